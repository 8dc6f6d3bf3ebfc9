# SPDX-License-Identifier: Apache-2.0
"""Encoders: BERT and its successors of tokens, ViT and DINOv2 of images.

Sources: ``models/{bert,roberta,xlm_roberta,distilbert,electra,mpnet,modernbert,vit,dinov2}`` of
transformers 5, ``configuration_*.py`` for fields and defaults, ``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.rope import RotaryByLayerType
from shardax.models.family import PUBLISHED, REQUIRED, Family, Field, FieldGroup, Taker
from shardax.models.tensors import HEADS, Tensor, Tensors, embedding, in_layers, linear, norm, part

# --- what they share ------------------------------------------------------------------------------

_FIELDS = {
    **shared.SIZES,
    "hidden_act": Field("activation"),
    "layer_norm_eps": Field("norms.epsilon"),
}
_DROPOUT = {
    "attention_probs_dropout_prob": Field("attention.dropout"),
    "hidden_dropout_prob": Field("dropout", "embedding.dropout"),
}
_MAX_POSITIONS = {"max_position_embeddings": Field("positions.max_positions")}
_FIXED = {
    **shared.ALL_BIASES,
    "norms.kind": "layer",
    "mlp.gated": False,
    "causal": False,
    "attention.rope": None,
}
# Norms stand behind the sums, and behind the embedding. The head of masked words is a dense layer
# with a norm before the transposed embedding, and a bias.
_AFTER = {**_FIXED, "norms.placement": "after", "embedding.norm": True}
_MASKED = {"output.transform": True, "output.bias": True, "output.tied": True}


def _heads(
    name: str, masked: Mapping[str, Any], classes: Mapping[str, Any], *, pooler: bool = True
) -> dict[str, Mapping[str, Any]]:
    """Returns the architectures of an encoder, of five heads."""
    return {
        f"{name}ForMaskedLM": masked,
        f"{name}Model": {"head": None, "pool.dense": True} if pooler else {"head": None},
        f"{name}ForSequenceClassification": {"head": "first", **classes},
        f"{name}ForTokenClassification": {"head": "each"},
        f"{name}ForQuestionAnswering": {"head": "span"},
    }


def _layer(inputs: str) -> Tensors:
    """Describes attention and MLP, by the prefix of the projections."""
    return (
        *shared.attention(
            f"{inputs}.query", f"{inputs}.key", f"{inputs}.value", "attention.output.dense"
        ),
        *shared.mlp(up="intermediate.dense", down="output.dense"),
    )


def _embeddings(model: str, *, types: bool = True) -> Tensors:
    """Describes embeddings of tokens, positions and types, with their norm."""
    return (
        *embedding(f"{model}.word_embeddings", to="embed", axis="vocab"),
        *embedding(f"{model}.position_embeddings", to="positions", axis="position"),
        *(embedding(f"{model}.token_type_embeddings", to="types", axis="type") if types else ()),
        *norm(f"{model}.LayerNorm", to="embed_norm"),
    )


def _trunk(model: str) -> Tensors:
    """Describes embeddings and layers as BERT names them."""
    layers = in_layers(
        f"{model}.encoder.layer",
        norm("attention.output.LayerNorm", to="attn_post_norm"),
        norm("output.LayerNorm", to="mlp_post_norm"),
        _layer("attention.self"),
    )
    return (*_embeddings(f"{model}.embeddings"), *layers)


def _pooler(name: str) -> Tensors:
    return linear(name, to="pooler", inputs="embed", outputs="output")


def _classifier(name: str) -> Tensors:
    return linear(name, to="head", inputs="embed", outputs="output")


def _transform(dense: str, layer_norm: str) -> Tensors:
    """Describes the layers before a head."""
    return (
        *linear(dense, to="head_dense", inputs="embed", outputs="output"),
        *norm(layer_norm, to="head_norm"),
    )


def _word_head(transform: Tensors, decoder: str, bias: str) -> Tensors:
    """Describes a head of masked words, and a tied decoder."""
    tied_bias = Tensor(bias, "head_bias", ("vocab",))
    return (*transform, tied_bias, *linear(decoder, "head", inputs="embed", outputs="vocab"))


def _head_tensors(words: Tensors, bare: Tensors, classes: Tensors) -> dict[str | None, Tensors]:
    """Returns the tensors of each kind of head."""
    return {
        "tokens": words,
        None: bare,
        "first": classes,
        "each": _classifier("classifier"),
        "span": _classifier("qa_outputs"),
    }


# --- BERT -----------------------------------------------------------------------------------------

BERT = Family(
    fields={
        **_FIELDS,
        **_DROPOUT,
        **_MAX_POSITIONS,
        "type_vocab_size": Field("embedding.token_types"),
    },
    fixed=_AFTER,
    groups=[shared.Labels()],
    architectures=_heads("Bert", _MASKED, {"pool.dense": True}),
    neutral={"position_embedding_type": ("absolute",)},
    harmless=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
        *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    ),
    prefix="bert.",
    buffers=(
        "embeddings.position_ids",
        # Of the heads that the first checkpoints have beside the one that they are named by.
        "seq_relationship.weight",
        "seq_relationship.bias",
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    ),
    tensors=_trunk("bert"),
    head_tensors=_head_tensors(
        _word_head(
            _transform("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
            "cls.predictions.decoder",
            "cls.predictions.bias",
        ),
        _pooler("bert.pooler.dense"),
        (*_pooler("bert.pooler.dense"), *_classifier("classifier")),
    ),
)

# --- RoBERTa, XLM-RoBERTa -------------------------------------------------------------------------

# Positions are counted behind the padding token, which keeps the row of its number.
_OWN_GELU = {**_MASKED, "output.activation": "exact_gelu"}
_LM_HEAD = _word_head(
    _transform("lm_head.dense", "lm_head.layer_norm"), "lm_head.decoder", "lm_head.bias"
)
_TWO_LAYERS = (*_pooler("classifier.dense"), *_classifier("classifier.out_proj"))

ROBERTA = Family(
    fields={**BERT.fields, "pad_token_id": Field("positions.pad_token")},
    fixed=_AFTER,
    groups=[shared.Labels()],
    architectures=_heads("Roberta", _OWN_GELU, {"pool.dense": True}),
    neutral=BERT.neutral,
    harmless=("language", "name"),
    prefix="roberta.",
    # The pooler is in files of heads that do not read it.
    buffers=("embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias"),
    tensors=_trunk("roberta"),
    head_tensors=_head_tensors(_LM_HEAD, _pooler("roberta.pooler.dense"), _TWO_LAYERS),
)
XLM_ROBERTA = replace(ROBERTA, architectures=_heads("XLMRoberta", _OWN_GELU, {"pool.dense": True}))

# --- DistilBERT -----------------------------------------------------------------------------------

DISTILBERT = Family(
    fields={
        "vocab_size": Field("vocab_size", default=REQUIRED),
        "dim": Field("embed_dim", default=REQUIRED),
        "hidden_dim": Field("mlp.dim", default=REQUIRED),
        "n_layers": Field("num_layers", default=REQUIRED),
        "n_heads": Field("attention.num_heads", default=REQUIRED),
        "activation": Field("activation"),
        "attention_dropout": Field("attention.dropout"),
        "dropout": Field("dropout", "embedding.dropout"),
        "tie_word_embeddings": Field("output.tied"),
        **_MAX_POSITIONS,
    },
    fixed={**_AFTER, "norms.epsilon": 1e-12},
    groups=[shared.Labels()],
    architectures=_heads(
        "DistilBert", _MASKED, {"pool.dense": True, "pool.activation": "relu"}, pooler=False
    ),
    neutral={"tie_weights_": (True,)},
    # Positions by sines are in the files like others.
    harmless=("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"),
    prefix="distilbert.",
    buffers=("embeddings.position_ids",),
    tensors=(
        *_embeddings("distilbert.embeddings", types=False),
        *in_layers(
            "distilbert.transformer.layer",
            norm("sa_layer_norm", to="attn_post_norm"),
            norm("output_layer_norm", to="mlp_post_norm"),
            shared.attention(*(f"attention.{name}_lin" for name in ("q", "k", "v", "out"))),
            shared.mlp(up="ffn.lin1", down="ffn.lin2"),
        ),
    ),
    head_tensors=_head_tensors(
        _word_head(
            _transform("vocab_transform", "vocab_layer_norm"),
            "vocab_projector",
            "vocab_projector.bias",
        ),
        (),
        (*_pooler("pre_classifier"), *_classifier("classifier")),
    ),
)

# --- ELECTRA --------------------------------------------------------------------------------------


class EmbeddingSize(FieldGroup):
    """The size of embeddings, projected if it is another."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        size, features = (
            take("embedding_size", PUBLISHED, kind=kinds.SIZE),
            take("hidden_size", kind=kinds.SIZE),
        )
        return {"embedding.dim": 0 if size == features else size}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"embedding_size": config.embedding.dim or config.embed_dim}


