# SPDX-License-Identifier: Apache-2.0
"""HTML pages without outside files, and the report of a training run.

treescope draws on white and knows no dark mode. On a dark page its drawing is therefore shown
inverted, with the hues turned back: what was black on pale red is white on deep red.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from shardax._files import write_whole
from shardax.view.parameter_table import ParameterTable

_FRAGMENT = """
.shardax-view treescope-container { color: #000; }
body[data-jp-theme-light="false"] .shardax-view treescope-container,
body.vscode-dark .shardax-view treescope-container,
html[theme="dark"] .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
"""
_WIDTH, _HEIGHT, _MARGIN = 720, 300, 45  # of the plot of losses


def html_page(title: str, body: str, style: str = "") -> str:
    """Returns a whole page; the title is text, the body HTML."""
    template = resources.files("shardax.view").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), body=body, style=style)


def inserted_at_once(body: str) -> str:
    """Returns HTML for insertion as a whole by a browser."""
    # Elements of treescope run a script when they are connected to the document. While a page is
    # parsed that can be before their script has arrived; a template's content has no such moment.
    return (
        f"<template>{body}</template><script>{{const here = document.currentScript;"
        "here.replaceWith(here.previousElementSibling.content);}</script>"
    )


def fragment(content: str) -> str:
    """Returns HTML for a page or the output of a notebook."""
    return f'<div class="shardax-view"><style>{_FRAGMENT}</style>{content}</div>'


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    parameters: ParameterTable,
    pictures: Mapping[str, str],
    records: Sequence[Mapping[str, Any]],
    references: Mapping[str, float],
    sample: str = "",
) -> Path:
    """Writes the report of a training run, an HTML page without scripts.

    Args:
        path: File to write; replaced in one step.
        title: Heading.
        summary: Facts to list first, by name.
        parameters: The layout table.
        pictures: SVG text by caption (``sharding_svg``).
        records: Log records: dicts with ``step`` and ``loss`` (training) or ``eval_loss``
            (held-out).
        references: Horizontal lines in the loss plot, by name, in the unit of the loss.
        sample: Generated text to show.

    Returns:
        The path.

    Example:
        >>> import tempfile, pathlib, shardax as sx
        >>> page = write_report(
        ...     pathlib.Path(tempfile.mkdtemp()) / "report.html",
        ...     title="Run",
        ...     summary={"steps": 2},
        ...     parameters=sx.view.table(sx.nn.Linear(2, 3, rngs=sx.Rngs(0))),
        ...     pictures={},
        ...     records=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}],
        ...     references={"bigram": 1.8},
        ... )
        >>> "<svg" in page.read_text(), "bigram" in page.read_text()
        (True, True)
    """
    facts = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in summary.items()
    )
    figures = "".join(
        f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, svg in pictures.items()
    )
    sections = [
        f'<h1>{escape(title)}</h1><table class="facts">{facts}</table>',
        f"<h2>Loss</h2>{loss_svg(records, references)}",
        f"<h2>Shardings</h2>{figures}" if figures else "",
        f"<h2>Sample</h2><pre>{escape(sample)}</pre>" if sample else "",
        f"<h2>Parameters</h2>{parameters.html()}",
    ]
    return write_whole(path, html_page(title, f'<main class="report">{"".join(sections)}</main>'))


def loss_svg(records: Sequence[Mapping[str, Any]], references: Mapping[str, float]) -> str:
    """Draws training and held-out loss over steps, with reference lines, as SVG."""
    series = {name: _series(records, key) for name, key, *_ in _CURVES}
    points = [pair for curve in series.values() for pair in curve]
    if not points:
        return "<p>No losses were recorded.</p>"
    steps = [step for step, _ in points]
    losses = [*(loss for _, loss in points), *references.values()]
    first, last = min(steps), max(*steps, min(steps) + 1)
    low, high = min(losses), max(losses)
    high = high if high > low else low + 1.0

    def x_of(step: float) -> float:
        return _MARGIN + (step - first) / (last - first) * (_WIDTH - 2 * _MARGIN)

    def y_of(loss: float) -> float:
        return _MARGIN / 2 + (high - loss) / (high - low) * (_HEIGHT - 1.5 * _MARGIN)

    right, bottom, top = _WIDTH - _MARGIN, _HEIGHT - _MARGIN, _MARGIN / 2
    parts = [
        f'<path d="M{_MARGIN},{top} V{bottom} H{right}" fill="none" stroke="#bbb"/>',
        _label(_MARGIN, bottom + 16, "middle", f"{first:.0f}"),
        _label(right, bottom + 16, "middle", f"step {last:.0f}"),
        _label(_MARGIN - 6, top + 4, "end", f"{high:.2f}"),
        _label(_MARGIN - 6, bottom, "end", f"{low:.2f}"),
    ]
    for name, value in references.items():
        y = y_of(value)
        parts.append(
            f'<line x1="{_MARGIN:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#999" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(_label(right, y - 4, "end", f"{name} {value:.3f}"))
    curves = [curve for curve in _CURVES if series[curve[0]]]
    for row, (name, _, color, has_dots) in enumerate(curves):
        places = [(x_of(step), y_of(loss)) for step, loss in series[name]]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for x, y in places if has_dots else ():
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
        # A legend where falling curves leave room: labels at their ends would meet.
        text = f"{name} {series[name][-1][1]:.3f}"
        parts.append(_label(right, 15 * (row + 1), "end", text, color, 12))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


# Name, key in the records, colour, and whether it has dots.
_CURVES = (("training", "loss", "#4e79a7", False), ("held out", "eval_loss", "#e15759", True))


def _series(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    points = [
        (int(record["step"]), float(record[key]))
        for record in records
        if key in record and "step" in record
    ]
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _label(x: float, y: float, anchor: str, text: str, color: str = "#888", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{color}">{escape(text)}</text>'
    )
