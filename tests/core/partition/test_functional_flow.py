# SPDX-License-Identifier: Apache-2.0
"""The functional flow: boxed initializers, sharded initialisation, training steps, scans."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import NoMeshError, PartitionCheckError, PartitionError, TransformError
from shardax.partition import (
    PARTITION_NAME,
    LogicallyPartitioned,
    Partitioned,
    add_axis,
    get_partition_spec,
    get_sharding,
    logical_to_mesh,
    remove_axis,
    unbox,
    with_logical_constraint,
    with_logical_partitioning,
    with_partitioning,
)
from tests.child_processes import environment

RULES = sx.Rules({"batch": "data", "mlp": "model", "embed": None, "layers": None})
DEPTH, EMBED, MLP, BATCH = 3, 8, 16, 4
NORMAL = jax.nn.initializers.uniform(0.3)  # quick to compile
OPTIMIZER = optax.adam(1e-2)
Wrap = Callable[..., Callable[..., Any]]

MESH_NAMES: dict[str, Any] = {"embed": None, "mlp": "model", "layers": None}


def by_mesh_axis(init: Any, names: tuple[str, ...]) -> Any:
    """Boxes with names of mesh axes."""
    return with_partitioning(init, tuple(MESH_NAMES[name] for name in names))


def by_name(init: Any, names: tuple[str, ...]) -> Any:
    """Boxes with logical names."""
    return with_logical_partitioning(init, names)


def layer_name(wrap: Wrap) -> dict[str, Any]:
    """What the dimension of layers is called."""
    return {PARTITION_NAME: None if wrap is by_mesh_axis else "layers"}


def init_params(wrap: Wrap, key: jax.Array, mlp: int = MLP) -> dict[str, Any]:
    """A deep network: its layers stacked, and a bias that is in no box."""

    def layer(key: jax.Array) -> dict[str, Any]:
        up, down = jax.random.split(key)
        return {
            "up": wrap(NORMAL, ("embed", "mlp"))(up, (EMBED, mlp)),
            "down": wrap(NORMAL, ("mlp", "embed"))(down, (mlp, EMBED)),
        }

    layers = jax.vmap(layer)(jax.random.split(key, DEPTH))
    return {"layers": add_axis(layers, 0, layer_name(wrap)), "bias": jnp.zeros(EMBED)}


def init_state(wrap: Wrap, key: jax.Array, mlp: int = MLP) -> dict[str, Any]:
    """Parameters, optimizer state and a step counter."""
    params = init_params(wrap, key, mlp)
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def forward(wrap: Wrap, params: Any, x: jax.Array, constrained: bool = True) -> jax.Array:
    """Runs the layers in a scan."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        layer = unbox(remove_axis(layer, 0, layer_name(wrap)))
        hidden = jnp.tanh(x @ layer["up"])
        if constrained:
            hidden = with_logical_constraint(hidden, ("batch", "mlp"), RULES)
        return x + hidden @ layer["down"], None

    return jax.lax.scan(block, x, params["layers"])[0] + params["bias"][None]


