# SPDX-License-Identifier: Apache-2.0
"""Static values, exact keys, and metadata of Variables.

Compiled programs are looked up by static values, so two values that behave differently must never
be equal there. Python's own equality is too coarse for that: ``1 == True == 1.0`` and ``0.0 ==
-0.0``, also inside tuples and frozen dataclasses. An *exact key* is a hashable stand-in that keeps
types apart at every depth. On purpose it is coarser in one direction: two functions made by running
the same ``def`` twice with the same closed-over values get equal keys, since they do the same
thing. That is why making ``optax.adam(1e-3)`` anew does not recompile a train step.

Metadata are *axes*, the logical names of an array's dimensions (``None`` for an unnamed one:
``("embed", None)``), and *entries*, whatever the user attached by keyword. Both are part of a
model's structure, so they must be hashable, and models whose metadata differ are compiled apart.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from shardax._core._jax import never_changes_closures
from shardax._core.errors import MetadataError
from shardax._core.object import Object

_PLAIN_TYPES = frozenset(
    {bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented), type, range, np.dtype}
)
# The attribute of a function in which ``jit`` keeps its programs.
PROGRAMS_ATTRIBUTE = "__shardax_programs__"
# Attributes of functions that change nothing in what they do.
NEUTRAL_ATTRIBUTES = frozenset({"__wrapped__", PROGRAMS_ATTRIBUTE})
# Closures nested deeper than this are compared by identity, which is always safe.
_MAX_FUNCTION_DEPTH = 12


class _Unkeyable(TypeError):
    """Raised inside this module when a value has no exact key."""


def exact_key(value: object) -> Hashable:
    """Returns a hashable key that tells types apart at every depth."""
    return _key(value, 0)


def _key(value: Any, depth: int) -> Hashable:
    """Returns the exact key of a value inside of so many functions."""
    kind = type(value)

    # Numbers by their digits, since 0.0 == -0.0 and nan != nan.
    if kind in _PLAIN_TYPES:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if kind is complex:
        return (kind, value.real.hex(), value.imag.hex())
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if isinstance(value, Object):
        raise TypeError(f"a {kind.__name__} is not a static value")

    # Containers by what they hold.
    if isinstance(value, tuple):
        return (kind, tuple(_key(item, depth) for item in value))
    if isinstance(value, frozenset):
        return (kind, frozenset(_key(item, depth) for item in value))
    if isinstance(value, slice):  # hashable only from Python 3.12 on
        return (kind, *(_key(item, depth) for item in (value.start, value.stop, value.step)))
    if isinstance(value, enum.Flag):  # combinations may have no name
        return (kind, value.value)
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if is_plain_frozen_dataclass(value):
        fields = dataclasses.fields(value)
        return (kind, tuple(_key(getattr(value, field.name), depth) for field in fields))

    # Functions by what they do.
    if isinstance(value, types.FunctionType):
        return _function_key(value, depth)
    if isinstance(value, functools.partial):
        return (
            kind,
            _key(value.func, depth),
            _key(value.args, depth),
            tuple((name, _key(item, depth)) for name, item in value.keywords.items()),
        )

    # All others as they compare themselves; inside of functions, also by identity.
    hash(value)  # raises TypeError for what cannot be a static value
    if depth and isinstance(value, types.MethodType):
        return (kind, identity_of(value.__self__), _key(value.__func__, depth))
    if depth and kind.__eq__ is object.__eq__:
        return identity_of(value)
    return (kind, value)


def is_plain_frozen_dataclass(value: object) -> bool:
    """Whether a value is compared by its fields, which do not change."""
    params = getattr(type(value), "__dataclass_params__", None)
    return (
        params is not None
        and "__dataclass_params__" in vars(type(value))
        and params.frozen
        and params.eq
        and not isinstance(value, type)
        and "__eq__" in vars(type(value))
    )


# The first key of each function, and the functions of which a closed-over name was rebound since,
# by that key. Neither keeps anything alive: such keys refer weakly to what has an identity.
_first_keys: weakref.WeakKeyDictionary[types.FunctionType, Hashable] = weakref.WeakKeyDictionary()
_rebound: dict[Hashable, weakref.ref[types.FunctionType]] = {}


def _function_key(function: types.FunctionType, depth: int) -> Hashable:
    """Returns a function's key, which stays when a closed-over name is rebound."""
    # As in ``jax.jit``, a name is read when a program is traced. Where that changed what one
    # function does, no other one shares its programs any more.
    key = _closure_key(function, depth)
    if depth:
        return key

    first = _first_keys.setdefault(function, key)
    if first not in _rebound and _same_numbers(first, key):
        return first
    if _rebound.setdefault(first, weakref.ref(function))() is not function:
        first = _first_keys[function] = identity_of(function)
    return first


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yields the functions inside of a static value that may read what the user changes."""
    if isinstance(value, types.FunctionType):
        if never_changes_closures(value):  # one of JAX, which may call one of the user's
            for cell in value.__closure__ or ():
                yield from functions_in(cell.cell_contents)
        else:
            yield value
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from functions_in(item)
    elif isinstance(value, functools.partial):
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from functions_in(item)
    elif isinstance(value, types.MethodType):
        yield from functions_in(value.__func__)
    elif is_plain_frozen_dataclass(value):
        for field in dataclasses.fields(value):
            yield from functions_in(getattr(value, field.name))


def function_identities(values: Iterable[object]) -> Hashable:
    """Returns the key of the functions inside of static values, each by its identity.

    Equal structure does not mean an equal program: a function that was made anew, from the same
    code, may read other settings.
    """
    return tuple(identity_of(function) for value in values for function in functions_in(value))


def _same_numbers(first: object, second: object) -> bool:
    """Whether keys differ at most in the types of equal numbers."""
    # Functions of optax make floats of their settings when they are first called.
    if first == second:
        return True
    if not (isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second)):
        return False
    if first[0] in (int, float) and second[0] in (int, float):
        numbers = [
            float.fromhex(number) if kind is float else number for kind, number in (first, second)
        ]
        return numbers[0] == numbers[1]
    return all(map(_same_numbers, first, second))


class Identity:
    """The key of a value by its identity, for as long as it lives.

    A ``weakref.ref`` would compare the values, by a method of the user's, while they live.
    """

    __slots__ = ("_hash", "held")

    def __init__(self, value: Any) -> None:
        self.held = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        referent = self.held()
        return referent is not None and isinstance(other, Identity) and other.held() is referent


class _HeldIdentity(Identity):
    """The identity of an object that cannot be referred to weakly."""

    __slots__ = ()

    def __init__(self, value: object) -> None:
        self.held = lambda: value
        self._hash = id(value)


def identity_of(value: object) -> Identity:
    """Returns the key of a value by its identity, which keeps nothing alive where it can."""
    try:
        return Identity(value)
    except TypeError:
        return _HeldIdentity(value)


def _closure_key(function: types.FunctionType, depth: int) -> Hashable:
    """Returns what a function does now: code, globals, defaults and closure."""
    if depth >= _MAX_FUNCTION_DEPTH or function.__dict__.keys() - NEUTRAL_ATTRIBUTES:
        return identity_of(function)
    try:
        cells = tuple(_cell_key(cell, function, depth) for cell in function.__closure__ or ())
        defaults = _key(function.__defaults__, depth + 1)
        named = tuple(
            (name, _key(value, depth + 1))
            for name, value in (function.__kwdefaults__ or {}).items()
        )
    except TypeError:  # something closed over is not hashable: the function is only equal to itself
        return identity_of(function)

    return (
        types.FunctionType,
        function.__code__,
        id(function.__globals__),
        cells,
        defaults,
        named,
        function.__qualname__,
    )


def _cell_key(cell: types.CellType, function: types.FunctionType, depth: int) -> Hashable:
    try:
        content = cell.cell_contents
    except ValueError:  # a name that is not bound yet: only this very function has this cell
        raise _Unkeyable from None
    if content is function:
        return "itself"
    if isinstance(content, jax.Array):
        raise _Unkeyable
    if type(content) is set and never_changes_closures(function):
        content = frozenset(content)
    return _key(content, depth + 1)


class Static:
    """A static value that compares by its exact key, as compiled programs compare configuration.

    Python's ``1 == True == 1.0`` are three values here, at every depth.

    Args:
        value: A hashable value.
        key: Its key, where that is known.

    Attributes:
        value: The value.

    Raises:
        TypeError: If the value is not hashable.

    Example:
        >>> from shardax import extend
        >>> extend.Static((1, "a")) == extend.Static((1, "a"))
        True
        >>> extend.Static((1, "a")) == extend.Static((True, "a"))
        False
    """

    __slots__ = ("_hash", "key", "value")

    def __init__(self, value: Any, key: Hashable = None) -> None:
        self.value = value
        self.key = exact_key(value) if key is None else key
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Static):
            return NotImplemented
        return self._hash == other._hash and self.key == other.key

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> Any:
        if type(self) is Static:
            # Which stands above: it expands exact keys.
            from shardax._core.graph.settings import settings_static

            return (settings_static, (self.value,))
        return (type(self), (self.value,))


# --- metadata -------------------------------------------------------------------------------------

AxisName = Hashable
Axes = tuple[AxisName, ...]


class Metadata:
    """Immutable, hashable axes and entries of a Variable."""

    __slots__ = ("_hash", "_key", "axes", "entries")

    def __init__(self, axes: Axes | None, entries: Mapping[str, Any]) -> None:
        self.axes = axes
        self.entries = MappingProxyType(dict(entries))
        try:
            items = sorted(self.entries.items())
            self._key = (exact_key(axes), tuple((name, exact_key(item)) for name, item in items))
        except TypeError as error:
            culprits = [name for name, item in self.entries.items() if not _is_hashable(item)]
            raise MetadataError(
                f"Metadata entries {culprits or 'axes'} are not hashable ({error}). Metadata is "
                f"part of a model's structure, by which compiled programs are found. Use tuples "
                f"instead of lists, frozen dataclasses instead of dicts, and put arrays into a "
                f"Variable of their own."
            ) from error
        self._hash = hash(self._key)

    def replace(self, **changes: Any) -> Metadata:
        """Returns the metadata with entries (or ``axes``) changed."""
        axes = check_axes(changes.pop("axes")) if "axes" in changes else self.axes
        return self._with(axes, {**self.entries, **changes})

    def without_axis(
        self,
        position: int,
        expected: AxisName = None,
        params: Mapping[str, Any] = MappingProxyType({}),
    ) -> Metadata:
        """Returns the metadata without the name of one dimension.

        Args:
            position: Which dimension goes.
            expected: Its name by the transform; None for any.
            params: Further properties of the dimension, for a box of the user's.
        """
        names = self.mapped_names
        if not -len(names) <= position < len(names):
            if self.axes is None:
                return self.box_without_axis(position, expected, params)
            raise MetadataError(f"axes {names} have no dimension {position} to remove.")

        dimension = position % len(names)
        name = names[dimension]
        if expected is not None and name not in (None, expected):
            raise MetadataError(
                f"the dimension {dimension} of axes {names} is named {name!r}, but the "
                f"transform maps it as {expected!r}. Map the dimension of that name, or give the "
                f"transform the Variable's own name: "
                f"metadata={{sx.partition.PARTITION_NAME: {name!r}}}."
            )
        renamed = self._with_names((*names[:dimension], *names[dimension + 1 :]))
        return renamed.box_without_axis(dimension, expected if name is None else name, params)

    def with_axis(
        self,
        position: int,
        name: AxisName = None,
        params: Mapping[str, Any] = MappingProxyType({}),
        *,
        knows_names: bool = False,
    ) -> Metadata:
        """Returns the metadata with the name of a new dimension.

        Args:
            position: Where the dimension is.
            name: Its name, or None.
            params: Further properties of the dimension, for a box of the user's.
            knows_names: Whether the value knows the names of its own dimensions.
        """
        names = self.mapped_names
        if self.axes is None:
            if position < 0 or not (knows_names or names):
                return self.box_with_axis(position, name, params)
            names = (*names, *(None,) * (position - len(names)))

        rank = len(names) + 1
        if not -rank <= position < rank:
            raise MetadataError(f"axes {names} have no place {position} for another dimension.")
        dimension = position % rank
        renamed = self._with_names((*names[:dimension], name, *names[dimension:]))
        return renamed.box_with_axis(dimension, name, params)

    def box_with_axis(self, position: int, name: AxisName, params: Mapping[str, Any]) -> Metadata:
        """Returns the metadata in which the box of the Variable knows of a new dimension."""
        return self._with_box("_kept_with_axis", position, name, params)

    def box_without_axis(
        self, position: int, name: AxisName, params: Mapping[str, Any]
    ) -> Metadata:
        """Returns the metadata in which the box of the Variable lost a dimension."""
        return self._with_box("_kept_without_axis", position, name, params)

    def _with_box(
        self, method: str, position: int, name: AxisName, params: Mapping[str, Any]
    ) -> Metadata:
        box = self.entries.get(BOX_ENTRY)
        change = getattr(box, method, None)
        if change is None:
            return self
        changed = change(position, {**params, PARTITION_NAME: name})
        if changed is box:
            return self
        return self._with(self.axes, {**self.entries, BOX_ENTRY: changed})

    @property
    def mapped_names(self) -> Axes:
        """The axes; of arrays that know theirs, those of mapped dimensions."""
        return self.entries.get(MAPPED_AXES, ()) if self.axes is None else self.axes

    def _with_names(self, names: Axes) -> Metadata:
        if self.axes is not None:
            return self._with(names, self.entries)
        entries = {key: item for key, item in self.entries.items() if key != MAPPED_AXES}
        named = any(name is not None for name in names)
        return self._with(None, {**entries, MAPPED_AXES: names} if named else entries)

    def _with(self, axes: Axes | None, entries: Mapping[str, object]) -> Metadata:
        """Returns metadata of the same kind with other contents."""
        return Metadata(axes, entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Metadata) and self._hash == other._hash and self._key == other._key

    def __repr__(self) -> str:
        parts = [] if self.axes is None else [f"axes={self.axes}"]
        return ", ".join(parts + [f"{name}={item!r}" for name, item in self.entries.items()])

    def __reduce__(self) -> Any:
        return (Metadata, (self.axes, dict(self.entries)))


def _is_hashable(item: object) -> bool:
    try:
        exact_key(item)
    except TypeError:
        return False
    return True


def check_axes(axes: Iterable[AxisName] | None) -> Axes | None:
    """Returns ``axes`` as a tuple of hashable names, or None."""
    if axes is None:
        return None
    if isinstance(axes, str):
        raise MetadataError(
            f"axes={axes!r} is one string; give one name per dimension: axes=({axes!r},)."
        )
    names = tuple(axes)
    for position, name in enumerate(names):
        if not _is_hashable(name):
            raise MetadataError(
                f"axes[{position}] = {name!r} is not hashable; an axis name is a string or None."
            )
    return names


EMPTY = Metadata(None, {})

# Key, in the ``metadata`` option of ``vmap`` and ``scan``, of the mapped dimension's name.
PARTITION_NAME = "partition_name"
# Entry of a Variable that holds arrays which know their names: those of their mapped dimensions.
MAPPED_AXES = "mapped_axes"
# Entry of a Variable that was made of a box: the box, empty.
BOX_ENTRY = "box"
