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

DOCS = Path(__file__).parents[3] / "docs"
# The section with a page's table of codes that are run.
SECTIONS = {
    "coming-from-equinox.md": "Names",
    "coming-from-flax.md": "The same calls in both",
    "coming-from-haliax.md": "Names",
}
CELLS = re.compile(r"\| `([^`]+)` \| `([^`]+)` \|[^`]*(?:`[^`]*`[^`]*)*\|")


# Sections of a page's names that are run and compared, and are not on the page.
BESIDE = {"coming-from-flax.md": "flax_calls.txt"}


def sections_of(page: str) -> dict[str, str]:
    text = (DOCS / page).read_text()
    if page in BESIDE:
        text += Path(__file__).with_name(BESIDE[page]).read_text()
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def rows_of(page: str) -> list[tuple[str, str]]:
    """The codes of the first two cells of each row; the header is text."""
    lines = sections_of(page)[SECTIONS[page]].splitlines()
    cells = [match for line in lines if (match := CELLS.fullmatch(line))]
    return [
        (match[1], match[2])
        for match in cells
        if match[1] != "shardax.named" and "`shardax` as" not in match[0]
    ]


@cache
def names_of(page: str) -> dict[str, Any]:
    """What the code of the first section and of the table's section defines."""
    sections = sections_of(page)
    code = sections["One program in both"] + sections[SECTIONS[page]]
    lines = [line[4:] for line in code.splitlines() if line.startswith((">>> ", "... "))]
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), page, "exec"), names)
    return names


ROWS = [(page, *row) for page in SECTIONS for row in rows_of(page)]


def test_rows_all_have_both_codes() -> None:
    for page, section in SECTIONS.items():
        lines = sections_of(page)[section].splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        assert len(rows) == len(rows_of(page)) > 15


@pytest.mark.parametrize(("page", "theirs", "ours"), ROWS)
def test_row_codes_agree(page: str, theirs: str, ours: str) -> None:
    first, second = (jax.tree.leaves(eval(code, names_of(page))) for code in (theirs, ours))
    assert len(first) == len(second) > 0
    for one, two in zip(first, second, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=1e-5, atol=1e-5)
