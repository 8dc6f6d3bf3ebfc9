# SPDX-License-Identifier: Apache-2.0
"""Decoders like Llama with parts of their own.

Sources: ``models/{granite,smollm3,nemotron,cohere2}`` of transformers 5, ``configuration_*.py`` for
fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import PUBLISHED, Family, Field, FieldGroup, Taker
from shardax.models.tensors import in_layers, norm

# --- Granite --------------------------------------------------------------------------------------


def _none_for_one(factor: float) -> float | None:
    return None if factor == 1 else factor


# Factors of embedding, layers, scores and logits.
_MULTIPLIERS = {
    "attention_multiplier": Field(
        "attention.scale",
        kind=kinds.NUMBER,
        back=lambda config: config.attention.scale or config.attention.head_dim**-0.5,
    ),
    "embedding_multiplier": Field(
        "embedding.scale",
        kind=kinds.NUMBER,
        to=_none_for_one,
        back=lambda config: config.embedding.scale or 1.0,
    ),
    "logits_scaling": Field(
        "output.scale",
        kind=kinds.NUMBER.positive,
        to=lambda divisor: _none_for_one(1 / divisor),
        back=lambda config: 1 / (config.output.scale or 1.0),
    ),
    "residual_multiplier": Field(
        "residual_scale",
        kind=kinds.NUMBER,
        to=_none_for_one,
        back=lambda config: config.residual_scale or 1.0,
    ),
}

GRANITE = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        **_MULTIPLIERS,
        "mlp_bias": Field("mlp.bias"),
    },
    groups=[Rotary()],
    architectures=shared.causal_lm("Granite"),
    tensors=shared.decoder(),
)

# --- SmolLM3 --------------------------------------------------------------------------------------


class LayersWithoutRope(FieldGroup):
    """Layers without a rotary embedding, the only ones with windows."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        rotated = shared.read_rotated_layers(take)
        is_used = take("use_sliding_window", PUBLISHED, kind=kinds.BOOLEAN.or_null)
        windows = shared.read_windows(take, lambda layer: is_used and not rotated[layer])
        types = take("layer_types", None, kind=kinds.TEXTS.or_null)
        has_window = take("sliding_window", None) is not None
        fits = "sliding_attention" not in (types or ()) or (is_used and has_window)
        limits = " without use_sliding_window=True and a sliding_window"
        kinds.check_supported("layer_types", types, fits, limits)
        return {"attention.rope_layers": None if all(rotated) else rotated, **windows}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        rotated = map(config.attention.has_rope, range(config.num_layers))
        return {
            "no_rope_layers": list(map(int, rotated)),
            "use_sliding_window": config.attention.window is not None,
            **shared.window_fields(config),
        }


SMOLLM3 = Family(
    fields={**shared.GATED_DECODER, **shared.ATTENTION_BIAS, "mlp_bias": Field("mlp.bias")},
    groups=[Rotary(2e6), LayersWithoutRope()],
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
        "head_dim": Field("attention.head_dim"),
        "hidden_act": Field("activation"),
        "mlp_bias": Field("mlp.bias"),
        "norm_eps": Field("norms.epsilon"),
    },
    fixed={"norms.kind": "layer_offset", "mlp.gated": False},
    groups=[Rotary(fraction=0.5)],
    architectures=shared.causal_lm("Nemotron"),
    tensors=shared.decoder(shared.mlp()),
)

# --- Cohere 2 -------------------------------------------------------------------------------------


class RotaryWindows(shared.WindowsByLayer):
    """A window of all layers but each fourth, and their rope."""

    def __init__(self) -> None:
        super().__init__(lambda layer: True, needs_size=True)

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=kinds.SIZE)
        period = take("sliding_window_pattern", 4, kind=kinds.SIZE)
        take("sliding_window", PUBLISHED, kind=kinds.SIZE)
        windows = shared.read_windows(take, lambda layer: (layer + 1) % period > 0)
        local = windows.get("attention.local_layers", (False,) * count)
        return {**windows, "attention.rope_layers": local}


# Attention and MLP read the same norm, which has no bias.
COHERE2 = Family(
    fields={
        **shared.DECODER,
        **shared.ATTENTION_BIAS,
        "head_dim": Field("attention.head_dim"),
        "hidden_act": Field("activation"),
        "layer_norm_eps": Field("norms.epsilon"),
        "logit_scale": Field("output.scale"),
    },
    fixed={"norms.kind": "layer_unbiased", "parallel": True, "norms.shared": True},
    groups=[Rotary(interleaved=True), RotaryWindows()],
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
