# SPDX-License-Identifier: Apache-2.0
"""Comparing layouts that someone has in mind: rule sets times meshes.

Layouts in people's own test suites: what a step may move, need and replicate.

A *bound* is a number, which the figure must equal; or a text of a comparison and a number with a
unit, ``"<= 26 GB"``, ``"< 1.5 GiB"``, ``">= 1"``. Units: B, kB, MB, GB, TB (powers of 1000), KiB,
MiB, GiB, TiB (powers of 1024).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from shardax.partition.mesh import mesh_text
from shardax.partition.rules import UNCONSTRAINED, Rules, RulesLike
from shardax.plan.compile.pool import make_evaluator
from shardax.plan.errors import LayoutAssertionError, PlanInputError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.report.progress import progress_for
from shardax.plan.result import Plan
from shardax.plan.search.search import search

# --- Compare ---


def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    rules: Mapping[str, RulesLike],
    meshes: Sequence[Mapping[str, int]] | Mapping[str, int],
    target: str | Target,
    *,
    effort: str = "full",
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = False,
) -> Plan:
    """Asks what each of some layouts costs: every rule set over every mesh.

    Args:
        step: What is planned: a function made by ``sx.jit`` or ``jax.jit``, or one to be compiled.
        args: Its positional arguments, none of which needs to hold an array: lazy Modules and
            optimizers, boxes, ``NamedShape`` for a batch.
        rules: Rules by name.
        meshes: Sizes of the mesh axes by name; one mesh or several.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
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
    layouts = _layouts(rules, [meshes] if isinstance(meshes, Mapping) else list(meshes))
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
    cache: Any = "default",
    progress: bool = False,
) -> Iterator[LayoutReport]:
    """Yields a report per layout, as they are done; see ``compare``.

    Args:
        inputs: The step and its arguments.
        layouts: The layouts.
        target: The hardware.
        effort: As for ``compare``.
        compiler: Likewise.
        processes: Likewise.
        cache: Likewise.
        progress: Likewise.
    """
    with (
        progress_for(progress) as shown,
        make_evaluator(inputs, target, compiler, processes, cache) as evaluator,
    ):
        shown.expect(len(layouts), "compiling")
        for answer in evaluator.evaluate(layouts, effort, begun=shown.begin):
            shown.end(answer.report, answer.cached)
            yield answer.report


def layout_of(name: str, rules: RulesLike, mesh: Mapping[str, int]) -> Layout:
    """Returns rules and the sizes of mesh axes as a layout.

    Args:
        name: Its name.
        rules: Rules, pairs or a mapping.
        mesh: Sizes of the mesh axes by name.

    Raises:
        PlanInputError: If the rules leave a choice to the compiler.

    Example:
        >>> layout_of("tp", {"mlp": "model"}, {"data": 2, "model": 4}).sizes
        {'data': 2, 'model': 4}
    """
    made = rules if isinstance(rules, Rules) else Rules(rules)
    free = [logical for logical, axes in made.pairs if axes is UNCONSTRAINED]
    if free:
        raise PlanInputError(
            f"The rules {name!r} leave {', '.join(map(repr, free))} UNCONSTRAINED, so the layout "
            "would be the compiler's choice, which can differ from one version to the next. Say a "
            "mesh axis or None."
        )
    policies = (made.on_conflict, made.on_unmapped)
    return Layout(name, tuple(made.pairs), tuple(mesh.items()), policies)


def layouts_over(name: str, rules: RulesLike, meshes: Sequence[Mapping[str, int]]) -> list[Layout]:
    """Returns rules over each of some meshes; of several, the mesh is in the layout's name.

    Args:
        name: Of the rules.
        rules: Rules, pairs or a mapping.
        meshes: Sizes of the mesh axes by name.

    Raises:
        PlanInputError: If the rules leave a choice to the compiler.

    Example:
        >>> found = layouts_over("dp", {"batch": "data"}, [{"data": 8}, {"data": 4, "model": 2}])
        >>> [layout.name for layout in found]
        ['dp data=8', 'dp data=4,model=2']
    """
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
    return [each for name, pairs in rules.items() for each in layouts_over(name, pairs, meshes)]


