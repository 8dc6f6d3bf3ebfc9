# SPDX-License-Identifier: Apache-2.0
"""CLIP and SigLIP: what encoders of texts and images return, pool and save."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as numpy_files

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, PretrainedError
from shardax.models import (
    AttentionConfig,
    DualEncoderConfig,
    ImageConfig,
    MLPConfig,
    PoolConfig,
    PositionsConfig,
    Transformer,
    TransformerConfig,
    from_pretrained,
    save_pretrained,
)
from tests.advice import run_advice
from tests.configs import with_fields, with_layers
from tests.models import peers
from tests.models.test_edit_laws import EDITS, is_saved, say_parts
from tests.needs import needs
from tests.values import with_values

END = 63
TEXT = {**peers.SIZES, "eos_token_id": END}
IMAGE = {**peers.IMAGES, "num_attention_heads": 8}
PIXELS = np.random.default_rng(0).normal(size=(2, 18, 18, 3)).astype(np.float32)
TOKENS, MASK = peers.batch()
TOKENS = TOKENS % END
TOKENS[:, [8, 10]] = END


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a folder: dtype, shape and bytes."""
    from safetensors.numpy import load_file

    values = load_file(folder / "model.safetensors")
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in values.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_close(result: Any, expected: Any) -> None:
    """Compares relative to the largest number."""
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(result / largest, expected / largest, rtol=0, atol=2e-5)


# --- towers alone ---------------------------------------------------------------------------------


TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip text": ("CLIPText", "CLIPTextModel", TEXT),
    "clip text, old end": ("CLIPText", "CLIPTextModel", {**TEXT, "eos_token_id": 2}),
    "clip text, projected": (
        "CLIPText",
        "CLIPTextModelWithProjection",
        {**TEXT, "projection_dim": 12, "hidden_act": "gelu"},
    ),
    "clip images": ("CLIPVision", "CLIPVisionModel", IMAGE),
    "clip images, projected": (
        "CLIPVision",
        "CLIPVisionModelWithProjection",
        {**IMAGE, "projection_dim": 12, "image_size": 18},
    ),
    "siglip text": ("SiglipText", "SiglipTextModel", TEXT),
    "siglip text, narrow": ("SiglipText", "SiglipTextModel", {**TEXT, "projection_size": 12}),
    "siglip images": ("SiglipVision", "SiglipVisionModel", {**IMAGE, "image_size": 18}),
    "siglip images, bare": (
        "SiglipVision",
        "SiglipVisionModel",
        {**IMAGE, "vision_use_head": False},
    ),
}


