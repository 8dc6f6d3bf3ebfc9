# SPDX-License-Identifier: Apache-2.0
"""Compile one layout and report its cost.

What is the layout's fault ends up in its report; what is the step's, the target's or the
installation's is raised.

The step is compiled as a training loop would compile it: Variables that it writes keep their
layout. A plain function has no such rule, so that of a *carried* result is made up: a result with
the tree, shapes and dtypes of an argument is taken to be that argument's next value, and keeps its
layout. What ``jax.jit`` made is taken as it is. Memory is reused where the step donates it: a plain
function donates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardax import Jit, Rules, axis_rules, jit, parallel
from shardax._parallel.pipeline import bubble_share
from shardax.errors import ShardaxError
from shardax.extend import Object, ScopeSettings, mesh_axes_of
from shardax.hlo import Program, ProgramFacts, model_flops, parse, read_program
from shardax.hlo.errors import CompilerFailedError
from shardax.hlo.partitioner import partitioned_text
from shardax.plan.compile.cache import ProgramCache
from shardax.plan.compile.compilers import compiler_for, rematerialization_warnings
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.cost import time_band
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs, Placed, label, needs_no_values, unbound
from shardax.plan.records import Layout, LayoutReport, Provenance
from shardax.plan.searching.dimensions import DimensionModel, trace_dimensions
from shardax.plan.timing.workload import expected_time, workload_of_program

# What tracing raises if the rules contradict the step: our errors, and JAX's of sharding types.
_CONSTRAINT_ERRORS = (ShardaxError, ValueError, TypeError, NotImplementedError)
_PIPELINE = re.compile(
    r"pipeline\(schedule=([\w-]+),stages=(\d+),microbatches=(\d+),rounds=(\d+)\)"
)
_DONATES_NOTHING = (
    "A plain function donates nothing; with jax.jit(step, donate_argnums=...), or sx.jit for "
    "Modules, results take the memory of the arguments that they replace."
)


def evaluate(
    inputs: Inputs,
    layout: Layout,
    target: Target,
    *,
    effort: str = "screen",
    compiler: str = "auto",
    cache: ProgramCache | None = None,
) -> LayoutReport:
    """Compiles a step in a layout, in this process."""
    target.check_mesh(layout.sizes)
    xla = compiler_for(target, compiler=compiler)
    mesh = xla.mesh(layout.sizes)
    placed = inputs.place(layout, mesh)
    if placed.errors:
        return LayoutReport(layout, "rejected", "\n".join(placed.errors))
    limit = target.limit_bytes
    report = functools.partial(
        LayoutReport,
        layout,
        argument_bytes=placed.argument_bytes,
        replicated=placed.replicated,
        arrays=placed.arrays,
        parameters=inputs.parameters,
        limit_bytes=limit,
        provenance=Provenance(target.text, xla.label, effort, xla.tier, jax.__version__),
    )

    # Tracing may find that the rules contradict the step.
    mesh_axes = tuple(layout.sizes)
    try:
        lowered, paths = lower(inputs, layout, placed, mesh)
    except PlanInputError:
        raise
    except _CONSTRAINT_ERRORS as error:
        lower_alone(inputs, mesh_axes)  # raises if the step is at fault anyway
        return report("rejected", _first_lines(error))

    try:
        if cache is None:
            compiled = xla.compile(lowered, effort)
        else:
            compiled = cache.compile(xla, layout.sizes, lowered, effort)
    except CompilerFailedError as error:
        return report("failed", str(error))

    # Of what the step donates, results take the memory.
    donates = hasattr(unbound(inputs.step)[0], "trace")
    advice = "" if donates else f" {_DONATES_NOTHING}"
    if compiled.text is None:
        return report(
            "does not fit",
            (compiled.out_of_memory or "") + advice,
            peak_bytes=compiled.peak_bytes,
            compile_seconds=compiled.seconds,
            warnings=placed.warnings,
        )

    # What the program does.
    program = parse(compiled.text)
    facts = read_program(
        program,
        layout.sizes,
        arguments=_argument_paths(program, paths),
        slices=target.slices,
        device_ids=[device.id for device in mesh.devices.flat],
        estimate=compiled.estimate,
    )
    whole, lost = _whole_program(inputs, layout, facts.matmul_flops)
    copies = rematerialization_warnings(compiled.full_rematerializations, paths, program.sources)

    # Whether there is room for it.
    verdict, reason = "fits", ""
    least = max(compiled.peak_bytes or 0, sum(placed.argument_bytes.values()))
    if least > limit:
        needs = f"needs {least:,} bytes of a device's memory, which has {limit:,}."
        verdict, reason = "does not fit", (compiled.out_of_memory or needs) + advice

    return report(
        verdict,
        reason,
        peak_bytes=compiled.peak_bytes,
        flops=facts.matmul_flops,
        program_flops=whole,
        hbm_bytes=facts.hbm_bytes,
        collectives=facts.collectives,
        time=time_band(facts, target, layout.sizes, _dimensions(inputs, mesh_axes).dtype),
        compile_seconds=compiled.seconds,
        warnings=(*placed.warnings, *lost, *copies, *_assumptions(layout), *facts.warnings),
        bubble_share=_bubble_share(compiled.text),
        **_expected(inputs, layout, target, facts, is_traced=bool(whole)),
    )


def _expected(
    inputs: Inputs, layout: Layout, target: Target, facts: ProgramFacts, *, is_traced: bool
) -> dict[str, Any]:
    """Returns a report's expected time and rates; nothing on CPU."""
    chip = target.hardware
    if chip.kind == "cpu":
        return {}

    axes_of = {name: mesh_axes_of(axes) for name, axes in layout.rules}
    batch_axes = frozenset(axis for name in inputs.batch_names for axis in axes_of.get(name, ()))
    work = workload_of_program(facts, layout.sizes, batch_axes)
    is_sparse = bool(axes_of.get("expert"))
    time = expected_time(work, chip, layout.sizes, slices=target.slices, sparse=is_sparse)

    operations = _model_flops(inputs, tuple(layout.sizes)) if is_traced else 0.0
    chips = layout.devices / chip.devices_per_chip
    return {
        "expected": time,
        "mfu": operations / (time.seconds * chip.peak("bf16") * layout.devices),
        "tokens_per_second_per_chip": inputs.tokens / (time.seconds * chips),
    }


