# SPDX-License-Identifier: Apache-2.0
"""Functions called by a run, and able to stop it.

Every process of a run calls them, with the same numbers. A stop that any process asks for stops all
at one step: that of the next log record, evaluation or checkpoint. A callback with ``state()`` and
``restore(state)``, a JSON value, is saved in checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax

from shardax.distributed import processes
from shardax.extend import Options
from shardax.train.errors import TrainError


class Event:
    """Event of a run; the argument of callbacks.

    Attributes:
        kind: ``"step"`` after a step, ``"eval"`` after a held-out evaluation, ``"checkpoint"``
            once a checkpoint is being written, or ``"end"``.
        step: Steps done so far.

    Example:
        >>> event = Event("eval", 10, {"eval_loss": 2.5})
        >>> event.kind, event.step, event.metrics
        ('eval', 10, {'eval_loss': 2.5})
    """

    def __init__(
        self,
        kind: Literal["step", "eval", "checkpoint", "end"],
        step: int,
        metrics: Mapping[str, object],
    ) -> None:
        self.kind = kind
        self.step = step
        self._metrics = metrics
        self.asks_stop = False
        self.asks_checkpoint = False

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers by name; reading them waits for the step."""
        numbers: dict[str, Any] = jax.device_get(dict(self._metrics))
        return {name: float(number) for name, number in numbers.items()}

    def stop(self) -> None:
        """Ends the run after this step, with a checkpoint."""
        self.asks_stop = True


_OPTIONS = Options(TrainError)


class _Watch:
    """The best value of a metric so far."""

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        _OPTIONS.choice("mode", mode, ("min", "max"))
        self.metric = metric
        self.mode = mode
        self.best: float | None = None

    def sees(self, event: Event) -> bool | None:
        """Whether an event has a better value; None: no value."""
        if event.kind != ("eval" if self.metric.startswith("eval_") else "step"):
            return None
        metrics = event.metrics
        if self.metric not in metrics:
            raise TrainError(
                f"{type(self).__name__} watches {self.metric!r}, which this run does not measure. "
                f"At step {event.step} there are: {', '.join(metrics)}."
            )
        value = metrics[self.metric]
        sign = 1 if self.mode == "min" else -1
        better = not math.isnan(value) and (self.best is None or sign * value < sign * self.best)
        self.best = value if better else self.best
        return better


class EarlyStopping(_Watch):
    """Stops a run when a metric is no longer getting better.

    Args:
        metric: Its name in the log, such as ``"eval_loss"``; others than ``eval_`` ones are looked
            at after every step.
        patience: After how many values in a row that are no better than the best to stop.
        mode: Whether smaller or larger is better: ``"min"`` or ``"max"``.

    Attributes:
        best: The best value so far, or None.
        stopped: Whether the patience is at its end. A run resumed then ends at once.

    Raises:
        TrainError: If an argument is not valid.

    Example:
        >>> early = EarlyStopping("eval_loss", patience=2)
        >>> for step, loss in enumerate([3.0, 2.0, 2.5, 2.0]):
        ...     early(Event("eval", step, {"eval_loss": loss}))
        >>> early.best, early.stopped
        (2.0, True)
    """

    def __init__(self, metric: str, *, patience: int, mode: Literal["min", "max"] = "min") -> None:
        super().__init__(metric, mode)
        _OPTIONS.integers(patience=patience)
        self.patience = patience
        self._waited = 0

    @property
    def stopped(self) -> bool:
        """Whether the patience is at its end."""
        return self._waited >= self.patience

    def __call__(self, event: Event) -> None:
        """Takes an event in."""
        better = self.sees(event)
        if better is not None:
            self._waited = 0 if better else self._waited + 1
            if self.stopped:
                event.stop()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"metric": self.metric, "best": self.best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a saved state back; the state of another metric is ignored."""
        if state["metric"] == self.metric:
            self.best, self._waited = state["best"], state["waited"]


class BestCheckpoint(_Watch):
    """Saves and keeps the checkpoint of the best evaluation.

    It is kept beside the ``keep_checkpoints`` newest ones.

    Args:
        metric: A held-out number in the log, such as ``"eval_loss"`` or ``"eval_accuracy"``.
        mode: Whether smaller or larger is better: ``"min"`` or ``"max"``.

    Attributes:
        best: The best value so far, or None.
        step: The step of the best checkpoint, or None.

    Raises:
        TrainError: If the metric is not a held-out one, or ``mode`` is not valid.

    Example:
        >>> best = BestCheckpoint("eval_accuracy", mode="max")
        >>> for step, share in enumerate([0.2, 0.4, 0.3]):
        ...     best(Event("eval", step, {"eval_accuracy": share}))
        >>> best.step, best.best
        (1, 0.4)
    """

    def __init__(self, metric: str, *, mode: Literal["min", "max"] = "min") -> None:
        super().__init__(metric, mode)
        is_held_out = metric.startswith("eval_")
        expected = "a held-out number, whose name begins with eval_, such as 'eval_loss'"
        _OPTIONS.check("metric", metric, is_held_out, expected)
        self.step: int | None = None

    def __call__(self, event: Event) -> None:
        """Takes an event in."""
        if self.sees(event):
            self.step = event.step
            event.asks_checkpoint = True

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"metric": self.metric, "best": self.best, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a saved state back; the state of another metric is ignored."""
        if state["metric"] == self.metric:
            self.best, self.step = state["best"], state["step"]


