# SPDX-License-Identifier: Apache-2.0
"""GLM of the fourth generation, and its experts.

Sources: ``models/{glm4,glm4_moe}`` of transformers 5, ``configuration_*.py`` for fields and
defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import PUBLISHED, Family, Field, Taker
from shardax.models.tensors import Tensor, in_layers, norm

# Half of a head is turned, its real and imaginary parts alternating; gate and up are one tensor.
GLM4 = Family(
    fields={**shared.GATED_DECODER, "attention_bias": Field("attention.qkv_bias")},
    fixed={"norms.placement": "sandwich"},
    groups=[Rotary(fraction=0.5, interleaved=True)],
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


class NormedExpertLayers(shared.ExpertLayers):
    """The layers with experts, and whether queries and keys have norms."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        has_norms = take("use_qk_norm", PUBLISHED, kind=kinds.BOOLEAN)
        return {**super().to(take), "attention.qk_norm": "head" if has_norms else None}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {**super().back(config), "use_qk_norm": config.attention.qk_norm is not None}


# The layers of Llama, half of a head turned; experts are chosen by sigmoids.
GLM4_MOE = Family(
    fields={
        **shared.GATED_DECODER,
        "attention_bias": Field("attention.qkv_bias"),
        "n_group": Field("experts.num_groups"),
        "n_routed_experts": Field("experts.num_experts", back=shared.experts_or_none),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts_per_tok": Field("experts.top_k"),
        "routed_scaling_factor": Field("experts.scale"),
        "topk_group": Field("experts.top_groups"),
    },
    fixed={"experts.scores": "sigmoid"},
    groups=[Rotary(fraction=0.5), NormedExpertLayers()],
    architectures=shared.causal_lm("Glm4Moe"),
    # Of layers that predict further tokens, which transformers does not read either.
    harmless=("num_mtp_layers", "num_nextn_predict_layers"),
    tensors=shared.decoder(
        shared.gated_mlp(),  # of the layers without experts
        shared.swiglu_experts(),
        (Tensor("mlp.gate.e_score_correction_bias", "mlp.choice_bias", ["expert"]),),
        shared.shared_expert("mlp.shared_experts"),
    ),
)
