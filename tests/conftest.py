# SPDX-License-Identifier: Apache-2.0
"""What tests share: meshes over the 8 virtual devices of the root ``conftest.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh

# It needs the extra `mutants`, and its docstrings have no examples.
collect_ignore = ["suite/mutants.py"]

MESH_SHAPE = (2, 4)
MESH_AXES = ("data", "model")


def make_mesh(axis_type: AxisType) -> Mesh:
    """Returns the mesh ``data=2, model=4`` with both axes of ``axis_type``."""
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=(axis_type,) * len(MESH_AXES))


@pytest.fixture
def collecting_only_what_is_new() -> Iterator[None]:
    """Garbage collections pass by what other tests left, which is gigabytes late in a run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Arrays that other tests left in cycles stay while a test counts arrays."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def auto_mesh() -> Mesh:
    """``data=2, model=4``, laid out by the compiler (``AxisType.Auto``)."""
    return make_mesh(AxisType.Auto)


@pytest.fixture
def explicit_mesh() -> Mesh:
    """``data=2, model=4``, shardings part of the types (``AxisType.Explicit``)."""
    return make_mesh(AxisType.Explicit)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """``data=2, model=4``, once of each kind: for tests that must hold under both."""
    return make_mesh(request.param)


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    """Returns a function: how many programs were compiled since it was last called."""
    counts = [0]

    def count(event: str, duration: float, **_: Any) -> None:
        counts[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)

    def taken() -> int:
        total, counts[0] = counts[0], 0
        return total

    yield taken
    jax.monitoring.unregister_event_duration_listener(count)
