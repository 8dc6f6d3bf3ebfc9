# SPDX-License-Identifier: Apache-2.0
"""Rows of the pages for people from other libraries: both codes of a row give the same result."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {"coming-from-equinox.md": "| `equinox` as `eqx` |"}


def rows_of(page: str) -> list[tuple[str, str]]:
    """The first two cells of each row, without their quotes."""
    table = (DOCS / page).read_text().split(TITLES[page])[1].split("\n\n")[0]
    lines = table.splitlines()[2:]
    return [tuple(cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:3]) for line in lines]  # type: ignore[misc]


@cache
def names_of(page: str) -> dict[str, Any]:
    """What the code above the table defines."""
    code = (DOCS / page).read_text().split(TITLES[page])[0]
    lines = [line[4:] for line in code.splitlines() if line.startswith((">>> ", "... "))]
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), page, "exec"), names)
    return names


ROWS = [(page, *row) for page in TITLES for row in rows_of(page)]


@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS)
def test_both_codes_of_a_row_agree(page: str, theirs: str, ours: str) -> None:
    assert theirs != ours
    first, second = (jax.tree.leaves(eval(code, names_of(page))) for code in (theirs, ours))
    assert len(first) == len(second) > 0
    for one, two in zip(first, second, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-5, atol=1e-5)
