# SPDX-License-Identifier: Apache-2.0
"""The figures of the house stay within their bounds (``make house`` prints them)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import sources
from tests.house.figures import Lines, figures, lines_of
from tests.house.sources import ROOT, Source
from tests.house.words import package_words


def test_figures_are_within_their_bounds() -> None:
    # One test: measuring takes ten seconds, which each worker would need.
    assert [figure for figure in figures() if figure.value > figure.most] == []


def test_lines_are_classified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(
        '"""What.\n\nWhy.\n"""\n\nimport os\nfrom os import (\n    path,\n)\n\n# why\nX = 1\n'
    )
    assert lines_of(Source(file)) == Lines(total=12, code=5, imports=4)


def test_page_explains_the_most_frequent_names() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    table = text.partition("The 100 most frequent local names")[2].partition("The last output")[0]
    explained = set(re.findall(r"`(\w+)`", table))
    # The last ranks are of nearly equal frequency, and change places with any edit.
    frequent = [name for name, _ in package_words().names.most_common(80)]
    assert [name for name in frequent if name not in explained] == []
    assert len(explained) == 100
