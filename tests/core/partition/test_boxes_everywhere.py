# SPDX-License-Identifier: Apache-2.0
"""Boxes in every function that lays out trees: one engine, one answer."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError, PartitionError
from shardax.partition import (
    AxisMetadata,
    LogicallyPartitioned,
    Partitioned,
    get_partition_spec,
    get_sharding,
    is_box,
    logical_to_mesh,
    replace_boxed,
    to_boxes,
    to_variables,
    unbox,
)
from tests.core.partition.own_boxes import Split

RULES = sx.Rules({"embed": "data", "mlp": "model", "rest": None})
ARRAY = np.arange(128.0, dtype=np.float32).reshape(8, 16)


@dataclasses.dataclass(frozen=True)
class Units(AxisMetadata[Any]):
    """A box of a user's own with names of its own kind, which rules of its own map."""

    value: Any
    units: tuple[str, ...]

    def add_axis(self, index: int, params: Any) -> Units:
        """See the base."""
        return self

    def remove_axis(self, index: int, params: Any) -> Units:
        """See the base."""
        return self

    def layout(self) -> Any:
        """Metres are split over the model axis."""
        return self.units, sx.Rules({"m": "model", "s": None})


class Pair(NamedTuple):
    """A container with attributes, as states of optimizers are."""

    left: Any
    right: Any


def tree() -> Any:
    """One of every kind of box, nested in containers, beside arrays and Variables."""
    return {
        "mesh": [Partitioned(ARRAY, ("data", "model"))],
        "logical": Pair(LogicallyPartitioned(ARRAY, ("embed", "mlp")), "text"),
        "baked": LogicallyPartitioned(ARRAY, ("embed", "mlp"), rules={"embed": "model"}),
        "many": Partitioned({"m": ARRAY, "v": (2 * ARRAY, "text")}, (None, "model")),
        "nested": LogicallyPartitioned(Partitioned(ARRAY, ("model", None)), ("embed", "mlp")),
        "own": Split(ARRAY, "data"),
        "units": Units(ARRAY, ("s", "m")),
        "unknown": Partitioned(ARRAY, None),
        "nothing": Partitioned(None, ("data",)),
        "variable": sx.Param(ARRAY, axes=("embed", "mlp")),
        "array": jnp.ones(3),
        "step": 3,
    }


SPECS = {
    "mesh": [P("data", "model")],
    "logical": Pair(P("data", "model"), None),
    "baked": P("model", None),
    "many": P(None, "model"),
    "nested": P("data", "model"),
    "own": P("data"),
    "units": P(None, "model"),
    "unknown": P(),
    "nothing": P("data"),
    "variable": P("data", "model"),
    "array": P(),
    "step": None,
}


