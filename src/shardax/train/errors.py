# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.train``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class TextNotFoundError(ShardaxError, FileNotFoundError):
    """There is no file or folder to read text from."""


class TextSourceError(ShardaxError, ValueError):
    """A text is empty, unreadable, or cannot be cut as asked."""


class WindowError(ShardaxError, ValueError):
    """Windows do not fit the text, the batch or the processes."""


class DataPositionError(ShardaxError, ValueError):
    """A saved data position belongs to other data, seed or sizes."""


class PrefetchError(ShardaxError, RuntimeError):
    """A prefetch is closed, or its source has no position."""


class LogError(ShardaxError, ValueError):
    """A log record is not valid, or a log file is damaged."""


class TrainerError(ShardaxError, RuntimeError):
    """A training run cannot start or go on."""


class GradientMismatchError(ShardaxError, ValueError):
    """Gradients do not fit the trained parameters; lists every path."""


class OptimizerStateError(ShardaxError, ValueError):
    """An optimizer's state does not fit, or nothing is trained."""


class AccumulationError(ShardaxError, ValueError):
    """Gradients cannot be accumulated over microbatches."""


class MetricError(ShardaxError, ValueError):
    """A metric lacks an argument, or was merged with another kind."""


class CheckpointMismatchError(ShardaxError, ValueError):
    """A checkpoint does not fit its target; lists every path."""


class CheckpointNotFoundError(ShardaxError, FileNotFoundError):
    """There is no complete checkpoint at a path."""


class CheckpointDamagedError(ShardaxError, ValueError):
    """A checkpoint's files differ from the written ones."""

    def __init__(self, message: str, problems: str = "") -> None:
        super().__init__(message)
        self.problems = problems  # what is wrong with which files


class CheckpointExistsError(ShardaxError, FileExistsError):
    """A checkpoint would overwrite another."""


class CheckpointWriteError(ShardaxError, OSError):
    """A checkpoint could not be written; those before are whole."""


class CheckpointValueError(ShardaxError, TypeError):
    """A value cannot be saved, or a format is not known."""
