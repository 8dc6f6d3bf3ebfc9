# SPDX-License-Identifier: Apache-2.0
"""What values hold: the search for objects that no walk over a model finds.

A walk finds what stands in attributes, and in containers with a handler. It does not find a layer
inside a function: in a cell that it closes over, a default, an attribute. Such a layer would be
part of no state, gradient, optimizer or checkpoint, and a copy of the model would go on calling the
original. So static values are searched for objects when they are assigned, and whenever a structure
is walked, since a name that a function closes over may be bound later.

What a value holds says Python's garbage collector (``gc.get_referents``), without calling anything
of the user's. Where a part has a name (closed-over names, defaults, attributes, local names of
generators), the error says it. There is no limit of depth or number. The search does not go into
what belongs to the program and not to the model: globals of functions, modules, frames, loggers,
classes of Modules and of libraries. It cannot go into what code in C shows to nobody.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shardax._core._jax import never_changes_closures
from shardax._core.errors import StaticAttributeError, hidden_object
from shardax._core.graph import handlers
from shardax._core.graph.python_values import (
    Way,
    attributes_of,
    is_of_library,
    items_of_array,
    package_of,
    steps_of,
)
from shardax._core.graph.static import PROGRAMS_ATTRIBUTE, Static
from shardax._core.object import Object, Placeholder, Wrapper

# How a part is reached from a value: what it is there, and its name or place. None: it is no step.
Step: TypeAlias = tuple[str, Any] | None
Part: TypeAlias = tuple[Step, Any]

# How many steps an error shows.
_MOST_SHOWN = 6


class HiddenObject(NamedTuple):
    """An object that a value holds."""

    item: Object | Placeholder
    steps: tuple[str, ...]  # how it is reached from the value, in words

    def error(self, value: object, where: str) -> StaticAttributeError:
        """Returns the error of the value, which is, or would be, part of a model."""
        shown = self.steps
        if len(shown) > _MOST_SHOWN:
            between = f"{len(shown) - _MOST_SHOWN} more steps"
            shown = (*shown[: _MOST_SHOWN - 1], between, shown[-1])
        return hidden_object(value, where, self.item, ", there by ".join(shown))


# --- the search -----------------------------------------------------------------------------------

# Types of values that hold nothing, or what belongs to the program.
_ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, bytearray, range, slice),
        *(type(None), type(Ellipsis), type(NotImplemented), np.dtype, np.ufunc),
        *(type(np.dtype(code)) for code in np.typecodes["All"]),
        *(types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, logging.Logger),
        *(types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType),
    }
)


class ObjectSearch:
    """A search through values; what several of them share is looked at once."""

    def __init__(self) -> None:
        # What was looked at, by ``id``.
        self._met: dict[int, Any] = {}

    def held_by(self, value: Any) -> HiddenObject | None:
        """Returns the first object inside of a static value, or None."""
        kind = type(value)
        if kind in _ATOMS or _is_bare(value):
            return None
        if kind is tuple and all(type(item) in _ATOMS for item in value):
            return None

        # An activation of JAX stands in many layers, and never changes if it is JAX's all through.
        is_of_jax = callable(value) and _is_of_jax(value)
        if is_of_jax and _is_known_empty(value):
            return None

        is_first = not self._met
        hidden = self._search([(None, value)])
        if hidden is None and is_of_jax and is_first and all(map(_is_of_jax, self._met.values())):
            _note_empty(value)
        return hidden

    def beside_children(self, value: object, config: object) -> HiddenObject | None:
        """Returns the first object in a container that is none of its children, or None.

        Args:
            value: A container, of which a walk finds the children.
            config: All that the container is besides, by its handler.
        """
        return self._search(_parts_beside_children(value, config))

    def hidden_in(self, value: object) -> HiddenObject | None:
        """Returns the first object in an attribute's value that a walk does not find, or None."""
        handler = handlers.handler_of(value)
        if handler.is_object or handler is handlers.PLACEHOLDER:
            return None
        if not handlers.has_parts(value):
            return self.held_by(value)

        hidden = self.beside_children(value, handler.config(value))
        for _, child in handler.children(value):
            hidden = hidden or self.hidden_in(child)
        return hidden

    def _search(self, starts: Iterable[Part]) -> HiddenObject | None:
        """Returns the object that is nearest to the starts, or None."""
        waiting = collections.deque[tuple[Any, Way]](
            (value, (None, step)) for step, value in starts
        )
        met = self._met
        while waiting:
            value, way = waiting.popleft()
            if isinstance(value, _SEARCHED_FOR):
                return HiddenObject(value, _words_of(way))

            if id(value) in met:
                continue
            met[id(value)] = value
            for step, part in _parts_of(value):
                if type(part) not in _ATOMS:
                    waiting.append((part, (way, step)))
        return None


