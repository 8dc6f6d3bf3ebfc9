# SPDX-License-Identifier: Apache-2.0
"""Edited models are written as what they are, or refused; a failing save leaves nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardax as sx
from shardax import models, nn
from shardax.errors import PretrainedError
from shardax.models import (
    AttentionConfig,
    ExpertsConfig,
    MLPConfig,
    OutputConfig,
    Transformer,
    TransformerConfig,
    architecture,
    from_pretrained,
    save_pretrained,
)
from tests.configs import field_of, with_fields, with_layers
from tests.models import peers
from tests.models.published import MODELS, TINY, initialised, tiny_config
from tests.needs import needs
from tests.values import with_values

SMALL = TransformerConfig(
    vocab_size=16,
    num_layers=2,
    embed_dim=8,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    mlp=MLPConfig(dim=8),
)
TOKENS = np.arange(6)[None]
WINDOW: dict[str, Any] = {"window": 3, "local_layers": (False, True)}


@sx.jit
def run(model: Any, tokens: Any) -> jax.Array:
    return model(tokens)


def values(model: Any) -> dict[Any, np.ndarray]:
    variables = sx.iter_variables(model)
    return {path: np.asarray(v.value) for path, v in variables if not isinstance(v, sx.RngState)}


def assert_equal(model: Any, other: Any) -> None:
    ours, theirs = values(model), values(other)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], str(path))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., Transformer]:
    """Makes a model that was read from its files."""

    def load(*, scan_layers: bool = False, **fields: Any) -> Transformer:
        model = with_values(Transformer(with_fields(SMALL, fields), rngs=sx.Rngs(0)))
        folder = tmp_path / f"loaded{len(list(tmp_path.iterdir()))}"
        save_pretrained(model, folder)
        return from_pretrained(folder, scan_layers=scan_layers)

    return load


# --- what is written ------------------------------------------------------------------------------


FREEZES: dict[str, tuple[Any, ...]] = {
    "embedding": (sx.PathContains("embed"),),
    "norms": (sx.PathContains("scale"),),
    "attention": (sx.PathContains("attn"),),
    "all": (),
}


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("part", FREEZES)
def test_frozen_parameters_are_written(part: str, scanned: bool, loaded: Any, tmp_path: Path):
    model = loaded(scan_layers=scanned)
    save_pretrained(sx.freeze(model, *FREEZES[part]), tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved", scan_layers=scanned), model)


def untie(model: Any) -> None:
    model.head = nn.Linear(8, 16, use_bias=False, rngs=None)
    model.head.kernel.value = 1 + jnp.arange(128.0).reshape(8, 16)


def extend(model: Any) -> None:
    model.embed.embedding.value = jnp.arange(160.0).reshape(20, 8)
    model.head.kernel.value = jnp.arange(160.0).reshape(8, 20)


def set_window(model: Any) -> None:
    for layer in model.layers:
        layer.attn.window = 3
    model.config = dataclasses.replace(model.config, source=None)


# An edit, the fields of the config that say it, and what is written then.
EDITS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], dict[str, Any]]] = {
    "untied": (untie, {"output.tied": False}, {"tie_word_embeddings": False}),
    "tied": (
        lambda model: setattr(model, "head", None),
        {"output.tied": True},
        {"tie_word_embeddings": True},
    ),
    "layer removed": (
        lambda model: model.layers.pop(0),
        {"num_layers": 1},
        {"num_hidden_layers": 1},
    ),
    "layer added": (
        lambda model: model.layers.append(sx.clone(model.layers[0])),
        {"num_layers": 3},
        {"num_hidden_layers": 3},
    ),
    "vocabulary": (extend, {"vocab_size": 20}, {"vocab_size": 20}),
    "epsilon": (
        lambda model: model.set_attributes(epsilon=0.5),
        {"norms.epsilon": 0.5},
        {"rms_norm_eps": 0.5},
    ),
    "activation": (
        lambda model: model.set_attributes(activation="relu"),
        {"activation": "relu"},
        {"hidden_act": "relu"},
    ),
    "function": (
        lambda model: model.set_attributes(activation=jax.nn.gelu),
        {"activation": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "window": (set_window, {"attention.window": 3}, {"model_type": "mistral", "sliding_window": 3}),
    "note": (lambda model: setattr(model, "note", "mine"), {}, {}),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_model_reads_back_as_it_is(name: str, loaded: Any, tmp_path: Path):
    edit, fields, expected = EDITS[name]
    model = loaded(output=OutputConfig(tied=name == "untied"))
    edit(model)
    save_pretrained(model, tmp_path / "saved", with_fields(model.config, fields))
    assert {field: config_of(tmp_path / "saved")[field] for field in expected} == expected
    again = from_pretrained(tmp_path / "saved")
    assert_equal(again, model)
    if name in ("tied", "epsilon", "window"):
        np.testing.assert_array_equal(run(again, TOKENS), run(model, TOKENS))
    save_pretrained(again, tmp_path / "again")  # and what was read is written as it was
    assert config_of(tmp_path / "again") == config_of(tmp_path / "saved")


# What is refused where the config is that from before an edit.
UNSAID = {
    "untied": r"\.head is a Linear, but None in its config",
    "tied": r"\.head is None, not a Linear",
    "layer removed": r"\.layers are 1, but 2 in its config\.json",
    "layer added": r"\.layers are 3, but 2 in its config\.json",
    "vocabulary": r"\.embed\.embedding has the shape \(20, 8\), but \(16, 8\) in its config;",
    "epsilon": r"\.final_norm\.epsilon is 0\.5, but 1e-06.*\.layers\[1\]\.mlp_norm\.epsilon",
    "activation": r"\.layers\[0\]\.mlp\.activation is 'relu', but 'silu'",
    "window": r"\.layers\[0\]\.attn\.window is 3, but None",
}


@pytest.mark.parametrize("name", UNSAID)
def test_edited_model_is_refused_by_path_without_its_config(name: str, loaded: Any, tmp_path: Path):
    edit, fields, _ = EDITS[name]
    model = loaded(output=OutputConfig(tied=name == "untied"))
    edit(model)
    with pytest.raises(PretrainedError, match=UNSAID[name]) as caught:
        save_pretrained(model, tmp_path / "saved")
    assert "config=dataclasses.replace(model.config, ...)" in str(caught.value)
    assert not (tmp_path / "saved").exists()
    model.config = with_fields(model.config, fields)  # which is the same as to give it
    save_pretrained(model, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), model)


def test_config_of_another_class_is_refused(loaded: Any, tmp_path: Path):
    with pytest.raises(PretrainedError, match="is no TransformerConfig, which a Transformer is"):
        save_pretrained(loaded(), tmp_path / "saved", models.ConvNeXtConfig())
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "fields", [{"embedding.scale": 3.0}, {"output.scale": 0.25}, {"output.softcap": 3.0}]
)
def test_config_that_calls_read_otherwise_is_refused(fields: Any, loaded: Any, tmp_path: Path):
    model = loaded()
    config = with_fields(model.config, fields)
    with pytest.raises(PretrainedError) as caught:
        save_pretrained(model, tmp_path / "saved", config)
    ((path, value),) = fields.items()
    text = f".config, which calls read, has {path}=None (but {value}) in config="
    assert text in str(caught.value)
    assert not (tmp_path / "saved").exists()


def test_config_of_another_rotation_is_refused(loaded: Any, tmp_path: Path):
    model = loaded()
    config = with_fields(model.config, {"attention.rope": models.Rope(500.0)})
    for layer in model.layers:
        layer.attn.rope_base = 500.0
    with pytest.raises(PretrainedError, match=r"\.config, which calls read, has attention\.rope="):
        save_pretrained(model, tmp_path / "saved", config)
    model.config = config
    save_pretrained(model, tmp_path / "saved")
    np.testing.assert_allclose(
        from_pretrained(tmp_path / "saved")(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5
    )


def test_shared_layers_are_written_twice(loaded: Any, tmp_path: Path):
    model = loaded()
    model.layers[1] = model.layers[0]
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert_equal(again.layers[0], model.layers[0])
    assert_equal(again.layers[1], model.layers[0])


def test_layers_stacked_by_hand_are_written(loaded: Any, tmp_path: Path):
    model = loaded()
    expected = values(model)
    model.layers = nn.stack_layers(model.layers)
    save_pretrained(model, tmp_path / "saved")
    again = values(from_pretrained(tmp_path / "saved"))
    assert {path: value.tolist() for path, value in again.items()} == {
        path: value.tolist() for path, value in expected.items()
    }


def test_merged_adapters_are_written(loaded: Any, tmp_path: Path):
    linears = sx.select(loaded()).at_instances_of(nn.Linear)
    adapted = sx.surgery.lora(linears.where(lambda path, _: path[-1] == "q"), rank=1)
    with pytest.raises(PretrainedError, match=r"\.layers\[0\]\.attn\.q is a LoRA, not a Linear;"):
        save_pretrained(adapted, tmp_path / "saved")
    merged = sx.surgery.merge_lora(adapted)  # as the error says
    save_pretrained(merged, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), merged)


def test_loaded_model_takes_a_kernel_of_attention(tmp_path: Path) -> None:
    config = sx.models.DecoderConfig(num_layers=2, scan_layers=True)
    save_pretrained(sx.models.Decoder(config, rngs=sx.Rngs(0)), tmp_path / "model")
    model = from_pretrained(tmp_path / "model", attention="splash")
    with pytest.raises(sx.errors.LayerInputError, match="runs on TPUs"):
        sx.models.generate(model, [[1, 2]], max_new_tokens=1)
    with pytest.raises(PretrainedError, match="attention='flash' must be 'auto'"):
        from_pretrained(tmp_path / "model", attention="flash")


def test_parameters_of_another_dtype_stay_so(loaded: Any, tmp_path: Path):
    model = loaded()
    model.head.kernel.value = model.head.kernel.value.astype(jnp.bfloat16)
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert (again.head.kernel.dtype, again.embed.embedding.dtype) == (jnp.bfloat16, jnp.float32)
    assert_equal(again, model)


class Named(Transformer):
    """A subclass that computes the same."""

    def loss(self) -> float:
        return 0.0


class Doubled(Transformer):
    def __call__(self, tokens: Any, **options: Any) -> Any:
        return 2 * super().__call__(tokens, **options)


def test_subclasses_are_written_unless_they_compute(tmp_path: Path):
    model = with_values(Named(SMALL, rngs=sx.Rngs(0)))
    save_pretrained(model, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), model)
    with pytest.raises(
        PretrainedError, match="is a Doubled, whose __call__ is not a Transformer's"
    ):
        save_pretrained(with_values(Doubled(SMALL, rngs=sx.Rngs(0))), tmp_path / "doubled")


# --- families -------------------------------------------------------------------------------------

PUBLISHED = {
    content["model_type"]: content
    for name, (content, _) in MODELS.items()
    if name != "google/vit-base-patch16-224"
}


def set_epsilon(model: Any, epsilon: float) -> None:
    """Sets the epsilon of all norms but those of latents, which no config.json says."""
    model.set_attributes(epsilon=epsilon)
    for _, module in sx.iter_modules(model):
        if isinstance(module, nn.MultiHeadLatentAttention):
            module.set_attributes(epsilon=1e-6)


class ReadFields:
    """A config, or a part of one, that records the paths of the fields that are read."""

    def __init__(self, config: Any, seen: set[str], path: str = "") -> None:
        self._of = (config, seen, path)

    def __getattr__(self, name: str) -> Any:
        config, seen, path = self._of
        value, path = getattr(config, name), f"{path}.{name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            return ReadFields(value, seen, path)
        if not callable(value):
            seen.add(path)
        return value


@pytest.mark.parametrize("kind", PUBLISHED)
def test_fields_that_calls_read_are_those_that_save_pretrained_compares(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = initialised(tmp_path, tiny_config(PUBLISHED[kind], layers=2))
    names = ("encoder", "decoder", "text", "image")
    parts = [getattr(model, name) for name in names if hasattr(model, name)] or [model]
    seen = set[str]()
    monkeypatch.setattr(Transformer, "_parts", property(lambda part: ReadFields(part.config, seen)))
    for part in parts:
        config = part.config
        x: Any = np.zeros((1, 4), np.int32)
        if config.image is not None:
            x = np.zeros((1, config.image.size, config.image.size, config.image.channels), "f4")
        if config.features is not None:
            x = np.zeros((1, 2 * config.positions.max_positions, config.features.size), "f4")
        context = np.zeros((1, 3, config.embed_dim), np.float32)
        options = {"context": context} if config.attention.cross_attention else {}
        sx.eval_shape(part, x, **options)
    compared = architecture._READ_BY_CALLS | {"activation", "remat"}
    unknown = {
        path for path in seen if not any(f"{path}.".startswith(f"{field}.") for field in compared)
    }
    assert unknown == set()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_fewer_layers_of_any_family_read_back(kind: str, tmp_path: Path):
    content = tiny_config(PUBLISHED[kind], layers=7)
    model = initialised(tmp_path, content)
    save_pretrained(model, tmp_path / "whole")
    if "torch_dtype" in content:
        content["torch_dtype"] = "float32"
    assert config_of(tmp_path / "whole") == content
    # The first layer of ModernBERT has no norm, and the epsilon of DistilBERT is no field.
    first = 0 if kind == "modernbert" else 1
    order = range(first, first + 6)
    del model.layers[0 if first else -1]
    epsilon = 1e-12 if kind == "distilbert" else 0.25
    set_epsilon(model, epsilon)
    fewer = with_fields(with_layers(model.config, order), {"norms.epsilon": epsilon})
    save_pretrained(model, tmp_path / "fewer", fewer)
    again = from_pretrained(tmp_path / "fewer")
    assert_equal(again, model)
    windows = [getattr(layer.attn, "window", None) for layer in model.layers]
    assert [getattr(layer.attn, "window", None) for layer in again.layers] == windows
    assert again.config.norms.epsilon == epsilon


def test_classes_of_a_head_may_change(tmp_path: Path):
    content = {name: TINY.get(name, value) for name, value in PUBLISHED["bert"].items()}
    content |= {"num_hidden_layers": 1, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised at random"):
        model = with_values(from_pretrained(tmp_path, strict=False))
    model.head = with_values(nn.Linear(8, 5, rngs=sx.Rngs(0)))
    config = with_fields(model.config, {"output.num_classes": 5})
    save_pretrained(model, tmp_path / "saved", config)
    assert len(config_of(tmp_path / "saved")["id2label"]) == 5
    assert_equal(from_pretrained(tmp_path / "saved"), model)


LONGER: dict[str, Any] = {"factor": 4.0, "length": 8.0, "high": 32.0}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "llama"),
        ({"attention.window": 3}, "mistral"),
        ({"attention.qkv_bias": True}, "qwen2"),
        ({"attention": dataclasses.replace(SMALL.attention, qkv_bias=True, **WINDOW)}, "qwen2"),
        ({"attention.qk_norm": "head"}, "qwen3"),
        ({"experts": ExpertsConfig(num_experts=2, dim=8)}, "mixtral"),
        (
            {"experts": ExpertsConfig(2, 4, dense_layers=(1,)), "attention.qk_norm": "head"},
            "qwen3_moe",
        ),
        ({"norms.placement": "post", "attention.qk_norm": "all"}, "olmo2"),
        ({"attention.rope": sx.models.Rope(kind="yarn", **LONGER)}, "llama"),
        (
            {
                "attention.num_kv_heads": 2,
                "attention.rope": sx.models.Rope(fraction=0.5),
                "mlp": MLPConfig(dim=8, gated=False, bias=True),
                "norms.kind": "layer",
            },
            "gpt_neox",
        ),
        (
            {
                "activation": "gelu",
                "attention.scale": 1 / 16,
                "embedding.scale": 8**0.5,
                "attention.local_rope": sx.models.Rope(),
                "norms.kind": "rms_offset",
                "norms.placement": "sandwich",
                "attention.qk_norm": "head",
                "attention.rope": sx.models.Rope(base=1e6),
                "attention.window": 3,
                "attention.local_layers": (True, False),
            },
            "gemma3_text",
        ),
    ],
)
def test_new_models_are_written_as_a_fitting_family(changes: Any, kind: str, tmp_path: Path):
    model = with_values(Transformer(with_fields(SMALL, changes), rngs=sx.Rngs(0)))
    save_pretrained(model, tmp_path / "saved")
    assert config_of(tmp_path / "saved")["model_type"] == kind
    again = from_pretrained(tmp_path / "saved")
    assert_equal(again, model)
    paths = ("attention", "norms", "activation", "embedding", "experts")
    assert [getattr(again.config, f) for f in paths] == [getattr(model.config, f) for f in paths]


ALONE: dict[str, dict[str, Any]] = {
    "granite": {"residual_scale": 0.5},
    "smollm3": {"attention.rope_layers": (True, False)},
    "lfm2": {
        "attention.qk_norm": "head",
        "recurrence": models.RecurrenceConfig(
            mixer=models.ShortConvolutionConfig(size=2), layers=(True, False)
        ),
    },
    "mamba2": {
        "mlp": None,
        "attention.rope": None,
        "recurrence": models.RecurrenceConfig(
            mixer=models.StateSpaceConfig(4, 4, num_groups=2, state_dim=4, chunk=8)
        ),
    },
}


@pytest.mark.parametrize("kind", ALONE)
def test_new_model_is_written_as_the_family_that_alone_has_its_parts(kind: str, tmp_path: Path):
    model = with_values(Transformer(with_fields(SMALL, ALONE[kind]), rngs=sx.Rngs(0)))
    save_pretrained(model, tmp_path / "saved")
    assert config_of(tmp_path / "saved")["model_type"] == kind
    again = from_pretrained(tmp_path / "saved")
    assert_equal(again, model)
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))


def test_refusal_of_a_new_model_names_the_nearest_family(tmp_path: Path):
    config = with_fields(SMALL, {"residual_scale": 0.5, "attention.qk_norm": "head"})
    model = Transformer(config, rngs=sx.Rngs(0))
    with pytest.raises(PretrainedError) as caught:
        save_pretrained(model, tmp_path / "saved")
    assert "has residual_scale=0.5 (but None), where a qwen3 is the nearest" in str(caught.value)

    # Of parts that one family has, what that family lacks.
    mixer = models.StateSpaceConfig(3, 5, num_groups=3, state_dim=4)
    config = with_fields(SMALL, {**ALONE["mamba2"], "recurrence": models.RecurrenceConfig(mixer)})
    says = (
        r"nothing was written: a mamba2's config\.json .*num_heads=3 of head_dim=5 are not expand"
    )
    with pytest.raises(PretrainedError, match=says):
        save_pretrained(Transformer(config, rngs=sx.Rngs(0)), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- what is refused ------------------------------------------------------------------------------


class DoublingLayer(sx.Module):
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return 2 * inputs


class DoubledDropout(nn.Dropout):
    def __call__(self, x: Any) -> Any:
        return 2 * x


def set_in_all(model: Any, name: str, value: Any) -> None:
    """Sets an attribute of attention in each layer, and its field of the config."""
    for layer in model.layers:
        setattr(layer.attn, name, value)
    model.config = with_fields(model.config, {f"attention.{name}": value})


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "embedding alone": (
        lambda model: setattr(model.embed.embedding, "value", jnp.ones((20, 8))),
        r"\.embed\.embedding has the shape \(20, 8\), but \(16, 8\)",
    ),
    "one activation": (
        lambda model: setattr(model.layers[0].mlp, "activation", "relu"),
        r"\.layers\[0\]\.mlp\.activation is 'relu', but 'silu'",
    ),
    "own activation": (
        lambda model: model.set_attributes(activation=abs),
        r"\.layers\[0\]\.mlp\.activation is the function abs",
    ),
    "one epsilon": (
        lambda model: setattr(model.layers[1].mlp_norm, "epsilon", 0.5),
        r"\.layers\[1\]\.mlp_norm\.epsilon is 0\.5, but 1e-06",
    ),
    "windows": (
        lambda model: set_in_all(model, "window", 3),
        r"a llama's config\.json has no way to say windows=\(3, 3\).*As a mistral it can be",
    ),
    "window of the config": (
        lambda model: setattr(model, "config", with_fields(model.config, {"attention.window": 4})),
        r"a llama's config\.json has no way to say windows=\(4, 4\)",
    ),
    "softmax": (
        lambda model: setattr(model.layers[0].attn, "softmax", jax.nn.sigmoid),
        r"\.layers\[0\]\.attn\.softmax is the function sigmoid",
    ),
    "norm gone": (lambda model: setattr(model, "final_norm", None), r"\.final_norm is None"),
    "further layer": (
        lambda model: setattr(model, "extra", nn.Linear(2, 2, rngs=sx.Rngs(0))),
        r"\.extra\.kernel has no tensor in its family; \.extra\.bias",
    ),
    "module for a dropout": (
        lambda model: setattr(model.layers[1], "dropout", DoublingLayer()),
        r"\.layers\[1\]\.dropout is a DoublingLayer, not a Dropout",
    ),
    "subclass of a dropout": (
        lambda model: setattr(model.layers[0].attn, "dropout", DoubledDropout(0.1)),
        r"\.layers\[0\]\.attn\.dropout is a DoubledDropout, whose __call__ is not a Dropout's",
    ),
    "function for a dropout": (
        lambda model: setattr(model, "embed_dropout", jnp.tanh),
        r"\.embed_dropout is the function tanh, not a Dropout",
    ),
    "no window": (
        lambda model: model.set_attributes(window=0),
        r"\.layers\[0\]\.attn\.window is 0, but None",
    ),
    "large scale of scores": (
        lambda model: set_in_all(model, "scale", 5),
        r"has no way to say attention\.scale=5",
    ),
    "raw array": (lambda model: setattr(model, "mean", jnp.ones(3)), r"\.mean has no tensor"),
    "dtype": (
        lambda model: setattr(model.head.kernel, "value", jnp.ones((8, 16), jnp.int8)),
        r"\.head\.kernel has the dtype int8, which is not read back",
    ),
    "one bias": (
        lambda model: setattr(model.layers[0].attn, "q", nn.Linear(8, (2, 4), rngs=sx.Rngs(0))),
        r"\.layers\[0\]\.attn\.q\.bias is a Param, but None",
    ),
    "wrapped layers": (
        lambda model: setattr(model, "layers", nn.Sequential(*model.layers)),
        "layers is a Sequential, neither a list of layers nor a Stack",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_save_pretrained_refuses_what_would_be_lost(name: str, loaded: Any, tmp_path: Path):
    edit, says = REFUSED[name]
    model = loaded()
    edit(model)
    with pytest.raises(PretrainedError, match=says) as caught:
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    if name == "windows":  # what the error says
        model.config = dataclasses.replace(model.config, source=None)
        save_pretrained(model, tmp_path / "saved")
    else:
        assert "sx.train.checkpoint.save(model, folder)" in str(caught.value)


@pytest.mark.parametrize("source", ["no json", "[1]", "", "[" * 10**5, 7])
def test_source_that_is_no_config_json_is_refused(source: Any, loaded: Any, tmp_path: Path):
    model = loaded()
    model.config = dataclasses.replace(model.config, source=source)
    with pytest.raises(PretrainedError, match=r"model\.config\.source is .*, and not the text of"):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.config = dataclasses.replace(model.config, source=None)  # as the error says
    save_pretrained(model, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), model)


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        ("mamba2", "num_heads", 5, "num_heads is 5, but 4 in its config.json"),
        ("mamba2", "num_groups", 3, "num_groups is 3, but 2 in its config.json"),
        ("mamba2", "activation", "tanh", "activation is 'tanh', but 'silu' in its config.json"),
        ("falcon_h1", "scales", (1.0,) * 5, r"scales is \(1.0, 1.0, 1.0, 1.0, 1.0\), but \(0.35"),
        ("falcon_h1", "gate_norm", "before", "gate_norm is 'before', but None in its config.json"),
        ("qwen3_next", "num_value_heads", 2, "num_value_heads is 2, but 4 in its config.json"),
        ("qwen3_next", "activation", "tanh", "activation is 'tanh', but 'silu' in its config.json"),
        ("qwen3_next", "convolution", None, "convolution is None, not a ChannelKernels"),
    ],
)
def test_edited_mixers_are_refused_by_path(
    kind: str, name: str, value: Any, says: str, tmp_path: Path
):
    model = initialised(tmp_path, tiny_config(PUBLISHED[kind], layers=2))
    setattr(model.layers[1].mixer, name, value)
    with pytest.raises(PretrainedError, match=rf"\.layers\[1\]\.mixer\.{says}"):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# By the attribute of a layer, the path in a config and a factor.
FACTORS = {
    "attention_in_scale": ("attention.in_scale", 3.0),
    "attention_out_scale": ("attention.out_scale", 1.1),
    "recurrent_in_scale": ("recurrence.in_scale", 0.7),
    "recurrent_out_scale": ("recurrence.out_scale", 0.3),
    "mlp_out_scale": ("mlp.out_scale", 0.2),
}


def test_edited_factors_read_back(tmp_path: Path):
    model = initialised(tmp_path, tiny_config(PUBLISHED["falcon_h1"], layers=2))
    for layer in model.layers:
        for name, (_, factor) in FACTORS.items():
            setattr(layer, name, factor)
        layer.attn.scale, layer.mlp.gate_scale = 0.3, 1.5
        layer.mixer.scales = (0.1, 0.2, 0.3, 0.4, 0.5)
    mixer = dataclasses.replace(model.config.recurrence.mixer, scales=model.layers[0].mixer.scales)
    fields = dict(FACTORS.values())
    fields |= {"attention.scale": 0.3, "mlp.gate_scale": 1.5, "recurrence.mixer": mixer}
    model.config = with_fields(model.config, fields)
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    for path, factor in FACTORS.values():
        assert field_of(again.config, path) == factor
    assert again.config.attention.scale == 0.3
    np.testing.assert_array_equal(run(again, TOKENS), run(model, TOKENS))
    model.layers[1].attention_in_scale = 2.0
    with pytest.raises(PretrainedError, match=r"\.layers\[1\]\.attention_in_scale is 2\.0, but 3"):
        save_pretrained(model, tmp_path / "one")
    model.layers[1].attention_in_scale = 3.0
    for layer in model.layers:
        layer.attn = None
    model.config = with_fields(model.config, {"recurrence.beside": False})
    with pytest.raises(PretrainedError, match=r"has no way to say .*recurrence\.beside=False"):
        save_pretrained(model, tmp_path / "alone")


def test_edited_chunks_of_local_layers_read_back(tmp_path: Path):
    model = initialised(tmp_path, tiny_config(PUBLISHED["llama4_text"], layers=4))
    local = [layer.attn for layer in model.layers if layer.attn.window is not None]
    assert len(local) == 3
    for attention in local:
        attention.window = 5
    config = with_fields(model.config, {"attention.window": 5})
    save_pretrained(model, tmp_path / "saved", config)
    assert config_of(tmp_path / "saved")["attention_chunk_size"] == 5
    again = from_pretrained(tmp_path / "saved")
    assert [layer.attn.window for layer in again.layers] == [5, 5, 5, None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mlp.gate_scale": 2.0, "mlp.gated": False}, "gate_scale to be 1 if ungated"),
        (
            {"mlp.gate_scale": 2.0, "experts": ExpertsConfig(2, 8)},
            r"TransformerConfig needs mlp\.gate_scale to be 1, with experts",
        ),
        (
            {"attention.gate": True, "attention.latent": sx.models.LatentConfig(8, 2, 4)},
            "gate to be False, with latent",
        ),
    ],
)
def test_factors_without_their_parts_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(sx.errors.LayerConfigError, match=says):
        with_fields(SMALL, {"attention.num_kv_heads": 2, **changes})


def test_experts_with_places_are_refused(loaded: Any, tmp_path: Path):
    model = loaded(experts=ExpertsConfig(num_experts=2, dim=8))
    model.set_attributes(dispatch="dropless")
    save_pretrained(model, tmp_path / "dropless")
    model.set_attributes(dispatch="capacity")
    with pytest.raises(PretrainedError, match=r"\.layers\[0\]\.mlp\.dispatch is 'capacity'"):
        save_pretrained(model, tmp_path / "capacity")


# --- disks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Lets no file grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_there", [False, True])
def test_failing_save_leaves_what_was_there(is_there: bool, loaded: Any, tmp_path: Path):
    model, folder = loaded(), tmp_path / "saved"
    if is_there:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with small_disk(700), pytest.raises(PretrainedError, match=r"not written to .*saved: \[Errno"):
        save_pretrained(model, folder, max_file_bytes=512)
    assert sorted(tmp_path.rglob("*")) == before
    save_pretrained(model, folder, max_file_bytes=512)
    assert_equal(from_pretrained(folder), model)
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors.index.json"}
    assert (folder / "tokenizer.json").exists() is is_there
    with pytest.raises(PretrainedError, match="holds tensors already"):
        save_pretrained(copy.deepcopy(model), folder)


# --- in transformers ------------------------------------------------------------------------------


@needs("torch", "transformers")
@pytest.mark.parametrize("name", ["tied", "layer removed", "vocabulary", "epsilon", "window"])
def test_edits_have_the_logits_of_transformers(name: str, loaded: Any, tmp_path: Path):
    import transformers

    model = loaded()
    edit, fields, _ = EDITS[name]
    edit(model)
    save_pretrained(model, tmp_path / "saved", with_fields(model.config, fields))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    expected = peers.logits(peer, TOKENS, np.ones_like(TOKENS, bool))
    np.testing.assert_allclose(run(model, TOKENS), expected, rtol=1e-5, atol=1e-5)


FEWER = ["gemma3", "gemma2", "qwen2", "qwen3_moe", "phi3", "gpt_neox"]
FEWER += [
    "deepseek_v2",
    "deepseek_v3",
    "cohere2",
    "falcon_h1",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "lfm2",
    "llama4_text",
    "mamba2",
    "olmo3",
    "qwen2_moe",
    "qwen3_next",
    "smollm3",
]


@needs("torch", "transformers")
@pytest.mark.parametrize("name", FEWER)
def test_fewer_layers_have_the_logits_of_transformers(name: str, tmp_path: Path):
    import transformers

    peers.make(tmp_path / "peer", name)
    model = from_pretrained(tmp_path / "peer")
    del model.layers[0]
    set_epsilon(model, 1e-3)
    fewer = with_layers(model.config, range(1, model.config.num_layers))
    save_pretrained(model, tmp_path / "saved", with_fields(fewer, {"norms.epsilon": 1e-3}))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    expected = peers.logits(peer, TOKENS, np.ones_like(TOKENS, bool))
    np.testing.assert_allclose(run(model, TOKENS), expected, rtol=0, atol=2e-5)


@needs("torch", "transformers")
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_without_experts_have_the_logits_of_transformers(name: str, tmp_path: Path):
    import transformers

    peers.make(tmp_path / "peer", name)
    model = from_pretrained(tmp_path / "peer")
    del model.layers[1:]
    save_pretrained(model, tmp_path / "saved", with_layers(model.config, [0]))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    expected = peers.logits(peer, TOKENS, np.ones_like(TOKENS, bool))
    np.testing.assert_allclose(run(model, TOKENS), expected, rtol=0, atol=2e-5)
    assert_equal(from_pretrained(tmp_path / "saved"), model)
