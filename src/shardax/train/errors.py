# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.train``."""

from __future__ import annotations

from shardax.errors import ShardaxError


class DataError(ShardaxError, ValueError, RuntimeError):
    """Texts, batches or data positions that cannot be used."""


class TrainError(ShardaxError, ValueError, RuntimeError):
    """Training cannot start or go on as asked."""


class CheckpointError(ShardaxError, ValueError, TypeError):
    """A tree cannot be saved, or restored from this checkpoint."""


class CheckpointDamagedError(ShardaxError, ValueError):
    """A checkpoint's files differ from the written ones."""

    def __init__(self, message: str, problems: str = "") -> None:
        super().__init__(message)
        self.problems = problems  # what is wrong with which files


class CheckpointWriteError(ShardaxError, OSError):
    """A checkpoint could not be written; those before are whole."""
