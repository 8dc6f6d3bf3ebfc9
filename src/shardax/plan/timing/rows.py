# SPDX-License-Identifier: Apache-2.0
"""Measured training steps as inputs of the time model.

A row says model, layout and hardware in the words of its source; where it does not say something,
the common default of its software stands in. Results in a row are not read for a prediction. A run
of ``shardax train`` makes a row of its settings and its log.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardax import Rules
from shardax.extend import Options, mesh_axes_of
from shardax.plan.errors import PlanFileError, PlanInputError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import find_chip
from shardax.plan.timing.transformer import Recompute, TrainingStep, TransformerShape

Row = Mapping[str, Any]
_OPTIONS = Options(PlanInputError)


def read_row(row: Row) -> tuple[TransformerShape, TrainingStep, Hardware, str]:
    """Returns model, step, hardware and software of a row.

    Args:
        row: A published step, by the names of its fields.

    Returns:
        Arguments of ``plan.predict``.

    Raises:
        PlanInputError: The row lacks a size that has no default.
        HardwareError: The hardware is unknown.

    Example:
        >>> from shardax import plan
        >>> sizes = dict(layers=32, embed=4096, mlp_hidden=14336, heads=32, vocab=32000)
        >>> row = dict(arch=sizes, hw="h100", chips=8, seq_len=4096, global_batch_seqs=16)
        >>> model, step, hardware, software = plan.read_row(row)
        >>> step.data, hardware.name
        (8, 'h100')
    """
    sequence = _number(row, "seq_len")
    batch = _number(row, "global_batch_seqs")
    model = _model(row, int(sequence))
    chip = _chip(row)
    software = _software(row)
    layout = row.get("layout") or {}

    def degree(name: str) -> int:
        return max(1, int(layout.get(name) or 1))

    devices = int(row.get("devices") or row.get("chips") or 0)
    tensor, context, pipeline = degree("tp"), degree("cp"), degree("pp")
    data = int(layout.get("dp") or 0) or max(1, devices // (tensor * context * pipeline))
    microbatch = row.get("seqs_per_dp_rank_per_microbatch") or 0
    if not microbatch and row.get("grad_accum"):
        microbatch = batch / data / row["grad_accum"]
    zero = layout.get("zero")
    zero = (3 if layout.get("fsdp") else 1) if zero is None else int(zero)
    shards = max(0, int(layout.get("fsdp" if zero >= 2 else "zero1_group") or 0))
    if zero >= 2 and software.startswith("pytorch"):
        shards *= context
    precision = _precision(row)
    pure = layout.get("mixed_precision_mode") == "PURE"
    compact = software == "xla" or pure or precision in ("mxfp8", "nvfp4")
    kernel = str(row.get("attention_kernel") or "flash").lower()
    graphs = str(layout.get("cuda_graph_impl") or "") + str(layout.get("cuda_graph_scope") or "")
    step = TrainingStep(
        global_batch=batch,
        sequence=int(sequence),
        devices=devices,
        data=data,
        zero=zero,
        shards=shards,
        tensor=tensor,
        sequence_parallel=bool(layout.get("sp"))
        or (software != "xla" and tensor > 1 and "flash" in kernel),
        split_stream=software == "xla",
        context=context,
        pipeline=pipeline,
        virtual=degree("vpp"),
        expert=degree("ep"),
        slices=degree("slices"),
        microbatch=float(microbatch or 0),
        precision=precision,
        recompute=_recompute(row),
        fused_attention="softmax" not in kernel,
        broadcast_parameters=zero == 1 and _engine(row) == "internevo",
        **_states(row, software, precision, compact=compact, pure=pure),
        overlap_tensor=bool(layout.get("async_tp")),
        overlap_experts=bool(layout.get("moe_a2a_overlap")),
        graphs="step"
        if "full_iteration" in graphs
        else "layer"
        if "[" in graphs or "mlp" in graphs
        else "",
        offloaded_layers=_offloaded(row),
    )
    return model, step, chip, software


def _engine(row: Row) -> str:
    """The optimizer's engine of a row, if not its software's."""
    source = str(row.get("source")).lower()
    engines = {"bigscience": "deepspeed", "deepspeed": "deepspeed", "internevo": "internevo"}
    return next((engine for words, engine in engines.items() if words in source), "")


def _states(
    row: Row, software: str, precision: str, *, compact: bool, pure: bool
) -> dict[str, float]:
    """Returns the bytes of a parameter's states in a software."""
    engine, gradient = _engine(row), 2 if compact else 4
    if pure and software != "xla":  # all in 16 bits, but the moments
        return {"gradient_bytes": gradient, "state_bytes": 12}
    if engine == "deepspeed":  # gradients in 16 bits, and those in bf16 are summed in 32
        copy = 0 if precision == "fp16" else 2
        return {
            "gradient_bytes": 2 if precision == "fp16" else 4,
            "gradient_copy_bytes": copy,
            "state_bytes": 16 if precision == "fp16" else 18,
            "update_bytes": 4,  # the gradient of its shard in 32 bits
            "bucket_elements": 5e8,
        }
    if software == "megatron":  # with gradients in 32 bits, 6 bytes and 12 that may be sharded
        return {"gradient_bytes": gradient, "state_bytes": 14 + gradient}
    if software == "xla":  # parameters and moments in 32 bits
        return {"gradient_bytes": gradient, "state_bytes": 12 + gradient}
    # Adam over lists of arrays makes one more of each. InternEvo flattens gradients, in 16 bits and
    # then in 32.
    if engine == "internevo":
        return {"gradient_bytes": 2, "state_bytes": 16, "update_bytes": 10}
    return {"gradient_bytes": gradient, "state_bytes": 16, "update_bytes": 4}


