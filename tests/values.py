# SPDX-License-Identifier: Apache-2.0
"""Values for parameters where their initialization is not what a test is about."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

import shardax as sx

M = TypeVar("M")


def with_values(model: M, seed: int = 0) -> M:
    """Gives each ``Param`` a random value of NumPy in place, and returns the model.

    No initializer is traced or compiled, which takes about 0.1 s for each new shape. Kernels of two
    dimensions have the scale of LeCun's initializer; those of three (heads) have a larger one, so
    that deep models need their own initializers. Vectors are near one, so that scales and biases
    count.
    """
    generator = np.random.default_rng(seed)
    for _, variable in sx.iter_variables(model):
        if isinstance(variable, sx.Param):
            variable.value = _value(generator, variable.shape, variable.dtype)
    return model


def _value(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    noise = generator.normal(size=shape)
    value = noise / math.sqrt(shape[-2]) if len(shape) > 1 else 1 + 0.1 * noise
    return value.astype(dtype)
