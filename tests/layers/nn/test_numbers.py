# SPDX-License-Identifier: Apache-2.0
"""Layers and losses in each dtype of parameters and computation, strict, with 64 bits, masked."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import models
from tests.layers.nn.test_half_precision import LAYERS

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
APART = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] != pair[1]]
X = np.linspace(-1, 1, 2 * 4 * 8, dtype=np.float32).reshape(2, 4, 8)


# The setting acts on all layers alike, so it takes turns.
@pytest.mark.parametrize(
    ("name", "x64"), [*zip(LAYERS, itertools.cycle([False, True]), strict=False)]
)
def test_layers_compute_in_the_dtype_given(name: str, x64: bool) -> None:
    for param_dtype, dtype in APART[:: 5 if x64 else 2]:
        with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
            options = {"param_dtype": param_dtype, "dtype": dtype, "rngs": sx.Rngs(0)}
            model, x = LAYERS[name](options), jax.ShapeDtypeStruct(X.shape, dtype)
            result = sx.eval_shape(lambda model, x: model(x), model, x)
            dtypes = {variable.dtype for _, variable in sx.iter_variables(model, sx.Param)}
        assert (result.dtype, dtypes) == (dtype, {jnp.dtype(param_dtype)}), (param_dtype, dtype)


TARGETS = {
    "in range": [[0, 1, 2], [3, 4, 5]],
    "ignored": [[0, -100, 2], [-100, 4, 5]],
    "out of range": [[0, 1, 6], [3, 4, 5]],
    "negative": [[0, -1, 2], [3, 4, 5]],
}
MASKS = {
    "none": None,
    "part": [[True, False, False], [True, True, False]],
    "weights": [[1.0, 0.5, 0.0], [2.0, 0.0, 1.0]],
    "whole": [[False] * 3] * 2,
}


def _reference(logits: np.ndarray[Any, Any], targets: Any, mask: Any) -> float:
    weights = np.ones((2, 3)) if mask is None else np.asarray(mask, np.float64)
    total = norm = 0.0
    for row, column in np.ndindex(2, 3):
        target, weight = targets[row][column], weights[row, column]
        if target == -100 or weight == 0:
            continue
        scores = logits[row, column].astype(np.float64)
        chosen = scores[target] if 0 <= target < 6 else np.nan
        total += weight * (np.log(np.exp(scores).sum()) - chosen)
        norm += weight
    return float(total / norm) if norm else 0.0


@pytest.mark.parametrize(("dtype", "x64"), [*zip(DTYPES, [False, True, False], strict=True)])
def test_losses_are_right_in_every_dtype(dtype: Any, x64: bool) -> None:
    generator = np.random.default_rng(0)
    hidden = jnp.asarray(generator.normal(size=(2, 3, 4)), dtype)
    kernel = jnp.asarray(generator.normal(size=(4, 6)), dtype)
    logits = (hidden @ kernel).astype(dtype)

    def both(hidden: Any, kernel: Any, logits: Any, targets: Any, mask: Any) -> Any:
        blocks = models.blockwise_cross_entropy(hidden, kernel, targets, mask, block_size=4)
        return models.cross_entropy(logits, targets, mask), blocks

    exact = np.asarray(hidden, np.float32) @ np.asarray(kernel, np.float32)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        losses = jax.jit(both)
        for targets, mask in itertools.product(TARGETS, MASKS):
            ids, weights = TARGETS[targets], MASKS[mask]
            given = None if weights is None else np.asarray(weights)
            if given is not None and given.dtype != bool:
                given = given.astype(np.float32)
            results = losses(hidden, kernel, logits, np.asarray(ids, np.int32), given)
            assert {result.dtype for result in results} == {jnp.dtype(jnp.float32)}
            references = [_reference(np.asarray(logits, np.float32), ids, weights)]
            references.append(_reference(exact, ids, weights))
            np.testing.assert_allclose(
                results, references, rtol=tolerance, err_msg=f"{targets}, {mask}"
            )


@pytest.mark.parametrize("loss", ["whole", "blocks"])
def test_masked_targets_of_no_probability_count_nothing(loss: str) -> None:
    hidden, kernel = np.ones((2, 1), np.float32), np.array([[0, -np.inf, 0]], np.float32)
    targets, mask = np.array([1, 0]), np.array([False, True])

    def compute(hidden: Any) -> Any:
        if loss == "whole":
            return models.cross_entropy(hidden * kernel, targets, mask)
        return models.blockwise_cross_entropy(hidden, kernel, targets, mask)

    assert float(compute(hidden)) == pytest.approx(np.log(2))
    assert float(models.cross_entropy(hidden * kernel, targets)) == np.inf
