# SPDX-License-Identifier: Apache-2.0
"""Construction, random numbers, joining and selection of named arrays.

Axes are a mapping from names to sizes, such as ``{"batch": 8, "embed": 512}``. Constants are stored
in its order. Random numbers are drawn in canonical order and stored so, so that one key gives the
same number at the same place whatever the order of the mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Variable
from shardax.extend import explicit_sharding, with_layout
from shardax.named import base
from shardax.named.array import NamedArray, as_named, dimension_of, refuse_positional
from shardax.named.base import Operand, from_parts, parts_of
from shardax.named.elementwise import align, check_sizes, expand, joined, operand_of
from shardax.named.lift import run_lifted


def wrap(array: Any, *names: Any) -> NamedArray:
    """Names the dimensions of an array.

    Args:
        array: A JAX or NumPy array, a number, or a Variable.
        *names: One per dimension, None for one that stays positional. Without any, all stay
            positional; but a Variable gives its ``axes``.

    Returns:
        The array under these names, not copied.

    Raises:
        NamedAxesError: If there is not one name per dimension.
        PartitionError: If a name is not hashable or occurs twice.

    Example:
        >>> import numpy as np, shardax as sx
        >>> sx.named.wrap(np.zeros((2, 3)), "batch", "embed").axes
        {'batch': 2, 'embed': 3}
        >>> sx.named.wrap(sx.Param(np.zeros((2, 3)), axes=("embed", "mlp"))).dims
        ('embed', 'mlp')
    """
    if isinstance(array, Variable) and not names:
        names = array.axes or ()
        array = array.value
    if not names and not isinstance(array, NamedArray):
        names = (None,) * jnp.ndim(array)
    return NamedArray(array, names)


def full(axes: base.Axes, fill_value: Any, dtype: jax.typing.DTypeLike | None = None) -> NamedArray:
    """Returns an array of one number.

    Args:
        axes: Sizes by name.
        fill_value: The number.
        dtype: The dtype; None for that of the number.

    Example:
        >>> import shardax as sx
        >>> sx.named.full({"a": 2}, 7).unwrap("a").tolist()
        [7, 7]
    """
    names, shape = base.check_sizes_by_name(axes)
    return NamedArray(jnp.full(shape, fill_value, dtype), names)


def zeros(axes: base.Axes, dtype: jax.typing.DTypeLike | None = None) -> NamedArray:
    """Returns an array of zeros.

    Args:
        axes: Sizes by name.
        dtype: The dtype; None for JAX's default float.

    Example:
        >>> import shardax as sx
        >>> sx.named.zeros({"a": 2, "b": 3}).axes
        {'a': 2, 'b': 3}
    """
    names, shape = base.check_sizes_by_name(axes)
    return NamedArray(jnp.zeros(shape, dtype), names)


def ones(axes: base.Axes, dtype: jax.typing.DTypeLike | None = None) -> NamedArray:
    """Returns an array of ones.

    Args:
        axes: Sizes by name.
        dtype: The dtype; None for JAX's default float.

    Example:
        >>> import shardax as sx
        >>> sx.named.ones({"a": 2}).sum().item()
        2.0
    """
    names, shape = base.check_sizes_by_name(axes)
    return NamedArray(jnp.ones(shape, dtype), names)


def arange(
    axes: base.Axes, start: Any = 0, step: Any = 1, dtype: jax.typing.DTypeLike | None = None
) -> NamedArray:
    """Returns numbers in equal steps along one axis.

    Args:
        axes: The one axis and how many numbers.
        start: The first.
        step: From each to the next.
        dtype: The dtype; None for that of start and step.

    Raises:
        NamedAxesError: If there is not one axis.

    Example:
        >>> import shardax as sx
        >>> sx.named.arange({"time": 4}, start=1, step=2).unwrap("time").tolist()
        [1, 3, 5, 7]
    """
    several = "arange({'a': 2}) + 10 * arange({'b': 3})"
    remedy = f"Add numbers along several axes, which meet by name: {several}."
    name, size = base.one_axis("arange", axes, remedy)
    numbers = start + step * jnp.arange(size)
    return NamedArray(numbers if dtype is None else numbers.astype(dtype), (name,))


def random(sampler: Callable[..., Any], key: Any, axes: base.Axes, **options: Any) -> NamedArray:
    """Draws random numbers by a function such as those of ``jax.random``.

    Args:
        sampler: Called as ``sampler(key, shape=shape, **options)``.
        key: A random key, or a named array of keys, of which each draws.
        axes: Sizes by name, other names than those of the keys.
        **options: For the sampler. Named arrays, such as bounds or rates, meet what is drawn by
            name; their axes are among those drawn along and those of the keys.

    Returns:
        The numbers, with the axes of the keys besides, stored in canonical order.

    Raises:
        NamedAxesError: If arguments are swapped, the keys have one of the axes, or an option has
            another axis or size.

    Example:
        >>> import jax, shardax as sx
        >>> sx.named.random(jax.random.gumbel, jax.random.key(0), {"vocab": 5}).axes
        {'vocab': 5}
        >>> rates = sx.named.arange({"batch": 2}, dtype=float)
        >>> counts = sx.named.random(
        ...     jax.random.poisson, jax.random.key(0), {"time": 3, "batch": 2}, lam=rates)
        >>> counts[{"batch": 0}].unwrap("time").tolist()
        [0, 0, 0]
    """
    if isinstance(key, Mapping) or not callable(sampler):
        description = f"the axes {dict(key)}" if isinstance(key, Mapping) else f"{sampler!r} first"
        raise base.NamedAxesError(
            f"A function that draws was given {description} in the place of a random key. The key "
            "comes before the axes: named.normal(key, {'batch': 8}), "
            "named.random(sampler, key, {...})."
        )

    sizes_by_name, _ = base.check_sizes_by_name(axes)
    names = base.sorted_names(sizes_by_name)
    shape = tuple(axes[name] for name in names)
    sizes = dict(axes) | (key.axes if isinstance(key, NamedArray) else {})
    for option, value in options.items():
        if isinstance(value, Variable) and isinstance(value.value, NamedArray):
            value = value.value
        if isinstance(value, NamedArray):
            options[option] = _beside(option, value, names, sizes)

    if not isinstance(key, NamedArray):
        plain = {k: v.data if isinstance(v, NamedArray) else v for k, v in options.items()}
        return NamedArray(sampler(key, shape=shape, **plain), names)
    twice = [name for name in names if name in key.axes]
    if twice:
        raise base.NamedAxesError(
            f"The keys have the axis {twice[0]!r} already: {base.shown(key.dims, key.shape)}. Draw "
            "along other axes only, as each key draws for itself; or take one key of them."
        )
    drawn = run_lifted(NamedArray, functools.partial(sampler, shape=shape), (key,), options)
    return drawn.tag(*names).canonical()


def _beside(
    option: str, value: NamedArray, names: tuple[object, ...], sizes: Mapping[Any, int]
) -> NamedArray:
    """Returns an option with a positional dimension per drawn name."""
    wrong = [name for name in value.dims if name is None or sizes.get(name) != value.axes[name]]
    if wrong:
        raise base.NamedAxesError(
            f"{option} has the dimensions {base.shown(value.dims, value.shape)}, but numbers are "
            f"drawn along {dict(sizes)}. Its names must be among these, of the same sizes: draw "
            "along the others too, give positional dimensions a name, x.tag(name), or x.rename("
            "{old: new})."
        )
    of_keys = tuple(name for name in value.dims if name not in names)
    data = expand(parts_of(value), (*of_keys, *names))
    return NamedArray(data, (*of_keys, *(None,) * len(names)))


def normal(key: object, axes: base.Axes, dtype: jax.typing.DTypeLike = float) -> NamedArray:
    """Draws numbers of the standard normal distribution.

    Args:
        key: A random key.
        axes: Sizes by name.
        dtype: A floating dtype.

    Returns:
        The numbers, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> one = sx.named.normal(jax.random.key(0), {"a": 2, "b": 3})
        >>> other = sx.named.normal(jax.random.key(0), {"b": 3, "a": 2})
        >>> bool((one == other).all())
        True
    """
    return random(jax.random.normal, key, axes, dtype=dtype)


def uniform(
    key: object,
    axes: base.Axes,
    dtype: jax.typing.DTypeLike = float,
    minval: object = 0.0,
    maxval: object = 1.0,
) -> NamedArray:
    """Draws numbers evenly from ``[minval, maxval)``.

    Args:
        key: A random key.
        axes: Sizes by name.
        dtype: A floating dtype.
        minval: The least number, or a named array of them.
        maxval: The bound above, or a named array of them.

    Returns:
        The numbers, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> bool((sx.named.uniform(jax.random.key(0), {"a": 9}) < 1).all())
        True
    """
    return random(jax.random.uniform, key, axes, dtype=dtype, minval=minval, maxval=maxval)


def randint(
    key: object, axes: base.Axes, minval: object, maxval: object, dtype: jax.typing.DTypeLike = int
) -> NamedArray:
    """Draws integers evenly from ``[minval, maxval)``.

    Args:
        key: A random key.
        axes: Sizes by name.
        minval: The least integer, or a named array of them.
        maxval: The bound above, or a named array of them.
        dtype: An integer dtype.

    Returns:
        The integers, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> tokens = sx.named.randint(jax.random.key(0), {"time": 9}, 0, 100)
        >>> tokens.axes, bool((tokens >= 0).all())
        ({'time': 9}, True)
    """
    return random(jax.random.randint, key, axes, minval=minval, maxval=maxval, dtype=dtype)


def random_split(key: object, axes: base.Axes) -> NamedArray:
    """Returns a random key for every position.

    A function run by ``nmap`` then draws differently at each. A key that is not split is the same
    at all positions, and so is the noise drawn from it.

    Args:
        key: A random key, or a named array of keys, each of which is split.
        axes: Sizes by name.

    Returns:
        The keys, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> keys = sx.named.random_split(jax.random.key(0), {"batch": 3})
        >>> sx.named.nmap(lambda key: jax.random.normal(key, (2,)))(keys).dims
        (None, 'batch')
        >>> sx.named.random_split(keys, {"head": 2}).axes
        {'batch': 3, 'head': 2}
    """
    return random(lambda key, shape: jax.random.split(key, shape), key, axes)


def categorical(
    key: Any, logits: object, axis: object, axes: base.Axes | None = None
) -> NamedArray:
    """Draws positions along an axis, by the logarithms of their probabilities.

    Args:
        key: A random key, or a named array of keys, of which each draws.
        logits: A named array; they need not be normalized.
        axis: The name of the axis whose positions are drawn.
        axes: Sizes by name of further axes, along which draws are independent.

    Returns:
        Integers with the other axes of the logits, the further ones and those of the keys, stored
        in canonical order.

    Raises:
        NamedAxesError: If there is no such axis, logits have positional dimensions, or a further
            axis is there already.

    Example:
        >>> import jax, shardax as sx
        >>> logits = sx.named.wrap([[0.0, -1e9], [-1e9, 0.0]], "batch", "vocab")
        >>> tokens = sx.named.categorical(jax.random.key(0), logits, "vocab", {"draw": 2})
        >>> tokens.unwrap("batch", "draw").tolist()
        [[0, 0], [1, 1]]
    """
    array = as_named(logits, "categorical")
    dimension_of(array, axis)
    refuse_positional(array, f"categorical draws along all names but {axis!r}")

    further, _ = base.check_sizes_by_name(axes or {})
    of_keys = key.axes if isinstance(key, NamedArray) else {}
    for name in further:
        if name in array.axes or name in of_keys:
            raise base.NamedAxesError(
                f"categorical draws along the further axis {name!r}, which the "
                f"{'logits' if name in array.axes else 'keys'} have already. Give another name, or "
                f"leave it out."
            )

    sizes = {name: size for name, size in array.axes.items() if name != axis} | dict(axes or {})
    names = tuple(name for name in base.sorted_names(sizes) if name not in of_keys)
    shared = tuple(name for name in array.axes if name in of_keys and name != axis)
    data = expand(parts_of(array), (*shared, *names, axis))
    draw = functools.partial(
        jax.random.categorical, axis=-1, shape=tuple(sizes[name] for name in names)
    )
    if not isinstance(key, NamedArray):
        return NamedArray(draw(key, data), names)

    # Each key draws along names of its own, which its slice of the logits does not have.
    lifted = NamedArray(data, (*shared, *(None,) * (len(names) + 1)))
    return run_lifted(NamedArray, draw, (key, lifted), {}).tag(*names).canonical()


def choice(
    key: Any, array: Any, axis: Any, axes: base.Axes, *, replace: bool = True, p: Any = None
) -> NamedArray:
    """Draws slices of an array along an axis.

    Args:
        key: A random key, or a named array of keys, of which each draws.
        array: A named array.
        axis: The name of the axis to draw along.
        axes: Sizes by name of the axes that take its place. Of one that the array has too each
            position draws for itself; along other axes of the array the draws are the same.
        replace: Whether a position may be drawn more than once.
        p: Probabilities of the positions, with that axis only; None for all alike.

    Returns:
        The array with the axes in place of the axis.

    Raises:
        NamedAxesError: If there is no such axis, or ``p`` has other axes.

    Example:
        >>> import jax, shardax as sx
        >>> x = sx.named.arange({"item": 3}) * 10
        >>> p = sx.named.wrap([0.0, 0.0, 1.0], "item")
        >>> sx.named.choice(jax.random.key(0), x, "item", {"draw": 2}, p=p).unwrap("draw").tolist()
        [20, 20]
    """
    array = as_named(array, "choice")
    size = array.data.shape[dimension_of(array, axis)]
    weights = p
    if p is not None:
        weights = p if isinstance(p, NamedArray) else wrap(jnp.asarray(p), axis)
        if weights.axes != {axis: size}:
            raise base.NamedAxesError(
                f"choice along {axis!r} takes probabilities with the axes {{{axis!r}: {size}}}, "
                f"but was given {base.shown(weights.dims, weights.shape)}. For others at each "
                f"position: named.categorical(key, named.nmap(jnp.log)(p), {axis!r})."
            )
        weights = weights.unwrap(axis)

    positions = random(
        lambda key, shape: jax.random.choice(key, size, shape, replace, weights), key, axes
    )
    return array[{axis: positions}]


def permutation(key: Any, array: object, axis: object, *, independent: bool = False) -> NamedArray:
    """Returns an array with its slices along an axis in random order.

    Args:
        key: A random key, or a named array of keys, each of which orders its own positions.
        array: A named array.
        axis: The name of the axis.
        independent: Whether each position along the other axes has an order of its own.

    Returns:
        The same axes, and those of the keys.

    Raises:
        NamedAxesError: If there is no such axis, or ``independent`` is given with named keys.

    Example:
        >>> import jax, shardax as sx
        >>> x = sx.named.permutation(jax.random.key(0), sx.named.arange({"item": 4}), "item")
        >>> sorted(x.unwrap("item").tolist())
        [0, 1, 2, 3]
    """
    array = as_named(array, "permutation")
    size = array.data.shape[dimension_of(array, axis)]
    if not independent:
        order = random(lambda key, shape: jax.random.permutation(key, size), key, {axis: size})
        return array[{axis: order}]
    if isinstance(key, NamedArray):
        raise base.NamedAxesError(
            "permutation(independent=True) takes one key, but was given named ones, each of which "
            "orders its own positions: leave independent out."
        )
    data, dims = parts_of(array.canonical())
    dimension = dims.index(axis)
    shuffle = functools.partial(jax.random.permutation, axis=dimension, independent=True)
    return NamedArray(with_layout(shuffle, explicit_sharding(data), key, data), dims)


def concatenate(arrays: Sequence[Any], axis: Any) -> NamedArray:
    """Concatenates arrays along a common axis.

    Args:
        arrays: Named arrays; one that lacks another name is repeated along it.
        axis: The name.

    Returns:
        An array with all their names; sizes along the axis add up.

    Raises:
        NamedAxesError: If an array lacks the axis, or another axis has two sizes.

    Example:
        >>> import shardax as sx
        >>> parts = [sx.named.ones({"a": 2, "b": 3}), sx.named.zeros({"b": 3, "a": 4})]
        >>> sx.named.concatenate(parts, "a").axes
        {'a': 6, 'b': 3}
    """
    operands = _operands(arrays, "concatenate")
    for data, dims in operands:
        if axis is None or axis not in dims:
            raise base.NamedAxesError(
                f"concatenate along {axis!r} was given an array with axes "
                f"{base.shown(dims, data.shape)}. Every array needs it; stack makes a new axis."
            )

    def narrowed(data, dimension: int) -> tuple[int, ...]:
        return (
            *data.shape[:dimension],
            1,
            *data.shape[dimension + 1 :],
        )  # along the axis sizes may differ

    structs = (
        jax.ShapeDtypeStruct(narrowed(data, dims.index(axis)), data.dtype)
        for data, dims in operands
    )
    check_sizes(
        [Operand(struct, dims) for struct, (_, dims) in zip(structs, operands, strict=True)]
    )
    dims = functools.reduce(joined, (operand.dims for operand in operands))
    datas = [expand(operand, dims) for operand in operands]
    dimension = dims.index(axis)
    common = np.broadcast_shapes(*(narrowed(data, dimension) for data in datas))
    full = [
        jnp.broadcast_to(
            data, (*common[:dimension], data.shape[dimension], *common[dimension + 1 :])
        )
        for data in datas
    ]
    return from_parts(NamedArray, jnp.concatenate(full, axis=dimension), dims)


def stack(arrays: Sequence[Any], axis: Any) -> NamedArray:
    """Stacks arrays along a new axis, stored first.

    Args:
        arrays: Named arrays, or numbers; one that lacks a name is repeated along it.
        axis: The new name.

    Returns:
        An array with the new axis and all their names.

    Raises:
        NamedAxesError: If an axis has two sizes.
        PartitionError: If an array has the new axis already.

    Example:
        >>> import shardax as sx
        >>> sx.named.stack([sx.named.ones({"a": 2}), sx.named.zeros({"a": 2})], "part").axes
        {'part': 2, 'a': 2}
    """
    datas, dims = align(_operands(arrays, "stack"))
    full = jnp.broadcast_arrays(*datas)
    return from_parts(NamedArray, jnp.stack(full), base.check_dims((axis, *dims)))


def unstack(array: NamedArray, axis: object) -> tuple[NamedArray, ...]:
    """Returns the slices along an axis; the inverse of ``stack``.

    Args:
        array: A named array.
        axis: The name of one of its axes.

    Raises:
        NamedAxesError: If it has no such axis.

    Example:
        >>> import shardax as sx
        >>> [part.item() for part in sx.named.unstack(sx.named.arange({"a": 3}), "a")]
        [0, 1, 2]
    """
    array = as_named(array, "unstack")
    data, dims = parts_of(array)
    dimension = dimension_of(array, axis)
    remaining = (*dims[:dimension], *dims[dimension + 1 :])
    return tuple(
        from_parts(NamedArray, part, remaining) for part in jnp.unstack(data, axis=dimension)
    )


def split(array: NamedArray, axis: Any, sizes: int | Sequence[int]) -> tuple[NamedArray, ...]:
    """Cuts an array into parts along an axis; the inverse of ``concatenate``.

    Args:
        array: A named array.
        axis: The name of one of its axes.
        sizes: The size of each part, which together are that of the axis; or a number of equal
            parts.

    Returns:
        The parts, in order.

    Raises:
        NamedAxesError: If it has no such axis, or the sizes do not add up.

    Example:
        >>> import shardax as sx
        >>> head, tail = sx.named.split(sx.named.arange({"a": 5}), "a", [2, 3])
        >>> head.axes, tail.unwrap("a").tolist()
        ({'a': 2}, [2, 3, 4])
    """
    array = as_named(array, "split")
    data, dims = parts_of(array)
    dimension = dimension_of(array, axis)

    whole = data.shape[dimension]
    if isinstance(sizes, int):
        parts = sizes
        sizes = (whole // parts,) * parts if parts > 0 else ()
    if sum(sizes) != whole or any(size < 0 for size in sizes):
        raise base.NamedAxesError(
            f"The axis {axis!r} has size {whole}, which the parts {tuple(sizes)} are not. Give "
            f"sizes that add up, or a number of parts that divides it."
        )
    return tuple(
        from_parts(NamedArray, part, dims)
        for part in jax.lax.split(data, tuple(sizes), axis=dimension)
    )


def where(condition: Any, x: Any, y: Any) -> NamedArray:
    """Chooses elements of ``x`` or ``y`` by a condition.

    Args:
        condition: Booleans, a named array.
        x: A named array or a number.
        y: Likewise.

    Returns:
        An array with all their names.

    Raises:
        NamedAxesError: If a name has two sizes.

    Example:
        >>> import shardax as sx
        >>> x = sx.named.arange({"a": 4})
        >>> sx.named.where(x % 2 == 0, x, -1).unwrap("a").tolist()
        [0, -1, 2, -1]
    """
    first = next(
        (argument for argument in (x, y, condition) if isinstance(argument, NamedArray)), None
    )
    if first is None:
        raise base.NamedAxesError(
            "named.where chooses between named arrays, but none was given; for plain ones there "
            "is jnp.where."
        )

    mate = parts_of(first)
    operands = [operand_of(argument, mate) for argument in (x, y, condition)]
    for operand, argument in zip(operands, (x, y, condition), strict=True):
        if operand is NotImplemented:
            raise base.NamedAxesError(
                f"named.where takes arrays and numbers, but was given {argument!r}."
            )

    datas, dims = align([operand for operand in operands if isinstance(operand, Operand)])
    expanded = iter(datas)
    chosen, alternative, mask = (next(expanded) if isinstance(e, Operand) else e for e in operands)
    return from_parts(NamedArray, jnp.where(mask, chosen, alternative), dims)


def _operands(arrays: Sequence[object], function: str) -> list[Operand]:
    operands = [
        Operand(jnp.asarray(array), ())
        if isinstance(array, (bool, int, float, complex))
        else parts_of(as_named(array, function))
        for array in arrays
    ]
    if not operands:
        raise base.NamedAxesError(f"{function} needs at least one array.")
    return operands
