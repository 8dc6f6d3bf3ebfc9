# SPDX-License-Identifier: Apache-2.0
"""Boxes beside those of Flax: the same where Flax is right, and what it should be where not.

Numbers of cases are those of the project's notes on defects found in Flax 0.12.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax.core import meta
from flax.linen import spmd
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import partition as part
from shardax.partition import PARTITION_NAME

NAMES = st.permutations(["a", "b", "c", None, None]).flatmap(
    lambda names: st.integers(0, 4).map(lambda n: tuple(names[:n]))
)
TARGETS = st.one_of(st.sampled_from(["x", "y", None]), st.just(("x", "y")))
RULES = st.lists(st.tuples(st.sampled_from("abc"), TARGETS), min_size=1, max_size=5).map(tuple)


def both(names: tuple[Any, ...], value: Any = 1.0) -> tuple[Any, Any]:
    """The same box of shardax and of Flax."""
    return part.Partitioned(value, names), meta.Partitioned(value, names)


# --- where both agree -----------------------------------------------------------------------------


@given(NAMES, st.data())
def test_add_and_remove_axis_agree_with_flax(names: Any, data: st.DataObject) -> None:
    mine, flaxs = both(names)
    index = data.draw(st.integers(0, len(names)))
    params = {PARTITION_NAME: "layers"}
    mine, flaxs = mine.add_axis(index, params), flaxs.add_axis(index, params)
    assert mine.names == flaxs.names
    assert mine.remove_axis(index, params).names == flaxs.remove_axis(index, params).names


@given(NAMES, RULES)
def test_specs_and_logical_specs_are_the_same(names: Any, rules: Any) -> None:
    tree = {"m": 0, "l": 1, "array": np.ones(2), "step": 3, "none": None}
    mine = {**tree, "m": both(names)[0], "l": part.LogicallyPartitioned(1.0, names)}
    flaxs = {**tree, "m": both(names)[1], "l": linen.LogicallyPartitioned(1.0, names)}
    specs = part.get_partition_spec(mine)
    assert specs == meta.get_partition_spec(flaxs)
    assert part.logical_to_mesh(specs, rules) == spmd.logical_to_mesh(specs, rules)
    with part.logical_axis_rules(rules), linen.logical_axis_rules(rules):
        assert part.logical_to_mesh(specs) == spmd.logical_to_mesh(specs)


def test_names_of_the_keys_are_the_same() -> None:
    assert PARTITION_NAME == meta.PARTITION_NAME


def test_initializers_and_unboxing_give_the_same_arrays(auto_mesh: Mesh) -> None:
    init = jax.nn.initializers.normal()
    rules = (("embed", "data"), ("mlp", "model"))

    def make(library: Any, logical: Any) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0))
        mesh_names = library.with_partitioning(init, ("data", None))
        return {
            "m": mesh_names(keys[0], (4, 8), dtype=jnp.bfloat16),
            "l": logical(init, ("embed", "mlp"), rules=rules)(keys[1], (4, 8)),
        }

    with jax.set_mesh(auto_mesh):
        mine = jax.jit(lambda: part.unbox(make(part, part.with_logical_partitioning)))()
        flaxs = jax.jit(lambda: meta.unbox(make(meta, linen.with_logical_partitioning)))()
    for name, spec in (("m", P("data")), ("l", P("data", "model"))):
        assert mine[name].dtype == flaxs[name].dtype
        assert np.array_equal(np.asarray(mine[name]), np.asarray(flaxs[name]))
        assert mine[name].sharding.is_equivalent_to(flaxs[name].sharding, 2)
        assert mine[name].sharding.is_equivalent_to(jax.NamedSharding(auto_mesh, spec), 2)


def test_shardings_of_an_initializer_are_the_same(auto_mesh: Mesh) -> None:
    def make(library: Any) -> Any:
        init = library.with_partitioning(jax.nn.initializers.zeros, ("data", "model"))
        return {"w": init(jax.random.key(0), (4, 8)), "step": jnp.zeros((), jnp.int32)}

    mine = part.get_sharding(jax.eval_shape(lambda: make(part)), auto_mesh)
    flaxs = meta.get_sharding(jax.eval_shape(lambda: make(meta)), auto_mesh)
    assert mine == flaxs


# --- where Flax goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_case_4_negative_axis_is_named_in_place(axis: int) -> None:
    mine, flaxs = both(("a", "b"), jnp.ones((2, 3)))
    params = {PARTITION_NAME: "L"}
    stacked = jax.vmap(lambda _: mine, out_axes=axis)(jnp.arange(5))
    named = part.add_axis(stacked, axis, params)
    assert dict(zip(named.names, named.value.shape, strict=True)) == {"a": 2, "b": 3, "L": 5}
    assert part.remove_axis(named, axis, params) == stacked
    if axis != -3:
        assert flaxs.add_axis(axis, params).names != named.names


def test_case_14_conversion_to_variable_leaves_box_unchanged() -> None:
    box = part.LogicallyPartitioned(jnp.ones(2), ("a",), rules={"a": "x"})
    before = part.LogicallyPartitioned(box.value, ("a",), rules={"a": "x"})
    variable = part.to_variables(box)
    assert box == before and part.to_boxes(variable) == box
    flaxs = linen.LogicallyPartitioned(jnp.ones(2), ("a",), rules=(("a", "x"),))
    flaxs.to_nnx_metadata()
    assert not hasattr(flaxs, "names")


def test_case_15_wrong_name_or_index_is_refused() -> None:
    mine, flaxs = both(("in", "out"))
    with pytest.raises(AssertionError):
        flaxs.remove_axis(0, {PARTITION_NAME: "L"})
    with pytest.raises(sx.errors.PartitionError, match="'in' stands there"):
        mine.remove_axis(0, {PARTITION_NAME: "L"})
    with pytest.raises(sx.errors.PartitionError, match="at -4"):
        mine.add_axis(-4, {PARTITION_NAME: "L"})
    assert flaxs.add_axis(-4, {PARTITION_NAME: "L"}).names == ("L", "in", "out")


def test_case_16_explicit_meshes(explicit_mesh: Mesh) -> None:
    mine, flaxs = both(("data", "model"), jnp.ones((4, 8)))
    with jax.set_mesh(explicit_mesh):
        with pytest.raises(AssertionError):
            jax.jit(meta.unbox)(flaxs)
        assert jax.jit(part.unbox)(mine).sharding.spec == P("data", "model")


def test_case_17_the_older_with_statement_is_seen(auto_mesh: Mesh) -> None:
    x, rules = jnp.ones((4, 8)), (("a", "data"),)
    with pytest.warns(DeprecationWarning, match="set_mesh"):
        auto_mesh.__enter__()
    try:
        mine = part.with_logical_constraint(x, ("a", None), rules)
        flaxs = spmd.with_logical_constraint(x, ("a", None), rules)
    finally:
        auto_mesh.__exit__(None, None, None)
    assert mine.sharding.spec == P("data", None) and flaxs is x


def test_case_19_keywords_of_the_initializer_pass_through() -> None:
    for wrap in (part.with_partitioning, part.with_logical_partitioning):
        init = wrap(jax.nn.initializers.zeros, (None, "a"))
        assert init(jax.random.key(0), shape=(2, 3), dtype=jnp.int32).value.dtype == jnp.int32


def test_case_22_boxed_variables_keep_axes_under_vmap() -> None:
    boxes = part.to_boxes({"w": sx.Param(jnp.ones((5, 2)), axes=("embed", "mlp"), tag="t")})
    stacked = jax.vmap(lambda _: boxes, out_axes=1)(jnp.arange(3))
    variable = part.to_variables(part.add_axis(stacked, 1, {PARTITION_NAME: "layers"}))["w"]
    assert variable.axes == ("embed", "layers", "mlp") and variable.shape == (5, 3, 2)
    assert dict(variable.metadata) == {"tag": "t"}


def test_case_23_comparing_boxes_of_arrays() -> None:
    mine, flaxs = both(("a",), jnp.ones(2))
    again, flax_again = both(("a",), jnp.ones(2))
    assert mine == again and hash(mine) == hash(again)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(flaxs == flax_again)
