# SPDX-License-Identifier: Apache-2.0
"""Slices of parameters, cut out of tensors and put into them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.models.entries import Entry
from shardax.models.files import READ_DTYPES, TensorFiles


def dtype_in_files(entry: Entry, files: TensorFiles) -> np.dtype:
    """Returns the dtype that holds all tensors of a parameter, such as layers of a stack."""
    dtypes = {np.dtype(READ_DTYPES[files.dtype(name)]) for name in entry.names()}
    return functools.reduce(jnp.promote_types, dtypes)


def read_parameter(
    entry: Entry,
    files: TensorFiles,
    sharding: jax.sharding.Sharding | None,
    *,
    stored_dtype: np.dtype,
    param_dtype: np.dtype | None,
) -> jax.Array:
    """Returns a parameter in its sharding, None for one device; each device reads its own part.

    Args:
        entry: The parameter, and where it stands in the files.
        files: The tensors.
        sharding: Where it is to be.
        stored_dtype: The dtype that its tensors are read in: that of the files, or of the numbers
            of a quantized kernel.
        param_dtype: What its numbers are converted to; None for as they are stored.
    """
    shape = tuple(entry.variable.shape)

    def read_slice(bounds: Sequence[tuple[int, int]]) -> np.ndarray:
        numbers = _read_block(entry, files, bounds, stored_dtype)
        return numbers if param_dtype is None else numbers.astype(param_dtype, copy=False)

    if sharding is None:
        return jax.block_until_ready(jax.device_put(read_slice([(0, size) for size in shape])))

    # Devices that hold the same slice, as replicas do, share one reading of it.
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        spans = zip(index, shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in spans)
        devices_of.setdefault(bounds, []).append(device)

    # The slice before is on its devices, and no more on the host, when the next one is read.
    arrays: list[jax.Array] = []
    for bounds, devices in devices_of.items():
        numbers = read_slice(bounds)
        arrays += [jax.device_put(numbers, device) for device in devices]
        del numbers
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_block(
    entry: Entry, files: TensorFiles, bounds: Sequence[tuple[int, int]], dtype: np.dtype
) -> np.ndarray:
    """Reads part of a parameter, of one layer or of several in a stack."""
    if entry.stacked:
        layers, bounds = entry.layers[slice(*bounds[0])], bounds[1:]
        blocks = (_read_layer(entry, files, bounds, layer, dtype) for layer in layers)
        return _stacked(blocks, len(layers), bounds, dtype)
    return _read_layer(entry, files, bounds, (entry.layers or (0,))[0], dtype)


def _stacked(
    blocks: Iterator[np.ndarray], count: int, bounds: Sequence[tuple[int, int]], dtype: np.dtype
) -> np.ndarray:
    """Returns the stack of blocks that are read one by one, in their order in memory."""
    first = next(blocks, None)
    if first is None:
        return np.empty((0, *(b - a for a, b in bounds)), dtype)

    # Blocks are views of tensors with other axes: copied as they lie, they are copied fast.
    strides = first.strides
    stored = sorted(range(first.ndim), key=lambda axis: -strides[axis])
    stack = np.empty((count, *(first.shape[axis] for axis in stored)), dtype)
    stack[0] = first.transpose(stored)
    del first
    for index, block in enumerate(blocks, start=1):
        stack[index] = block.transpose(stored)
    return stack.transpose(0, *(1 + stored.index(axis) for axis in range(len(stored))))


def _read_layer(
    entry: Entry, files: TensorFiles, bounds: Sequence[tuple[int, int]], layer: int, dtype: np.dtype
) -> np.ndarray:
    """Reads part of a parameter of one layer, whose experts may each have a tensor."""
    if not entry.tensor.is_of_expert:
        return _read_tensor(entry, files, entry.name(layer), bounds)
    experts = range(*bounds[0])
    names = (entry.name(layer, expert) for expert in experts)
    blocks = (_read_tensor(entry, files, name, bounds) for name in names)
    return _stacked(blocks, len(experts), bounds[1:], dtype)


def _read_tensor(
    entry: Entry, files: TensorFiles, name: str, bounds: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Returns part of a tensor, with the axes of the parameter in their order."""
    offsets = [files.offsets[entry.path, axis] for axis in range(len(entry.tensor.tensor_axes))]
    runs, sizes, order = _cut(entry, bounds, offsets)

    spans = [span for span in map(_span, runs) if span is not None]
    is_one_slice = len(spans) == len(runs)
    array = files.read(name, spans) if is_one_slice else _read_runs(files, name, runs)
    return array.reshape(sizes).transpose(order)  # a view, which JAX copies much faster than NumPy


