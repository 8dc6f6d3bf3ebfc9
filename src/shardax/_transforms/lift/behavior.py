# SPDX-License-Identifier: Apache-2.0
"""What a function does now, as a key.

Two functions, or one at two times, have equal *behavior keys* if they have the same code and
defaults, and closures and globals that hold equal values. A name that was bound again, an item that
was appended or an attribute that was set makes another key. Modules and Variables are no part of
it: where they are reached is, and lifted functions have them as inputs. Attributes of modules and
classes are not compared, and neither are functions of other modules: as for ``jax.jit``, they are
what they were when a program was traced. Whatever may hide a state (a generator, a random
generator, an instance of a class that is written in C) has no key.

A trace may itself write into Python objects: a counter of traces, a list of shapes. What it left
there is no reason to trace again, so it is in keys as *left by a trace*, whatever it is, until
something else is written there.
"""

from __future__ import annotations

import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core.graph.settings import LIBRARIES, Identity
from shardax._core.graph.static import NEUTRAL_ATTRIBUTES, exact_key
from shardax._core.object import Object, Wrapper
from shardax._transforms.lift import arguments as inputs

# What is nested deeper, or has more items, is not compared.
_MOST_DEPTH = 12
_MOST_ITEMS = 64
_MOST_BYTES = 4096  # of a NumPy array, which may be changed in place

_PLAIN = frozenset({bool, int, str, bytes, type(None), type(Ellipsis)})
_FIXED = (
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    np.ufunc,
)
# Packages and types whose instances do the same for as long as they live, or change no result.
_CONSTANT_PACKAGES = frozenset({"jax", "jaxlib", "logging", "typing"})
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANT_TYPES = (type, type(functools.lru_cache(len)), *_LOCKS)
# Packages whose functions depend on no global that a user changes.
_LIBRARIES = LIBRARIES | {"shardax", "optax"}
# Classes written in C whose instances are their items and attributes.
_CONTAINERS = (tuple, list, dict, OrderedDict)
_HOLDERS = (object, types.SimpleNamespace)


class NotComparable(TypeError):
    """A function depends on what cannot be compared at the next call."""


# A way from the functions to a part: of closures and globals the name, of containers the key.
Way = tuple[Hashable, ...]


