# SPDX-License-Identifier: Apache-2.0
"""Steps with non-finite numbers.

The compiled step returns flags beside its loss: whether loss and gradients are finite, and which
Variables it made infinite or NaN. Elements that were so before (a mask of ``-inf``, the best value
of a schedule that starts at infinity) do not count. The host reads the flags a step late, so that
the devices never wait for it, but before anything is saved, evaluated or logged.

A step stops the run if it spoils a value, or if its loss is not finite. With
``optax.apply_if_finite``, which leaves such steps out by itself, only spoiled values count.
Steps are skipped in the compiled step, by what is known before the update: that needs all gradients
at once, so it costs memory, and is done only where it is asked for.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardax import Variable, iter_variables
from shardax.extend import Path, format_path, stored_value, values_by_path
from shardax.train.optimizer import Optimizer, laid_out_as, trained_variables
from shardax.train.step_numbers import gradient_norm

_PARTS = ("model", "optimizer", "ema")
_FIRST = 2  # flags that are not of a Variable: loss, skipped


# --- In the compiled step ---


def current_values(trained: object) -> list[tuple[Path, Variable, Any]]:
    """Returns path, Variable and value of everything a step may change."""
    return [(path, variable, stored_value(variable)) for path, variable in iter_variables(trained)]


def step_flags(
    optimizer: Optimizer,
    old: Sequence[tuple[Path, Variable, object]],
    loss: Any,
    gradients: object,
    *,
    skip: bool,
    mesh: Mesh | None,
) -> jax.Array:
    """Returns a step's flags; undoes it if it is skipped."""
    bad_gradients = [
        ~jnp.isfinite(gradient_norm(gradient)) for gradient in _by_path(optimizer, gradients)
    ]
    bad_loss = ~jnp.all(jnp.isfinite(loss))
    skipped = bad_loss | jnp.any(jnp.stack(bad_gradients)) if skip else jnp.zeros((), bool)
    if skip:
        _undo(old, skipped)
    spoiled = [
        _spoils(value, stored_value(variable)) for _, variable, value in old if _is_inexact(value)
    ]
    flags = jnp.stack([bad_loss, skipped, *bad_gradients, *spoiled])
    if mesh is not None and set(mesh.axis_types) == {AxisType.Auto}:  # every process reads it
        flags = jax.lax.with_sharding_constraint(flags, NamedSharding(mesh, PartitionSpec()))
    return flags


def _by_path(optimizer: Optimizer, gradients: object) -> list[Any]:
    """Returns gradients in the order of the optimizer's Variables."""
    paths = [path for path, _ in trained_variables(optimizer)]
    by_path = values_by_path(gradients, paths)
    return [by_path[path] for path in paths]


def _undo(old: Sequence[tuple[Path, Variable, object]], skipped: jax.Array) -> None:
    """Puts values back if a step is skipped."""
    # Random streams and integer counts of the model go on: a step is not to repeat what spoiled it.
    for path, variable, value in old:
        new = stored_value(variable)
        if new is not value and (path[0] != 0 or _is_inexact(value)):
            variable.value = jax.tree.map(
                lambda old_leaf, new_leaf: jax.lax.select(
                    skipped, jnp.asarray(old_leaf), laid_out_as(old_leaf, jnp.asarray(new_leaf))
                ),
                value,
                new,
            )


def _spoils(old: object, new: object) -> jax.Array:
    """Whether finite elements are no longer finite."""
    if new is old:
        return jnp.zeros((), bool)
    lost = [
        jnp.any(jnp.isfinite(old_leaf) & ~jnp.isfinite(laid_out_as(old_leaf, new_leaf)))
        for old_leaf, new_leaf in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(old_leaf.dtype, jnp.inexact)
    ]
    return jnp.any(jnp.stack(lost))


def _is_inexact(value: object) -> bool:
    return any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value))


def _leaves_out_steps(optimizer: Optimizer) -> bool:
    """Whether ``optax.apply_if_finite`` is in the optimizer's transformation."""
    paths = {path for path, _ in iter_variables(optimizer.opt_state)}
    return any(
        path[-1:] == ("last_finite",) and (*path[:-1], "notfinite_count") in paths for path in paths
    )


# --- On the host ---


class FiniteCheck:
    """Non-finite steps of a run."""

    def __init__(self, trained: Sequence[Any], limit: int, saved: Any) -> None:
        parts: dict[Any, str] = dict(enumerate(_PARTS))
        self._gradients = [f"model{format_path(p)}" for p, _ in trained_variables(trained[1])]
        self._values = [
            f"{parts[path[0]]}{format_path(path[1:])}"
            for path, variable in iter_variables(tuple(trained))
            if _is_inexact(stored_value(variable))
        ]
        self._is_guarded = _leaves_out_steps(trained[1])
        self._limit = limit
        self._unread: collections.deque[tuple[int, Any, Any]] = collections.deque()
        self.skipped, self._in_a_row = saved or (0, 0)
        self.notes: list[str] = []

    def state(self) -> list[int]:
        """Returns the numbers of skipped steps, and of those in a row."""
        return [self.skipped, self._in_a_row]

    def add(self, step: int, loss: object, flags: object) -> None:
        """Takes in a step, perhaps still running."""
        self._unread.append((step, loss, flags))

    def problem(self, behind: int = 0) -> str:
        """Returns why the run may not go on, or nothing."""
        # The latest ``behind`` steps are left for later, as they may still be running.
        while len(self._unread) > behind:
            step, loss, device_flags = self._unread.popleft()
            flags = np.asarray(device_flags)
            if not flags.any():
                self._in_a_row = 0
            elif text := self._judge(step, float(loss), flags):
                return text
        return ""

    def _judge(self, step: int, loss: float, flags: np.ndarray) -> str:
        bad_loss, skipped = flags[:_FIRST]
        gradients, spoiled = np.split(flags[_FIRST:], [len(self._gradients)])
        causes = _listed("The gradients of", self._gradients, gradients, "are not finite.")
        causes += _listed("Values of", self._values, spoiled, "are no longer finite.")

        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if skipped:
            self.skipped += 1
            if self._in_a_row <= self._limit:
                self.notes.append(f"step {step} was skipped: its loss is {loss:.6g}.{causes}")
                return ""
            return (
                f"The loss at step {step} is {loss:.6g}.{causes} {self._in_a_row} steps in a row "
                f"were skipped; TrainerSettings has max_skipped_steps={self._limit}."
            )

        if not spoiled.any() and (self._is_guarded or not bad_loss):
            return ""
        note = "" if bad_loss and not math.isfinite(loss) else ", but not all of the step is finite"
        leave_out = (
            "" if self._limit else " TrainerSettings(..., max_skipped_steps=10) skips such steps."
        )
        return f"The loss at step {step} is {loss:.6g}{note}.{causes}{leave_out}"


def _listed(title: str, names: Sequence[str], are_bad: np.ndarray, end: str) -> str:
    bad = [name for name, is_bad in zip(names, are_bad, strict=True) if is_bad]
    omitted = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return f" {title} {', '.join(bad[:8])}{omitted} {end}" if bad else ""
