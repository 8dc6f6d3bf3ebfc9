# SPDX-License-Identifier: Apache-2.0
"""The tensors of a folder of safetensors, by name, read by slices."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardax._core.errors import first_of, naming_package
from shardax.models.kinds import PretrainedError, brief
from shardax.models.mxfp4 import BLOCKS, SCALES, PackedSlice, is_packed, packed_names

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class TensorFiles(contextlib.ExitStack):
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        super().__init__()
        with naming_package("Reading weights", "shardax[hub]"):
            from safetensors import SafetensorError, safe_open
        self.offsets: dict[Any, tuple[int, int]] = {}
        by_name = _file_names(folder, content.get("architectures"))
        opened: dict[str, Any] = {}
        for title in sorted({*by_name.values()}):
            try:
                opened[title] = self.enter_context(safe_open(folder / title, framework="np"))
            except (SafetensorError, OSError) as error:
                raise PretrainedError(
                    f"{folder / title} is damaged: {error}. Download or save it again."
                ) from error
        self.names: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        for title, file in opened.items():
            for stored in sorted(file.keys()):
                name = _today(stored)
                if name not in self.names or by_name.get(stored) == title:
                    self.names[name], self._stored_names[name] = file, stored
        self.packed: dict[str, PackedSlice] = {}
        if is_packed(content):
            self._find_packed()

    def _find_packed(self) -> None:
        """Puts tensors in MXFP4 in the place of their two parts."""
        dtype = _most_common(map(self.dtype, self.names))
        for name in packed_names([*self.names]):
            blocks, scales = (self.slice(name + end) for end in (BLOCKS, SCALES))
            self.packed[name] = PackedSlice(name, blocks, scales, dtype)
            for end in (BLOCKS, SCALES):
                del self.names[name + end]
            self.names[name] = None

    def slice(self, name: str) -> Any:
        """Returns a reader of parts of a tensor."""
        packed = self.packed.get(name)
        return self.names[name].get_slice(self._stored_names[name]) if packed is None else packed

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """Returns a part of a tensor, also by steps."""
        if name in self.packed:
            return self.packed[name].read(index, DTYPES[self.dtype(name)])
        source = self.slice(name)
        if all(part.step is None for part in index):
            return source[tuple(index)]
        # safetensors takes no steps, so what is between them is read too: a row at a time.
        rows, *others = index
        steps = tuple(slice(None, None, part.step) for part in others)
        spans = tuple(slice(part.start, part.stop) for part in others)
        places = range(rows.start, rows.stop, rows.step or 1)
        sizes = [len(range(part.start, part.stop, part.step or 1)) for part in others]
        result = np.empty([len(places), *sizes], DTYPES[self.dtype(name)])
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
        """Returns the dtype of most tensors."""
        return DTYPES[_most_common(map(self.dtype, self.names))]

    def equal(self, left: str, right: str) -> bool:
        """Whether two tensors are the same, to the last bit."""
        if (self.shape(left), self.dtype(left)) != (self.shape(right), self.dtype(right)):
            return False
        count, step = self.shape(left)[0], 4096
        parts = (slice(at, min(at + step, count)) for at in range(0, count, step))
        return all(
            self.slice(left)[part].tobytes() == self.slice(right)[part].tobytes() for part in parts
        )


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
            suffixes = sorted({path.suffix for path in folder.iterdir()} & _OTHER_FORMATS)
            hint = f", but {', '.join(suffixes)}, which is not read" if suffixes else ""
            names = architectures if isinstance(architectures, list) else []
            # AutoModel would leave the head out.
            known = len(names) == 1 and isinstance(names[0], str) and names[0].isidentifier()
            title = names[0] if known else "AutoModel"
            raise PretrainedError(
                f"{folder} has neither {SINGLE} nor {INDEX}{hint}. Save the model anew: "
                f"transformers.{title}.from_pretrained({str(folder)!r}).save_pretrained(NEW)."
            )
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
        raise PretrainedError(f"{folder} lacks {first_of(absent, most=12)}, which {INDEX} names.")
    return by_name


# Files that hold weights in formats that are not read.
_OTHER_FORMATS = frozenset([".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"])


def _check_inside(folder: Path, title: str) -> None:
    """Raises if a file of tensors leads out of its folder."""
    home = folder.resolve()
    target = (folder / title).resolve()
    # In the cache of a hub the files of a snapshot are links to blobs beside it.
    snapshots = next((path for path in home.parents if path.name == "snapshots"), None)
    homes = [home] if snapshots is None else [home, snapshots.parent.resolve() / "blobs"]
    if Path(title).is_absolute() or ".." in Path(title).parts:
        raise PretrainedError(
            f"{folder} names {brief(title)} as a file of tensors, which is not in the folder. "
            f"Download the model again, from those who made it."
        )
    if not any(target.is_relative_to(place) for place in homes):
        raise PretrainedError(
            f"{folder / title} is a link to {target}, out of the folder. If it is meant, copy it: "
            f"shutil.copyfile(link, copy); os.replace(copy, link)."
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the table of a JSON file, or raises."""
    if not path.is_file():
        raise PretrainedError(f"{path} is not there, so {path.parent} holds no published model.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise PretrainedError(f"{path} holds no table of fields.")
    return content
