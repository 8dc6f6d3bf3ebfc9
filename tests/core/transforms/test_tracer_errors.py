# SPDX-License-Identifier: Apache-2.0
"""Errors about values unknown while tracing name arguments and Variables, and say what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from tests.advice import run_advice

ROWS = jnp.arange(6.0).reshape(3, 2)


class Gate(sx.Module):
    """A layer that asks for the value of its Variable."""

    def __init__(self) -> None:
        self.level = sx.Param(jnp.float32(1))

    def __call__(self, x: Any) -> Any:
        return x if self.level > 0 else -x


CALLS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "jit": (lambda gate: sx.jit(lambda gate, x: gate(x))(gate, ROWS), "gate.level", "jit"),
    "jit by name": (
        lambda gate: sx.jit(lambda *, layers: layers["a"][0](ROWS))(layers={"a": [gate]}),
        "layers.a[0].level",
        "jit",
    ),
    "closure": (lambda gate: sx.jit(lambda x: gate(x))(ROWS), "gate.level", "jit"),
    "grad in jit": (
        lambda gate: sx.jit(sx.grad(lambda gate: gate(ROWS).sum()))(gate),
        "gate.level",
        "jit",
    ),
    "plain array in jit": (
        lambda _: sx.jit(lambda batch: 1 if batch["x"].sum() > 0 else 2)({"x": ROWS}),
        "batch['x']",
        "jit",
    ),
    "scan of a Module": (
        lambda gate: sx.scan(lambda gate, x: gate(x), in_axes=(None, 0), out_axes=0)(gate, ROWS),
        "gate.level",
        "scan",
    ),
    "scan of rows": (
        lambda _: sx.scan(lambda total, row: (total, row) if row[0] > 0 else (row, total))(
            jnp.zeros(2), ROWS
        ),
        "row",
        "scan",
    ),
    "body of while_loop": (
        lambda _: sx.while_loop(
            lambda c: c["n"] < 3, lambda c: {"n": c["n"] + 1} if c["n"] > 0 else c, {"n": 0}
        ),
        "c['n']",
        "while_loop",
    ),
    "condition of while_loop": (
        lambda _: sx.while_loop(lambda x: bool(x < 3), lambda x: x + 1, jnp.float32(0)),
        "x",
        "while_loop",
    ),
    "fori_loop": (
        lambda _: sx.fori_loop(0, 3, lambda i, x: x if i > 0 else -x, jnp.float32(0)),
        "i",
        "fori_loop",
    ),
    "cond": (
        lambda gate: sx.cond(True, lambda gate, x: gate(x), lambda gate, x: x, gate, ROWS),
        "gate.level",
        "cond",
    ),
    "remat": (
        lambda gate: sx.grad(sx.remat(lambda gate: gate(ROWS).sum()))(gate),
        "gate.level",
        "remat",
    ),
    "eval_shape": (
        lambda gate: sx.eval_shape(lambda gate: gate(ROWS), gate),
        "gate.level",
        "eval_shape",
    ),
    "make_jaxpr": (
        lambda gate: sx.make_jaxpr(lambda gate: gate(ROWS))(gate),
        "gate.level",
        "make_jaxpr",
    ),
    "argument of an outer scan": (
        lambda _: sx.scan(
            lambda total, row: (sx.fori_loop(0, 2, lambda i, x: x if row else -x, total), total)
        )(jnp.float32(0), jnp.arange(2.0)),
        "row",
        "scan",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_traced_condition_names_argument_and_function(name: str) -> None:
    call, argument, transform = CALLS[name]
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        call(Gate())
    text = str(caught.value)
    assert f"depends on the value of the argument {argument}." in text
    assert f"{__file__}:" in text and f" for sx.{transform}. " in text
    assert text.count("`sx.cond(x > 0, f, g, *operands)`") == 1


def _error_of(call: Callable[[], Any], kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_advice_for_traced_conditions_runs() -> None:
    error = _error_of(
        lambda: sx.jit(lambda x: -x if x > 0 else x)(3.0), jax.errors.TracerBoolConversionError
    )
    x = jnp.float32(3)
    names = {"jnp": jnp, "sx": sx, "a": 1.0, "b": 2.0, "f": lambda x: -x, "g": lambda x: x}

    def where(x: Any) -> Any:
        return run_advice(error, "jnp.where(x > 0, a, b)", names | {"x": x})

    def cond(x: Any) -> Any:
        choice = names | {"x": x, "operands": (x,)}
        return run_advice(error, "sx.cond(x > 0, f, g, *operands)", choice)

    assert [float(sx.jit(where)(x)), float(sx.jit(cond)(x))] == [1.0, -3.0]
    static = {"sx": sx, "f": lambda x, mode: -x if mode > 0 else x, "rest": "mode"}
    assert float(run_advice(error, "sx.jit(f, static_argnames=(...))", static)(x, mode=1)) == -3.0


def test_advice_for_traced_integers_runs() -> None:
    kind = jax.errors.TracerIntegerConversionError
    error = _error_of(lambda: sx.jit(lambda n: [*range(n)])(3), kind)
    assert "depends on the value of the argument n." in str(error)

    def repeat(n: Any, x: Any) -> Any:
        names = {"sx": sx, "n": n, "x": x, "body": lambda i, x: 2 * x}
        return run_advice(error, "sx.fori_loop(0, n, body, x)", names)

    def take(items: Any, i: Any) -> Any:
        names = {"jnp": jnp, "items": items, "i": i}
        return run_advice(error, "jnp.take(items, i, axis=0)", names)

    assert int(sx.jit(repeat)(3, 1)) == 8
    np.testing.assert_array_equal(sx.jit(take)(ROWS, 2), [4, 5])


def test_advice_for_numpy_runs() -> None:
    kind = jax.errors.TracerArrayConversionError
    error = _error_of(lambda: sx.jit(lambda gate: np.sin(gate.level))(Gate()), kind)
    assert "argument gate.level." in str(error) and "Write `jnp.` for `np.`" in str(error)

    def on_host(gate: Any) -> Any:
        names = {"sx": sx, "jax": jax, "f": np.sin, "shape": (), "dtype": "f4", "x": gate.level}
        return run_advice(
            error, "sx.host.host_function(f, out=jax.ShapeDtypeStruct(shape, dtype))(x)", names
        )

    same = [sx.jit(lambda gate: jnp.sin(gate.level.value))(Gate()), sx.jit(on_host)(Gate())]
    np.testing.assert_allclose(same, np.sin(1), rtol=1e-6)


def test_advice_for_masks_runs() -> None:
    kind = jax.errors.NonConcreteBooleanIndexError
    error = _error_of(lambda: sx.jit(lambda x: x[x > 2])(ROWS), kind)

    def choose(x: Any) -> Any:
        return run_advice(error, "jnp.where(mask, x, 0)", {"jnp": jnp, "mask": x > 2, "x": x})

    np.testing.assert_array_equal(sx.jit(choose)(ROWS), [[0, 0], [0, 3], [4, 5]])


def test_advice_for_numbers_runs() -> None:
    kind = jax.errors.ConcretizationTypeError
    error = _error_of(lambda: sx.jit(lambda x: float(x.sum()))(ROWS), kind)
    assert "argument x." in str(error)

    def total(x: Any) -> Any:
        return run_advice(error, "x.astype(jnp.float32)", {"jnp": jnp, "x": x.sum()})

    assert float(sx.jit(total)(ROWS)) == 15


def test_traced_shapes_name_the_argument() -> None:
    with pytest.raises(TypeError, match=r"depends on the value of the argument n\."):
        sx.jit(lambda n: jnp.zeros(n))(3)
    assert sx.jit(lambda n: jnp.zeros(n), static_argnums=0)(3).shape == (3,)


def test_errors_of_plain_jax_stay_as_they_are() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        sx.jit(lambda x: x)(jax.jit(lambda values: 1 if values[0] > 0 else 2)(ROWS[0]))
    assert "argument values." in str(caught.value)
