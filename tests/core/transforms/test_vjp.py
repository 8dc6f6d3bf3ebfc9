# SPDX-License-Identifier: Apache-2.0
"""vjp and jvp: what moves, how it is arranged, what the function leaves behind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import shardax as sx
from shardax.errors import ModuleError, ShardaxError, TransformError
from tests.advice import run_advice
from tests.core.transforms.examples import Box, Scale, Tied, values
from tests.core.transforms.pure import floating, pure_of, touch
from tests.strategies import assert_equal_values, assert_same_model, models

FEW = settings(max_examples=15)
FLOAT0 = np.zeros((), jax.dtypes.float0)


def _lists(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.tolist(), tree)


def _flat(state: sx.State) -> dict[Any, Any]:
    return _lists(state.flat())


def _forward(model: Scale, x: Any) -> Any:
    return model(x) ** 2


# --- vjp ---


def test_vjp_returns_result_and_gradient_per_argument() -> None:
    model, x = Scale(), jnp.array([1.0, 2.0])
    out, gradients = sx.vjp(_forward, model, x)
    of_model, of_x = gradients(jnp.array([1.0, 10.0]))
    assert out.tolist() == [0.25, 1.0]
    assert isinstance(of_model, sx.State) and _flat(of_model) == {("factor",): [0.5, 20.0]}
    assert of_model.origins()[("factor",)].variable_type is sx.Param
    assert of_x.tolist() == [0.5, 10.0]


def test_vjp_runs_once_and_carries_writes() -> None:
    model = Scale()
    _, gradients = sx.vjp(_forward, model, jnp.ones(2))
    assert int(model.calls) == 1
    gradients(jnp.ones(2)), gradients(jnp.ones(2))
    assert int(model.calls) == 1


def test_vjp_carries_structure_metadata_and_captured_writes_back() -> None:
    model, counter = Scale(), sx.Variable(0)

    def forward(m: Scale) -> Any:
        m.seen = sx.Intermediate(m.factor * 2)
        m.factor.set_metadata(axes=("embed",))
        counter[...] += 1
        counter.set_metadata(tag="used")
        return m.factor * 3

    assert _flat(sx.vjp(forward, model)[1](jnp.ones(2))[0]) == {("factor",): [3.0, 3.0]}
    assert values(model)[("seen",)] == [2.0, 2.0] and model.factor.axes == ("embed",)
    assert int(counter) == 1 and counter.metadata["tag"] == "used"


def test_vjp_with_aux_that_holds_objects() -> None:
    model = Scale()
    out, gradients, aux = sx.vjp(
        lambda m: (m.factor * 2, {"m": m, "new": sx.Param(m.factor + 1)}), model, has_aux=True
    )
    assert out.tolist() == [2.0, 2.0] and aux["m"] is model
    assert aux["new"].value.tolist() == [2.0, 2.0]
    assert _flat(gradients(jnp.ones(2))[0]) == {("factor",): [2.0, 2.0]}


def test_vjp_decorates_functions_and_methods() -> None:
    class Model(Scale):
        @sx.vjp
        def scaled(self, x: Any) -> Any:
            return self(x)

        @sx.vjp(has_aux=True, wrt=sx.PathContains("factor"))
        def with_aux(self, x: Any, *, times: Any) -> Any:
            return self(x) * times, self

    model = Model()
    _, gradients = model.scaled(jnp.full(2, 4.0))
    assert _lists(gradients(jnp.ones(2))[1]) == [0.5, 0.5]
    out, gradients, same = model.with_aux(jnp.full(2, 4.0), times=3.0)
    assert out.tolist() == [6.0, 6.0] and same is model and int(model.calls) == 2
    assert _flat(gradients(jnp.ones(2))[0]) == {("factor",): [6.0, 6.0]}


def test_vjp_of_modules_methods_and_variables() -> None:
    model = Scale()
    for function in (model, model.__call__):
        _, gradients = sx.vjp(function, jnp.ones(2))
        assert _lists(gradients(jnp.ones(2))) == ([0.5, 0.5],)
    assert int(model.calls) == 2
    gradient = sx.vjp(lambda v: v**3, sx.BatchStat(jnp.float32(2)))[1](1.0)
    assert isinstance(gradient[0], jax.Array) and float(gradient[0]) == 12.0


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (sx.Param, ({("p",): 2.0}, {("p",): 1.0})),
        (sx.BatchStat, ({("s",): 1.0}, {("s",): 2.0})),
        ((sx.Param, sx.BatchStat), ({("p",): 2.0, ("s",): 1.0}, {("p",): 1.0, ("s",): 2.0})),
        (sx.DiffState(1, sx.BatchStat), ({("p",): 2.0}, {("s",): 2.0})),
        ((sx.DiffState(-2, ...), sx.DiffState(1, None)), ({("p",): 2.0, ("s",): 1.0}, {})),
    ],
)
def test_wrt_filters_all_arguments_or_each(wrt: Any, expected: Any) -> None:
    def box() -> Box:
        made = Box()
        made.p, made.s = sx.Param(1.0), sx.BatchStat(1.0)
        return made

    if wrt == (sx.DiffState(-2, ...), sx.DiffState(1, None)):
        with pytest.raises(TransformError, match=r"'b' \(Box\) has no Variable .* None"):
            sx.vjp(lambda a, b: a.p, box(), box(), wrt=wrt)
        return
    _, gradients = sx.vjp(lambda a, b: a.p**2 * a.s * b.p * b.s**2, box(), box(), wrt=wrt)
    assert tuple(map(_flat, gradients(1.0))) == expected


def test_shared_variable_has_gradient_at_first_path() -> None:
    model = Tied(3.0)
    _, gradients = sx.vjp(lambda a, b: a.embed * b.head, model, model)
    assert [_flat(gradient) for gradient in gradients(1.0)] == [{("embed",): 6.0}, {}]
    _, gradients = sx.vjp(lambda a, b: a * b.head, model.embed, model)
    of_variable, of_model = gradients(1.0)
    assert (of_variable, _flat(of_model)) == (6.0, {})
    _, gradients = sx.vjp(lambda a, b: a.embed * b, model, model.embed, wrt=sx.BatchStat)
    assert [_flat(gradients(1.0)[0]), gradients(1.0)[1]] == [{}, 6.0]


def test_plain_arguments_are_differentiated_as_by_jax() -> None:
    def function(x: Any, y: Any, n: Any, key: Any) -> Any:
        return {"a": x["a"] * y, "b": (x["b"][0] + n, y.sum())}

    args = {"a": jnp.ones(2), "b": [jnp.zeros(3), 1.5]}, jnp.ones(2), 3, jax.random.key(0)
    out, mine = sx.vjp(function, *args)
    plain_out, plain = jax.vjp(function, *args)
    assert_equal_values(out, plain_out)
    assert_equal_values(mine(out), plain(out))
    assert mine(out)[2].dtype == mine(out)[3].dtype == jax.dtypes.float0


def test_gradients_of_pytree_have_its_structure() -> None:
    tree = {"m": Scale(), "x": [jnp.array([1.0, 2.0])]}
    _, gradients = sx.vjp(lambda t: t["m"].factor * t["x"][0], tree)
    gradient = gradients(jnp.ones(2))[0]
    assert _flat(gradient["m"]) == {("factor",): [1.0, 2.0]}
    assert _lists(gradient["x"]) == [[1.0, 1.0]]


def test_gradients_can_leave_a_compiled_function() -> None:
    model = Scale()
    run = sx.jit(lambda m, x: sx.vjp(_forward, m, x))
    for _ in range(2):
        out, gradients = run(model, jnp.array([1.0, 2.0]))
        assert out.tolist() == [0.25, 1.0]
        assert _flat(gradients(jnp.array([1.0, 10.0]))[0]) == {("factor",): [0.5, 20.0]}
    assert int(model.calls) == 2


def test_lazy_params_are_materialized() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    _, gradients = sx.vjp(lambda m, x: m(x), layer, jnp.ones(2))
    assert gradients(jnp.ones(3))[0]["kernel"].tolist() == [[1.0] * 3] * 2
    assert not layer.kernel.is_lazy


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sx.vjp(lambda m: m, Scale()), TransformError, r"a Scale at the result itse"),
        (
            lambda: sx.vjp(lambda m: {"a": [1.0, m.factor]}, Scale()),
            TransformError,
            r"sx\.vjp returned a Param at a\.1, .* has_aux=True",
        ),
        (
            lambda: sx.vjp(lambda m: m.factor * 1, Scale(), wrt=sx.Cache),
            TransformError,
            r"'m' \(Scale\) has no Variable that the filter Cache",
        ),
        (
            lambda: sx.vjp(lambda m: m, Scale(), wrt=(sx.Param, sx.DiffState(0))),
            TransformError,
            r"mixes filters and DiffStates",
        ),
        (
            lambda: sx.vjp(lambda m: m, Scale(), wrt=sx.DiffState(1)),
            TransformError,
            r"argnums=1 is out of range",
        ),
        (
            lambda: sx.vjp(lambda x: x, 1.0, has_aux=True),
            TransformError,
            r"must return \(result, aux\), but it returned a",
        ),
        (lambda: sx.vjp(lambda m, x: x, Scale(), ["a"]), TransformError, r"\.x\[0\] .* is a str"),
        (
            lambda: sx.vjp(lambda m: m.factor * 1, sx.eval_shape(Scale)),
            ModuleError,
            r"2 Variables hold only shapes, not arrays: \.m\.factor, \.m\.calls",
        ),
    ],
)
def test_vjp_refuses_wrong_calls(call: Any, error: type[ShardaxError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_exception_leaves_everything_untouched() -> None:
    model, counter = Scale(), sx.Variable(0)

    def forward(m: Scale) -> Any:
        counter[...] += 1
        m.factor += 1
        m.extra = sx.Param(1.0)
        raise KeyError("stop")

    for call in (lambda: sx.vjp(forward, model), lambda: sx.jvp(forward, (model,), (None,))):
        with pytest.raises(KeyError, match="stop"):
            call()
    assert int(counter) == 0 and values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


# --- jvp ---


def test_jvp_gives_the_result_and_how_it_moves() -> None:
    model, x = Scale(), jnp.array([1.0, 2.0])
    moves = sx.State({"factor": jnp.array([1.0, 0.0])})
    out, moved = sx.jvp(_forward, (model, x), (moves, jnp.array([0.0, 1.0])))
    assert out.tolist() == [0.25, 1.0] and moved.tolist() == [0.5, 1.0]
    assert int(model.calls) == 1


@pytest.mark.parametrize(
    ("tangents", "expected"),
    [
        ((None, None), [0.0, 0.0]),
        (({}, None), [0.0, 0.0]),
        (({"factor": jnp.ones(2)}, None), [0.5, 2.0]),
        (({"factor": jnp.ones(2), "calls": None}, jnp.ones(2)), [1.0, 3.0]),
        (({"factor": jnp.ones(2), "calls": FLOAT0}, jnp.ones(2)), [1.0, 3.0]),
    ],
)
def test_missing_tangents_are_zero(tangents: Any, expected: Any) -> None:
    found = sx.jvp(_forward, (Scale(), jnp.array([1.0, 2.0])), tangents)[1]
    assert found.tolist() == expected


def test_gradient_is_a_direction() -> None:
    model = Scale()
    gradient = sx.grad(lambda m: _forward(m, 2.0).sum())(model)
    _, moved = sx.jvp(lambda m: _forward(m, 2.0).sum(), (model,), (gradient,))
    assert float(moved) == float((gradient["factor"] ** 2).sum())


def test_any_variable_may_move_not_only_params() -> None:
    model = Box()
    model.stat, model.pair = sx.BatchStat(3.0), sx.Variable({"a": jnp.float32(2), "n": 1})
    moves = {"stat": 1.0, "pair": {"a": 10.0, "n": None}}
    _, moved = sx.jvp(lambda m: m.stat**2 * m.pair.value["a"], (model,), (moves,))
    assert float(moved) == 6.0 * 2.0 + 9.0 * 10.0


def test_jvp_with_aux_as_decorator_and_with_keywords() -> None:
    @sx.jvp(has_aux=True)
    def function(m: Scale, x: Any, *, times: Any) -> Any:
        return m(x) * times, m

    model = Scale()
    out, moved, same = function((model, 2.0), ({"factor": jnp.ones(2)}, None), times=3.0)
    assert out.tolist() == moved.tolist() == [3.0, 3.0] and same is model


def test_writes_are_carried_back_without_tangent() -> None:
    cache = sx.Cache(jnp.float32(0))

    def function(c: sx.Cache[Any], x: Any) -> Any:
        c[...] = x * 2
        return x

    assert float(sx.jvp(function, (cache, 3.0), (None, 1.0))[1]) == 1.0
    assert float(cache) == 6.0 and isinstance(cache.value, jax.Array)


def test_nested_jvp_and_vjp_give_second_derivatives() -> None:
    v = sx.Param(jnp.float32(3))

    def slope(v: Any) -> Any:
        return sx.vjp(lambda w: w**3, v)[1](1.0)[0]

    assert float(sx.jvp(slope, (v,), (1.0,))[1]) == 18.0
    moved = sx.vjp(lambda v: sx.jvp(lambda w: w**3, (v,), (1.0,))[1], v)
    assert float(moved[1](1.0)[0]) == 18.0


@pytest.mark.parametrize(
    ("tangents", "message"),
    [
        (({"facto": jnp.ones(2)}, None), r"\.facto \(did you mean \.factor\?\)"),
        (({"factor": jnp.ones(3)}, None), r"\.model\.factor is float32\[3\], but must be float32"),
        (({"factor": jnp.ones(2, jnp.bfloat16)}, None), r"\.model\.factor is bfloat16\[2\]"),
        (({"calls": jnp.ones((), jnp.int32)}, None), r"\.model\.calls, which has dtype int32"),
        ((jnp.ones(2), None), r"the Scale at \.model is of type ArrayImpl; it must be a State"),
        ((sx.Rngs(0), None), r"The tangent for \.model: .*:\n  \.default\.key"),
        ((None, jnp.ones(3)), r"tangent for \.x is float32\[3\]"),
        ((None, {"a": 1.0}), r"tangent for \.x is of type dict"),
        ((None,), r"2 primals and 1 tangents"),
        (jnp.ones(2), r"were given as ArrayImpl"),
    ],
)
def test_tangent_that_does_not_fit_is_named(tangents: Any, message: str) -> None:
    model = Scale()
    with pytest.raises(TransformError, match=message) as caught:
        sx.jvp(_forward, (model, jnp.ones(2)), tangents)
    assert int(model.calls) == 0
    if "were given as" in message:
        names = {"sx": sx, "f": lambda x: x**2, "x": 3.0, "direction": 1.0}
        _, moved = run_advice(caught.value, "sx.jvp(f, (x,), (direction,))", names)
        assert float(moved) == 6.0


def test_tangent_of_another_form_is_refused_by_place() -> None:
    variable = sx.Variable((jnp.ones(2), jnp.ones(2)))
    with pytest.raises(TransformError) as caught:
        sx.jvp(lambda v: v.value[0], (variable,), ([1.0, 2.0, 3.0],))
    assert str(caught.value) == (
        "The tangent for .v is not arranged like its value: Expected tuple, got [1.0, 2.0, 3.0]."
    )
    with pytest.raises(TransformError) as caught:
        sx.jvp(lambda pair: pair["a"], ({"a": 1.0, "b": 2.0},), ({"a": 1.0},))
    assert str(caught.value) == (
        "The tangent for the argument 'pair' is not arranged like it: Dict key mismatch; expected "
        "keys: ['a', 'b']; present keys: ['a']."
    )


def test_shared_variable_has_one_tangent() -> None:
    model, one = Tied(3.0), jnp.float32(1)

    def product(a: Tied, b: Tied) -> Any:
        return a.embed * b.head

    for tangents in (({"embed": one}, None), ({"embed": one}, {"embed": one})):
        assert float(sx.jvp(product, (model, model), tangents)[1]) == 6.0
    with pytest.raises(TransformError, match=r"\.a\.embed\n  \.b\.embed"):
        sx.jvp(product, (model, model), ({"embed": one}, {"embed": 2 * one}))


# --- laws ---


@given(models())
@FEW
def test_vjp_of_model_matches_jax_on_values(model: Any) -> None:
    model.own = sx.Param(1.0)
    pure, state, paths = pure_of(touch, sx.clone(model))
    out, plain = jax.vjp(pure, state)
    written = sx.clone(model)
    touch(written)
    mine_out, mine = sx.vjp(touch, model, wrt=...)
    assert_equal_values(mine_out, out)
    assert_same_model(model, written)
    gradients = mine(out)[0].flat()
    assert list(gradients) == paths
    assert_equal_values(list(gradients.values()), plain(out)[0])


@given(models())
@FEW
def test_jvp_of_model_matches_jax_on_values(model: Any) -> None:
    pure, state, paths = pure_of(touch, sx.clone(model))
    places = [place for place, value in enumerate(state) if floating(value)]
    moving = [state[place] for place in places]
    moves = jax.tree.map(lambda leaf: leaf + 1, moving)

    def pure_of_moving(points: Any) -> Any:
        values = list(state)
        for place, point in zip(places, points, strict=True):
            values[place] = point
        return pure(values)

    expected = jax.jvp(pure_of_moving, (moving,), (moves,))
    given_moves = dict(zip([paths[place] for place in places], moves, strict=True))
    found = sx.jvp(touch, (model,), (sx.State.from_flat(given_moves),))
    assert_equal_values(found, expected)
