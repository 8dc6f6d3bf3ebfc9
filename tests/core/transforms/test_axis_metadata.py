# SPDX-License-Identifier: Apache-2.0
"""Axis names follow their arrays through ``vmap`` and ``scan``.

Names and real shardings agree afterwards; where Flax 0.12.8 gets this wrong, a test says so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax._core.graph.static import Metadata
from shardax.errors import MetadataError
from shardax.partition import PARTITION_NAME
from tests.core.transforms.examples import Box
from tests.strategies import assert_same_model

NAMED = {PARTITION_NAME: "layers"}
RULES = {"layers": "data", "in": None, "out": "model"}
AXES = (0, 1, 2, -1, -2, -3)


def _layer(rngs: Any) -> Any:
    # Names and shardings are tested, not numbers: programs without random numbers are small.
    return sx.nn.Linear(8, 8, kernel_init=jax.nn.initializers.ones, rngs=rngs)


def _stack(**options: Any) -> Any:
    return sx.vmap(_layer, axis_size=4, **options)(sx.Rngs(0))


def _weight(*axes: Any) -> sx.Param[Any]:
    return sx.Param(jnp.zeros((2, 2, 2)[: len(axes)]), axes=axes)


def _per_slice(transform: str, function: Any, axis: Any, metadata: Any) -> Any:
    """Returns ``function(weight, scale)`` mapped by one of the transforms that map."""
    if transform == "vmap":
        return sx.vmap(function, in_axes=(axis, None), out_axes=axis, metadata=metadata)
    return sx.scan(function, in_axes=(axis, None), out_axes=axis, metadata=metadata)


each_transform = pytest.mark.parametrize("transform", ["vmap", "scan"])


# --- names ---


@pytest.mark.parametrize(
    ("transform", "axis", "metadata"),
    [  # each axis with each transform, and with and without a name
        (transform, axis, [NAMED, None][(place + (transform == "scan")) % 2])
        for place, axis in enumerate(AXES)
        for transform in ("vmap", "scan")
    ],
)
def test_mapped_name_is_absent_inside_and_restored(
    transform: str, axis: int, metadata: Any
) -> None:
    names = ["in", "out"]
    names.insert(axis % 3, "layers")
    weight, seen = _weight(*names), []

    def step(w: Any, scale: Any) -> Any:
        seen.append(w.axes)
        w[...] = w * scale
        return sx.Param(w[...], axes=w.axes)

    new = _per_slice(transform, step, axis, metadata)(weight, 2.0)
    assert set(seen) == {("in", "out")}
    assert weight.axes == tuple(names)
    assert new.axes == tuple(name if metadata or name != "layers" else None for name in names)


@each_transform
def test_last_axis_gets_the_last_name_flax_4(transform: str) -> None:
    """Flax puts the value's axis last but its name before the last (notes: ('i', 'L', 'o'))."""

    def make(w: Any, _: Any) -> Any:
        return sx.Param(w[...], axes=("in", "out"))

    run = _per_slice(transform, make, -1, NAMED)
    made = run(jnp.zeros((2, 3, 4)), 1.0)
    assert (made.shape, made.axes) == ((2, 3, 4), ("in", "out", "layers"))


@each_transform
def test_new_dimension_without_name_is_unnamed_flax_5(transform: str) -> None:
    """Flax leaves the names as they were, so each is one dimension off."""

    def make(w: Any, _: Any) -> Any:
        return sx.Param(w[...], axes=("in", "out"))

    made = _per_slice(transform, make, 0, None)(jnp.zeros((4, 2, 3)), 1.0)
    assert (made.shape, made.axes) == ((4, 2, 3), (None, "in", "out"))
    assert sx.partition_specs(made, RULES) == PartitionSpec(None, None, "model")


def test_metadata_changed_inside_keeps_the_mapped_name() -> None:
    model = Box()
    model.named, model.unnamed = _weight("layers", "in", "out"), sx.Param(jnp.zeros((2, 3)))

    def rename(m: Box) -> None:
        m.named.set_metadata(axes=("a", "b"), tag="x")
        m.unnamed.set_metadata(axes=("c",))

    sx.vmap(rename, metadata=NAMED)(model)
    assert model.named.axes == ("layers", "a", "b") and model.named.metadata["tag"] == "x"
    assert model.unnamed.axes == ("layers", "c")


