# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: T5, BART and Whisper.

Sources: ``models/{t5,bart,whisper}`` of transformers 5, ``configuration_*.py`` for fields and
defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.family import (
    PUBLISHED,
    EncoderDecoderFamily,
    Field,
    FieldGroup,
    HalfFamily,
    Taker,
)
from shardax.models.tensors import Tensor, Tensors, embedding, in_layers, linear, norm, part

# --- what they share ------------------------------------------------------------------------------


_START = {"decoder_start_token_id": Field("start_token", kind=kinds.INTEGER.or_null)}


def _halves(
    fixed: Mapping[str, Any],
    heads: Mapping[str, Mapping[str, Any]],
    encoder: Mapping[str, Any],
    decoder: Mapping[str, Any],
) -> dict[str, HalfFamily]:
    """Returns the halves of a family, by what they share and the fields and groups of each."""
    of_encoder = {**fixed, "causal": False, "head": None}
    of_decoder = {**fixed, "attention.cross_attention": True}
    headless = {name: {} for name in heads}
    return {
        "encoder": HalfFamily(tensors=(), fixed=of_encoder, architectures=headless, **encoder),
        "decoder": HalfFamily(tensors=(), fixed=of_decoder, architectures=heads, **decoder),
    }


def _half(name: str, tensors: Tensors) -> Tensors:
    """Returns the tensors of a half, by their paths in both."""
    return tuple(replace(tensor, to=f"{name}.{tensor.to}") for tensor in tensors)


def _cross(tensors: Tensors) -> Tensors:
    """Returns the tensors of cross-attention, of those of attention."""
    return tuple(replace(tensor, to=f"cross_{tensor.to}") for tensor in tensors)


def _copies(model: str, head: str) -> dict[str, str]:
    """Returns the names under which files repeat the embedding."""
    names = (head, f"{model}encoder.embed_tokens.weight", f"{model}decoder.embed_tokens.weight")
    return dict.fromkeys(names, f"{model}shared.weight")


def _shared_embedding(name: str) -> Tensors:
    """Describes the embedding of both halves."""
    parts = embedding(name, to="embed", axis="vocab")
    return (*_half("encoder", parts), *_half("decoder", parts))


# --- T5 -------------------------------------------------------------------------------------------


class Units(FieldGroup):
    """The activation of the MLP, and whether it is gated."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        name = take("feed_forward_proj", PUBLISHED, kind=kinds.TEXT)
        gate, _, activation = name.rpartition("-")
        kinds.check_supported("feed_forward_proj", name, gate in ("", "gated"))
        # These two go before the first one, if they are there.
        default = "gelu_new" if name == "gated-gelu" else activation
        activation = take("dense_act_fn", default, kind=kinds.TEXT)
        is_gated = take("is_gated_act", gate == "gated", kind=kinds.BOOLEAN)
        return {
            "mlp.gated": is_gated,
            "activation": kinds.known_activation("dense_act_fn", activation),
        }

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        is_gated = config.mlp is not None and config.mlp.gated
        name = kinds.published_activation(config.activation)
        return {
            "feed_forward_proj": f"gated-{name}" if is_gated else name,
            "dense_act_fn": name,
            "is_gated_act": is_gated,
        }


class DecoderLayers(FieldGroup):
    """The decoder's number of layers, by default the encoder's."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("num_decoder_layers", None, kind=kinds.SIZE.or_null)
        encoder_count = take("num_layers", PUBLISHED, kind=kinds.SIZE)
        return {"num_layers": encoder_count if count is None else count}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"num_decoder_layers": config.num_layers}