# The discriminator says of each token whether it was replaced; the generator masks words.
_ELECTRA_HEADS = _heads("Electra", _OWN_GELU, {"pool.dense": True}, pooler=False)
_ELECTRA_CLASSES = {"head": "first", "pool.dense": True, "pool.activation": "exact_gelu"}

ELECTRA = Family(
    fields={**BERT.fields, "tie_word_embeddings": Field("output.tied")},
    fixed=_AFTER,
    groups=[EmbeddingSize(), shared.Labels()],
    architectures={
        **_ELECTRA_HEADS,
        "ElectraForSequenceClassification": _ELECTRA_CLASSES,
        "ElectraForPreTraining": {
            "head": "binary",
            "output.transform": True,
            "output.transform_norm": False,
        },
    },
    neutral={"position_embedding_type": ("absolute",)},
    harmless=(*("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),),
    prefix="electra.",
    buffers=("embeddings.position_ids",),
    tensors=(
        *_trunk("electra"),
        *linear("electra.embeddings_project", "embed_projection", "token", "embed"),
    ),
    head_tensors={
        **_head_tensors(
            _word_head(
                _transform("generator_predictions.dense", "generator_predictions.LayerNorm"),
                "generator_lm_head",
                "generator_lm_head.bias",
            ),
            (),
            _TWO_LAYERS,
        ),
        "binary": (
            *linear("discriminator_predictions.dense", "head_dense", "embed", "output"),
            *_classifier("discriminator_predictions.dense_prediction"),
        ),
    },
)

# --- MPNet ----------------------------------------------------------------------------------------

# All layers add the same biases of distances to their scores. Its padding is token 1.
MPNET = Family(
    fields={**_FIELDS, **_DROPOUT, **_MAX_POSITIONS},
    fixed={**_AFTER, "positions.pad_token": 1, "positions.relative_buckets": 32},
    groups=[shared.Labels()],
    architectures=_heads("MPNet", _OWN_GELU, {"pool.dense": True}),
    prefix="mpnet.",
    buffers=("embeddings.position_ids", "mpnet.pooler.dense.weight", "mpnet.pooler.dense.bias"),
    tensors=(
        *_embeddings("mpnet.embeddings", types=False),
        *in_layers(
            "mpnet.encoder.layer",
            norm("attention.LayerNorm", to="attn_post_norm"),
            norm("output.LayerNorm", to="mlp_post_norm"),
            shared.attention(*(f"attention.attn.{name}" for name in ("q", "k", "v", "o"))),
            shared.mlp(up="intermediate.dense", down="output.dense"),
        ),
        Tensor(
            "mpnet.encoder.relative_attention_bias.weight",
            "distances.embedding",
            ("bucket", "heads"),
        ),
    ),
    head_tensors=_head_tensors(_LM_HEAD, _pooler("mpnet.pooler.dense"), _TWO_LAYERS),
)

# --- ModernBERT -----------------------------------------------------------------------------------


class LocalAttention(FieldGroup):
    """Windows to both sides, of all layers but some."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        window = take("local_attention", PUBLISHED, kind=kinds.INTEGER) // 2 + 1
        period = take("global_attn_every_n_layers", 3, kind=kinds.SIZE)
        return shared.windows_by_layer(take, window, lambda layer: layer % period > 0)

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        fields = shared.window_fields(config)
        window = fields.pop("sliding_window")
        return fields if window is None else {**fields, "local_attention": 2 * (window - 1)}


class Pooling(FieldGroup):
    """Input of the head of classes."""

    names: ClassVar = {"cls": "first", "mean": "mean"}

    def to(self, take: Taker) -> Mapping[str, Any]:
        name = take("classifier_pooling", PUBLISHED, kind=kinds.TEXT)
        fits = name in self.names
        kinds.check_supported("classifier_pooling", name, fits, ", only 'cls' or 'mean'")
        return {"pool.kind": self.names[name]}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        published = {pooling: name for name, pooling in self.names.items()}
        kind = config.pool.kind
        return {"classifier_pooling": published[kind]} if kind in published else {}


_BEFORE_HEAD = _transform("head.dense", "head.norm")
_MODERN_CLASSES = (*_BEFORE_HEAD, *_classifier("classifier"))

MODERNBERT = Family(
    fields={
        **shared.SIZES,
        "attention_bias": Field("attention.qkv_bias", "attention.out_bias"),
        "classifier_activation": Field("output.activation"),
        "classifier_bias": Field("output.transform_bias"),
        "decoder_bias": Field("output.bias"),
        "embedding_dropout": Field("embedding.dropout"),
        "hidden_activation": Field("activation"),
        "mlp_bias": Field("mlp.bias"),
        "norm_bias": Field(
            "norms.kind",
            kind=kinds.BOOLEAN.or_null,
            to=lambda has_bias: "layer" if has_bias else "layer_unbiased",
            back=lambda config: config.norms.kind == "layer",
        ),
        "norm_eps": Field("norms.epsilon"),
        "tie_word_embeddings": Field("output.tied"),
    },
    fixed={"causal": False, "embedding.norm": True, "norms.first": False},
    groups=[
        RotaryByLayerType(
            ("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0), is_scaled=False
        ),
        LocalAttention(),
        Pooling(),
        shared.Labels(),
    ],
    architectures={
        name: {"output.transform": parts.get("head", "") is not None, **parts}
        for name, parts in _heads("ModernBert", {}, {}, pooler=False).items()
    },
    # Dropout there stands in other places than here, and published models have none.
    neutral={"attention_dropout": (0.0,)},
    harmless=(
        *("cls_token_id", "deterministic_flash_attn", "initializer_cutoff_factor"),
        *("layer_norm_eps", "position_embedding_type", "reference_compile"),
        *("repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction"),
    ),
    tensors=(
        *embedding("model.embeddings.tok_embeddings", to="embed", axis="vocab"),
        *norm("model.embeddings.norm", to="embed_norm"),
        *in_layers(
            "model.layers",
            shared.pre_norms("attn_norm", "mlp_norm"),
            *(
                linear("attn.Wqkv", f"attn.{name}", "embed", (part(index, of=3), *HEADS))
                for index, name in enumerate("qkv")
            ),
            linear("attn.Wo", to="attn.out", inputs=HEADS, outputs="embed"),
            linear("mlp.Wi", "mlp.gate", "embed", (part(0, of=2), "mlp")),
            linear("mlp.Wi", "mlp.up", "embed", (part(1, of=2), "mlp")),
            linear("mlp.Wo", to="mlp.down", inputs="mlp", outputs="embed"),
        ),
        *norm("model.final_norm", to="final_norm"),
    ),
    head_tensors={
        "tokens": _word_head(_BEFORE_HEAD, "decoder", "decoder.bias"),
        "first": _MODERN_CLASSES,
        "each": _MODERN_CLASSES,
        "span": _MODERN_CLASSES,
    },
)

# --- ViT ------------------------------------------------------------------------------------------


class PatchPositions(FieldGroup):
    """The number of positions: of patches, and of the vector before them."""

    def __init__(self, first_vector: bool = True) -> None:
        self.first_vector = first_vector

    def to(self, take: Taker) -> Mapping[str, Any]:
        side = take("patch_size", PUBLISHED, kind=kinds.SIZE)
        per_side = take("image_size", PUBLISHED, kind=kinds.SIZE) // max(side, 1)
        return {"vocab_size": 0, "positions.max_positions": per_side**2 + self.first_vector}


def _patches(model: str) -> Tensors:
    """Describes the embeddings of images."""
    one = part(0, of=1)
    return (
        Tensor(f"{model}.cls_token", "first", (one, one, "embed")),
        Tensor(f"{model}.position_embeddings", "positions.embedding", (one, "position", "embed")),
        Tensor(
            f"{model}.patch_embeddings.projection.weight",
            "patches.kernel",
            ("embed", "channel", "row", "column"),
            ("row", "column", "channel", "embed"),
        ),
        Tensor(f"{model}.patch_embeddings.projection.bias", "patches.bias", ("embed",)),
    )


VIT = Family(
    fields={
        **shared.without(_FIELDS, "vocab_size"),
        "attention_probs_dropout_prob": Field("attention.dropout"),
        "hidden_dropout_prob": Field("dropout", "embedding.dropout"),
        "image_size": Field("image.size"),
        "num_channels": Field("image.channels"),
        "patch_size": Field("image.patch_size"),
        "qkv_bias": Field("attention.qkv_bias"),
    },
    fixed=_FIXED,
    groups=[PatchPositions(), shared.Labels()],
    architectures={
        "ViTForImageClassification": {"head": "first"},
        "ViTModel": {"head": None, "pool.dense": True},
    },
    harmless=("encoder_stride", "pooler_output_size", "tie_word_embeddings", "vocab_size"),
    prefix="vit.",
    buffers=(),
    tensors=(
        *_patches("vit.embeddings"),
        *in_layers(
            "vit.encoder.layer",
            norm("layernorm_before", to="attn_norm"),
            norm("layernorm_after", to="mlp_norm"),
            _layer("attention.attention"),
        ),
        *norm("vit.layernorm", to="final_norm"),
        *_pooler("vit.pooler.dense"),
        *_classifier("classifier"),
    ),
)

# --- DINOv2 ---------------------------------------------------------------------------------------


class BackboneStages(FieldGroup):
    """Names of stages, of interest to backbones alone."""

    # There is a name for each layer; transformers makes them anew, and refuses other ones.
    older = ("out_features", "out_indices", "stage_names")

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"num_hidden_layers": config.num_layers}


class MlpRatio(FieldGroup):
    """The size of the MLP's hidden layer, by a ratio."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        ratio = take("mlp_ratio", PUBLISHED, kind=kinds.NUMBER.positive)
        size = take("hidden_size", kind=kinds.SIZE) * ratio
        return {"mlp.dim": kinds.whole(f"mlp_ratio={ratio!r}", size)}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        if config.mlp is None:
            return {}
        ratio, remainder = divmod(config.mlp.dim, config.embed_dim)
        return {"mlp_ratio": config.mlp.dim / config.embed_dim if remainder else ratio}


# What attention and MLP add is scaled. The head reads the first position and the mean of patches.
DINOV2 = Family(
    fields={
        **shared.without(VIT.fields, "intermediate_size"),
        "use_mask_token": Field("image.mask_patch"),
    },
    fixed={**_FIXED, "layer_scale": True},
    groups=[PatchPositions(), MlpRatio(), BackboneStages(), shared.Labels()],
    architectures={
        "Dinov2ForImageClassification": {"head": "first", "pool.kind": "first_and_mean"},
        "Dinov2Model": {"head": None},
    },
    # In evaluation a rate of paths changes nothing, but training would differ.
    harmless=(
        *("apply_layernorm", "layerscale_value", "reshape_hidden_states", "tie_word_embeddings"),
        *BackboneStages.older,
    ),
    prefix="dinov2.",
    buffers=(),
    tensors=(
        *_patches("dinov2.embeddings"),
        Tensor("dinov2.embeddings.mask_token", "mask_patch", (part(0, of=1), "embed")),
        *in_layers(
            "dinov2.encoder.layer",
            shared.pre_norms("norm1", "norm2"),
            shared.attention(
                "attention.attention.query",
                "attention.attention.key",
                "attention.attention.value",
                "attention.output.dense",
            ),
            shared.mlp(up="mlp.fc1", down="mlp.fc2"),
            (
                Tensor("layer_scale1.lambda1", "attn_scale", ("embed",)),
                Tensor("layer_scale2.lambda1", "mlp_scale", ("embed",)),
            ),
        ),
        *norm("dinov2.layernorm", to="final_norm"),
        *_classifier("classifier"),
    ),
)
