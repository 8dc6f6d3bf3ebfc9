# SPDX-License-Identifier: Apache-2.0
"""Llama and its closest relatives: Mistral, Ministral, Mixtral, Phi-3, OLMo.

Sources: ``models/{llama,llama4,mistral,ministral,mixtral,phi3,olmo2,olmo3,olmoe}`` of
transformers 5, ``configuration_*.py`` for fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary, RotaryByLayerType
from shardax.models.family import PUBLISHED, REQUIRED, Family, Field, FieldGroup, Taker
from shardax.models.tensors import HEADS, Tensor, concatenated, in_layers, linear, norm

LLAMA = Family(
    fields={**shared.GATED_DECODER, **shared.ATTENTION_BIAS, "mlp_bias": Field("mlp.bias")},
    groups=[Rotary()],
    architectures=shared.causal_lm("Llama"),
    tensors=shared.decoder(),
)

MISTRAL = Family(
    fields={**shared.GATED_DECODER},
    groups=[Rotary(), shared.Window()],
    architectures=shared.causal_lm("Mistral"),
    tensors=shared.decoder(),
)

# As Mistral, but some layers may have no window.
MINISTRAL = Family(
    fields={**shared.GATED_DECODER},
    groups=[Rotary(), shared.WindowsByLayer(lambda layer: True, needs_size=True)],
    architectures=shared.causal_lm("Ministral"),
    tensors=shared.decoder(),
)

MIXTRAL = Family(
    fields={
        **shared.GATED_DECODER,
        "intermediate_size": Field("mlp.dim", "experts.dim", default=REQUIRED),
        "num_experts_per_tok": Field("experts.top_k"),
        "num_local_experts": Field("experts.num_experts"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
    },
    fixed={"experts.normalise": True},
    groups=[Rotary(1e6), shared.Window()],
    architectures=shared.causal_lm("Mixtral"),
    tensors=shared.decoder(
        shared.experts(
            router="block_sparse_moe.gate.weight",
            gate="block_sparse_moe.experts.{expert}.w1.weight",
            up="block_sparse_moe.experts.{expert}.w3.weight",
            down="block_sparse_moe.experts.{expert}.w2.weight",
        )
    ),
)

_QKV_AXES = {"axes": (concatenated(*HEADS), "embed"), "parameter_axes": ("embed", *HEADS)}

# Queries, keys and values are one tensor, gate and up another.
PHI3 = Family(
    fields={
        **shared.GATED_DECODER,
        "embd_pdrop": Field("embedding.dropout"),
        "resid_pdrop": Field("dropout"),
    },
    groups=[Rotary(types=["default"], partial=True), shared.Window()],
    architectures=shared.causal_lm("Phi3"),
    neutral={"attention_bias": (False,)},
    harmless=("original_max_position_embeddings",),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            (
                Tensor("self_attn.qkv_proj.weight", "attn.q.kernel", **_QKV_AXES),
                Tensor("self_attn.qkv_proj.weight", "attn.k.kernel", **_QKV_AXES),
                Tensor("self_attn.qkv_proj.weight", "attn.v.kernel", **_QKV_AXES),
            ),
            linear("self_attn.o_proj", to="attn.out", inputs=HEADS, outputs="embed"),
            shared.fused_gated_mlp(),
        ),
    ),
)

# Norms stand behind attention and MLP; those of queries and keys are over all heads together.
OLMO2 = Family(
    fields={**shared.GATED_DECODER, **shared.ATTENTION_BIAS},
    fixed={"norms.placement": "post", "attention.qk_norm": "all"},
    groups=[Rotary()],
    architectures=shared.causal_lm("Olmo2"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            norm("post_attention_layernorm", to="attn_post_norm"),
            norm("post_feedforward_layernorm", to="mlp_post_norm"),
            (
                Tensor("self_attn.q_norm.weight", "attn.query_norm.scale", [HEADS]),
                Tensor("self_attn.k_norm.weight", "attn.key_norm.scale", [HEADS]),
            ),
            shared.attention(),
            shared.gated_mlp(),
        ),
    ),
)

# The layers of OLMo 2, all but each fourth with a window. An older file's ``rope_theta`` is of the
# layers without one: transformers takes the default for the others.
OLMO3 = Family(
    fields=OLMO2.fields,
    fixed=OLMO2.fixed,
    groups=[
        RotaryByLayerType(("rope_theta", 500_000.0), ("", 500_000.0)),
        shared.WindowsByLayer(lambda layer: (layer + 1) % 4 > 0, needs_size=True),
    ],
    architectures=shared.causal_lm("Olmo3"),
    tensors=OLMO2.tensors,
)

# Norms of queries and keys are over all heads together, as in OLMo 2; the others as in Llama.
OLMOE = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "intermediate_size": Field("mlp.dim", "experts.dim", default=REQUIRED),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts": Field("experts.num_experts"),
        "num_experts_per_tok": Field("experts.top_k"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
    },
    fixed={"attention.qk_norm": "all"},
    groups=[Rotary()],
    architectures=shared.causal_lm("Olmoe"),
    neutral={"clip_qkv": (None,)},
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            (
                Tensor("self_attn.q_norm.weight", "attn.query_norm.scale", [HEADS]),
                Tensor("self_attn.k_norm.weight", "attn.key_norm.scale", [HEADS]),
            ),
            shared.attention(),
            shared.swiglu_experts(),
        ),
    ),
)

# --- Llama 4 --------------------------------------------------------------------------------------

# Queries and keys are normalized behind the rotation there, which changes no norm.
_CHUNKED_TYPES = ("full_attention", "chunked_attention")


class ChunkedLayers(FieldGroup):
    """Layers with a rotary embedding, by default those with chunks."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        rotated = shared.read_rotated_layers(take, may_be_empty=True)
        size = take("attention_chunk_size", PUBLISHED, kind=kinds.SIZE)
        local = shared.read_layer_types(take, _CHUNKED_TYPES, rotated.__getitem__)
        factor = take("attn_scale", PUBLISHED, kind=kinds.NUMBER)
        length = take("floor_scale", PUBLISHED, kind=kinds.NUMBER.positive)
        growth = (float(factor), float(length))
        is_grown = take("attn_temperature_tuning", PUBLISHED, kind=kinds.BOOLEAN)
        return {
            "attention.rope_layers": None if all(rotated) else rotated,
            "attention.query_growth": growth if is_grown else None,
            **({"attention.window": size, "attention.chunked": True} if any(local) else {}),
            "attention.local_layers": None if all(local) or not any(local) else local,
        }

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        attention, layers = config.attention, range(config.num_layers)
        fields: dict[str, Any] = {
            "no_rope_layers": [int(attention.has_rope(index)) for index in layers],
            "attn_temperature_tuning": attention.query_growth is not None,
            "layer_types": [_CHUNKED_TYPES[attention.is_local(index)] for index in layers],
        }
        if attention.query_growth is not None:
            factor, length = attention.query_growth
            # An integer there, by the checks of transformers.
            length = int(length) if length == int(length) else length
            fields |= {"attn_scale": factor, "floor_scale": length}
        if attention.window is not None:
            fields["attention_chunk_size"] = attention.window
        return fields


