# SPDX-License-Identifier: Apache-2.0
"""The config.json of published encoders of tokens and images, and what is read of each."""

from __future__ import annotations

from typing import Any

LABELS = {"id2label": {"0": "A", "1": "B"}, "label2id": {"A": 0, "B": 1}}

_POOLER = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}


def sizes_of(hidden: int, mlp: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        **more,
    }


def _bert(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        **sizes_of(*sizes, **more),
    }


def _vit(*sizes: int, **more: Any) -> dict[str, Any]:
    config = _bert(*sizes, 0)
    for name in ("vocab_size", "type_vocab_size", "position_embedding_type"):
        del config[name]
    del config["max_position_embeddings"], config["gradient_checkpointing"]
    rest = {"image_size": 224, "num_channels": 3, "patch_size": 16, "qkv_bias": True}
    theirs = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    return {**config, **theirs, **rest, "encoder_stride": 16, **more}


def _roberta(*sizes: int, **more: Any) -> dict[str, Any]:
    theirs = {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta"}
    theirs |= {"bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    return {**_bert(*sizes), **theirs, "max_position_embeddings": 514, "type_vocab_size": 1, **more}


def _mpnet(*sizes: int) -> dict[str, Any]:
    theirs = {"architectures": ["MPNetForMaskedLM"], "model_type": "mpnet"}
    config = {**_roberta(*sizes), **theirs, "relative_attention_num_buckets": 32}
    del config["position_embedding_type"], config["type_vocab_size"]
    return config


def _distilbert(**more: Any) -> dict[str, Any]:
    return {
        "activation": "gelu",
        "architectures": ["DistilBertForMaskedLM"],
        "attention_dropout": 0.1,
        "dim": 768,
        "dropout": 0.1,
        "hidden_dim": 3072,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "model_type": "distilbert",
        "n_heads": 12,
        "n_layers": 6,
        "pad_token_id": 0,
        "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2,
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
        "transformers_version": "4.10.0.dev0",
        "vocab_size": 30522,
        **more,
    }


def _electra(*sizes: int, **more: Any) -> dict[str, Any]:
    theirs = {"architectures": ["ElectraForPreTraining"], "model_type": "electra"}
    theirs |= {"summary_activation": "gelu", "summary_last_dropout": 0.1}
    theirs |= {"summary_type": "first", "summary_use_proj": True}
    return {**_bert(*sizes), **theirs, **more}


def _modernbert(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_dropout": 0.0,
        "classifier_pooling": "mean",
        "cls_token_id": 50281,
        "decoder_bias": True,
        "deterministic_flash_attn": False,
        "embedding_dropout": 0.0,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "gradient_checkpointing": False,
        "hidden_activation": "gelu",
        "initializer_cutoff_factor": 2.0,
        "layer_norm_eps": 1e-05,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_dropout": 0.0,
        "model_type": "modernbert",
        "norm_bias": False,
        "norm_eps": 1e-05,
        "pad_token_id": 50283,
        "position_embedding_type": "absolute",
        "reference_compile": None,
        "repad_logits_with_grad": False,
        "sep_token_id": 50282,
        "sparse_pred_ignore_index": -100,
        "sparse_prediction": False,
        "tie_word_embeddings": True,
        **sizes_of(*sizes, **more),
    }


def _dinov2(width: int, heads: int) -> dict[str, Any]:
    return {
        "apply_layernorm": True,
        "architectures": ["Dinov2Model"],
        "attention_probs_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": width,
        "image_size": 518,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-06,
        "layerscale_value": 1.0,
        "mlp_ratio": 4,
        "model_type": "dinov2",
        "num_attention_heads": heads,
        "num_channels": 3,
        "num_hidden_layers": 12,
        "out_features": ["stage12"],
        "out_indices": [12],
        "patch_size": 14,
        "qkv_bias": True,
        "reshape_hidden_states": True,
        "stage_names": ["stem", *(f"stage{index}" for index in range(1, 13))],
        "torch_dtype": "float32",
        "transformers_version": "4.32.0.dev0",
        "use_swiglu_ffn": False,
    }


ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "google-bert/bert-base-uncased": (_bert(768, 3072, 12, 30522), {"output.transform": True}),
    "google-bert/bert-base-multilingual-cased": (
        _bert(768, 3072, 12, 119547, **_POOLER),
        {"norms.placement": "after"},
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        _bert(384, 1536, 12, 30522, architectures=["BertModel"]),
        {"head": None, "pool.dense": True},
    ),
    "cross-encoder/ms-marco-MiniLM-L6-v2": (
        _bert(
            *(384, 1536, 12, 30522),
            architectures=["BertForSequenceClassification"],
            id2label={"0": "LABEL_0"},
            label2id={"LABEL_0": 0},
            sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
        ),
        {"output.num_classes": 1},
    ),
    "ProsusAI/finbert": (
        _bert(
            *(768, 3072, 12, 30522),
            architectures=["BertForSequenceClassification"],
            finetuning_task=None,
            id2label={"0": "positive", "1": "negative", "2": "neutral"},
            label2id={"positive": 0, "negative": 1, "neutral": 2},
            num_labels=3,
            output_past=True,
            problem_type="single_label_classification",
        ),
        {"output.num_classes": 3},
    ),
    "BAAI/bge-small-en-v1.5": (
        _bert(384, 1536, 12, 30522, architectures=["BertModel"], **LABELS),
        {"pool.dense": True},
    ),
    "FacebookAI/roberta-base": (
        _roberta(768, 3072, 12, 50265),
        {
            "positions.pad_token": 1,
            "positions.max_positions": 514,
            "output.activation": "exact_gelu",
            "embedding.token_types": 1,
        },
    ),
    "cardiffnlp/twitter-roberta-base-sentiment-latest": (
        _roberta(
            *(768, 3072, 12, 50265),
            architectures=["RobertaForSequenceClassification"],
            id2label={"0": "negative", "1": "neutral", "2": "positive"},
            label2id={"negative": 0, "neutral": 1, "positive": 2},
        ),
        {"head": "first", "output.num_classes": 3, "pool.dense": True},
    ),
    "deepset/roberta-base-squad2": (
        _roberta(
            *(768, 3072, 12, 50265),
            architectures=["RobertaForQuestionAnswering"],
            gradient_checkpointing=False,
            language="english",
            name="Roberta",
        ),
        {"head": "span", "head_size": 2},
    ),
    "FacebookAI/xlm-roberta-base": (
        _roberta(
            *(768, 3072, 12, 250002),
            architectures=["XLMRobertaForMaskedLM"],
            model_type="xlm-roberta",
            output_past=True,
        ),
        {"positions.pad_token": 1, "output.tied": True},
    ),
    "BAAI/bge-m3": (
        _roberta(
            *(1024, 4096, 16, 250002),
            architectures=["XLMRobertaModel"],
            classifier_dropout=None,
            max_position_embeddings=8194,
            model_type="xlm-roberta",
        ),
        {"head": None, "pool.dense": True},
    ),
    "distilbert/distilbert-base-uncased": (
        _distilbert(),
        {"embedding.token_types": 0, "mlp.dim": 3072},
    ),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": (
        _distilbert(
            architectures=["DistilBertForSequenceClassification"],
            finetuning_task="sst-2",
            id2label={"0": "NEGATIVE", "1": "POSITIVE"},
            label2id={"NEGATIVE": 0, "POSITIVE": 1},
            output_past=True,
        ),
        {"pool.activation": "relu", "output.num_classes": 2},
    ),
    "google/electra-base-discriminator": (
        _electra(768, 3072, 12, 30522, embedding_size=768),
        {"head": "binary", "embedding.dim": 0},
    ),
    "google/electra-small-generator": (
        _electra(*(256, 1024, 4, 30522), architectures=["ElectraForMaskedLM"], embedding_size=128),
        {"head": "tokens", "embedding.dim": 128},
    ),
    "microsoft/mpnet-base": (
        _mpnet(768, 3072, 12, 30527),
        {"positions.relative_buckets": 32, "positions.pad_token": 1, "embedding.token_types": 0},
    ),
    "answerdotai/ModernBERT-base": (
        _modernbert(768, 1152, 12, 50368),
        {"attention.window": 65, "attention.local_layers": (False, True, True, False, True, True)}
        | {
            "pool.kind": "mean",
            "attention.rope.base": 160000.0,
            "norms.first": False,
            "norms.kind": "layer_unbiased",
        },
    ),
    "google/vit-base-patch16-224": (
        _vit(768, 3072, 12, id2label={str(i): str(i) for i in range(1000)}),
        {"output.num_classes": 1000, "positions.max_positions": 197},
    ),
    "facebook/dinov2-base": (
        _dinov2(768, 12),
        {"head": None, "layer_scale": True, "mlp.dim": 3072, "positions.max_positions": 1370},
    ),
    "google/vit-base-patch16-224-in21k": (
        _vit(768, 3072, 12, architectures=["ViTModel"]),
        {"pool.dense": True},
    ),
}
