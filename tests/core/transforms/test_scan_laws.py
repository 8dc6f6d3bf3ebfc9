# SPDX-License-Identifier: Apache-2.0
"""Laws of ``sx.scan``: it is a loop in Python, and the plain scan of the pure function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx

Carry = sx.Carry

NAMES = ("a", "b", "c")
PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.sampled_from(["add", "tanh", "copy"]), st.sampled_from(NAMES)
    ),
    max_size=4,
)
ENTRIES = st.fixed_dictionaries({name: st.sampled_from([0, -1, None, Carry]) for name in NAMES})


class Three(sx.Module):
    """Three Variables, each sliced, shared or carried."""

    def __init__(self, entries: dict[str, Any], length: int) -> None:
        for seed, name in enumerate(NAMES):
            rows = np.sin(np.arange(2 * length, dtype=np.float32) + seed).reshape(2, length)
            axis = entries[name]
            value = rows[:, 0] if axis in (None, Carry) else np.moveaxis(rows, 1, axis)
            setattr(self, name, sx.Variable(jnp.asarray(value)))


def play(program: list[Any], model: Any, x: Any) -> Any:
    """Runs a random program on the Variables of a model."""
    for target, kind, source in program:
        one, other = getattr(model, target), getattr(model, source)
        if kind == "add":
            one[...] = 0.5 * one + other * x
        elif kind == "tanh":
            one[...] = jnp.tanh(other.value)
        else:
            one[...] = other.value
    return model.a * model.b + model.c * x


def play_on_arrays(program: list[Any], arrays: dict[str, Any], x: Any) -> Any:
    """Runs the same program on arrays of NumPy in a dict."""
    for target, kind, source in program:
        one, other = arrays[target], arrays[source]
        if kind == "add":
            arrays[target] = np.float32(0.5) * one + other * x
        else:
            arrays[target] = np.tanh(other) if kind == "tanh" else other
    return arrays["a"] * arrays["b"] + arrays["c"] * x


def numbers(length: int) -> Any:
    """The numbers that a loop goes over."""
    return np.cos(np.arange(length, dtype=np.float32))


LENGTHS = st.sampled_from([1, 3])


@given(PROGRAMS, ENTRIES, LENGTHS, st.booleans())
@settings(max_examples=25)
def test_scan_is_a_python_loop(
    program: list[Any], entries: dict[str, Any], length: int, compiled: bool
) -> None:
    model, xs = Three(entries, length), numbers(length)
    same = {name: np.array(getattr(model, name).value) for name in NAMES}
    axes = sx.StateAxes({sx.PathContains(name): entry for name, entry in entries.items()})
    run = sx.scan(lambda m, x: play(program, m, x), in_axes=(axes, 0), out_axes=0)
    rows = (sx.jit(run) if compiled else run)(model, xs)

    expected = []
    for i in range(length):
        part = {
            name: same[name] if axis in (None, Carry) else np.take(same[name], i, axis)
            for name, axis in entries.items()
        }
        expected.append(play_on_arrays(program, part, xs[i]))
        for name, axis in entries.items():
            if axis in (None, Carry):
                same[name] = part[name]
            else:
                np.moveaxis(same[name], axis, 0)[i] = part[name]
    np.testing.assert_allclose(rows, np.stack(expected), rtol=1e-5, atol=1e-6)
    for name in NAMES:
        np.testing.assert_allclose(getattr(model, name).value, same[name], rtol=1e-5, atol=1e-6)


@given(PROGRAMS, LENGTHS)
@settings(max_examples=12)
def test_scan_equals_lax_scan_of_pure_function(program: list[Any], length: int) -> None:
    model = Three(dict.fromkeys(NAMES, Carry), length)
    xs = numbers(length)
    graphdef, state = sx.split(model)

    def pure(state: Any, x: Any) -> Any:
        copy = sx.merge(graphdef, state)
        row = play(program, copy, x)
        return sx.state(copy), row

    final, expected = jax.lax.scan(pure, state, xs)
    _, rows = sx.scan(lambda m, x: (m, play(program, m, x)))(model, xs)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    for path, value in sx.state(model).flat().items():
        np.testing.assert_allclose(value, final.flat()[path], rtol=1e-5, atol=1e-6)


@given(PROGRAMS, LENGTHS)
@settings(max_examples=12)
def test_captured_module_behaves_as_a_passed_one(program: list[Any], length: int) -> None:
    shared = dict.fromkeys(NAMES, Carry)
    passed, captured = Three(shared, length), Three(shared, length)
    xs = numbers(length)
    _, rows = sx.scan(lambda m, x: (m, play(program, m, x)))(passed, xs)
    same = sx.scan(lambda x: play(program, captured, x), in_axes=0, out_axes=0)(xs)
    np.testing.assert_allclose(rows, same, rtol=1e-5, atol=1e-6)
    for name in NAMES:
        np.testing.assert_allclose(
            getattr(passed, name).value, getattr(captured, name).value, rtol=1e-5, atol=1e-6
        )
