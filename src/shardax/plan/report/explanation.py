# SPDX-License-Identifier: Apache-2.0
"""Why a layout communicates: its collectives, by line of model code, by array, or by kind.

A *group* is the collectives that share a source line, an array that travels, or a kind. Its bytes
are those that one device sends in a step. Collectives are *alike* if what is said of them differs
in the numbers of layers alone; they are said once.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from shardax.hlo.collectives import Collective
from shardax.partition.findings import did_you_mean
from shardax.plan.errors import PlanInputError
from shardax.plan.records import LayoutReport
from shardax.plan.report.columns import (
    BINARY,
    DECIMAL,
    TIMES,
    axes_text,
    band_text,
    figure,
    quantity,
    scale,
)

BY = ("source", "parameter", "kind")
"""By what collectives can be grouped."""

UNKNOWN = {
    "source": "no line of the model (made by the compiler, or of a library)",
    "parameter": "no parameter (activations, gradients of them, or several things)",
    "kind": "",
}

_WIDTH = 100
_NUMBERS = re.compile(r"\[(\d+(?:-\d+)?)\]")


@dataclass(frozen=True)
class Group:
    """Collectives with something in common.

    Attributes:
        key: What they share: ``"decoder.py:240"``, a path, or a kind; "" if it is not known.
        collectives: They, the largest first.
    """

    key: str
    collectives: tuple[Collective, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends for all of them."""
        return sum(each.wire_bytes for each in self.collectives)


def groups(report: LayoutReport, axis: str | None = None, by: str = "source") -> tuple[Group, ...]:
    """Returns the collectives of a layout in groups, the largest first.

    Args:
        report: What was found of the layout.
        axis: Only those along this mesh axis; None for all.
        by: ``"source"``, ``"parameter"`` (the arrays that travel) or ``"kind"``.

    Raises:
        PlanInputError: If the mesh has no such axis, or there is no such grouping.

    Example:
        >>> from shardax.hlo import Collective
        >>> from shardax.plan import Layout, LayoutReport
        >>> sums = Collective("all-reduce", "ar", "bf16", 80, 140.0, 8, ("data",), source="m.py:3")
        >>> report = LayoutReport(Layout("dp", (), (("data", 8),)), "fits", collectives=(sums,))
        >>> [(group.key, group.wire_bytes) for group in groups(report)]
        [('m.py:3', 140.0)]
    """
    if by not in BY:
        raise PlanInputError(
            f"by={by!r} is no grouping; there are {', '.join(map(repr, BY))}.{did_you_mean(by, BY)}"
        )
    axes = report.layout.sizes
    if axis is not None and axis not in axes:
        raise PlanInputError(
            f"The mesh of {report.layout.name!r} has no axis {axis!r}; it has "
            f"{', '.join(map(repr, axes))}.{did_you_mean(axis, list(axes))}"
        )
    found: dict[str, list[Collective]] = {}
    for each in report.collectives:
        if axis is None or axis in each.axes:
            found.setdefault(of_any_layer(key_of(each, by)), []).append(each)
    made = [
        Group(
            of_layers([key_of(each, by) for each in members]),
            tuple(sorted(members, key=lambda each: -each.wire_bytes)),
        )
        for members in found.values()
    ]
    return tuple(sorted(made, key=lambda group: -group.wire_bytes))


def key_of(each: Collective, by: str) -> str:
    """Returns what a collective is grouped by; "" if it is not known.

    Args:
        each: The collective.
        by: See ``groups``.
    """
    if by == "source":
        return each.source
    return each.kind if by == "kind" else arrays_text(each.parameters)


def explain(report: LayoutReport, axis: str | None = None, by: str = "source") -> str:
    """Says what a layout sends over the wire and why, down to the line of model code.

    Args:
        report: What was found of the layout, such as ``plan["fsdp"]``.
        axis: Only what travels along this mesh axis; None for all.
        by: ``"source"``: by line of code; ``"parameter"``: by the arrays that travel; ``"kind"``.

    Returns:
        Lines of text: the groups, the largest first, with their collectives and the reasons.

    Raises:
        PlanInputError: If the mesh has no such axis, or there is no such grouping.

    Example:
        >>> from shardax.hlo import Collective
        >>> from shardax.plan import Layout, LayoutReport
        >>> sums = Collective(
        ...     "all-reduce", "ar", "bf16", 80000, 140000.0, 8, ("data",), source="model.py:3"
        ... )
        >>> report = LayoutReport(Layout("dp", (), (("data", 8),)), "fits", collectives=(sums,))
        >>> print(explain(report))
        dp over data=8: fits
        140 kB on the wire of each device in a step
        <BLANKLINE>
        140 kB  100%  model.py:3
            all-reduce along data, 1 x 80.0 kB of bf16: 140 kB
    """
    found = groups(report, axis, by)
    total = sum(group.wire_bytes for group in found)
    along = "" if axis is None else f" along {axis}"
    lines = [headline(report)]
    if report.time is None and not found:
        return "\n".join([*lines, report.reason or "it was not compiled, so nothing is known"])
    if not found:
        return "\n".join([*lines, f"nothing on the wire{along}"])
    unit, size = scale([total], DECIMAL)
    lines.append(f"{figure(total / size)} {unit} on the wire of each device in a step{along}")
    widest = max(len(quantity(group.wire_bytes, DECIMAL)) for group in found)
    for group in found:
        share = 100 * group.wire_bytes / total if total else 0.0
        amount = quantity(group.wire_bytes, DECIMAL).rjust(widest)
        lines += ["", f"{amount}  {share:3.0f}%  {group.key or UNKNOWN[by]}"]
        for same in alike(group.collectives, by):
            lines += _wrapped(same.sentence, 4)
            for detail in same.details:
                lines += _wrapped(detail, 8)
    return "\n".join(lines)


