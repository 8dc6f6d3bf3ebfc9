# SPDX-License-Identifier: Apache-2.0
"""Objects: the things in a model that have identity.

An *object* is a Variable, a Module or a tracked container. Two names for one object are one object
everywhere: in transforms, in checkpoints, in gradients. Everything else in a model is a static
value, or an immutable container (tuple, bound method, ``functools.partial``) of objects and static
values.
"""

from __future__ import annotations

from typing import Any

from shardax.core.display import Shown


class Object(Shown):
    """Base of everything with identity.

    What follows is the contract by which the core walks, copies and guards objects.

    Attributes:
        _owner: The frame that made the object (``core.frames``), or None.
        _lock: Why the object must not be written, or None.
        _marked: Whether some remembered walk has seen the object (``core.epoch``).

    Modules and containers also have ``_flat``: how they were last flattened
    (``core.structure.flatten``), or None.
    """

    __slots__ = ()
    _owner: Any
    _lock: str | None
    _marked: bool

    def _describe(self, encode: Any) -> Any:
        """Returns the object's definition, calling ``encode(child, key)`` for each child."""
        raise NotImplementedError

    @classmethod
    def _allocate(cls, owner: Any, lock: str | None) -> Any:
        """Makes an empty object, to be filled once all objects of a graph exist."""
        raise NotImplementedError

    def _fill(self, definition: Any, decode: Any) -> None:
        """Fills an object from its definition, calling ``decode(child)`` for each child."""
        raise NotImplementedError


class Placeholder:
    """An immutable value that stands where an object belongs (``core.slots``).

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
