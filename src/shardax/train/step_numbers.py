# SPDX-License-Identifier: Apache-2.0
"""Numbers recorded by a run beside its loss.

Numbers of a training step (those that the loss returns, the gradient's norm) are computed in the
compiled step and read on the host only where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import iter_variables
from shardax.extend import PyTree
from shardax.train.errors import TrainError
from shardax.train.metrics import (
    Metric,
    counted_by,
    relative_weights,
    target_weights,
    update_from_batch,
    weighted,
)
from shardax.train.speed import THROUGHPUTS

_OWN = ("step", "loss", "grad_norm", "learning_rate", "memory")
_OWN += ("mfu", *THROUGHPUTS, "checkpoint_seconds", "skipped_steps")


# --- Numbers of a training step ---


def with_metrics(loss: Callable[[PyTree, PyTree], object]) -> Callable[[PyTree, PyTree], PyTree]:
    """Makes any loss return (loss, metrics)."""

    def both(model: object, batch: object) -> tuple[Any, dict[str, Any]]:
        value = loss(model, batch)
        if not isinstance(value, tuple):
            return value, {}
        if len(value) != 2 or not isinstance(value[1], Mapping):
            kinds = ", ".join(type(part).__name__ for part in value)
            raise TrainError(
                f"The loss returned a tuple of {kinds or 'nothing'}. It may return the loss alone, "
                "or the loss and its metrics by name: return loss, {'accuracy': accuracy}."
            )

        metrics = {name: jnp.asarray(number) for name, number in value[1].items()}

        for name, number in metrics.items():
            check_name(name, "The loss returned a metric")
            if number.shape or not jnp.isrealobj(number):
                raise TrainError(
                    f"The loss returned the metric {name!r} as {number.dtype}{list(number.shape)}, "
                    "but what is logged is one real number. Return its mean: jnp.mean(...)."
                )

        return value[0], {name: number.astype(jnp.float32) for name, number in metrics.items()}

    return both


def with_counts(
    loss: Callable[[PyTree, PyTree], object], count: Callable[[PyTree], object] | None = None
) -> Callable[[PyTree, PyTree], PyTree]:
    """Makes any loss return (loss, (metrics, weight of its targets))."""
    loss_and_metrics = with_metrics(loss)

    def counted(model, batch) -> tuple[Any, tuple[dict[str, Any], jax.Array]]:
        value, metrics = loss_and_metrics(model, batch)
        if count is not None:
            return value, (metrics, counted_by(count, batch))
        weights = target_weights(batch)
        targets = jnp.ones(()) if weights is None else jnp.sum(weights)
        return value, (metrics, targets.astype(jnp.float32))

    return counted


def means_of_parts(metrics: Mapping[str, jax.Array], counts: jax.Array) -> dict[str, jax.Array]:
    """Means of metrics over parts, weighted by their targets."""
    weights = relative_weights(counts)
    return {name: jnp.mean(weighted(parts, weights)) for name, parts in metrics.items()}


def check_name(name: object, who: str) -> None:
    """Raises TrainError unless a metric may have this name in the log."""
    if not isinstance(name, str) or not name or name in _OWN or name.startswith("eval_"):
        raise TrainError(
            f"{who} named {name!r}, but a name is a text, does not begin with eval_, and is none "
            f"of those that the log has by itself: {', '.join(_OWN)}."
        )


def count_targets(batch: PyTree, count: Callable[[PyTree], object] | None = None) -> jax.Array:
    """Number of targets by a function or a mask; else of rows."""
    if count is not None:
        return counted_by(count, batch)
    # Rows count by the share of their targets that are not ignored.
    weights = target_weights(batch)
    if weights is not None and batch.get("mask") is not None:
        return jnp.sum(weights)
    rows = jnp.asarray(jax.tree.leaves(batch)[0].shape[0])
    return rows if weights is None else rows * jnp.mean(weights)


def gradient_norm(gradients: object) -> jax.Array:
    """Returns the norm of all gradients together, in float32."""
    leaves = [x for x in jax.tree.leaves(gradients) if jnp.issubdtype(x.dtype, jnp.inexact)]
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def learning_rate_of(optimizer: Any, count: Any) -> dict[str, Any]:
    """Returns the rate of an update by its name, if one."""
    # In the compiled step, after the update: ``count`` is the number of updates before it. A
    # schedule that is evaluated on the host is a dozen small programs.
    injected = [
        variable.value
        for path, variable in iter_variables(optimizer.opt_state)
        if path[-2:] == ("hyperparams", "learning_rate")
    ]
    rates = injected or _rates(optimizer.tx.update)
    if len(rates) != 1:
        return {}
    rate = rates[0] if injected else -_at(rates[0], count)
    return {"learning_rate": jnp.asarray(rate, jnp.float32)} if np.ndim(rate) == 0 else {}


def _at(rate, count) -> Any:
    return jnp.asarray(rate(count)) if callable(rate) else rate


def _rates(update) -> list[Any]:
    """Returns the last step sizes of a chain, numbers or functions."""
    # optax does not tell it, but its functions hold it: a number, or a function of the count.
    code = getattr(update, "__code__", None)

    closure: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars if code else (), update.__closure__ or (), strict=True):
        try:
            closure[name] = cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue

    for name in ("step_size", "step_size_fn"):
        if name in closure:
            # Step sizes of a descent are negative; scale(0.5), say, only shrinks updates.
            step = closure[name]
            return [step] if callable(step) or (np.ndim(step) == 0 and step < 0) else []

    within = closure.get("update_fns", ()) or [getattr(closure.get("tx"), "update", None)]
    return [rate for inner in within if inner is not None for rate in _rates(inner)]


def device_memory() -> int | None:
    """Returns the peak bytes of a device; None if not told."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [memory["peak_bytes_in_use"] for memory in stats if "peak_bytes_in_use" in memory]
    return max(peaks, default=None)


