# SPDX-License-Identifier: Apache-2.0
"""What a function does now, as a key.

Two functions, or one at two times, have equal *behavior keys* if they have the same code and
defaults, and closures and globals that hold equal values. A name that was bound again, an item that
was appended or an attribute that was set makes another key. Modules and Variables are no part of
it: where they are reached is, and lifted functions have them as inputs. Attributes of modules and
classes are not compared, and neither are functions of other modules: as for ``jax.jit``, they are
what they were when a program was traced. What a trace writes itself, such as a counter of traces,
is taken out of the keys of that code.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardax._core.graph.static import exact_key
from shardax._core.object import Object, Wrapper
from shardax._transforms.lift import arguments as inputs

# What is nested deeper, or has more items, is not compared.
_MOST_DEPTH = 8
_MOST_ITEMS = 64
_MOST_BYTES = 4096  # of a NumPy array, which may be changed in place

_PLAIN = frozenset({bool, int, str, bytes, type(None), type(Ellipsis)})
_FIXED = (types.ModuleType, types.BuiltinFunctionType, np.ufunc)
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "optax", *sys.stdlib_module_names} - {"builtins"})


class NotComparable(Exception):
    """A function depends on what cannot be compared at the next call."""


class Identity:
    """An object by its identity, for as long as it lives."""

    __slots__ = ("_hash", "held")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self.held: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            raise NotComparable from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        held = self.held()
        return held is not None and isinstance(other, Identity) and other.held() is held


# A way from the functions to a part: of closures and globals the name, of containers the key.
Way = tuple[Hashable, ...]


class Behavior:
    """What functions depend on now."""

    def __init__(self, functions: Sequence[Any], options: Any = None) -> None:
        self.objects: list[Object] = []  # Modules and Variables, each once
        self.closes_over_arrays = False
        self.parts: dict[Way, Hashable] = {}
        self.codes = tuple(map(_code_of, functions))
        # What functions of this code were seen to write, such as a counter of traces.
        self._written = _written.get(self.codes, frozenset())
        self._places: dict[int, int] = {}  # by ``id``, of what was met before
        for place, function in enumerate(functions):
            self._visit(function, (place,))
        self._visit(options, ("options",))

    @property
    def key(self) -> Hashable:
        """The behavior key."""
        return self.codes, tuple(self.parts.items())

    def note_writes(self, functions: Sequence[Any], options: Any = None) -> bool:
        """Ignores from now on what a trace changed; returns whether any."""
        # What a function does to objects of Python happens when it is traced, as in JAX. It is no
        # reason to trace it again.
        try:
            parts = Behavior(functions, options).parts
        except NotComparable:  # nor is it at the next call
            return False
        changed = {way for way, part in self.parts.items() if parts.get(way, self) != part}
        if not changed:
            return False
        if len(_written) >= _MOST_CODES:
            _written.clear()
        _written[self.codes] = self._written | changed
        return True

    def _visit(self, value: Any, way: Way) -> None:
        if way in self._written:
            return
        kind = type(value)
        if kind in _PLAIN:
            self.parts[way] = kind, value
        elif kind is float:
            self.parts[way] = kind, value.hex()
        elif isinstance(value, Object):
            place = self._places.setdefault(id(value), len(self.objects))
            if place == len(self.objects):
                self.objects.append(value)
            self.parts[way] = Object, place  # ``jit`` compares its structure
        elif isinstance(value, _FIXED):
            self.parts[way] = value
        elif isinstance(value, jax.Array):
            self.closes_over_arrays = True
            self.parts[way] = Identity(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes > _MOST_BYTES or value.dtype.hasobject:
                raise NotComparable
            self.parts[way] = kind, value.dtype.str, value.shape, value.tobytes()
        elif len(way) > _MOST_DEPTH:
            raise NotComparable
        elif isinstance(value, (tuple, list)):
            self._visit_items(kind, enumerate(value), len(value), way)
        elif isinstance(value, dict):
            names = tuple((type(name), name) for name in value)
            self._visit_items((kind, names), value.items(), len(value), way)
        else:
            self._visit_composite(value, kind, way)

    def _visit_items(
        self, kind: Hashable, items: Iterable[tuple[Hashable, Any]], count: int, way: Way
    ) -> None:
        if count > _MOST_ITEMS:
            raise NotComparable
        self.parts[way] = kind, count
        for name, item in items:
            self._visit(item, (*way, name))

    def _visit_composite(self, value: Any, kind: type, way: Way) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value, way)
        elif isinstance(value, types.MethodType):
            self._visit_items(kind, enumerate((value.__self__, value.__func__)), 2, way)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            self._visit_items(kind, enumerate(parts), 3, way)
        elif isinstance(value, Wrapper):
            parts = (value.__wrapped__,)
            self._visit_items((kind, value._wrapping()), enumerate(parts), 1, way)
        elif _is_ordinary(value):
            self._visit_instance(value, kind, way)
        elif kind.__eq__ is object.__eq__:
            self.parts[way] = Identity(value)
        else:
            try:
                self.parts[way] = kind, exact_key(value)
            except TypeError:
                raise NotComparable from None

    def _met(self, value: Any, way: Way) -> bool:
        """Whether a value was met before; it is described only once."""
        place = self._places.setdefault(id(value), -1 - len(self._places))
        met = place != -len(self._places)
        self.parts[way] = type(value), place
        return met

    def _visit_function(self, function: types.FunctionType, way: Way) -> None:
        if self._met(function, way):
            return
        code, scope = function.__code__, function.__globals__
        self.parts[way] = code
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                raise NotComparable from None
            self._visit(content, (*way, name))
        self._visit(function.__defaults__, (*way, "__defaults__"))
        self._visit(function.__kwdefaults__, (*way, "__kwdefaults__"))
        closes_over_arrays = self.closes_over_arrays
        for name in inputs.global_names(code):
            if name in scope:
                self._visit_global(scope[name], scope, (*way, name))
        self.closes_over_arrays = closes_over_arrays  # a global lives on by itself

    def _visit_global(self, value: Any, scope: Mapping[str, Any], way: Way) -> None:
        # Functions of other modules are what they are.
        if isinstance(value, types.FunctionType) and value.__globals__ is not scope:
            self.parts[way] = Identity(value)
        else:
            self._visit(value, way)

    def _visit_instance(self, value: Any, kind: type, way: Way) -> None:
        """Visits an ordinary instance: what it holds now."""
        if self._met(value, way):
            return
        attributes = vars(value)
        # Instances of shardax are what they hold.
        identity = None if _package(kind) == "shardax" else Identity(value)
        self._visit_items(
            (kind, identity, tuple(attributes)), attributes.items(), len(attributes), way
        )
        if callable(value):
            self._visit(kind.__call__, (*way, "__call__"))


_MOST_CODES = 1024
_written: dict[Hashable, frozenset[Way]] = {}


def _code_of(function: Any) -> Hashable:
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", None) or Identity(type(function))


def _is_ordinary(value: Any) -> bool:
    """Whether a value is an instance of a user's or shardax's class."""
    attributes = getattr(value, "__dict__", None)
    return (
        isinstance(attributes, dict)
        and not isinstance(value, type)
        and _package(type(value)) not in _LIBRARIES
    )


_LASTING = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, np.dtype, np.ufunc)


def is_lasting(value: Any, depth: int = 0) -> bool:
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
        return _package(kind) in ("jax", "jaxlib")  # such as ``jax.nn.relu``
    return all(is_lasting(part, depth + 1) for part in parts)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
