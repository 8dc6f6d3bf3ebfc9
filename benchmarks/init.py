# SPDX-License-Identifier: Apache-2.0
"""How long a decoder's parameters take to come into being, sharded over 8 virtual CPU devices.

The mesh is 2x4, its axes Auto.

Opponents, each measurement in a process of its own (nothing compiled before counts), in turn:

- `shardax.shard`: a lazy `shardax.models.Decoder`, then `shard(model, mesh, rules)`.
- `nnx.jit`: the model of `nnx_decoder.py` made inside `nnx.jit`, its variables constrained to their
  shardings.
- `nnx eager`: the same model made outside: each array whole on one device first, then moved.
- `raw jax`: `raw_decoder.init` as one program, `jax.jit` with `out_shardings`.

Timed: from having imported everything and made the mesh to all parameters being there. Beside the
time: how many programs XLA compiled and how long that took, and the bytes that the first device
ends up with, which must agree.

Bounds on the median over repeats: shardax takes at most 0.2 of `nnx.jit` and at most 1.0 of `nnx
eager`, and compiles as many programs for the deepest model as for the shallowest.

    python benchmarks/init.py --json init.json
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import raw_decoder
from _decoder_steps import RULES, eight_cpu_devices, mesh_2x4, raw_shardings, shardax_decoder
from _harness import Report, Samples, arguments, compare, table
from jax.sharding import Mesh
from raw_decoder import Config

LAYERS = (24, 96)
BOUND_OF_NNX_JIT = 0.2
BOUND_OF_NNX_EAGER = 1.0
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def config_of(layers: int) -> Config:
    """The decoder measured here: small arrays, so that the cost is the number of them."""
    return Config(layers=layers, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=384)


def make_shardax(config: Config, mesh: Mesh) -> Any:
    """Lazy model, then one small program per distinct kind of parameter."""
    import shardax as sx

    model = sx.shard(shardax_decoder(config), mesh, RULES)
    return [variable.value for _, variable in sx.iter_variables(model)]


def make_nnx_jit(config: Config, mesh: Mesh) -> Any:
    """One program that makes the model and constrains each variable."""
    import nnx_decoder
    from flax import nnx

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        model = nnx.jit(lambda: nnx_decoder.Decoder(config, nnx.Rngs(0)))()
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def make_nnx_eager(config: Config, mesh: Mesh) -> Any:
    """Each variable made whole by its own small programs, then moved."""
    import nnx_decoder
    from flax import nnx

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        model = nnx_decoder.Decoder(config, nnx.Rngs(0))
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def make_raw(config: Config, mesh: Mesh) -> Any:
    """One program with an output sharding per parameter."""
    shardings = raw_shardings(config, mesh)
    make = jax.jit(lambda key: raw_decoder.init(config, key), out_shardings=shardings)
    return jax.tree.leaves(make(jax.random.key(0)))


METHODS: dict[str, Callable[[Config, Mesh], Any]] = {
    "raw jax": make_raw,
    "shardax.shard": make_shardax,
    "nnx.jit": make_nnx_jit,
    "nnx eager": make_nnx_eager,
}
IMPORTS = {"shardax.shard": "shardax.models", "nnx.jit": "nnx_decoder", "nnx eager": "nnx_decoder"}


def measure_here(method: str, layers: int) -> dict[str, Any]:
    """Make the model once in this process and say what it took; the process must be fresh."""
    eight_cpu_devices()
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = mesh_2x4()
    if method in IMPORTS:
        __import__(IMPORTS[method])
    compiles: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            compiles.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    arrays = jax.block_until_ready(METHODS[method](config_of(layers), mesh))
    seconds = time.perf_counter() - start
    first = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
        if shard.device == first
    )
    return {
        "seconds": seconds,
        "compiles": len(compiles),
        "compile_seconds": sum(compiles),
        "arrays": len(arrays),
        "bytes_on_first_device": held,
    }


def measure_in_fresh_process(method: str, layers: int) -> dict[str, Any]:
    """Run `measure_here` in a new interpreter."""
    command = [sys.executable, str(Path(__file__)), "--child", method, "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{method} at {layers} layers failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds(methods: list[str], layers: int, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """`repeats` measurements of each method, in turn, each repeat beginning with another."""
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for repeat in range(repeats):
        for turn in range(len(methods)):
            method = methods[(repeat + turn) % len(methods)]
            found[method].append(measure_in_fresh_process(method, layers))
    return found


def failures_of(records: list[dict[str, Any]]) -> list[str]:
    """A sentence for every bound that does not hold."""
    failures = []
    by = {(record["layers"], record["name"]): record for record in records}
    depths = sorted({record["layers"] for record in records})
    for layers in depths:
        at_depth = [record for record in records if record["layers"] == layers]
        sizes = {record["name"]: record["bytes_on_first_device"] for record in at_depth}
        if len(set(sizes.values())) > 1:
            failures.append(f"{layers} layers: the methods made different shards: {sizes}")
        mine = by.get((layers, "shardax.shard"))
        for other, bound in (("nnx.jit", BOUND_OF_NNX_JIT), ("nnx eager", BOUND_OF_NNX_EAGER)):
            its = by.get((layers, other))
            if mine and its and mine["ratio_to"][other] > bound:
                ratio = mine["ratio_to"][other]
                failures.append(f"{layers} layers: {ratio:.2f} of {other}, at most {bound}")
    counts = {depth: by[depth, "shardax.shard"]["compiles"] for depth in depths if mine}
    if len(set(counts.values())) > 1:
        failures.append(f"programs compiled grow with depth: {counts}")
    return failures


def main() -> int:
    """Measure at each depth, print one table a depth, and check the bounds."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--layers", type=int, nargs="*", default=None)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--child", choices=list(METHODS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options.child, options.layers[0])))
        return 0
    depths = options.layers or ((2, 4) if options.quick else LAYERS)
    repeats = 1 if options.quick else options.repeats
    report = Report("init", {"layers": depths, "repeats": repeats})
    for layers in depths:
        found = rounds(options.methods, layers, repeats)
        samples = [Samples(m, tuple(one["seconds"] for one in ones)) for m, ones in found.items()]
        to = {other: compare(samples, other) for other in options.methods}
        rows = []
        for method, ones in found.items():
            ratios = {other: to[other][method].record()["ratio_median"] for other in to}
            record = {"name": method, "layers": layers, "ratio_to": ratios} | ones[-1]
            record["seconds"] = [one["seconds"] for one in ones]
            report.records.append(record)
            least, spent = min(record["seconds"]), min(one["compile_seconds"] for one in ones)
            times = [f"{least:.2f} s", f"{spent:.2f} s", record["compiles"]]
            rows.append([method, *times, *(f"{ratio:.2f}" for ratio in ratios.values())])
        print(f"\n### {layers} layers, {rows and report.records[-1]['arrays']} parameters\n")
        columns = ["method", "least time", "XLA, all threads", "programs"]
        print(table([*columns, *(f"/ {other}" for other in to)], rows), flush=True)
    report.failures = failures_of(report.records)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
