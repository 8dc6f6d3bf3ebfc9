# SPDX-License-Identifier: Apache-2.0
"""Explanations of a layout's communication, and differences between two layouts.

A *group* is the collectives that share a source line, an array that travels, or a kind. Its bytes
are those that one device sends in a step. Collectives whose descriptions differ only in the numbers
of layers are described once. Those of two layouts are matched by kind, mesh axes and source line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardax.extend import align_columns, did_you_mean
from shardax.hlo.collectives import Collective
from shardax.plan.errors import PlanInputError
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report.table import (
    BINARY,
    DECIMAL,
    OPERATIONS,
    TIMES,
    Units,
    axes_text,
    band_text,
    figure,
    peak_text,
    quantity,
    scale,
)
from shardax.view.shardings import join_layers, without_layers

BY = ("source", "parameter", "kind")

UNKNOWN = {
    "source": "no line of the model (made by the compiler, or of a library)",
    "parameter": "no parameter (activations, gradients of them, or several things)",
    "kind": "",
}
"""What a group without a key is called."""

_WIDTH = 100
_LONGEST_NAME = 90  # of an operation: compilers join many into one


def explain(report: LayoutReport, axis: str | None = None, by: str = "source") -> str:
    """Explains the wire traffic of a layout, with reasons.

    Args:
        report: What was found of the layout, such as ``plan["fsdp"]``.
        axis: Only what travels along this mesh axis; None for all.
        by: ``"source"``: by line of code; ``"parameter"``: by the arrays that travel; ``"kind"``.

    Returns:
        A text of lines, which has the groups, the largest first, with collectives and reasons.

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
    group_list = groups(report, axis, by)
    along = "" if axis is None else f" along {axis}"
    lines = [headline(report)]
    if report.time is None and not group_list:
        return "\n".join([*lines, report.reason or "it was not compiled, so nothing is known"])
    if not group_list:
        return "\n".join([*lines, f"nothing on the wire{along}"])

    total = sum(group.wire_bytes for group in group_list)
    lines.append(f"{quantity(total, DECIMAL)} on the wire of each device in a step{along}")
    amounts = [quantity(group.wire_bytes, DECIMAL) for group in group_list]
    widest = max(map(len, amounts))

    for group, amount in zip(group_list, amounts, strict=True):
        share = 100 * group.wire_bytes / total if total else 0.0
        lines += ["", f"{amount.rjust(widest)}  {share:3.0f}%  {group.key or UNKNOWN[by]}"]
        for sentence, details in descriptions(group.collectives, by):
            lines += _wrapped(sentence, 4)
            for detail in details:
                lines += _wrapped(detail, 8)
    return "\n".join(lines)


def headline(report: LayoutReport) -> str:
    """Summarizes a layout in one line."""
    parts = [f"{report.layout.name} over {report.layout.mesh_text}: {report.outcome}"]
    if report.peak_bytes is not None:
        parts.append(f"peak {peak_text(report)}")

    if expected := report.expected:
        unit, size = scale([expected.high], TIMES)
        texts = [figure(s / size) for s in (expected.seconds, expected.low, expected.high)]
        waits = f"{report.mfu:.0%} MFU, waits for {expected.waits_for}"
        parts.append("{} {unit} expected ({} - {}), {waits}".format(*texts, unit=unit, waits=waits))
    if report.time is not None:
        unit, size = scale([report.time.upper], TIMES)
        band = band_text(report.time, size)
        parts.append(f"{band} {unit} (estimate), bound by {report.time.binding}")

    if report.bubble_share:
        parts.append(f"pipeline idle for {report.bubble_share:.0%}")
    return "; ".join(parts)


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives with a common key, the largest first."""

    key: str  # "decoder.py:240", a path, or a kind; "" if it is not known
    collectives: tuple[Collective, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes sent by one device for all of them."""
        return sum(collective.wire_bytes for collective in self.collectives)


def groups(
    report: LayoutReport, axis: str | None = None, by: str = "source"
) -> tuple[CollectiveGroup, ...]:
    """Groups the collectives of a layout, the largest group first."""
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

    def key_of(collective: Collective) -> str:
        if by == "parameter":
            return _arrays_text(collective.parameters)
        return collective.source if by == "source" else collective.kind

    members_by_key: dict[str, list[Collective]] = {}
    for collective in report.collectives:
        if axis is None or axis in collective.axes:
            members_by_key.setdefault(without_layers(key_of(collective)), []).append(collective)
    group_list = [
        CollectiveGroup(
            join_layers([key_of(collective) for collective in members]),
            tuple(sorted(members, key=lambda collective: -collective.wire_bytes)),
        )
        for members in members_by_key.values()
    ]
    return tuple(sorted(group_list, key=lambda group: -group.wire_bytes))


