# SPDX-License-Identifier: Apache-2.0
"""What differs between two layouts: rules, splits, memory, time, and which collective by how much.

Collectives of the two programs are matched by what they do: kind, mesh axes and source line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardax._core.state.state import columns
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.plan.report.columns import (
    BINARY,
    DECIMAL,
    OPERATIONS,
    TIMES,
    axes_text,
    quantity,
)
from shardax.plan.report.explanation import (
    UNKNOWN,
    headline,
    of_any_layer,
    of_layers,
)

_SHOWN = 20
_COUNTED = (
    ("work", "flops", OPERATIONS),
    ("memory traffic", "hbm_bytes", DECIMAL),
    ("wire", "total_wire_bytes", DECIMAL),
    ("cross-slice", "cross_slice_bytes", DECIMAL),
)

Units = Sequence[tuple[str, float]]


def diff(a: LayoutReport, b: LayoutReport) -> str:
    """Says what differs between two layouts.

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
    tables = [
        _table("Rules", _rules(a, b)),
        _table("Mesh", _mesh(a, b)),
        _table("Figures", _figures(a, b), "b - a"),
        _table("Wire bytes", _wire(a, b), "b - a"),
        _table("Arrays", _arrays(a, b)),
    ]
    head = f"a: {headline(a)}\nb: {headline(b)}"
    found = [table for table in tables if table]
    return "\n\n".join([head, *(found or ["There is no difference."])])


Row = tuple[str, ...]


def _table(title: str, rows: Sequence[Row], more: str = "") -> str:
    if not rows:
        return ""
    heads = (title, "a", "b", *([more] if more else []))
    return "\n".join(columns([heads, *rows], []))


def _rules(a: LayoutReport, b: LayoutReport) -> list[Row]:
    first, second = _targets(a), _targets(b)
    return [
        (name, first.get(name, "no rule"), second.get(name, "no rule"))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _targets(report: LayoutReport) -> dict[str, str]:
    """What each name maps to, in words; several rules of a name in their order."""
    found: dict[str, list[str]] = {}
    for name, axes in report.layout.rules:
        text = axes if isinstance(axes, str) else "+".join(axes or ()) or "None"
        found.setdefault(name, []).append(text)
    words = {name: ", then ".join(texts) for name, texts in found.items()}
    for policy, value in zip(("on_conflict", "on_unmapped"), report.layout.policies, strict=True):
        words[f"({policy})"] = str(value)
    return words


def _mesh(a: LayoutReport, b: LayoutReport) -> list[Row]:
    first, second = a.layout.sizes, b.layout.sizes
    rows = [
        (axis, str(first.get(axis, "-")), str(second.get(axis, "-")))
        for axis in dict.fromkeys([*first, *second])
        if first.get(axis) != second.get(axis)
    ]
    if not rows and list(first) != list(second):
        rows.append(("order", ", ".join(first), ", ".join(second)))
    return rows


def _figures(a: LayoutReport, b: LayoutReport) -> list[Row]:
    kinds = dict.fromkeys([*a.argument_bytes, *b.argument_bytes])
    rows: list[tuple[str, float | None, float | None, Units]] = [
        ("peak", a.peak_bytes, b.peak_bytes, BINARY),
        *(
            (kind, a.argument_bytes.get(kind, 0), b.argument_bytes.get(kind, 0), BINARY)
            for kind in kinds
        ),
        *(
            (name, _known(a, attribute), _known(b, attribute), units)
            for name, attribute, units in _COUNTED
        ),
    ]
    for name in ("lower", "upper", "compute", "memory", "communication"):
        first = getattr(a.time, name, None)
        second = getattr(b.time, name, None)
        rows.append((f"time: {name}", first, second, TIMES))
    return _changes(rows)


def _known(report: LayoutReport, attribute: str) -> float | None:
    """A figure that is counted in the program; None if there is no program."""
    return getattr(report, attribute) if report.time else None


def _wire(a: LayoutReport, b: LayoutReport) -> list[Row]:
    if a.time is None or b.time is None:
        return []
    first, second = _by_deed(a), _by_deed(b)
    rows: list[tuple[str, float | None, float | None, Units]] = [
        (key, first.get(key, 0.0), second.get(key, 0.0), DECIMAL)
        for key in dict.fromkeys([*first, *second])
    ]
    rows.sort(key=lambda row: -abs((row[2] or 0.0) - (row[1] or 0.0)))
    changed = _changes(rows)
    more = len(changed) - _SHOWN
    return [*changed[:_SHOWN], *([(f"and {more} more", "", "", "")] if more > 0 else [])]


def _by_deed(report: LayoutReport) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in report.collectives:
        where = each.source or UNKNOWN["source"].partition(" (")[0]
        key = f"{each.kind} along {axes_text(each.axes)}, {where}"
        found[key] = found.get(key, 0.0) + each.wire_bytes
    return found


def _changes(rows: Iterable[tuple[str, float | None, float | None, Units]]) -> list[Row]:
    """The rows that differ, in words."""
    found: list[Row] = []
    for name, first, second, units in rows:
        if first == second:
            continue
        texts = ["-" if each is None else quantity(each, units) for each in (first, second)]
        known = first is not None and second is not None
        found.append((name, *texts, _signed((second or 0) - (first or 0), units) if known else ""))
    return found


def _signed(value: float, units: Units) -> str:
    return f"+{quantity(value, units)}" if value > 0 else quantity(value, units)


def _arrays(a: LayoutReport, b: LayoutReport) -> list[Row]:
    first = {each.path: each for each in a.arrays}
    second = {each.path: each for each in b.arrays}
    if not first or not second:  # one was not compiled: there is nothing to compare
        return []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path in dict.fromkeys([*first, *second]):
        splits = _split(first.get(path)), _split(second.get(path))
        if splits[0] != splits[1]:
            alike.setdefault((of_any_layer(path), *splits), []).append(path)
    return [(of_layers(paths), *splits) for (_, *splits), paths in alike.items()]


def _split(array: ArrayLayout | None) -> str:
    """Says how an array is split, as ``embed: data, mlp: model``."""
    if array is None:
        return "not there"
    names = [*array.names, *(None,) * (len(array.spec) - len(array.names))]
    parts = [
        f"{number if name is None else name}: {'+'.join(axes)}"
        for number, (name, axes) in enumerate(zip(names, array.spec, strict=False))
        if axes
    ]
    return ", ".join(parts) or "whole"
