# SPDX-License-Identifier: Apache-2.0
"""Published steps as inputs of the time model.

A row says model, layout and hardware in the words of its source. What it says is read, or refused
by an error that lists what is known; where it says nothing, the common default of its software
stands in. Results in a row are not read for a prediction.

The *software* of a row is that of the developers who published it: their kernels, launches and
overlap are the tuned ones. Whoever else runs it, or does not say what runs, has ``"untuned"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from shardax.extend import Options
from shardax.plan.errors import PlanInputError, RowError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing import words
from shardax.plan.timing.figures import find_chip
from shardax.plan.timing.transformer import SOFTWARE, Recompute, TrainingStep, TransformerShape

Row = Mapping[str, Any]
_OPTIONS = Options(PlanInputError)
_ADAPTER_RANK = 16  # of LoRA, where a row does not say it: NeMo's and PEFT's recipes have 8 to 32


def read_row(row: Row) -> tuple[TransformerShape, TrainingStep, Hardware, str]:
    """Returns model, step, hardware and software of a row.

    Args:
        row: A published step, by the names of its fields.

    Returns:
        Arguments of ``plan.predict``.

    Raises:
        PlanInputError: The row lacks a size that has no default.
        RowError: The row has a name or a word that is not known; the text lists those that are.
        HardwareError: The hardware is unknown.

    Example:
        >>> from shardax import plan
        >>> sizes = dict(layers=32, embed=4096, mlp_hidden=14336, heads=32, vocab=32000)
        >>> row = dict(arch=sizes, hw="h100", chips=8, seq_len=4096, global_batch_seqs=16)
        >>> model, step, hardware, software = plan.read_row(row)
        >>> step.data, hardware.name, software
        (8, 'h100', 'untuned')
        >>> plan.read_row({**row, "precision": "bf61"})
        Traceback (most recent call last):
            ...
        shardax.errors.RowError: The row's precision 'bf61' is not known; it is 'bf16', ...
    """
    check_fields(row)
    layout = row.get("layout") or {}
    words.optimizer_of(row)
    if missing := missing_sizes(row):
        raise PlanInputError(f"The row says no {missing}.")
    sequence = _count(row, "seq_len") or 0
    batch = _amount(row, "global_batch_seqs") or 0
    model = _model(row, sequence)
    chip = _chip(row)
    software = _software(row)

    def degree(name: str) -> int:
        return _count(layout, name) or 1

    # Degrees of parallelism, and sequences at a time.
    devices = _count(row, "devices")
    # Of chips of two devices, one device is half a chip.
    chips = _count(row, "chips") if devices is None else _amount(row, "chips")
    devices = devices or int(chips or 0)
    tensor, context, pipeline = degree("tp"), degree("cp"), degree("pp")
    data = _count(layout, "dp") or max(1, devices // (tensor * context * pipeline))
    microbatch = _amount(row, "seqs_per_dp_rank_per_microbatch") or 0.0
    accumulated = _amount(row, "grad_accum")
    if not microbatch and accumulated:
        microbatch = batch / data / accumulated
    sharded, group = _count(layout, "fsdp", least=0), _count(layout, "zero1_group", least=0)
    zero = layout.get("zero")
    if zero is None:
        zero = 3 if sharded else 1
    elif not Options.is_integer(zero) or zero not in range(4):
        raise RowError(f"zero is {zero!r}; it is 0, 1, 2 or 3.")
    shards = (sharded if zero >= 2 else group) or 0
    if zero >= 2 and software.startswith("pytorch"):
        shards *= context

    # Kernels, and what runs beside what.
    kernel = words.attention_kernel_of(row)
    offload = words.offload_of(row)
    is_partitioned = software == "xla" or chip.kind == "tpu"
    is_flash = kernel.startswith("flash") or not kernel
    is_split = bool(_said(row, "sp")) or (not is_partitioned and tensor > 1 and is_flash)
    has_adapters = words.task_of(row) == "lora"
    recompute = str(row.get("recompute") or "none")
    try:
        Recompute.parse(recompute)
    except PlanInputError as error:
        raise RowError(str(error)) from None
    step = TrainingStep(
        global_batch=batch,
        sequence=sequence,
        devices=devices,
        data=data,
        zero=zero,
        shards=shards,
        tensor=tensor,
        sequence_parallel=is_split,
        split_stream=is_partitioned,
        context=context,
        pipeline=pipeline,
        virtual=degree("vpp"),
        expert=degree("ep"),
        slices=degree("slices"),
        microbatch=float(microbatch),
        precision=words.precision_of(row),
        recompute=recompute,
        fused_attention=kernel not in ("unfused", "fused softmax"),
        attention_kernel=kernel,
        broadcast_parameters=zero == 1 and _engine(row) == "internevo",
        **_states(row, is_partitioned=is_partitioned),
        overlap_tensor=_said(row, "async_tp", "overlap_tensor", "tp_comm_overlap"),
        overlap_gradients=_said(row, "overlap_gradients", "overlap_grad_reduce"),
        overlap_experts=bool(_said(row, "moe_a2a_overlap")),
        graphs=_graphs(layout),
        offloaded_layers=model.layers if offload.layers < 0 else offload.layers,
        offloaded=offload.activations,
        host_optimizer=offload.optimizer,
        adapter_rank=(_count(layout, "lora_rank") or _ADAPTER_RANK) if has_adapters else 0,
        capacity_factor=words.capacity_factor_of(layout),
        expert_nodes=_expert_nodes(row, degree("ep"), chip),
        context_kind=words.context_kind_of(layout, str(row.get("attention_kernel") or "").lower()),
    )
    return model, step, chip, software


def check_fields(row: Row) -> None:
    """Refuses a row, or a part of it, that is no table or has names that are not known."""
    if not isinstance(row, Mapping):
        raise RowError(f"A row is a {type(row).__name__}; it is a table of names and values.")
    words.check_names("A row", row, words.ROW_FIELDS)
    for part, known in (("layout", words.LAYOUT_FIELDS), ("arch", words.ARCH_FIELDS)):
        table = row.get(part)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise RowError(f"{part} is {table!r}; it is a table of names and values.")
        words.check_names(f"{part} of a row", table, known)


def missing_sizes(row: Row) -> str:
    """Returns the sizes without a default that a row does not say, as text; "" for none."""
    arch, layout = row.get("arch") or {}, row.get("layout") or {}
    for name in ("seq_len", "global_batch_seqs"):
        if row.get(name) is None:
            return name
    sizes = ("layers", "embed", "mlp_hidden", "heads", "vocab")
    if missing := [name for name in sizes if arch.get(name) is None]:
        return f"{', '.join(missing)} of the model"
    counts = row.get("chips"), row.get("devices"), layout.get("dp")
    return "chips, devices or layout.dp" if counts == (None, None, None) else ""


def _count(table: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    """Returns a whole number of a row; None if the row does not say it."""
    value = table.get(name)
    if value is None:
        return None

    # Tables of numbers have 8.0 for 8.
    is_whole = Options.is_integer(value) or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < least:
        raise RowError(f"{name} is {value!r}; it is an integer of at least {least}.")
    return int(value)


def _amount(table: Mapping[str, Any], name: str) -> float | None:
    """Returns a positive number of a row; None if the row does not say it."""
    value = table.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise RowError(f"{name} is {value!r}; it is a positive number.")
    return value


def _flag(table: Mapping[str, Any], name: str) -> bool | None:
    """Returns what a table says by true or false; None if nothing."""
    value = table.get(name)
    if value is not None and not isinstance(value, bool):
        raise RowError(f"{name} is {value!r}; it is true or false.")
    return value


def _said(row: Row, *names: str) -> bool | None:
    """Returns what a row or its layout says by one of some names; None if nothing."""
    layout = row.get("layout") or {}
    for name in names:
        for table in (row, layout):
            value = _flag(table, name)
            if value is not None:
                return value
    return None


def _graphs(layout: Mapping[str, Any]) -> str:
    """Returns what a layout launches as CUDA graphs, as of ``TrainingStep``."""
    graphs = str(layout.get("cuda_graph_impl") or "") + str(layout.get("cuda_graph_scope") or "")
    if "full_iteration" in graphs:
        return "step"
    scope = str(layout.get("cuda_graph_scope") or "")
    return "layer" if "[" in scope or "mlp" in scope or "attn" in scope else ""


def _expert_nodes(row: Row, expert: int, chip: Hardware) -> int:
    """Returns the nodes on which a token's experts lie at most; 0 for any."""
    layout, arch = row.get("layout") or {}, row.get("arch") or {}
    groups = _count(layout, "moe_router_num_groups") or _count(arch, "n_group", least=0)
    chosen = _count(layout, "moe_router_group_topk") or _count(arch, "topk_group", least=0)
    if not groups or not chosen or chip.kind != "gpu":
        return 0
    # A token's experts are in so many of the groups, and a group lies on so many nodes.
    nodes = max(1, expert // chip.node_size)
    return min(nodes, chosen * max(1, nodes // groups))


def _engine(row: Row) -> str:
    """Returns the optimizer's engine of a row, if not its software's."""
    source = str(row.get("source")).lower()
    engines = {"bigscience": "deepspeed", "deepspeed": "deepspeed", "internevo": "internevo"}
    return next((engine for word, engine in engines.items() if word in source), "")


def _states(row: Row, *, is_partitioned: bool) -> dict[str, float]:
    """Returns the bytes of a parameter's states in a row's software."""
    layout = row.get("layout") or {}
    precision, software, engine = words.precision_of(row), _software(row), _engine(row)
    pure = layout.get("mixed_precision_mode") == "PURE"
    compact = is_partitioned or pure or precision in ("mxfp8", "nvfp4")
    gradient = words.gradient_bytes_of(row) or (2 if compact else 4)
    if pure and not is_partitioned:  # all in 16 bits, but the moments
        return {"gradient_bytes": gradient, "state_bytes": 12}

    if engine == "deepspeed":  # gradients in 16 bits, and those in bf16 are summed in 32
        copy = 0 if precision == "fp16" else 2
        return {
            "gradient_bytes": 2 + copy,
            "gradient_copy_bytes": copy,
            "state_bytes": 16 + copy,
            "update_bytes": 4,  # the gradient of its shard in 32 bits
            "bucket_elements": 5e8,
        }

    if is_partitioned:  # parameters and moments in 32 bits
        return {"gradient_bytes": gradient, "state_bytes": 12 + gradient}
    if software in ("megatron", "untuned"):
        # With gradients in 32 bits, 6 bytes and 12 that may be sharded.
        return {"gradient_bytes": gradient, "state_bytes": 14 + gradient}

    # Adam over lists of arrays makes one more of each. InternEvo flattens gradients, in 16 bits and
    # then in 32.
    if engine == "internevo":
        return {"gradient_bytes": 2, "state_bytes": 16, "update_bytes": 10}
    return {"gradient_bytes": gradient, "state_bytes": 16, "update_bytes": 4}


def _model(row: Row, sequence: int) -> TransformerShape:
    arch = row.get("arch") or {}
    kind = arch.get("attention_type")
    if kind is not None and kind not in words.ATTENTION_TYPES:
        raise words.unknown_words("arch.attention_type", kind, words.ATTENTION_TYPES)
    latent = kind == "mla"

    # Such as "5 local : 1 global" layers; half of the layers, where a row does not say it.
    pattern = re.search(r"(\d+) local\D+(\d+) global", str(arch.get("local_global") or ""))
    windowed = 0.5
    if pattern:
        local, whole = int(pattern[1]), int(pattern[2])
        windowed = local / (local + whole)

    return TransformerShape(
        layers=arch["layers"],
        embed=arch["embed"],
        mlp_hidden=arch["mlp_hidden"],
        heads=arch["heads"],
        vocab=arch["vocab"],
        kv_heads=arch.get("kv_heads") or 0,
        head_dim=(arch.get("qk_nope") if latent else arch.get("head_dim")) or 0,
        mlp_matrices=arch.get("mlp_mats") or 3,
        tied=bool(_flag(arch, "tied")),
        experts=arch.get("experts") or 0,
        top_k=arch.get("top_k") or (1 if arch.get("experts") else 0),
        expert_hidden=arch.get("moe_mlp") or 0,
        shared_experts=arch.get("shared_experts") or 0,
        dense_layers=arch.get("first_dense") or 0,
        expert_every=arch.get("moe_every") or arch.get("moe_layer_freq") or 1,
        q_rank=arch.get("q_lora_rank") or 0 if latent else 0,
        kv_rank=arch.get("kv_lora_rank") or 0 if latent else 0,
        rope_dim=arch.get("qk_rope") or 0 if latent else 0,
        value_dim=arch.get("v_head") or 0 if latent else 0,
        extra_layers=arch.get("mtp_layers") or 0,
        window=arch.get("sliding_window") or 0,
        windowed_share=windowed if arch.get("sliding_window") else 0.0,
        learned_positions=sequence if "learned" in str(arch.get("pos") or "") else 0,
    )


def _chip(row: Row) -> Hardware:
    chip = find_chip(str(row.get("hw")))
    note = str(row.get("hw_note") or "")
    node = re.search(r"(\d+) x (\d+) Gb\b", note) or re.search(r"(\d+) x HDR (\d+) Gb", note)
    changes: dict[str, Any] = {}
    size = re.search(r"nodes x (\d+) V100", note)
    if chip.name.startswith("v100"):
        changes["node_size"] = int(size[1]) if size else 4
    if chip.kind == "gpu" and node:
        per_node = int(node[1]) * int(node[2]) * 1e9 / 8
        changes["network_bandwidth"] = per_node / changes.get("node_size", chip.node_size)
    elif total := re.search(r"(\d+) Gbps node-node", note):
        changes["network_bandwidth"] = int(total[1]) * 1e9 / 8 / chip.node_size
    return chip.like(**changes) if changes else chip


# The repositories whose developers publish steps of their own software.
_DEVELOPERS = (
    (("torchtitan",), "pytorch-compile"),
    (("mosaicml", "llm-foundry", "internlm", "nanotron"), "pytorch"),
    (("ai-hypercomputer", "maxtext", "pytorch/xla"), "xla"),
    (("nvidia", "nemo", "megatron", "bigscience", "moe-modelzoo"), "megatron"),
    (("pytorch",), "pytorch"),
    (("jax",), "xla"),
)


def _software(row: Row) -> str:
    """Returns the software of a row, one of ``SOFTWARE``."""
    said = row.get("software")
    if said is not None:
        if said not in SOFTWARE:
            raise words.unknown_words("software", said, SOFTWARE)
        return said

    # A repository's name, not a path in it: who runs Megatron-LM has a folder of its name.
    repository = str(row.get("source") or row.get("group") or "").partition(":")[0].lower()
    software = "untuned"
    for names, name in _DEVELOPERS:
        if any(word in repository for word in names):
            software = name
            break
    if row.get("kind") == "tpu" and software != "untuned":
        return "xla"
    if software == "pytorch" and _said(row, "compile"):
        return "pytorch-compile"
    return software
