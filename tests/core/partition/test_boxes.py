# SPDX-License-Identifier: Apache-2.0
"""Boxes: axis names that travel with a value, through trees, transforms and changes of rank."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import flax.core.meta as flax_meta
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import (
    MetadataError,
    PartitionCheckError,
    PartitionError,
    ShardaxError,
    TransformError,
)
from shardax.partition import (
    PARTITION_NAME,
    AxisMetadata,
    LogicallyPartitioned,
    Partitioned,
    add_axis,
    get_partition_spec,
    remove_axis,
    replace_boxed,
    unbox,
)
from shardax.partition.boxes.axis_metadata import inserted, without
from tests.advice import run_advice

LAYERS = {PARTITION_NAME: "layers"}


@dataclasses.dataclass(frozen=True)
class Units(AxisMetadata[Any]):
    """A box of a user's own: units of each dimension, and where the value goes."""

    value: Any
    units: tuple[str | None, ...]

    def add_axis(self, index: int, params: Any) -> Units:
        """See the base."""
        unit = params.get("unit")
        return dataclasses.replace(self, units=inserted(self, self.units, index, unit))

    def remove_axis(self, index: int, params: Any) -> Units:
        """See the base."""
        unit = params.get("unit")
        return dataclasses.replace(self, units=without(self, self.units, index, unit))

    def get_partition_spec(self) -> P:
        """Metres are split."""
        return P(*("data" if unit == "m" else None for unit in self.units))


class Plain(AxisMetadata[Any]):
    """A box that is no dataclass, with an attribute that cannot be hashed."""

    def __init__(self, value: Any, notes: Any) -> None:
        self.value, self.notes = value, notes

    def add_axis(self, index: int, params: Any) -> Plain:
        """See the base."""
        return self

    def remove_axis(self, index: int, params: Any) -> Plain:
        """See the base."""
        return self


# --- boxes as pytree nodes ------------------------------------------------------------------------


def test_box_is_a_pytree_node_of_its_value() -> None:
    box = Partitioned({"w": jnp.ones(2), "b": 3}, ("model",))
    leaves, treedef = jax.tree.flatten_with_path(box)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".value['b']", ".value['w']"]
    assert treedef.unflatten([4, 5]) == Partitioned({"w": 5, "b": 4}, ("model",))


@pytest.mark.parametrize("make", [Partitioned, LogicallyPartitioned, Units])
def test_names_travel_through_every_transform(make: Any) -> None:
    box = make(jnp.arange(6.0).reshape(2, 3), ("a", None))
    double = lambda b: jax.tree.map(lambda x: 2 * x, b)  # noqa: E731
    expected = make(2 * box.value, ("a", None))
    assert jax.jit(double)(box) == expected
    assert sx.jit(double)(box) == expected
    assert jax.vmap(double)(box) == expected
    assert jax.eval_shape(double, box) == make(
        jax.ShapeDtypeStruct((2, 3), jnp.float32), box_names(box)
    )
    assert jax.grad(lambda b: (unbox(b) ** 2).sum())(box) == expected
    assert jax.lax.scan(lambda carry, _: (double(carry), None), box, None, length=1)[0] == expected


def box_names(box: Any) -> Any:
    """The static part of the boxes above."""
    return box.units if isinstance(box, Units) else box.names


def test_boxes_of_other_names_are_other_structures() -> None:
    first, second = Partitioned(1.0, ("a",)), Partitioned(1.0, ("b",))
    with pytest.raises(ValueError, match="names"):
        jax.tree.map(jnp.add, first, second)
    traces = []

    @jax.jit
    def look(box: Any) -> Any:
        traces.append(box.names)
        return box

    for box in (first, second, first):
        look(box)
    assert traces == [("a",), ("b",)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Partitioned(np.ones((2, 3)), ("a", None)),
        lambda: LogicallyPartitioned(np.ones(3), (("a", "b"),), rules={"a": "x"}),
        lambda: LogicallyPartitioned(None, None),
        lambda: Units(np.ones(2), ("m",)),
    ],
)
def test_copies_and_pickles_are_equal(make: Any) -> None:
    box = make()
    for other in (copy.copy(box), copy.deepcopy(box), pickle.loads(pickle.dumps(box))):
        assert other == box and hash(other) == hash(box) and type(other) is type(box)


