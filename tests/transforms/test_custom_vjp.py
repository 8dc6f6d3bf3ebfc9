# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: what rules get and give, where they run, and what is never lost on the way.

The rules here give ten times the true gradient, so that one sees that they were used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from tests.transforms.examples import Box, Scale, Tied, values

import shardax as sx
from shardax.core.errors import (
    ClosureError,
    DifferentiationError,
    InconsistentAliasingError,
    OutputError,
    ShardaxError,
    TangentError,
)

X = jnp.array([1.0, 2.0])


def _lists(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.tolist(), tree)


def _flat(state: sx.State) -> dict[Any, Any]:
    return _lists(state.flat())


class Sine(sx.Module):
    """``sin(factor * x)``, counting its calls and keeping a running mean."""

    def __init__(self) -> None:
        self.factor = sx.Param(jnp.array([1.0, 2.0]))
        self.mean = sx.BatchStat(jnp.zeros(2))
        self.calls = sx.Variable(0)

    def __call__(self, x: Any) -> Any:
        self.mean[...] = 0.5 * self.mean + 0.5 * self.factor * x
        self.calls += 1
        return jnp.sin(self.factor * x)


@sx.custom_vjp
def _tenfold(model: Sine, x: Any) -> Any:
    return model(x)


def _fwd(model: Sine, x: Any) -> Any:
    return _tenfold(model, x), (model, x)


def _bwd(residuals: Any, ct: Any) -> Any:
    model, x = residuals
    slope = 10 * ct * jnp.cos(model.factor * x)
    return {"factor": slope * x}, slope * model.factor


_tenfold.defvjp(_fwd, _bwd)


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
    assert jnp.allclose(found["factor"], expected["factor"], rtol=1e-5)
    assert int(model.calls) == int(other.calls) > 0
    assert jnp.allclose(model.mean.value, other.mean.value, rtol=1e-5)


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
def test_the_rule_is_used_and_state_carried_under(lift: Any) -> None:
    model, other = Sine(), Sine()
    run, plain = lift(_twice(_tenfold)), lift(_twice(_plain))
    for _ in range(2):
        found, expected = run(model, X), jax.tree.map(lambda g: 10 * g, plain(other, X))
        _assert_like(found, model, expected, other)


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["", "jit"])
def test_inside_scan(wrap: Any) -> None:
    def loss(function: Any) -> Any:
        def body(model: Sine, x: Any) -> tuple[Sine, Any]:
            return model, function(model, x)

        return lambda model, xs: (sx.scan(wrap(body))(model, xs)[1] ** 2).sum()

    model, xs = Sine(), jnp.stack([X, 2 * X, 3 * X])
    expected, other = _expected(Sine(), loss(_plain), xs)
    _assert_like(wrap(sx.grad(wrap(loss(_tenfold))))(model, xs), model, expected, other)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("outside", [sx.grad, lambda f: sx.grad(sx.jit(f))], ids=["", "jit"])
def test_inside_vmap(shared: bool, outside: Any) -> None:
    axes = sx.StateAxes({sx.Param: None, ...: 0}) if shared else 0
    models = sx.vmap(lambda _: Sine())(jnp.arange(3))
    others = sx.clone(models)
    if shared:
        models.factor, others.factor = sx.Param(X), sx.Param(X)
    xs = jnp.stack([X, 2 * X, 3 * X])

    def loss(function: Any) -> Any:
        lanes = sx.vmap(_twice(function), in_axes=(axes, 0))
        return lambda model, xs: lanes(model, xs).sum()

    found, expected = outside(loss(_tenfold))(models, xs), sx.grad(loss(_plain))(others, xs)
    assert jnp.allclose(found["factor"], 10 * expected["factor"], rtol=1e-5)
    assert models.calls.value.tolist() == [2, 2, 2]


def test_lanes_of_gradients() -> None:
    models = sx.vmap(lambda _: Sine())(jnp.arange(3))
    xs = jnp.stack([X, 2 * X, 3 * X])
    found = sx.vmap(sx.grad(_twice(_tenfold)))(models, xs)
    expected = sx.vmap(sx.grad(_twice(_plain)))(models, xs)
    assert jnp.allclose(found["factor"], 10 * expected["factor"], rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["", "jit"])
def test_inside_shard_map_shared_values_get_the_sum_over_shards(auto_mesh: Any, wrap: Any) -> None:
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
    expected = sx.grad(loss(lambda m, x: m(x)))(model, xs)
    assert jnp.allclose(found["factor"], 10 * expected["factor"], rtol=1e-5)


