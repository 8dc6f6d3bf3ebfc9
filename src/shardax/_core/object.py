# SPDX-License-Identifier: Apache-2.0
"""Showing in notebooks: what a notebook and treescope ask of an object.

What answers is the *renderer*, which stands far above the core (``shardax.view``). The package's
face names it here, and it is imported when something is shown for the first time.

Objects: the things in a model that have identity.

An *object* is a Variable, a Module or a tracked container. Two names for one object are one object
everywhere: in transforms, in checkpoints, in gradients. Everything else in a model is a static
value, or an immutable container (tuple, bound method, ``functools.partial``) of objects and static
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# --- Display ---


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


# --- Node ---


class Object(Shown):
    """Base of everything with identity.

    What follows is the contract by which the core walks, copies and guards objects.

    Attributes:
        _owner: The frame that made the object (``_core.frames``), or None.
        _lock: Why the object must not be written, or None.
        _marked: Whether some remembered walk has seen the object (``_core.epoch``).

    Modules and containers also have ``_flat``: how they were last flattened
    (``_core.graph.flatten.flatten``), or None.
    """

    __slots__ = ()
    _owner: Any
    _lock: str | None
    _marked: bool

    def _flatten(self, encode: Any) -> Any:
        """Returns the object's definition, calling ``encode(child, key)`` for each child."""
        raise NotImplementedError

    @classmethod
    def _allocate(cls, owner: Any, lock: str | None) -> Any:
        """Makes an empty object, to be filled once all objects of a graph exist."""
        raise NotImplementedError

    def _unflatten(self, definition: Any, decode: Any) -> None:
        """Fills an object from its definition, calling ``decode(child)`` for each child."""
        raise NotImplementedError


class Placeholder:
    """An immutable value that stands where an object belongs (``_core.frozen``).

    It is configuration, but walks look for it as they look for objects.
    """

    __slots__ = ()


class Wrapper:
    """A callable around another one that may lead to objects, such as a compiled bound method.

    Where it stands in a model, a copy of the model gets a wrapper of its own, around the copy's
    objects.
    """

    __slots__ = ()
    __wrapped__: Any

    def _wrapping(self) -> Any:
        """Returns what the wrapper adds, as hashable configuration."""
        raise NotImplementedError

    def _wrap(self, wrapped: Any) -> Any:
        """Returns a wrapper like this one around another callable."""
        raise NotImplementedError
