# SPDX-License-Identifier: Apache-2.0
"""Words of published steps: the names of their fields, and what the texts of some mean.

A name or a text that is not known here is an error that lists what is; nothing of a row is passed
over. Fields of results and remarks are known and say nothing about the time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from shardax.extend import did_you_mean
from shardax.plan.errors import RowError

ROW_FIELDS = (
    # What a step is.
    *("arch", "attention_kernel", "chips", "compile", "devices", "form", "global_batch_seqs"),
    *("grad_accum", "group", "hw", "hw_note", "kind", "layout", "microbatch_seqs", "offload"),
    *("optimizer", "overlap_gradients", "overlap_tensor", "precision", "recompute"),
    *("seq_len", "seqs_per_dp_rank_per_microbatch", "software", "source", "task"),
    # What was measured, and remarks.
    *("complete", "complete_strict", "date", "flop_check", "id", "memory_per_chip", "missing"),
    *("model", "moe", "notes", "outcome", "result_printed", "step_seconds", "step_seconds_how"),
    *("tokens_per_s_per_chip",),
)
"""Fields of a row."""

ARCH_FIELDS = (
    *("attention_type", "embed", "experts", "first_dense", "global_head_dim", "global_kv_heads"),
    *("head_dim", "heads", "kv_heads", "kv_lora_rank", "layers", "local_global", "mlp_hidden"),
    *("activation", "active_params", "bias", "moe_layer_freq", "norm", "params"),
    *("mlp_mats", "moe_every", "moe_mlp", "mtp_layers", "n_group", "origin", "pos"),
    *("q_lora_rank", "qk_nope", "qk_rope", "shared_experts", "sliding_window", "tied", "top_k"),
    *("topk_group", "v_head", "vocab"),
)
"""Fields of a row's model."""

LAYOUT_FIELDS = (
    # Degrees and groups.
    *("cp", "dcn_dp", "dcn_fsdp", "dp", "ep", "etp", "expert_tensor_parallel_size", "fsdp", "pp"),
    *("slices", "sp", "tp", "vpp", "zero", "zero1_group"),
    # What runs beside what, and how.
    *("async_tp", "compile", "cp_balanced", "cp_kind", "cuda_graph_impl", "cuda_graph_scope"),
    *("grad_reduce_dtype", "mixed_precision_mode", "moe_a2a_overlap", "overlap_gradients"),
    *("overlap_grad_reduce", "overlap_param_gather", "overlap_tensor", "tp_comm_overlap"),
    # Where tokens go.
    *("capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor"),
    *("moe_router_group_topk", "moe_router_num_groups"),
    # Adapters.
    *("lora_rank",),
    # Choices of a software within the above, and remarks.
    *("cuda_graph_modules", "dispatcher", "dp_as_printed", "dp_note", "dp_replicate"),
    *("dp_shard", "fsdp_axis", "reshard_after_forward"),
    *("fsdp_transpose_axis", "fused_grouped_mlp", "ici_data", "model_parallel_printed"),
    *("moe_dispatcher", "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_grouped_gemm"),
    *("moe_pad_expert_input_to_capacity", "moe_permute_fusion", "moe_router_dtype"),
    *("moe_router_force_load_balancing", "moe_router_fusion", "moe_router_load_balancing_type"),
    *("moe_shared_expert_overlap", "moe_token_dispatcher_type", "moe_token_drop_policy"),
    *("num_vocab_tiling", "pp_layout", "pp_schedule", "sharding", "tp_mode"),
)
"""Fields of a row's layout."""

TASKS = ("pretrain", "sft", "lora")
ATTENTION_TYPES = ("mha", "gqa", "mqa", "mla")
CONTEXT_KINDS = ("ring", "zigzag", "gather", "ulysses")
OPTIMIZERS = ("adam", "adafactor", "lion", "muon", "sgd", "shampoo", "lamb")
ATTENTION_KERNELS = (
    *("flash", "flash1", "flash2", "flash3", "flash4", "cudnn", "splash"),
    *("unfused", "fused softmax"),
)
"""Kernels of attention; ``flash`` is that of its software and hardware."""


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuses names that are not known, and lists those that are."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        hint = did_you_mean(unknown[0], known)
        listed = ", ".join(map(repr, unknown))
        raise RowError(f"{what} has no {listed}.{hint} It may have {', '.join(sorted(known))}.")


