# SPDX-License-Identifier: Apache-2.0
"""Comparisons of given layouts, and assertions on one layout."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from shardax import Rules
from shardax import parallel as parallel_scope
from shardax.errors import PartitionError
from shardax.extend import PyTree, RulesLike, mesh_text
from shardax.partition import UNCONSTRAINED
from shardax.plan.compile.pool import make_evaluator
from shardax.plan.errors import LayoutAssertionError, PlanInputError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport, Plan
from shardax.plan.report.progress import progress_for
from shardax.plan.searching.search import search

Bound = int | float | str

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_BOUND = re.compile(r"\s*(<=|>=|==|<|>)\s*([\d_.,]+(?:e\d+)?)\s*([kKMGT]?i?B)?\s*")
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{i}B": base ** (power + 1)
    for i, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT")
}
_UNITS["kB"] = 1000
_SHOWN = 5


def compare(
    step: Callable[..., PyTree],
    args: Sequence[PyTree],
    rules: Mapping[str, RulesLike],
    meshes: Sequence[Mapping[str, int]] | Mapping[str, int],
    target: str | Target,
    *,
    parallel: Mapping[str, Any] | None = None,
    effort: str = "full",
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = False,
) -> Plan:
    """Compares layouts by their cost: every rule set over every mesh.

    Args:
        step: What is planned: a function made by ``sx.jit`` or ``jax.jit``, a method or partial of
            one, or a plain function, which donates no arguments.
        args: Its positional arguments, none of which needs to hold an array: lazy Modules and
            optimizers, boxes, ``NamedShape`` for a batch.
        rules: Rules by name.
        meshes: Sizes of the mesh axes by name; one mesh or several.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
        parallel: Settings of ``sx.parallel`` under which the step runs, such as
            ``{"microbatches": 8}``; and ``"optimizer_rules"``, rules of the optimizer's state alone
            (ZeRO), and ``"optimizer_memory"``, such as ``"pinned_host"``.
        effort: ``"full"``: as the target's compiler would for a run. ``"screen"``: faster, with the
            same operations and wire bytes, and a peak of memory that is up to a fifth too low.
        compiler: ``"auto"``: the target's own if it is installed, else the CPU's as an estimate;
            ``"target"`` or ``"estimate"``: that one.
        processes: How many processes compile; None for one per core, at most one per layout.
        cache: Folder in which reports are remembered by program; None for none.
        progress: Whether to show what is being compiled.

    Returns:
        The plan, best layout first.

    Raises:
        PlanInputError: If arguments have no names, the step needs values, or rules are malformed.
        TargetError: If there is no such target, or a mesh does not have its devices.
        CompilerMissingError: If ``compiler="target"`` and it is not installed; names the extra.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> @sx.jit
        ... def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = plan.NamedShape((32, 64), "float32", ("batch", "embed"))
        >>> rules = {"tp": {"mlp": "model"}, "row": {"embed": "model"}}
        >>> found = plan.compare(apply, (weight, x), rules, {"model": 4}, "cpu:4")
        >>> [(each.layout.name, round(each.total_wire_bytes)) for each in found]
        [('tp', 0), ('row', 49152)]
    """
    target = Target.parse(target)
    inputs = Inputs(step, args)
    mesh_list = [meshes] if isinstance(meshes, Mapping) else list(meshes)
    layouts = [_under(layout, parallel) for layout in _layouts(rules, mesh_list)]
    for layout in layouts:
        target.check_mesh(layout.sizes)

    reports = reports_of(
        inputs,
        layouts,
        target,
        effort,
        compiler=compiler,
        processes=processes,
        cache=cache,
        progress=progress,
    )
    return Plan(target.text, tuple(reports))


def reports_of(
    inputs: Inputs,
    layouts: Sequence[Layout],
    target: Target,
    effort: str,
    *,
    compiler: str = "auto",
    processes: int | None = None,
    cache: object = "default",
    progress: bool = False,
) -> Iterator[LayoutReport]:
    """Yields reports as layouts are done; options as for ``compare``."""
    with (
        progress_for(progress) as bar,
        make_evaluator(inputs, target, compiler, processes, cache) as evaluator,
    ):
        bar.expect(len(layouts), "compiling")
        for answer in evaluator.evaluate(layouts, effort, begun=bar.begin):
            bar.end(answer.report, answer.cached)
            yield answer.report


def layout_of(name: str, rules: RulesLike, mesh: Mapping[str, int]) -> Layout:
    """Returns rules over a mesh as a layout."""
    checked = rules if isinstance(rules, Rules) else Rules(rules)
    free = [logical for logical, axes in checked.pairs if axes is UNCONSTRAINED]
    if free:
        raise PlanInputError(
            f"The rules {name!r} leave {', '.join(map(repr, free))} UNCONSTRAINED, so the layout "
            "would be the compiler's choice, which can differ from one version to the next. Say a "
            "mesh axis or None."
        )
    policies = (checked.on_conflict, checked.on_unmapped)
    return Layout(name, tuple(checked.pairs), tuple(mesh.items()), policies)


def _under(layout: Layout, parallel: Mapping[str, Any] | None) -> Layout:
    """Returns a layout with settings of ``sx.parallel`` and of the optimizer's state."""
    settings = dict(parallel or {})
    memory = settings.pop("optimizer_memory", None) or ""
    try:
        optimizer_rules = tuple(Rules(settings.pop("optimizer_rules", ())).pairs)
        with parallel_scope(**settings):  # which checks them
            pass
    except (PartitionError, TypeError) as error:
        raise PlanInputError(f"parallel={parallel!r}: {error}") from error

    if not isinstance(memory, str):
        raise PlanInputError(
            f"parallel={parallel!r}: optimizer_memory is a kind of memory, such as 'pinned_host'."
        )

    return dataclasses.replace(
        layout,
        parallel=tuple(settings.items()),
        optimizer_rules=optimizer_rules,
        optimizer_memory=memory,
    )


