# SPDX-License-Identifier: Apache-2.0
"""Sums of products, softmax, mapped functions and loops along names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax import Variable
from shardax import scan as scan_objects
from shardax.errors import TransformError
from shardax.extend import Object, joined_sharding, transformed
from shardax.named import elementwise
from shardax.named.array import NamedArray, as_named
from shardax.named.base import (
    Dims,
    Name,
    NamedAxesError,
    Operand,
    check_dims,
    from_parts,
    parts_of,
    positional_dimensions,
    shown,
)
from shardax.named.lift import is_named, is_whole, run_lifted
from shardax.nn.arithmetic import cast_all


def dot(
    x: NamedArray, y: NamedArray, axes: object, *, dtype: jax.typing.DTypeLike | None = None
) -> NamedArray:
    """Sums products of two arrays over names; other common names go together.

    It is ``(x * y).sum(axes)`` as one contraction.

    Args:
        x: A named array.
        y: Another; one of the two may have positional dimensions.
        axes: The name, or an iterable of names, to sum over; both arrays have them.
        dtype: Dtype of the sums and of the result; None for that of the products.

    Returns:
        Stored as: the names that go together, then what else ``x`` has, then what else ``y`` has.
        Over Explicit mesh axes these keep their layouts.

    Raises:
        NamedAxesError: If one is no named array or lacks a name, a name has two sizes, or both have
            positional dimensions.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.ones({"batch": 2, "time": 3, "embed": 4})
        >>> w = sx.named.ones({"embed": 4, "mlp": 5})
        >>> sx.named.dot(x, w, "embed").axes
        {'batch': 2, 'time': 3, 'mlp': 5}
    """
    first, second = (parts_of(as_named(array, "dot")) for array in (x, y))

    names = _names(axes, first.dims, second.dims)
    elementwise.check_sizes((first, second))
    if positional_dimensions(first.dims) and positional_dimensions(second.dims):
        raise NamedAxesError(
            f"dot cannot tell which positional dimensions belong together: "
            f"{elementwise.listing((first, second))}. Name those of one array, x.tag(...)."
        )

    # Names of both arrays that are not summed over go together, as batch dimensions.
    common = (name for name in first.dims if name is not None and name in second.dims)
    joint = [name for name in common if name not in names]
    free = [
        [dimension for dimension, name in enumerate(dims) if name not in (*names, *joint)]
        for dims in (first.dims, second.dims)
    ]

    left, right = cast_all(None, first.data, second.data)
    summed, batch = (
        (tuple(map(first.dims.index, shared_names)), tuple(map(second.dims.index, shared_names)))
        for shared_names in (names, joint)
    )
    data = jax.lax.dot_general(
        left,
        right,
        (summed, batch),
        preferred_element_type=left.dtype if dtype is None else dtype,
        out_sharding=joined_sharding(((left, (*batch[0], *free[0])), (right, free[1]))),
    )

    free_names = (
        (first.dims[dimension] for dimension in free[0]),
        (second.dims[dimension] for dimension in free[1]),
    )
    return from_parts(NamedArray, data, (*joint, *free_names[0], *free_names[1]))


_DOTS = "..."


def einsum(subscripts: str, *arrays: Any, dtype: jax.typing.DTypeLike | None = None) -> NamedArray:
    """Sums products of arrays over names, given as a text.

    Args:
        subscripts: The names of each array, separated by spaces, with commas between arrays, and
            those of the result after ``->``. Names that the result lacks are summed over. An
            ellipsis stands for the names of a named array that are not mentioned; in the result,
            for all of these.
        *arrays: As many arrays. Of a named one, names that are not mentioned stay, and go together
            with those of other arrays; the dimensions of a plain one are named in order.
        dtype: Dtype of the sums and of the result; None for that of the products.

    Returns:
        The result, stored as: the names that are not mentioned, in place of the ellipsis or in
        front, and those after ``->``.

    Raises:
        NamedAxesError: If the text does not fit the arrays, or a name has two sizes.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> x, w = sx.named.ones({"batch": 2, "time": 3, "embed": 4}), jnp.ones((4, 5))
        >>> sx.named.einsum("time embed, embed mlp -> mlp time", x, w).axes
        {'batch': 2, 'mlp': 5, 'time': 3}
        >>> sx.named.einsum("... embed, embed mlp -> ... mlp", x, w).axes
        {'batch': 2, 'time': 3, 'mlp': 5}
    """
    terms, arrow, last = subscripts.replace("...", f" {_DOTS} ").partition("->")
    inputs, result = [term.split() for term in terms.split(",")], last.split()
    if any(_DOTS in term for term in inputs) and _DOTS not in result:
        raise NamedAxesError(
            f"einsum({subscripts!r}) has an ellipsis for the names that are not mentioned, which "
            f"stay: write it in the result too, '... embed, embed mlp -> ... mlp'."
        )

    operands: list[Operand] = []
    for term, array in zip(inputs, arrays, strict=False):
        if isinstance(array, Variable):
            array = array.value
        operand = Operand(array, tuple(term))
        if isinstance(array, NamedArray):
            operand = parts_of(array)
            term = [name for name in term if name != _DOTS]
        elif not hasattr(array, "shape") or len(array.shape) != len(term) or _DOTS in term:
            operand = None
        if operand is None or None in operand.dims or not {*term} <= {*operand.dims}:
            raise NamedAxesError(
                f"einsum({subscripts!r}) has the names {' '.join(term)!r} for {_kind(array)}. Give "
                "a named array that has them and no positional dimension, or a plain one of that "
                "rank."
            )
        operands.append(operand)

    mentioned = [name for term in inputs for name in term]
    twice = any(len({*names}) < len(names) for names in (*inputs, result))
    if not arrow or twice or len(inputs) != len(arrays) or not {*result} <= {*mentioned, _DOTS}:
        raise NamedAxesError(
            f"einsum({subscripts!r}) does not fit {len(arrays)} arrays: give the names of each, "
            "every name once, with commas between, and those of the result, which are some of "
            "these: einsum('batch embed, embed mlp -> batch mlp', x, w)."
        )

    sizes = elementwise.named_sizes(operands)
    numbers = {name: index for index, name in enumerate(sizes)}
    index = result.index(_DOTS) if _DOTS in result else 0
    further = (name for name in sizes if name not in mentioned)
    dims = (*result[:index], *further, *(name for name in result[index:] if name != _DOTS))

    # ``jnp.einsum`` takes numbers in place of letters, of which there may be too few.
    interleaved: list[Any] = []
    for data, own_dims in operands:
        interleaved += [data, [numbers[name] for name in own_dims]]
    out = [numbers[name] for name in dims]
    return from_parts(NamedArray, jnp.einsum(*interleaved, out, preferred_element_type=dtype), dims)


def _names(axes, *dims: Dims) -> tuple[Any, ...]:
    single = isinstance(axes, str) or not isinstance(axes, Iterable)
    if isinstance(axes, tuple) and any(axes in array_dims for array_dims in dims):
        single = True  # a name that is a tuple
    names = (axes,) if single else tuple(axes)
    for array_dims in dims:
        for name in names:
            if name is None or name not in array_dims:
                raise NamedAxesError(
                    f"dot sums over {', '.join(map(repr, names))}, which both arrays need; one "
                    f"has the dims {array_dims}."
                )
    return names


def softmax(x: NamedArray, axis: object) -> NamedArray:
    """Returns exponentials along axes, divided by their sum.

    Args:
        x: A named array.
        axis: A name, the number of a positional dimension, or a list or tuple of these.

    Returns:
        The same axes.

    Raises:
        NamedAxesError: If there is no such axis.

    Example:
        >>> import shardax as sx
        >>> sx.named.softmax(sx.named.zeros({"a": 4}), "a").unwrap("a").tolist()
        [0.25, 0.25, 0.25, 0.25]
        >>> sx.named.softmax(sx.named.zeros({"a": 4, "b": 2}), ("a", "b")).max().item()
        0.125
    """
    data, dims = parts_of(as_named(x, "softmax"))
    return from_parts(NamedArray, jax.nn.softmax(data, axis=_dimensions(dims, axis)), dims)


def log_softmax(x: NamedArray, axis: object) -> NamedArray:
    """Returns the logarithm of the softmax along axes.

    Args:
        x: A named array.
        axis: As for ``softmax``.

    Returns:
        The same axes.

    Raises:
        NamedAxesError: If there is no such axis.

    Example:
        >>> import shardax as sx
        >>> sx.named.log_softmax(sx.named.zeros({"a": 1}), "a").unwrap("a").tolist()
        [0.0]
    """
    data, dims = parts_of(as_named(x, "log_softmax"))
    return from_parts(NamedArray, jax.nn.log_softmax(data, axis=_dimensions(dims, axis)), dims)


def logsumexp(x: NamedArray, axis: object) -> NamedArray:
    """Returns the logarithm of the sum of exponentials along axes.

    Args:
        x: A named array.
        axis: As for ``softmax``.

    Returns:
        The axes that remain.

    Raises:
        NamedAxesError: If there is no such axis.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.zeros({"a": 1, "b": 1, "batch": 2})
        >>> sx.named.logsumexp(x, ("a", "b")).unwrap("batch").tolist()
        [0.0, 0.0]
    """
    data, dims = parts_of(as_named(x, "logsumexp"))
    dimensions = _dimensions(dims, axis)
    remaining = tuple(name for dimension, name in enumerate(dims) if dimension not in dimensions)
    return from_parts(NamedArray, jax.nn.logsumexp(data, axis=dimensions), remaining)


def _dimensions(dims: Dims, axis: object) -> tuple[int, ...]:
    return (
        (elementwise.dimension_of_axis(dims, axis),)
        if axis is None
        else elementwise.dimensions_of_axes(dims, axis)
    )


def nmap(function: Callable[..., object]) -> Callable[..., Any]:
    """Lifts a function of plain arrays to all names of named arrays.

    The function sees slices, which have the positional dimensions only, at every position of the
    union of all names. An argument that lacks a name is the same at all positions along it; so are
    arrays that are not named, and Modules and Variables (one that holds a named array stands for
    it). Collectives of ``jax.lax`` find the names:
    ``jax.lax.psum(x, "batch")``.

    A random key that has no names is one key, and what is drawn from it is the same at all
    positions, also by layers that draw by themselves; ``random_split`` makes one for each.

    Args:
        function: Takes and returns pytrees of arrays. A function, method or callable Module. It
            may return named arrays with other names, which are kept. What it writes into Variables
            must be the same at all positions.

    Returns:
        A function that takes named arrays, and returns them with all names.

    Raises:
        NamedAxesError: When called, if a name has two sizes; lists the axes of every argument.
        ClosureError: When called, if it uses a named array that it was not given and that has one
            of the names.
        TransformError: When called, if a name is split over Explicit mesh axes in two ways; when
            called, if it writes different values into a Variable.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> x = sx.named.wrap(jnp.arange(6.0).reshape(2, 3), "batch", "embed")
        >>> sx.named.nmap(jnp.sin)(x).axes
        {'batch': 2, 'embed': 3}
        >>> sx.named.nmap(jax.nn.softmax)(x.untag("embed")).tag("embed").sum("embed").dims
        ('batch',)
    """

    @functools.wraps(function, updated=())
    def mapped(*args, **kwargs):
        return run_lifted(NamedArray, function, args, kwargs)

    return transformed(mapped, nmap, function)


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
    """Runs a function once per slice along a name, carrying state.

    It does along a name what ``jax.lax.scan`` does along a dimension. Named arrays in the carry
    keep the storage order that they came in with.

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
        TransformError: If the carry changes its structure, its axes or its dtypes.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.arange({"time": 3}) + 10 * sx.named.arange({"batch": 2})
        >>> last, sums = sx.named.scan(
        ...     lambda total, now: (total + now, total), "time", sx.named.zeros({"batch": 2}), x)
        >>> last.unwrap("batch").tolist(), sums.unwrap("batch", "time").tolist()
        ([3.0, 33.0], [[0.0, 0.0, 1.0], [0.0, 10.0, 21.0]])
    """
    slices, slices_tree = _slices(xs, axis)
    carry = _ScanCarry.of(init)
    results: list[Any] = []

    def body(values: Sequence[Any], now: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        step_slices = [
            from_parts(NamedArray, data, operand.dims)
            for data, operand in zip(now, slices, strict=True)
        ]
        result = function(carry.filled(values), slices_tree.unflatten(step_slices))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TransformError(
                f"The function of named.scan returns (carry, result), but returned "
                f"{type(result).__name__}. Without a result return (carry, None)."
            )
        leaves, treedef = jax.tree.flatten(result[1], is_leaf=is_named)
        operands = [_operand(leaf) for leaf in leaves]
        results[:] = [treedef, *(check_dims((axis, *dims)) for _, dims in operands)]
        return carry.taken_from(result[0]), [data for data, _ in operands]

    run = scan_objects(body, length=length, reverse=reverse, unroll=unroll)
    last, stacked = run(carry.values, [data for data, _ in slices])
    treedef, *dims = results
    arrays = [
        from_parts(NamedArray, data, array_dims)
        for data, array_dims in zip(stacked, dims, strict=True)
    ]
    return carry.filled(last), treedef.unflatten(arrays)


def _slices(xs: object, axis: Name) -> tuple[list[Operand], Any]:
    """Returns the arrays with the axis in front, without its name."""
    leaves, treedef = jax.tree.flatten_with_path(xs, is_leaf=is_named)
    operands: list[Operand] = []
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        where = f"xs{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, NamedArray):
            raise NamedAxesError(
                f"{where} of named.scan is of type {type(leaf).__name__}, without names to slice "
                f"by. Wrap it, named.wrap(array, {axis!r}, ...), or let the function close over it."
            )

        data, dims = parts_of(leaf)
        if axis is None or axis not in dims:
            raise NamedAxesError(
                f"{where} of named.scan has the axes {shown(dims, data.shape)}, without {axis!r}."
            )
        dimension = dims.index(axis)
        sizes.setdefault(data.shape[dimension], where)
        remaining = (*dims[:dimension], *dims[dimension + 1 :])
        operands.append(Operand(jnp.moveaxis(data, dimension, 0), remaining))
    if len(sizes) > 1:
        texts = ", ".join(f"{size} at {where}" for size, where in sizes.items())
        raise NamedAxesError(f"The sizes of the axis {axis!r} of named.scan differ: {texts}.")
    return operands, treedef


class _ScanCarry(NamedTuple):
    """Carry of a loop: arrays and objects in the order of leaves."""

    values: list[Any]
    dims: list[Dims | None]  # of named arrays
    treedef: Any
    paths: list[str]

    @classmethod
    def of(cls, init) -> _ScanCarry:
        leaves, treedef = jax.tree.flatten_with_path(init, is_leaf=is_whole)
        values: list[Any] = []
        dims: list[Dims | None] = []
        for _, leaf in leaves:
            data, own_dims = parts_of(leaf) if isinstance(leaf, NamedArray) else (leaf, None)
            values.append(data if isinstance(data, Object) else jnp.asarray(data))
            dims.append(own_dims)
        paths = [f"carry{jax.tree_util.keystr(path)}" for path, _ in leaves]
        return cls(values, dims, treedef, paths)

    def filled(self, values: Sequence[object]):
        """Returns the carry as the function knows it."""
        return self.treedef.unflatten(
            value if dims is None else from_parts(NamedArray, value, dims)
            for value, dims in zip(values, self.dims, strict=True)
        )

    def taken_from(self, carry: object) -> list[Any]:
        """Returns the values of a returned carry, or raises if it changed."""
        leaves, treedef = jax.tree.flatten(carry, is_leaf=is_whole)
        if treedef != self.treedef:
            raise TransformError(
                f"The carry of named.scan changes its structure: it comes in as {self.treedef} and "
                f"is returned as {treedef}."
            )
        return [self._carried_data(index, leaf) for index, leaf in enumerate(leaves)]

    def _carried_data(self, index: int, leaf):
        start, dims = self.values[index], self.dims[index]
        if isinstance(leaf, Object) or isinstance(start, Object):
            return leaf
        if dims is None and isinstance(leaf, NamedArray) and not leaf.dims:
            return leaf.data  # a number to begin with is a number in every iteration
        if (dims is not None) != isinstance(leaf, NamedArray):
            raise self._changed(index, leaf)
        if dims is None:
            return leaf
        was = from_parts(NamedArray, start, dims)
        for trait in ("axes", "positional_shape", "dtype"):  # but storage order may change
            if getattr(was, trait) != getattr(leaf, trait):
                raise self._changed(index, leaf)
        return leaf.order_as(*dims).data

    def _changed(self, index: int, leaf: object) -> TransformError:
        start = self.filled(self.values)
        was = jax.tree.leaves(start, is_leaf=is_whole)[index]

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
        return TransformError(
            f"{self.paths[index]} of named.scan comes in as {_kind(was)} and is returned as "
            f"{_kind(leaf)}. {hint}"
        )


def _kind(value) -> str:
    if isinstance(value, NamedArray):
        return f"{value.dtype}{shown(value.dims, value.shape)}"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _operand(leaf) -> Operand:
    if isinstance(leaf, NamedArray):
        return parts_of(leaf)
    array = jnp.asarray(leaf)
    return Operand(array, (None,) * array.ndim)
