# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation: the mean loss over all targets, with the model in evaluation mode.

Batches may count different numbers of targets (the last one is padded), so each batch's mean loss
is weighted by its number of targets: where it has a ``mask``, those that the mask leaves, else its
rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardax._core.state.split_merge import iter_modules
from shardax._transforms.jit.jit import jit
from shardax.train.errors import TrainerError
from shardax.train.prefetch import put_batch

MODES = {"deterministic": True, "use_running_average": True}
"""The attributes that make evaluation mode, as ``Module.eval`` sets them."""


@contextlib.contextmanager
def evaluation_mode(tree: Any) -> Iterator[None]:
    """Puts all Modules of a tree into evaluation mode, and each back into the mode it was in.

    Args:
        tree: A Module or a pytree of Modules.

    Example:
        >>> import shardax as sx
        >>> frozen = sx.nn.Dropout(0.5, deterministic=True)
        >>> model = sx.nn.Sequential(frozen, sx.nn.Dropout(0.5, rngs=sx.Rngs(0)))
        >>> with evaluation_mode(model):
        ...     [layer.deterministic for layer in model.layers]
        [True, True]
        >>> [layer.deterministic for layer in model.layers]
        [True, False]
    """
    before = [
        (module, name, getattr(module, name))
        for _, module in iter_modules(tree)
        for name in MODES
        if name in vars(module) and getattr(module, name) != MODES[name]
    ]
    for module, name, _ in before:
        setattr(module, name, MODES[name])
    try:
        yield
    finally:
        for module, name, mode in before:
            setattr(module, name, mode)


def make_eval_step(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Compiles ``(model, batch) -> (mean loss of the batch, its number of targets)``.

    Args:
        loss: ``loss(model, batch)``, the mean loss over the batch's targets.

    Example:
        >>> step = make_eval_step(lambda model, batch: jnp.mean(batch["x"]))
        >>> [float(number) for number in step(None, {"x": jnp.array([1.0, 2.0])})]
        [1.5, 2.0]
    """

    @jit
    def eval_step(model: Any, batch: Any) -> tuple[Any, Any]:
        return loss(model, batch), _targets(batch)

    return eval_step


def _targets(batch: Any) -> Any:
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    if mask is not None:
        return jnp.sum(mask)
    return jnp.asarray(jax.tree.leaves(batch)[0].shape[0])


def held_out_loss(
    eval_step: Callable[[Any, Any], Any],
    model: Any,
    batches: Iterable[Any],
    shardings: Any = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Evaluates a model on held-out batches.

    Args:
        eval_step: From ``make_eval_step``.
        model: The model, in evaluation mode.
        batches: Host batches; iterating starts a new pass.
        shardings: Where the arrays of a batch go, as for ``put_batch``.
        should_stop: Asked before each batch.

    Returns:
        The mean loss per target, summed up in float64; None if it was stopped.

    Raises:
        TrainerError: If the batches hold no target.

    Example:
        >>> step = make_eval_step(lambda model, batch: jnp.mean(batch["x"]))
        >>> held_out_loss(step, None, [{"x": jnp.array([1.0, 2.0])}, {"x": jnp.array([9.0])}])
        4.0
    """
    total, count = 0.0, 0.0
    for batch in batches:
        if should_stop():
            return None
        mean, targets = jax.device_get(eval_step(model, put_batch(batch, shardings)))
        if targets:  # the mean over nothing may be anything
            total += float(mean) * float(targets)
            count += float(targets)
    if count == 0:
        raise TrainerError(
            "The held-out batches hold no target. They are read anew in every evaluation, so give "
            "something that can be iterated again, such as EvalBatches or a list, not a generator."
        )
    return total / count
