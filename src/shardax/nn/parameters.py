# SPDX-License-Identifier: Apache-2.0
"""Parameters, dtypes and checks shared by layers.

A layer's parameters are lazy: building a layer runs no JAX operation. Each has an axis name per
dimension. The names have defaults, the same for layers that are meant to be joined ("embed" is what
goes from layer to layer), and every layer lets its caller choose others.

The parameter dtype (``param_dtype``) is how a parameter is stored, trained and saved. The compute
dtype (``dtype``) is what inputs and parameters are cast to where they are used, and so the dtype of
a layer's output. Without a compute dtype a layer promotes: it computes in the widest dtype among
its input and its parameters, by JAX's own promotion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Init, Param, Rngs
from shardax.extend import Options, check_rngs
from shardax.nn.errors import LayerConfigError, LayerInputError

ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros

IGNORE_INDEX = -100
"""The target that losses and metrics leave out, as in PyTorch and Hugging Face."""

AxisNames = tuple[str | None, ...]
Initializer = Callable[..., Any]
"""A function of a key, a shape and a dtype that returns an array, or a box around one."""

Sizes = int | tuple[int, ...]


def make_parameter(
    initializer: Initializer,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    axes: Sequence[object],
    rngs: Rngs | None,
) -> Param:
    """Makes a lazy parameter with one axis name per dimension."""
    check_rngs(rngs)
    init = Init(initializer, shape, dtype)

    # Constants draw nothing, so adding a bias or a norm to a model leaves its other parameters as
    # they were. ``init.initializer`` is that of the bare array, without a box around it.
    if init.initializer not in (ones, zeros):
        init = Init(initializer, shape, dtype, rngs=rngs)

    names = None if init.has_names else tuple(axes)  # those of its box come before the layer's
    return Param(init, axes=names)


@functools.lru_cache(maxsize=256)
def lecun_normal(
    inputs: tuple[int, ...], outputs: tuple[int, ...], batch: tuple[int, ...] = ()
) -> Initializer:
    """Returns the initializer of variance 1 / fan-in, by kinds of dimensions."""
    # LeCun et al., "Efficient BackProp", 1998. Kernel dimensions are summed over (inputs), in the
    # result (outputs), or those along which it is many kernels (batch).
    return jax.nn.initializers.lecun_normal(in_axis=inputs, out_axis=outputs, batch_axis=batch)


def as_sizes(layer: str, name: str, sizes: Any) -> tuple[int, ...]:
    """Returns one positive size or several as a tuple, or raises."""
    all_sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    fits = bool(all_sizes) and all(map(_is_positive_integer, all_sizes))
    Options(LayerConfigError, layer).check(name, sizes, fits, "positive")
    return tuple(int(size) for size in all_sizes)


def as_size(layer: str, name: str, size: Any) -> int:
    """Returns one size, or raises if it is not a positive integer."""
    options = Options(LayerConfigError, layer)
    options.check(name, size, _is_positive_integer(size), "a positive integer")
    return int(size)


def _is_positive_integer(size: object) -> bool:
    return Options.is_integer(size) and bool(size > 0)


def as_axes(layer: str, name: str, axes: Sequence[str | None], count: int) -> AxisNames:
    """Returns ``count`` axis names as a tuple, or raises."""
    if isinstance(axes, str) or len(axes) != count:
        raise LayerConfigError(
            f"{layer} needs {count} {name}, one per dimension, but was given {axes!r}."
        )
    return tuple(axes)


def refuse_input(layer: str, expected: str, value: Any, hint: str) -> NoReturn:
    """Raises the error for a refused input of a layer."""
    shape = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
    raise LayerInputError(f"{layer} takes {expected}, but was given {shape}. {hint}")


def canonical_dtype(dtype: jax.typing.DTypeLike | None) -> np.dtype | None:
    """Returns a dtype as NumPy names it, canonical for JAX."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def check_epsilon(layer: str, epsilon: float, name: str = "epsilon") -> float:
    """Returns the term added to a variance, or raises if negative."""
    Options(LayerConfigError, layer).check(name, epsilon, epsilon >= 0, "at least 0")
    return float(epsilon)