def unknown_words(name: str, text: object, known: Iterable[str], remedy: str = "") -> RowError:
    """Returns the error for a text that is not known, which lists what is."""
    listed = ", ".join(map(repr, known))
    return RowError(f"The row's {name} {text!r} is not known; it is {listed}. {remedy}".rstrip())


def task_of(row: Mapping[str, Any]) -> str:
    """Returns the task of a row, one of ``TASKS``."""
    text = str(row.get("task") or "pretrain").lower().replace("-", "")
    names = {
        "pretrain": "pretrain", "pretraining": "pretrain", "train": "pretrain",
        "continued pretraining": "pretrain",
        "sft": "sft", "finetune": "sft", "finetuning": "sft", "full finetune": "sft",
        "lora": "lora",
    }  # fmt: skip
    if text not in names:
        raise unknown_words("task", row.get("task"), TASKS)
    return names[text]


_NEGATIONS = r"\b(no|not|non|never|without|disabled?|off)\b"
_ENGINES = "fused|cpu|paged|deepspeedcpu|distributed"  # before an optimizer's name, as FusedAdam


def optimizer_of(row: Mapping[str, Any]) -> str:
    """Returns the family of a row's optimizer, one of ``OPTIMIZERS``."""
    text = str(row.get("optimizer") or "adam").lower()
    families = set(
        re.findall(rf"(?<![a-z])(?:{_ENGINES})?({'|'.join(OPTIMIZERS)})w?(?![a-z])", text)
    )
    if families and not re.search(_NEGATIONS, text):
        return next(name for name in OPTIMIZERS if name in families)
    raise unknown_words("optimizer", row.get("optimizer"), OPTIMIZERS)


_FORMATS = {
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "f16": "fp16", "float16": "fp16",
    "fp32": "f32", "f32": "f32", "float32": "f32", "tf32": "f32",
    "fp8": "fp8", "float8": "fp8", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4", "fp4": "nvfp4",
    "int8": "int8",
}  # fmt: skip
_VARIANTS = ("e4m3", "e5m2", "o1", "o2")  # of a format, and levels of mixed precision
_NARROWEST = ("nvfp4", "mxfp8", "fp8", "int8", "fp16", "bf16", "f32")
_PRECISIONS = ("bf16", "fp16", "f32", "fp8", "fp8 rowwise", "mxfp8", "fp8-mx", "nvfp4", "int8")


def precision_of(row: Mapping[str, Any]) -> str:
    """Returns the precision of the products of a row's layers, as of ``TrainingStep``."""
    whole = str(row.get("precision") or "bf16").lower()

    # What stands in parentheses, or after a comma, is about other numbers than these.
    text = re.sub(r"\([^)]*\)", " ", whole)
    text = re.split(r"[;,]| by | for ", text)[0]
    words = [word for word in re.findall(r"[a-z]*\d+[a-z]*\d*", text) if word not in _VARIANTS]
    formats = {_FORMATS[word] for word in words if word in _FORMATS}
    if not formats or any(word not in _FORMATS for word in words):
        raise unknown_words("precision", row.get("precision"), _PRECISIONS)

    # Such as "bf16/fp16 mixed", of which a source does not say more; bf16 is as fast.
    if formats == {"bf16", "fp16"}:
        return "bf16" if text.strip().startswith("bf16") else "fp16"
    narrowest = next(name for name in _NARROWEST if name in formats)
    if narrowest == "fp8":
        if re.search(r"\bmx\b", text):
            return "mxfp8"
        return "fp8-row" if "row" in text else "fp8"
    return narrowest


def gradient_bytes_of(row: Mapping[str, Any]) -> int | None:
    """Returns the bytes of a gradient that devices send; None if a row does not say."""
    layout = row.get("layout") or {}
    named = str(layout.get("grad_reduce_dtype") or "").lower()
    if named:
        formats = {"bf16": 2, "fp16": 2, "fp32": 4}
        name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(named, named)
        if name not in formats:
            raise unknown_words("layout.grad_reduce_dtype", named, formats)
        return formats[name]
    said = re.search(r"(\w+) gradient", str(row.get("precision") or "").lower())
    if said and said[1] in _FORMATS:
        return 4 if _FORMATS[said[1]] == "f32" else 2
    return None


