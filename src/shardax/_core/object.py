# SPDX-License-Identifier: Apache-2.0
"""Objects with identity, and the structure epoch.

An *object* is a Variable, a Module or a tracked container. Two names for one object are one object
everywhere: in transforms, in checkpoints, in gradients. Everything else in a model is a static
value, or an immutable container of objects and static values (``_core.graph.handlers``).

Walking a model on every call is what makes stateful libraries slow. So a walk *marks* every object
that it meets, and its result is kept together with the *epoch* at which it began. A structural
write to a marked object (an attribute of another kind, a changed container or metadata) advances
the epoch; a value written into a Variable does not, nor does building a new model, whose objects
are not marked yet. The result of a walk is valid exactly while the epoch is the one it began at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

if TYPE_CHECKING:
    from shardax._core.frames import Frame

# What a walk does with a child, given its key in the object; returns what stands for the child.
Encode: TypeAlias = Callable[[Any, Hashable], Any]
# The inverse: returns the child.
Decode: TypeAlias = Callable[[Any], Any]


def _no_renderer() -> NoReturn:
    raise LookupError("Nothing draws objects: shardax/__init__.py has not been run.")


# Returns the module that has ``mimebundle``, ``treescope_rendering`` and ``ndarray_adapter``. The
# package's face sets it, because rendering is above the core; it is imported on first use.
renderer: Callable[[], Any] = _no_renderer


class Shown:
    """Base of what notebooks and treescope show by the renderer."""

    __slots__ = ()

    # This protocol and not _repr_html_, which treescope looks for on everything inside a drawing.
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
        return renderer().mimebundle(self)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return renderer().treescope_rendering(self, path, subtree_renderer)


class ShownArray(Shown):
    """Base of arrays of one's own, which notebooks show as this library shows arrays.

    treescope draws their numbers (``treescope.render_array``) by ``dims`` and ``data``.

    Example:
        >>> import shardax as sx
        >>> from shardax import extend
        >>> isinstance(sx.named.ones({"batch": 2}), extend.ShownArray)
        True
    """

    __slots__ = ()

    def __treescope_ndarray_adapter__(self) -> Any:
        return renderer().ndarray_adapter()


class Object(Shown):
    """Base of everything with identity: Variables, Modules and tracked containers.

    Functions of JAX that stop above objects are given ``is_leaf=lambda leaf: isinstance(leaf,
    extend.Object)``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> values = [sx.Param(jnp.ones(2)), sx.List([]), jnp.ones(2)]
        >>> [isinstance(value, extend.Object) for value in values]
        [True, True, False]
    """

    __slots__ = ()
    _owner: Frame | None  # the frame that made the object (_core.frames)
    _lock: str | None  # why the object must not be written, or None
    _marked: bool  # whether the result of a walk that met the object is kept
    # Modules and containers also have _flat: how they were last flattened, or None.

    def _flatten(self, encode: Encode) -> Any:
        """Returns the object's definition, calling ``encode(child, key)`` for each child."""
        raise NotImplementedError

    @classmethod
    def _allocate(cls, owner: Frame | None, lock: str | None) -> Self:
        """Makes an empty object, to be filled by ``_unflatten``."""
        raise NotImplementedError

    def _unflatten(self, definition: Any, decode: Decode) -> None:
        """Fills an object from its definition, calling ``decode(child)`` for each child."""
        raise NotImplementedError


class Placeholder:
    """Immutable stand-in for an object: configuration that walks find like objects."""

    __slots__ = ()


class Wrapper:
    """Callable around another one, such as a compiled bound method.

    Where it stands in a model, a copy of the model has a wrapper of its own around its own objects.
    What it runs by is in slots: ``functools.wraps`` may write ``__wrapped__`` and other attributes
    of the instance, which are only shown.
    """

    __slots__ = ()
    function: Any  # the callable that it runs

    def _wrapping(self) -> Hashable:
        """Returns what the wrapper adds, as hashable configuration."""
        raise NotImplementedError

    def _maker(self) -> Callable[[Any], Any]:
        """Returns what makes wrappers like this one around other callables.

        It refers to no callable itself, since structures that are remembered have it. The callable
        may also be the hole that ``partition`` leaves of one.
        """
        raise NotImplementedError

    def _options_held(self) -> Mapping[str, Any]:
        """Returns what the wrapper holds besides the function, by name."""
        return {}

    @property
    def _title(self) -> str:
        """What drawings of models call the wrapper."""
        return type(self).__name__


class StructureEpoch:
    """Counter of structural changes of marked objects."""

    def __init__(self) -> None:
        self.current = 0
        self._hooks: list[Callable[[tuple[object, ...]], None]] = []
        # A lost increment could bring back an epoch at which an older walk was remembered.
        self._lock = threading.Lock()

    def on_advance(self, hook: Callable[[tuple[object, ...]], None]) -> None:
        """Has ``hook(changed)`` called after every advance."""
        self._hooks.append(hook)

    def advance(self, *changed: object) -> None:
        """Declares every remembered walk out of date, and says what changed."""
        with self._lock:
            self.current += 1
        for hook in self._hooks:
            hook(changed)


epoch = StructureEpoch()