_SEARCHED_FOR = (Object, Placeholder)


def _words_of(way: Way) -> tuple[str, ...]:
    """Returns the steps of a way in words."""
    steps: list[Step] = steps_of(way)
    return tuple(
        step[0] if step[1] is None else f"{step[0]} {step[1]!r}"
        for step in steps
        if step is not None
    )


def _is_bare(value: Any) -> bool:
    """Whether a value is a function of its code and its globals alone."""
    return (
        type(value) is types.FunctionType
        and value.__closure__ is None
        and value.__defaults__ is None
        and value.__kwdefaults__ is None
        and not value.__dict__
    )


# Callables of JAX in which nothing was found, by ``id``.
_empty: dict[int, weakref.ref[Any]] = {}


def _is_known_empty(value: object) -> bool:
    known = _empty.get(id(value))
    return known is not None and known() is value


def _note_empty(value: object) -> None:
    key = id(value)
    with contextlib.suppress(TypeError):  # it cannot be known when it is gone
        _empty[key] = weakref.ref(value, lambda _: _empty.pop(key, None))


def _is_of_jax(value: Any) -> bool:
    """Whether a value is a callable of JAX, or part of one that never changes."""
    kind = type(value)
    if kind is types.FunctionType:
        return never_changes_closures(value)
    if kind is tuple:
        return all(map(_is_of_jax, value))
    return kind in _ATOMS or kind is types.CellType or package_of(kind) in ("jax", "jaxlib")


# --- parts of values, by their class --------------------------------------------------------------

PartsFunction: TypeAlias = Callable[[Any], Iterable[Part]]

_parts_by_type: weakref.WeakKeyDictionary[type, PartsFunction] = weakref.WeakKeyDictionary()


def _parts_of(value: object) -> Iterable[Part]:
    """Returns everything that a value shows of what it holds."""
    kind = type(value)
    parts = _parts_by_type.get(kind)
    if parts is None:
        parts = _parts_by_type[kind] = _find_parts(kind)
    return parts(value)


def _find_parts(kind: type) -> PartsFunction:
    """Returns the function that lists the parts of instances of a class."""
    for known, parts in _PARTS_OF_KNOWN:
        if issubclass(kind, known):
            return parts
    return _parts_of_jax if package_of(kind) in ("jax", "jaxlib") else _parts_of_instance


def set_aside(kind: type) -> None:
    """Leaves instances of a class, which describe models and hold none, out of searches."""
    _parts_by_type[kind] = _no_parts


def _no_parts(value: object) -> Iterable[Part]:
    return ()


def _named(what: str, parts: Mapping[str, Any]) -> list[Part]:
    return [((what, name), part) for name, part in list(parts.items())]


def _parts_of_instance(value: object) -> Iterable[Part]:
    """Returns the attributes, by name, and all else that the garbage collector knows."""
    parts = _named("the attribute", attributes_of(value))
    parts.extend((("an item", None), part) for part in gc.get_referents(value))
    return parts


