# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: logits, generation with inputs, caches, and what is saved."""

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
from safetensors.numpy import load_file, save_file

import shardax as sx
from shardax import nn
from shardax.errors import GenerationError, LayerConfigError, LayerInputError, PretrainedError
from shardax.models import (
    AttentionConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    TransformerConfig,
    from_pretrained,
    generate,
    save_pretrained,
)
from tests.advice import run_advice
from tests.configs import field_of, with_fields
from tests.models import peers
from tests.models.test_edit_laws import EDITS, is_saved, say_parts
from tests.needs import needs
from tests.values import with_values

T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
# By name: the type, and what is not the default.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {**T5, "num_decoder_layers": 3, "relative_attention_num_buckets": 8}),
    "t5, 1.1": (
        "T5",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        | {"relative_attention_max_distance": 9, "relative_attention_num_buckets": 8},
    ),
}
BART = {"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 8, "max_position_embeddings": 20}
CASES |= {
    "bart": ("Bart", {**BART, "scale_embedding": True}),
    "bart, plain": ("Bart", {**BART, "activation_function": "relu", "decoder_start_token_id": 0}),
}
WHISPER = {name: value for name, value in BART.items() if name != "max_position_embeddings"}
WHISPER |= {"max_source_positions": 6, "max_target_positions": 20, "num_mel_bins": 5}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
CASES |= {"whisper": ("Whisper", WHISPER)}
FEATURES = np.random.default_rng(0).normal(size=(2, 12, 5)).astype(np.float32)
INPUTS = np.random.default_rng(0).integers(3, 64, (2, 12))
INPUT_MASK = np.arange(12) < np.array([[12], [7]])
TOKENS = np.random.default_rng(1).integers(3, 64, (2, 10))
MASK = np.arange(10) < np.array([[10], [6]])


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a folder: dtype, shape and bytes."""
    values = load_file(folder / "model.safetensors")
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in values.items()}


def content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_close(result: Any, expected: Any) -> None:
    """Compares relative to the largest number."""
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(result / largest, expected / largest, rtol=0, atol=2e-5)


@sx.jit
def logits_of(model: Any, inputs: Any, tokens: Any, input_mask: Any, mask: Any) -> jax.Array:
    return model(inputs, tokens, input_mask=input_mask, mask=mask)


# --- as transformers ------------------------------------------------------------------------------


def peer_logits(peer: Any) -> np.ndarray:
    import torch

    tokens = {
        "decoder_input_ids": torch.from_numpy(TOKENS),
        "decoder_attention_mask": torch.from_numpy(MASK.astype(int)),
    }
    with torch.no_grad():
        return peer(**peer_inputs(peer), **tokens).logits.numpy()


def peer_inputs(peer: Any) -> dict[str, Any]:
    import torch

    if peer.config.model_type == "whisper":
        return {"input_features": torch.from_numpy(FEATURES.transpose(0, 2, 1).copy())}
    mask = torch.from_numpy(INPUT_MASK.astype(int))
    return {"input_ids": torch.from_numpy(INPUTS), "attention_mask": mask}


def peer_texts(peer: Any) -> np.ndarray:
    """Greedy texts of transformers."""
    import torch
    import transformers

    with torch.no_grad():
        texts = transformers.GenerationMixin.generate(  # that of Whisper cuts texts by times
            peer,
            **peer_inputs(peer),
            generation_config=type(peer.generation_config)(
                decoder_start_token_id=peer.config.decoder_start_token_id,
                max_new_tokens=10,  # of which BART forces the last
                eos_token_id=None,
            ),
            use_cache=False,  # with one, it must have as many layers as the encoder
        )
    return texts.numpy()


@needs("torch", "transformers")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_texts_equal_those_of_transformers(name: str, tmp_path: Path):
    import torch

    kind, options = CASES[name]
    head = f"{kind}ForConditionalGeneration"
    peer = peers.make_model(tmp_path / "peer", f"{kind}Config", head, options)
    if kind == "Bart":
        peer.final_logits_bias.normal_(0, 0.2)
        peer.save_pretrained(tmp_path / "peer")
    if options.get("tie_word_embeddings") is False:
        peer.lm_head.weight = torch.nn.Parameter(peer.lm_head.weight.detach().flip(0))
        shutil.rmtree(tmp_path / "peer")
        peer.save_pretrained(tmp_path / "peer")
    expected, texts = peer_logits(peer), peer_texts(peer)
    inputs, input_mask = (FEATURES, None) if kind == "Whisper" else (INPUTS, INPUT_MASK)
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    rows = [list(row[real]) for row, real in zip(INPUTS, INPUT_MASK, strict=True)]
    rows = FEATURES if kind == "Whisper" else rows
    number = list(CASES).index(name)
    for scanned in (False, True):
        where = mesh if number % 2 or kind == "Whisper" else None
        model = from_pretrained(tmp_path / "peer", mesh=where, scan_layers=scanned)
        model.generation_config = None  # texts have their full length
        if scanned == number % 2:  # the other form is written only
            result = logits_of(model, inputs, TOKENS, input_mask, MASK)
            assert_close(np.asarray(result)[MASK], expected[MASK])
            results = generate(model, inputs=rows, max_new_tokens=9, temperature=0)
            np.testing.assert_array_equal(np.stack(results), texts[:, :-1])
        save_pretrained(model, tmp_path / f"copy {scanned}")
        assert tensors(tmp_path / f"copy {scanned}") == tensors(tmp_path / "peer")
    again = type(peer).from_pretrained(tmp_path / "copy True").eval()
    np.testing.assert_array_equal(peer_logits(again), expected)


# --- small models ---------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    | {"model_type": "t5", "decoder_start_token_id": 0, "relative_attention_num_buckets": 4}
    | {"relative_attention_max_distance": 5}
}
SMALL |= {
    "bart": {"vocab_size": 16, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2}
    | {"encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "encoder_attention_heads": 2}
    | {"decoder_attention_heads": 2, "max_position_embeddings": 10, "model_type": "bart"}
}
SMALL |= {
    "whisper": {name: value for name, value in SMALL["bart"].items() if "positions" not in name}
    | {"model_type": "whisper", "max_source_positions": 3, "max_target_positions": 10}
    | {"num_mel_bins": 4, "decoder_start_token_id": 0}
}
del SMALL["whisper"]["max_position_embeddings"]
SMALL_FEATURES = FEATURES[:1, :6, :4]
SMALL_INPUTS, SMALL_TOKENS = np.arange(1, 7)[None], np.array([[0, 5, 9, 2]])


def read(folder: Path, content: dict[str, Any]) -> Any:
    """A model of a config.json, without values, by a folder without tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file({}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all is initialised
        return from_pretrained(folder, strict=False)


@functools.cache
def folder_of(kind: str) -> Path:
    """A folder with a small model."""
    folder = Path(tempfile.mkdtemp())
    save_pretrained(with_values(read(folder, SMALL[kind])), folder / "whole")
    return folder / "whole"


def load(kind: str, **options: Any) -> Any:
    return from_pretrained(folder_of(kind), dtype=jnp.float32, **options)


def outputs(model: Any) -> np.ndarray:
    inputs = SMALL_INPUTS if model.config.encoder.vocab_size else SMALL_FEATURES
    return np.asarray(model(inputs, SMALL_TOKENS))


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
def test_batch_has_the_texts_of_its_rows(kind: str):
    model = load(kind, scan_layers=kind != "bart")
    beginnings = [[0], [0, 3, 7]]
    inputs = FEATURES[:, :6, :4] if kind == "whisper" else [[4, 5, 6, 7, 8], [9]]
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0}
    together = generate(model, beginnings, inputs=inputs, **options)
    for beginning, row, result in zip(beginnings, inputs, together, strict=True):
        # Twice, so that the programs of two rows serve.
        for alone in generate(model, [beginning] * 2, inputs=[row] * 2, **options):
            np.testing.assert_array_equal(result, alone)
    stream = generate(model, beginnings, inputs=inputs, stream=True, **options)
    np.testing.assert_array_equal(np.stack(list(stream), 1), [text[-5:] for text in together])


def test_keys_of_the_context_are_computed_once():
    model, names = load("t5", scan_layers=True), []
    cache = model.make_cache(1, 4, input_length=8)

    def keys(model: Any) -> Any:
        return model.at_instances_of(nn.MultiHeadAttention).at(lambda attention: attention.k)

    @sx.jit
    def call(model: Any, cache: Any, tokens: Any, inputs: Any = None) -> jax.Array:
        options = {} if inputs is None else {"context": model.encode(inputs)}
        result, activations = sx.surgery.record(model.decoder, keys)(tokens, cache=cache, **options)
        names.append({path[2] for path in activations})
        return result

    first = call(model, cache, SMALL_TOKENS[:, :3], SMALL_INPUTS)
    second = call(model, cache, SMALL_TOKENS[:, 3:])
    assert names == [{"attn", "cross_attn"}, {"attn"}]
    expected = logits_of(model, SMALL_INPUTS, SMALL_TOKENS, None, None)
    assert_close(np.concatenate([first, second], 1), np.asarray(expected))


def test_recorded_activations_ignore_scan():
    def kinds(model: Any) -> Any:
        return model.at_instances_of((nn.MultiHeadAttention, nn.RMSNorm))

    unrolled, scanned = (
        sx.surgery.record(load("t5", scan_layers=scan), kinds)(SMALL_INPUTS, SMALL_TOKENS)[1]
        for scan in (False, True)
    )
    assert list(scanned) == list(unrolled)
    for path, activation in unrolled.items():
        np.testing.assert_allclose(scanned[path], activation, rtol=1e-4, atol=1e-4)


def test_wrong_inputs_of_generation_are_refused():
    model, options = load("t5"), dict[str, Any](max_new_tokens=2)
    decoder = sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))
    for says, call in {
        "EncoderDecoder reads inputs, and was given none": lambda: generate(model, **options),
        "Decoder takes no inputs": lambda: generate(decoder, [[1]], inputs=[[1]], **options),
        "There are 2 prompts, but 1 inputs": lambda: generate(
            model, [[0], [0]], inputs=[[1]], **options
        ),
        "An input is empty; give at least one token.": lambda: generate(
            model, inputs=[[]], **options
        ),
        "The input 0 has the token 16": lambda: generate(model, inputs=[[16]], **options),
        "An input has 11 tokens, but its encoder takes 10": lambda: generate(
            load("bart"), inputs=[[1] * 11], **options
        ),
        "make 11 tokens, but the model has max_positions=10": lambda: generate(
            load("bart"), [[1] * 9], inputs=[[1] * 10], **options
        ),
        "an array of shape (batch, frames, features), but one of shape (1, 2)": lambda: generate(
            load("whisper"), inputs=[[1, 2]], **options
        ),
        "The prompt 0 has the token 16": lambda: generate(model, [[16]], inputs=[[1]], **options),
    }.items():
        with pytest.raises(GenerationError) as caught:
            call()
        assert says in str(caught.value)
    model.config = dataclasses.replace(model.config, start_token=None)
    model.generation_config = None
    with pytest.raises(GenerationError, match="to begin with"):
        generate(model, inputs=[[1]], **options)


