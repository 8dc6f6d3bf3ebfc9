# SPDX-License-Identifier: Apache-2.0
"""Facts about the fields of any ``config.json``: types, and which of them change nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from shardax.models.transformer import TransformerConfig, find_activation

# Fields that change nothing in what a model computes.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
_num_labels architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens
bos_token_id classifier_dropout cross_attention_hidden_size decoder_start_token_id
diversity_penalty do_sample dtype early_stopping eos_token_id exponential_decay_length_penalty
finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty mask_token_id
max_length max_position_embeddings max_sequence_length max_window_layers min_length
model_max_length model_type no_repeat_ngram_size num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_past output_router_logits output_scores pad_token
pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sentence_transformers sep_token_id suppress_tokens task_specific_params
temperature tokenizer_class tokenizer_model_max_length tokenizer_padding_side top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
unsloth_fixed unsloth_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
# Fields that change nothing at these values, where a family does not read them itself.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "chunk_size_feed_forward": (0,),
    "final_logit_softcapping": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "qk_layernorm": (False, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}
ACTIVATION_NAMES = {
    "gelu": "exact_gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation_name(function: Any) -> str | None:
    """Returns the name of an activation in ``TransformerConfig``, or None."""
    names = sorted(set(ACTIVATION_NAMES.values()))
    if isinstance(function, str):
        return function if function in names else None
    return next((name for name in names if find_activation(name) is function), None)


def published_activation(name: str) -> str:
    """Returns how ``config.json`` names an activation of ``TransformerConfig``."""
    published = {"exact_gelu": "gelu", "gelu": "gelu_pytorch_tanh"}
    return published.get(name, name)


# --- types ----------------------------------------------------------------------------------------


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (type(value) is float and math.isfinite(value))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (_is_boolean, "true or false"),
    "float": (_is_number, "a number"),
    "int": (_is_integer, "an integer"),
    "str": (_is_text, "a text"),
    "dict": (_is_table, "a table of fields"),
    "texts": (_is_list_of(_is_text), "a list of texts"),
    "integers": (_is_list_of(_is_integer), "a list of integers"),
}
# Of fields that families compute with: the type, and ? where null is a value.
_TYPES = {
    name: kind
    for kind, names in {
        "bool": "scale_attn_weights use_parallel_residual",
        "bool?": "use_sliding_window",
        "dict?": "id2label rope_parameters rope_scaling",
        "float": "query_pre_attn_scalar rotary_emb_base rotary_pct",
        "float?": "partial_rotary_factor rope_local_base_freq rope_theta",
        "int": "decoder_sparse_step hidden_size image_size max_position_embeddings "
        "max_window_layers n_embd num_hidden_layers num_labels patch_size",
        "int?": "_sliding_window_pattern n_inner num_experts num_local_experts sliding_window "
        "sliding_window_pattern",
        "integers?": "mlp_only_layers",
        "str?": "hidden_act hidden_activation model_type",
        "texts?": "architectures layer_types",
    }.items()
    for name in names.split()
}
# The type of each field of TransformerConfig, as it is annotated.
_TARGETS = {field.name: str(field.type) for field in dataclasses.fields(TransformerConfig)}
_POSITIVE = frozenset(
    [
        *("channels", "embed_dim", "expert_dim", "experts_per_token", "head_dim", "image_size"),
        *("mlp_dim", "num_heads", "num_kv_heads", "num_layers", "patch_size", "vocab_size"),
        "window",
    ]
)
_POSITIVE_FIELDS = frozenset(
    [
        *("_sliding_window_pattern", "decoder_sparse_step", "hidden_size", "image_size", "n_embd"),
        *("num_hidden_layers", "patch_size", "query_pre_attn_scalar", "sliding_window"),
        "sliding_window_pattern",
    ]
)


def type_problem(name: str, value: Any, target: str | None = None) -> str | None:
    """Says what is wrong with the type of a field, or with a size below one.

    ``target`` is the field of ``TransformerConfig`` that it sets, if it sets one.
    """
    if target == "activation":
        kind = "str"
    elif target is not None:
        kind = _TARGETS[target].replace(" | None", "?")
    else:
        kind = _TYPES.get(name, "")
    check, text = _CHECKS.get(kind.removesuffix("?"), (None, ""))
    if check is None or (value is None and kind.endswith("?")):
        return None
    if value is None and (target in ("num_kv_heads", "head_dim") or (target and kind == "bool")):
        return None  # as if it were left out, or false
    if not check(value):
        return f"{name}={brief(value)} is not {text}"
    if (target in _POSITIVE or name in _POSITIVE_FIELDS) and value <= 0:
        return f"{name}={value!r} is not positive"
    return None


def brief(value: Any) -> str:
    """Returns the ``repr`` of a value, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an integer of many digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 120 else text[:120] + "..."


def is_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> bool | None:
    """Whether a field changes nothing at its value; None if any value does."""
    if name == "layer_types":  # of a family without kinds of layers
        return value is None or set(value) <= {"full_attention"}
    return value in neutral[name] if name in neutral else None
