# SPDX-License-Identifier: Apache-2.0
"""What values hold: the search for objects that no walk over a model finds.

A walk finds what stands in attributes, and in containers with a handler. It does not find a layer
inside a function: in a cell that it closes over, a default, an attribute. Such a layer would be
part of no state, gradient, optimizer or checkpoint, and a copy of the model would go on calling the
original. So static values are searched for objects when they are assigned, and whenever a structure
is walked, since a name that a function closes over may be bound later.

Looked at is what Python itself shows, without calling anything of the user's: cells, defaults and
attributes of functions; what methods and partials are bound to; items of containers; local names of
generators; attributes in ``__dict__`` and ``__slots__``; attributes of the user's own classes.
There is no limit of depth or number. The search does not go into what belongs to the program and
not to the model: globals of functions, modules, loggers, classes of Modules and of libraries. It
cannot go into what code in C shows to nobody.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from shardax._core._jax import never_changes_closures
from shardax._core.errors import StaticAttributeError, hidden_object
from shardax._core.graph import handlers
from shardax._core.graph.python_values import (
    MAPPINGS,
    SEQUENCES,
    SETS,
    Way,
    attributes_of,
    is_of_library,
    items_of_array,
    items_of_mapping,
    items_of_sequence,
    items_of_set,
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
        *(types.ModuleType, types.CodeType, logging.Logger),
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
    parts = _PARTS_OF_NATIVE.get(kind) or _parts_by_type.get(kind)
    if parts is None:
        parts = _parts_by_type[kind] = _find_parts(kind)
    return parts(value)


def _find_parts(kind: type) -> PartsFunction:
    """Returns the function that lists the parts of instances of a class."""
    for known, parts in _PARTS_OF_KNOWN:
        if issubclass(kind, known):
            return parts
    if issubclass(kind, Iterator) and package_of(kind) in _WITH_ITERATORS:
        return _parts_of_iterator
    if package_of(kind) in ("jax", "jaxlib"):
        return _parts_of_jax
    return _parts_of_instance


def set_aside(kind: type) -> None:
    """Leaves instances of a class, which describe models and hold none, out of searches."""
    _parts_by_type[kind] = _no_parts


def _no_parts(value: object) -> Iterable[Part]:
    return ()


def _named(what: str, parts: Mapping[str, Any]) -> list[Part]:
    return [((what, name), part) for name, part in list(parts.items())]


def _parts_beside_children(value: Any, config: object) -> Iterable[Part]:
    """Returns what a container, of which a walk finds the children, is besides them."""
    if isinstance(config, handlers.NodeType):
        return [(("its static part", None), config.static.value)]
    if isinstance(config, Static):  # the function of a method
        return [(("the attribute", "__func__"), config.value)]
    if isinstance(value, Wrapper):
        return _parts_beside_function(value)

    if type(value) in _PLAIN_CONTAINERS:
        keys = value if type(value) is dict else ()
        return [(("a key", None), key) for key in keys]
    if not isinstance(value, (tuple, list, dict, functools.partial)):
        return []  # what its handler lists is all that the value is
    parts = _named("the attribute", attributes_of(value))
    if isinstance(value, dict):
        parts.extend((("a key", None), key) for key in list(dict.keys(value)))
    return parts


# --- parts of callables ---------------------------------------------------------------------------


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


def _parts_of_cell(cell: types.CellType) -> Iterable[Part]:
    try:
        return [(None, cell.cell_contents)]
    except ValueError:  # as above
        return ()


def _parts_in_attributes(*names: str) -> PartsFunction:
    """Returns the function that lists those of some attributes which a value has."""
    return lambda value: [
        (("the attribute", name), getattr(value, name)) for name in names if hasattr(value, name)
    ]


_parts_of_method = _parts_in_attributes("__self__", "__func__")
_accessors_of = _parts_in_attributes("__func__", "fget", "fset", "fdel")


def _parts_of_partial(partial: functools.partial[Any]) -> Iterable[Part]:
    return [
        (("the attribute", "func"), partial.func),
        *((("the argument", index), argument) for index, argument in enumerate(partial.args)),
        *_named("the argument", partial.keywords),
        *_parts_of_instance(partial),
    ]


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


def _parts_of_call(call: Any) -> Iterable[Part]:
    # An ``operator.methodcaller`` shows its arguments to ``pickle`` alone.
    return [(("the arguments", None), part) for part in call.__reduce__()[1:]]


def _parts_of_descriptor(descriptor: Any) -> Iterable[Part]:
    return [*_accessors_of(descriptor), *_parts_of_instance(descriptor)]


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


# --- parts of containers --------------------------------------------------------------------------


def _parts_of_dict(value: Any) -> Iterable[Part]:
    parts: list[Part] = []
    for key, item in items_of_mapping(value):
        parts.append((("a key", None), key))
        entry = ("the entry", key) if type(key) in _ATOMS else ("an entry", None)
        parts.append((entry, item))
    if isinstance(value, collections.defaultdict):
        parts.append((("the attribute", "default_factory"), value.default_factory))
    parts.extend(_parts_of_instance(value))
    return parts


def _parts_of_sequence(value: Any) -> Iterable[Part]:
    items = items_of_sequence(value)
    parts: list[Part] = [(("the item", index), item) for index, item in enumerate(items)]
    parts.extend(_parts_of_instance(value))
    return parts


def _parts_of_set(value: Any) -> Iterable[Part]:
    parts = [(("an item", None), item) for item in items_of_set(value)]
    return [*parts, *_parts_of_instance(value)]


def _parts_of_dict_view(view: Iterable[object]) -> Iterable[Part]:
    return [(("an item", None), item) for item in list(view)]


def _parts_of_array(array: np.ndarray[Any, Any]) -> Iterable[Part]:
    parts = [(("an item", None), item) for item in items_of_array(array)]
    return [*parts, *_parts_of_instance(array)]


def _parts_of_iterator(iterator: object) -> Iterable[Part]:
    # Iterators of Python itself show what they iterate over to the garbage collector alone.
    return [(("what it iterates over", None), part) for part in gc.get_referents(iterator)]


def _parts_of_static(static: Static) -> Iterable[Part]:
    return [(None, static.value)]


# --- parts of classes and their instances ---------------------------------------------------------


def _parts_of_class(kind: type) -> Iterable[Part]:
    """Returns what a class of the user's own has; it may derive from others."""
    if not _is_searched(kind):
        return ()
    return [*_named("the class attribute", vars(kind)), *((None, base) for base in kind.__bases__)]


