# SPDX-License-Identifier: Apache-2.0
"""The two ways from a program to the host, and functions that several tests use."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import shardax as sx
from shardax.host.callback import HostProgram

FLOAT = jax.ShapeDtypeStruct((), "float32")


@pytest.fixture(params=["buffers", "callback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the CPU's own way, and, on the CPU as well, by that of other processors."""
    if request.param == "callback":
        monkeypatch.setattr(HostProgram, "_by_buffers", HostProgram._by_callback)
    return request.param


def same(x: Any) -> Any:
    """The shape rule of a result like the argument."""
    return x


class Seen:
    """A host function that remembers what it was given.

    Attributes:
        calls: Shape, dtype and type of the argument, one entry per call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], str, type]] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.calls.append((x.shape, x.dtype.name, type(x)))
        return 2 * x


def doubling(seen: Seen | None = None, **options: Any) -> sx.host.HostFunction:
    """A host function that doubles its argument."""
    return sx.host.host_function(seen or Seen(), out=same, **options)
