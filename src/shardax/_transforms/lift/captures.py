# SPDX-License-Identifier: Apache-2.0
"""Objects that a compiled function reaches without being given them.

A program reads the Variables that it was traced with. So an object that a function takes from
outside must be found again at every later call, in a way that leads to the object that plain Python
would use now. Three ways are certain:

1. a closure cell of the function,
2. a global that the function's own code names,
3. a default value of a parameter.

A *place* is one such cell, name or default. What it holds may be the object itself, or a tuple, a
``functools.partial`` or a bound method with objects inside, none of which can change. It may also
be a function that shardax made of another one (``sx.jit(f)``, ``sx.vmap(f)``): the places of that
other function count as well. What a method or a partial is bound to is an argument of the call.

While a function is traced, it runs with *stand-ins*: a copy of the function sees, at each place,
the copy of the object that belongs to the trace (``StandIns``). So an object that the trace meets
as the original was reached in some other way: by an item of a list, by a helper function, by an
attribute of an ordinary object. Nothing says whether that way leads to the same object at the next
call, and the function is traced again at every call.

A place whose name is bound anew while the function is traced is not certain either: two functions
may share the cell. Such a trace is dropped, and another one runs without a stand-in there.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from shardax._core.graph.flatten import is_object
from shardax._core.graph.static import identity_of
from shardax._core.object import Object, Wrapper

_LIBRARY = __name__.partition(".")[0]


class CapturePlace(NamedTuple):
    """Where a function finds an object, or a function made by shardax that finds one."""

    name: str
    """The name of the cell, global or parameter, for messages and paths."""

    read: Callable[[], Any]
    """Returns what the place holds now; None if it is empty."""

    key: Hashable
    """What tells places apart: the ``id`` of the cell, or of what has the name; and the name."""

    is_fixed: bool = False
    """Whether the place always holds the same objects: what a method is bound to."""

    def signature(self) -> Hashable:
        """Returns what tells whether the place holds the same objects as at another call."""
        return signature_of(self.read())


def signature_of(value: Any, of_object: Callable[[Object], Hashable] = id) -> Hashable:
    """Returns the structure of what a place holds, with objects and functions by identity.

    Args:
        value: What the place holds.
        of_object: What an object counts by.
    """
    kind = type(value)

    if issubclass(kind, Object):
        return of_object(value)
    if _is_tuple(kind):
        return (kind, *(signature_of(item, of_object) for item in value))
    if kind is functools.partial:
        function = signature_of(value.func, of_object) or identity_of(value.func)
        parts = (*value.args, *value.keywords.values())
        names = tuple(value.keywords)
        return (kind, function, names, *(signature_of(part, of_object) for part in parts))
    if kind is types.MethodType and issubclass(type(value.__self__), Object):
        return (of_object(value.__self__), identity_of(value.__func__))
    if kind is types.FunctionType or issubclass(kind, (Wrapper, Functions)):
        return identity_of(value)
    # Anything else is read when the function is traced.
    return None


def _is_tuple(kind: type) -> bool:
    """Returns whether values of a class are made of their items alone."""
    return kind is tuple or (kind.__bases__ == (tuple,) and "_fields" in vars(kind))


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
    elif _is_tuple(kind):
        for item in value:
            yield from objects_in(item)
    elif kind is functools.partial:
        for item in (value.func, *value.args, *value.keywords.values()):
            yield from objects_in(item)
    elif kind is types.MethodType:
        yield from objects_in(value.__self__)


def places_of(function: object) -> list[CapturePlace]:
    """Returns the places of a function that hold objects now, or functions that have such."""
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

    def _visit_owner(self, owner: Any) -> None:
        if issubclass(type(owner), Object):
            self.places.append(CapturePlace("", weakref.ref(owner), (id(owner), ""), is_fixed=True))

    def _visit_place(
        self, name: str, holder: object, read: Callable[[], Any], in_our_cell: bool = False
    ) -> None:
        value = read()
        place = CapturePlace(name, read, (id(holder), name))
        if next(objects_in(value), None) is not None:
            self.places.append(place)

        known = len(self.places)
        for made in _functions_in(value, in_our_cell):
            self.visit_function(made)
        if len(self.places) > known:
            # The places just added belong to what this one holds. Should it be bound anew, they are
            # others, so it counts by what it holds, too. (Once more does no harm.)
            self.places.append(place)


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


def _global_names(function: types.FunctionType) -> list[str]:
    """Returns the globals that a function's code, or code inside of it, may name."""
    scope = function.__globals__
    # A module of this package holds no object of the user's. A function that stores globals needs
    # the real ones, where others see them at once.
    if _is_ours(function) or _stores_globals(function.__code__):
        return []
    return [name for name in _names_in(function.__code__) if name in scope]


@functools.lru_cache(maxsize=1024)
def _stores_globals(code: types.CodeType) -> bool:
    """Returns whether code, or code inside of it, stores or deletes globals."""
    if any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code)):
        return True
    inner = (constant for constant in code.co_consts if type(constant) is types.CodeType)
    return any(map(_stores_globals, inner))


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in code."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)