class InterleavedExperts(FieldGroup):
    """The layers with experts, by their numbers or an interval."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=kinds.SIZE)
        step = take("interleave_moe_layer_step", PUBLISHED, kind=kinds.SIZE)
        layers = take("moe_layers", None, kind=kinds.INTEGERS.or_null)
        layers = range(step - 1, count, step) if layers is None else layers
        size = take("intermediate_size", kind=kinds.SIZE)
        dense = tuple(index for index in range(count) if index not in layers)
        return {"experts.dense_layers": dense, "experts.dim": size, "experts.shared_dim": size}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        experts = config.experts
        if experts is None:
            return {"moe_layers": []}
        layers = [index for index in range(config.num_layers) if experts.in_layer(index)]
        return {"moe_layers": layers, "intermediate_size": experts.dim}


def _scales_inputs_of_experts(config: TransformerConfig) -> bool:
    return config.experts is not None and config.experts.scores == "input_sigmoid"


_LLAMA4_FIELDS = {
    **shared.without(shared.GATED_DECODER, "intermediate_size"),
    **shared.ATTENTION_BIAS,
    "intermediate_size_mlp": Field("mlp.dim"),
    "num_experts_per_tok": Field("experts.top_k"),
    "num_local_experts": Field("experts.num_experts", back=shared.experts_or_none),
    "use_qk_norm": Field(
        "attention.qk_norm",
        kind=kinds.BOOLEAN,
        to=lambda has_norms: "unscaled" if has_norms else None,
        back=lambda config: config.attention.qk_norm is not None,
    ),
}
_GATE_AND_UP = ("expert", "embed", concatenated("mlp"))

LLAMA4_TEXT = Family(
    fields=_LLAMA4_FIELDS,
    fixed={"experts.scores": "input_sigmoid"},
    groups=[
        # Others change the length of what they turn, before it is normalized.
        Rotary(500_000.0, types=["default", "linear", "llama3"], interleaved=True),
        ChunkedLayers(),
        InterleavedExperts(),
    ],
    architectures={"Llama4ForCausalLM": {}, "Llama4TextModel": {"head": None, "output.tied": True}},
    has_parts=_scales_inputs_of_experts,
    # Of training, and not read by transformers either.
    harmless=("for_llm_compressor", "router_aux_loss_coef", "router_jitter_noise"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            shared.attention(),
            shared.gated_mlp(*(f"feed_forward.{name}_proj" for name in ("gate", "up", "down"))),
            linear("feed_forward.router", to="mlp.router", inputs="embed", outputs="expert"),
            (
                Tensor("feed_forward.experts.gate_up_proj", "mlp.gate", _GATE_AND_UP),
                Tensor("feed_forward.experts.gate_up_proj", "mlp.up", _GATE_AND_UP),
                Tensor("feed_forward.experts.down_proj", "mlp.down", ("expert", "mlp", "embed")),
            ),
            shared.shared_expert("feed_forward.shared_expert"),
        ),
    ),
)