# --- attention to a context -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_context_is_written_again_in_its_place(dtype: str):
    attention = with_values(nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0)))
    cache = nn.ContextCache(2, 5, 2, 4, dtype=dtype)
    x, *contexts = (
        np.random.default_rng(n).normal(size=(2, time, 8)).astype(np.float32)
        for n, time in enumerate((3, 5, 4))
    )
    mask = np.array([[True] * 4, [True, True, False, False]])[:, None, None]

    @sx.jit
    def write_and_read(attention: Any, context: Any, mask: Any, cache: Any) -> Any:
        expected = attention(x, context, mask=mask)
        attention(x, context, mask=mask, cache=cache)
        return attention(x, cache=cache), expected

    for context, real in zip(contexts, (None, mask), strict=True):
        found, expected = map(np.asarray, write_and_read(attention, context, real, cache))
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error < (2e-2 if dtype == "int8" else 2e-6)


def test_context_cache_refuses_what_it_cannot_hold():
    attention = with_values(nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0)))
    cache, x = nn.ContextCache(1, 2, 2, 4), jnp.ones((1, 3, 8))
    with pytest.raises(LayerInputError, match="read before a context was written") as caught:
        attention(x, cache=cache)
    assert np.isnan(
        sx.jit(lambda layer, x, cache: layer(x, cache=cache))(attention, x, cache)
    ).all()
    with pytest.raises(LayerInputError, match="2 slots was to take a context of 3 positions"):
        attention(x, x, cache=cache)
    names = {"attention": attention, "x": x, "context": x[:, :2], "cache": cache}
    assert run_advice(caught.value, "attention(x, context, cache=cache)", names).shape == x.shape
    rotary = nn.MultiHeadAttention(8, 2, rope_base=1e4, rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match="attention without positions and order"):
        rotary(x, cache=cache)


