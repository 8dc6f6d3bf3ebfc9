# SPDX-License-Identifier: Apache-2.0
"""Decoders with recurrent layers: LFM2.

Sources: ``models/lfm2`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models.families import shared
from shardax.models.families.rope import Rotary
from shardax.models.family import (
    BOOLEAN,
    INTEGERS,
    NUMBER,
    SIZE,
    TEXTS,
    ConfigEdit,
    Family,
    Field,
    FieldGroup,
    PretrainedError,
    Taker,
    brief,
)
from shardax.models.recurrent import ShortConvolutionConfig
from shardax.models.tensors import Tensor, in_layers, linear, part


class ConvolutionLayers(FieldGroup):
    """Short convolutions, and the layers that have them."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_hidden_layers", kind=SIZE)
        types = take("layer_types", None, kind=TEXTS.or_null)
        indices = take("full_attn_idxs", None, kind=INTEGERS.or_null)
        size = take("conv_L_cache", 3, kind=SIZE)
        use_bias = take("conv_bias", False, kind=BOOLEAN)
        if types is None:
            chosen = [indices is not None and index not in indices for index in range(count)]
        elif set(types) <= {"conv", "full_attention"} and len(types) == count:
            chosen = [kind == "conv" for kind in types]
        else:
            raise PretrainedError(
                f"layer_types={brief(types)} is not supported for {count} layers, only "
                f"'conv' or 'full_attention' for each"
            )
        if not any(chosen):
            return {}
        recurrent = ShortConvolutionConfig(size, use_bias)
        return {"recurrent": recurrent, "recurrent_layers": None if all(chosen) else tuple(chosen)}

    def write(self, edit: ConfigEdit) -> None:
        config, content = edit.config, edit.content
        if edit.changes("recurrent") and isinstance(config.recurrent, ShortConvolutionConfig):
            content["conv_L_cache"] = config.recurrent.size
            content["conv_bias"] = config.recurrent.use_bias
        if edit.changes("recurrent", "recurrent_layers", "num_layers"):
            content.pop("full_attn_idxs", None)
            content["layer_types"] = [
                "conv" if config.is_recurrent(index) else "full_attention"
                for index in range(config.num_layers)
            ]


class AdjustedMLP(FieldGroup):
    """The size of the MLP, two thirds of a field rounded up."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        size = take("intermediate_size", kind=SIZE)
        size = take("block_ff_dim", size, kind=SIZE)
        is_adjusted = take("block_auto_adjust_ff_dim", True, kind=BOOLEAN)
        factor = take("block_ffn_dim_multiplier", 1.0, kind=NUMBER.positive.or_null)
        multiple = take("block_multiple_of", 256, kind=SIZE)
        if is_adjusted:
            size = int(2 * size / 3)
            if factor is not None:
                size = -(-int(factor * size) // multiple) * multiple
        return {"mlp_dim": size}

    def write(self, edit: ConfigEdit) -> None:
        if edit.changes("mlp_dim"):
            edit.content.pop("block_ff_dim", None)
            edit.content["intermediate_size"] = edit.config.mlp_dim
            edit.content["block_auto_adjust_ff_dim"] = False


class TiedHead(FieldGroup):
    """The older name of ``tie_word_embeddings``, which goes before it."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        tied = take("tie_embedding", None, kind=BOOLEAN.or_null)
        return {} if tied is None else {"tied_head": tied}

    def write(self, edit: ConfigEdit) -> None:
        if edit.changes("tied_head"):
            edit.content.pop("tie_embedding", None)


_SIZES = {name: field for name, field in shared.DECODER.items() if name != "intermediate_size"}
del _SIZES["attention_dropout"]  # which its attention does not have

LFM2 = Family(
    fields={
        **_SIZES,
        "head_dim": Field("head_dim", default=None),
        "norm_eps": Field("norm_epsilon", default=1e-5),
        "num_key_value_heads": Field("num_kv_heads", default=8),
        "tie_word_embeddings": Field("tied_head", default=True),
    },
    fixed={"qk_norm": "head"},
    groups=[
        Rotary(base=1e6, max_positions=128_000),
        ConvolutionLayers(),
        AdjustedMLP(),
        TiedHead(),
    ],
    architectures=shared.causal_lm("Lfm2"),
    neutral={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
    harmless=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
        *("num_heads", "theta"),
    ),
    tensors=(
        *shared.ends(final_norm="embedding_norm"),
        *in_layers(
            "model.layers",
            shared.pre_norms("operator_norm", "ffn_norm"),
            shared.attention(out="self_attn.out_proj"),
            shared.head_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
            linear("conv.in_proj", to="mixer.into", inputs="embed", outputs=("gate", "mlp")),
            (
                Tensor(
                    "conv.conv.weight",
                    "mixer.kernel",
                    ("mlp", part(0, of=1), "time"),
                    ("time", "mlp"),
                ),
                Tensor("conv.conv.bias", "mixer.bias", ("mlp",)),
            ),
            linear("conv.out_proj", to="mixer.out", inputs="mlp", outputs="embed"),
            linear("feed_forward.w1", to="mlp.gate", inputs="embed", outputs="mlp"),
            linear("feed_forward.w3", to="mlp.up", inputs="embed", outputs="mlp"),
            linear("feed_forward.w2", to="mlp.down", inputs="mlp", outputs="embed"),
        ),
    ),
)
