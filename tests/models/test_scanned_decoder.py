# SPDX-License-Identifier: Apache-2.0
"""The decoder with scanned layers: the numbers of the unrolled one, in a program of one layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import LayerConfigError
from shardax.models import DECODER_RULES, Decoder, next_token_loss
from shardax.nn import unstack_state
from tests.models import small
from tests.models.small import BATCH, TOKENS, with_equal_values
from tests.strategies import assert_equal_values

SMALL = dataclasses.replace(small.SMALL, num_layers=3, dropout=0.1)


def decoder(**changes: Any) -> Decoder:
    return with_equal_values(initial(**changes))


def initial(**changes: Any) -> Decoder:
    return Decoder(dataclasses.replace(SMALL, **changes), rngs=sx.Rngs(params=0, dropout=1))


def loss_and_gradients(model: Decoder) -> tuple[Any, Any]:
    return sx.jit(sx.value_and_grad(next_token_loss))(model, BATCH)


@pytest.fixture(scope="module")
def unrolled() -> tuple[Any, Any]:
    """(loss, gradients) of the decoder with layers in a list."""
    return loss_and_gradients(decoder())


def test_initial_parameters_equal_those_of_the_unrolled() -> None:
    model = initial(scan_layers=True)
    params = unstack_state(sx.state(model, sx.Param), model).flat()
    expected = sx.state(initial(), sx.Param).flat()
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        assert_equal_values(params[path], value)


@pytest.mark.parametrize("remat", [None, "full", "dots_saveable"])
def test_scanned_loss_and_gradients_equal_the_unrolled(remat: str | None, unrolled: Any) -> None:
    model = decoder(scan_layers=True, remat=remat)
    loss, gradients = loss_and_gradients(model)
    np.testing.assert_allclose(loss, unrolled[0], rtol=1e-6)
    mine = unstack_state(gradients, model).flat()
    assert mine.keys() == unrolled[1].flat().keys()
    for path, value in unrolled[1].flat().items():
        np.testing.assert_allclose(mine[path], value, 1e-5, 1e-6, err_msg=str(path))


def test_unrolled_remat_keeps_loss_and_gradients(unrolled: Any) -> None:
    loss, gradients = loss_and_gradients(decoder(remat="full"))
    np.testing.assert_allclose(loss, unrolled[0], rtol=1e-6)
    for path, value in unrolled[1].flat().items():
        np.testing.assert_allclose(gradients.flat()[path], value, 1e-5, 1e-6, err_msg=str(path))


def test_loss_and_gradients_over_a_mesh(mesh: Mesh, unrolled: Any) -> None:
    model = sx.shard(decoder(scan_layers=True), mesh, DECODER_RULES)
    layers: Any = model.layers
    kernel = layers.stacked.mlp.up.kernel
    assert kernel.axes == ("layers", "embed", "mlp")
    assert kernel.sharding.spec == P(None, None, "model")
    with jax.set_mesh(mesh), sx.axis_rules(DECODER_RULES):
        loss, gradients = loss_and_gradients(model)
    np.testing.assert_allclose(loss, unrolled[0], rtol=1e-5)
    up = gradients["layers"]["stacked"]["mlp"]["up"]["kernel"]
    assert up.sharding.spec == P(None, None, "model")
    expected = [unrolled[1]["layers"][i]["mlp"]["up"]["kernel"] for i in range(3)]
    np.testing.assert_allclose(up, np.stack(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scanned_logits_with_given_positions_and_dtype(dtype: str) -> None:
    positions, tokens = np.arange(5, 13), TOKENS[:, 1:]
    models = [
        decoder(scan_layers=scanned, dtype=dtype, tied_head=True, dropout=0.0, num_layers=2)
        for scanned in (False, True)
    ]
    run = sx.jit(lambda *models: [model(tokens, positions=positions) for model in models])
    logits = run(*models)
    assert logits[0].dtype == logits[1].dtype == jnp.dtype(dtype)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(*map(np.float32, logits), tolerance, tolerance)


def test_program_does_not_grow_with_depth() -> None:
    def size(layers: int) -> int:
        model = decoder(scan_layers=True, num_layers=layers)
        text = sx.jit(sx.grad(next_token_loss)).lower(model, BATCH).as_text()
        return len(text.splitlines())

    assert size(3) == size(6)


@pytest.mark.parametrize("remat", ["dots", jax.checkpoint_policies.dots_saveable])
def test_unknown_remat_policy_is_refused(remat: Any) -> None:
    with pytest.raises(LayerConfigError, match="remat="):
        dataclasses.replace(SMALL, remat=remat)
