# SPDX-License-Identifier: Apache-2.0
"""While loops and counted loops over Modules.

Both run a ``Loop`` (``loop_body``): ``while_loop`` with a condition, ``fori_loop`` with an index as
the slice of each iteration. Outside of a compiled function they run as one (``eager.run``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.graph.paths import PyTree
from shardax._core.variable import Variable
from shardax._transforms.control import errors
from shardax._transforms.control.loop_body import Loop, LoopCarry, LoopSlices, ReadOnlyFunction
from shardax._transforms.control.numbers import Number, as_integer, as_predicate
from shardax._transforms.jit import eager
from shardax._transforms.lift import engine
from shardax._transforms.lift.transformed import takes_options


@takes_options
def while_loop(
    cond_fun: Callable[[PyTree], object], body_fun: Callable[[PyTree], object], init_val: object
) -> PyTree:
    """Runs a function over Modules while a condition holds, as ``jax.lax.while_loop`` does.

    The body may write Variables, passed or reached through a closure, and draw random numbers; only
    those that it writes are carried. The condition only reads. As in JAX, the loop has a
    forward-mode but no reverse-mode derivative; see ``bounded_while_loop``.

    Args:
        cond_fun: Called as ``cond_fun(carry)``; returns a boolean of shape ().
        body_fun: Called as ``body_fun(carry)``; returns the next carry: the same structure, shapes
            and dtypes, Modules as the objects they are.
        init_val: The first carry: arrays, Modules, Variables and pytrees of these.

    Returns:
        The last carry.

    Raises:
        TransformError: If the body changes the form of the carry or of a Variable, or the structure
            of a Module; if the condition does not return one boolean, or writes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> counter = sx.Variable(jnp.int32(0))
        >>> def double(x):
        ...     counter[...] = counter + 1
        ...     return 2 * x
        >>> float(sx.while_loop(lambda x: x < 100, double, jnp.float32(1))), int(counter)
        (128.0, 7)
    """
    return eager.run(_while_loop, (body_fun, cond_fun), None, (init_val,), {})


def _while_loop(
    functions: Sequence[Callable[..., PyTree]],
    _: None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    def attempt(captured: list[Variable]) -> PyTree:
        call = engine.LiftedCall("while_loop", functions, args, kwargs, captured=captured)
        loop, condition = loop_with_condition(call)
        last_carry = jax.lax.while_loop(condition, loop.next_carry, loop.first_carry())
        return loop.apply(last_carry)

    return engine.retry_captured(attempt)


def loop_with_condition(call: engine.LiftedCall) -> tuple[Loop, ReadOnlyFunction]:
    """Returns the loop of a call whose functions are body and condition, and the condition."""
    engine.check_operands(call)
    loop = Loop(call, carried_argument=0)
    loop.find_carry()

    name = f"What the condition of sx.{call.name} returns"
    condition = ReadOnlyFunction(loop, 1, "condition", lambda result: as_predicate(result, name))

    # A carry that differs between shards may make the condition differ over more mesh axes.
    while loop.differ_like(jax.eval_shape(condition, loop.first_carry())):
        pass
    return loop, condition


@takes_options
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[PyTree, PyTree], PyTree],
    init_val: PyTree,
    *,
    unroll: int | bool | None = None,
) -> PyTree:
    """Runs a function over Modules a number of times, as ``jax.lax.fori_loop`` does.

    With Python integers as bounds the loop has a reverse-mode derivative.

    Args:
        lower: The first index, an integer of shape ().
        upper: The index to stop before.
        body_fun: Called as ``body_fun(index, carry)``; returns the next carry, as for
            ``while_loop``.
        init_val: The first carry, as for ``while_loop``.
        unroll: As in ``jax.lax.fori_loop``.

    Returns:
        The last carry.

    Raises:
        TransformError: As for ``while_loop``; if a bound is not one integer; if ``unroll`` is of
            another kind.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jnp.int32(0))
        >>> def add(i, total):
        ...     total += i
        ...     return total
        >>> sx.fori_loop(0, 5, add, total) is total, int(total)
        (True, 10)
    """
    if unroll is not None:
        check_unroll(unroll, "fori_loop")
    if type(lower) is int and type(upper) is int:  # part of the program, as in JAX
        return eager.run(_fori_loop, (body_fun,), (unroll, lower, upper), (init_val,), {})
    return eager.run(_fori_loop, (body_fun,), (unroll,), (init_val, lower, upper), {})


def _fori_loop(
    functions: Sequence[Callable[..., PyTree]],
    options: Sequence[Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    unroll, *static_bounds = options
    init_val, *traced_bounds = args
    lower, upper = static_bounds or traced_bounds
    first = as_integer(lower, "lower of sx.fori_loop")
    stop = as_integer(upper, "upper of sx.fori_loop")
    index = jnp.zeros((), jnp.result_type(first, stop))

    def attempt(captured: list[Variable]) -> PyTree:
        call = engine.LiftedCall(
            "fori_loop", functions, [index, init_val], kwargs, captured=captured
        )
        engine.check_operands(call)
        loop = Loop(call, carried_argument=1)
        loop.slices = LoopSlices({}, {0: index})
        loop.find_carry()
        loop.differ_like(first)
        loop.differ_like(stop)

        def next_carry(i: Number, carry: LoopCarry) -> LoopCarry:
            slices = LoopSlices({}, {0: jax.lax.convert_element_type(i, index.dtype)})
            return loop.step(carry, slices)[0]

        last_carry = jax.lax.fori_loop(first, stop, next_carry, loop.first_carry(), unroll=unroll)
        return loop.apply(last_carry)

    return engine.retry_captured(attempt)


def check_unroll(unroll: object, name: str) -> None:
    """Raises unless an option says how many iterations one turn of the loop runs."""
    is_count = isinstance(unroll, (int, np.integer)) and unroll >= 1
    if not is_count and not isinstance(unroll, (bool, np.bool_)):
        raise errors.not_an_unroll(unroll, name)