def test_box_of_ones_own_may_register_itself() -> None:
    class Own(Units, register=False):
        pass

    before = Own(2.0, ("m",))
    jax.tree_util.register_pytree_node(Own, lambda b: ((), b), lambda static, _: static)
    assert jax.tree.leaves([before, Own(1.0, ("m",))]) == []


def test_static_attributes_that_cannot_be_hashed_are_named() -> None:
    with pytest.raises(PartitionError, match=r"Plain.*notes.*\[1\]"):
        jax.tree.leaves(Plain(jnp.ones(2), [1]))


# --- comparing and showing ------------------------------------------------------------------------

VALUES = [
    1.0,
    None,
    "text",
    np.ones(2),
    jnp.ones(2),
    jnp.ones((2, 1)),
    jnp.array([1.0, jnp.nan]),
    jnp.ones(2, jnp.bfloat16),
    jax.random.key(0),
    {"a": jnp.ones(2)},
    [jnp.ones(2), 3],
    jax.ShapeDtypeStruct((2,), jnp.float32),
    object(),
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("other", VALUES)
def test_comparing_and_hashing_never_fail(value: Any, other: Any) -> None:
    """Case 23 of the notes on Flax: there, arrays make it raise."""
    first, second = Partitioned(value, ("a",)), Partitioned(other, ("a",))
    equal = first == second
    assert isinstance(equal, bool)
    if value is other:
        assert equal
    if equal:
        assert hash(first) == hash(second)
    assert (first != second) is not equal


def test_equal_boxes_have_equal_bits_names_and_class() -> None:
    box = Partitioned(jnp.array([1.0, jnp.nan]), ("a",))
    assert box == Partitioned(jnp.array([1.0, jnp.nan]), ("a",))
    assert box != Partitioned(jnp.array([2.0, jnp.nan]), ("a",))
    assert box != Partitioned(box.value, ("b",))
    assert box != Partitioned(box.value, ("a",), AbstractMesh((1,), ("a",)))
    assert box != LogicallyPartitioned(box.value, ("a",))
    assert box != box.value.tolist()
    keys = [Partitioned(jax.random.key(seed), ()) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    assert Units(1, ("m",)) != Units(True, ("m",))


def test_traced_deleted_and_unhashable_boxes_compare_by_identity() -> None:
    seen = []
    jax.jit(lambda a, b: seen.append((a == b, a == a, hash(a) == hash(b))))(
        Partitioned(jnp.ones(2), ("a",)), Partitioned(jnp.ones(2), ("a",))
    )
    assert seen == [(False, True, True)]
    gone = Partitioned(jnp.ones(2), ("a",))
    gone.value.delete()
    assert gone != Partitioned(jnp.ones(2), ("a",)) and gone == gone
    plain = Plain(jnp.ones(2), [1])
    assert plain != Plain(jnp.ones(2), [1]) and isinstance(hash(plain), int)


def test_repr_of_box_shows_shapes_and_given_arguments() -> None:
    mesh = AbstractMesh((2,), ("x",))
    box = LogicallyPartitioned({"w": jnp.ones((2, 3))}, ("a", None), mesh, {"a": "x"})
    assert repr(Partitioned(jnp.ones((2, 3)), ("a", None))) == (
        "Partitioned(float32[2, 3], names=('a', None))"
    )
    assert repr(box) == (
        f"LogicallyPartitioned({{'w': 'float32[2, 3]'}}, names=('a', None), mesh={mesh!r}, "
        "rules=Rules([('a', 'x')]))"
    )


def test_box_keeps_the_repr_it_defines() -> None:
    @dataclasses.dataclass(frozen=True)
    class Metres(Units):
        def __repr__(self) -> str:
            return f"{self.value} m"

    assert repr(Metres(2.0, ("m",))) == "2.0 m"
    assert Metres(2.0, ("m",)) == Metres(2.0, ("m",)) != Units(2.0, ("m",))


# --- making boxes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Partitioned, LogicallyPartitioned])
def test_invalid_names_meshes_and_rules_are_refused_immediately(make: Any) -> None:
    with pytest.raises(MetadataError, match="embed"):
        make(1.0, "embed")
    with pytest.raises(MetadataError, match="hashable"):
        make(1.0, (["a"],))
    with pytest.raises(TransformError, match="data"):
        make(1.0, ("a",), "data")
    with pytest.raises(PartitionError, match="pairs"):
        LogicallyPartitioned(1.0, ("a",), rules="data")


def test_boxes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Partitioned(1.0, ("a",)), "names", ("b",))  # noqa: B010


# --- taking out and putting in --------------------------------------------------------------------


def test_unbox_reaches_into_nested_boxes_and_variables() -> None:
    tree = {
        "box": Partitioned(jnp.ones(2), ("a",)),
        "nested": Units({"inner": LogicallyPartitioned(3.0, ())}, ("m",)),
        "variable": sx.Param(jnp.zeros(3), axes=("a",)),
        "lazy": sx.Param(sx.Init(jax.nn.initializers.ones, (2,)), axes=("a",)),
        "array": np.ones(1),
        "other": ("text", None, 4),
    }
    result = unbox(tree)
    assert jax.tree.map(np.asarray, {k: result[k] for k in ("box", "variable", "lazy")}) == {
        "box": pytest.approx(np.ones(2)),
        "variable": pytest.approx(np.zeros(3)),
        "lazy": pytest.approx(np.ones(2)),
    }
    assert result["nested"] == {"inner": 3.0}
    assert result["array"] is tree["array"] and result["other"] == ("text", None, 4)


def test_modules_and_states_are_no_boxes_and_stay() -> None:
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    state = sx.state(model)
    assert unbox({"m": model, "s": state}) == {"m": model, "s": state}
    assert unbox(model) is model


def test_replace_boxed_keeps_boxes_and_changes_values() -> None:
    tree = {
        "box": Partitioned(jnp.ones(2), ("a",)),
        "nested": Units([LogicallyPartitioned(3.0, ("b",)), 1], ("m",)),
        "variable": sx.BatchStat(jnp.zeros(3), axes=("a",), tag="slow"),
        "plain": 1,
    }
    values = {"box": 5.0, "nested": [6.0, 7], "variable": jnp.ones(3), "plain": 8}
    result = replace_boxed(tree, values)
    assert result["box"] == Partitioned(5.0, ("a",))
    assert result["nested"] == Units([LogicallyPartitioned(6.0, ("b",)), 7], ("m",))
    assert result["plain"] == 8
    assert type(result["variable"]) is sx.BatchStat and result["variable"].axes == ("a",)
    assert dict(result["variable"].metadata) == {"tag": "slow"}
    assert tree["variable"].value.tolist() == [0, 0, 0]


def test_values_of_another_structure_are_refused() -> None:
    tree = {"w": Partitioned(1.0, ()), "b": 2}
    with pytest.raises(PartitionError, match="do not fit"):
        replace_boxed(tree, {"w": 1.0})
    with pytest.raises(PartitionError, match="do not fit"):
        replace_boxed(Units([Partitioned(1.0, ())], ()), [1.0, 2.0])


def test_replacing_with_other_structure_is_refused() -> None:
    tree = {"w": sx.named.NamedArray(jnp.ones((2, 3)), ("embed", "mlp"))}
    same = {"w": sx.named.NamedArray(jnp.zeros((2, 3)), ("embed", "mlp"))}
    assert jax.tree.leaves(replace_boxed(tree, same))[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    for other in (jnp.ones((2, 3)), sx.named.NamedArray(jnp.ones(2), ("heads",))):
        with pytest.raises(PartitionError, match="do not fit"):
            replace_boxed(tree, {"w": other})


# --- another dimension ----------------------------------------------------------------------------


def test_negative_index_counts_from_the_new_last_dimension() -> None:
    """Case 4 of the notes on Flax: there, the name lands one place too early."""
    box = Partitioned(jnp.ones((2, 3)), ("a", "b"))
    assert box.add_axis(-1, LAYERS).names == ("a", "b", "layers")
    assert box.add_axis(-3, LAYERS).names == ("layers", "a", "b")
    assert box.add_axis(1, {PARTITION_NAME: None}).names == ("a", None, "b")


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_name_stands_where_vmap_puts_the_dimension(axis: int) -> None:
    make = sx.partition.with_partitioning(jax.nn.initializers.ones, ("a", "b"))
    stacked = jax.vmap(lambda key: make(key, (2, 3)), out_axes=axis)(
        jax.random.split(jax.random.key(0), 5)
    )
    named = add_axis({"w": stacked}, axis, LAYERS)["w"]
    sizes = dict(zip(named.names, named.value.shape, strict=True))
    assert sizes == {"a": 2, "b": 3, "layers": 5}


def test_nested_boxes_states_and_variables_change_axes_too() -> None:
    lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)), axes=("a",), tag="t")
    state = sx.state({"v": sx.BatchStat(jnp.ones(2), axes=("a",), tag="t")})
    tree = {"nested": Units(Partitioned(1.0, ("a",)), ("m",)), "v": lazy, "s": state, "x": 3}
    result = add_axis(tree, 0, LAYERS)
    assert result["nested"] == Units(Partitioned(1.0, ("layers", "a")), (None, "m"))
    assert result["v"].axes == ("layers", "a") and dict(result["v"].metadata) == {"tag": "t"}
    assert result["v"].is_lazy and result["v"] is not lazy and lazy.axes == ("a",)
    origin = result["s"].origins()["v",]
    assert origin.axes == ("layers", "a") and dict(origin.metadata) == {"tag": "t"}
    assert result["x"] == 3
    again = remove_axis(result, 0, LAYERS)
    assert again["nested"] == tree["nested"] and again["v"].axes == ("a",)
    assert again["s"].origins() == state.origins()


