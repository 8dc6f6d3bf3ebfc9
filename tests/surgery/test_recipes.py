# SPDX-License-Identifier: Apache-2.0
"""The page of recipes holds for decoders in every layout, and its numbers are right."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tests.surgery.decoders import TOKENS, close, decoder, run

import shardax as sx
from shardax import named

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ON_THE_PAGE = "scan_layers=True, tied_head=True"


def test_the_page_holds_for_layers_in_a_list_and_an_own_head() -> None:
    text = PAGE.read_text()
    assert text.count(ON_THE_PAGE) == 1
    text = text.replace(ON_THE_PAGE, "scan_layers=False, tied_head=False")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def test_heads_ablated_by_name_are_those_whose_values_are_zero() -> None:
    def ablated(kernel: Any, heads: jax.Array) -> Any:
        array = named.wrap(kernel.value, *kernel.axes).at[{"heads": heads}].set(0)
        return kernel.replace(array.unwrap(*kernel.axes))

    models, compiled = [decoder(scanned) for scanned in (False, True)], sx.jit(run)
    for heads in (jnp.array(1), jnp.array([0, 3])):
        expected = jax.jit(_without_heads)(heads)
        for model in models:
            attention = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention)
            outputs = attention.at(lambda attention: attention.out.kernel)
            close(compiled(outputs.apply(lambda kernel: ablated(kernel, heads))), expected)  # noqa: B023


def _without_heads(heads: jax.Array) -> jax.Array:
    """The decoder's logits by hand, with the results of some heads set to zero."""
    model = decoder()
    turned = sx.nn.rotation(
        jnp.arange(TOKENS.shape[-1]), model.config.head_dim, model.config.rope_base
    )
    x = model.embed(TOKENS)
    for layer in model.layers:
        qkv = layer.attn.project(layer.attn_norm(x), positions=turned)
        values = layer.attn.attend(qkv).at[:, :, heads].set(0)
        x = x + jnp.einsum("bthd,hde->bte", values, layer.attn.out.kernel[...])
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.head(model.final_norm(x))
