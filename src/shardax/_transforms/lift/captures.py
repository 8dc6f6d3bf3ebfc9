# SPDX-License-Identifier: Apache-2.0
"""Objects that a compiled function reaches without being given them.

At every call, the object that is read and written is the one that plain Python would use now. How
that is made sure depends on the way in which the function reaches it. Three ways are *certain*:

1. a closure cell of the function,
2. a global that the function's own code names,
3. a default value of a parameter.

Such an object is an input of the program, like an argument. Every call looks at what the cell, the
name or the default holds (``CapturePlace.read``). If that is another object than before, the other
one is read and written; it is traced for only if its structure is another one.

Any other way is not certain: an attribute of an imported module (``settings.model``), an item of a
list, a helper function, an attribute of an ordinary object. Nothing says whether it leads to the
same object at the next call. So when a trace has met an object in such a way, the function is
traced once more with the object as an input, and nothing is remembered: the next call traces again,
and meets what is there then. There is one warning (``errors.uncertain_capture``).

A name bound by ``from settings import model`` is a global of the function's own module: a certain
way. As in plain Python, binding ``settings.model`` anew does not change it.

A *place* is one cell, global or default (``places_of``). What it holds may be the object itself, or
a tuple, a ``functools.partial`` or a bound method with objects inside, none of which can change. It
may also be a function that shardax made of another one (``sx.jit(f)``, ``sx.vmap(f)``): the places
of that other function count as well. What a method or a partial is bound to is an argument.

While a function is traced, a copy of it runs, which sees at each place the copy of the object that
belongs to the trace, its *stand-in* (``StandIns``). This is how the two ways are told apart: an
object that the trace meets as the original was reached in some other way.

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
    """Whether the place always holds the same object: what a method is bound to."""

    def signature(self) -> Hashable:
        """Returns the identities of what the place holds now, as part of what a call is found by.

        Two calls with equal signatures read and write the same objects there.
        """
        return signature_of(self.read())


def signature_of(value: Any, of_object: Callable[[Object], Hashable] = id) -> Hashable:
    """Returns what a place holds, as a key: objects and functions by identity.

    Args:
        value: What the place holds.
        of_object: What an object counts by: its identity, or its type.
    """
    kind = type(value)

    if issubclass(kind, Object):
        return of_object(value)
    if _is_tuple(kind):
        return (kind, *(signature_of(item, of_object) for item in value))
    if kind is functools.partial:
        function = signature_of(value.func, of_object) or identity_of(value.func)
        names = tuple(value.keywords)
        arguments = (*value.args, *value.keywords.values())
        return (kind, function, names, *(signature_of(item, of_object) for item in arguments))
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


# --- finding places ---------------------------------------------------------------------------


def places_of(function: object) -> list[CapturePlace]:
    """Returns the places of a function that hold objects now, or functions with such places."""
    search = _PlaceSearch()
    search.visit_function(function)
    return search.places


def closed_over(function: types.FunctionType) -> list[object]:
    """Returns what the closure cells of a function hold, None for names not bound yet."""
    return [_content(cell) for cell in function.__closure__ or ()]


class _PlaceSearch:
    """The search for the places of a function, and of the functions that it is made of.

    Attributes:
        places: The places that hold objects.
    """

    def __init__(self) -> None:
        self.places: list[CapturePlace] = []
        # By ``id``; holding the functions keeps their ids from being used again.
        self._visited: dict[int, object] = {}

    def visit_function(self, function: Any) -> None:
        """Adds the places of a function that the compiled call runs: made by shardax, or plain."""
        if id(function) in self._visited:
            return
        self._visited[id(function)] = function
        kind = type(function)

        if issubclass(kind, Functions):
            for inner in function.functions:
                self.visit_function(inner)
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
        # 1. Closure cells.
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._visit_place(name, cell, functools.partial(_content, cell), _is_ours(function))

        # 2. Globals.
        scope = function.__globals__
        for name in _global_names(function):
            self._visit_place(name, scope, functools.partial(scope.get, name))

        # 3. Default values.
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

        count = len(self.places)
        for function in _functions_in(value, in_our_cell):
            self.visit_function(function)
        if len(self.places) > count:
            # The places just added are of a function that this place holds. If it is bound anew,
            # they are others; so it is a place, too. (To add it twice does no harm.)
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
    # the real ones, where others see them at once, so none of its globals is a place.
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
    """Returns the names of globals and attributes in code.

    Python has one list of both. An attribute with the name of a global makes that global a place,
    which costs a look at it and does no harm.
    """
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


# --- stand-ins --------------------------------------------------------------------------------


class _ReplacedCell(NamedTuple):
    """A closure cell, and the cell with a stand-in that a copied function has in its place."""

    key: Hashable
    cell: types.CellType
    content: object
    copy: types.CellType
    stand_in: object

    @property
    def is_bound_anew(self) -> bool:
        """Whether the name was bound anew, by ``nonlocal``, in the traced function or elsewhere."""
        is_same = _content(self.copy) is self.stand_in and _content(self.cell) is self.content
        return not is_same


class StandIns:
    """Copies of functions in which stand-ins take the place of objects, for one trace.

    When the trace is over, ``bound_anew`` says where that was not right.

    Args:
        pairs: Originals and their stand-ins.
        uncertain: Keys of places that were bound anew in an earlier trace: there the function has
            the cell itself.
    """

    def __init__(
        self, pairs: Iterable[tuple[Object, Object]], uncertain: Container[Hashable] = ()
    ) -> None:
        self._pairs = list(pairs)
        self._stand_ins = {id(original): stand_in for original, stand_in in self._pairs}
        self._uncertain = uncertain
        # (original, copy) of functions, by ``id`` of the original.
        self._copies: dict[int, tuple[object, Any]] = {}
        self._replaced_cells: list[_ReplacedCell] = []
        self._uncertain_cells: list[types.CellType] = []

    def function(self, function: Any) -> Any:
        """Returns a function that finds stand-ins at its places; itself if it has none."""
        if id(function) in self._copies:
            _, copy = self._copies[id(function)]
            return copy

        # A function that reaches itself finds itself.
        self._copies[id(function)] = (function, function)
        copy = self._copy(function)
        self._copies[id(function)] = (function, copy)
        return copy

    def bound_anew(self) -> list[Hashable]:
        """Undoes what the function stored; returns the keys of places that it bound anew."""
        for cell in self._uncertain_cells:
            self._restore(cell)
        return [cell.key for cell in self._replaced_cells if cell.is_bound_anew]

    def _restore(self, cell: types.CellType) -> None:
        """Replaces a stand-in, which the function stored into its own cell, by the original."""
        content = _content(cell)
        for original, stand_in in self._pairs:
            if stand_in is content:
                cell.cell_contents = original
                return

    def _value(self, value: Any, in_our_cell: bool = False) -> Any:
        """Returns what a place holds with stand-ins; see ``_functions_in`` for ``in_our_cell``."""
        kind = type(value)

        if issubclass(kind, Object):
            return self._stand_ins.get(id(value), value)
        if next(_functions_in(value, in_our_cell), None) is value:
            return self.function(value)
        if _is_tuple(kind):
            items = [self._value(item, in_our_cell) for item in value]
            return value if _are_same(items, value) else tuple.__new__(kind, items)
        if kind is functools.partial:
            function = self._value(value.func)
            args = [self._value(item) for item in value.args]
            keywords = {name: self._value(item) for name, item in value.keywords.items()}
            before = (value.func, *value.args, *value.keywords.values())
            if _are_same([function, *args, *keywords.values()], before):
                return value
            return functools.partial(function, *args, **keywords)
        if kind is types.MethodType:
            owner = self._value(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        return value

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
            owner = self._value(function.__self__)
            called = self.function(function.__func__)
            if owner is function.__self__ and called is function.__func__:
                return function
            return types.MethodType(called, owner)
        if kind is functools.partial:
            called = self.function(function.func)
            arguments = (function.args, function.keywords)
            args, keywords = jax.tree.map(self._value, arguments, is_leaf=is_object)
            return functools.partial(called, *args, **keywords)
        if issubclass(kind, Wrapper):
            inner = function.function
            copy = self.function(inner)
            return function if copy is inner else function._maker()(copy)
        if issubclass(kind, Object):
            return self._value(function)
        return function

    def _copy_plain_function(self, function: types.FunctionType) -> types.FunctionType:
        # 1. Closure cells.
        cells = function.__closure__ or ()
        names = function.__code__.co_freevars
        in_our_cell = _is_ours(function)
        closure = tuple(
            self._cell(name, cell, in_our_cell) for name, cell in zip(names, cells, strict=True)
        )

        # 2. Globals.
        scope = self._globals(function)

        # 3. Default values.
        defaults = self._value(function.__defaults__) if function.__defaults__ else None
        named = function.__kwdefaults__ or {}
        named_copy = {name: self._value(value) for name, value in named.items()}

        if (
            _are_same(closure, cells)
            and scope is function.__globals__
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

    def _cell(self, name: str, cell: types.CellType, in_our_cell: bool) -> types.CellType:
        """Returns a cell with a stand-in; the cell itself if it holds no object."""
        key = (id(cell), name)
        if key in self._uncertain:
            self._uncertain_cells.append(cell)
            return cell

        content = _content(cell)
        stand_in = self._value(content, in_our_cell)
        if stand_in is content:
            return cell

        copy = types.CellType(stand_in)
        self._replaced_cells.append(_ReplacedCell(key, cell, content, copy, stand_in))
        return copy

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        """Returns globals with stand-ins; those of the function if they hold no object."""
        scope = function.__globals__
        stand_ins: dict[str, tuple[object, object]] = {}
        for name in _global_names(function):
            value = scope[name]
            stand_in = self._value(value)
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