def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    rules: Mapping[str, RulesLike] | None = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    **options: Any,
) -> Plan:
    """Plans a step: compares the rules that are given, or searches for the best.

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


# --- Assertion ---

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


def assert_layout(
    step: Callable[..., Any],
    args: Sequence[Any],
    rules: RulesLike,
    mesh: Mapping[str, int],
    *,
    target: str | Target | None = None,
    wire_bytes: Bound | Mapping[str | tuple[str, ...], Bound] | None = None,
    peak_bytes: Bound | None = None,
    replicated_params: int | Collection[str] | None = None,
    compiler: str = "auto",
) -> LayoutReport:
    """Asserts what a step moves, needs and replicates in a layout; for tests of one's own models.

    Args:
        step: What is planned, as for ``compare``.
        args: Its positional arguments.
        rules: Rules, pairs or a mapping.
        mesh: Sizes of the mesh axes by name.
        target: The hardware; None for CPU devices, as many as the mesh has.
        wire_bytes: A bound (see the module's text) on the bytes that one device sends in a step; or
            bounds by mesh axis (several for collectives over all of them together), in which an
            axis that is not named is not looked at.
        peak_bytes: A bound on the most memory that a device needs at a time.
        replicated_params: How many parameters every device holds whole, or which, by path.
        compiler: As for ``compare``.

    Returns:
        The report, for further assertions.

    Raises:
        LayoutAssertionError: If something is otherwise, or the layout cannot be; lists all, and
            for wire bytes what moves most.
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
    wanted = _wire_bounds(wire_bytes)
    peak = None if peak_bytes is None else _Check("peak_bytes", peak_bytes)
    inputs = Inputs(step, args)
    asked = Target.parse(target or f"cpu:{math.prod(mesh.values())}")
    asked.check_mesh(mesh)
    layout = layout_of("asserted", rules, mesh)
    # On CPU both efforts give the same program and memory.
    effort = "screen" if asked.kind == "cpu" else "full"
    (report,) = reports_of(inputs, [layout], asked, effort, compiler=compiler, cache=None)
    problems = list(_problems(report, wanted, peak, replicated_params))
    if problems:
        listed = "\n  ".join(problems)
        raise LayoutAssertionError(
            f"Over {mesh_text(mesh)} on {asked.text} the layout is another:\n  {listed}"
        )
    return report


class _Check:
    """One bound, understood."""

    def __init__(self, name: str, bound: Bound) -> None:
        self.name, self.bound = name, bound
        if isinstance(bound, (int, float)) and not isinstance(bound, bool):
            self.holds = lambda figure: figure == bound
            return
        found = _BOUND.fullmatch(bound) if isinstance(bound, str) else None
        if found is None:
            raise PlanInputError(
                f"{name}={bound!r} is no bound. Give a number that the figure must equal, or a "
                'comparison such as "<= 26 GB" or "< 1.5 GiB".'
            )
        compare, unit = _COMPARISONS[found[1]], _UNITS[found[3] or ""]
        limit = float(re.sub("[_,]", "", found[2])) * unit
        self.holds = lambda figure: compare(figure, limit)

    def __call__(self, figure: float) -> str | None:
        """Returns what is wrong with a figure, or None."""
        if self.holds(figure):
            return None
        shown = self.bound if isinstance(self.bound, str) else f"{self.bound:,}"
        return f"{self.name} is {figure:,.0f}, not {shown}"


def _wire_bounds(bounds: Any) -> dict[tuple[str, ...] | None, _Check]:
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        return {None: _Check("wire_bytes", bounds)}
    return {
        (axis,) if isinstance(axis, str) else tuple(axis): _Check(f"wire_bytes[{axis!r}]", bound)
        for axis, bound in bounds.items()
    }


def _problems(
    report: LayoutReport,
    wire: Mapping[tuple[str, ...] | None, _Check],
    peak: _Check | None,
    replicated: int | Collection[str] | None,
) -> Iterator[str]:
    if report.time is None:
        yield f"it was {report.outcome}: {report.reason}"
        return
    moved = report.wire_bytes("axes")
    for axes in wire:
        strange = [axis for axis in axes or () if axis not in report.layout.sizes]
        if strange:
            yield f"wire_bytes names {strange}, but the mesh has {list(report.layout.sizes)}"
    for axes, check in wire.items():
        wrong = check(report.total_wire_bytes if axes is None else moved.get(axes, 0.0))
        if wrong:
            yield "\n    ".join([wrong, *_largest(report, axes)])
    wrong = peak and report.peak_bytes is not None and peak(report.peak_bytes)
    if wrong:
        yield wrong
    if isinstance(replicated, int):
        if len(report.replicated) != replicated:
            paths = ", ".join(report.replicated) or "none"
            yield f"{len(report.replicated)} parameters are replicated, not {replicated}: {paths}"
    elif replicated is not None and set(replicated) != set(report.replicated):
        yield f"replicated are {sorted(report.replicated)}, not {sorted(replicated)}"


def _largest(report: LayoutReport, axes: tuple[str, ...] | None) -> list[str]:
    """The collectives that move most, one a line."""
    among = [each for each in report.collectives if axes is None or each.axes == axes]
    return [
        f"{each.wire_bytes:,.0f} B {each.kind} over {'+'.join(each.axes) or 'other groups'} "
        f"({each.runs} x) at {each.source or each.op_name or each.name}"
        for each in sorted(among, key=lambda each: -each.wire_bytes)[:_SHOWN]
    ]
