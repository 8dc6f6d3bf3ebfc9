# SPDX-License-Identifier: Apache-2.0
"""The config.json of much used models, as they are published; generation fields left out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors import numpy as numpy_files

from shardax.models import Rope, from_pretrained
from tests.models.published_encoders import ENCODERS as PUBLISHED_ENCODERS
from tests.models.published_encoders import LABELS, sizes_of
from tests.models.published_experts import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    LLAMA4_TEXT,
    MOONLIGHT,
    MSCALE,
    TINY_EXPERTS,
    UNPACKED_GPT_OSS,
)
from tests.models.published_hybrids import HYBRIDS, TINY_HYBRIDS
from tests.models.published_towers import TOWERS
from tests.values import with_values


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **sizes_of(*sizes, **more),
    }


def _llama3(*sizes: int, factor: float = 0.0, **more: Any) -> dict[str, Any]:
    scaling = {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    theirs = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
    theirs |= {"rope_scaling": scaling if factor else None, "rope_theta": 500000.0}
    theirs |= {"max_position_embeddings": 131072 if factor else 8192, "num_key_value_heads": 8}
    return _llama(*sizes, **{**theirs, "eos_token_id": [128001, 128008, 128009], **more})


def _mistral(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **sizes_of(*sizes, **more),
    }


def _qwen2(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        **sizes_of(*sizes, **more),
    }


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    theirs = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    theirs |= {"attention_bias": False, "rope_scaling": None, "sliding_window": None}
    theirs |= {"max_window_layers": 28, "num_key_value_heads": 8}
    return {**_qwen2(*sizes), **theirs, **more}


def _gemma2(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        **sizes_of(*sizes, **more),
    }


def _gpt2(width: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": width,
        "n_head": heads,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
        **more,
    }


def _neox(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        **sizes_of(*sizes, **more),
    }


def _phi3(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "model_type": "phi3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **sizes_of(*sizes, **more),
    }


def _old_llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return _llama(*sizes, max_position_embeddings=4096, num_key_value_heads=sizes[2], **more)


def _distilled(*sizes: int, **more: Any) -> dict[str, Any]:
    return _qwen2(*sizes, use_mrope=False, tie_word_embeddings=False, **more)


_SMOL = {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True}
_SMOL |= {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}
_UNSLOTH = {"unsloth_fixed": True, "tie_word_embeddings": True, "head_dim": 64}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
_MIXTRAL |= {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False}
_MIXTRAL |= {"rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
_QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768}
_QWEN3_MOE |= {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_MOE |= {"num_key_value_heads": 4, "output_router_logits": False}
_QWEN3_MOE |= {"router_aux_loss_coef": 0.001, "tie_word_embeddings": False}
_GEMMA = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 256}
_GEMMA |= {"attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 8192}
_GEMMA |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0}
_GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
_GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_GEMMA3 |= {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None}
_GEMMA3 |= {"rope_theta": 1e6, "sliding_window": 512, "sliding_window_pattern": 6}
_GEMMA3 |= {"num_key_value_heads": 1}
_PHI = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"}
_PHI |= {"attention_dropout": 0.0, "embd_pdrop": 0.0, "layer_norm_eps": 1e-5}
_PHI |= {"max_position_embeddings": 2048, "partial_rotary_factor": 0.4, "qk_layernorm": False}
_PHI |= {"resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 1e4, "tie_word_embeddings": False}
_STARCODER = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
_STARCODER |= {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1}
_STARCODER |= {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384}
_STARCODER |= {"mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm"}
_STARCODER |= {"num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True}
_OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False}
_OLMO2 |= {"attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 4096}
_OLMO2 |= {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 500000}
_OLMO2 |= {"rope_scaling": None, "tie_word_embeddings": False}
_OLMO3 = {**_OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
_OLMO3 |= {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
_OLMO3 |= {"sliding_window": 4096, "max_position_embeddings": 65536, "rope_theta": 500000}
_OLMO3 |= {
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    }
}
_OLMOE = {**_OLMO2, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
_OLMOE |= {"clip_qkv": None, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8}
_OLMOE |= {"num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-5}
_OLMOE |= {"rope_theta": 10000.0, "router_aux_loss_coef": 0.01}
_QWEN2_MOE = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
_QWEN2_MOE |= {"decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts": 60}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4}
_QWEN2_MOE |= {"norm_topk_prob": False, "num_key_value_heads": 16, "router_aux_loss_coef": 0.001}
_QWEN2_MOE |= {"output_router_logits": False, "tie_word_embeddings": False}
_GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "mlp_bias": False}
_GRANITE |= {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 1e7}
_GRANITE |= {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
_GRANITE |= {"logits_scaling": 8.0, "residual_multiplier": 0.22, "num_key_value_heads": 8}
_GRANITE |= {"max_position_embeddings": 131072, "tie_word_embeddings": True}
_SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "mlp_bias": False}
_SMOLLM3 |= {"attention_bias": False, "attention_dropout": 0.0, "max_window_layers": 28}
_SMOLLM3 |= {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9}
_SMOLLM3 |= {"no_rope_layer_interval": 4, "num_key_value_heads": 4, "pretraining_tp": 2}
_SMOLLM3 |= {"rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False}
_MINISTRAL = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
_MINISTRAL |= {"head_dim": 128, "rope_theta": 1e8, "sliding_window": 32768}
_MINISTRAL |= {"layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9}
_GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True}
_GLM4 |= {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5}
_GLM4 |= {"max_position_embeddings": 32768, "num_key_value_heads": 2, "rope_theta": 10000.0}
_GLM4 |= {"partial_rotary_factor": 0.5, "tie_word_embeddings": False}
_GLM4_MOE = {**_GLM4, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
_GLM4_MOE |= {"first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1}
_GLM4_MOE |= {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
_GLM4_MOE |= {"norm_topk_prob": True, "num_experts_per_tok": 8, "num_key_value_heads": 8}
_GLM4_MOE |= {"num_nextn_predict_layers": 1, "rope_scaling": None, "rope_theta": 1000000}
_GLM4_MOE |= {"routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False}
_COHERE2 = {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 128}
_COHERE2 |= {"attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid"}
_COHERE2 |= {"hidden_act": "silu", "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25}
_COHERE2 |= {"max_position_embeddings": 132096, "num_key_value_heads": 8, "rope_theta": 50000.0}
_COHERE2 |= {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0}
_COHERE2 |= {"position_embedding_type": "rope_gptj", "rope_scaling": None, "sliding_window": 4096}
_COHERE2 |= {"sliding_window_pattern": 4, "use_embedding_sharing": True}
_COHERE2 |= {"use_gated_activation": True, "use_parallel_block": True}
_COHERE2 |= {"use_parallel_embedding": True}
_NEMOTRON = {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "head_dim": 128}
_NEMOTRON |= {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "relu2"}
_NEMOTRON |= {"max_position_embeddings": 4096, "mlp_bias": False, "norm_eps": 1e-5}
_NEMOTRON |= {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
_NEMOTRON |= {"tie_word_embeddings": False}

# By name: the file, and fields of the config that is read which are not plain sizes.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "meta-llama/Llama-2-7b-hf": (
        _old_llama(4096, 11008, 32, 32000),
        {"attention.num_kv_heads": 32},
    ),
    "meta-llama/Llama-2-13b-chat-hf": (
        _old_llama(5120, 13824, 40, 32000),
        {"attention.head_dim": 128},
    ),
    "meta-llama/Llama-2-70b-hf": (
        _llama(8192, 28672, 64, 32000, num_key_value_heads=8, max_position_embeddings=4096),
        {"attention.num_kv_heads": 8},
    ),
    "codellama/CodeLlama-7b-hf": (
        _old_llama(4096, 11008, 32, 32016, rope_theta=1000000),
        {"attention.rope.base": 1e6},
    ),
    "lmsys/vicuna-7b-v1.5": (
        _old_llama(4096, 11008, 32, 32000, max_sequence_length=4096),
        {"attention.rope.base": 1e4},
    ),
    "huggyllama/llama-7b": (
        {**_llama(4096, 11008, 32, 32000), "max_sequence_length": 2048, "output_past": True},
        {"attention.num_kv_heads": 32, "attention.rope.base": 1e4},
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        _llama(2048, 5632, 32, 32000, num_key_value_heads=4, attention_bias=False),
        {"attention.num_kv_heads": 4, "attention.head_dim": 64},
    ),
    "meta-llama/Meta-Llama-3-8B": (_llama3(4096, 14336, 32, 128256), {"attention.rope.base": 5e5}),
    "meta-llama/Meta-Llama-3-70B-Instruct": (
        _llama3(8192, 28672, 64, 128256),
        {"attention.rope.base": 5e5},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        _llama3(4096, 14336, 32, 128256, factor=8.0),
        {"attention.rope.kind": "llama3", "attention.rope.factor": 8.0},
    ),
    "meta-llama/Llama-3.1-405B": (
        _llama3(16384, 53248, 128, 128256, factor=8.0),
        {"attention.rope.kind": "llama3"},
    ),
    "meta-llama/Llama-3.2-1B": (
        _llama3(2048, 8192, 32, 128256, factor=32.0, head_dim=64, tie_word_embeddings=True),
        {"attention.rope.factor": 32.0, "output.tied": True},
    ),
    "unsloth/Llama-3.2-1B-Instruct": (
        _llama3(2048, 8192, 32, 128256, factor=32.0, **_UNSLOTH),
        {"attention.rope.factor": 32.0, "output.tied": True},
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        _llama3(8192, 28672, 64, 128256, factor=8.0),
        {"attention.rope.length": 8192},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        _llama3(4096, 14336, 32, 128256, factor=8.0, eos_token_id=128001),
        {"attention.rope.kind": "llama3"},
    ),
    "deepseek-ai/deepseek-coder-6.7b-base": (
        _old_llama(4096, 11008, 32, 32256, rope_theta=100000, rope_scaling=None)
        | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
        {"attention.rope.kind": "linear", "attention.rope.factor": 4.0, "attention.rope.base": 1e5},
    ),
    "01-ai/Yi-1.5-9B": (
        _llama(4096, 11008, 32, 64000, num_key_value_heads=4, rope_theta=5000000.0),
        {"attention.rope.base": 5e6},
    ),
    "HuggingFaceTB/SmolLM2-135M": (
        _llama(576, 1536, 9, 49152, num_key_value_heads=3, rope_theta=100000, **_SMOL),
        {"attention.head_dim": 64, "output.tied": True},
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        _llama(2048, 8192, 32, 49152, num_key_value_heads=32, rope_theta=130000, **_SMOL),
        {"attention.rope.base": 130000.0},
    ),
    "mistralai/Mistral-7B-v0.1": (
        _mistral(4096, 14336, 32, 32000, rope_theta=10000.0, sliding_window=4096),
        {"attention.window": 4096, "attention.local_layers": None},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        _mistral(4096, 14336, 32, 32000, rope_theta=1e6, sliding_window=None),
        {"attention.window": None, "attention.rope.base": 1e6},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        _mistral(4096, 14336, 32, 32768, rope_theta=1e6, sliding_window=None),
        {"attention.window": None},
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        _mistral(5120, 14336, 32, 131072, head_dim=128, rope_theta=1e6, sliding_window=None),
        {"attention.head_dim": 128},
    ),
    "HuggingFaceH4/zephyr-7b-beta": (
        _mistral(4096, 14336, 32, 32000, rope_theta=10000.0, sliding_window=4096),
        {"attention.window": 4096},
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        {**_mistral(4096, 14336, 32, 32000), **_MIXTRAL},
        {"experts.num_experts": 8, "experts.load_balance_weight": 0.02, "attention.window": None},
    ),
    "Qwen/Qwen2-0.5B": (
        _qwen2(896, 4864, 14, 151936, num_key_value_heads=2),
        {"attention.qkv_bias": True},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (
        _qwen2(896, 4864, 14, 151936, num_key_value_heads=2, use_mrope=False),
        {"output.tied": True, "attention.window": None},
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        _qwen2(3584, 18944, 28, 152064, num_key_value_heads=4, tie_word_embeddings=False),
        {"output.tied": False},
    ),
    "Qwen/Qwen2.5-Coder-32B-Instruct": (
        _qwen2(5120, 27648, 40, 152064, num_key_value_heads=8, tie_word_embeddings=False),
        {"attention.rope.base": 1e6},
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        _distilled(1536, 8960, 12, 151936, num_key_value_heads=2) | {"rope_theta": 10000},
        {"attention.rope.base": 1e4},
    ),
    "Qwen/Qwen3-0.6B": (
        _qwen3(1024, 3072, 16, 151936),
        {"attention.head_dim": 128, "attention.qk_norm": "head", "attention.window": None},
    ),
    "Qwen/Qwen3-8B": (
        _qwen3(4096, 12288, 32, 151936, tie_word_embeddings=False),
        {"output.tied": False},
    ),
    "Qwen/Qwen3-30B-A3B": (
        {**_qwen3(2048, 6144, 32, 151936), **_QWEN3_MOE},
        {"experts.num_experts": 128, "experts.top_k": 8, "experts.dense_layers": ()},
    ),
    "google/gemma-2b": (
        {**sizes_of(2048, 16384, 8, 256000, num_key_value_heads=1), **_GEMMA}
        | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"activation": "gelu", "embedding.scale": 2048**0.5, "output.tied": True},
    ),
    "google/gemma-7b": (
        {**sizes_of(3072, 24576, 16, 256000, num_key_value_heads=16), **_GEMMA}
        | {"hidden_act": "gelu", "hidden_activation": None},
        {"activation": "gelu", "attention.head_dim": 256},
    ),
    "google/gemma-2-2b-it": (
        _gemma2(2304, 9216, 8, 256000, num_key_value_heads=4, query_pre_attn_scalar=256),
        {"attention.window": 4096, "attention.softcap": 50.0, "attention.scale": 1 / 16},
    ),
    "google/gemma-2-27b": (
        _gemma2(4608, 36864, 32, 256000, num_key_value_heads=16, query_pre_attn_scalar=144)
        | {"head_dim": 128},
        {"attention.scale": 1 / 12},
    ),
    "google/gemma-3-1b-it": (
        {**_gemma2(1152, 6912, 4, 262144), **_GEMMA3},
        {
            "attention.window": 512,
            "attention.rope.base": 1e6,
            "attention.softcap": None,
            "attention.qk_norm": "head",
        },
    ),
    "microsoft/phi-2": (
        {**sizes_of(2560, 10240, 32, 51200, num_key_value_heads=32), **_PHI},
        {"attention.rope.fraction": 0.4, "dropout": 0.1},
    ),
    "microsoft/phi-1_5": (
        {**sizes_of(2048, 8192, 32, 51200, num_key_value_heads=None), **_PHI}
        | {"partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
        {"attention.rope.fraction": 0.5, "attention.num_kv_heads": 32},
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        _phi3(3072, 8192, 32, 32064, num_key_value_heads=32, sliding_window=2047),
        {"attention.window": 2047},
    ),
    "microsoft/phi-4": (
        _phi3(5120, 17920, 40, 100352, num_key_value_heads=10, sliding_window=None)
        | {"max_position_embeddings": 16384, "rope_theta": 250000},
        {"attention.rope.base": 250000.0, "attention.window": None},
    ),
    "allenai/OLMo-2-1124-7B": (
        {**sizes_of(4096, 11008, 32, 100352), **_OLMO2},
        {"attention.qk_norm": "all", "norms.placement": "post"},
    ),
    "allenai/Olmo-3-7B-Instruct": (
        {**sizes_of(4096, 11008, 32, 100278), **_OLMO3},
        {
            "attention.qk_norm": "all",
            "attention.rope.kind": "yarn",
            "attention.local_rope": Rope(5e5),
            "attention.window": 4096,
        },
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {**sizes_of(2048, 1024, 16, 50304), **_OLMOE},
        {
            "experts.num_experts": 64,
            "experts.dim": 1024,
            "attention.qk_norm": "all",
            "experts.normalise": False,
        },
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {**_qwen2(2048, 5632, 16, 151936), **_QWEN2_MOE},
        {"experts.shared_dim": 5632, "experts.shared_gate": True, "attention.window": None},
    ),
    "ibm-granite/granite-3.3-2b-instruct": (
        {**_llama(2048, 8192, 32, 49159), **_GRANITE},
        {"attention.scale": 1 / 64, "embedding.scale": 12.0, "output.scale": 1 / 8}
        | {"residual_scale": 0.22},
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {**_llama(2048, 11008, 16, 128256), **_SMOLLM3, "tie_word_embeddings": True},
        {"attention.rope_layers": (True, True, True, False, True, True), "attention.window": None},
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        {**_mistral(4096, 12288, 32, 131072), **_MINISTRAL},
        {
            "attention.window": 32768,
            "attention.local_layers": (False, True, True, True, False, True),
        },
    ),
    "zai-org/GLM-4-9B-0414": (
        {**sizes_of(4096, 13696, 32, 151552), **_GLM4},
        {
            "attention.rope.fraction": 0.5,
            "attention.rope.interleaved": True,
            "norms.placement": "sandwich",
            "attention.out_bias": False,
        },
    ),
    "zai-org/GLM-4.5-Air": (
        {**sizes_of(4096, 10944, 96, 151552), **_GLM4_MOE},
        {"experts.num_experts": 128, "experts.scores": "sigmoid", "experts.shared_dim": 1408}
        | {
            "experts.dense_layers": (0,),
            "attention.rope.fraction": 0.5,
            "attention.rope.interleaved": False,
            "attention.qk_norm": None,
        },
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {**sizes_of(2048, 10944, 16, 102400), **DEEPSEEK_V2},
        {
            "attention.head_dim": 192,
            "attention.latent.dim": 512,
            "attention.latent.query_dim": None,
            "attention.rope.kind": "yarn",
        }
        | {
            "experts.scores": "grouped_softmax",
            "attention.rope.attention_factor": 1.0,
            "experts.dense_layers": (0,),
        }
        | {"attention.scale": 192**-0.5 * MSCALE * MSCALE},
    ),
    "moonshotai/Moonlight-16B-A3B": (
        {**sizes_of(2048, 11264, 16, 163840), **MOONLIGHT},
        {
            "experts.scores": "sigmoid",
            "attention.scale": None,
            "attention.rope.interleaved": True,
            "attention.latent.rope_dim": 64,
        },
    ),
    "unsloth/DeepSeek-V3-0324-BF16": (
        {**sizes_of(7168, 18432, 128, 129280), **DEEPSEEK_V3},
        {
            "experts.num_groups": 8,
            "experts.top_groups": 4,
            "attention.latent.query_dim": 1536,
            "attention.latent.value_dim": 128,
        }
        | {"experts.shared_dim": 2048, "experts.dense_layers": (0, 1, 2)},
    ),
    "openai/gpt-oss-120b": (
        {
            **sizes_of(2880, 2880, 64, 201088),
            **GPT_OSS,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
        {
            "experts.num_experts": 128,
            "experts.limit": 7.0,
            "attention.sinks": True,
            "attention.rope.kind": "yarn",
        },
    ),
    "openai/gpt-oss-20b": (
        {**sizes_of(2880, 2880, 64, 201088), **GPT_OSS},
        {
            "attention.window": 128,
            "attention.local_layers": (True, False) * 3,
            "attention.rope.base": 150000,
            "attention.rope.truncate": False,
        }
        | {
            "experts.load_balance_weight": 0.9,
            "activation": "quick_gelu",
            "attention.rope.length": 4096,
        },
    ),
    "unsloth/gpt-oss-20b-BF16": (
        {**sizes_of(2880, 2880, 64, 201088), **UNPACKED_GPT_OSS},
        {
            "experts.num_experts": 32,
            "experts.dim": 2880,
            "experts.bias": True,
            "attention.out_bias": True,
        },
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct, text_config": (
        {**sizes_of(5120, 8192, 40, 202048), **LLAMA4_TEXT},
        {
            "attention.chunked": True,
            "attention.local_layers": (True, True, True, False, True, True),
            "attention.rope.high": 1.0,
        }
        | {
            "attention.query_growth": (0.1, 8192.0),
            "experts.dim": 8192,
            "experts.shared_dim": 8192,
        },
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": (
        {**sizes_of(4096, 14336, 32, 256000), **_COHERE2},
        {
            "norms.kind": "layer_unbiased",
            "parallel": True,
            "output.scale": 0.25,
            "attention.rope.interleaved": True,
        }
        | {"attention.rope_layers": (True, True, True, False, True, True)},
    ),
    "nvidia/Minitron-4B-Base": (
        {**sizes_of(3072, 9216, 24, 256000), **_NEMOTRON},
        {
            "activation": "squared_relu",
            "mlp.gated": False,
            "norms.kind": "layer_offset",
            "attention.rope.fraction": 0.5,
        },
    ),
    "openai-community/gpt2": (_gpt2(768, 12), {"output.tied": True, "mlp.dim": 3072}),
    "openai-community/gpt2-medium": (
        _gpt2(1024, 16, n_special=0, predict_special_tokens=True),
        {"dropout": 0.1},
    ),
    "distilbert/distilgpt2": (_gpt2(768, 12, _num_labels=1, **LABELS), {"attention.rope": None}),
    "EleutherAI/pythia-160m": (
        _neox(768, 3072, 12, 50304),
        {"attention.rope.fraction": 0.25, "parallel": True},
    ),
    "EleutherAI/gpt-neox-20b": (
        _neox(6144, 24576, 64, 50432, hidden_act="gelu_fast"),
        {"activation": "gelu"},
    ),
    "bigcode/starcoder2-3b": (
        {**sizes_of(3072, 12288, 24, 49152), **_STARCODER} | {"rope_theta": 999999.4420358813},
        {"attention.window": 4096, "mlp.bias": True},
    ),
    **PUBLISHED_ENCODERS,
    **HYBRIDS,
    **TOWERS,
}


ENCODERS = (
    "bert",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "vit",
    "xlm-roberta",
    "dinov2",
)


def layers_field(model_type: str) -> str:
    """Returns the field with the number of layers."""
    return {"gpt2": "n_layer", "distilbert": "n_layers"}.get(model_type, "num_hidden_layers")


# Sizes with which a model of any family is small.
TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "dim": 8,
    "hidden_dim": 8,
    "n_heads": 2,
    "embedding_size": 4,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 8,
    "n_embd": 8,
    "n_head": 2,
    "rotary_pct": 0.5,
    "n_positions": 8,
    "image_size": 4,
    "patch_size": 2,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "projection_dim": 4,
    "projection_size": 4,
}
# And those of one family.
TINY_OF = {**TINY_EXPERTS, **TINY_HYBRIDS}


def tiny_config(content: dict[str, Any], layers: int, **fields: Any) -> dict[str, Any]:
    """The config.json of a small model of the family of a published one."""
    tiny = {**TINY, **TINY_OF.get(content["model_type"], {})}
    small = {name: tiny.get(name, value) for name, value in content.items()} | fields
    if content["model_type"] == "cohere2":  # which turns whole heads
        small["rotary_pct"] = content["rotary_pct"]
    return with_layers(small, layers)


def with_layers(content: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config.json with another number of layers."""
    shorter = dict(content)
    for name in ("out_features", "out_indices", "stage_names"):  # one for each layer
        shorter.pop(name, None)
    for name in ("layer_types", "no_rope_layers"):
        if shorter.get(name) is not None:
            shorter[name] = shorter[name][:layers]
    shorter[layers_field(content["model_type"])] = layers
    return shorter


def initialised(folder: Path, content: dict[str, Any]) -> Any:
    """A model of a config.json, by a folder without tensors."""
    (folder / "config.json").write_text(json.dumps(content))
    numpy_files.save_file({}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all is initialised
        return with_values(from_pretrained(folder, strict=False))