def test_without_differentiation_the_function_itself_runs() -> None:
    function = sx.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x + 100, None), lambda residuals, ct: (ct,))
    assert float(function(1.0)) == 1.0 and float(sx.jit(function)(1.0)) == 1.0
    value, gradient = sx.value_and_grad(function)(1.0)
    assert (float(value), float(gradient)) == (101.0, 1.0)


def test_a_rule_that_cannot_be_traced_is_no_matter_until_it_is_needed() -> None:
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


def test_no_tracer_is_left_behind() -> None:
    model = Sine()
    with jax.checking_leaks():
        sx.grad(sx.jit(lambda m, x: _twice(_tenfold)(m, x)))(model, X)
        sx.jit(sx.grad(sx.remat(sx.jit(lambda m, x: _twice(_tenfold)(m, x)))))(model, X)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sx.state(model)))


# --- what rules get ---


def test_residuals_may_be_modules_variables_arrays_and_static_values() -> None:
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
    assert _flat(gradient) == {("factor",): [2.0, 2.0]}
    assert seen == [(1, (2,), 2, "tag", None)]


def test_modules_in_residuals_are_copies_to_work_with() -> None:
    """``bwd`` may run the model again, random numbers included; its writes go nowhere."""
    model = Box()
    model.dropout, model.factor = sx.nn.Dropout(0.5, rngs=sx.Rngs(0)), sx.Param(jnp.ones(100))
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


def test_arguments_without_gradient_come_first_static_ones_as_they_are() -> None:
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


def test_defaults_and_names_are_positions_and_keyword_only_ones_have_no_gradient() -> None:
    @sx.custom_vjp(nondiff_argnums=1)
    def power(x: Any, n: int = 2, *, times: Any = 1.0, mode: str = "a") -> Any:
        assert isinstance(n, int) and mode in "ab"
        return times * x**n

    def fwd(x: Any, n: int, *, times: Any, mode: str) -> Any:
        return power(x, n, times=times, mode=mode), (x, times)

    power.defvjp(fwd, lambda n, residuals, ct: (10 * ct * n * residuals[0] ** (n - 1),))
    assert float(sx.grad(power)(3.0)) == 60.0
    assert float(sx.grad(lambda x: power(n=3, x=x, mode="b"))(2.0)) == 120.0
    with pytest.raises(DifferentiationError, match=r"asked for the argument 'times'"):
        sx.grad(lambda t: power(3.0, times=t))(2.0)


def test_a_filter_says_which_variables_of_an_argument_have_a_gradient() -> None:
    @sx.custom_vjp(nondiff_argnums=(sx.DiffState(1, sx.BatchStat),))
    def function(a: Sine, b: Sine) -> Any:
        return (a.factor * b.mean).sum()

    def bwd(residuals: Any, ct: Any) -> Any:
        return {"factor": ct * jnp.ones(2)}, {"mean": ct * jnp.full(2, 7.0)}

    function.defvjp(lambda a, b: (function(a, b), None), bwd)
    argnums = (0, sx.DiffState(1, sx.BatchStat))
    found = sx.grad(function, argnums=argnums)(Sine(), Sine())
    assert list(map(_flat, found)) == [{("factor",): [1.0, 1.0]}, {("mean",): [7.0, 7.0]}]


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
        assert _flat(gradient) == {("weight",): 20.0}
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
def test_a_gradient_of_a_module_is_by_path_and_zero_where_missing(
    given: Any, expected: Any
) -> None:
    function = sx.custom_vjp(lambda model, n: model.factor.sum() * n)
    function.defvjp(lambda model, n: (function(model, n), None), lambda r, ct: [given, None])
    for run in (sx.grad(function), sx.jit(sx.grad(function)), sx.grad(sx.jit(function))):
        assert _flat(run(Sine(), 3)) == {("factor",): expected}


def test_gradients_of_variables_and_pytrees_with_objects() -> None:
    def bwd(residuals: Any, ct: Any) -> Any:
        return 5 * ct, {"m": {"factor": ct * jnp.ones(2)}, "x": [None, 7 * ct], "s": None}

    function = sx.custom_vjp(lambda v, t: v * t["x"][1] * t["m"].factor.sum())
    function.defvjp(lambda v, t: (function(v, t), None), bwd)
    tree = {"m": Sine(), "x": [1, 2.0], "s": "static"}

    def loss(v: Any, m: Sine, x: Any) -> Any:
        return function(v, {**tree, "m": m, "x": [1, x]})

    found = sx.grad(loss, argnums=(0, 1, 2))(sx.Param(3.0), Sine(), 2.0)
    assert (float(found[0]), _flat(found[1]), float(found[2])) == (
        5.0,
        {("factor",): [1.0, 1.0]},
        7.0,
    )


