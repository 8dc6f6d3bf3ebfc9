# SPDX-License-Identifier: Apache-2.0
"""Indexing of named arrays by name and position, and their updates.

``x[{"batch": 0, "time": slice(2)}]`` indexes by name; ``x[0]``, ``x[..., 1:]``, ``x[[0, 2]]`` and
``x[mask]`` index the positional dimensions, along all names. ``x.at[index].set(value)`` and its
relatives return a new array; the value meets the part that the index takes by name. By name,

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
from jax.core import Tracer

from shardax import Slot, Variable
from shardax.extend import Options, explicit_sharding
from shardax.named import base, elementwise
from shardax.named.base import Operand, from_parts, parts_of
from shardax.named.lift import run_lifted

Change = Callable[[Any, Any, Any], Any]


class ResolvedIndex(NamedTuple):
    """An index of the stored array, transposed first, in JAX's form."""

    permutation: tuple[int, ...] | None  # None: none is needed
    entries: tuple[Any, ...]  # one per dimension
    dims: base.Dims  # of the result
    shape: tuple[int, ...]  # of the result


class _Gathered(NamedTuple):
    """Positions to take along one dimension, over dims of the result."""

    dimension: int
    positions: Operand


def resolve_index(array: Operand, index: object) -> ResolvedIndex:
    """Resolves an index by names or position, without new names."""
    entries = _by_dimension(array, index)
    entries = {dimension: _resolve(array, dimension, entry) for dimension, entry in entries.items()}

    gathered = [
        _Gathered(dimension, entry)
        for dimension, entry in entries.items()
        if isinstance(entry, Operand)
    ]
    if not gathered:
        whole = tuple(entries.get(dimension, slice(None)) for dimension in range(len(array.dims)))
        kept_dimensions = [
            dimension for dimension, entry in enumerate(whole) if not isinstance(entry, int)
        ]
        dims = tuple(array.dims[dimension] for dimension in kept_dimensions)
        return ResolvedIndex(None, whole, dims, _sizes(array, entries, kept_dimensions))

    # Axes of the array that positions have too: each position goes with its own.
    new_names = {name for item in gathered for name in item.positions.dims if name is not None}
    for dimension, name in enumerate(array.dims):
        if name in new_names and dimension not in entries:
            positions = Operand(jnp.arange(array.data.shape[dimension]), (name,))
            gathered.append(_Gathered(dimension, positions))
    return _gather(array, entries, gathered)


def _gather(
    array: Operand, entries: Mapping[int, object], items: Sequence[_Gathered]
) -> ResolvedIndex:
    """Orders dimensions, gathered ones in JAX's place."""
    # In the place of a single array of positions; in front, if there are more, or integers.
    positions, dims = elementwise.align([item.positions for item in items])
    gathered = [item.dimension for item in items]
    single = [dimension for dimension, entry in entries.items() if isinstance(entry, int)]
    remaining = [
        dimension for dimension in range(len(array.dims)) if dimension not in (*gathered, *single)
    ]
    lead = gathered[0] if len(gathered) == 1 and not single else 0
    order = (*remaining[:lead], *gathered, *single, *remaining[lead:])
    all_entries = {**entries, **dict(zip(gathered, positions, strict=True))}

    names = [array.dims[dimension] for dimension in remaining]
    new_dims = (*names[:lead], *dims, *names[lead:])
    twice = [name for name in new_dims if name is not None and new_dims.count(name) > 1]
    if twice:
        raise base.NamedAxesError(
            f"The result of this index would have the axis {twice[0]!r} twice: of the array "
            f"{base.shown(array.dims, array.data.shape)} it takes only a slice along that axis, "
            f"and positions have that name too. Take the slice first: x[{{...: slice}}][...]."
        )

    sizes = _sizes(array, entries, remaining)
    shape = np.broadcast_shapes(*(index_array.shape for index_array in positions))
    indices = tuple(all_entries.get(dimension, slice(None)) for dimension in order)
    return ResolvedIndex(order, indices, new_dims, (*sizes[:lead], *shape, *sizes[lead:]))


def _sizes(
    array: Operand, entries: Mapping[int, Any], dimensions: Sequence[int]
) -> tuple[int, ...]:
    """Sizes of remaining dimensions, whole or sliced."""
    return tuple(
        len(range(*entries.get(dimension, slice(None)).indices(array.data.shape[dimension])))
        for dimension in dimensions
    )


