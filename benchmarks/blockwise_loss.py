# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of a loss over a large vocabulary, block by block and with all logits.

Opponents: `sx.models.cross_entropy` of the logits (baseline) and
`sx.models.blockwise_cross_entropy`, with the loss and the gradients of hidden states and kernel, in
float32 and bfloat16. Both give the same numbers. Block by block, the logits are computed twice: 4
products of the size of the head instead of 3.

The peak is what the compiled program needs beside its inputs and results, as the compiler counts
it (`memory_analysis`). Beside it stand what the process took in one call more than before, measured
(`VmHWM` of Linux), and the planner's count of a device's peak, inputs and results included, from
shapes alone: for one device, and for four with tokens split by two and the vocabulary by two.

Bounds: a quarter of the peak with all logits at most, by each of these; at most 1.5 of its time
(median over repeats).

    python benchmarks/blockwise_loss.py --json blockwise_loss.json
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Opponent, Report, arguments, compare, measure, table

import shardax as sx
from shardax import plan

PEAK_BOUND, TIME_BOUND = 0.25, 1.5
BASELINE, OURS = "all logits", "blockwise"
SIZES = {"rows": 4, "time": 512, "embed": 256, "vocab": 32_000}
QUICK = {"rows": 2, "time": 64, "embed": 16, "vocab": 2048}
BLOCK = 256
DTYPES = ("float32", "bfloat16")
# Split over four devices a block is a larger share of what each has.
UNBOUND = ("planner, cpu:4",)
TARGETS = {"cpu:1": {"data": 1, "model": 1}, "cpu:4": {"data": 2, "model": 2}}

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


def steps_of(block_size: int) -> dict[str, Step]:
    """The step of each opponent: loss and gradients."""
    blockwise = functools.partial(sx.models.blockwise_cross_entropy, block_size=block_size)
    losses = {BASELINE: all_logits, OURS: blockwise}
    return {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()}


def compiled(block_size: int, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    """The compiled step of each opponent."""
    steps = steps_of(block_size)
    return {name: jax.jit(step).lower(*arrays).compile() for name, step in steps.items()}


def planned_peaks(
    step: Step, arrays: tuple[jax.Array, ...], targets: Mapping[str, dict[str, int]]
) -> dict[str, int | None]:
    """The planner's peak of a device, by target."""
    names = ("batch", "seq", "embed"), ("embed", "vocab"), ("batch", "seq")
    shapes = tuple(
        plan.NamedShape(array.shape, str(array.dtype), axes)
        for array, axes in zip(arrays, names, strict=True)
    )
    rules = {"split": {"batch": "data", "vocab": "model"}}
    found: dict[str, int | None] = {}
    for target, mesh in targets.items():
        (report,) = plan.compare(step, shapes, rules, mesh, target, cache=None).reports
        found[target] = report.peak_bytes
    return found


def measured_peak(step: Step, arrays: tuple[jax.Array, ...]) -> int | None:
    """Bytes that a call takes at its most beside what is there; None but on Linux."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    reset.write_text("5")  # The peak is that of now.
    before = _kilobytes(status.read_text(), "VmRSS")
    jax.block_until_ready(step(*arrays))
    return 1024 * (_kilobytes(status.read_text(), "VmHWM") - before)


def _kilobytes(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


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
    failures = [
        f"{record['dtype']}: {name} peak {ratio:.2f} of that with all logits, at most {PEAK_BOUND}"
        for name, ratio in record["peak_ratios"].items()
        if ratio > PEAK_BOUND and name not in UNBOUND
    ]
    if record["ratio_median"] > TIME_BOUND:
        failures.append(
            f"{record['dtype']}: time {record['ratio_median']:.2f} of that with all logits, at "
            f"most {TIME_BOUND}"
        )
    return failures


def peaks_of(
    steps: dict[str, Any],
    block: int,
    arrays: tuple[jax.Array, ...],
    targets: Mapping[str, dict[str, int]] = TARGETS,
) -> dict[str, dict[str, int]]:
    """Peaks in bytes by opponent, and by who counts."""
    found = {}
    for name, step in steps_of(block).items():
        every = {
            "compiler": steps[name].memory_analysis().temp_size_in_bytes,
            "measured": measured_peak(steps[name], arrays),
            **{f"planner, {t}": n for t, n in planned_peaks(step, arrays, targets).items()},
        }
        found[name] = {who: peak for who, peak in every.items() if peak is not None}
    return found


def main() -> int:
    """Measures, prints tables and returns the exit status."""
    options = arguments(__doc__, repeats=5).parse_args()
    sizes = QUICK if options.quick else SIZES
    block = 16 if options.quick else BLOCK
    repeats = 2 if options.quick else options.repeats
    report = Report("blockwise_loss", {**sizes, "block_size": block, "repeats": repeats})
    times: list[list[str]] = []
    counts: list[list[str]] = []
    for dtype in DTYPES:
        arrays = inputs(sizes, dtype)
        steps = compiled(block, arrays)
        targets = dict([*TARGETS.items()][: 1 if options.quick else None])
        peaks = peaks_of(steps, block, arrays, targets)
        check_equal(steps, arrays, 1e-4 if dtype == "float32" else 0.05)
        competing = [Opponent(name, repeated(step, arrays)) for name, step in steps.items()]
        samples = measure(competing, repeats=repeats, calls=1)
        for name, comparison in compare(samples, BASELINE).items():
            ratios = {who: peak / max(peaks[BASELINE][who], 1) for who, peak in peaks[name].items()}
            record = comparison.record() | {"dtype": dtype, "peak_bytes": peaks[name]}
            record["peak_ratios"] = ratios
            report.records.append(record)
            median = f"{record['median_us'] / 1e3:,.1f}"
            times.append([name, dtype, median, f"{record['ratio_median']:.2f}x"])
            for who, peak in peaks[name].items():
                counts.append([name, dtype, who, f"{peak / 2**20:,.1f}", f"{ratios[who]:.3f}x"])
            if name == OURS and not options.quick:
                report.failures += bound_failures(record)
    print("\n### A loss over a large vocabulary, with gradients\n")
    print(table(["loss", "dtype", "median ms", "to all logits"], times))
    print()
    print(table(["loss", "dtype", "peak counted by", "MiB", "to all logits"], counts))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
