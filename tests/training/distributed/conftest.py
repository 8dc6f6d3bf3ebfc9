# SPDX-License-Identifier: Apache-2.0
"""Processes that tests share end with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.distributed.processes import KEPT


@pytest.fixture(scope="session", autouse=True)
def _processes_end_with_the_tests() -> Iterator[None]:
    yield
    KEPT.close()
