# SPDX-License-Identifier: Apache-2.0
"""Metrics as Modules with sums over many batches.

``weights`` say how much each value counts, broadcast against the values from the left: weights of
shape (rows,) for values of shape (rows, length) count whole rows. A boolean mask is a weight of 0
or 1. A value of weight zero does not count at all, even if it is NaN.

The mean of n values is kept as a mean and a total weight in float32, not as a sum, so it stays
exact to rounding however many values there are (the update is that of Chan, Golub and LeVeque,
1979, which also gives the variance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import MetricState, Module, iter_variables
from shardax.extend import Options, PyTree, did_you_mean
from shardax.nn.arithmetic import at_least_float32
from shardax.nn.parameters import IGNORE_INDEX
from shardax.train.errors import TrainError


class Metric(Module):
    """Base of metrics; a subclass holds ``MetricState`` and defines the methods."""

    def update(self, **kwargs: PyTree) -> None:
        """Takes in one batch."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Returns the metric of everything taken in since the last reset."""
        raise NotImplementedError

    def merge(self, other: Any) -> None:
        """Takes in all data of another metric of this kind."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets everything taken in."""
        for _, variable in iter_variables(self, MetricState):
            variable.value = jnp.zeros_like(variable.value)

    def _take(self, name: str, kwargs: dict[str, object]) -> jax.Array:
        if name not in kwargs:
            raise TrainError(
                f"{type(self).__name__}.update needs {name}=..., but was given "
                f"{', '.join(kwargs) or 'nothing'}. Pass it, or make the metric with another name."
            )
        return jnp.asarray(kwargs[name])


