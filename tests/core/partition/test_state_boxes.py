# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose states have other shapes than the boxed parameters they are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError
from shardax.partition import (
    LogicallyPartitioned,
    Partitioned,
    get_partition_spec,
    get_sharding,
    unbox,
    with_logical_partitioning,
    with_partitioning,
)

RULES = sx.Rules({"layers": None, "embed": "data", "mlp": "model"})
UNIFORM = jax.nn.initializers.uniform(0.3)


def by_mesh_axis(names: tuple[str, ...]) -> Any:
    """An initializer in a box of mesh axes."""
    return with_partitioning(UNIFORM, RULES.spec(names))


def by_name(names: tuple[str, ...]) -> Any:
    """An initializer in a box of logical names."""
    return with_logical_partitioning(UNIFORM, names)


def init_params(wrap: Any, key: jax.Array) -> dict[str, Any]:
    """A layer, one whose sizes are alike, stacked layers, and a bias."""
    keys = jax.random.split(key, 4)
    return {
        "layer": {
            "up": wrap(("embed", "mlp"))(keys[0], (8, 16)),
            "square": wrap(("mlp", "embed"))(keys[1], (8, 8)),
        },
        "stack": wrap(("layers", "embed", "mlp"))(keys[2], (3, 8, 16)),
        "bias": wrap(("mlp",))(keys[3], (16,)),
    }


def init_state(wrap: Any, optimizer: Any, key: jax.Array) -> dict[str, Any]:
    """Parameters and the optimizer's state."""
    params = init_params(wrap, key)
    return {"params": params, "opt": optimizer.init(params)}


def factored() -> Any:
    """The factored second moments of Adafactor, at small sizes."""
    return optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-0.1))


def adafactor() -> Any:
    """The whole of Adafactor, with momentum."""
    return optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)


def loss(params: Any, x: jax.Array) -> jax.Array:
    """A made-up loss over all parameters."""
    params = unbox(params)
    hidden = jnp.tanh((x @ params["layer"]["square"]) @ params["layer"]["up"])
    hidden = hidden + params["bias"][None]
    for weight in params["stack"]:
        hidden = hidden + jnp.tanh(x @ weight)
    return jnp.mean(hidden**2)


def train_step(optimizer: Any, state: Any, x: jax.Array) -> Any:
    """One step."""
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def specs_of(tree: Any) -> dict[str, Any]:
    """The real spec of each array, by path."""
    leaves = jax.tree.leaves_with_path(unbox(tree, apply_constraint=False))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.sharding.spec
        for path, leaf in leaves
    }


WHOLE = P()
FACTORED = {
    "0.count": WHOLE,
    "0.v_row.layer.up": P("data"),  # shape (8,) of (8, 16)
    "0.v_col.layer.up": P("model"),
    "0.v.layer.up": WHOLE,  # one number: nothing is kept
    "0.v_row.layer.square": WHOLE,  # shape (8,) of (8, 8): which dimension, nobody knows
    "0.v_col.layer.square": WHOLE,
    "0.v.layer.square": WHOLE,
    "0.v_row.stack": P(None, "data"),
    "0.v_col.stack": P(None, "model"),
    "0.v.stack": WHOLE,
    "0.v_row.bias": WHOLE,
    "0.v_col.bias": WHOLE,
    "0.v.bias": P("model"),
}
PARAMS = {
    "layer.up": P("data", "model"),
    "layer.square": P("model", "data"),
    "stack": P(None, "data", "model"),
    "bias": P("model"),
}


@pytest.mark.parametrize("wrap", [by_mesh_axis, by_name])
def test_states_of_other_shapes_follow_their_dimensions(wrap: Any, mesh: Mesh) -> None:
    optimizer = factored()
    state = sx.initialise(init_state, wrap, optimizer, jax.random.key(0), mesh=mesh, rules=RULES)
    assert specs_of(state["opt"]) == FACTORED
    assert specs_of(state["params"]) == PARAMS
    assert sx.shardings(state, mesh, RULES) == get_sharding(state, mesh, RULES)
    specs = sx.partition_specs(state, RULES)["opt"][0]
    assert specs.v_col["stack"] == P(None, "model") and specs.v_row["layer"]["square"] == P()
    again = sx.shard(state, mesh, RULES)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True))


