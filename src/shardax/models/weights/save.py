# SPDX-License-Identifier: Apache-2.0
"""Models into files, as they are published."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Quantized, distributed
from shardax._files import draft_folder, move_files, write_tensors
from shardax.extend import byte_count, warn_user
from shardax.models.architecture import describe
from shardax.models.entries import Entry, WrittenLayout
from shardax.models.files import INDEX, SINGLE
from shardax.models.generating.config import GENERATION_CONFIG, config_of_texts, generation_content
from shardax.models.kinds import PretrainedError
from shardax.models.quantized.mxfp4 import PACKING, is_packed
from shardax.models.weights.hub import CONFIG
from shardax.models.weights.table import TensorTable
from shardax.models.words import refuses_other_words

LARGEST_FILE = 5 * 2**30
_DTYPE_FIELDS = frozenset(["dtype", "torch_dtype"])


@refuses_other_words("save_pretrained")
def save_pretrained(
    model: object, directory: str | Path, config: Any = None, *, max_file_bytes: int = LARGEST_FILE
) -> None:
    """Writes a model as it is published: ``config.json`` and safetensors.

    ``config.json`` is that which was read, with what differs in the config. A model that was not
    loaded is written as a llama, or as the first family that can say what its config says. The
    model is compared with the one that the config builds, and refused where they differ, by path,
    before a file is written: whose architecture was edited, by a head that is tied no more, fewer
    layers, a larger vocabulary, another window, epsilon or activation, is saved with the config
    that builds it. Frozen parameters are written like others, and tensors that did not change bit
    for bit. Files appear when all are complete: a disk that is full leaves what was there.

    Quantized kernels are written in a layout that ``transformers`` reads, with its
    ``quantization_config``: as compressed-tensors, or in fp8 by blocks where they were read so.
    What has none, such as a quantized embedding, is refused; ``sx.dequantize`` makes numbers.
    Kernels that were read from MXFP4 are written as the numbers that they are, with a warning.

    ``generation_config.json`` is written where ``model.generation_config`` says more than
    ``config.json``. The compute dtype and dropout are no part of what is written. In a run of
    several processes all must call it, and the first writes.

    Args:
        model: A ``Transformer``, ``DualEncoder``, ``EncoderDecoder`` or ``ConvNeXt``, such as
            ``from_pretrained`` returns, or a ``Decoder``.
        directory: The folder; made if it is not there, and without tensors if it is.
        config: Of a model whose architecture was edited the config that builds it, such as
            ``dataclasses.replace(model.config, num_layers=2)``; None for ``model.config``.
        max_file_bytes: Size above which tensors go to another file.

    Raises:
        PretrainedError: If the model is of no family or is another than its config builds, or no
            ``config.json`` of its family says what it is; a quantized kernel has no layout; or the
            folder has tensors already, or cannot be written.
        GenerationError: If ``model.generation_config`` is no ``GenerationConfig``.
        ImportError: If ``safetensors`` is missing.

    Example:
        >>> import pathlib, tempfile, shardax as sx
        >>> folder = pathlib.Path(tempfile.mkdtemp(), "model")
        >>> sx.models.save_pretrained(sx.models.Decoder(
        ...     sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0)), folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    folder = Path(directory).expanduser()

    # What config.json says, and the parameters by the tensors that they are written as.
    content, family, config = describe(model, config)
    if is_packed(content):
        content = {name: value for name, value in content.items() if name != PACKING}
        warn_user(
            "The model was read from MXFP4, which is not written: its experts are written as they "
            f"are, several times as large, and config.json has no {PACKING}."
        )

    texts = generation_content(config_of_texts(model), content)
    table = TensorTable.of_edited(model, family, config)

    # What config.json says of their dtypes and of quantized kernels.
    layout = table.layout(content.pop(PACKING, None))
    if layout.config is not None:
        content[PACKING] = layout.config
    floats = [e.variable for e in table.entries if not isinstance(e.variable, Quantized)]
    stored = Counter(jnp.dtype(variable.dtype).name for variable in floats)
    content |= {name: max(stored, key=stored.__getitem__) for name in _DTYPE_FIELDS & {*content}}

    if folder.is_dir() and any(folder.glob("*.safetensors")):
        raise PretrainedError(f"{folder} holds tensors already. Give another folder, or clear it.")
    distributed.barrier("save_pretrained")  # that all have looked before the first writes

    # All files are written beside the folder, and moved when they are complete.
    try:
        with draft_folder(folder) if distributed.is_main() else contextlib.nullcontext() as draft:
            _write_files(table, layout, draft, max_file_bytes)
            if draft is not None:
                _write_json(draft / CONFIG, content)
                if texts is not None:
                    _write_json(draft / GENERATION_CONFIG, texts)
                move_files(draft, folder, last=CONFIG)
    except OSError as error:
        raise PretrainedError(
            f"The model was not written to {folder}: {error}. What was there is as it was; call "
            f"save_pretrained again when it can be written, or with another folder."
        ) from error


def _whole(variable: Any) -> np.ndarray:
    """Returns the array of a Variable, gathered from all processes."""
    value = variable.value
    if not getattr(value, "is_fully_addressable", True):
        value = distributed.gather(value)
    return np.asarray(value)


def _bytes_of(entry: Entry) -> int:
    """Returns the size of the part of a tensor that a parameter makes up."""
    return byte_count(entry.axis_sizes(), jnp.dtype(entry.variable.dtype))


def _write_files(
    table: TensorTable, layout: WrittenLayout, draft: Path | None, max_file_bytes: int
) -> None:
    """Gathers tensors file by file, and writes them into the draft."""
    files = _files_of(table, max_file_bytes)
    whole = functools.lru_cache(maxsize=8)(_whole)  # fused tensors ask for one another's parts
    failure: OSError | None = None
    by_name, total = dict[str, str](), 0
    for title, names in files.items():
        tensors = (layout.stored(name, table.tensor(name, whole)) for name in names)
        arrays = {name: array for parts in tensors for name, array in parts.items()}
        by_name |= dict.fromkeys(arrays, title)
        total += sum(array.nbytes for array in arrays.values())

        if draft is not None and failure is None:
            try:
                write_tensors(draft / title, arrays, {"format": "pt"})
            except OSError as error:
                failure = error
                if jax.process_count() == 1:
                    break  # else the others wait for this one's parts

    if failure is not None:
        raise failure
    if draft is not None and len(files) > 1:
        _write_json(draft / INDEX, {"metadata": {"total_size": total}, "weight_map": by_name})


def _files_of(table: TensorTable, max_file_bytes: int) -> dict[str, list[str]]:
    """Returns the names of tensors by file, in the order of the table."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, places in table.by_name.items():
        size = sum(_bytes_of(entry) for entry, _, _ in places)
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size

    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": names
        for number, names in enumerate(files, start=1)
    }


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
