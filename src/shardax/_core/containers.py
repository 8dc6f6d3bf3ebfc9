# SPDX-License-Identifier: Apache-2.0
"""Tracked lists and dicts.

A plain list that holds Variables could be changed behind the model's back. So assigning a list or
dict to an attribute stores a ``List`` or ``Dict`` with the same items, which advances the structure
epoch when it changes. They compare and behave like ``list`` and ``dict``. The list that was
assigned is *not* tracked: ``layers = []; self.layers = layers; layers.append(x)`` changes only the
local list; append to ``self.layers``.

Items are stored as attributes of Modules are (``_core.stored``), and read back so.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
)
from typing import Any, Generic, Self, TypeVar, overload

from shardax._core.frames import Frame, check_structural_write, owner_here
from shardax._core.graph import handlers
from shardax._core.graph.definitions import DictDef, ListDef
from shardax._core.graph.pytrees import register_graph
from shardax._core.graph.static import Static
from shardax._core.object import Decode, Encode, Object, epoch
from shardax._core.stored import (
    check_static,
    from_stored,
    same_structure,
    to_stored,
    tracked_forms,
    write_through,
)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_AS_KEY = "a key of a dict in a model"


class _Container(Object):
    """What List and Dict share: ownership, marking, JAX registration."""

    __slots__ = ("__weakref__", "_flat", "_items", "_lock", "_marked", "_owner")
    _items: Any

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_graph(cls)

    @classmethod
    def _allocate(cls, owner: Frame | None, lock: str | None) -> Self:
        container = object.__new__(cls)
        container._set_up(owner, lock)
        return container

    def _set_up(self, owner: Frame | None, lock: str | None = None) -> None:
        self._owner = owner
        self._lock = lock
        self._marked = False
        self._flat = None

    def _check_change(self) -> None:
        """Raises if the container must not be changed here."""
        check_structural_write(self, f"a {type(self).__name__}")

    def _note_change(self) -> None:
        """Makes what was remembered of models with this container out of date."""
        if self._marked:
            epoch.advance(self)

    def __getstate__(self) -> Any:
        return self._items

    def __setstate__(self, items: object) -> None:
        self._set_up(owner_here())
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
        self._set_up(owner_here())
        self._items: list[Any] = _stored_items(items, "a list")

    @classmethod
    def _of(cls, items: Iterable[T], where: str) -> Self:
        """Returns a list with items, which stands somewhere in a model (for messages)."""
        tracked = cls._allocate(owner_here(), None)
        tracked._items = _stored_items(items, f"a list in {where}")
        return tracked

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [from_stored(item) for item in self._items[index]]
        return from_stored(self._items[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._check_change()
            self._items[index] = [to_stored(item, "item of a list") for item in value]
            self._note_change()
            return

        where = f"item {index} of a list"
        old = self._items[index]
        if write_through(old, value, where):
            return
        self._check_change()
        new = to_stored(value, where)
        self._items[index] = new
        if not same_structure(old, new):
            self._note_change()

    def __delitem__(self, index: Any) -> None:
        self._check_change()
        del self._items[index]
        self._note_change()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return (from_stored(item) for item in self._items)

    def insert(self, index: int, value: T) -> None:
        """Inserts ``value`` before position ``index``."""
        self._check_change()
        self._items.insert(index, to_stored(value, f"item {index} of a list"))
        self._note_change()

    def sort(self, *, key: Callable[[T], Any] | None = None, reverse: bool = False) -> None:
        """Sorts in place, as ``list.sort``."""

        def key_of_stored(item: Any) -> Any:
            value = from_stored(item)
            return key(value) if key else value

        self._check_change()
        # A new list, so a failing comparison changes nothing.
        self._items = sorted(self._items, key=key_of_stored, reverse=reverse)
        self._note_change()

    def reverse(self) -> None:
        """Reverses in place, as ``list.reverse``."""
        self._check_change()
        self._items.reverse()
        self._note_change()

    def extend(self, values: Iterable[T]) -> None:
        """Appends all items, as ``list.extend``."""
        new = [
            to_stored(item, f"item {index} of a list")
            for index, item in enumerate(values, start=len(self))
        ]
        self._check_change()
        self._items.extend(new)
        self._note_change()

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

    def _flatten(self, encode: Encode) -> ListDef:
        items = tuple(encode(item, index) for index, item in enumerate(self._items))
        return ListDef(type(self), items)

    def _unflatten(self, definition: ListDef, decode: Decode) -> None:
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
        self._set_up(owner_here())
        self._items: dict[Any, Any] = _stored_entries(dict(items, **entries), "a dict")

    @classmethod
    def _of(cls, entries: dict[K, T], where: str) -> Self:
        """Returns a dict with entries, which stands somewhere in a model (for messages)."""
        tracked = cls._allocate(owner_here(), None)
        tracked._items = _stored_entries(dict(entries), f"a dict in {where}")
        return tracked

    @classmethod
    def fromkeys(cls, keys: Iterable[object], value: object = None) -> Dict[Any, Any]:
        """Makes a Dict with the same value for every key, as ``dict.fromkeys``."""
        return cls(dict.fromkeys(keys, value))

    def __getitem__(self, key: K) -> T:
        return from_stored(self._items[key])

    def __setitem__(self, key: K, value: T) -> None:
        where = f"entry {key!r} of a dict"
        is_new = key not in self._items
        old = self._items.get(key)
        if old is not None and write_through(old, value, where):
            return

        self._check_change()
        new = to_stored(value, where)
        if is_new:
            check_static(key, _AS_KEY)
        self._items[key] = new
        if is_new or not same_structure(old, new):
            self._note_change()

    def __delitem__(self, key: K) -> None:
        self._check_change()
        del self._items[key]
        self._note_change()

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

    def _flatten(self, encode: Encode) -> DictDef:
        items = tuple((Static(key), encode(item, key)) for key, item in self._items.items())
        return DictDef(type(self), items)

    def _unflatten(self, definition: DictDef, decode: Decode) -> None:
        self._items = {key.value: decode(item) for key, item in definition.items}


def _stored_items(items: Iterable[object], where: str) -> list[Any]:
    return [to_stored(item, f"item {index} of {where}") for index, item in enumerate(items)]


def _stored_entries(entries: Mapping[Any, object], where: str) -> dict[Any, Any]:
    stored = {}
    for key, item in entries.items():
        check_static(key, _AS_KEY)
        stored[key] = to_stored(item, f"entry {key!r} of {where}")
    return stored


tracked_forms[list] = List._of
tracked_forms[dict] = Dict._of


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