@pytest.mark.parametrize(("wrap", "make"), [(by_mesh_axis, factored), (by_name, adafactor)])
def test_step_over_mesh_equals_single_device_step(wrap: Any, make: Any, auto_mesh: Mesh) -> None:
    optimizer, key = make(), jax.random.key(0)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    state = sx.initialise(init_state, wrap, optimizer, key, mesh=auto_mesh, rules=RULES)
    places = get_sharding(state, auto_mesh, RULES)
    step = jax.jit(
        lambda state, x: train_step(optimizer, state, x),
        in_shardings=(places, None),
        out_shardings=(places, None),
        donate_argnums=0,
    )
    before = specs_of(state)
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        after, value = step(state, x)
    assert specs_of(after) == before
    alone, expected = jax.jit(
        lambda key, x: train_step(optimizer, init_state(wrap, optimizer, key), x)
    )(key, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_check_says_what_became_of_each(auto_mesh: Mesh) -> None:
    state = jax.eval_shape(lambda key: init_state(by_name, factored(), key), jax.random.key(0))
    found = {f.path[1:]: (f.severity, f.code) for f in sx.check(state, auto_mesh, RULES)}
    info, unclear = ("info", "reduced-state"), ("warning", "reduced-state")
    assert found == {
        **{(0, moment, "layer", "up"): info for moment in ("v_row", "v_col", "v")},
        **{(0, moment, "stack"): info for moment in ("v_row", "v_col", "v")},
        **{(0, moment, "bias"): info for moment in ("v_row", "v_col")},
        **{(0, moment, "layer", "square"): unclear for moment in ("v_row", "v_col")},
        (0, "v", "layer", "square"): info,
    }


def test_logical_specs_of_such_states_fit_them_too() -> None:
    state = jax.eval_shape(lambda key: init_state(by_name, factored(), key), jax.random.key(0))
    specs = get_partition_spec(state)["opt"][0]
    assert specs.v_row["layer"]["up"] == P("embed")
    assert specs.v_row["layer"]["square"] == P()
    assert specs.v_col["stack"] == P("layers", "mlp")


def test_history_has_its_new_dimension_whole(auto_mesh: Mesh) -> None:
    params = {"w": Partitioned(jnp.ones((8, 16)), ("data", "model"))}
    history = jax.tree.map(lambda x: jnp.zeros((5, *x.shape)), params)
    many = jax.tree.map(lambda x: [jnp.zeros(n) for n in x.shape], params)
    specs = sx.partition_specs({"params": params, "opt": {"h": history, "m": many}})
    assert specs["opt"] == {"h": {"w": P(None, "data", "model")}, "m": {"w": P()}}
    assert sx.shard((params, [history]), auto_mesh)[1][0]["w"].names == ("data", "model")


def test_state_without_its_parameters_is_refused_by_path(auto_mesh: Mesh) -> None:
    state = jax.eval_shape(lambda key: init_state(by_name, factored(), key), jax.random.key(0))
    for function in (
        lambda: get_sharding(state["opt"], auto_mesh, RULES),
        lambda: sx.shardings(state["opt"], auto_mesh, RULES),
        lambda: get_partition_spec(state["opt"]),
    ):
        with pytest.raises(PartitionCheckError) as caught:
            function()
        paths = {finding.path for finding in caught.value.findings}
        assert (0, "v_row", "layer", "up") in paths and (0, "v", "bias") not in paths
        assert "(params, state)" in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"w": (8, 16)}, "b": {"w": (7, 16)}},  # two parameters, one of them odd
        {"w": (8, 16), "block": {"w": (6, 3)}},
        {"w": (8,), "block": {"w": (3,)}},
        {"params": {"w": (7, 16)}, "opt": {"mu": {"w": (7, 16)}}},
        {"w": (8, 16), "block": {"other": (6, 3), "w": (7, 16)}},
    ],
)
def test_array_not_derived_from_parameter_is_refused(tree: Any, auto_mesh: Mesh) -> None:
    boxes = jax.tree.map(
        lambda shape: LogicallyPartitioned(jnp.ones(shape), ("embed", "mlp")[: len(shape)]),
        tree,
        is_leaf=lambda item: isinstance(item, tuple),
    )
    codes = {finding.code for finding in sx.check(boxes, auto_mesh, RULES)}
    assert "indivisible" in codes and "reduced-state" not in codes
    with pytest.raises(PartitionCheckError):
        sx.shard(boxes, auto_mesh, RULES)


def test_top_level_parameter_owns_matching_sizes() -> None:
    def boxes(*shape: int) -> Any:
        box = Partitioned(jnp.ones((8, 16)), ("data", "model"))
        return box, {"v_row": box.replace_boxed(jnp.ones(shape))}

    assert sx.partition_specs(boxes(8))[1] == {"v_row": P("data")}
    assert sx.partition_specs(boxes(1))[1] == {"v_row": P()}
    with pytest.raises(PartitionCheckError, match=r"\[1\]\.v_row: 2 axis names .* shape \(5,\)"):
        sx.partition_specs(boxes(5))


def test_equal_names_with_different_shapes_own_nothing() -> None:
    def box(*shape: int) -> Any:
        return Partitioned(jnp.ones(shape), ("data", "model"))

    params = {"a": {"w": box(8, 16)}, "b": {"w": box(4, 16)}}
    clear = {"opt": {"mu": {"a": {"w": box(8)}, "b": {"w": box(4)}}}}
    assert sx.partition_specs({**params, **clear})["opt"] == {
        "mu": {"a": {"w": P("data")}, "b": {"w": P("data")}}
    }
    unclear = {"opt": {"mu": {"c": {"w": box(8)}}}}
    with pytest.raises(PartitionCheckError, match=r"\.opt\.mu\.c\.w: 2 axis names"):
        sx.partition_specs({**params, **unclear})
