# SPDX-License-Identifier: Apache-2.0
"""Showing in notebooks: what a notebook and treescope ask of an object.

What answers is the *renderer*, which stands far above the core (``shardax.view``). The package's
face names it here, and it is imported when something is shown for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _no_renderer() -> Any:
    raise LookupError("Nothing draws objects: shardax/__init__.py has not been run.")


renderer: Callable[[], Any] = _no_renderer
"""Returns the module that has ``mimebundle``, ``treescope_rendering`` and ``ndarray_adapter``."""


class Shown:
    """Base of what notebooks and treescope show by the renderer."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """Returns texts by MIME type, for IPython.

        It is this protocol because treescope, which looks for ``_repr_html_`` on everything inside
        a drawing, does not know it.
        """
        return renderer().mimebundle(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return renderer().treescope_rendering(self, path, subtree_renderer)


class ShownArray(Shown):
    """Base of arrays, of which treescope draws the numbers (``treescope.render_array``)."""

    __slots__ = ()

    def __treescope_ndarray_adapter__(self) -> Any:
        return renderer().ndarray_adapter()
