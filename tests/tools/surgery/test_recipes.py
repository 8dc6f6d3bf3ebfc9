# SPDX-License-Identifier: Apache-2.0
"""The page of recipes holds for decoders in every layout, and its numbers are right."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardax as sx
from shardax import named
from tests.tools.surgery.decoders import TOKENS, close, decoder, run

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
ON_THE_PAGE = "scan_layers=True, tied_head=True"


def test_page_holds_for_listed_layers_and_own_head() -> None:
    text = PAGE.read_text()
    assert text.count(ON_THE_PAGE) == 1
    text = text.replace(ON_THE_PAGE, "scan_layers=False, tied_head=False")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def test_heads_ablated_by_name_have_zero_values() -> None:
    def ablated(kernel: Any, heads: jax.Array) -> Any:
        array = named.wrap(kernel.value, *kernel.axes).at[{"heads": heads}].set(0)
        return kernel.replace(array.unwrap(*kernel.axes))

    models = [decoder(scanned) for scanned in (False, True)]
    for heads in (1, [0, 3]):
        kept = np.ones(4, np.float32)
        kept[heads] = 0
        expected = _with_heads(decoder(), kept)
        for model in models:
            attention = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention)
            outputs = attention.at(lambda attention: attention.out.kernel)
            close(run(outputs.apply(lambda kernel: ablated(kernel, jnp.array(heads)))), expected)  # noqa: B023


@sx.jit
def _with_heads(model: Any, kept: Any) -> jax.Array:
    """The decoder's logits by hand, with the results of heads multiplied by 0 or 1."""
    turned = sx.nn.rotation(
        jnp.arange(TOKENS.shape[-1]), model.config.head_dim, model.config.rope_base
    )
    x = model.embed(TOKENS)
    for layer in model.layers:
        qkv = layer.attn.project(layer.attn_norm(x), positions=turned)
        values = layer.attn.attend(qkv) * kept.reshape(1, 1, -1, 1)
        x = x + jnp.einsum("bthd,hde->bte", values, layer.attn.out.kernel[...])
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.head(model.final_norm(x))
