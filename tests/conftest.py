# SPDX-License-Identifier: Apache-2.0
"""Meshes over the 8 virtual devices that the root ``conftest.py`` sets up."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType, Mesh

MESH_SHAPE = (2, 4)
MESH_AXES = ("data", "model")


def make_mesh(axis_type: AxisType) -> Mesh:
    """Returns the mesh ``data=2, model=4`` with both axes of ``axis_type``."""
    return jax.make_mesh(MESH_SHAPE, MESH_AXES, axis_types=(axis_type,) * len(MESH_AXES))


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
