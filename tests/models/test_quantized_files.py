# SPDX-License-Identifier: Apache-2.0
"""Quantized files: their numbers, what is refused, and what is written of quantized models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import shardax as sx
from shardax.errors import PretrainedError
from shardax.models import from_pretrained, save_pretrained
from tests.advice import run_advice
from tests.models import stored_kernels as files
from tests.models.published import MODELS, initialised, numpy_files, tiny_config
from tests.needs import needs

TOKENS = np.arange(6)[None]


def config_of(name: str, layers: int = 2, **fields: Any) -> dict[str, Any]:
    return tiny_config(MODELS[name][0], layers, torch_dtype="float32", **fields)


LLAMA = config_of("meta-llama/Llama-3.1-8B-Instruct")
MODELS_WITH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama int8": (LLAMA, files.CHANNELS),
    "llama int4": (LLAMA, files.GROUPS),
    "qwen3 int8 in words": (config_of("Qwen/Qwen3-0.6B"), files.WORDS),
    "mistral fp8": (config_of("mistralai/Mistral-7B-v0.1"), files.ROWS),
    "gemma fp8 whole": (config_of("google/gemma-2b"), files.WHOLE),
    "mixtral int4": (config_of("mistralai/Mixtral-8x7B-Instruct-v0.1"), files.GROUPS),
    "qwen3 experts in blocks": (config_of("Qwen/Qwen3-30B-A3B"), files.BLOCKS),
    "deepseek in blocks": (config_of("moonshotai/Moonlight-16B-A3B"), files.BLOCKS),
    "phi3 in blocks": (config_of("microsoft/Phi-3-mini-4k-instruct"), files.BLOCKS),
    "phi3 fp8 whole": (config_of("microsoft/Phi-3-mini-4k-instruct"), files.WHOLE),
    "neox int4": (config_of("EleutherAI/pythia-160m", 1), files.GROUPS),
    "gpt2 int8": (config_of("openai-community/gpt2", 1), files.CHANNELS),
    "llama int4 with zeros": (LLAMA, files.SHIFTED),
}


def arrays(model: Any) -> dict[Any, np.ndarray]:
    variables = sx.iter_variables(model, sx.Param, sx.Quantized)
    return {path: np.asarray(variable.value) for path, variable in variables}


def check_same(model: Any, expected: Any) -> None:
    left, right = arrays(model), arrays(expected)
    assert left.keys() == right.keys()
    for path, array in left.items():
        assert array.dtype == right[path].dtype, path
        np.testing.assert_array_equal(array, right[path], err_msg=str(path))


def quantized_kernels(model: Any) -> int:
    return sx.select(model).at_instances_of(sx.nn.QuantizedKernel).count()


@pytest.mark.parametrize("name", MODELS_WITH)
def test_numbers_are_those_of_the_layout(name: str, tmp_path: Path) -> None:
    quantized, plain = files.make_folders(tmp_path, *MODELS_WITH[name])
    is_scanned = name != "neox int4"
    expected = from_pretrained(plain, scan_layers=is_scanned)
    check_same(from_pretrained(quantized, scan_layers=is_scanned, dequantize=True), expected)
    model = from_pretrained(quantized, scan_layers=is_scanned)
    if name == "llama int4 with zeros":
        assert quantized_kernels(model) == 0
        check_same(model, expected)
        return
    assert quantized_kernels(model) >= 3
    check_same(sx.dequantize(model), expected)
    if name == "gpt2 int8":
        with pytest.raises(PretrainedError, match="no scale for each output") as caught:
            save_pretrained(model, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        code = "sx.models.save_pretrained(sx.dequantize(model), folder)"
        run_advice(caught.value, code, {"model": model, "folder": tmp_path / "saved", "sx": sx})
        check_same(from_pretrained(tmp_path / "saved", scan_layers=True), expected)
        return
    save_pretrained(model, tmp_path / "saved")
    check_same(from_pretrained(tmp_path / "saved", scan_layers=is_scanned), model)


@pytest.mark.parametrize("packing", [files.GROUPS, files.BLOCKS], ids=["groups", "blocks"])
def test_devices_read_their_own_slices(packing: dict[str, Any], tmp_path: Path) -> None:
    quantized, _ = files.make_folders(tmp_path, LLAMA, packing)
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    rules = sx.Rules([("mlp", "y"), ("heads", "y"), ("embed", "x")])
    model = from_pretrained(quantized, mesh=mesh, rules=rules, scan_layers=True)
    assert not model.layers.stacked.mlp.up.kernel.values.value.sharding.is_fully_replicated
    check_same(model, from_pretrained(quantized, scan_layers=True))


def test_numbers_are_rounded_once_to_the_dtype(tmp_path: Path) -> None:
    quantized, plain = files.make_folders(tmp_path, LLAMA, files.CHANNELS)
    options: dict[str, Any] = {"param_dtype": "bfloat16", "scan_layers": True}
    expected = from_pretrained(plain, **options)
    check_same(from_pretrained(quantized, dequantize=True, **options), expected)
    check_same(sx.dequantize(from_pretrained(quantized, **options)), expected)


# --- files that are refused ---

QUERY = "model.layers.0.self_attn.q_proj.weight"
FP8 = ml_dtypes.float8_e4m3fn


SHAPE = (8, 8)


def change(folder: Path, removed: tuple[str, ...] = (), **tensors: Any) -> None:
    """Writes tensors of a query projection: fp8, with a scale of each row, and changes."""
    query = {"weight": np.ones(SHAPE, FP8), "weight_scale": np.ones((8, 1), np.float32), **tensors}
    plain = numpy_files.load_file(folder.parent / "plain" / "model.safetensors")
    stored = {QUERY.replace("weight", name): array for name, array in query.items()}
    stored = {name: array for name, array in (plain | stored).items() if name not in removed}
    numpy_files.save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder whose config says that kernels are fp8, with a scale for each row."""
    save_pretrained(initialised(tmp_path, LLAMA), tmp_path / "plain")
    folder = tmp_path / "rows"
    folder.mkdir()
    described = json.loads((tmp_path / "plain" / "config.json").read_text())
    described["quantization_config"] = files.ROWS
    (folder / "config.json").write_text(json.dumps(described))
    change(folder)
    return folder