def _bubble_share(text: str) -> float:
    """Returns the largest share of idle ticks of a program's pipelines."""
    # A pipeline says what it is in the names of its operations.
    shapes = {(how, *map(int, numbers)) for how, *numbers in _PIPELINE.findall(text)}
    return max((bubble_share(*shape) for shape in shapes), default=0.0)


def _assumptions(layout: Layout) -> list[str]:
    """Warnings of the assumptions behind times, and of their gaps."""
    assumptions, sizes = [], layout.sizes
    if any(sizes.get(axis, 1) > 1 for axis in mesh_axes_of(dict(layout.rules).get("expert"))):
        assumptions.append(
            "Times assume that all experts get equally many tokens; the device of an expert that "
            "gets more takes longer, and the others wait for it."
        )
    if layout.optimizer_memory:
        assumptions.append(
            "Times leave out how the optimizer's state moves between the devices and "
            f"{layout.optimizer_memory}."
        )
    return assumptions


def _whole_program(inputs: Inputs, layout: Layout, flops: float) -> tuple[float, list[str]]:
    """Returns the operations of the unpartitioned program, and warnings by it."""
    try:
        whole = program_flops(inputs, tuple(layout.sizes))
        return whole, [*_lost_batches(inputs, layout), *_flops_warnings(flops, whole, layout)]
    except _CONSTRAINT_ERRORS as error:
        unknown = (
            "The step cannot be traced over mesh axes of size 1, so the operations of the whole "
            "program are unknown, and with them how much is computed several times. Code that asks "
            "for the size of a mesh axis (jax.lax.axis_size) can be. The error was: "
            f"{_first_lines(error, 1)}"
        )
        return 0.0, [unknown]


