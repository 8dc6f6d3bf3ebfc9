# SPDX-License-Identifier: Apache-2.0
"""How long tracing and lowering a train step of an unrolled decoder takes.

Opponents: the decoder of `raw_decoder.py` under `jax.jit` (baseline), `shardax.models.Decoder`
under `shardax.jit`, and the same model of NNX's own layers under `nnx.jit`. Every timed trace is of
a new function, so none is found in a cache; the small functions of `jax.numpy` inside it were
traced before, for all alike, as in a long-running process. Compiling is left out: it is XLA's, and
`program.py` shows that the programs are the same. Time is that of the processor, since tracing is
the work of one Python thread.

Bound on the median over repeats: shardax takes at most 1.08 of raw JAX at 48 layers, tracing and
lowering together.

    python benchmarks/trace_time.py --json trace_time.json
"""

import sys
import time
from collections.abc import Callable

import _decoder_steps
import optax
from _decoder_steps import Step
from _harness import Opponent, Report, arguments, compare, measure, table
from raw_decoder import Config

BOUND_RATIO = 1.08


def tracing(step: Step) -> Callable[[int], None]:
    """Traces a new function each call."""

    def run(calls: int) -> None:
        for _ in range(calls):
            step.jit().trace(*step.args)

    return run


def tracing_and_lowering(step: Step) -> Callable[[int], None]:
    """Traces and lowers a new function each call."""

    def run(calls: int) -> None:
        for _ in range(calls):
            step.jit().trace(*step.args).lower()

    return run


def main() -> int:
    """Measure, print one table, and check the bound."""
    parser = arguments(__doc__, repeats=7)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--opponents", nargs="*", default=list(_decoder_steps.MAKERS))
    options = parser.parse_args()
    layers = 2 if options.quick else options.layers
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    config, tx = Config(layers=layers), optax.adamw(1e-3)
    names = ["raw jax", *(name for name in options.opponents if name != "raw jax")]
    steps = [_decoder_steps.MAKERS[name](config, tx) for name in names]
    report = Report("trace_time", {"layers": layers, "repeats": repeats})
    rows = []
    for what, timed in (("trace", tracing), ("trace and lower", tracing_and_lowering)):
        opponents = [Opponent(step.name, timed(step)) for step in steps]
        samples = measure(opponents, repeats=repeats, calls=1, clock=time.process_time)
        for comparison in compare(samples, "raw jax").values():
            record = {"what": what, "layers": layers} | comparison.record()
            report.records.append(record)
            seconds, least = f"{record['min_us'] / 1e6:.3f} s", f"{record['ratio_min']:.3f}x"
            ratio = record["ratio_median"]
            rows.append([record["name"], what, seconds, least, f"{ratio:.3f}x"])
            bounded = what == "trace and lower" and record["name"] == "shardax"
            if bounded and ratio > BOUND_RATIO:
                report.failures.append(f"{ratio:.3f} of raw JAX, at most {BOUND_RATIO}")
    print(f"\n### Tracing a train step of {layers} unrolled layers\n")
    print(table(["model", "what", "least time", "least ratio", "median ratio"], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
