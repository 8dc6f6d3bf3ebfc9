# SPDX-License-Identifier: Apache-2.0
"""``while_loop`` and ``fori_loop``: what goes around, what is only read, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import TransformError
from tests.core.transforms.examples import Box, Many, Scale, Tied, step, values


def _below(limit: int) -> Any:
    return lambda model: model.calls < limit


def _call(model: Scale) -> Scale:
    model.factor[...] = model(jnp.ones(2)) * 2
    return model


# --- what goes around ---


def test_carried_module_keeps_its_identity() -> None:
    model = Scale(rate=1.0)
    factor = model.factor
    assert sx.while_loop(_below(3), _call, model) is model
    assert model.factor is factor and values(model) == {("factor",): [8.0, 8.0], ("calls",): 3}


def test_condition_that_never_holds_changes_nothing() -> None:
    model = Scale()
    assert sx.while_loop(_below(0), _call, model) is model
    assert values(model) == values(Scale())


def test_carry_is_pytree_of_arrays_and_objects() -> None:
    model, tied = Scale(), Tied()

    def body(carry: Any) -> Any:
        i, parts = carry["i"], carry["parts"]
        parts[1].embed[...] = parts[1].embed + i
        return {"i": i + 1, "parts": parts, "none": None, "cell": carry["cell"]}

    first = {"i": 0, "parts": (model, tied), "none": None, "cell": tied.head}
    last = sx.while_loop(lambda carry: carry["i"] < 3, body, first)
    assert last["parts"][0] is model and last["cell"] is tied.head and last["none"] is None
    assert int(last["i"]) == 3 and float(tied.head) == 6.0


def test_fori_loop_carries_written_variables_only() -> None:
    many = Many(4)

    def body(i: Any, many: Many) -> Many:
        many.cells[2][...] = many.cells[2] + many.cells[0] + i
        return many

    def loop(many: Many) -> Many:
        return sx.fori_loop(0, 3, body, many)

    (equation,) = sx.make_jaxpr(loop)(many).jaxpr.eqns
    assert loop(many) is many
    assert [cell.value.tolist() for cell in many.cells] == [
        [0.0] * 2,
        [0.0] * 2,
        [3.0] * 2,
        [0.0] * 2,
    ]
    # The index, and the one Variable that is written.
    assert [result.aval.shape for result in equation.outvars] == [(), (2,)]


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_captured_variables_that_are_written_are_carried() -> None:
    total, step_size = sx.Variable(jnp.float32(0)), sx.Variable(jnp.float32(2))

    def body(i: Any) -> Any:
        total[...] = total + step_size
        return i + 1

    run = lambda: sx.while_loop(lambda i: total < 7, body, 0)  # noqa: E731
    assert int(run()) == 4 and float(total) == 8.0
    total[...] = 0.0
    assert int(sx.jit(run)()) == 4 and float(total) == 8.0 and float(step_size) == 2.0


def test_captured_module_in_carry_keeps_identity() -> None:
    model = Scale()

    def body(carry: Any) -> Any:
        model.calls += 1
        return model, carry[1] + carry[0].calls

    last = sx.while_loop(lambda carry: model.calls < 3, body, (model, 0))
    assert last[0] is model and int(last[1]) == 1 + 2 + 3


def test_nested_loops_write_captured_variables() -> None:
    count = sx.Variable(jnp.int32(0))

    def inner(j: Any, x: Any) -> Any:
        count[...] = count + 1
        return x + j

    def outer(i: Any, x: Any) -> Any:
        return sx.fori_loop(0, i, inner, x)

    assert int(sx.fori_loop(0, 4, outer, 0)) == 4 and int(count) == 6


def test_random_numbers_match_a_python_loop() -> None:
    rngs, same = sx.Rngs(0), sx.Rngs(0)

    def body(i: Any, x: Any) -> Any:
        return x + jax.random.normal(rngs())

    expected = sum(float(jax.random.normal(same())) for _ in range(3))
    assert float(sx.fori_loop(0, 3, body, jnp.float32(0))) == pytest.approx(expected, rel=1e-5)
    assert int(rngs.default.count) == 3


def test_functions_may_be_methods_partials_and_modules() -> None:
    class Halver(sx.Module):
        def __init__(self) -> None:
            self.count = sx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.count += 1
            return x / 2

        def large(self, limit: Any, x: Any) -> Any:
            return x > limit

    halver = Halver()
    condition = functools.partial(halver.large, jnp.float32(1))
    assert float(sx.while_loop(condition, halver, jnp.float32(8))) == 1.0
    assert int(halver.count) == 3


@pytest.mark.parametrize("bounds", [(0, 5), (2, 2), (3, 1), (-2, 2)])
@pytest.mark.parametrize("traced", [False, True])
def test_fori_loop_counts_as_pythons_range(bounds: tuple[int, int], traced: bool) -> None:
    def run(lower: Any, upper: Any) -> Any:
        return sx.fori_loop(lower, upper, lambda i, x: x * 3 + i, jnp.int32(1))

    expected = functools.reduce(lambda x, i: x * 3 + i, range(*bounds), 1)
    assert int(sx.jit(run)(*bounds) if traced else run(*bounds)) == expected


def test_bounds_may_have_a_dtype_of_their_own() -> None:
    lower, upper = jnp.int8(0), sx.Variable(jnp.int8(3))
    total = sx.fori_loop(lower, upper, lambda i, x: x + i, jnp.int8(0))
    assert total.dtype == jnp.int8 and int(total) == 3


def test_body_and_condition_are_traced_once() -> None:
    traced = []

    def body(i: Any, model: Scale) -> Scale:
        traced.append("body")
        return _call(model)

    def condition(model: Scale) -> Any:
        traced.append("condition")
        return model.calls < 2

    sx.fori_loop(0, 3, body, Scale())
    sx.while_loop(condition, functools.partial(body, 0), Scale())
    assert traced == ["body", "body", "condition"]


def test_python_number_takes_the_body_dtype() -> None:
    result = sx.while_loop(lambda x: x < 10, lambda x: x * jnp.float32(1.5), 1.0)
    assert result.dtype == jnp.float32 and float(result) == jax.lax.while_loop(
        lambda x: x < 10, lambda x: x * jnp.float32(1.5), 1.0
    )


# --- what is refused ---


@pytest.mark.parametrize(
    ("new", "shown"),
    [
        (lambda: jnp.ones(3), r"float32\[3\]"),
        (lambda: jnp.ones(2, jnp.int32), r"int32\[2\]"),
        (lambda: [jnp.ones(2)], r"\[float32\[2\]\]"),
    ],
)
def test_variable_keeps_its_form(new: Any, shown: str) -> None:
    model = Box()
    model.inner = Scale()

    def body(model: Box) -> Box:
        model.inner.calls += 1
        model.inner.factor.value = new()
        return model

    told = rf"Param at \.model\.inner\.factor .*from float32\[2\] to {shown}"
    with pytest.raises(TransformError, match=told):
        sx.while_loop(lambda model: model.inner.calls < 2, body, model)
    assert values(model.inner) == values(Scale())


def test_array_keeps_its_form() -> None:
    with pytest.raises(
        TransformError, match=r"\.carry\.a\[1\] .*from float32\[2\] to float32\[4\]"
    ):
        sx.fori_loop(0, 2, lambda i, carry: {"a": (1, jnp.ones(4))}, {"a": (1, jnp.ones(2))})


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (
            lambda model: {"model": model},
            r"keys 'model', 'x' came back as a dict with keys 'model'",
        ),
        (lambda model: {"model": Scale(), "x": 1}, "another Scale"),
        (lambda model: {"model": model.factor, "x": 1}, "another Param"),
        (lambda model: {"model": model, "x": model.calls}, r"\.x"),
    ],
)
def test_changed_carry_structure_raises(returned: Any, told: str) -> None:
    with pytest.raises(TransformError, match=told):
        sx.fori_loop(0, 2, lambda i, c: returned(c["model"]), {"model": Scale(), "x": 1})


def test_structure_of_a_module_stays() -> None:
    def body(i: Any, model: Scale) -> Scale:
        model.sow("seen", jnp.float32(i))
        return model

    model = Scale()
    with pytest.raises(TransformError, match=r"Scale at \.model: \.seen is new"):
        sx.fori_loop(0, 2, body, model)
    assert not hasattr(model, "seen")


@pytest.mark.parametrize("passed", [True, False])
def test_condition_only_reads(passed: bool) -> None:
    model = Box()
    model.rngs = sx.Rngs(noise=0)
    model.x = sx.Variable(jnp.float32(0))

    def draw(given: Any) -> Any:
        return jax.random.uniform((given if passed else model).rngs.noise()) < 0.5

    body = lambda given: given  # noqa: E731
    with pytest.raises(TransformError, match=r"RngState at \.(given|model)\.rngs\.noise\.count"):
        sx.while_loop(draw, body, model if passed else 0)
    assert int(model.rngs.noise.count) == 0


def test_condition_sets_no_attribute() -> None:
    def condition(model: Box) -> Any:
        model.asked = True
        return False

    model = Box()
    with pytest.raises(TransformError) as caught:
        sx.while_loop(condition, lambda model: model, model)
    assert str(caught.value).startswith(
        "The condition of sx.while_loop changes the Box at .model, but it only reads"
    )
    assert not hasattr(model, "asked")


@pytest.mark.parametrize("bad", [lambda x: jnp.array([True, False]), lambda x: "yes"])
def test_condition_returns_one_boolean(bad: Any) -> None:
    with pytest.raises(TransformError, match=r"condition of sx\.while_loop .*one boolean"):
        sx.while_loop(bad, lambda x: x, 0)


@pytest.mark.parametrize("bad", [1.5, jnp.arange(2), "3", True])
def test_bounds_are_integers(bad: Any) -> None:
    with pytest.raises(TransformError, match=r"upper of sx\.fori_loop must be one integer"):
        sx.fori_loop(0, bad, lambda i, x: x, 0)
    with pytest.raises(TransformError, match=r"lower of sx\.fori_loop must be one integer"):
        sx.fori_loop(bad, 3, lambda i, x: x, 0)


def test_carry_holds_arrays_and_objects() -> None:
    with pytest.raises(TransformError, match=r"\.options\.mode of sx\.while_loop is a str"):
        sx.while_loop(lambda options: True, lambda options: options, {"mode": "a"})


# --- inside other transforms ---


def test_under_vmap_each_lane_stops_by_itself() -> None:
    lanes = sx.vmap(lambda rate: Scale(1, rate=1.0), axis_size=3)(jnp.zeros(3))
    result = sx.vmap(
        lambda model, limit: sx.while_loop(lambda m: m.calls < limit, _call_one, model)
    )(lanes, jnp.arange(3))
    assert result is lanes
    assert lanes.calls.value.tolist() == [0, 1, 2]
    assert lanes.factor.value.tolist() == [[1.0], [2.0], [4.0]]


def _call_one(model: Scale) -> Scale:
    model.factor[...] = model(jnp.ones(1)) * 2
    return model


def test_fori_loop_has_a_gradient_through_state() -> None:
    model = Box()
    model.weight, model.state = sx.Param(jnp.float32(2)), sx.Variable(jnp.float32(1))

    def body(i: Any, model: Box) -> Box:
        model.state[...] = model.state * model.weight
        return model

    gradient = sx.grad(lambda m: sx.fori_loop(0, 3, body, m).state.value)(model)
    assert float(gradient["weight"]) == 3 * 2.0**2 and float(model.state) == 8.0


def test_bounded_while_loop_has_the_reverse_mode_that_while_loop_lacks() -> None:
    model = Scale()

    def loss(m: Scale) -> Any:
        return sx.while_loop(lambda x: x < 9, lambda x: x + m.factor.sum(), 0.0)

    def bounded(m: Scale, **options: Any) -> Any:
        return sx.bounded_while_loop(
            lambda x: x < 9, lambda x: x + m.factor.sum(), 0.0, max_steps=9, **options
        ).final

    # JAX's own error.
    for function in (loss, bounded):
        with pytest.raises(ValueError, match="while_loop"):
            sx.grad(function)(model)
    _, pullback = sx.vjp(loss, model)
    with pytest.raises(ValueError, match="while_loop"):
        pullback(1.0)

    steps = np.ceil(9 / np.asarray(model.factor.value).sum())
    gradient = sx.grad(lambda m: bounded(m, differentiable="recompute"))(model)
    np.testing.assert_array_equal(gradient["factor"], [steps, steps])


def test_carry_may_become_different_between_shards(auto_mesh: Any) -> None:
    def shard(x: Any) -> Any:
        total = sx.Variable(jnp.zeros(1))

        def body(i: Any, carry: Any) -> Any:
            total[...] = total + x
            return carry + i * x.sum()

        result = sx.fori_loop(0, 3, body, 0.0)
        result += sx.while_loop(lambda r: r < 2, lambda r: r + x.sum(), 0.0)
        return total.value + result

    mapped = jax.shard_map(shard, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(mapped)(jnp.array([1.0, 2.0])).tolist() == [3 + 3 + 2, 6 + 6 + 2]


# --- laws ---


@sx.jit(static_argnames=("position", "captured"))
def _loop(many: Many, limit: Any, *, position: int, captured: bool) -> Any:
    """A loop whose model is captured by its functions or goes around; returns a number."""

    def body(many: Many, x: Any) -> Any:
        step(many)
        many.cells[position][...] = many.cells[position] * 2 + x
        return x + 1

    def holds(many: Many, x: Any) -> Any:
        return many.cells[position].value.sum() + x < limit

    if captured:
        return sx.while_loop(lambda x: holds(many, x), lambda x: body(many, x), 0)
    same, last = sx.while_loop(lambda c: holds(*c), lambda c: (c[0], body(*c)), (many, 0))
    assert same is many
    return last


@pytest.mark.parametrize(("position", "captured"), [(0, True), (1, False), (2, True), (3, False)])
def test_while_loop_is_pythons_while(position: int, captured: bool) -> None:
    for limit in (0, 1, 10, 30, 50):
        many, expected, x = Many(4), np.zeros((4, 2)), 0
        while expected[position].sum() + x < limit:
            expected += 1
            expected[position] = expected[position] * 2 + x
            x += 1
        assert int(_loop(many, limit, position=position, captured=captured)) == x
        assert [cell.value.tolist() for cell in many.cells] == expected.tolist()
