# SPDX-License-Identifier: Apache-2.0
"""Code that the pages for people from other libraries give in their tables is run on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.house.sources import ROOT

PAGES = ("coming-from-flax.md", "coming-from-penzai.md")


def rows(text: str) -> Iterator[list[str]]:
    """Yields the cells of each row of the tables of what to write instead."""
    part = text.split("## What to write instead\n")[1].split("\n## ")[0]
    for line in part.splitlines():
        if line.startswith("|") and not line.startswith("| ---") and "| write |" not in line:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_every_row_is_run(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    run = "\n".join(line[4:] for line in text.splitlines() if line.startswith((">>> ", "... ")))
    found = list(rows(text))
    assert len(found) > 30
    assert {len(cells) for cells in found} == {3}
    pieces = [
        piece
        for _, write, _ in found
        for code in re.findall(r"`([^`]+)`", write)
        for piece in re.split("…|[.]{3}(?=[)])", code)
    ]
    assert [piece for piece in pieces if piece.strip("() ") not in run] == []
