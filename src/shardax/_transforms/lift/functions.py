# SPDX-License-Identifier: Apache-2.0
"""Closures: finding the objects that a function uses without being given them.

A *source* is a place outside a function from which it takes an object: a closure cell, or a name in
its globals. Compiled functions look through their sources at every call, so that a model which was
rebound to the name is noticed.

Leaves of arguments that are static: which they are, and what they are compared by.

A *leaf* is what is left of an argument when its containers are taken apart. Arrays are dynamic.
Python's numbers are dynamic unless they are asked to be static. Everything else is static, and
compared by its *argument key*: the exact key of ``_core.graph.static``, and for an instance that Python
compares by identity, the keys of its attributes as well. Such an instance is equal to itself
whatever is assigned to it, so by identity alone a program compiled for its old attributes would
answer for the new ones.

Arguments that a compiled function treats in a way of their own.

*Static* arguments are compiled for by value, *donated* ones lend their memory. Here is found which
they are, and what static ones are compared by.

Plain arguments: telling by its type alone that an argument holds no objects.

It makes the steady call of a compiled function quick. JAX's type of concrete arrays is not public;
it is learned from the first array that comes by.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import Path, format_path
from shardax._core.graph.static import Static, exact_key
from shardax._core.object import Object
from shardax._transforms.errors import StaticArgumentError

# --- Closures ---

_MAX_DEPTH = 4
"""How many calls deep to look for sources in helper functions."""
_MAX_ITEMS = 64
"""Largest holder that is looked into, unless one of its first so many items is an object."""
_MAX_HOLDERS = 3
"""How many holders (containers, instances of user classes) deep to look for objects."""


class Source(NamedTuple):
    """A place that held an object when it was found.

    Attributes:
        name: The variable's name, for messages and paths.
        read: Returns what the place holds now (None if it is empty).
    """

    name: str
    read: Callable[[], Any]


def find_sources(function: Any) -> list[Source]:
    """Finds the places from which a function, or a helper it calls, takes Modules and Variables.

    Args:
        function: A function, bound method, partial, or wrapper with ``__wrapped__``.

    Returns:
        One source per place, in order of discovery.
    """
    found: dict[Any, Source] = {}
    _search(function, 0, set(), found)
    return list(found.values())


def _search(value: Any, depth: int, seen: set[int], found: dict[Any, Source]) -> None:
    if depth > _MAX_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.MethodType):
        if not isinstance(value.__self__, Object):  # an Object owner is an argument, not a source
            _add_holder(value.__self__, found)
        _search(value.__func__, depth, seen, found)
    elif isinstance(value, functools.partial):
        _search(value.func, depth, seen, found)
    elif isinstance(value, types.FunctionType):
        for key, source in _places(value):
            held = source.read()
            if any(True for _ in objects_in(held)):
                found.setdefault(key, source)
            if callable(held):
                _search(held, depth + 1, seen, found)
    elif hasattr(value, "__wrapped__") and not isinstance(value, type):
        _search(value.__wrapped__, depth, seen, found)
    elif is_plain_instance(value) and callable(value):
        _add_holder(value, found)
        _search(type(value).__call__, depth, seen, found)


def _add_holder(holder: Any, found: dict[Any, Source]) -> None:
    if any(True for _ in objects_in(holder)):
        found.setdefault(id(holder), Source("self", lambda: holder))


def _places(function: types.FunctionType) -> Iterator[tuple[Any, Source]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield id(cell), Source(name, functools.partial(_read_cell, cell))
    scope = function.__globals__
    for name in _global_names(function.__code__):
        if name in scope:
            yield (id(scope), name), Source(name, functools.partial(scope.get, name))


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(dict.fromkeys(names))


def objects_in(value: Any, depth: int = _MAX_HOLDERS) -> Iterator[Object]:
    """Yields the objects that a source holds.

    Args:
        value: What the source holds: an object, a method of one, or a *holder*, that is a small
            list, tuple or dict, or an instance of a user's class with objects in its attributes.
        depth: How many holders deep to look.
    """
    if isinstance(value, Object):
        yield value
        return
    if depth == 0:
        return
    if isinstance(value, types.MethodType):
        yield from objects_in(value.__self__, depth)
        return
    if isinstance(value, (tuple, list)):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif is_plain_instance(value):
        items = vars(value).values()
    else:
        return
    first = itertools.islice(items, _MAX_ITEMS)
    if len(items) <= _MAX_ITEMS or any(isinstance(item, Object) for item in first):
        for item in list(items):
            yield from objects_in(item, depth - 1)


def is_plain_instance(value: Any) -> bool:
    """Whether ``value`` is an instance of an ordinary user class."""
    return (
        not isinstance(value, (Object, type, types.ModuleType, types.FunctionType))
        and not hasattr(value, "__wrapped__")
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def parameters_of(function: Any) -> tuple[inspect.Parameter, ...] | None:
    """Returns a function's parameters, or None if it has no signature."""
    try:
        found = _PARAMETERS.get(function, _UNKNOWN)
    except TypeError:  # without a hash, or without weak references
        return _find_parameters(function)
    if found is _UNKNOWN:
        found = _PARAMETERS[function] = _find_parameters(function)
    return found


