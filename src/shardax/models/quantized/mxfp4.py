# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts in MXFP4, read as numbers.

Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023. A number has
four bits, a sign and e2m1; 32 numbers share a scale of eight bits, a power of two. In the files of
gpt-oss ``NAME_blocks`` holds two numbers a byte, the lower bits first, of shape (experts, outputs,
groups, 16), and ``NAME_scales`` the scales. Here they are one tensor ``NAME`` of shape (experts,
inputs, outputs), of which slices are unpacked as they are read. Every number is one of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardax.models import kinds
from shardax.models.kinds import PretrainedError

PACKING = "quantization_config"
BLOCKS, SCALES = "_blocks", "_scales"
_GROUP = 32
_STEPS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BYTES = np.arange(256)


def check_packing(packing: Mapping[str, Any] | None) -> None:
    """Raises unless a ``quantization_config`` is null or of MXFP4."""
    if not packing:
        return
    fields = {**packing}
    method, names = fields.pop("quant_method", None), fields.pop("modules_to_not_convert", None)
    fields.pop("dequantize", None)  # says what transformers does with them
    wrong = kinds.TEXTS.or_null.problem("modules_to_not_convert", names)
    fits = method == "mxfp4" and not fields and not wrong
    kinds.check_supported(PACKING, packing, fits, ", only quant_method='mxfp4'")


def is_packed(content: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` says that kernels are in MXFP4."""
    packing = content.get(PACKING)
    return isinstance(packing, dict) and packing.get("quant_method") == "mxfp4"


def packed_names(names: Sequence[str]) -> list[str]:
    """Returns the tensors that stand in two packed ones."""
    ends = [name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS)]
    return [name for name in ends if name + SCALES in names and name not in names]


class PackedSlice:
    """A tensor in MXFP4, read like a slice of safetensors."""

    def __init__(self, name: str, blocks: Any, scales: Any, dtype: str) -> None:
        self.blocks, self.scales = blocks, scales
        self.dtype = "BF16" if dtype == "F16" else dtype  # which has not all of the numbers
        shapes = [tuple(part.get_shape()) for part in (blocks, scales)]
        dtypes = [part.get_dtype() for part in (blocks, scales)]
        fits = len(shapes[0]) == 4 and shapes[0][3] == _GROUP // 2 and shapes[1] == shapes[0][:3]
        if not fits or dtypes != ["U8", "U8"]:
            raise PretrainedError(
                f"{name}{BLOCKS} and {name}{SCALES} are {dtypes[0]}{list(shapes[0])} and "
                f"{dtypes[1]}{list(shapes[1])}, but MXFP4 has bytes of shape (experts, outputs, "
                f"groups, {_GROUP // 2}) and (experts, outputs, groups). Download them again."
            )
        experts, outputs, groups = shapes[1]
        self.shape = (experts, groups * _GROUP, outputs)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def read(self, index: Sequence[slice], dtype: str) -> np.ndarray:
        """Returns the numbers at slices, which may have steps."""
        ranges = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)]
        experts, inputs, outputs = ranges

        # Groups of inputs are read whole.
        result = np.empty([len(part) for part in ranges], jnp.dtype(dtype))
        first, end = inputs.start // _GROUP, -(-inputs.stop // _GROUP)
        tables = _tables(result.dtype)

        for place, expert in enumerate(experts):
            part = (slice(expert, expert + 1), slice(outputs.start, outputs.stop))
            part = (*part, slice(first, end))
            blocks, scales = (
                np.moveaxis(stored[0, :: outputs.step], 0, -1)
                for stored in (self.blocks[(*part, slice(None))], self.scales[part])
            )

            # The number of a byte's halves with its scale, from tables of all of them.
            codes = scales[:, None].astype(np.int32) * 256 + blocks
            numbers = np.stack([table[codes] for table in tables], axis=2)
            numbers = numbers.reshape(-1, len(outputs))
            result[place] = numbers[inputs.start - first * _GROUP :][: len(inputs)]
        return result


def _tables(dtype: Any) -> list[np.ndarray]:
    """Returns the first and second number of each scale and byte."""
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.ldexp(np.float32(1), _BYTES - 127)[:, None]
        numbers = scales * np.concatenate([_STEPS, -_STEPS])
        halves = (numbers[:, half] for half in (_BYTES & 15, _BYTES >> 4))
        return [table.astype(dtype).reshape(-1) for table in halves]
