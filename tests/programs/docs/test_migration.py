# SPDX-License-Identifier: Apache-2.0
"""Code that the pages for people from other libraries give in their tables is run."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import ROOT

PAGES = ("coming-from-flax", "coming-from-penzai")
TABLES = "## What to write instead\n"


def rows(text: str) -> Iterator[list[str]]:
    """Yields the cells of each row of the tables of what to write instead."""
    part = text.split(TABLES)[1].split("\n## ")[0]
    for line in part.splitlines():
        if line.startswith("|") and not line.startswith("| ---") and "| write |" not in line:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def page_and_code(page: str) -> tuple[str, str]:
    """Returns the text of a page, and the code that runs what its tables say."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return text, Path(__file__).with_name(f"{page}.txt").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_code_of_every_row_is_run(page: str) -> None:
    text, code = page_and_code(page)
    lines = (text + code).splitlines()
    run = "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ")))
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


@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_tables_gives_what_it_says(page: str) -> None:
    text, code = page_and_code(page)
    before = text.partition(TABLES)[0]
    test = doctest.DocTestParser().get_doctest(before + code, {}, page, None, 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.failed == 0, "".join(said)
