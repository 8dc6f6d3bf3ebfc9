# SPDX-License-Identifier: Apache-2.0
"""Moving a live model: onto other meshes, other numbers of devices, other memories; interrupted."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import shardax as sx
from shardax.errors import PartitionError, TransformError
from tests.core.partition.models import RULES, Tower, assert_same_bits, values

KINDS = [memory.kind for memory in jax.devices()[0].addressable_memories()]


def make_mesh(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    names = ("data", "model", "pipe")[: len(shape)]
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def places(tree: Any) -> dict[Any, Any]:
    """Path to sharding, as the arrays have it."""
    return {p: jax.tree.map(lambda x: x.sharding, v) for p, v in sx.state(tree).flat().items()}


def weights(count: int = 6) -> list[sx.Param[Any]]:
    """Parameters of 512 KiB, of different numbers."""
    return [
        sx.Param(jnp.asarray(np.full((256, 512), i, np.float32)), axes=("embed", "mlp"))
        for i in range(count)
    ]


def bytes_per_device() -> dict[Any, int]:
    """Live bytes by device; buffers that several arrays look at count once."""
    buffers: dict[Any, int] = {}
    for array in jax.live_arrays():
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for piece in array.addressable_shards:
            buffers[piece.device, piece.data.unsafe_buffer_pointer()] = piece.data.nbytes
    held = dict.fromkeys(jax.devices(), 0)
    for (device, _), size in buffers.items():
        held[device] += size
    return held


# --- from mesh to mesh ----------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(8, 1), (2, 4), (4, 2), (1, 1), (2, 2), (1, 4)]),
            st.sampled_from([AxisType.Auto, AxisType.Explicit]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_law_resharding_and_unsharding_keep_all_bits(
    journey: list[tuple[tuple[int, int], AxisType]],
) -> None:
    model, rules = Tower(depth=1), {"mlp": "model", "embed": "data"}
    before = values(model)  # which makes them
    for shape, kind in journey:
        mesh = make_mesh(shape, kind)
        assert sx.shard(model, mesh, rules) is model
        assert places(model) == sx.shardings(model, mesh, rules).flat()
    assert sx.unshard(model) is model
    assert {leaf.sharding for leaf in jax.tree.leaves(sx.state(model))} == {
        jax.sharding.SingleDeviceSharding(jax.devices()[0])
    }
    assert_same_bits(values(model), before)


def test_moved_model_computes_what_it_did_before() -> None:
    tokens = jnp.arange(8)
    run = sx.jit(lambda model, tokens: model(tokens))
    model = sx.shard(Tower(), make_mesh((2, 4)), RULES)
    before = run(model, tokens)
    after = run(sx.shard(model, make_mesh((2, 2)), RULES), tokens)
    alone = run(sx.unshard(model, jax.devices()[5]), tokens)
    assert after.sharding.device_set == set(jax.devices()[:4])
    assert alone.devices() == {jax.devices()[5]}
    assert np.allclose(jax.device_get(after), jax.device_get(before), atol=1e-5)
    assert np.allclose(jax.device_get(alone), jax.device_get(before), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_model_moves_to_every_memory_kind_and_back(kind: str) -> None:
    mesh = make_mesh((2, 4))
    lazy, live = Tower(depth=1), sx.shard(Tower(depth=1), mesh, RULES)
    for model in (lazy, live):
        sx.shard(model, mesh, RULES, memory_kind=kind)
        assert places(model) == sx.shardings(model, mesh, RULES, memory_kind=kind).flat()
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(sx.state(model))} == {kind}
        sx.shard(model, mesh, RULES)
        assert places(model) == sx.shardings(model, mesh, RULES).flat()
        assert_same_bits(values(model), values(Tower(depth=1)))


@pytest.mark.skipif("pinned_host" not in KINDS, reason="the devices have no second memory")
def test_memory_kind_filters_leave_other_variables_on_devices(auto_mesh: Mesh) -> None:
    model = Tower(depth=1)
    sx.shard(model, auto_mesh, RULES, memory_kind={sx.PathContains("layers"): "pinned_host"})
    kinds = {p: v.sharding.memory_kind for p, v in sx.iter_variables(model, sx.Param)}
    assert kinds == {
        ("embed",): "device",
        ("layers", 0, "up"): "pinned_host",
        ("layers", 0, "down"): "pinned_host",
    }


def test_missing_memory_kind_is_refused_listing_available_ones(mesh: Mesh) -> None:
    model = Tower()
    with pytest.raises(PartitionError, match=r"memory_kind=.*moon(.|\n)*device"):
        sx.shard(model, mesh, RULES, memory_kind="moon")
    with pytest.raises(PartitionError, match="5 of type int is no memory kind"):
        sx.shard(model, mesh, RULES, memory_kind={sx.Param: 5})
    assert model.embed.is_lazy


# --- room -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_collections")
def test_peak_memory_is_both_shares_of_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_mesh((2, 4)), make_mesh((4, 2))
    model = sx.shard(weights(), old, {"embed": "data", "mlp": "model"})
    share = 4 * 256 * 512 // 8
    before = bytes_per_device()
    peak: list[int] = []
    put = jax.device_put

    def probed(*args: Any, **kwargs: Any) -> Any:
        result = put(*args, **kwargs)
        now = bytes_per_device()
        peak.append(max(now[device] - before[device] for device in now))
        return result

    monkeypatch.setattr(jax, "device_put", probed)
    sx.shard(model, new, {"embed": "data", "mlp": "model"})
    assert peak == [share] * 6  # one copy beside the old array; the one before has been let go
    assert bytes_per_device() == before


@pytest.mark.usefixtures("without_collections")
def test_unsharding_needs_one_array_besides_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sx.shard(weights(), make_mesh((2, 4)), {"embed": "data", "mlp": "model"})
    size, share, first = 4 * 256 * 512, 4 * 256 * 512 // 8, jax.devices()[0]
    before = bytes_per_device()[first]
    seen: list[int] = []
    put = jax.device_put

    def probed(*args: Any, **kwargs: Any) -> Any:
        result = put(*args, **kwargs)
        seen.append(bytes_per_device()[first] - before)
        return result

    monkeypatch.setattr(jax, "device_put", probed)
    sx.unshard(model)
    assert seen == [size + i * (size - share) for i in range(6)]
    assert bytes_per_device()[first] - before == 6 * (size - share)


def test_arrays_that_something_else_holds_stay_valid(auto_mesh: Mesh) -> None:
    model = weights(2)
    held = sx.state(model[0]), sx.clone(model[1])
    sx.shard(model, auto_mesh, RULES)
    sx.shard(model, make_mesh((4, 2)), RULES)
    assert float(jax.tree.leaves(held[0])[0].sum()) == 0
    assert float(held[1].value.sum()) == 256 * 512


# --- interrupted ----------------------------------------------------------------------------------


def refuse_from(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Lets devices refuse every copy after ``count``, as they do when memory is short."""
    put, calls = jax.device_put, 0

    def refusing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > count:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", refusing)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_out_of_memory_leaves_parameters_valid_and_retryable(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    old, new = make_mesh((2, 4)), make_mesh((2, 2))
    model = sx.shard(weights(), old, RULES)
    before = [v.value for v in model]
    meshes = [new if position < count else old for position in range(6)]
    expected = [sx.shardings(v, m, RULES) for v, m in zip(model, meshes, strict=True)]
    with monkeypatch.context() as patch:
        refuse_from(patch, count)
        with pytest.raises(PartitionError, match=rf"\[{count}\]: (.|\n)*{count} of 6") as caught:
            sx.shard(model, new, RULES)
    assert isinstance(caught.value, RuntimeError)
    assert [v.sharding for v in model] == expected
    assert all(v.value is old for v, old in list(zip(model, before, strict=True))[count:])
    assert [float(v.value[0, 0]) for v in model] == [0, 1, 2, 3, 4, 5]
    sx.shard(model, new, RULES)
    assert [v.sharding for v in model] == [sx.shardings(v, new, RULES) for v in model]
    assert [float(v.value[-1, -1]) for v in model] == [0, 1, 2, 3, 4, 5]


