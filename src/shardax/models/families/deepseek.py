# SPDX-License-Identifier: Apache-2.0
"""DeepSeek of the second and third version: latent attention, experts in groups.

Sources: ``models/{deepseek_v2,deepseek_v3}`` of transformers 5, ``configuration_*.py`` for fields
and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import PUBLISHED, REQUIRED, Family, Field, FieldGroup, Taker
from shardax.models.kinds import PretrainedError, brief
from shardax.models.tensors import HEADS, Tensor, in_layers, linear
from shardax.nn.rope import Rope


class LatentHeads(Rotary):
    """Sizes of heads, and the rotary embedding of a part of each."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        plain, rotated = (
            take(name, default, kind=kinds.SIZE)
            for name, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64))
        )
        heads = take("num_attention_heads", kind=kinds.SIZE)
        for name, value in (
            ("head_dim", rotated),
            ("qk_head_dim", plain + rotated),
            ("num_key_value_heads", heads),
        ):
            stated = take(name, None, kind=kinds.SIZE.or_null)
            kinds.check_supported(name, stated, stated in (None, value), f", only {value} here")
        tables: list[dict[str, Any]] = []

        def take_table(name: str, *default: Any, **options: Any) -> Any:
            value = take(name, *default, **options)
            if not value or not isinstance(value, dict):
                return value
            tables.append({n: x for n, x in value.items() if n.startswith("mscale") and x})
            return {n: x for n, x in value.items() if not n.startswith("mscale")}

        rope = super().to(take_table)["attention.rope"]
        interleaved = self.interleaved or bool(
            take("rope_interleave", PUBLISHED, kind=kinds.BOOLEAN.or_null)
        )
        fields = {"attention.head_dim": plain + rotated, "attention.num_kv_heads": heads}
        fields["attention.latent.rope_dim"] = rotated
        scales = tables[0] if tables else {}  # rope_scaling goes before rope_parameters
        return fields | _scaled(replace(rope, interleaved=interleaved), plain + rotated, scales)

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        attention, latent = config.attention, config.attention.latent
        fields = dict(super().back(config))
        if attention.rope is not None:
            scale = _scale_field(attention.rope, attention.head_dim, attention.scale)
            if scale is not None:
                fields["rope_parameters"]["mscale_all_dim"] = scale
            if not self.interleaved:
                fields["rope_interleave"] = attention.rope.interleaved

        if latent is not None:
            fields["qk_nope_head_dim"] = attention.head_dim - latent.rope_dim
            fields["qk_rope_head_dim"] = latent.rope_dim
        return fields


def _is_latent(config: TransformerConfig) -> bool:
    return config.attention.latent is not None


def _scale_field(rope: Rope, head_dim: int, scale: float | None) -> float | None:
    """Returns the ``mscale_all_dim`` that gives the scale of scores, None if there is none."""
    plain = head_dim**-0.5
    if scale is None or scale <= plain or rope.kind != "yarn" or rope.factor <= 1:
        return None

    def scale_of(field: float) -> float:
        factor = 0.1 * field * math.log(rope.factor) + 1
        return plain * factor * factor

    # Files have short decimals, and the root alone is often one bit beside theirs.
    root = (math.sqrt(scale / plain) - 1) / (0.1 * math.log(rope.factor))
    candidates = [round(root, digits) for digits in range(1, 15)]
    exact = (field for field in candidates if field > 0 and scale_of(field) == scale)
    return next(exact, root)


