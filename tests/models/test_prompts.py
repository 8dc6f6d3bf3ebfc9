# SPDX-License-Identifier: Apache-2.0
"""Padded prompts, and what a model's files say of the beginning and the end of texts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import GenerationError, PretrainedError
from shardax.models import GenerationConfig, from_pretrained, generate, save_pretrained
from tests.advice import run_advice
from tests.conftest import make_mesh
from tests.models import test_encoder_decoders as encoder_decoders
from tests.needs import needs
from tests.values import with_values

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0}
SAMPLED: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.8, "top_k": 9, "seed": 3}


def decoder(**options: Any) -> sx.models.Decoder:
    config = sx.models.DecoderConfig(vocab_size=32, num_layers=2, num_kv_heads=4, **options)
    return with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))


def padded(side: str, token: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as one array, and their mask."""
    tokens = np.full((len(PROMPTS), 6), token)
    mask = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(PROMPTS):
        start = {"left": 6 - len(prompt), "right": 0, "both": (6 - len(prompt)) // 2}[side]
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = True
    return tokens, mask


def lists(rows: Any) -> list[list[int]]:
    return [row.tolist() for row in rows]


# --- padded arrays --------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "NumPy": np.asarray,
    "JAX": jnp.asarray,
    "lists": lambda array: array.tolist(),
    "integers": lambda array: array.astype(np.int64),
}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_prompts_have_the_texts_of_ragged_ones(side: str, options: Any) -> None:
    model = decoder()
    expected = lists(generate(model, PROMPTS, **options))
    tokens, mask = padded(side, token=-100)  # whatever padding is, it is not read
    for form in FORMS.values():
        assert lists(generate(model, form(tokens), mask=form(mask), **options)) == expected
    stream = generate(model, tokens, mask=mask, stream=True, **options)
    assert np.stack(list(stream), 1).tolist() == [row[-5:] for row in expected]


def without_cache(model: Any) -> Any:
    class Plain(sx.Module):
        def __init__(self, model: Any) -> None:
            self.model = model

        def __call__(self, tokens: Any) -> Any:
            return self.model(tokens)

    return Plain(model)


