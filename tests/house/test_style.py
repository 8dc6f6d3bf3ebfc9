# SPDX-License-Identifier: Apache-2.0
"""The code is formatted (``make format`` does it), lints clean, and its types hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT

CHECKS = {
    "formatted": ["ruff", "format", "--check", "--output-format=concise"],
    "free_of_lint": ["ruff", "check", "--output-format=concise"],
    "well_typed": ["basedpyright", "--project", "pyproject.toml"],
}


@pytest.mark.parametrize(
    "check", ["formatted", "free_of_lint", pytest.param("well_typed", marks=pytest.mark.programs)]
)
def test_the_code_is(check: str) -> None:
    program, *arguments = CHECKS[check]
    beside_python = Path(sys.executable).with_name(program)
    done = subprocess.run(
        [beside_python, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{program} {' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)