def test_add_axis_adds_no_name_where_there_are_none() -> None:
    assert Partitioned(1.0, None).add_axis(3, LAYERS) == Partitioned(1.0, None)
    assert add_axis(sx.Param(jnp.ones(2)), 0, LAYERS).axes is None


BAD_CHANGES: dict[str, tuple[Any, type[ShardaxError], list[str]]] = {
    "no name": (lambda t: add_axis(t, 0, {}), PartitionError, ["PARTITION_NAME"]),
    "no name to remove": (lambda t: remove_axis(t, 0, {"other": 1}), PartitionError, ["other"]),
    "add too far back": (lambda t: add_axis(t, -4, LAYERS), PartitionError, ["-4", "from -3 on"]),
    "remove too far": (lambda t: remove_axis(t, 2, LAYERS), PartitionError, ["2", "there are 2"]),
    "remove too far back": (lambda t: remove_axis(t, -3, LAYERS), PartitionError, ["-3"]),
    "remove another": (
        lambda t: remove_axis(t, 1, LAYERS),
        PartitionError,
        ["1", "'out'", "'layers'"],
    ),
    "remove elsewhere": (
        lambda t: remove_axis(t, 1, {PARTITION_NAME: "in"}),
        PartitionError,
        ["stands at 0"],
    ),
}