# --- Numbers of an evaluation ---


class EvalNumbers:
    """Means and metrics over held-out batches, by name."""

    def __init__(
        self, specs: Mapping[str, PyTree], count: Callable[[PyTree], PyTree] | None = None
    ) -> None:
        self.count = count  # of a batch's targets
        self.functions: dict[str, Callable[[Any, Any], Any]] = {}
        self.metrics: dict[str, Metric] = {}
        self._arguments: dict[str, Callable[[Any, Any], Any]] = {}

        for name, spec in specs.items():
            check_name(name, "eval_metrics has a metric")

            metric, arguments = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, None)
            if isinstance(metric, Metric) and (arguments is None or callable(arguments)):
                self.metrics[name] = metric
                if arguments is not None:
                    self._arguments[name] = arguments
            elif callable(spec):
                self.functions[name] = spec
            else:
                raise TrainError(
                    f"eval_metrics[{name!r}] is a {type(spec).__name__}. Give a metric, such as "
                    "metrics.Accuracy(), a metric with a function (model, batch) that returns the "
                    "arguments of its update, or a function (model, batch) that returns a mean."
                )

    def measure(
        self, model: PyTree, metrics: Any, batch: PyTree, loss: Any
    ) -> tuple[Any, Any, Any]:
        """Returns means of a batch and its targets' number; updates metrics."""
        mean, means = loss(model, batch)
        count = count_targets(batch, self.count)

        if twice := means.keys() & {*self.functions, *self.metrics}:
            raise TrainError(
                f"eval_metrics and the loss both have {', '.join(sorted(map(repr, twice)))}. What "
                "the loss returns is averaged over held-out data too: give one of them."
            )

        for name, function in self.functions.items():
            value = jnp.asarray(function(model, batch))
            if value.shape:
                raise TrainError(
                    f"eval_metrics[{name!r}] returned an array of shape {value.shape}, but must "
                    "return the mean over the batch's targets, one number."
                )
            means = {**means, name: value}

        for name, metric in metrics.items():
            if name in self._arguments:
                metric.update(**self._arguments[name](model, batch))
            else:
                update_from_batch(metric, name, model, batch, mean, count)

        return mean, count, means

    def reset(self) -> dict[str, Metric]:
        """Makes metrics forget all batches; returns them."""
        for metric in self.metrics.values():
            metric.reset()
            # As NumPy arrays, which every process may give to a program over all devices.
            for _, variable in iter_variables(metric):
                variable.value = np.asarray(variable.value)
        return self.metrics

    def computed(self) -> dict[str, float]:
        """Returns the values of the metrics, by name."""
        numbers: dict[str, float] = {}
        for name, metric in self.metrics.items():
            result = jax.device_get(metric.compute())
            parts = result.items() if isinstance(result, Mapping) else [("", result)]
            numbers |= {f"{name}_{key}" if key else name: float(part) for key, part in parts}
        return numbers
