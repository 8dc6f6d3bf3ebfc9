# SPDX-License-Identifier: Apache-2.0
"""Display of models in notebooks, as HTML, and as text.

``mimebundle``, ``treescope_rendering`` and ``ndarray_adapter`` are the renderer of
``_core.object``.
"""

from __future__ import annotations

import importlib
import sys
from html import escape
from typing import Any

from shardax import Selection
from shardax.view import figures
from shardax.view.page import fragment, html_page, inserted_at_once
from shardax.view.parameter_table import ParameterTable
from shardax.view.shardings import ShardingDrawing, ShardingView


def show(*values: Any) -> None:
    """Shows anything, as foldable drawings or as text.

    In a notebook these are drawings, elsewhere texts. Several things are shown one below the other,
    and a string stands as it is between them.

    Args:
        *values: Each a Module, Variable, State, ``GraphDef``, selection, named array, mesh,
            sharding, a table or a view of this package, or a pytree of such; or a string.

    Example:
        >>> import shardax as sx
        >>> sx.view.show("A layer:", sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0)))
        A layer:
        Linear(  # 6 parameters
          kernel=Param(float32[2, 3], lazy, axes=('in', 'out')),
          bias=None,
          in_features=2,
          out_features=3,
          dtype=None,
        )
    """
    if not in_notebook():
        for value in values:
            print(value if isinstance(value, str) else to_text(value))  # noqa: T201 (the purpose)
        return

    # It is running, and no requirement of this package.
    display = importlib.import_module("IPython.display").display
    for value in values:
        if isinstance(value, str):
            bundle = {"text/html": fragment(f"<pre>{escape(value)}</pre>"), "text/plain": value}
        else:
            bundle = {"text/html": html_fragment(value), "text/plain": repr(value)}
        display(bundle, raw=True)


def to_text(value: object) -> str:
    """Returns anything as text, whole, with layouts and sharing.

    Args:
        value: As for ``show``.

    Example:
        >>> import shardax as sx
        >>> print(sx.view.to_text(sx.graphdef(sx.Rngs(dropout=0))))
        GraphDef: Rngs(
          dropout=RngStream(
            name='dropout',
            key=RngState(tag='dropout'),
            count=RngState(tag='dropout'),
          ),
        )
    """
    if isinstance(value, (ParameterTable, Selection, ShardingView)):
        return str(value)
    if isinstance(value, figures.PLACES):
        drawing = ShardingDrawing.of(figures.example_array(value))
        return f"{figures.place_title(value)}\n{drawing.text()}"
    return "\n".join(figures.drawing_of(value).lines(figures.describe, figures.comment))


def to_html(value: Any, title: str | None = None) -> str:
    """Returns a page of anything, without other files or network.

    Args:
        value: As for ``show``.
        title: Title of the page; the type's name by default.

    Returns:
        The text of the page. With treescope its drawing can be unfolded, and the pointer reads
        values off pictures of arrays: of the first 100, if there are more.

    Example:
        >>> import pathlib, tempfile, shardax as sx
        >>> page = sx.view.to_html(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
        >>> size = pathlib.Path(tempfile.mkdtemp(), "layer.html").write_text(page)
        >>> "<title>Linear</title>" in page
        True
    """
    body = html_fragment(value)
    return html_page(
        title or type(value).__name__, inserted_at_once(body) if "<script" in body else body
    )


def html_fragment(value: object) -> str:
    """Returns HTML for a page or a notebook."""
    if isinstance(value, (ParameterTable, ShardingView)):
        return fragment(value.html())
    if not _has_treescope():
        return fragment(f"<pre>{escape(to_text(value))}</pre>")
    return fragment(figures.tree_html(value))


def _has_treescope() -> bool:
    try:
        import treescope  # noqa: F401
    except ImportError:
        return False
    return True


def in_notebook() -> bool:
    """Whether this process has a front end for HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "text/html" in shell.display_formatter.active_types


def mimebundle(value: object) -> dict[str, str] | None:
    """Returns an object's texts by MIME type."""
    if "IPython" in sys.modules and not in_notebook():
        return None  # a terminal has no use for HTML and shows the repr
    return {"text/html": html_fragment(value), "text/plain": repr(value)}


def treescope_rendering(value: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Returns an object's part in a drawing of treescope."""
    return figures.FoldableTree(figures.drawing_of(value), subtree_renderer).part(path)


def ndarray_adapter() -> Any:
    """Returns treescope's adapter for a ``NamedArray``."""
    return figures.ADAPTER