def layouts_over(name: str, rules: RulesLike, meshes: Sequence[Mapping[str, int]]) -> list[Layout]:
    """Returns rules over each mesh, named by it if several."""
    if len(meshes) == 1:
        return [layout_of(name, rules, meshes[0])]
    return [layout_of(f"{name} {mesh_text(mesh, ',')}", rules, mesh) for mesh in meshes]


def _layouts(rules: Mapping[str, RulesLike], meshes: Sequence[Mapping[str, int]]) -> list[Layout]:
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        raise PlanInputError(
            f"rules is {rules!r}; give a mapping from names to rules, as in "
            'rules={"fsdp": {"embed": "data"}, "tp": {"mlp": "model"}}.'
        )
    if not rules or not meshes:
        raise PlanInputError("There is nothing to compare: give at least one rule set and mesh.")
    return [layout for name, pairs in rules.items() for layout in layouts_over(name, pairs, meshes)]


def plan(
    step: Callable[..., PyTree],
    args: Sequence[PyTree],
    target: str | Target,
    *,
    rules: Mapping[str, RulesLike] | None = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    **options: Any,
) -> Plan:
    """Compares given rules, or searches for the best layout.

    Args:
        step: What is planned; see ``compare``.
        args: Its positional arguments.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
        rules: Rules by name, to be compared; None to search.
        meshes: Sizes of mesh axes by name, one mapping per mesh; needed with ``rules``.
        **options: As for ``compare`` or ``search``.

    Returns:
        The plan, best layout first.

    Raises:
        PlanInputError: As ``compare`` and ``search``; or if there are rules and no mesh.

    Example:
        >>> import jax, shardax as sx
        >>> def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = sx.plan.NamedShape((32, 64), "float32", ("batch", "embed"))
        >>> rules = {"tp": {"mlp": "model"}}
        >>> found = sx.plan.plan(apply, (weight, x), "cpu:4", rules=rules, meshes=[{"model": 4}])
        >>> found.best().layout.name
        'tp'
    """
    if rules is None:
        return search(step, args, target, meshes=meshes, **options)
    if meshes is None:
        raise PlanInputError(
            "There are rules but no meshes to compare them over: give meshes=[{'data': 4, "
            "'model': 2}], or leave rules out to search for both."
        )
    return compare(step, args, rules, meshes, target, **options)


