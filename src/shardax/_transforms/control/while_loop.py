# SPDX-License-Identifier: Apache-2.0
"""``while_loop`` and ``fori_loop``: a function over Modules, run again and again.

The *carry* is what goes from one iteration to the next: what the caller gives first and gets back
last. Modules and Variables in it go around as the objects they are, and so do Variables that the
body writes through a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.graph.paths import Path, format_path
from shardax._core.variable import Variable
from shardax._transforms.control.loop_body import Body
from shardax._transforms.errors import DecisionError
from shardax._transforms.lift.call import (
    Call,
    Inside,
    as_integer,
    as_predicate,
    check_operands,
    path_of,
    retry_captured,
)
from shardax._transforms.lift.engine import carry_in, check_no_leak

CONDITION = 1
"""Position of the condition among the functions of a call; the body is the first."""


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init: Any) -> Any:
    """Runs a function over Modules while a condition holds, as ``jax.lax.while_loop`` does.

    The body may write Variables, passed or reached through a closure, and draw random numbers; only
    those that it writes go around. The condition only reads. As in JAX, the loop has a forward-mode
    but no reverse-mode derivative; see ``bounded_while_loop``.

    Args:
        cond_fun: Called as ``cond_fun(carry)``; returns a boolean of shape ().
        body_fun: Called as ``body_fun(carry)``; returns the next carry: the same structure, shapes
            and dtypes, Modules as the objects they are.
        init: The first carry: arrays, Modules, Variables and pytrees of these.

    Returns:
        The last carry.

    Raises:
        CarryError: If the body changes the form of the carry or of a Variable, or the structure of
            a Module.
        DecisionError: If the condition does not return one boolean, or writes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> counter = sx.Variable(jnp.int32(0))
        >>> def double(x):
        ...     counter[...] = counter + 1
        ...     return 2 * x
        >>> float(sx.while_loop(lambda x: x < 100, double, jnp.float32(1))), int(counter)
        (128.0, 7)
    """

    def attempt(captured: list[Variable[Any]]) -> Any:
        call = Call("while_loop", [body_fun, cond_fun], [init], {}, captured=captured)
        check_operands(call)
        body = Body(call, carry_of, call.labels[0])
        body.discover(body.values, body.plain)
        condition = condition_of(body)
        while body.differ_like(jax.eval_shape(condition, body.start())):
            pass
        around = jax.lax.while_loop(condition, lambda around: body.step(around)[0], body.start())
        return carry_back(body, around)

    return retry_captured(attempt)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Runs a function over Modules a number of times, as ``jax.lax.fori_loop`` does.

    With Python integers as bounds the loop has a reverse-mode derivative.

    Args:
        lower: The first index, an integer of shape ().
        upper: The index to stop before.
        body_fun: Called as ``body_fun(index, carry)``; returns the next carry, as for
            ``while_loop``.
        init: The first carry, as for ``while_loop``.
        unroll: As in ``jax.lax.fori_loop``.

    Returns:
        The last carry.

    Raises:
        CarryError: As for ``while_loop``.
        DecisionError: If a bound is not one integer.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jnp.int32(0))
        >>> def add(i, total):
        ...     total += i
        ...     return total
        >>> sx.fori_loop(0, 5, add, total) is total, int(total)
        (True, 10)
    """
    first = as_integer(lower, "lower of sx.fori_loop")
    stop = as_integer(upper, "upper of sx.fori_loop")
    index = jnp.zeros((), jnp.result_type(first, stop))

    def attempt(captured: list[Variable[Any]]) -> Any:
        call = Call("fori_loop", [body_fun], [index, init], {}, captured=captured)
        check_operands(call)
        count = len(jax.tree.leaves(list(call.arguments.plain)))
        body = Body(
            call, lambda inside: (inside.args[1], inside.result), call.labels[1], range(1, count)
        )
        body.discover(body.values, body.plain)
        body.differ_like(first)
        body.differ_like(stop)

        def step(i: Any, around: Any) -> Any:
            return body.step(around, plain={0: jax.lax.convert_element_type(i, index.dtype)})[0]

        around = jax.lax.fori_loop(first, stop, step, body.start(), unroll=unroll)
        return carry_back(body, around)

    return retry_captured(attempt)


def carry_of(inside: Inside) -> tuple[Any, Any]:
    """Returns (what was given that goes around, what came back), of a body of the carry alone."""
    return inside.args[0], inside.result


def carry_back(body: Body, around: tuple[Sequence[Any], Sequence[Any]]) -> Any:
    """Stores what a loop wrote and returns its last carry.

    Args:
        body: The loop's body.
        around: What came out of the last iteration.
    """
    carried = body.finish(around)
    check_no_leak(body.call.graph, carried)
    return carry_in(body.call.graph, carried)


class Reader:
    """A function of what goes around a loop that only reads: its condition, for one.

    Args:
        body: The body of the loop, after it was discovered.
        which: Which of the call's functions.
        role: What the function is to the loop, for messages.
        finish: Turns its result into arrays, inside.
    """

    def __init__(self, body: Body, which: int, role: str, finish: Callable[[Any], Any]) -> None:
        self.body = body
        self.which = which
        self.role = role
        self.finish = finish
        # Compiled as a unit so that JAX traces it once.
        self.one = jax.jit(self._one, inline=True)

    def __call__(self, around: tuple[Sequence[Any], Sequence[Any]]) -> Any:
        return self.one(*self.body.inputs(around))

    def _one(self, values: list[Any], plain: list[Any]) -> Any:
        positional, named = self.body.plain_tree.unflatten(plain)
        return self.body.call.run(values, positional, named, self._leave, which=self.which)

    def _leave(self, inside: Inside) -> Any:
        call = self.body.call
        for item in inside.captured():
            self._refuse(item.outer, path_of(call.functions, item.outer))
        record = inside.carry_out(None).record
        for position in record.written:
            self._refuse(call.graph.leaves[position], call.graph.flat.leaf_paths[position])
        for index in record.updates:
            self._refuse(call.graph.objects()[index], call.graph.flat.paths[index])
        return self.finish(inside.result)

    def _refuse(self, item: Any, path: Path) -> None:
        raise DecisionError(
            f"The {self.role} of sx.{self.body.call.name} changes the {type(item).__name__} at "
            f"{format_path(path)}, but it only reads: it may be asked at other times than the body "
            f"runs. Write in the body (draw random numbers there, too), and keep what it needs in "
            f"the carry."
        )


def condition_of(body: Body) -> Reader:
    """Returns the condition of a loop, whose call has it as second function."""
    what = f"What the condition of sx.{body.call.name} returns"
    return Reader(body, CONDITION, "condition", lambda result: as_predicate(result, what))