def test_a_variable_shared_by_arguments_has_one_gradient() -> None:
    model = Tied(3.0)

    def rule(bwd: Any) -> Any:
        function = sx.custom_vjp(lambda a, b: a.embed * b.head)
        function.defvjp(lambda a, b: (function(a, b), (a, b)), bwd)
        return sx.grad(lambda m: function(m, m))

    again = rule(lambda residuals, ct: sx.vjp(lambda a, b: a.embed * b.head, *residuals)[1](ct))
    assert _flat(again(model)) == {("embed",): 6.0}
    assert _flat(rule(lambda r, ct: (None, {"embed": 5 * ct}))(model)) == {("embed",): 5.0}
    with pytest.raises(InconsistentAliasingError, match=r"\.a\.embed\n  \.b\.embed"):
        rule(lambda r, ct: ({"embed": ct}, {"embed": 2 * ct}))(model)


# --- state that the forward writes ---


def test_what_fwd_writes_is_carried_back_when_differentiated() -> None:
    def fwd(model: Scale, x: Any) -> Any:
        model.calls += 10
        model.seen = sx.Intermediate(x)
        return model.factor * x, None

    def function_of(change: Any) -> Any:
        function = sx.custom_vjp(change)
        function.defvjp(fwd, lambda residuals, ct: (None, ct))
        return lambda model, x: function(model, x).sum()

    def change(model: Scale, x: Any) -> Any:
        model.calls += 1
        model.seen = sx.Intermediate(x * 2)
        return model.factor * x

    model = Scale()
    loss = function_of(change)
    loss(model, X)
    assert int(model.calls) == 1 and model.seen.value.tolist() == [2.0, 4.0]
    sx.grad(loss)(model, X)
    assert int(model.calls) == 11 and model.seen.value.tolist() == [1.0, 2.0]
    sx.grad(sx.jit(loss))(model, X)
    assert int(model.calls) == 21 and model.seen.value.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("lift", [sx.grad, lambda f: sx.grad(sx.jit(f))], ids=["", "jit"])
def test_gradients_stop_at_what_is_written_unless_the_rule_asks_for_them(lift: Any) -> None:
    def put(cache: Any, x: Any) -> Any:
        cache.old[...] = 2 * x
        cache.new = sx.Cache(3 * x)
        return x

    def loss(function: Any) -> Any:
        def run(x: Any) -> Any:
            cache = Box()
            cache.old = sx.Cache(jnp.zeros(()))
            y = function(cache, x)
            return y + 10 * cache.old.value + 100 * cache.new.value

        return run

    silent, asking = sx.custom_vjp(put), sx.custom_vjp(put)
    silent.defvjp(lambda c, x: (put(c, x), None), lambda r, ct: (None, ct))

    def bwd(residuals: Any, ct: Any, written: sx.State) -> Any:
        assert list(written.flat()) == [("cache", "old"), ("cache", "new")]
        return None, ct + 2 * written["cache"]["old"] + 3 * written["cache"]["new"]

    asking.defvjp(lambda c, x: (put(c, x), None), bwd, state_cotangents=True)
    assert float(lift(loss(put))(1.0)) == 321.0
    assert float(lift(loss(silent))(1.0)) == 1.0
    assert float(lift(loss(asking))(1.0)) == 321.0


def test_gradients_pass_through_state_that_the_rule_makes_differentiable() -> None:
    """Two calls: what the first wrote is read, and given a gradient, by the second."""

    @sx.custom_vjp(wrt=sx.Cache)
    def put(cache: Any, x: Any) -> Any:
        y = cache * x
        cache[...] = 2 * x
        return y

    def fwd(cache: Any, x: Any) -> Any:
        before = cache.value
        return put(cache, x), (before, x)

    def bwd(residuals: Any, ct: Any, written: sx.State) -> Any:
        cache, x = residuals
        return ct * x, ct * cache + 2 * written["cache"]

    put.defvjp(fwd, bwd, state_cotangents=True)

    def loss(function: Any) -> Any:
        def run(x: Any) -> Any:
            cache = sx.Cache(jnp.float32(5))
            return function(cache, x) + function(cache, 3 * x)

        return run

    expected = sx.grad(loss(put.function))(2.0)
    assert float(sx.grad(loss(put))(2.0)) == float(expected)
    assert float(sx.grad(sx.jit(loss(put)))(2.0)) == float(expected)


