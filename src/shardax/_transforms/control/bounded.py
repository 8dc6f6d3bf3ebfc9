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
from shardax._core.array_ops import is_weakly_typed
from shardax._core.checks import Options, is_integer
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, PyTree, plain_path
from shardax._core.variable import Variable
from shardax._transforms.control import errors
from shardax._transforms.control.forms import abstract_eval, vary_alike
from shardax._transforms.control.loop_body import ReadOnlyFunction
from shardax._transforms.control.loops import loop_with_condition
from shardax._transforms.errors import TransformError
from shardax._transforms.jit import eager
from shardax._transforms.lift.effects import holds_same_arrays
from shardax._transforms.lift.engine import ARRAY_OR_NUMBER, LiftedCall, retry_captured
from shardax._transforms.lift.transformed import takes_options

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
    length: jax.Array
    converged: jax.Array


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
    modes = get_args(Differentiable)
    checks = Options(TransformError)
    checks.check(
        "differentiable",
        differentiable,
        differentiable in modes,
        f"one of {', '.join(map(repr, modes))}",
    )
    checks.instance(
        "history of sx.bounded_while_loop",
        history,
        (Callable, type(None)),
        "a function of the carry that returns arrays, or None",
    )
    _check_max_steps(max_steps)

    functions = (body_fun, cond_fun) if history is None else (body_fun, cond_fun, history)
    options = (operator.index(max_steps), differentiable, padding)
    return eager.run(_bounded_while_loop, functions, options, (init,), {})


def _check_max_steps(max_steps: Any) -> None:
    """Raises unless the size of the history is known before the loop runs."""
    if isinstance(max_steps, (Tracer, jax.Array)):
        raise errors.max_steps_is_an_array()
    if not is_integer(max_steps) or max_steps < 0:
        raise errors.not_max_steps(max_steps)


# Position of the history function among the functions of a call.
_HISTORY = 2


