# SPDX-License-Identifier: Apache-2.0
"""Decoders with LayerNorms and a plain MLP, and gpt-oss with experts.

Sources: ``models/{gpt2,gpt_neox,starcoder2,phi,gpt_oss}`` of transformers 5, ``configuration_*.py``
for fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary, read_rope
from shardax.models.family import PUBLISHED, REQUIRED, Family, Field, FieldGroup, Taker
from shardax.models.quantized import mxfp4
from shardax.models.tensors import (
    HEADS,
    AxisLike,
    Tensor,
    Tensors,
    conv1d,
    embedding,
    in_layers,
    linear,
    norm,
    part,
)

# --- GPT-2 ----------------------------------------------------------------------------------------


class InnerSize(FieldGroup):
    """The size of the MLP, by default four times the embedding's."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        inner = take("n_inner", None, kind=kinds.INTEGER.or_null)
        size = take("n_embd", kind=kinds.SIZE)
        return {"mlp.dim": 4 * size if inner is None else inner}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {} if config.mlp is None else {"n_inner": config.mlp.dim}


def _third(index: int) -> AxisLike:
    """Returns the axis of queries, keys or values, in thirds."""
    return (part(index, of=3), *HEADS)


GPT2 = Family(
    fields={
        "activation_function": Field("activation"),
        "attn_pdrop": Field("attention.dropout"),
        "embd_pdrop": Field("embedding.dropout"),
        "layer_norm_epsilon": Field("norms.epsilon"),
        "n_embd": Field("embed_dim", default=REQUIRED),
        "n_head": Field("attention.num_heads", default=REQUIRED),
        "n_layer": Field("num_layers", default=REQUIRED),
        "n_positions": Field("positions.max_positions"),
        "resid_pdrop": Field("dropout"),
        "scale_attn_weights": Field(
            "attention.scale",
            kind=kinds.BOOLEAN,
            to=lambda is_scaled: None if is_scaled else 1.0,
            back=lambda config: config.attention.scale is None,
        ),
        "tie_word_embeddings": Field("output.tied"),
        "vocab_size": Field("vocab_size", default=REQUIRED),
    },
    fixed={**shared.ALL_BIASES, "norms.kind": "layer", "mlp.gated": False, "attention.rope": None},
    groups=[InnerSize()],
    architectures={"GPT2LMHeadModel": {}, "GPT2Model": {"head": None, "output.tied": True}},
    harmless=(
        *("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"),
        *("summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    prefix="transformer.",
    buffers=("attn.bias", "attn.masked_bias"),
    tensors=(
        *shared.ends("transformer.", tokens="wte", final_norm="ln_f"),
        *embedding("transformer.wpe", to="positions", axis="position"),
        *in_layers(
            "transformer.h",
            shared.pre_norms(attn="ln_1", mlp="ln_2"),
            conv1d("attn.c_attn", to="attn.q", inputs="embed", outputs=_third(0)),
            conv1d("attn.c_attn", to="attn.k", inputs="embed", outputs=_third(1)),
            conv1d("attn.c_attn", to="attn.v", inputs="embed", outputs=_third(2)),
            conv1d("attn.c_proj", to="attn.out", inputs=HEADS, outputs="embed"),
            conv1d("mlp.c_fc", to="mlp.up", inputs="embed", outputs="mlp"),
            conv1d("mlp.c_proj", to="mlp.down", inputs="mlp", outputs="embed"),
        ),
    ),
)

# --- GPT-NeoX -------------------------------------------------------------------------------------


class NeoxRotary(Rotary):
    """The rotary embedding, with older names of its base and fraction."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        base = take("rotary_emb_base", 10_000.0, kind=kinds.NUMBER)
        fraction = take("rotary_pct", self.fraction, kind=kinds.NUMBER)
        ignored = {
            name: take(name, None, kind=kinds.NUMBER.or_null)
            for name in ("rope_theta", "partial_rotary_factor")
        }

        def take_noticed(name: str, *default: Any, **options: Any) -> Any:
            return None if name in ignored else take(name, *default, **options)

        rope = read_rope(take_noticed, base=base, fraction=fraction)
        for name, value in zip(ignored, (rope.base, rope.fraction), strict=True):
            remedy = f": write rope_parameters={{{name!r}: {ignored[name]!r}}}"
            fits = ignored[name] in (None, value)
            kinds.check_supported(name, ignored[name], fits, kinds.UNNOTICED + remedy)
        return {"attention.rope": rope}


def _interleaved(index: int) -> AxisLike:
    """Returns the axis of queries, keys or values, in thirds by head."""
    return ("heads", part(index, of=3), "head_dim")


def _fused_attention() -> Tensors:
    name = "attention.query_key_value"
    return (
        *linear(name, to="attn.q", inputs="embed", outputs=_interleaved(0)),
        *linear(name, to="attn.k", inputs="embed", outputs=_interleaved(1)),
        *linear(name, to="attn.v", inputs="embed", outputs=_interleaved(2)),
        *linear("attention.dense", to="attn.out", inputs=HEADS, outputs="embed"),
    )


GPT_NEOX = Family(
    fields={
        **shared.SIZES,
        **shared.ATTENTION_BIAS,
        "attention_dropout": Field("attention.dropout"),
        "hidden_act": Field("activation"),
        "hidden_dropout": Field("dropout", "embedding.dropout"),
        "layer_norm_eps": Field("norms.epsilon"),
        "tie_word_embeddings": Field("output.tied"),
        "use_parallel_residual": Field("parallel", kind=kinds.BOOLEAN),
    },
    fixed={"mlp.bias": True, "norms.kind": "layer", "mlp.gated": False},
    groups=[NeoxRotary(fraction=0.25)],
    architectures=shared.causal_lm("GPTNeoX"),
    prefix="gpt_neox.",
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    tensors=(
        *shared.ends(
            "gpt_neox.", tokens="embed_in", final_norm="final_layer_norm", head="embed_out"
        ),
        *in_layers(
            "gpt_neox.layers",
            shared.pre_norms(),
            _fused_attention(),
            shared.mlp(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        ),
    ),
)

# --- StarCoder2 -----------------------------------------------------------------------------------

STARCODER2 = Family(
    fields={
        **shared.DECODER,
        "embedding_dropout": Field("embedding.dropout"),
        "hidden_act": Field("activation"),
        "norm_epsilon": Field("norms.epsilon"),
        "residual_dropout": Field("dropout"),
        "use_bias": Field("attention.qkv_bias", "attention.out_bias", "mlp.bias"),
    },
    fixed={"norms.kind": "layer", "mlp.gated": False},
    groups=[Rotary(), shared.Window()],
    architectures=shared.causal_lm("Starcoder2"),
    neutral={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            shared.attention(),
            shared.mlp(up="mlp.c_fc", down="mlp.c_proj"),
        ),
    ),
)

# --- Phi ------------------------------------------------------------------------------------------

# Attention and MLP read the same norm; half of a head is turned by its position.
PHI = Family(
    fields={
        **shared.DECODER,
        "embd_pdrop": Field("embedding.dropout"),
        "hidden_act": Field("activation"),
        "layer_norm_eps": Field("norms.epsilon"),
        "resid_pdrop": Field("dropout"),
    },
    fixed={
        **shared.ALL_BIASES,
        "norms.kind": "layer",
        "mlp.gated": False,
        "parallel": True,
        "norms.shared": True,
        "output.bias": True,
    },
    groups=[Rotary(fraction=0.5)],
    architectures=shared.causal_lm("Phi"),
    neutral={"qk_layernorm": (False,)},
    tensors=(
        *shared.ends(final_norm="final_layernorm"),
        *in_layers(
            "model.layers",
            norm("input_layernorm", to="attn_norm"),
            shared.attention(out="self_attn.dense"),
            shared.mlp(up="mlp.fc1", down="mlp.fc2"),
        ),
    ),
)

# --- gpt-oss --------------------------------------------------------------------------------------

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 4096}


class YarnRotary(Rotary):
    """The rotary embedding, by default YaRN."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        def take_table(name: str, *default: Any, **options: Any) -> Any:
            value = take(name, *default, **options)
            return _YARN if name == "rope_parameters" and value is None else value

        return super().to(take_table)


# The factor in the sigmoid of ``quick_gelu``.
_QUICK = 1.702


class ClippedExperts(FieldGroup):
    """The bound and the factor of the experts' units, and how their kernels are packed."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        mxfp4.check_packing(take(mxfp4.PACKING, None, kind=kinds.TABLE.or_null))
        factor = take("swiglu_alpha", _QUICK, kind=kinds.NUMBER)
        return {
            "experts.limit": take("swiglu_limit", PUBLISHED, kind=kinds.NUMBER.positive),
            "experts.gate_factor": None if factor == _QUICK else float(factor),
        }

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        experts = config.experts
        if experts is None or experts.limit is None:
            return {}
        factor = _QUICK if experts.gate_factor is None else experts.gate_factor
        return {"swiglu_limit": experts.limit, "swiglu_alpha": factor}


def _stacked_experts(name: str, *, turns: int = 1) -> tuple[Tensor, ...]:
    """Describes ``down`` of all experts, or ``gate`` and ``up`` by turns."""
    tensors = []
    for index, to in enumerate(("down",) if turns == 1 else ("gate", "up")):
        inputs, outputs = ("mlp", "embed") if turns == 1 else ("embed", "mlp")
        made = (outputs, part(index, of=turns))
        tensors += [
            Tensor(f"mlp.experts.{name}", f"mlp.{to}", ("expert", inputs, made)),
            Tensor(f"mlp.experts.{name}_bias", f"mlp.{to}_bias", ("expert", made)),
        ]
    return tuple(tensors)


# Half of the layers have a window.
GPT_OSS = Family(
    fields={
        **shared.without(shared.GATED_DECODER, "hidden_act"),
        "attention_bias": Field("attention.qkv_bias", "attention.out_bias"),
        "intermediate_size": Field("mlp.dim", "experts.dim", default=REQUIRED),
        "num_experts_per_tok": Field("experts.top_k"),
        "num_local_experts": Field("experts.num_experts"),
        "router_aux_loss_coef": Field("experts.load_balance_weight"),
    },
    fixed={
        "activation": "quick_gelu",
        "attention.sinks": True,
        "experts.bias": True,
        "experts.normalise": True,
    },
    groups=[
        YarnRotary(150_000.0),
        shared.WindowsByLayer(lambda layer: layer % 2 == 0, needs_size=True),
        ClippedExperts(),
    ],
    architectures=shared.causal_lm("GptOss"),
    neutral={"hidden_act": ("silu",)},
    # Older names, which transformers does not read.
    harmless=("experts_per_token", "initial_context_length"),
    tensors=(
        *shared.ends(),
        *in_layers(
            "model.layers",
            shared.pre_norms(),
            shared.attention(),
            (Tensor("self_attn.sinks", "attn.sinks", ("heads",)),),
            linear("mlp.router", to="mlp.router", inputs="embed", outputs="expert"),
            _stacked_experts("gate_up_proj", turns=2),
            _stacked_experts("down_proj"),
        ),
    ),
)
