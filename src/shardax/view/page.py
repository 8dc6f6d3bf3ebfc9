# SPDX-License-Identifier: Apache-2.0
"""HTML pages: one file that needs no other, light or dark as the reader's system is.

treescope draws on white and knows no dark mode. On a dark page its drawing is therefore shown
inverted, with the hues turned back: what was black on pale red is white on deep red, and white is
the colour of the page. A notebook says by its body whether it is dark, whatever the system is.

The report of a training run: one HTML page without scripts or outside files.

It shows the settings, the loss curve beside reference lines, the layout table, pictures of
shardings, and a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardax.host.files import write_whole
from shardax.view.table import ParameterTable

# --- Page ---

PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid #eee;
  font-family: ui-monospace, monospace; vertical-align: top; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
figure { display: inline-block; margin: 0 1.5rem 1rem 0; }
figcaption { font-size: 13px; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; }
  pre { background: #222; }
  th, td { border-color: #333; }
  .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
}
"""

_FRAGMENT = """
.shardax-view treescope-container { color: #000; }
body[data-jp-theme-light="false"] .shardax-view treescope-container,
body.vscode-dark .shardax-view treescope-container,
html[theme="dark"] .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """Returns a whole page.

    Args:
        title: Its title, as text.
        body: Its contents, as HTML.
        style: More CSS.

    Example:
        >>> page = html_page("Layers <1>", "<p>Two.</p>")
        >>> page.startswith("<!doctype html>"), "<title>Layers &lt;1&gt;</title>" in page
        (True, True)
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def fragment(content: str) -> str:
    """Returns HTML to stand in a page or in the output of a notebook.

    Args:
        content: What treescope drew, or any other HTML.

    Example:
        >>> fragment("<p>Two.</p>").endswith("<p>Two.</p></div>")
        True
    """
    return f'<div class="shardax-view"><style>{_FRAGMENT}</style>{content}</div>'


# --- Report ---

_STYLE = """
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
table { width: 100%; }
.parameters td:last-child, .parameters th:last-child { text-align: right; }
.facts td:first-child { white-space: nowrap; }
"""
_WIDTH, _HEIGHT, _MARGIN = 720, 300, 45


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
    """Writes the report of a training run.

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
        f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in summary.items()
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
    page = html_page(title, "".join(sections), _STYLE)
    return write_whole(path, page)


def loss_svg(records: Sequence[Mapping[str, Any]], references: Mapping[str, float]) -> str:
    """Draws training and held-out loss over steps, with reference lines.

    Args:
        records: See ``write_report``.
        references: See ``write_report``.

    Returns:
        The text of an ``<svg>`` element, or a sentence if there is nothing to draw.
    """
    train = _series(records, "loss")
    held_out = _series(records, "eval_loss")
    if not train and not held_out:
        return "<p>No losses were recorded.</p>"
    steps = [step for step, _ in train + held_out]
    losses = [loss for _, loss in train + held_out] + list(references.values())
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(losses), max(losses)
    high = high if high > low else low + 1.0

    def point(step: float, loss: float) -> str:
        x = _MARGIN + (step - first) / (last - first) * (_WIDTH - 2 * _MARGIN)
        y = _MARGIN / 2 + (high - loss) / (high - low) * (_HEIGHT - 1.5 * _MARGIN)
        return f"{x:.1f},{y:.1f}"

    parts = [_axes(first, last, low, high)]
    for name, value in references.items():
        (left, y), (right, _) = (point(step, value).split(",") for step in (first, last))
        parts.append(
            f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#999" '
            f'stroke-dasharray="4 3"/><text x="{right}" y="{float(y) - 4:.1f}" '
            f'text-anchor="end" font-size="11" fill="#888">'
            f"{escape(name)} {value:.3f}</text>"
        )
    curves = [(train, "training", "#4e79a7", False), (held_out, "held out", "#e15759", True)]
    for row, (series, name, color, dots) in enumerate(curve for curve in curves if curve[0]):
        places = [point(step, loss) for step, loss in series]
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" '
            'stroke-width="1.6"/>'
        )
        for x, y in (place.split(",") for place in places if dots):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
        # A legend where falling curves leave room: labels at their ends would meet.
        parts.append(
            f'<text x="{_WIDTH - _MARGIN}" y="{15 * (row + 1)}" text-anchor="end" font-size="12" '
            f'fill="{color}">{name} {series[-1][1]:.3f}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _series(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    found = [
        (int(record["step"]), float(record[name]))
        for record in records
        if name in record and "step" in record
    ]
    return [(step, loss) for step, loss in found if math.isfinite(loss)]


def _axes(first: float, last: float, low: float, high: float) -> str:
    bottom = _HEIGHT - _MARGIN
    labels = [
        (_MARGIN, bottom + 16, "middle", f"{first:.0f}"),
        (_WIDTH - _MARGIN, bottom + 16, "middle", f"step {last:.0f}"),
        (_MARGIN - 6, _MARGIN / 2 + 4, "end", f"{high:.2f}"),
        (_MARGIN - 6, bottom, "end", f"{low:.2f}"),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="#888">{text}</text>'
        for x, y, anchor, text in labels
    )
    path = f"M{_MARGIN},{_MARGIN / 2} V{bottom} H{_WIDTH - _MARGIN}"
    return f'<path d="{path}" fill="none" stroke="#bbb"/>{texts}'
