# SPDX-License-Identifier: Apache-2.0
"""``bounded_while_loop``: history, length, convergence, padding, state and lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import TransformError
from tests.core.transforms.examples import Many, Scale, step, values

MODES = ("no", "store", "recompute")
every_mode = pytest.mark.parametrize("mode", MODES)


def _below(limit: Any) -> Callable[[Any], Any]:
    return lambda x: x < limit


def _add_one(x: Any) -> Any:
    return x + 1


# --- the four parts of the result ---


@every_mode
def test_loop_that_ends_by_itself_has_converged(mode: Any) -> None:
    result = sx.bounded_while_loop(
        _below(3), _add_one, 0, max_steps=5, history=lambda x: x * 10, differentiable=mode
    )
    assert int(result.final) == 3 and result.history.tolist() == [10, 20, 30, 0, 0]
    assert (int(result.length), bool(result.converged)) == (3, True)
    assert (result.length.dtype, result.converged.dtype) == (jnp.int32, jnp.bool_)


@every_mode
def test_loop_that_reaches_its_limit_says_so(mode: Any) -> None:
    limits = (1, 2, 3, 5, 7)  # "recompute" divides them into blocks of the size of their root

    @jax.jit
    def run() -> Any:
        return [
            sx.bounded_while_loop(
                _below(100), _add_one, 0, max_steps=limit, history=lambda x: x, differentiable=mode
            )
            for limit in limits
        ]

    for result, limit in zip(run(), limits, strict=True):
        assert int(result.final) == int(result.length) == limit
        assert result.history.tolist() == list(range(1, limit + 1))
        assert not bool(result.converged)


@every_mode
def test_ending_exactly_at_the_limit_is_converging(mode: Any) -> None:
    result = sx.bounded_while_loop(_below(4), _add_one, 0, max_steps=4, differentiable=mode)
    assert int(result.length) == 4 and bool(result.converged)


@every_mode
@pytest.mark.parametrize(("limit", "converged"), [(0, True), (3, False)])
def test_bounded_while_loop_of_no_steps_returns_the_start(
    mode: Any, limit: int, converged: bool
) -> None:
    run = functools.partial(
        sx.bounded_while_loop, _below(limit), _add_one, history=_add_one, differentiable=mode
    )
    none, never = jax.jit(lambda: (run(0, max_steps=0), run(5, max_steps=3)))()
    assert int(none.final) == 0 and none.history.shape == (0,) and int(none.length) == 0
    assert bool(none.converged) == converged
    assert int(never.final) == 5 and never.history.tolist() == [0] * 3
    assert int(never.length) == 0 and bool(never.converged)


@every_mode
def test_bounded_while_loop_without_history_returns_none(mode: Any) -> None:
    result = sx.bounded_while_loop(_below(2), _add_one, 0, max_steps=3, differentiable=mode)
    assert result.history is None and len(jax.tree.leaves(result)) == 3


@every_mode
def test_result_is_a_pytree_that_leaves_jit(mode: Any) -> None:
    traced = []

    def body(x: Any) -> Any:
        traced.append(1)
        return x * 2.0

    @sx.jit
    def run(x: Any) -> Any:
        return sx.bounded_while_loop(
            _below(50), body, x, max_steps=9, history=lambda x: {"x": x}, differentiable=mode
        )

    result = run(jnp.float32(3))
    assert isinstance(result, sx.WhileResult) and float(result.final) == 96.0
    assert result.history["x"].tolist() == [6.0, 12.0, 24.0, 48.0, 96.0, 0.0, 0.0, 0.0, 0.0]
    assert int(run(jnp.float32(60)).length) == 0 and len(traced) == 1


@every_mode
def test_python_number_takes_the_body_dtype(mode: Any) -> None:
    body = lambda c: (c[0] * jnp.float32(1.5), c[1] + 1)  # noqa: E731
    result = sx.bounded_while_loop(
        lambda c: c[1] < 2, body, (1, 0), max_steps=4, history=lambda c: c, differentiable=mode
    )
    assert [float(x) for x in result.final] == [2.25, 2.0]
    assert result.final[0].dtype == result.history[0].dtype == jnp.float32


@every_mode
def test_random_keys_are_carried_and_recorded(mode: Any) -> None:
    first = jax.random.key(0)
    result = sx.bounded_while_loop(
        lambda c: c[1] < 2,
        lambda c: (jax.random.fold_in(c[0], c[1]), c[1] + 1),
        (first, 0),
        max_steps=3,
        history=lambda c: c[0],
        padding=first,
        differentiable=mode,
    )
    second = jax.random.fold_in(first, 0)
    expected = [second, jax.random.fold_in(second, 1), first]
    assert all(bool(a == b) for a, b in zip(result.history, expected, strict=True))


# --- padding ---


@every_mode
def test_padding_is_number_array_or_prefix(mode: Any) -> None:
    def row_after(padding: Any) -> Any:
        result = sx.bounded_while_loop(
            _below(1.0),
            _add_one,
            0.0,
            max_steps=2,
            history=lambda x: {"a": (x, x > 5), "b": jnp.full(2, x)},
            padding=padding,
            differentiable=mode,
        )
        return jax.tree.map(lambda rows: rows[1], result.history)

    zeros = {"a": (0.0, False), "b": [0.0, 0.0]}
    cases = [
        (0, zeros),
        ({"a": (-1, True), "b": np.array([1, 2])}, {"a": (-1.0, True), "b": [1.0, 2.0]}),
        ({"a": 1, "b": jnp.inf}, {"a": (1.0, True), "b": [np.inf, np.inf]}),
    ]
    found = jax.jit(lambda: [row_after(padding) for padding, _ in cases])()
    found.append(row_after(sx.Variable(jnp.float32(0))))
    for row, (_, expected) in zip(found, [*cases, (None, zeros)], strict=True):
        assert jax.tree.map(lambda x: x.tolist(), row) == expected


@pytest.mark.parametrize(
    ("padding", "told"),
    [
        ({"n": jnp.nan, "x": 0}, r"padding=nan .*\.n, which has dtype int32"),
        ({"n": 1.5, "x": 0}, r"padding=1\.5 .*\.n"),
        ({"n": 2**40, "x": 0}, r"\.n, which has dtype int32"),
        ({"n": 0, "x": 1j}, r"\.x, which has dtype float32"),
        ({"n": 0, "x": "a"}, r"\.x, which has dtype float32"),
        ({"n": 0, "x": jnp.ones(3)}, r"shape \(3,\) .*\.x, which has shape \(2,\)"),
        ({"n": 0}, r"not a prefix .* which is \{n: int32\[\], x: float32\[2\]\}"),
        (jax.random.key(0), r"\.n"),
    ],
)
def test_unfitting_padding_raises_with_path(padding: Any, told: str) -> None:
    with pytest.raises(TransformError, match=told):
        sx.bounded_while_loop(
            _below(1),
            _add_one,
            0,
            max_steps=2,
            history=lambda n: {"n": n, "x": jnp.ones(2)},
            padding=padding,
        )


# --- state ---


def _call(model: Scale) -> Scale:
    model.factor[...] = model(jnp.ones(2)) * 2
    return model


@every_mode
def test_carried_modules_keep_their_identity(mode: Any) -> None:
    model = Scale(rate=1.0)
    result = sx.bounded_while_loop(
        lambda m: m.calls < 2,
        _call,
        model,
        max_steps=4,
        history=lambda m: (m.calls, m.factor),
        differentiable=mode,
    )
    assert result.final is model and values(model) == {("factor",): [4.0, 4.0], ("calls",): 2}
    calls, factors = result.history
    assert calls.tolist() == [1, 2, 0, 0]
    assert factors.tolist() == [[2.0] * 2, [4.0] * 2, [0.0] * 2, [0.0] * 2]


@functools.cache
def _draws_until(total: float) -> list[float]:
    """What a loop in Python draws until its sum reaches a total."""
    rngs, drawn = sx.Rngs(0), []
    while sum(drawn) < total:
        drawn.append(float(jax.random.uniform(rngs())))
    return drawn


@every_mode
def test_captured_variables_that_are_written_are_carried(mode: Any) -> None:
    total, rngs = sx.Variable(jnp.float32(0)), sx.Rngs(0)

    def body(i: Any) -> Any:
        total[...] = total + jax.random.uniform(rngs())
        return i + 1

    result = sx.bounded_while_loop(
        lambda i: total < 1,
        body,
        0,
        max_steps=50,
        history=lambda i: total.value,
        differentiable=mode,
    )
    expected = _draws_until(1)
    count = len(expected)
    assert int(result.length) == int(rngs.default.count) == count
    np.testing.assert_allclose(result.history[:count], np.cumsum(expected), rtol=1e-5)
    assert float(total) == float(result.history[count - 1])


@every_mode
def test_exception_leaves_everything_as_it_was(mode: Any) -> None:
    model = Scale()

    def fail(model: Scale) -> Any:
        model(jnp.ones(2))
        raise KeyError("no")

    with pytest.raises(KeyError):
        sx.bounded_while_loop(lambda m: True, fail, model, max_steps=3, differentiable=mode)
    assert values(model) == values(Scale())


# --- lanes ---


@every_mode
def test_under_vmap_each_batch_element_has_its_own_length(mode: Any) -> None:
    def run(limit: Any) -> Any:
        return sx.bounded_while_loop(
            _below(limit),
            _add_one,
            0,
            max_steps=4,
            history=lambda x: x,
            padding=-1,
            differentiable=mode,
        )

    nest = jax.vmap(jax.vmap(run))
    result, nested = sx.jit(lambda limits, pairs: (sx.vmap(run)(limits), nest(pairs)))(
        jnp.array([2, 0, 9, 4]), jnp.array([[1, 2], [3, 0]])
    )
    assert result.final.tolist() == result.length.tolist() == [2, 0, 4, 4]
    assert result.converged.tolist() == [True, True, False, True]
    assert result.history.tolist() == [[1, 2, -1, -1], [-1] * 4, [1, 2, 3, 4], [1, 2, 3, 4]]
    assert nested.length.tolist() == [[1, 2], [3, 0]]


@every_mode
def test_shared_and_mapped_limits_agree_under_vmap(mode: Any) -> None:
    def run(x: Any, limit: Any) -> Any:
        body = lambda c: (c[0] * 2, c[1] + 1)  # noqa: E731
        return sx.bounded_while_loop(
            lambda c: c[1] < limit, body, (x, 0), max_steps=3, differentiable=mode
        )

    @jax.jit
    def both(x: Any, limits: Any) -> Any:
        return jax.vmap(run, in_axes=(0, None))(x, limits[0]), jax.vmap(run)(x, limits)

    together, apart = both(jnp.arange(3.0), np.full(3, 2, np.int32))
    assert together.final[0].tolist() == apart.final[0].tolist() == [0.0, 4.0, 8.0]
    assert together.length.tolist() == apart.length.tolist() == [2, 2, 2]


@every_mode
def test_module_state_of_each_batch_element_stops_with_it(mode: Any) -> None:
    lanes = sx.vmap(lambda rate: Scale(1, rate=1.0), axis_size=3)(jnp.zeros(3))

    def body(model: Scale) -> Scale:
        model.factor[...] = model(jnp.ones(1)) * 2
        return model

    def run(model: Scale, limit: Any) -> Any:
        return sx.bounded_while_loop(
            lambda m: m.calls < limit, body, model, max_steps=3, differentiable=mode
        )

    result = sx.vmap(run)(lanes, jnp.array([0, 2, 7]))
    assert result.final is lanes and result.converged.tolist() == [True, True, False]
    assert lanes.calls.value.tolist() == [0, 2, 3]
    assert lanes.factor.value.tolist() == [[1.0], [4.0], [8.0]]


@every_mode
def test_finished_batch_elements_produce_no_nonfinite_values(mode: Any) -> None:
    weight = jnp.float32(1)

    def run(weight: Any, x: Any) -> Any:
        return sx.bounded_while_loop(
            lambda x: x > 0,
            lambda x: jnp.sqrt(weight * x) - 0.5 + jnp.log(x) * 0,
            x,
            max_steps=6,
            history=lambda x: x,
            differentiable=mode,
        )

    lanes = jax.vmap(run, in_axes=(None, 0))
    gradients = jax.grad(lambda w, x: lanes(w, x).final.sum(), argnums=(0, 1))

    @jax.jit
    def both(w: Any, x: Any) -> Any:
        return lanes(w, x), () if mode == "no" else gradients(w, x)

    result, found = both(weight, jnp.array([0.04, 0.9]))
    assert np.isfinite(result.history).all() and result.length.tolist() == [1, 3]
    for gradient in found:
        assert np.isfinite(gradient).all() and np.all(gradient != 0)


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_no_batch_element_takes_are_not_run(mode: Any) -> None:
    ran = []

    def body(x: Any) -> Any:
        jax.debug.callback(lambda: ran.append(1))
        return x + 1

    def run(limit: Any) -> Any:
        return sx.bounded_while_loop(
            _below(limit), body, 0, max_steps=30, differentiable=mode
        ).final

    assert int(jax.jit(run)(3)) == 3
    jax.effects_barrier()
    assert len(ran) == 3
    ran.clear()
    assert jax.jit(jax.vmap(run))(jnp.array([1, 2])).tolist() == [1, 2]
    jax.effects_barrier()
    assert len(ran) == 2


# --- inside other transforms ---


@every_mode
def test_carry_may_become_different_between_shards(auto_mesh: Any, mode: Any) -> None:
    def shard(x: Any) -> Any:
        result = sx.bounded_while_loop(
            lambda c: c[1] < 2,
            lambda c: (c[0] + x, c[1] + 1),
            (jnp.zeros(1), 0),
            max_steps=3,
            history=lambda c: c,
            differentiable=mode,
        )
        return result.final[0] + result.history[0].sum()

    mapped = jax.shard_map(shard, mesh=auto_mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(mapped)(jnp.array([1.0, 2.0])).tolist() == [5.0, 10.0]


@every_mode
def test_history_rows_keep_the_sharding(explicit_mesh: Any, mode: Any) -> None:
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(jnp.arange(4.0), P("data"))
        result = sx.jit(
            lambda x: sx.bounded_while_loop(
                lambda x: x.sum() < 20,
                lambda x: x * 2,
                x,
                max_steps=3,
                history=lambda x: x,
                differentiable=mode,
            )
        )(x)
        assert result.history.tolist() == [[0.0, 2.0, 4.0, 6.0], [0.0, 4.0, 8.0, 12.0], [0.0] * 4]
        assert result.history.sharding.spec == P(None, "data")


# --- what is refused ---


@pytest.mark.parametrize("max_steps", [-1, 2.0, True, "3", None])
def test_max_steps_is_a_nonnegative_integer(max_steps: Any) -> None:
    with pytest.raises(TransformError, match=r"max_steps of sx\.bounded_while_loop is "):
        sx.bounded_while_loop(_below(3), _add_one, 0, max_steps=max_steps)


def test_limit_is_known_before_the_program_runs() -> None:
    run = sx.jit(lambda n: sx.bounded_while_loop(_below(3), _add_one, 0, max_steps=n))
    with pytest.raises(TransformError, match="static argument"):
        run(3)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TransformError, match="'no', 'store', 'recompute'"):
        sx.bounded_while_loop(_below(3), _add_one, 0, max_steps=3, differentiable="yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TransformError, match=r"history .* is a list"):
        sx.bounded_while_loop(_below(3), _add_one, 0, max_steps=3, history=[])  # pyright: ignore[reportArgumentType]


def test_row_of_the_history_holds_arrays() -> None:
    with pytest.raises(TransformError, match=r"returned a Scale at \.m"):
        sx.bounded_while_loop(
            lambda m: m.calls < 2, _call, Scale(), max_steps=3, history=lambda m: {"m": m}
        )


def test_history_only_reads() -> None:
    with pytest.raises(TransformError, match=r"history .* changes the Variable at \.model\.calls"):
        sx.bounded_while_loop(
            lambda model: model.calls < 2,
            lambda model: _call(model),
            Scale(),
            max_steps=3,
            history=lambda m: m(jnp.ones(2)),
        )


def test_changed_form_of_carry_raises() -> None:
    with pytest.raises(TransformError, match=r"from int32\[\] to float32\[2\]"):
        sx.bounded_while_loop(lambda x: True, lambda x: jnp.ones(2), jnp.int32(0), max_steps=3)
    with pytest.raises(TransformError, match=r"is a str"):
        sx.bounded_while_loop(lambda x: True, _add_one, "a", max_steps=3)


# --- the law ---


def _row(many: Many) -> Any:
    return many.cells[1].value * 10


def _advance(many: Many) -> Many:
    step(many)
    many.cells[1][...] = many.cells[1] * 2
    return many


@sx.jit(static_argnames=("captured", "options"))
def _loop(many: Many, limit: Any, *, captured: bool, options: tuple[Any, ...]) -> Any:
    """A bounded loop whose model is captured by its functions or goes around."""

    def holds(many: Many) -> Any:
        return many.cells[1].value.sum() < limit

    if captured:
        result = sx.bounded_while_loop(
            lambda none: holds(many),
            lambda none: _advance(many) and none,
            (),
            history=lambda none: _row(many),
            **dict(options),
        )
    else:
        result = sx.bounded_while_loop(holds, _advance, many, history=_row, **dict(options))
        assert result.final is many
    return result.history, result.length, result.converged


@every_mode
@pytest.mark.parametrize(
    ("max_steps", "captured"), [(0, True), (1, False), (3, True), (5, False), (6, True)]
)
def test_bounded_loop_is_a_loop_in_python(mode: Any, max_steps: int, captured: bool) -> None:
    options = (("max_steps", max_steps), ("differentiable", mode), ("padding", -1))
    for limit in (0, 4, 40):
        many, rows, expected = Many(3), [], np.zeros((3, 2))
        while expected[1].sum() < limit and len(rows) < max_steps:
            expected += 1
            expected[1] *= 2
            rows.append((expected[1] * 10).tolist())
        history, length, converged = _loop(many, limit, captured=captured, options=options)
        assert [cell.value.tolist() for cell in many.cells] == expected.tolist()
        assert history.tolist() == rows + [[-1.0] * 2] * (max_steps - len(rows))
        assert (int(length), bool(converged)) == (len(rows), not expected[1].sum() < limit)