_UNKNOWN: Any = object()
_PARAMETERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Parameters by function, which may close over a model: remembering them keeps nothing alive."""


def _find_parameters(function: Any) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def argument_path(function: Any, key: int | str) -> tuple[str, ...]:
    """Returns the path of an argument by its position or name: the name of the parameter."""
    return (parameter_name(function, key) if isinstance(key, int) else key,)


def parameter_name(function: Any, position: int) -> str:
    """Returns the name of a function's positional parameter, for messages."""
    parameters = parameters_of(function) or ()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if position < len(positional):
        return positional[position].name
    return f"args[{position}]"


# --- Static leaves ---

AUTO = "auto"
NUMBERS = "numbers"
"""The values of the option ``static``; under the second Python's numbers are static, too."""

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)
NUMBER_TYPES = frozenset({int, float, complex})
_TAKEN_WHOLE = frozenset({"jax", "jaxlib", "numpy", *sys.stdlib_module_names} - {"builtins"})
"""Packages whose instances (meshes, policies, loggers) are compared by identity alone.

A class that was made by ``exec`` without a module name says that it is of ``builtins``.
"""


def is_dynamic(leaf: Any, static_numbers: bool = False) -> bool:
    """Whether a leaf is passed to the program rather than compiled into it.

    Args:
        leaf: A leaf that is no Module or Variable.
        static_numbers: Whether Python's numbers are static.
    """
    if type(leaf) in NUMBER_TYPES:
        return not static_numbers
    if isinstance(leaf, enum.Enum):
        return False
    return isinstance(leaf, _ARRAYS) or hasattr(type(leaf), "__jax_array__")


def static_leaf(leaf: Any, where: Callable[[], Path] = tuple) -> Static:
    """Returns a static leaf with its argument key.

    Args:
        leaf: The leaf.
        where: Returns the path of the leaf, beginning with the name of the argument; asked for
            messages only.

    Raises:
        StaticArgumentError: If it is not hashable, or has attributes that are not.
    """
    try:
        return Static(leaf, argument_key(leaf))
    except TypeError as error:
        path = where()
        place = f" at {format_path(path)}" if path else ""
        raise StaticArgumentError(
            f"What is no array, number or Module is static here (as under static='auto'), but the "
            f"{type(leaf).__name__}{place} cannot be: {_shortened(leaf)} is not hashable "
            f"({error}). Use a tuple or frozenset instead of a list or set, a frozen dataclass for "
            f"configuration, and an sx.Module for what holds arrays or changes."
        ) from error


def argument_key(value: Any) -> Hashable:
    """Returns what a static argument is compared by: type-exact, and true after an assignment.

    Args:
        value: The argument, or a leaf of it.

    Raises:
        TypeError: If it is not hashable, or an attribute of an instance that is compared by
            identity is not.
    """
    return _key(value, ())


def _key(value: Any, around: tuple[Any, ...]) -> Hashable:
    key = exact_key(value)
    holder = value.__self__ if isinstance(value, types.MethodType) else value
    if not _is_open(holder) or any(holder is item for item in around):
        return key
    return (key, *(_attribute(holder, name, (*around, holder)) for name in vars(holder)))


def _attribute(holder: Any, name: str, around: tuple[Any, ...]) -> Hashable:
    value = vars(holder)[name]
    if isinstance(value, Object):  # used without being passed, it is an input of the program
        return (name, _Same(value))
    try:
        return (name, _key(value, around))
    except TypeError as error:
        raise TypeError(
            f"it is compared by identity, so a change of its attribute {name!r}, of type "
            f"{type(value).__name__}, could not be noticed; {error}"
        ) from error


class _Same:
    """An object by its identity, for as long as it lives."""

    __slots__ = ("_hash", "held")

    def __init__(self, held: Object) -> None:
        self.held = weakref.ref(held)
        self._hash = id(held)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        held = self.held()
        return held is not None and isinstance(other, _Same) and other.held() is held


def _is_open(value: Any) -> bool:
    """Whether a value is an instance that compares by identity and can be assigned to."""
    kind = type(value)
    return (
        kind.__eq__ is object.__eq__
        and kind.__hash__ is object.__hash__
        and kind.__module__.partition(".")[0] not in _TAKEN_WHOLE
        and not isinstance(value, Object)
        and is_plain_instance(value)
    )


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


# --- Static arguments ---


