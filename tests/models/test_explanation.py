# SPDX-License-Identifier: Apache-2.0
"""The layers of families as plain code: its text, and the shapes in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.errors import PretrainedError
from shardax.extend import format_path
from shardax.models import (
    AttentionConfig,
    ConvNeXtConfig,
    Decoder,
    DecoderConfig,
    DualEncoderConfig,
    EncoderDecoderConfig,
    MLPConfig,
    NormConfig,
    TransformerConfig,
    TransformerLayer,
    explain,
    register,
)
from shardax.models.convnext import ConvNeXtBlock
from shardax.models.explaining.explanation import config_of_family
from shardax.models.families.registry import FAMILIES
from tests.models import plain_layers
from tests.models.published import MODELS, tiny_config
from tests.values import with_values

LLAMA = """\
# layers 0 to 31 of 32
def layer(x):                          # (batch, time, 4096)
    h = rms_norm(x) * attn_norm.scale  # (embed=4096)
    q = h @ attn.q.kernel              # (embed=4096, heads=32, head_dim=128)
    k = h @ attn.k.kernel              # (embed=4096, kv_heads=32, head_dim=128)
    v = h @ attn.v.kernel              # (embed=4096, kv_heads=32, head_dim=128)
    q, k = rotary(q, k, base=10000)
    y = attend(q, k, v, scale=0.08839, causal=True)
    y = y @ attn.out.kernel            # (heads=32, head_dim=128, embed=4096)
    x = x + y
    h = rms_norm(x) * mlp_norm.scale   # (embed=4096)
    gate = silu(h @ mlp.gate.kernel)   # (embed=4096, mlp=11008)
    up = h @ mlp.up.kernel             # (embed=4096, mlp=11008)
    y = (gate * up) @ mlp.down.kernel  # (mlp=11008, embed=4096)
    return x + y"""


def test_code_of_llama_is_shown_whole():
    assert explain("llama") == LLAMA


def test_code_of_a_config_shows_its_parts_in_their_places():
    config = TransformerConfig(
        num_layers=2,
        embed_dim=8,
        activation="gelu",
        residual_scale=0.5,
        layer_scale=True,
        norms=NormConfig(kind="layer", placement="sandwich"),
        attention=AttentionConfig(2, 1, 4, rope=None, window=3, softcap=5.0, out_scale=0.25),
        mlp=MLPConfig(16, gated=False, bias=True),
    )
    assert (
        explain(config)
        == """\
# layers 0 to 1 of 2
def layer(x):                                             # (batch, time, 8)
    h = layer_norm(x) * attn_norm.scale + attn_norm.bias  # (embed=8), (embed=8)
    q = h @ attn.q.kernel                                 # (embed=8, heads=2, head_dim=4)
    k = h @ attn.k.kernel                                 # (embed=8, kv_heads=1, head_dim=4)
    v = h @ attn.v.kernel                                 # (embed=8, kv_heads=1, head_dim=4)
    y = attend(q, k, v, scale=0.5, causal=True, window=3, softcap=5)
    y = y @ attn.out.kernel                               # (heads=2, head_dim=4, embed=8)
    y = 0.25 * y
    y = y * attn_scale                                    # (embed=8)
    y = layer_norm(y) * attn_post_norm.scale + attn_post_norm.bias  # (embed=8), (embed=8)
    x = x + 0.5 * y
    h = layer_norm(x) * mlp_norm.scale + mlp_norm.bias    # (embed=8), (embed=8)
    hidden = gelu(h @ mlp.up.kernel + mlp.up.bias)        # (embed=8, mlp=16), (mlp=16)
    y = hidden @ mlp.down.kernel + mlp.down.bias          # (mlp=16, embed=8), (embed=8)
    y = y * mlp_scale                                     # (embed=8)
    y = layer_norm(y) * mlp_post_norm.scale + mlp_post_norm.bias  # (embed=8), (embed=8)
    return x + 0.5 * y"""
    )


def built_layers(config: Any) -> Iterator[list[sx.Module]]:
    """The layers of each half or tower of a model, or of each stage the first block."""
    rngs = sx.Rngs(0)
    match config:
        case ConvNeXtConfig():
            yield [ConvNeXtBlock(config, width, rngs=rngs) for width in config.widths]
        case DualEncoderConfig():
            yield from (*built_layers(config.text), *built_layers(config.image))
        case EncoderDecoderConfig():
            yield from (*built_layers(config.encoder), *built_layers(config.decoder))
        case _:
            indices = range(config.num_layers)
            yield [TransformerLayer(config, index, rngs=rngs) for index in indices]


def shapes_of(layer: sx.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's parameters, by path."""
    return {
        format_path(path).removeprefix("."): tuple(parameter.shape)
        for path, parameter in sx.iter_variables(layer, sx.Param)
    }