MODELS: dict[str, Callable[[], Any]] = {
    "stacked": lambda: decoder(scan_layers=True),
    "window": lambda: with_values(
        sx.models.Transformer(
            sx.models.TransformerConfig(
                vocab_size=32, num_layers=2, attention=sx.models.AttentionConfig(window=3)
            ),
            rngs=sx.Rngs(0),
        )
    ),
    "without cache": lambda: without_cache(decoder()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_padded_prompts_of_other_models_are_ragged_ones(kind: str) -> None:
    model = MODELS[kind]()
    tokens, mask = padded("right")
    assert lists(generate(model, tokens, mask=mask, **GREEDY)) == lists(
        generate(model, PROMPTS, **GREEDY)
    )


def test_padded_prompts_are_ragged_ones_over_a_mesh_and_with_int8() -> None:
    tokens, mask = padded("left")
    model = decoder()
    options = {**GREEDY, "cache_dtype": "int8"}
    expected = lists(generate(model, PROMPTS, **options))
    sx.shard(model, make_mesh(jax.sharding.AxisType.Auto), sx.models.DECODER_RULES)
    with sx.axis_rules(sx.models.DECODER_RULES):
        assert lists(generate(model, tokens, mask=mask, **options)) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_inputs_of_an_encoder_are_ragged_ones(side: str) -> None:
    model = encoder_decoders.load("t5")
    tokens, mask = padded(side)
    expected = lists(generate(model, [[0], [0, 3], [0]], inputs=PROMPTS, **GREEDY))
    starts = np.array([[0, 9], [0, 3], [0, 9]])
    options = {"mask": [[1, 0], [1, 1], [1, 0]], "inputs": tokens, "input_mask": mask}
    assert lists(generate(model, starts, **options, **GREEDY)) == expected


WRONG: dict[str, tuple[Any, Any]] = {
    r"padding between the real tokens of row 1: 101\.": ([[1, 2, 3]] * 2, [[1, 1, 0], [1, 0, 1]]),
    r"mask has no real token in row 1; a prompt has": ([[1, 2]] * 2, [[1, 0], [0, 0]]),
    r"mask has the shape \(2, 1\), but the tokens have the shape \(2, 2\)": (
        [[1, 2]] * 2,
        [[1], [1]],
    ),
    r"mask is for tokens that are padded to one length, but the rows differ": (
        [[1], [1, 2]],
        [[1, 1], [1, 1]],
    ),
    r"the dtype float64 and the value -1000000000\.0.* give mask == 0\.": ([[1, 2]], [[-1e9, 0.0]]),
    r"the dtype int64 and the value 2\.": ([[1, 2]], [[1, 2]]),
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_masks_are_refused_with_the_row(says: str) -> None:
    tokens, mask = WRONG[says]
    with pytest.raises(GenerationError, match=says):
        generate(decoder(), tokens, mask=mask, **GREEDY)


def test_masks_without_their_tokens_are_refused() -> None:
    t5 = encoder_decoders.load("t5")
    table: Any = {"input_ids": [[1]], "attention_mask": [[1]]}
    for says, call in {
        "mask= is of the prompts, and there are none": lambda: generate(
            t5, inputs=[[1]], mask=[[1]], **GREEDY
        ),
        "input_mask= is of inputs, and there are none": lambda: generate(
            decoder(), [[1]], input_mask=[[1]], **GREEDY
        ),
        "batch['input_ids'], mask=batch['attention_mask']": lambda: generate(
            decoder(), table, **GREEDY
        ),
    }.items():
        with pytest.raises(GenerationError) as caught:
            call()
        assert says in str(caught.value)


def test_padding_without_a_mask_is_told_with_the_mask_to_give() -> None:
    model = decoder()
    prompts, mask = padded("right", token=3)
    generate(model, prompts, **GREEDY)  # the model has no token of padding
    model.generation_config = GenerationConfig(pad=3)
    with pytest.warns(UserWarning, match="The prompts 0, 1, 2 begin or end with the token 3") as w:
        generate(model, prompts, **GREEDY)
    code = "mask=prompts != 3"
    assert code in str(w[0].message)
    with warnings.catch_warnings(action="error"):
        found = eval(f"generate(model, prompts, {code}, **GREEDY)", {**globals(), **locals()})
        generate(model, [[3, 4], [4, 3]], **GREEDY)  # of lists all is text
        generate(model, np.array([[3, 4], [3, 5]]), **GREEDY)  # all begin so
    assert lists(found) == lists(generate(model, prompts, mask=mask, **GREEDY))


# --- beginnings and ends --------------------------------------------------------------------------


def written(folder: Path, model: Any, **fields: Any) -> Path:
    """A folder with a model and a generation_config.json."""
    save_pretrained(model, folder)
    if fields:
        (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("as_list", [False, True])
def test_stops_of_the_files_end_texts_and_are_kept(as_list: bool, tmp_path: Path) -> None:
    model = decoder()
    (whole,) = generate(model, [[1, 2]], **GREEDY)
    end = int(whole[4])
    stops = [end, 31] if as_list else end
    folder = written(tmp_path / "one", model, eos_token_id=stops, pad_token_id=0, top_p=0.5)
    loaded = from_pretrained(folder)
    assert loaded.generation_config.stop == ((end, 31) if as_list else (end,))
    (text,) = generate(loaded, [[1, 2]], **GREEDY)
    assert text.tolist() == whole[: whole.tolist().index(end, 2) + 1].tolist()
    assert generate(loaded, [[1, 2]], stop=(), **GREEDY)[0].tolist() == whole.tolist()

    save_pretrained(loaded, tmp_path / "two")
    again = json.loads((tmp_path / "two" / "generation_config.json").read_text())
    assert again == {"eos_token_id": stops, "pad_token_id": 0, "top_p": 0.5}
    loaded.generation_config = GenerationConfig(stop=(7,), source=loaded.generation_config.source)
    save_pretrained(loaded, tmp_path / "three")
    again = json.loads((tmp_path / "three" / "generation_config.json").read_text())
    assert again == {"eos_token_id": 7, "pad_token_id": None, "top_p": 0.5}


def test_stops_of_an_older_config_json_count(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", decoder())
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "eos_token_id": [4, 5]}))
    model = from_pretrained(folder)
    assert model.generation_config == GenerationConfig(stop=(4, 5))
    save_pretrained(model, tmp_path / "again")
    assert not (tmp_path / "again" / "generation_config.json").exists()  # config.json says it


def test_trained_models_are_published_with_their_stops(tmp_path: Path) -> None:
    model = decoder()
    model.generation_config = GenerationConfig(stop=(4,))
    save_pretrained(model, tmp_path / "model")
    assert from_pretrained(tmp_path / "model").generation_config.stop == (4,)


def test_model_without_a_config_of_texts_is_read_back_without_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", decoder())
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "eos_token_id": 4}))
    model = from_pretrained(folder)
    model.generation_config = None
    save_pretrained(model, tmp_path / "again")
    assert from_pretrained(tmp_path / "again").generation_config is None


