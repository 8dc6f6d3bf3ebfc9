# SPDX-License-Identifier: Apache-2.0
"""Whether shardax compiles to the program that hand-written JAX compiles to.

Opponent: the train step of the decoder in `raw_decoder.py` under `jax.jit`. Compared are XLA's own
figures for the optimized program: floating-point operations, transcendentals, bytes accessed,
instructions, and argument, output, aliased and temporary memory; with and without a tied head,
bfloat16 compute, and donation. NNX's figures stand beside them for reference; its layers order some
operations otherwise and its optimizer counts steps twice.

Bound: each ratio shardax / raw is 1.00, that is within 0.005 of one.

    python benchmarks/program.py --json program.json
"""

import re
import sys
from dataclasses import replace
from typing import Any

import _decoder_steps
import optax
from _decoder_steps import Step
from _harness import Report, arguments, table
from raw_decoder import Config

TOLERANCE = 0.005
COSTS = ("flops", "transcendentals", "bytes accessed")
MEMORY = ("argument", "output", "alias", "temp")


def variants(quick: bool) -> dict[str, tuple[Config, bool]]:
    """The programs to compare: a configuration and whether model and optimizer are donated."""
    base = Config(layers=1) if quick else Config(layers=6, embed=128, mlp=384, head_dim=32)
    if quick:
        return {"untied": (base, False)}
    return {
        "untied": (base, False),
        "untied, donated": (base, True),
        "tied": (replace(base, tied=True), False),
        "bfloat16 compute": (replace(base, dtype="bfloat16"), False),
    }


def figures(step: Step) -> dict[str, float]:
    """XLA's figures for the compiled step, by name; memory in bytes."""
    compiled = step.jit().lower(*step.args).compile()
    costs: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    found = {name: float(costs.get(name, 0.0)) for name in COSTS}
    for name in MEMORY:
        found[f"{name} bytes"] = float(getattr(memory, f"{name}_size_in_bytes"))
    instruction = re.compile(r"^\s+(?:ROOT )?%\S+ = ", re.MULTILINE)
    found["instructions"] = float(len(instruction.findall(compiled.as_text())))
    return found


def ratio(mine: float, its: float) -> float:
    """mine / its; one where both are zero, infinite where only the second is."""
    if its:
        return mine / its
    return 1.0 if not mine else float("inf")


def main() -> int:
    """Compile, print one table a variant, and check that every ratio is one."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--opponents", nargs="*", default=list(_decoder_steps.MAKERS))
    options = parser.parse_args()
    tx = optax.adamw(1e-3)
    report = Report("program", {"quick": options.quick})
    names = ["raw jax", *(name for name in options.opponents if name != "raw jax")]
    for variant, (config, donate) in variants(options.quick).items():
        found = {name: figures(_decoder_steps.MAKERS[name](config, tx, donate)) for name in names}
        rows = []
        for figure, its in found["raw jax"].items():
            ratios = {name: ratio(found[name][figure], its) for name in names}
            values = {name: found[name][figure] for name in names}
            record = {"variant": variant, "figure": figure, "values": values, "ratios": ratios}
            report.records.append(record)
            rows.append([figure, f"{its:,.0f}", *(f"{ratios[name]:.3f}" for name in names[1:])])
            if abs(ratios.get("shardax", 1.0) - 1.0) > TOLERANCE:
                report.failures.append(f"{variant}: {figure} {ratios['shardax']:.3f} of raw JAX")
        print(f"\n### {variant}\n")
        print(table(["figure", "raw jax", *(f"{name} / raw" for name in names[1:])], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
