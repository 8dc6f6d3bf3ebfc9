# SPDX-License-Identifier: Apache-2.0
"""Any edits of a loaded model are refused by name, or read back with equal logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax import nn
from shardax.errors import LayerConfigError, PretrainedError
from shardax.models import from_pretrained, save_pretrained
from tests.configs import with_fields, with_layers
from tests.models import peers
from tests.models.published import MODELS, initialised, tiny_config
from tests.needs import needs
from tests.values import with_values

FAMILIES = {content["model_type"]: content for content, _ in MODELS.values()}
IMAGES = ("clip_vision_model", "dinov2", "siglip_vision_model", "vit")
TOKENS = np.arange(6)[None]
PIXELS = np.linspace(-1, 1, 4 * 4 * 3, dtype=np.float32).reshape(1, 4, 4, 3)


def inputs_of(family: str) -> np.ndarray:
    return PIXELS if family in IMAGES else TOKENS


@functools.cache
def folder_of(family: str) -> Path:
    """A folder with a small model of a family, in float32."""
    folder = Path(tempfile.mkdtemp())
    # By default a phi3 has a pad token beyond a small vocabulary.
    content = tiny_config(FAMILIES[family], layers=3, pad_token_id=0)
    model = initialised(folder, content)
    save_pretrained(model, folder / "whole")
    return folder / "whole"


def load(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, dtype=jnp.float32, **options)


# --- edits, of a model and a number that says where -----------------------------------------------


def say(model: Any, fields: dict[str, Any]) -> None:
    """Gives a model the config that says an edit, where there is one."""
    with contextlib.suppress(LayerConfigError):
        model.config = with_fields(model.config, fields)


def say_parts(model: Any, *names: str) -> None:
    """Gives a model the configs of its parts, where there is such a config."""
    configs = {name: getattr(model, name).config for name in names}
    with contextlib.suppress(LayerConfigError):
        model.config = dataclasses.replace(model.config, **configs)


def linears(model: Any, number: int) -> list[tuple[Any, Any]]:
    """A linear layer and those of its shape, with their paths."""
    layers = [(path, m) for path, m in sx.iter_modules(model) if isinstance(m, nn.Linear)]
    shape = layers[number % len(layers)][1].kernel.shape
    return [(path, layer) for path, layer in layers if layer.kernel.shape == shape]


def values_changed(variable: Any, number: int) -> Any:
    draws = np.random.default_rng(number).normal(size=variable.shape)
    return jnp.asarray(draws / 4, variable.dtype)


def freeze(model: Any, number: int) -> Any:
    parts = ["embed", "scale", "attn", "layers", "kernel"]
    if number % 6 == 5:
        return sx.freeze(model)
    return sx.freeze(model, sx.PathContains(parts[number % 6]))


def tie_or_untie(model: Any, number: int) -> Any:
    if model.config.head == "tokens":
        say(model, {"output.tied": model.head is not None})
    if model.head is not None:
        model.head = None
        return model
    if not hasattr(model.embed, "embedding"):  # of images
        return model
    vocabulary, features = model.embed.embedding.shape
    model.head = with_values(nn.Linear(features, vocabulary, use_bias=False, rngs=sx.Rngs(0)))
    return model


def remove_layer(model: Any, number: int) -> Any:
    order = list(range(len(model.layers)))
    del model.layers[number % len(model.layers)], order[number % len(order)]
    if order:
        model.config = with_layers(model.config, order)
    return model


def remove_part(model: Any, number: int) -> Any:
    layer = model.layers[number % len(model.layers)]
    names = [name for name, value in vars(layer).items() if isinstance(value, sx.Module)]
    setattr(layer, names[number % len(names)], None)
    return model


def repeat_layer(model: Any, number: int) -> Any:
    order = list(range(len(model.layers)))
    layer = model.layers[number % len(model.layers)]
    model.layers.append(layer if number % 2 else sx.clone(layer))
    model.config = with_layers(model.config, [*order, number % len(order)])
    return model


def share_layer(model: Any, number: int) -> Any:
    model.layers[number % len(model.layers)] = model.layers[0]
    return model


def replace_linear(model: Any, number: int) -> Any:
    path, layer = linears(model, number)[0]
    size = layer.kernel.shape[0] if number % 3 else layer.kernel.shape[0] + 1
    shape = (size, *layer.kernel.shape[1:])
    if len(shape) > 2:
        return model
    new = nn.Linear(*shape, use_bias=bool(number % 2), rngs=sx.Rngs(0))
    return (
        sx.select(model)
        .at_instances_of(nn.Linear)
        .where(lambda where, _: where == path)
        .set(with_values(new))
    )


def draw_values(model: Any, number: int) -> Any:
    for _, layer in linears(model, number):
        if isinstance(layer.kernel, sx.Param):
            layer.kernel.value = values_changed(layer.kernel, number)
    return model


def extend(model: Any, number: int) -> Any:
    if not hasattr(model.embed, "embedding"):  # of images
        return model
    more = number % 3 + 1

    def wide(value: jax.Array, axis: int) -> jax.Array:
        new = list(value.shape)
        new[axis] = more
        return jnp.concatenate([value, jnp.ones(new, value.dtype)], axis)

    parts = [(model.embed, "embedding", 0)]
    if model.head is not None and number % 5:
        parts += [(model.head, "kernel", 1), (model.head, "bias", 0)]
    for layer, name, axis in parts:
        variable = getattr(layer, name)
        if isinstance(variable, sx.Param):
            variable.value = wide(variable.value, axis)
    say(model, {"vocab_size": model.embed.embedding.shape[0]})
    return model


def lora(model: Any, number: int) -> Any:
    model = merge(model, number)
    path, _ = linears(model, number)[-1]
    chosen = sx.select(model).at_instances_of(nn.Linear).where(lambda where, _: where == path)
    model = sx.surgery.lora(chosen, rank=1, rngs=sx.Rngs(number))
    for path, variable in sx.iter_variables(model, sx.Param):
        if path[-1] in ("a", "b"):
            variable.value = values_changed(variable, number)
    return model


def merge(model: Any, number: int) -> Any:
    has_adapters = any("LoRA" in type(module).__name__ for _, module in sx.iter_modules(model))
    return sx.surgery.merge_lora(model) if has_adapters else model


def cast(model: Any, number: int) -> Any:
    dtype = [jnp.bfloat16, jnp.float16, jnp.float32][number % 3]
    variables = [variable for _, variable in sx.iter_variables(model, sx.Param)]
    for variable in variables if number % 2 else variables[number % 7 : number % 7 + 1]:
        variable.value = variable.value.astype(dtype)
    return model


def set_attributes(model: Any, number: int) -> Any:
    options: list[tuple[str, str, Any]] = [
        ("epsilon", "norms.epsilon", 0.1),
        ("activation", "activation", "relu"),
        ("softcap", "attention.softcap", 2.0),
        ("scale", "attention.scale", 0.3),
        ("window", "attention.window", 2),
        ("top_k", "experts.top_k", 1),
        ("normalise", "experts.normalise", False),
    ]
    name, path, value = options[number % len(options)]
    if any(hasattr(module, name) for _, module in sx.iter_modules(model)):
        model.set_attributes(**{name: value})
        say(model, {path: value})
    return model


EDITS: tuple[Callable[[Any, int], Any], ...] = (
    freeze,
    tie_or_untie,
    remove_layer,
    remove_part,
    repeat_layer,
    share_layer,
    replace_linear,
    draw_values,
    extend,
    lora,
    merge,
    cast,
    set_attributes,
)
steps = st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 41)), min_size=1, max_size=3)


stacked_steps = st.lists(
    st.tuples(
        st.sampled_from((freeze, tie_or_untie, extend, set_attributes, cast)),
        st.integers(0, 20).map(lambda number: 2 * number + 1),  # casts of all
    ),
    min_size=1,
    max_size=2,
)
families = st.sampled_from(sorted(FAMILIES))


def edited(family: str, edits: Any, **options: Any) -> Any:
    """A model after some edits."""
    model = load(folder_of(family), **options)
    for edit, number in edits:
        model = edit(model, number)
    return model


def is_saved(model: Any, folder: Path) -> bool:
    """Whether a model is saved; if not, the error names what it is, and no file is there."""
    text = ""
    try:
        save_pretrained(model, folder)
    except PretrainedError as error:
        text = str(error)
    assert folder.exists() == (not text)
    assert not text or any(sign in text for sign in (" .", "config", "layers")), text
    return not text


@settings(max_examples=25)
@given(family=families, edits=steps)
@example(family="deepseek_v2", edits=[(set_attributes, 2)])  # a soft cap that no config has
@example(family="deepseek_v3", edits=[(set_attributes, 5)])  # fewer experts than groups
@example(family="clip_text_model", edits=[(set_attributes, 2)])  # a pooling of no other family
def test_edits_are_refused_or_read_back(family: str, edits: Any) -> None:
    model = edited(family, edits)
    with tempfile.TemporaryDirectory() as name:
        if is_saved(model, Path(name, "saved")):
            again = load(Path(name, "saved"))
            np.testing.assert_array_equal(again(inputs_of(family)), model(inputs_of(family)))


@settings(max_examples=10)
@given(family=families, edits=stacked_steps)
def test_edits_of_stacks_are_those_of_layers(family: str, edits: Any) -> None:
    stacked, model = edited(family, edits, scan_layers=True), edited(family, edits)
    with tempfile.TemporaryDirectory() as name:
        written = [is_saved(model, Path(name, "layers")), is_saved(stacked, Path(name, "stack"))]
        assert written[0] == written[1]
        if written[0]:
            again = load(Path(name, "stack"))
            np.testing.assert_array_equal(again(inputs_of(family)), model(inputs_of(family)))


@needs("torch", "transformers")
@settings(max_examples=10)
@given(family=families, edits=steps)
def test_edits_have_the_logits_of_transformers(family: str, edits: Any) -> None:
    import torch
    import transformers

    model = edited(family, edits)
    with tempfile.TemporaryDirectory() as name:
        if not is_saved(model, Path(name, "saved")):
            return
        (architecture,) = json.loads(Path(name, "saved", "config.json").read_text())[
            "architectures"
        ]
        read = getattr(transformers, architecture).from_pretrained
        peer = read(Path(name, "saved"), dtype="float32").eval()
    inputs = inputs_of(family)
    if family in IMAGES:
        with torch.no_grad():
            expected = peer(torch.from_numpy(np.moveaxis(inputs, -1, 1)))[0].numpy()
    else:
        expected = peers.logits(peer, inputs, np.ones_like(inputs, bool))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(model(inputs) / scale, expected / scale, rtol=0, atol=2e-5)


@settings(max_examples=5)
@given(family=families)
def test_recorded_activations_ignore_scan(family: str) -> None:
    def kinds(model: Any) -> Any:
        return model.at_instances_of((nn.Linear, nn.LayerNorm, nn.RMSNorm))

    def recorded(scan_layers: bool) -> dict[Any, Any]:
        model = load(folder_of(family), scan_layers=scan_layers)
        return sx.surgery.record(model, kinds)(inputs_of(family))[1]

    unrolled, scanned = recorded(False), recorded(True)
    assert list(scanned) == list(unrolled)
    for path, activation in unrolled.items():
        np.testing.assert_allclose(scanned[path], activation, rtol=1e-4, atol=1e-4)


def test_shorter_backbone_names_no_stages(tmp_path: Path) -> None:
    (content,) = (content for content, _ in MODELS.values() if content["model_type"] == "dinov2")
    small = tiny_config(content, layers=12)
    stages = {name: content[name] for name in ("out_features", "out_indices", "stage_names")}
    (tmp_path / "read").mkdir()
    model = initialised(tmp_path / "read", {**small, **stages})
    save_pretrained(model, tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["out_indices"] == [12]
    del model.layers[3]
    save_pretrained(model, tmp_path / "shorter", with_layers(model.config, range(11)))
    written = json.loads((tmp_path / "shorter" / "config.json").read_text())
    assert written["num_hidden_layers"] == 11 and not written.keys() & stages.keys()
    np.testing.assert_array_equal(load(tmp_path / "shorter")(PIXELS), model(PIXELS))
