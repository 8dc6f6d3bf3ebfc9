# SPDX-License-Identifier: Apache-2.0
"""Parameters and their tensors; those of quantized kernels, read and written.

A quantized kernel has two entries, its numbers and its scales. A tensor of scales has the axes of
the weight, with the number of blocks in place of each size, so both are cut and put together alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Param, Quantized
from shardax.extend import Path, format_path
from shardax.models.comparison import refusal
from shardax.models.files import READ_DTYPES, TensorFiles
from shardax.models.kinds import PretrainedError
from shardax.models.quantized.layouts import COMPRESSED, FP8, Scheme, packed
from shardax.models.tensors import Axis, Tensor
from shardax.nn.einsum import Einsum
from shardax.nn.embedding import Embed
from shardax.nn.linear import Linear
from shardax.nn.moe import MoE
from shardax.nn.quantization import RANGES, QuantizedKernel, kernel_of_parts

SCALE_END = "_scale"
_FORMAT_OF = {jnp.dtype(range_.dtype): name for name, range_ in RANGES.items()}


class Entry(NamedTuple):
    """A parameter, its tensor, and its layers."""

    path: Path
    variable: Any
    tensor: Tensor
    layers: tuple[int, ...]  # () for what belongs to no layer
    stacked: bool
    prefix: str  # that the names of tensors do without

    @property
    def sizes(self) -> dict[str, int]:
        shape = self.variable.shape[1:] if self.stacked else self.variable.shape
        return dict(zip(self.tensor.parameter_axes, shape, strict=True))

    @property
    def is_scale(self) -> bool:
        """Whether it is the scales of a quantized kernel."""
        return isinstance(self.variable, Quantized) and self.path[-1] == "scale"

    def name(self, layer: int, expert: int = 0) -> str:
        """Returns the name of a tensor."""
        return self.tensor.numbered(layer, expert).removeprefix(self.prefix)

    @property
    def experts(self) -> int:
        """Number of tensors of a layer, each for one expert."""
        return self.sizes[self.tensor.parameter_axes[0]] if self.tensor.is_of_expert else 1

    def names(self) -> list[str]:
        """Returns the names of all its tensors."""
        experts = range(self.experts)
        return [self.name(i, x) for i in self.layers or (0,) for x in experts]

    def axis_sizes(self) -> list[int]:
        """Returns the shape of its tensor, possibly shared with others."""
        ranges = {name: (size, 0, size) for name, size in self.sizes.items()}
        return [math.prod(f[0] for f in axis.factors(ranges)) for axis in self.tensor.tensor_axes]

    def outer_sizes(self, axis: int) -> list[int]:
        """Returns the sizes of the axes outside of a concatenation."""
        held = self.tensor.tensor_axes[axis]
        ranges = {name: (size, 0, size) for name, size in self.sizes.items()}
        return [factor[0] for factor in held.factors(ranges)[: held.outer]]


def place_of(name: str, path: Path, variable: object) -> tuple[str, bool]:
    """Returns a parameter's name in a table, and if of scales."""
    if not isinstance(variable, Quantized):
        return name, False
    return name.rpartition(".")[0], path[-1] == "scale"


def tensor_of_scales(tensor: Tensor) -> Tensor:
    """Returns the tensor of a weight's scales."""
    return replace(tensor, name=tensor.name + SCALE_END)


# --- reading --------------------------------------------------------------------------------------


def quantize_as_stored(
    entries: Sequence[Entry], files: TensorFiles, modules: Mapping[Path, Any]
) -> None:
    """Puts quantized kernels in the places of those stored so."""
    # The rows and columns of a scale by path, and the parameters of each tensor.
    blocks = {entry.path: _stored_block(entry, files, modules) for entry in entries}
    shared: dict[str, list[Entry]] = {}
    for entry in entries:
        for name in entry.names():
            shared.setdefault(name, []).append(entry)

    # Parameters of one tensor are all quantized, or none.
    waiting = [entry for entry in entries if blocks[entry.path] is None]
    while waiting:
        for name in waiting.pop().names():
            tensor_blocks = [blocks[other.path] for other in shared[name]]
            if None in tensor_blocks:
                waiting += [other for other in shared[name] if blocks[other.path] is not None]
                blocks.update(dict.fromkeys((other.path for other in shared[name]), None))

    for name, members in shared.items():
        if len({blocks[entry.path] for entry in members}) > 1:
            raise PretrainedError(f"{name} has scales for blocks that its parameters cut apart.")

    for entry in entries:
        block = blocks[entry.path]
        if block is not None:
            for name in entry.names():
                files.split_quantized(name, block)
            kernel = _placeholder(entry, block, files)
            setattr(modules[entry.path[:-1]], str(entry.path[-1]), kernel)


