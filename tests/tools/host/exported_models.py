# SPDX-License-Identifier: Apache-2.0
"""Models and helpers for the tests of artifacts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.host.export.signature import to_words

RoundTrip = Callable[..., sx.host.LoadedFunction]


class Counter(sx.Module):
    """Counts what it was called with, and keeps weights."""

    def __init__(self) -> None:
        self.scale = sx.Param(jnp.array([1.0, 2.0]))
        self.total = sx.Variable(jnp.zeros(2))

    def __call__(self, x: Any) -> Any:
        self.total += x
        return self.total * self.scale

    def peek(self) -> Any:
        return self.total.value


class Noisy(sx.Module):
    """Layers with every kind of state: parameters, statistics, a random stream."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(3, 4, rngs=rngs)
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.norm = sx.nn.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dropout(self.linear(x)))


@pytest.fixture
def round_trip(tmp_path: pathlib.Path) -> RoundTrip:
    """Exports and loads: ``round_trip(function, *args, **options_of_export)``."""

    def run(function: Any, *args: Any, **options: Any) -> sx.host.LoadedFunction:
        count = len(list(tmp_path.iterdir()))
        return sx.host.load(sx.host.export(function, *args, to=tmp_path / str(count), **options))

    return run


def values(tree: Any) -> list[Any]:
    """Returns the values of a tree's Variables as NumPy arrays, random keys as words."""
    return [np.asarray(to_words(value)) for value in jax.tree.leaves(sx.state(tree))]


def same(left: Any, right: Any) -> bool:
    """Whether two lists or trees of arrays are the same."""
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(np.asarray(to_words(a)), np.asarray(to_words(b)))
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def run_python(code: str, *args: Any) -> str:
    """Runs code in a process of its own, without a cache of programs; returns what it printed."""
    command = [sys.executable, "-c", code, *map(str, args)]
    environment = {**os.environ}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout
