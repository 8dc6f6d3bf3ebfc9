# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4: the numbers of their files, each device its own, and what is written."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardax as sx
from shardax.errors import PretrainedError
from shardax.models import from_pretrained, save_pretrained
from tests.models.published import MODELS, initialised, tiny_config
from tests.needs import needs

EXPERTS, EMBED, HIDDEN, LAYERS = 4, 64, 96, 2
NIBBLES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
TOKENS = np.arange(6)[None]


def published() -> dict[str, Any]:
    sizes = {"hidden_size": EMBED, "intermediate_size": HIDDEN, "torch_dtype": "float32"}
    return tiny_config(MODELS["openai/gpt-oss-20b"][0], LAYERS, **sizes)


def numbers_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of shape (experts, inputs, outputs), one by one."""
    values = np.empty((*blocks.shape[:2], blocks.shape[2] * 32), np.float64)
    for place in np.ndindex(blocks.shape):
        column = place[2] * 32 + place[3] * 2
        scale = 2.0 ** (int(scales[place[:3]]) - 127)
        low, high = int(blocks[place]) % 16, int(blocks[place]) // 16
        values[(*place[:2], column)] = NIBBLES[low] * scale
        values[(*place[:2], column + 1)] = NIBBLES[high] * scale
    return values.swapaxes(1, 2)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with experts in MXFP4, and the numbers of its kernels."""
    content = published()
    model = initialised(tmp_path, content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that MXFP4 is not written
        save_pretrained(model, tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors, expected = load_file(file), {}
    generator = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("_proj")]:
        _, inputs, outputs = tensors.pop(name).shape
        shape = (EXPERTS, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = generator.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = generator.integers(120, 126, shape, np.uint8)
        expected[name] = numbers_of(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    save_file(tensors, file)
    (tmp_path / "packed" / "config.json").write_text(json.dumps(content))
    return tmp_path / "packed", expected


def kernels_of(model: Any, layer: int) -> dict[str, np.ndarray]:
    """The kernels of a layer, as the files name them."""
    experts = model.layers[layer].mlp
    both = np.stack([np.asarray(experts.gate), np.asarray(experts.up)], axis=-1)
    prefix = f"model.layers.{layer}.mlp.experts."
    return {
        f"{prefix}gate_up_proj": both.reshape(EXPERTS, EMBED, 2 * HIDDEN),
        f"{prefix}down_proj": np.asarray(experts.down),
    }


def test_experts_are_the_numbers_of_their_bytes(packed: Any):
    folder, expected = packed
    model = from_pretrained(folder)
    kernels = kernels_of(model, 0) | kernels_of(model, 1)
    assert kernels.keys() == expected.keys()
    for name, kernel in kernels.items():
        assert kernel.dtype == np.float32
        np.testing.assert_array_equal(kernel, expected[name])
    narrow = from_pretrained(folder, param_dtype="bfloat16")
    for name, kernel in kernels_of(narrow, 0).items():
        np.testing.assert_array_equal(kernel.astype(np.float64), expected[name])


@pytest.mark.parametrize("axes", [{"embed": "x", "mlp": "y"}, {"expert": "x", "mlp": "y"}], ids=str)
def test_devices_unpack_their_own_slices(axes: dict[str, str], packed: Any):
    folder, _ = packed
    mesh = jax.make_mesh((4, 2), ("x", "y"))  # of 16 inputs, half of what has one scale
    whole = from_pretrained(folder)
    model = from_pretrained(folder, mesh=mesh, rules=sx.Rules([*axes.items()]))
    for part in ("gate", "up", "down"):
        kernel = getattr(model.layers[1].mlp, part)
        assert not kernel.value.sharding.is_fully_replicated
        np.testing.assert_array_equal(kernel, getattr(whole.layers[1].mlp, part))


@pytest.mark.parametrize("scanned", [False, True])
def test_unpacked_experts_are_written_with_a_warning(scanned: bool, packed: Any, tmp_path: Path):
    folder, expected = packed
    model = from_pretrained(folder, scan_layers=scanned)
    with pytest.warns(UserWarning, match=r"read from MXFP4, which is not written.*no quantization"):
        save_pretrained(model, tmp_path / "saved")
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == content
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    for name, numbers in expected.items():
        np.testing.assert_array_equal(tensors[name], numbers)
    again = from_pretrained(tmp_path / "saved")
    run = sx.jit(lambda model: model(TOKENS))
    np.testing.assert_array_equal(run(again), run(from_pretrained(folder)))
    save_pretrained(again, tmp_path / "again")  # without a warning


def change(folder: Path, **tensors: Any) -> None:
    file = folder / "model.safetensors"
    changed = {**load_file(file), **tensors}
    save_file({n: x for n, x in changed.items() if x is not None}, file)


def test_damaged_packed_experts_are_refused_by_name(packed: Any):
    folder, _ = packed
    name = "model.layers.0.mlp.experts.down_proj"
    scales = load_file(folder / "model.safetensors")[f"{name}_scales"]
    for wrong, says in (
        (scales[:, :, :1], r"down_proj_scales are .*, but MXFP4 has bytes of shape"),
        (scales.astype(np.float32), r"F32\[4, 64, 3\], but MXFP4 has bytes"),
        (None, r"missing are .*down_proj; the model has no place for .*down_proj_blocks"),
    ):
        change(folder, **{f"{name}_scales": wrong})
        with pytest.raises(PretrainedError, match=says):
            from_pretrained(folder)
    change(folder, **{f"{name}_scales": scales})
    content = published()
    del content["quantization_config"]  # without which they are no numbers
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(PretrainedError, match=r"no place for .*_blocks"):
        from_pretrained(folder)


def test_files_of_float16_have_experts_in_bfloat16(packed: Any):
    folder, expected = packed
    tensors = load_file(folder / "model.safetensors")
    halves = {n: x.astype(np.float16) for n, x in tensors.items() if x.dtype == np.float32}
    change(folder, **halves)
    model = from_pretrained(folder)
    assert (model.head.kernel.dtype, model.layers[0].mlp.up.dtype) == (jnp.float16, jnp.bfloat16)
    for name, kernel in kernels_of(model, 0).items():
        np.testing.assert_array_equal(kernel.astype(np.float64), expected[name])


@needs("torch", "transformers")
def test_unpacked_numbers_equal_those_of_transformers(packed: Any):
    import torch
    from transformers.integrations import mxfp4

    folder, _ = packed
    tensors = load_file(folder / "model.safetensors")
    for name, kernel in kernels_of(from_pretrained(folder), 0).items():
        parts = [torch.from_numpy(tensors[f"{name}_{end}"]) for end in ("blocks", "scales")]
        expected = mxfp4.convert_moe_packed_tensors(*parts, dtype=torch.float32)
        np.testing.assert_array_equal(kernel, expected.numpy())
