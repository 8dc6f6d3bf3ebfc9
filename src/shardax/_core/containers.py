# SPDX-License-Identifier: Apache-2.0
"""Tracked lists and dicts, and the form in which Modules store values.

A plain list that holds Variables could be changed behind the model's back. So assigning a list or
dict to an attribute stores a ``List`` or ``Dict`` with the same items, which advances the structure
epoch when it changes. They compare and behave like ``list`` and ``dict``. The list that was
assigned is *not* tracked: ``layers = []; self.layers = layers; layers.append(x)`` changes only the
local list; append to ``self.layers``.

Plain arrays are *boxed*: held in a hidden Variable (``ArrayAttribute``), so that they can be
lifted, written and saved like any other data, and unboxed when read. A pytree node that can be
changed in place, such as a dataclass that is not frozen, is kept beside its children if some of
them are boxed (``ChangeableNode``).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import reprlib
from collections.abc import (
    Callable,
    Hashable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    MutableMapping,
    MutableSequence,
    ValuesView,
)
from typing import Any, Generic, Self, TypeVar, overload

import jax
import numpy as np

from shardax._core.errors import StaticAttributeError, VariableValueError
from shardax._core.frames import Frame, check_structural_write, local, owner_here, resolve
from shardax._core.frozen import FrozenArray, FrozenVariable, Slot
from shardax._core.graph import handlers
from shardax._core.graph.definitions import DictDef, ListDef
from shardax._core.graph.held import ObjectSearch
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.graph.pytrees import register_graph
from shardax._core.graph.settings import (
    IncomparableError,
    SettingsKey,
    incomparable_attribute,
    settings_key,
)
from shardax._core.graph.static import Static, function_identities
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, Wrapper, epoch
from shardax._core.variable import ArrayAttribute, Variable

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BOXES = (ArrayAttribute, FrozenArray)
ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, LazyValue)

_SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})


def box(value: Any, where: str) -> Any:
    """Returns ``value`` in the form in which a model stores it."""
    if type(value) in _SIMPLE_TYPES or isinstance(value, (Object, ChangeableNode)):
        return value
    if isinstance(value, ARRAY_TYPES):
        return _box_arrays(value, where)
    if isinstance(value, list):
        return List._of(value, where)
    if isinstance(value, dict):
        return Dict._of(value, where)
    has_parts = handlers.has_parts(value)
    handler = handlers.handler_of(value)
    if handler.stores_items and (has_parts or isinstance(value, tuple)):
        _check_key(value, where, handler.config)
        hidden = ObjectSearch().beside_children(value, handler.config(value))
        if hidden is not None:
            raise hidden.error(value, where)
        stored = handlers.map_children(lambda item: box(item, where), value)
        is_copied = handler.volatile and any(
            is_boxed(child) for _, child in handler.children(stored)
        )
        return ChangeableNode.of(value, where) if is_copied else stored
    if has_parts:
        hidden = ObjectSearch().hidden_in(value)
        if hidden is not None:
            raise hidden.error(value, where)
        return value
    if not jax.tree_util.all_leaves((value,)) and _is_array_tree(value):
        return _box_arrays(value, where)
    _check_static(value, where)
    return value


def _box_arrays(value: object, where: str) -> ArrayAttribute:
    try:
        return ArrayAttribute(value)
    except VariableValueError as error:
        raise StaticAttributeError(
            f"Cannot use an array of dtype {getattr(value, 'dtype', 'object')} as {where}: JAX has "
            f"no such dtype. Encode it as numbers; or, if "
            f"it is configuration, keep it as a tuple: tuple(array.tolist())."
        ) from error


def _is_array_tree(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda item: isinstance(item, Object))
    return bool(leaves) and all(isinstance(leaf, ARRAY_TYPES) for leaf in leaves)


def _check_static(value: Any, where: str) -> None:
    untracked = _untracked_data(value)
    if untracked is not None:
        raise StaticAttributeError(
            f"Cannot use {value!r} of type {type(value).__name__} as {where}: {untracked}, so it "
            f"would be part of no state, gradient or checkpoint. Ways out: use a list, dict or "
            f"tuple, such as list(value)."
        )
    hidden = ObjectSearch().held_by(value)
    if hidden is not None:
        raise hidden.error(value, where)
    _check_key(value, where, settings_key)


def _check_key(value: object, where: str, key: Callable[[Any], object]) -> None:
    try:
        key(value)
    except IncomparableError as error:
        raise StaticAttributeError(
            incomparable_attribute(type(value), f"given as {where}", error)
        ) from error
    except TypeError as error:
        raise StaticAttributeError(
            f"Cannot use {value!r} of type {type(value).__name__} as {where}: it is neither data "
            f"(an array, Variable, Module, or list, dict, tuple of these) nor hashable "
            f"configuration ({error}). Ways out: wrap arrays that live inside it in "
            f"sx.Variable(...); use a tuple or frozenset instead of a set; make a class of your "
            f"own a frozen dataclass, a sx.Module, or give it __hash__ and __eq__."
        ) from error


def _untracked_data(value: Any) -> str | None:
    """Returns why arrays in a value of Python's own cannot be tracked, or None."""
    if isinstance(value, (set, frozenset, collections.deque)):
        array = next((item for item in value if isinstance(item, jax.Array)), None)
        return None if array is None else f"the {type(array).__name__} in it cannot be tracked"
    is_pythons = type(value).__module__ in ("builtins", "itertools")
    is_passing = isinstance(value, (Iterator, KeysView, ValuesView, ItemsView))
    return "what passes through it cannot be tracked" if is_pythons and is_passing else None