class TiedDecoderHead(FieldGroup):
    """Whether the head is tied, and whether its inputs are scaled."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        is_tied = take("tie_word_embeddings", True, kind=kinds.BOOLEAN.or_null) is not False
        is_scaled = take("scale_decoder_outputs", is_tied, kind=kinds.BOOLEAN)
        size = take("d_model", PUBLISHED, kind=kinds.SIZE)
        return {"output.tied": is_tied, "output.scale": size**-0.5 if is_scaled else None}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        is_scaled = config.output.scale is not None
        return {"tie_word_embeddings": config.output.tied, "scale_decoder_outputs": is_scaled}


class T5Family(EncoderDecoderFamily):
    """T5, of the first version and of 1.1."""

    def tensors_for(self, config: Any) -> Tensors:
        """Returns the tensors of gated units, or of plain ones."""
        others = (".wi.",) if config.decoder.mlp.gated else (".wi_0.", ".wi_1.")
        return tuple(t for t in self.tensors if not any(name in t.name for name in others))

    def as_stored(self, content: dict[str, Any], files: Any) -> dict[str, Any]:
        """Unties a head with a tensor of its own."""
        head = "lm_head.weight"
        embeddings = ("shared.weight", *(name for name in self.copies if name != head))
        embedding = next((name for name in embeddings if name in files.names), None)
        is_untied = content.get("tie_word_embeddings") is False
        if is_untied or embedding is None or head not in files.names:
            return content
        if files.equal(head, embedding):
            return content
        scaled = content.get("scale_decoder_outputs", True)
        return {**content, "tie_word_embeddings": False, "scale_decoder_outputs": scaled}


_FIELDS = {
    "vocab_size": Field("vocab_size"),
    "d_model": Field("embed_dim"),
    "d_kv": Field("attention.head_dim"),
    "d_ff": Field("mlp.dim"),
    "num_heads": Field("attention.num_heads"),
    "dropout_rate": Field("dropout", "embedding.dropout", "attention.dropout"),
    "layer_norm_epsilon": Field("norms.epsilon"),
    "relative_attention_num_buckets": Field("positions.relative_buckets"),
    "relative_attention_max_distance": Field("positions.farthest_distance"),
}
_ARCHITECTURES = {
    "T5ForConditionalGeneration": {},
    "T5WithLMHeadModel": {},  # its name of before 2020
    "T5Model": {"head": None},
}


def _t5_layers(stack: str, cross: Tensors, mlp: int) -> Tensors:
    """Describes the layers of a half, its distances and its last norm."""
    layer = f"layer.{mlp}.DenseReluDense"
    attn = "layer.0.SelfAttention"
    layers = in_layers(
        f"{stack}.block",
        shared.attention(*(f"{attn}.{name}" for name in "qkvo")),
        norm("layer.0.layer_norm", to="attn_norm"),
        cross,
        linear(f"{layer}.wi", to="mlp.up", inputs="embed", outputs="mlp"),
        linear(f"{layer}.wi_0", to="mlp.gate", inputs="embed", outputs="mlp"),
        linear(f"{layer}.wi_1", to="mlp.up", inputs="embed", outputs="mlp"),
        linear(f"{layer}.wo", to="mlp.down", inputs="mlp", outputs="embed"),
        norm(f"layer.{mlp}.layer_norm", to="mlp_norm"),
    )

    # The first layer holds the distances of all.
    distances = f"{stack}.block.0.{attn}.relative_attention_bias"
    return _half(
        stack,
        (
            Tensor(f"{distances}.weight", "distances.embedding", ("bucket", "heads")),
            *layers,
            *norm(f"{stack}.final_layer_norm", to="final_norm"),
        ),
    )


_READ_STATES = "layer.1.EncDecAttention"
T5 = T5Family(
    fields=_START,
    halves=_halves(
        {"attention.rope": None, "attention.scale": 1.0},
        _ARCHITECTURES,
        {"fields": {**_FIELDS, "num_layers": Field("num_layers")}, "groups": [Units()]},
        {"fields": _FIELDS, "groups": [Units(), DecoderLayers(), TiedDecoderHead()]},
    ),
    architectures=_ARCHITECTURES,
    neutral={"is_encoder_decoder": (True,)},
    harmless=("initializer_factor", "n_positions"),
    prefix="",
    buffers=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    copies=_copies("", "lm_head.weight"),
    tensors=(
        *_shared_embedding("shared"),
        *_t5_layers("encoder", (), mlp=1),
        *_t5_layers(
            "decoder",
            (
                *_cross(shared.attention(*(f"{_READ_STATES}.{name}" for name in "qkvo"))),
                *norm("layer.1.layer_norm", to="cross_norm"),
            ),
            mlp=2,
        ),
        *_half("decoder", linear("lm_head", to="head", inputs="embed", outputs="vocab")),
    ),
)

# --- BART -----------------------------------------------------------------------------------------


class RootScale(FieldGroup):
    """Whether the embedding is multiplied by the root of its size."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        is_scaled = take("scale_embedding", PUBLISHED, kind=kinds.BOOLEAN.or_null)
        return {"embedding.scale": take("d_model", kind=kinds.SIZE) ** 0.5 if is_scaled else None}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"scale_embedding": config.embedding.scale is not None}


class EncoderLayers(FieldGroup):
    """The number of layers of the encoder, which files may have twice."""

    older = ("num_hidden_layers",)

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("encoder_layers", kind=kinds.SIZE)
        again = take("num_hidden_layers", count, kind=kinds.SIZE)
        beside = f" beside encoder_layers={count}"
        kinds.check_supported("num_hidden_layers", again, again == count, beside)
        return {}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"encoder_layers": config.num_layers}


def _half_fields(half: str) -> dict[str, Field]:
    """Returns the fields of a half."""
    return {
        "d_model": Field("embed_dim"),
        f"{half}_layers": Field("num_layers"),
        f"{half}_attention_heads": Field("attention.num_heads"),
        f"{half}_ffn_dim": Field("mlp.dim"),
        "activation_function": Field("activation"),
        "attention_dropout": Field("attention.dropout"),
        "dropout": Field("dropout", "embedding.dropout"),
    }


