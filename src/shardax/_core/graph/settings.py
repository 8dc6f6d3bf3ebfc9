# SPDX-License-Identifier: Apache-2.0
"""Keys of static values that are changed in place.

A *settings object* is an instance of a class of the user's own which is no configuration by value
(no frozen dataclass, no named tuple, no enum). Python compares it by identity, or by a method of
its class, and either way the object that a program was compiled for equals itself, whatever was
assigned to its attributes since. So its *settings key* has its attributes as well, those in
``__dict__`` and those in ``__slots__``, at every depth: a settings object in an attribute counts by
the same rule, and lists, dicts, sets and NumPy arrays in one count by what they hold.

By identity alone count: arrays of JAX, which do not change; Modules and Variables, which are inputs
of a program where it uses them; functions, classes, modules; and instances of
JAX, NumPy, shardax and the standard library (meshes, policies, loggers, locks). What holds a state
that cannot be read (a view of memory, a container written in C) has no key.

A user's object is asked for nothing: attributes are read by the descriptors of its class, and
decisions are made by its type. So hooks such as ``__getattr__`` never run.

A trace may itself write into a settings object: a counter of traces, a cached property. What the
trace wrote is no reason to trace again. So an attribute that holds just that is in keys by the
number of the *trace's write*, whatever it holds, until something else is written there. But an
object that compares itself by value is another value then.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import enum
import functools
import hashlib
import itertools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.python_values import (
    Way,
    attributes_of,
    has_attributes,
    is_of_library,
    items_of_array,
    items_of_mapping,
    items_of_sequence,
    items_of_set,
    native_base,
    package_of,
    steps_of,
)
from shardax._core.graph.static import (
    Identity,
    Static,
    exact_key,
    identity_of,
    is_plain_frozen_dataclass,
)
from shardax._core.object import Object

# Libraries whose instances without a hash are compared by identity.
_BY_IDENTITY = frozenset({"jax", "jaxlib", "shardax"})

# Types of values that never hold a settings object; of functions the exact key decides.
_LEAF_TYPES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, slice, type),
        *(type(None), type(Ellipsis), type(NotImplemented), np.dtype, np.ufunc),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    }
)
# Types of values that are changed in place and count by what they hold.
_CONTENT_TYPES = (
    *(list, dict, set, bytearray),
    *(collections.deque, types.MappingProxyType, np.ndarray),
)
# A NumPy array with more bytes is in a key by a digest.
_MOST_BYTES = 4096


class IncomparableError(TypeError):
    """A settings object holds what cannot be compared at the next call."""


def _incomparable(way: Way, value: object) -> IncomparableError:
    path = format_path(tuple(steps_of(way)))
    return IncomparableError(
        f"it counts by the values of its attributes, but a change of the {type(value).__name__} at "
        f"its {path} could not be noticed: such a value cannot be compared "
        f"with what it was. Keep numbers, strings, tuples, lists, dicts or NumPy arrays there"
    )


def incomparable_attribute(kind: type, where: str, error: IncomparableError) -> str:
    """Returns the text of the error of a static value."""
    return (
        f"The {kind.__name__} {where} is static configuration; {error}. Or make {kind.__name__} "
        f"a sx.Module, which may hold arrays and what changes, or a frozen dataclass."
    )


# What a value or attribute holds: a flat sequence, each container before its parts, so that no
# depth is too deep for Python. Other settings objects are in it by their identity.
_Content = tuple[Hashable, ...]


class _SettingsEntry(NamedTuple):
    """A settings object and what its attributes hold."""

    identity: Identity
    # The content of each by its name, or the number of a trace's write.
    attributes: tuple[tuple[str, Hashable], ...]


class SettingsKey:
    """The key of what is, or holds, settings objects."""

    __slots__ = ("_compared", "_hash", "content", "entries", "ways")

    def __init__(
        self, content: _Content, entries: Sequence[_SettingsEntry], ways: Sequence[Way] = ()
    ) -> None:
        self.content = content  # of the value itself
        self.entries = tuple(entries)
        self.ways = ways  # how each entry is reached, for messages; not compared
        self._compared = (content, self.entries)
        self._hash = hash(self._compared)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, SettingsKey):
            return NotImplemented
        return self._hash == other._hash and self._compared == other._compared

    def changes(self, later: SettingsKey) -> Iterator[Path]:
        """Yields the path of each attribute that a later key has otherwise."""
        before = {entry.identity: dict(entry.attributes) for entry in self.entries}
        for entry, way in zip(later.entries, later.ways, strict=True):
            old = before.get(entry.identity)
            if old is None:
                continue
            new = dict(entry.attributes)
            for name in dict.fromkeys([*old, *new]):
                if old.get(name) != new.get(name):
                    yield (*steps_of(way), name)


def settings_key(value: object) -> Hashable:
    """Returns the exact key of a static value, settings objects expanded.

    Raises:
        IncomparableError: If a settings object holds what cannot be compared.
        TypeError: If the value is not hashable.
    """
    if type(value) in _LEAF_TYPES:
        return exact_key(value)

    reader = _SettingsReader()
    content = reader.read(value, None, inside=False)
    if not reader.changeable:
        return exact_key(value)

    reader.read_waiting()
    return SettingsKey(content, reader.entries, reader.ways)


def settings_static(value: object) -> Static:
    """Returns a static value that compares by its settings key."""
    return Static(value, settings_key(value))


class Setting(NamedTuple):
    """What is, or holds, settings objects, and its key then."""

    path: Path
    value: Any
    key: SettingsKey


def settings_among(statics: Iterable[Static]) -> list[Setting]:
    """Returns those static values that are, or hold, settings objects."""
    return [
        Setting((), static.value, static.key)
        for static in statics
        if isinstance(static.key, SettingsKey)
    ]


def have_changed(settings: Iterable[Setting]) -> bool:
    """Whether a settings object holds something else than its key says."""
    try:
        return any(settings_key(setting.value) != setting.key for setting in settings)
    except TypeError:  # what cannot be compared: the walk that follows says where
        return True


class _SettingsReader:
    """Reads a value and every settings object that it leads to."""

    def __init__(self) -> None:
        self.changeable = False  # whether something was met that is changed in place
        self.entries: list[_SettingsEntry] = []
        self.ways: list[Way] = []
        self._waiting: list[tuple[Any, Identity, Way]] = []
        self._met: set[int] = set()  # by ``id``, settings objects that have an entry, or will

    def read_waiting(self) -> None:
        """Makes the entries of settings objects that were met."""
        for value, identity, way in self._waiting:  # grows while it is read
            writes = _writes_into(value)
            attributes: list[tuple[str, Hashable]] = []
            for name, item in attributes_of(value).items():
                content: Hashable = self.read(item, (way, name), inside=True)
                write = writes.get(name)
                if write is not None and write.content == content:
                    content = write.number
                attributes.append((name, content))
            self.entries.append(_SettingsEntry(identity, tuple(attributes)))
            self.ways.append(way)

    def read(self, value: object, way: Way, *, inside: bool) -> _Content:
        """Returns the content of a value."""
        content: list[Hashable] = []
        index_by_id: dict[int, int] = {}  # where in this content something was met
        stack: list[tuple[Any, Way]] = [(value, way)]
        while stack:
            item, item_way = stack.pop()
            if id(item) in index_by_id:
                content.append(_Again(index_by_id[id(item)]))
                continue

            label, parts = self._describe(item, item_way, inside)
            # A tuple made anew equals the one before, whether or not its parts are one object.
            if parts and not issubclass(type(item), (tuple, frozenset)):
                index_by_id[id(item)] = len(content)
            content.append(label)
            stack.extend((part, (item_way, step)) for step, part in reversed(parts))
        return tuple(content)

    def _describe(self, value: Any, way: Way, inside: bool) -> _Description:
        """Returns what a value is besides its parts, and its parts."""
        kind = type(value)

        # What never changes, or counts by identity.
        if kind is types.FunctionType and inside:
            # One that was made anew from the same code may read other settings.
            return identity_of(value), ()
        if kind in _LEAF_TYPES or issubclass(kind, (type, enum.Enum)):
            return exact_key(value), ()
        if issubclass(kind, Object):  # used without being passed, it is an input of the program
            return (identity_of(value) if inside else exact_key(value)), ()

        # What counts by its parts, and does not change itself.
        if kind is types.MethodType:
            return self._describe_method(value, inside)
        if issubclass(kind, tuple):
            return self._with_attributes(
                (kind, len(value)), value, enumerate(tuple.__iter__(value))
            )
        if issubclass(kind, frozenset):
            return self._describe_set(value)
        if issubclass(kind, functools.partial):
            named = value.keywords.items()
            parts = [("func", value.func), *enumerate(value.args), *named]
            return (kind, len(value.args), *value.keywords), parts
        if is_plain_frozen_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return (kind,), [(name, object.__getattribute__(value, name)) for name in names]

        # What is changed in place.
        if issubclass(kind, _CONTENT_TYPES):
            if not inside:
                hash(value)  # raises TypeError, but for a subclass with a hash
                self.changeable = True
            return self._describe_content(value, kind)

        if is_of_library(kind):
            return self._describe_of_library(value, way, inside)
        return self._describe_instance(value, kind, way, inside)

    def _describe_method(self, value: types.MethodType, inside: bool) -> _Description:
        holder = value.__self__
        kind = type(holder)
        if issubclass(kind, (type, types.ModuleType)) or (issubclass(kind, Object) and not inside):
            return exact_key(value), ()
        parts = [("__self__", holder), ("__func__", value.__func__)]
        return (types.MethodType, identity_of(holder)), parts

    def _describe_set(self, value: Any) -> _Description:
        items = items_of_set(value)
        if all(type(item) in _LEAF_TYPES for item in items):
            return (type(value), frozenset(map(exact_key, items))), ()
        return (type(value), len(items)), list(enumerate(items))

    def _describe_content(self, value: Any, kind: type) -> _Description:
        if issubclass(kind, np.ndarray):
            return self._describe_array(value, kind)
        if issubclass(kind, bytearray):
            return self._with_attributes((kind, bytes(value)), value)
        if issubclass(kind, set):
            label, parts = self._describe_set(value)
            return self._with_attributes(label, value, parts)
        if issubclass(kind, (dict, types.MappingProxyType)):
            pairs = items_of_mapping(value)
            keys = [(position, key) for position, (key, _) in enumerate(pairs)]
            return self._with_attributes((kind, len(pairs)), value, [*keys, *pairs])
        items = items_of_sequence(value)
        return self._with_attributes((kind, len(items)), value, enumerate(items))

    def _describe_array(self, value: np.ndarray[Any, Any], kind: type) -> _Description:
        label = (kind, value.dtype, value.shape)
        if value.dtype.hasobject:
            return self._with_attributes(label, value, enumerate(items_of_array(value)))
        content = np.ndarray.tobytes(value)
        if len(content) > _MOST_BYTES:
            content = hashlib.blake2b(content).digest()
        return self._with_attributes((*label, content), value)

    def _describe_of_library(self, value: object, way: Way, inside: bool) -> _Description:
        kind = type(value)
        if not inside:
            return exact_key(value), ()
        if issubclass(kind, weakref.ref):
            return identity_of(value), ()
        try:
            return exact_key(value), ()
        except (TypeError, ValueError):  # ValueError: a view of memory that may be written
            if package_of(kind) in _BY_IDENTITY:
                return identity_of(value), ()
        if has_attributes(kind) and native_base(kind) in (object, types.SimpleNamespace):
            return self._with_attributes((kind,), value)
        raise _incomparable(way, value)

    def _describe_instance(self, value: object, kind: type, way: Way, inside: bool) -> _Description:
        """Describes an instance of a class of the user's own."""
        # A settings object: it is in the content by identity, and has an entry for its attributes.
        if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
            identity = identity_of(value)
            self.changeable |= has_attributes(kind)
            if id(value) not in self._met:
                self._met.add(id(value))
                self._waiting.append((value, identity, way))
            return identity, ()

        # An instance that compares itself by a method of its class.
        if not inside:
            hash(value)  # raises TypeError for what cannot be a static value
        native = native_base(kind)
        if native is object and has_attributes(kind):
            # Its own comparison would find the remembered object equal to itself.
            self.changeable = True
            return self._with_attributes((kind,), value)
        if kind.__hash__ is None:
            raise _incomparable(way, value)

        # What is written in C and is not of Python itself may compare itself to something else than
        # a boolean, as tensors do.
        is_pythons = native is object or package_of(native) == "builtins" or not inside
        label = exact_key(value) if is_pythons else identity_of(value)
        return self._with_attributes(label, value)

    def _with_attributes(
        self, label: Hashable, value: object, parts: Iterable[tuple[Any, Any]] = ()
    ) -> _Description:
        """Adds the attributes of an instance to its parts."""
        attributes = attributes_of(value)
        if not attributes:
            return label, list(parts)
        self.changeable = True
        return (label, *attributes), [*parts, *attributes.items()]


