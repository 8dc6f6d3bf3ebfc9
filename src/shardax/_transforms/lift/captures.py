# SPDX-License-Identifier: Apache-2.0
"""Objects that a compiled function reaches without being given them.

A program reads the Variables that it was traced with. So an object that a function takes from
outside must be found again at every later call, in a way that leads to the object that plain Python
would use now. Four ways are certain:

1. a closure cell of the function,
2. a global that the function's own code names,
3. a default value of a parameter,
4. an attribute of the plain object that a method is bound to, or that is called itself.

A *place* is one such cell, name, default or attribute. What it holds may be the object itself, or a
tuple, a ``functools.partial`` or a bound method with objects inside, none of which can change. It
may also be a function that shardax made of another one (``sx.jit(f)``, ``sx.vmap(f)``): the places
of that other function count as well.

While a function is traced, it runs with *stand-ins*: a copy of the function sees, at each place,
the copy of the object that belongs to the trace (``StandIns``). So an object that the trace meets
as the original was reached in some other way: by an item of a list, by a helper function, by an
attribute of a class. Nothing says whether that way leads to the same object at the next call, and
the function is traced again at every call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from shardax._core.graph.flatten import is_object
from shardax._core.object import Object, Wrapper

_LIBRARY = __name__.partition(".")[0]


class CapturePlace(NamedTuple):
    """Where a function finds an object."""

    name: str
    """The name of the cell, global, parameter or attribute, for messages and paths."""

    read: Callable[[], object]
    """Returns what the place holds now; None if it is empty."""

    key: Hashable
    """What tells places apart: the ``id`` of what has the cell, name or attribute, and the name."""

    is_fixed: bool = False
    """Whether the place always holds the same objects: what a method is bound to."""


class Functions:
    """Base of what shardax makes of functions of the user's, and calls them."""

    __slots__ = ()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The functions that are called."""
        raise NotImplementedError

    def with_functions(self, functions: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
        """Returns what calls other functions in the same way."""
        raise NotImplementedError


def objects_in(value: Any) -> Iterator[Object]:
    """Yields the objects in what a place holds."""
    # By the type alone: a user's object is never asked for an attribute or its ``__class__``.
    kind = type(value)

    if issubclass(kind, Object):
        yield value
    elif issubclass(kind, tuple):
        for item in tuple.__iter__(value):
            yield from objects_in(item)
    elif kind is functools.partial:
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from objects_in(item)
    elif kind is types.MethodType:
        yield from objects_in(value.__self__)


def places_of(function: object) -> list[CapturePlace]:
    """Returns the places of a function that hold objects now."""
    search = _PlaceSearch()
    search.visit_function(function)
    return search.places


def closed_over(function: types.FunctionType) -> list[object]:
    """Returns what the closure cells of a function hold, None for names not bound yet."""
    return [_content(cell) for cell in function.__closure__ or ()]


class _PlaceSearch:
    """A search for the places of a function."""

    def __init__(self) -> None:
        self.places: list[CapturePlace] = []
        self._visited: dict[int, object] = {}

    def visit_function(self, function: Any) -> None:
        """Adds the places of a function that the compiled call runs."""
        if id(function) in self._visited:
            return
        self._visited[id(function)] = function
        kind = type(function)

        if issubclass(kind, Functions):
            for each in function.functions:
                self.visit_function(each)
        elif kind is types.FunctionType:
            self._visit_plain_function(function)
        elif kind is types.MethodType:
            self._visit_owner(function.__self__)
            self.visit_function(function.__func__)
        elif kind is functools.partial:
            self._visit_place("", function, lambda: _objects_of_partial(function))
            self.visit_function(function.func)
        elif issubclass(kind, Wrapper):
            self.visit_function(function.function)
        else:
            self._visit_owner(function)

    def _visit_plain_function(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._visit_place(name, cell, functools.partial(_content, cell), _is_ours(function))

        scope = function.__globals__
        for name in _global_names(function):
            self._visit_place(name, scope, functools.partial(scope.get, name))

        defaults = function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        for index in range(len(defaults)):
            name = function.__code__.co_varnames[first + index]
            self._visit_place(name, function, functools.partial(_default, function, index))
        for name in function.__kwdefaults__ or ():
            read = functools.partial(_keyword_default, function, name)
            self._visit_place(name, function, read)

    def _visit_owner(self, owner: object) -> None:
        if issubclass(type(owner), Object):
            self.places.append(CapturePlace("", lambda: owner, (id(owner), ""), is_fixed=True))
        elif _has_plain_attributes(owner):
            for name in _attributes(owner):
                self._visit_place(name, owner, functools.partial(_attribute, owner, name))
            self.visit_function(_call_of(owner))

    def _visit_place(
        self, name: str, holder: object, read: Callable[[], object], is_ours: bool = False
    ) -> None:
        value = read()
        if next(objects_in(value), None) is not None:
            self.places.append(CapturePlace(name, read, (id(holder), name)))
        for made in _functions_in(value, is_ours):
            self.visit_function(made)


def _objects_of_partial(function: functools.partial[Any]) -> tuple[Object, ...]:
    """Returns the objects in the arguments that a partial gives, as in those of a call."""
    leaves = jax.tree.leaves((function.args, function.keywords), is_leaf=is_object)
    return tuple(leaf for leaf in leaves if is_object(leaf))


def _content(cell: types.CellType) -> object:
    """Returns what a closure cell holds; None if its name is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _default(function: types.FunctionType, index: int) -> object:
    defaults = function.__defaults__ or ()
    return defaults[index] if index < len(defaults) else None


