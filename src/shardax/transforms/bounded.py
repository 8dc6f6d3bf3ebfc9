# SPDX-License-Identifier: Apache-2.0
"""Bounded loops over plain pytrees: a while loop with an upper limit on its steps.

The limit makes room for two things that a plain while loop cannot have. One is a *history*: one
*row* per step, in arrays whose size is known before the program runs; rows past the steps that were
taken hold *padding*. The other is a reverse-mode derivative, which must know how much it will have
to remember.

Loops that are not differentiated run as one ``while``. It writes rows into a buffer, so its cost
follows the steps that are taken. Under ``vmap`` it goes on while any *lane* does, and a lane that
is finished keeps its state.

Loops that are differentiated run as a scan over *blocks* of the square root of the limit, and in
each a scan over its steps; steps and whole blocks after the end are skipped. Of a step only what
goes in is kept, and the step is run again when its derivative is computed. (Keeping more would cost
more: what a branch keeps is kept for every step, also the weights that it uses and does not
change.) ``"store"`` keeps what goes into every step. ``"recompute"`` keeps what goes into every
block, and, for the block whose derivative is being computed, what goes into its steps: twice the
square root of the limit, for one more run of every step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardax.transforms.repeat import vary_alike

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

    final: Any
    history: Any
    length: Any
    converged: Any


class Loop(NamedTuple):
    """What a bounded loop runs.

    Attributes:
        condition: Returns, for a carry, whether to go on: a boolean of shape ().
        body: Returns the next carry.
        row: Returns a carry's row of the history: a pytree of arrays.
        max_steps: The most steps to take.
        padding: A row of padding.
    """

    condition: Callable[[Any], Any]
    body: Callable[[Any], Any]
    row: Callable[[Any], Any]
    max_steps: int
    padding: Any


class _Progress(NamedTuple):
    """The carry, how many steps led to it, and whether to go on."""

    active: Any
    length: Any
    carry: Any


def run_bounded(loop: Loop, init: Any, differentiable: Differentiable) -> WhileResult:
    """Runs a bounded loop.

    Args:
        loop: What to run.
        init: The first carry, as ``settled`` returns it.
        differentiable: ``"no"`` for no reverse-mode derivative; ``"store"`` and ``"recompute"`` as
            in the module's docstring.
    """
    active = loop.condition(init)
    start = _Progress(active, vary_alike(jnp.zeros((), jnp.int32), active), init)
    if loop.max_steps == 0:
        last, history = start, _repeated(loop.padding, 0)
    elif differentiable == "no":
        last, history = _run_buffered(loop, start)
    else:
        last, history = _run_blocks(loop, start, differentiable == "store")
    return WhileResult(last.carry, history, last.length, jnp.logical_not(last.active))


def settled(body: Callable[[Any], Any], init: Any) -> Any:
    """Returns the first carry as arrays, Python numbers in the dtypes that the body gives them."""
    arrays = jax.tree.map(jnp.asarray, init)
    for _ in range(len(jax.tree.leaves(arrays)) + 1):  # one number may change what another becomes
        kinds = jax.eval_shape(body, arrays)
        before, arrays = arrays, jax.tree.map(_with_dtype, arrays, kinds)
        if all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(arrays))):
            break
    return arrays


def _with_dtype(leaf: Any, kind: Any) -> Any:
    weakness = [getattr(jax.typeof(item), "weak_type", False) for item in (leaf, kind)]
    if leaf.dtype == kind.dtype and weakness[0] == weakness[1]:
        return leaf
    return jax.lax.convert_element_type(leaf, kind.dtype)


# --- one while, rows in a buffer ------------------------------------------------------------------


def _run_buffered(loop: Loop, start: _Progress) -> tuple[_Progress, Any]:
    def proceed(state: Any) -> Any:
        step, progress, _ = state
        return any_lane(progress.active) & (step < loop.max_steps)

    def advance(state: Any) -> Any:
        step, (active, length, carry), buffers = state
        mine = own_lane(active)
        new = loop.body(carry)
        rows = _select(mine, loop.row(new), loop.padding)
        buffers = jax.tree.map(
            lambda buffer, row: jax.lax.dynamic_update_index_in_dim(buffer, row, step, 0),
            buffers,
            rows,
        )
        progress = _Progress(
            active & loop.condition(new),
            jnp.where(mine, step + 1, length),  # without lanes the counter itself
            _select(mine, new, carry),
        )
        return step + 1, progress, buffers

    buffers = _repeated(loop.padding, loop.max_steps)
    _, last, history = jax.lax.while_loop(
        proceed, advance, (jnp.zeros((), jnp.int32), start, buffers)
    )
    return last, history


def _select(mine: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(mine, a, b), new, old)


def _repeated(rows: Any, count: int) -> Any:
    return jax.tree.map(lambda row: jax.lax.broadcast(row, (count,)), rows)


@jax.custom_batching.custom_vmap
def any_lane(active: Any) -> Any:
    """Whether any lane is active, however many ``vmap`` are around: one answer for all."""
    return active


@any_lane.def_vmap
def _any_lane_rule(axis_size: int, batched: Any, active: Any) -> tuple[Any, bool]:
    return any_lane(active.any(axis=0)), False


@jax.custom_batching.custom_vmap
def own_lane(active: Any) -> Any:
    """Whether this lane is active, given that any is.

    Without ``vmap`` there is one lane, so the answer is a constant, and the compiler drops what is
    selected by it.
    """
    return jnp.ones((), jnp.bool_)


@own_lane.def_vmap
def _own_lane_rule(axis_size: int, batched: Any, active: Any) -> tuple[Any, bool]:
    return active, True


# --- scans over blocks of steps -------------------------------------------------------------------

_GOES_IN = "shardax: what goes into a step of a bounded loop"


def _run_blocks(loop: Loop, start: _Progress, store: bool) -> tuple[_Progress, Any]:
    size = math.isqrt(loop.max_steps - 1) + 1
    count = -(-loop.max_steps // size)
    one_step = _step_of(loop, exact=count * size == loop.max_steps)

    def take_block(progress: _Progress, first: Any) -> tuple[_Progress, Any]:
        return jax.lax.scan(one_step, progress, first + jnp.arange(size, dtype=jnp.int32))

    def skip_block(progress: _Progress, first: Any) -> tuple[_Progress, Any]:
        return progress, _repeated(loop.padding, size)

    def one_block(progress: _Progress, first: Any) -> tuple[_Progress, Any]:
        return jax.lax.cond(any_lane(progress.active), take_block, skip_block, progress, first)

    kept = jax.checkpoint_policies.save_only_these_names(_GOES_IN) if store else None
    checkpointed = jax.checkpoint(one_block, prevent_cse=False, policy=kept)
    firsts = jnp.arange(count, dtype=jnp.int32) * size
    last, rows = jax.lax.scan(checkpointed, start, firsts)
    return last, jax.tree.map(
        lambda row: row.reshape(count * size, *row.shape[2:])[: loop.max_steps], rows
    )


def _step_of(loop: Loop, exact: bool) -> Callable[[_Progress, Any], tuple[_Progress, Any]]:
    """Returns one step, for a scan; unless ``exact``, some steps are past the limit."""

    def take(progress: _Progress) -> tuple[_Progress, Any]:
        new = loop.body(progress.carry)
        return _Progress(loop.condition(new), progress.length + 1, new), loop.row(new)

    def skip(progress: _Progress) -> tuple[_Progress, Any]:
        return progress, loop.padding

    def one_step(progress: _Progress, step: Any) -> tuple[_Progress, Any]:
        goes_on = progress.active if exact else progress.active & (step < loop.max_steps)

        def take_own(progress: _Progress) -> tuple[_Progress, Any]:
            return jax.lax.cond(own_lane(goes_on), take, skip, progress)

        return jax.lax.cond(any_lane(goes_on), take_own, skip, progress)

    # What a checkpointed function keeps is what goes into it; around the choice, not inside, since
    # what is kept inside a branch is kept by every turn of the scan.
    checkpointed = jax.checkpoint(one_step, prevent_cse=False)

    def named_step(progress: _Progress, step: Any) -> tuple[_Progress, Any]:
        return checkpointed(checkpoint_name(progress, _GOES_IN), step)

    return named_step
