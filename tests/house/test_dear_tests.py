# SPDX-License-Identifier: Apache-2.0
"""A test that takes more than 20 CPU-seconds fails, unless a list has it with a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.house.sources import ROOT
from tests.suite.limits import DEAR, LIMIT_VARIABLE

PROGRAM = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 1.5: pass"

def test_cheap():
    pass

def test_own_seconds():
    end = time.process_time() + 1.5
    while time.process_time() < end:
        pass

def test_seconds_of_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_waiting_is_free():
    time.sleep(0.5)
"""


OPTIONS = ("-c", os.devnull, "-p", "no:cacheprovider", "--tb=line", "-ra")


def test_tests_above_the_cpu_limit_fail(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    variables |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.suite.limits", *OPTIONS, program],
        cwd=tmp_path,
        env=variables | {LIMIT_VARIABLE: "0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    dear = re.findall(r"^ERROR test_program.py::(\w+)", done.stdout, re.MULTILINE)
    assert dear == ["test_own_seconds", "test_seconds_of_a_child"], done.stdout
    assert re.search(r"took \d\.\d CPU-seconds; the limit is \d\.\d", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("4 passed, 2 errors")


def test_every_dear_test_exists_and_has_a_reason() -> None:
    for test, reason in DEAR.items():
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert name == "code" or f"def {name.partition('[')[0]}(" in text
        assert len(reason.split()) > 3