def _keyword_default(function: types.FunctionType, name: str) -> object:
    return (function.__kwdefaults__ or {}).get(name)


def _attribute(owner: object, name: str) -> object:
    return _attributes(owner).get(name)


def _attributes(owner: object) -> dict[str, object]:
    """Returns the attributes in an instance's ``__dict__``."""
    # Not ``vars``, which would run a ``__getattribute__`` of the user's.
    return object.__getattribute__(owner, "__dict__")


def _has_plain_attributes(owner: object) -> bool:
    """Returns whether a stand-in of an instance can be made."""
    # Not of what is written in C, whose state cannot be copied; nor where a finalizer would run for
    # the stand-in too, and close what both hold.
    kind = type(owner)
    return (
        kind.__new__ is object.__new__
        and _inherited(kind, "__del__") is None
        and type(_inherited(kind, "__dict__")) is types.GetSetDescriptorType
    )


def _inherited(kind: type, name: str) -> object:
    """Returns the attribute of a class or its bases, as it was defined; None if there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _call_of(owner: object) -> object:
    """Returns the function that calling an instance runs, None if there is none."""
    return _inherited(type(owner), "__call__")


def _global_names(function: types.FunctionType) -> list[str]:
    """Returns the globals that a function's code, or code inside of it, may name."""
    scope = function.__globals__
    # A module of this package holds no object of the user's.
    if scope.get("__name__", "").partition(".")[0] == _LIBRARY:
        return []
    return [name for name in _names_in(function.__code__) if name in scope]


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in code."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)


def _functions_in(value: Any, is_ours: bool) -> Iterator[object]:
    """Yields the functions, in what a place holds, whose places count as well.

    Args:
        value: What the place holds.
        is_ours: Whether the place is a cell of a function that shardax made, which calls every
            function that it closes over. Otherwise only functions made by shardax count.
    """
    kind = type(value)

    if issubclass(kind, (Wrapper, Functions)):
        yield value
    elif kind is types.FunctionType:
        if is_ours or _is_ours(value):
            yield value
    elif kind in (functools.partial, types.MethodType) and is_ours:
        yield value
    elif kind is functools.partial:
        yield from _functions_in(value.func, is_ours)
    elif issubclass(kind, tuple):
        for item in tuple.__iter__(value):
            yield from _functions_in(item, is_ours)


