# SPDX-License-Identifier: Apache-2.0
"""Boxes in vmap and scan: their names lose the mapped dimension inside, and have it outside."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import PartitionError, PrefixError
from shardax.partition import PARTITION_NAME, AxisMetadata, LogicallyPartitioned, Partitioned

LAYERS = {PARTITION_NAME: "layers"}
COUNT = 5


def named(*names: Any) -> Any:
    """A box of logical names whose array has one size per name: a=2, b=3, c=4, layers=5."""
    sizes = {"a": 2, "b": 3, "c": 4, "layers": COUNT, "other": COUNT, None: COUNT}
    array = np.ones([sizes[name] for name in names], np.float32)
    return LogicallyPartitioned(jnp.asarray(array), names)


def sizes(box: Any) -> dict[Any, int]:
    """The size of each named dimension."""
    return dict(zip(box.names, box.value.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Strict(AxisMetadata[Any]):
    """A box that must know what its dimensions are called."""

    value: Any
    labels: tuple[str, ...]

    def add_axis(self, index: int, params: Any) -> Strict:
        """See the base."""
        if params[PARTITION_NAME] is None:
            raise PartitionError("a dimension must have a label.")
        return dataclasses.replace(self, labels=(params[PARTITION_NAME], *self.labels))

    def remove_axis(self, index: int, params: Any) -> Strict:
        """See the base."""
        return dataclasses.replace(self, labels=self.labels[1:])


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_new_boxes_have_name_at_out_axis(axis: int) -> None:
    make = sx.vmap(lambda _: {"w": named("a", "b")}, out_axes=axis, metadata=LAYERS)
    box = make(jnp.arange(COUNT))["w"]
    assert sizes(box) == {"a": 2, "b": 3, "layers": COUNT}
    assert box.names.index("layers") == axis % 3


def test_vmap_without_axis_name_adds_an_unnamed_dimension() -> None:
    box = sx.vmap(lambda _: named("a"), out_axes=1)(jnp.arange(COUNT))
    assert box.names == ("a", None) and box.value.shape == (2, COUNT)


def test_box_name_is_kept_by_its_class() -> None:
    def lane(box: Any) -> Any:
        return {"same": box, "mesh": Partitioned(box.value, ("model",))}

    result = sx.vmap(lane, out_axes=-1)(named("layers", "a"))
    assert result["same"].names == ("a", "layers")
    assert result["mesh"].names == ("model", None)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_lanes_see_boxes_without_the_mapped_dimension(axis: int) -> None:
    names = ["a", "b"]
    names.insert(axis % 3, "layers")
    seen = []

    def lane(tree: Any, *, scale: Any) -> Any:
        seen.append((sizes(tree["w"]), scale.names))
        return tree

    lanes = sx.vmap(lane, in_axes=(axis,), out_axes=axis, metadata=LAYERS)
    result = lanes({"w": named(*names)}, scale=named("layers"))
    assert seen == [({"a": 2, "b": 3}, ())]
    assert result == {"w": named(*names)}


def test_boxes_that_all_lanes_share_keep_their_names() -> None:
    seen = []

    def lane(shared: Any, x: Any) -> Any:
        seen.append(shared.names)
        return shared, x

    shared, _ = sx.vmap(lane, in_axes=(None, 0), out_axes=(None, 0), metadata=LAYERS)(
        named("a", "b"), jnp.arange(COUNT)
    )
    assert seen == [("a", "b")] and shared == named("a", "b")


def test_boxes_variables_and_modules_go_through_together() -> None:
    def make(rngs: sx.Rngs) -> Any:
        linear = sx.nn.Linear(2, 3, rngs=rngs)
        return {"box": named("a"), "v": sx.Param(jnp.ones(3), axes=("b",)), "m": linear}

    tree = sx.vmap(make, axis_size=COUNT, metadata=LAYERS)(sx.Rngs(0))
    assert (tree["box"].names, tree["v"].axes, tree["m"].kernel.axes) == (
        ("layers", "a"),
        ("layers", "b"),
        ("layers", "in", "out"),
    )
    back = sx.vmap(lambda t: jax.tree.map(lambda x: 2 * x, t["box"]), metadata=LAYERS)(tree)
    assert back == LogicallyPartitioned(2 * tree["box"].value, ("layers", "a"))


def test_nested_and_multiarray_boxes_are_updated() -> None:
    nested = Strict({"w": named("layers", "a")}, ("layers", "x"))
    many = LogicallyPartitioned({"m": jnp.ones((COUNT, 2)), "v": jnp.ones((COUNT, 3))}, None)
    seen = []

    def lane(nested: Any, many: Any) -> Any:
        seen.append((nested.labels, nested.value["w"].names, many.names))
        return nested, many

    assert sx.vmap(lane, metadata=LAYERS)(nested, many) == (nested, many)
    assert seen == [(("x",), ("a",), None)]


@given(st.integers(1, 3), st.integers(-3, 2), st.integers(-3, 2))
@settings(max_examples=20)
def test_law_identity_keeps_names_at_any_axis(rank: int, into: int, out: int) -> None:
    rest = ["a", "b", "c"][:rank]
    into, out = into % (rank + 1), out % (rank + 1) - (rank + 1)
    before = [*rest[:into], "layers", *rest[into:]]
    box = named(*before)
    after = sx.vmap(lambda b: b, in_axes=into, out_axes=out, metadata=LAYERS)(box)
    assert sizes(after) == sizes(box)
    assert after.names == (*rest[: out % (rank + 1)], "layers", *rest[out % (rank + 1) :])


# --- scan -----------------------------------------------------------------------------------------


def test_scan_slices_and_stacks_boxes() -> None:
    seen = []

    def body(carry: Any, layer: Any) -> Any:
        seen.append((carry.names, layer["w"].names))
        return jax.tree.map(lambda x: x + 1, carry), {"out": layer["w"], "new": named("b")}

    carry = Partitioned(jnp.zeros(2), ("data",))
    final, rows = sx.scan(body, in_axes=(sx.Carry, -1), out_axes=(sx.Carry, 1), metadata=LAYERS)(
        carry, {"w": named("a", "layers")}
    )
    assert set(seen) == {(("data",), ("a",))}
    assert final == Partitioned(jnp.full(2, float(COUNT)), ("data",))
    assert rows == {"out": named("a", "layers"), "new": named("b", "layers")}


def test_deep_network_needs_no_manual_axis_calls() -> None:
    def layer(key: jax.Array) -> Any:
        normal = jax.nn.initializers.normal()
        return {"w": LogicallyPartitioned(normal(key, (2, 2)), ("embed", "embed_out"))}

    params = sx.vmap(layer, metadata=LAYERS)(jax.random.split(jax.random.key(0), COUNT))
    x = jnp.ones(2)

    def block(x: Any, layer: Any) -> Any:
        assert layer["w"].names == ("embed", "embed_out")
        return jnp.tanh(x @ sx.unbox(layer)["w"])

    result = sx.scan(block, in_axes=(sx.Carry, 0), out_axes=sx.Carry, metadata=LAYERS)(x, params)
    expected = x
    for i in range(COUNT):
        expected = jnp.tanh(expected @ params["w"].value[i])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert params["w"].names == ("layers", "embed", "embed_out")


def test_gradients_and_compiled_calls_around_keep_the_names() -> None:
    def loss(params: Any) -> Any:
        def body(carry: Any, layer: Any) -> Any:
            return carry + (sx.unbox(layer) ** 2).sum(), None

        return sx.scan(body, metadata=LAYERS)(jnp.float32(0), params)[0]

    box = named("layers", "a")
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), sx.jit(jax.grad(loss))):
        assert grad(box) == LogicallyPartitioned(2 * box.value, ("layers", "a"))


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [sx.vmap, sx.scan], ids=["vmap", "scan"])
def test_dimension_with_other_name_raises_with_path(transform: Any) -> None:
    lanes = transform(lambda tree: None, in_axes=0, out_axes=0, metadata=LAYERS)
    with pytest.raises(PartitionError, match=r"^\.tree\.w\[0\]: .*'layers'.*'other'"):
        lanes({"w": [named("other", "a")]})


def test_box_without_required_name_raises_with_path() -> None:
    with pytest.raises(PartitionError, match=r"^\.result\.w: .*label"):
        sx.vmap(lambda x: {"w": Strict(x, ())})(jnp.arange(COUNT))
    box = sx.vmap(lambda x: Strict(x, ()), metadata=LAYERS)(jnp.arange(COUNT))
    assert box == Strict(jnp.arange(COUNT), ("layers",))


def test_mapped_dimension_after_last_name_is_unnamed() -> None:
    seen = []

    def body(box: Any) -> Any:
        seen.append(box.names)
        return box

    result = sx.vmap(body, in_axes=1)(LogicallyPartitioned(jnp.ones((2, COUNT)), ("a",)))
    assert seen[0] == ("a",)
    assert result == LogicallyPartitioned(jnp.ones((COUNT, 2)), (None, "a"))


def test_arrays_of_one_box_have_one_axis() -> None:
    box = LogicallyPartitioned((jnp.ones((COUNT, 2)), jnp.ones((2, COUNT))), ("layers", "a"))
    axes = LogicallyPartitioned((0, 1), ("layers", "a"))
    with pytest.raises(PrefixError, match=r"box at \.box .*axes"):
        sx.vmap(lambda box: box, in_axes=(axes,))(box)


@pytest.mark.parametrize("count", [1, 2])
def test_boxes_cause_no_extra_traces(count: int) -> None:
    traces = itertools.count()

    def lane(box: Any) -> Any:
        next(traces)
        return box

    mapped = sx.jit(sx.vmap(lane, metadata=LAYERS))
    for _ in range(count):
        mapped(named("layers", "a"))
    assert next(traces) == 1
