# SPDX-License-Identifier: Apache-2.0
"""Lets these tests import the benchmark programs, which are scripts and belong to no package."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _quick_collections(collecting_only_what_is_new: None) -> None:
    """The programs collect garbage before every timed block."""