class Welford(Metric):
    """Mean and standard deviation of values.

    Args:
        argname: Keyword under which the values come.

    Example:
        >>> import jax.numpy as jnp
        >>> spread = Welford()
        >>> spread.update(values=jnp.array([1.0, 2.0]))
        >>> spread.update(values=jnp.array([3.0, 100.0]), weights=jnp.array([1, 0]))
        >>> {name: round(float(value), 4) for name, value in spread.compute().items()}
        {'mean': 2.0, 'std': 0.8165}
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.weight = MetricState(np.zeros((), np.float32))
        self.mean = MetricState(np.zeros((), np.float32))
        self.spread = MetricState(np.zeros((), np.float32))

    def update(self, **kwargs: PyTree) -> None:
        """Takes in real values and, if given, their ``weights`` or ``mask``."""
        values = self._take(self.argname, kwargs).astype(jnp.float32)
        _refuse_unknown(self, kwargs, {self.argname, *_WEIGHTS})
        weights = _weights(_weights_and_mask(kwargs), values.shape)
        values = jnp.where(weights == 0, 0, values)
        weight = weights.sum()
        mean = (weights * values).sum() / jnp.where(weight == 0, 1, weight)
        spread = (weights * (values - mean) ** 2).sum()
        self._combine(weight, mean, spread)

    def _combine(self, weight, mean: object, spread: object) -> None:
        total = self.weight + weight
        share = weight / jnp.where(total == 0, 1, total)
        difference = mean - self.mean
        self.spread.value = self.spread + spread + difference**2 * self.weight * share
        self.mean.value = self.mean + difference * share
        self.weight.value = total

    def compute(self) -> Any:
        """Returns ``{"mean", "std"}``, float32 scalars; NaN if nothing was taken in."""
        return {
            "mean": jnp.where(self.weight == 0, jnp.nan, self.mean.value),
            "std": jnp.sqrt(self.spread / self.weight.value),
        }

    def merge(self, other: Any) -> None:
        """Takes in all data of another metric of this kind."""
        _check_kind(self, other)
        self._combine(other.weight.value, other.mean.value, other.spread.value)


class Average(Welford):
    """Mean of values.

    Args:
        argname: Keyword under which the values come.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = Average("loss")
        >>> loss.update(loss=jnp.array([1.0, 3.0]))
        >>> loss.update(loss=5.0)
        >>> float(loss.compute()), float(loss.total)
        (3.0, 9.0)
    """

    @property
    def total(self) -> jax.Array:
        """Sum of the weighted values, a float32 scalar."""
        return self.mean * self.weight.value

    def compute(self) -> Any:
        """Returns the mean, a float32 scalar; NaN if nothing was taken in."""
        return super().compute()["mean"]


class Perplexity(Average):
    """Exponential of the mean loss in nats.

    It says between how many equally likely choices one would be as unsure as the model is.

    Args:
        argname: Keyword under which losses come, one per token, or a mean with the number of tokens
            as ``weights``.

    Example:
        >>> import jax.numpy as jnp
        >>> perplexity = Perplexity()
        >>> perplexity.update(loss=jnp.log(jnp.array([2.0, 8.0])))
        >>> round(float(perplexity.compute()), 4)
        4.0
    """

    def __init__(self, argname: str = "loss") -> None:
        super().__init__(argname)

    def compute(self) -> Any:
        """Returns the perplexity, a float32 scalar of at least 1.

        NaN if nothing was taken in.
        """
        return jnp.exp(super().compute())


class Accuracy(Average):
    """Share of rows with the largest of ``logits`` at the ``labels``.

    ``logits`` have shape (..., classes), ``labels`` are integers of shape (...). With a threshold
    there are two classes: both have shape (...), and ``labels`` are booleans, or integers 0 and 1.

    Args:
        threshold: Logits at or above it say class 1; None for the largest of several logits.

    Raises:
        TrainError: If the threshold is no number.

    Example:
        >>> import jax.numpy as jnp
        >>> accuracy = Accuracy()
        >>> accuracy.update(logits=jnp.array([[2.0, 1.0], [0.0, 1.0]]), labels=jnp.array([0, 0]))
        >>> float(accuracy.compute())
        0.5
        >>> binary = Accuracy(threshold=0.5)
        >>> binary.update(
        ...     logits=jnp.array([0.2, 0.7, 0.9]),
        ...     labels=jnp.array([0, 1, 0]),
        ...     mask=jnp.array([True, True, False]),
        ... )
        >>> float(binary.compute())
        1.0
    """

    def __init__(self, threshold: float | None = None) -> None:
        super().__init__()
        is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        fits = threshold is None or (is_number and threshold == threshold)
        Options(TrainError).check("threshold", threshold, fits, "a number or None")
        self.threshold = threshold

    def update(self, **kwargs: PyTree) -> None:
        """Takes in ``logits`` and ``labels`` and, if given, their ``weights`` or ``mask``."""
        logits, labels = self._take("logits", kwargs), self._take("labels", kwargs)
        _refuse_unknown(self, kwargs, {"logits", "labels", *_WEIGHTS})
        if self.threshold is not None:
            self._update_binary(logits, labels, kwargs)
            return
        if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise TrainError(
                f"Accuracy of logits of shape {logits.shape} needs integer labels of shape "
                f"{logits.shape[:-1]}, but was given labels {labels.dtype}{list(labels.shape)}. "
                "One-hot labels: pass labels.argmax(-1)."
            )
        correct = jnp.argmax(logits, axis=-1) == labels
        super().update(values=correct, weights=_weights_and_mask(kwargs))

    def _update_binary(self, logits, labels, kwargs: Mapping[str, PyTree]) -> None:
        kinds = (jnp.integer, jnp.bool_)
        is_class = any(jnp.issubdtype(labels.dtype, kind) for kind in kinds)
        if logits.shape != labels.shape or not is_class:
            raise TrainError(
                f"Accuracy(threshold={self.threshold}) of logits of shape {logits.shape} needs "
                f"labels 0 and 1 of that shape, but was given {labels.dtype}{list(labels.shape)}. "
                f"For logits of several classes: Accuracy()."
            )
        correct = (logits >= self.threshold) == (labels > 0)
        super().update(values=correct, weights=_weights_and_mask(kwargs))


class MultiMetric(Metric):
    """Several metrics by name, updated together.

    Each is given those keywords that it takes; one that none of them takes is an error.

    Args:
        **metrics: The metrics; each is also an attribute.

    Example:
        >>> import jax.numpy as jnp
        >>> metrics = MultiMetric(loss=Average("loss"), perplexity=Perplexity())
        >>> metrics.update(loss=jnp.zeros(4))
        >>> {name: float(value) for name, value in metrics.compute().items()}
        {'loss': 0.0, 'perplexity': 1.0}
    """

    def __init__(self, **metrics: Metric) -> None:
        reserved = [name for name in metrics if hasattr(MultiMetric, name)]
        if reserved:
            raise TrainError(
                f"A metric cannot be named {reserved[0]!r}, which is a method of MultiMetric; "
                "choose another name."
            )
        self.names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def update(self, **kwargs: PyTree) -> None:
        """Updates every metric with the keywords it takes.

        Args:
            **kwargs: Values. ``weights`` and ``mask`` are those of all metrics, or a mapping from
                names of metrics to theirs: ``mask={"loss": real}``.
        """
        _refuse_unknown(self, kwargs, _known_keywords(self))
        for name in self.names:
            metric = getattr(self, name)
            taken = _known_keywords(metric)
            given = {n: v for n, v in kwargs.items() if taken is None or n in taken}
            for weights in given.keys() & _WEIGHTS:
                if isinstance(given[weights], Mapping):
                    self._check_names(weights, given[weights])
                    given[weights] = given[weights].get(name)
            metric.update(**{n: v for n, v in given.items() if v is not None or n not in _WEIGHTS})

    def _check_names(self, keyword: str, by_name: Mapping[str, object]) -> None:
        unknown = [name for name in by_name if name not in self.names]
        if unknown:
            raise TrainError(
                f"{keyword}={{{unknown[0]!r}: ...}} is of no metric: they are named "
                f"{', '.join(self.names)}."
            )

    def _metrics(self) -> list[Metric]:
        return [getattr(self, name) for name in self.names]

    def compute(self) -> Any:
        """Returns a dict of the metrics' values."""
        return {name: getattr(self, name).compute() for name in self.names}

    def merge(self, other: Any) -> None:
        """Merges every metric with the one of the same name."""
        _check_kind(self, other)
        if self.names != other.names:
            raise TrainError(
                f"Cannot merge metrics named {other.names} into metrics named {self.names}."
            )
        for name in self.names:
            getattr(self, name).merge(getattr(other, name))


