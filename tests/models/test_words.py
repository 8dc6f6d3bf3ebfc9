# SPDX-License-Identifier: Apache-2.0
"""The words of ``transformers``: what errors say of them, and the page with their table."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.models.words import OTHER_WORDS
from tests.advice import run_advice

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-transformers.md").read_text()
ROW = re.compile(r"\| (`[^|]+`) \| `([^`]+)` \| (.*)\|")
ROWS = [match.groups() for line in PAGE.splitlines() if (match := ROW.fullmatch(line))][1:]


@cache
def names_of_page() -> dict[str, Any]:
    """What the first program of the page defines."""
    code = PAGE.partition("## Words")[0]
    lines = [line[4:] for line in code.splitlines() if line.startswith((">>> ", "... "))]
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), "page", "exec"), names)
    return names


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_code_of_a_row_runs(row: tuple[str, str, str]) -> None:
    assert eval(row[1], names_of_page()) is not None or ".save_pretrained(" in row[1]


def test_table_has_every_word_of_the_errors() -> None:
    words = {word for theirs, _, _ in ROWS for word in re.findall(r"`([^`]+)`", theirs)}
    assert len(ROWS) > 30
    assert {name for table in OTHER_WORDS.values() for name in table} - words == set()


@cache
def small() -> sx.models.Decoder:
    return sx.models.Decoder(sx.models.DecoderConfig(num_layers=1), rngs=sx.Rngs(0))


CALLS: dict[str, Any] = {
    "generate": lambda model, **word: sx.models.generate(model, [[1]], max_new_tokens=1, **word),
    "from_pretrained": lambda _, **word: sx.models.from_pretrained("nowhere", **word),
    "save_pretrained": lambda model, **word: sx.models.save_pretrained(model, "nowhere", **word),
    "call": lambda model, **word: model(np.array([[1]]), **word),
}


@pytest.mark.parametrize(
    ("function", "word"), [(name, word) for name, words in OTHER_WORDS.items() for word in words]
)
def test_function_says_what_a_word_is_here(function: str, word: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[function](small(), **{word: None})
    ours = OTHER_WORDS[function][word].partition("; ")[0].replace("no option", "no option here", 1)
    assert f"{word} is {ours}" in str(caught.value)


def refusal(function: str, word: str) -> str:
    """The text of the error for a word."""
    with pytest.raises(TypeError) as caught:
        CALLS[function](small(), **{word: None})
    return str(caught.value)


def test_codes_in_place_of_options_run() -> None:
    model, tokens = small(), np.array([[1, 2, 3]])
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    names = {"sx": sx, "model": model, "batch": batch}
    names |= {"logits": model(batch["inputs"]), "targets": batch["targets"]}
    text = refusal("call", "labels")
    loss = run_advice(text, "sx.models.next_token_loss(model, batch)", names)
    assert run_advice(text, "sx.models.cross_entropy(logits, targets)", names) == loss

    names["rest"] = sx.select(model).at_instances_of(sx.nn.MLP)
    recording = run_advice(
        refusal("call", "output_hidden_states"), "sx.surgery.record(model, ...)", names
    )
    assert len(recording(tokens)[1]) == 1

    text = refusal("from_pretrained", "load_in_4bit")
    assert run_advice(text, "sx.quantize(model, 'int4')", names)(tokens).shape == (1, 3, 256)
    text = refusal("from_pretrained", "load_in_8bit")
    assert run_advice(text, "sx.quantize(model, 'int8')", names)(tokens).shape == (1, 3, 256)


def test_misspelt_option_is_suggested() -> None:
    with pytest.raises(TypeError, match=r"generate: temprature is unknown \(Did you mean 'temp"):
        CALLS["generate"](None, temprature=0)


def test_loss_of_a_batch_of_transformers_says_how_to_cut_it() -> None:
    model = small()
    batch = {"input_ids": np.array([[1, 2, 3]]), "labels": np.array([[-100, 2, 3]])}
    with pytest.raises(sx.errors.LayerInputError) as caught:
        sx.models.next_token_loss(model, batch)
    names = {"batch": batch}
    code = 'batch = {"inputs": batch["input_ids"][:, :-1], "targets": batch["labels"][:, 1:]}'
    assert code in str(caught.value)
    exec(code, names)
    expected = {"inputs": np.array([[1, 2]]), "targets": np.array([[2, 3]])}
    loss = sx.models.next_token_loss(model, names["batch"])
    assert float(loss) == float(sx.models.next_token_loss(model, expected))