def _parts_of_instance(value: object) -> Iterable[Part]:
    kind = type(value)
    if kind in _PLAIN_CONTAINERS:
        return ()
    parts = _named("the attribute", attributes_of(value))
    if _is_searched(kind):
        parts.append((None, kind))
    return parts


_searched: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _is_searched(kind: type) -> bool:
    """Whether a class is one of the user's own, and no class of Modules."""
    known = _searched.get(kind)
    if known is None:
        known = _searched[kind] = not (issubclass(kind, Object) or is_of_library(kind))
    return known


# --- which function lists the parts of which class ------------------------------------------------

_PLAIN_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
# Packages of Python's own iterators.
_WITH_ITERATORS = frozenset({"builtins", "itertools", "collections", "_collections"})

# Of the most frequent classes, which live as long as Python.
_PARTS_OF_NATIVE: dict[type, PartsFunction] = {
    types.FunctionType: _parts_of_function,
    types.MethodType: _parts_of_method,
    tuple: _parts_of_sequence,
    list: _parts_of_sequence,
    dict: _parts_of_dict,
}

# Of instances of known classes; the first that fits decides.
_PARTS_OF_KNOWN: tuple[tuple[Any, PartsFunction], ...] = (
    (types.CellType, _parts_of_cell),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _parts_of_method),
    (functools.partial, _parts_of_partial),
    (Wrapper, _parts_of_wrapper),
    (Static, _parts_of_static),
    ((staticmethod, classmethod, property), _parts_of_descriptor),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _parts_of_generator),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), _parts_of_call),
    (MAPPINGS, _parts_of_dict),
    (SEQUENCES, _parts_of_sequence),
    (SETS, _parts_of_set),
    ((type({}.keys()), type({}.values()), type({}.items())), _parts_of_dict_view),
    (np.ndarray, _parts_of_array),
    (np.dtype, _no_parts),
    (jax.Array, _no_parts),
    (type, _parts_of_class),
)
