# SPDX-License-Identifier: Apache-2.0
"""Folders of quantized weights, written with NumPy alone, and the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardax.models import save_pretrained
from tests.models.published import initialised, numpy_files

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
BLOCK = 8  # rows and columns, in place of 128
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS |= {"weight_block_size": [BLOCK, BLOCK]}
GROUP = 4


def compressed(form: str, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors, of one group."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {**COMPRESSED, "format": form, "config_groups": {"group_0": group}}


CHANNELS = compressed("int-quantized", 8, strategy="channel")
GROUPS = compressed("pack-quantized", 4, strategy="group", group_size=GROUP)
WORDS = compressed("pack-quantized", 8, strategy="channel")
WHOLE = compressed("float-quantized", 8, "float", strategy="tensor")
ROWS = compressed("float-quantized", 8, "float", strategy="channel")
SHIFTED = compressed("pack-quantized", 4, strategy="group", group_size=GROUP, symmetric=False)


def _is_quantized(name: str, array: np.ndarray) -> bool:
    outside = ("embed", "norm", "lm_head", "mlp.gate.", "moe.gate.", "wte", "wpe")
    return name.endswith(".weight") and array.ndim == 2 and not any(x in name for x in outside)


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers in words of 32 bits, one by one: the first in the lowest bits."""
    each = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint32)
    for column, values in enumerate(numbers.T):
        shifted = (values.astype(np.int64) + 2 ** (bits - 1)).astype(np.uint32)
        words[:, column // each] |= shifted << np.uint32(column % each * bits)
    return words.view(np.int32)


def _stored(
    name: str, shape: tuple[int, int], packing: dict[str, Any], draw: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a weight, and its numbers."""
    if packing["quant_method"] == "fp8":
        blocks, form, weights = packing["weight_block_size"], "", {"num_bits": 8, "type": "float"}
    else:
        group = packing["config_groups"]["group_0"]
        form, weights = packing["format"], group["weights"]
        inputs = weights.get("group_size") or shape[1]
        blocks = [shape[0] if weights["strategy"] == "tensor" else 1, inputs]
    grid = [-(-size // block) for size, block in zip(shape, blocks, strict=True)]
    scale = draw.uniform(0.001, 0.01, grid).astype(np.float32)
    if weights["type"] == "float":
        numbers = draw.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    else:
        limit = 2 ** (weights["num_bits"] - 1)
        numbers = draw.integers(-limit, limit, shape, np.int8)
    spread = np.repeat(np.repeat(scale, blocks[0], 0), blocks[1], 1)[: shape[0], : shape[1]]
    plain = numbers.astype(np.float32)
    tensors: dict[str, np.ndarray] = {f"{name}_scale": scale}
    if not weights.get("symmetric", True):
        zeros = draw.integers(-8, 8, grid, np.int8)
        plain -= np.repeat(zeros, blocks[1], 1)[:, : shape[1]]
        tensors[f"{name}_zero_point"] = np.ascontiguousarray(_words(zeros.T, 4).T)
    if form == "pack-quantized":
        tensors[f"{name}_packed"] = _words(numbers, weights["num_bits"])
        tensors[f"{name}_shape"] = np.array(shape)
    else:
        tensors[name] = numbers
    if not form:
        tensors[f"{name}_scale_inv"] = tensors.pop(f"{name}_scale")
    if weights.get("strategy") == "tensor":
        tensors[f"{name}_scale"] = scale.reshape(1)
    return tensors, plain * spread


def make_folders(
    folder: Path, content: dict[str, Any], packing: dict[str, Any]
) -> tuple[Path, Path]:
    """Folders of a model with quantized weights, and of one with their numbers."""
    quantized, plain = folder / "quantized", folder / "plain"
    save_pretrained(initialised(folder, content), plain)
    tensors = numpy_files.load_file(plain / "model.safetensors")
    draw, stored = np.random.default_rng(0), {}
    for name, array in tensors.items():
        if not _is_quantized(name, array):
            stored[name] = array
            continue
        parts, numbers = _stored(name, array.shape, packing, draw)
        stored |= parts
        tensors[name] = numbers
    numpy_files.save_file(tensors, plain / "model.safetensors")
    quantized.mkdir()
    numpy_files.save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    described = json.loads((plain / "config.json").read_text())
    config = {**described, "quantization_config": packing}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain
