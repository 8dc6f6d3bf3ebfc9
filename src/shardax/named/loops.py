# SPDX-License-Identifier: Apache-2.0
"""``scan``: a function run once per slice along a name.

The *carry* goes from one iteration to the next. Its named arrays keep the storage order that they
came in with, whatever order the function leaves them in, so nothing is transposed that need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax.core.errors import CarryError, NamedAxesError
from shardax.core.node import Object
from shardax.named.align import Operand
from shardax.named.array import NamedArray
from shardax.named.names import Dims, Name, check_dims, shown
from shardax.transforms import scan as scans


def scan(
    function: Callable[[Any, Any], Any],
    axis: Name,
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Runs a function once per slice along a name, as ``jax.lax.scan`` does along a dimension.

    Args:
        function: Takes the carry and a slice of ``xs``; returns the new carry and a result. May
            read and write Modules and Variables, as under ``sx.scan``.
        axis: The name. Slices lack it, and results get it.
        init: The first carry: a pytree of named arrays, arrays, numbers, Modules and Variables.
        xs: A pytree of named arrays that have the axis; None for no slices.
        length: The number of iterations; needed if there are no slices.
        reverse: Whether to go through the slices from the last to the first.
        unroll: As in ``jax.lax.scan``.

    Returns:
        The last carry, and the results, put together along the axis.

    Raises:
        NamedAxesError: If ``xs`` has an array without the axis, or the axis has two sizes.
        CarryError: If the carry changes its structure, its axes or its dtypes.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.arange({"time": 3}) + 10 * sx.named.arange({"batch": 2})
        >>> last, sums = sx.named.scan(
        ...     lambda total, now: (total + now, total), "time", sx.named.zeros({"batch": 2}), x)
        >>> last.unwrap("batch").tolist(), sums.unwrap("batch", "time").tolist()
        ([3.0, 33.0], [[0.0, 0.0, 1.0], [0.0, 10.0, 21.0]])
    """
    slices, slices_tree = _slices(xs, axis)
    carry = _Carry.of(init)
    results: list[Any] = []

    def body(values: Sequence[Any], now: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = [NamedArray._make(data, each.dims) for data, each in zip(now, slices, strict=True)]
        result = function(carry.filled(values), slices_tree.unflatten(given))
        if not isinstance(result, tuple) or len(result) != 2:
            raise CarryError(
                f"The function of named.scan returns (carry, result), but returned "
                f"{type(result).__name__}. Without a result return (carry, None)."
            )
        leaving, treedef = _results(result[1])
        results[:] = [treedef, *(check_dims((axis, *dims)) for _, dims in leaving)]
        return carry.taken_from(result[0]), [data for data, _ in leaving]

    run = scans.scan(body, length=length, reverse=reverse, unroll=unroll)
    last, stacked = run(carry.values, [data for data, _ in slices])
    treedef, *dims = results
    arrays = [NamedArray._make(data, each) for data, each in zip(stacked, dims, strict=True)]
    return carry.filled(last), treedef.unflatten(arrays)


def _slices(xs: Any, axis: Name) -> tuple[list[Operand], Any]:
    """Returns the arrays with the axis in front, under the dims of their slices."""
    leaves, treedef = jax.tree.flatten_with_path(xs, is_leaf=_is_named)
    found: list[Operand] = []
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        where = f"xs{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, NamedArray):
            raise NamedAxesError(
                f"{where} of named.scan is of type {type(leaf).__name__}, without names to slice "
                f"by. Wrap it, named.wrap(array, {axis!r}, ...); what every iteration sees whole "
                f"the function can take from around it."
            )
        data, dims = leaf._parts()
        if axis is None or axis not in dims:
            raise NamedAxesError(
                f"{where} of named.scan has the axes {shown(dims, data.shape)}, without {axis!r}."
            )
        place = dims.index(axis)
        sizes.setdefault(data.shape[place], where)
        rest = (*dims[:place], *dims[place + 1 :])
        found.append(Operand(jnp.moveaxis(data, place, 0), rest))
    if len(sizes) > 1:
        texts = ", ".join(f"{size} at {where}" for size, where in sizes.items())
        raise NamedAxesError(f"The sizes of the axis {axis!r} of named.scan differ: {texts}.")
    return found, treedef


class _Carry(NamedTuple):
    """What goes from one iteration to the next.

    Attributes:
        values: Arrays and objects, in the order of leaves.
        dims: For each the dims of a named array; None for anything else.
        treedef: The pytree of them.
        paths: Where each is.
    """

    values: list[Any]
    dims: list[Dims | None]
    treedef: Any
    paths: list[str]

    @classmethod
    def of(cls, init: Any) -> _Carry:
        leaves, treedef = jax.tree.flatten_with_path(init, is_leaf=_is_whole)
        values: list[Any] = []
        dims: list[Dims | None] = []
        for _, leaf in leaves:
            data, own = leaf._parts() if isinstance(leaf, NamedArray) else (leaf, None)
            values.append(data if isinstance(data, Object) else jnp.asarray(data))
            dims.append(own)
        paths = [f"carry{jax.tree_util.keystr(path)}" for path, _ in leaves]
        return cls(values, dims, treedef, paths)

    def filled(self, values: Sequence[Any]) -> Any:
        """Returns the carry as the function knows it."""
        return self.treedef.unflatten(
            value if dims is None else NamedArray._make(value, dims)
            for value, dims in zip(values, self.dims, strict=True)
        )

    def taken_from(self, carry: Any) -> list[Any]:
        """Returns the values of a carry that the function returned.

        Raises:
            CarryError: If it is another one than came in.
        """
        leaves, treedef = jax.tree.flatten(carry, is_leaf=_is_whole)
        if treedef != self.treedef:
            raise CarryError(
                f"The carry of named.scan changes its structure: it comes in as {self.treedef} and "
                f"is returned as {treedef}."
            )
        return [self._checked(place, leaf) for place, leaf in enumerate(leaves)]

    def _checked(self, place: int, leaf: Any) -> Any:
        before, dims = self.values[place], self.dims[place]
        if isinstance(leaf, Object) or isinstance(before, Object):
            return leaf
        if dims is None and isinstance(leaf, NamedArray) and not leaf.dims:
            return leaf.data  # a number to begin with is a number in every iteration
        if (dims is not None) != isinstance(leaf, NamedArray):
            raise self._changed(place, leaf)
        if dims is None:
            return leaf
        was = NamedArray._make(before, dims)
        if _traits(was) != _traits(leaf):
            raise self._changed(place, leaf)
        return leaf.order_as(*dims).data

    def _changed(self, place: int, leaf: Any) -> CarryError:
        before = self.filled(self.values)
        was = jax.tree.leaves(before, is_leaf=_is_whole)[place]
        hint = "Every iteration must hand on what it was given."
        if isinstance(was, NamedArray) and isinstance(leaf, NamedArray):
            gained = [name for name in leaf.axes if name not in was.axes]
            if gained:
                sizes = ", ".join(f"{name!r}: {leaf.axes[name]}" for name in gained)
                hint = (
                    f"It gained {', '.join(map(repr, gained))}: give it the axis from the start, "
                    f"init.broadcast_axes({{{sizes}}}), or reduce along it."
                )
            elif was.dtype != leaf.dtype:
                hint = f"Cast it: .astype({str(was.dtype)!r})."
        return CarryError(
            f"{self.paths[place]} of named.scan comes in as {_kind(was)} and is returned as "
            f"{_kind(leaf)}. {hint}"
        )


def _traits(array: NamedArray) -> Any:
    """What must not change; storage order may."""
    return array.axes, array.positional_shape, array.dtype


def _kind(value: Any) -> str:
    if isinstance(value, NamedArray):
        return f"{value.dtype}{shown(value.dims, value.shape)}"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _results(result: Any) -> tuple[list[Operand], Any]:
    leaves, treedef = jax.tree.flatten(result, is_leaf=_is_named)
    found = []
    for leaf in leaves:
        if isinstance(leaf, NamedArray):
            found.append(Operand(*leaf._parts()))
        else:
            array = jnp.asarray(leaf)
            found.append(Operand(array, (None,) * array.ndim))
    return found, treedef


def _is_named(value: Any) -> bool:
    return isinstance(value, NamedArray)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (NamedArray, Object))
