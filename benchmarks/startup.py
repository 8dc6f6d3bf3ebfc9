# SPDX-License-Identifier: Apache-2.0
"""How long a program takes from `python` to its first training step, and what importing costs.

The model and the step are those of `examples/functional_train_step.py`: an MLP, softmax cross
entropy and AdamW, on one batch.

Opponents, each in a fresh process, in turn; timed from starting the process until the loss of the
first step is there, so Python's start, the imports, building the model, tracing and reading the
compiled programs count. JAX's persistent compilation cache has every program of both.

- `raw jax`: nested dicts of arrays, `jax.value_and_grad` and `jax.jit`.
- `shardax`: Modules, `sx.train.Optimizer` and `sx.jit`.

Beside them, in processes of their own: `import jax`, and then `import shardax` in the same process.

Bounds on the median over repeats: shardax takes at most 1.15 of raw JAX. On the least: its import
takes at most 80 ms after that of JAX.

    python benchmarks/startup.py --json startup.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import Report, Samples, arguments, compare, table

BOUND = 1.15
IMPORT_BOUND_SECONDS = 0.080
OPPONENTS = ("raw jax", "shardax")
IMPORTS = ("import jax", "import shardax")
# Not in this file, which imports JAX at its top.
TIME_IMPORTS = """
import time
start = time.perf_counter()
import jax
between = time.perf_counter()
import shardax
print([between - start, time.perf_counter() - between])
"""
CLASSES = 3


def raw_step() -> float:
    """Initialises the MLP as nested dicts and takes one step; returns its loss."""
    import jax
    import jax.numpy as jnp
    import optax

    def linear(key: Any, inputs: int, outputs: int) -> dict[str, Any]:
        kernel = jax.nn.initializers.lecun_normal()(key, (inputs, outputs))
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    def apply(layer: dict[str, Any], x: Any) -> Any:
        return x @ layer["kernel"] + layer["bias"][None]

    def loss_of(params: Any, x: Any, label: Any) -> Any:
        x = apply(params["embed"], x)
        hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
        logits = apply(params["head"], x + hidden @ params["down"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, label: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, x, label)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    keys = jax.random.split(jax.random.key(0), 5)
    init = jax.nn.initializers.lecun_normal()
    params = {
        "embed": linear(keys[0], 2, 32),
        "gate": init(keys[1], (32, 64)),
        "up": init(keys[2], (32, 64)),
        "down": init(keys[3], (64, 32)),
        "head": linear(keys[4], 32, CLASSES),
    }
    tx = optax.adamw(3e-3)
    return float(step(params, tx.init(params), *batch())[2])


def shardax_step() -> float:
    """Builds the model of the example and takes one step; returns its loss."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import functional_train_step as example
    import optax

    import shardax as sx

    model = example.Classifier(CLASSES, sx.Rngs(0))
    optimizer = sx.train.Optimizer(model, optax.adamw(3e-3))

    @sx.jit
    def step(model: Any, optimizer: Any, x: Any, label: Any) -> Any:
        value, grads = sx.value_and_grad(example.loss_of)(model, x, label)
        optimizer.update(grads)
        return value

    return float(step(model, optimizer, *batch()))


def batch() -> tuple[Any, Any]:
    """Points of the plane and their classes."""
    import numpy as np

    points = np.random.default_rng(0).normal(size=(256, 2)).astype("float32")
    return points, (points[:, 0] > 0).astype("int32") + (points[:, 1] > 0)


def first_step(opponent: str) -> dict[str, Any]:
    """Takes the first step of this process and says when it was done."""
    loss = {"raw jax": raw_step, "shardax": shardax_step}[opponent]()
    return {"done": time.time(), "loss": loss}


def in_fresh_process(words: list[str], cache: str) -> Any:
    """What a new interpreter printed last, as JSON."""
    # As for whoever runs a program twice, bytecode is written.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_in_fresh_process(opponent: str, cache: str) -> dict[str, Any]:
    """Runs `first_step` in a new interpreter; `seconds` are those from its start."""
    start, before = time.time(), os.times()
    found = in_fresh_process([__file__, "--child", opponent], cache)
    after = os.times()
    processor = sum(after[2:4]) - sum(before[2:4])  # of children, which a busy machine adds less to
    return {**found, "seconds": found["done"] - start, "processor": processor}


def main() -> int:
    """Measures, prints a table, and checks the bound."""
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--child", choices=OPPONENTS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_step(options.child)))
        return 0
    repeats = 1 if options.quick else options.repeats
    report = Report("startup", {"repeats": repeats})
    seconds: dict[str, list[float]] = {name: [] for name in (*OPPONENTS, *IMPORTS)}
    processor: dict[str, list[float]] = {name: [] for name in OPPONENTS}
    with tempfile.TemporaryDirectory() as cache:
        # The first round, which a quick run leaves out, fills the cache and writes bytecode.
        for repeat in range(0 if options.quick else -1, repeats):
            for turn in range(len(OPPONENTS)):
                opponent = OPPONENTS[(repeat + turn) % len(OPPONENTS)]
                found = measure_in_fresh_process(opponent, cache)
                if not 0.5 < (loss := found["loss"]) < 5:
                    report.failures.append(f"{opponent}: the loss of the first step is {loss}")
                if repeat >= 0:
                    seconds[opponent].append(found["seconds"])
                    processor[opponent].append(found["processor"])
            if repeat < 0:
                continue
            both = in_fresh_process(["-c", TIME_IMPORTS], cache)
            for name, each in zip(IMPORTS, both, strict=True):
                seconds[name].append(each)
    for names in (OPPONENTS, IMPORTS):
        samples = [Samples(name, tuple(seconds[name])) for name in names]
        compared = compare(samples, names[0])
        report.records += [compared[name].record() for name in names]
    rows = [
        [
            r["name"],
            *(f"{r[key] / 1e3:.0f} ms" for key in ("min_us", "median_us")),
            *(f"{r[key]:.2f}" for key in ("ratio_min", "ratio_median")),
        ]
        for r in report.records
    ]
    print(table(["program", "least", "median", "least ratio", "median ratio"], rows))
    of_processor = statistics.median(b / a for a, b in zip(*processor.values(), strict=True))
    report.records[1]["processor_ratio_median"] = of_processor
    print(f"In processor time, shardax takes {of_processor:.2f} of raw JAX (median).")
    ratio, added = report.records[1]["ratio_median"], min(seconds["import shardax"])
    if not options.quick and ratio > BOUND:
        report.failures.append(f"shardax takes {ratio:.2f} of raw JAX, bound {BOUND}")
    if not options.quick and added > IMPORT_BOUND_SECONDS:
        report.failures.append(
            f"import shardax takes {added:.3f} s after import jax, bound {IMPORT_BOUND_SECONDS}"
        )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