def resolve_arguments(
    function: Any, argnums: Any, argnames: Any, kind: str, error: type[ShardaxError]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Resolves positions and names of arguments from each other, as ``jax.jit`` does.

    Args:
        function: The user's function.
        argnums: ``static_argnums`` or ``donate_argnums`` as given.
        argnames: ``static_argnames`` or ``donate_argnames`` as given.
        kind: ``"static"`` or ``"donate"``, for messages.
        error: What to raise.

    Returns:
        (positions, names), sorted; negative positions are counted from the end.

    Raises:
        ShardaxError: Of the given class, if the function has no such argument.
    """
    positions, names = as_tuple(argnums), as_tuple(argnames)
    parameters = parameters_of(function)
    if parameters is None or not (positions or names):
        return positions, names
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    count = len(positional)
    shown = getattr(function, "__name__", function)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for position in positions:
        if not variadic and not -count <= position < count:
            raise error(
                f"{kind}_argnums={position} is out of range: {shown} has {count} positional "
                f"parameters ({', '.join(positional)})."
            )
    known = [p.name for p in parameters]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in names:
            if name not in known:
                raise error(
                    f"{kind}_argnames has {name!r}, but {shown} has only ({', '.join(known)})."
                )
    positions = tuple(p % count if p < 0 else p for p in positions)
    all_positions = {
        *positions,
        *(positional.index(n) for n in names if n in positional),
    }
    all_names = {*names, *(positional[p] for p in positions if p < count)}
    return tuple(sorted(all_positions)), tuple(sorted(all_names))


def check_static_option(static: str | None) -> None:
    """Raises if the option ``static`` has a value that it does not take.

    Raises:
        StaticArgumentError: Saying which it takes.
    """
    if static not in (None, AUTO, NUMBERS):
        raise StaticArgumentError(
            f"static={static!r}: the option takes 'auto', which makes everything static that is no "
            f"array, number or Module; 'numbers', which makes Python's numbers static, too; or "
            f"None. To choose arguments, use static_argnums or static_argnames."
        )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Returns an option that may be None, one entry or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


def static_argument(value: Any, function: Any, place: int | str) -> Static:
    """Returns a static argument by its exact key.

    Args:
        value: What was passed.
        function: The user's function, for messages.
        place: Position or name of the argument.

    Raises:
        StaticArgumentError: If the value is a Module or not hashable.
    """
    label = parameter_name(function, place) if isinstance(place, int) else place
    if isinstance(value, Object):
        raise StaticArgumentError(
            f"The argument {label!r} is static, but a {type(value).__name__} was passed: its "
            f"values would be frozen into the program and "
            f"changes missed. Pass it as an ordinary argument: a Module's configuration is static "
            f"by itself."
        )
    try:
        return Static(value, argument_key(value))
    except TypeError as error:
        raise StaticArgumentError(
            f"The static argument {label!r} of {getattr(function, '__name__', function)} is "
            f"{value!r} of type {type(value).__name__}, which is "
            f"not hashable ({error}). Pass arrays as ordinary arguments; use tuples instead of "
            f"lists, frozen dataclasses instead of dicts, and an sx.Module for what holds arrays "
            f"or changes."
        ) from error


class Signature(NamedTuple):
    """A call, sorted into what is passed and what identifies it.

    Attributes:
        args: Positional arguments that are not static.
        kwargs: Keyword arguments that are not static.
        static: (position or name, value) of each static argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[Any, Static], ...]


def separate_static(
    function: Any,
    positions: Sequence[int],
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Signature:
    """Sorts the arguments of a call.

    Args:
        function: The user's function, for messages.
        positions: Which positions are static.
        names: Which names are static.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        StaticArgumentError: If a static one is a Module or not hashable.
    """
    static: list[tuple[Any, Static]] = [
        (i, static_argument(args[i], function, i)) for i in positions if i < len(args)
    ]
    static += [
        (name, static_argument(kwargs[name], function, name)) for name in names if name in kwargs
    ]
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in positions)
    named = {name: arg for name, arg in kwargs.items() if name not in names}
    return Signature(dynamic, named, tuple(static))


# --- Plain ---

ARRAY_TYPES: set[type] = {np.ndarray, bool, int, float, complex, type(None)}
"""Types of arguments that are surely plain; JAX's concrete array type joins when first met."""


def note_types(arg: Any) -> bool:
    """Learns JAX's concrete array type; returns whether the argument holds tracers."""
    if isinstance(arg, jax.Array) and not isinstance(arg, Tracer):
        ARRAY_TYPES.add(type(arg))
        return False
    leaves = jax.tree.leaves(arg)
    if ARRAY_TYPES.issuperset(map(type, leaves)):
        return False
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            ARRAY_TYPES.add(type(leaf))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def all_dynamic(args: Sequence[Any], static: frozenset[type]) -> bool:
    """Whether surely nothing of the arguments is static but what is of the given types."""
    for arg in args:  # no generator: it would cost as much as a short call
        kind = type(arg)
        if (kind not in ARRAY_TYPES or kind in static) and not isinstance(arg, Object):
            return False
    return True