def test_an_exception_leaves_everything_untouched() -> None:
    model = Scale()

    def fail(m: Scale) -> Any:
        m.factor += 1
        m.extra = sx.Param(1.0)
        raise KeyError("stop")

    function = sx.custom_vjp(fail)
    function.defvjp(fail, lambda residuals, ct: (None,))
    for run in (function, sx.grad(function), sx.jit(sx.grad(function))):
        with pytest.raises(KeyError, match="stop"):
            run(model)
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


# --- closures ---


def _closing(model: Sine, counter: Any) -> Any:
    @sx.custom_vjp
    def function(x: Any) -> Any:
        counter[...] += 1
        return (model.mean * x).sum()

    function.defvjp(lambda x: (function(x), model.mean.value), lambda mean, ct: (10 * ct * mean,))
    return function


@pytest.mark.parametrize(
    "lift",
    [
        lambda f: sx.grad(f),
        lambda f: sx.jit(sx.grad(f)),
        lambda f: sx.grad(sx.jit(f)),
        lambda f: sx.grad(sx.jit(sx.remat(sx.jit(f)))),
    ],
    ids=["grad", "jit grad", "grad jit", "remat"],
)
def test_captured_variables_are_read_as_they_are_and_written(lift: Any) -> None:
    model, counter = Sine(), sx.Variable(0)
    run = lift(_closing(model, counter))
    for turn in (1, 2, 3):
        model.mean[...] = turn * X
        assert run(jnp.ones(2)).tolist() == (10 * turn * X).tolist()
        assert int(counter) == turn


def test_closed_over_is_passed_in() -> None:
    """Also when the rule closes over objects of a transform that is over when it runs."""

    def loss(model: Sine, x: Any) -> Any:
        model.mean[...] = 2 * model.mean
        function = _closing(model, sx.Variable(0))
        return function(x)

    model = Sine()
    model.mean[...] = X
    gradient = sx.grad(sx.jit(loss), argnums=1)
    assert gradient(model, jnp.ones(2)).tolist() == [20.0, 40.0]
    assert gradient(model, jnp.ones(2)).tolist() == [40.0, 80.0]
    assert model.mean.value.tolist() == [4.0, 8.0]


@pytest.mark.parametrize("lift", [sx.grad, lambda f, **k: sx.grad(sx.jit(f), **k)], ids=["", "jit"])
def test_a_gradient_that_the_rule_does_not_give_is_never_lost(lift: Any) -> None:
    model, counter = Sine(), sx.Variable(0)
    function = _closing(model, counter)
    with pytest.raises(DifferentiationError, match=r"the BatchStat at \S*model\.mean, which"):
        lift(lambda m: function(X), wrt=sx.BatchStat)(model)
    with pytest.raises(DifferentiationError, match=r"the BatchStat at \.model\.mean, which"):
        lift(lambda m: _tenfold(m, X).sum(), wrt=sx.BatchStat)(model)
    still = sx.custom_vjp(lambda x, y: x * y, nondiff_argnums=0)
    still.defvjp(lambda x, y: (x * y, x), lambda x, residuals, ct: (ct * x,))
    with pytest.raises(DifferentiationError, match=r"the argument 'x', which"):
        lift(lambda x: still(x, 3.0))(2.0)
    assert values(model)[("calls",)] == 0 and int(counter) == 0


def test_state_that_a_rule_does_not_use_may_depend_on_parameters() -> None:
    def loss(model: Sine, x: Any) -> Any:
        model(x)  # the running mean now depends on the factor
        return unused(model, x)

    @sx.custom_vjp
    def unused(model: Sine, x: Any) -> Any:
        return (model.factor * x).sum()

    unused.defvjp(
        lambda model, x: (unused(model, x), (model.factor.value, x)),
        lambda residuals, ct: ({"factor": 10 * ct * residuals[1]}, None),
    )
    assert _flat(sx.grad(loss)(Sine(), X)) == {("factor",): [10.0, 20.0]}


# --- what is refused ---


def _rule(fwd: Any, bwd: Any) -> Any:
    function = sx.custom_vjp(lambda model, x: (model.factor * x).sum())
    function.defvjp(fwd or (lambda model, x: (function(model, x), None)), bwd)
    return function


_OUTSIDE = Sine()