def _parts_of_function(function: types.FunctionType) -> Iterable[Part]:
    # An optimizer is a hundred such functions, and all are looked at in every walk: so each way to
    # a part is asked for only where there is one.
    parts: list[Part] = []
    code = function.__code__
    if function.__closure__ is not None:
        for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
            try:
                parts.append((("the closed-over name", name), cell.cell_contents))
            except ValueError:  # a name that is not bound yet: a later walk looks again
                continue

    if function.__defaults__ is not None:
        first = code.co_argcount - len(function.__defaults__)
        names = code.co_varnames[first:]
        for name, default in zip(names, function.__defaults__, strict=False):
            parts.append((("the default of", name), default))
    if function.__kwdefaults__ is not None:
        parts.extend(_named("the default of", function.__kwdefaults__))

    if function.__dict__:
        for name, part in list(function.__dict__.items()):
            if name != PROGRAMS_ATTRIBUTE:  # programs hold no object of the user's
                parts.append((("the attribute", name), part))
    return parts


def _parts_of_generator(generator: Any) -> Iterable[Part]:
    parts: list[Part] = []
    for name in ("gi_frame", "cr_frame", "ag_frame"):
        frame = getattr(generator, name, None)
        if frame is not None:
            parts.extend(_named("the local name", frame.f_locals))
    return parts


def _parts_of_jax(value: Any) -> Iterable[Part]:
    """Returns the function that JAX made a callable of, and its rules."""
    # Its other instances are large (programs, meshes) and hold nothing of the user's.
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is None or not callable(value):
        return ()
    attributes = attributes_of(value)
    public = {name: part for name, part in attributes.items() if not name.startswith("_")}
    return [(("the attribute", "__wrapped__"), wrapped), *_named("the attribute", public)]


def _parts_of_remembering(function: Any) -> Iterable[Part]:
    return [(("the attribute", "__wrapped__"), function.__wrapped__)]  # and not what it remembers


def _parts_of_array(array: np.ndarray[Any, Any]) -> Iterable[Part]:
    parts = [(("an item", None), item) for item in items_of_array(array)]
    return [*parts, *_parts_of_instance(array)]


def _parts_of_static(static: Static) -> Iterable[Part]:
    return [(None, static.value)]


def _parts_of_class(kind: type) -> Iterable[Part]:
    """Returns what a class of the user's own has, but no class of Modules."""
    if issubclass(kind, Object) or is_of_library(kind):
        return ()
    return [*_named("the class attribute", vars(kind)), *((None, base) for base in kind.__bases__)]


# --- parts of what a walk looks into --------------------------------------------------------------


def _parts_beside_children(value: Any, config: object) -> Iterable[Part]:
    """Returns what a container, of which a walk finds the children, is besides them."""
    if isinstance(config, handlers.NodeType):
        return [(("its static part", None), config.static.value)]
    if isinstance(config, Static):  # the function of a method
        return [(("the attribute", "__func__"), config.value)]
    if isinstance(value, Wrapper):
        return _parts_beside_function(value)

    if not isinstance(value, (tuple, list, dict, functools.partial)):
        return []  # what its handler lists is all that the value is
    parts = _named("the attribute", attributes_of(value))
    if isinstance(value, dict):
        parts.extend((("a key", None), key) for key in list(dict.keys(value)))
    return parts


def _parts_of_wrapper(wrapper: Wrapper) -> Iterable[Part]:
    return [
        (("the function that it runs", None), wrapper.function),
        *_parts_beside_function(wrapper),
    ]


def _parts_beside_function(wrapper: Wrapper) -> Iterable[Part]:
    # ``functools.wraps`` writes ``__wrapped__``, which is only shown.
    attributes = dict(getattr(wrapper, "__dict__", {}))
    for shown in ("__wrapped__", PROGRAMS_ATTRIBUTE):
        attributes.pop(shown, None)
    return [*_named("the option", wrapper._options_held()), *_named("the attribute", attributes)]


# Of instances of known classes; the first that fits decides.
_PARTS_OF_KNOWN: tuple[tuple[Any, PartsFunction], ...] = (
    (types.FunctionType, _parts_of_function),
    (type, _parts_of_class),
    (Wrapper, _parts_of_wrapper),
    (Static, _parts_of_static),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _parts_of_generator),
    (type(functools.lru_cache(len)), _parts_of_remembering),
    (np.ndarray, _parts_of_array),
    ((np.dtype, jax.Array), _no_parts),
)