def unbox(value: Any) -> PyTree:
    """Returns a stored value as the user sees it."""
    if isinstance(value, BOXES):
        return value.value
    if isinstance(value, ChangeableNode):
        return value.read()
    if handlers.handler_of(value).stores_items and handlers.has_parts(value):
        return handlers.map_children(unbox, value)
    return value


def unbox_attribute(value: object) -> Any:
    """Returns the array of an array attribute that left its model."""
    # A frozen array is what the user made it there, so it stays.
    return value.value if isinstance(value, ArrayAttribute) else value


def copy_boxes(value: object, where: str) -> Leaf:
    """Copies the array attributes of a stored value."""
    if handlers.handler_of(value).stores_items and is_boxed(value):
        return handlers.map_children(lambda item: copy_boxes(item, where), value)
    return box(value.value, where) if isinstance(value, ArrayAttribute) else value


def is_boxed(value: object) -> bool:
    """Whether the user sees an array in place of a stored value."""
    if isinstance(value, (*BOXES, ChangeableNode)):
        return True
    if isinstance(value, Slot):
        return value.variable_type is ArrayAttribute
    handler = handlers.handler_of(value)
    return handler.stores_items and any(is_boxed(child) for _, child in handler.children(value))


def same_structure(old: object, new: object) -> bool:
    """Whether replacing a stored value leaves the structure as it was."""
    if old is new:
        return True
    if (
        isinstance(old, Object)
        or isinstance(new, Object)
        or handlers.has_parts(old)
        or handlers.has_parts(new)
    ):
        return False
    new_key = settings_key(new)
    # The walk that is remembered looks at the settings objects that it met, and at no others. A
    # function that was made anew, from the same code, may read other settings.
    return (
        type(new_key) is not SettingsKey
        and settings_key(old) == new_key
        and function_identities([old]) == function_identities([new])
    )


class ChangeableNode:
    """A pytree node that users change in place, as models store it."""

    # The user has the node itself. So every walk stores what was put into it since the last one,
    # and every reading puts into it what was written elsewhere, such as by a compiled step.

    __slots__ = ("_kind", "_node", "_shown", "_stored", "_where")

    def __init__(self, kind: handlers.NodeType, stored: handlers.Pairs, where: str) -> None:
        self._kind, self._stored, self._where = kind, stored, where
        self._node: Any = None  # what the user has, from the first reading on
        self._shown: list[Any] = []  # its children when it was last looked at

    @classmethod
    def of(cls, node: object, where: str) -> ChangeableNode:
        """Returns a user's node as a model stores it."""
        node_read = cls(handlers.NODE.config(node), [], where)
        node_read._look(node)
        stored = [unbox(child) for _, child in node_read._stored]
        if all(old is new for old, new in zip(node_read._shown, stored, strict=True)):
            node_read._node = node
        return node_read

    def children(self) -> handlers.Pairs:
        """Returns keys and stored children."""
        if self._node is not None:
            self._look(self._node)
        return self._stored

    def config(self) -> handlers.NodeType:
        """Returns type and static part."""
        self.children()
        return self._kind

    def read(self) -> Leaf:
        """Returns the node that the user sees, with the present values."""
        frame = local.frame
        if frame is not None and any(resolve(box, frame) is not box for box in _boxes_in(self)):
            pair = frame.nodes.get(id(self))
            if pair is None:
                copy = ChangeableNode(self._kind, self.children(), self._where)
                pair = frame.nodes[id(self)] = (self, copy)
            return pair[1]._read_here()
        return self._read_here()

    def _read_here(self):
        """Returns the node for the frame that it belongs to."""
        values = [unbox(child) for _, child in self.children()]
        if self._node is None or any(
            new is not old for new, old in zip(values, self._shown, strict=True)
        ):
            fresh = self._kind.value.unflatten(values)
            node = fresh if self._node is None else _with_fields_of(fresh, self._node)
            self._shown = [child for _, child in handlers.NODE.children(node)]
            again = [child for _, child in handlers.NODE.children(node)]
            if any(one is not other for one, other in zip(self._shown, again, strict=True)):
                return node  # its class makes its children anew: they cannot be told from writes
            self._node = node
        return self._node

    def _look(self, node: object) -> None:
        """Stores what was put into the node since the last look."""
        pairs = handlers.NODE.children(node)
        kind = handlers.NODE.config(node)
        is_alike = kind == self._kind and len(pairs) == len(self._shown)
        stored = []
        for position, (key, child) in enumerate(pairs):
            where = f"{key!r} of {self._where}"
            old = self._stored[position][1] if is_alike else None
            if is_alike and child is self._shown[position]:
                new = old
            else:
                try:
                    new = old if write_through(old, child, where) else box(child, where)
                except StaticAttributeError:  # the assignment is undone
                    if self._shown:
                        _with_fields_of(self._kind.value.unflatten(self._shown), node)
                    raise
            stored.append((key, new))
        self._kind, self._stored, self._shown = kind, stored, [child for _, child in pairs]

    def __reduce__(self) -> Any:
        return ChangeableNode, (self.config(), self._stored, self._where)


