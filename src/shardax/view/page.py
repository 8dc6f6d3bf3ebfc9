# SPDX-License-Identifier: Apache-2.0
"""HTML pages without outside files, and the report of a training run.

treescope draws on white and knows no dark mode. On a dark page its drawing is therefore shown
inverted, with the hues turned back: what was black on pale red is white on deep red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from types import MappingProxyType

from shardax._charts import NO_CHARTS, has_matplotlib
from shardax._files import write_whole
from shardax._tables import facts_html
from shardax.view.loss_chart import loss_chart, other_charts
from shardax.view.parameter_table import ParameterTable

_FRAGMENT = """
.shardax-view treescope-container { color: #000; }
body[data-jp-theme-light="false"] .shardax-view treescope-container,
body.vscode-dark .shardax-view treescope-container,
html[theme="dark"] .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
"""


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
    summary: Mapping[str, object],
    parameters: ParameterTable,
    pictures: Mapping[str, str],
    records: Sequence[Mapping[str, object]],
    references: Mapping[str, float],
    sample: str = "",
    facts: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    loss_unit: str = "",
) -> Path:
    """Writes the report of a training run, an HTML page without scripts.

    Its charts are drawn by matplotlib; without it, the page says how to install it.

    Args:
        path: File to write; replaced in one step.
        title: Heading.
        summary: Facts to list first, by name.
        parameters: The layout table.
        pictures: HTML by caption (``sharding_html``).
        records: Log records: dicts with ``step`` and ``loss`` (training) or ``eval_loss``
            (held-out). Where they have ``learning_rate``, ``grad_norm`` or a speed, such as
            ``tokens_per_second``, there is a chart of that too.
        references: Horizontal lines in the loss plot, by name, in the unit of the loss.
        sample: Generated text to show.
        facts: Further tables of facts, by heading, such as of the model and of the optimizer.
        loss_unit: What the loss is measured in, such as ``"nats per token"``.

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
    tables = [
        f"<section><h2>{escape(heading)}</h2>{_facts_table(table)}</section>"
        for heading, table in facts.items()
    ]
    # Everybody who trains writes a report, also without matplotlib.
    loss, others = NO_CHARTS, list[str]()
    if has_matplotlib():
        loss = loss_chart(records, references, loss_unit)
        others = other_charts(records)

    figures = "".join(
        f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, picture in pictures.items()
    )
    sections = [
        f"<h1>{escape(title)}</h1>{_facts_table(summary)}",
        f'<div class="columns">{"".join(tables)}</div>' if tables else "",
        f"<h2>Loss</h2>{loss}",
        f'<h2>Training</h2><div class="columns charts">{"".join(others)}</div>' if others else "",
        f"<h2>Shardings</h2>{figures}" if figures else "",
        f"<h2>Sample</h2><pre>{escape(sample)}</pre>" if sample else "",
        f"<h2>Parameters</h2>{parameters.html()}",
    ]
    return write_whole(path, html_page(title, f'<main class="report">{"".join(sections)}</main>'))


def _facts_table(facts: Mapping[str, object]) -> str:
    """Returns the HTML of a table of names and what they are."""
    return facts_html([(str(name), str(value)) for name, value in facts.items()], "facts")
