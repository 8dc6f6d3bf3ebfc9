# SPDX-License-Identifier: Apache-2.0
"""Differences between two layouts: rules, splits, memory, time, collectives.

Collectives of the two programs are matched by kind, mesh axes and source line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardax._core.state.state import columns
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report import columns as formats
from shardax.plan.report.columns import BINARY, DECIMAL, Units, quantity
from shardax.plan.report.explanation import UNKNOWN, headline, join_layers, without_layers

_SHOWN = 20
_COUNTED = (
    ("work", "flops", formats.OPERATIONS),
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
        Lines of text: what became of both; rules and mesh axes that differ; figures; collectives by
        how much more or less they send; arrays that are split otherwise.

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
    tables = [
        (("Rules", "a", "b"), _changed(_targets(a), _targets(b), "no rule")),
        (("Mesh", "a", "b"), mesh),
        (("Figures", "a", "b", "b - a"), _changes(_figures(a, b))),
        (("Wire bytes", "a", "b", "b - a"), _wire(a, b)),
        (("Arrays", "a", "b"), _arrays(a, b)),
    ]
    found = ["\n".join(columns([heads, *rows])) for heads, rows in tables if rows]
    head = f"a: {headline(a)}\nb: {headline(b)}"
    return "\n\n".join([head, *(found or ["There is no difference."])])


def _changed(first: Mapping[str, str], second: Mapping[str, str], missing: str) -> list[Cells]:
    return [
        (name, first.get(name, missing), second.get(name, missing))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _texts(sizes: Mapping[str, int]) -> dict[str, str]:
    return {axis: str(size) for axis, size in sizes.items()}


def _targets(report: LayoutReport) -> dict[str, str]:
    """What each name maps to, in words and in order."""
    found: dict[str, list[str]] = {}
    for name, axes in report.layout.rules:
        text = axes if isinstance(axes, str) else "+".join(axes or ()) or "None"
        found.setdefault(name, []).append(text)
    words = {name: ", then ".join(texts) for name, texts in found.items()}
    for policy, value in zip(("on_conflict", "on_unmapped"), report.layout.policies, strict=True):
        words[f"({policy})"] = str(value)
    return words


Figures = tuple[str, float | None, float | None, Units]  # what, of a, of b


def _figures(a: LayoutReport, b: LayoutReport) -> list[Figures]:
    rows: list[Figures] = [("peak", a.peak_bytes, b.peak_bytes, BINARY)]
    for kind in dict.fromkeys([*a.argument_bytes, *b.argument_bytes]):
        rows.append((kind, a.argument_bytes.get(kind, 0), b.argument_bytes.get(kind, 0), BINARY))
    for name, attribute, units in _COUNTED:  # in the program, if there is one
        first, second = (getattr(each, attribute) if each.time else None for each in (a, b))
        rows.append((name, first, second, units))
    for name in ("lower", "upper", "compute", "memory", "communication"):
        first, second = getattr(a.time, name, None), getattr(b.time, name, None)
        rows.append((f"time: {name}", first, second, formats.TIMES))
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
    found: dict[str, float] = {}
    for each in report.collectives:
        where = each.source or UNKNOWN["source"].partition(" (")[0]
        key = f"{each.kind} along {formats.axes_text(each.axes)}, {where}"
        found[key] = found.get(key, 0.0) + each.wire_bytes
    return found


def _changes(rows: Iterable[Figures]) -> list[Cells]:
    """The rows that differ, in words."""
    found: list[Cells] = []
    for name, first, second, units in rows:
        if first == second:
            continue
        texts = ["-" if each is None else quantity(each, units) for each in (first, second)]
        change = ""
        if first is not None and second is not None:
            sign = "+" if second > first else ""
            change = sign + quantity(second - first, units)
        found.append((name, *texts, change))
    return found


def _arrays(a: LayoutReport, b: LayoutReport) -> list[Cells]:
    first = {each.path: each for each in a.arrays}
    second = {each.path: each for each in b.arrays}
    if not first or not second:  # one was not compiled: there is nothing to compare
        return []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path in dict.fromkeys([*first, *second]):
        splits = _split(first.get(path)), _split(second.get(path))
        if splits[0] != splits[1]:
            alike.setdefault((without_layers(path), *splits), []).append(path)
    return [(join_layers(paths), *splits) for (_, *splits), paths in alike.items()]


def _split(array: ArrayLayout | None) -> str:
    """How an array is split, as ``embed: data, mlp: model``."""
    if array is None:
        return "not there"
    names = [*array.names, *(None,) * (len(array.spec) - len(array.names))]
    parts = [
        f"{number if name is None else name}: {'+'.join(axes)}"
        for number, (name, axes) in enumerate(zip(names, array.spec, strict=False))
        if axes
    ]
    return ", ".join(parts) or "whole"
