# SPDX-License-Identifier: Apache-2.0
"""What ``core.display`` asks for: objects as notebooks and treescope show them."""

from __future__ import annotations

import sys
from typing import Any

from shardax.view.array_figure import ADAPTER
from shardax.view.drawings import drawing_of
from shardax.view.foldable import Foldable
from shardax.view.show import html_fragment, in_notebook


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
