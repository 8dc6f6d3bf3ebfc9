# SPDX-License-Identifier: Apache-2.0
"""Small programs, run with Flax and translated: they print the same, or the report leaves them."""

from __future__ import annotations

import pytest

from tests.interop.migrate.both_ways import run_both_ways
from tests.interop.migrate.small_programs import SMALL_PROGRAMS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax: sow, .value
@pytest.mark.parametrize("name", SMALL_PROGRAMS)
def test_small_program_prints_the_same_or_is_left(name: str) -> None:
    text, lines = SMALL_PROGRAMS[name]
    outcome = run_both_ways(text)
    assert outcome.left == lines
    if lines:
        assert outcome.ours.startswith("shardax migrate left ")
    else:
        assert outcome.ours == outcome.theirs != ""
