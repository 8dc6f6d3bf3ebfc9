# SPDX-License-Identifier: Apache-2.0
"""Tiny models of ``transformers``, of every family, with knobs that are not the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 4, "pad_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0} | {
    "original_max_position_embeddings": 16
}
LATENT = {**SIZES, "num_key_value_heads": 8, "pad_token_id": 0, "q_lora_rank": 12}
LATENT |= {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATENT |= {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
# A bound within what the experts' units have here.
CLIPPED = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.3}
CLIPPED |= {"sliding_window": 3}
CHUNKED = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "floor_scale": 3}
CHUNKED |= {"intermediate_size_mlp": 40, "attention_chunk_size": 5, "attn_scale": 0.5}
CHUNKED |= {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]}
DELTA = {"head_dim": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 6}
DELTA |= {"linear_num_value_heads": 8, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3}
DELTA |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA |= {"shared_expert_intermediate_size": 20}
STATE_SPACE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8}
STATE_SPACE |= {"head_dim": 8, "state_size": 6, "chunk_size": 5, "pad_token_id": 0}
BESIDE = {"mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
BESIDE |= {"mamba_chunk_size": 5, "mamba_d_conv": 3, "attention_in_multiplier": 1.3}
BESIDE |= {"attention_out_multiplier": 0.7, "embedding_multiplier": 2.5, "key_multiplier": 0.4}
BESIDE |= {"lm_head_multiplier": 0.5, "mlp_multipliers": [0.8, 0.6], "ssm_in_multiplier": 1.2}
BESIDE |= {"ssm_multipliers": [0.3, 1.5, 0.7, 1.4, 0.6], "ssm_out_multiplier": 0.9}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

MODERN = {
    **SIZES,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
HEADS = {
    "": "ForMaskedLM",
    "-bare": "Model",
    "-classes": "ForSequenceClassification",
    "-each": "ForTokenClassification",
    "-span": "ForQuestionAnswering",
}


def _heads(name: str, title: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the cases of an encoder with each head."""
    return {
        name + suffix: (
            f"{title}Config",
            title + head,
            options if suffix in ("", "-bare", "-span") else {**options, "num_labels": 5},
        )
        for suffix, head in HEADS.items()
    }