def test_context_is_given_where_it_is_read():
    model = load("t5")
    with pytest.raises(LayerInputError, match="reads a context, and was given none"):
        model.decode(SMALL_TOKENS)
    states = model.encode(SMALL_INPUTS)
    with pytest.raises(LayerInputError, match="takes no segment_ids"):
        model.decoder(SMALL_TOKENS, context=states, segment_ids=np.ones_like(SMALL_TOKENS))
    with pytest.raises(LayerInputError, match="given a context or its mask, and reads none"):
        model.encoder(SMALL_INPUTS, context=states)
    with pytest.raises(LayerConfigError, match="cross_attention=True, but make_cache"):
        model.decoder.make_cache(1, 4)


def test_features_have_the_size_of_the_config():
    model = load("whisper")
    with pytest.raises(LayerInputError, match=r"features of shape \(batch, 6, 4\)"):
        model.encode(SMALL_FEATURES[:, :4])
    with pytest.raises(LayerInputError, match="features without a mask"):
        model(SMALL_FEATURES, SMALL_TOKENS, input_mask=np.ones((1, 6), bool))
    for changes, says in (
        ({"embedding.norm": True}, r"embedding\.norm to be False, with features"),
        ({"causal": True}, "features to be None if causal"),
        ({"positions.max_positions": 0}, "features to be None if .* without positions"),
    ):
        with pytest.raises(LayerConfigError, match=says):
            with_fields(model.config.encoder, changes)


