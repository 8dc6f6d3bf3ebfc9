# SPDX-License-Identifier: Apache-2.0
"""Llama and its closest relatives: Mistral, Ministral, Mixtral, Phi-3, OLMo.

Sources: ``models/{llama,mistral,ministral,mixtral,phi3,olmo2,olmo3,olmoe}`` of transformers 5,
``configuration_*.py`` for fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families import shared
from shardax.models.families.rope import Rotary, RotaryByLayerType
from shardax.models.family import Family, Field
from shardax.models.tensors import HEADS, Tensor, concatenated, in_layers, linear, norm

LLAMA = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "mlp_bias": Field("mlp_bias", default=False),
    },
    groups=[Rotary()],
    architectures=shared.causal_lm("Llama"),
    tensors=shared.decoder(),
)

MISTRAL = Family(
    fields={**shared.GATED_DECODER, "num_key_value_heads": Field("num_kv_heads", default=8)},
    groups=[Rotary(max_positions=131_072), shared.Window(4096)],
    architectures=shared.causal_lm("Mistral"),
    tensors=shared.decoder(),
)

# As Mistral, but some layers may have no window.
MINISTRAL = Family(
    fields={**shared.GATED_DECODER, "num_key_value_heads": Field("num_kv_heads", default=8)},
    groups=[
        Rotary(max_positions=131_072),
        shared.WindowsByLayer(4096, lambda layer: True, needs_size=True),
    ],
    architectures=shared.causal_lm("Ministral"),
    tensors=shared.decoder(),
)

MIXTRAL = Family(
    fields={
        **shared.GATED_DECODER,
        "intermediate_size": Field("mlp_dim", "expert_dim"),
        "num_experts_per_tok": Field("experts_per_token", default=2),
        "num_key_value_heads": Field("num_kv_heads", default=8),
        "num_local_experts": Field("num_experts", default=8),
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
        "router_aux_loss_coef": Field("load_balance_weight", default=0.001),
    },
    groups=[Rotary(1e6, max_positions=131_072), shared.Window()],
    architectures=shared.causal_lm("Mixtral"),
    neutral={"router_jitter_noise": (0.0,)},
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
        "embd_pdrop": Field("embed_dropout", default=0.0),
        "resid_pdrop": Field("dropout", default=0.0),
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
    },
    groups=[Rotary(kinds=["default"], max_positions=4096, partial=True), shared.Window()],
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
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
    },
    fixed={"norm_placement": "post", "qk_norm": "all"},
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
        shared.WindowsByLayer(4096, lambda layer: (layer + 1) % 4 > 0, needs_size=True),
    ],
    architectures=shared.causal_lm("Olmo3"),
    tensors=OLMO2.tensors,
)

# Norms of queries and keys are over all heads together, as in OLMo 2; the others as in Llama.
OLMOE = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "intermediate_size": Field("mlp_dim", "expert_dim"),
        "norm_topk_prob": Field("normalise_experts", default=False),
        "num_experts": Field("num_experts", default=64),
        "num_experts_per_tok": Field("experts_per_token", default=8),
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
        "router_aux_loss_coef": Field("load_balance_weight", default=0.01),
    },
    fixed={"qk_norm": "all"},
    groups=[Rotary(max_positions=4096)],
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
