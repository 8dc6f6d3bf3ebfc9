# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: state that rules write, what they close over, what is refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ClosureError, ForeignMutationError, ShardaxError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Box, Scale, values
from tests.core.transforms.rules import Sine, X, flat, tenfold

# --- state that the forward writes ---


def test_custom_vjp_carries_back_writes_of_fwd_when_differentiated() -> None:
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
def test_gradients_stop_at_writes_by_default(lift: Any) -> None:
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


def test_gradients_pass_through_state_declared_differentiable() -> None:
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


def test_exception_leaves_everything_untouched() -> None:
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


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
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
def test_captured_variables_are_read_and_written(lift: Any) -> None:
    model, counter = Sine(), sx.Variable(0)
    run = lift(_closing(model, counter))
    for turn in (1, 2, 3):
        model.mean[...] = turn * X
        assert run(jnp.ones(2)).tolist() == (10 * turn * X).tolist()
        assert int(counter) == turn


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit, sx.remat], ids=["", "jit", "remat"])
def test_captured_variables_in_loops_branches_and_lanes(wrap: Any) -> None:
    model, counter = Sine(), sx.Variable(0)
    model.mean[...] = X
    function = _closing(model, counter)

    def scanned(xs: Any) -> Any:
        return sx.scan(lambda total, x: (total + function(x), None))(jnp.zeros(()), xs)[0]

    def decided(x: Any) -> Any:
        return sx.cond(x.sum() > 0, function, lambda x: x.sum(), x)

    xs = jnp.ones((3, 2))
    assert sx.grad(wrap(scanned))(xs).tolist() == [[10.0, 20.0]] * 3 and int(counter) == 3
    assert sx.grad(wrap(decided))(xs[0]).tolist() == [10.0, 20.0] and int(counter) == 4
    with pytest.raises(
        ForeignMutationError, match=r"inside sx\.vmap: the Variable was not passed in"
    ):
        sx.vmap(wrap(function))(xs)
    reading = sx.custom_vjp(lambda x: (model.mean * x).sum())
    reading.defvjp(lambda x: (reading(x), model.mean.value), lambda mean, ct: (10 * ct * mean,))
    lanes = sx.grad(wrap(lambda xs: sx.vmap(reading)(xs).sum()))
    assert lanes(xs).tolist() == [[10.0, 20.0]] * 3 and int(counter) == 4


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
def test_gradient_missing_from_the_rule_raises(lift: Any) -> None:
    model, counter = Sine(), sx.Variable(0)
    function = _closing(model, counter)
    with pytest.raises(TransformError, match=r"the BatchStat at \S*model\.mean, which"):
        lift(lambda m: function(X), wrt=sx.BatchStat)(model)
    with pytest.raises(TransformError, match=r"at \.model\.mean, which") as caught:
        lift(lambda m: tenfold(m, X).sum(), wrt=sx.BatchStat)(model)
    names = {"sx": sx, "argnum": 0, "filter": sx.BatchStat}
    run_advice(caught.value, "nondiff_argnums=sx.DiffState(argnum, filter)", names)
    chosen = sx.custom_vjp(
        lambda m, x: (m.mean * x).sum(), nondiff_argnums=names["nondiff_argnums"]
    )
    chosen.defvjp(lambda m, x: (chosen(m, x), None), lambda r, ct: ({"mean": 10 * ct * X}, None))
    gradient = lift(lambda m: chosen(m, X), wrt=sx.BatchStat)(model)
    assert flat(gradient) == {("mean",): (10 * X).tolist()}
    still = sx.custom_vjp(lambda x, y: x * y, nondiff_argnums=0)
    still.defvjp(lambda x, y: (x * y, x), lambda x, residuals, ct: (ct * x,))
    with pytest.raises(TransformError, match=r"the argument 'x', which"):
        lift(lambda x: still(x, 3.0))(2.0)
    assert values(model)[("calls",)] == 0 and int(counter) == 0


