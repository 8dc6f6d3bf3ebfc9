# SPDX-License-Identifier: Apache-2.0
"""Rows of the tables of docs/coming-from-flax.md: both sides run, and give the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs" / "coming-from-flax.md").read_text()
CODES = (HERE / "flax_rows.txt").read_text()


def in_our_words(code: str) -> str:
    return re.sub(r"\bnnx\b", "sx", code).replace("their_", "our_")


def cases() -> Iterator[tuple[str, str, str, str]]:
    """Yields sections, beginnings of rows, and the codes of both libraries."""
    section = row = ""
    lines = CODES.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("    ") and not line.startswith("    = "):
            is_pair = following.startswith("    = ")
            yield section, row, line.strip(), following[6:] if is_pair else in_our_words(line)
        elif line and line[0] not in "# ":
            row = line


CASES = list(cases())


def test_table_rows_are_all_compared() -> None:
    parts = dict(part.split("\n", 1) for part in re.split(r"\n##+ ", PAGE)[1:])
    for section in dict.fromkeys(section for section, *_ in CASES):
        rows = [line[2:] for line in parts[section].splitlines() if line.startswith("|")][2:]
        begins = list(dict.fromkeys(row for name, row, *_ in CASES if name == section))
        assert len(rows) == len(begins)
        assert [
            row for row, begin in zip(rows, begins, strict=True) if not row.startswith(begin)
        ] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, len(CASES), 25))
def test_table_rows_agree_on_both_sides(start: int) -> None:
    from tests.programs.docs.flax_names import names

    for _, row, theirs, ours in CASES[start : start + 25]:
        scope = names(theirs, ours)
        with jax.numpy_rank_promotion("allow"):  # Flax's layers rely on it
            first = jax.tree.leaves(eval(theirs, scope))
        second = jax.tree.leaves(eval(ours.strip(), scope))
        assert len(first) == len(second) > 0, row
        for one, two in zip(first, second, strict=True):
            if isinstance(one, str | jax.P | None):
                assert one == two, row
            else:
                np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5, err_msg=row)
