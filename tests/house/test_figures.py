# SPDX-License-Identifier: Apache-2.0
"""The figures of the house stay within their bounds (``make house`` prints them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import sources
from tests.house.figures import Lines, figures, lines_of
from tests.house.sources import Source


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
