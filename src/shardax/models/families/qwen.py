# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 3, and their experts.

Sources: ``models/{qwen2,qwen2_moe,qwen3,qwen3_moe}`` of transformers 5, ``configuration_*.py`` for
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
from shardax.models.tensors import linear


class SwitchedWindows(FieldGroup):
    """A window of some layers, if it is used."""

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        has_window = config.attention.window is not None
        return {"use_sliding_window": has_window, **shared.window_fields(config)}


class UpperWindows(SwitchedWindows):
    """A window of the layers from ``max_window_layers`` on, if it is used."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        first = take("max_window_layers", PUBLISHED, kind=kinds.INTEGER)
        is_used = take("use_sliding_window", PUBLISHED, kind=kinds.BOOLEAN.or_null)
        windows = shared.read_windows(take, lambda layer: layer >= first)
        return windows if is_used else {}


class LowerWindows(SwitchedWindows):
    """A window of each second layer before ``max_window_layers``, if it is used."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        last = take("max_window_layers", PUBLISHED, kind=kinds.INTEGER)
        is_used = take("use_sliding_window", PUBLISHED, kind=kinds.BOOLEAN.or_null)
        types = take("layer_types", None, kind=kinds.TEXTS.or_null)
        if is_used:
            take("sliding_window", PUBLISHED, kind=kinds.SIZE)
            return shared.read_windows(take, lambda i: i % 2 == 0 and i < last)
        take("sliding_window", PUBLISHED, kind=kinds.INTEGER.or_null)  # transformers writes 0
        fits = set(types or ()) <= {"full_attention"}
        kinds.check_supported("layer_types", types, fits, " without use_sliding_window=True")
        return {}


class SparseLayers(FieldGroup):
    """The number of experts, and the layers that have an MLP instead."""

    older = ("num_local_experts",)

    def to(self, take: Taker) -> Mapping[str, Any]:
        step = take("decoder_sparse_step", PUBLISHED, kind=kinds.SIZE)
        dense = take("mlp_only_layers", None, kind=kinds.INTEGERS.or_null) or ()
        count = take("num_hidden_layers", kind=kinds.SIZE)
        number = take("num_experts", PUBLISHED, kind=kinds.INTEGER.or_null)
        older_number = take("num_local_experts", None, kind=kinds.INTEGER.or_null)
        return {
            "experts.num_experts": number if older_number is None else older_number,
            "experts.dense_layers": tuple(i for i in range(count) if i in dense or (i + 1) % step),
        }

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        experts = config.experts
        return {
            "num_experts": 0 if experts is None else experts.num_experts,
            "mlp_only_layers": [] if experts is None else [*experts.dense_layers],
            "decoder_sparse_step": 1,
        }


QWEN2 = Family(
    fields={**shared.GATED_DECODER},
    fixed={"attention.qkv_bias": True},
    groups=[Rotary(), UpperWindows()],
    architectures=shared.causal_lm("Qwen2"),
    tensors=shared.decoder(),
)

# Beside the experts stands one for all tokens, with a gate.
QWEN2_MOE = Family(
    fields={
        **shared.GATED_DECODER,
        "moe_intermediate_size": Field("experts.dim"),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts_per_tok": Field("experts.top_k"),
        "qkv_bias": Field("attention.qkv_bias"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
        "shared_expert_intermediate_size": Field("experts.shared_dim"),
    },
    fixed={"experts.shared_gate": True},
    groups=[Rotary(), SparseLayers(), LowerWindows()],
    architectures=shared.causal_lm("Qwen2Moe"),
    tensors=shared.decoder(
        shared.gated_mlp(),  # of the layers without experts
        shared.swiglu_experts(),
        shared.shared_expert("mlp.shared_expert"),
        linear("mlp.shared_expert_gate", to="shared_gate", inputs="embed", outputs="one"),
    ),
)

QWEN3 = Family(
    fields={**shared.GATED_DECODER, **shared.ATTENTION_BIAS},
    fixed={"attention.qk_norm": "head"},
    groups=[Rotary(), UpperWindows()],
    architectures=shared.causal_lm("Qwen3"),
    tensors=shared.decoder(),
)

QWEN3_MOE = Family(
    fields={
        **shared.GATED_DECODER,
        **shared.ATTENTION_BIAS,
        "moe_intermediate_size": Field("experts.dim"),
        "norm_topk_prob": Field("experts.normalise"),
        "num_experts_per_tok": Field("experts.top_k"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
    },
    fixed={"attention.qk_norm": "head"},
    groups=[Rotary(), SparseLayers(), shared.Window("use_sliding_window")],
    architectures=shared.causal_lm("Qwen3Moe"),
    tensors=shared.decoder(
        shared.gated_mlp(),  # of the layers without experts
        shared.swiglu_experts(),
    ),
)
