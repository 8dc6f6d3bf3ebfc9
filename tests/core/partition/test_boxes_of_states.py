# SPDX-License-Identifier: Apache-2.0
"""Entries of a State stand for boxes, as Variables do: they have names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import nn
from shardax.errors import MetadataError, PartitionError
from shardax.partition import (
    PARTITION_NAME,
    LogicallyPartitioned,
    Partitioned,
    VariableBox,
    add_axis,
    get_partition_spec,
    map_axis_meta,
    remove_axis,
    replace_boxed,
    to_boxes,
    to_variables,
    unbox,
    with_partitioning,
)

LAYERS = {PARTITION_NAME: "layers"}
NORMAL = jax.nn.initializers.normal()


def make_state(key: Any) -> sx.State:
    """The State of a model: one kernel of a box, one with names, and a running mean."""
    rngs = sx.Rngs(key)

    class Model(sx.Module):
        def __init__(self) -> None:
            init = with_partitioning(NORMAL, (None, "model"))
            self.boxed = nn.Linear(4, 8, kernel_init=init, use_bias=False, rngs=rngs)
            self.named = nn.Linear(4, 8, kernel_axes=("in", "out"), use_bias=False, rngs=rngs)
            self.mean = sx.BatchStat(jnp.zeros(3), axes=("embed",))
            self.plain = jnp.zeros(2)

    return sx.state(Model())


def make_many(**options: Any) -> Any:
    """The States of three models, stacked."""
    keys = jax.random.split(jax.random.key(0), 3)
    return sx.vmap(make_state, **options)(keys)


def specs(tree: Any) -> dict[Any, Any]:
    """The spec of each entry by its path, written as one string."""
    return {
        ".".join(map(str, path)): spec for path, spec in get_partition_spec(tree).flat().items()
    }


SPECS = {
    "boxed.kernel": P(None, "model"),
    "named.kernel": P("in", "out"),
    "mean": P("embed"),
    "plain": P(),
}
STACKED = {
    "boxed.kernel": P("layers", None, "model"),
    "named.kernel": P("layers", "in", "out"),
    "mean": P("layers", "embed"),
    "plain": P(),
}


def test_to_boxes_of_a_state_returns_boxes_and_back() -> None:
    state = make_state(jax.random.key(0))
    boxes = to_boxes({"s": [state]})["s"][0]
    assert {path: type(box) for path, box in boxes.flat().items()} == {
        ("boxed", "kernel"): Partitioned,
        ("named", "kernel"): VariableBox,
        ("mean",): VariableBox,
        ("plain",): VariableBox,
    }
    assert boxes["boxed"]["kernel"] == Partitioned(state["boxed"]["kernel"], (None, "model"))
    assert boxes["mean"].variable_type is sx.BatchStat and boxes["mean"].names == ("embed",)
    assert to_variables(boxes) == state and to_boxes(to_variables(boxes)) == boxes
    assert jax.tree.map(np.shape, unbox(boxes)).flat() == jax.tree.map(np.shape, state).flat()
    assert specs(boxes) == specs(state) == SPECS
    assert to_boxes(boxes) == boxes
    assert replace_boxed(boxes, unbox(boxes)) == boxes and replace_boxed(state, 3) == 3
    with pytest.raises(PartitionError, match="no State of the same paths") as caught:
        replace_boxed({"s": boxes}, {"s": {"mean": 1.0}})
    assert "unbox(tree)" in str(caught.value)

    of_boxes = sx.State({"w": LogicallyPartitioned(jnp.ones(2), ("embed",)), "n": jnp.ones(3)})
    taken = to_variables(of_boxes, sx.BatchStat)
    assert taken.origins()["w",].variable_type is sx.BatchStat and taken["w"].tolist() == [1, 1]


def test_map_axis_meta_sees_the_entries_of_a_state() -> None:
    state = make_state(jax.random.key(0))
    names = map_axis_meta(lambda box: box.names, {"s": state})["s"]
    assert names.flat() == {
        ("boxed", "kernel"): (None, "model"),
        ("named", "kernel"): ("in", "out"),
        ("mean",): ("embed",),
        ("plain",): None,
    }
    kinds = map_axis_meta(type, {"s": state})["s"]
    assert set(kinds.flat().values()) == {VariableBox}
    boxes = to_boxes(state)
    assert map_axis_meta(lambda box: box, boxes) != boxes  # boxes of Variables become entries
    assert to_boxes(map_axis_meta(lambda box: box, boxes)) == boxes
    renamed = map_axis_meta(lambda box: box.replace(value=2 * box.value), state)
    assert renamed.origins() == state.origins() and renamed["mean"].tolist() == [0, 0, 0]
    assert renamed["boxed"]["kernel"].tolist() == (2 * state["boxed"]["kernel"]).tolist()


def test_add_axis_names_a_stacked_state() -> None:
    state = make_state(jax.random.key(0))
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    named = add_axis(stacked, 0, LAYERS)
    first = jax.tree.map(lambda x: x[0], named)
    assert specs(named) == STACKED and specs(remove_axis(first, 0, LAYERS)) == SPECS
    assert specs(add_axis(to_boxes(stacked), 0, LAYERS)) == STACKED


@pytest.mark.parametrize("axis", [0, -1])
def test_vmap_names_the_new_axis_of_a_state(axis: int) -> None:
    stacked = make_many(metadata=LAYERS, out_axes=axis)
    moved = {
        name: P(*spec[1:], "layers") if axis == -1 and spec else spec
        for name, spec in STACKED.items()
    }
    assert specs(stacked) == moved

    inside: list[Any] = []

    def one(state: Any) -> Any:
        inside.append(specs(state))
        return {"again": jax.tree.map(lambda x: x + 1, state)}

    for options in ({"metadata": LAYERS}, {}):
        again = sx.vmap(one, in_axes=axis, out_axes=axis, **options)(stacked)["again"]
        assert inside.pop() == SPECS and specs(again) == moved
    unnamed = make_many()
    assert specs(unnamed) == {
        name: P(None, *spec[1:]) if spec else spec for name, spec in STACKED.items()
    }


def test_vmap_names_the_axis_of_boxes_in_a_state() -> None:
    boxes = sx.vmap(lambda key: to_boxes(make_state(key)), metadata=LAYERS)(
        jax.random.split(jax.random.key(0), 3)
    )
    assert specs(boxes) == STACKED and boxes["boxed"]["kernel"].names == ("layers", None, "model")
    assert boxes.origins() == make_many(metadata=LAYERS).origins()


def test_scan_names_the_rows_of_a_state() -> None:
    stacked = make_many(metadata=LAYERS)
    inside: list[Any] = []

    def body(carry: Any, state: Any) -> Any:
        inside.append(specs(state))
        return carry, state

    carry, rows = sx.scan(body, metadata=LAYERS)(make_state(jax.random.key(1)), stacked)
    assert inside[0] == SPECS and specs(rows) == STACKED and specs(carry) == SPECS
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    placed = sx.shard(rows, mesh, {"layers": None, "out": "model"})
    assert placed["boxed"]["kernel"].sharding.spec == P(None, None, "model")
    assert placed["named"]["kernel"].sharding.spec == P(None, None, "model")


def test_vmap_refuses_a_state_of_another_name() -> None:
    stacked = make_many(metadata=LAYERS)
    with pytest.raises(
        MetadataError, match=r"\.named\.kernel cannot be mapped.*'layers'"
    ) as caught:
        sx.vmap(lambda s: s, metadata={PARTITION_NAME: "experts"})({"named": stacked["named"]})
    assert "metadata={sx.partition.PARTITION_NAME: 'layers'}" in str(caught.value)
