# SPDX-License-Identifier: Apache-2.0
"""``custom_jvp``: tangents of the author's for functions over Modules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import ClosureError, TransformError
from tests.strategies import Node


def _model() -> Node:
    model = Node()
    model.w = sx.Param(jnp.array([1.0, 2.0]))
    model.tied, model.count = model.w, sx.Variable(jnp.float32(0))
    return model


def _function(model: Any, x: Any) -> Any:
    model.count.value = model.count + 1
    return model.w * x


def _made(function: Any = _function, **options: Any) -> Any:
    """Returns the function with 10 times the tangent of w."""
    made = sx.custom_jvp(function, **options)

    @made.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (model, x), (of_model, of_x) = primals, tangents
        return _function(model, x), 10 * of_model["w"] * x + of_x * model.w.value

    return made


X = jnp.array([3.0, 5.0])
AROUND = pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])


@AROUND
def test_rule_gives_tangents_gradients_and_effects(around: Any) -> None:
    model, made = _model(), _made()
    assert around(made)(model, X).tolist() == [3.0, 10.0]
    assert float(model.count) == 1.0
    grads, of_x = around(sx.grad(lambda m, x: made(m, x).sum(), argnums=(0, 1)))(model, X)
    assert {path: v.tolist() for path, v in grads.flat().items()} == {("w",): [30.0, 50.0]}
    assert (of_x.tolist(), float(model.count)) == ([1.0, 2.0], 2.0)
    moves = {"w": jnp.ones(2)}
    _, moved = around(lambda model, x: sx.jvp(made, (model, x), (moves, None)))(model, X)
    assert (moved.tolist(), float(model.count)) == ([30.0, 50.0], 3.0)


def test_diff_state_chooses_the_variables_with_a_tangent() -> None:
    model = _model()
    model.mean = sx.BatchStat(jnp.array([3.0, 5.0]))
    scaled = sx.custom_jvp(
        lambda model: model.w * model.mean, nondiff_argnums=sx.DiffState(0, sx.BatchStat)
    )
    scaled.defjvp(lambda primals, tangents: (scaled(*primals), 10 * tangents[0]["mean"]))
    grads = sx.grad(lambda model: scaled(model).sum(), wrt=sx.BatchStat)(model)
    assert grads["mean"].tolist() == [10.0, 10.0]
    with pytest.raises(TransformError, match=r"arrives at the Param at \.model\.w, for which"):
        sx.grad(lambda model: scaled(model).sum())(model)


def test_rule_holds_inside_other_transforms() -> None:
    model, made = _model(), _made()

    def total(model: Any, xs: Any) -> Any:
        rows = sx.vmap(lambda w, x: made(_with(model, w), x), in_axes=(None, 0))(model.w, xs)
        carried = sx.scan(lambda c, x: (c + sx.jit(made)(model, x), x))(jnp.zeros(2), xs)[0]
        return rows.sum() + carried.sum()

    grads = sx.grad(total)(model, jnp.stack([X, X]))
    assert grads["w"].tolist() == [120.0, 200.0]
    assert float(model.count) == 2.0


def _with(model: Any, w: Any) -> Any:
    fresh = _model()
    fresh.w = w
    return fresh


def test_nondifferentiable_arguments_come_first() -> None:
    power = sx.custom_jvp(lambda n, w: w.value**n, nondiff_argnums=0)

    @power.defjvp
    def rule(n: int, primals: Any, tangents: Any) -> Any:
        return primals[0].value ** n, n * tangents[0]

    assert float(sx.grad(lambda w: power(3, w))(sx.Param(jnp.float32(2)))) == 3.0


@settings(max_examples=8)
@given(st.sampled_from(["jvp", "grad", "jacfwd", "jit"]), st.booleans())
def test_pure_functions_have_the_tangents_of_jax(name: str, zero: bool) -> None:
    def f(x: Any, y: Any) -> Any:
        return {"a": jnp.sin(x) * y, "n": jnp.int32(2)}

    def rule(primals: Any, tangents: Any) -> Any:
        result = f(*primals)
        tangent = jnp.zeros(()) if zero else 2 * tangents[0] + tangents[1]
        return result, {"a": tangent, "n": np.zeros((), jax.dtypes.float0)}

    results = []
    for library in (sx, jax):
        made = library.custom_jvp(f)
        made.defjvp(rule)
        first = lambda x, y, made=made: made(x, y)["a"]  # noqa: E731
        transform = getattr(library, name)
        if name == "jvp":
            results.append(transform(first, (0.5, 2.0), (1.0, 3.0)))
        else:
            results.append(transform(first)(0.5, 2.0))
    assert jax.tree.map(float, results[0]) == jax.tree.map(float, results[1])


def test_custom_jvp_refuses_what_a_rule_loses_by_path() -> None:
    model, made = _model(), _made(wrt=sx.Cache)
    with pytest.raises(TransformError, match=r"arrives at the Param at \.model\.w, for which"):
        sx.grad(lambda m: made(m, X).sum())(model)
    with pytest.raises(TransformError, match="has no tangent yet"):
        sx.custom_jvp(_function)(model, X)
    with pytest.raises(TransformError, match=r"nondiff_argnums names the argument 5"):
        _made(nondiff_argnums=5)(model, X)
    with pytest.raises(TransformError, match=r"nondiff_argnums names the argument -1 twice"):
        _made(nondiff_argnums=(1, -1))(model, X)


def test_rule_with_other_effects_is_refused() -> None:
    model = _model()
    other = sx.custom_jvp(lambda model, x: model.w * x)
    other.defjvp(lambda primals, tangents: (_function(*primals), tangents[1]))
    with pytest.raises(TransformError, match=r"writes \.model\.count, which the function"):
        sx.grad(lambda m: sx.jit(other)(m, X).sum())(model)
    wrong = sx.custom_jvp(lambda x: x)
    wrong.defjvp(lambda primals, tangents: primals[0])
    with pytest.raises(
        TransformError, match="must return \\(result, tangent\\), but it returned a"
    ):
        sx.grad(wrong)(1.0)


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_captured_variables_are_inputs_of_the_function() -> None:
    count, scale = sx.Variable(jnp.float32(0)), sx.Variable(jnp.float32(4))

    @sx.custom_jvp
    def f(x: Any) -> Any:
        count.value = count + 1
        return scale * x

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        count.value = count + 1
        return scale * primals[0], 2 * scale * tangents[0]

    assert float(sx.jit(sx.grad(f))(1.0)) == float(sx.grad(sx.jit(f))(1.0)) == 8.0
    assert float(count) == 2.0
    late = sx.custom_jvp(lambda x: x)
    late.defjvp(lambda primals, tangents: (primals[0], scale * tangents[0]))
    assert float(sx.grad(late)(1.0)) == 4.0
    with pytest.raises(ClosureError, match="when differentiated, a Variable"):
        sx.grad(sx.jit(late))(1.0)


class RuledMethod(sx.Module):
    """A method with a tangent of its own."""

    def __init__(self) -> None:
        self.w = sx.Param(jnp.float32(2))

    @sx.custom_jvp
    def times(self, x: Any) -> Any:
        return x * self.w

    times.defjvp(lambda primals, tangents: (primals[0].w * primals[1], 7 * tangents[1]))


def test_decorated_method_is_bound_to_its_object() -> None:
    model = RuledMethod()
    result, tangent = sx.jvp(model.times, (3.0,), (1.0,))
    assert (float(model.times(3.0)), float(result), float(tangent)) == (6.0, 6.0, 7.0)
    assert repr(RuledMethod.times) == "<custom_jvp of RuledMethod.times>"


def test_arguments_taken_by_name_alone_are_refused() -> None:
    def scaled(x: Any, *, rate: Any) -> Any:
        return x * rate

    made = sx.custom_jvp(scaled)
    made.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(TransformError) as caught:
        made(1.0, rate=2.0)
    assert str(caught.value) == (
        f"{made!r} was given rate by name alone, and the rule of sx.custom_jvp takes them by "
        "position. Let the function take them so."
    )


def test_tangent_of_another_form_is_refused_with_cause() -> None:
    pair = sx.custom_jvp(lambda x: (x, x))
    pair.defjvp(lambda primals, tangents: ((primals[0], primals[0]), [tangents[0]] * 3))
    with pytest.raises(TransformError) as caught:
        sx.jvp(pair, (1.0,), (1.0,))
    assert str(caught.value).startswith(
        "The tangent that the rule of sx.custom_jvp returned is not arranged like its result: "
        "Expected tuple, got ["
    )


def test_integers_have_tangents_without_numbers() -> None:
    kinds: list[Any] = []
    power = sx.custom_jvp(lambda x, n: x**n)

    @power.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        kinds.append((tangents[1].dtype, tangents[1].shape))
        return primals[0] ** primals[1], 10 * tangents[0]

    assert float(sx.grad(power)(2.0, jnp.int32(3))) == 10.0
    assert kinds == [(jax.dtypes.float0, ())]