def test_unused_state_may_depend_on_parameters() -> None:
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
    assert flat(sx.grad(loss)(Sine(), X)) == {("factor",): [10.0, 20.0]}


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
        (None, lambda r, ct: None, TransformError, r"for each of \(model, x\), but it retu"),
        (None, lambda r, ct: (None,), TransformError, r"but it returned a tuple of 1"),
        (None, lambda r, ct: ({"facto": ct}, None), TransformError, r"did you mean \.factor"),
        (
            None,
            lambda r, ct: ({"calls": ct}, None),
            TransformError,
            r"\.model\.calls, which the fi",
        ),
        (
            None,
            lambda r, ct: ({"mean": X}, None),
            TransformError,
            r"\.model\.mean, which the filte",
        ),
        (
            None,
            lambda r, ct: ({"factor": ct}, None),
            TransformError,
            r"\.model\.factor is float32\[",
        ),
        (None, lambda r, ct: (X, None), TransformError, r"the Sine at \.model is of type"),
        (None, lambda r, ct: (None, ct), TransformError, r"for \.x is float32\[\], but must be"),
        (
            None,
            lambda r, ct: ({"factor": ct * _OUTSIDE.factor}, None),
            ClosureError,
            r"uses the Param _OUTSIDE\.factor, which it was not given",
        ),
        (lambda m, x: 3.0, None, TransformError, r"fwd .* must return \(result, residuals\)"),
        (lambda m, x: (m, None), None, TransformError, r"returned a Sine at the result its"),
    ],
)
def test_invalid_rule_raises_with_the_reason(
    lift: Any, fwd: Any, bwd: Any, error: type[ShardaxError], message: str
) -> None:
    function = _rule(fwd, bwd or (lambda r, ct: (None, None)))
    with pytest.raises(error, match=message) as caught:
        lift(lambda m: function(m, X))(Sine())
    if "model\\.mean" in message:
        names = {"sx": sx, "filter": (sx.Param, sx.BatchStat)}
        run_advice(caught.value, "nondiff_argnums=sx.DiffState(0, filter)", names)
        chosen = sx.custom_vjp(
            lambda m, x: (m.mean * x).sum(), nondiff_argnums=names["nondiff_argnums"]
        )
        chosen.defvjp(lambda m, x: (chosen(m, x), None), bwd)
        assert flat(sx.grad(lambda m: chosen(m, X), wrt=sx.BatchStat)(Sine())) == {
            ("mean",): X.tolist()
        }


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.custom_vjp(lambda x: x)(1.0), TransformError, r"has no derivative yet"),
        (
            lambda: tenfold.__class__(lambda x: x, 1, sx.Param).__call__(1.0),
            TransformError,
            r"has no derivative yet",
        ),
        (lambda: _defined(lambda x: x, nondiff_argnums=1)(1.0), TransformError, r"the call has 1"),
        (
            lambda: _defined(lambda x, y: x, nondiff_argnums=(0, -2))(1.0, 2.0),
            TransformError,
            r"names the argument -2 twice",
        ),
        (lambda: _defined(lambda m: m.factor)(Sine()), TransformError, r"returned a Param"),
        (lambda: _defined(lambda x: "a")(1.0), TransformError, r"sx\.custom_vjp returned 'a'"),
        (
            lambda: _defined(lambda x: x)(),
            TypeError,
            r"missing 1 required positional argument: 'x'",
        ),
    ],
)
def test_custom_vjp_refuses_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def _defined(function: Any, **options: Any) -> Any:
    made = sx.custom_vjp(function, **options)
    made.defvjp(lambda *args: (made.function(*args), None), lambda residuals, ct: (None,))
    return made


def test_function_and_rule_change_the_same_structure() -> None:
    def fwd(model: Sine, x: Any) -> Any:
        model.extra = sx.Param(1.0)
        return (model.factor * x).sum(), None

    function = _rule(fwd, lambda r, ct: (None, None))
    assert flat(sx.grad(lambda m: function(m, X))(Sine())) == {("factor",): [0.0, 0.0]}
    with pytest.raises(TransformError, match=r"changes structure or metadata, which the fun"):
        sx.grad(sx.jit(lambda m: function(m, X)))(Sine())
