# SPDX-License-Identifier: Apache-2.0
"""Host functions have the derivatives that they are given, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import shardax as sx
from shardax.errors import TransformError
from tests.advice import run_advice
from tests.tools.host.ways import doubling, same
from tests.tools.host.ways import way as way

host_function = sx.host.host_function

X = jnp.array([0.5, 1.0, 2.0])


def cube(x: np.ndarray) -> np.ndarray:
    return x**3


def cube_vjp(args: Any, result: Any, cotangent: Any) -> Any:
    return (3 * args[0] ** 2 * cotangent,)


def cube_jvp(args: Any, result: Any, tangents: Any) -> Any:
    return 3 * args[0] ** 2 * tangents[0]


RULES = {
    "vjp": {"vjp": cube_vjp},
    "jvp": {"jvp": cube_jvp},
    "vjp on the host": {"vjp": host_function(cube_vjp)},
    "jvp on the host": {"jvp": host_function(cube_jvp)},
}
BACKWARD = ["vjp", "jvp", "vjp on the host"]


def cubed(rule: str, **options: Any) -> sx.host.HostFunction:
    return host_function(cube, out=same, **RULES[rule], **options)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rule", BACKWARD)
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_are_those_of_the_rule(rule: str, compiled: Any) -> None:
    function = cubed(rule)
    gradient = compiled(jax.grad(lambda x: function(x).sum()))(X)
    assert gradient.tolist() == (3 * X**2).tolist()
    check_grads(compiled(function), (X,), order=1, modes=["rev"], rtol=1e-2)


@pytest.mark.parametrize("rule", ["jvp", "jvp on the host"])
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_tangents_are_those_of_the_rule(rule: str, compiled: Any) -> None:
    function = compiled(cubed(rule))
    assert jax.jacfwd(function)(X).diagonal().tolist() == (3 * X**2).tolist()
    check_grads(function, (X,), order=1, modes=["fwd"], rtol=1e-2)


@pytest.mark.parametrize("rule", ["vjp", "jvp"])
def test_rules_in_jax_have_derivatives_of_their_own(rule: str) -> None:
    function = cubed(rule)
    assert float(jax.grad(jax.grad(jax.grad(function)))(2.0)) == 6.0
    modes = ["rev"] if rule == "vjp" else ["fwd", "rev"]
    check_grads(jax.jit(function), (X,), order=2, modes=modes, rtol=2e-2)


def test_host_rule_may_have_its_own_rule() -> None:
    def second(args: Any, result: Any, cotangent: Any) -> Any:
        (x,), _, outer = args
        return ((6 * x * outer * cotangent[0],), None, 3 * x**2 * cotangent[0])

    function = host_function(cube, out=same, vjp=host_function(cube_vjp, vjp=second))
    assert float(jax.jit(jax.grad(jax.grad(function)))(2.0)) == 12.0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vmap", ["sequential", "vectorized"])
@pytest.mark.parametrize("rule", BACKWARD)
def test_gradients_of_lanes_and_lanes_of_gradients_agree(rule: str, vmap: str) -> None:
    function = cubed(rule, vmap=vmap)
    lanes = jax.vmap(jax.grad(function))(X)
    summed = jax.grad(lambda x: jax.vmap(function)(x).sum())(X)
    assert lanes.tolist() == summed.tolist() == (3 * X**2).tolist()


@pytest.mark.parametrize("rule", BACKWARD)
def test_gradients_go_through_loops_and_recomputation(rule: str) -> None:
    function = cubed(rule)

    def steps(c: Any) -> Any:
        body = jax.checkpoint(lambda c, x: (function(c) * x, None))
        return jax.lax.scan(body, c, jnp.array([1.0, 2.0]))[0]

    assert float(steps(1.5)) == 2 * 1.5**9
    assert float(jax.jit(jax.grad(steps))(1.5)) == pytest.approx(18 * 1.5**8)
    assert float(sx.grad(sx.remat(function))(2.0)) == 12.0


# --- integers -------------------------------------------------------------------------------------


def test_integer_results_stop_gradients() -> None:
    """By itself ``jax.pure_callback`` fails here: it is differentiated all the same."""
    index = host_function(np.argmax, out=jax.ShapeDtypeStruct((), int))

    def largest(x: Any) -> Any:
        return x[index(x)]

    assert jax.jit(jax.grad(largest))(X).tolist() == [0.0, 0.0, 1.0]
    assert jax.jvp(largest, (X,), (X,))[1].tolist() == 2.0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_rules_see_none_for_integers(on_host: bool, kind: str) -> None:
    def vjp(args: Any, result: Any, cotangent: Any) -> Any:
        assert cotangent["count"] is None
        return cotangent["scaled"] * args[1], None

    def jvp(args: Any, result: Any, tangents: Any) -> Any:
        assert tangents[1] is None
        return {"scaled": tangents[0] * args[1], "count": None}

    rule = {"vjp": vjp, "jvp": jvp}[kind]
    function = host_function(
        lambda x, n: {"scaled": x * n, "count": n},
        out=lambda x, n: {"scaled": x, "count": n},
        **{kind: host_function(rule) if on_host else rule},
    )
    if kind == "vjp":
        gradient = jax.jit(jax.grad(lambda x: function(x, 3)["scaled"].sum()))(X)
        assert gradient.tolist() == [3.0, 3.0, 3.0]
    else:
        zero = np.zeros((), jax.dtypes.float0)
        _, tangents = jax.jvp(function, (X, 3), (X, zero))
        assert tangents["scaled"].tolist() == (3 * X).tolist()
        assert tangents["count"].dtype == jax.dtypes.float0


def test_arguments_of_integers_have_gradients_without_numbers() -> None:
    function = host_function(lambda x, n: x * n, out=lambda x, n: x, vjp=lambda *_: (2.0, None))
    of_x, of_n = jax.grad(function, argnums=(0, 1), allow_int=True)(1.0, 3)
    assert (float(of_x), of_n.dtype) == (2.0, jax.dtypes.float0)


# --- none, and wrong ones -------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_missing_rule_error_names_the_differentiated_arguments(compiled: Any) -> None:
    function = compiled(host_function(lambda x, y, z: x, out=lambda x, y, z: x))

    def loss(y: Any) -> Any:
        return function(1.0, {"deep": y}, 2)

    with pytest.raises(TransformError, match=r"by \.y,.*nondiff=True"):
        jax.grad(loss)(1.0)
    with pytest.raises(TransformError, match=r"by \.y,"):
        jax.jvp(loss, (1.0,), (1.0,))
    assert float(jax.grad(lambda y: loss(jax.lax.stop_gradient(y)) * y)(1.0)) == 1.0


def test_nondiff_says_that_the_derivative_is_zero() -> None:
    function = doubling(nondiff=True)
    assert float(jax.jit(jax.grad(lambda x: function(x) * x))(3.0)) == 6.0
    assert float(jax.jvp(function, (3.0,), (1.0,))[1]) == 0.0


def test_host_function_derivative_left_out_by_a_rule_is_zero() -> None:
    function = host_function(
        lambda x, y: x * y,
        out=lambda x, y: x,
        vjp=host_function(lambda a, r, ct: (None, ct * a[0])),
    )
    assert [float(g) for g in jax.grad(function, argnums=(0, 1))(2.0, 3.0)] == [0.0, 2.0]
    still = host_function(cube, out=same, jvp=lambda *_: None)
    assert float(jax.grad(still)(2.0)) == 0.0


def test_gradient_that_fits_nothing_is_an_error() -> None:
    wrong = {
        "no tuple": (TransformError, {"vjp": lambda a, r, ct: ct}),
        "too many": (TransformError, {"vjp": lambda a, r, ct: (ct, ct)}),
        "shape": (TransformError, {"vjp": lambda a, r, ct: (ct[:1],)}),
        "tangent": (TransformError, {"jvp": lambda a, r, t: t[0][:1]}),
        "tree": (TransformError, {"jvp": lambda a, r, t: {"x": t[0]}}),
    }
    for error, rule in wrong.values():
        function = host_function(cube, out=same, **rule)
        with pytest.raises(error, match=r"cube|args\[0\]|result"):
            jax.grad(lambda x, function=function: function(x).sum())(X)


FORWARD = {
    "jax.jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "jax.hessian": lambda f: jax.hessian(f)(X),
    "sx.jvp": lambda f: sx.jvp(f, (X,), (X,)),
    "sx.jacfwd": lambda f: sx.jacfwd(f)(X),
    "sx.hessian": lambda f: sx.hessian(f)(X),
    "sx.jit": lambda f: sx.jit(sx.hessian(f))(X),
}


@pytest.mark.parametrize("forward", FORWARD.values(), ids=list(FORWARD))
def test_forward_mode_of_a_vjp_rule_names_the_modes_that_work(forward: Any) -> None:
    inner = host_function(lambda x: 3 * x**2, out=same, vjp=lambda a, r, ct: (6 * a[0] * ct,))
    backward = host_function(cube, out=same, vjp=lambda a, r, ct: (inner(a[0]) * ct,))
    with pytest.raises(TransformError, match=r"<host function (cube|<lambda>)> cannot") as caught:
        forward(lambda x: backward(x).sum())
    names = {"sx": sx, "f": lambda x: backward(x).sum()}
    first = run_advice(caught.value, "sx.jacrev(f)", names)(X)
    np.testing.assert_allclose(first, 3 * X**2, rtol=1e-6)
    second = run_advice(caught.value, "sx.jacrev(sx.jacrev(f))", names)(X)
    np.testing.assert_allclose(second, np.diag(6 * X), rtol=1e-6)
    forward(lambda x: host_function(cube, out=same, jvp=cube_jvp)(x).sum())


@pytest.mark.parametrize("staged", [sx.jit, sx.remat], ids=["jit", "remat"])
@pytest.mark.parametrize("name", ["jvp", "jacfwd", "hessian"])
def test_forward_mode_of_a_staged_vjp_rule_is_explained(name: str, staged: Any) -> None:
    backward = host_function(cube, out=same, vjp=host_function(cube_vjp))
    with pytest.raises(TypeError) as caught:
        FORWARD[f"sx.{name}"](staged(lambda x: backward(x).sum()))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "sx.jacrev(sx.jacrev(f))" in f"{caught.value}{notes}"


def test_rules_get_what_was_passed_by_name() -> None:
    def scale(x: np.ndarray, *, by: str) -> np.ndarray:
        return x * len(by)

    def vjp(args: Any, result: Any, cotangent: Any, *, by: str) -> Any:
        return (cotangent * len(by),)

    def jvp(args: Any, result: Any, tangents: Any, *, by: str) -> Any:
        return tangents[0] * len(by)

    for rule in ({"vjp": vjp}, {"vjp": host_function(vjp)}, {"jvp": jvp}):
        function = host_function(scale, out=lambda x, *, by: x, **rule)
        assert float(jax.jit(jax.grad(lambda x, f=function: f(x, by="three")))(1.0)) == 5.0


def test_implicit_functions_are_differentiated_by_what_they_solve() -> None:
    """A root found on the host; its derivative needs no step of the search."""

    def root(a: np.ndarray) -> np.ndarray:
        x = np.ones_like(a)
        for _ in range(50):
            x = (x + a / x) / 2
        return x

    def jvp(args: Any, x: Any, tangents: Any) -> Any:
        return tangents[0] / (2 * x)  # of x**2 == a

    function = host_function(root, out=same, jvp=jvp, vmap="vectorized")
    check_grads(jax.jit(function), (X,), order=2, modes=["fwd", "rev"], rtol=2e-2)
    check_grads(jax.vmap(function), (X,), order=2, modes=["fwd", "rev"], rtol=2e-2)


def test_host_rule_runs_only_for_gradients() -> None:
    calls = []

    def rule(args: Any, result: Any, cotangent: Any) -> Any:
        calls.append(type(result))
        return cube_vjp(args, result, cotangent)

    function = host_function(cube, out=same, vjp=host_function(rule))
    jax.jit(function)(X).block_until_ready()
    assert jax.eval_shape(jax.grad(function), 1.0).shape == ()
    assert calls == []
    jax.jit(jax.grad(function))(1.0).block_until_ready()
    assert calls == [np.ndarray]