def inputs_of(name: str, options: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The input of a tower, and those of its peer."""
    import torch

    if "images" in name:
        pixels = PIXELS[:, : options["image_size"], : options["image_size"]]
        return pixels, None, {"pixel_values": torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())}
    positions = torch.from_numpy(np.maximum(np.cumsum(MASK, 1) - 1, 0))
    mask = torch.from_numpy(MASK.astype(int))
    theirs = {"input_ids": torch.from_numpy(TOKENS), "attention_mask": mask}
    return TOKENS, MASK, {**theirs, "position_ids": positions}


def states_and_pooled(model: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """What a model returns, and what it is pooled to, if it has no head."""
    if mask is None:
        states = model(inputs)
        return states, (model.pool(states) if model.config.head is None else None)
    states = model(inputs, mask=mask)
    return states, (model.pool(states, inputs, mask) if model.config.head is None else None)


@needs("torch", "transformers")
@pytest.mark.parametrize("name", TOWERS)
def test_tower_equals_that_of_transformers(name: str, tmp_path: Path):
    import torch

    config, kind, options = TOWERS[name]
    peer = peers.make_model(tmp_path / "peer", f"{config}Config", kind, options)
    inputs, mask, theirs = inputs_of(name, options)
    with torch.no_grad():
        expected = peer(**theirs)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    number = list(TOWERS).index(name)
    for scanned in (False, True):
        where = mesh if number // 2 % 2 else None
        model = from_pretrained(tmp_path / "peer", mesh=where, scan_layers=scanned)
        if scanned == number % 2:  # the other form is written only
            states, pooled = sx.jit(states_and_pooled)(model, inputs, mask)
            real = MASK if mask is not None and states.ndim == 3 else np.s_[:]
            assert_close(np.asarray(states)[real], expected[0].numpy()[real])
            if pooled is not None and expected.get("pooler_output") is not None:
                assert_close(pooled, expected.pooler_output.numpy())
        copy = tmp_path / f"copy {scanned}"
        save_pretrained(model, copy)
        assert tensors(copy) == tensors(tmp_path / "peer")
        assert config_of(copy) == config_of(tmp_path / "peer")
    again = type(peer).from_pretrained(copy).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**theirs)[0], expected[0], rtol=0, atol=0)


def small(**fields: Any) -> Any:
    config = TransformerConfig(
        vocab_size=16,
        num_layers=1,
        embed_dim=8,
        head=None,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4, rope=None),
        mlp=MLPConfig(dim=8),
    )
    return with_values(Transformer(dataclasses.replace(config, **fields), rngs=sx.Rngs(0)))


def test_files_with_the_older_prefix_are_read(tmp_path: Path):
    content = {**peers.SIZES, "model_type": "clip_text_model", "architectures": ["CLIPTextModel"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    numpy_files.save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised"):
        model = with_values(from_pretrained(tmp_path, strict=False))
    save_pretrained(model, tmp_path / "saved")
    values = numpy_files.load_file(tmp_path / "saved" / "model.safetensors")
    assert "embeddings.token_embedding.weight" in values
    older = {f"text_model.{name}": value for name, value in values.items()}
    older["text_model.embeddings.position_ids"] = np.arange(64)[None]
    numpy_files.save_file(older, tmp_path / "model.safetensors")
    again = from_pretrained(tmp_path)
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))


# --- pooling --------------------------------------------------------------------------------------


def test_text_is_pooled_at_its_first_end():
    model = small(pool=PoolConfig(kind="end", end_token=3))
    tokens = np.array([[5, 3, 3, 0], [3, 1, 1, 1]])
    hidden = np.asarray(sx.jit(model)(tokens))
    np.testing.assert_array_equal(model.pool(hidden, tokens), hidden[[0, 1], [1, 0]])


def test_text_without_an_end_is_refused():
    model = small(pool=PoolConfig(kind="end", end_token=3))
    tokens = np.array([[5, 3], [1, 1]])
    hidden = sx.jit(model)(tokens)
    with pytest.raises(LayerInputError, match="at its token 3, but one has none") as caught:
        model.pool(hidden, tokens)
    code = "numpy.pad(tokens, ((0, 0), (0, 1)), constant_values=3)"
    ended = run_advice(caught.value, code, {"numpy": np, "tokens": tokens})
    assert model.pool(model(ended), ended).shape == (2, 8)
    compiled = sx.jit(lambda model, hidden, tokens: model.pool(hidden, tokens))
    is_finite = np.isfinite(compiled(model, hidden, tokens)).all(-1)
    assert is_finite.tolist() == [True, False]
    with pytest.raises(LayerInputError, match=r"tokens of shape \(2, 2\)") as caught:
        model.pool(hidden)
    names = {"model": model, "tokens": ended}
    assert run_advice(caught.value, "model.pool(model(tokens), tokens)", names).shape == (2, 8)


def test_images_lose_what_patches_do_not_cover():
    image, positions = ImageConfig(size=18, patch_size=8), PositionsConfig(max_positions=5)
    model = small(vocab_size=0, image=image, positions=positions, causal=False)
    run = sx.jit(model)
    np.testing.assert_array_equal(run(PIXELS), run(PIXELS * (np.arange(18) < 16)[:, None]))
    with pytest.raises(sx.errors.LayerConfigError, match="patch_size to be from 1 up to 18"):
        ImageConfig(size=18, patch_size=19)


# --- pairs ----------------------------------------------------------------------------------------


CLIP = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 12}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("CLIP", CLIP),
    "clip, old end": ("CLIP", {**CLIP, "text_config": {**TEXT, "eos_token_id": 2}}),
    "siglip": ("Siglip", {"text_config": TEXT, "vision_config": {**IMAGE, "image_size": 18}}),
}


def peer_outputs(peer: Any, pixels: np.ndarray) -> list[np.ndarray]:
    """Logits and embeddings of transformers, in the order of ``DualEncoderOutput``."""
    import torch

    positions = torch.from_numpy(np.maximum(np.cumsum(MASK, 1) - 1, 0))
    with torch.no_grad():
        output = peer(
            input_ids=torch.from_numpy(TOKENS),
            attention_mask=torch.from_numpy(MASK.astype(int)),
            position_ids=positions,
            pixel_values=torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()),
        )
    names = ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds")
    return [output[name].numpy() for name in names]


@sx.jit
def compare(model: Any, tokens: Any, images: Any, mask: Any) -> Any:
    return model(tokens, images, mask=mask)


@needs("torch", "transformers")
@pytest.mark.parametrize("name", PAIRS)
def test_pair_equals_that_of_transformers(name: str, tmp_path: Path):
    kind, options = PAIRS[name]
    peer = peers.make_model(tmp_path / "peer", f"{kind}Config", f"{kind}Model", options)
    side = options["vision_config"]["image_size"]
    pixels = np.concatenate([PIXELS, PIXELS[:1] ** 2])[:, :side, :side]
    expected = peer_outputs(peer, pixels)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    number = list(PAIRS).index(name)
    for scanned in (False, True):
        where = mesh if number % 2 else None
        model = from_pretrained(tmp_path / "peer", mesh=where, scan_layers=scanned)
        if scanned == number % 2:
            for result, value in zip(compare(model, TOKENS, pixels, MASK), expected, strict=True):
                assert_close(result, value)
        save_pretrained(model, tmp_path / f"copy {scanned}")
        assert tensors(tmp_path / f"copy {scanned}") == tensors(tmp_path / "peer")
        assert config_of(tmp_path / f"copy {scanned}") == config_of(tmp_path / "peer")
    again = type(peer).from_pretrained(tmp_path / "copy True").eval()
    for result, value in zip(peer_outputs(again, pixels), expected, strict=True):
        np.testing.assert_array_equal(result, value)


SMALL_TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
SMALL_TOWER |= {"num_hidden_layers": 2}
SMALL_TEXT = {**SMALL_TOWER, "vocab_size": 16, "max_position_embeddings": 8, "eos_token_id": 5}
SMALL_IMAGE = {**SMALL_TOWER, "image_size": 4, "patch_size": 2}
SMALL_TOKENS, SMALL_IMAGES = np.arange(6)[None], PIXELS[:, :4, :4]


def content_of(kind: str, **changes: Any) -> dict[str, Any]:
    content = {"model_type": kind, "text_config": SMALL_TEXT, "vision_config": SMALL_IMAGE}
    if kind == "clip":
        content["projection_dim"] = 6
    return {**content, **changes}


def read(folder: Path, content: dict[str, Any]) -> Any:
    """A pair of a config.json, without values, by a folder without tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    numpy_files.save_file({}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all is initialised
        return from_pretrained(folder, strict=False)


def made(folder: Path, content: dict[str, Any]) -> Any:
    return with_values(read(folder, content))


def outputs(model: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in model(SMALL_TOKENS, SMALL_IMAGES)]


@functools.cache
def folder_of(kind: str) -> Path:
    """A folder with a small pair."""
    folder = Path(tempfile.mkdtemp())
    save_pretrained(made(folder, content_of(kind)), folder / "whole")
    return folder / "whole"


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_pair_over_explicit_axes_computes_the_same(kind: str):
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    rules, whole = sx.models.DECODER_RULES, from_pretrained(folder_of(kind))
    tokens = np.concatenate([SMALL_TOKENS, SMALL_TOKENS[:, ::-1]])
    images = np.concatenate([SMALL_IMAGES, SMALL_IMAGES**2])
    expected = compare(whole, tokens, images, None)
    split = sx.shard(whole, mesh, rules)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        inputs = [jax.device_put(values, rows) for values in (tokens, images)]
        result = compare(split, *inputs, None)
    for value, other in zip(result, expected, strict=True):
        assert_close(np.asarray(value), np.asarray(other))
    assert result.logits_per_image.sharding.spec == jax.P("data", None)


# --- edited pairs ---------------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    kind=st.sampled_from(["clip", "siglip"]),
    edits=st.lists(
        st.tuples(st.sampled_from(["text", "image"]), st.sampled_from(EDITS), st.integers(0, 41)),
        min_size=1,
        max_size=3,
    ),
)
def test_edits_of_towers_are_refused_or_read_back(kind: str, edits: Any) -> None:
    model = from_pretrained(folder_of(kind), dtype=jnp.float32)
    for tower, edit, number in edits:
        setattr(model, tower, edit(getattr(model, tower), number))
    say_parts(model, "text", "image")
    with tempfile.TemporaryDirectory() as name:
        if is_saved(model, Path(name, "saved")):
            again = from_pretrained(Path(name, "saved"), dtype=jnp.float32)
            for result, value in zip(outputs(again), outputs(model), strict=True):
                np.testing.assert_array_equal(result, value)


def remove_layers(model: Any) -> None:
    del model.text.layers[0], model.image.layers[1]
    for tower in (model.text, model.image):
        tower.config = with_layers(tower.config, range(len(tower.layers)))
    say_parts(model, "text", "image")


def set_ends(model: Any) -> None:
    text = with_fields(model.config.text, {"pool.end_token": 4})
    model.config = dataclasses.replace(model.config, text=text)
    model.text.config = text


def project(model: Any) -> None:
    for name in ("text_projection", "image_projection"):
        options: dict[str, Any] = {"use_bias": False, "rngs": sx.Rngs(0)}
        setattr(model, name, with_values(sx.nn.Linear(8, 3, **options)))
    model.config = dataclasses.replace(model.config, projection_dim=3)


def forget_source(model: Any) -> None:
    text, image = (
        with_fields(config, {"output.projection_dim": 0})
        for config in (model.config.text, model.config.image)
    )
    model.config = dataclasses.replace(model.config, text=text, image=image, source=None)


@pytest.mark.parametrize("edit", [remove_layers, set_ends, project, forget_source])
def test_edited_pair_reads_back_as_it_is(edit: Callable[[Any], None], tmp_path: Path):
    model = from_pretrained(folder_of("clip"))
    edit(model)
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    for result, value in zip(outputs(again), outputs(model), strict=True):
        np.testing.assert_array_equal(result, value)
    save_pretrained(again, tmp_path / "again")
    assert config_of(tmp_path / "again") == config_of(tmp_path / "saved")


def test_tower_of_another_config_is_refused(tmp_path: Path) -> None:
    model = from_pretrained(folder_of("clip"))
    model.text.config = with_fields(model.text.config, {"pool.kind": "highest"})
    expected = outputs(model)
    with pytest.raises(PretrainedError, match=r"\.text\.config has pool\.kind='highest'") as caught:
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    code = "model.config = dataclasses.replace(model.config, text=model.text.config)"
    run_advice(caught.value, code, {"model": model, "dataclasses": dataclasses})
    save_pretrained(model, tmp_path / "saved")
    for result, value in zip(outputs(from_pretrained(tmp_path / "saved")), expected, strict=True):
        np.testing.assert_array_equal(result, value)


@needs("torch", "transformers")
def test_edited_pair_equals_that_of_transformers(tmp_path: Path):
    import torch
    import transformers

    model = from_pretrained(folder_of("clip"))
    remove_layers(model)
    project(model)
    model.set_attributes(epsilon=0.1, activation="relu")
    fields = {"norms.epsilon": 0.1, "activation": "relu"}
    text, image = (with_fields(tower.config, fields) for tower in (model.text, model.image))
    config = dataclasses.replace(model.config, text=text, image=image)
    save_pretrained(model, tmp_path / "saved", config)
    peer = transformers.CLIPModel.from_pretrained(tmp_path / "saved").eval()
    images = torch.from_numpy(SMALL_IMAGES.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        expected = peer(input_ids=torch.from_numpy(SMALL_TOKENS), pixel_values=images)
    assert_close(outputs(model)[0], expected.logits_per_image.numpy())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one projection": (
        lambda model: setattr(model, "image_projection", sx.nn.Linear(8, 3, rngs=sx.Rngs(0))),
        r"\.image_projection\.kernel has the shape \(8, 3\), but \(8, 6\) in its config",
    ),
    "no projection": (
        lambda model: setattr(model, "text_projection", None),
        r"\.text_projection is None, not a Linear",
    ),
    "a bias": (
        lambda model: setattr(model, "logit_bias", sx.Param(jnp.ones(()))),
        r"\.logit_bias is a Param, but None",
    ),
    "no tower": (
        lambda model: setattr(model, "text", sx.nn.MLP(2, 2, rngs=None)),
        r"\.text is a MLP, not a Transformer",
    ),
    "one activation": (
        lambda model: setattr(model.image.layers[0].mlp, "activation", "relu"),
        r"\.image\.layers\[0\]\.mlp\.activation is 'relu', but the function quick_gelu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_save_pretrained_refuses_what_a_pair_would_lose(name: str, tmp_path: Path):
    edit, says = REFUSED[name]
    model = from_pretrained(folder_of("clip"))
    edit(model)
    with pytest.raises(PretrainedError, match=says):
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- configs and tensors of pairs -----------------------------------------------------------------


def test_published_pairs_are_read_as_they_are(tmp_path: Path):
    generation = {"add_cross_attention": False, "architectures": None, "num_beam_groups": 1}
    generation |= {"encoder_no_repeat_ngram_size": 0, "pruned_heads": {}, "top_k": 50}
    older = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    older |= {"num_hidden_layers": 2, "projection_dim": 768}
    text = {**generation, **older, "bos_token_id": 0, "dropout": 0.0, "eos_token_id": 2}
    large = {
        "architectures": ["CLIPModel"],
        "initializer_factor": 1.0,
        "logit_scale_init_value": 2.6592,
        "model_type": "clip",
        "projection_dim": 768,
        "text_config": {**text, "model_type": "clip_text_model", "vocab_size": 49408},
        "text_config_dict": older,
        "torch_dtype": "float32",
        "vision_config": {**generation, **older, "model_type": "clip_vision_model"},
        "vision_config_dict": {**older, "hidden_size": 1024, "patch_size": 14},
    }
    vision = large["vision_config_dict"] | {"num_attention_heads": 16, "intermediate_size": 4096}
    config = read(tmp_path / "large", {**large, "vision_config_dict": vision}).config
    assert (config.text.pool.end_token, config.text.embed_dim, config.projection_dim) == (
        49407,
        768,
        768,
    )
    assert (config.image.image.patch_size, config.image.positions.max_positions) == (14, 257)
    base = {**large, "projection_dim": 512, "text_config_dict": None, "vision_config_dict": None}
    assert read(tmp_path / "base", base).config.text.pool.kind == "highest"
    two = {"num_hidden_layers": 2}
    siglip = {
        "architectures": ["SiglipModel"],
        "initializer_factor": 1.0,
        "model_type": "siglip",
        "text_config": {"model_type": "siglip_text_model", **two},
        "torch_dtype": "float32",
        "transformers_version": "4.37.0.dev0",
        "vision_config": {"model_type": "siglip_vision_model", **two},
    }
    config = read(tmp_path / "siglip", siglip).config
    assert (config.text.vocab_size, config.text.positions.max_positions) == (32000, 64)
    assert config.image.positions.max_positions == 196
    assert (config.logit_bias, config.projection_dim) == (True, 0)


@needs("transformers")
def test_older_table_goes_before_as_in_transformers(tmp_path: Path):
    import transformers

    older = {**SMALL_TEXT, "num_hidden_layers": 1, "hidden_act": "gelu"}
    del older["eos_token_id"]
    content = content_of("clip", text_config_dict=older)
    theirs = transformers.CLIPConfig(**json.loads(json.dumps(content))).to_dict()
    plain = {**content_of("clip"), "text_config": theirs["text_config"]}
    ours = made(tmp_path / "older", content).config
    expected = made(tmp_path / "plain", json.loads(json.dumps(plain))).config
    texts = [dataclasses.replace(config.text, source=None) for config in (ours, expected)]
    assert texts[0] == texts[1]
    assert (ours.text.pool.end_token, ours.text.num_layers) == (49407, 1)
    model = made(tmp_path / "older", content)
    del model.image.layers[0]
    image = with_layers(model.config.image, range(len(model.image.layers)))
    edited = dataclasses.replace(model.config, image=image)
    save_pretrained(model, tmp_path / "edited", edited)
    again = from_pretrained(tmp_path / "edited")
    assert config_of(tmp_path / "edited")["text_config_dict"] == older
    for name, inputs in (("text", SMALL_TOKENS), ("image", SMALL_IMAGES)):
        result = getattr(again, name)(inputs)
        np.testing.assert_array_equal(result, getattr(model, name)(inputs))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("clip", {"text_config": [1]}, "text_config=[1] is not a table"),
        ("clip", {"text_config": {**SMALL_TEXT, "clip_qkv": 1}}, "text_config describes"),
        ("clip", {"text_config": {**SMALL_TEXT, "clip_qkv": 1}}, "clip_qkv=1 is unknown"),
        ("clip", {"vision_config": {**SMALL_IMAGE, "hidden_size": 0}}, "hidden_size=0 is not"),
        ("clip", {"vision_config": {"model_type": "siglip_vision_model"}}, "only 'clip_vision_m"),
        ("clip", {"projection_dim": 0}, "projection_dim=0 is not positive"),
        ("clip", {"projection_dim": None}, "projection_dim=None is not an integer"),
        ("clip", {"note": 1}, "note=1 is unknown"),
        ("clip", {"architectures": ["CLIPForImageClassification"]}, "only one of CLIPModel"),
        ("clip", {"quantization_config": {"bits": 4}}, "is not supported, only None"),
        ("siglip", {"text_config": {**SMALL_TEXT, "projection_size": 4}}, "pool to 4 and 8"),
        ("siglip", {"vision_config": {**SMALL_IMAGE, "num_hidden_layers": 10**9}}, "its files"),
    ],
)
def test_hostile_pair_is_refused_by_field(kind: str, changes: Any, says: str, tmp_path: Path):
    with pytest.raises(PretrainedError) as caught:
        read(tmp_path, content_of(kind, **changes))
    assert says in str(caught.value)