def _boxes_in(stored: object) -> Iterator[Any]:
    """Yields the array attributes in the immutable parts of a stored value."""
    if isinstance(stored, ArrayAttribute):
        yield stored
    elif (handler := handlers.handler_of(stored)).stores_items:
        children = (
            stored._stored if isinstance(stored, ChangeableNode) else handler.children(stored)
        )
        for _, child in children:
            yield from _boxes_in(child)


def class_of(stored: object) -> type:
    """Returns the class of a stored value as the user sees it."""
    if isinstance(stored, ChangeableNode):
        return stored.config().value.node_data()[0]
    return type(stored)


def title_of(stored: object) -> str:
    """Returns what drawings call a stored value: its class, or what a wrapper does."""
    return stored._title if isinstance(stored, Wrapper) else class_of(stored).__name__


def _with_fields_of(fresh: object, node: object):
    """Gives a node a fresh one's fields; else returns the fresh one."""
    names = {name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())}
    fields = {name: getattr(fresh, name) for name in names if hasattr(fresh, name)}
    fields |= getattr(fresh, "__dict__", {})
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node if fields else fresh


handlers.register(
    ChangeableNode,
    dataclasses.replace(
        handlers.NODE,
        name="changeable pytree node of a model",
        children=ChangeableNode.children,
        config=ChangeableNode.config,
        rebuild=lambda kind, pairs: ChangeableNode(kind, list(pairs), "a pytree node"),
        volatile=True,
    ),
)


class _Container(Object):
    """What List and Dict share: ownership, marking, JAX registration."""

    __slots__ = ("__weakref__", "_flat", "_items", "_lock", "_marked", "_owner")
    _items: Any

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_graph(cls)

    @classmethod
    def _allocate(cls, owner: Frame | None, lock: str | None) -> Any:
        container = object.__new__(cls)
        container._start(owner, lock)
        return container

    def _start(self, owner: Frame | None, lock: str | None = None) -> None:
        self._owner, self._lock, self._marked, self._flat = owner, lock, False, None

    def _changing(self) -> None:
        check_structural_write(self, f"a {type(self).__name__}")

    def _changed(self) -> None:
        if self._marked:
            epoch.advance(self)

    def __getstate__(self) -> Any:
        return self._items

    def __setstate__(self, items: object) -> None:
        self._start(owner_here())
        self._items = items


