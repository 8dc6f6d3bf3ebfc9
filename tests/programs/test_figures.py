# SPDX-License-Identifier: Apache-2.0
"""A reader of one call has to open few files (``make house`` prints how many)."""

from __future__ import annotations

from tests.programs.figures import figures


def test_figures_are_within_their_bounds() -> None:
    assert [figure for figure in figures() if figure.value > figure.most] == []
