# SPDX-License-Identifier: Apache-2.0
"""``bounded_while_loop``: a while loop over Modules that takes at most a given number of steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core._jax import Tracer
from shardax.core.errors import BoundedLoopError
from shardax.core.paths import Path, format_path, path_step
from shardax.core.pytree import is_object
from shardax.core.variables import Variable
from shardax.transforms.bounded import (
    Differentiable,
    Loop,
    WhileResult,
    run_bounded,
    settled,
)
from shardax.transforms.call import Call, retry_captured
from shardax.transforms.decide import check_operands
from shardax.transforms.kinds import result_kinds
from shardax.transforms.loops import Reader, carry_back, carry_of, condition_of
from shardax.transforms.repeat import Body, form, vary_alike

_HISTORY = 2
"""Position of the history function among the functions of a call."""


def bounded_while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init: Any,
    *,
    max_steps: int,
    history: Callable[[Any], Any] | None = None,
    differentiable: Differentiable = "no",
    padding: Any = 0,
) -> WhileResult:
    """Runs a function over Modules while a condition holds, but at most ``max_steps`` times.

    Carry, condition and body are as for ``while_loop``. Under ``vmap`` each lane has a length of
    its own.

    Args:
        cond_fun: Called as ``cond_fun(carry)``; returns a boolean of shape ().
        body_fun: Called as ``body_fun(carry)``; returns the next carry.
        init: The first carry: arrays, Modules, Variables and pytrees of these.
        max_steps: The most steps to take, a Python integer of at least 0.
        history: Called with the carry after each step; returns arrays, Variables or a pytree of
            these, one row of the history. It only reads. None keeps no history.
        differentiable: ``"no"``: forward mode only, and the cost follows the steps that are taken.
            ``"store"``: also reverse mode; keeps the carry of every step, so memory grows with
            ``max_steps``. ``"recompute"``: also reverse mode; memory for carries grows with the
            square root of ``max_steps``, for one more run of every step.
        padding: What rows past the last step hold: a number or array for all, or a pytree prefix
            of a row.

    Returns:
        A ``WhileResult``: ``final``, the last carry; ``history``, arrays with a first dimension of
        size ``max_steps``; ``length``, the number of steps taken; ``converged``, whether the
        condition no longer holds. If it is False, the limit was reached.

    Raises:
        BoundedLoopError: If ``max_steps``, ``differentiable``, ``history`` or ``padding`` is not
            valid.
        CarryError: As for ``while_loop``.
        DecisionError: As for ``while_loop``; also if the history function writes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> newton = lambda x: (x + 2 / x) / 2
        >>> result = sx.bounded_while_loop(lambda x: abs(x**2 - 2) > 1e-3, newton, jnp.float32(1),
        ...                                max_steps=5, history=lambda x: x, padding=jnp.nan)
        >>> [round(float(x), 4) for x in result.history], int(result.length)
        ([1.5, 1.4167, 1.4142, nan, nan], 3)
        >>> round(float(result.final), 4), bool(result.converged)
        (1.4142, True)
    """
    steps = _check_options(max_steps, history, differentiable)
    functions = [body_fun, cond_fun] if history is None else [body_fun, cond_fun, history]

    def attempt(captured: list[Variable[Any]]) -> WhileResult:
        call = Call("bounded_while_loop", functions, [init], {}, captured=captured)
        check_operands(call)
        body = Body(call, carry_of, call.labels[0])
        body.discover(body.values, body.plain)
        condition = condition_of(body)
        while body.differ_like(jax.eval_shape(condition, body.start())):
            pass

        def advance(around: Any) -> Any:
            return body.step(around)[0]

        start = settled(advance, body.start())
        row = _no_row if history is None else Reader(body, _HISTORY, "history", _row_of)
        rows = padding_row(padding, result_kinds(row, start))
        loop = Loop(condition, advance, row, steps, rows)
        result = run_bounded(loop, start, differentiable)
        return result._replace(final=carry_back(body, result.final))

    return retry_captured(attempt)


def _check_options(max_steps: Any, history: Any, differentiable: Any) -> int:
    if isinstance(max_steps, (Tracer, jax.Array)):
        raise BoundedLoopError(
            "max_steps of sx.bounded_while_loop is an array, but it is the size of the history and "
            "must be known before the program runs. Give a Python integer; inside sx.jit, make it "
            "a static argument."
        )
    is_integer = isinstance(max_steps, (int, np.integer)) and not isinstance(max_steps, bool)
    if not is_integer or max_steps < 0:
        raise BoundedLoopError(
            f"max_steps of sx.bounded_while_loop is {max_steps!r}; give an integer of at least 0."
        )
    modes = get_args(Differentiable)
    if differentiable not in modes:
        raise BoundedLoopError(
            f"differentiable={differentiable!r} is not known; use one of "
            f"{', '.join(map(repr, modes))}."
        )
    if history is not None and not callable(history):
        raise BoundedLoopError(
            f"history of sx.bounded_while_loop is a {type(history).__name__}; give a function of "
            f"the carry that returns arrays, or None."
        )
    return operator.index(max_steps)


def _no_row(around: Any) -> None:
    return None


def _row_of(result: Any) -> Any:
    """Returns what a history function returned as arrays."""

    def as_array(path: Any, leaf: Any) -> Any:
        value = leaf.value if isinstance(leaf, Variable) else leaf
        if isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return jnp.asarray(value)
        where = format_path(tuple(path_step(key) for key in path)) if path else "itself"
        raise BoundedLoopError(
            f"The history function of sx.bounded_while_loop returned a {type(leaf).__name__} at "
            f"{where}. A row of the history holds arrays: return the values to keep, "
            f"lambda model: model.kernel.value."
        )

    return jax.tree_util.tree_map_with_path(as_array, result, is_leaf=is_object)


# --- padding --------------------------------------------------------------------------------------


def padding_row(padding: Any, kinds: Any) -> Any:
    """Returns a row of padding.

    Args:
        padding: As given by the caller.
        kinds: Shapes and dtypes of a row.

    Raises:
        BoundedLoopError: If the padding does not fit, naming the place.
    """
    given = jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf, padding, is_leaf=is_object
    )
    try:
        spread = jax.tree.broadcast(given, kinds)
    except ValueError as error:
        raise BoundedLoopError(
            f"padding={padding!r} of sx.bounded_while_loop is not a prefix of a row of the "
            f"history, which is {form(kinds)}. Give one number for all, or the containers of a row "
            f"with one number each."
        ) from error

    def fill(path: Any, value: Any, kind: Any) -> Any:
        return _filled(tuple(path_step(key) for key in path), value, kind)

    return jax.tree_util.tree_map_with_path(fill, spread, kinds)


def _filled(path: Path, value: Any, kind: Any) -> Any:
    where = f" at {format_path(path)}" if path else ""
    array = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)
    if not _holds(array, kind.dtype):
        shown = f"{value!r}" if array.ndim == 0 and not isinstance(value, Tracer) else array.dtype
        raise BoundedLoopError(
            f"padding={shown} cannot stand in the history{where}, which has dtype {kind.dtype}. "
            f"Give a padding of that dtype, or convert what the history function returns."
        )
    try:
        row = jnp.broadcast_to(jnp.asarray(array, kind.dtype), kind.shape)
    except ValueError as error:
        raise BoundedLoopError(
            f"padding of shape {array.shape} does not fit a row of the history{where}, which has "
            f"shape {kind.shape}."
        ) from error
    return vary_alike(_laid_out_alike(row, kind), kind)


def _laid_out_alike(row: Any, kind: Any) -> Any:
    """Returns an array in the layout of another, which Explicit mesh axes count to the type."""
    sharding = jax.typeof(kind).sharding
    if all(entry is None for entry in sharding.spec):
        return row
    return jax.sharding.reshard(row, sharding)


def _holds(array: Any, dtype: Any) -> bool:
    """Whether an array of the given dtype can hold the padding; floats may round."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array.dtype == dtype
    if isinstance(array, Tracer) or array.dtype.kind not in "biufc":
        return bool(jnp.can_cast(array.dtype, dtype, "same_kind"))
    values = np.asarray(array)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        return not np.iscomplexobj(values)
    with np.errstate(invalid="ignore"):
        return bool(np.all(values.astype(dtype) == values))
