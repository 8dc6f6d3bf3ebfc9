# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are shared by their jaxpr, with constants as inputs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx

X = jnp.arange(4.0)
TRUE = jnp.array(True)
ONE_DEVICE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


class Layer(sx.Module):
    """Multiplies, and counts its calls."""

    def __init__(self) -> None:
        self.scale = sx.Param(jnp.float32(2))
        self.calls = sx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * self.scale


def rule(function: Any) -> Any:
    product = sx.custom_vjp(function)
    product.defvjp(lambda x: (function(x), None), lambda kept, given: (given,))
    return product


# Each calls a transform of a function that is made anew, on ``X``.
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jit": lambda f: sx.jit(f)(X),
    "cond": lambda f: sx.cond(TRUE, f, lambda x: x, X),
    "switch": lambda f: sx.switch(1, [lambda x: x, f], X),
    "fori_loop": lambda f: sx.fori_loop(0, 1, lambda i, x: f(x), X),
    "while_loop": lambda f: sx.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, X)
    )[1],
    "bounded_while_loop": lambda f: sx.bounded_while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, X), max_steps=3
    ).final[1],
    "scan": lambda f: sx.scan(lambda x, _: (f(x), None), length=1)(X, None)[0],
    "remat": lambda f: sx.remat(f)(X),
    "custom_vjp": lambda f: rule(f)(X),
    "shard_map": lambda f: sx.shard_map(
        f, mesh=ONE_DEVICE, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )(X),
    "cond of vmap": lambda f: sx.cond(TRUE, sx.vmap(f), lambda x: x, X),
    "vmap": lambda f: sx.vmap(f)(X),
    "grad": lambda f: sx.grad(lambda x: f(x).sum())(X) * X,
    "jit, a dict": lambda f: sx.jit(lambda tree: {"y": f(tree["x"])})({"x": X})["y"],
    "jit, donated": lambda f: sx.jit(f, donate_argnums=0)(X * 1),
    "jit, shardings": lambda f: sx.jit(
        f,
        in_shardings=NamedSharding(ONE_DEVICE, PartitionSpec()),
        out_shardings=NamedSharding(ONE_DEVICE, PartitionSpec()),
    )(X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functions_made_anew_compile_nothing_after_the_first(
    name: str, compilations: Callable[[], int]
) -> None:
    transform = TRANSFORMS[name]
    arrays = [jnp.float32(number) for number in range(20)]
    expected = [np.asarray(array * X) for array in arrays]
    transform(lambda x, array=arrays[0]: array * x)
    compilations()

    results = [transform(lambda x, array=array: array * x) for array in arrays]

    assert compilations() == 0
    np.testing.assert_array_equal(results, expected)  # each with its own constant


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functions_made_anew_read_settings_anew(name: str) -> None:
    settings = {"scale": 0.0}
    results = []
    for settings["scale"] in (1.0, 5.0, 1.0):
        results.append(TRANSFORMS[name](lambda x: settings["scale"] * x))
    np.testing.assert_array_equal(results, [X, 5 * X, X])


def test_stack_made_anew_compiles_nothing(compilations: Callable[[], int]) -> None:
    def make() -> Any:
        return sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=rngs), 2)

    rngs = sx.Rngs(0)
    stacks = [make() for _ in range(4)]
    expected = [stack[1](stack[0](X)) for stack in stacks]
    stacks[0](X)
    compilations()
    results = [stack(X) for stack in stacks]
    assert compilations() == 0
    np.testing.assert_allclose(results, expected, rtol=1e-6)


# --- what tells programs apart --------------------------------------------------------------------


