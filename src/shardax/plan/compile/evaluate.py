# SPDX-License-Identifier: Apache-2.0
"""One layout, asked of a compiler: laid out, lowered, compiled and read.

Nothing is allocated: the arguments are shapes, and the devices need not exist. What is the layout's
fault ends up in its report; what is the step's, the target's or the installation's is raised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardax._core.errors import ShardaxError
from shardax.hlo import Program, parse, read_program
from shardax.hlo.analyze import partitioned_text
from shardax.hlo.program import CompilerFailedError
from shardax.partition.rules import assign
from shardax.plan.compile.cache import CachedCompiler, ProgramCache
from shardax.plan.compile.compilers import CompiledProgram, compiler_for, whole_warnings
from shardax.plan.compile.lowering import LoweredStep, lower, lower_alone
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.cost import time_band
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs, Placed
from shardax.plan.records import Layout, LayoutReport, Provenance
from shardax.plan.search.dimensions import Dimensions, trace_dimensions

_CONSTRAINT_ERRORS = (ShardaxError, ValueError, TypeError, NotImplementedError)
"""What tracing raises if the rules contradict the step: our errors, and JAX's of sharding types."""


def evaluate(
    step: Callable[..., Any],
    args: Sequence[Any],
    layout: Layout,
    target: Target,
    *,
    effort: str = "screen",
    compiler: str = "auto",
    inputs: Inputs | None = None,
    cache: ProgramCache | None = None,
) -> LayoutReport:
    """Asks what a layout costs, in this process.

    Args:
        step: The step; see ``shardax.plan.inputs``.
        args: Its positional arguments.
        layout: The layout.
        target: The hardware.
        effort: ``"screen"`` compiles fast, ``"full"`` as for a run.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``; see ``shardax.plan.compile.compilers``.
        inputs: The step and arguments, prepared; instead of them.
        cache: Where compiled programs are kept, and asked for first.

    Returns:
        The report. Layouts that cannot be, or do not fit, have one too.

    Raises:
        PlanInputError: If the step needs values, or arguments have no names.
        TargetError: If the mesh does not have the target's devices.
        CompilerMissingError: If the compiler is asked for and is not installed.
        HloReadError: If the compiled program has something unknown in it.
    """
    inputs = inputs or Inputs(step, args)
    target.check_mesh(layout.sizes)
    asked = compiler_for(target, compiler=compiler)
    if cache is not None:
        asked = CachedCompiler(asked, cache)
    mesh = asked.mesh(layout.sizes)
    placed = inputs.place(layout, mesh)
    if placed.errors:
        return rejected(layout, "\n".join(placed.errors))
    common: dict[str, Any] = {
        "argument_bytes": placed.argument_bytes,
        "replicated": placed.replicated,
        "arrays": placed.arrays,
        "limit_bytes": target.limit_bytes,
        "provenance": Provenance(target.text, asked.label, effort, asked.tier, jax.__version__),
    }
    try:
        lowered = lower(inputs, layout, placed, mesh)
    except PlanInputError:
        raise
    except _CONSTRAINT_ERRORS as error:
        lower_alone(inputs, tuple(layout.sizes))  # raises if the step is at fault anyway
        return LayoutReport(layout, "rejected", _first_lines(error), **common)
    try:
        compiled = asked.compile(lowered.lowered, effort)
    except CompilerFailedError as error:
        return LayoutReport(layout, "failed", str(error), **common)
    if compiled.text is None:
        return LayoutReport(
            layout,
            "does not fit",
            compiled.out_of_memory or "",
            peak_bytes=compiled.peak_bytes,
            compile_seconds=compiled.seconds,
            warnings=placed.warnings,
            **common,
        )
    return _read(inputs, layout, target, placed, lowered, compiled, mesh, common)


def rejected(layout: Layout, reason: str, **more: Any) -> LayoutReport:
    """Returns the report of a layout that was not compiled."""
    return LayoutReport(layout, "rejected", reason, **more)