def test_layers_of_other_forms_are_read_as_numbers(rows: Path) -> None:
    model = from_pretrained(rows)
    assert quantized_kernels(model) == 1
    assert isinstance(model.layers[0].attn.q.kernel, sx.nn.QuantizedKernel)
    stacked = from_pretrained(rows, scan_layers=True)
    assert quantized_kernels(stacked) == 0
    assert float(stacked.layers.stacked.attn.q.kernel.value[0].min()) == 1


@pytest.mark.parametrize(
    ("tensors", "removed", "message"),
    [
        (
            {},
            (f"{QUERY}_scale",),
            "q_proj.weight is F8_E4M3, and there is no .*q_proj.weight_scale",
        ),
        ({"weight": np.ones(SHAPE, np.float32)}, (), "no place for .*q_proj.weight_scale"),
        ({"weight": np.ones(SHAPE, np.int8)}, (), r"is I8\[8, 8\], but .* says F8_E4M3"),
        ({"weight": np.ones((8, 4), FP8)}, (), r"has the shape \(8, 4\), but the config"),
        ({"weight_scale": np.ones((8, 2), np.float32)}, (), r"F32\[8, 2\], but .*\[8, 1\]"),
        ({"weight_scale": np.ones((8, 1), np.int8)}, (), "but .* says floats of shape"),
        ({"weight_zero_point": np.zeros((8, 1), np.int8)}, (), "has zero points, but not symm"),
        ({"weight_g_idx": np.zeros(8, np.int32)}, (), "no place for .*q_proj.weight_g_idx"),
    ],
)
def test_unfit_tensors_are_refused_by_name(
    tensors: dict[str, Any], removed: tuple[str, ...], message: str, rows: Path
) -> None:
    change(rows, removed, **tensors)
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(rows)


def test_scales_of_activations_are_named(rows: Path) -> None:
    change(rows, input_scale=np.ones(1, np.float32))
    with pytest.raises(PretrainedError, match=r"no place for .*q_proj.input_scale"):
        from_pretrained(rows)
    with pytest.warns(UserWarning, match="not read, as the model has no place: .*input_scale"):
        assert quantized_kernels(from_pretrained(rows, strict=False)) == 1


