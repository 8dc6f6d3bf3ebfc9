# SPDX-License-Identifier: Apache-2.0
"""Runs of ``shardax train`` as rows of measured steps."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardax import Rules
from shardax.extend import Options, mesh_axes_of
from shardax.plan.errors import PlanFileError, PlanInputError
from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.figures import find_chip
from shardax.plan.timing.rows import Row

_OPTIONS = Options(PlanInputError)

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

    # What the row needs, and a run need not say.
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
    devices = math.prod(mesh.values())
    return {
        "id": str(path),
        "kind": chip.kind,
        "hw": chip.name,
        "chips": devices / chip.devices_per_chip,
        "devices": devices,
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