def test_positions_of_frames_are_sines_not_trained():
    content = {**SMALL["whisper"], "max_source_positions": 50}
    with tempfile.TemporaryDirectory() as name:
        model = with_values(load("whisper")), read(Path(name), content)
    sines = np.asarray(model[1].encoder.positions.embedding.value)
    angles = np.arange(50)[:, None] * 10_000.0 ** -(np.arange(4) / 3)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    np.testing.assert_allclose(sines, expected, atol=1e-5)
    loss = lambda model: jnp.square(model(SMALL_FEATURES, SMALL_TOKENS)).mean()  # noqa: E731
    gradient = sx.jit(sx.grad(loss))(model[0])
    assert not np.any(gradient.encoder.positions.embedding)
    assert np.any(gradient.encoder.frames.conv1.kernel)


def test_halves_that_do_not_fit_are_refused():
    encoder = TransformerConfig(num_layers=1, causal=False, head=None)
    decoder = TransformerConfig(num_layers=1, attention=AttentionConfig(cross_attention=True))
    for changes, says in (
        ({"encoder": decoder}, "encoder.head to be None"),
        ({"decoder": encoder}, "decoder.causal to be True"),
        ({"decoder": dataclasses.replace(decoder, vocab_size=8)}, "decoder.vocab_size to be 256"),
        ({"start_token": 256}, "start_token=256, but tokens are from 0 to 255"),
    ):
        with pytest.raises(LayerConfigError, match=says):
            EncoderDecoderConfig(**{"encoder": encoder, "decoder": decoder, **changes})
    for fields, says in (
        ({"parallel": True}, r"parallel to be False, with attention\.cross_attention"),
        ({"positions.offset": 2}, "offset to be within max_positions"),
        ({"positions.relative_buckets": 5}, "relative_buckets to be even"),
        ({"positions.relative_buckets": 4, "positions.farthest_distance": 2}, "at least 3"),
    ):
        with pytest.raises(LayerConfigError, match=says):
            with_fields(decoder, fields)


