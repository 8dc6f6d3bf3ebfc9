# SPDX-License-Identifier: Apache-2.0
"""Indexing of named arrays: reading parts, and new arrays with parts replaced.

``x[{"batch": 0, "time": slice(2)}]`` indexes by name; ``x[0]``, ``x[..., 1:]`` and ``x[mask]``
index the positional dimensions, along all names. What an index by name may hold, and what becomes
of the axes, says ``shardax.named.indexing``. ``x.at[index].set(value)`` and its relatives return
a new array; the value meets the part that the index takes by name.

What an index by names means for the stored array.

An index gives for some axes which positions to take. What it does to an axis depends on its kind:

- an integer, or an array of one, takes one position, and the axis is gone;
- a slice takes a part, and the axis stays;
- a list or array of integers takes these positions, and the axis stays, with as many;
- a boolean array, one entry per position, takes those where it is true; it must be known outside of
  any trace, as the size of the result depends on it;
- a named array of integers takes one position for each of its own, and its axes take the axis'
  place; where several have the same name, or the indexed array has it too, they go together;
- None, for a name that is new, adds an axis of size 1.

Axes that are not mentioned stay whole. A position that is known before the program runs (an integer
or a NumPy array) and is out of range is an error; of others, JAX's own rule holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.array_ops import ArrayLike
from shardax.named.base import (
    Dims,
    NamedAxesError,
    NamedIndexError,
    Stored,
    check_dims,
    positional_places,
    shown,
    transposed,
)
from shardax.named.elementwise import (
    Operand,
    align,
    check_sizes,
    expand,
    joined,
    operand_of,
    place_of,
)
from shardax.named.lift import run_lifted

# --- Index plan ---


class Plan(NamedTuple):
    """An index for the stored array.

    The array is transposed, indexed as JAX does it, and the result has ``dims``.

    Attributes:
        permutation: Of the stored array, before; None for as it is.
        entries: The index, one entry per dimension.
        dims: Those of the result.
        shape: Its shape.
    """

    permutation: tuple[int, ...] | None
    entries: tuple[Any, ...]
    dims: Dims
    shape: tuple[int, ...]


class _Taken(NamedTuple):
    """Positions to take along one dimension: an array over the dims of the result."""

    place: int
    positions: Operand


def plan_index(array: Operand, index: Any) -> Plan:
    """Returns the plan of an index, without the names that it adds.

    Args:
        array: The array to index.
        index: A mapping from axes, or an index of the positional dimensions as NumPy has it.

    Raises:
        NamedIndexError: If a position is out of range.
        NamedAxesError: If an axis does not exist, or an index does not fit its axis.
    """
    entries = _by_place(array, index)
    entries = {place: _resolve(array, place, entry) for place, entry in entries.items()}
    taken = [_Taken(place, entry) for place, entry in entries.items() if isinstance(entry, Operand)]
    if not taken:
        whole = tuple(entries.get(place, slice(None)) for place in range(len(array.dims)))
        kept = [place for place, entry in enumerate(whole) if not isinstance(entry, int)]
        dims = tuple(array.dims[place] for place in kept)
        return Plan(None, whole, dims, _sizes(array, entries, kept))
    return _gather(array, entries, _paired(array, entries, taken))


def _gather(array: Operand, entries: Mapping[int, Any], taken: Sequence[_Taken]) -> Plan:
    """Orders dimensions so that what is taken stands where JAX leaves it.

    That is in the place of a single array of positions; in front, if there are more, or integers.
    """
    positions, dims = align([each.positions for each in taken])
    gathered = [each.place for each in taken]
    single = [place for place, entry in entries.items() if isinstance(entry, int)]
    rest = [place for place in range(len(array.dims)) if place not in (*gathered, *single)]
    before = gathered[0] if len(gathered) == 1 and not single else 0
    order = (*rest[:before], *gathered, *single, *rest[before:])
    found = {**entries, **dict(zip(gathered, positions, strict=True))}
    sizes = _sizes(array, entries, rest)
    shape = np.broadcast_shapes(*(each.shape for each in positions))
    names = [array.dims[place] for place in rest]
    kept = (*names[:before], *dims, *names[before:])
    _check_result(array, kept)
    return Plan(
        None if order == tuple(range(len(order))) else order,
        tuple(found.get(place, slice(None)) for place in order),
        kept,
        (*sizes[:before], *shape, *sizes[before:]),
    )


def _sizes(array: Operand, entries: Mapping[int, Any], places: Sequence[int]) -> tuple[int, ...]:
    """Sizes of dimensions that stay, whole or sliced."""
    return tuple(
        len(range(*entries.get(place, slice(None)).indices(array.data.shape[place])))
        for place in places
    )


def _paired(array: Operand, entries: Mapping[int, Any], taken: list[_Taken]) -> list[_Taken]:
    """Adds the axes of the array that positions have too: each position goes with its own."""
    wanted = {name for each in taken for name in each.positions.dims if name is not None}
    own = [
        place for place, name in enumerate(array.dims) if name in wanted and place not in entries
    ]
    return [
        *taken,
        *(
            _Taken(place, Operand(jnp.arange(array.data.shape[place]), (array.dims[place],)))
            for place in own
        ),
    ]


def _check_result(array: Operand, dims: Dims) -> None:
    names = [name for name in dims if name is not None]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise NamedAxesError(
            f"The result of this index would have the axis {twice[0]!r} twice: the array has "
            f"{shown(array.dims, array.data.shape)} and takes only a slice along {twice[0]!r}, "
            f"where positions have that name too. Take the slice first: x[{{...: slice}}][...]."
        )


# --- which axes -----------------------------------------------------------------------------------


def _by_place(array: Operand, index: Any) -> dict[int, Any]:
    if isinstance(index, Mapping):
        entries: dict[int, Any] = {}
        for axis, entry in index.items():
            place = place_of(array.dims, axis)
            if place in entries:
                raise NamedAxesError(f"The index {dict(index)} has an axis twice.")
            entries[place] = entry
        return entries
    given = index if isinstance(index, tuple) else (index,)
    places = positional_places(array.dims)
    if sum(entry is Ellipsis for entry in given) > 1:
        raise NamedAxesError("An index has one Ellipsis (...) at most.")
    if any(entry is None for entry in given):
        raise NamedAxesError(
            "None in an index would add a dimension without saying where among names. Add an axis "
            "by name, x[{'new': None}]; for a positional one say so after, .untag('new')."
        )
    before = next((i for i, entry in enumerate(given) if entry is Ellipsis), len(given))
    after = given[before + 1 :]
    if before + len(after) > len(places):
        raise NamedAxesError(
            f"The index has {before + len(after)} entries, but an array with axes "
            f"{shown(array.dims, array.data.shape)} has {len(places)} positional dimensions, which "
            f"is what an index without names counts. Index by name: x[{{name: ...}}]."
        )
    pairs = zip(places[len(places) - len(after) :], after, strict=True)
    return {**dict(zip(places, given[:before], strict=False)), **dict(pairs)}


# --- what to take along one of them ---------------------------------------------------------------


def _resolve(array: Operand, place: int, entry: Any) -> Any:
    """Returns an integer, a slice, or an ``Operand`` of positions."""
    name, size = array.dims[place], int(array.data.shape[place])
    if isinstance(entry, ArrayLike):
        entry = entry.value
    if isinstance(entry, slice):
        return _check_slice(name, entry)
    if isinstance(entry, (int, np.integer)) and not isinstance(entry, bool):
        return _in_range(name, int(entry), size)
    if isinstance(entry, Stored):
        operand = Operand(*entry._parts())
        if operand.data.dtype == jnp.bool_:
            return _masked(name, operand.data, operand.dims, size)
    elif isinstance(entry, (list, np.ndarray, jax.Array)):
        if isinstance(entry, list):
            entry = np.asarray(entry)
        if entry.dtype == np.bool_:
            return _masked(name, entry, (name,), size)
        operand = _unnamed(name, entry)
        if not isinstance(entry, jax.Array):
            _check_known(name, entry, size)
    else:
        raise NamedAxesError(
            f"The axis {name!r} cannot be indexed by {entry!r} of type {type(entry).__name__}. Use "
            f"an integer, a slice, an array of integers or booleans, or a NamedArray of integers."
        )
    if not jnp.issubdtype(operand.data.dtype, jnp.integer):
        raise NamedAxesError(
            f"The axis {name!r} is indexed by an array of {operand.data.dtype}; positions are "
            f"integers, and masks booleans."
        )
    return operand


def _unnamed(name: Any, positions: Any) -> Operand:
    if positions.ndim > 1 or (name is None and positions.ndim):
        raise NamedAxesError(
            f"The axis {name!r} is indexed by an array of shape {tuple(positions.shape)}, whose "
            f"dimensions have no names that the result could have. Name them: "
            f"named.wrap(positions, {', '.join(map(repr, ('one', 'other')[: positions.ndim]))})."
        )
    return Operand(jnp.asarray(positions), (name,) * positions.ndim)


def _in_range(name: Any, position: int, size: int) -> int:
    if not -size <= position < size:
        raise NamedIndexError(
            f"Position {position} is out of range for the axis {name!r} of size {size}."
        )
    return position


def _check_known(name: Any, positions: np.ndarray, size: int) -> None:
    if positions.dtype.kind in "iu":
        for position in positions[(positions < -size) | (positions >= size)].ravel()[:1]:
            _in_range(name, int(position), size)


def _check_slice(name: Any, entry: slice) -> slice:
    bounds = (entry.start, entry.stop, entry.step)
    if all(bound is None or isinstance(bound, (int, np.integer)) for bound in bounds):
        return entry
    raise NamedAxesError(
        f"The axis {name!r} is indexed by {entry}, whose bounds are not plain integers. The size "
        f"of a slice is fixed when a program is compiled; for one that starts anywhere, take "
        f"positions: x[{{{name!r}: start + jnp.arange(length)}}]."
    )


def _masked(name: Any, mask: Any, dims: Dims, size: int) -> Operand:
    if isinstance(mask, Tracer):
        raise NamedAxesError(
            f"The axis {name!r} is indexed by booleans inside a trace, where how many are true is "
            f"not known, and so neither is the size. Keep the size: named.where(mask, x, 0)."
        )
    if mask.shape != (size,) or dims not in ((name,), (None,)):
        raise NamedAxesError(
            f"The axis {name!r} of size {size} is indexed by booleans with axes "
            f"{shown(dims, mask.shape) if len(dims) == mask.ndim else tuple(mask.shape)}. A mask "
            f"has one entry per position of its axis; for several axes at once, keep the shape: "
            f"named.where(mask, x, 0)."
        )
    return Operand(jnp.asarray(np.flatnonzero(np.asarray(mask))), (name,))


def is_by_place(index: Any) -> bool:
    """Whether an index needs no names: integers and slices of positional dimensions."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(
        entry is None or entry is Ellipsis or isinstance(entry, (slice, int, np.integer))
        for entry in entries
    )


