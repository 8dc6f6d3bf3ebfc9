# SPDX-License-Identifier: Apache-2.0
"""Storage, names and pytree of named arrays.

A name is any hashable object but None. The dims of an array have one entry per dimension, a name or
None. A dimension without a name is positional: what counts of it is its place among the other
positional ones. Storage order is the order of the dims as the array has them, a matter of speed.

As a pytree a named array is one node, whose static part is the names, sorted, with their sizes, and
whose child is the array in canonical order: positional dimensions first, as they stand, then the
names, sorted: numbers, then strings, then all else by type and text, alike in every process. So
arrays that differ in storage order are the same to JAX; one that is stored otherwise is transposed
on its way into a transform, and what comes out of one is stored so.

How many positional dimensions there are is not static. They stand first, so ``jax.vmap`` and
``jax.lax.scan`` take them away and put them there at axis 0, as they do with plain arrays. A
transform that takes a named dimension instead, or ``jax.tree.map`` with a function that changes
shapes, leaves a node whose names do not fit its array; using that as an array is an error. So is
using a named array inside a function lifted by ``nmap`` along one of its names: captured by a
closure it is still whole, and would give every slice all of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Generator, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Slot, Variable
from shardax.errors import ClosureError, PartitionError, ShardaxError
from shardax.extend import Options, PickledArray, register_container


class NamedAxesError(ShardaxError, ValueError, TypeError):
    """The axes of named arrays do not fit.

    A name is unknown or has two sizes, or there are dimensions where none may be.
    """


class NamedIndexError(ShardaxError, IndexError):
    """A position, known before running, is out of range."""


Name = Hashable
Dims = tuple[Any, ...]
Axes = Mapping[Any, int]
Form = tuple[tuple[Name, ...], tuple[int, ...]]
"""Names in canonical order, and their sizes: what there is to know of dims but storage order."""


def check_dims(dims: Iterable[object]) -> Dims:
    """Returns dims as a tuple, or raises PartitionError."""
    names = tuple(dims)
    try:
        return _checked(names)
    except TypeError:
        for name in names:
            try:
                hash(name)
            except TypeError:
                raise PartitionError(
                    f"An axis name is hashable, but {name!r} is of type {type(name).__name__}. Use "
                    f"a string, a number, a tuple or a frozen dataclass; None for no name."
                ) from None
        raise


@functools.lru_cache(maxsize=4096)
def _checked(dims: Dims) -> Dims:
    names = [name for name in dims if name is not None]
    if len(set(names)) < len(names):
        repeated = list(dict.fromkeys(name for name in names if names.count(name) > 1))
        raise PartitionError(
            f"The dims {dims} hold {', '.join(map(repr, repeated))} more than once. An axis is "
            f"found by its name, so give each its own, such as {str(repeated[0]) + '_2'!r}."
        )
    keys = sorted(map(_sort_key, names))
    if any(left == right for left, right in itertools.pairwise(keys)):
        raise PartitionError(
            f"Of the names {names} two are different and have one type and text, by which names "
            f"are sorted. Give their class a __repr__ that tells them apart."
        )
    return dims


def _sort_key(name: Name) -> tuple[int, Any, str]:
    if isinstance(name, str):  # also a member of a string enumeration, which equals its value
        return 1, 0, str.__str__(name)
    if isinstance(name, (int, float)):
        return 0, name, ""
    kind = type(name)
    return 2, 0, f"{kind.__module__}.{kind.__qualname__}:{name!r}"


def sorted_names(names: Iterable[Name]) -> tuple[Name, ...]:
    """Returns names in canonical order."""
    return tuple(sorted(names, key=_sort_key))


@functools.lru_cache(maxsize=4096)
def canonical(dims: Dims, shape: tuple[int, ...]) -> tuple[Form, tuple[int, ...] | None]:
    """Returns names with sizes, and the permutation to canonical order or None."""
    # For dims ("b", None, "a") of shape (2, 3, 4): (("a", "b"), (4, 2)), (1, 2, 0).
    positional = positional_dimensions(dims)
    names = sorted_names(name for name in dims if name is not None)
    order = (*positional, *map(dims.index, names))
    form = (names, tuple(shape[dimension] for dimension in order[len(positional) :]))
    return form, None if order == tuple(range(len(dims))) else order


def check_sizes_by_name(axes: object, least: int = 0) -> tuple[Dims, tuple[int, ...]]:
    """Returns names and sizes of a mapping of axes, or raises."""
    if not isinstance(axes, Mapping):
        raise NamedAxesError(
            f"Axes are a mapping from names to sizes, such as {{'batch': 8}}, not {axes!r}."
        )
    sizes = cast("Mapping[Any, Any]", axes)
    for name, size in sizes.items():
        if name is None or not Options.is_integer(size) or size < least:
            raise NamedAxesError(
                f"Axes give each name its size, a whole number of at least {least}, but "
                f"{dict(sizes)} has {name!r}: {size!r}."
            )
    return check_dims(sizes), tuple(int(size) for size in sizes.values())


def one_axis(function: str, axes: object, remedy: str) -> tuple[Any, int]:
    """Returns name and size of the only axis, or raises."""
    names, sizes = check_sizes_by_name(axes)
    if len(names) != 1:
        raise NamedAxesError(
            f"{function} makes one axis, but was given {len(names)}: {axes}. {remedy}"
        )
    return names[0], sizes[0]


def label(name: Name) -> Any:
    """Returns a name as rules have it: a string, or several."""
    if isinstance(name, str):
        return str.__str__(name)
    merged = isinstance(name, tuple) and all(isinstance(part, str) for part in name)
    return name if merged else repr(name)


def positional_dimensions(dims: Dims) -> tuple[int, ...]:
    """Returns the dimensions without a name."""
    return tuple(dimension for dimension, name in enumerate(dims) if name is None)


def shown(dims: Dims, shape: Iterable[int]) -> str:
    """Formats names with sizes, such as ``{3, 'batch': 8}``."""
    parts = (
        str(size) if name is None else f"{name!r}: {size}"
        for name, size in zip(dims, shape, strict=True)
    )
    return f"{{{', '.join(parts)}}}"


class _MappedNames(threading.local):
    names: frozenset[Name] = frozenset()


mapped = _MappedNames()
"""The names that the functions around this code are mapped over, in this thread."""


@contextlib.contextmanager
def mapping(names: Iterable[Name]) -> Generator[None]:
    """Marks names as mapped while the body runs."""
    outer_names = mapped.names
    mapped.names = outer_names | frozenset(names)
    try:
        yield
    finally:
        mapped.names = outer_names


class Operand(NamedTuple):
    """The data and the dims of an array, while an operation works on it."""

    data: Any
    dims: Dims


class NamedStorage:
    """Base of ``NamedArray``: the array, its dims and their static form."""

    __slots__ = ("__weakref__", "_data", "_dims", "_form")

    def __init__(self, data: Any, dims: Iterable[Any]) -> None:
        names = check_dims((dims,) if isinstance(dims, str) else dims)
        array = as_leaf(data)
        if array.ndim != len(names):
            raise NamedAxesError(
                f"An array of shape {tuple(array.shape)} does not have the {len(names)} dims "
                f"{names}. Give one name per dimension, None for one that stays positional."
            )
        self._data: Any = array
        self._dims: Dims | None = names
        self._form: Form | None = None

    @classmethod
    def _make(cls, data, dims: Dims) -> Self:
        """Makes an array of fitting parts."""
        array = object.__new__(cls)
        array._data, array._dims, array._form = data, dims, None
        return array

    def _parts(self) -> Operand:
        """Returns the array for an operation by name."""
        dims = self._dims
        if dims is None:
            dims = self.dims
        if mapped.names and (clashing := [name for name in dims if name in mapped.names]):
            raise ClosureError(
                f"A NamedArray with dims {dims} is used inside a function that nmap runs along "
                f"{', '.join(map(repr, clashing))}, where each run sees one slice. It was captured "
                f"by closure, so it is still whole. Pass it as an argument, nmap(f)(x, captured); "
                f"or, if each run shall see all of it, unwrap it: captured.unwrap(...)."
            )
        return Operand(self._data, dims)

    @property
    def data(self) -> Any:
        """The array, its dimensions in storage order."""
        return self._data

    @property
    def dims(self) -> Dims:
        """One name, or None, per dimension, in storage order."""
        if self._dims is None:
            self._dims = self._dims_of_leaf()
        return self._dims

    @property
    def axes(self) -> dict[Any, int]:
        """The sizes of the named dimensions by name, in storage order."""
        pairs = zip(self.dims, self._data.shape, strict=True)
        return {name: size for name, size in pairs if name is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all dimensions, in storage order."""
        self.dims  # noqa: B018 (a node that is no array says so)
        return tuple(self._data.shape)

    @property
    def positional_shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions without names."""
        shape = self.shape
        return tuple(shape[dimension] for dimension in positional_dimensions(self.dims))

    @property
    def ndim(self) -> int:
        """Number of dimensions, named or not."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self._data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * self.dtype.itemsize

    @property
    def sharding(self) -> Any:
        """Sharding of ``data``; None for an abstract array without one."""
        return self._data.sharding

    @property
    def partition_axes(self) -> tuple[Any, ...] | None:
        """Names as rules have them, in canonical order; None without an array."""
        try:
            (names, _), _ = canonical(self.dims, self.shape)
        except NamedAxesError:
            return None
        positional = (None,) * (self.ndim - len(names))
        return (*positional, *map(label, names))

    def _dims_of_leaf(self) -> Dims:
        """Returns the dims of the leaf put into this node by JAX."""
        assert self._form is not None  # only JAX makes an array without dims
        names, sizes = self._form
        leaf = self._data
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise NamedAxesError(
                f"This node of a pytree has the axes {shown(names, sizes)} and holds "
                f"{type(leaf).__name__} in place of an array, as jax.tree.map makes it from a "
                f"function that returns no array. It cannot be computed with; look at its .data."
            )

        shape = tuple(leaf.shape)
        lead = len(shape) - len(names)
        if lead < 0 or shape[lead:] != sizes:
            raise NamedAxesError(
                f"This NamedArray has the axes {shown(names, sizes)}, but a transform or "
                f"jax.tree.map put an array of shape {shape} into it. JAX sees the positional "
                f"dimensions first, then these: map positional ones only (x.untag('name') makes "
                f"one), use nmap, which maps names, or change the array itself, x.sum('name'). "
                f"For jax.shard_map, unwrap it outside and wrap the part inside."
            )
        return (None,) * lead + names

    def __reduce__(self) -> Any:
        if self._dims is None:
            return _rebuilt, (type(self), self._form, PickledArray.in_tree(self._data))
        return type(self), (PickledArray.in_tree(self._data), self._dims)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        data, _ = self._parts()
        return self._make(jnp.copy(data) if isinstance(data, jax.Array) else data, self.dims)