def _functions_in(value: Any, in_our_cell: bool) -> Iterator[object]:
    """Yields the functions, in what a place holds, whose places count as well.

    Args:
        value: What the place holds.
        in_our_cell: Whether the place is a cell of a function that shardax made, which calls every
            function that it closes over. Otherwise only functions made by shardax count.
    """
    kind = type(value)

    if issubclass(kind, (Wrapper, Functions)):
        yield value
    elif kind is types.FunctionType:
        if in_our_cell or _is_ours(value):
            yield value
    elif kind in (functools.partial, types.MethodType) and in_our_cell:
        yield value
    elif kind is functools.partial:
        yield from _functions_in(value.func, in_our_cell)
    elif _is_tuple(kind):
        for item in value:
            yield from _functions_in(item, in_our_cell)


def _is_ours(function: types.FunctionType) -> bool:
    """Returns whether a function was made by this package."""
    # ``functools.wraps`` overwrites ``__module__``; the globals are those of the defining module.
    name = function.__globals__.get("__name__")
    return type(name) is str and name.partition(".")[0] == _LIBRARY


class StandIns:
    """Copies of functions in which stand-ins take the place of objects.

    Used while a trace runs; ``bound_anew`` then says where that was not right.
    """

    def __init__(
        self, pairs: Iterable[tuple[Object, Object]], uncertain: Container[Hashable] = ()
    ) -> None:
        # Originals and their stand-ins; and the latter by ``id`` of the original.
        self._pairs = list(pairs)
        self._stand_ins = {id(original): stand_in for original, stand_in in self._pairs}
        # Keys of places that are no certain ones.
        self._uncertain = uncertain
        # (original, copy) of functions, by ``id`` of the original.
        self._copies: dict[int, tuple[object, Any]] = {}
        # Called once the trace is over: each returns the key of a place that was bound anew, or
        # puts an original back.
        self._checks: list[Callable[[], Hashable | None]] = []

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

    def value(self, value: Any, in_our_cell: bool = False) -> Any:
        """Returns what a place holds with stand-ins; see ``_functions_in`` for ``in_our_cell``."""
        kind = type(value)

        if issubclass(kind, Object):
            return self._stand_ins.get(id(value), value)
        if next(_functions_in(value, in_our_cell), None) is value:
            return self.function(value)
        if _is_tuple(kind):
            items = [self.value(item, in_our_cell) for item in value]
            return value if _are_same(items, value) else tuple.__new__(kind, items)
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

    def _restore(self, cell: types.CellType) -> None:
        """Replaces a stand-in, which the function stored into its own cell, by the original."""
        content = _content(cell)
        originals = (original for original, copy in self._pairs if copy is content)
        original = next(originals, None)
        if original is not None:
            cell.cell_contents = original

    def bound_anew(self) -> list[Hashable]:
        """Undoes what the function stored; returns the keys of places that it bound anew."""
        keys = (check() for check in self._checks)
        return [key for key in keys if key is not None]

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
            owner = self.value(function.__self__)
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
            return function if copy is inner else function._maker()(copy)
        if issubclass(kind, Object):
            return self.value(function)
        return function

    def _copy_plain_function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        in_our_cell = _is_ours(function)
        names = function.__code__.co_freevars
        closure = tuple(map(functools.partial(self._cell, in_our_cell), names, cells))
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

    def _cell(self, in_our_cell: bool, name: str, cell: types.CellType) -> types.CellType:
        key = (id(cell), name)
        content = _content(cell)
        stand_in = self.value(content, in_our_cell)
        if key in self._uncertain:  # the function has the cell itself
            self._checks.append(functools.partial(self._restore, cell))
            return cell
        if stand_in is content:
            return cell
        copy = types.CellType(stand_in)

        def check() -> Hashable | None:
            # By ``nonlocal``, in the traced function or in another one that shares the cell.
            is_same = _content(copy) is stand_in and _content(cell) is content
            return None if is_same else key

        self._checks.append(check)
        return copy

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        scope = function.__globals__
        stand_ins = {}
        for name in _global_names(function):
            value = scope[name]
            stand_in = self.value(value)
            if stand_in is not value:
                stand_ins[name] = (value, stand_in)

        return _GlobalsWithStandIns(scope, stand_ins) if stand_ins else scope


def _are_same(items: Iterable[object], others: Iterable[object]) -> bool:
    """Returns whether two sequences of one length hold the very same values."""
    return all(item is other for item, other in zip(items, others, strict=True))


class _GlobalsWithStandIns(dict):
    """The globals of a traced function that stores none, with stand-ins for some names.

    Python looks a global name up by ``__getitem__`` where a function's globals are of a subclass of
    ``dict``. Were a version of Python to look up in another way, the function would still find a
    stand-in, in the copy that this dictionary is.
    """

    def __init__(
        self, scope: dict[str, Any], stand_ins: Mapping[str, tuple[object, object]]
    ) -> None:
        super().__init__(scope)
        self.update({name: stand_in for name, (_, stand_in) in stand_ins.items()})
        self._scope = scope
        self._stand_ins = stand_ins

    def __getitem__(self, name: str) -> Any:
        # From the real globals, which other functions may have stored into since.
        value = self._scope[name]
        original, stand_in = self._stand_ins.get(name, (None, None))
        return stand_in if original is value and original is not None else value

    def __setitem__(self, name: str, value: object) -> None:
        # Not by a statement of the function, but by ``globals()[name] = value``.
        super().__setitem__(name, value)
        self._scope[name] = value
