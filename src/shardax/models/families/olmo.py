# SPDX-License-Identifier: Apache-2.0
"""OLMo after the second: OLMo 3 and the experts of OLMoE.

Sources: ``models/{olmo3,olmoe}`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families import llama, shared
from shardax.models.families.rope import Rotary, RotaryByLayerType
from shardax.models.family import Family, Field
from shardax.models.tensors import HEADS, Tensor, in_layers

# The layers of OLMo 2, all but each fourth with a window. An older file's ``rope_theta`` is of the
# layers without one: transformers takes the default for the others.
OLMO3 = Family(
    fields=llama.OLMO2.fields,
    fixed=llama.OLMO2.fixed,
    groups=[
        RotaryByLayerType(500_000.0, 500_000.0),
        shared.WindowsByLayer(4096, lambda layer: (layer + 1) % 4 > 0, needs_size=True),
    ],
    architectures=shared.causal_lm("Olmo3"),
    tensors=llama.OLMO2.tensors,
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
