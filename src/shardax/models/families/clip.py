# SPDX-License-Identifier: Apache-2.0
"""CLIP and SigLIP: encoders of texts and images, alone and as pairs.

Sources: ``models/{clip,siglip}`` of transformers 5, ``configuration_*.py`` for fields and defaults,
``modeling_*.py`` for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardax.models import kinds
from shardax.models.config.transformer import TransformerConfig
from shardax.models.families import shared
from shardax.models.families.encoders import PatchPositions
from shardax.models.family import (
    PUBLISHED,
    DualFamily,
    Family,
    Field,
    FieldGroup,
    Taker,
    Tower,
    tensors_of,
)
from shardax.models.tensors import (
    HEADS,
    Tensor,
    Tensors,
    concatenated,
    embedding,
    in_layers,
    linear,
    norm,
    part,
)

# --- what they share ------------------------------------------------------------------------------

_FIXED = {
    **shared.ALL_BIASES,
    "norms.kind": "layer",
    "mlp.gated": False,
    "attention.rope": None,
    "head": None,
}


# Pairs leave out sizes that are the default.
_FIELDS = {
    "hidden_size": Field("embed_dim"),
    "intermediate_size": Field("mlp.dim"),
    "num_hidden_layers": Field("num_layers"),
    "num_attention_heads": Field("attention.num_heads"),
    "attention_dropout": Field("attention.dropout"),
    "hidden_act": Field("activation"),
    "layer_norm_eps": Field("norms.epsilon"),
}
_TEXT_FIELDS = {
    **_FIELDS,
    "vocab_size": Field("vocab_size"),
    "max_position_embeddings": Field("positions.max_positions"),
}
_IMAGE_FIELDS = {
    **_FIELDS,
    "image_size": Field("image.size"),
    "num_channels": Field("image.channels"),
    "patch_size": Field("image.patch_size"),
}


def _layers(model: str) -> Tensors:
    return in_layers(
        f"{model}.encoder.layers",
        shared.pre_norms("layer_norm1", "layer_norm2"),
        shared.attention(out="self_attn.out_proj"),
        shared.mlp(up="mlp.fc1", down="mlp.fc2"),
    )


def _text_tensors() -> Tensors:
    """Describes embeddings, layers and last norm of an encoder of texts."""
    return (
        *embedding("text_model.embeddings.token_embedding", to="embed", axis="vocab"),
        *embedding("text_model.embeddings.position_embedding", to="positions", axis="position"),
        *_layers("text_model"),
        *norm("text_model.final_layer_norm", to="final_norm"),
    )


def _image_tensors() -> Tensors:
    """Describes patches, positions, layers and last norm of an encoder of images."""
    name = "vision_model.embeddings"
    return (
        Tensor(
            f"{name}.patch_embedding.weight",
            "patches.kernel",
            ("embed", "channel", "row", "column"),
            ("row", "column", "channel", "embed"),
        ),
        Tensor(f"{name}.patch_embedding.bias", "patches.bias", ("embed",)),
        *embedding(f"{name}.position_embedding", to="positions", axis="position"),
        *_layers("vision_model"),
        *norm("vision_model.post_layernorm", to="final_norm"),
    )


# --- CLIP -----------------------------------------------------------------------------------------


class EndToken(FieldGroup):
    """The token that a text is pooled at."""

    # Files of before 2023 say 2, whatever the tokenizer has. There the highest token counts.
    OLD = 2

    def to(self, take: Taker) -> Mapping[str, Any]:
        token = take("eos_token_id", PUBLISHED, kind=kinds.INTEGER)
        return (
            {"pool.kind": "highest"}
            if token == self.OLD
            else {"pool.kind": "end", "pool.end_token": token}
        )

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        is_old = config.pool.kind == "highest"
        return {"eos_token_id": self.OLD if is_old else config.pool.end_token}


# A pair has a size of projections of its own.
_PROJECTION = {"projection_dim": Field("output.projection_dim")}
_HARMLESS = ("dropout", "initializer_factor", "tie_word_embeddings")

CLIP_TEXT = Family(
    fields={**_TEXT_FIELDS, **_PROJECTION},
    fixed=_FIXED,
    groups=[EndToken()],
    group_fields=("eos_token_id",),
    architectures={"CLIPTextModel": {}, "CLIPTextModelWithProjection": {"head": "embedding"}},
    harmless=_HARMLESS,
    prefix="text_model.",
    buffers=("embeddings.position_ids",),
    tensors=_text_tensors(),
    head_tensors={
        "embedding": linear("text_projection", to="head", inputs="embed", outputs="output")
    },
)
# Its result has no norm, but what is pooled of it has.
CLIP_VISION = Family(
    fields={**_IMAGE_FIELDS, **_PROJECTION},
    fixed={
        **_FIXED,
        "causal": False,
        "embedding.norm": True,
        "image.patch_bias": False,
        "pool.norm": True,
    },
    groups=[PatchPositions()],
    architectures={"CLIPVisionModel": {}, "CLIPVisionModelWithProjection": {"head": "embedding"}},
    harmless=_HARMLESS,
    prefix="vision_model.",
    buffers=("embeddings.position_ids",),
    tensors=(
        Tensor("vision_model.embeddings.class_embedding", "first", ("embed",)),
        *_image_tensors(),
        *norm("vision_model.pre_layrnorm", to="embed_norm"),
    ),
    head_tensors={
        "embedding": linear("visual_projection", to="head", inputs="embed", outputs="output")
    },
)

# --- SigLIP ---------------------------------------------------------------------------------------


class PooledSize(FieldGroup):
    """The size of what a text is pooled to."""

    def to(self, take: Taker) -> Mapping[str, Any]:
        size = take("projection_size", None, kind=kinds.SIZE.or_null)
        return {"pool.dim": 0 if size in (None, take("hidden_size", kind=kinds.SIZE)) else size}

    def back(self, config: TransformerConfig) -> Mapping[str, Any]:
        return {"projection_size": config.pool.dim or config.embed_dim}


# The last position is pooled even if it is padding: models were trained so.
SIGLIP_TEXT = Family(
    fields=_TEXT_FIELDS,
    fixed={
        **_FIXED,
        "causal": False,
        "pool.kind": "last",
        "pool.dense": True,
        "pool.activation": "identity",
    },
    groups=[PooledSize()],
    group_fields=("projection_size",),
    architectures={"SiglipTextModel": {}},
    harmless=_HARMLESS,
    prefix="text_model.",
    buffers=("embeddings.position_ids",),
    tensors=(
        *_text_tensors(),
        *linear("text_model.head", to="pooler", inputs="embed", outputs="output"),
    ),
)
_IN, _POOLING = "vision_model.head.attention.in_proj", "attention_pooling"
SIGLIP_VISION = Family(
    fields={
        **_IMAGE_FIELDS,
        "vision_use_head": Field(
            "pool.kind",
            kind=kinds.BOOLEAN,
            to=lambda has_head: "attention" if has_head else "first",
            back=lambda config: config.pool.kind == "attention",
        ),
    },
    fixed={**_FIXED, "causal": False, "image.first_vector": False},
    groups=[PatchPositions(first_vector=False)],
    architectures={"SiglipVisionModel": {}},
    harmless=_HARMLESS,
    prefix="vision_model.",
    buffers=("embeddings.position_ids",),
    tensors=(
        *_image_tensors(),
        Tensor(
            "vision_model.head.probe", f"{_POOLING}.query", (part(0, of=1), part(0, of=1), "embed")
        ),
        *(
            tensor
            for name in ("q", "k", "v")
            for tensor in (
                Tensor(
                    f"{_IN}_weight",
                    f"{_POOLING}.attn.{name}.kernel",
                    (concatenated(*HEADS), "embed"),
                    ("embed", *HEADS),
                ),
                Tensor(f"{_IN}_bias", f"{_POOLING}.attn.{name}.bias", (concatenated(*HEADS),)),
            )
        ),
        *linear(
            "vision_model.head.attention.out_proj",
            to=f"{_POOLING}.attn.out",
            inputs=HEADS,
            outputs="embed",
        ),
        *norm("vision_model.head.layernorm", to=f"{_POOLING}.norm"),
        *linear("vision_model.head.mlp.fc1", f"{_POOLING}.mlp.up", "embed", "mlp"),
        *linear("vision_model.head.mlp.fc2", f"{_POOLING}.mlp.down", "mlp", "embed"),
    ),
)

# --- pairs ----------------------------------------------------------------------------------------


def _pair(text: str, text_family: Family, image: str, image_family: Family) -> dict[str, Any]:
    """Returns the towers of a pair, and their tensors."""
    towers = {
        "text": Tower("text_config", "text_config_dict", text, text_family.of_type(text)),
        "image": Tower("vision_config", "vision_config_dict", image, image_family.of_type(image)),
    }
    tensors = (*tensors_of("text", text_family), *tensors_of("image", image_family))
    return {"towers": towers, "tensors": tensors}


_CLIP_PAIR = _pair("clip_text_model", CLIP_TEXT, "clip_vision_model", CLIP_VISION)
CLIP = DualFamily(
    fields={"projection_dim": Field("projection_dim", kind=kinds.SIZE)},
    architectures={"CLIPModel": {}},
    harmless=("initializer_factor", "logit_scale_init_value", "tie_word_embeddings"),
    prefix="",
    buffers=("embeddings.position_ids",),
    towers=_CLIP_PAIR["towers"],
    tensors=(
        Tensor("logit_scale", "logit_scale", ()),
        *_CLIP_PAIR["tensors"],
        *linear("text_projection", to="text_projection", inputs="embed", outputs="output"),
        *linear("visual_projection", to="image_projection", inputs="embed", outputs="output"),
    ),
)
_SIGLIP_PAIR = _pair("siglip_text_model", SIGLIP_TEXT, "siglip_vision_model", SIGLIP_VISION)
SIGLIP = DualFamily(
    fields={},
    fixed={"logit_bias": True},
    architectures={"SiglipModel": {}},
    harmless=("initializer_factor", "tie_word_embeddings"),
    prefix="",
    buffers=("embeddings.position_ids",),
    towers=_SIGLIP_PAIR["towers"],
    tensors=(
        Tensor("logit_scale", "logit_scale", (part(0, of=1),)),
        Tensor("logit_bias", "logit_bias", (part(0, of=1),)),
        *_SIGLIP_PAIR["tensors"],
    ),
)
