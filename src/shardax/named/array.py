# SPDX-License-Identifier: Apache-2.0
"""``NamedArray``: an array with named dimensions.

Operations find axes by name, so it does not matter in which order they are stored. Dimensions may
also stay positional, without a name: untag the axes that a function shall see, run it by ``nmap``
along all others, and tag what it returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from shardax import Variable
from shardax.extend import ShownArray, require_addressable
from shardax.named import base
from shardax.named.base import NamedAxesError, positional_dimensions, shown
from shardax.named.elementwise import Operators, Reductions, unary
from shardax.named.indexing import Indexing
from shardax.named.lift import lifted_method, lifted_operator


class NamedArray(Operators, Reductions, Indexing, ShownArray):
    """Immutable array with named dimensions; a pytree.

    Operators meet by name and repeat an operand along the names that it lacks. Methods such as
    ``sum("batch")`` work along names; methods of arrays that know dimensions by position, such as
    ``reshape``, work on the positional dimensions. Two arrays that differ only in the order of
    their dims are the same in operations, as arguments of compiled functions, in ``jax.tree.map``,
    in branches and in carries.

    Args:
        data: A JAX array, a ``jax.ShapeDtypeStruct``, a Variable, or what ``jnp.asarray`` takes.
        dims: One name per dimension, in the order in which ``data`` has them: any hashable object,
            or None for a dimension that stays positional.

    Raises:
        PartitionError: If a name is not hashable or occurs twice.
        NamedAxesError: If there is not one entry per dimension.

    Example:
        >>> import jax.numpy as jnp
        >>> x = NamedArray(jnp.ones((2, 3)), ("batch", "embed"))
        >>> scale = NamedArray(jnp.arange(3.0), ("embed",))
        >>> (x * scale).axes, (scale * x).sum("embed").unwrap("batch").tolist()
        ({'batch': 2, 'embed': 3}, [3.0, 3.0])
    """

    __slots__ = ()

    def tag(self, *names: Any) -> Self:
        """Names the positional dimensions.

        Args:
            *names: One for each, in order; None leaves it positional.

        Returns:
            The array under these names.

        Raises:
            NamedAxesError: If there are more or fewer names than positional dimensions.
            PartitionError: If a name is there already.

        Example:
            >>> NamedArray(np.zeros((2, 3)), (None, "b")).tag("a").dims
            ('a', 'b')
        """
        data, dims = self._parts()
        positional = positional_dimensions(dims)
        if len(names) != len(positional):
            raise NamedAxesError(
                f"tag was given the {len(names)} names {names}, but of the axes "
                f"{shown(dims, data.shape)} {len(positional)} are positional. Give each a name or "
                "None."
            )
        new_names = dict(zip(positional, names, strict=True))
        renamed = (new_names.get(dimension, name) for dimension, name in enumerate(dims))
        return self._make(data, base.check_dims(renamed))

    def untag(self, *names: Any) -> Self:
        """Makes named axes positional, in the order given, after the positional ones.

        Args:
            *names: The names to take off.

        Returns:
            The array without them.

        Raises:
            NamedAxesError: If there is no such name.

        Example:
            >>> x = NamedArray(np.zeros((2, 3, 4)), ("a", "b", "c"))
            >>> x.untag("c", "a").dims, x.untag("c", "a").shape
            ((None, 'b', None), (4, 3, 2))
        """
        data, dims = self._parts()
        tagged = (*positional_dimensions(dims), *(dimension_of(self, name) for name in names))
        if len(set(tagged)) < len(tagged):
            raise NamedAxesError(f"untag was given a name twice: {names}.")
        # The dimensions concerned trade places, so that they stand in the order asked for.
        sources = dict(zip(sorted(tagged), tagged, strict=True))
        order = tuple(sources.get(dimension, dimension) for dimension in range(len(dims)))
        new_dims = tuple(
            None if dimension in tagged else name for dimension, name in enumerate(dims)
        )
        return self._make(base.transposed(data, order), new_dims)

    def unwrap(self, *names: Any) -> jax.Array:
        """Returns the plain array with the names as dimensions, in order.

        Args:
            *names: All names of the array. Positional dimensions stand before them.

        Returns:
            A JAX array.

        Raises:
            NamedAxesError: If a name of the array is not given, or if it has no such name.

        Example:
            >>> NamedArray(np.zeros((2, 3)), ("a", "b")).unwrap("b", "a").shape
            (3, 2)
        """
        # Reading the whole array is what a function run by nmap may do on purpose.
        dims = self.dims
        missing = [name for name in dims if name is not None and name not in names]
        if missing:
            raise NamedAxesError(
                f"unwrap{names!r} leaves out {', '.join(map(repr, missing))} of the axes "
                f"{shown(dims, self.shape)}. Give every name, in the order of the dimensions to "
                f"be: x.unwrap({', '.join(map(repr, (*names, *missing)))})."
            )
        order = (*positional_dimensions(dims), *(dimension_of(self, name) for name in names))
        if len(set(order)) < len(order):
            raise NamedAxesError(f"unwrap was given a name twice: {names}.")
        return base.transposed(self._data, order)

    def order_as(self, *dims: Any) -> Self:
        """Returns the array in another storage order.

        Nothing that works by name sees a difference.

        Args:
            *dims: All names, in storage order, and None where a positional dimension stands;
                without any None these stand first.

        Raises:
            NamedAxesError: If names are missing or unknown.

        Example:
            >>> x = NamedArray(np.zeros((2, 3)), ("a", "b"))
            >>> x.order_as("b", "a").shape, x.order_as("b", "a").axes == x.axes
            ((3, 2), True)
        """
        data, own_dims = self._parts()
        positional = positional_dimensions(own_dims)
        target = base.check_dims(dims if None in dims else (*(None for _ in positional), *dims))
        if len(target) != len(own_dims) or {*target} != {*own_dims}:
            raise NamedAxesError(
                f"order_as{dims!r} does not have the dims {own_dims} in another order. Give every "
                f"name once, and None for each positional dimension, or for none."
            )
        rest = iter(positional)
        order = tuple(next(rest) if name is None else own_dims.index(name) for name in target)
        if order == tuple(range(len(own_dims))):
            return self
        return self._make(base.transposed(data, order), target)

    def canonical(self) -> Self:
        """Returns the array stored as JAX's transforms see it.

        Example:
            >>> NamedArray(np.zeros((2, 3, 4)), ("b", None, "a")).canonical().dims
            (None, 'a', 'b')
        """
        data, dims = self._parts()
        _, order = base.canonical(dims, tuple(data.shape))
        if order is None:
            return self
        return self._make(
            base.transposed(data, order), tuple(dims[dimension] for dimension in order)
        )

    def rename(self, names: Mapping[Any, Any]) -> Self:
        """Returns the array with names exchanged.

        Args:
            names: New name by old; all are exchanged at once, so two can swap.

        Raises:
            NamedAxesError: If there is no such name.
            PartitionError: If a name would occur twice.

        Example:
            >>> NamedArray(np.zeros((2, 3)), ("a", "b")).rename({"a": "b", "b": "a"}).axes
            {'b': 2, 'a': 3}
        """
        data, dims = self._parts()
        for name in names:
            dimension_of(self, name)
        renamed = (name if name is None else names.get(name, name) for name in dims)
        return self._make(data, base.check_dims(renamed))

    def broadcast_axes(self, axes: Mapping[Any, int]) -> Self:
        """Returns the array repeated along missing names.

        Operators do this by themselves; it is for functions that need the axes to be there.

        Args:
            axes: Sizes by name; names that the array has must have its size.

        Raises:
            NamedAxesError: If a size differs.

        Example:
            >>> NamedArray(np.zeros(2), ("a",)).broadcast_axes({"b": 3}).axes
            {'b': 3, 'a': 2}
        """
        data, dims = self._parts()
        own_axes = self.axes
        for name, size in axes.items():
            if own_axes.get(name, size) != size:
                raise NamedAxesError(
                    f"The axis {name!r} has size {own_axes[name]}, not {size}: the axes are "
                    f"{shown(dims, data.shape)}."
                )
        new = tuple(name for name in axes if name not in own_axes)
        shape = (*(axes[name] for name in new), *data.shape)
        dimensions = tuple(range(len(new), len(shape)))
        return self._make(
            jax.lax.broadcast_in_dim(data, shape, dimensions), base.check_dims((*new, *dims))
        )

    def _shown(self) -> str:
        return shown(self.dims, self.shape)

    __matmul__ = lifted_operator(operator.matmul, reflected=False)
    __rmatmul__ = lifted_operator(operator.matmul, reflected=True)
    real, imag = property(unary(lambda data: data.real)), property(unary(lambda data: data.imag))
    conj = conjugate = unary(lambda data: data.conj())
    reshape, ravel, flatten = map(lifted_method, ("reshape", "ravel", "flatten"))
    transpose, swapaxes, squeeze = map(lifted_method, ("transpose", "swapaxes", "squeeze"))
    repeat, take, dot = map(lifted_method, ("repeat", "take", "dot"))
    diagonal, trace = map(lifted_method, ("diagonal", "trace"))
    clip, round = map(lifted_method, ("clip", "round"))

    @property
    def T(self) -> Self:  # noqa: N802 (NumPy's name)
        """The array with its positional dimensions reversed."""
        return self.transpose()

    def astype(self, dtype: jax.typing.DTypeLike) -> Self:
        """Returns the array in another dtype.

        Example:
            >>> NamedArray(np.zeros(2), ("a",)).astype("bfloat16").dtype
            dtype(bfloat16)
        """
        data, dims = self._parts()
        return self._make(data.astype(dtype), dims)

    def block_until_ready(self) -> Self:
        """Waits until the array is computed, and returns it."""
        jax.block_until_ready(self._data)
        return self

    def item(self) -> Any:
        """Returns the element of an array without dimensions as a number.

        Raises:
            NamedAxesError: If there are dimensions.

        Example:
            >>> NamedArray(np.arange(3), ("a",)).sum().item()
            3
        """
        return self._scalar("be a number").item()

    def tolist(self) -> Any:
        """Returns an array without names as nested lists.

        Raises:
            NamedAxesError: If there are names.
        """
        return require_addressable(self._nameless("become nested lists"), "tolist").tolist()

    def __array__(
        self, dtype: jax.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        nameless = self._nameless("become a NumPy array")
        array = np.asarray(require_addressable(nameless, "np.asarray"), dtype)
        return array.copy() if copy else array

    def __bool__(self) -> bool:
        return bool(self._scalar("be true or false"))

    def __int__(self) -> int:
        return int(self._scalar("be a number"))

    def __float__(self) -> float:
        return float(self._scalar("be a number"))

    def __complex__(self) -> complex:
        return complex(self._scalar("be a number"))

    def __index__(self) -> int:
        return operator.index(self._scalar("be a number"))

    def __len__(self) -> int:
        return len(self._nameless("have a length (see x.axes)"))

    def __iter__(self) -> Iterator[Self]:
        data = self._nameless("be iterated over (named.unstack(x, name) gives its slices)")
        return (self._make(row, self.dims[1:]) for row in data)

    def __contains__(self, item: object) -> bool:
        return item in self._nameless("be searched ((x == item).any() says whether it is there)")

    def _nameless(self, action: str):
        names = ", ".join(repr(name) for name in self.dims if name is not None)
        if names:
            raise NamedAxesError(
                f"A NamedArray with axes {self._shown()} cannot {action}, which would lose its "
                f"names. Say in which order they become dimensions: x.unwrap({names})."
            )
        return self._data

    def _scalar(self, action: str):
        if self.dims:
            raise NamedAxesError(
                f"A NamedArray with axes {self._shown()} cannot {action}: it has dimensions. "
                f"Reduce it first, by x.sum(...), x.all(...) or x[{{name: position}}]."
            )
        return self._data

    def __repr__(self) -> str:
        try:
            return f"NamedArray({self._data!r}, dims={self.dims})"
        except NamedAxesError:  # what jax.tree.map put into the node, such as a text
            names, sizes = self._form or ((), ())
            return f"NamedArray({self._data}, axes={shown(names, sizes)})"


base.register(NamedArray)


def refuse_positional(array: NamedArray, work: str) -> None:
    """Raises if an array has dimensions without names."""
    if array.positional_shape:
        raise NamedAxesError(
            f"{work}, but the array has positional dimensions: {shown(array.dims, array.shape)}. "
            f"Name them, x.tag(...)."
        )


def as_named(value: Any, function: str) -> NamedArray:
    """Returns a named array, or a Variable's, or raises."""
    if isinstance(value, Variable):
        value = value.value
    if isinstance(value, NamedArray):
        return value
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise NamedAxesError(
        f"{function} takes named arrays, but was given {type(value).__name__}{shape}. Name the "
        f"dimensions: named.wrap(array, ...)."
    )


def dimension_of(array: NamedArray, name: object) -> int:
    """Returns the dimension of a name, or raises."""
    if name is not None and name in array.dims:
        return array.dims.index(name)
    axes = shown(array.dims, array.shape)
    raise NamedAxesError(f"There is no axis {name!r}: the axes are {axes}.")
