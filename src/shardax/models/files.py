# SPDX-License-Identifier: Apache-2.0
"""The tensors of a folder of safetensors, by name, read by slices."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from shardax.extend import join_first, needs_package
from shardax.models.kinds import PretrainedError, brief
from shardax.models.quantized.layouts import (
    COMPRESSED,
    SCALE_ENDS,
    STORED_DTYPES,
    NumbersSlice,
    ScaleSlice,
    StoredKernel,
    StoredLayout,
    ValuesSlice,
    read_layout,
)
from shardax.models.quantized.mxfp4 import BLOCKS, SCALES, PackedSlice, is_packed, packed_names

T = TypeVar("T")

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
READ_DTYPES = DTYPES | STORED_DTYPES

# By a name of its own, as ``slice`` is a method below.
_Index = Sequence[slice]


def _repeat(entries: dict[str, T], name: str, other: str) -> None:
    """Gives an entry another name too."""
    if name in entries:
        entries[other] = entries[name]


class TensorFiles(contextlib.ExitStack):
    """The tensors of a folder, by name."""

    def __init__(
        self, folder: Path, content: Mapping[str, Any], embeddings: Set[str] = frozenset()
    ) -> None:
        super().__init__()
        with needs_package("Reading weights", "shardax[hub]"):
            from safetensors import SafetensorError, safe_open

        self.offsets: dict[Any, tuple[int, int]] = {}
        by_name = _file_names(folder, content.get("architectures"))
        opened: dict[str, Any] = {}
        for title in sorted({*by_name.values()}):
            check_no_pointer(folder / title)
            try:
                opened[title] = self.enter_context(safe_open(folder / title, framework="np"))
            except (SafetensorError, OSError) as error:
                raise PretrainedError(
                    f"{folder / title} is damaged: {error}. Download or save it again."
                ) from error

        # Each tensor by the name of today, in the file that the index says.
        self.names: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        # Tensors that safetensors.torch.save_model left out, by the names of those it kept.
        self.kept_as: dict[str, str] = {}
        for title, file in opened.items():
            for name, kept in (file.metadata() or {}).items():
                self.kept_as[_today(name)] = _today(kept)
            for stored in sorted(file.keys()):
                name = _today(stored)
                if name not in self.names or by_name.get(stored) == title:
                    self.names[name], self._stored_names[name] = file, stored
        self.kept_as = {name: kept for name, kept in self.kept_as.items() if kept in self.names}

        self._paths = {id(file): folder / title for title, file in opened.items()}
        self._places: dict[Path, dict[str, int]] = {}

        # What is stored in another form than numbers.
        self.packed: dict[str, PackedSlice | NumbersSlice] = {}
        self.quantized: dict[str, StoredKernel] = {}
        if is_packed(content):
            self._find_packed()
        layout = read_layout(content, str(folder / "config.json"))
        if layout is not None:
            self._find_quantized(layout, embeddings)

    def _find_packed(self) -> None:
        """Puts tensors in MXFP4 in the place of their two parts."""
        dtype = _most_common(map(self.dtype, self.names))
        for name in packed_names([*self.names]):
            blocks, scales = (self.slice(name + end) for end in (BLOCKS, SCALES))
            self.packed[name] = PackedSlice(name, blocks, scales, dtype)
            for end in (BLOCKS, SCALES):
                del self.names[name + end]
            self.names[name] = None

    def _find_quantized(self, layout: StoredLayout, embeddings: Set[str]) -> None:
        """Puts the numbers of quantized weights in the place of their parts."""
        for name in [*self.names]:
            weight = name.removesuffix("_packed")
            if not weight.endswith(".weight") or weight in self.quantized:
                continue

            scales = (weight + end for end in SCALE_ENDS[layout.method])
            scale = next((text for text in scales if text in self.names), None)
            is_number = self.dtype(name) in DTYPES
            if scale is None or is_number:
                if not is_number:
                    raise PretrainedError(
                        f"{name} is {self.dtype(name)}, and there is no {weight}_scale. Download "
                        f"or save the model again."
                    )
                continue

            parts = {"weight": name, "scale": scale}
            if layout.method == COMPRESSED:
                parts |= {"zero": f"{weight}_zero_point", "shape": f"{weight}_shape"}
            parts = {part: text for part, text in parts.items() if text in self.names}
            slices = {part: self.slice(text) for part, text in parts.items()}
            scheme = layout.scheme_of(weight, weight in embeddings)
            self.quantized[weight] = StoredKernel(weight, scheme, slices)
            for text in parts.values():
                del self.names[text]

        for weight, kernel in self.quantized.items():
            self.names[weight], self.packed[weight] = None, NumbersSlice(kernel)

    def split_quantized(self, name: str, block: tuple[int, int]) -> None:
        """Puts stored numbers and scales in the place of a weight's numbers."""
        self.packed[name] = ValuesSlice(self.quantized[name])
        self.packed[f"{name}_scale"] = ScaleSlice(self.quantized[name], block)
        self.names[f"{name}_scale"] = None

    def repeat(self, name: str, other: str) -> None:
        """Lets a tensor be read by another name too."""
        _repeat(self.names, name, other)
        _repeat(self._stored_names, name, other)
        _repeat(self.packed, name, other)
        _repeat(self.quantized, name, other)

    def set_dtype(self, dtype: Any) -> None:
        """Sets the dtype for numbers of quantized weights."""
        names = {value: name for name, value in DTYPES.items()}
        for weight in self.quantized:
            self.packed[weight].dtype = names.get(np.dtype(dtype).name, "F32")

    def slice(self, name: str) -> Any:
        """Returns a reader of parts of a tensor."""
        if name in self.packed:
            return self.packed[name]
        stored = self._stored_names[name]
        part = self.names[name].get_slice(stored)
        if part.get_dtype() not in _BYTES:
            return part

        path = self._paths[id(self.names[name])]
        if path not in self._places:
            self._places[path] = _places_in(path)
        return _ByteSlice(part, path, self._places[path][stored])

    def read(self, name: str, index: _Index) -> np.ndarray:
        """Returns a part of a tensor, also by steps."""
        if name in self.packed:
            return self.packed[name].read(index, READ_DTYPES[self.dtype(name)])
        source = self.slice(name)
        if all(part.step is None for part in index):
            return source[tuple(index)]

        # safetensors takes no steps, so what is between them is read too: a row at a time.
        rows, *others = index
        steps = tuple(slice(None, None, part.step) for part in others)
        spans = tuple(slice(part.start, part.stop) for part in others)
        places = range(rows.start, rows.stop, rows.step or 1)
        sizes = [len(range(part.start, part.stop, part.step or 1)) for part in others]

        result = np.empty([len(places), *sizes], READ_DTYPES[self.dtype(name)])
        for at, place in enumerate(places):
            result[at] = source[(slice(place, place + 1), *spans)][(0, *steps)]
        return result

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor, as safetensors names it."""
        return self.slice(name).get_dtype()

    def common_dtype(self) -> str:
        """Returns the dtype of most tensors, without quantized ones."""
        names = [name for name in self.names if name not in self.quantized]
        return DTYPES[_most_common(map(self.dtype, names))]

    def equal(self, left: str, right: str) -> bool:
        """Whether two tensors are the same, to the last bit."""
        if (self.shape(left), self.dtype(left)) != (self.shape(right), self.dtype(right)):
            return False
        count, step = self.shape(left)[0], 4096
        parts = (slice(at, min(at + step, count)) for at in range(0, count, step))
        return all(
            self.slice(left)[part].tobytes() == self.slice(right)[part].tobytes() for part in parts
        )


# Dtypes that safetensors reads by no slices of NumPy.
_BYTES = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}


class _ByteSlice:
    """A tensor of 8-bit floats, read like a slice of safetensors."""

    def __init__(self, part: Any, path: Path, place: int) -> None:
        self.dtype, self.shape = part.get_dtype(), tuple(part.get_shape())
        self.path, self.place = path, place

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        count = math.prod(self.shape)
        numbers: Any = np.empty(0, np.uint8)
        if count:
            numbers = np.memmap(self.path, np.uint8, "r", self.place, (count,))
        return np.array(numbers.reshape(self.shape)[index]).view(_BYTES[self.dtype])


def _places_in(path: Path) -> dict[str, int]:
    """Returns the first byte of each tensor of a file."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def _most_common(dtypes: Iterable[str]) -> str:
    """Returns the most common dtype that is read, as safetensors names it."""
    counts = Counter(dtypes).most_common()
    return next((name for name, _ in counts if name in DTYPES), "F32")