def _read_runs(
    files: TensorFiles, name: str, runs: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray:
    """Returns several runs of each axis, one behind the other, where no single slice has them."""
    lengths = [[end - start for start, end in axis_runs] for axis_runs in runs]
    array = np.empty([sum(axis) for axis in lengths], READ_DTYPES[files.dtype(name)])

    # Where each part stands in the array, by axis.
    ends = [list(itertools.accumulate(axis)) for axis in lengths]
    places = [
        [slice(end - length, end) for end, length in zip(*axis, strict=True)]
        for axis in zip(ends, lengths, strict=True)
    ]

    for part, place in zip(itertools.product(*runs), itertools.product(*places), strict=True):
        array[place] = files.read(name, [slice(*run) for run in part])
    return array


def _span(runs: Sequence[tuple[int, int]]) -> slice | None:
    """Returns the slice, perhaps with a step, that has just the runs of an axis; None if none."""
    if len(runs) == 1:
        return slice(*runs[0])
    starts = [start for start, _ in runs]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    is_even = len(steps) == 1 and all(end - start == 1 for start, end in runs)
    return slice(starts[0], runs[-1][1], steps.pop()) if is_even else None


def _cut(
    entry: Entry, bounds: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
    """Returns what to read of a tensor for part of a parameter.

    Args:
        entry: How the axes of the parameter stand in the tensor.
        bounds: Of each axis of the parameter the first index and the end.
        offsets: Of each axis of the tensor where the parameter begins in it, and the size of that
            axis, which is more than the parameter's own where several stand behind one another.

    Returns:
        The runs of each axis of the tensor, as (first, end); the shape to give what was read, which
        has an axis for each of the parameter's; and the transposition into the parameter's order.
    """
    tensor, sizes = entry.tensor, entry.sizes
    ranges = {
        name: (sizes[name], *bound)
        for name, bound in zip(tensor.parameter_axes, bounds, strict=True)
    }

    runs: list[list[tuple[int, int]]] = []
    shape: list[int] = []
    names: list[str] = []
    for axis, (offset, size) in zip(tensor.tensor_axes, offsets, strict=True):
        factors = axis.factors(ranges)

        # Where several parameters stand behind one another within each index of outer axes, this
        # one has a run for each of these indices.
        inner = [(a + offset, b + offset) for a, b in _runs(factors[axis.outer :])]
        runs.append(_runs(factors[: axis.outer], inner, size))

        for part, (_, first, end) in zip(axis.parts, factors, strict=True):
            if isinstance(part, str):  # else a fixed index, which the parameter has no axis for
                shape.append(end - first)
                names.append(part)

    axis_names = [name for name in tensor.parameter_axes if name in names]
    return runs, shape, [names.index(name) for name in axis_names]


def _runs(
    factors: Sequence[tuple[int, int, int]],
    inner: Sequence[tuple[int, int]] = ((0, 1),),
    size: int = 1,
) -> list[tuple[int, int]]:
    """Returns the contiguous runs of an axis that is made of several.

    Args:
        factors: Of each axis that it is made of, from the outside, (size, first index, end).
        inner: The runs within one index of the innermost of these axes.
        size: The length of such an index.
    """
    runs = list(inner)
    for count, first, end in reversed(factors):
        if runs == [(0, size)]:
            runs = [(first * size, end * size)]
        else:
            runs = [(k * size + a, k * size + b) for k in range(first, end) for a, b in runs]
        size *= count
    return runs


def put_parameter(
    result: np.ndarray, value: np.ndarray, entry: Entry, offsets: Sequence[tuple[int, int]]
) -> None:
    """Writes a parameter to its place in a tensor.

    Args:
        result: The tensor, which is changed.
        value: The parameter, of one layer and of one expert where each has a tensor.
        entry: How its axes stand in the tensor.
        offsets: Of each axis of the tensor where the parameter begins, and the size.
    """
    whole: list[int] = []
    index: list[slice] = []
    shape: list[int] = []
    names: list[Any] = []
    sizes = entry.axis_sizes()
    for number, (axis, (offset, total)) in enumerate(
        zip(entry.tensor.tensor_axes, offsets, strict=True)
    ):
        # The tensor's axis as those outside a concatenation and the concatenated one.
        outer = entry.outer_sizes(number)
        whole += [*outer, total]
        index += [slice(None)] * len(outer)
        index.append(slice(offset, offset + sizes[number] // math.prod(outer)))

        for part in axis.parts:
            shape.append(entry.sizes[part] if isinstance(part, str) else part.count)
            names.append(part)

    # The parameter has the named parts of axes; of the others it is at one index.
    own_axes = entry.tensor.parameter_axes[1 if entry.tensor.is_of_expert else 0 :]
    place = tuple(slice(None) if isinstance(part, str) else part.index for part in names)
    order = [own_axes.index(part) for part in names if isinstance(part, str)]

    result = result.reshape(whole)  # a view, as it is contiguous
    block = np.asarray(result[tuple(index)])  # of no axes it is a number
    view = block.reshape(shape)  # a copy where a concatenated axis is cut
    view[place] = value.transpose(order)
    if not np.shares_memory(view, result):
        result[tuple(index)] = view.reshape(block.shape)