def new_names(array: Operand, index: Any) -> tuple[Any, Dims]:
    """Takes out of an index the names that it adds.

    Returns:
        The index without them, and the new names.
    """
    if not isinstance(index, Mapping):
        return index, ()
    added = tuple(name for name, entry in index.items() if entry is None)
    if not added:
        return index, ()
    check_dims((*added, *(name for name in array.dims if name is not None)))
    return {name: entry for name, entry in index.items() if entry is not None}, added


# --- Indexing ---


class Indexing(Stored):
    """Indexing."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Mapping) and not is_by_place(index):
            return run_lifted(self._make, lambda array, at: array[at], (self, index), {})
        array = Operand(*self._parts())
        index, added = new_names(array, index)
        plan = plan_index(array, index)
        data = transposed(array.data, plan.permutation)[plan.entries]
        if added:
            data = jax.lax.expand_dims(data, range(len(added)))
        return self._make(data, (*added, *plan.dims))

    @property
    def at(self) -> At:
        """Updates of parts: ``x.at[index].set(value)`` returns a new array.

        Besides ``set`` there are ``add``, ``subtract``, ``multiply``, ``divide``, ``power``,
        ``min``, ``max``, ``apply`` and ``get``, with the options that ``jax.Array.at`` has.
        """
        return At(self)


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """What ``x.at`` is: give it an index.

    Attributes:
        array: The named array.
    """

    array: Any

    def __getitem__(self, index: Any) -> Update:
        return Update(self.array, index)


def _update(name: str) -> Callable[..., Any]:
    def method(self: Update, value: Any, **options: Any) -> Any:
        return self._run(lambda part, given: getattr(part, name)(given, **options), value)

    method.__name__ = name
    return method


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What ``x.at[index]`` is: give it a value.

    Attributes:
        array: The named array.
        index: The index.
    """

    array: Any
    index: Any

    set, add, subtract = _update("set"), _update("add"), _update("subtract")
    multiply, divide, power = _update("multiply"), _update("divide"), _update("power")
    min, max = _update("min"), _update("max")

    def apply(self, function: Callable[[Any], Any], **options: Any) -> Any:
        """Returns the array with a function applied to the elements of the part."""
        return self._run(lambda part, _: part.apply(function, **options), 0)

    def get(self, **options: Any) -> Any:
        """Returns the part, with JAX's options for positions out of range."""
        reference, plan, _ = self._reference()
        return self.array._make(reference.get(**options), plan.dims)

    def _reference(self) -> tuple[Any, Plan, Operand]:
        array = Operand(*self.array._parts())
        plan = plan_index(array, self.index)
        return transposed(array.data, plan.permutation).at[plan.entries], plan, array

    def _run(self, change: Callable[[Any, Any], Any], value: Any) -> Any:
        reference, plan, array = self._reference()
        part = jax.ShapeDtypeStruct(plan.shape, array.data.dtype)
        data = change(reference, _fitting(value, Operand(part, plan.dims)))
        if plan.permutation is not None:
            data = transposed(data, tuple(map(plan.permutation.index, range(data.ndim))))
        return self.array._make(data, array.dims)


def _fitting(value: Any, part: Operand) -> Any:
    """Returns a value with the dimensions of the part that it goes into."""
    found = operand_of(value, part)
    if found is NotImplemented:
        raise NamedAxesError(
            f"A part of a NamedArray cannot be set to {value!r} of type {type(value).__name__}."
        )
    if not isinstance(found, Operand):
        return found
    check_sizes((part, found))
    if joined(part.dims, found.dims) != part.dims:
        raise NamedAxesError(
            f"A value with axes {shown(found.dims, found.data.shape)} does not fit into a part "
            f"with axes {shown(part.dims, part.data.shape)}: it may lack axes, along which it is "
            f"repeated, but not have more."
        )
    return expand(found, part.dims)
