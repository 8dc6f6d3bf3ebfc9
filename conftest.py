# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: the tests, the doctests of the sources, and the code of the pages.

*Pages* are the README and the Markdown files of ``docs/``. The examples of one page share a
namespace and run from top to bottom, as a reader would run them.
"""

from __future__ import annotations

import os

# Before jax is imported, and also for the processes that tests start. A machine with an accelerator
# can run the tests on it with JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import PythonCodeBlockParser

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
# Implicit rank promotion hides shape errors; the library must never need it.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes as long as it takes, so there is no deadline. In CI the examples are the same on
# every run; elsewhere they vary, and what fails is kept in .hypothesis/ and tried first next time.
settings.register_profile(
    "shardax",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shardax")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
).pytest()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps the examples of one page on one worker of pytest-xdist: they share a namespace."""
    if isinstance(item, SybilItem):
        item.add_marker(pytest.mark.xdist_group(f"page {item.path.name}"))