def _flops_warnings(flops: float, whole: float, layout: Layout) -> list[str]:
    counted = flops * layout.devices
    # In zig-zag order half of what a causal mask hides is not computed.
    if counted >= 0.98 * whole or dict(layout.parallel).get("context") == "ring-zigzag":
        return []
    warning = (
        f"The counted operations of {layout.devices} devices, {counted:.4g}, are fewer than the "
        f"{whole:.4g} of the whole program: some were not recognised, so times are too short."
    )
    return [warning]


@functools.lru_cache(maxsize=16)
def program_flops(inputs: Inputs, mesh_axes: tuple[str, ...] = ()) -> float:
    """Returns the matrix-product operations of a step's one-device program."""
    # The program is that of XLA before its optimizations, without what is unused or there twice.
    text = partitioned_text(_lowered_alone(inputs, mesh_axes))
    counted = read_program(text, {}, estimate=True).matmul_flops
    return counted - _dimensions(inputs, mesh_axes).masked_flops()  # as a CPU computes ragged ones


@functools.lru_cache(maxsize=1)
def _lowered_alone(inputs: Inputs, mesh_axes: tuple[str, ...]):
    return lower_alone(inputs, mesh_axes)[0]


@functools.lru_cache(maxsize=16)
def _model_flops(inputs: Inputs, mesh_axes: tuple[str, ...]) -> float:
    """Returns the operations of a step on one device, without recomputed ones."""
    program = parse(_lowered_alone(inputs, mesh_axes).as_text("hlo", debug_info=True))
    masked = _dimensions(inputs, mesh_axes).masked_flops(recomputed=False)
    return sum(model_flops(program).by_dtype.values()) - masked


@functools.lru_cache(maxsize=16)
def _dimensions(inputs: Inputs, mesh_axes: tuple[str, ...]) -> DimensionModel:
    return trace_dimensions(inputs, mesh_axes)


def _lost_batches(inputs: Inputs, layout: Layout) -> list[str]:
    """Warnings of activations split by another name than the batch."""
    # Rules are asked in order. With that of a parameter's dimension first, which activations have
    # too, they are split by it and not by the batch, and most of what is computed travels.
    rules = layout.as_rules
    dimensions = _dimensions(inputs, tuple(layout.sizes))
    warnings: dict[str, None] = {}
    for shape, names in (*dimensions.constraints, *dimensions.arguments):
        assignment = rules.assign(names)
        for lost in assignment.passed_over:
            name, winner = lost.rule[0], lost.winner[0]
            split = name in assignment.chosen and rules.pairs[assignment.chosen[name]][1]
            if split or name not in inputs.batch_names:
                continue

            warning = (
                f"Arrays of shape {shape} and names {names} are not split by {name!r}: "
                f"the mesh axis {lost.mesh_axis!r} goes to {winner!r}, whose rule comes first. "
                f"Put the rule of {name!r} before it."
            )
            warnings[warning] = None
    return list(warnings)


def _argument_paths(program: Program, paths: dict[str, str]) -> tuple[str, ...]:
    """Paths of a compiled program's parameters, or JAX's names of them."""
    # The reader has seen that their numbers have no gap.
    parameters = program.main.parameters
    names = [parameters[number].op_name for number in range(len(parameters))]
    return tuple(paths.get(name, name) for name in names)


def _first_lines(error: BaseException, count: int = 6) -> str:
    return "\n".join(str(error).strip().splitlines()[:count]) or type(error).__name__


# What JAX or ``sx.jit`` lowered; and paths of the program's inputs, by JAX's names of them.
LoweredStep = tuple[Any, dict[str, str]]


