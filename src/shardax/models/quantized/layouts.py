# SPDX-License-Identifier: Apache-2.0
"""Layouts of quantized kernels in published files: ``quantization_config``, and its tensors.

Sources: compressed-tensors 0.20 and ``utils/quantization_config.py`` of transformers 5 for the
fields, and for what a tensor's numbers are. A number is ``(q - zero) * scale``, rounded once. What
is computed of activations in each call is left out: it is no part of the kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardax.models.kinds import BOOLEAN, TABLE, TEXT, TEXTS, Kind, PretrainedError, brief
from shardax.models.quantized.mxfp4 import PACKING

COMPRESSED, FP8, FBGEMM = "compressed-tensors", "fp8", "fbgemm_fp8"
_METHODS = (COMPRESSED, FP8, FBGEMM)
SCALE_ENDS = {COMPRESSED: ("_scale",), FP8: ("_scale_inv", "_scale"), FBGEMM: ("_scale",)}
STORED_DTYPES = {"I8": "int8", "I4": "int4", "F8_E4M3": "float8_e4m3fn"}
NAME_OF_FORMAT = {"int8": "I8", "int4": "I4", "fp8": "F8_E4M3"}


# Above every dimension of a weight, and within int32.
_LARGEST_BLOCK = 2**30


class Scheme(NamedTuple):
    """The stored form of a module's weight, of shape (outputs, inputs)."""

    format: str  # "int8", "int4" or "fp8"
    rows: int | None  # outputs that share a scale, None for all
    columns: int | None  # inputs that share a scale, None for all
    is_symmetric: bool = True
    is_packed: bool = False

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rows and columns of a scale, by a weight's shape."""
        # A block that is larger than a weight is all of it, also of a part of the weight.
        rows = shape[0] if self.rows is None else min(self.rows, _LARGEST_BLOCK)
        columns = shape[1] if self.columns is None else min(self.columns, _LARGEST_BLOCK)
        return rows, columns

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 4 if self.format == "int4" else 8


class StoredLayout(NamedTuple):
    """A ``quantization_config``, read."""

    method: str
    by_target: Mapping[str, Scheme]  # of names of modules, patterns and classes
    ignored: Sequence[str] = ()

    def scheme_of(self, name: str, is_embedding: bool) -> Scheme:
        """Returns the scheme of a tensor, or raises if there is none.

        As in compressed-tensors a name comes before a pattern and that before a class, whatever
        their order in the file; of several patterns the first by the alphabet counts.
        """
        module = name.removesuffix(".weight")
        if self.method != COMPRESSED:
            (scheme,) = self.by_target.values()
            return scheme

        classes = ("Embedding" if is_embedding else "Linear", "Module")
        if any(_matches(module, text) or text in classes for text in self.ignored):
            raise PretrainedError(
                f"{name} is quantized in the files, but {PACKING} names it in ignore. Download or "
                f"save the model again."
            )

        targets = sorted(self.by_target, key=lambda text: (text.startswith(_PATTERN), text))
        for text in targets:
            if _matches(module, text):
                return self.by_target[text]
        for text in targets:
            if text in classes:
                return self.by_target[text]

        raise PretrainedError(
            f"{name} is quantized in the files, but no group of {PACKING} has it as a target. "
            f"Download or save the model again."
        )


_PATTERN = "re:"


def _matches(module: str, text: str) -> bool:
    if text.startswith(_PATTERN):
        return re.match(text.removeprefix(_PATTERN), module) is not None
    return module == text


# --- quantization_config --------------------------------------------------------------------------


def read_layout(content: Mapping[str, Any], where: str) -> StoredLayout | None:
    """Returns the layout of a ``config.json``, or raises; None without one."""
    packing = content.get(PACKING)
    if packing is None:
        return None
    try:
        problem = TABLE.problem(PACKING, packing)
        if problem is not None:
            raise PretrainedError(problem)
        return _layout(packing)
    except PretrainedError as error:
        raise PretrainedError(f"{where} describes files that cannot be read: {error}.") from error


def _layout(packing: Mapping[str, Any]) -> StoredLayout | None:
    method = packing.get("quant_method")
    if method == "mxfp4":
        return None
    if method in _METHODS:
        return (_compressed if method == COMPRESSED else _fp8)(_Fields(packing))
    known = f"None, or a quant_method of {', '.join(_METHODS)}, or mxfp4 of gpt_oss"
    advice = _DEQUANTIZE if method in ("bitsandbytes", "higgs") else _QUANTIZE
    raise _unsupported(f"{PACKING}={brief(packing)}", f"{known}. {advice}")


