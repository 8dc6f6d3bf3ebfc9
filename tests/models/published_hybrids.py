# SPDX-License-Identifier: Apache-2.0
"""The config.json of published models with recurrent layers."""

from __future__ import annotations

from typing import Any

from shardax.models import GatedDeltaConfig

_LFM2: dict[str, Any] = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
_LFM2 |= {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0}
_LFM2 |= {"block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5}
_LFM2 |= {"block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True}
_LFM2 |= {"conv_L_cache": 3, "conv_bias": False, "conv_use_xavier_init": True}
_LFM2 |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000}
_LFM2 |= {"norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16}
_LFM2 |= {"num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": True}
_LFM2 |= {"vocab_size": 65536, "pad_token_id": 0, "eos_token_id": 7, "theta": 1000000.0}

_MAMBA2: dict[str, Any] = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}
_MAMBA2 |= {"chunk_size": 256, "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu"}
_MAMBA2 |= {"layer_norm_epsilon": 1e-5, "norm_before_gate": True, "rescale_prenorm_residual": False}
_MAMBA2 |= {"residual_in_fp32": True, "rms_norm": True, "state_size": 128, "time_step_floor": 1e-4}
_MAMBA2 |= {"time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1}
_MAMBA2 |= {"time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "pad_token_id": 0}

_QWEN3_NEXT: dict[str, Any] = {"architectures": ["Qwen3NextForCausalLM"]}
_QWEN3_NEXT |= {"attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1}
_QWEN3_NEXT |= {"full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"}
_QWEN3_NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
_QWEN3_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_QWEN3_NEXT |= {"linear_value_head_dim": 128, "max_position_embeddings": 262144}
_QWEN3_NEXT |= {"mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512}
_QWEN3_NEXT |= {"norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}
_QWEN3_NEXT |= {"num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-6}
_QWEN3_NEXT |= {"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000}
_QWEN3_NEXT |= {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512}
_QWEN3_NEXT |= {"tie_word_embeddings": False, "use_sliding_window": False}

_FALCON_H1: dict[str, Any] = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}
_FALCON_H1 |= {"attention_bias": False, "attention_dropout": 0.0, "attention_in_multiplier": 1.0}
_FALCON_H1 |= {"attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381}
_FALCON_H1 |= {"head_dim": 64, "hidden_act": "silu", "key_multiplier": 0.390625}
_FALCON_H1 |= {"lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True}
_FALCON_H1 |= {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128}
_FALCON_H1 |= {"mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24}
_FALCON_H1 |= {"mamba_norm_before_gate": False, "mamba_proj_bias": False}
_FALCON_H1 |= {"mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384}
_FALCON_H1 |= {"mlp_bias": False, "mlp_expansion_factor": 8}
_FALCON_H1 |= {"mlp_multipliers": [0.8838834764831844, 0.5859375], "num_key_value_heads": 2}
_FALCON_H1 |= {"num_logits_to_keep": 1, "projectors_bias": False, "rms_norm_eps": 1e-5}
_FALCON_H1 |= {"rope_scaling": None, "rope_theta": 1e11, "ssm_in_multiplier": 1.25}
_FALCON_H1 |= {"ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False}
_FALCON_H1["ssm_multipliers"] = [0.3535533905932738, 0.25, 0.3535533905932738, 0.5]
_FALCON_H1["ssm_multipliers"] += [0.3535533905932738]

HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LiquidAI/LFM2-1.2B": (
        {**_LFM2, "hidden_size": 2048, "block_dim": 2048, "block_ff_dim": 12288}
        | {"conv_dim": 2048, "conv_dim_out": 2048, "intermediate_size": 12288},
        {"mlp.dim": 8192, "recurrence.layers": (True, True, False, True, True, False)}
        | {
            "attention.qk_norm": "head",
            "attention.rope.base": 1e6,
            "output.tied": True,
            "attention.num_kv_heads": 8,
        },
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": (
        {**_MAMBA2, "hidden_size": 4096, "intermediate_size": 8192, "n_groups": 8, "num_heads": 128}
        | {"num_hidden_layers": 64, "tie_word_embeddings": False, "time_step_rank": 256}
        | {"vocab_size": 32768},
        {"mlp": None, "output.tied": False, "attention.rope": None},
    ),
    "AntonV/mamba2-130m-hf": (
        {**_MAMBA2, "hidden_size": 768, "n_groups": 1, "num_heads": 24, "num_hidden_layers": 24}
        | {"tie_word_embeddings": True, "time_step_rank": 48, "vocab_size": 50288}
        | {"time_step_limit": [0.0, float("inf")]},
        {"output.tied": True, "norms.epsilon": 1e-5},
    ),
    "tiiuae/Falcon-H1-0.5B-Instruct": (
        {**_FALCON_H1, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36}
        | {"num_attention_heads": 8, "vocab_size": 32784},
        {"recurrence.beside": True, "recurrence.layers": None, "attention.scale": 0.390625 / 8}
        | {
            "mlp.gate_scale": 0.8838834764831844,
            "mlp.out_scale": 0.5859375,
            "attention.rope.base": 1e11,
        }
        | {"recurrence.in_scale": 1.25, "attention.out_scale": 0.9375, "output.scale": 0.0390625},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {**_QWEN3_NEXT, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "vocab_size": 151936},
        {
            "attention.gate": True,
            "norms.kind": "rms_offset",
            "attention.rope.fraction": 0.25,
            "experts.num_experts": 512,
        }
        | {"recurrence.mixer": GatedDeltaConfig(16, 128, 32, 128), "experts.shared_gate": True}
        | {"recurrence.layers": (True, True, True, False, True, True), "attention.rope.base": 1e7},
    ),
}
TINY_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"block_ff_dim": 8, "block_multiple_of": 4, "full_attn_idxs": [1]},
    "mamba2": {"num_heads": 4, "head_dim": 4, "state_size": 3, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 3, "mamba_d_ssm": 12, "mamba_n_groups": 2}
    | {"mamba_d_state": 3, "mamba_chunk_size": 4},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
    | {"linear_key_head_dim": 2, "linear_value_head_dim": 3},
}