@pytest.mark.parametrize("case", BAD_CHANGES)
@pytest.mark.parametrize("make", [Partitioned, LogicallyPartitioned])
def test_errors_name_parameter_box_index_and_names(make: Any, case: str) -> None:
    """Where Flax has an empty assertion, or puts the name in front."""
    change, error, words = BAD_CHANGES[case]
    tree = {"block": [{"kernel": make(jnp.ones((2, 3)), ("in", "out"))}]}
    with pytest.raises(error) as caught:
        change(tree)
    text = str(caught.value)
    assert text.startswith(".block[0].kernel: ")
    assert f"{make.__name__}(float32[2, 3], names=('in', 'out'))" in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_add_axis_beyond_the_names_pads_as_in_flax(index: int) -> None:
    theirs = flax_meta.Partitioned(1.0, ("in", "out")).add_axis(index, LAYERS).names
    for box in (Partitioned(1.0, ("in", "out")), LogicallyPartitioned(jnp.ones(2), ("in", "out"))):
        assert box.add_axis(index, LAYERS).names == theirs
        assert box.add_axis(index, LAYERS).remove_axis(index, LAYERS).names[:2] == ("in", "out")
    with pytest.raises(PartitionCheckError, match=r"\.w: 6 axis names"):
        get_partition_spec(add_axis({"w": Partitioned(jnp.ones((2, 3)), ("in", "out"))}, 5, LAYERS))


def test_errors_name_variables_and_modules_by_their_paths() -> None:
    with pytest.raises(PartitionError, match=r"^\.w: "):
        add_axis({"w": sx.Param(jnp.ones(2), axes=("a",))}, 0, {})
    with pytest.raises(PartitionError, match=r"^\.s\.kernel: "):
        add_axis({"s": sx.state(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))}, 0, {})
    with pytest.raises(PartitionError, match=r"^\.m: a Linear is no box") as caught:
        add_axis({"m": sx.nn.Linear(2, 3, rngs=sx.Rngs(0))}, 0, LAYERS)
    names = {"sx": sx, "PARTITION_NAME": PARTITION_NAME}
    names["make"] = lambda _: sx.Param(jnp.ones(2), axes=("embed",))
    make = run_advice(caught.value, "sx.vmap(make, metadata={PARTITION_NAME: 'layers'})", names)
    assert make(jnp.arange(3)).axes == ("layers", "embed")