@functools.total_ordering
class List(_Container, MutableSequence[T], Generic[T]):
    """A tracked list: behaves like ``list``, and models notice when it changes.

    Args:
        items: Initial items.

    Example:
        >>> import shardax as sx
        >>> class Tower(sx.Module):
        ...     def __init__(self):
        ...         self.widths = [8, 4]
        >>> tower = Tower()
        >>> tower.widths.append(2)
        >>> tower.widths == [8, 4, 2], tower.widths
        (True, List([8, 4, 2]))
    """

    __slots__ = ()

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._start(owner_here())
        self._items: list[Any] = _boxed_items(items, "a list")

    @classmethod
    def _of(cls, items: Iterable[T], where: str) -> Self:
        """Returns a list that stands somewhere in a model, for messages."""
        made = cls._allocate(owner_here(), None)
        made._items = _boxed_items(items, f"a list in {where}")
        return made

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        items = self._items[index]
        return [unbox(item) for item in items] if isinstance(index, slice) else unbox(items)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._changing()
            self._items[index] = [box(item, "item of a list") for item in value]
            self._changed()
            return
        old = self._items[index]
        if write_through(old, value, f"item {index} of a list"):
            return
        self._changing()
        new = box(value, f"item {index} of a list")
        self._items[index] = new
        if not same_structure(old, new):
            self._changed()

    def __delitem__(self, index: Any) -> None:
        self._changing()
        del self._items[index]
        self._changed()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (unbox(item) for item in self._items)

    def insert(self, index: int, value: T) -> None:
        """Inserts ``value`` before position ``index``."""
        self._changing()
        self._items.insert(index, box(value, f"item {index} of a list"))
        self._changed()

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        """Sorts in place, as ``list.sort``."""
        self._changing()
        self._items = sorted(  # a new list: a failing comparison changes nothing
            self._items, key=lambda item: key(unbox(item)) if key else unbox(item), reverse=reverse
        )
        self._changed()

    def reverse(self) -> None:
        """Reverses in place, as ``list.reverse``."""
        self._changing()
        self._items.reverse()
        self._changed()

    def extend(self, values: Iterable[T]) -> None:
        """Appends all items, as ``list.extend``."""
        new = [box(item, f"item {len(self) + i} of a list") for i, item in enumerate(values)]
        self._changing()
        self._items.extend(new)
        self._changed()

    def copy(self) -> list[T]:
        """Returns a plain list of the items."""
        return list(self)

    def __copy__(self) -> Self:
        return type(self)(self)

    def __add__(self, other: Any) -> list[Any]:
        return list(self) + list(other)

    def __radd__(self, other: Any) -> list[Any]:
        return list(other) + list(self)

    def __mul__(self, count: int) -> list[T]:
        return list(self) * count

    __rmul__ = __mul__

    def __imul__(self, count: int) -> Self:
        self[:] = list(self) * count
        return self

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, List)) else NotImplemented

    def __lt__(self, other: object) -> bool:
        return list(self) < list(other) if isinstance(other, (list, List)) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType] (as for list)

    @reprlib.recursive_repr("List([...])")
    def __repr__(self) -> str:
        return f"List({list(self)!r})"

    def _flatten(self, encode: Any) -> ListDef:
        return ListDef(type(self), tuple(encode(item, i) for i, item in enumerate(self._items)))

    def _unflatten(self, definition: ListDef, decode) -> None:
        self._items = [decode(item) for item in definition.items]


class Dict(_Container, MutableMapping[K, T], Generic[K, T]):
    """A tracked dict: behaves like ``dict``, and models notice when it changes.

    Args:
        items: Initial entries.
        **entries: More entries.

    Example:
        >>> import shardax as sx
        >>> class Heads(sx.Module):
        ...     def __init__(self):
        ...         self.sizes = {"en": 8}
        >>> heads = Heads()
        >>> heads.sizes["de"] = 4
        >>> heads.sizes == {"en": 8, "de": 4}
        True
    """

    __slots__ = ()

    def __init__(self, items: Any = (), /, **entries: Any) -> None:
        self._start(owner_here())
        self._items: dict[Any, Any] = _boxed_entries(dict(items, **entries), "a dict")

    @classmethod
    def _of(cls, entries: dict[K, T], where: str) -> Self:
        """Returns a dict that stands somewhere in a model, for messages."""
        made = cls._allocate(owner_here(), None)
        made._items = _boxed_entries(dict(entries), f"a dict in {where}")
        return made

    @classmethod
    def fromkeys(cls, keys: Iterable[object], value: object = None) -> Dict[Any, Any]:
        """Makes a Dict with the same value for every key, as ``dict.fromkeys``."""
        return cls(dict.fromkeys(keys, value))

    def __getitem__(self, key: K) -> T:
        return unbox(self._items[key])

    def __setitem__(self, key: K, value: T) -> None:
        old = self._items.get(key)
        if old is not None and write_through(old, value, f"entry {key!r} of a dict"):
            return
        self._changing()
        new = box(value, f"entry {key!r} of a dict")
        absent = key not in self._items
        self._items[_checked_key(key) if absent else key] = new
        if absent or not same_structure(old, new):
            self._changed()

    def __delitem__(self, key: K) -> None:
        self._changing()
        del self._items[key]
        self._changed()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._items)

    def popitem(self) -> tuple[K, T]:
        """Removes and returns the last entry, as ``dict.popitem``."""
        if not self._items:
            raise KeyError("popitem(): the Dict is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: K, default: Any = None) -> Any:
        """Returns the entry, setting it first if absent.

        A list or dict comes back as what was stored: tracked.
        """
        if key not in self._items:
            self[key] = default
        return self[key]

    def copy(self) -> dict[K, T]:
        """Returns a plain dict of the entries."""
        return dict(self.items())

    def __copy__(self) -> Self:
        return type(self)(self)

    def __or__(self, other: object) -> dict[Any, Any]:
        return self.copy() | dict(other) if isinstance(other, (dict, Dict)) else NotImplemented

    def __ror__(self, other: object) -> dict[Any, Any]:
        return dict(other) | self.copy() if isinstance(other, (dict, Dict)) else NotImplemented

    def __ior__(self, other: Any) -> Dict[K, T]:
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (dict, Dict)):
            return self.copy() == dict(other.items())
        return NotImplemented

    __hash__ = None  # as for dict

    @reprlib.recursive_repr("Dict({...})")
    def __repr__(self) -> str:
        return f"Dict({self.copy()!r})"

    def _flatten(self, encode: Any) -> DictDef:
        return DictDef(
            type(self), tuple((Static(key), encode(item, key)) for key, item in self._items.items())
        )

    def _unflatten(self, definition: DictDef, decode) -> None:
        self._items = {key.value: decode(item) for key, item in definition.items}


