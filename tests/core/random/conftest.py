# SPDX-License-Identifier: Apache-2.0
"""Every test here starts from seed 0 and leaves the global stream as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardax as sx


@pytest.fixture(autouse=True)
def seeded_stream() -> Iterator[None]:
    saved = sx.random.get_state()
    sx.random.seed(0)
    yield
    sx.random.set_state(saved)
