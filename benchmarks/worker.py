# SPDX-License-Identifier: Apache-2.0
"""How long a program takes to its first result, when what it calls takes seconds to compile.

The function is the gradient of a deep network of unrolled layers, on one device of the processor.

Opponents, each in a process of its own, in turn; timed from starting the process until it has the
result, so Python's start and the imports count:

- `cold`: `jax.jit` and a call.
- `cache`: the same with JAX's persistent compilation cache, which has the program.
- `worker`: the same function submitted to a `shardax.host.Worker` with a name, which an earlier
  program started and where the function was called before.

Beside it, within a program that runs: what a further call costs, by `jax.jit` here and in the
worker. That is what a worker costs where nothing is compiled.

Bounds on the median over repeats: the worker takes at most 0.5 of `cold`, and no more than `cache`.

    python benchmarks/worker.py --json worker.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import Report, Samples, arguments, compare, table

LAYERS = 60
WIDTH = 32
STEADY_CALLS = 50
BOUNDS = {"cold": 0.5, "cache": 1.0}
OPPONENTS = ("cold", "cache", "worker")


def deep_gradient(weights: Any, x: Any) -> Any:
    """The gradient of a network of as many layers as there are weights, unrolled."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any) -> Any:
        y = x
        for index in range(weights.shape[0]):
            z = y @ weights[index]
            y = y + jnp.tanh(z - z.mean(-1, keepdims=True)) * jax.nn.softmax(z)
        return (y * y).sum()

    return jax.grad(loss)(weights)


def run_here(opponent: str, layers: int, cache: str) -> dict[str, Any]:
    """Calls the function once, and then often; the process must be fresh."""
    import jax
    import numpy as np

    weights = np.full((layers, WIDTH, WIDTH), 0.01, "float32")
    x = np.ones((4, WIDTH), "float32")
    compiled = jax.jit(deep_gradient)
    if opponent == "worker":
        from shardax.host import Worker

        worker = Worker(name="benchmark", start_timeout=600.0)

        def call() -> Any:
            return worker.submit(compiled, weights, x).result()

    else:
        if opponent == "cache":
            jax.config.update("jax_compilation_cache_dir", cache)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

        def call() -> Any:
            return jax.block_until_ready(compiled(weights, x))

    total = float(np.abs(call()).sum())
    first = time.time()
    for _ in range(STEADY_CALLS):
        call()
    return {"first": first, "steady": (time.time() - first) / STEADY_CALLS, "total": total}


def measure_in_fresh_process(opponent: str, layers: int, folder: str) -> dict[str, Any]:
    """Runs `run_here` in a new interpreter; `seconds` are those to its first result."""
    command = [sys.executable, str(Path(__file__)), "--child", opponent]
    command += ["--layers", str(layers), "--folder", folder]
    start = time.time()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": folder, "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": found["first"] - start}


def rounds(
    layers: int, repeats: int, folder: str, *, quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """One untimed run of each, which fills cache and worker; then repeats of all in turn.

    A quick run has no untimed ones.
    """
    found: dict[str, list[dict[str, Any]]] = {opponent: [] for opponent in OPPONENTS}
    for opponent in () if quick else OPPONENTS:
        measure_in_fresh_process(opponent, layers, folder)
    for repeat in range(repeats):
        for turn in range(len(OPPONENTS)):
            opponent = OPPONENTS[(repeat + turn) % len(OPPONENTS)]
            found[opponent].append(measure_in_fresh_process(opponent, layers, folder))
    return found


def end_worker(folder: str) -> None:
    """Ends the worker that the programs left behind."""
    os.environ["XDG_RUNTIME_DIR"] = folder
    from shardax.host import Worker

    Worker(name="benchmark", start_timeout=600.0).stop()


def records_of(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The figures of each opponent, with its ratio to the others."""
    samples = [Samples(name, tuple(one["seconds"] for one in ones)) for name, ones in found.items()]
    to = {other: compare(samples, other) for other in OPPONENTS}
    return [
        {
            "name": name,
            "seconds": [one["seconds"] for one in ones],
            "steady_us": min(one["steady"] for one in ones) * 1e6,
            "ratio_to": {other: to[other][name].record()["ratio_median"] for other in OPPONENTS},
        }
        for name, ones in found.items()
    ]


def main() -> int:
    """Measures, prints a table, and checks the bounds."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--child", choices=OPPONENTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_here(options.child, options.layers, f"{options.folder}/cache")))
        return 0
    layers = options.layers or (2 if options.quick else LAYERS)
    repeats = 1 if options.quick else options.repeats
    report = Report("worker", {"layers": layers, "width": WIDTH, "repeats": repeats})
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = rounds(layers, repeats, folder, quick=options.quick)
        finally:
            end_worker(folder)
    report.records = records_of(found)
    rows = [
        [
            record["name"],
            f"{min(record['seconds']):.2f} s",
            *(f"{record['ratio_to'][other]:.2f}" for other in OPPONENTS),
            f"{record['steady_us']:.0f} us",
        ]
        for record in report.records
    ]
    print(f"\n### {layers} layers, from starting the program to its first result\n")
    columns = ["program", "least time", *(f"/ {other}" for other in OPPONENTS), "further calls"]
    print(table(columns, rows))
    totals = [one["total"] for ones in found.values() for one in ones]
    if max(totals) - min(totals) > 1e-4 * max(totals):
        report.failures.append(f"the results differ: {sorted(set(totals))}")
    ratios = {record["name"]: record["ratio_to"] for record in report.records}["worker"]
    for other, bound in BOUNDS.items():
        if ratios[other] > bound:
            report.failures.append(f"worker: {ratios[other]:.2f} of {other}, at most {bound}")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