def test_lanes_of_lanes_have_a_name_each() -> None:
    def layers(rngs: Any) -> Any:
        return sx.vmap(_layer, axis_size=2, metadata=NAMED)(rngs)

    model = sx.vmap(layers, axis_size=3, metadata={PARTITION_NAME: "members"}, out_axes=-1)(
        sx.Rngs(0)
    )
    assert model.kernel.axes == ("layers", "in", "out", "members")
    assert model.kernel.shape == (2, 8, 8, 3)
    seen: list[Any] = []

    def outer(m: Any) -> None:
        seen.append(m.kernel.axes)
        sx.vmap(lambda m: seen.append(m.kernel.axes), metadata=NAMED)(m)

    sx.vmap(outer, in_axes=-1)(model)
    assert seen == [("layers", "in", "out"), ("in", "out")]


def test_shared_and_unnamed_variables_keep_their_names() -> None:
    model = Box()
    model.shared, model.plain = _weight("in", "out"), sx.Param(jnp.zeros((2, 2)))
    axes = sx.StateAxes({sx.PathContains("shared"): None, ...: 0})
    seen: list[Any] = []
    sx.vmap(lambda m: seen.append((m.shared.axes, m.plain.axes)), in_axes=axes, metadata=NAMED)(
        model
    )
    assert seen == [(("in", "out"), None)]
    assert (model.shared.axes, model.plain.axes) == (("in", "out"), None)


@each_transform
def test_wrong_mapped_name_raises_with_the_variable(transform: str) -> None:
    model = Box()
    model.parts = [_weight("layers", "in"), _weight("in", "out")]
    run = _per_slice(transform, lambda m, _: jnp.zeros(()), 0, NAMED)
    with pytest.raises(MetadataError) as caught:
        run(model, 1.0)
    message = str(caught.value)
    assert message.startswith("The Param at .m.parts[1] cannot be mapped: ")
    assert "is named 'in', but" in message and "as 'layers'" in message


@each_transform
def test_mapped_dimension_has_any_name_by_default(transform: str) -> None:
    model = Box()
    model.parts = [_weight("layers", "in"), _weight("in", "out")]
    _per_slice(transform, lambda m, _: jnp.zeros(()), 0, None)(model, 1.0)
    assert [part.axes for part in model.parts] == [("layers", "in"), ("in", "out")]


def _replace_by_a_number(w: Any, _: Any) -> None:
    w.value = 0.0


@each_transform
@pytest.mark.parametrize(
    ("body", "out_axis", "path"),
    [
        (lambda w, _: w[...].sum(), 1, ".result"),
        (lambda w, _: {"new": sx.Param(w[...].sum())}, -2, ".result.new"),
        (_replace_by_a_number, 0, ".w"),
    ],
)
def test_out_axis_beyond_rank_raises_with_path(
    transform: str, body: Any, out_axis: int, path: str
) -> None:
    weight = _weight("in", "layers")
    run = {
        "vmap": lambda: sx.vmap(body, in_axes=(1, None), out_axes=out_axis),
        "scan": lambda: sx.scan(body, in_axes=(1, None), out_axes=out_axis),
    }[transform]()
    with pytest.raises(sx.errors.TransformError, match=rf"puts \{path} together along axis"):
        run(weight, 1.0)
    assert weight.shape == (2, 2)


_NAMES = st.lists(st.sampled_from(["a", "b", None]), max_size=3).map(tuple)


@given(_NAMES, st.data(), st.sampled_from(["layers", None]))
def test_adding_an_axis_and_removing_it_are_inverse(
    names: Any, data: st.DataObject, name: Any
) -> None:
    metadata = Metadata(names, {"tag": "x"})
    rank = len(names) + 1
    position = data.draw(st.integers(-rank, rank - 1))
    more = metadata.with_axis(position, name)
    assert more.axes is not None and more.axes[position] == name
    assert more.without_axis(position, name) == metadata
    assert metadata.with_axis(position % rank, name) == more
    with pytest.raises(MetadataError, match="no place"):
        metadata.with_axis(data.draw(st.sampled_from([rank, -rank - 1])), name)
    with pytest.raises(MetadataError, match="no dimension"):
        metadata.without_axis(data.draw(st.sampled_from([rank - 1, -rank])))