_DEQUANTIZE = (
    "Its numbers are saved by transformers: transformers.AutoModelForCausalLM.from_pretrained("
    "folder).dequantize().save_pretrained(NEW)"
)
_QUANTIZE = (
    "Read the model that it was made of, and quantize that: sx.quantize(sx.models.from_pretrained("
    "ORIGINAL), formats)"
)


def _unsupported(value: str, supported: object) -> PretrainedError:
    return PretrainedError(f"{value} is not supported, only {supported}")


class _Fields:
    """The fields of a table, each to be read or refused."""

    def __init__(self, table: Mapping[str, Any], where: str = PACKING) -> None:
        self.unread, self.where = dict(table), where

    def take(self, name: str, kind: Kind, default: Any = None) -> Any:
        value = self.unread.pop(name, default)
        problem = kind.or_null.problem(f"{self.where}.{name}", value)
        if problem is not None:
            raise PretrainedError(problem)
        return default if value is None else value

    def one_of(self, name: str, supported: Sequence[Any], default: Any = None) -> Any:
        value = self.unread.pop(name, default)
        # By types too, as 8.0 equals 8, and 1 true.
        if not any(type(value) is type(one) and value == one for one in supported):
            listed = " or ".join(map(repr, supported))
            raise _unsupported(f"{self.where}.{name}={brief(value)}", listed)
        return value

    def finish(self, harmless: Sequence[str]) -> None:
        unknown = {name: value for name, value in self.unread.items() if name not in harmless}
        if unknown:
            raise PretrainedError(f"{self.where} has {brief(unknown)}, which is unknown")


_SIZES = Kind("two sizes", lambda x: isinstance(x, list) and len(x) == 2 and min(map(_size, x)) > 0)


def _size(value: object) -> int:
    return value if type(value) is int else 0


def _fp8(fields: _Fields) -> StoredLayout:
    """Reads a layout of fp8, with scales of blocks or rows."""
    method = fields.one_of("quant_method", (FP8, FBGEMM))
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.one_of("scale_fmt", ("float", "ue8m0", None), "float")
    fields.one_of("expert_dtype", ("fp8", None), "fp8")

    ignored = [
        name
        for field in ("modules_to_not_convert", "ignored_layers")
        for name in fields.take(field, TEXTS, [])
    ]

    # Where nothing is said of blocks the files of FP8 have those of DeepSeek's, of FBGEMM rows.
    default = None if method == FBGEMM or "weight_block_size" in fields.unread else [128, 128]
    rows, columns = fields.take("weight_block_size", _SIZES, default) or (None, None)
    fields.finish(("dequantize", "modules_to_convert", "activation_scale_ub"))
    scheme = Scheme("fp8", 1 if method == FBGEMM else rows, columns)
    return StoredLayout(method, {"Linear": scheme}, ignored)


_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")


def _compressed(fields: _Fields) -> StoredLayout:
    """Reads the layout of compressed-tensors."""
    fields.one_of("quant_method", (COMPRESSED,))
    common = fields.one_of("format", (*_FORMATS, "mixed-precision"))
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    fields.one_of("transform_config", (None, {}))
    sparsity = fields.take("sparsity_config", TABLE, {})
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported(f"{PACKING}.sparsity_config={brief(sparsity)}", "'dense'")

    ignored = _patterns(fields.take("ignore", TEXTS, []))
    tables = fields.take("config_groups", TABLE, {})
    by_target: dict[str, Scheme] = {}
    for name, table in tables.items():
        where = f"{PACKING}.config_groups.{name}"
        if not isinstance(table, dict):
            raise _unsupported(f"{where}={brief(table)}", "a table of fields")

        group = _Fields(table, where)
        targets = _patterns(group.take("targets", TEXTS, []))
        weights = group.take("weights", TABLE, {})
        own = group.unread.pop("format", None) or common
        if own not in _FORMATS:
            raise _unsupported(f"{where}.format={brief(own)}", " or ".join(_FORMATS))

        # Those of activations are rounded in each call.
        group.finish(("input_activations", "output_activations"))
        scheme = _weights(_Fields(weights, f"{where}.weights"), own == "pack-quantized")
        by_target |= dict.fromkeys(targets, scheme)  # of the last group with a target

    harmless = ("kv_cache_scheme", "global_compression_ratio", "moe_sparsity_config", "version")
    fields.finish((*harmless, "dequantize", "run_compressed", "use_optimized_inference"))
    return StoredLayout(COMPRESSED, by_target, ignored)


def _patterns(texts: Sequence[str]) -> Sequence[str]:
    """Returns names and patterns of modules, or raises."""
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise PretrainedError(f"{PACKING}: {brief(text)} is no pattern: {error}") from error
    return texts


