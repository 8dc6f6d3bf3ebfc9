# SPDX-License-Identifier: Apache-2.0
"""Fields of the config.json of published models with experts, but for plain sizes."""

from __future__ import annotations

import math
from typing import Any

_MLA = {"attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001}
_MLA |= {"first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512}
_MLA |= {"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64}
_MLA |= {"n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6}
_MLA |= {"num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "seq_aux": True}
_MLA |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "tie_word_embeddings": False}
_MLA |= {"topk_group": 1, "v_head_dim": 128, "max_position_embeddings": 163840}
_MLA |= {"rms_norm_eps": 1e-6, "routed_scaling_factor": 1.0}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
_YARN |= {"original_max_position_embeddings": 4096, "type": "yarn"}
MSCALE = 0.1 * 0.707 * math.log(40) + 1
DEEPSEEK_V2 = {**_MLA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
DEEPSEEK_V2 |= {"rope_scaling": _YARN, "rope_theta": 10000, "scoring_func": "softmax"}
DEEPSEEK_V2 |= {"topk_method": "greedy"}
MOONLIGHT = {**_MLA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
MOONLIGHT |= {"ep_size": 1, "max_position_embeddings": 8192, "norm_topk_prob": True}
MOONLIGHT |= {"num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 50000.0}
MOONLIGHT |= {"routed_scaling_factor": 2.446, "scoring_func": "sigmoid"}
MOONLIGHT |= {"topk_method": "noaux_tc"}
DEEPSEEK_V3 = {**MOONLIGHT, "first_k_dense_replace": 3, "max_position_embeddings": 163840}
DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256}
DEEPSEEK_V3 |= {"n_shared_experts": 1, "num_experts_per_tok": 8, "num_key_value_heads": 128}
DEEPSEEK_V3 |= {"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-6}
DEEPSEEK_V3 |= {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
DEEPSEEK_V3 |= {"rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4}

GPT_OSS: dict[str, Any] = {"architectures": ["GptOssForCausalLM"]}
GPT_OSS |= {"attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4}
GPT_OSS |= {"head_dim": 64, "hidden_act": "silu", "initial_context_length": 4096}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
GPT_OSS |= {"max_position_embeddings": 131072, "model_type": "gpt_oss", "num_experts_per_tok": 4}
GPT_OSS |= {"num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32}
GPT_OSS |= {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000}
GPT_OSS |= {"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0}}
GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096, "rope_type": "yarn"}
GPT_OSS["rope_scaling"] |= {"truncate": False}
GPT_OSS |= {"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0}
GPT_OSS |= {"tie_word_embeddings": False, "eos_token_id": 200002, "pad_token_id": 199999}
GPT_OSS["quantization_config"] = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}
UNPACKED_GPT_OSS = {n: value for n, value in GPT_OSS.items() if n != "quantization_config"}

LLAMA4_TEXT: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
LLAMA4_TEXT |= {"attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0}
LLAMA4_TEXT |= {"attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192}
LLAMA4_TEXT |= {"for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu"}
LLAMA4_TEXT |= {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384}
LLAMA4_TEXT |= {"layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12}
LLAMA4_TEXT |= {"max_position_embeddings": 10485760, "no_rope_layers": [1, 1, 1, 0] * 12}
LLAMA4_TEXT |= {"num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8}
LLAMA4_TEXT |= {"num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018}
LLAMA4_TEXT |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_qk_norm": True}
LLAMA4_TEXT |= {"rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}}
LLAMA4_TEXT["rope_scaling"] |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
LLAMA4_TEXT |= {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
LLAMA4_TEXT |= {"tie_word_embeddings": False}

# Sizes with which models are small, beside those of all families.
TINY_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 2, "q_lora_rank": None},
    "llama4_text": {"intermediate_size_mlp": 8, "attention_chunk_size": 3, "floor_scale": 2},
    "deepseek_v3": {"num_key_value_heads": 2, "n_group": 2, "topk_group": 1},
}
