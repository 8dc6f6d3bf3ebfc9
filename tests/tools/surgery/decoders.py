# SPDX-License-Identifier: Apache-2.0
"""Small decoders with equal parameters, in all layouts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import shardax as sx
from tests.models.small import with_equal_values

TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SIZES: dict[str, Any] = {"vocab_size": 16, "embed_dim": 12, "head_dim": 6, "mlp_dim": 10}

LAYOUTS = [(False, False, None), (True, False, None), (False, True, "full"), (True, True, "full")]
in_every_layout = pytest.mark.parametrize(("scanned", "tied", "remat"), LAYOUTS)


def decoder(
    scanned: bool = False, tied: bool = False, remat: str | None = None, **options: Any
) -> Any:
    """Returns a decoder of two layers; its parameters are the same in all layouts."""
    config = sx.models.DecoderConfig(
        **SIZES, scan_layers=scanned, tied_head=tied, remat=remat, **options
    )
    return with_equal_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))


@sx.jit
def run(model: Any) -> jax.Array:
    """Returns the logits of the tokens, by a compiled call."""
    return model(TOKENS)


@functools.cache
def logits(tied: bool = False) -> np.ndarray:
    """Returns the logits of the decoder that nothing is done to, in any layout."""
    return np.asarray(run(decoder(tied=tied)))


def close(found: Any, expected: Any) -> None:
    """Compares arrays to float32 precision."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
