# SPDX-License-Identifier: Apache-2.0
"""Showing anything: in a notebook, as HTML, as text.

The HTML is a drawing by treescope, where that is installed (``pip install 'shardax[view]'``), and
the text otherwise. Nothing here reads a lazy value: what is lazy is shown as lazy.

What ``_core.object`` asks for: objects as notebooks and treescope show them.
"""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardax._select.selection import Selection
from shardax.view.figures import (
    ADAPTER,
    describe,
    drawing_of,
    example_array,
    notes,
    place_title,
)
from shardax.view.foldable import Foldable, draw_sharding, draw_with_treescope
from shardax.view.page import fragment, html_page
from shardax.view.pictures import sharding_text
from shardax.view.sharding_view import ShardingView
from shardax.view.table import ParameterTable

# --- Show ---


def show(value: Any) -> None:
    """Shows anything: in a notebook as a drawing to unfold, elsewhere as text.

    Args:
        value: A Module, Variable, State, ``GraphDef``, selection, named array, mesh, sharding, a
            table or a view of this package, or a pytree of such.

    Example:
        >>> import shardax as sx
        >>> sx.view.show(sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0)))
        Linear(  # 6 parameters
          kernel=Param(float32[2, 3], lazy, axes=('in', 'out')),
          bias=None,
          in_features=2,
          out_features=3,
          dtype=None,
        )
    """
    if in_notebook():
        from IPython.display import (  # pyright: ignore[reportMissingImports] (it is running)
            display,
        )

        display({"text/html": html_fragment(value), "text/plain": repr(value)}, raw=True)
    else:
        print(to_text(value))  # noqa: T201 (printing is the purpose)


def in_notebook() -> bool:
    """Whether this process runs in a notebook, or another front end that shows HTML.

    Example:
        >>> in_notebook()
        False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "text/html" in shell.display_formatter.active_types


def to_text(value: Any) -> str:
    """Returns anything as text: the whole of it, with layouts, and with sharing said.

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
    if isinstance(value, (Mesh, AbstractMesh, NamedSharding)):
        return f"{place_title(value)}\n{sharding_text(example_array(value))}"
    return "\n".join(drawing_of(value).lines(describe, notes))


def to_html(value: Any, title: str | None = None) -> str:
    """Returns a page that shows anything; it needs no other file and no network.

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
    return html_page(title or type(value).__name__, html_fragment(value))


def html_fragment(value: Any) -> str:
    """Returns HTML to stand in a page or a notebook.

    Args:
        value: As for ``show``.

    Example:
        >>> import jax
        >>> "shardax-view" in html_fragment(jax.sharding.AbstractMesh((2,), ("data",)))
        True
    """
    if isinstance(value, ShardingView) and value.single and has_treescope():
        (row,) = value.rows
        picture = draw_sharding(row.array, row.axes)
        if picture is not None:
            caption = f"<figcaption>{escape(value.caption())}</figcaption>"
            return fragment(f"<figure>{picture}{caption}</figure>")
    if isinstance(value, (ParameterTable, ShardingView)):
        return fragment(value.html())
    if not has_treescope():
        return fragment(f"<pre>{escape(to_text(value))}</pre>")
    return fragment(draw_with_treescope(value))


def has_treescope() -> bool:
    """Whether treescope is installed (``pip install 'shardax[view]'``).

    Example:
        >>> has_treescope()
        True
    """
    try:
        import treescope  # noqa: F401
    except ImportError:
        return False
    return True


# --- Notebook ---


def mimebundle(value: Any) -> dict[str, str] | None:
    """Returns an object's texts by MIME type.

    Args:
        value: The object.

    Returns:
        The texts; None in a terminal, which has no use for HTML and shows the repr.

    Example:
        >>> import shardax as sx
        >>> sorted(mimebundle(sx.Rngs(0)))
        ['text/html', 'text/plain']
    """
    if "IPython" in sys.modules and not in_notebook():
        return None
    return {"text/html": html_fragment(value), "text/plain": repr(value)}


def treescope_rendering(value: Any, path: str | None, subtree_renderer: Any) -> Any:
    """Returns treescope's part for an object, inside whatever treescope draws.

    Args:
        value: The object.
        path: The code that leads to it, or None.
        subtree_renderer: treescope's renderer for what it holds.

    Example:
        >>> import shardax as sx, treescope
        >>> layers = [sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0))]
        >>> print(treescope.render_to_text(layers).splitlines()[2].strip())
        kernel=Param(float32[2, 3], lazy, axes=('in', 'out')),
    """
    return Foldable(drawing_of(value), subtree_renderer).part(path)


def ndarray_adapter() -> Any:
    """Returns what treescope asks of a ``NamedArray``.

    Example:
        >>> import shardax as sx, treescope
        >>> type(treescope.render_array(sx.named.zeros({"batch": 2, "embed": 3}))).__name__
        'TreescopeFigure'
    """
    return ADAPTER