def anew(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a compiled copy of a function."""
    return sx.jit(lambda *args: function(*args))(*args)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x * 1.0, lambda x: x * 2.0),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x + jnp.float32(1), lambda x: x + jnp.bfloat16(1)),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdims=True)),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: jnp.maximum(x, x[::-1]), lambda x: jnp.maximum(x[::-1], x * 1)),
        (lambda x: jnp.where(x > 1, x, jnp.nan), lambda x: jnp.where(x > 1, x, jnp.inf)),
        (lambda x: {"a": x}, lambda x: {"b": x}),
        (lambda x: [x], lambda x: (x,)),
        (lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, None, length=2)[1],) * 2,
        (
            lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
        ),
    ],
)
def test_programs_of_other_jaxprs_are_others(first: Any, second: Any) -> None:
    for function in (first, second, first, second):
        result, expected = anew(function, X), jax.jit(function)(X)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for leaf, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert (leaf.dtype, leaf.weak_type) == (other.dtype, other.weak_type)
            assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def test_structures_of_one_shape_are_told_apart() -> None:
    def function(tree: Any) -> Any:
        return tree, 1.0

    compiled = sx.jit(function)
    for tree in (None, [], {}, (), [None], {"a": None}, None, []):
        assert jax.tree.structure(compiled(tree)) == jax.tree.structure((tree, 1.0))


def test_settings_of_jax_are_told_apart() -> None:
    @sx.jit
    def function(x: Any) -> Any:
        return x @ x, x + 1.0

    x = jnp.eye(3)
    first = function.lower(x).as_text()
    assert function(x)[0].tolist() == x.tolist()
    with jax.default_matmul_precision("float32"):
        assert function.lower(x).as_text() != first
        assert function(x)[0].tolist() == x.tolist()
    with jax.enable_x64(True):
        assert function(np.eye(3))[0].dtype == np.float64
    assert function(np.eye(3))[0].dtype == np.float32


def test_cleared_caches_of_jax_are_no_trouble() -> None:
    scale = {"now": 2.0}

    @sx.jit
    def function(x: Any) -> Any:
        return x * scale["now"]

    assert function(X).tolist() == (2 * X).tolist()
    jax.clear_caches()
    scale["now"] = 3.0
    assert function(X).tolist() == (3 * X).tolist()  # traced anew, as jax.jit would


def test_shapes_in_turn_are_each_traced_once() -> None:
    traces = []

    @sx.jit
    def function(layer: Layer, x: Any) -> Any:
        traces.append(x.shape)
        return layer(x)

    layer = Layer()
    for _ in range(3):
        for size in (2, 3, 2):
            assert function(layer, jnp.ones(size)).tolist() == [2.0] * size
    assert traces == [(2,), (3,)]
    assert int(layer.calls) == 9


def test_variables_of_other_types_are_traced_anew() -> None:
    traces = []
    variable = sx.Variable(jnp.ones(2))

    @sx.jit
    def function(v: Any, x: Any) -> Any:
        traces.append(v.shape)
        return v.sum() * x

    for _ in range(3):
        for size in (2, 3):
            variable.value = jnp.ones(size)
            assert float(function(variable, 1.0)) == size
    assert traces == [(2,), (3,)]


# --- constants ------------------------------------------------------------------------------------


def test_numpy_constant_is_as_old_as_the_trace() -> None:
    table = np.ones(4, np.float32)
    compiled = [jit(lambda x: x * table) for jit in (sx.jit, jax.jit)]
    for function in compiled:
        function(X)
    table[:] = 7.0
    assert compiled[0](X).tolist() == compiled[1](X).tolist() == X.tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: jax.random.key(seed),
        lambda seed: jnp.bfloat16(seed),
        lambda seed: jnp.full((300, 300), seed),
        lambda seed: jnp.zeros((0,)) + seed,
        lambda seed: np.full(5, seed),
        lambda seed: jax.device_put(jnp.full(8, seed), jax.devices()[0]),
    ],
    ids=["key", "bfloat16", "large", "empty", "NumPy", "committed"],
)
def test_constants_of_any_kind_are_inputs(make: Any, compilations: Callable[[], int]) -> None:
    def total(constant: Any) -> Any:
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.uniform(constant, (2,))
        return jnp.sum(constant)

    constants = [make(seed) for seed in (1, 2, 3)]
    expected = [np.asarray(jax.jit(total)(constant)) for constant in constants]
    sx.jit(lambda x: x + total(constants[0]))(1.0)
    compilations()
    results = [sx.jit(lambda x, c=constant: x + total(c))(0.0) for constant in constants]
    assert compilations() == 0
    np.testing.assert_array_equal(np.asarray(results, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("name", ["jit", "fori_loop", "cond", "scan", "remat"])
@pytest.mark.parametrize("constant", [np.tri(4, dtype=bool), jnp.tri(4, dtype=bool)])
def test_constants_may_be_read_within_auto_axes(name: str, constant: Any, explicit_mesh: Mesh):
    layout = NamedSharding(explicit_mesh, PartitionSpec())

    def lower_triangle(x: Any) -> Any:
        masked = jax.sharding.auto_axes(
            lambda x: jnp.where((x > 0) & constant, x, 0.0), out_sharding=layout
        )
        return masked(jnp.outer(x, x))[3]

    expected = lower_triangle(X)
    with jax.set_mesh(explicit_mesh):
        assert TRANSFORMS[name](lambda x: lower_triangle(x)).tolist() == expected.tolist()


# --- what belongs to one function -----------------------------------------------------------------


def test_constant_is_kept_though_its_array_is_donated() -> None:
    array = jnp.arange(4.0)
    product = sx.jit(lambda x: x * array)
    product(X)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)

    assert array.is_deleted()
    np.testing.assert_array_equal(product(X), X * X)


def test_donated_argument_may_be_a_constant_too() -> None:
    model = Layer()
    anchor = model.scale.value

    @functools.partial(sx.jit, donate_argnums=0)
    def step(model: Any) -> None:
        model.scale.value = model.scale.value + (model.scale.value - anchor) + 1

    for _ in range(3):
        step(model)
    assert float(model.scale) == 9


@pytest.mark.parametrize(
    "constant",
    [jnp.float32(3), jnp.asarray(3.0), jnp.bfloat16(3), jax.random.key(3)],
    ids=["float32", "weak", "bfloat16", "key"],
)
@pytest.mark.parametrize(("device", "of_argument"), [(0, None), (5, None), (3, 0), (3, 3)])
def test_committed_constant_is_wherever_the_program_runs(
    constant: Any, device: int, of_argument: int | None
) -> None:
    constant = jax.device_put(constant, jax.devices()[device])
    x = X if of_argument is None else jax.device_put(X, jax.devices()[of_argument])

    def function(x: Any) -> Any:
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            return x + jax.random.uniform(constant)
        return x + constant

    ours, expected = sx.jit(function)(x), jax.jit(function)(x)
    np.testing.assert_array_equal(ours, expected)
    assert (ours.aval, ours.devices()) == (expected.aval, expected.devices())


def test_derivative_rules_are_those_of_the_function() -> None:
    def make(slope: float) -> Any:
        @jax.custom_vjp
        def function(x: Any) -> Any:
            return x * 2

        function.defvjp(lambda x: (x * 2, None), lambda kept, given: (given * slope,))
        return sx.jit(lambda x: function(x))

    functions = [make(slope) for slope in (3.0, 5.0)]
    assert [float(function(1.0)) for function in functions] == [2.0, 2.0]  # one program
    assert [float(jax.grad(function)(1.0)) for function in functions] == [3.0, 5.0]
    assert [float(sx.grad(function)(1.0)) for function in functions] == [3.0, 5.0]


def test_callbacks_are_those_of_the_function() -> None:
    def make(number: float) -> Any:
        def on_host(x: Any) -> Any:
            return np.float32(number) + x

        return sx.jit(lambda x: jax.pure_callback(on_host, jax.ShapeDtypeStruct((), x.dtype), x))

    assert [float(make(number)(jnp.float32(1))) for number in (1.0, 2.0, 1.0)] == [2.0, 3.0, 2.0]


def test_inner_jit_with_an_array_is_its_own() -> None:
    def make(array: Any) -> Any:
        inner = jax.jit(lambda x: x * array)
        return sx.jit(lambda x: inner(x) + 1)

    results = [make(jnp.float32(number))(X) for number in (2, 3)]
    np.testing.assert_array_equal(results, [2 * X + 1, 3 * X + 1])


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_programs_keep_nothing_of_functions_alive() -> None:
    references: list[weakref.ref[Any]] = []

    def call() -> None:
        layer, array = Layer(), jnp.arange(4.0) + 1

        @jax.custom_vjp
        def ruled(x: Any) -> Any:
            return x

        ruled.defvjp(lambda x: (x, None), lambda kept, given: (given * array,))

        def function(x: Any) -> Any:
            return ruled(layer(x) * array)

        sx.jit(function)(X)
        sx.cond(TRUE, function, lambda x: x, X)
        sx.jit(functools.partial(lambda layer, x: layer(x), layer))(X)
        references.extend(map(weakref.ref, (layer, array, function)))

    call()
    for _ in range(3):
        gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.usefixtures("collecting_only_what_is_new")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_programs_free_the_functions_they_were_traced_from(name: str) -> None:
    references: list[weakref.ref[Any]] = []

    def call() -> None:
        def double(x: Any) -> Any:
            return 2 * x

        references.append(weakref.ref(double))
        TRANSFORMS[name](double)

    for _ in range(3):
        call()
    gc.collect()

    assert [reference() for reference in references] == [None] * 3


def test_jit_under_an_outer_mesh_shares_nothing_of_another() -> None:
    def function(x: Any) -> Any:
        return x * jax.sharding.get_abstract_mesh().size

    meshes = [Mesh(np.array(jax.devices()[:size]), ("data",)) for size in (1, 2)]
    results = []
    for mesh in meshes:
        with jax.set_mesh(mesh):
            results.append(float(anew(function, jnp.float32(1))))
    assert results == [1.0, 2.0]
