# SPDX-License-Identifier: Apache-2.0
"""Llama and its closest relatives: Mistral, Mixtral, OLMo 2.

Sources: ``models/{llama,mistral,mixtral,olmo2}`` of transformers 5, ``configuration_*.py`` for
fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families.rope import Rotary
from shardax.models.families.shared import (
    ATTENTION_BIAS,
    GATED_DECODER,
    Window,
    attention,
    causal_lm,
    ends,
    experts,
    gated_mlp,
    head_norms,
    pre_norms,
)
from shardax.models.family import Family, Field
from shardax.models.tensors import HEADS, Tensor, in_layers, norm

LLAMA = Family(
    fields={**GATED_DECODER, **ATTENTION_BIAS, "mlp_bias": Field("mlp_bias", default=False)},
    groups=[Rotary()],
    architectures=causal_lm("Llama"),
    tensors=(
        *ends(),
        *in_layers("model.layers", pre_norms(), attention(), head_norms(), gated_mlp()),
    ),
)

MISTRAL = Family(
    fields={**GATED_DECODER, "num_key_value_heads": Field("num_kv_heads", default=8)},
    groups=[Rotary(max_positions=131_072), Window(4096)],
    architectures=causal_lm("Mistral"),
    tensors=(
        *ends(),
        *in_layers("model.layers", pre_norms(), attention(), head_norms(), gated_mlp()),
    ),
)

MIXTRAL = Family(
    fields={
        **GATED_DECODER,
        "intermediate_size": Field("mlp_dim", "expert_dim"),
        "num_experts_per_tok": Field("experts_per_token", default=2),
        "num_key_value_heads": Field("num_kv_heads", default=8),
        "num_local_experts": Field("num_experts", default=8),
        "rms_norm_eps": Field("norm_epsilon", default=1e-5),
        "router_aux_loss_coef": Field("load_balance_weight", default=0.001),
    },
    groups=[Rotary(1e6, max_positions=131_072), Window()],
    architectures=causal_lm("Mixtral"),
    neutral={"router_jitter_noise": (0.0,)},
    tensors=(
        *ends(),
        *in_layers(
            "model.layers",
            pre_norms(),
            attention(),
            head_norms(),
            experts(
                router="block_sparse_moe.gate.weight",
                gate="block_sparse_moe.experts.{expert}.w1.weight",
                up="block_sparse_moe.experts.{expert}.w3.weight",
                down="block_sparse_moe.experts.{expert}.w2.weight",
            ),
        ),
    ),
)

# Norms stand behind attention and MLP; those of queries and keys are over all heads together.
OLMO2 = Family(
    fields={**GATED_DECODER, **ATTENTION_BIAS, "rms_norm_eps": Field("norm_epsilon", default=1e-5)},
    fixed={"norm_placement": "post", "qk_norm": "all"},
    groups=[Rotary()],
    architectures=causal_lm("Olmo2"),
    tensors=(
        *ends(),
        *in_layers(
            "model.layers",
            norm("post_attention_layernorm", to="attn_post_norm"),
            norm("post_feedforward_layernorm", to="mlp_post_norm"),
            (
                Tensor("self_attn.q_norm.weight", "attn.query_norm.scale", [HEADS]),
                Tensor("self_attn.k_norm.weight", "attn.key_norm.scale", [HEADS]),
            ),
            attention(),
            gated_mlp(),
        ),
    ),
)