# By name: the class of the config, of the model, and what is not the default.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama-biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3}},
    ),
    "llama-yarn": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 3}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**GROUPED, "head_dim": 6, "attention_bias": True},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "sliding_window": 5},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GROUPED, "head_dim": 6}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 3,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 3,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 8,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", {**GROUPED, "hidden_size": 64}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**GROUPED, "hidden_size": 64, "sliding_window": 4, "rope_parameters": PARTIAL},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**GROUPED, "attention_bias": True}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 8}
        | {"n_inner": 40, "activation_function": "gelu"},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**SIZES, "hidden_size": 64, "rope_parameters": PARTIAL},
    ),
    "gpt_neox-serial": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**SIZES, "hidden_size": 64, "use_parallel_residual": False},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**GROUPED, **CLIPPED, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "gpt_oss-plain": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**GROUPED, **CLIPPED, "attention_bias": False, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 1, "swiglu_alpha": 0.5},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**GROUPED, **CHUNKED, "interleave_moe_layer_step": 2}
        | {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.0}},
    ),
    "llama4_text-plain": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**GROUPED, **CHUNKED, "attn_temperature_tuning": False, "use_qk_norm": False}
        | {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 2}
        | {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "moe_layers": [0, 3]},
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 3}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GROUPED, "attention_bias": True, "embedding_multiplier": 3.0, "logits_scaling": 5.0}
        | {"residual_multiplier": 0.3, "attention_multiplier": 0.25},
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {**GROUPED, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 3},
    ),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {**GROUPED, "sliding_window": 3, "head_dim": 6}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {**GROUPED, "sliding_window": 3, "num_hidden_layers": 5}
        | {"rope_parameters": {**GEMMA3_ROPES, "full_attention": YARN}},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**GROUPED, "head_dim": 8}),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**GROUPED, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True}
        | {"n_shared_experts": 2, "head_dim": 8, "attention_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
        | {"routed_scaling_factor": 1.5, "attention_bias": True},
    ),
    "deepseek_v3-direct": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "mlp_bias": True},
    ),
    "deepseek_v2-greedy": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "q_lora_rank": None, "attention_bias": True, "v_head_dim": 10},
    ),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {**GROUPED, "sliding_window": 3, "num_hidden_layers": 5, "logit_scale": 0.5},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**GROUPED, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
        | {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2-biases": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**GROUPED, "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_bias": True}
        | {"tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**STATE_SPACE, "n_groups": 2, "conv_kernel": 3, "time_step_limit": (0.3, 0.9)},
    ),
    "mamba2-biases": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**STATE_SPACE, "n_groups": 1, "use_bias": True, "use_conv_bias": False}
        | {"tie_word_embeddings": True, "hidden_act": "gelu", "expand": 1, "head_dim": 4},
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**GROUPED, **BESIDE}),
    "falcon_h1-norms": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**GROUPED, **BESIDE, "mamba_rms_norm": True, "mamba_proj_bias": True, "head_dim": 6}
        | {"mamba_conv_bias": False, "time_step_limit": (0.3, 0.9), "attention_bias": True},
    ),
    "falcon_h1-biases": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**GROUPED, **BESIDE, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"projectors_bias": True, "mlp_bias": True, "mamba_d_ssm": None, "hidden_act": "gelu"}
        | {"tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GROUPED, **DELTA, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "qwen3_next-biases": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GROUPED, **DELTA, "attention_bias": True, "norm_topk_prob": False}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"linear_num_value_heads": 4, "tie_word_embeddings": True, "decoder_sparse_step": 2}
        | {"hidden_act": "gelu", "rope_parameters": PARTIAL},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**GROUPED, "head_dim": 8}),
    "bert": ("BertConfig", "BertForMaskedLM", SIZES),
    "bert-bare": ("BertConfig", "BertModel", SIZES),
    "bert-classes": ("BertConfig", "BertForSequenceClassification", {**SIZES, "num_labels": 5}),
    **_heads("bert", "Bert", SIZES),
    **_heads("roberta", "Roberta", {**SIZES, "pad_token_id": 1, "hidden_act": "relu"}),
    "xlm_roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        {**SIZES, "pad_token_id": 5, "type_vocab_size": 1},
    ),
    **_heads(
        "distilbert",
        "DistilBert",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 8}
        | {"max_position_embeddings": 64, "activation": "relu"},
    ),
    **_heads("electra", "Electra", {**SIZES, "embedding_size": 16, "hidden_act": "relu"}),
    "electra-discriminator": (
        "ElectraConfig",
        "ElectraForPreTraining",
        {**SIZES, "embedding_size": 32},
    ),
    "electra-narrow-discriminator": (
        "ElectraConfig",
        "ElectraForPreTraining",
        {**SIZES, "embedding_size": 16, "hidden_act": "relu"},
    ),
    **_heads("mpnet", "MPNet", {**SIZES, "hidden_act": "relu"}),
    **_heads("modernbert", "ModernBert", MODERN),
    "modernbert-biases": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**MODERN, "attention_bias": True, "mlp_bias": True, "norm_bias": True}
        | {"classifier_bias": True, "classifier_activation": "relu", "decoder_bias": False},
    ),
    "modernbert-mean": (
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {**MODERN, "classifier_pooling": "mean", "num_labels": 4},
    ),
}
# Their positions follow from the padding tokens.
COUNTED_BY_PADDING = ("roberta", "xlm-roberta", "mpnet")
# In a batch padding changes their rows: growth of queries counts it, biases come from it.
READ_ALONE = ("falcon_h1", "lfm2", "llama4_text", "mamba2")
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def make(folder: Path, name: str, *, dtype: str = "float32", **saving: Any) -> Any:
    """Makes a model with drawn parameters, saves it, and returns it."""
    config, model, options = CASES[name]
    return make_model(folder, config, model, options, dtype=dtype, **saving)


def make_model(
    folder: Path, config: str, model: str, options: Any, *, dtype: str = "float32", **saving: Any
) -> Any:
    """Makes a model of ``transformers`` by the names of its classes."""
    import torch
    import transformers

    torch.manual_seed(0)
    peer = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    for parameter in peer.parameters():
        parameter.data.normal_(0, 0.2)
    for name, buffer in peer.named_buffers():  # which is saved, and is zeros at first
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
    peer = peer.to(getattr(torch, dtype))
    peer.save_pretrained(folder, **saving)
    return peer


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and their mask: the second row is padded on the left."""
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    mask = np.ones((2, 12), bool)
    mask[1, :5] = False
    return tokens, mask


def logits(peer: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes what the model of ``transformers`` returns first, in float32."""
    import torch

    if peer.config.model_type in READ_ALONE and not mask.all():
        return logits_without_padding(peer, tokens, mask)

    positions = torch.from_numpy(np.maximum(np.cumsum(mask, 1) - 1, 0))
    options = {"attention_mask": torch.from_numpy(mask.astype(int)), "position_ids": positions}
    if peer.config.model_type in READ_ALONE:  # a cache without attention has no length there
        options["use_cache"] = False
    if peer.config.model_type in COUNTED_BY_PADDING:
        del options["position_ids"]
    with torch.no_grad():
        result = peer(torch.from_numpy(tokens), **options)
    if "start_logits" in result:
        return torch.stack([result.start_logits, result.end_logits], -1).float().numpy()
    if type(peer).__name__ == "ElectraForPreTraining":
        return result.logits[..., None].float().numpy()
    return result[0].float().numpy()


def logits_without_padding(peer: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes each row alone."""
    result = np.zeros((*tokens.shape, peer.config.vocab_size), np.float32)
    for row, real in enumerate(mask):
        result[row, real] = logits(peer, tokens[row][real][None], real[real][None])[0]
    return result
