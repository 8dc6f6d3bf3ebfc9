# SPDX-License-Identifier: Apache-2.0
"""While loops with an upper limit on their steps.

The limit makes room for two things that a plain while loop cannot have. One is a *history*: one
*row* per step, in arrays whose size is known before the program runs; rows past the last step hold
*padding*. The other is a reverse-mode derivative, which must know how much it has to remember.

Loops that are not differentiated run as one ``while``. It writes rows into a buffer, so its cost
follows the steps that are taken. Under ``vmap`` it goes on while any batch element does, and one
that is finished keeps its state.

Loops that are differentiated run as a scan over *blocks* of the square root of the limit, and in
each a scan over its steps; steps and whole blocks after the end are skipped. Of a step only its
input is kept, and the step is run again when its derivative is computed. (Keeping more would cost
more: what a branch keeps is kept for every step, also the weights that it uses and does not
change.) ``"store"`` keeps the input of every step. ``"recompute"`` keeps that of every block, and,
for the block whose derivative is being computed, of its steps: twice the square root of the limit,
for one more run of every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardax._core._jax import Tracer
from shardax._core.checks import Options, is_integer
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, PyTree, format_path, plain_path
from shardax._core.variable import Variable
from shardax._transforms.control import loops, scan
from shardax._transforms.errors import TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift.engine import (
    ARRAY_OR_NUMBER,
    LiftedCall,
    retry_captured,
    takes_options,
)

Differentiable = Literal["no", "store", "recompute"]


class WhileResult(NamedTuple):
    """What a bounded loop returns.

    Attributes:
        final: The carry after the last step.
        history: Rows of the carry after each step: arrays with a first dimension of size
            ``max_steps``, or None.
        length: The number of steps taken, int32 of shape ().
        converged: Whether the loop ended because its condition no longer held, bool of shape ();
            False means that it reached the limit and would have gone on.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> result = sx.bounded_while_loop(lambda x: x < 9, lambda x: 2 * x, 1, max_steps=3)
        >>> int(result.final), int(result.length), bool(result.converged)
        (8, 3, False)
    """

    final: PyTree
    history: PyTree
    length: Any
    converged: object


class BoundedLoop(NamedTuple):
    """What a bounded loop runs."""

    condition: Callable[[Any], Any]  # returns, for a carry, whether to go on: a boolean of shape ()
    body: Callable[[PyTree], PyTree]  # returns the next carry
    row: Callable[[Any], Any]  # returns a carry's row of the history: a pytree of arrays
    max_steps: int  # the most steps to take
    padding: object  # A row of padding


class _LoopState(NamedTuple):
    """Whether to go on, how many steps were taken, the carry."""

    active: Any
    length: Any
    carry: PyTree


def run_bounded(loop: BoundedLoop, init: object, differentiable: Differentiable) -> WhileResult:
    """Runs a bounded loop."""
    active = loop.condition(init)
    start = _LoopState(active, scan.vary_alike(jnp.zeros((), jnp.int32), active), init)
    if loop.max_steps == 0:
        last, history = start, _repeated(loop.padding, 0)
    elif differentiable == "no":
        last, history = _run_buffered(loop, start)
    else:
        last, history = _run_blocks(loop, start, differentiable == "store")
    return WhileResult(last.carry, history, last.length, jnp.logical_not(last.active))


def settled(body: Callable[[PyTree], object], init: object) -> PyTree:
    """Returns the first carry as arrays of the body's dtypes."""
    arrays = jax.tree.map(jnp.asarray, init)
    for _ in range(len(jax.tree.leaves(arrays)) + 1):  # one number may change what another becomes
        kinds = jax.eval_shape(body, arrays)
        old_arrays, arrays = arrays, jax.tree.map(_with_dtype, arrays, kinds)
        if all(map(operator.is_, jax.tree.leaves(old_arrays), jax.tree.leaves(arrays))):
            break
    return arrays


def _with_dtype(leaf, kind):
    weakness = [getattr(jax.typeof(item), "weak_type", False) for item in (leaf, kind)]
    if leaf.dtype == kind.dtype and weakness[0] == weakness[1]:
        return leaf
    return jax.lax.convert_element_type(leaf, kind.dtype)


def _run_buffered(loop: BoundedLoop, start: _LoopState) -> tuple[_LoopState, PyTree]:
    def proceed(state):
        step, progress, _ = state
        return any_active(progress.active) & (step < loop.max_steps)

    def advance(state):
        step, (active, length, carry), buffers = state
        mine = element_active(active)
        new = loop.body(carry)
        rows = _select(mine, loop.row(new), loop.padding)
        buffers = jax.tree.map(
            lambda buffer, row: jax.lax.dynamic_update_index_in_dim(buffer, row, step, 0),
            buffers,
            rows,
        )
        progress = _LoopState(
            active & loop.condition(new),
            jnp.where(mine, step + 1, length),  # without a batch the counter itself
            _select(mine, new, carry),
        )
        return step + 1, progress, buffers

    buffers = _repeated(loop.padding, loop.max_steps)
    _, last, history = jax.lax.while_loop(
        proceed, advance, (jnp.zeros((), jnp.int32), start, buffers)
    )
    return last, history


