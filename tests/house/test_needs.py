# SPDX-License-Identifier: Apache-2.0
"""A test that needs what is missing is skipped with a command, and is an error in CI."""

from __future__ import annotations

import pytest

from tests import needs

pytest_plugins = ["pytester"]

PROGRAM = """
import pytest
from tests.needs import needs, needs_compiler

@needs("there")
def test_here():
    pass

@needs("nowhere", "there")
def test_absent():
    raise AssertionError

@pytest.mark.parametrize("kind", ["cpu", pytest.param("tpu", marks=needs_compiler("tpu"))])
def test_compiler(kind):
    assert kind == "cpu"

@pytest.mark.skipif(True, reason="another platform")
@needs("nowhere")
def test_platform():
    raise AssertionError
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a program under the plugin alone, in this process."""
    monkeypatch.setitem(needs.PACKAGES, "there", needs.Need(lambda: True, "pip install there"))
    monkeypatch.setitem(needs.PACKAGES, "nowhere", needs.Need(lambda: False, "pip install nowhere"))
    monkeypatch.setitem(needs.COMPILERS, "tpu", needs.Need(lambda: False, "pip install tpu"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers =\n  needs\n  needs_compiler")

    def run(program: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(program)
        return pytester.runpytest_inprocess("-p", "tests.needs", "-rs", *options)

    return run


def test_missing_package_skips_its_tests_and_names_the_command(run) -> None:
    result = run(PROGRAM)
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED * needs nowhere: pip install nowhere",
            "SKIPPED * needs compiler tpu: pip install tpu",
            "SKIPPED * another platform",
        ]
    )


def test_missing_package_is_an_error_where_every_need_is_asked_for(run) -> None:
    result = run(PROGRAM, "--every-need")
    result.assert_outcomes(passed=2, skipped=1, errors=2)
    result.stdout.fnmatch_lines(
        ["* ERROR at setup of test_absent *", "needs nowhere: pip install nowhere"]
    )


@pytest.mark.parametrize(
    ("expression", "passed", "skipped"),
    [("needs(there=True)", 1, 1), ("needs and not needs(nowhere=True)", 1, 0)],
)
def test_names_select_tests(run, expression: str, passed: int, skipped: int) -> None:
    run(PROGRAM, "-m", expression).assert_outcomes(
        passed=passed, skipped=skipped, deselected=5 - passed - skipped
    )


@pytest.mark.parametrize("mark", ['needs("unheard_of")', "needs()", 'needs_compiler("cpu")'])
def test_unknown_name_is_an_error_of_collection(run, mark: str) -> None:
    result = run(f"from tests.needs import *\npytestmark = {mark}\ndef test_any(): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E * known are *tests/needs.py*"])