# --- gradients and layouts ------------------------------------------------------------------------


def test_scanned_layers_have_the_same_gradients():
    def loss(model: Any) -> jax.Array:
        return jnp.square(model(SMALL_INPUTS, SMALL_TOKENS)).mean()

    norms = []
    for scanned in (False, True):
        model = load("t5", scan_layers=scanned, remat="full" if scanned else None)
        gradient = sx.jit(sx.grad(loss))(model)
        parts = (gradient.encoder.embed, gradient.encoder.distances, gradient.decoder.distances)
        norms.append([np.abs(part.embedding).sum() for part in parts])
    np.testing.assert_allclose(*norms, rtol=1e-4)


@pytest.mark.parametrize("kind", SMALL)
def test_explicit_axes_change_nothing(kind: str):
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    rules, whole = sx.models.DECODER_RULES, load(kind, scan_layers=kind != "bart")
    first = SMALL_FEATURES if kind == "whisper" else SMALL_INPUTS
    inputs, tokens = (np.concatenate([x, x[:, ::-1]]) for x in (first, SMALL_TOKENS))
    expected = logits_of(whole, inputs, tokens, None, None)
    texts = generate(whole, inputs=inputs, max_new_tokens=3, temperature=0)
    split = sx.shard(whole, mesh, rules)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        arrays = [jax.device_put(values, rows) for values in (inputs, tokens)]
        result = logits_of(split, *arrays, None, None)
        again = generate(split, inputs=inputs, max_new_tokens=3, temperature=0)
    assert_close(np.asarray(result), np.asarray(expected))
    np.testing.assert_array_equal(again, texts)


