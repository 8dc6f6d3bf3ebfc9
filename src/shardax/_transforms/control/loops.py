# SPDX-License-Identifier: Apache-2.0
"""While loops and counted loops over Modules.

A predicate, an index or a bound is one number: a Python number, an array of shape (), or a Variable
that holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core._jax import INLINE
from shardax._core.frames import kind_of
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.variable import Variable
from shardax._transforms.control.scan import LoopBody, check_unroll
from shardax._transforms.errors import TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift import engine


def as_predicate(value: object, name: str) -> Any:
    """Returns a predicate as a boolean of shape ()."""
    number = _one_number(value, name, "one boolean", "Reduce it: x.all(), x.any(), x[0] > 0.")
    kind = jnp.result_type(number)
    if kind == jnp.bool_:
        return number
    if jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating):
        return number != 0
    raise TransformError(f"{name} must be one boolean, but has dtype {kind}. Compare it: x != y.")


def as_integer(value: object, name: str) -> Any:
    """Returns an index or bound, an integer of shape ()."""
    number = _one_number(value, name, "one integer", "Take one of them: x[0].")
    kind = jnp.result_type(number)
    if jnp.issubdtype(kind, jnp.integer):
        return number
    hint = "jnp.int32(x)" if kind == jnp.bool_ else "x.astype(int)"
    raise TransformError(f"{name} must be one integer, but has dtype {kind}. Convert it: {hint}.")


def _one_number(value: object, name: str, expected: str, hint: str):
    number = value.value if isinstance(value, Variable) else value
    if not isinstance(number, engine.ARRAY_OR_NUMBER):
        raise TransformError(f"{name} must be {expected}, but is a {type(value).__name__}.")
    if jnp.shape(number) != ():
        raise TransformError(
            f"{name} must be {expected}, but has shape {jnp.shape(number)}. {hint}"
        )
    return number


@engine.takes_options
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
    functions: Sequence[Any], _: None, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
):
    def attempt(captured: list[Variable]):
        call = engine.LiftedCall("while_loop", functions, args, kwargs, captured=captured)
        body, condition = body_and_condition(call)
        carry = jax.lax.while_loop(condition, lambda carry: body.step(carry)[0], body.start())
        return call.apply(body.finish(carry))

    return engine.retry_captured(attempt)


@engine.takes_options
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
        check_unroll("fori_loop", unroll)
    if type(lower) is int and type(upper) is int:  # part of the program, as in JAX
        return eager.run(_fori_loop, (body_fun,), (unroll, lower, upper), (init_val,), {})
    return eager.run(_fori_loop, (body_fun,), (unroll,), (init_val, lower, upper), {})


def _fori_loop(
    functions: Sequence[Any],
    options: tuple[Any, ...],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
):
    unroll, *counts = options
    init_val, *bounds = args
    lower, upper = counts or bounds
    first = as_integer(lower, "lower of sx.fori_loop")
    stop = as_integer(upper, "upper of sx.fori_loop")
    index = jnp.zeros((), jnp.result_type(first, stop))

    def attempt(captured: list[Variable]):
        call = engine.LiftedCall(
            "fori_loop", functions, [index, init_val], kwargs, captured=captured
        )
        engine.check_operands(call)
        count = len(jax.tree.leaves(list(call.arguments.plain)))
        body = LoopBody(
            call, lambda context: (context.args[1], context.result), call.labels[1], range(1, count)
        )
        body.discover(body.values, body.plain)
        body.differ_like(first)
        body.differ_like(stop)

        def step(i, carry) -> PyTree:
            return body.step(carry, plain={0: jax.lax.convert_element_type(i, index.dtype)})[0]

        carry = jax.lax.fori_loop(first, stop, step, body.start(), unroll=unroll)
        return call.apply(body.finish(carry))

    return engine.retry_captured(attempt)


class ReadOnlyFunction:
    """A function of the carry that only reads, such as a condition."""

    def __init__(
        self, body: LoopBody, which: int, role: str, finish: Callable[[PyTree], PyTree]
    ) -> None:
        self.body = body
        self.which = which
        self.role = role
        self.finish = finish
        # Compiled as a unit so that JAX traces it once.
        self.one = jax.jit(body.call.program(self._one, "leaves", which), inline=INLINE)

    def __call__(self, carry: tuple[Sequence[PyTree], Sequence[PyTree]]) -> PyTree:
        return self.one(*self.body.inputs(carry))

    def _one(self, values: list[object], plain: list[object]):
        positional, named = self.body.plain_tree.unflatten(plain)
        return self.body.call.run(values, positional, named, self._leave, which=self.which)

    def _leave(self, context: engine.RunContext):
        call = self.body.call
        for item in context.captured():
            self._refuse(item.outer, engine.path_of(call.functions, item.outer))
        effects = context.record_effects(None).effects
        for position in effects.written:
            self._refuse(call.graph.leaves[position], call.graph.flat.leaf_paths[position])
        for index in effects.updates:
            self._refuse(call.graph.objects()[index], call.graph.flat.paths[index])
        return self.finish(context.result)

    def _refuse(self, item: object, path: Path) -> None:
        raise TransformError(
            f"The {self.role} of sx.{self.body.call.name} changes the {kind_of(item)} at "
            f"{format_path(path)}, but it only reads: it may be asked at other times than the body "
            f"runs. Write in the body (draw random numbers there, too), and keep what it needs in "
            f"the carry."
        )


def body_and_condition(call: engine.LiftedCall) -> tuple[LoopBody, ReadOnlyFunction]:
    """Returns body and condition of a call, the carry settled."""
    engine.check_operands(call)
    body = LoopBody(call, lambda context: (context.args[0], context.result), call.labels[0])
    body.discover(body.values, body.plain)
    name = f"What the condition of sx.{call.name} returns"
    condition = ReadOnlyFunction(body, 1, "condition", lambda result: as_predicate(result, name))
    while body.differ_like(jax.eval_shape(condition, body.start())):
        pass
    return body, condition