# What a value is besides its parts, and (step, part) of each.
_Description = tuple[Hashable, Sequence[tuple[Any, Any]]]


class _Again(NamedTuple):
    """A part of a content that was met before."""

    # A tuple's method of this name has no use here.
    index: int  # in the content  # pyright: ignore[reportIncompatibleMethodOverride]


# --- what traces write ----------------------------------------------------------------------------


class _WriteNumber(NamedTuple):
    """Stands in a key for what a trace wrote."""

    number: int


class _TraceWrite(NamedTuple):
    """What the last trace that wrote an attribute wrote there."""

    content: Hashable
    # Stays from trace to trace, so that programs of one object do not call for each other's traces;
    # another one where something else was written before the trace.
    number: _WriteNumber


class _TraceWrites(NamedTuple):
    """What traces wrote into an object."""

    holder: weakref.ref[Any]
    by_attribute: dict[str, _TraceWrite]


_NO_WRITES: dict[str, _TraceWrite] = {}
_trace_writes: dict[int, _TraceWrites] = {}  # by ``id`` of the object
# With the callbacks of weak references in it, which use this module.
atexit.register(_trace_writes.clear)
_write_numbers = itertools.count()


def _writes_into(value: object) -> dict[str, _TraceWrite]:
    """Returns what traces wrote into an object, by attribute."""
    writes = _trace_writes.get(id(value))
    if writes is None or writes.holder() is not value:
        return _NO_WRITES
    return writes.by_attribute


def note_trace(before: SettingsKey, after: SettingsKey) -> None:
    """Notes what a trace wrote, by keys before and after it."""
    attributes_before = {entry.identity: dict(entry.attributes) for entry in before.entries}
    for entry in after.entries:
        old_attributes = attributes_before.get(entry.identity, {})
        for name, content in entry.attributes:
            old = old_attributes.get(name)
            if old == content or isinstance(content, _WriteNumber):
                continue
            number = old if isinstance(old, _WriteNumber) else _WriteNumber(next(_write_numbers))
            _note_write(entry.identity.held(), name, _TraceWrite(content, number))


def _note_write(holder: object, name: str, write: _TraceWrite) -> None:
    writes = _trace_writes.get(id(holder))
    if writes is None or writes.holder() is not holder:
        key = id(holder)
        try:
            reference = weakref.ref(holder, lambda _: _trace_writes.pop(key, None))
        except TypeError:  # it cannot be known when it is gone
            return
        writes = _trace_writes[key] = _TraceWrites(reference, {})
    writes.by_attribute[name] = write
