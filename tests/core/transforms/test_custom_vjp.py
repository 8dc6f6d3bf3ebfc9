# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: where rules run, what they get and what they give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import shardax as sx
from shardax.errors import TransformError
from tests.core.transforms.examples import Box, Mask, Scale, Tied
from tests.core.transforms.rules import Sine, X, flat, tenfold
from tests.values import with_values

XS = np.array([[1.0], [2.0], [3.0]], np.float32) * np.asarray(X)


def _lanes() -> Sine:
    """Three models with equal values, stacked."""
    model = Sine()
    for _, variable in sx.iter_variables(model):
        value = np.asarray(variable.value)
        variable.value = jnp.asarray(np.broadcast_to(value, (3, *value.shape)))
    return model


def _plain(model: Sine, x: Any) -> Any:
    return model(x)


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the function on a model two times; the second call sees what the first wrote."""
    return lambda model, x: (function(model, x) * function(model, x)).sum()


def _expected(model: Sine, loss: Callable[..., Any], *args: Any) -> Any:
    """Ten times the true gradient, and the model afterwards."""
    gradient = sx.grad(loss)(model, *args)
    return jax.tree.map(lambda g: 10 * g, gradient), model


def _assert_like(found: sx.State, model: Sine, expected: sx.State, other: Sine) -> None:
    assert list(found.flat()) == list(expected.flat()) == [("factor",)]
    np.testing.assert_allclose(found["factor"], expected["factor"], rtol=1e-5)
    assert int(model.calls) == int(other.calls) > 0
    np.testing.assert_allclose(model.mean.value, other.mean.value, rtol=1e-5)


@functools.cache
def _two_calls() -> list[Any]:
    """After each of two calls: ten times the true gradient, the mean, and the number of calls."""
    factor, x, mean, rows = np.array([1.0, 2.0]), np.asarray(X), np.zeros(2), []
    for call in (1, 2):
        for _ in range(2):  # the function is called twice in one loss
            mean = 0.5 * mean + 0.5 * factor * x
        rows.append((10 * 2 * np.sin(factor * x) * np.cos(factor * x) * x, mean, 2 * call))
    return rows


# --- where rules run ---


@pytest.mark.parametrize(
    "lift",
    [
        lambda loss: sx.grad(loss),
        lambda loss: sx.jit(sx.grad(loss)),
        lambda loss: sx.grad(sx.jit(loss)),
        lambda loss: sx.jit(sx.grad(sx.jit(sx.remat(loss)))),
        lambda loss: sx.grad(sx.remat(sx.jit(loss))),
        lambda loss: sx.grad(lambda m, x: sx.cond(x.sum() > 0, loss, loss, m, x)),
        lambda loss: sx.grad(lambda m, x: sx.switch(1, [loss, sx.jit(loss)], m, x)),
        lambda loss: lambda m, x: sx.vjp(loss, m, x)[1](1.0)[0],
    ],
    ids=["grad", "jit grad", "grad jit", "remat", "remat jit", "cond", "switch", "vjp"],
)
def test_rule_is_used_and_state_carried_under(lift: Any) -> None:
    model, run = Sine(), lift(_twice(tenfold))
    for gradient, mean, calls in _two_calls():
        found = run(model, X)
        assert list(found.flat()) == [("factor",)]
        np.testing.assert_allclose(found["factor"], gradient, rtol=1e-5)
        np.testing.assert_allclose(model.mean.value, mean, rtol=1e-5)
        assert int(model.calls) == calls


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["", "jit"])
def test_inside_scan(wrap: Any) -> None:
    def loss(function: Any) -> Any:
        def body(model: Sine, x: Any) -> tuple[Sine, Any]:
            return model, function(model, x)

        return lambda model, xs: (sx.scan(wrap(body))(model, xs)[1] ** 2).sum()

    model, xs = Sine(), XS
    expected, other = _expected(Sine(), loss(_plain), xs)
    _assert_like(wrap(sx.grad(wrap(loss(tenfold))))(model, xs), model, expected, other)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("outside", [sx.grad, lambda f: sx.grad(sx.jit(f))], ids=["", "jit"])
def test_inside_vmap(shared: bool, outside: Any) -> None:
    axes = sx.StateAxes({sx.Param: None, ...: 0}) if shared else 0
    models = _lanes()
    others = sx.clone(models)
    if shared:
        models.factor, others.factor = sx.Param(X), sx.Param(X)
    xs = XS

    def loss(function: Any) -> Any:
        lanes = sx.vmap(_twice(function), in_axes=(axes, 0))
        return lambda model, xs: lanes(model, xs).sum()

    found, expected = outside(loss(tenfold))(models, xs), sx.grad(loss(_plain))(others, xs)
    np.testing.assert_allclose(found["factor"], 10 * expected["factor"], rtol=1e-5)
    assert models.calls.value.tolist() == [2, 2, 2]


def test_lanes_of_gradients() -> None:
    models = _lanes()
    xs = XS
    found = sx.vmap(sx.grad(_twice(tenfold)))(models, xs)
    expected = sx.vmap(sx.grad(_twice(_plain)))(models, xs)
    np.testing.assert_allclose(found["factor"], 10 * expected["factor"], rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["", "jit"])
def test_shard_map_sums_gradients_of_replicated_values(auto_mesh: Any, wrap: Any) -> None:
    class Plain(sx.Module):
        def __init__(self) -> None:
            self.factor = sx.Param(jnp.array([[1.0, 2.0]]))

        def __call__(self, x: Any) -> Any:
            return jnp.sin(self.factor * x)

    def loss(function: Any) -> Any:
        shards = sx.shard_map(
            function, mesh=auto_mesh, in_specs=(P(), P("data")), out_specs=P("data")
        )
        return lambda model, xs: (shards(model, xs) ** 2).sum()

    model, xs = Plain(), jnp.arange(8.0).reshape(4, 2)
    function = sx.custom_vjp(lambda model, x: model(x))

    def bwd(residuals: Any, ct: Any) -> Any:
        m, x = residuals
        return {"factor": (10 * ct * x * jnp.cos(m.factor * x)).sum(0, keepdims=True)}, None

    function.defvjp(lambda m, x: (m(x), (m, x)), bwd)
    found = wrap(sx.grad(loss(function)))(model, xs)
    phase = np.array([[1.0, 2.0]]) * np.asarray(xs)
    slope = (2 * np.sin(phase) * np.cos(phase) * np.asarray(xs)).sum(0, keepdims=True)
    np.testing.assert_allclose(found["factor"], 10 * slope, rtol=1e-5, atol=1e-5)


def test_custom_vjp_without_differentiation_runs_the_function_itself() -> None:
    function = sx.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x + 100, None), lambda residuals, ct: (ct,))
    assert float(function(1.0)) == 1.0 and float(sx.jit(function)(1.0)) == 1.0
    value, gradient = sx.value_and_grad(function)(1.0)
    assert (float(value), float(gradient)) == (101.0, 1.0)


def test_failing_rule_raises_only_under_differentiation() -> None:
    def fwd(x: Any) -> Any:
        raise NotImplementedError("no gradient")

    function = sx.custom_vjp(lambda x: 2 * x)
    function.defvjp(fwd, lambda residuals, ct: (ct,))
    assert float(function(1.0)) == 2.0 and float(sx.jit(function)(1.0)) == 2.0
    for run in (sx.grad(function), sx.grad(sx.jit(function))):
        with pytest.raises(NotImplementedError, match="no gradient"):
            run(1.0)


def test_higher_derivatives() -> None:
    @sx.custom_vjp
    def cube(v: Any) -> Any:
        return v.value**3

    cube.defvjp(lambda v: (cube(v), v), lambda v, ct: (3 * v.value**2 * ct,))
    v = sx.Param(jnp.float32(2))

    def derivative(function: Any, wrap: Any) -> Any:
        return wrap(lambda v: sx.grad(function)(v))

    for wrap in (lambda f: f, sx.jit):
        second = derivative(wrap(cube), wrap)
        assert float(sx.grad(second)(v)) == 12.0
        assert float(sx.grad(derivative(second, wrap))(v)) == 6.0


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_custom_vjp_leaves_no_tracer_behind() -> None:
    model = Sine()
    with jax.checking_leaks():
        sx.grad(sx.jit(lambda m, x: _twice(tenfold)(m, x)))(model, X)
        sx.jit(sx.grad(sx.remat(sx.jit(lambda m, x: _twice(tenfold)(m, x)))))(model, X)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sx.state(model)))


# --- what rules get ---


def test_residuals_are_modules_arrays_and_static_values() -> None:
    seen = []

    def fwd(model: Scale, x: Any) -> Any:
        new = Scale(3)
        new.twin = new.factor
        residuals = {
            "m": model,
            "v": model.factor,
            "n": [new, x.shape, 2],
            "s": "tag",
            "none": None,
        }
        return model(x), residuals

    def bwd(residuals: Any, ct: Any) -> Any:
        assert residuals["v"] is residuals["m"].factor
        new, shape, two = residuals["n"]
        assert new.twin is new.factor and new.rate == 0.5
        seen.append((int(residuals["m"].calls), shape, two, residuals["s"], residuals["none"]))
        return {"factor": ct * two}, None

    function = sx.custom_vjp(lambda model, x: model(x))
    function.defvjp(fwd, bwd)
    gradient = sx.grad(lambda m, x: function(m, x).sum())(Scale(), X)
    assert flat(gradient) == {("factor",): [2.0, 2.0]}
    assert seen == [(1, (2,), 2, "tag", None)]


def test_modules_in_residuals_are_copies_to_work_with() -> None:
    """``bwd`` may run the model again, random numbers included; its writes go nowhere."""
    model = Box()
    model.dropout, model.factor = Mask(sx.Rngs(0)), sx.Param(jnp.ones(20))
    model.calls = sx.Variable(0)

    def run(m: Box, x: Any) -> Any:
        m.calls += 1
        return m.dropout(m.factor * x)

    def fwd(m: Box, x: Any) -> Any:
        before = sx.clone(m)
        return run(m, x), (before, x)

    def bwd(residuals: Any, ct: Any) -> Any:
        return sx.vjp(run, *residuals)[1](ct)

    function = sx.custom_vjp(run)
    function.defvjp(fwd, bwd)
    for wrap in (lambda f: f, sx.jit):
        (value, gradient), stream = (
            wrap(sx.value_and_grad(lambda m, x: function(m, x).sum()))(model, 1.0),
            model.dropout.stream,
        )
        assert float(gradient["factor"].sum()) == float(value)
    assert int(model.calls) == 2 and stream is not None and int(stream.count) == 2


def test_nondiff_arguments_come_first_static_ones_unchanged() -> None:
    got = []

    @sx.custom_vjp(nondiff_argnums=(0, 2, -1))
    def function(act: Any, x: Any, model: Scale, mode: str, table: Any) -> Any:
        assert isinstance(mode, str)
        return act(model.factor * x + table)

    def fwd(act: Any, x: Any, model: Scale, mode: str, table: Any) -> Any:
        return function(act, x, model, mode, table), x

    def bwd(act: Any, model: Scale, table: Any, x: Any, ct: Any) -> Any:
        got.append((act, type(model), table.tolist()))
        return ct * model.factor * 10, None

    function.defvjp(fwd, bwd)
    run = functools.partial(function, jnp.sin)
    gradient = sx.grad(lambda x: run(x, Scale(), "a", table=jnp.zeros(2)).sum())(X)
    assert gradient.tolist() == [10.0, 10.0]
    assert got == [(jnp.sin, Scale, [0.0, 0.0])]


def test_keyword_only_arguments_have_no_gradient() -> None:
    @sx.custom_vjp(nondiff_argnums=1)
    def power(x: Any, n: int = 2, *, times: Any = 1.0, mode: str = "a") -> Any:
        assert isinstance(n, int) and mode in "ab"
        return times * x**n

    def fwd(x: Any, n: int, *, times: Any, mode: str) -> Any:
        return power(x, n, times=times, mode=mode), (x, times)

    power.defvjp(fwd, lambda n, residuals, ct: (10 * ct * n * residuals[0] ** (n - 1),))
    assert float(sx.grad(power)(3.0)) == 60.0
    assert float(sx.grad(lambda x: power(n=3, x=x, mode="b"))(2.0)) == 120.0
    with pytest.raises(TransformError, match=r"asked for the argument 'times'"):
        sx.grad(lambda t: power(3.0, times=t))(2.0)


def test_filter_selects_variables_with_gradients() -> None:
    @sx.custom_vjp(nondiff_argnums=(sx.DiffState(1, sx.BatchStat),))
    def function(a: Sine, b: Sine) -> Any:
        return (a.factor * b.mean).sum()

    def bwd(residuals: Any, ct: Any) -> Any:
        return {"factor": ct * jnp.ones(2)}, {"mean": ct * jnp.full(2, 7.0)}

    function.defvjp(lambda a, b: (function(a, b), None), bwd)
    argnums = (0, sx.DiffState(1, sx.BatchStat))
    found = sx.grad(function, argnums=argnums)(Sine(), Sine())
    assert list(map(flat, found)) == [{("factor",): [1.0, 1.0]}, {("mean",): [7.0, 7.0]}]


def test_methods_bound_methods_and_callable_modules() -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            self.weight = sx.Param(3.0)

        @sx.custom_vjp(nondiff_argnums=2)
        def apply(self, x: Any, mode: str = "linear") -> Any:
            return self.weight * x

        apply.defvjp(
            lambda self, x, mode: (self.apply(x, mode), (self, x)),
            lambda mode, residuals, ct: ({"weight": 10 * residuals[1] * ct}, None),
        )

        def __call__(self, x: Any) -> Any:
            return self.weight * x

    model = Model()
    for wrap in (lambda f: f, sx.jit):
        gradient = sx.grad(wrap(lambda m, x: m.apply(x, mode="other")))(model, 2.0)
        assert flat(gradient) == {("weight",): 20.0}
    for target in (model, model.__call__):
        function = sx.custom_vjp(target)
        function.defvjp(lambda x: (model(x), None), lambda residuals, ct: (100 * ct,))
        assert float(sx.grad(function)(2.0)) == float(sx.grad(sx.jit(function))(2.0)) == 100.0


# --- what rules give ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"factor": jnp.ones(2)}, [1.0, 1.0]),
        (sx.State({"factor": jnp.ones(2)}), [1.0, 1.0]),
        ({}, [0.0, 0.0]),
        ({"factor": None}, [0.0, 0.0]),
        (None, [0.0, 0.0]),
    ],
)
def test_missing_gradients_of_a_module_are_zero(given: Any, expected: Any) -> None:
    function = sx.custom_vjp(lambda model, n: model.factor.sum() * n)
    function.defvjp(lambda model, n: (function(model, n), None), lambda r, ct: [given, None])
    for run in (sx.grad(function), sx.jit(sx.grad(function)), sx.grad(sx.jit(function))):
        assert flat(run(Sine(), 3)) == {("factor",): expected}


def test_gradients_of_variables_and_pytrees_with_objects() -> None:
    def bwd(residuals: Any, ct: Any) -> Any:
        return 5 * ct, {"m": {"factor": ct * jnp.ones(2)}, "x": [None, 7 * ct], "s": None}

    function = sx.custom_vjp(lambda v, t: v * t["x"][1] * t["m"].factor.sum())
    function.defvjp(lambda v, t: (function(v, t), None), bwd)
    tree = {"m": Sine(), "x": [1, 2.0], "s": "static"}

    def loss(v: Any, m: Sine, x: Any) -> Any:
        return function(v, {**tree, "m": m, "x": [1, x]})

    found = sx.grad(loss, argnums=(0, 1, 2))(sx.Param(3.0), Sine(), 2.0)
    assert (float(found[0]), flat(found[1]), float(found[2])) == (
        5.0,
        {("factor",): [1.0, 1.0]},
        7.0,
    )


def test_variable_shared_by_arguments_has_one_gradient() -> None:
    model = Tied(3.0)

    def rule(bwd: Any) -> Any:
        function = sx.custom_vjp(lambda a, b: a.embed * b.head)
        function.defvjp(lambda a, b: (function(a, b), (a, b)), bwd)
        return sx.grad(lambda m: function(m, m))

    again = rule(lambda residuals, ct: sx.vjp(lambda a, b: a.embed * b.head, *residuals)[1](ct))
    assert flat(again(model)) == {("embed",): 6.0}
    assert flat(rule(lambda r, ct: (None, {"embed": 5 * ct}))(model)) == {("embed",): 5.0}
    with pytest.raises(TransformError, match=r"\.a\.embed\n  \.b\.embed"):
        rule(lambda r, ct: ({"embed": ct}, {"embed": 2 * ct}))(model)


# --- laws ---


@pytest.mark.parametrize("compiled", [False, True])
def test_correct_rule_matches_finite_differences(compiled: bool) -> None:
    graphdef, state = sx.split(with_values(sx.nn.Linear(3, 2, rngs=sx.Rngs(0))))
    function = sx.custom_vjp(lambda m, x: jnp.tanh(m(x)))

    def bwd(residuals: Any, ct: Any) -> Any:
        return sx.vjp(lambda m, x: jnp.tanh(m(x)), *residuals)[1](ct)

    function.defvjp(lambda m, x: (function(m, x), (m, x)), bwd)
    run = sx.jit(function) if compiled else function

    @jax.jit
    def on_values(kernel: Any, x: Any) -> Any:
        return run(sx.merge(graphdef, state, {"kernel": kernel}), x)

    for seed in range(3):
        random = np.random.default_rng(seed)
        kernel, x = random.normal(size=(3, 2)), random.normal(size=3)
        arguments = kernel.astype(np.float32), x.astype(np.float32)
        check_grads(on_values, arguments, order=2, modes=["rev"])