def test_stops_are_made_a_tuple_that_a_model_can_have() -> None:
    model = decoder()
    for stop, tokens in ((5, (5,)), ([5, 6], (5, 6)), (None, ()), ((5,), (5,))):
        model.generation_config = GenerationConfig(stop=stop)  # ty: ignore[invalid-argument-type]
        assert model.generation_config.stop == tokens
    with pytest.raises(GenerationError, match="has the token 'a'"):
        GenerationConfig(stop="a")  # ty: ignore[invalid-argument-type]


def test_config_of_texts_of_another_class_is_refused() -> None:
    model: Any = decoder()
    model.generation_config = {"stop": (5,)}
    with pytest.raises(GenerationError, match="generation_config is a Dict") as caught:
        generate(model, [[1]], **GREEDY)
    code = "model.generation_config = sx.models.GenerationConfig(stop=(2,))"
    run_advice(caught.value, code, {"sx": sx, "model": model})
    generate(model, [[1]], **GREEDY)


def test_tokens_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="has the token -1, but tokens are integers"):
        GenerationConfig(stop=(-1,))
    with pytest.raises(PretrainedError, match=r"eos_token_id='</s>' is no token"):
        from_pretrained(written(tmp_path / "model", decoder(), eos_token_id="</s>"))


def test_forced_tokens_begin_and_end_texts() -> None:
    model = encoder_decoders.load("bart")
    model.generation_config = GenerationConfig(start=2, forced_start=7, forced_end=3, stop=(3,))
    inputs = [[4, 5, 6], [7]]
    for text in generate(model, inputs=inputs, **GREEDY):
        assert text[:2].tolist() == [2, 7]
        assert text[-1] == 3
        assert len(text) <= 6
    # A prompt that goes on has its own.
    plain = sx.clone(model)
    plain.generation_config = None
    ((*_, last), _) = generate(model, [[2, 9], [2]], inputs=inputs, **GREEDY)
    (first, _) = generate(plain, [[2, 9], [2]], inputs=inputs, **GREEDY)
    assert last == 3
    assert generate(model, [[2, 9], [2]], inputs=inputs, **GREEDY)[0][:-1].tolist() == (
        first[:-1].tolist()
    )


@needs("torch", "transformers")
def test_forced_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from tests.models import peers

    kind, options = encoder_decoders.CASES["bart"]
    forced = {"forced_bos_token_id": 9, "forced_eos_token_id": 4, "eos_token_id": 4}
    forced |= {"decoder_start_token_id": 2}
    peer = peers.make_model(
        tmp_path, f"{kind}Config", f"{kind}ForConditionalGeneration", {**options, **forced}
    )
    import torch

    for name, token in forced.items():
        setattr(peer.generation_config, name, token)
    peer.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = peer.generate(
            **encoder_decoders.peer_inputs(peer),
            max_new_tokens=6,
            do_sample=False,
            num_beams=1,
            use_cache=False,
        )
    inputs, mask = encoder_decoders.INPUTS, encoder_decoders.INPUT_MASK
    texts = generate(
        from_pretrained(tmp_path), inputs=inputs, input_mask=mask, max_new_tokens=6, temperature=0
    )
    for text, row in zip(texts, expected.tolist(), strict=True):
        assert text.tolist() == row[: len(text)]
        assert text[1] == 9


# --- seeds ----------------------------------------------------------------------------------------


def test_calls_without_a_seed_differ() -> None:
    model = decoder()
    options: dict[str, Any] = {"max_new_tokens": 16}
    texts = {str(lists(generate(model, PROMPTS, **options))) for _ in range(3)}
    assert len(texts) == 3
    seeded = {str(lists(generate(model, PROMPTS, seed=2**31 + 5, **options))) for _ in range(3)}
    assert len(seeded) == 1


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 1])
def test_seed_is_the_key_of_jax(seed: int) -> None:
    model = decoder()
    key: Any = np.uint32(seed)  # which is made a key outside of the program
    found, expected = (
        lists(generate(model, PROMPTS, seed=each, max_new_tokens=3)) for each in (seed, key)
    )
    assert found == expected


@pytest.mark.parametrize("jit", [jax.jit, sx.jit])
def test_generate_inside_a_program_is_refused(jit: Any) -> None:
    model = decoder()
    with pytest.raises(GenerationError, match="while a function is traced"):
        jit(lambda tokens: generate(model, tokens, **GREEDY)[0])(np.array([[1, 2]]))