def _read(
    inputs: Inputs,
    layout: Layout,
    target: Target,
    placed: Placed,
    lowered: LoweredStep,
    compiled: CompiledProgram,
    mesh: Mesh,
    common: dict[str, Any],
) -> LayoutReport:
    program = parse(compiled.text or "")
    facts = read_program(
        program,
        layout.sizes,
        arguments=argument_paths(program, lowered.paths),
        slices=target.slices,
        device_ids=[device.id for device in mesh.devices.flat],
        estimate=compiled.estimate,
    )
    peak, limit = compiled.peak_bytes, target.limit_bytes
    least = max(peak or 0, sum(placed.argument_bytes.values()))
    fits = limit is None or least <= limit
    reason = "" if fits else f"needs {least:,} bytes of a device's memory, which has {limit:,}"
    try:
        whole = program_flops(inputs, tuple(layout.sizes))
        alone = [*lost_batches(inputs, layout), *_self_check(facts.matmul_flops, whole, layout)]
    except _CONSTRAINT_ERRORS as error:
        whole, alone = 0.0, [_not_alone(error)]
    whole_arrays = whole_warnings(compiled.made_whole, lowered.paths, program.sources)
    warnings = [*placed.warnings, *alone, *whole_arrays, *facts.warnings]
    return LayoutReport(
        layout,
        "fits" if fits else "does not fit",
        compiled.out_of_memory or reason,
        peak_bytes=peak,
        flops=facts.matmul_flops,
        program_flops=whole,
        hbm_bytes=facts.hbm_bytes,
        collectives=facts.collectives,
        time=time_band(facts, target, layout.sizes, _dimensions(inputs, tuple(layout.sizes)).dtype),
        compile_seconds=compiled.seconds,
        warnings=tuple(warnings),
        **common,
    )


@functools.lru_cache(maxsize=16)
def program_flops(inputs: Inputs, mesh_axes: tuple[str, ...] = ()) -> float:
    """Returns the operations of the matrix products of a step, counted in its one-device program.

    The program is that of XLA before its optimizations, without what is unused or there twice.

    Args:
        inputs: The step and its arguments.
        mesh_axes: Names of mesh axes, for code in the step that asks for them.
    """
    text = partitioned_text(lower_alone(inputs, mesh_axes).lowered)
    return read_program(text, {}, estimate=True).matmul_flops


@functools.lru_cache(maxsize=16)
def _dimensions(inputs: Inputs, mesh_axes: tuple[str, ...]) -> Dimensions:
    return trace_dimensions(inputs, mesh_axes)


def lost_batches(inputs: Inputs, layout: Layout) -> list[str]:
    """Says where an activation is not split by the batch because another name took its mesh axis.

    Rules are asked in order. With that of a parameter's dimension first, which activations have
    too, they are split by it and not by the batch, and most of what is computed travels.

    Args:
        inputs: The step and its arguments, whose constraints are looked at.
        layout: The layout.
    """
    rules, said = layout.as_rules, []
    found = _dimensions(inputs, tuple(layout.sizes))
    for shape, names in (*found.constraints, *found.arguments):
        assignment = assign(names, rules.pairs)
        for lost in assignment.passed_over:
            name, winner = lost.rule[0], lost.winner[0]
            split = name in assignment.chosen and rules.pairs[assignment.chosen[name]][1]
            if name in inputs.batch_names and not split:
                said.append(
                    f"Arrays of shape {shape} and names {names} are not split by {name!r}: "
                    f"the mesh axis {lost.mesh_axis!r} goes to {winner!r}, whose rule comes first. "
                    f"Put the rule of {name!r} before it."
                )
    return list(dict.fromkeys(said))


def argument_paths(program: Program, paths: dict[str, str]) -> tuple[str, ...]:
    """Returns where each parameter of a compiled program is among the arguments.

    Args:
        program: The compiled program.
        paths: Paths by JAX's name of the input; a name that is not in it stands for itself.

    Returns:
        A text per parameter, in order.
    """
    found = {number: each.op_name for number, each in program.main.parameters.items()}
    names = [found.get(number, "") for number in range(max(found, default=-1) + 1)]
    return tuple(paths.get(name, name) for name in names)


def _not_alone(error: BaseException) -> str:
    """The warning for a step that runs in this layout, and not on one device."""
    return (
        "The step cannot be traced over mesh axes of size 1, so the operations of the whole "
        "program are unknown, and with them how much is computed several times. Code that asks "
        "for the size of a mesh axis (jax.lax.axis_size) can be. The error was: "
        f"{_first_lines(error, 1)}"
    )


def _self_check(flops: float, whole: float, layout: Layout) -> list[str]:
    """The devices together must do at least what the program does."""
    devices = layout.devices
    if flops * devices >= 0.98 * whole:
        return []
    return [
        (
            f"The counted operations of {devices} devices, {flops * devices:.4g}, are fewer than "
            f"the {whole:.4g} of the whole program: some were not recognised, so times are too "
            "short."
        )
    ]


def _first_lines(error: BaseException, count: int = 6) -> str:
    return "\n".join(str(error).strip().splitlines()[:count]) or type(error).__name__
