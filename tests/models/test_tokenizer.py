# SPDX-License-Identifier: Apache-2.0
"""``load_tokenizer`` reads texts as ``transformers.AutoTokenizer`` does, whatever calls left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import shardax as sx
from shardax.errors import PretrainedError
from tests.needs import needs

WORDS = ["one", "two", "three", "four", "[UNK]", "[PAD]", "<s>", "</s>"]
TEXT = "one <s> two three [PAD] four <tool>two one"
PLAIN = [0, 6, 1, 2, 5, 3, 4, 0]


def token(content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True, **off, **flags}


def fixed_padding(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=24, pad_id=5, pad_token="[PAD]")


def padding_on_the_left(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(pad_to_multiple_of=16, direction="left", pad_id=5)


def template(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 6), ("</s>", 7)]
    )


def everything(tokenizer: Tokenizer) -> None:
    template(tokenizer)
    tokenizer.enable_truncation(4, stride=1, direction="left")
    fixed_padding(tokenizer)


Case = tuple[Callable[[Tokenizer], Any], dict[str, Any], list[int]]
CASES: dict[str, Case] = {
    "plain": (lambda _: None, {}, PLAIN),
    "truncation": (lambda t: t.enable_truncation(3), {}, PLAIN),
    "truncation from the left": (lambda t: t.enable_truncation(3, direction="left"), {}, PLAIN),
    "truncation with a stride": (lambda t: t.enable_truncation(3, stride=2), {}, PLAIN),
    "fixed padding": (fixed_padding, {}, PLAIN),
    "padding to a multiple": (padding_on_the_left, {}, PLAIN),
    "template": (template, {}, [6, *PLAIN, 7]),
    "template, truncation and padding": (everything, {}, [6, *PLAIN, 7]),
    # The template of tokenizer.json counts, and no length of a model cuts.
    "settings of calls": (
        everything,
        {"add_bos_token": False, "model_max_length": 3, "padding_side": "left"},
        [6, *PLAIN, 7],
    ),
    # Unknown to tokenizer.json, a token is appended; "<tool>two" is split there.
    "numbered token": (
        everything,
        {"added_tokens_decoder": {"8": token("<tool>")}},
        [6, *PLAIN[:6], 8, 1, 0, 7],
    ),
    "tokens with a name": (
        fixed_padding,
        {"mask_token": "<mask>", "pad_token": "[PAD]", "tool_token": "<tool>"},
        [*PLAIN[:6], 9, 1, 0],
    ),
    "list of tokens": (
        fixed_padding,
        {"additional_special_tokens": ["<tool>", "two"]},
        [*PLAIN[:6], 8, 1, 0],
    ),
    "other flags": (  # of a word in the vocabulary, which is found within others then
        template,
        {"added_tokens_decoder": {"1": token("two"), "6": token("<s>", lstrip=True)}},
        [6, *PLAIN[:6], 4, 1, 0, 7],
    ),
    "special tokens as text": (
        lambda t: t.add_special_tokens(["one", "tw"]),
        {"split_special_tokens": True},
        PLAIN,
    ),
}


def saved(folder: Path, case: str) -> list[int]:
    change, settings, expected = CASES[case]
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return expected


@pytest.mark.parametrize("case", CASES)
def test_load_tokenizer_reads_whole_texts_without_padding(case: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, case)
    tokenizer = sx.models.load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT).ids == expected
    assert next(row.ids for row in tokenizer.encode_batch([TEXT, "one"])) == expected
    assert (tokenizer.truncation, tokenizer.padding) == (None, None)


@needs("transformers")
def test_load_tokenizer_reads_what_transformers_reads(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    import transformers

    for case in CASES:
        folder = tmp_path_factory.mktemp("tokenizer")
        expected = saved(folder, case)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        published = transformers.AutoTokenizer.from_pretrained(folder)
        assert published(TEXT)["input_ids"] == expected, case
        bare = published(TEXT, add_special_tokens=False)["input_ids"]
        loaded = sx.models.load_tokenizer(folder)
        assert loaded.encode(TEXT, add_special_tokens=False).ids == bare, case


@pytest.mark.parametrize(
    ("numbered", "says"),
    [
        ({"40": token("<tool>")}, "gives the token '<tool>' the number 40, but .* it is 8"),
        ({"0": token("two")}, "gives the token 'two' the number 0, but .* it is 1"),
        ({"eight": token("<tool>")}, "is no table of tokens by their numbers"),
        ({"8": "<tool>"}, "is no table of tokens by their numbers"),
        (["<tool>"], "is no table of tokens by their numbers"),
    ],
)
def test_load_tokenizer_refuses_tokens_out_of_place(
    numbered: Any, says: str, tmp_path: Path
) -> None:
    saved(tmp_path, "plain")
    settings = {"added_tokens_decoder": numbered}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(PretrainedError, match=says):
        sx.models.load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**5, "{", "[]"])
def test_load_tokenizer_names_damaged_settings(text: str, tmp_path: Path) -> None:
    saved(tmp_path, "plain")
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(
        PretrainedError, match=r"tokenizer_config\.json (is no JSON|holds no table)"
    ):
        sx.models.load_tokenizer(tmp_path)


def test_load_tokenizer_names_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(PretrainedError, match=r"tokenizer\.json is a pointer of Git LFS.*lfs pull"):
        sx.models.load_tokenizer(tmp_path)
