# SPDX-License-Identifier: Apache-2.0
"""Decoders like Llama with parts of their own.

Sources: ``models/{granite,smollm3,nemotron,cohere2}`` of transformers 5, ``configuration_*.py`` for
fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import ConfigEdit, Family, Field, FieldGroup, Taker
from shardax.models.tensors import in_layers, norm

# --- Granite --------------------------------------------------------------------------------------


class Multipliers(FieldGroup):
    """Factors of embedding, layers, scores and logits."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        embedding = take("embedding_multiplier", 1.0, kind=kinds.NUMBER)
        residual = take("residual_multiplier", 1.0, kind=kinds.NUMBER)
        logits = 1 / take("logits_scaling", 1.0, kind=kinds.NUMBER.positive)
        return {
            "attention.scale": take("attention_multiplier", 1.0, kind=kinds.NUMBER),
            "embedding.scale": None if embedding == 1 else embedding,
            "residual_scale": None if residual == 1 else residual,
            "output.scale": None if logits == 1 else logits,
        }

    def write(self, edit: ConfigEdit) -> None:
        config, content = edit.config, edit.content
        for path, field in (
            ("embedding.scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
        ):
            if edit.changes(path):
                content[field] = 1.0 if edit.value(path) is None else edit.value(path)
        if edit.changes("attention.scale", "attention.head_dim"):
            scale, plain = config.attention.scale, config.attention.head_dim**-0.5
            content["attention_multiplier"] = plain if scale is None else scale
        if edit.changes("output.scale"):
            content["logits_scaling"] = (
                1.0 if config.output.scale is None else 1 / config.output.scale
            )


GRANITE = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "mlp_bias": Field("mlp.bias", default=False),
    },
    groups=[Rotary(), Multipliers()],
    architectures=shared.causal_lm("Granite"),
    tensors=shared.decoder(),
)

# --- SmolLM3 --------------------------------------------------------------------------------------


class LayersWithoutRope(FieldGroup):
    """Layers without a rotary embedding, the only ones with windows."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        rotated = shared.read_rotated_layers(take)
        is_used = take("use_sliding_window", False, kind=kinds.BOOLEAN.or_null)
        windows = shared.read_windows(take, None, lambda layer: is_used and not rotated[layer])
        types = take("layer_types", None)
        has_window = take("sliding_window", None) is not None
        fits = "sliding_attention" not in (types or ()) or (is_used and has_window)
        limits = " without use_sliding_window=True and a sliding_window"
        kinds.check_supported("layer_types", types, fits, limits)
        return {"attention.rope_layers": None if all(rotated) else rotated, **windows}

    def write(self, edit: ConfigEdit) -> None:
        config = edit.config
        if edit.changes("attention.rope_layers", "num_layers"):
            rotated = map(config.attention.has_rope, range(config.num_layers))
            edit.content["no_rope_layers"] = list(map(int, rotated))
        if edit.changes("attention.window"):
            edit.content["use_sliding_window"] = config.attention.window is not None
        shared.write_windows(edit)


SMOLLM3 = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "mlp_bias": Field("mlp.bias", default=False),
        "num_key_value_heads": Field("attention.num_kv_heads", default=4),
        "tie_word_embeddings": Field("output.tied", default=True),
    },
    groups=[Rotary(2e6, max_positions=32_768), LayersWithoutRope()],
    architectures=shared.causal_lm("SmolLM3"),
    neutral={"pretraining_tp": (1, 2, None)},  # of training alone
    tensors=shared.decoder(),
)

# --- Nemotron -------------------------------------------------------------------------------------

# LayerNorms with 1 added to the scale, an MLP without a gate, half of a head turned.
NEMOTRON = Family(
    fields={
        **shared.DECODER,
        **shared.ATTENTION_BIAS,
        "head_dim": Field("attention.head_dim", default=None),
        "hidden_act": Field("activation", default="relu2"),
        "mlp_bias": Field("mlp.bias", default=False),
        "norm_eps": Field("norms.epsilon", default=1e-5),
    },
    fixed={"norms.kind": "layer_offset", "mlp.gated": False},
    groups=[Rotary(fraction=0.5, max_positions=4096)],
    architectures=shared.causal_lm("Nemotron"),
    tensors=shared.decoder(shared.mlp()),
)

# --- Cohere 2 -------------------------------------------------------------------------------------


class RotaryWindows(shared.WindowsByLayer):
    """A window of all layers but each fourth, and their rope."""

    def __init__(self) -> None:
        super().__init__(4096, lambda layer: True, needs_size=True)

    def read(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=kinds.SIZE)
        period = take("sliding_window_pattern", 4, kind=kinds.SIZE)
        take("sliding_window", self.default, kind=kinds.SIZE)
        windows = shared.read_windows(take, self.default, lambda layer: (layer + 1) % period > 0)
        local = windows.get("attention.local_layers", (False,) * count)
        return {**windows, "attention.rope_layers": local}


# Attention and MLP read the same norm, which has no bias.
COHERE2 = Family(
    fields={
        **shared.DECODER,
        **shared.ATTENTION_BIAS,
        "head_dim": Field("attention.head_dim", default=None),
        "hidden_act": Field("activation", default="silu"),
        "layer_norm_eps": Field("norms.epsilon", default=1e-5),
        "logit_scale": Field("output.scale", default=0.0625),
        "tie_word_embeddings": Field("output.tied", default=True),
    },
    fixed={"norms.kind": "layer_unbiased", "parallel": True, "norms.shared": True},
    groups=[Rotary(interleaved=True, max_positions=8192), RotaryWindows()],
    architectures=shared.causal_lm("Cohere2"),
    neutral={
        "layer_switch": (4,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    },
    harmless=("cache_implementation", "use_parallel_embedding"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            norm("input_layernorm", to="attn_norm"),
            shared.attention(),
            shared.gated_mlp(),
        ),
    ),
)