T = TypeVar("T", bound=NamedStorage)


def from_parts(kind: type[T], data: Any, dims: Dims) -> T:
    """Returns a named array of data and dims that are known to fit."""
    return kind._make(data, dims)


def parts_of(array: NamedStorage) -> Operand:
    """Returns the data and the dims of an array, for an operation by name."""
    return array._parts()


def as_leaf(data: object) -> Any:
    """Returns a caller's value as the content of a named array."""
    if isinstance(data, (Slot, Variable)):
        data = data.value
    if isinstance(data, (jax.Array, jax.ShapeDtypeStruct)):
        return data
    if isinstance(data, NamedStorage):
        raise NamedAxesError(
            f"This is a NamedArray already, with dims {data.dims}. Name its positional dimensions "
            f"with x.tag(...), or change names with x.rename({{...}})."
        )
    return jnp.asarray(data)


def transposed(data: Any, permutation: tuple[int, ...] | None) -> Any:
    """Returns an array or ShapeDtypeStruct with its dimensions in another order."""
    if permutation is None or permutation == tuple(range(len(permutation))):
        return data
    if not isinstance(data, jax.ShapeDtypeStruct):
        return jax.lax.transpose(data, permutation)
    sharding = data.sharding
    if isinstance(sharding, NamedSharding):
        entries = (*sharding.spec, *(None,) * (len(data.shape) - len(sharding.spec)))
        spec = PartitionSpec(*(entries[dimension] for dimension in permutation))
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    shape = tuple(data.shape[dimension] for dimension in permutation)
    return jax.ShapeDtypeStruct(shape, data.dtype, sharding=sharding, weak_type=data.weak_type)


def _flatten(array: NamedStorage) -> tuple[tuple[Any], Form]:
    form = array._form
    if form is not None:
        return (array._data,), form
    form, permutation = canonical(array.dims, tuple(array._data.shape))
    if permutation is None:
        array._form = form
        return (array._data,), form
    return (transposed(array._data, permutation),), form


def _flatten_with_keys(array: NamedStorage) -> tuple[tuple[tuple[Any, Any]], Form]:
    (leaf,), form = _flatten(array)
    return ((jax.tree_util.GetAttrKey("data"), leaf),), form


def _rebuilt(cls: type[NamedStorage], form: Form, leaf: object):
    array = object.__new__(cls)
    array._data, array._dims, array._form = leaf, None, form
    return array


register_container(NamedStorage, name="named array", axes=lambda array: array.partition_axes)


def register(cls: type[NamedStorage]) -> None:
    """Registers a class of named arrays with JAX."""
    jax.tree_util.register_pytree_with_keys(
        cls,
        _flatten_with_keys,
        lambda form, children: _rebuilt(cls, form, next(iter(children))),
        _flatten,
    )