def shapes_in(code: str, paths: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes behind lines of code, by the path of the parameter in the line."""
    shapes = dict[str, tuple[int, ...]]()
    for line in code.splitlines()[1:]:
        text, _, comment = line.partition("  # ")
        names = [name for name in re.findall(r"[\w.]+", text) if name in paths]
        dimensions = re.findall(r"\(([^)]*)\)", comment)
        for name, sizes in zip(names, dimensions, strict=True):
            shapes[name] = tuple(int(size.rpartition("=")[2]) for size in sizes.split(", "))
    return shapes


@pytest.mark.parametrize("kind", FAMILIES)
def test_code_has_the_shapes_of_the_layers_of_each_family(kind: str):
    sections = explain(kind).split("\n\n")
    for layers in built_layers(config_of_family(kind)):
        shown = set[int]()
        while len(shown) < len(layers):
            title, _, code = sections.pop(0).partition("\n")
            compile(code, title, "exec")  # it is Python
            if title.startswith("# stage"):
                indices = {len(shown)}
            else:
                listed = title.partition("layers ")[2].rpartition(" of ")[0].split(", ")
                runs = [[int(index) for index in run.split(" to ")] for run in listed]
                indices = {i for run in runs for i in range(run[0], run[-1] + 1)}
            for index in indices:
                expected = shapes_of(layers[index])
                assert shapes_in(code, expected) == expected
            assert not shown & indices
            shown |= indices
    assert not sections


def test_configs_of_models_are_explained():
    config = DecoderConfig(num_layers=1)
    model = Decoder(config, rngs=sx.Rngs(0))
    assert explain(model.config) == explain(config.transformer)
    assert explain(config_of_family("whisper")) == explain("whisper")


def test_registered_families_are_explained():
    register("my_scaled_llama", like="llama", fixed={"residual_scale": 0.5})
    try:
        assert explain("my_scaled_llama") == LLAMA.replace("x + y", "x + 0.5 * y")
    finally:
        del FAMILIES["my_scaled_llama"]


def test_unknown_families_and_other_values_are_refused():
    with pytest.raises(PretrainedError, match=r"'lama', but known are bart, .*, llama, "):
        explain("lama")
    with pytest.raises(PretrainedError, match=r"explain was given 7, and takes the name of a"):
        explain(7)  # type: ignore[arg-type]


# The part of a head of 4 that is turned must be even.
ROTATED = {"phi": {"partial_rotary_factor": 0.5}}
# Of each type the first model, small.
SMALL = {
    content["model_type"]: tiny_config(content, layers=4, **ROTATED.get(content["model_type"], {}))
    for content, _ in reversed(list(MODELS.values()))
}


@pytest.mark.parametrize("kind", SMALL)
def test_printed_code_computes_what_the_layer_computes(kind: str):
    config = FAMILIES[kind].config(SMALL[kind], kind)
    halves = [config] if isinstance(config, TransformerConfig) else [config.encoder, config.decoder]
    generator = np.random.default_rng(0)
    for half in halves:
        x = generator.normal(size=(2, 5, half.embed_dim)).astype(np.float32)
        context = generator.normal(size=(2, 3, half.embed_dim)).astype(np.float32)
        bias = generator.normal(size=(half.attention.num_heads, 5, 5)).astype(np.float32)
        for section in explain(half).split("\n\n"):
            title, _, code = section.partition("\n")
            index = int(re.findall(r"\d+", title)[0])
            layer = with_values(TransformerLayer(half, index, rngs=sx.Rngs(0)))
            layer.eval()

            names, options = {"x": x}, dict[str, Any]()
            if layer.cross_attn is not None:
                names["context"] = options["context"] = context
            if half.positions.relative_buckets:
                names["bias_of_distances"] = options["bias"] = bias
            expected = layer(x, **options)
            # Factors are printed with four digits, and norms have an epsilon that is not printed.
            np.testing.assert_allclose(
                plain_layers.run(code, layer, **names), expected, rtol=2e-3, atol=2e-3
            )