def headline(report: LayoutReport) -> str:
    """Says in a line what became of a layout.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> headline(LayoutReport(Layout("dp", (), (("data", 8),)), "fits", peak_bytes=2**30))
        'dp over data=8: fits; peak 1.00 GiB'
    """
    parts = [f"{report.layout.name} over {report.layout.mesh_text}: {report.outcome}"]
    if report.peak_bytes is not None:
        peak = f"peak {quantity(report.peak_bytes, BINARY)}"
        limit = report.limit_bytes
        parts.append(peak if limit is None else f"{peak} of {quantity(limit, BINARY)}")
    if report.time is not None:
        unit, size = scale([report.time.upper], TIMES)
        band = band_text(report.time, size)
        parts.append(f"{band} {unit} (estimate), bound by {report.time.binding}")
    return "; ".join(parts)


def sentence(each: Collective) -> str:
    """Says what one collective moves.

    Example:
        >>> sentence(Collective("all-gather", "ag", "bf16", 800, 700.0, 8, ("data",), runs=2))
        'all-gather along data, 2 x 800 B of bf16: 700 B'
    """
    runs = f"{each.runs}" if each.runs_known else f"at least {each.runs}"
    payload, wire = quantity(each.payload, DECIMAL), quantity(each.wire_bytes, DECIMAL)
    parts = [
        f"{each.kind} along {axes_text(each.axes)}",
        f"{runs} x {payload} of {each.dtype}: {wire}",
    ]
    if each.asynchronous:
        parts.append("while other work goes on")
    if each.crosses_slices:
        parts.append("between slices")
    return ", ".join(parts)


@dataclass(frozen=True)
class Alike:
    """What is said of collectives that are alike.

    Attributes:
        sentence: What each of them moves, and how many there are.
        details: Why, what travels, and the operation.
    """

    sentence: str
    details: tuple[str, ...]


def alike(members: Sequence[Collective], by: str) -> tuple[Alike, ...]:
    """Returns what is to be said of some collectives, those that are alike once; largest first.

    Args:
        members: The collectives.
        by: By what they are grouped, which is not said again.

    Example:
        >>> same = ("all-gather", "ag", "bf16", 8, 7.0, 8, ("data",))
        >>> layers = [Collective(*same, parameters=(f"up[{n}].kernel",)) for n in range(3)]
        >>> alike(layers, "kind")[0].sentence
        '3 times all-gather along data, 1 x 8.00 B of bf16: 7.00 B, 21.0 B together'
        >>> alike(layers, "kind")[0].details
        ('carries up[0-2].kernel',)
    """
    found: dict[str, list[Collective]] = {}
    for each in members:
        whole = "\n".join([sentence(each), *_details(each, by)])
        found.setdefault(of_any_layer(whole), []).append(each)
    made: list[Alike] = []
    largest = sorted(found.values(), key=lambda same: -sum(each.wire_bytes for each in same))
    for same in largest:
        said = sentence(same[0])
        if len(same) > 1:
            together = quantity(sum(each.wire_bytes for each in same), DECIMAL)
            said = f"{len(same)} times {said}, {together} together"
        details = zip(*(_details(each, by) for each in same), strict=True)
        made.append(Alike(said, tuple(of_layers(texts) for texts in details)))
    return tuple(made)


def arrays_text(paths: Sequence[str]) -> str:
    """Names arrays, those of several layers as one.

    Example:
        >>> arrays_text(["up[0].kernel", "up[1].kernel", "head"])
        'up[0-1].kernel, head'
    """
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(of_any_layer(path), []).append(path)
    return ", ".join(map(of_layers, found.values()))


def of_any_layer(text: str) -> str:
    """Returns a text without the numbers of layers.

    Example:
        >>> of_any_layer("layers[3].up")
        'layers[#].up'
    """
    return _NUMBERS.sub("[#]", text)


def of_layers(texts: Sequence[str]) -> str:
    """Returns one text for those that differ in numbers of layers, which become ``first-last``.

    Example:
        >>> of_layers(["layers[0].up", "layers[2].up"]), of_layers(["head.kernel"])
        ('layers[0-2].up', 'head.kernel')
    """
    text = ""
    for place, found in enumerate(zip(*map(_NUMBERS.split, texts), strict=True)):
        if place % 2 == 0:
            text += found[0]
        else:
            numbers = [int(number) for each in found for number in each.split("-")]
            first, last = min(numbers), max(numbers)
            text += f"[{first}]" if first == last else f"[{first}-{last}]"
    return text


def _details(each: Collective, by: str) -> list[str]:
    found = [each.why] if each.why else []
    if by != "source" and each.source:
        found.append(f"at {each.source}")
    said = len(each.parameters) == 1 and each.parameters[0] in each.why
    if by != "parameter" and each.parameters and not said:
        found.append(f"carries {arrays_text(each.parameters)}")
    if each.op_name and not each.why:
        found.append(f"of {short(each.op_name)}")
    return found


def short(name: str, most: int = 90) -> str:
    """Cuts the name of an operation, of which compilers join many into one.

    Example:
        >>> short("jit(step)/dot_general", 12)
        'jit(step)/d…'
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _wrapped(text: str, indent: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=blank,
        subsequent_indent=blank + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
