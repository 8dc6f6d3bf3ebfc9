# SPDX-License-Identifier: Apache-2.0
"""Lets these tests import the benchmark programs, which are scripts and belong to no package."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