def _scaled(rope: Any, head_dim: int, scales: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rotary embedding and the scale of scores."""
    wrong = [f"{n}={brief(x)}" for n, x in scales.items() if kinds.NUMBER.positive.problem(n, x)]
    unknown = scales.keys() - {"mscale", "mscale_all_dim"}
    if wrong or unknown or (scales and rope.kind != "yarn"):
        listed = ", ".join([*wrong, *unknown]) or ", ".join(scales)
        raise PretrainedError(f"rope_type={rope.kind!r} with {listed} is not supported")

    every = scales.get("mscale_all_dim")
    if every is None:
        return {"attention.rope": rope}
    both, one = (
        0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
        for scale in (every, scales.get("mscale", 0))
    )

    # The rotated part has a factor of its own, beside that of all scores.
    if rope.attention_factor is None and "mscale" in scales:
        rope = replace(rope, attention_factor=one / both)
    return {"attention.rope": rope, "attention.scale": head_dim**-0.5 * both * both}


class ExpertGroups(FieldGroup):
    """Groups of experts, if ``topk_method`` says that they are chosen by groups."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        method = take("topk_method", PUBLISHED, kind=kinds.TEXT)
        groups, chosen = (
            take(n, None, kind=kinds.INTEGER.or_null) for n in ("n_group", "topk_group")
        )
        if method == "greedy":
            return {}
        fits = method == "group_limited_greedy" and None not in (groups, chosen)
        limits = ", only 'greedy', or 'group_limited_greedy' with both"
        stated = f" with n_group={groups} and topk_group={chosen}"
        kinds.check_supported("topk_method", method, fits, stated + limits)
        return {"experts.num_groups": groups, "experts.top_groups": chosen}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        experts = config.experts
        if experts is None:
            return {}
        method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
        groups = {"n_group": experts.num_groups, "topk_group": experts.top_groups}
        return {"topk_method": method, **groups}


_LATENT = (
    *linear("self_attn.q_proj", to="attn.q", inputs="embed", outputs=HEADS),
    *linear("self_attn.q_a_proj", to="attn.q_down", inputs="embed", outputs="latent"),
    Tensor("self_attn.q_a_layernorm.weight", "attn.q_latent_norm.scale", ["latent"]),
    *linear("self_attn.q_b_proj", to="attn.q_up", inputs="latent", outputs=HEADS),
    *linear("self_attn.kv_a_proj_with_mqa", to="attn.kv_down", inputs="embed", outputs="latent"),
    Tensor("self_attn.kv_a_layernorm.weight", "attn.latent_norm.scale", ["latent"]),
    *linear("self_attn.kv_b_proj", to="attn.kv_up", inputs="latent", outputs=HEADS),
    *linear("self_attn.o_proj", to="attn.out", inputs=HEADS, outputs="embed"),
)
_FIELDS = {
    **shared.without(shared.GATED_DECODER, "head_dim", "num_key_value_heads"),
    **shared.ATTENTION_BIAS,
    "kv_lora_rank": Field("attention.latent.dim"),
    "q_lora_rank": Field("attention.latent.query_dim"),
    "v_head_dim": Field("attention.latent.value_dim"),
}


def _tensors(*more: Tensor) -> tuple[Tensor, ...]:
    mlp = (shared.gated_mlp(), shared.swiglu_experts(), more)
    mlp = (*mlp, shared.shared_expert("mlp.shared_experts"))
    return (*shared.ends(), *in_layers("model.layers", shared.pre_norms(), _LATENT, *mlp))


# Experts are chosen by sigmoids.
DEEPSEEK_V3 = Family(
    fields={
        **_FIELDS,
        "n_group": Field("experts.num_groups"),
        "n_routed_experts": Field("experts.num_experts", back=shared.experts_or_none),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts_per_tok": Field("experts.top_k"),
        "routed_scaling_factor": Field("experts.scale"),
        "topk_group": Field("experts.top_groups"),
    },
    fixed={"experts.scores": "sigmoid"},
    groups=[LatentHeads(), shared.ExpertLayers()],
    architectures=shared.causal_lm("DeepseekV3"),
    has_parts=_is_latent,
    neutral={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    # Of training, and of layers that predict further tokens.
    harmless=("aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "seq_aux"),
    tensors=_tensors(Tensor("mlp.gate.e_score_correction_bias", "mlp.choice_bias", ["expert"])),
)

# Experts are chosen by a softmax, and their weights are not normalised.
DEEPSEEK_V2 = Family(
    fields={
        **_FIELDS,
        "mlp_bias": Field("mlp.bias"),
        "n_routed_experts": Field("experts.num_experts", back=shared.experts_or_none),
        "num_experts_per_tok": Field("experts.top_k", default=REQUIRED),
        "routed_scaling_factor": Field("experts.scale"),
    },
    fixed={"experts.scores": "grouped_softmax", "experts.normalise": False},
    groups=[LatentHeads(interleaved=True), shared.ExpertLayers(), ExpertGroups()],
    architectures=shared.causal_lm("DeepseekV2"),
    has_parts=_is_latent,
    neutral={"moe_layer_freq": (1,), "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
    harmless=("aux_loss_alpha", "ep_size", "seq_aux"),
    tensors=_tensors(),
)
