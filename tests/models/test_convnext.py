# SPDX-License-Identifier: Apache-2.0
"""ConvNeXt: the logits of ``transformers``, the same files when written again, and edits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardax as sx
from shardax.errors import GenerationError, LayerConfigError, LayerInputError, PretrainedError
from shardax.models import ConvNeXt, ConvNeXtConfig, from_pretrained, save_pretrained
from tests.models import peers
from tests.models.published import initialised
from tests.needs import needs
from tests.values import with_values

PIXELS = np.random.default_rng(0).normal(size=(2, 17, 16, 3)).astype(np.float32)
SIZES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_stages": 2}
KINDS = {"convnext": "ConvNext", "convnextv2": "ConvNextV2"}


def content_of(kind: str, **fields: Any) -> dict[str, Any]:
    names = [f"{KINDS[kind]}ForImageClassification"]
    return {"model_type": kind, "architectures": names, "num_labels": 5, **SIZES, **fields}


@sx.jit
def run(model: Any, images: Any) -> Any:
    return model(images)


@sx.jit
def bare(model: Any, images: Any) -> Any:
    hidden = model(images)
    return hidden, model.pool(hidden)


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    found = load_file(folder / "model.safetensors")
    return {name: (each.dtype, each.shape, each.tobytes()) for name, each in found.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def written(model: Any, folder: Path, config: Any = None) -> Any:
    """The model, read back."""
    save_pretrained(model, folder, config)
    return from_pretrained(folder)


# --- numbers --------------------------------------------------------------------------------------


@needs("torch", "transformers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["ForImageClassification", "Model"])
def test_results_and_files_equal_transformers(kind: str, head: str, tmp_path: Path):
    import torch

    name = KINDS[kind]
    sizes = {**SIZES, "num_labels": 5, "hidden_act": "relu" if head == "Model" else "gelu"}
    peer = peers.make_model(tmp_path / "peer", f"{name}Config", f"{name}{head}", sizes)
    with torch.no_grad():
        expected = peer(torch.from_numpy(PIXELS.transpose(0, 3, 1, 2)))[:2]
    model = from_pretrained(tmp_path / "peer")
    if head == "Model":
        found, values = bare(model, PIXELS), [expected[0].permute(0, 2, 3, 1), expected[1]]
    else:
        found, values = [run(model, PIXELS)], expected
        again = bare(from_pretrained(tmp_path / "peer", head=False), PIXELS)[1]
        np.testing.assert_allclose(model.head(again), found[0], rtol=1e-5, atol=1e-6)
    for result, value in zip(found, values, strict=True):
        largest = float(value.abs().max())
        np.testing.assert_allclose(result, value.numpy(), rtol=0, atol=2e-5 * largest)
    save_pretrained(model, tmp_path / "copy")
    assert tensors(tmp_path / "copy") == tensors(tmp_path / "peer")
    assert config_of(tmp_path / "copy") == config_of(tmp_path / "peer")


@pytest.mark.parametrize("kind", KINDS)
def test_convnext_logits_depend_on_each_tensor(kind: str, tmp_path: Path):
    model = initialised(tmp_path, content_of(kind))
    expected = run(model, PIXELS)
    for path, variable in sx.iter_variables(model):
        value = variable.value
        variable.value = value + 0.5 * np.sign(np.arange(value.size).reshape(value.shape) % 2 - 0.5)
        assert float(jnp.abs(run(model, PIXELS) - expected).max()) > 1e-6, path
        variable.value = value


def test_layouts_and_half_precision_agree_with_one_device(mesh: Any, tmp_path: Path):
    folder = tmp_path / "model"
    fields = {"hidden_sizes": [8, 16], "num_labels": 8}
    model = initialised(tmp_path, content_of("convnextv2", **fields))
    save_pretrained(model, folder)
    expected = run(model, PIXELS)
    with jax.set_mesh(mesh), sx.axis_rules(sx.models.DECODER_RULES):
        split = from_pretrained(folder)
        up = split.stages[0].blocks[1].up.kernel
        assert up.sharding.spec == jax.sharding.PartitionSpec(None, "model")
        images = jax.device_put(PIXELS, jax.NamedSharding(mesh, jax.P("data")))
        found = run(split, images)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    half = from_pretrained(folder, dtype="bfloat16")
    result = run(half, PIXELS)
    assert (result.dtype, half.head.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    largest = float(jnp.abs(expected).max())
    np.testing.assert_allclose(result.astype(np.float32), expected, atol=0.05 * largest)


def test_record_has_the_results_of_blocks(tmp_path: Path):
    model = initialised(tmp_path, content_of("convnext"))
    blocks = sx.select(model).at_instances_of(type(model.stages[0].blocks[0]))
    result, activations = sx.jit(sx.surgery.record(model, blocks))(PIXELS)
    shapes = {path: value.shape for path, value in activations.items()}
    assert shapes == {
        ("stages", 0, "blocks", 0): (2, 4, 4, 8),
        ("stages", 0, "blocks", 1): (2, 4, 4, 8),
        ("stages", 1, "blocks", 0): (2, 2, 2, 16),
    }
    last = activations["stages", 1, "blocks", 0]
    np.testing.assert_allclose(model.head(model.pool(last)), result, rtol=1e-5, atol=1e-6)


# --- configs --------------------------------------------------------------------------------------

_PUBLISHED: dict[str, Any] = {"drop_path_rate": 0.0, "hidden_act": "gelu", "image_size": 224}
_PUBLISHED |= {"initializer_range": 0.02, "layer_norm_eps": 1e-12, "num_channels": 3}
_PUBLISHED |= {"num_stages": 4, "patch_size": 4, "torch_dtype": "float32"}
_PUBLISHED |= {"id2label": {str(index): str(index) for index in range(1000)}}
_PUBLISHED |= {"label2id": {str(index): index for index in range(1000)}}
_V1 = {"architectures": ["ConvNextForImageClassification"], "model_type": "convnext"}
_V1 |= {"layer_scale_init_value": 1e-6, "transformers_version": "4.18.0.dev0"}
_V2 = {"architectures": ["ConvNextV2ForImageClassification"], "model_type": "convnextv2"}
_V2 |= {"out_features": ["stage4"], "out_indices": [4], "transformers_version": "4.27.0.dev0"}
_V2 |= {"stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"]}


@pytest.mark.parametrize(
    ("fields", "count"),
    [  # facebook/convnext-tiny-224, facebook/convnextv2-base-22k-224; counts of their papers
        ({**_V1, "depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}, 28.6e6),
        ({**_V2, "depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}, 88.7e6),
    ],
)
def test_published_configs_have_their_number_of_parameters(fields: Any, count: float, tmp_path):
    content = {**_PUBLISHED, **fields}
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised at random"):
        model = from_pretrained(tmp_path, strict=False)
    assert model.config.num_layers == sum(content["depths"])
    sizes = [np.prod(variable.shape) for _, variable in sx.iter_variables(model)]
    assert sum(sizes) == pytest.approx(count, rel=2e-3)


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "convnext"}))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised at random"):
        config = from_pretrained(tmp_path, strict=False).config
    assert dataclasses.replace(config, source=None) == ConvNeXtConfig(num_classes=2)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"drop_path_rate": 0.1}, "drop_path_rate=0.1 is not supported"),
        ({"num_stages": 3}, "num_stages=3, hidden_sizes=[8, 16]"),
        ({"depths": [2, 0]}, "depths=[2, 0] are not positive"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is none of"),
        ({"patch_size": [4, 4]}, "patch_size=[4, 4] is not an integer"),
        ({"use_gelu": True}, "use_gelu=True is unknown"),
        ({"architectures": ["ConvNextBackbone"]}, "architectures=['ConvNextBackbone']"),
        ({"num_labels": 0}, "num_classes"),
    ],
)
def test_from_pretrained_refuses_what_a_config_cannot_say(
    fields: Any, problem: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(content_of("convnext", **fields)))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(PretrainedError) as caught:
        from_pretrained(tmp_path, strict=False)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"widths": (8,), "depths": (1, 1)}, "widths=(8,)"),
        ({"widths": (8, 0), "depths": (1, 1)}, "widths[1]"),
        ({"head": "tokens"}, "head='tokens'"),
        ({"activation": "none such"}, "activation='none such'"),
        ({"norm_epsilon": -1.0}, "norm_epsilon=-1.0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: Any, problem: str):
    with pytest.raises(LayerConfigError) as caught:
        ConvNeXtConfig(**fields)
    assert problem in str(caught.value)


# --- edits ----------------------------------------------------------------------------------------


def small(**fields: Any) -> ConvNeXt:
    sizes = {"widths": (8, 16), "depths": (2, 1), "num_classes": 5} | fields
    return with_values(ConvNeXt(ConvNeXtConfig(**sizes), rngs=sx.Rngs(0)))


def change_head(model: Any) -> None:
    model.head = with_values(sx.nn.Linear(16, 3, kernel_axes=("embed", None), rngs=sx.Rngs(0)))


def drop_head(model: Any) -> None:
    model.head = None


def drop_block(model: Any) -> None:
    del model.stages[0].blocks[1]


def drop_scales(model: Any) -> None:
    for stage in model.stages:
        for block in stage.blocks:
            block.scale = None


def change_activation(model: Any) -> None:
    for stage in model.stages:
        for block in stage.blocks:
            block.activation = "relu"


def change_epsilon(model: Any) -> None:
    model.final_norm.epsilon = 0.5


# Edits, and the fields of the config that say them.
EDITS: dict[Any, dict[str, Any]] = {
    change_head: {"num_classes": 3},
    drop_head: {"head": None},
    drop_block: {"depths": (1, 1)},
    drop_scales: {"layer_scale": False},
    change_activation: {"activation": "relu"},
    change_epsilon: {"norm_epsilon": 0.5},
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_that_a_config_can_say_are_written(edit: Any, tmp_path: Path):
    model = initialised(tmp_path, content_of("convnext"))
    edit(model)
    config = dataclasses.replace(model.config, **EDITS[edit])
    again = written(model, tmp_path / "edited", config)
    np.testing.assert_array_equal(run(again, PIXELS), run(model, PIXELS))
    save_pretrained(again, tmp_path / "again")
    assert tensors(tmp_path / "edited") == tensors(tmp_path / "again")


class OtherBlock(type(small().stages[0].blocks[0])):  # type: ignore[misc]
    def __call__(self, x: Any) -> Any:
        return x


def replace_block(model: Any) -> None:
    model.stages[0].blocks[1] = OtherBlock(model.config, 8, rngs=sx.Rngs(0))


def change_one_activation(model: Any) -> None:
    model.stages[0].blocks[1].activation = "relu"


def change_convolution(model: Any) -> None:
    model.stages[1].reduction.strides = (1, 1)


def add_parameter(model: Any) -> None:
    model.stages[0].extra = sx.Param(jnp.ones(3))


def change_config(model: Any) -> None:
    model.config = dataclasses.replace(model.config, activation="relu")


def normalize_responses(model: Any) -> None:
    for stage in model.stages:
        for block in stage.blocks:
            block.responses = small(response_norm=True).stages[0].blocks[0].responses
    model.config = dataclasses.replace(model.config, response_norm=True)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (replace_block, ".stages[0].blocks[1] is a OtherBlock"),
        (change_one_activation, ".stages[0].blocks[1].activation is 'relu'"),
        (change_convolution, ".stages[1].reduction.strides is (1, 1)"),
        (add_parameter, ".stages[0].extra has no tensor in its family"),
        (change_config, ".stages[0].blocks[0].activation is 'exact_gelu', but 'relu'"),
        (change_head, ".head.kernel has the shape (16, 3), but (16, 5) in its config"),
        (drop_block, ".stages[0].blocks are 1, but 2 in its config.json"),
        (
            lambda model: setattr(model.stages[0], "blocks", None),
            ".stages[0].blocks is None, not a",
        ),
        (
            lambda model: setattr(model, "stages", model.stages[0]),
            ".stages is a ConvNeXtStage, not a list",
        ),
        (normalize_responses, "no way to say response_norm=True"),
    ],
)
def test_save_pretrained_refuses_other_edits_by_path(edit: Any, problem: str, tmp_path: Path):
    model = initialised(tmp_path, content_of("convnext"))
    edit(model)
    with pytest.raises(PretrainedError) as caught:
        save_pretrained(model, tmp_path / "edited")
    assert problem in str(caught.value)
    assert not (tmp_path / "edited").exists()


def test_quantized_head_is_read_back_bit_for_bit(tmp_path: Path):
    model = initialised(tmp_path, content_of("convnext"))
    model.head = sx.quantize(model.head, "int8")
    kernel, again = model.head.kernel, written(model, tmp_path / "quantized").head.kernel
    np.testing.assert_array_equal(again.values.value, kernel.values.value)
    np.testing.assert_array_equal(again.scale.value, kernel.scale.value)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"channels": 1}, "convnext"), ({"layer_scale": False, "response_norm": True}, "convnextv2")],
)
def test_new_models_are_written_as_their_type(fields: Any, kind: str, tmp_path: Path):
    model = small(**fields)
    again = written(model, tmp_path / "new")
    assert config_of(tmp_path / "new")["model_type"] == kind
    expected = dataclasses.replace(again.config, source=None)
    assert expected == model.config
    images = PIXELS[..., : model.config.channels]
    np.testing.assert_array_equal(run(again, images), run(model, images))


def test_new_model_of_both_versions_is_refused(tmp_path: Path):
    with pytest.raises(PretrainedError, match=r"no family of .* has response_norm=True"):
        save_pretrained(small(response_norm=True), tmp_path / "new")


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 16, 16, 4), (16, 16, 3), (2, 16, 7, 3)])
def test_images_of_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(LayerInputError, match="at least 8 rows and columns"):
        small()(jnp.ones(shape))


def test_loops_over_layers_and_tokens_are_refused(tmp_path: Path):
    folder = tmp_path / "model"
    save_pretrained(small(), folder)
    with pytest.raises(LayerConfigError, match="ConvNeXt has no scan_layers and no remat"):
        from_pretrained(folder, scan_layers=True, remat="full")
    with pytest.raises(GenerationError, match="head='classes'"):
        sx.models.generate(small(), [[1]], max_new_tokens=1)