def _boxed_items(items: Iterable[object], where: str) -> list[Any]:
    return [box(item, f"item {index} of {where}") for index, item in enumerate(items)]


def _boxed_entries(entries: dict[Any, object], where: str) -> dict[Any, Any]:
    return {
        _checked_key(key): box(item, f"entry {key!r} of {where}") for key, item in entries.items()
    }


def _fill_list(holder: List[Any], pairs: handlers.Pairs) -> None:
    holder._items = [item for _, item in pairs]


def _fill_dict(holder: Dict[Any, Any], pairs: handlers.Pairs) -> None:
    holder._items = dict(pairs)


def empty_like(holder: Any) -> Any:
    """Returns an object of the same type, owned here, to be filled."""
    return type(holder)._allocate(owner_here(), None)


handlers.register(
    List,
    dataclasses.replace(
        handlers.LIST,
        name="List",
        children=lambda holder: list(enumerate(holder._items)),
        empty=empty_like,
        fill=_fill_list,
        is_object=True,
    ),
)
handlers.register(
    Dict,
    dataclasses.replace(
        handlers.DICT,
        name="Dict",
        children=lambda holder: list(holder._items.items()),
        empty=empty_like,
        fill=_fill_dict,
        is_object=True,
    ),
)


def _checked_key(key: object):
    """Checks that a dict key is configuration, and returns it."""
    _check_static(key, "a key of a dict in a model")
    return key


def write_through(old: object, new: object, where: str) -> bool:
    """Writes an array into stored data; returns whether it did."""
    if not isinstance(old, (Variable, Slot)) or isinstance(new, Object):
        return False
    is_array = isinstance(new, ARRAY_TYPES)
    if is_array and isinstance(old, (FrozenVariable, Slot)):
        if isinstance(old, FrozenArray) or old.variable_type is ArrayAttribute:
            return False  # an array takes the place of an array
        form = "slot" if isinstance(old, Slot) else "frozen value"
        raise StaticAttributeError(
            f"Cannot assign an array over the {form} of a {old.variable_type.__name__} in {where}: "
            f"the Variable with its type and metadata would be lost. Put Variables in first, "
            f"sx.bind(model, variables) or sx.thaw(model); or assign a new one: "
            f"sx.{old.variable_type.__name__}(array)."
        )
    if isinstance(old, ArrayAttribute):
        if is_array or (
            not jax.tree_util.all_leaves((new,))
            and _is_array_tree(new)
            and not isinstance(new, (tuple, list, dict))
        ):
            old.value = new
            return True
        return False
    if is_array:
        raise StaticAttributeError(
            f"Cannot assign an array over the {type(old).__name__} in {where}: the Variable with "
            f"its type and metadata would be lost. Write into it instead (name[...] = array, or "
            f"name.value = array); to really replace it, assign a new Variable: "
            f"sx.{type(old).__name__}(array)."
        )
    return False
