# SPDX-License-Identifier: Apache-2.0
"""How compiling a training step grows with devices and with layers, without the hardware.

The step is that of `plan_search.py`, the decoder of 1.7 B parameters: FSDP over the axis `data`,
tensor parallelism over `model` of 8, the batch growing with the devices. It is compiled by the
target's own compiler (libtpu) for slices of 16 to 4,096 chips and several slices, each in a fresh
process whose peak memory is its own; and for 512 chips with 6 to 48 layers, scanned and unrolled.

No bound: it is a table.

    PYTHONPATH=.compilers python benchmarks/plan_scale.py --json plan_scale.json
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from _harness import Report, arguments, table

TARGETS = {
    "tpu:v5p:2x2x4": 16,
    "tpu:v5p:4x4x4": 64,
    "tpu:v5p:8x8x8": 512,
    "tpu:v5p:8x16x16": 2048,
    "tpu:v5p:16x16x16": 4096,
}
LAYERS = (6, 12, 24, 48)
DEPTH_OF = "tpu:v5p:8x8x8"
HEADERS = ("target", "layers", "compile", "processor time", "memory", "device peak", "wire a step")


def work(given: dict[str, Any]) -> dict[str, Any]:
    """Compiles one layout; returns what it took."""
    import plan_search

    import shardax as sx
    from shardax import models, plan, train

    devices, layers = given["devices"], given["layers"]
    sizes: dict[str, Any] = {
        "vocab_size": 32_000,
        "embed_dim": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
        "mlp_dim": 8192,
    }
    if given["quick"]:
        sizes = {name: size // 16 for name, size in sizes.items()} | {"num_heads": 8}
        sizes |= {"num_kv_heads": 8}
    config = models.DecoderConfig(
        **sizes, num_layers=layers, scan_layers=given["scanned"], remat="full", dtype="bfloat16"
    )
    model = models.Decoder(config, rngs=sx.Rngs(0))
    optimizer = train.Optimizer(model, plan_search.optax.adamw(1e-3))
    tokens = plan.NamedShape((devices, plan_search.LENGTH), "int32", ("batch", "seq"))
    model_axis = min(8, devices)
    rules = [("batch", "data"), ("embed", "data")]
    rules += [(name, "model") for name in ("heads", "kv_heads", "mlp", "vocab")]
    (report,) = plan.compare(
        plan_search.step,
        (model, optimizer, {"inputs": tokens, "targets": tokens}),
        {"fsdp+tensor": rules},
        {"data": devices // model_axis, "model": model_axis},
        given["target"],
        effort="screen",
        cache=None,
        processes=1,
    )
    # Compiled in a child of the planner.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return given | {
        "outcome": report.outcome,
        "error": str(report.error)[-300:] if report.outcome == "failed" else "",
        "compile_seconds": report.compile_seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "process_peak_bytes": used.ru_maxrss * 1024,
        "peak_bytes": report.peak_bytes,
        "wire_bytes": report.total_wire_bytes,
    }


def asked(**given: Any) -> dict[str, Any]:
    """Runs ``work`` in a process of its own."""
    ended = subprocess.run(
        [sys.executable, __file__, "--work", json.dumps(given)], capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    return json.loads(ended.stdout.splitlines()[-1])


def row(record: dict[str, Any]) -> list[str]:
    """A record as a row of the table."""
    layers = f"{record['layers']} {'scanned' if record['scanned'] else 'unrolled'}"
    return [
        record["target"],
        layers,
        f"{record['compile_seconds']:.0f} s",
        f"{record['processor_seconds']:.0f} s",
        f"{record['process_peak_bytes'] / 2**30:.1f} GiB",
        f"{record['peak_bytes'] / 2**30:.2f} GiB",
        f"{record['wire_bytes'] / 1e9:.1f} GB",
    ]


def main() -> int:
    """Compiles for each target, then for each depth."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--work", help="as a process of its own: what to compile, in JSON")
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(json.loads(options.work))))
        return 0
    report = Report("plan_scale", {"targets": options.targets})
    wanted = [(name, 24, True) for name in options.targets]
    wanted += [(DEPTH_OF, layers, scanned) for layers in LAYERS for scanned in (True, False)]
    if options.quick:
        wanted = [("tpu:v5p:2x2x4", 2, True)]
    for target, layers, scanned in dict.fromkeys(wanted):
        given = {"target": target, "devices": TARGETS[target], "layers": layers}
        report.records.append(asked(**given, scanned=scanned, quick=options.quick))
        print(json.dumps(report.records[-1]), file=sys.stderr, flush=True)
    print(table(HEADERS, map(row, report.records)))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