def test_unknown_fields_of_towers_may_be_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardax.models.families import registry

    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    content = content_of("clip", text_config={**SMALL_TEXT, "note": 1})
    with pytest.raises(PretrainedError, match="note=1 is unknown") as caught:
        made(tmp_path, content)
    code = "sx.models.register('clip_text_model', like='clip_text_model', harmless=['note'])"
    run_advice(caught.value, code, {"sx": sx})
    assert made(tmp_path, content).config.text.embed_dim == 8
    sx.models.register("my_clip", like="clip", harmless=["mine"])
    mine = content_of("clip", model_type="my_clip", mine=1)
    assert made(tmp_path, mine).config.projection_dim == 6


def test_unfit_tensors_of_a_pair_are_named(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(folder_of("siglip"), folder)
    values = numpy_files.load_file(folder / "model.safetensors")
    del values["text_model.final_layer_norm.bias"], values["logit_bias"]
    numpy_files.save_file({**values, "extra": np.ones(2)}, folder / "model.safetensors")
    with pytest.raises(PretrainedError) as caught:
        from_pretrained(folder)
    for part in ("missing are ", "logit_bias", "text_model.final_layer_norm.bias", "for extra"):
        assert part in str(caught.value)


def test_pair_of_unlike_encoders_is_refused():
    text = TransformerConfig(num_layers=1, head=None, pool=PoolConfig(kind="last"))
    image = dataclasses.replace(
        text, image=ImageConfig(size=8, patch_size=4), positions=PositionsConfig(max_positions=5)
    )
    with pytest.raises(LayerConfigError, match="image to be the config of an encoder of images"):
        DualEncoderConfig(text, text)
    with pytest.raises(LayerConfigError, match="texts, without a head, but it has head='tokens'"):
        DualEncoderConfig(dataclasses.replace(text, head="tokens"), image)
    wide = dataclasses.replace(image, embed_dim=32)
    with pytest.raises(LayerConfigError, match="pool to 64 and 32") as caught:
        DualEncoderConfig(text, wide)
    assert "projection_dim=64" in str(caught.value)
    assert DualEncoderConfig(text, wide, projection_dim=64).num_layers == 2