def over(mesh: Any, specs: Any) -> Any:
    """Specs as shardings."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda item: isinstance(item, P)
    )


def shardings_in(entry: Any) -> Any:
    """The shardings of the arrays in one entry of a tree, whatever it is."""
    leaves = jax.tree.leaves(entry)
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    return [leaf.sharding for leaf in leaves if isinstance(leaf, kinds)]


# --- what the functions return --------------------------------------------------------------------


def test_specs_and_shardings_are_one_entry_per_box(mesh: Mesh) -> None:
    assert sx.partition_specs(tree(), RULES) == SPECS
    assert sx.shardings(tree(), mesh, RULES) == over(mesh, SPECS)
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        assert sx.partition_specs(tree()) == SPECS
        assert sx.shardings(tree()) == over(mesh, SPECS)


def test_shard_keeps_the_boxes_and_moves_the_values(mesh: Mesh) -> None:
    before = tree()
    after = sx.shard(before, mesh, RULES)
    for key in before:
        assert set(shardings_in(after[key])) <= set(jax.tree.leaves(over(mesh, SPECS[key])))
    assert after["variable"] is before["variable"]
    kept = {key: value for key, value in tree().items() if key not in ("variable", "array")}
    assert {key: after[key] for key in kept} == kept
    assert after["many"].value["v"][1] == "text"
    again = sx.shard(after, mesh, RULES)
    assert all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True))


def test_unshard_returns_tree_of_boxes_to_one_device(auto_mesh: Mesh) -> None:
    boxes = {"w": LogicallyPartitioned([ARRAY, 2 * ARRAY], ("embed", "mlp")), "n": jnp.ones(2)}
    back = sx.unshard(sx.shard(boxes, auto_mesh, RULES))
    assert back["w"] == boxes["w"]
    assert set(shardings_in(back)) == {SingleDeviceSharding(jax.devices()[0])}


def test_abstract_copy_keeps_the_boxes(mesh: Mesh) -> None:
    copy = sx.abstract(tree(), mesh, RULES)
    struct = jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def at(*spec: Any) -> Any:
        return struct.update(sharding=NamedSharding(mesh, P(*spec)))

    assert copy["mesh"] == [Partitioned(at("data", "model"), ("data", "model"))]
    assert copy["many"] == Partitioned(
        {"m": at(None, "model"), "v": (at(None, "model"), "text")}, (None, "model")
    )
    assert copy["nested"].value == Partitioned(at("data", "model"), ("model", None))
    assert copy["nothing"] == tree()["nothing"] and copy["step"] is None
    plain = sx.abstract({"w": tree()["baked"]})
    assert plain == {"w": tree()["baked"].replace_boxed(struct)}


def test_lazy_boxed_values_are_computed_into_their_shards(mesh: Mesh) -> None:
    lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 16)), axes=("embed", "mlp"))
    boxes = to_boxes({"w": lazy})
    assert sx.shardings(boxes, mesh, RULES) == {"w": NamedSharding(mesh, P("data", "model"))}
    assert sx.unshard(boxes)["w"].value is boxes["w"].value
    placed = sx.shard(boxes, mesh, RULES)["w"]
    assert placed.value.sharding == NamedSharding(mesh, P("data", "model"))
    assert placed.value.tolist() == np.ones((8, 16)).tolist() and lazy.is_lazy


def test_shard_inside_program_constrains_boxed_values(auto_mesh: Mesh) -> None:
    @jax.jit
    def place(box: Any) -> Any:
        return sx.shard(box, auto_mesh)

    box = place(Partitioned(jnp.asarray(ARRAY), ("data", "model")))
    assert box.names == ("data", "model")
    assert box.value.sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data", "model")), 2)


# --- rules and meshes of their own ----------------------------------------------------------------


def test_box_rules_override_those_of_the_call() -> None:
    baked = LogicallyPartitioned(ARRAY, ("embed", "mlp"), rules={"mlp": "data"})
    strict = sx.Rules(RULES, on_unmapped="error")
    assert sx.partition_specs({"w": baked}, strict) == {"w": P(None, "data")}
    assert [f.code for f in sx.check({"w": baked}, None, RULES)] == ["unused-rule"] * 3


def test_box_mesh_is_used_unless_one_is_given(auto_mesh: Mesh) -> None:
    own = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    boxes = {
        "own": Partitioned(ARRAY, ("data", None), own),
        "w": Partitioned(ARRAY, ("data", None)),
    }
    with jax.set_mesh(auto_mesh):
        found = sx.shardings(boxes)
        assert found == get_sharding(boxes)
        placed: Any = sx.shard(boxes)
    assert (found["own"].mesh, found["w"].mesh) == (own, auto_mesh)
    assert {key: box.value.sharding for key, box in placed.items()} == found
    assert sx.shardings({"own": boxes["own"]})["own"].mesh == own
    with pytest.raises(NoMeshError, match="shardings"):
        sx.shardings(boxes)
    given = sx.shardings(boxes, auto_mesh)
    assert {place.mesh for place in given.values()} == {auto_mesh}
    assert [(f.severity, f.path, f.code) for f in sx.check(boxes, auto_mesh)] == [
        ("warning", ("own",), "other-mesh")
    ]
    assert sx.check(boxes, AbstractMesh((4, 2), ("data", "model"))) == []


# --- overrides, findings, pictures ----------------------------------------------------------------


def test_overrides_match_boxes_by_path_class_and_origin() -> None:
    boxes = {
        "params": {"w": LogicallyPartitioned(ARRAY, ("embed", "mlp"))},
        "mu": {"w": LogicallyPartitioned(ARRAY, ("embed", "mlp"))},
        "mesh": Partitioned(ARRAY, (None, "model")),
        "was": to_boxes(sx.BatchStat(ARRAY, axes=("embed", None), tag="slow")),
        "slow": to_boxes(sx.Param(ARRAY, axes=("embed", None), tag="slow")),
    }
    found = sx.partition_specs(
        boxes,
        {"mlp": "model"},
        overrides={
            sx.PathContains("mu"): {"embed": "data"},
            sx.BatchStat: P("model"),
            "slow": P(None, "data"),
            LogicallyPartitioned: None,
            Partitioned: {"model": None},
        },
    )
    assert found == {
        "params": {"w": P(None, "model")},
        "mu": {"w": P("data", "model")},
        "mesh": P(None, None),
        "was": P("model"),
        "slow": P(None, "data"),
    }


def test_override_splits_functional_optimizer_state_further(auto_mesh: Mesh) -> None:
    params: Any = {"w": LogicallyPartitioned(jnp.asarray(ARRAY), ("embed", "mlp"))}
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    rules, zero = {"mlp": "model"}, {sx.PathContains("opt"): {"embed": "data"}}
    placed = sx.shard(state, auto_mesh, rules, overrides=zero)
    assert placed["params"]["w"].value.sharding.spec == P(None, "model")
    assert placed["opt"][0].mu["w"].value.sharding.spec == P("data", "model")
    places = sx.shardings(state, auto_mesh, rules, overrides=zero)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), out_shardings=places)
    assert step(placed)["opt"][0].nu["w"].value.sharding == places["opt"][0].nu["w"]


def test_findings_name_boxes_in_optimizer_states_and_lists(auto_mesh: Mesh) -> None:
    params = {
        "blocks": [{"odd": Partitioned(jnp.ones((7, 8)), ("data", "model"))}],
        "stray": Partitioned(jnp.ones(8), ("modle",)),
        "rank": LogicallyPartitioned(jnp.ones(8), ("embed", "mlp")),
        "twice": Partitioned(jnp.ones((8, 8)), ("data", "data")),
        "own": Split(jnp.ones((3, 2)), "data"),
        "large": LogicallyPartitioned(
            jax.ShapeDtypeStruct((1024, 512), jnp.float32), (None, "other")
        ),
    }
    moments = optax.adam(1e-3).init({k: v for k, v in params.items() if k != "large"})
    found = sx.check((params, moments), auto_mesh, RULES)
    errors = {
        (("blocks", 0, "odd"), "indivisible"),
        (("stray",), "unknown-mesh-axis"),
        (("rank",), "rank-mismatch"),
        (("twice",), "axis-names"),
        (("own",), "indivisible"),
    }
    assert {(f.path, f.code) for f in found if f.severity == "error"} == {
        ((*where, *path), code)
        for path, code in errors
        for where in [(0,), (1, 0, "mu"), (1, 0, "nu")]
    }
    assert [f.path for f in found if f.code == "large-replicated"] == [(0, "large")]


def test_misplaced_live_box_is_found(auto_mesh: Mesh) -> None:
    boxes = {"a": Partitioned(ARRAY, ("data", None)), "b": [Partitioned(ARRAY, (None, "model"))]}
    placed = sx.shard(boxes, auto_mesh)
    assert sx.check(placed, auto_mesh) == []
    wrong = placed | {"b": [Partitioned(placed["b"][0].value, ("model", None))]}
    assert [(f.severity, f.path, f.code) for f in sx.check(wrong, auto_mesh)] == [
        ("warning", ("b", 0), "misplaced")
    ]


def test_logical_box_names_without_rules_are_refused(auto_mesh: Mesh) -> None:
    boxes = {"w": [LogicallyPartitioned(ARRAY, ("embed", None))], "n": Partitioned(ARRAY, None)}
    for function in (sx.shard, sx.shardings, sx.abstract, get_sharding):
        with pytest.raises(PartitionError, match=r"^\.w\[0\]: "):
            function(boxes, auto_mesh)
    assert [(f.path, f.code) for f in sx.check(boxes, auto_mesh)] == [(("w", 0), "no-rules")]
    assert sx.partition_specs(boxes) == {"w": [P("embed", None)], "n": P()}
    unnamed = {"w": LogicallyPartitioned(ARRAY, (None, None))}
    assert sx.shardings(unnamed, auto_mesh)["w"].spec == P(None, None)


def test_unplaceable_boxes_are_listed_and_nothing_moves(auto_mesh: Mesh) -> None:
    gone = jnp.ones(8)
    gone.delete()
    weight = sx.Param(jnp.ones((8, 16)), axes=("embed", "mlp"))
    boxes = {
        "abstract": Partitioned({"m": jax.ShapeDtypeStruct((8,), jnp.float32)}, ("data",)),
        "gone": [Partitioned(gone, ("data",))],
        "odd": Partitioned(jnp.ones(7), ("data",)),
        "variable": weight,
    }
    before = weight.sharding
    with pytest.raises(PartitionCheckError) as caught:
        sx.shard(boxes, auto_mesh, RULES)
    assert {(f.path, f.code) for f in caught.value.findings} == {
        (("abstract", "m"), "abstract"),
        (("gone", 0), "deleted"),
        (("odd",), "indivisible"),
    }
    assert weight.sharding == before


def test_named_scalar_is_reported_for_boxes_and_variables(mesh: Mesh) -> None:
    named = {"loss_scale": LogicallyPartitioned(3.5, names=("embed",))}
    for tree in (named, to_variables(named)):
        errors = [found for found in sx.check(tree, mesh, RULES) if found.severity == "error"]
        assert [found.code for found in errors] == ["rank-mismatch"]
        with pytest.raises(PartitionCheckError, match=r"loss_scale: 1 axis names"):
            sx.shardings(tree, mesh, RULES)
    unnamed = {"loss_scale": LogicallyPartitioned(3.5, names=())}
    assert sx.shard(unnamed, mesh, RULES)["loss_scale"].value == 3.5


def test_boxes_are_seen_in_the_table_of_shardings() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    boxes = {
        "params": {"w": LogicallyPartitioned(ARRAY, ("embed", "mlp"))},
        "own": Split(ARRAY, "data"),
    }
    assert str(sx.view.sharding(boxes, mesh, RULES)).splitlines() == [
        "path       shape  dtype    split                    shard  copies  bytes/device",
        ".own       8x16   float32  data: data               4x16        4         256 B",
        ".params.w  8x16   float32  embed: data, mlp: model  4x4         1          64 B",
        "mesh data=2, model=4; 320 B per device, 1.0 KiB in all",
    ]


# --- laws -----------------------------------------------------------------------------------------

NAMES = [None, "a", "b", "c", ("a", "b")]


@st.composite
def one_box(draw: st.DrawFn) -> Any:
    """A box of any kind, or a Variable, whose array has 24 along every dimension."""
    names = draw(st.permutations(NAMES[:4]))[: draw(st.integers(0, 3))]
    array = np.arange(24 ** len(names), dtype=np.float32).reshape((24,) * len(names))
    mesh_names = tuple({"a": "x", "b": "y", "c": None, None: None}[name] for name in names)
    value = draw(st.sampled_from([array, {"m": array, "v": [array]}]))
    rules = draw(st.sampled_from([None, {"a": "y", "b": "x"}]))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Partitioned(value, mesh_names)
    if kind == 1:
        return LogicallyPartitioned(value, tuple(names), rules=rules)
    if kind == 2 and names:
        return Split(value, mesh_names[0])
    return sx.Param(array, axes=tuple(names))


def trees() -> st.SearchStrategy[Any]:
    """Trees of boxes, arrays and whatever else."""
    leaves = st.one_of(one_box(), st.sampled_from([np.ones(3, np.float32), None, "text", 3]))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from("uvw"), inner, max_size=3),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=5,
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, sx.Rules]:
    """A mesh of 1 to 8 devices with the axes x and y, and rules."""
    sizes = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (4, 2), (2, 4)]))
    kinds = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in sizes)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=kinds, devices=devices)
    target = st.sampled_from([None, "x", "y", ("x", "y")])
    pairs = draw(st.lists(st.tuples(st.sampled_from("abc"), target), min_size=1, max_size=4))
    return mesh, sx.Rules(pairs)


def is_entry(value: Any) -> bool:
    """Whether a value is a box, a Variable or an entry for one."""
    return is_box(value) or isinstance(value, (P, NamedSharding)) or value is None


def entries_of(boxes: Any) -> list[Any]:
    """The boxes, Variables, entries and other leaves of a tree."""
    return jax.tree.leaves(boxes, is_leaf=is_entry)


@settings(max_examples=60)
@given(trees(), layouts())
def test_law_all_functions_give_one_answer(boxes: Any, layout: Any) -> None:
    mesh, rules = layout
    specs, places = sx.partition_specs(boxes, rules), sx.shardings(boxes, mesh, rules)
    assert specs == logical_to_mesh(boxes, rules)
    assert specs == logical_to_mesh(get_partition_spec_of_logical(boxes), rules)
    assert places == get_sharding(boxes, mesh, rules) == over(mesh, specs)
    for box, place in zip(entries_of(boxes), entries_of(places), strict=True):
        if isinstance(box, AxisMetadata):
            with sx.axis_rules(rules):
                assert box.get_sharding(mesh) == place
        assert {s.spec for s in shardings_in(sx.abstract(box, mesh, rules))} <= {
            getattr(place, "spec", None)
        }
    placed = sx.shard(boxes, mesh, rules)
    for box, place in zip(entries_of(placed), entries_of(places), strict=True):
        assert set(shardings_in(box)) <= {place}
    found = sx.check(placed, mesh, rules)
    assert [f for f in found if f.severity == "error" or f.code in ("misplaced", "elsewhere")] == []


def get_partition_spec_of_logical(boxes: Any) -> Any:
    """The specs that boxes have, but the boxes themselves where these know better than rules."""
    specs = get_partition_spec(boxes)
    return jax.tree.map(
        lambda box, spec: (
            spec
            if isinstance(box, (LogicallyPartitioned, sx.Variable)) and not getattr(box, "rules", 0)
            else box
        ),
        boxes,
        specs,
        is_leaf=is_entry,
    )


@settings(max_examples=30)
@given(trees())
def test_law_replace_boxed_undoes_unbox(boxes: Any) -> None:
    again = replace_boxed(boxes, unbox(boxes))
    for one, other in zip(entries_of(boxes), entries_of(again), strict=True):
        if isinstance(one, AxisMetadata):
            assert one == other
        elif isinstance(one, sx.Variable):
            assert one.axes == other.axes and np.array_equal(one.value, other.value)