def assert_layout(
    step: Callable[..., object],
    args: Sequence[object],
    rules: RulesLike,
    mesh: Mapping[str, int],
    *,
    target: str | Target | None = None,
    parallel: Mapping[str, object] | None = None,
    wire_bytes: Bound | Mapping[str | tuple[str, ...], Bound] | None = None,
    peak_bytes: Bound | None = None,
    replicated_params: int | Collection[str] | None = None,
    compiler: str = "auto",
) -> LayoutReport:
    """Asserts the traffic, memory and replication of a step in a layout.

    A *bound* is a number, which the figure must equal; or a text of a comparison and a number with
    a unit, ``"<= 26 GB"``, ``"< 1.5 GiB"``, ``">= 1"``. Units are B, kB, MB, GB, TB (powers of
    1000), KiB, MiB, GiB and TiB (powers of 1024).

    Args:
        step: What is planned, as for ``compare``.
        args: Its positional arguments.
        rules: Rules, pairs or a mapping.
        mesh: Sizes of the mesh axes by name.
        target: The hardware; None for CPU devices, as many as the mesh has.
        parallel: As for ``compare``.
        wire_bytes: A bound on the bytes that one device sends in a step; or
            bounds by mesh axis (several for collectives over all of them together), in which an
            axis that is not named is not looked at.
        peak_bytes: A bound on the most memory that a device needs at a time.
        replicated_params: How many parameters every device holds whole, or which, by path.
        compiler: As for ``compare``.

    Returns:
        The report, for further assertions.

    Raises:
        LayoutAssertionError: If something is otherwise, or the layout cannot be; lists all, and for
            wire bytes what moves most.
        PlanInputError: If a bound is malformed.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> def apply(weight, x):
        ...     return x @ weight.value
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> args = (weight, plan.NamedShape((32, 64), "float32", ("batch", "embed")))
        >>> rules, mesh = {"mlp": "model"}, {"data": 2, "model": 4}
        >>> found = plan.assert_layout(apply, args, rules, mesh, wire_bytes=0, replicated_params=0)
        >>> found.argument_bytes["parameters"]
        16384
    """
    # Bounds first, which may be malformed: compiling takes long.
    wire: dict[tuple[str, ...] | None, Check] = {}
    if isinstance(wire_bytes, Mapping):
        for axes, bound in wire_bytes.items():
            check = _parse_bound(f"wire_bytes[{axes!r}]", bound)
            wire[(axes,) if isinstance(axes, str) else tuple(axes)] = check
    elif wire_bytes is not None:
        wire[None] = _parse_bound("wire_bytes", wire_bytes)
    peak = None if peak_bytes is None else _parse_bound("peak_bytes", peak_bytes)

    inputs = Inputs(step, args)
    hardware = Target.parse(target or f"cpu:{math.prod(mesh.values())}")
    hardware.check_mesh(mesh)
    layout = _under(layout_of("asserted", rules, mesh), parallel)

    # On CPU both efforts give the same program and memory.
    effort = "screen" if hardware.kind == "cpu" else "full"
    (report,) = reports_of(inputs, [layout], hardware, effort, compiler=compiler, cache=None)

    problems = list(_problems(report, wire, peak, replicated_params))
    if problems:
        listed = "\n  ".join(problems)
        raise LayoutAssertionError(
            f"Over {mesh_text(mesh)} on {hardware.text} the layout is another:\n  {listed}"
        )
    return report


Check = Callable[[float], str | None]  # what is wrong with a figure, or None


def _parse_bound(name: str, bound: Bound) -> Check:
    if isinstance(bound, (int, float)) and not isinstance(bound, bool):
        compare, limit, bound_text = operator.eq, bound, f"{bound:,}"
    else:
        match = _BOUND.fullmatch(bound) if isinstance(bound, str) else None
        if match is None:
            raise PlanInputError(
                f"{name}={bound!r} is no bound. Give a number that the figure must equal, or a "
                'comparison such as "<= 26 GB" or "< 1.5 GiB".'
            )
        compare, bound_text = _COMPARISONS[match[1]], bound
        limit = float(re.sub("[_,]", "", match[2])) * _UNITS[match[3] or ""]

    def check(figure: float) -> str | None:
        return None if compare(figure, limit) else f"{name} is {figure:,.0f}, not {bound_text}"

    return check


def _problems(
    report: LayoutReport,
    wire: Mapping[tuple[str, ...] | None, Check],  # None: all bytes together
    peak: Check | None,
    replicated: int | Collection[str] | None,
) -> Iterator[str]:
    if report.time is None:
        yield f"it was {report.outcome}: {report.reason}"
        return

    moved = report.wire_bytes("axes")
    for axes in wire:
        unknown = [axis for axis in axes or () if axis not in report.layout.sizes]
        if unknown:
            yield f"wire_bytes names {unknown}, but the mesh has {list(report.layout.sizes)}"
    for axes, check in wire.items():
        wrong = check(report.total_wire_bytes if axes is None else moved.get(axes, 0.0))
        if wrong:
            yield "\n    ".join([wrong, *_largest(report, axes)])

    if peak is not None and report.peak_bytes is not None:
        wrong = peak(report.peak_bytes)
        if wrong:
            yield wrong

    if isinstance(replicated, int):
        if len(report.replicated) != replicated:
            paths = ", ".join(report.replicated) or "none"
            yield f"{len(report.replicated)} parameters are replicated, not {replicated}: {paths}"
    elif replicated is not None and set(replicated) != set(report.replicated):
        yield f"replicated are {sorted(report.replicated)}, not {sorted(replicated)}"


def _largest(report: LayoutReport, axes: tuple[str, ...] | None) -> list[str]:
    """Returns descriptions of the collectives with the most bytes."""
    moved = [each for each in report.collectives if axes is None or each.axes == axes]
    largest = sorted(moved, key=lambda each: -each.wire_bytes)[:_SHOWN]
    return [
        f"{each.wire_bytes:,.0f} B {each.kind} over {'+'.join(each.axes) or 'other groups'} "
        f"({each.runs} x) at {each.source or each.op_name or each.name}"
        for each in largest
    ]