# --- laws -----------------------------------------------------------------------------------------

NAMES = st.lists(
    st.one_of(st.sampled_from(["a", "b", "layers", None, P.UNCONSTRAINED]), st.just(("a", "b"))),
    max_size=4,
).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, depth: int = 2) -> Any:
    """A box of any kind around an array, a pytree or another box."""
    names = draw(NAMES)
    arrays = st.builds(lambda n: np.full((2,) * len(names), n, np.float32), st.integers(0, 2))
    value = st.one_of(arrays, st.fixed_dictionaries({"m": arrays, "v": arrays}), st.just(1.0))
    if depth:
        value = st.one_of(value, boxes(depth - 1), st.tuples(boxes(depth - 1), arrays))
    kind = draw(st.sampled_from(["mesh", "logical", "baked", "units", "variable"]))
    if kind == "variable":
        array = draw(arrays)
        return sx.partition.to_boxes(sx.BatchStat(array, axes=names, tag="t"))
    if kind == "units":
        return Units(draw(value), tuple(map(str, names)))
    if kind == "baked":
        return LogicallyPartitioned(draw(value), names, rules={"a": "x"})
    return {"mesh": Partitioned, "logical": LogicallyPartitioned}[kind](draw(value), names)


def trees() -> st.SearchStrategy[Any]:
    """Pytrees with boxes at some places."""
    leaf = st.one_of(boxes(), boxes(), st.just("text"), st.none(), st.just(np.float32(2)))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
        ),
        max_leaves=4,
    )


@given(trees())
def test_law_replacing_with_unboxed_values_is_identity(tree: Any) -> None:
    assert replace_boxed(tree, unbox(tree)) == tree


@given(trees(), st.integers(0, 9))
def test_law_what_was_put_in_comes_out(tree: Any, number: int) -> None:
    values = jax.tree.map(lambda leaf: leaf if isinstance(leaf, str) else number, unbox(tree))
    assert unbox(replace_boxed(tree, values)) == values


def ranks(tree: Any) -> list[int]:
    """The number of names of every box, also of those in boxes."""
    found: list[int] = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, AxisMetadata)):
        if isinstance(leaf, AxisMetadata):
            found += [len(box_names(leaf)), *ranks(leaf.value)]
    return found


@given(trees(), st.data())
def test_law_remove_axis_inverts_add_axis(tree: Any, data: st.DataObject) -> None:
    smallest = min(ranks(tree), default=0)
    index = data.draw(st.integers(-smallest - 1, smallest))
    params = {PARTITION_NAME: data.draw(st.sampled_from(["new", "a", None])), "unit": "s"}
    assert remove_axis(add_axis(tree, index, params), index, params) == tree


@given(NAMES.filter(len), st.data())
def test_law_add_axis_inverts_remove_axis(names: Any, data: st.DataObject) -> None:
    box = Partitioned(1.0, names)
    index = data.draw(st.integers(-len(names), len(names) - 1))
    params = {PARTITION_NAME: names[index]}
    assert box.remove_axis(index, params).add_axis(index, params) == box


@given(boxes(), boxes())
def test_law_equal_boxes_have_equal_hashes_and_structures(first: Any, second: Any) -> None:
    if first == second:
        assert hash(first) == hash(second)
        assert jax.tree.structure(first) == jax.tree.structure(second)


# --- optimizers -----------------------------------------------------------------------------------


def test_states_of_optimizers_carry_the_boxes(mesh: Mesh) -> None:
    params = {"w": Partitioned(jnp.ones((4, 8)), ("data", "model")), "b": jnp.zeros(8)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    new: Any = optax.apply_updates(params, updates)
    assert new["w"].names == ("data", "model")
    place = sx.partition.get_sharding(state, mesh)
    adam = place[1][0]
    assert adam.mu["w"] == adam.nu["w"] == NamedSharding(mesh, P("data", "model"))
    assert adam.mu["b"] == adam.count == NamedSharding(mesh, P())