def update_from_batch(
    metric: Metric, name: str, model: PyTree, batch: PyTree, loss: Any, count: Any
) -> None:
    """Updates a metric with logits and labels, or the mean loss."""
    keywords = _known_keywords(metric) or {"logits", "labels", *_WEIGHTS}
    has_targets = isinstance(batch, Mapping) and {"inputs", "targets"} <= batch.keys()

    if keywords == {"logits", "labels", *_WEIGHTS} and has_targets:
        # A metric of the user's gets weights where the batch has a mask.
        is_own = _known_keywords(metric) is not None
        weights = target_weights(batch) if is_own or batch.get("mask") is not None else None
        options = {} if weights is None else {"weights": weights}
        metric.update(logits=model(batch["inputs"]), labels=batch["targets"], **options)
    elif keywords == {"loss", *_WEIGHTS}:
        metric.update(loss=loss, weights=count)
    else:
        raise TrainError(
            f"eval_metrics[{name!r}], a {type(metric).__name__}, takes "
            f"{', '.join(f'{word}=...' for word in sorted(keywords))}, which this batch does not "
            f"tell. Say what to give it: eval_metrics={{{name!r}: (metric, lambda model, batch: "
            "{'values': ...})}."
        )


def target_weights(batch: object) -> PyTree:
    """Weights of a batch's targets; None if all count."""
    # By its mask, and 0 for what losses ignore.
    if not isinstance(batch, Mapping):
        return None

    mask: Any = batch.get("mask")
    targets: PyTree = batch.get("targets")
    dtype = getattr(targets, "dtype", None)
    if dtype is None or not targets.ndim:
        return mask

    if mask is not None and not _broadcasts(mask.shape, targets.shape):
        mask = None  # of the inputs, as for attention
    if not jnp.issubdtype(dtype, jnp.signedinteger):
        return mask

    counted = targets != IGNORE_INDEX
    if mask is None:
        return counted

    weights = mask.reshape(mask.shape + (1,) * (targets.ndim - mask.ndim))
    return jnp.where(counted, weights, jnp.zeros((), weights.dtype))


