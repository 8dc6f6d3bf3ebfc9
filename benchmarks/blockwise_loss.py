# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of a loss over a large vocabulary, block by block and with all logits.

Opponents: `sx.models.cross_entropy` of the logits (baseline) and
`sx.models.blockwise_cross_entropy`, with the loss and the gradients of hidden states and kernel, in
float32 and bfloat16. Both give the same numbers. Block by block, the logits are computed twice: 4
products of the size of the head instead of 3.

The peak is what the compiled program needs beside its inputs and results, as the compiler counts
it (`memory_analysis`).

Bounds: a quarter of the peak with all logits at most, and at most 1.5 of its time (median over
repeats).

    python benchmarks/blockwise_loss.py --json blockwise_loss.json
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Opponent, Report, arguments, compare, measure, table

import shardax as sx

PEAK_BOUND, TIME_BOUND = 0.25, 1.5
BASELINE, OURS = "all logits", "blockwise"
SIZES = {"rows": 4, "time": 512, "embed": 256, "vocab": 32_000}
QUICK = {"rows": 2, "time": 64, "embed": 16, "vocab": 2048}
BLOCK = 256
DTYPES = ("float32", "bfloat16")

Step = Callable[..., Any]


def all_logits(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
    """The plain loss."""
    return sx.models.cross_entropy(hidden @ kernel, targets)


def inputs(sizes: dict[str, int], dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, kernel and targets."""
    random = np.random.default_rng(0)
    tokens, embed, vocab = (sizes["rows"], sizes["time"]), sizes["embed"], sizes["vocab"]
    hidden = random.normal(size=(*tokens, embed)).astype(np.float32)
    kernel = random.normal(size=(embed, vocab)).astype(np.float32) / embed**0.5
    targets = random.integers(0, vocab, tokens, np.int32)
    return jnp.asarray(hidden, dtype), jnp.asarray(kernel, dtype), jnp.asarray(targets)


def compiled(block_size: int, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    """The compiled step of each opponent: loss and gradients."""
    blockwise = functools.partial(sx.models.blockwise_cross_entropy, block_size=block_size)
    losses = {BASELINE: all_logits, OURS: blockwise}
    return {
        name: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        for name, loss in losses.items()
    }


def check_equal(steps: dict[str, Any], arrays: tuple[jax.Array, ...], tolerance: float) -> None:
    """Raises if the opponents disagree by more than rounding."""
    found = [jax.tree.leaves(step(*arrays)) for step in steps.values()]
    for one, other in zip(*found, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        most = tolerance * np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=most)


def repeated(step: Step, arrays: tuple[jax.Array, ...]) -> Callable[[int], Any]:
    """Makes a number of calls."""

    def run(calls: int) -> Any:
        return [step(*arrays) for _ in range(calls)][-1]

    return run


def bound_failures(record: dict[str, Any]) -> list[str]:
    """Says which bounds a record of ours is out of."""
    failures = []
    if record["peak_ratio"] > PEAK_BOUND:
        failures.append(
            f"{record['dtype']}: peak {record['peak_ratio']:.2f} of that with all logits, at most "
            f"{PEAK_BOUND}"
        )
    if record["ratio_median"] > TIME_BOUND:
        failures.append(
            f"{record['dtype']}: time {record['ratio_median']:.2f} of that with all logits, at "
            f"most {TIME_BOUND}"
        )
    return failures


def main() -> int:
    """Measures, prints a table and returns the exit status."""
    options = arguments(__doc__, repeats=5).parse_args()
    sizes = QUICK if options.quick else SIZES
    block = 16 if options.quick else BLOCK
    repeats = 2 if options.quick else options.repeats
    report = Report("blockwise_loss", {**sizes, "block_size": block, "repeats": repeats})
    rows = []
    for dtype in DTYPES:
        arrays = inputs(sizes, dtype)
        steps = compiled(block, arrays)
        check_equal(steps, arrays, 1e-4 if dtype == "float32" else 0.05)
        peaks = {n: step.memory_analysis().temp_size_in_bytes for n, step in steps.items()}
        competing = [Opponent(name, repeated(step, arrays)) for name, step in steps.items()]
        samples = measure(competing, repeats=repeats, calls=1)
        for name, comparison in compare(samples, BASELINE).items():
            ratio = peaks[name] / peaks[BASELINE]
            record = comparison.record() | {"dtype": dtype, "peak_bytes": peaks[name]}
            record["peak_ratio"] = ratio
            report.records.append(record)
            cells = [f"{peaks[name] / 2**20:,.1f}", f"{ratio:.3f}x"]
            times = [f"{record['median_us'] / 1e3:,.1f}", f"{record['ratio_median']:.2f}x"]
            rows.append([name, dtype, *cells, *times])
            if name == OURS and not options.quick:
                report.failures += bound_failures(record)
    print("\n### A loss over a large vocabulary, with gradients\n")
    print(table(["loss", "dtype", "peak MiB", "to all logits", "median ms", "to all logits"], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