# --- edited models --------------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    kind=st.sampled_from(sorted(SMALL)),
    edits=st.lists(
        st.tuples(
            st.sampled_from(["encoder", "decoder"]), st.sampled_from(EDITS), st.integers(0, 41)
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_edits_of_halves_are_refused_or_read_back(kind: str, edits: Any) -> None:
    model = load(kind)
    for half, edit, number in edits:
        setattr(model, half, edit(getattr(model, half), number))
    say_parts(model, "encoder", "decoder")
    with tempfile.TemporaryDirectory() as name:
        if is_saved(model, Path(name, "saved")):
            again = from_pretrained(Path(name, "saved"), dtype=jnp.float32)
            np.testing.assert_array_equal(outputs(again), outputs(model))


def say_in_halves(model: Any, fields: dict[str, Any], *names: str) -> None:
    """Gives halves of a model, and the model, the configs that say an edit."""
    for name in names or ("encoder", "decoder"):
        half = getattr(model, name)
        half.config = with_fields(half.config, fields)
    say_parts(model, "encoder", "decoder")


def remove_layers(model: Any) -> None:
    del model.encoder.layers[0]
    say_in_halves(model, {"num_layers": len(model.encoder.layers)}, "encoder")


def untie(model: Any) -> None:
    model.decoder.head = with_values(nn.Linear(8, 16, use_bias=False, rngs=sx.Rngs(0)))
    say_in_halves(model, {"output.tied": False}, "decoder")


def set_units(model: Any) -> None:
    model.set_attributes(epsilon=0.1, activation="silu")
    say_in_halves(model, {"norms.epsilon": 0.1, "activation": "silu"})


def set_start(model: Any) -> None:
    model.config = dataclasses.replace(model.config, start_token=3)


def forget_source(model: Any) -> None:
    halves = {"encoder": model.encoder, "decoder": model.decoder}
    for half in halves.values():
        half.config = dataclasses.replace(half.config, source=None)
    configs = {name: half.config for name, half in halves.items()}
    model.config = dataclasses.replace(model.config, **configs, source=None)


def fewer_positions(model: Any) -> None:
    for half in (model.encoder, model.decoder):
        half.positions.embedding.value = half.positions.embedding.value[:9]
    rows = model.encoder.positions.embedding.shape[0]
    say_in_halves(model, {"positions.max_positions": rows})


KEPT = [(kind, edit) for kind in SMALL for edit in (remove_layers, set_start, forget_source)]
KEPT += [("t5", set_units), ("t5", untie), ("whisper", untie), ("bart", fewer_positions)]


@pytest.mark.parametrize(("kind", "edit"), KEPT)
def test_edited_model_reads_back_as_it_is(kind: str, edit: Callable[[Any], None], tmp_path: Path):
    model = load(kind)
    edit(model)
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert again.config.start_token == model.config.start_token
    np.testing.assert_array_equal(outputs(again), outputs(model))
    save_pretrained(again, tmp_path / "again")
    assert content_of(tmp_path / "again") == content_of(tmp_path / "saved")


def test_embedding_of_each_half_is_refused(tmp_path: Path):
    model = load("t5")
    model.decoder.embed = sx.clone(model.decoder.embed)
    with pytest.raises(PretrainedError, match=r"\.decoder\.embed is not the encoder's") as caught:
        save_pretrained(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    run_advice(caught.value, "model.decoder.embed = model.encoder.embed", {"model": model})
    save_pretrained(model, tmp_path / "saved")


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_half_that_is_no_transformer_is_refused(half: str, tmp_path: Path):
    model = load("t5")
    setattr(model, half, None)
    with pytest.raises(PretrainedError, match=rf"\.{half} is None, not a Transformer"):
        save_pretrained(model, tmp_path / "saved")


def test_config_of_a_half_that_its_calls_read_otherwise_is_refused(tmp_path: Path):
    model = load("t5")
    config = dataclasses.replace(
        model.config, decoder=with_fields(model.config.decoder, {"output.scale": 0.25})
    )
    with pytest.raises(
        PretrainedError, match=r"\.decoder\.config, which calls read, has output\.scale="
    ):
        save_pretrained(model, tmp_path / "saved", config)
    assert not (tmp_path / "saved").exists()


# --- configs and tensors --------------------------------------------------------------------------


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "google-t5/t5-small": (
        {"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1}
        | {"initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06}
        | {"model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6}
        | {"output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32}
        | {"task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 32128},
        {
            "attention.head_dim": 64,
            "mlp.gated": False,
            "activation": "relu",
            "positions.relative_buckets": 32,
        },
        {"output.tied": True, "output.scale": 512**-0.5, "num_layers": 6, "attention.scale": 1.0},
    ),
    "google/flan-t5-small": (
        {"architectures": ["T5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512}
        | {"decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1}
        | {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True}
        | {"layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 6}
        | {"num_decoder_layers": 8, "num_layers": 8, "output_past": True, "pad_token_id": 0}
        | {"relative_attention_max_distance": 128, "relative_attention_num_buckets": 32}
        | {"tie_word_embeddings": False, "transformers_version": "4.23.1", "use_cache": True}
        | {"vocab_size": 32128},
        {
            "mlp.gated": True,
            "activation": "gelu",
            "attention.num_heads": 6,
            "positions.farthest_distance": 128,
        },
        {"output.tied": False, "output.scale": None, "num_layers": 8, "causal": True},
    ),
    "facebook/bart-large-cnn": (
        {"_num_labels": 3, "activation_dropout": 0.0, "activation_function": "gelu"}
        | {"add_final_layer_norm": False, "architectures": ["BartForConditionalGeneration"]}
        | {"attention_dropout": 0.0, "bos_token_id": 0, "classif_dropout": 0.0, "d_model": 1024}
        | {"decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0}
        | {"decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1}
        | {"early_stopping": True, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096}
        | {"encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2}
        | {"force_bos_token_to_be_generated": True, "forced_bos_token_id": 0}
        | {"forced_eos_token_id": 2, "gradient_checkpointing": False, "init_std": 0.02}
        | {"is_encoder_decoder": True, "length_penalty": 2.0, "max_length": 142}
        | {"max_position_embeddings": 1024, "min_length": 56, "model_type": "bart"}
        | {"no_repeat_ngram_size": 3, "normalize_before": False, "num_beams": 4}
        | {"num_hidden_layers": 12, "output_past": True, "pad_token_id": 1, "prefix": " "}
        | {"scale_embedding": False, "use_cache": True, "vocab_size": 50264},
        {
            "positions.max_positions": 1026,
            "positions.offset": 2,
            "embedding.scale": None,
            "embedding.norm": True,
        },
        {"output.bias": True, "output.tied": True, "norms.placement": "after", "num_layers": 12},
    ),
    "openai/whisper-tiny": (
        {"activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0}
        | {"architectures": ["WhisperForConditionalGeneration"], "bos_token_id": 50257}
        | {"begin_suppress_tokens": [220, 50257], "d_model": 384, "decoder_attention_heads": 6}
        | {"decoder_ffn_dim": 1536, "decoder_layerdrop": 0.0, "decoder_layers": 4, "dropout": 0.0}
        | {"decoder_start_token_id": 50258, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
        | {"encoder_layerdrop": 0.0, "encoder_layers": 4, "eos_token_id": 50257, "init_std": 0.02}
        | {"forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]], "is_encoder_decoder": True}
        | {"max_length": 448, "max_source_positions": 1500, "max_target_positions": 448}
        | {"model_type": "whisper", "num_hidden_layers": 4, "num_mel_bins": 80}
        | {"pad_token_id": 50257, "scale_embedding": False, "suppress_tokens": [1, 2, 7]}
        | {"torch_dtype": "float32", "use_cache": True, "vocab_size": 51865},
        {
            "features.size": 80,
            "positions.max_positions": 1500,
            "attention.key_bias": False,
            "norms.placement": "pre",
        },
        {
            "positions.max_positions": 448,
            "positions.offset": 0,
            "output.tied": True,
            "attention.key_bias": False,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_as_they_are(name: str, tmp_path: Path):
    content, encoder, decoder = PUBLISHED[name]
    config = read(tmp_path, content).config
    assert config.start_token == content["decoder_start_token_id"]
    for half, expected in ((config.encoder, encoder), (config.decoder, decoder)):
        assert {path: field_of(half, path) for path in expected} == expected


CLASSES = {"t5": "T5", "bart": "Bart", "whisper": "Whisper"}


@needs("transformers")
@pytest.mark.parametrize("kind", CLASSES)
def test_defaults_equal_those_of_its_class(kind: str, tmp_path: Path):
    import transformers

    whole = getattr(transformers, f"{CLASSES[kind]}Config")().to_dict()
    brief = read(tmp_path, {"model_type": kind}).config
    named = read(tmp_path, json.loads(json.dumps(whole))).config
    for half in ("encoder", "decoder"):
        plain = dataclasses.replace(getattr(brief, half), source=None)
        assert plain == dataclasses.replace(getattr(named, half), source=None)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("t5", {"d_model": 0}, "d_model=0 is not positive"),
        ("t5", {"note": 1, "num_heads": None}, "num_heads=None is not an integer; note=1 is unk"),
        ("t5", {"feed_forward_proj": "glu-relu"}, "feed_forward_proj='glu-relu' is not supp"),
        ("t5", {"dense_act_fn": "mish"}, "dense_act_fn='mish' is none of"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=False is not supported"),
        ("t5", {"relative_attention_max_distance": 2}, "farthest_distance to be at least 3"),
        ("t5", {"architectures": ["T5EncoderModel"]}, "only one of T5ForConditionalGeneration"),
        ("t5", {"num_decoder_layers": 10**9}, "1000000000 layers"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
        ("bart", {"num_hidden_layers": 3}, "num_hidden_layers=3 is not supported beside"),
        ("bart", {"decoder_layerdrop": 0.1}, "decoder_layerdrop=0.1 is not supported"),
        ("whisper", {"num_mel_bins": 0}, "num_mel_bins=0 is not positive"),
        ("whisper", {"apply_spec_augment": True}, "apply_spec_augment=True is not supported"),
        ("t5", {"decoder_start_token_id": 16}, "start_token=16, but tokens are"),
    ],
)
def test_hostile_config_is_refused_by_field(kind: str, changes: Any, says: str, tmp_path: Path):
    with pytest.raises(PretrainedError) as caught:
        read(tmp_path, {**SMALL[kind], **changes})
    assert says in str(caught.value)
    assert str(caught.value).count("describes a model") == 1


def test_farthest_distance_may_be_any_number(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(folder_of("t5"), folder)
    content = content_of(folder)
    content["relative_attention_max_distance"] = 10**12
    (folder / "config.json").write_text(json.dumps(content))
    model = from_pretrained(folder, dtype=jnp.float32)
    tokens = generate(model, inputs=SMALL_INPUTS, max_new_tokens=6, temperature=0)[0]
    logits = model(SMALL_INPUTS, tokens[None, :-1])
    np.testing.assert_array_equal(tokens[1:], logits[0].argmax(-1))


def test_unfit_tensors_are_named(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(folder_of("t5"), folder)
    values = load_file(folder / "model.safetensors")
    shared = values["shared.weight"]
    copies = {"encoder.embed_tokens.weight": shared, "lm_head.weight": shared}
    distances = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    older = {**values, **copies, distances: np.ones((4, 2), np.float32)}
    save_file(older, folder / "model.safetensors")
    np.testing.assert_array_equal(outputs(from_pretrained(folder)), outputs(load("t5")))
    copies["encoder.embed_tokens.weight"] = shared + 1
    missing = "decoder.block.1.layer.1.EncDecAttention.q.weight"
    del values[missing]
    save_file({**values, **copies}, folder / "model.safetensors")
    with pytest.raises(PretrainedError) as caught:
        from_pretrained(folder)
    for part in (f"missing are {missing}", "encoder.embed_tokens.weight are one tensor"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kind", SMALL)
def test_bare_model_has_no_head(kind: str, tmp_path: Path):
    model = from_pretrained(folder_of(kind), head=False)
    assert model.config.head is None
    save_pretrained(model, tmp_path / "bare")
    assert content_of(tmp_path / "bare")["architectures"] == [f"{CLASSES[kind]}Model"]
    np.testing.assert_array_equal(outputs(from_pretrained(tmp_path / "bare")), outputs(model))
    with pytest.raises(GenerationError, match="head=None"):
        generate(model, inputs=SMALL_FEATURES if kind == "whisper" else [[1]], max_new_tokens=1)


def test_users_register_types_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardax.models.families import registry

    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    sx.models.register("my_t5", like="t5", harmless=["mine"])
    model = read(tmp_path, {**SMALL["t5"], "model_type": "my_t5", "mine": 1})
    assert isinstance(model, EncoderDecoder) and model.config.num_layers == 4
