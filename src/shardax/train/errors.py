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


def trained_beside_adapters(count: int, others: int) -> str:
    """Returns the warning of adapters that are trained together with what they adapt."""
    return (
        f"The model has adapters with {count:,} parameters, and {others:,} others are trained with "
        f'them. To train the adapters alone give wrt="lora" to the optimizer and to sx.grad; to '
        f"train all, wrt=sx.Param."
    )


def quantized_are_not_trained(path: str, count: int, trained: int) -> str:
    """Returns the warning of a quantized model that is trained like another."""
    return (
        f"{count} quantized kernels, such as {path}, are no parameters and stay as they are: only "
        f"the other {trained:,} parameters are trained. Train adapters, "
        f'model = sx.surgery.lora(sx.select(model), rank=8) with wrt="lora"; or numbers, '
        f"model = sx.dequantize(model). If that is meant, wrt=sx.Param."
    )