def grouped(**weights: Any) -> dict[str, Any]:
    return files.compressed("pack-quantized", 4, **weights)


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"only None, or a quant_method of .*\.dequantize\(\)\.save_pretrained\(NEW\)",
        ),
        ({"quant_method": "gptq", "bits": 4}, r"only None, .*sx\.quantize\(sx\.models\.from_pre"),
        ({**files.ROWS, "format": "marlin-24"}, "format='marlin-24' is not supported, only"),
        ({**files.ROWS, "transform_config": {"R1": {}}}, "transform_config=.* is not supported"),
        ({**files.ROWS, "rotations": 1}, "has {'rotations': 1}, which is unknown"),
        ({**files.ROWS, "ignore": ["re:.*q_proj$"]}, "q_proj.weight is quantized .* in ignore"),
        ({**files.ROWS, "ignore": ["re:("]}, "is no pattern: missing"),
        ({**files.ROWS, "config_groups": {}}, "no group of quantization_config has it as a"),
        ({**files.ROWS, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config=.* only"),
        (grouped(strategy="group", group_size=0), "strategy='group' with group_size=0"),
        (grouped(strategy="group", group_size=4, actorder="group"), "actorder='group' is not"),
        (files.compressed("pack-quantized", 3, group_size=-1), "num_bits=3 is not supported"),
        (files.compressed("pack-quantized", 8.0, group_size=-1), "num_bits=8.0 is not supported"),
        (grouped(strategy="group", group_size=4.0), "strategy='group' with group_size=4.0"),
        ({**files.ROWS, "ignore": ["Linear"]}, "_proj.weight is quantized .* in ignore"),
        (files.compressed("pack-quantized", 8, "float", group_size=-1), "type='float' is not"),
        ({**files.BLOCKS, "weight_block_size": [8]}, r"weight_block_size=\[8\] is not two sizes"),
        ({**files.BLOCKS, "expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported, only"),
        ({**files.BLOCKS, "fmt": "e5m2"}, "fmt='e5m2' is not supported, only 'e4m3'"),
    ],
)
def test_unknown_layouts_are_refused(packing: dict[str, Any], message: str, rows: Path) -> None:
    content = json.loads((rows / "config.json").read_text())
    (rows / "config.json").write_text(json.dumps({**content, "quantization_config": packing}))
    with pytest.raises(PretrainedError, match=message) as caught:
        from_pretrained(rows)
    if packing["quant_method"] == "gptq":
        code = "sx.quantize(sx.models.from_pretrained(ORIGINAL), formats)"
        names = {"sx": sx, "ORIGINAL": rows.parent / "plain", "formats": "int4"}
        assert quantized_kernels(run_advice(caught.value, code, names)) > 7


def test_group_larger_than_a_weight_is_all_of_it(tmp_path: Path) -> None:
    quantized, _ = files.make_folders(tmp_path, LLAMA, files.CHANNELS)
    expected = from_pretrained(quantized)
    content = json.loads((quantized / "config.json").read_text())
    packing = files.compressed("int-quantized", 8, strategy="group", group_size=10**30)
    (quantized / "config.json").write_text(json.dumps({**content, "quantization_config": packing}))
    check_same(from_pretrained(quantized), expected)


# --- groups ---

# The targets of two groups, of 8 and of 4 bits, by which queries alone have 4 bits.
PROJECTIONS = ("q", "k", "v", "o")
QUERIES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
MIXED: dict[str, tuple[list[str], list[str]]] = {
    "a pattern before a class": (["Linear"], ["re:.*q_proj"]),
    "a name before a class": (["Linear"], QUERIES),
    "a name before a pattern": (["re:.*"], QUERIES),
    "the first of patterns by the alphabet": (["re:.*proj|lm_head"], ["re:.*[q]_proj"]),
    "a pattern before the base of a class": (["Module"], ["re:.*q_proj"]),
    "a name before a pattern and a class": (["Linear", "re:.*self_attn.*"], QUERIES),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with queries in int4 beside int8."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "plain").mkdir()
    model = initialised(folder / "plain", LLAMA)
    formats = {sx.PathContains("embed"): None, sx.PathContains("q"): "int4", ...: "int8"}
    save_pretrained(sx.quantize(model, formats), folder / "saved")
    return folder / "saved"


def regroup(folder: Path, wide: list[str], narrow: list[str], order: int = 1) -> None:
    """Gives the groups of 8 and of 4 bits other targets, in one order or the other."""
    content = json.loads((folder / "config.json").read_text())
    groups = content["quantization_config"]["config_groups"].values()
    by_bits = {group["weights"]["num_bits"]: group for group in groups}
    pairs = [(8, wide), (4, narrow)][::order]
    content["quantization_config"]["config_groups"] = {
        f"group_{place}": {**by_bits[bits], "targets": targets}
        for place, (bits, targets) in enumerate(pairs)
    }
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", MIXED)
def test_groups_count_by_kind_of_target_and_not_in_order(
    name: str, mixed: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(mixed, tmp_path / "mixed")
    expected = from_pretrained(mixed)
    for order in (1, -1):
        regroup(folder, *MIXED[name], order)
        check_same(from_pretrained(folder), expected)


@needs("compressed_tensors", "torch", "transformers")
@pytest.mark.parametrize("name", MIXED)
def test_groups_are_those_that_compressed_tensors_finds(name: str) -> None:
    import torch
    from compressed_tensors.utils import match as matching

    wide, narrow = MIXED[name]
    for projection in PROJECTIONS:
        module = f"model.layers.0.self_attn.{projection}_proj"
        first, *_ = matching.match_targets(module, torch.nn.Linear(1, 1), [*wide, *narrow])
        assert (first in narrow) == (projection == "q")


def test_last_group_with_a_target_counts(mixed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mixed, tmp_path / "mixed")
    regroup(folder, ["Linear", *QUERIES], QUERIES)
    check_same(from_pretrained(folder), from_pretrained(mixed))
    for wide, narrow, message in (
        ([*QUERIES, "Linear"], ["lm_head"], "quantization_config says"),
        (["Linear"], [], "quantization_config says"),
        (["re:.*mlp.*"], ["Embedding"], "no group of quantization_config has it as a target"),
    ):
        regroup(folder, wide, narrow)
        with pytest.raises(PretrainedError, match=message):
            from_pretrained(folder)


# --- models that are written ---

OUTSIDE: dict[Any, Any] = {sx.PathContains("embed"): None, sx.PathContains("router"): None}
FORMATS: dict[str, tuple[dict[Any, Any], int | None]] = {
    "int8": ({**OUTSIDE, ...: "int8"}, None),
    "int4 in tiles": ({**OUTSIDE, ...: "int4"}, 4),
    "fp8 beside int4": ({**OUTSIDE, sx.PathContains("attn"): "fp8", ...: "int4"}, None),
}


def small(folder: Path, name: str = "mistralai/Mixtral-8x7B-Instruct-v0.1") -> Any:
    save_pretrained(initialised(folder, config_of(name)), folder / "model")
    return from_pretrained(folder / "model", scan_layers=True)


@pytest.mark.parametrize("name", FORMATS)
def test_saved_kernels_are_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    formats, tile_size = FORMATS[name]
    model = sx.quantize(small(tmp_path), formats, tile_size=tile_size)
    save_pretrained(model, tmp_path / "saved", max_file_bytes=2**11)
    check_same(from_pretrained(tmp_path / "saved", scan_layers=True), model)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    stored: dict[str, np.ndarray] = {}
    for title in {*index["weight_map"].values()}:
        if name != "fp8 beside int4":  # safetensors has no fp8 of NumPy
            stored |= numpy_files.load_file(tmp_path / "saved" / title)
    if stored:
        assert stored.keys() == index["weight_map"].keys()
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    packing = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    formats_written = {group["format"] for group in packing["config_groups"].values()}
    expected = {"pack-quantized"} | ({"float-quantized"} if name == "fp8 beside int4" else set())
    assert formats_written == expected
    assert "model.layers.0.block_sparse_moe.gate" in packing["ignore"]


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ("int8", r"embed\.embedding is of an embedding.*router\.kernel is of a router"),
        (
            {**OUTSIDE, sx.PathContains("gate"): "int8", ...: "int4"},
            "experts are quantized in several ways",
        ),
    ],
)
def test_kernels_without_a_layout_are_refused(formats: Any, message: str, tmp_path: Path) -> None:
    model = sx.quantize(small(tmp_path), formats)
    with pytest.raises(PretrainedError, match=message):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- as transformers reads them ---


@needs("compressed_tensors", "torch", "transformers")
@pytest.mark.parametrize("name", FORMATS)
def test_transformers_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    formats, tile_size = FORMATS[name]
    save_pretrained(sx.quantize(small(tmp_path), formats, tile_size=tile_size), tmp_path / "saved")
    model = from_pretrained(tmp_path / "saved")
    options = {"dtype": torch.float32}
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options).eval()
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model(TOKENS), expected, atol=5e-6)
    output = np.asarray(model.layers[0].attn.out.kernel.value)
    weight = peer.get_parameter("model.layers.0.self_attn.o_proj.weight").detach().numpy()
    np.testing.assert_array_equal(output.reshape(-1, output.shape[-1]).T, weight)


@needs("torch", "transformers")
def test_transformers_has_the_numbers_of_blocks(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers.integrations import finegrained_fp8 as fp8

    quantized, _ = files.make_folders(tmp_path, LLAMA, files.BLOCKS)
    stored = load_file(quantized / "model.safetensors")
    parts = stored[QUERY], stored[f"{QUERY}_scale_inv"]
    expected = fp8.Fp8Dequantize(None)._dequantize_one(*parts, output_dtype=torch.float32)
    kernel = np.asarray(from_pretrained(quantized).layers[0].attn.q.kernel.value)
    np.testing.assert_array_equal(kernel.reshape(len(kernel), -1).T, expected.numpy())
