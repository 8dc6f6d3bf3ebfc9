# SPDX-License-Identifier: Apache-2.0
"""What a mask is, for layers, models, pooling and losses.

A mask holds booleans, true for what counts: a real token, a position that may be read. Integers of
0 and 1, which tokenizers give, are the same. Floating numbers are refused, as they come with two
meanings that are each other's opposite: ones for what counts, and, as PyTorch adds them to scores,
zeros for what counts beside very negative numbers.

In a compiled program the numbers of an array are not known. There integers count where they are not
0, which is right of ones and zeros, and of numbers of segments with 0 for padding; they are not
refused, as the masks of tokenizers are integers, and most models run compiled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardax.nn.arithmetic import as_array
from shardax.nn.errors import LayerInputError
from shardax.nn.parameters import refuse_input

MEANINGS = (
    "Of weights: mask > 0. Of numbers that PyTorch adds to scores, 0 for what counts: mask == 0."
)


def as_mask(layer: str, mask: object, shape: str = "", hint: str = "") -> jax.Array:
    """Returns a mask as booleans, or raises.

    Args:
        layer: What takes the mask, for errors.
        mask: Booleans, or integers of 0 and 1.
        shape: Which shape it must have, for errors, such as ``"of shape (2, 8)"``.
        hint: What else an error says.

    Returns:
        Booleans of the shape of ``mask``.

    Raises:
        LayerInputError: If it holds floating numbers, or integers that are known and neither 0
            nor 1.
    """
    array = as_array(mask)
    if array.dtype == jnp.bool_:
        return array

    expected = f"a mask of booleans {shape}".rstrip()
    hint = f"{hint} {MEANINGS}".lstrip()
    if not jnp.issubdtype(array.dtype, np.integer):
        refuse_input(layer, expected, array, hint)

    numbers = _known_numbers(array)
    if numbers is not None:
        others = numbers[(numbers != 0) & (numbers != 1)]
        if others.size:
            given = f"{array.dtype}{list(array.shape)} with the number {int(others[0])}"
            raise LayerInputError(
                f"{layer} takes {expected}, or of the integers 0 and 1, but was given {given}. "
                f"{hint}"
            )
    return array.astype(bool)


def as_weights(function: str, mask: object) -> jax.Array:
    """Returns a mask or weights of a mean in float32, or raises.

    Args:
        function: What takes them, for errors.
        mask: Booleans, or numbers of at least 0.

    Returns:
        Numbers of the shape of ``mask``, NaN in the place of negative ones that are not known
        while a program is traced.

    Raises:
        LayerInputError: If it holds numbers that are known and below 0, or no real ones.
    """
    array = as_array(mask)
    expected = "a mask of booleans, or of weights of at least 0"
    is_real = array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, np.integer)
    if not is_real and not jnp.issubdtype(array.dtype, np.floating):
        refuse_input(function, expected, array, MEANINGS)

    weights = array.astype(jnp.float32)
    if array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, np.unsignedinteger):
        return weights

    numbers = _known_numbers(array)
    if numbers is None:
        return jnp.where(weights < 0, jnp.nan, weights)
    below = numbers[numbers < 0]
    if below.size:
        raise LayerInputError(
            f"{function} takes {expected}, but was given {array.dtype}{list(array.shape)} with the "
            f"number {below[0]}. {MEANINGS}"
        )
    return weights


def _known_numbers(array: jax.Array) -> np.ndarray | None:
    """Returns the numbers of an array, or None where it has none in this process."""
    if isinstance(array, Tracer) or not array.is_fully_addressable:
        return None
    return np.asarray(array)
