# SPDX-License-Identifier: Apache-2.0
"""Whether shardax compiles to the program that hand-written JAX compiles to.

Opponent: the train step of the decoder in `raw_decoder.py` under `jax.jit`. Compared are XLA's own
figures for the optimized program: floating-point operations, transcendentals, bytes accessed,
argument, output, aliased and temporary memory, and the number of instructions and of collectives
in its text. Variants: tied head, bfloat16 compute, donation, and a 2x4 mesh of virtual devices
(figures are then of one device). NNX's figures stand beside them on one device, for reference: its
layers order some operations otherwise, and its optimizer counts steps twice.

Bound: each ratio shardax / raw is 1.00, that is within 0.005 of one.

    python benchmarks/program.py --json program.json
"""

import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import optax
from _decoder_steps import MAKERS, Step, eight_cpu_devices, mesh_2x4
from _harness import Report, arguments, table
from raw_decoder import Config

TOLERANCE = 0.005
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
COSTS = ("flops", "transcendentals", "bytes accessed")
MEMORY = ("argument", "output", "alias", "temp")


@dataclass(frozen=True)
class Variant:
    """A program to compare.

    Attributes:
        config: The decoder.
        donate: Whether model and optimizer are donated.
        sharded: Whether they are laid over the 2x4 mesh.
    """

    config: Config
    donate: bool = False
    sharded: bool = False


def variants(quick: bool) -> dict[str, Variant]:
    """The programs to compare, by name."""
    base = Config(layers=1) if quick else Config(layers=6, embed=128, heads=8, kv_heads=4, mlp=384)
    if quick:
        return {"untied": Variant(base)}
    return {
        "untied": Variant(base),
        "untied, donated": Variant(base, donate=True),
        "tied": Variant(replace(base, tied=True)),
        "bfloat16 compute": Variant(replace(base, dtype="bfloat16")),
        "sharded over 2x4": Variant(base, donate=True, sharded=True),
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
    text = compiled.as_text()
    found["instructions"] = float(len(instruction.findall(text)))
    found["collectives"] = float(sum(text.count(f" {name}(") for name in COLLECTIVES))
    return found


def ratio(mine: float, its: float) -> float:
    """mine / its; one where both are zero, infinite where only the second is."""
    if its:
        return mine / its
    return 1.0 if not mine else float("inf")


def main() -> int:
    """Compile, print one table a variant, and check that every ratio is one."""
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--opponents", nargs="*", default=list(MAKERS))
    options = parser.parse_args()
    eight_cpu_devices()
    tx = optax.adamw(1e-3)
    report = Report("program", {"quick": options.quick})
    everyone = ["raw jax", *(name for name in options.opponents if name != "raw jax")]
    for variant, asked in variants(options.quick).items():
        mesh = mesh_2x4() if asked.sharded else None
        names = [name for name in everyone if mesh is None or name != "nnx"]
        found = {}
        for name in names:
            step = MAKERS[name](asked.config, tx, asked.donate, **({"mesh": mesh} if mesh else {}))
            found[name] = figures(step)
        rows = []
        for figure, its in found["raw jax"].items():
            ratios = {name: ratio(found[name][figure], its) for name in names}
            values = {name: found[name][figure] for name in names}
            record = {"variant": variant, "figure": figure, "values": values, "ratios": ratios}
            report.records.append(record)
            rows.append([figure, f"{its:,.0f}", *(f"{ratios[name]:.3f}" for name in names[1:])])
            if ratios.get("shardax", 1.0) - 1.0 > TOLERANCE:
                report.failures.append(f"{variant}: {figure} {ratios['shardax']:.3f} of raw JAX")
        print(f"\n### {variant}\n")
        print(table(["figure", "raw jax", *(f"{name} / raw" for name in names[1:])], rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