def counted_by(count: Callable[[PyTree], object], batch: object) -> jax.Array:
    """Number of a batch's targets by a user's function."""
    targets = jnp.asarray(count(batch))
    if targets.ndim or not jnp.isrealobj(targets):
        raise TrainError(
            f"count returned {targets.dtype}{list(targets.shape)}, but what a microbatch counts "
            'is one real number, such as microbatch["mask"].sum().'
        )
    return targets.astype(jnp.float32)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether weights of a shape fit values, from the left."""
    return len(shape) <= len(to) and all(
        size in (1, full) for size, full in zip(shape, to, strict=False)
    )


def relative_weights(counts: jax.Array) -> jax.Array:
    """Weights of parts by their numbers of targets, 1 on average."""
    # Exactly 1 where all are equal, or nothing counts.
    total = jnp.sum(counts)
    return jnp.where(total == 0, 1, counts * counts.size / jnp.where(total == 0, 1, total))


def weighted(tree: PyTree, weight: Any) -> Any:
    """Arrays times a weight; zeros for weight 0, also of NaN."""

    def times_weight(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        wide = x.astype(at_least_float32(x.dtype))
        return jnp.where(weight == 0, 0, wide * weight.astype(wide.dtype))

    return jax.tree.map(times_weight, tree)


def _known_keywords(metric) -> set[str] | None:
    """Returns the keywords of a metric's ``update``; None for any."""
    owner = next(kind for kind in type(metric).__mro__ if "update" in vars(kind))
    if owner is Welford:
        return {metric.argname, *_WEIGHTS}
    if owner is Accuracy:
        return {"logits", "labels", *_WEIGHTS}
    if owner is not MultiMetric:
        return None
    sets = [_known_keywords(child) for child in metric._metrics()]
    return None if None in sets else set[str]().union(*(words for words in sets if words))


def _refuse_unknown(metric: Metric, kwargs: Mapping[str, object], words: set[str] | None) -> None:
    """Raises TrainError for an unknown keyword."""
    # A misspelt ``weights`` would otherwise silently count everything.
    for name in kwargs:
        if words is not None and name not in words:
            raise TrainError(
                f"{type(metric).__name__}.update takes no {name}=..., but "
                f"{', '.join(f'{word}=...' for word in sorted(words))}.{did_you_mean(name, words)}"
            )


_WEIGHTS = ("weights", "mask")


def _weights_and_mask(kwargs: Mapping[str, object]):
    """Returns weights with zeros for masked values."""
    weights, mask = kwargs.get("weights"), kwargs.get("mask")
    if mask is None:
        return weights

    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TrainError(
            f"mask= has dtype {mask.dtype}, but says by booleans which values count. Give numbers "
            f"as weights=."
        )

    if weights is None:
        return mask
    weights = jnp.asarray(weights)

    dims = max(mask.ndim, weights.ndim)  # both are broadcast from the left
    mask, weights = (
        array.reshape(array.shape + (1,) * (dims - array.ndim)) for array in (mask, weights)
    )
    return jnp.where(mask, weights, 0)


def _weights(weights: object, shape: tuple[int, ...]) -> jax.Array:
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    weights = jnp.asarray(weights).astype(jnp.float32)
    if not _broadcasts(weights.shape, shape):
        raise TrainError(
            f"Weights of shape {weights.shape} do not fit values of shape {shape}: they must have "
            "its first dimensions (or 1)."
        )
    return jnp.broadcast_to(
        weights.reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape
    )


def _check_kind(metric: Metric, other: Metric) -> None:
    if type(metric) is not type(other):
        raise TrainError(f"Cannot merge a {type(other).__name__} into a {type(metric).__name__}.")
