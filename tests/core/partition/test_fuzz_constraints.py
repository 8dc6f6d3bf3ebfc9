# SPDX-License-Identifier: Apache-2.0
"""Whatever names, rules and meshes are given to a constraint: the same numbers, or our error."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import PartitionCheckError, ShardaxError
from tests.core.partition.nonsense import PHASES, entries, meshes, mostly, nonsense, rules

shapes = st.sampled_from(
    [(8, 16), (24, 8), (3, 16), (24, 3), (0, 8), (8, 16, 24), (24, 3, 8), (16, 8, 0)]
)
names = mostly(st.lists(entries, min_size=3, max_size=3), nonsense | st.just("embed"))
mesh_options = st.one_of(meshes(), st.none())
on_no_mesh = mostly(st.sampled_from([None, "error", "ignore"]), nonsense)


@settings(max_examples=200, phases=PHASES)
@given(shapes, names, mesh_options, mesh_options, rules, on_no_mesh, st.booleans())
def test_law_constraint_keeps_numbers_or_raises_shardax_error(
    shape: Any, names: Any, mesh: Any, scope: Any, rules: Any, policy: Any, compiled: bool
) -> None:
    if isinstance(names, list) and shape != (8, 16):  # mostly as many as there are dimensions
        names = names[: len(shape)]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed: Any = x
    if compiled and isinstance(mesh, Mesh):
        scope = mesh  # JAX itself refuses a program over other devices than those of its inputs
    if isinstance(scope, Mesh) and AxisType.Manual not in scope.axis_types:
        placed = jax.device_put(x, NamedSharding(scope, PartitionSpec()))

    def constrained(x: Any) -> Any:
        return sx.constrain(x, names, mesh, rules, on_no_mesh=policy)

    call = jax.jit(constrained) if compiled else constrained
    try:
        found = call(placed)
    except ShardaxError as error:
        event(type(error).__name__)
        return
    event("laid out")
    assert found.shape == x.shape
    # JAX 0.10 itself cannot fetch an empty array that a program has split: its parts are whole.
    if x.size or not compiled:
        assert np.asarray(found).tobytes() == x.tobytes()
    if isinstance(mesh, Mesh) and not compiled:
        spec = sx.partition.logical_to_mesh_axes(names, rules)
        assert spec is not None
        if PartitionSpec.UNCONSTRAINED not in spec:
            assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@settings(max_examples=200, phases=PHASES)
@given(rules, mesh_options)
def test_law_rules_are_validated_or_raise_shardax_error(rules: Any, mesh: Any) -> None:
    try:
        made = sx.Rules(rules)
        findings = made.check(mesh)
    except ShardaxError as error:
        event(type(error).__name__)
        return
    event("judged")
    errors = [finding for finding in findings if finding.severity == "error"]
    if mesh is None:
        assert errors == []
        return
    if not errors:
        assert made.validate(mesh) is made
        return
    with pytest.raises(PartitionCheckError) as caught:
        made.validate(mesh)
    assert list(caught.value.findings) == errors