class Behavior:
    """What functions depend on now."""

    def __init__(self, functions: Sequence[Any], options: Any = None) -> None:
        self.objects: list[Object] = []  # Modules and Variables, each once
        self.closes_over_arrays = False
        self.codes = tuple(map(_code_of, functions))
        self._parts: dict[Way, Hashable] = {}
        self._holders: dict[Way, int] = {}  # the ``id`` of where a part is held
        self._places: dict[int, int] = {}  # by ``id``, of what was met before
        for place, function in enumerate(functions):
            self._visit(function, (place,), 0)
        self._visit(options, ("options",), 0)

    def key(self) -> Hashable:
        """Returns the behavior key."""
        written = _written.get(self.codes)
        if not written:
            return self.codes, tuple(self._parts.items())
        untouched = tuple(
            item for item in self._parts.items() if _root_in(item[0], written) is None
        )
        left = tuple((way, self._content_or_left(way)) for way in written if way in self._parts)
        return self.codes, untouched, left

    def _content(self, way: Way) -> Hashable:
        return tuple(item for item in self._parts.items() if item[0][: len(way)] == way)

    def _content_or_left(self, way: Way) -> Hashable:
        content = self._content(way)
        return "left" if _left.get((self._holders[way], way[-1])) == content else content

    def keys_around_trace(
        self, functions: Sequence[object], options: object = None
    ) -> tuple[Hashable, Hashable]:
        """Returns the keys before and after a trace of these functions."""
        behavior_after = Behavior(functions, options)
        changed = {
            way for way, part in self._parts.items() if behavior_after._parts.get(way, self) != part
        }
        if not changed:
            return self.key(), self.key()
        for table in (_written, _left):
            if len(table) >= _MOST_WRITTEN:
                table.clear()
        ways = {*_written.get(self.codes, ()), *changed}
        roots = (way for way in ways if _root_in(way[:-1], ways) is None)
        _written[self.codes] = tuple(sorted(roots, key=repr))
        key_before = self.key()
        for way in _written[self.codes]:
            if way in behavior_after._parts and behavior_after._content(way) != self._content(way):
                _left[behavior_after._holders[way], way[-1]] = behavior_after._content(way)
        return key_before, behavior_after.key()

    def _visit(self, value, way: Way, holder: int) -> None:
        kind = type(value)
        self._holders[way] = holder
        if kind in _PLAIN:
            self._parts[way] = kind, value
        elif kind is float:
            self._parts[way] = kind, value.hex()
        elif isinstance(value, Object):
            place = self._places.setdefault(id(value), len(self.objects))
            if place == len(self.objects):
                self.objects.append(value)
            self._parts[way] = Object, place  # ``jit`` compares its structure
        elif isinstance(value, _FIXED):
            self._parts[way] = value
        elif isinstance(value, jax.Array):
            self.closes_over_arrays = True
            self._parts[way] = Identity(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes > _MOST_BYTES or value.dtype.hasobject or kind is not np.ndarray:
                raise NotComparable
            self._parts[way] = kind, value.dtype.str, value.shape, value.tobytes()
        elif len(way) > _MOST_DEPTH:
            raise NotComparable
        else:
            self._visit_composite(value, kind, way)

    def _visit_composite(self, value: object, kind: type, way: Way) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value, way)
        elif isinstance(value, types.MethodType):
            self._visit_items(value, enumerate((value.__self__, value.__func__)), way)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if isinstance(value.__self__, (types.ModuleType, type(None))):
                self._parts[way] = value
            else:  # such as the ``append`` of a list
                self._visit_items(value, [(value.__name__, value.__self__)], way)
        elif isinstance(value, functools.partial):
            self._visit_items(value, enumerate((value.func, value.args, value.keywords)), way)
        elif isinstance(value, weakref.ref):
            self._visit_items(value, [("referent", value())], way)
        elif isinstance(value, Wrapper):
            self._visit_items(value, [(value._wrapping(), value.__wrapped__)], way)
        elif isinstance(value, _CONSTANT_TYPES):
            self._parts[way] = Identity(value)
        elif isinstance(value, enum.Enum):
            self._parts[way] = _constant_key(value)
        elif kind.__module__.partition(".")[0] in _CONSTANT_PACKAGES:
            is_by_identity = kind.__eq__ is object.__eq__
            self._parts[way] = Identity(value) if is_by_identity else _exact_key(value)
        elif not self._is_met(value, way):
            self._visit_instance(value, kind, way)

    def _is_met(self, value: object, way: Way) -> bool:
        """Whether a value was met before; it is described only once."""
        place = self._places.setdefault(id(value), -1 - len(self._places))
        met = place != -len(self._places)
        self._parts[way] = type(value), place
        return met

    def _visit_instance(self, value, kind: type, way: Way) -> None:
        """Visits a container or an instance: what it holds now."""
        native = inputs.native_base(kind)
        attributes = inputs.attributes_of(value)
        if native in _CONTAINERS:
            # By the native class: methods of a class of the user may make what they return.
            if native.__len__(value) > _MOST_ITEMS:
                raise NotComparable
            is_dict = issubclass(native, dict)
            items = native.items(value) if is_dict else enumerate(native.__iter__(value))
            self._visit_items(value, items, way)
        elif native in (set, frozenset):
            self._parts[way] = kind, _constant_key(frozenset(value))
        elif native in _HOLDERS:
            if callable(value):
                self._visit(kind.__call__, (*way, "__call__"), 0)
        elif kind.__eq__ is object.__eq__:
            raise NotComparable
        else:
            self._parts[way] = _exact_key(value)
        if len(attributes) > _MOST_ITEMS:
            raise NotComparable
        if attributes:
            self._visit_items(value, attributes.items(), (*way, "__dict__"))

    def _visit_items(
        self, value: object, items: Iterable[tuple[Hashable, object]], way: Way
    ) -> None:
        names: list[Hashable] = []
        for name, item in list(items):
            part = name if type(name) in _PLAIN else _constant_key(name)
            names.append((type(name), part))
            self._visit(item, (*way, part), id(value))
        self._parts[way] = self._parts.get(way, type(value)), *names

    def _visit_function(self, function: types.FunctionType, way: Way) -> None:
        if self._is_met(function, way):
            return
        code, scope = function.__code__, function.__globals__
        self._parts[way] = code
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                raise NotComparable from None
            self._visit(content, (*way, name), id(cell))
        self._visit(function.__defaults__, (*way, "__defaults__"), 0)
        self._visit(function.__kwdefaults__, (*way, "__kwdefaults__"), 0)
        attributes = [item for item in vars(function).items() if item[0] not in NEUTRAL_ATTRIBUTES]
        if attributes:
            self._visit_items(function, attributes, (*way, "__dict__"))
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        closes_over_arrays = self.closes_over_arrays
        for name in inputs.global_names(code):
            if name in scope:
                self._visit_global(scope[name], scope, (*way, name))
        self.closes_over_arrays = closes_over_arrays  # a global lives on by itself

    def _visit_global(self, value: object, scope: Mapping[str, object], way: Way) -> None:
        # Functions of other modules are what they are.
        if isinstance(value, types.FunctionType) and value.__globals__ is not scope:
            self._parts[way] = Identity(value)
            self._holders[way] = id(scope)
        else:
            self._visit(value, way, id(scope))


_MOST_WRITTEN = 1024
# What functions of a code were seen to write, each the way to a part.
_written: dict[Hashable, tuple[Way, ...]] = {}
# What traces left, by the ``id`` of what holds it and the name there.
_left: dict[tuple[int, Hashable], Hashable] = {}


def _root_in(way: Way, ways: Iterable[Way]) -> Way | None:
    """Returns the shortest of some ways that leads to a part."""
    return next((root for root in ways if way[: len(root)] == root), None)


def _code_of(function: object) -> Hashable:
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", None) or Identity(type(function))


def _exact_key(value: object) -> Hashable:
    try:
        return exact_key(value)
    except (TypeError, ValueError):  # ValueError: a view of memory that may be written
        raise NotComparable from None


def _constant_key(value) -> Hashable:
    """Returns the key of a value that holds nothing that may change."""
    if not is_lasting(value):
        raise NotComparable
    return _exact_key(value)


_LASTING = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, np.dtype, np.ufunc)


def is_lasting(value: object, depth: int = 0) -> bool:
    """Whether a static value may be kept: it can hold no model."""
    kind = type(value)
    if kind in _PLAIN or kind in (float, complex) or isinstance(value, _LASTING):
        return True
    if depth > _MOST_DEPTH:
        return False
    if isinstance(value, (tuple, frozenset)):
        parts: Iterable[Any] = value
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:
            return False
        parts = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    else:
        return kind.__module__.partition(".")[0] in ("jax", "jaxlib")  # such as ``jax.nn.relu``
    return all(is_lasting(part, depth + 1) for part in parts)
