# SPDX-License-Identifier: Apache-2.0
"""Models built of a config, without a file: any family writes them, and transformers reads them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardax as sx
from shardax.models import from_pretrained, save_pretrained
from tests.models import peers
from tests.models import test_dual_encoders as dual_encoders
from tests.models import test_encoder_decoders as encoder_decoders
from tests.models.published import initialised, tiny_config
from tests.models.test_saved_models import PUBLISHED, assert_equal
from tests.needs import needs
from tests.values import with_values


class Case(NamedTuple):
    """A model of ``transformers``: the names of its classes, and what is not the default."""

    config: str
    model: str
    options: dict[str, Any]


_IMAGES = peers.IMAGES
_DINO = {name: value for name, value in _IMAGES.items() if name != "intermediate_size"}
_STAGES = {"hidden_sizes": [8, 16], "depths": [2, 1], "num_stages": 2, "num_labels": 5}
CASES = {name: Case(*case) for name, case in peers.CASES.items()}
CASES |= {
    "vit": Case("ViTConfig", "ViTForImageClassification", {**_IMAGES, "num_labels": 4}),
    "vit-bare": Case("ViTConfig", "ViTModel", {**_IMAGES, "qkv_bias": False}),
    "dinov2": Case("Dinov2Config", "Dinov2ForImageClassification", {**_DINO, "num_labels": 4}),
    "dinov2-bare": Case("Dinov2Config", "Dinov2Model", {**_DINO, "mlp_ratio": 2}),
    "convnext": Case("ConvNextConfig", "ConvNextForImageClassification", _STAGES),
    "convnext-bare": Case("ConvNextConfig", "ConvNextModel", _STAGES),
    "convnextv2": Case("ConvNextV2Config", "ConvNextV2ForImageClassification", _STAGES),
}
CASES |= {
    name: Case(f"{title}Config", model, options)
    for name, (title, model, options) in dual_encoders.TOWERS.items()
}
CASES |= {
    name: Case(f"{title}Config", f"{title}Model", options)
    for name, (title, options) in dual_encoders.PAIRS.items()
}
CASES |= {
    name: Case(f"{title}Config", f"{title}ForConditionalGeneration", options)
    for name, (title, options) in encoder_decoders.CASES.items()
}


def without_source(config: Any) -> Any:
    """Returns a config as one that was never read, with its parts."""
    parts = {
        field.name: without_source(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if hasattr(getattr(config, field.name), "source")
    }
    return dataclasses.replace(config, source=None, **parts)


def content_of(case: Case) -> dict[str, Any]:
    """Returns the config.json of a case."""
    import transformers

    config = getattr(transformers, case.config)(**case.options, architectures=[case.model])
    return json.loads(config.to_json_string(use_diff=False))


def new_model(folder: Path, content: dict[str, Any]) -> Any:
    """Builds a model of a config alone, with drawn parameters."""
    read = initialised(folder, content)
    return with_values(type(read)(without_source(read.config), rngs=sx.Rngs(0)))


def peer_of(folder: Path) -> Any:
    """Loads a model into ``transformers``, by the class that its config.json names."""
    import transformers

    content = json.loads((folder / "config.json").read_text())
    (name,) = content["architectures"]
    peer, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return peer.eval()


def outputs(model: Any) -> list[np.ndarray]:
    """Computes what a model of this library returns."""
    if isinstance(model, sx.models.EncoderDecoder):
        features = model.config.encoder.features is not None
        inputs = encoder_decoders.FEATURES if features else encoder_decoders.INPUTS
        mask = None if features else encoder_decoders.INPUT_MASK
        tokens = (encoder_decoders.TOKENS, mask, encoder_decoders.MASK)
        logits = encoder_decoders.logits_of(model, inputs, *tokens)
        return [np.asarray(logits)[encoder_decoders.MASK]]

    if isinstance(model, sx.models.DualEncoder):
        image: Any = model.config.image.image
        pixels = pixels_of(image.size)
        tokens, mask = dual_encoders.TOKENS, dual_encoders.MASK
        return [np.asarray(x) for x in dual_encoders.compare(model, tokens, pixels, mask)]

    call = sx.jit(lambda model, *inputs, **options: model(*inputs, **options))
    if isinstance(model, sx.models.ConvNeXt):
        return [np.asarray(call(model, pixels_of(16)))]
    if model.config.image is not None:
        return [np.asarray(call(model, pixels_of(model.config.image.size)))]

    tokens, mask = dual_encoders.TOKENS, dual_encoders.MASK  # with ends of texts
    result = np.asarray(call(model, tokens, mask=mask))
    # Of results that are one vector the first token of the second row is padding.
    return [result[mask if result.ndim == 3 else np.array([True, False])]]


def pixels_of(side: int) -> np.ndarray:
    return dual_encoders.PIXELS[:, :side, :side]


def peer_outputs(peer: Any) -> list[np.ndarray]:
    """Computes what the model of ``transformers`` returns, as ``outputs`` does."""
    import torch

    if peer.config.is_encoder_decoder:
        return [encoder_decoders.peer_logits(peer)[encoder_decoders.MASK]]
    if hasattr(peer.config, "vision_config"):
        side = peer.config.vision_config.image_size
        return dual_encoders.peer_outputs(peer, pixels_of(side))
    if hasattr(peer.config, "num_channels"):
        pixels = pixels_of(getattr(peer.config, "image_size", 16))
        if peer.config.model_type.startswith("convnext"):
            pixels = pixels_of(16)
        with torch.no_grad():
            result = peer(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))[0].numpy()
        is_map = result.ndim == 4
        return [result.transpose(0, 2, 3, 1) if is_map else result]

    tokens, mask = dual_encoders.TOKENS, dual_encoders.MASK
    result = peers.logits(peer, tokens, mask)
    return [result[mask if result.ndim == 3 else np.array([True, False])]]


@needs("torch", "transformers")
@pytest.mark.parametrize("name", CASES)
def test_new_model_of_any_family_has_the_logits_of_transformers(name: str, tmp_path: Path):
    model = new_model(tmp_path, content_of(CASES[name]))
    save_pretrained(model, tmp_path / "saved")

    again = from_pretrained(tmp_path / "saved")
    assert_equal(again, model)
    model.eval()
    expected = outputs(model)
    for result, value in zip(outputs(again), expected, strict=True):
        np.testing.assert_array_equal(result, value)

    for result, value in zip(peer_outputs(peer_of(tmp_path / "saved")), expected, strict=True):
        largest = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(result, value, rtol=0, atol=1e-4 * largest)


SMALL_PAIRS = {kind: dual_encoders.content_of(kind) for kind in ("clip", "siglip")}
SMALL = {kind: tiny_config(content, layers=4) for kind, content in PUBLISHED.items()}
SMALL |= SMALL_PAIRS | encoder_decoders.SMALL


@pytest.mark.parametrize("kind", SMALL)
def test_new_model_of_any_family_reads_back(kind: str, tmp_path: Path):
    model = new_model(tmp_path, SMALL[kind])
    save_pretrained(model, tmp_path / "saved")
    assert_equal(from_pretrained(tmp_path / "saved"), model)


def test_new_model_has_no_tokens_but_its_own(tmp_path: Path):
    model = new_model(tmp_path, SMALL["llama"])
    model.generation_config = sx.models.GenerationConfig(stop=(5,))
    save_pretrained(model, tmp_path / "saved")
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [content[name] for name in names] == [None] * 3
    said = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert said == {"eos_token_id": 5}