def _weights(fields: _Fields, is_packed: bool) -> Scheme:
    """Reads how weights of a group are quantized."""
    kind = fields.take("type", TEXT, "int")
    bits = fields.one_of("num_bits", (8, 4) if kind == "int" else (8,), 8)
    if kind not in ("int", "float") or (kind == "float" and is_packed):
        raise _unsupported(f"{fields.where}.type={brief(kind)}", "'int', or 'float' of 8 bits")
    fields.one_of("dynamic", (False, None), False)
    fields.one_of("actorder", (None, False, "weight", "static"))
    is_symmetric = fields.take("symmetric", BOOLEAN, True)

    # How many rows and columns share a scale, by strategy.
    size = fields.unread.pop("group_size", None)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = fields.unread.pop("strategy", None) or default
    structure = fields.take("block_structure", _SIZES)
    shared: dict[str, Sequence[Any]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "group" and _size(size) > 0:
        shared["group"] = (1, size)
    if strategy == "block" and structure is not None:
        shared["block"] = structure
    if strategy not in shared:
        raise _unsupported(
            f"{fields.where}.strategy={brief(strategy)} with group_size={brief(size)}",
            "tensor, channel, group with a size or block with a block_structure",
        )

    fields.finish(("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx"))
    number_format = "fp8" if kind == "float" else f"int{bits}"
    rows, columns = shared[strategy]
    return Scheme(number_format, rows, columns, is_symmetric, is_packed)


# --- tensors --------------------------------------------------------------------------------------


class StoredKernel:
    """The tensors of a quantized weight, read by parts."""

    def __init__(self, name: str, scheme: Scheme, parts: Mapping[str, Any]) -> None:
        self.name, self.scheme = name, scheme  # the name is that without quantization
        self.weight, self.scale = parts["weight"], parts["scale"]
        self.zero: Any = parts.get("zero")

        stored, self.shape = self._shapes(parts.get("shape"))
        expected = "I32" if scheme.is_packed else "F8_E4M3" if scheme.format == "fp8" else "I8"
        if self.weight.get_dtype() != expected or tuple(self.weight.get_shape()) != stored:
            self._raise("weight", f"{expected}{list(stored)}")

        # One scale for each block, whose axes of size 1 files may leave out.
        grid = tuple(-(-n // k) for n, k in zip(self.shape, scheme.block(self.shape), strict=True))
        shapes: list[tuple[int, ...]] = [grid]
        if math.prod(grid) == grid[0]:
            shapes += [grid[:1], ()] if grid[0] == 1 else [grid[:1]]
        kinds = ("F16", "BF16", "F32", "F64", "F8_E8M0", "U8")
        if tuple(self.scale.get_shape()) not in shapes or self.scale.get_dtype() not in kinds:
            self._raise("scale", f"floats of shape {list(grid)}")
        self.grid = grid

        if (self.zero is None) != scheme.is_symmetric:
            lacks = "lacks the zero points of" if self.zero is None else "has zero points, but not"
            raise PretrainedError(f"{name} {lacks} symmetric=False in {PACKING}.")
        if self.zero is not None:
            self._check_zero(shapes)

    def _shapes(self, shape: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Returns the expected stored shape, and the weight's."""
        stored = tuple(self.weight.get_shape())
        if self.scheme.is_packed and (shape is None or tuple(shape.get_shape()) != (2,)):
            raise PretrainedError(f"{self.name} has no {self.name}_shape with its two sizes.")
        if len(stored) != 2:
            self._raise("weight", "of two dimensions")
        if not self.scheme.is_packed:
            return stored, (stored[0], stored[1])
        rows, columns = (int(size) for size in shape[:])
        return (rows, -(-columns * self.scheme.bits // 32)), (rows, columns)

    def _check_zero(self, shapes: Sequence[tuple[int, ...]]) -> None:
        packed = -(-self.grid[0] * self.scheme.bits // 32), self.grid[1]
        kind, shape = self.zero.get_dtype(), tuple(self.zero.get_shape())
        fits = shape == packed if kind == "I32" else kind == "I8" and shape in shapes
        if not fits or self.scheme.format == "fp8":
            self._raise("zero", f"I8{list(self.grid)} or I32{list(packed)}")

    def _raise(self, part: str, expected: str) -> None:
        tensor = getattr(self, part)
        raise PretrainedError(
            f"The {part} of {self.name} is {tensor.get_dtype()}{list(tensor.get_shape())}, but "
            f"{PACKING} says {expected}. Download or save the model again."
        )

    def values(self, index: Sequence[slice]) -> np.ndarray:
        """Returns the stored numbers at slices, also with steps."""
        rows, columns = self._ranges(index)
        outputs = slice(rows.start, rows.stop)
        if not self.scheme.is_packed:
            part = self.weight[outputs, slice(columns.start, columns.stop)]
            part = part[:: rows.step, :: columns.step]
        else:
            each = 32 // self.scheme.bits
            first = columns.start // each
            words = self.weight[outputs, slice(first, -(-columns.stop // each))][:: rows.step]
            start = columns.start - first * each
            part = _unpacked(words, self.scheme.bits)[:, start:][:, : columns.stop - columns.start]
            part = part[:, :: columns.step]
        return part.astype(jnp.int4) if self.scheme.format == "int4" else part

    def scales(self, rows: np.ndarray, columns: np.ndarray, part: str = "scale") -> np.ndarray:
        """Returns the scales of rows and columns, one for each pair."""
        grid = self._zeros() if part == "zero" else as_floats(self.scale)
        places = zip((rows, columns), self.scheme.block(self.shape), strict=True)
        return grid.reshape(self.grid)[np.ix_(*(place // size for place, size in places))]

    def _zeros(self) -> np.ndarray:
        if self.zero.get_dtype() == "I8":
            return self.zero[...]
        columns = _unpacked(np.ascontiguousarray(self.zero[:].T), self.scheme.bits)
        return columns[:, : self.grid[0]].T

    def numbers(self, index: Sequence[slice], dtype: str) -> np.ndarray:
        """Returns the weight's numbers at slices."""
        places = [np.arange(part.start, part.stop, part.step) for part in self._ranges(index)]
        scale = self.scales(places[0], places[1])
        scale = scale.astype(np.promote_types(scale.dtype, np.float32))

        # In place, so that the numbers of a large slice are there once.
        numbers = self.values(index).astype(scale.dtype)
        if self.zero is not None:
            numbers -= self.scales(places[0], places[1], "zero").astype(scale.dtype)
        numbers *= scale
        return numbers.astype(jnp.dtype(dtype), copy=False)

    def _ranges(self, index: Sequence[slice]) -> list[range]:
        return [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)]


def as_floats(scale: Any) -> np.ndarray:
    """Returns scales, also those of powers of two in bytes."""
    kind = scale.get_dtype()
    array = scale[...] if scale.get_shape() else np.asarray(scale[...])
    if kind == "U8":
        return np.ldexp(np.float32(1), array.astype(np.int32) - 127)
    return array.astype(np.float32) if kind == "F8_E8M0" else array


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the numbers in rows of words, the lowest bits first."""
    numbers = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(len(numbers), -1)
    return (numbers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns rows of numbers in words, the lowest bits first."""
    shifted = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    missing = -values.shape[1] % (32 // bits)
    shifted = np.pad(shifted, ((0, 0), (0, missing)))
    if bits == 4:
        shifted = shifted[:, ::2] | (shifted[:, 1::2] << 4)
    return np.ascontiguousarray(shifted).view("<i4").astype(np.int32)


class NumbersSlice:
    """A quantized weight, read as floating numbers."""

    def __init__(self, kernel: StoredKernel) -> None:
        self.kernel, self.dtype = kernel, "F32"

    def get_shape(self) -> list[int]:
        return list(self.kernel.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def read(self, index: Sequence[slice], dtype: str) -> np.ndarray:
        """Returns the numbers at slices, also with steps."""
        return self.kernel.numbers(index, dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.kernel.numbers((rows, slice(None)), "float32")


class ValuesSlice(NumbersSlice):
    """A quantized weight, read as the stored numbers."""

    def __init__(self, kernel: StoredKernel) -> None:
        super().__init__(kernel)
        self.dtype = NAME_OF_FORMAT[kernel.scheme.format]

    def read(self, index: Sequence[slice], dtype: str) -> np.ndarray:
        """Returns the stored numbers at slices."""
        return self.kernel.values(index)


class ScaleSlice(NumbersSlice):
    """The scales of a quantized weight, one for each block."""

    def __init__(self, kernel: StoredKernel, block: tuple[int, int]) -> None:
        super().__init__(kernel)
        self.block = block
        kind = kernel.scale.get_dtype()
        self.dtype = "F32" if kind in ("U8", "F8_E8M0") else kind

    def get_shape(self) -> list[int]:
        return [n // size for n, size in zip(self.kernel.shape, self.block, strict=True)]

    def read(self, index: Sequence[slice], dtype: str) -> np.ndarray:
        """Returns the scales at slices."""
        shape = self.get_shape()
        places = [
            np.arange(*part.indices(count)) * size
            for part, count, size in zip(index, shape, self.block, strict=True)
        ]
        return self.kernel.scales(places[0], places[1])
