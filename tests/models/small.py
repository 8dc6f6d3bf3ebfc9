# SPDX-License-Identifier: Apache-2.0
"""A decoder small enough to compile many times, a batch for it, and values for any layout."""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeVar

import numpy as np

import shardax as sx
from shardax.models import DecoderConfig

SMALL = DecoderConfig(
    vocab_size=32, num_layers=1, embed_dim=16, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32
)
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, 9), np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}

M = TypeVar("M")


def with_equal_values(model: M) -> M:
    """Gives each ``Param`` of a transformer a value by its path, without compiling initializers.

    Layers in a list and stacked ones get the same values, as they do from initializers.
    """
    for path, variable in sx.iter_variables(model):
        if isinstance(variable, sx.Param):
            variable.value = _value(path, variable.shape).astype(variable.dtype)
    return model


def _value(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
    if path[:2] == ("layers", "stacked"):
        layers = range(shape[0])
        return np.stack([_value(("layers", i, *path[2:]), shape[1:]) for i in layers])
    noise = np.random.default_rng(zlib.crc32(repr(path).encode())).normal(size=shape)
    return 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[-2])
