# SPDX-License-Identifier: Apache-2.0
"""What a training run is told before it starts, and what it tells when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from shardax.core.errors import TrainerError


@dataclass(frozen=True)
class TrainerSettings:
    """How long to train and what to do along the way.

    Attributes:
        steps: Number of optimizer steps of the whole run, resumed parts included.
        log_every: Steps between log records of the training loss.
        eval_every: Steps between held-out evaluations; 0: only at the end.
        checkpoint_every: Steps between checkpoints; 0: only at the end.
        keep_checkpoints: How many checkpoints to keep.
        grad_accumulation: Parts into which each batch is split to save memory; the update is that
            of the whole batch.

    Raises:
        TrainerError: If one is not an integer, or is too small.

    Example:
        >>> TrainerSettings(steps=100, checkpoint_every=25).log_every
        10
    """

    steps: int
    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    grad_accumulation: int = 1

    def __post_init__(self) -> None:
        least: dict[str, int] = {"eval_every": 0, "checkpoint_every": 0}
        for name, value in vars(self).items():
            if type(value) is not int or value < least.get(name, 1):
                hint = "; 0: only at the end" if name in least else ""
                raise TrainerError(
                    f"TrainerSettings has {name}={value!r}, but it must be an integer of at least "
                    f"{least.get(name, 1)}{hint}."
                )


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        step: Last step done.
        loss: Training loss of that step.
        eval_loss: Held-out loss at the end; None without held-out data or when stopped.
        stopped: The signal that stopped the run early, or None.
        checkpoint: The last checkpoint's directory.
        log: The log file.

    Example:
        >>> from pathlib import Path
        >>> RunResult(10, 2.0, 2.1, None, Path("checkpoints/10"), Path("log.jsonl")).eval_loss
        2.1
    """

    step: int
    loss: float
    eval_loss: float | None
    stopped: Signals | None
    checkpoint: Path
    log: Path