def train_step(wrap: Wrap, state: Any, x: jax.Array, constrained: bool = True) -> Any:
    """One step of Adam on a made-up loss."""

    def loss(params: Any) -> jax.Array:
        return jnp.mean((forward(wrap, params, x, constrained) - jnp.roll(x, 1, 1)) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, value


def batch() -> np.ndarray:
    """One batch."""
    return np.random.default_rng(0).normal(size=(BATCH, EMBED)).astype(np.float32)


def arrays(tree: Any) -> list[np.ndarray]:
    """The values of a tree, on the host."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(first: Any, second: Any) -> None:
    """Asserts that two trees hold the same bits."""
    for one, other in zip(arrays(first), arrays(second), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


# --- initialisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [by_mesh_axis, by_name])
def test_training_state_is_made_in_its_shardings(wrap: Wrap, mesh: Mesh) -> None:
    state = sx.initialise(init_state, wrap, jax.random.key(0), mesh=mesh, rules=RULES)
    up, down, whole = (P(None, None, "model"), P(None, "model", None), P())
    layers = {"down": down, "up": up}
    expected = {
        "params": {"layers": layers, "bias": whole},
        "opt": (
            optax.ScaleByAdamState(
                count=cast(Any, whole),
                mu={"layers": layers, "bias": whole},
                nu={"layers": layers, "bias": whole},
            ),
            optax.EmptyState(),
        ),
        "step": whole,
    }
    plain = unbox(state, apply_constraint=False)
    assert jax.tree.map(lambda x: x.sharding.spec, plain) == expected
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(plain)} == {mesh}
    assert state["params"]["layers"]["up"].names == (
        (None, None, "model") if wrap is by_mesh_axis else ("layers", "embed", "mlp")
    )
    assert jax.tree.structure(state) == jax.tree.structure(
        jax.eval_shape(lambda key: init_state(wrap, key), jax.random.key(0))
    )


@pytest.mark.parametrize("wrap", [by_mesh_axis, by_name])
def test_manual_flow_steps_equal_initialise(wrap: Wrap, auto_mesh: Mesh) -> None:
    key = jax.random.key(0)
    shapes = jax.eval_shape(lambda key: init_state(wrap, key), key)
    specs = get_partition_spec(shapes)
    assert (specs["step"], specs["params"]["bias"]) == (P(), P())
    if wrap is by_name:
        specs = logical_to_mesh(specs, RULES)
    places = jax.tree.map(
        lambda spec: NamedSharding(auto_mesh, spec), specs, is_leaf=lambda item: isinstance(item, P)
    )
    assert places == get_sharding(shapes, auto_mesh, RULES)
    by_hand = jax.jit(lambda key: init_state(wrap, key), out_shardings=places)(key)
    at_once = sx.initialise(init_state, wrap, key, mesh=auto_mesh, rules=RULES)
    assert_equal(by_hand, at_once)
    assert jax.tree.map(lambda x: x.sharding, by_hand) == jax.tree.map(
        lambda x: x.sharding, at_once
    )


def test_vmapped_layers_initialise_and_scan_by_name(auto_mesh: Mesh) -> None:
    metadata = layer_name(by_name)

    def init(key: jax.Array) -> Any:
        make = sx.vmap(
            lambda key: by_name(NORMAL, ("embed", "mlp"))(key, (EMBED, MLP)), metadata=metadata
        )
        return make(jax.random.split(key, DEPTH))

    def run(x: Any, layers: Any) -> jax.Array:
        def block(x: jax.Array, layer: Any) -> jax.Array:
            weight = unbox(layer)
            return jnp.tanh(x @ weight) @ weight.T

        return sx.scan(block, in_axes=(sx.Carry, 0), out_axes=sx.Carry, metadata=metadata)(
            x, layers
        )

    layers = sx.initialise(init, jax.random.key(0), mesh=auto_mesh, rules=RULES)
    assert layers.names == ("layers", "embed", "mlp")
    assert layers.value.sharding == NamedSharding(auto_mesh, P(None, None, "model"))
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        found = jax.jit(run)(batch(), layers)
    expected = jax.jit(lambda x, key: run(x, init(key)))(batch(), jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def test_initialise_puts_only_its_shards_on_a_device(mesh: Mesh) -> None:
    """Over Explicit axes too, where a program would be made of whole arrays if traced so."""

    def init(key: jax.Array) -> Any:
        return with_partitioning(NORMAL, ("data", "model"))(key, (256, 1024))

    box = sx.initialise(init, jax.random.key(0), mesh=mesh)
    assert box.value.sharding == NamedSharding(mesh, P("data", "model"))
    assert {s.data.shape for s in box.value.addressable_shards} == {(128, 256)}


def test_mesh_and_rules_in_scope_apply_inside_initialise(mesh: Mesh) -> None:
    seen = []

    def init(key: jax.Array) -> Any:
        inside = sx.partition.resolve_mesh()
        seen.append((sx.partition.current_rules(), inside and inside.axis_names))
        value = with_logical_constraint(jax.random.normal(key, (BATCH, MLP)), ("batch", "mlp"))
        return LogicallyPartitioned(value, ("batch", "mlp"))

    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        box = sx.initialise(init, jax.random.key(0))
    assert box.value.sharding == NamedSharding(mesh, P("data", "model"))
    assert set(seen) == {(RULES, ("data", "model"))}


def test_non_array_arguments_are_part_of_the_program(auto_mesh: Mesh) -> None:
    def init(key: jax.Array, widths: tuple[int, ...], *, make: Any, scale: np.ndarray) -> Any:
        init = with_partitioning(make, (None, "model"))
        boxes = [init(key, shape) for shape in itertools.pairwise(widths)]
        return jax.tree.map(lambda x: x * scale, boxes)

    boxes = sx.initialise(
        init, jax.random.key(0), (2, 4, 8), make=NORMAL, scale=np.full((1, 1), 2.0), mesh=auto_mesh
    )
    assert [box.value.shape for box in boxes] == [(2, 4), (4, 8)]
    assert {box.value.sharding.spec for box in boxes} == {P(None, "model")}


def test_variables_and_modules_are_initialised_by_their_axes(mesh: Mesh) -> None:
    def init(rngs: sx.Rngs) -> Any:
        linear = sx.nn.Linear(8, 16, rngs=rngs)
        linear.kernel.set_metadata(axes=("embed", "mlp"))
        return {"m": linear, "v": sx.Param(jax.random.normal(rngs(), (16,)), axes=("mlp",))}

    rngs = sx.Rngs(0)
    result = sx.initialise(init, rngs, mesh=mesh, rules=RULES)
    assert result["m"].kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert result["v"].sharding == NamedSharding(mesh, P("model"))
    alone = sx.Rngs(0)
    expected = init(alone)
    assert_equal(sx.state(expected["m"]), sx.state(result["m"]))
    assert_equal(jax.random.key_data(rngs()), jax.random.key_data(alone()))


def test_result_is_a_function_of_its_key(auto_mesh: Mesh) -> None:
    init = with_partitioning(NORMAL, (None, "model"))
    first, again, other = (
        sx.initialise(init, jax.random.key(seed), (4, 8), mesh=auto_mesh) for seed in (0, 0, 1)
    )
    assert first == again and first != other


def test_initialise_finds_all_problems_before_anything_is_compiled(auto_mesh: Mesh) -> None:
    ran = []

    def init(key: jax.Array) -> Any:
        jax.debug.callback(lambda: ran.append(1))
        return init_state(by_name, key, mlp=6)

    with pytest.raises(PartitionCheckError) as caught:
        sx.initialise(init, jax.random.key(0), mesh=auto_mesh, rules=RULES)
    jax.effects_barrier()
    wrong = {finding.path for finding in caught.value.findings}
    assert wrong == {
        (*where, "layers", name)
        for where in (("params",), ("opt", 0, "mu"), ("opt", 0, "nu"))
        for name in ("up", "down")
    }
    assert ran == []


def test_initialise_says_what_it_needs(auto_mesh: Mesh) -> None:
    key = jax.random.key(0)
    with pytest.raises(NoMeshError, match="initialise"):
        sx.initialise(init_params, by_name, key, rules=RULES)
    with pytest.raises(TransformError, match="no devices"):
        sx.initialise(init_params, by_name, key, mesh=AbstractMesh((2,), ("data",)), rules=RULES)
    with pytest.raises(PartitionError, match=r"^\.layers\.(up|down): "):
        sx.initialise(init_params, by_name, key, mesh=auto_mesh)
    with pytest.raises(TransformError, match="inside a program"):
        jax.jit(lambda key: sx.initialise(init_params, by_mesh_axis, key, mesh=auto_mesh))(key)


# --- training -------------------------------------------------------------------------------------


def train(wrap: Wrap, mesh: Mesh, steps: int = 3) -> tuple[list[float], Any]:
    """Trains over a mesh, with shardings of the whole state stated on both sides."""
    state = sx.initialise(init_state, wrap, jax.random.key(0), mesh=mesh, rules=RULES)
    places = get_sharding(state, mesh, RULES)
    step = jax.jit(
        lambda state, x: train_step(wrap, state, x),
        in_shardings=(places, NamedSharding(mesh, P("data"))),
        out_shardings=(places, None),
        donate_argnums=0,
    )
    losses = []
    with jax.set_mesh(mesh), sx.axis_rules(RULES):
        for _ in range(steps):
            state, value = step(state, batch())
            losses.append(float(value))
    return losses, state


def test_training_by_mesh_axis_and_by_name_equals_one_device(auto_mesh: Mesh) -> None:
    alone = jax.jit(lambda key: init_state(by_name, key))(jax.random.key(0))
    step = jax.jit(lambda state, x: train_step(by_name, state, x, constrained=False))
    expected = []
    for _ in range(3):
        alone, value = step(alone, batch())
        expected.append(float(value))
    (first, by_axis), (second, named) = (train(wrap, auto_mesh) for wrap in (by_mesh_axis, by_name))
    assert first == second
    np.testing.assert_allclose(first, expected, rtol=1e-5)
    assert_equal(by_axis, named)
    for one, other in zip(arrays(alone), arrays(named), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    assert int(named["step"]) == 3
    up = named["opt"][0].mu["layers"]["up"]
    assert up.names == ("layers", "embed", "mlp")
    assert up.value.sharding.spec == by_axis["opt"][0].mu["layers"]["up"].value.sharding.spec


def test_shardax_jit_steps_over_boxes_as_well(auto_mesh: Mesh) -> None:
    state = sx.initialise(init_state, by_name, jax.random.key(0), mesh=auto_mesh, rules=RULES)
    places = get_sharding(state, auto_mesh, RULES)
    step = sx.jit(lambda s, x: train_step(by_name, s, x), out_shardings=(places, None))
    plain = jax.jit(lambda s, x: train_step(by_name, s, x), out_shardings=(places, None))
    with jax.set_mesh(auto_mesh), sx.axis_rules(RULES):
        (mine, value), (theirs, other) = step(state, batch()), plain(state, batch())
    assert float(value) == float(other)
    assert_equal(mine, theirs)
    assert mine["params"]["layers"]["up"].names == ("layers", "embed", "mlp")


def test_unboxed_gradients_are_laid_out_as_their_parameters(auto_mesh: Mesh) -> None:
    box = Partitioned(np.ones((8, 16), np.float32), ("data", "model"))
    with jax.set_mesh(auto_mesh):
        grads = jax.jit(jax.grad(lambda box: (unbox(box) ** 2).sum()))(box)
    assert grads.names == box.names
    assert grads.value.sharding.is_equivalent_to(NamedSharding(auto_mesh, P("data", "model")), 2)


# --- laws -----------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, tuple[Any, ...], tuple[int, ...], sx.Rules]:
    """A mesh of 1 to 8 devices, names of an array, a shape that fits, and rules."""
    sizes = draw(st.sampled_from([(1,), (2,), (8,), (2, 2), (2, 4), (1, 3), (2, 2, 2), (2, 1, 4)]))
    axes = ("x", "y", "z")[: len(sizes)]
    kinds = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in axes)
    mesh = jax.make_mesh(
        sizes, axes, axis_types=kinds, devices=jax.devices()[: int(np.prod(sizes))]
    )
    names = tuple(draw(st.permutations(["a", "b", None]))[: draw(st.integers(1, 3))])
    target = st.one_of(st.none(), st.sampled_from(axes), st.just(axes))
    rules = sx.Rules(draw(st.lists(st.tuples(st.sampled_from(["a", "b"]), target), min_size=1)))
    return mesh, names, (24,) * len(names), rules


@settings(max_examples=10)
@given(layouts())
def test_law_initial_values_are_mesh_independent(layout: Any) -> None:
    mesh, names, shape, rules = layout

    def init(key: jax.Array) -> Any:
        return with_logical_partitioning(jax.nn.initializers.uniform(), names)(key, shape)

    box = sx.initialise(init, jax.random.key(3), mesh=mesh, rules=rules)
    assert box == init(jax.random.key(3))
    assert box.value.sharding == NamedSharding(mesh, rules.spec(names))


def test_process_that_initialised_ends_without_a_word() -> None:
    """Programs are kept by weak references, of which none may act while the modules go."""
    program = """
import jax
import shardax as sx

mesh = jax.make_mesh((1,), ("model",))

def make(key):
    normal = jax.nn.initializers.normal()
    return sx.partition.with_partitioning(normal, (None, "model"))(key, (2, 3))

for _ in range(2):
    sx.initialise(make, jax.random.key(0), mesh=mesh)
    sx.initialise(lambda key, made: made(key), jax.random.key(0), make, mesh=mesh)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
