# SPDX-License-Identifier: Apache-2.0
"""remat: nothing changes but memory and time; random numbers and writes happen once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.ad_checkpoint import checkpoint_name
from jax.test_util import check_grads

import shardax as sx
from shardax.errors import ForeignMutationError, ShardaxError, StaticArgumentError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Mask, Scale, values
from tests.core.transforms.pure import touch
from tests.strategies import assert_equal_values, assert_same_model, models
from tests.values import with_values

FEW = settings(max_examples=8)


class Noisy(sx.Module):
    """Layers with dropout, a counter, a running mean and an intermediate."""

    def __init__(self, sows: bool = True) -> None:
        rngs = sx.Rngs(0)
        self.sows = sows
        self.layers = [sx.nn.Linear(4, 4, rngs=rngs) for _ in range(2)]
        self.dropout = Mask(rngs)
        self.mean = sx.BatchStat(jnp.zeros(4))
        self.calls = sx.Variable(0)
        with_values(self)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.dropout(jnp.tanh(layer(x)))
        self.calls += 1
        self.mean[...] = 0.9 * self.mean + 0.1 * x.mean(0)
        if self.sows:
            self.sow("seen", x)
        return x


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def _loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, x: (forward(model, x) ** 2).sum()


def _call(model: Any, x: Any) -> Any:
    return model(x)


def _assert_close(found: Any, expected: Any) -> None:
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(leaves, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def _primitives(jaxpr: Any) -> list[str]:
    """The names of all primitives in a program, inner programs included."""
    names = []
    for equation in jaxpr.eqns:
        names.append(equation.primitive.name)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            names += _primitives(inner) if hasattr(inner, "eqns") else []
    return names


# --- the same but for memory ---


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_values_gradients_numbers_and_writes_are_those_without(wrap: Any) -> None:
    plain, rematerialized = Noisy(), Noisy()
    x = X
    for _ in range(2):  # the second time draws other numbers
        expected = wrap(sx.value_and_grad(_loss(_call)))(plain, x)
        found = wrap(sx.value_and_grad(_loss(sx.remat(_call))))(rematerialized, x)
        _assert_close(found, expected)
        x = x + 1
    assert int(rematerialized.calls) == 2
    plain_state, state = sx.state(plain).flat(), sx.state(rematerialized).flat()
    assert list(plain_state) == list(state)
    count = ("dropout", "stream", "count")
    assert_equal_values(state[count], plain_state[count])
    _assert_close(state[("mean",)], plain_state[("mean",)])
    assert len(rematerialized.seen.value) == 2


def test_random_numbers_are_replayed_and_not_drawn_again() -> None:
    """``jax.checkpoint`` over a generator that is a closed-over ref gives wrong gradients here."""
    x = jnp.ones(1000)

    def noise(stream: sx.RngStream, x: Any) -> Any:
        return (x * jax.random.bernoulli(stream(), 0.5, x.shape)).sum()

    stream = sx.Rngs(noise=0).noise
    value, gradient = sx.value_and_grad(sx.remat(noise), argnums=1)(stream, x)
    assert float(gradient.sum()) == float(value) and set(gradient.tolist()) == {0.0, 1.0}
    assert int(stream.count) == 1


def test_unsaved_values_are_recomputed() -> None:
    model = Noisy()

    def computed(forward: Any) -> int:
        return _primitives(sx.make_jaxpr(sx.grad(_loss(forward)))(model, X).jaxpr).count("tanh")

    keep = sx.remat(_call, policy=jax.checkpoint_policies.everything_saveable)
    assert (computed(_call), computed(sx.remat(_call)), computed(keep)) == (2, 4, 2)


def test_policy_saves_values_by_name() -> None:
    def forward(model: Scale, x: Any) -> Any:
        hidden = checkpoint_name(jnp.sin(model(x)), "hidden")
        return jnp.cos(hidden)

    model = Scale()

    def computed(policy: Any) -> int:
        gradient = sx.grad(_loss(sx.remat(forward, policy=policy)))
        return _primitives(sx.make_jaxpr(gradient)(model, jnp.ones(2)).jaxpr).count("sin")

    # sin of the forward, and of the derivative of cos; one more where it is not kept
    assert computed(None) == 3
    assert computed(jax.checkpoint_policies.save_only_these_names("hidden")) == 2


def test_prevent_cse_is_handed_on() -> None:
    def shown(prevent_cse: bool) -> str:
        forward = sx.remat(_call, prevent_cse=prevent_cse)
        return str(sx.make_jaxpr(forward)(Scale(), jnp.ones(2)))

    assert "prevent_cse=True" in shown(True) and "prevent_cse=False" in shown(False)


# --- forms ---


def test_decorates_functions_and_methods() -> None:
    class Model(Scale):
        @sx.remat
        def plain(self, x: Any) -> Any:
            return self(x)

        @sx.remat(policy=jax.checkpoint_policies.dots_saveable, static_argnums=2)
        def chosen(self, x: Any, mode: str = "once", *, times: Any = 1.0) -> Any:
            return self(x) * times * (2 if mode == "twice" else 1)

    model = Model()
    assert model.plain(2.0).tolist() == [1.0, 1.0]
    assert model.chosen(2.0, "twice").tolist() == [2.0, 2.0]
    assert model.chosen(2.0, mode="twice", times=3.0).tolist() == [6.0, 6.0]
    gradient = sx.grad(lambda m: m.chosen(2.0, mode="twice", times=3.0).sum())(model)
    assert gradient["factor"].tolist() == [6.0, 6.0] and int(model.calls) == 4


def test_static_arguments_by_name() -> None:
    @sx.remat(static_argnames=("mode",))
    def forward(x: Any, *, mode: str) -> Any:
        return x**2 if mode == "square" else x

    assert float(sx.grad(forward)(3.0, mode="square")) == 6.0
    assert float(sx.grad(forward)(3.0, mode="same")) == 1.0


def test_modules_methods_and_partials_are_functions() -> None:
    model = Scale()
    functions = (model, model.__call__, functools.partial(_call, model))
    for function in functions:
        assert float(sx.grad(lambda x, f=function: sx.remat(f)(x).sum())(2.0)) == 1.0
    assert int(model.calls) == 3


# --- what it does besides ---


def test_structure_metadata_and_identity_are_carried_back() -> None:
    model = Scale()

    @sx.remat
    def forward(m: Scale) -> Any:
        m.seen = sx.Intermediate(m.factor * 2)
        m.factor.set_metadata(axes=("embed",))
        del m.calls
        m.mode = "eval"
        return {"same": m, "new": Scale(3), "x": m.factor * 3}

    out = forward(model)
    assert out["same"] is model and out["x"].tolist() == [3.0, 3.0] and model.mode == "eval"
    assert values(out["new"]) == {("factor",): [1.0] * 3, ("calls",): 0}
    assert values(model) == {("factor",): [1.0, 1.0], ("seen",): [2.0, 2.0]}
    assert model.factor.axes == ("embed",)


def test_captured_variables_are_read_written_and_differentiated() -> None:
    model, counter = Scale(), sx.Variable(0)

    @sx.remat
    def forward(x: Any) -> Any:
        counter[...] += 1
        return (model.factor * x).sum()

    def loss(m: Scale) -> Any:
        return forward(2.0)

    for run in (sx.grad(loss), sx.jit(sx.grad(loss)), sx.grad(sx.jit(loss))):
        assert run(model)["factor"].tolist() == [2.0, 2.0]
    assert int(counter) == 3
    model.factor[...] = jnp.full(2, 5.0)
    assert float(forward(2.0)) == 20.0 and int(counter) == 4


def test_nested_and_inside_loops_and_lanes() -> None:
    model, plain = Noisy(sows=False), Noisy(sows=False)

    def inner(m: Noisy, x: Any) -> Any:
        return sx.remat(sx.remat(_call))(m, x)

    def through(forward: Any) -> Any:
        def loss(m: Noisy, xs: Any) -> Any:
            def body(m: Noisy, x: Any) -> tuple[Noisy, Any]:
                return m, forward(m, x)

            m, ys = sx.scan(body)(m, xs)
            return (ys**2).sum()

        return loss

    xs = np.stack([X, X + 1])
    found, expected = sx.grad(through(inner))(model, xs), sx.grad(through(_call))(plain, xs)
    _assert_close(found, expected)
    assert int(model.calls) == int(plain.calls) == 2

    lanes = sx.vmap(lambda m, x: sx.remat(_call)(m, x), in_axes=(None, 0))
    assert lanes(Double(), xs).tolist() == (xs * 2).tolist()


class Double(sx.Module):
    """Doubles."""

    def __init__(self) -> None:
        self.two = sx.Param(2.0)

    def __call__(self, x: Any) -> Any:
        return self.two * x


def test_exception_leaves_everything_untouched() -> None:
    model, counter = Scale(), sx.Variable(0)

    @sx.remat
    def forward(m: Scale) -> Any:
        counter[...] += 1
        m.factor += 1
        m.extra = sx.Param(1.0)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        forward(model)
    assert int(counter) == 0 and values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_remat_leaves_no_tracer_behind() -> None:
    model = Noisy()
    with jax.checking_leaks():
        sx.jit(sx.grad(_loss(sx.remat(_call))))(model, X)
        sx.grad(sx.jit(_loss(sx.remat(sx.jit(_call)))))(model, X)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sx.state(model)))


def _edit_outside(model: Scale) -> Any:
    def forward(x: Any) -> Any:
        model.extra = sx.Param(x)
        return x

    return sx.remat(forward)(1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.remat(_call)(Scale(), "a"), TransformError, r"\.x of sx\.remat is a str"),
        (lambda: sx.remat(lambda **k: 1.0)(m="a"), TransformError, r"\.m of sx\.remat is a str"),
        (lambda: sx.remat(lambda x: "a")(1.0), TransformError, r"sx\.remat returned 'a'"),
        (
            lambda: sx.remat(_call, static_argnums=0)(Scale(), 1.0),
            StaticArgumentError,
            r"'model' is static, but a Scale was passed",
        ),
        (
            lambda: sx.remat(_call, static_argnums=1)(Scale(), [1.0]),
            StaticArgumentError,
            r"'x' of _call is \[1\.0\]",
        ),
        (
            lambda: sx.remat(_call, static_argnums=2),
            StaticArgumentError,
            r"static_argnums=2 is out of range",
        ),
        (lambda: _edit_outside(Scale()), ForeignMutationError, r"'extra' of Scale inside sx\.rem"),
    ],
)
def test_remat_refuses_wrong_calls(call: Any, error: type[ShardaxError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    if "is a str" in message:
        names = {"sx": sx, "f": lambda x, mode: len(mode) * x, "rest": "mode"}
        static = run_advice(caught.value, "sx.remat(f, static_argnames=...)", names)
        assert static(2.0, mode="a") == 2.0


# --- laws ---


@given(models())
@FEW
def test_remat_keeps_values_writes_and_gradients(model: Any) -> None:
    model.own = sx.Param(1.0)
    other = sx.clone(model)
    out, gradients = sx.vjp(touch, model)
    found, rematerialized = sx.vjp(sx.remat(touch), other)
    assert_equal_values(found, out)
    assert_equal_values(rematerialized(out), gradients(out))
    assert_same_model(other, model)


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", None])
def test_gradients_are_those_of_finite_differences(policy: str | None) -> None:
    layer = with_values(sx.nn.Linear(3, 2, rngs=sx.Rngs(0)))
    chosen = None if policy is None else getattr(jax.checkpoint_policies, policy)
    run = sx.remat(lambda m, x: jnp.tanh(m(x)), policy=chosen)
    graphdef, state = sx.split(layer)

    @jax.jit
    def function(kernel: Any, x: Any) -> Any:
        return run(sx.merge(graphdef, state, {"kernel": kernel}), x)

    arguments = layer.kernel.value, np.ones(3, np.float32)
    check_grads(function, arguments, order=1, modes=["rev", "fwd"])
