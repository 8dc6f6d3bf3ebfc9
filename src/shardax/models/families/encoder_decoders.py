# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: T5, BART and Whisper.

Sources: ``models/{t5,bart,whisper}`` of transformers 5, ``configuration_*.py`` for fields and
defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.family import EncoderDecoderFamily, Field, FieldGroup, HalfFamily, Taker
from shardax.models.tensors import Tensor, Tensors, embedding, in_layers, linear, norm, part

# --- what they share ------------------------------------------------------------------------------


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
        name = take("feed_forward_proj", "relu", kind=kinds.TEXT)
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
        return {"num_layers": take("num_layers", 6, kind=kinds.SIZE) if count is None else count}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"num_decoder_layers": config.num_layers}


class TiedDecoderHead(FieldGroup):
    """Whether the head is tied, and whether its inputs are scaled."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        is_tied = take("tie_word_embeddings", True, kind=kinds.BOOLEAN.or_null) is not False
        is_scaled = take("scale_decoder_outputs", is_tied, kind=kinds.BOOLEAN)
        size = take("d_model", 512, kind=kinds.SIZE)
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
    "vocab_size": Field("vocab_size", default=32128),
    "d_model": Field("embed_dim", default=512),
    "d_kv": Field("attention.head_dim", default=64),
    "d_ff": Field("mlp.dim", default=2048),
    "num_heads": Field("attention.num_heads", default=8),
    "dropout_rate": Field("dropout", "embedding.dropout", "attention.dropout", default=0.1),
    "layer_norm_epsilon": Field("norms.epsilon", default=1e-6),
    "relative_attention_num_buckets": Field("positions.relative_buckets", default=32),
    "relative_attention_max_distance": Field("positions.farthest_distance", default=128),
}
_T5 = {"attention.rope": None, "attention.scale": 1.0}
_ARCHITECTURES = {
    "T5ForConditionalGeneration": {},
    "T5WithLMHeadModel": {},  # its name of before 2020
    "T5Model": {"head": None},
}


def _t5_layers(stack: str, cross: Tensors, mlp: int) -> Tensors:
    """Describes the layers of a half, its distances and its last norm."""
    layer = "layer.{number}.DenseReluDense".replace("{number}", str(mlp))
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
    fields={},
    halves={
        "encoder": HalfFamily(
            fields={**_FIELDS, "num_layers": Field("num_layers", default=6)},
            tensors=(),
            fixed={**_T5, "causal": False, "head": None},
            groups=[Units()],
            architectures={name: {} for name in _ARCHITECTURES},
        ),
        "decoder": HalfFamily(
            fields=_FIELDS,
            tensors=(),
            fixed={**_T5, "attention.cross_attention": True},
            groups=[Units(), DecoderLayers(), TiedDecoderHead()],
            architectures=_ARCHITECTURES,
        ),
    },
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


class LearnedPositions(FieldGroup):
    """The number of learned positions, behind two rows that are not read."""

    ROWS = 2

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("max_position_embeddings", 1024, kind=kinds.SIZE)
        return {"positions.max_positions": count + self.ROWS, "positions.offset": self.ROWS}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"max_position_embeddings": config.positions.max_positions - self.ROWS}


class RootScale(FieldGroup):
    """Whether the embedding is multiplied by the root of its size."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        is_scaled = take("scale_embedding", False, kind=kinds.BOOLEAN.or_null)
        return {"embedding.scale": take("d_model", kind=kinds.SIZE) ** 0.5 if is_scaled else None}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"scale_embedding": config.embedding.scale is not None}


class EncoderLayers(FieldGroup):
    """The number of layers of the encoder, which files may have twice."""

    older: ClassVar = ("num_hidden_layers",)

    def to(self, take: Taker) -> Mapping[str, Any]:
        count = take("encoder_layers", kind=kinds.SIZE)
        again = take("num_hidden_layers", count, kind=kinds.SIZE)
        beside = f" beside encoder_layers={count}"
        kinds.check_supported("num_hidden_layers", again, again == count, beside)
        return {}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"encoder_layers": config.num_layers}


def _half_fields(
    half: str, width: int, layers: int, heads: int, mlp: int, dropout: float
) -> dict[str, Field]:
    """Returns the fields of a half, with their defaults."""
    return {
        "d_model": Field("embed_dim", default=width),
        f"{half}_layers": Field("num_layers", default=layers),
        f"{half}_attention_heads": Field("attention.num_heads", default=heads),
        f"{half}_ffn_dim": Field("mlp.dim", default=mlp),
        "activation_function": Field("activation", default="gelu"),
        "attention_dropout": Field("attention.dropout", default=0.0),
        "dropout": Field("dropout", "embedding.dropout", default=dropout),
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
_BART = {**_BIASED, "norms.placement": "after", "embedding.norm": True}
_BART_FIELDS = {"vocab_size": Field("vocab_size", default=50265)}
_BART_GROUPS = [LearnedPositions(), RootScale()]
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
    fields={},
    halves={
        "encoder": HalfFamily(
            fields={**_BART_FIELDS, **_half_fields("encoder", 1024, 12, 16, 4096, 0.1)},
            tensors=(),
            fixed={**_BART, "causal": False, "head": None},
            groups=[*_BART_GROUPS, EncoderLayers()],
            architectures={name: {} for name in _BART_HEADS},
        ),
        "decoder": HalfFamily(
            fields={**_BART_FIELDS, **_half_fields("decoder", 1024, 12, 16, 4096, 0.1)},
            tensors=(),
            fixed={**_BART, "attention.cross_attention": True},
            groups=_BART_GROUPS,
            architectures=_BART_HEADS,
        ),
    },
    architectures=_BART_HEADS,
    defaults={"decoder_start_token_id": 2},
    neutral={
        "is_encoder_decoder": (True,),
        "tie_word_embeddings": (True,),  # else each half has an embedding of its own
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
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

_WHISPER = {**_BIASED, "attention.key_bias": False}
_WHISPER_HEADS = {"WhisperForConditionalGeneration": {}, "WhisperModel": {"head": None}}
_BEFORE = {"self_attn_layer_norm": "attn_norm", "final_layer_norm": "mlp_norm"}


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
    fields={},
    halves={
        "encoder": HalfFamily(
            fields={
                **_half_fields("encoder", 384, 4, 6, 1536, 0.0),
                "max_source_positions": Field("positions.max_positions", default=1500),
                "num_mel_bins": Field("features.size", default=80),
            },
            tensors=(),
            fixed={**_WHISPER, "causal": False, "head": None, "vocab_size": 0},
            groups=[EncoderLayers()],
            architectures={name: {} for name in _WHISPER_HEADS},
        ),
        "decoder": HalfFamily(
            fields={
                **_half_fields("decoder", 384, 4, 6, 1536, 0.0),
                "max_target_positions": Field("positions.max_positions", default=448),
                "tie_word_embeddings": Field("output.tied", default=True),
                "vocab_size": Field("vocab_size", default=51865),
            },
            tensors=(),
            fixed={**_WHISPER, "attention.cross_attention": True},
            architectures=_WHISPER_HEADS,
        ),
    },
    architectures=_WHISPER_HEADS,
    defaults={"decoder_start_token_id": 50257},
    neutral={
        "is_encoder_decoder": (True,),
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
        "apply_spec_augment": (False,),  # of training
        "scale_embedding": (False,),
    },
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