class Callbacks:
    """Callbacks of a run, and their requests."""

    def __init__(self, callbacks: Any) -> None:
        functions: tuple[Any, ...] = () if callable(callbacks) else tuple(callbacks)
        are_functions = not callable(callbacks) and all(map(callable, functions))
        example = "callbacks=(EarlyStopping('eval_loss', patience=3),)"
        expected = f"functions of an event, in a tuple or list: {example}"
        _OPTIONS.check("callbacks", callbacks, are_functions, expected)
        self.functions = functions
        self.stopping = False
        self.saving = False
        self._asks = [False, False]
        self._kept_before: set[int] = set()

    def begin(self, saved: Any) -> None:
        """Takes the states of a checkpoint, or none."""
        for callback, (name, state) in zip(self.functions, list(saved or []), strict=False):
            if state is not None and name == type(callback).__name__:
                callback.restore(state)
        self.stopping = any(getattr(f, "stopped", False) is True for f in self.functions)
        self.saving, self._asks, self._kept_before = False, [False, False], self._kept()

    def fire(self, kind: Any, step: int, metrics: Mapping[str, Any], agreed: bool = True) -> None:
        """Calls all; if ``agreed``, processes share their requests."""
        if not self.functions:
            return
        event = Event(kind, step, metrics)
        for callback in self.functions:
            callback(event)

        # What one process asks for all do, so all tell the others what they were asked.
        asks = (event.asks_stop, event.asks_checkpoint)
        self._asks = [old or new for old, new in zip(self._asks, asks, strict=True)]

        several = jax.process_count() > 1
        if agreed or not several:
            texts = [json.dumps(self._asks)]
            if several:
                texts = processes.exchange(texts[0], f"callbacks at step {step}")
            stop, save = (any(flags) for flags in zip(*map(json.loads, texts), strict=True))
            self.stopping, self.saving = self.stopping or stop, self.saving or save
            self._asks = [False, False]

    def states(self) -> list[Any]:
        """Returns the state of each, for a checkpoint."""
        return [
            [type(callback).__name__, callback.state() if hasattr(callback, "restore") else None]
            for callback in self.functions
        ]

    def pinned(self, *, ended: bool = False) -> set[int]:
        """Returns the steps of the checkpoints to keep."""
        # The one before goes only once its successor is complete.
        old_steps, self._kept_before = self._kept_before, self._kept()
        self.saving = False
        return self._kept_before if ended else old_steps | self._kept_before

    def _kept(self) -> set[int]:
        steps = (f.step for f in self.functions if isinstance(f, BestCheckpoint))
        return {step for step in steps if step is not None}