def _stored_block(
    entry: Entry, files: TensorFiles, modules: Mapping[Path, Any]
) -> tuple[int, int] | None:
    """Returns the rows and columns of a scale; None to read numbers."""
    kernels = [files.quantized.get(name) for name in entry.names()]
    layer, axes = modules.get(entry.path[:-1]), entry.tensor.tensor_axes
    known = isinstance(layer, (Linear, Einsum, MoE, Embed)) and isinstance(entry.variable, Param)
    first = kernels[0]
    if not known or first is None or not first.scheme.is_symmetric or len(axes) != 2:
        return None

    stored = {
        None if k is None else (k.scheme, k.shape, k.scale.get_dtype(), k.weight.get_dtype())
        for k in kernels
    }
    if len(stored) > 1:
        return None  # layers or experts in one parameter, of several forms

    rows, columns = first.scheme.block(first.shape)
    rows = 1 if first.scheme.rows is None else rows  # a scale of all is one of each
    if isinstance(layer, Embed) and rows != 1:
        return None  # rows are looked up with their scales
    return _fitting(entry, 0, rows), _fitting(entry, 1, columns)


def _fitting(entry: Entry, axis: int, block: int) -> int:
    """Returns the largest block size that fits a parameter's axis."""
    names = entry.tensor.tensor_axes[axis]
    if not _is_plain(names):
        return 1

    # From the innermost part outwards, while a block covers whole parts.
    fitting = 1
    for part in reversed(names.parts):
        size = entry.sizes[str(part)]
        common = math.gcd(block, size)
        fitting *= common
        if common != size:
            break
        block = max(1, block // size)
    return fitting


def _is_plain(axis: Axis) -> bool:
    """Whether an axis of a tensor is of one parameter alone."""
    return not axis.is_concatenated and all(isinstance(part, str) for part in axis.parts)


def _counts(entry: Entry, block: Sequence[int]) -> dict[str, int]:
    """Returns how many scales each axis of a parameter has."""
    counts = dict(entry.sizes)
    for axis, size in zip(entry.tensor.tensor_axes, block, strict=True):
        for part in reversed(_names(axis)):
            common = math.gcd(size, entry.sizes[part])
            counts[part] = entry.sizes[part] // common
            size //= common
    return counts


def _placeholder(entry: Entry, block: Sequence[int], files: TensorFiles) -> QuantizedKernel:
    """Returns a quantized kernel with values yet to read."""
    counts = _counts(entry, block)
    shape = tuple(counts[axis] for axis in entry.tensor.parameter_axes)
    shape = (entry.variable.shape[0], *shape) if entry.stacked else shape

    name = entry.names()[0]
    number_dtype = RANGES[files.quantized[name].scheme.format].dtype
    numbers = jax.ShapeDtypeStruct(entry.variable.shape, number_dtype)
    scale = jax.ShapeDtypeStruct(shape, READ_DTYPES[files.dtype(name + SCALE_END)])
    return kernel_of_parts(entry.variable, numbers, scale)


# --- writing --------------------------------------------------------------------------------------


class WrittenLayout(NamedTuple):
    """The layout of quantized kernels in new files."""

    config: dict[str, Any] | None = None  # its quantization_config
    schemes: Mapping[str, Scheme] = {}  # by the names of weights
    shapes: Mapping[str, tuple[int, ...]] = {}

    def stored(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the file's tensors for a tensor of the table."""
        scheme, weight = self.schemes.get(name), name.removesuffix(SCALE_END)
        if scheme is not None and scheme.is_packed:
            shape = np.asarray(array.shape, np.int64)
            return {f"{name}_packed": packed(array, scheme.bits), f"{name}_shape": shape}
        if scheme is not None or weight not in self.schemes or self.schemes[weight].rows == 1:
            return {name: array}

        # Scales of parameters are repeated so that each part of an axis has its own. A file has one
        # for each block: the first of each, if the others are the same.
        scheme, shape = self.schemes[weight], self.shapes[weight]
        firsts: list[np.ndarray] = []
        repeats: list[np.ndarray] = []
        for size, count, block in zip(shape, array.shape, scheme.block(shape), strict=True):
            places = np.arange(size) // block
            firsts.append(np.arange(0, size, block) * count // size)
            repeats.append(places[:: size // count])
        grid = array[np.ix_(*firsts)]
        if not np.array_equal(grid[np.ix_(*repeats)], array):
            raise refusal([f"{weight} has scales that are not one for each block of its config"])
        return {f"{weight}_scale_inv": grid}


_QUANTIZE_LESS = (
    " Leave such kernels as they are, with None in the formats of sx.quantize; or write numbers: "
    "sx.models.save_pretrained(sx.dequantize(model), folder)."
)


def layout_of(
    by_name: Mapping[str, Sequence[tuple[Entry, int, int]]],
    shape: Callable[[str], tuple[int, ...]],
    packing: Mapping[str, Any] | None,
    linear_names: Sequence[str],
) -> WrittenLayout:
    """Returns the layout of a model's kernels, or raises by path."""
    problems: list[str] = []
    schemes: dict[str, Scheme] = {}
    blocks = (packing or {}).get("weight_block_size") or None
    scales = {e.path[:-1]: e for places in by_name.values() for e, *_ in places if e.is_scale}

    # Each kernel alone.
    for name, places in by_name.items():
        for entry, *_ in places:
            if not isinstance(entry.variable, Quantized) or entry.is_scale:
                continue
            scheme = _written_scheme(entry, scales[entry.path[:-1]], blocks)
            if not isinstance(scheme, str) and schemes.setdefault(name, scheme) != scheme:
                scheme = f"is a part of {name}, of which others are quantized in another way"
            if isinstance(scheme, str):
                problems.append(f"{format_path(entry.path[:-1])} {scheme}")

    # All together: files have one way for blocks, and one for experts.
    is_blocked = any(scheme.rows != 1 for scheme in schemes.values())
    if is_blocked and len({*schemes.values()}) > 1:
        other = next(name for name, scheme in schemes.items() if scheme.rows == 1)
        problems.append(f"{other} has no scales for blocks of {blocks}, as others have")

    of_experts = {scheme: name for name, scheme in schemes.items() if _EXPERTS in name}
    if len(of_experts) > 1:
        listed = ", ".join(f"{name} in {scheme.format}" for scheme, name in of_experts.items())
        problems.append(f"experts are quantized in several ways, where files have one: {listed}")

    if problems:
        raise refusal(list(dict.fromkeys(problems)), _QUANTIZE_LESS)
    if not schemes:
        return WrittenLayout()

    plain = [name for name in linear_names if f"{name}.weight" not in schemes]
    config = _compressed_config(schemes, plain)
    if is_blocked:
        config = {
            "quant_method": FP8,
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": blocks,
            "modules_to_not_convert": plain,
        }
    return WrittenLayout(config, schemes, {name: shape(name) for name in schemes})


def _written_scheme(entry: Entry, of_scales: Entry, blocks: Sequence[int] | None) -> Scheme | str:
    """Returns a kernel's scheme, or why there is none."""
    number_format = _FORMAT_OF.get(jnp.dtype(entry.variable.dtype))
    place, axes = entry.tensor.to, entry.tensor.tensor_axes
    if number_format is None:
        return f"has numbers of {entry.variable.dtype}, which no layout has"
    if place.endswith("embedding"):
        return "is of an embedding, whose vectors no layout quantizes"
    if place.endswith("router.kernel"):
        return "is of a router, which transformers reads as numbers"
    if not entry.tensor.name.endswith(".weight") or len(axes) != 2:
        return f"is the tensor {entry.tensor.name}, which is no weight of outputs by inputs"

    if number_format == "fp8" and blocks is not None:
        sizes = [_fitting(entry, axis, block) for axis, block in enumerate(blocks)]
        if of_scales.sizes == _counts(entry, sizes):
            return Scheme("fp8", blocks[0], blocks[1])

    counts = of_scales.sizes
    if any(counts[str(p)] != entry.sizes[str(p)] for p in _names(axes[0])) or not _is_plain(
        axes[1]
    ):
        return "has no scale for each output of its tensor"

    # How many inputs share a scale: whole parts from the innermost outwards, then a piece of one.
    group, is_open = 1, True
    for part in reversed(_names(axes[1])):
        size, count = entry.sizes[part], counts[part]
        if not is_open and count != size:
            return "shares scales between inputs that are not next to each other"
        group *= size // count
        is_open = is_open and count == 1
    columns = None if is_open else group
    return Scheme(number_format, 1, columns, is_packed=number_format != "fp8")


_EXPERTS = ".experts."


def _names(axis: Axis) -> list[str]:
    """Returns the axes of a parameter that make up an axis of its tensor."""
    return [part for part in axis.parts if isinstance(part, str)]


def _targets(names: Sequence[str]) -> list[str]:
    """Returns a group's targets: modules, or a pattern of experts."""
    # By which transformers finds out how experts are stored.
    others = [name for name in names if _EXPERTS not in name]
    return others if len(others) == len(names) else [*others, r"re:.*\.experts\..*"]


def _compressed_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` of compressed-tensors."""
    members: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault(scheme, []).append(name.removesuffix(".weight"))

    groups: dict[str, Any] = {}
    for number, (scheme, names) in enumerate(members.items()):
        weights = {
            "num_bits": scheme.bits,
            "type": "float" if scheme.format == "fp8" else "int",
            "symmetric": True,
            "strategy": "channel" if scheme.columns is None else "group",
            "group_size": scheme.columns,
            "dynamic": False,
        }
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(members) == 1 else _targets(names),
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized" if scheme.is_packed else "float-quantized",
        }

    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(plain),
    }