def _today(name: str) -> str:
    """Returns the name of a tensor as it is written today."""
    for older, newer in (
        ("LayerNorm.gamma", "LayerNorm.weight"),
        ("LayerNorm.beta", "LayerNorm.bias"),
    ):
        if name.endswith(older):
            return name.removesuffix(older) + newer
    return name


def _file_names(folder: Path, architectures: object) -> dict[str, str]:
    """Returns the file of each tensor, or of all under one key."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise _no_tensors(folder, architectures)
        _check_inside(folder, SINGLE)
        return {SINGLE: SINGLE}

    by_name = read_json(index).get("weight_map")
    if not isinstance(by_name, dict) or not all(isinstance(x, str) for x in by_name.values()):
        raise PretrainedError(f"{index} has no weight_map, a table of tensors and file names.")

    titles = sorted({*by_name.values()})
    for title in titles:
        _check_inside(folder, title)
    absent = [title for title in titles if not (folder / title).is_file()]
    if absent:
        raise PretrainedError(f"{folder} lacks {join_first(absent, most=12)}, which {INDEX} names.")
    return by_name


def _no_tensors(folder: Path, architectures: object) -> PretrainedError:
    """Returns the error of a folder without safetensors, with the call that makes them."""
    suffixes = sorted({path.suffix for path in folder.iterdir()} & _OTHER_FORMATS)
    hint = f", but {', '.join(suffixes)}, which is not read" if suffixes else ""

    # AutoModel would leave the head out.
    names = architectures if isinstance(architectures, list) else []
    is_known = len(names) == 1 and isinstance(names[0], str) and names[0].isidentifier()
    title = names[0] if is_known else "AutoModel"
    return PretrainedError(
        f"{folder} has neither {SINGLE} nor {INDEX}{hint}. Save the model anew: "
        f"transformers.{title}.from_pretrained({str(folder)!r}).save_pretrained(NEW)."
    )


# Files that hold weights in formats that are not read.
_OTHER_FORMATS = frozenset([".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"])


def _check_inside(folder: Path, title: str) -> None:
    """Raises if a file of tensors leads out of its folder."""
    if Path(title).is_absolute() or ".." in Path(title).parts:
        raise PretrainedError(
            f"{folder} names {brief(title)} as a file of tensors, which is not in the folder. "
            f"Download the model again, from those who made it."
        )

    # In the cache of a hub the files of a snapshot are links to blobs beside it.
    home = folder.resolve()
    snapshots = next((path for path in home.parents if path.name == "snapshots"), None)
    homes = [home] if snapshots is None else [home, snapshots.parent.resolve() / "blobs"]

    target = (folder / title).resolve()
    if not any(target.is_relative_to(place) for place in homes):
        raise PretrainedError(
            f"{folder / title} is a link to {target}, out of the folder. If it is meant, copy it: "
            f"shutil.copyfile(link, copy); os.replace(copy, link)."
        )


def check_no_pointer(path: Path) -> None:
    """Raises if a file holds what Git LFS left in the place of the real one."""
    with open(path, "rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        raise PretrainedError(
            f"{path} is a pointer of Git LFS, {path.stat().st_size} bytes that stand for the "
            f"file: it was cloned without it. Fetch it, in {path.parent}: git lfs install; git "
            f"lfs pull."
        )


# How each pointer begins, by the specification of Git LFS.
_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the table of a JSON file, or raises."""
    if not path.is_file():
        raise PretrainedError(f"{path} is not there, so {path.parent} holds no published model.")
    check_no_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} holds no table of fields.")
    return content
