# SPDX-License-Identifier: Apache-2.0
"""Gemma, of three generations.

Their norms add 1 to the scale, and the embedding is multiplied by the root of its size. Since the
second, norms stand on both sides of attention and MLP, and layers take turns with a window; the
third has another rotary embedding in those with one.

Sources: ``models/{gemma,gemma2,gemma3}`` of transformers 5, ``configuration_*.py`` for fields and
defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import Rotary, RotaryByLayerType
from shardax.models.family import PUBLISHED, Family, Field, FieldGroup, Taker
from shardax.models.kinds import PretrainedError, brief
from shardax.models.tensors import Tensors, norm

# --- what the three share -------------------------------------------------------------------------

_FIELDS = {
    **shared.DECODER,
    **shared.ATTENTION_BIAS,
    "head_dim": Field("attention.head_dim"),
    "rms_norm_eps": Field("norms.epsilon"),
}


class ScaledEmbedding(FieldGroup):
    """The factor of the embedding, the root of its size."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        return {"embedding.scale": take("hidden_size", kind=kinds.SIZE) ** 0.5}


class Activation(FieldGroup):
    """The activation, which older files have by another name too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alias = "hidden_act" if name == "hidden_activation" else "hidden_activation"
        self.older = (self.alias,)

    def to(self, take: Taker) -> Mapping[str, Any]:
        activation = take(self.name, "gelu_pytorch_tanh", kind=kinds.TEXT.or_null)
        alias = take(self.alias, None, kind=kinds.TEXT.or_null)
        names = {function for function in (activation, alias) if function is not None}
        # The first files say "gelu" and mean its approximation, as transformers reads them.
        names = {"gelu_pytorch_tanh" if function == "gelu" else function for function in names}
        functions = {kinds.ACTIVATION_NAMES.get(function) for function in names}
        if len(functions) != 1 or None in functions:
            raise PretrainedError(
                f"{self.name}={brief(activation)} beside {brief(alias)} is not supported: write "
                f"{self.name}='gelu_pytorch_tanh' alone"
            )
        return {"activation": functions.pop()}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {self.name: kinds.published_activation(config.activation)}


class QueryScale(FieldGroup):
    """The scale of attention's scores, by the square of its inverse."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        scalar = take("query_pre_attn_scalar", PUBLISHED, kind=kinds.NUMBER.positive)
        return {"attention.scale": scalar**-0.5}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        scale = config.attention.scale or config.attention.head_dim**-0.5
        scalar = scale**-2
        whole = max(round(scalar), 1)
        return {"query_pre_attn_scalar": whole if whole**-0.5 == scale else scalar}


def _sandwich_norms() -> Tensors:
    return (
        *norm("input_layernorm", to="attn_norm"),
        *norm("post_attention_layernorm", to="attn_post_norm"),
        *norm("pre_feedforward_layernorm", to="mlp_norm"),
        *norm("post_feedforward_layernorm", to="mlp_post_norm"),
    )


# --- the first ------------------------------------------------------------------------------------

GEMMA = Family(
    fields=_FIELDS,
    fixed={"norms.kind": "rms_offset"},
    groups=[Rotary(), ScaledEmbedding(), Activation("hidden_act")],
    architectures=shared.causal_lm("Gemma"),
    tensors=shared.decoder(),
)

# --- the second -----------------------------------------------------------------------------------

GEMMA2 = Family(
    fields={
        **_FIELDS,
        "attn_logit_softcapping": Field("attention.softcap"),
        "final_logit_softcapping": Field("output.softcap"),
    },
    fixed={"norms.kind": "rms_offset", "norms.placement": "sandwich"},
    groups=[
        Rotary(),
        ScaledEmbedding(),
        Activation("hidden_activation"),
        QueryScale(),
        shared.WindowsByLayer(lambda layer: layer % 2 == 0),
    ],
    architectures=shared.causal_lm("Gemma2"),
    harmless=("cache_implementation",),
    tensors=shared.decoder(norms=_sandwich_norms()),
)

# --- the third ------------------------------------------------------------------------------------


class AlternatingWindows(FieldGroup):
    """A window of all layers but each sixth, or another number."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        period = take("sliding_window_pattern", None, kind=kinds.SIZE.or_null) or 6
        newer_period = take("_sliding_window_pattern", None, kind=kinds.SIZE.or_null)
        windows = shared.read_windows(take, lambda layer: (layer + 1) % period > 0)
        fits = take("layer_types", None) is not None or newer_period in (None, period)
        limits = f" without layer_types{kinds.UNNOTICED}: write sliding_window_pattern"
        kinds.check_supported("_sliding_window_pattern", newer_period, fits, limits)
        return windows

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return shared.window_fields(config)


GEMMA3_TEXT = Family(
    fields={
        **_FIELDS,
        # transformers knows a soft cap of attention here, and leaves it out of the computation.
        "final_logit_softcapping": Field("output.softcap"),
    },
    fixed={"norms.kind": "rms_offset", "norms.placement": "sandwich", "attention.qk_norm": "head"},
    groups=[
        RotaryByLayerType(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        ScaledEmbedding(),
        Activation("hidden_activation"),
        QueryScale(),
        AlternatingWindows(),
    ],
    architectures={"Gemma3ForCausalLM": {}, "Gemma3TextModel": {"head": None, "output.tied": True}},
    harmless=("cache_implementation",),
    tensors=shared.decoder(norms=_sandwich_norms()),
)