def _layers(half: str, norms: Mapping[str, str]) -> Tensors:
    """Describes the layers of a half, by the places of their norms."""
    names = [f"encoder_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    cross = _cross(shared.attention(*names)) if half == "decoder" else ()
    layers = in_layers(
        f"model.{half}.layers",
        shared.attention(out="self_attn.out_proj"),
        cross,
        shared.mlp(up="fc1", down="fc2"),
        *(norm(name, to=place) for name, place in norms.items()),
    )
    return _half(half, layers)


_BIASED = {
    **shared.ALL_BIASES,
    "norms.kind": "layer",
    "norms.epsilon": 1e-5,
    "mlp.gated": False,
    "attention.rope": None,
}
_ROWS = 2  # before those of positions, which nothing reads
_BART = {**_BIASED, "norms.placement": "after", "embedding.norm": True, "positions.offset": _ROWS}
_BART_FIELDS = {
    "vocab_size": Field("vocab_size"),
    "max_position_embeddings": Field(
        "positions.max_positions",
        kind=kinds.SIZE,
        to=lambda count: count + _ROWS,
        back=lambda config: config.positions.max_positions - _ROWS,
    ),
}
_BART_HEADS = {
    "BartForConditionalGeneration": {"output.bias": True, "output.tied": True},
    "BartModel": {"head": None},
}
_AFTER = {"self_attn_layer_norm": "attn_post_norm", "final_layer_norm": "mlp_post_norm"}


def _bart_embeddings(half: str) -> Tensors:
    """Describes positions and norm of the embedding of a half."""
    positions = embedding(f"model.{half}.embed_positions", to="positions", axis="position")
    return _half(half, (*positions, *norm(f"model.{half}.layernorm_embedding", to="embed_norm")))


BART = EncoderDecoderFamily(
    fields=_START,
    halves=_halves(
        _BART,
        _BART_HEADS,
        {
            "fields": {**_BART_FIELDS, **_half_fields("encoder")},
            "groups": [RootScale(), EncoderLayers()],
        },
        {"fields": {**_BART_FIELDS, **_half_fields("decoder")}, "groups": [RootScale()]},
    ),
    architectures=_BART_HEADS,
    neutral={
        "is_encoder_decoder": (True,),
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
        "extra_pos_embeddings": (2,),
    },
    harmless=(
        *("activation_dropout", "classif_dropout", "force_bos_token_to_be_generated", "init_std"),
    ),
    buffers=("encoder.version", "decoder.version"),
    copies=_copies("model.", "lm_head.weight"),
    tensors=(
        *_shared_embedding("model.shared"),
        *_bart_embeddings("encoder"),
        *_bart_embeddings("decoder"),
        *_layers("encoder", _AFTER),
        *_layers("decoder", {**_AFTER, "encoder_attn_layer_norm": "cross_post_norm"}),
        Tensor("final_logits_bias", "decoder.head_bias", (part(0, of=1), "vocab")),
    ),
)

# --- Whisper --------------------------------------------------------------------------------------

_WHISPER_HEADS = {"WhisperForConditionalGeneration": {}, "WhisperModel": {"head": None}}
_BEFORE = {"self_attn_layer_norm": "attn_norm", "final_layer_norm": "mlp_norm"}


class NoTokens(FieldGroup):
    """That the encoder has no vocabulary, whose size is the decoder's."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        return {"vocab_size": 0}


def _frames(name: str) -> Tensors:
    """Describes a convolution over frames."""
    axes = ("embed", "channel", "frame"), ("frame", "channel", "embed")
    return (
        Tensor(f"model.encoder.{name}.weight", f"encoder.frames.{name}.kernel", *axes),
        Tensor(f"model.encoder.{name}.bias", f"encoder.frames.{name}.bias", ("embed",)),
    )


def _ends(half: str) -> Tensors:
    """Describes positions and last norm of a half."""
    positions = embedding(f"model.{half}.embed_positions", to="positions", axis="position")
    return _half(half, (*positions, *norm(f"model.{half}.layer_norm", to="final_norm")))


WHISPER = EncoderDecoderFamily(
    fields=_START,
    halves=_halves(
        {**_BIASED, "attention.key_bias": False},
        _WHISPER_HEADS,
        {
            "fields": {
                **_half_fields("encoder"),
                "max_source_positions": Field("positions.max_positions"),
                "num_mel_bins": Field("features.size"),
            },
            "groups": [NoTokens(), EncoderLayers()],
        },
        {
            "fields": {
                **_half_fields("decoder"),
                "max_target_positions": Field("positions.max_positions"),
                "tie_word_embeddings": Field("output.tied"),
                "vocab_size": Field("vocab_size"),
            }
        },
    ),
    architectures=_WHISPER_HEADS,
    neutral={"is_encoder_decoder": (True,)},
    harmless=(
        *("activation_dropout", "init_std", "median_filter_width", "forced_decoder_ids"),
        *("classifier_proj_size", "use_weighted_layer_sum"),  # of heads of classes
        *("mask_feature_length", "mask_feature_min_masks", "mask_feature_prob"),
        *("mask_time_length", "mask_time_min_masks", "mask_time_prob"),
    ),
    copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    tensors=(
        *_half("decoder", embedding("model.decoder.embed_tokens", to="embed", axis="vocab")),
        *_frames("conv1"),
        *_frames("conv2"),
        *_ends("encoder"),
        *_ends("decoder"),
        *_layers("encoder", _BEFORE),
        *_layers("decoder", {**_BEFORE, "encoder_attn_layer_norm": "cross_norm"}),
        *_half("decoder", linear("proj_out", to="head", inputs="embed", outputs="vocab")),
    ),
)
