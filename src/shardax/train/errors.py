# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.train``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class TextNotFoundError(ShardaxError, FileNotFoundError):
    """There is no file or folder at the path that text was to be read from."""


class TextSourceError(ShardaxError, ValueError):
    """A text is empty, cannot be gathered, or cannot be cut as asked."""


class WindowError(ShardaxError, ValueError):
    """Batches of windows cannot be drawn: too little text, or sizes that do not divide."""


class DataPositionError(ShardaxError, ValueError):
    """A saved data position belongs to other data, another seed, or other batch sizes."""


class PrefetchError(ShardaxError, RuntimeError):
    """A prefetch is closed, or its source has no position to save or restore."""


class LogError(ShardaxError, ValueError):
    """A log record has no standard JSON form or goes back in steps, or a log file is damaged."""


class TrainerError(ShardaxError, RuntimeError):
    """A training run cannot start or go on: bad settings, a used directory, a loss not finite."""


class GradientMismatchError(ShardaxError, ValueError):
    """Gradients do not fit the parameters that an optimizer trains; lists every path."""


class OptimizerStateError(ShardaxError, ValueError):
    """An optimizer's state does not fit its model, or there is nothing to train."""


class AccumulationError(ShardaxError, ValueError):
    """Gradients cannot be accumulated (rows that do not divide, state that changes its form)."""


class MetricError(ShardaxError, ValueError):
    """A metric lacks an argument that it needs, or was merged with one of another kind."""


class CheckpointMismatchError(ShardaxError, ValueError):
    """A checkpoint does not fit what it is to be restored into; lists every path."""


class CheckpointNotFoundError(ShardaxError, FileNotFoundError):
    """There is no complete checkpoint at a path."""


class CheckpointExistsError(ShardaxError, FileExistsError):
    """A checkpoint would overwrite another."""


class CheckpointWriteError(ShardaxError, OSError):
    """A checkpoint could not be written to the end; those before it are whole."""


class CheckpointValueError(ShardaxError, TypeError):
    """Something cannot be saved in a checkpoint, or a checkpoint has a form that is not known."""
