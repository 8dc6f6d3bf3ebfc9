# SPDX-License-Identifier: Apache-2.0
"""One layout on a plan's page: its rules, figures, pictures of parameters, and what it sends."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardax.plan.columns import (
    BINARY,
    DECIMAL,
    OPERATIONS,
    TIMES,
    figure,
    measured_label,
    quantity,
)
from shardax.plan.explanation import UNKNOWN, Alike, Group, alike, groups, headline
from shardax.plan.records import ArrayLayout, LayoutReport
from shardax.view.pictures import sharding_svg

_PICTURES = 4
_GROUPS = 25
_LISTED = 12
_CELLS = 1024


def details(report: LayoutReport, number: int, opened: bool) -> str:
    """Returns a layout's part of the page, which can be folded.

    Args:
        report: What was found of it.
        number: Its place in the plan, from 1; a link to ``#layout-1`` opens it.
        opened: Whether it is unfolded at first.
    """
    parts = [
        _facts(report),
        _rules(report),
        _warnings(report),
        _pictures(report),
        _sent(report),
    ]
    summary = f"<strong>{escape(report.layout.name)}</strong> "
    told = headline(report).removeprefix(report.layout.name).strip()
    return (
        f'<details class="layout" id="layout-{number}"{" open" if opened else ""}>'
        f'<summary>{summary}<span class="quiet">{escape(told)}</span></summary>'
        f"<div>{''.join(parts)}</div></details>"
    )


def _facts(report: LayoutReport) -> str:
    label = measured_label([report])
    found: list[tuple[str, str, str]] = []
    if report.peak_bytes is not None:
        found.append(("peak of memory", quantity(report.peak_bytes, BINARY), label))
    if report.headroom_bytes is not None:
        found.append(("memory that stays free", quantity(report.headroom_bytes, BINARY), label))
    found += [
        (kind, quantity(size, BINARY), "exact")
        for kind, size in report.argument_bytes.items()
        if size
    ]
    if report.time is not None:
        factor = f"{figure(report.replicated_compute)} x"
        found += [
            ("work of a device", quantity(report.flops, OPERATIONS), "counted"),
            ("each operation is done", factor, "counted"),
            ("memory traffic", quantity(report.hbm_bytes, DECIMAL), "estimate"),
            ("on the wire", quantity(report.total_wire_bytes, DECIMAL), "counted"),
            ("while other work goes on", f"{100 * report.asynchronous_share:.0f} %", "counted"),
            ("time of arithmetic", quantity(report.time.compute, TIMES), "estimate"),
            ("time of memory traffic", quantity(report.time.memory, TIMES), "estimate"),
            ("time of communication", quantity(report.time.communication, TIMES), "estimate"),
        ]
        if report.compile_seconds:  # 0 if the program was kept from before
            found.append(("compiled in", quantity(report.compile_seconds, TIMES), ""))
        if report.cross_slice_bytes:
            found.append(("between slices", quantity(report.cross_slice_bytes, DECIMAL), "counted"))
    if not found:
        return ""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <small>{escape(kind)}</small></dd></div>"
        for name, value, kind in found
    )
    return f'<dl class="facts">{cells}</dl>'


def _rules(report: LayoutReport) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_target(axes))}</td></tr>"
        for name, axes in report.layout.rules
    )
    mesh = escape(report.layout.mesh_text)
    table = f'<table class="pairs">{rows}</table>' if rows else "<p>There are none.</p>"
    return f'<h3>Rules</h3><p class="quiet">over {mesh}</p>{table}'


def _target(axes: Any) -> str:
    return axes if isinstance(axes, str) else " + ".join(axes or ()) or "not split"


def _warnings(report: LayoutReport) -> str:
    said = [*([report.reason] if report.reason else []), *report.warnings]
    items = "".join(f"<li>{escape(text)}</li>" for text in said)
    if report.replicated:
        shown = ", ".join(report.replicated[:_LISTED])
        more = len(report.replicated) - _LISTED
        rest = f" and {more} more" if more > 0 else ""
        items += f"<li>Held whole by every device: <code>{escape(shown)}</code>{rest}</li>"
    return f'<h3>To know</h3><ul class="remarks">{items}</ul>' if items else ""


def _pictures(report: LayoutReport) -> str:
    """The largest parameters of distinct forms, as the devices hold them."""
    largest = sorted(
        (each for each in report.arrays if each.kind == "parameters"),
        key=lambda each: -math.prod(each.shape),
    )
    chosen: dict[object, ArrayLayout] = {}
    for each in largest:
        chosen.setdefault((each.shape, each.spec), each)
    figures = "".join(_picture(report, each) for each in list(chosen.values())[:_PICTURES])
    if not figures:
        return ""
    return (
        "<h3>The largest parameters</h3>"
        '<p class="quiet">A rectangle is the part that a device holds, with the numbers of those '
        "that do; of more than two dimensions, those that are split are drawn.</p>"
        f'<div class="pictures">{figures}</div>'
    )


def _picture(report: LayoutReport, array: ArrayLayout) -> str:
    names = [
        f"{'-' if name is None else name}: {size}" + (f" / {'+'.join(axes)}" if axes else "")
        for name, size, axes in zip(array.names, array.shape, array.spec, strict=False)
    ]
    sizes = report.layout.sizes
    cells = math.prod(sizes[axis] for axes in array.spec for axis in axes)
    drawn = ""
    if sizes and cells <= _CELLS:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        place = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in array.spec)))
        drawn = sharding_svg(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place))
        said = escape(f"{array.path} in {cells} parts")
        drawn = drawn.replace("<svg ", f'<svg aria-label="{said}" ', 1)
    caption = f"<code>{escape(array.path)}</code><br>{escape(', '.join(names))}"
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _sent(report: LayoutReport) -> str:
    if report.time is None:
        return ""
    found = groups(report)
    total = report.total_wire_bytes
    if not found:
        return "<h3>What it sends</h3><p>Nothing: no device needs what another has.</p>"
    items = "".join(_group(group, total) for group in found[:_GROUPS])
    rest = found[_GROUPS:]
    if rest:
        size = quantity(sum(group.wire_bytes for group in rest), DECIMAL)
        items += f"<li>{len(rest)} more lines of code, {size} together</li>"
    return (
        f"<h3>What it sends, and which line of code needs it</h3>"
        f'<p class="quiet">{quantity(total, DECIMAL)} from each device in a step, by the line of '
        f"the model whose operation needs it.</p><ol class='sent'>{items}</ol>"
    )


def _group(group: Group, total: float) -> str:
    share = 100 * group.wire_bytes / total if total else 0.0
    key = f"<code>{escape(group.key)}</code>" if group.key else f"<em>{UNKNOWN['source']}</em>"
    items = "".join(f"<li>{_said(same)}</li>" for same in alike(group.collectives, "source"))
    return (
        f'<li><div class="head"><span>{quantity(group.wire_bytes, DECIMAL)}</span>'
        f"<span>{share:.0f} %</span>{key}</div>"
        f'<div class="share"><span style="width:{share:.1f}%"></span></div><ul>{items}</ul></li>'
    )


def _said(same: Alike) -> str:
    details = "".join(f'<br><span class="quiet">{escape(text)}</span>' for text in same.details)
    return f"<strong>{escape(same.sentence)}</strong>{details}"