@given(_NAMES, st.data())
@settings(max_examples=20)
def test_identity_over_new_dimension_returns_the_model(names: Any, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(names) - 1, len(names)))
    model = Box()
    model.w = sx.Param(jnp.zeros((2,) * (len(names) + 1)), axes=(None,) * (len(names) + 1))
    model.w.set_metadata(axes=Metadata(names, {}).with_axis(axis, "layers").axes)
    before = sx.clone(model)
    made = sx.vmap(sx.clone, in_axes=axis, out_axes=axis, metadata=NAMED)(model)
    assert_same_model(made, before)
    assert_same_model(model, before)


# --- names and real shardings ---


def _agree(model: Any, mesh: Mesh) -> bool:
    """Whether every array lies as its names say."""
    declared = sx.shardings(model, mesh, RULES).flat()
    return all(
        value.sharding.is_equivalent_to(declared[path], value.ndim)
        for path, value in sx.state(model).flat().items()
    )


@pytest.mark.parametrize(
    ("mesh", "axis", "metadata"),
    [
        (AxisType.Auto, 0, NAMED),
        (AxisType.Auto, -1, None),
        (AxisType.Explicit, 0, None),
        (AxisType.Explicit, -1, NAMED),
    ],
    indirect=["mesh"],
)
def test_stack_is_sharded_by_its_names_flax_6(mesh: Mesh, axis: int, metadata: Any) -> None:
    """Flax names the new dimension but does not split it."""
    model = sx.shard(_stack(out_axes=axis, metadata=metadata), mesh, RULES)
    over = "data" if metadata else None
    spec = (over, None, "model") if axis == 0 else (None, "model", over)
    assert sx.partition_specs(model, RULES)["kernel"] == PartitionSpec(*spec)
    assert model.kernel.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), 3)
    assert _agree(model, mesh)


def _update(m: Any) -> None:
    m.kernel[...] = m.kernel * 2
    m.moment = sx.Variable(jnp.ones_like(m.kernel.value), axes=m.kernel.axes)
    m.copy = sx.clone(m.bias)


@pytest.mark.parametrize(
    ("mesh", "axis", "compiled"),
    [
        (AxisType.Auto, 0, False),
        (AxisType.Auto, 1, True),
        (AxisType.Auto, -1, False),
        (AxisType.Explicit, 0, True),
        (AxisType.Explicit, 1, False),
        (AxisType.Explicit, -1, True),
    ],
    indirect=["mesh"],
)
def test_written_and_new_values_follow_their_names(mesh: Mesh, axis: int, compiled: bool) -> None:
    if axis == 1:
        model = _stack(out_axes=sx.StateAxes({sx.PathContains("bias"): 0, ...: 1}), metadata=NAMED)
        axes: Any = sx.StateAxes(
            {sx.PathContains("kernel"): 1, sx.PathContains("moment"): 1, ...: 0}
        )
    else:
        model, axes = _stack(out_axes=axis, metadata=NAMED), axis
    sx.shard(model, mesh, RULES)
    run = sx.vmap(_update, in_axes=axes, metadata=NAMED)
    with jax.set_mesh(mesh):
        (sx.jit(run) if compiled else run)(model)
    place = axis % 3
    names = ["in", "out"]
    names.insert(place, "layers")
    assert model.kernel.axes == model.moment.axes == tuple(names)
    assert model.copy.axes == model.bias.axes
    assert model.kernel.sharding.is_equivalent_to(sx.shardings(model, mesh, RULES)["kernel"], 3)
    assert model.copy.sharding.is_equivalent_to(sx.shardings(model, mesh, RULES)["copy"], 2)
    assert _agree(sx.shard(model, mesh, RULES), mesh)