def descriptions(members: Sequence[Collective], by: str) -> list[tuple[str, tuple[str, ...]]]:
    """Describes collectives, those of alike layers once, largest first."""
    # A description is a sentence and details: why, what travels, and the operation, without what
    # the collectives are grouped by.
    same_by_text: dict[str, list[Collective]] = {}
    for collective in members:
        whole = "\n".join([_sentence(collective), *_details(collective, by)])
        same_by_text.setdefault(without_layers(whole), []).append(collective)

    def total(same: Sequence[Collective]) -> float:
        return sum(collective.wire_bytes for collective in same)

    sentences: list[tuple[str, tuple[str, ...]]] = []
    for same in sorted(same_by_text.values(), key=total, reverse=True):
        sentence = _sentence(same[0])
        if len(same) > 1:
            sentence = f"{len(same)} times {sentence}, {quantity(total(same), DECIMAL)} together"
        details = zip(*(_details(collective, by) for collective in same), strict=True)
        sentences.append((sentence, tuple(map(join_layers, details))))
    return sentences


def _sentence(collective: Collective) -> str:
    runs = f"{collective.runs}" if collective.runs_known else f"at least {collective.runs}"
    payload, wire = (
        quantity(size, DECIMAL) for size in (collective.payload, collective.wire_bytes)
    )
    parts = [
        f"{collective.kind} along {axes_text(collective.axes)}",
        f"{runs} x {payload} of {collective.dtype}: {wire}",
    ]
    if collective.asynchronous:
        parts.append("while other work goes on")
    if collective.crosses_slices:
        parts.append("between slices")
    return ", ".join(parts)


def _details(collective: Collective, by: str) -> list[str]:
    details = [collective.why] if collective.why else []
    if by != "source" and collective.source:
        details.append(f"at {collective.source}")
    named = len(collective.parameters) == 1 and collective.parameters[0] in collective.why
    if by != "parameter" and collective.parameters and not named:
        details.append(f"carries {_arrays_text(collective.parameters)}")
    if collective.op_name and not collective.why:
        name = collective.op_name
        cut = len(name) > _LONGEST_NAME
        details.append(f"of {name[: _LONGEST_NAME - 1] + '…' if cut else name}")
    return details


def _arrays_text(paths: Sequence[str]) -> str:
    """Names arrays, those of several layers as one."""
    same_paths: dict[str, list[str]] = {}
    for path in paths:
        same_paths.setdefault(without_layers(path), []).append(path)
    return ", ".join(map(join_layers, same_paths.values()))


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


_SHOWN = 20
_COUNTED = (
    ("work", "flops", OPERATIONS),
    ("memory traffic", "hbm_bytes", DECIMAL),
    ("wire", "total_wire_bytes", DECIMAL),
    ("cross-slice", "cross_slice_bytes", DECIMAL),
)

Cells = tuple[str, ...]


def diff(a: LayoutReport, b: LayoutReport) -> str:
    """Lists the differences between two layouts.

    Args:
        a: What was found of one layout, such as ``plan["fsdp"]``.
        b: What was found of the other.

    Returns:
        A text of lines, which has what became of both; rules and mesh axes that differ; figures;
        collectives by how much more or less they send; arrays that are split otherwise.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> dp = LayoutReport(
        ...     Layout("dp", (("batch", "data"),), (("data", 8),)), "fits", peak_bytes=3 * 2**30
        ... )
        >>> tp = LayoutReport(
        ...     Layout("tp", (("mlp", "data"),), (("data", 8),)), "fits", peak_bytes=2**30
        ... )
        >>> print(diff(dp, tp))
        a: dp over data=8: fits; peak 3.00 GiB
        b: tp over data=8: fits; peak 1.00 GiB
        <BLANKLINE>
        Rules   a         b
        batch   data      no rule
        mlp     no rule   data
        <BLANKLINE>
        Figures     a         b         b - a
        peak        3.00 GiB  1.00 GiB  -2.00 GiB
    """
    mesh = _changed(_texts(a.layout.sizes), _texts(b.layout.sizes), "-")
    if not mesh and list(a.layout.sizes) != list(b.layout.sizes):
        mesh = [("order", ", ".join(a.layout.sizes), ", ".join(b.layout.sizes))]

    tables: list[list[Cells]] = [
        [("Rules", "a", "b"), *_changed(_targets(a), _targets(b), "no rule")],
        [("Mesh", "a", "b"), *mesh],
        [("Figures", "a", "b", "b - a"), *_changes(_figures(a, b))],
        [("Wire bytes", "a", "b", "b - a"), *_wire(a, b)],
        [("Arrays", "a", "b"), *_arrays(a, b)],
    ]
    sections = ["\n".join(align_columns(rows)) for rows in tables if len(rows) > 1]
    head = f"a: {headline(a)}\nb: {headline(b)}"
    return "\n\n".join([head, *(sections or ["There is no difference."])])