_FLASH = r"(flash[-_ ]?(attn|attention)?|\bfa)[-_ ]?v?"
_KERNEL_WORDS = (
    # The first that a text has.
    (r"fused softmax", "fused softmax"),
    (
        r"unfused|softmax|naive|eager|\bmath\b|plain|standard|vanilla|native|\bdot|\bxla\b",
        "unfused",
    ),
    (r"splash", "splash"),
    (rf"{_FLASH}1\b", "flash1"),
    (rf"{_FLASH}2\b", "flash2"),
    (rf"{_FLASH}3\b", "flash3"),
    (rf"{_FLASH}4\b", "flash4"),
    (r"cudnn|\bte\b|transformer engine", "cudnn"),
    (r"flash|flex|sdpa|efficient|xformers|triton|pallas|tokamax|\bauto\b|ring|ulysses", "flash"),
)


def attention_kernel_of(row: Mapping[str, Any]) -> str:
    """Returns the kernel of a row's attention; "" if it does not say."""
    if not row.get("attention_kernel"):
        return ""
    text = str(row["attention_kernel"]).lower()
    is_denied = re.search(_NEGATIONS, text) is not None
    for pattern, name in _KERNEL_WORDS:
        if not is_denied and re.search(pattern, text):
            return name
    raise unknown_words("attention_kernel", row["attention_kernel"], ATTENTION_KERNELS)


class Offload(NamedTuple):
    """What a step keeps on the host."""

    layers: int = 0  # whose activations are moved; -1 for all
    activations: tuple[str, ...] = ()  # of every layer, by MaxText's names
    optimizer: bool = False


ACTIVATIONS = (
    *("decoder_layer_input", "query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj"),
    *("context", "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"),
)
"""Activations of a layer that policies name."""

_OFFLOADS = (
    "none",
    "activation CPU offload, 20 layers",
    "host offload of decoder_layer_input, query_proj",
    "fine-grained activation offload",
    "optimizer states on CPU",
)


def offload_of(row: Mapping[str, Any]) -> Offload:
    """Returns what a row's step keeps on the host."""
    text = str(row.get("offload") or "none").lower()
    if text in ("none", "no", "off", "false"):
        return Offload()

    names = [name for name in ACTIVATIONS if re.search(rf"\b{name}(?![a-z])", text)]
    if "qkv_proj_offload" in text:
        names = ["qkv_proj"]
    layers = re.search(r"(\d+) layers", text)
    optimizer = bool(re.search(r"optimizer|\badam|zero-?offload", text))

    if names and not layers:
        return Offload(activations=tuple(names), optimizer=optimizer)
    if layers:
        return Offload(layers=int(layers[1]), optimizer=optimizer)
    if optimizer:
        return Offload(optimizer=True)
    if "fine-grained" in text:  # Megatron's: inputs of a layer's products
        return Offload(activations=("decoder_layer_input",))
    if "activation" in text:
        return Offload(layers=-1)
    raise unknown_words("offload", row.get("offload"), _OFFLOADS)


def context_kind_of(layout: Mapping[str, Any], kernel: str) -> str:
    """Returns how shards of the sequence share attention, one of ``CONTEXT_KINDS``."""
    said = layout.get("cp_kind")
    if said is None:
        # Sequences are dealt out from both ends, unless a source says otherwise.
        is_plain_ring = "ring" in kernel or layout.get("cp_balanced") is False
        return "ring" if is_plain_ring else "zigzag"

    names = {
        "ring": "ring", "ring attention": "ring",
        "zigzag": "zigzag", "striped": "zigzag", "p2p": "zigzag", "balanced": "zigzag",
        "gather": "gather", "allgather": "gather", "all_gather": "gather", "all-gather": "gather",
        "ulysses": "ulysses", "a2a": "ulysses", "all-to-all": "ulysses",
    }  # fmt: skip
    text = str(said).lower()
    if text not in names:
        raise unknown_words("layout.cp_kind", said, CONTEXT_KINDS)
    return names[text]


def capacity_factor_of(layout: Mapping[str, Any]) -> float:
    """Returns the capacity factor of a layout's experts; 0 for none."""
    names = ("capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor")
    value = next((layout[name] for name in names if layout.get(name) is not None), 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise RowError(f"The layout's capacity_factor is {value!r}; it is a number.")
    return max(0.0, float(value))  # Megatron's -1 is dropless