def _by_dimension(array: Operand, index: object) -> dict[int, Any]:
    if isinstance(index, Mapping):
        entries: dict[int, Any] = {}
        for axis, entry in index.items():
            dimension = elementwise.dimension_of_axis(array.dims, axis)
            if dimension in entries:
                raise base.NamedAxesError(f"The index {dict(index)} has an axis twice.")
            entries[dimension] = entry
        return entries

    items = index if isinstance(index, tuple) else (index,)
    dimensions = base.positional_dimensions(array.dims)
    if sum(entry is Ellipsis for entry in items) > 1:
        raise base.NamedAxesError("An index has one Ellipsis (...) at most.")
    if any(entry is None for entry in items):
        raise base.NamedAxesError(
            "None in an index would add a dimension without saying where among names. Add an axis "
            "by name, x[{'new': None}]; for a positional one say so after, .untag('new')."
        )

    # What stands before an Ellipsis counts from the first, what stands behind it from the last.
    ellipsis_at = next((i for i, entry in enumerate(items) if entry is Ellipsis), len(items))
    trailing = items[ellipsis_at + 1 :]
    if ellipsis_at + len(trailing) > len(dimensions):
        raise base.NamedAxesError(
            f"The index has {ellipsis_at + len(trailing)} entries, but an array with axes "
            f"{base.shown(array.dims, array.data.shape)} has {len(dimensions)} positional "
            f"dimensions, which an index without names counts. Index by name: x[{{name: ...}}]."
        )
    pairs = zip(dimensions[len(dimensions) - len(trailing) :], trailing, strict=True)
    return {**dict(zip(dimensions, items[:ellipsis_at], strict=False)), **dict(pairs)}


def _resolve(array: Operand, dimension: int, entry: object):
    """Returns an integer, a slice, or an ``Operand`` of positions."""
    name, size = array.dims[dimension], int(array.data.shape[dimension])
    if isinstance(entry, (Slot, Variable)):
        entry = entry.value
    if isinstance(entry, slice):
        return _check_slice(name, entry)
    if Options.is_integer(entry):
        return _in_range(name, int(entry), size)

    if isinstance(entry, base.NamedStorage):
        operand = parts_of(entry)
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
        raise base.NamedAxesError(
            f"The axis {name!r} cannot be indexed by {entry!r} of type {type(entry).__name__}. Use "
            f"an integer, a slice, an array of integers or booleans, or a NamedArray of integers."
        )

    if not jnp.issubdtype(operand.data.dtype, jnp.integer):
        raise base.NamedAxesError(
            f"The axis {name!r} is indexed by an array of {operand.data.dtype}; positions are "
            f"integers, and masks booleans."
        )
    return operand


def _unnamed(name, positions) -> Operand:
    if positions.ndim > 1 or (name is None and positions.ndim):
        raise base.NamedAxesError(
            f"The axis {name!r} is indexed by an array of shape {tuple(positions.shape)}, whose "
            f"dimensions have no names that the result could have. Name them: "
            f"named.wrap(positions, {', '.join(map(repr, ('one', 'other')[: positions.ndim]))})."
        )
    return Operand(jnp.asarray(positions), (name,) * positions.ndim)


def _in_range(name: object, position: int, size: int) -> int:
    if not -size <= position < size:
        raise base.NamedIndexError(
            f"Position {position} is out of range for the axis {name!r} of size {size}."
        )
    return position


def _check_known(name: object, positions: np.ndarray, size: int) -> None:
    if positions.dtype.kind in "iu":
        for position in positions[(positions < -size) | (positions >= size)].ravel()[:1]:
            _in_range(name, int(position), size)


def _check_slice(name: object, entry: slice) -> slice:
    bounds = (entry.start, entry.stop, entry.step)
    if all(bound is None or isinstance(bound, (int, np.integer)) for bound in bounds):
        return entry
    raise base.NamedAxesError(
        f"The axis {name!r} is indexed by {entry}, whose bounds are not plain integers. The size "
        f"of a slice is fixed when a program is compiled; for one that starts anywhere, take "
        f"positions: x[{{{name!r}: start + jnp.arange(length)}}]."
    )


def _masked(name, mask, dims: base.Dims, size: int) -> Operand:
    if isinstance(mask, Tracer):
        raise base.NamedAxesError(
            f"The axis {name!r} is indexed by booleans inside a trace, where how many are true is "
            f"not known, and so neither is the size. Keep the size: named.where(mask, x, 0)."
        )
    if mask.shape != (size,) or dims not in ((name,), (None,)):
        raise base.NamedAxesError(
            f"The axis {name!r} of size {size} is indexed by booleans with axes "
            f"{base.shown(dims, mask.shape) if len(dims) == mask.ndim else tuple(mask.shape)}. "
            f"A mask has one entry per position of its axis; for several axes at once, keep the "
            f"shape: named.where(mask, x, 0)."
        )
    return Operand(jnp.asarray(np.flatnonzero(np.asarray(mask))), (name,))


class _Index(NamedTuple):
    """An index, and its new names."""

    entries: Any
    added: base.Dims = ()
    is_lifted: bool = False  # positional, with arrays: along all names, as JAX indexes


def _take_apart(array: Operand, index: object) -> _Index:
    if isinstance(index, Mapping):
        added = tuple(name for name, entry in index.items() if entry is None)
        if added:
            base.check_dims((*added, *(name for name in array.dims if name is not None)))
        return _Index({k: entry for k, entry in index.items() if entry is not None}, added)
    entries = index if isinstance(index, tuple) else (index,)
    simple = (slice, int, np.integer, type(None), type(Ellipsis))
    if all(isinstance(entry, simple) for entry in entries):
        return _Index(index)
    values = (entry.value if isinstance(entry, (Slot, Variable)) else entry for entry in entries)
    return _Index(tuple(np.asarray(e) if isinstance(e, list) else e for e in values), (), True)