def _changed(first: Mapping[str, str], second: Mapping[str, str], missing: str) -> list[Cells]:
    return [
        (name, first.get(name, missing), second.get(name, missing))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _texts(sizes: Mapping[str, int]) -> dict[str, str]:
    return {axis: str(size) for axis, size in sizes.items()}


def _targets(report: LayoutReport) -> dict[str, str]:
    """Mesh axes of each name, in words and in order."""
    texts_by_name: dict[str, list[str]] = {}
    for name, axes in report.layout.rules:
        text = axes if isinstance(axes, str) else "+".join(axes or ()) or "None"
        texts_by_name.setdefault(name, []).append(text)
    words = {name: ", then ".join(texts) for name, texts in texts_by_name.items()}
    for policy, value in zip(("on_conflict", "on_unmapped"), report.layout.policies, strict=True):
        words[f"({policy})"] = str(value)
    return words | report.layout.settings


Figures = tuple[str, float | None, float | None, Units]  # what, of a, of b


def _figures(a: LayoutReport, b: LayoutReport) -> list[Figures]:
    rows: list[Figures] = [("peak", a.peak_bytes, b.peak_bytes, BINARY)]
    for kind in dict.fromkeys([*a.argument_bytes, *b.argument_bytes]):
        rows.append((kind, a.argument_bytes.get(kind, 0), b.argument_bytes.get(kind, 0), BINARY))
    for name, attribute, units in _COUNTED:  # in the program, if there is one
        first, second = (getattr(report, attribute) if report.time else None for report in (a, b))
        rows.append((name, first, second, units))
    for name in ("lower", "upper", "compute", "memory", "communication"):
        first, second = getattr(a.time, name, None), getattr(b.time, name, None)
        rows.append((f"time: {name}", first, second, TIMES))
    first, second = (report.expected.seconds if report.expected else None for report in (a, b))
    rows.append(("time: expected", first, second, TIMES))
    return rows


def _wire(a: LayoutReport, b: LayoutReport) -> list[Cells]:
    if a.time is None or b.time is None:
        return []
    first, second = _bytes_by_purpose(a), _bytes_by_purpose(b)
    rows: list[Figures] = [
        (key, first.get(key, 0.0), second.get(key, 0.0), DECIMAL)
        for key in dict.fromkeys([*first, *second])
    ]
    rows.sort(key=lambda row: -abs((row[2] or 0.0) - (row[1] or 0.0)))
    changed = _changes(rows)
    more = len(changed) - _SHOWN
    return [*changed[:_SHOWN], *([(f"and {more} more", "", "", "")] if more > 0 else [])]


def _bytes_by_purpose(report: LayoutReport) -> dict[str, float]:
    bytes_by_purpose: dict[str, float] = {}
    for collective in report.collectives:
        where = collective.source or UNKNOWN["source"].partition(" (")[0]
        key = f"{collective.kind} along {axes_text(collective.axes)}, {where}"
        bytes_by_purpose[key] = bytes_by_purpose.get(key, 0.0) + collective.wire_bytes
    return bytes_by_purpose


def _changes(rows: Iterable[Figures]) -> list[Cells]:
    """The changed rows, in words."""
    cells: list[Cells] = []
    for name, first, second, units in rows:
        if first == second:
            continue
        texts = ["-" if figure is None else quantity(figure, units) for figure in (first, second)]
        change = ""
        if first is not None and second is not None:
            sign = "+" if second > first else ""
            change = sign + quantity(second - first, units)
        cells.append((name, *texts, change))
    return cells


def _arrays(a: LayoutReport, b: LayoutReport) -> list[Cells]:
    first = {array.path: array for array in a.arrays}
    second = {array.path: array for array in b.arrays}
    if not first or not second:  # one was not compiled: there is nothing to compare
        return []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path in dict.fromkeys([*first, *second]):
        splits = _split(first.get(path)), _split(second.get(path))
        if splits[0] != splits[1]:
            alike.setdefault((without_layers(path), *splits), []).append(path)
    return [(join_layers(paths), *splits) for (_, *splits), paths in alike.items()]


def _split(array: ArrayLayout | None) -> str:
    """The split of an array, as ``embed: data, mlp: model``."""
    if array is None:
        return "not there"
    names = [*array.names, *(None,) * (len(array.spec) - len(array.names))]
    parts = [
        f"{number if name is None else name}: {'+'.join(axes)}"
        for number, (name, axes) in enumerate(zip(names, array.spec, strict=False))
        if axes
    ]
    return ", ".join(parts) or "whole"
