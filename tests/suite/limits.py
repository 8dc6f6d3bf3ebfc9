# SPDX-License-Identifier: Apache-2.0
"""The most CPU-seconds that one test may take, and the tests that may take more.

A pytest plugin that the root ``conftest.py`` loads. CPU-seconds count all threads and the child
processes that a test waited for, so that other work on the machine hardly moves them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.suite import cpu_seconds

LIMIT = 20.0
# Tests that take more, each with the reason.
DEAR = {
    "tests/house/test_style.py::test_the_code_is[well_typed]": (
        "the type checker reads the package, JAX and NumPy as a whole"
    )
}
# Another limit, for the test of this file.
LIMIT_VARIABLE = "SHARDAX_TEST_CPU_SECONDS"


class CpuLimit:
    """Fails a test that took more CPU-seconds than the limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.start = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes the clock before a test and its fixtures."""
        self.start = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        """Turns the last report of a dear test into a failure."""
        report: Any = yield
        spent = cpu_seconds() - self.start
        if call.when == "teardown" and spent > self.limit and item.nodeid not in DEAR:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {spent:.0f} CPU-seconds; the limit is {self.limit:g}. Make it "
                "cheaper (docs/contributing.md says how), or add it to DEAR in "
                "tests/suite/limits.py with the reason."
            )
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    limit = float(os.environ.get(LIMIT_VARIABLE, LIMIT))
    config.pluginmanager.register(CpuLimit(limit), "suite-cpu-limit")
