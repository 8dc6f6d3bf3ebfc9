# SPDX-License-Identifier: Apache-2.0
"""Encoders: BERT of tokens, ViT of images.

Sources: ``models/{bert,vit}`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models.families import shared
from shardax.models.family import SIZE, Family, Field, FieldGroup, Taker
from shardax.models.tensors import Tensor, Tensors, embedding, in_layers, linear, norm, part

# --- what the two share ---------------------------------------------------------------------------

_FIELDS = {
    **shared.SIZES,
    "hidden_act": Field("activation", default="gelu"),
    "layer_norm_eps": Field("norm_epsilon", default=1e-12),
}
_FIXED = {**shared.ALL_BIASES, "norm": "layer", "gated": False, "causal": False, "rope": None}


def _layer(inputs: str) -> Tensors:
    """Describes attention and MLP, by the prefix of the projections."""
    return (
        *shared.attention(
            f"{inputs}.query", f"{inputs}.key", f"{inputs}.value", "attention.output.dense"
        ),
        *shared.mlp(up="intermediate.dense", down="output.dense"),
    )


def _pooler(name: str) -> Tensors:
    return linear(name, to="pooler", inputs="embed", outputs="output")


_CLASSIFIER = linear("classifier", to="head", inputs="embed", outputs="output")

# --- BERT -----------------------------------------------------------------------------------------

# Norms stand behind the sums, and behind the embedding. The head of masked words is a dense layer
# with a norm before the transposed embedding, and a bias.
BERT = Family(
    fields={
        **_FIELDS,
        "attention_probs_dropout_prob": Field("attention_dropout", default=0.1),
        "hidden_dropout_prob": Field("dropout", "embed_dropout", default=0.1),
        "max_position_embeddings": Field("max_positions", default=512),
        "type_vocab_size": Field("token_types", default=2),
    },
    fixed={**_FIXED, "norm_placement": "after", "embed_norm": True},
    groups=[shared.Labels()],
    architectures={
        "BertForMaskedLM": {"head_transform": True, "head_bias": True, "tied_head": True},
        "BertModel": {"head": None, "pooler": True},
        "BertForSequenceClassification": {"head": "first", "pooler": True},
    },
    neutral={"position_embedding_type": ("absolute",), "tie_word_embeddings": (True,)},
    harmless=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads"),
        *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    ),
    prefix="bert.",
    buffers=(
        "embeddings.position_ids",
        "predictions.decoder.weight",
        "predictions.decoder.bias",
        # Of the heads that the first checkpoints have beside the one that they are named by.
        "seq_relationship.weight",
        "seq_relationship.bias",
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    ),
    tensors=(
        *embedding("bert.embeddings.word_embeddings", to="embed", axis="vocab"),
        *embedding("bert.embeddings.position_embeddings", to="positions", axis="position"),
        *embedding("bert.embeddings.token_type_embeddings", to="types", axis="type"),
        *norm("bert.embeddings.LayerNorm", to="embed_norm"),
        *in_layers(
            "bert.encoder.layer",
            norm("attention.output.LayerNorm", to="attn_post_norm"),
            norm("output.LayerNorm", to="mlp_post_norm"),
            _layer("attention.self"),
        ),
        *linear("cls.predictions.transform.dense", "head_dense", "embed", "output"),
        *norm("cls.predictions.transform.LayerNorm", to="head_norm"),
        Tensor("cls.predictions.bias", "head_bias", ("vocab",)),
        *_pooler("bert.pooler.dense"),
        *_CLASSIFIER,
    ),
)

# --- ViT ------------------------------------------------------------------------------------------


class PatchPositions(FieldGroup):
    """The number of positions: of patches, and one for the first."""

    def read(self, take: Taker) -> Mapping[str, Any]:
        per_side = take("image_size", 224, kind=SIZE) // max(take("patch_size", 16, kind=SIZE), 1)
        return {"vocab_size": 0, "max_positions": per_side**2 + 1}


VIT = Family(
    fields={
        **{name: field for name, field in _FIELDS.items() if name != "vocab_size"},
        "attention_probs_dropout_prob": Field("attention_dropout", default=0.0),
        "hidden_dropout_prob": Field("dropout", "embed_dropout", default=0.0),
        "image_size": Field("image_size", default=224),
        "num_channels": Field("channels", default=3),
        "patch_size": Field("patch_size", default=16),
        "qkv_bias": Field("qkv_bias", default=True),
    },
    fixed=_FIXED,
    groups=[PatchPositions(), shared.Labels()],
    architectures={
        "ViTForImageClassification": {"head": "first"},
        "ViTModel": {"head": None, "pooler": True},
    },
    neutral={"pooler_act": ("tanh",)},
    harmless=("encoder_stride", "pooler_output_size", "tie_word_embeddings", "vocab_size"),
    prefix="vit.",
    buffers=(),
    tensors=(
        Tensor("vit.embeddings.cls_token", "first", (part(0, of=1), part(0, of=1), "embed")),
        Tensor(
            "vit.embeddings.position_embeddings",
            "positions.embedding",
            (part(0, of=1), "position", "embed"),
        ),
        Tensor(
            "vit.embeddings.patch_embeddings.projection.weight",
            "patches.kernel",
            ("embed", "channel", "row", "column"),
            ("row", "column", "channel", "embed"),
        ),
        Tensor("vit.embeddings.patch_embeddings.projection.bias", "patches.bias", ("embed",)),
        *in_layers(
            "vit.encoder.layer",
            norm("layernorm_before", to="attn_norm"),
            norm("layernorm_after", to="mlp_norm"),
            _layer("attention.attention"),
        ),
        *norm("vit.layernorm", to="final_norm"),
        *_pooler("vit.pooler.dense"),
        *_CLASSIFIER,
    ),
)
