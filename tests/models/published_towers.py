# SPDX-License-Identifier: Apache-2.0
"""The config.json of encoders of texts and images that are used alone, as they are published."""

from __future__ import annotations

from typing import Any


def _sizes(hidden: int, mlp: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": 12,
        "torch_dtype": "float32",
        "transformers_version": "4.40.0",
    }


def _clip(kind: str, hidden: int, mlp: int, heads: int, **more: Any) -> dict[str, Any]:
    tower = {
        "architectures": [f"CLIP{kind}Model"],
        "model_type": f"clip_{kind.lower()}_model",
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "quick_gelu",
        "initializer_factor": 1.0,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        **_sizes(hidden, mlp, heads),
    }
    if kind == "Text":
        tower |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
        tower |= {"max_position_embeddings": 77, "vocab_size": 49408}
    else:
        tower |= {"image_size": 224, "num_channels": 3, "patch_size": 14}
    return {**tower, **more}


def _siglip(kind: str, hidden: int, mlp: int, heads: int, **more: Any) -> dict[str, Any]:
    tower = {
        "architectures": [f"Siglip{kind}Model"],
        "model_type": f"siglip_{kind.lower()}_model",
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        **_sizes(hidden, mlp, heads),
    }
    return {**tower, **more}


# By name: the file, and fields of the config that is read which are not plain sizes.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CompVis/stable-diffusion-v1-4/text_encoder": (
        _clip("Text", 768, 3072, 12),
        {
            "head": None,
            "pool.kind": "highest",
            "activation": "quick_gelu",
            "positions.max_positions": 77,
        },
    ),
    "stabilityai/stable-diffusion-xl-base-1.0/text_encoder_2": (
        _clip(
            *("Text", 1280, 5120, 20),
            architectures=["CLIPTextModelWithProjection"],
            hidden_act="gelu",
            projection_dim=1280,
        ),
        {
            "head": "embedding",
            "output.projection_dim": 1280,
            "activation": "exact_gelu",
            "causal": True,
        },
    ),
    "h94/IP-Adapter/models/image_encoder": (
        _clip(
            *("Vision", 1280, 5120, 16),
            architectures=["CLIPVisionModelWithProjection"],
            hidden_act="gelu",
            projection_dim=1024,
        ),
        {
            "head": "embedding",
            "positions.max_positions": 257,
            "pool.norm": True,
            "image.patch_bias": False,
        },
    ),
    "google/siglip-so400m-patch14-384, images": (
        _siglip("Vision", 1152, 4304, 16, image_size=384, patch_size=14, num_channels=3),
        {"pool.kind": "attention", "positions.max_positions": 729, "image.first_vector": False},
    ),
    "google/siglip-so400m-patch14-384, texts": (
        _siglip(
            *("Text", 1152, 4304, 16),
            max_position_embeddings=64,
            vocab_size=32000,
            projection_size=1152,
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=1,
        ),
        {"pool.kind": "last", "pool.activation": "identity", "pool.dim": 0, "causal": False},
    ),
}
