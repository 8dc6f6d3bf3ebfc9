# SPDX-License-Identifier: Apache-2.0
"""GLM of the fourth generation.

Sources: ``models/glm4`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import Family, Field
from shardax.models.tensors import in_layers, norm

# Half of a head is turned, its real and imaginary parts alternating; gate and up are one tensor.
GLM4 = Family(
    fields={
        **shared.GATED_DECODER,
        "attention_bias": Field("qkv_bias", default=True),
        "head_dim": Field("head_dim", default=128),
        "num_key_value_heads": Field("num_kv_heads", default=2),
        "rms_norm_eps": Field("norm_epsilon", default=1.5625e-7),
    },
    fixed={"norm_placement": "sandwich"},
    groups=[Rotary(fraction=0.5, max_positions=131_072, interleaved=True)],
    architectures=shared.causal_lm("Glm4"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            norm("post_self_attn_layernorm", to="attn_post_norm"),
            norm("post_mlp_layernorm", to="mlp_post_norm"),
            shared.attention(),
            shared.fused_gated_mlp(),
        ),
    ),
)