def _select(mine, new, old):
    return jax.tree.map(lambda a, b: jnp.where(mine, a, b), new, old)


def _repeated(rows: object, count: int):
    return jax.tree.map(lambda row: jax.lax.broadcast(row, (count,)), rows)


@jax.custom_batching.custom_vmap
def any_active(active: object) -> PyTree:
    """Whether any batch element is active: one answer for all."""
    return active


@any_active.def_vmap
def _any_active_rule(axis_size: int, batched: object, active) -> tuple[Any, bool]:
    return any_active(active.any(axis=0)), False


@jax.custom_batching.custom_vmap
def element_active(active: object) -> PyTree:
    """Whether this batch element is active, given that any is."""
    # Without ``vmap`` there is one batch element, so the answer is a constant, and the compiler
    # drops what is selected by it.
    return jnp.ones((), jnp.bool_)


@element_active.def_vmap
def _element_active_rule(axis_size: int, batched: object, active: object) -> tuple[Any, bool]:
    return active, True


_GOES_IN = "shardax: what goes into a step of a bounded loop"


def _run_blocks(loop: BoundedLoop, start: _LoopState, store: bool) -> tuple[_LoopState, PyTree]:
    size = math.isqrt(loop.max_steps - 1) + 1
    count = -(-loop.max_steps // size)
    one_step = _step_of(loop, exact=count * size == loop.max_steps)

    def take_block(progress: _LoopState, first) -> tuple[_LoopState, PyTree]:
        return jax.lax.scan(one_step, progress, first + jnp.arange(size, dtype=jnp.int32))

    def skip_block(progress: _LoopState, first: object) -> tuple[_LoopState, PyTree]:
        return progress, _repeated(loop.padding, size)

    def one_block(progress: _LoopState, first: object) -> tuple[_LoopState, PyTree]:
        return jax.lax.cond(any_active(progress.active), take_block, skip_block, progress, first)

    policy = jax.checkpoint_policies.save_only_these_names(_GOES_IN) if store else None
    checkpointed = jax.checkpoint(one_block, prevent_cse=False, policy=policy)
    firsts = jnp.arange(count, dtype=jnp.int32) * size
    last, rows = jax.lax.scan(checkpointed, start, firsts)
    return last, jax.tree.map(
        lambda row: row.reshape(count * size, *row.shape[2:])[: loop.max_steps], rows
    )


def _step_of(loop: BoundedLoop, exact: bool) -> Callable[[_LoopState, Any], tuple[_LoopState, Any]]:
    """Returns one step of a scan."""

    def take(progress: _LoopState) -> tuple[_LoopState, Leaf]:
        new = loop.body(progress.carry)
        return _LoopState(loop.condition(new), progress.length + 1, new), loop.row(new)

    def skip(progress: _LoopState) -> tuple[_LoopState, PyTree]:
        return progress, loop.padding

    def one_step(progress: _LoopState, step) -> tuple[_LoopState, PyTree]:
        goes_on = progress.active if exact else progress.active & (step < loop.max_steps)

        def take_own(progress: _LoopState) -> tuple[_LoopState, PyTree]:
            return jax.lax.cond(element_active(goes_on), take, skip, progress)

        return jax.lax.cond(any_active(goes_on), take_own, skip, progress)

    # What a checkpointed function keeps is what goes into it; around the choice, not inside, since
    # what is kept inside a branch is kept by every turn of the scan.
    checkpointed = jax.checkpoint(one_step, prevent_cse=False)

    def named_step(progress: _LoopState, step: object) -> tuple[_LoopState, PyTree]:
        return checkpointed(checkpoint_name(progress, _GOES_IN), step)

    return named_step


# Position of the history function among the functions of a call.
_HISTORY = 2


@takes_options
def bounded_while_loop(
    cond_fun: Callable[[PyTree], object],
    body_fun: Callable[[PyTree], object],
    init: object,
    *,
    max_steps: int,
    history: Callable[[Any], object] | None = None,
    differentiable: Differentiable = "no",
    padding: object = 0,
) -> WhileResult:
    """Runs a function over Modules at most ``max_steps`` times.

    Carry, condition and body are as for ``while_loop``. Under ``vmap`` each batch element has a
    length of its own.

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
        TransformError: If ``max_steps``, ``differentiable``, ``history`` or ``padding`` is not
            valid; as for ``while_loop``; also if the history function writes.

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
    checks, modes = Options(TransformError), get_args(Differentiable)
    expected = f"one of {', '.join(map(repr, modes))}"
    checks.check("differentiable", differentiable, differentiable in modes, expected)
    expected = "a function of the carry that returns arrays, or None"
    kinds = (Callable, type(None))
    checks.instance("history of sx.bounded_while_loop", history, kinds, expected)
    steps = _size_of_history(max_steps)
    functions = (body_fun, cond_fun) if history is None else (body_fun, cond_fun, history)
    options = (steps, differentiable, padding)
    return eager.run(_bounded_while_loop, functions, options, (init,), {})


def _bounded_while_loop(
    functions: Sequence[Any],
    options: tuple[int, Differentiable, object],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> WhileResult:
    steps, differentiable, padding = options

    def attempt(captured: list[Variable]) -> WhileResult:
        call = LiftedCall("bounded_while_loop", functions, args, kwargs, captured=captured)
        body, condition = loops.body_and_condition(call)

        def advance(carry):
            return body.step(carry)[0]

        start = settled(advance, body.start())
        row = (
            (lambda carry: None)
            if len(functions) == _HISTORY
            else loops.ReadOnlyFunction(body, _HISTORY, "history", _row_of)
        )
        rows = padding_row(padding, scan.abstract_eval(row, start))
        loop = BoundedLoop(condition, advance, row, steps, rows)
        result = run_bounded(loop, start, differentiable)
        return result._replace(final=call.apply(body.finish(result.final)))

    return retry_captured(attempt)


def _size_of_history(max_steps: Any) -> int:
    """Returns the size of the history, known before the loop runs."""
    if isinstance(max_steps, (Tracer, jax.Array)):
        raise TransformError(
            "max_steps of sx.bounded_while_loop is an array, but it is the size of the history and "
            "must be known before the program runs. Give a Python integer; inside sx.jit, make it "
            "a static argument."
        )
    if not is_integer(max_steps) or max_steps < 0:
        raise TransformError(
            f"max_steps of sx.bounded_while_loop is {max_steps!r}; give an integer of at least 0."
        )
    return operator.index(max_steps)


def _row_of(result: object):
    """Returns what a history function returned as arrays."""

    def as_array(path, leaf: object):
        value = leaf.value if isinstance(leaf, Variable) else leaf
        if isinstance(value, ARRAY_OR_NUMBER):
            return jnp.asarray(value)
        where = format_path(plain_path(path)) if path else "itself"
        raise TransformError(
            f"The history function of sx.bounded_while_loop returned a {type(leaf).__name__} at "
            f"{where}. A row of the history holds arrays: return the values to keep, "
            f"lambda model: model.kernel.value."
        )

    return jax.tree_util.tree_map_with_path(as_array, result, is_leaf=is_object)


def padding_row(padding: object, kinds: object) -> PyTree:
    """Returns a row of padding."""
    rows = jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf, padding, is_leaf=is_object
    )
    try:
        spread = jax.tree.broadcast(rows, kinds)
    except ValueError as error:
        raise TransformError(
            f"padding={padding!r} of sx.bounded_while_loop is not a prefix of a row of the "
            f"history, which is {scan.form(kinds)}. Give one number, or one each in its containers."
        ) from error

    return jax.tree_util.tree_map_with_path(_filled, spread, kinds)


def _filled(key_path, value, kind):
    where = f" at {format_path(plain_path(key_path))}" if key_path else ""
    array = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)
    if not _holds(array, kind.dtype):
        description = (
            f"{value!r}" if array.ndim == 0 and not isinstance(value, Tracer) else array.dtype
        )
        raise TransformError(
            f"padding={description} cannot stand in the history{where}, which has dtype "
            f"{kind.dtype}. Give a padding of that dtype, or convert what the history function "
            "returns."
        )
    try:
        row = jnp.broadcast_to(jnp.asarray(array, kind.dtype), kind.shape)
    except ValueError as error:
        raise TransformError(
            f"padding of shape {array.shape} does not fit a row of the history{where}, which has "
            f"shape {kind.shape}."
        ) from error
    return scan.vary_alike(_laid_out_alike(row, kind), kind)


def _laid_out_alike(row: object, kind: object):
    """Returns an array in another's layout over Explicit axes."""
    sharding = jax.typeof(kind).sharding
    if all(entry is None for entry in sharding.spec):
        return row
    return jax.sharding.reshard(row, sharding)


def _holds(array, dtype: jax.typing.DTypeLike) -> bool:
    """Whether a dtype can hold the padding; floats may round."""
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