_DECODER_RULES = {"batch": "data"} | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "model")


def read_run(folder: str | os.PathLike[str], hardware: str | Hardware) -> Row:
    """Returns the row of a run of ``shardax train``.

    Args:
        folder: The run's folder, with its settings and its log.
        hardware: What it ran on.

    Returns:
        A row for ``plan.read_row`` and ``plan.calibrate``; ``step_seconds`` is the median of what
        the log says.

    Raises:
        PlanFileError: There is no run in the folder, or its files are damaged.
        PlanInputError: The run does not say the sizes of its model, or its log no throughput.

    Example:
        >>> import json, pathlib, tempfile
        >>> from shardax import plan
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> model = dict(vocab_size=256, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=256)
        >>> run = dict(model=model, batch_size=16, seq_len=64, mesh="data=4,model=2", zero=True)
        >>> _ = (folder / "run.json").write_text(json.dumps(run))
        >>> _ = (folder / "log.jsonl").write_text('{"step": 20, "tokens_per_second": 2048.0}')
        >>> row = plan.read_run(folder, "h100")
        >>> row["step_seconds"], row["layout"]["dp"], row["layout"]["tp"], row["layout"]["zero"]
        (0.5, 4, 2, 1)
    """
    path = Path(folder)
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        lines = (path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        rates = [json.loads(line).get("tokens_per_second") for line in lines if line.strip()]
    except FileNotFoundError as error:
        raise PlanFileError(
            f"{path} is no run of shardax train: there is no {error.filename}."
        ) from None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PlanFileError(f"{path}: the run cannot be read: {error}.") from None
    sizes = run.get("model") if isinstance(run, dict) else None
    if not isinstance(sizes, dict) or run.get("source"):
        raise PlanInputError(
            f"{path}: the run trains a published model, whose sizes run.json does not say. Write "
            "the row: plan.calibrate([{'arch': ..., 'hw': ..., 'step_seconds': ...}])."
        )
    measured = [rate for rate in rates if type(rate) in (int, float) and 0 < rate < math.inf]
    if not measured:
        raise PlanInputError(
            f"{path}: the log says no tokens_per_second yet; a run logs it from its second step on."
        )
    try:
        batch, sequence = run["batch_size"], run["seq_len"]
        mesh = {
            name.strip(): int(size)
            for name, _, size in (part.partition("=") for part in run["mesh"].split(",") if part)
        }
        _OPTIONS.integers(batch_size=batch, seq_len=sequence, **mesh)
        arch = {name: sizes[key] for name, key in _SIZES.items() if key in sizes}
        layout = _run_layout(run, mesh)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanFileError(f"{path}: run.json is damaged: {error}") from None
    chip = hardware if isinstance(hardware, Hardware) else find_chip(hardware)
    return {
        "id": str(path),
        "kind": chip.kind,
        "hw": chip.name,
        "chips": math.prod(mesh.values()) / chip.devices_per_chip,
        "devices": math.prod(mesh.values()),
        "arch": arch,
        "layout": layout,
        "source": "jax",
        "seq_len": sequence,
        "global_batch_seqs": batch,
        "grad_accum": ((run.get("rules") or {}).get("parallel") or {}).get("microbatches"),
        "precision": _run_precision(path, run.get("precision"), sizes.get("dtype")),
        "recompute": {None: "none", True: "full"}.get(sizes.get("remat"), "full"),
        "attention_kernel": "softmax" if run.get("attention") in _UNFUSED else "flash",
        "step_seconds": batch * sequence / statistics.median(measured),
    }


_SIZES = {
    "layers": "num_layers",
    "embed": "embed_dim",
    "mlp_hidden": "mlp_dim",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "tied": "tied_head",
}


# Kernels of attention that hold its scores; "auto" takes a fused one on an accelerator.
_UNFUSED = (None, "xla")


def _run_precision(path: Path, precision: object, dtype: str | None) -> str:
    """Returns the precision of all products of a run."""
    if precision is None:
        return dtype or "float32"
    if "=" in str(precision).removeprefix("layers=") or "none" in str(precision):
        raise PlanInputError(
            f"{path}: some products of the run were in fp8, others not ({precision}), and a "
            "row has one precision. Write the row, with that of most products: "
            "row = {'arch': ..., 'hw': ..., 'precision': 'fp8', 'step_seconds': ...}."
        )
    return "fp8"


def _run_layout(run: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns a run's degrees of parallelism."""
    entry = run.get("rules")
    pairs = dict(Rules(entry["rules"] if entry else _DECODER_RULES))
    axes_of = {name: set(mesh_axes_of(axes)) & set(mesh) for name, axes in pairs.items()}

    def degree(axes: set[str]) -> int:
        return math.prod(mesh[axis] for axis in axes)

    batch = axes_of.get("batch", set())
    seq = axes_of.get("seq", set()) - batch
    stages = axes_of.get("layers", set()) - batch
    split = {axis for name in ("heads", "mlp", "vocab") for axis in axes_of.get(name, ())}
    shards = {axis for name, axes in axes_of.items() if name != "batch" for axis in axes & batch}
    fully = degree(shards) if shards else 0
    is_zero = run.get("zero") or (entry or {}).get("optimizer_rules")
    zero = 3 if shards else 1 if is_zero else 0
    return {
        "dp": degree(batch),
        "tp": degree(split - batch - seq - stages),
        "cp": degree(seq),
        "pp": degree(stages),
        "fsdp": fully,
        "zero": zero,
    }


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise PlanInputError(f"The row says no {name} ({value!r}).")
    return value


def _model(row: Row, sequence: int) -> TransformerShape:
    arch = row.get("arch") or {}
    sizes = ("layers", "embed", "mlp_hidden", "heads", "vocab")
    if missing := [name for name in sizes if not arch.get(name)]:
        raise PlanInputError(f"The row says no {', '.join(missing)} of the model.")
    latent = arch.get("attention_type") == "mla"
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
        tied=bool(arch.get("tied")),
        experts=arch.get("experts") or 0,
        top_k=arch.get("top_k") or (1 if arch.get("experts") else 0),
        expert_hidden=arch.get("moe_mlp") or 0,
        shared_experts=arch.get("shared_experts") or 0,
        dense_layers=arch.get("first_dense") or 0,
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


def _software(row: Row) -> str:
    source = str(row.get("source") or "").lower() + " " + str(row.get("group") or "").lower()
    if row.get("kind") == "tpu":
        return "xla"
    for words, software in (
        (("torchtitan",), "pytorch-compile"),
        (("mosaicml", "llm-foundry", "internlm", "nanotron", "pytorch", "levanter"), "pytorch"),
        (("maxtext", "axlearn", "levanter", "easydel", "jax"), "xla"),
        (("megatron", "nemo", "nvidia", "bigscience"), "megatron"),
    ):
        if any(word in source for word in words):
            return software
    return "pytorch" if "FSDP" in str(row.get("form")) else "megatron"


def _precision(row: Row) -> str:
    text = str(row.get("precision") or "bf16").lower()
    if "nvfp4" in text or "fp4" in text:
        return "nvfp4"
    if "mxfp8" in text or "fp8-mx" in text:
        return "mxfp8"
    if "fp8" in text and "int8" not in text:
        return "fp8-row" if "rowwise" in text else "fp8"
    if "int8" in text:
        return "int8"
    if text.startswith("fp16"):
        return "fp16"
    return "f32" if text in ("fp32", "f32", "float32") else "bf16"


def _recompute(row: Row) -> str:
    policy = str(row.get("recompute") or "none")
    try:
        Recompute.parse(policy)
    except PlanInputError:
        return "full"  # a source that names a policy of its own recomputes something
    return policy


def _offloaded(row: Row) -> int:
    match = re.search(r"(\d+) layers", str(row.get("offload") or ""))
    return int(match[1]) if match else 0