def lower(inputs: Inputs, layout: Layout, placed: Placed, mesh: Mesh) -> LoweredStep:
    """Lowers a step in a layout."""
    settings = dict(layout.parallel)
    with axis_rules(layout.as_rules), parallel(**settings), jax.set_mesh(mesh), needs_no_values():
        traced = _traceable(inputs, placed).trace(*placed.args)
        return traced.lower(), _paths(traced, inputs)


def lower_alone(inputs: Inputs, mesh_axes: Sequence[str] = ()) -> LoweredStep:
    """Lowers a step for one device, with mesh axes of size 1."""
    devices = np.array(jax.devices("cpu")[:1]).reshape((1,) * len(mesh_axes))
    # Each name has a rule, so that constraints find that they may stay as they are.
    rules = Rules([(name, None) for name in inputs.logical_names or ("batch",)])
    with contextlib.ExitStack() as scope:
        if mesh_axes:
            scope.enter_context(jax.set_mesh(Mesh(devices, tuple(mesh_axes))))
            scope.enter_context(axis_rules(rules))
        scope.enter_context(needs_no_values())
        # Kernels of the target do not run on a CPU.
        scope.enter_context(ScopeSettings.scope(reference=True))
        traced = _traceable(inputs, None).trace(*inputs.shapes())
        return traced.lower(), _paths(traced, inputs)


def _traceable(inputs: Inputs, placed: Placed | None):
    """The step as something with ``trace``."""
    step, args, keywords = unbound(inputs.step)
    shardings = None if placed is None else placed.shardings

    # What was jitted keeps its options, but for those of arguments that are bound.
    if isinstance(step, Jit):
        count = len(args)
        # Tuples: ``Jit`` has resolved them. What is bound is no argument any more.
        donated: Any = step.options.donate_argnums
        donated_names: Any = step.options.donate_argnames or ()
        bound = {*list(inspect.signature(step.function).parameters)[:count], *keywords}

        options = dataclasses.replace(
            step.options,
            in_shardings=shardings,
            keep_unused=True,
            static_argnums=[n - count for n in step.static_positions if n >= count],
            static_argnames=[name for name in step.static_names if name not in bound],
            donate_argnums=[n - count for n in donated if n >= count],
            donate_argnames=[name for name in donated_names if name not in bound],
        )
        return Jit(functools.partial(step.function, *args, **keywords), options)
    if hasattr(step, "trace"):
        return types.SimpleNamespace(trace=functools.partial(step.trace, *args, **keywords))

    # A plain function is jitted here, by ``sx.jit`` if it is given Modules.
    leaves = jax.tree.leaves(inputs.tree, is_leaf=lambda value: isinstance(value, Object))
    if any(isinstance(leaf, Object) for leaf in leaves):
        return jit(inputs.step, in_shardings=shardings, keep_unused=True)
    out = None if placed is None else _carried(inputs, placed)
    return jax.jit(inputs.step, out_shardings=out, keep_unused=True)


def _carried(inputs: Inputs, placed: Placed):
    """Result shardings: of an argument's next value, those of the argument."""

    def form_of(tree: object) -> tuple[Any, Any]:
        leaves, treedef = jax.tree.flatten(tree)
        return [(jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves], treedef

    shapes = inputs.shapes()
    result = jax.eval_shape(inputs.step, *shapes)
    several = type(result) in (tuple, list)
    left = [*range(len(shapes))]
    places: list[Any] = []
    for part in list(result) if several else [result]:
        form = form_of(part)
        matches = [i for i in left if form[0] and form_of(shapes[i]) == form][:1]
        places.append(placed.shardings[matches[0]] if matches else None)
        left = [i for i in left if i not in matches]
    return type(result)(places) if several else places[0]


def _paths(traced: object, inputs: Inputs) -> dict[str, str]:
    input_paths = getattr(traced, "input_paths", None) or {}
    return {
        name: label((inputs.names[path[0]] if isinstance(path[0], int) else path[0], *path[1:]))
        for name, path in input_paths.items()
    }