class Indexing(base.NamedStorage):
    """Indexing of named arrays."""

    __slots__ = ()

    def __getitem__(self, index: object) -> Any:
        return Update(self, index)._part(lambda array, at: array[at])

    @property
    def at(self) -> At:
        """Updates of parts: ``x.at[index].set(value)`` returns a new array.

        Besides ``set`` there are ``add``, ``subtract``, ``multiply``, ``mul``, ``divide``,
        ``power``, ``min``, ``max``, ``apply`` and ``get``, with the options that ``jax.Array.at``
        has. The index is as for ``x[index]``.
        """
        return At(self)


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """``x.at``, to be indexed."""

    array: Any

    def __getitem__(self, index: object) -> Update:
        return Update(self.array, index)


def _update(name: str) -> Callable[..., Any]:
    def method(self: Update, value, **options) -> Any:
        def change(array, at, new_values):
            # Over Explicit mesh axes the result is laid out as the array is.
            sharding = explicit_sharding(array)
            layout_option = {} if sharding is None else {"out_sharding": sharding}
            return getattr(array.at[at], name)(new_values, **{**layout_option, **options})

        return self._run(change, value, options.get("mode"))

    method.__name__ = name
    return method


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """``x.at[index]``, to be given a value."""

    array: Any
    index: Any

    set, add, subtract = _update("set"), _update("add"), _update("subtract")
    multiply, mul, divide = _update("multiply"), _update("multiply"), _update("divide")
    power, min, max = _update("power"), _update("min"), _update("max")

    def apply(self, function: Callable[[Any], Any], **options: Any) -> Any:
        """Returns the array with a function applied to the part."""
        change = lambda array, at, _: array.at[at].apply(function, **options)  # noqa: E731
        return self._run(change, 0, options.get("mode"))

    def get(self, **options: Any) -> Any:
        """Returns the part, with JAX's options for positions out of range."""
        return self._part(lambda array, at: array.at[at].get(**options))

    def _part(self, get: Callable[[Any, Any], Any]):
        array = parts_of(self.array)
        index = _take_apart(array, self.index)
        if index.is_lifted:
            return run_lifted(type(self.array), get, (self.array, index.entries), {})

        resolved = resolve_index(array, index.entries)
        data = get(base.transposed(array.data, resolved.permutation), resolved.entries)
        if index.added:
            data = jax.lax.expand_dims(data, range(len(index.added)))
        return from_parts(type(self.array), data, (*index.added, *resolved.dims))

    def _run(self, change: Change, value: object, mode: object = None):
        array = parts_of(self.array)
        index = _take_apart(array, self.index)
        if index.is_lifted:
            return self._run_lifted(array, index.entries, change, value, mode)

        resolved = resolve_index(array, index.entries)
        dims, shape = (*index.added, *resolved.dims), (*(1 for _ in index.added), *resolved.shape)
        part = Operand(jax.ShapeDtypeStruct(shape, array.data.dtype), dims)
        new_values = _fitting(value, part)
        if index.added and np.ndim(new_values):
            new_values = jax.lax.squeeze(new_values, range(len(index.added)))

        data = change(
            base.transposed(array.data, resolved.permutation), resolved.entries, new_values
        )
        if resolved.permutation is not None:
            data = base.transposed(data, tuple(map(resolved.permutation.index, range(data.ndim))))
        return from_parts(type(self.array), data, array.dims)

    def _run_lifted(self, array: Operand, index: object, change: Change, value: object, mode):
        """Changes the elements at the positions of the index."""
        # Names of the index that the array lacks are further positions, not further arrays. A
        # position out of range stays so, for JAX to treat by the mode.
        shape, indices = array.data.shape, []
        fills = jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.FILL_OR_DROP
        updated = array
        for dimension, size in enumerate(shape):
            options = {"mode": "fill", "fill_value": size} if fills else {"mode": mode}
            positions_array = from_parts(
                type(self.array), jax.lax.broadcasted_iota(np.int32, shape, dimension), array.dims
            )
            part = Update(positions_array, index)._part(
                lambda indexed, at, o=options: indexed.at[at].get(**o)
            )
            updated = parts_of(part)
            indices.append(updated.data)

        data = change(array.data, tuple(indices), _fitting(value, updated))
        return from_parts(type(self.array), data, array.dims)


def _fitting(value: object, part: Operand):
    """Returns a value with the dimensions of its part."""
    operand = elementwise.operand_of(value, part)
    if operand is NotImplemented:
        raise base.NamedAxesError(
            f"A part of a NamedArray cannot be set to {value!r} of type {type(value).__name__}."
        )
    if not isinstance(operand, Operand):
        return operand

    elementwise.check_sizes((part, operand))
    if elementwise.joined(part.dims, operand.dims) != part.dims:
        raise base.NamedAxesError(
            f"A value with axes {base.shown(operand.dims, operand.data.shape)} does not fit into a "
            f"part with axes {base.shown(part.dims, part.data.shape)}: it may lack axes, along "
            f"which it is repeated, but not have more."
        )
    return elementwise.expand(operand, part.dims)