def _bounded_while_loop(
    functions: Sequence[Callable[..., PyTree]],
    options: tuple[int, Differentiable, PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> WhileResult:
    max_steps, differentiable, padding = options

    def attempt(captured: list[Variable]) -> WhileResult:
        call = LiftedCall("bounded_while_loop", functions, args, kwargs, captured=captured)
        loop, condition = loop_with_condition(call)
        init = settle_dtypes(loop.next_carry, loop.first_carry())

        def no_row(carry: PyTree) -> None:
            return None

        row = no_row
        if len(functions) > _HISTORY:
            row = ReadOnlyFunction(loop, _HISTORY, "history", _as_row)
        bounded = BoundedLoop(
            condition,
            loop.next_carry,
            row,
            max_steps,
            padding_row(padding, abstract_eval(row, init)),
        )
        result = run_bounded(bounded, init, differentiable)
        return result._replace(final=loop.apply(result.final))

    return retry_captured(attempt)


# --- running --------------------------------------------------------------------------------------


class BoundedLoop(NamedTuple):
    """What a bounded loop runs."""

    condition: Callable[[PyTree], jax.Array]  # of a carry: whether to go on, a boolean of shape ()
    body: Callable[[PyTree], PyTree]  # returns the next carry
    row: Callable[[PyTree], PyTree]  # returns a carry's row of the history, arrays
    max_steps: int  # the most steps to take
    padding: PyTree  # a row of padding


class _LoopState(NamedTuple):
    """Where a loop is."""

    active: jax.Array  # whether to go on
    length: jax.Array  # how many steps were taken
    carry: PyTree


def run_bounded(loop: BoundedLoop, init: PyTree, differentiable: Differentiable) -> WhileResult:
    """Returns the result of a loop, given its first carry."""
    active = loop.condition(init)
    start = _LoopState(active, vary_alike(jnp.zeros((), jnp.int32), active), init)
    if loop.max_steps == 0:
        last, history = start, _repeat(loop.padding, 0)
    elif differentiable == "no":
        last, history = _run_buffered(loop, start)
    else:
        last, history = _run_blocks(loop, start, differentiable)
    return WhileResult(last.carry, history, last.length, jnp.logical_not(last.active))


def settle_dtypes(body: Callable[[PyTree], PyTree], init: PyTree) -> PyTree:
    """Returns the first carry as arrays of the dtypes that the body makes of them."""
    arrays = jax.tree.map(jnp.asarray, init)
    # One number may change what another becomes, so there is a round for each.
    for _ in range(len(jax.tree.leaves(arrays)) + 1):
        types = jax.eval_shape(body, arrays)
        before, arrays = arrays, jax.tree.map(_with_dtype, arrays, types)
        if holds_same_arrays(before, arrays):
            break
    return arrays


def _with_dtype(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if array.dtype == like.dtype and is_weakly_typed(array) == is_weakly_typed(like):
        return array
    return jax.lax.convert_element_type(array, like.dtype)


def _run_buffered(loop: BoundedLoop, start: _LoopState) -> tuple[_LoopState, PyTree]:
    """Runs a loop as one ``while`` that writes into a buffer; returns (last state, history)."""

    def goes_on(state: tuple[jax.Array, _LoopState, PyTree]) -> jax.Array:
        step, progress, _ = state
        return any_active(progress.active) & (step < loop.max_steps)

    def advance(
        state: tuple[jax.Array, _LoopState, PyTree],
    ) -> tuple[jax.Array, _LoopState, PyTree]:
        step, (active, length, carry), buffers = state
        is_own_step = element_active(active)
        new_carry = loop.body(carry)

        row = _select(is_own_step, loop.row(new_carry), loop.padding)
        buffers = jax.tree.map(
            lambda buffer, array: jax.lax.dynamic_update_index_in_dim(buffer, array, step, 0),
            buffers,
            row,
        )
        progress = _LoopState(
            active & loop.condition(new_carry),
            jnp.where(is_own_step, step + 1, length),  # without a batch the counter itself
            _select(is_own_step, new_carry, carry),
        )
        return step + 1, progress, buffers

    buffers = _repeat(loop.padding, loop.max_steps)
    first = (jnp.zeros((), jnp.int32), start, buffers)
    _, last, history = jax.lax.while_loop(goes_on, advance, first)
    return last, history


def _select(condition: jax.Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def _repeat(row: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda array: jax.lax.broadcast(array, (count,)), row)


@jax.custom_batching.custom_vmap
def any_active(active: jax.Array) -> jax.Array:
    """Whether any batch element is active: one answer for all."""
    return active


@any_active.def_vmap
def _any_active_rule(
    axis_size: int, batched: Sequence[bool], active: jax.Array
) -> tuple[jax.Array, bool]:
    return any_active(active.any(axis=0)), False


@jax.custom_batching.custom_vmap
def element_active(active: jax.Array) -> jax.Array:
    """Whether this batch element is active, given that any is."""
    # Without ``vmap`` there is one batch element, so the answer is a constant, and the compiler
    # drops what is selected by it.
    return jnp.ones((), jnp.bool_)


@element_active.def_vmap
def _element_active_rule(
    axis_size: int, batched: Sequence[bool], active: jax.Array
) -> tuple[jax.Array, bool]:
    return active, True


_STEP_INPUT = "shardax: what goes into a step of a bounded loop"


def _run_blocks(
    loop: BoundedLoop, start: _LoopState, differentiable: Differentiable
) -> tuple[_LoopState, PyTree]:
    """Runs a loop as a scan over blocks of steps; returns (last state, history)."""
    size = math.isqrt(loop.max_steps - 1) + 1
    count = -(-loop.max_steps // size)
    one_step = _scan_step(loop, may_exceed=count * size > loop.max_steps)

    def take_block(progress: _LoopState, first: jax.Array) -> tuple[_LoopState, PyTree]:
        return jax.lax.scan(one_step, progress, first + jnp.arange(size, dtype=jnp.int32))

    def skip_block(progress: _LoopState, first: jax.Array) -> tuple[_LoopState, PyTree]:
        return progress, _repeat(loop.padding, size)

    def one_block(progress: _LoopState, first: jax.Array) -> tuple[_LoopState, PyTree]:
        return jax.lax.cond(any_active(progress.active), take_block, skip_block, progress, first)

    policy = None  # nothing of a block is kept but its input
    if differentiable == "store":
        policy = jax.checkpoint_policies.save_only_these_names(_STEP_INPUT)
    checkpointed = jax.checkpoint(one_block, prevent_cse=False, policy=policy)

    firsts = jnp.arange(count, dtype=jnp.int32) * size
    last, blocks = jax.lax.scan(checkpointed, start, firsts)
    history = jax.tree.map(
        lambda rows: rows.reshape(count * size, *rows.shape[2:])[: loop.max_steps], blocks
    )
    return last, history


def _scan_step(
    loop: BoundedLoop, may_exceed: bool
) -> Callable[[_LoopState, jax.Array], tuple[_LoopState, PyTree]]:
    """Returns one step of a scan; ``may_exceed`` if the scan has more steps than the limit."""

    def take(progress: _LoopState) -> tuple[_LoopState, PyTree]:
        new_carry = loop.body(progress.carry)
        active = loop.condition(new_carry)
        return _LoopState(active, progress.length + 1, new_carry), loop.row(new_carry)

    def skip(progress: _LoopState) -> tuple[_LoopState, PyTree]:
        return progress, loop.padding

    def one_step(progress: _LoopState, step: jax.Array) -> tuple[_LoopState, PyTree]:
        active = progress.active
        if may_exceed:
            active = active & (step < loop.max_steps)

        def take_own(progress: _LoopState) -> tuple[_LoopState, PyTree]:
            return jax.lax.cond(element_active(active), take, skip, progress)

        return jax.lax.cond(any_active(active), take_own, skip, progress)

    # What a checkpointed function keeps is what goes into it; around the choice, not inside, since
    # what is kept inside a branch is kept by every turn of the scan.
    checkpointed = jax.checkpoint(one_step, prevent_cse=False)

    def named_step(progress: _LoopState, step: jax.Array) -> tuple[_LoopState, PyTree]:
        return checkpointed(checkpoint_name(progress, _STEP_INPUT), step)

    return named_step


# --- rows of the history --------------------------------------------------------------------------


def _as_row(result: PyTree) -> PyTree:
    """Returns what a history function returned as arrays."""

    def as_array(keys: tuple[Any, ...], leaf: Any) -> jax.Array:
        value = leaf.value if isinstance(leaf, Variable) else leaf
        if not isinstance(value, ARRAY_OR_NUMBER):
            raise errors.history_is_no_array(plain_path(keys), leaf)
        return jnp.asarray(value)

    return jax.tree_util.tree_map_with_path(as_array, result, is_leaf=is_object)


def padding_row(padding: PyTree, types: PyTree) -> PyTree:
    """Returns a row of padding, given the types of a row."""

    def value_of(leaf: Any) -> Leaf:
        return leaf.value if isinstance(leaf, Variable) else leaf

    values = jax.tree.map(value_of, padding, is_leaf=is_object)
    try:
        values = jax.tree.broadcast(values, types)
    except ValueError as error:
        raise errors.padding_is_no_prefix(padding, types) from error
    return jax.tree_util.tree_map_with_path(_padding_array, values, types)


def _padding_array(keys: tuple[Any, ...], value: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the padding of one array of a row."""
    path = plain_path(keys)
    array = value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)
    if not _can_hold(like.dtype, array):
        raise errors.padding_has_another_dtype(path, value, array, like.dtype)
    try:
        array = jnp.broadcast_to(jnp.asarray(array, like.dtype), like.shape)
    except ValueError as error:
        raise errors.padding_has_another_shape(path, array.shape, like.shape) from error

    # In the layout of the row over Explicit axes.
    sharding = jax.typeof(like).sharding
    if any(mesh_axes is not None for mesh_axes in sharding.spec):
        array = jax.sharding.reshard(array, sharding)
    return vary_alike(array, like)


def _can_hold(dtype: jax.typing.DTypeLike, array: jax.Array | np.ndarray) -> bool:
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