@pytest.mark.parametrize("lift", [sx.grad, lambda f: sx.grad(sx.jit(f))], ids=["", "jit"])
@pytest.mark.parametrize(
    ("fwd", "bwd", "error", "message"),
    [
        (None, lambda r, ct: None, DifferentiationError, r"for each of \(model, x\), but it retu"),
        (None, lambda r, ct: (None,), DifferentiationError, r"but it returned a tuple of 1"),
        (None, lambda r, ct: ({"facto": ct}, None), TangentError, r"did you mean \.factor"),
        (None, lambda r, ct: ({"calls": ct}, None), TangentError, r"\.model\.calls, which the fi"),
        (None, lambda r, ct: ({"mean": X}, None), TangentError, r"\.model\.mean, which the filte"),
        (None, lambda r, ct: ({"factor": ct}, None), TangentError, r"\.model\.factor is float32\["),
        (None, lambda r, ct: (X, None), TangentError, r"the Sine at \.model is of type"),
        (None, lambda r, ct: (None, ct), TangentError, r"for \.x is float32\[\], but must be"),
        (
            None,
            lambda r, ct: ({"factor": ct * _OUTSIDE.factor}, None),
            ClosureError,
            r"uses the Param _OUTSIDE\.factor, which it was not given",
        ),
        (lambda m, x: 3.0, None, OutputError, r"fwd .* must return \(result, residuals\)"),
        (lambda m, x: (m, None), None, DifferentiationError, r"returned a Sine at the result its"),
    ],
)
def test_a_rule_that_does_not_fit_is_told_why(
    lift: Any, fwd: Any, bwd: Any, error: type[ShardaxError], message: str
) -> None:
    function = _rule(fwd, bwd or (lambda r, ct: (None, None)))
    with pytest.raises(error, match=message):
        lift(lambda m: function(m, X))(Sine())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.custom_vjp(lambda x: x)(1.0), DifferentiationError, r"has no derivative yet"),
        (
            lambda: _tenfold.__class__(lambda x: x, 1, sx.Param).__call__(1.0),
            DifferentiationError,
            r"has no derivative yet",
        ),
        (
            lambda: _defined(lambda x: x, nondiff_argnums=1)(1.0),
            DifferentiationError,
            r"the call has 1",
        ),
        (
            lambda: _defined(lambda x, y: x, nondiff_argnums=(0, -2))(1.0, 2.0),
            DifferentiationError,
            r"names the argument -2 twice",
        ),
        (lambda: _defined(lambda m: m.factor)(Sine()), DifferentiationError, r"returned a Param"),
        (lambda: _defined(lambda x: "a")(1.0), OutputError, r"sx\.custom_vjp returned 'a'"),
        (lambda: _defined(lambda x: x)(), TypeError, r"missing a required argument: 'x'"),
    ],
)
def test_what_a_call_refuses(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _defined(function: Any, **options: Any) -> Any:
    made = sx.custom_vjp(function, **options)
    made.defvjp(lambda *args: (made.function(*args), None), lambda residuals, ct: (None,))
    return made


def test_a_compiled_function_and_its_rule_must_change_the_same_structure() -> None:
    def fwd(model: Sine, x: Any) -> Any:
        model.extra = sx.Param(1.0)
        return (model.factor * x).sum(), None

    function = _rule(fwd, lambda r, ct: (None, None))
    assert _flat(sx.grad(lambda m: function(m, X))(Sine())) == {("factor",): [0.0, 0.0]}
    with pytest.raises(DifferentiationError, match=r"changes structure or metadata, which the fun"):
        sx.grad(sx.jit(lambda m: function(m, X)))(Sine())


# --- laws ---


@given(st.integers(0, 5), st.booleans())
@settings(max_examples=8)
def test_a_true_rule_passes_the_check_of_finite_differences(seed: int, compiled: bool) -> None:
    layer = sx.nn.Linear(3, 2, rngs=sx.Rngs(seed))
    graphdef, state = sx.split(layer)
    function = sx.custom_vjp(lambda m, x: jnp.tanh(m(x)))

    def bwd(residuals: Any, ct: Any) -> Any:
        return sx.vjp(lambda m, x: jnp.tanh(m(x)), *residuals)[1](ct)

    function.defvjp(lambda m, x: (function(m, x), (m, x)), bwd)
    run = sx.jit(function) if compiled else function

    def on_values(kernel: Any, x: Any) -> Any:
        return run(sx.merge(graphdef, state, {"kernel": kernel}), x)

    check_grads(on_values, (layer.kernel.value, jnp.ones(3)), order=2, modes=["rev"])
