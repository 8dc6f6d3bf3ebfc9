# SPDX-License-Identifier: Apache-2.0
"""Layouts in people's own test suites: what a step may move, need and replicate.

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

from shardax.core.errors import LayoutAssertionError, PlanInputError
from shardax.partition.mesh import mesh_text
from shardax.partition.rules import RulesLike
from shardax.plan.compare import layout_of, reports_of
from shardax.plan.inputs import Inputs
from shardax.plan.records import LayoutReport
from shardax.plan.targets import Target

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