def test_spmd_axis_name_shards_lanes_by_name(auto_mesh: Mesh) -> None:
    model = sx.shard(_stack(metadata=NAMED), auto_mesh, RULES)

    def forward(m: Any, x: Any) -> Any:
        m.seen = sx.Variable(
            sx.constrain(m(x), ("batch", "out"), rules=RULES), axes=("batch", "out")
        )
        return m(x)

    run = sx.jit(sx.vmap(forward, in_axes=(0, None), spmd_axis_name="data", metadata=NAMED))
    with jax.set_mesh(auto_mesh):
        y = run(model, jnp.ones((2, 8)))
    assert model.seen.axes == ("layers", "batch", "out")
    assert model.seen.sharding.is_equivalent_to(
        NamedSharding(auto_mesh, PartitionSpec("data", None, "model")), 3
    )
    assert y.shape == (4, 2, 8)
    assert _agree(model, auto_mesh)


def test_abstract_stack_has_names_and_shardings(mesh: Mesh) -> None:
    """Flax's eval_shape reports the names of one layer for the whole stack."""
    for metadata in (NAMED, None):
        shapes = sx.eval_shape(lambda metadata=metadata: _stack(metadata=metadata))
        real = sx.shard(_stack(metadata=metadata), mesh, RULES)
        assert shapes.kernel.is_abstract and shapes.kernel.axes == real.kernel.axes
        specs = sx.partition_specs(shapes, RULES).flat()
        assert specs == sx.partition_specs(real, RULES).flat()
        declared = sx.shardings(shapes, mesh, RULES)
        assert real.kernel.sharding.is_equivalent_to(declared["kernel"], 3)


def test_eval_shape_keeps_shardings_of_the_model(mesh: Mesh) -> None:
    model = sx.shard(_stack(metadata=NAMED), mesh, RULES)
    with jax.set_mesh(mesh):
        shapes = sx.eval_shape(lambda m: sx.vmap(lambda m: m, metadata=NAMED)(m), model)
    assert shapes.kernel.axes == model.kernel.axes
    declared = sx.shardings(shapes, mesh, RULES).flat()
    assert declared == sx.shardings(model, mesh, RULES).flat()


@pytest.mark.parametrize(
    ("mesh", "stacked", "given"),
    [
        (AxisType.Auto, False, False),
        (AxisType.Auto, True, True),
        (AxisType.Explicit, False, True),
        (AxisType.Explicit, True, False),
    ],
    indirect=["mesh"],
)
def test_shard_inside_jit_follows_the_names(mesh: Mesh, stacked: bool, given: bool) -> None:
    def make() -> Any:
        return _stack(metadata=NAMED) if stacked else _layer(sx.Rngs(0))

    run = sx.jit(lambda *models: sx.shard(models[0] if given else make(), mesh, RULES))
    with jax.set_mesh(mesh):
        model = run(*([make()] if given else []))
    assert _agree(model, mesh)
    assert not model.kernel.sharding.is_fully_replicated


# --- Explicit meshes: the mapped dimension is part of the types ---


def test_arrays_mapped_together_need_equal_splits(explicit_mesh: Mesh) -> None:
    model = sx.shard(_stack(metadata=NAMED), explicit_mesh, RULES)
    run = sx.vmap(lambda m, x: m(x))
    with jax.set_mesh(explicit_mesh):
        with pytest.raises(sx.errors.TransformError) as caught:
            run(model, jnp.ones((4, 2, 8)))
        assert "\n  .m.kernel: data\n  .x: None\n" in str(caught.value)
        x = jax.device_put(jnp.ones((4, 2, 8)), PartitionSpec("data"))
        assert run(model, x).shape == (4, 2, 8)


def test_shared_array_cannot_be_split_over_mapped_axes(explicit_mesh: Mesh) -> None:
    model = sx.shard(_stack(metadata=NAMED), explicit_mesh, RULES)
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(jnp.ones((2, 8)), PartitionSpec("data"))
        with pytest.raises(sx.errors.TransformError, match=r"array at \.x, which the whole batch"):
            sx.vmap(lambda m, x: m(x), in_axes=(0, None))(model, x)