def _is_ours(function: types.FunctionType) -> bool:
    """Returns whether a function was made by this package."""
    # ``functools.wraps`` overwrites ``__module__``; the globals are those of the defining module.
    name = function.__globals__.get("__name__")
    return type(name) is str and name.partition(".")[0] == _LIBRARY


class StandIns:
    """Copies of functions in which stand-ins take the place of objects.

    Used while a trace runs; ``finish`` then hands on what the traced function bound anew.
    """

    def __init__(self, stand_ins: Mapping[int, Object]) -> None:
        # By ``id`` of the original.
        self._stand_ins = stand_ins
        # (original, copy) of functions and owners, by ``id`` of the original.
        self._copies: dict[int, tuple[object, Any]] = {}
        # Called at the end.
        self._endings: list[Callable[[], None]] = []

    def function(self, function: Any) -> Any:
        """Returns a function that finds stand-ins at its places; itself if it has none."""
        known = self._copies.get(id(function))
        if known is not None:
            return known[1]

        # A function that reaches itself finds itself.
        self._copies[id(function)] = (function, function)
        copy = self._copy(function)
        self._copies[id(function)] = (function, copy)
        return copy

    def value(self, value: Any, is_ours: bool = False) -> Any:
        """Returns what a place holds with stand-ins; see ``_functions_in`` for ``is_ours``."""
        kind = type(value)

        if issubclass(kind, Object):
            return self._stand_ins.get(id(value), value)
        if next(_functions_in(value, is_ours), None) is value:
            return self.function(value)
        if issubclass(kind, tuple):
            items = [self.value(item, is_ours) for item in tuple.__iter__(value)]
            if _are_same(items, tuple.__iter__(value)):
                return value
            return tuple.__new__(kind, items)
        if kind is functools.partial:
            function = self.value(value.func)
            args = [self.value(item) for item in value.args]
            keywords = {name: self.value(item) for name, item in value.keywords.items()}
            before = (value.func, *value.args, *value.keywords.values())
            if _are_same([function, *args, *keywords.values()], before):
                return value
            return functools.partial(function, *args, **keywords)
        if kind is types.MethodType:
            owner = self.value(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        return value

    def finish(self) -> None:
        """Hands on to the originals what copies of functions and owners were given."""
        for end in self._endings:
            end()

    def _copy(self, function: Any) -> Any:
        kind = type(function)

        if issubclass(kind, Functions):
            functions = tuple(map(self.function, function.functions))
            if _are_same(functions, function.functions):
                return function
            return function.with_functions(functions)
        if kind is types.FunctionType:
            return self._copy_plain_function(function)
        if kind is types.MethodType:
            owner = self._owner(function.__self__)
            called = self.function(function.__func__)
            if owner is function.__self__ and called is function.__func__:
                return function
            return types.MethodType(called, owner)
        if kind is functools.partial:
            called = self.function(function.func)
            arguments = (function.args, function.keywords)
            args, keywords = jax.tree.map(self.value, arguments, is_leaf=is_object)
            return functools.partial(called, *args, **keywords)
        if issubclass(kind, Wrapper):
            inner = function.function
            copy = self.function(inner)
            return function if copy is inner else function._wrap(copy)
        if issubclass(kind, Object):
            return self.value(function)
        owner = self._owner(function)
        called = _call_of(function)
        copy = self.function(called)
        if owner is function and copy is called:
            return function
        return types.MethodType(copy, owner)

    def _copy_plain_function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        is_ours = _is_ours(function)
        closure = tuple(self._cell(cell, is_ours) for cell in cells)
        defaults = self.value(function.__defaults__) if function.__defaults__ else None
        named = function.__kwdefaults__ or {}
        named_copy = {name: self.value(value) for name, value in named.items()}
        scope = self._globals(function)

        if (
            scope is function.__globals__
            and _are_same(closure, cells)
            and defaults is function.__defaults__
            and _are_same(named_copy.values(), named.values())
        ):
            return function
        copy = types.FunctionType(function.__code__, scope, function.__name__, defaults, closure)
        copy.__kwdefaults__ = named_copy or None
        for name in ("__qualname__", "__module__", "__doc__"):
            setattr(copy, name, getattr(function, name))
        copy.__dict__.update(function.__dict__)
        return copy

    def _cell(self, cell: types.CellType, is_ours: bool) -> types.CellType:
        content = _content(cell)
        stand_in = self.value(content, is_ours)
        if stand_in is content:
            return cell
        copy = types.CellType(stand_in)

        def end() -> None:
            # The traced function bound the name anew (``nonlocal``).
            if _content(copy) is not stand_in:
                cell.cell_contents = _content(copy)

        self._endings.append(end)
        return copy

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        scope = function.__globals__
        stand_ins = {}
        for name in _global_names(function):
            value = scope[name]
            stand_in = self.value(value)
            if stand_in is not value:
                stand_ins[name] = (value, stand_in)

        if not stand_ins:
            return scope
        copy = _GlobalsWithStandIns(scope, stand_ins)
        self._endings.append(copy.hand_on)
        return copy

    def _owner(self, owner: Any) -> Any:
        """Returns the stand-in of what a method is bound to."""
        if issubclass(type(owner), Object):
            return self.value(owner)
        if id(owner) in self._copies and self._copies[id(owner)][1] is not owner:
            return self._copies[id(owner)][1]
        if not _has_plain_attributes(owner):
            return owner
        attributes = _attributes(owner)
        before = {name: self.value(value) for name, value in attributes.items()}
        if _are_same(before.values(), attributes.values()):
            return owner

        copy = object.__new__(type(owner))
        _attributes(copy).update(before)
        for base in type(owner).__mro__:
            for descriptor in vars(base).values():
                if type(descriptor) is types.MemberDescriptorType:
                    _copy_slot(descriptor, owner, copy)

        def end() -> None:
            # What the traced method set on ``self``, as a trace under ``jax.jit`` would.
            after = _attributes(copy)
            for name in before.keys() - after.keys():
                attributes.pop(name, None)
            for name, value in after.items():
                if name not in before or before[name] is not value:
                    attributes[name] = value

        self._endings.append(end)
        return copy


def _copy_slot(descriptor: types.MemberDescriptorType, owner: object, copy: object) -> None:
    try:
        value = descriptor.__get__(owner)
    except AttributeError:  # it was never set
        return
    descriptor.__set__(copy, value)


def _are_same(items: Iterable[object], others: Iterable[object]) -> bool:
    """Returns whether two sequences of one length hold the very same values."""
    return all(item is other for item, other in zip(items, others, strict=True))


class _GlobalsWithStandIns(dict):
    """The globals of a traced function, in which some names have stand-ins.

    Python looks a global name up by ``__getitem__`` where a function's globals are of a subclass of
    ``dict``, and stores one (``global name``) past ``__setitem__``. What is stored is handed on to
    the real globals before the next name is looked up. Were a version of Python to look up in
    another way, the function would meet the originals, and be traced again at every call.
    """

    def __init__(
        self, scope: dict[str, Any], stand_ins: Mapping[str, tuple[object, object]]
    ) -> None:
        # Python itself reads ``__builtins__``, ``__name__`` and the like.
        super().__init__({name: scope[name] for name in [*scope] if name.startswith("__")})
        self._own = len(self)
        self._scope = scope
        self._stand_ins = stand_ins

    def __getitem__(self, name: str) -> Any:
        if len(self) > self._own:
            self.hand_on()
        value = self._scope[name]
        original, stand_in = self._stand_ins.get(name, (None, None))
        return stand_in if original is value and original is not None else value

    def hand_on(self) -> None:
        """Stores in the real globals what the function stored."""
        for name in [*dict.keys(self)][self._own :]:
            self._scope[name] = dict.pop(self, name)

    def __setitem__(self, name: str, value: object) -> None:
        self._scope[name] = value

    def __delitem__(self, name: str) -> None:
        if len(self) > self._own:
            self.hand_on()
        del self._scope[name]

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or name in self._scope

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a global, or the default."""
        try:
            return self[name]
        except KeyError:
            return default