def test_out_of_memory_counts_what_was_in_place_before(
    monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh
) -> None:
    model = weights(5)
    sx.shard(model[:2], auto_mesh, RULES)
    with monkeypatch.context() as patch:
        refuse_from(patch, 0)
        with pytest.raises(PartitionError, match=r"\[2\]: (.|\n)*2 of 5 values"):
            sx.shard(model, auto_mesh, RULES)


def test_out_of_memory_of_a_state_counts_what_the_caller_has(
    monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh
) -> None:
    placed = sx.shard(weights(1), auto_mesh, RULES)[0].value
    state = sx.state(
        [sx.Param(x, axes=("embed", "mlp")) for x in (placed, *map(_value, weights(2)))]
    )
    refuse_from(monkeypatch, 1)
    with pytest.raises(PartitionError, match=r"\[2\]: (.|\n)*1 of 3 values"):
        sx.shard(state, auto_mesh, RULES)


def _value(variable: sx.Param) -> jax.Array:
    return variable.value


def test_late_out_of_memory_keeps_the_old_arrays(
    monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh
) -> None:
    model = weights(3)
    before = [v.value for v in model]

    def failing(arrays: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", failing)
        with pytest.raises(PartitionError, match="RESOURCE_EXHAUSTED"):
            sx.shard(model, auto_mesh, RULES)
    assert all(v.value is old for v, old in zip(model, before, strict=True))


def test_state_is_placed_completely_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, auto_mesh: Mesh
) -> None:
    state = sx.state(dict(enumerate(weights(3))))
    before = jax.tree.leaves(state)
    refuse_from(monkeypatch, 2)
    with pytest.raises(PartitionError, match=r"\[2\]"):
        sx.shard(state, auto_mesh, RULES)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), before, strict=True))


# --- what cannot be -------------------------------------------------------------------------------


def test_mesh_with_manual_axes_is_refused() -> None:
    model = Tower()
    with pytest.raises(TransformError, match="Manual"):
        sx.shard(model, make_mesh((2, 4), AxisType.Manual), RULES)
    assert model.embed.is_lazy
