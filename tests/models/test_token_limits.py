# SPDX-License-Identifier: Apache-2.0
"""Tokens and positions that a model does not have are errors, not zeros."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import GenerationError, LayerInputError
from shardax.models import (
    AttentionConfig,
    MLPConfig,
    PositionsConfig,
    Rope,
    Transformer,
    TransformerConfig,
    generate,
)
from tests.values import with_values


def _model(max_positions: int = 0) -> Transformer:
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    config = TransformerConfig(
        vocab_size=64,
        num_layers=1,
        embed_dim=8,
        attention=AttentionConfig(**heads, rope=Rope() if max_positions == 0 else None),
        mlp=MLPConfig(dim=8),
        positions=PositionsConfig(max_positions=max_positions),
    )
    return with_values(Transformer(config, rngs=sx.Rngs(0)))


class Called(sx.Module):
    """A model whose vocabulary cannot be seen."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: Any) -> Any:
        return self.model(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stream", [False, True])
def test_generate_refuses_logits_that_are_nan(temperature: float, stream: bool) -> None:
    options = {"max_new_tokens": 3, "temperature": temperature, "stream": stream}
    with pytest.raises(GenerationError, match=r"NaN for the prompts \[1\]"):
        list(generate(Called(_model()), [[1, 2], [1, 64]], **options))


def test_generate_refuses_tokens_outside_the_vocabulary() -> None:
    model = _model()
    for token in (64, 2**32 + 1):
        with pytest.raises(GenerationError, match=str(token)):
            generate(model, [[1, 2], [1, token]], max_new_tokens=2)
    (row,) = generate(model, [[1, 63]], max_new_tokens=1)
    assert row.shape == (3,)


def test_generate_refuses_parameters_that_are_nan() -> None:
    model = _model()
    model.head.kernel[...] = np.nan
    with pytest.raises(GenerationError, match="NaN for the prompts"):
        generate(model, [[1]], max_new_tokens=1)


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_more_tokens_than_positions_are_refused(wrap: Any) -> None:
    model = _model(max_positions=4)
    call = wrap(lambda model, tokens: model(tokens))
    assert np.isfinite(call(model, np.arange(4)[None])).all()
    with pytest.raises(LayerInputError, match=r"max_positions=4.*position 4.*tokens\[:, :4\]"):
        call(model, np.arange(5)[None])
    assert np.isfinite(call(model, np.arange(5)[None][:, :4])).all()  # as the error says


def test_positions_beyond_the_learned_ones_are_refused() -> None:
    model = _model(max_positions=4)
    tokens = np.arange(6)[None]
    with pytest.raises(LayerInputError, match="position 9"):
        model(tokens[:, :2], positions=np.array([0, 9]))
    mask = np.array([[False, False, True, True, True, True]])
    assert np.isfinite(model(tokens, mask=mask)).all()  # padding has no position
    with pytest.raises(LayerInputError, match="position 4"):
        model(tokens, mask=mask | (np.arange(6) == 1))
    cache = model.make_cache(1, 8)
    model(tokens[:, :3], cache=cache)
    with pytest.raises(LayerInputError, match="position 4"):
        model(tokens[:, :2], cache=cache)


def test_padding_may_have_the_position_minus_one() -> None:
    model = _model(max_positions=4)
    tokens, mask = np.array([[7, 1, 2]]), np.array([[False, True, True]])
    padded = model(tokens, mask=mask, positions=np.array([[-1, 0, 1]]))
    np.testing.assert_allclose(padded[:, 1:], model(tokens[:, 1:]), rtol=1e-5, atol=1e-6)
    assert jnp.isfinite(padded).all()
