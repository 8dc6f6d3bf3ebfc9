# SPDX-License-Identifier: Apache-2.0
"""Objects that a compiled function reaches without being given them.

At every call, the object that is read and written is the one that plain Python would use now. How
that is made sure depends on the way in which the function reaches it. Three ways are *certain*:

1. a closure cell of the function,
2. a global that the function's own code names,
3. a default value of a parameter.

Such an object is an input of the program, like an argument. Every call looks at what the cell, the
name or the default holds (``CapturePlace.read``). If that is another object than before, the other
one is read and written. The function is traced for it only if its structure, or the shape or dtype
of a value, is another one.

Any other way is not certain: an attribute of an imported module (``settings.model``), an item of a
list, an attribute of an ordinary object, a helper function (whose cells and globals are not looked
at). Nothing says whether it leads to the same object at the next call. So when a trace has met an
object in such a way, the function is traced once more with the object as an input, and the program
is not kept: every later call traces again, and meets what is there then. It traces once where it
meets the objects of the trace before, and twice where it meets another one. There is one warning
(``errors.uncertain_capture``).

A name bound by ``from settings import model`` is a global of the function's own module: a certain
way. As in plain Python, binding ``settings.model`` anew does not change it.

A *place* is one cell, global or default (``places_of``). What it holds may be the object itself, or
a tuple, a ``functools.partial`` or a bound method with objects inside, none of which can change. It
may also be a function that shardax made of another one (``sx.jit(f)``, ``sx.vmap(f)``): the places
of that other function count as well. What a method or a partial is bound to is an argument.

While a function is traced, a copy of it runs, which sees at each place the copy of the object that
belongs to the trace, its *stand-in* (``StandIns``). This is how the two ways are told apart: an
object that the trace meets as the original was reached in some other way. One walk finds the places
and makes the copy.

A place whose name is bound anew while the function is traced is not certain either: others read the
same name. Such a trace is dropped, with what it stored, and another one runs without a stand-in
there. A function that stores any global of a module has no stand-ins for the globals of that
module.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
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
    if kind is types.FunctionType or issubclass(kind, (Wrapper, Functions)):
        return identity_of(value)
    if kind is types.MethodType and not issubclass(type(value.__self__), Object):
        return None

    items = _items_of(value)
    if not items:
        return None  # anything else is read when the function is traced
    signatures = [signature_of(item, of_object) for item in items]
    if kind is functools.partial:
        names = tuple(value.keywords)
        return (kind, signatures[0] or identity_of(value.func), names, *signatures[1:])
    if kind is types.MethodType:
        return (kind, identity_of(value.__func__), *signatures)
    return (kind, *signatures)


def objects_in(value: Any) -> Iterator[Object]:
    """Yields the objects in what a place holds."""
    if issubclass(type(value), Object):
        yield value
        return
    for item in _items_of(value):
        yield from objects_in(item)


def _items_of(value: Any) -> tuple[Any, ...]:
    """Returns what a tuple, a partial or a bound method is made of, which cannot change."""
    # By the type alone: a user's object is never asked for an attribute or its ``__class__``.
    kind = type(value)
    if _is_tuple(kind):
        return tuple(value)
    if kind is functools.partial:
        return (value.func, *value.args, *value.keywords.values())
    if kind is types.MethodType:
        return (value.__self__,)
    return ()


def _with_items(value: Any, items: Sequence[Any]) -> Any:
    """Returns a tuple, a partial or a bound method that is made of other items."""
    kind = type(value)
    if kind is functools.partial:
        end = 1 + len(value.args)
        keywords = dict(zip(value.keywords, items[end:], strict=True))
        return functools.partial(items[0], *items[1:end], **keywords)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, items[0])
    return tuple.__new__(kind, items)


def _is_tuple(kind: type) -> bool:
    """Returns whether values of a class are made of their items alone."""
    return kind is tuple or (kind.__bases__ == (tuple,) and "_fields" in vars(kind))


def _are_same(items: Iterable[object], others: Iterable[object]) -> bool:
    """Returns whether two sequences of one length hold the very same values."""
    return all(item is other for item, other in zip(items, others, strict=True))


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


# --- the walk ---------------------------------------------------------------------------------


def places_of(function: object) -> list[CapturePlace]:
    """Returns the places of a function that hold objects now, or functions with such places."""
    walk = StandIns(())
    walk.function(function)
    return walk.places


class _WalkedFunction(NamedTuple):
    """A function that was walked."""

    function: object
    copy: Any
    has_places: bool


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
    """A walk over a function and those that it is made of, copying them with stand-ins.

    When the copy has run, ``bound_anew`` says where that was not right.

    Args:
        pairs: Originals and their stand-ins.
        uncertain: Keys of places that were bound anew in an earlier trace: there the function has
            the cell, or the globals, itself.

    Attributes:
        places: The places that were found to hold objects, or functions with such places.
    """

    def __init__(
        self, pairs: Iterable[tuple[Object, Object]], uncertain: Container[Hashable] = ()
    ) -> None:
        self.places: list[CapturePlace] = []
        self._pairs = list(pairs)
        self._stand_ins = {id(original): stand_in for original, stand_in in self._pairs}
        self._uncertain = uncertain
        # By ``id``; holding the functions keeps their ids from being used again.
        self._walked: dict[int, _WalkedFunction] = {}
        self._replaced_cells: list[_ReplacedCell] = []
        self._replaced_globals: list[_GlobalsWithStandIns] = []
        self._uncertain_cells: list[types.CellType] = []

    def function(self, function: Any) -> Any:
        """Returns a function that finds stand-ins at its places; itself if it has none."""
        if id(function) in self._walked:
            return self._walked[id(function)].copy

        # A function that reaches itself finds itself.
        self._walked[id(function)] = _WalkedFunction(function, function, has_places=False)
        count = len(self.places)
        copy = self._copy(function)
        has_places = len(self.places) > count
        self._walked[id(function)] = _WalkedFunction(function, copy, has_places)
        return copy

    def bound_anew(self) -> list[Hashable]:
        """Undoes what the function stored; returns the keys of places that it bound anew."""
        for cell in self._uncertain_cells:
            self._restore(cell)
        keys = [cell.key for cell in self._replaced_cells if cell.is_bound_anew]
        for scope in self._replaced_globals:
            keys += scope.bound_anew
        return keys

    def _restore(self, cell: types.CellType) -> None:
        """Replaces a stand-in, which the function stored into its own cell, by the original."""
        content = _content(cell)
        for original, stand_in in self._pairs:
            if stand_in is content:
                cell.cell_contents = original
                return

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
            return self._copy_partial(function)
        if issubclass(kind, Wrapper):
            inner = function.function
            copy = self.function(inner)
            return function if copy is inner else function._maker()(copy)
        return self._owner(function)

    def _owner(self, owner: Any) -> Any:
        """Returns what a method is bound to, or a callable Module, as a stand-in."""
        if issubclass(type(owner), Object):
            self.places.append(CapturePlace("", weakref.ref(owner), (id(owner), ""), is_fixed=True))
        return self._value(owner)

    def _copy_partial(self, function: functools.partial[Any]) -> functools.partial[Any]:
        # Like the arguments of a call, those of a partial may be pytrees with objects.
        leaves, treedef = jax.tree.flatten((function.args, function.keywords), is_leaf=is_object)
        objects = tuple(leaf for leaf in leaves if is_object(leaf))
        self._at_place("", function, lambda: objects)

        called = self.function(function.func)
        new_leaves = [self._value(leaf) for leaf in leaves]
        if called is function.func and _are_same(new_leaves, leaves):
            return function
        args, keywords = treedef.unflatten(new_leaves)
        return functools.partial(called, *args, **keywords)

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
        defaults = function.__defaults__ or ()
        first = function.__code__.co_argcount - len(defaults)
        new_defaults = []
        for index in range(len(defaults)):
            name = function.__code__.co_varnames[first + index]
            read = functools.partial(_default, function, index)
            new_defaults.append(self._at_place(name, function, read))
        named = function.__kwdefaults__ or {}
        new_named = {}
        for name in named:
            read = functools.partial(_keyword_default, function, name)
            new_named[name] = self._at_place(name, function, read)

        if (
            _are_same(closure, cells)
            and scope is function.__globals__
            and _are_same(new_defaults, defaults)
            and _are_same(new_named.values(), named.values())
        ):
            return function
        code, name = function.__code__, function.__name__
        copy = types.FunctionType(code, scope, name, tuple(new_defaults) or None, closure)
        copy.__kwdefaults__ = new_named or None
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
        stand_in = self._at_place(name, cell, functools.partial(_content, cell), in_our_cell)
        if stand_in is content:
            return cell
        copy = types.CellType(stand_in)
        self._replaced_cells.append(_ReplacedCell(key, cell, content, copy, stand_in))
        return copy

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        """Returns globals with stand-ins; those of the function if they hold no object."""
        scope = function.__globals__
        # A module of this package holds no object of the user's.
        if _is_ours(function):
            return scope

        stand_ins: dict[str, tuple[object, object]] = {}
        for name in _names_in(function.__code__):
            if name not in scope or (id(scope), name) in self._uncertain:
                continue
            value = scope[name]
            stand_in = self._at_place(name, scope, functools.partial(scope.get, name))
            if stand_in is not value:
                stand_ins[name] = (value, stand_in)

        if not stand_ins:
            return scope
        copy = _GlobalsWithStandIns(scope, stand_ins)
        self._replaced_globals.append(copy)
        return copy

    def _at_place(
        self, name: str, holder: object, read: Callable[[], Any], in_our_cell: bool = False
    ) -> Any:
        """Returns what a cell, global or default holds, with stand-ins; notes it if it is a place.

        Args:
            name: The name of the cell, global or parameter.
            holder: The cell, or what has the name.
            read: Returns what it holds.
            in_our_cell: Whether it is a cell of a function that shardax made, which calls every
                function that it closes over. Otherwise only functions made by shardax are walked.
        """
        value = read()
        place = CapturePlace(name, read, (id(holder), name))
        holds_object = next(objects_in(value), None) is not None
        if holds_object:
            self.places.append(place)

        stand_in = self._value(value, in_our_cell)

        # If a function with places is replaced by another one, the places are others.
        functions = _functions_in(value, in_our_cell)
        if not holds_object and any(self._walked[id(inner)].has_places for inner in functions):
            self.places.append(place)
        return stand_in

    def _value(self, value: Any, in_our_cell: bool = False) -> Any:
        """Returns a value with stand-ins for the objects and functions in it."""
        if issubclass(type(value), Object):
            return self._stand_ins.get(id(value), value)
        if _is_walked(value, in_our_cell):
            return self.function(value)

        items = _items_of(value)
        new_items = [self._value(item, in_our_cell) for item in items]
        return value if _are_same(new_items, items) else _with_items(value, new_items)


def _is_walked(value: Any, in_our_cell: bool) -> bool:
    """Returns whether a value is a function whose places count; see ``StandIns._at_place``."""
    kind = type(value)
    if issubclass(kind, (Wrapper, Functions)):
        return True
    if kind is types.FunctionType:
        return in_our_cell or _is_ours(value)
    return in_our_cell and kind in (functools.partial, types.MethodType)


def _functions_in(value: Any, in_our_cell: bool) -> Iterator[object]:
    """Yields the functions in what a place holds whose places count."""
    if _is_walked(value, in_our_cell):
        yield value
        return
    for item in _items_of(value):
        yield from _functions_in(item, in_our_cell)


def _is_ours(function: types.FunctionType) -> bool:
    """Returns whether a function was made by this package."""
    # ``functools.wraps`` overwrites ``__module__``; the globals are those of the defining module.
    name = function.__globals__.get("__name__")
    return type(name) is str and name.partition(".")[0] == _LIBRARY


# --- cells, globals and defaults --------------------------------------------------------------


def closed_over(function: types.FunctionType) -> list[object]:
    """Returns what the closure cells of a function hold, None for names not bound yet."""
    return [_content(cell) for cell in function.__closure__ or ()]


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


class _GlobalsWithStandIns(dict):
    """The globals of a traced function, with stand-ins for some names.

    Python looks a global name up by ``__getitem__`` where a function's globals are of a subclass of
    ``dict``. Were a version of Python to look up in another way, the function would still find a
    stand-in, in the copy that this dictionary is. The statement ``global x; x = ...`` stores into
    the copy, in any version.
    """

    def __init__(
        self, scope: dict[str, Any], stand_ins: Mapping[str, tuple[object, object]]
    ) -> None:
        super().__init__(scope)
        self.update({name: stand_in for name, (_, stand_in) in stand_ins.items()})
        self._as_made = dict(self)
        self._scope = scope
        self._stand_ins = stand_ins

    def __getitem__(self, name: str) -> Any:
        # From the real globals, which other functions may have stored into since.
        value = self._scope[name]
        original, stand_in = self._stand_ins.get(name, (None, None))
        return stand_in if original is value and original is not None else value

    @property
    def bound_anew(self) -> list[Hashable]:
        """The keys of all places in it, if the function stored or deleted a global."""
        items = zip(self.items(), self._as_made.items(), strict=False)
        is_as_made = len(self) == len(self._as_made) and all(
            name == old_name and value is old_value
            for (name, value), (old_name, old_value) in items
        )
        return [] if is_as_made else [(id(self._scope), name) for name in self._stand_ins]
