# SPDX-License-Identifier: Apache-2.0
"""A plan with something of everything, made by hand: what tables and pages are tested on."""

from __future__ import annotations

from typing import Any

from shardax.hlo.collectives import Collective
from shardax.plan.records import ArrayLayout, Layout, LayoutReport, Provenance, TimeBand

GIB = 2**30
TPU = Provenance("tpu:v5e:4x4", "libtpu 0.0.42.1", "full", "target compiler", "0.10.2")
FSDP = (("batch", "data"), ("embed", "data"), ("mlp", None))
BOTH = (("batch", "data"), ("embed", "data"), ("mlp", "model"), ("seq", ("data", "model")))


def array(path: str, shape: tuple[int, ...], names: Any, *spec: tuple[str, ...]) -> ArrayLayout:
    return ArrayLayout(path, "parameters", shape, "float32", names, spec)


def gather(wire: float, **changes: Any) -> Collective:
    given: dict[str, Any] = {
        "kind": "all-gather",
        "name": "all-gather.7",
        "dtype": "bf16",
        "payload": int(wire * 16 / 15 / 24),
        "wire_bytes": wire,
        "group_size": 16,
        "axes": ("data",),
        "runs": 24,
        "asynchronous": True,
        "op_name": "jit(train_step)/while/body/layers/mlp/dot_general",
        "source": "decoder.py:240",
        "parameters": ("model.layers.mlp.gate.kernel", "model.layers.mlp.up.kernel"),
        "why": "dot_general needs the whole of a matrix that is split by embed",
    }
    return Collective(**{**given, **changes})


def report(name: str, mesh: tuple[tuple[str, int], ...], **changes: Any) -> LayoutReport:
    given: dict[str, Any] = {
        "outcome": "fits",
        "argument_bytes": {
            "parameters": 418 * 2**20,
            "optimizer": 836 * 2**20,
            "batch": 2**20,
            "other": 0,
        },
        "peak_bytes": int(9.1 * GIB),
        "limit_bytes": int(15.75 * GIB),
        "flops": 115.371e12,
        "program_flops": 16 * 115.371e12,
        "hbm_bytes": 480e9,
        "collectives": (
            gather(6.9e9),
            gather(
                3.3e9,
                kind="reduce-scatter",
                name="reduce-scatter.2",
                source="train.py:31",
                why="sums the gradient of a matrix that is split by embed",
                asynchronous=False,
            ),
            gather(
                0.09e9,
                kind="all-reduce",
                name="all-reduce.1",
                source="",
                parameters=(),
                why="",
                runs=1,
                runs_known=False,
                op_name="jit(train_step)/reduce_sum",
            ),
        ),
        "time": TimeBand(0.586, 1.41, 0.586, 0.593, 0.229, 0.0, "memory"),
        "compile_seconds": 7.4,
        "provenance": TPU,
        "replicated": ("model.norm.scale",),
        "arrays": (
            array(
                "model.layers.mlp.gate.kernel",
                (24, 2048, 8192),
                ("layers", "embed", "mlp"),
                (),
                ("data",),
                (),
            ),
            array("model.embed.embedding", (32000, 2048), ("vocab", "embed"), (), ("data",)),
            array("model.norm.scale", (2048,), ("norm",), ()),
        ),
    }
    rules = changes.pop("rules", FSDP)
    return LayoutReport(layout=Layout(name, rules, mesh), **{**given, **changes})


WIDE, SQUARE = (("data", 16), ("model", 1)), (("data", 4), ("model", 4))
NOTHING: dict[str, Any] = {
    "flops": 0.0,
    "program_flops": 0.0,
    "hbm_bytes": 0.0,
    "collectives": (),
    "time": None,
    "arrays": (),
    "replicated": (),
    "peak_bytes": None,
}


def sample_reports() -> tuple[LayoutReport, ...]:
    """Two that fit and are near one another, two that do not fit, three rejected, one failed."""
    return (
        report("fsdp 16x1", WIDE),
        _both(),
        report("dp 16x1", WIDE, outcome="does not fit", peak_bytes=int(29.8 * GIB), reason=""),
        report(
            "tp 1x16",
            (("data", 1), ("model", 16)),
            outcome="does not fit",
            reason="HLO temporaries (43.40G) exceeds available HBM (15.75G)",
            **NOTHING,
        ),
        *(
            _rejected(
                f"heads {size}",
                f"model.attn.q.kernel: dimension 1 of size {size} is not divisible by 16",
            )
            for size in (8, 12)
        ),
        _rejected("odd", "parameters alone need 27.1 GiB"),
        report(
            "crash",
            WIDE,
            outcome="failed",
            reason="the compiler ended by signal 11\nCheck failed: x == y",
            **NOTHING,
        ),
    )


def _rejected(name: str, reason: str) -> LayoutReport:
    return report(name, WIDE, outcome="rejected", provenance=None, reason=reason, **NOTHING)


def _both() -> LayoutReport:
    return report(
        "fsdp+tp 4x4",
        SQUARE,
        rules=BOTH,
        peak_bytes=int(8.2 * GIB),
        flops=1.25 * 115.371e12,
        collectives=(
            gather(7.2e9, group_size=4),
            gather(
                12.1e9,
                kind="all-reduce",
                name="all-reduce.4",
                axes=("model",),
                group_size=4,
                parameters=(),
                why="sums partial results of a product over mlp",
            ),
            gather(1e9, kind="all-reduce", axes=("data", "model"), crosses_slices=True, runs=1),
        ),
        time=TimeBand(0.61, 1.5, 0.61, 0.5, 0.35, 0.1, "compute"),
        warnings=("model.norm.scale is held whole by every device",),
        arrays=(
            array(
                "model.layers.mlp.gate.kernel",
                (24, 2048, 8192),
                ("layers", "embed", "mlp"),
                (),
                ("data",),
                ("model",),
            ),
            array("model.embed.embedding", (32000, 2048), ("vocab", "embed"), (), ("data",)),
            array("model.norm.scale", (2048,), ("norm",), ()),
        ),
    )
