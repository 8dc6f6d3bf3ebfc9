# SPDX-License-Identifier: Apache-2.0
"""``shardax train --from``: a published model is trained, and published again."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shardax as sx
from shardax.cli import main
from shardax.cli.train import Train, _TrainingRun
from shardax.models import Decoder, DecoderConfig, from_pretrained, save_pretrained

SIZES = ["--preset", "tiny", "--batch-size", "4", "--seq-len", "8", "--checkpoint-every", "0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("one two three four\n" * 400)
    return file


def publish(folder: Path, vocab_size: int) -> dict[str, np.ndarray]:
    model = Decoder(DecoderConfig(vocab_size=vocab_size, num_layers=1), rngs=sx.Rngs(0))
    save_pretrained(model, folder)
    return arrays(folder)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def add_tokenizer(folder: Path, words: Sequence[str] = ("one", "two", "three", "four")) -> None:
    words = [*words, "[UNK]"]
    content = {
        "model": {"type": "WordLevel", "unk_token": "[UNK]"}
        | {"vocab": {word: number for number, word in enumerate(words)}},
        "pre_tokenizer": {"type": "Whitespace"},
        # What a call before it was saved left, which is nothing of the text: three tokens at most,
        # and 32 of them by padding.
        "truncation": {"max_length": 3, "stride": 0, "strategy": "LongestFirst"}
        | {"direction": "Right"},
        "padding": {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None}
        | {"pad_id": 3, "pad_type_id": 0, "pad_token": "four"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def eval_losses(run: Path) -> list[float]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line]


class Tuned(NamedTuple):
    """A run on words that is done, the model that it began with, and what it printed."""

    model: Path
    run: Path
    printed: str


def tune(folder: Path, text: Path, *options: str) -> Tuned:
    publish(folder / "model", vocab_size=8)
    add_tokenizer(folder / "model")
    given = ["--from", str(folder / "model"), *options, "--text", str(text), *SIZES]
    more = ["--steps", "30", "--learning-rate", "0.05", "--out", str(folder / "run")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["train", *given, *more]) == 0
    return Tuned(folder / "model", folder / "run", printed.getvalue())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Tuned:
    """A run of adapters over a mesh."""
    folder = tmp_path_factory.mktemp("adapted")
    return tune(folder, text, "--lora", "2", "--mesh", "data=2,model=2")


def test_adapters_are_trained_on_tokens_and_merged(adapted: Tuned):
    run, before = adapted.run, arrays(adapted.model)
    after = arrays(run / "model-00000030")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    losses = eval_losses(run)
    assert losses[-1] < losses[0]
    assert losses[-1] < np.log(4)  # below that of the four words by their frequency
    tokens = np.array([[0, 1, 2, 3]])
    assert from_pretrained(run / "model-00000030")(tokens)[0, :-1].argmax(-1).tolist() == [1, 2, 3]

    report = (run / "report.html").read_text(encoding="utf-8")
    for text in (
        f"{losses[-1]:.4f} nats per token",
        "adapters of rank 2",
        "gradient norm",
        "AdamW",
    ):
        assert text in report


def test_run_of_adapters_is_verified(adapted: Tuned, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", str(adapted.run)]) == 0
    assert "all is good" in capsys.readouterr().out


def test_experts_are_adapted_and_router_stays_frozen(tmp_path: Path, text: Path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "num_hidden_layers": 1, "num_local_experts": 4}
    more |= {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    config = {"model_type": "mixtral", "vocab_size": 8, "router_aux_loss_coef": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | more))
    from safetensors.numpy import save_file

    save_file({}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="initialised at random"):  # nothing is there
        drawn = from_pretrained(tmp_path, strict=False)
    save_pretrained(drawn, tmp_path / "model")
    before = arrays(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    given = ["--from", str(tmp_path / "model"), "--lora", "2", "--text", str(text), *SIZES]
    run = tmp_path / "run"
    assert main(["train", *given, "--steps", "3", "--out", str(run)]) == 0
    after = arrays(run / "model-00000003")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    experts, attention = ({name for name in before if part in name} for part in (".w", "_proj"))
    used = changed & experts  # two of four, at least
    assert changed == used | attention and len(used) >= 6
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] > 100 * 2 * 0.9  # top_k, if balanced
    assert max(eval_losses(run)) < 3  # of the tokens alone


def test_full_training_on_bytes_is_resumed(tmp_path: Path, text: Path):
    before = publish(tmp_path / "model", vocab_size=256)
    run = tmp_path / "run"
    given = ["--from", str(tmp_path / "model"), "--text", str(text), *SIZES, "--out", str(run)]
    assert main(["train", *given, "--steps", "2"]) == 0
    assert main(["train", *given, "--steps", "3", "--resume", "--override"]) == 0
    after = arrays(run / "model-00000003")
    assert all(not np.array_equal(before[name], after[name]) for name in before)


def test_rows_of_tokens_are_shuffled_in_each_epoch_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(tmp_path / "model", vocab_size=64)
    add_tokenizer(tmp_path / "model", words=[f"w{number}" for number in range(63)])
    text = tmp_path / "numbered.txt"
    text.write_text(" ".join(f"w{number % 63}" for number in range(4000)))
    monkeypatch.setattr(np.random, "default_rng", None)  # who shuffles a list would draw from it

    def batches(seed: int) -> sx.train.TrainBatches:
        source = str(tmp_path / "model")
        options = {"preset": "tiny", "batch_size": 4, "seq_len": 8, "text": text, "seed": seed}
        settings = Train(source=source, **options)._fresh()
        return _TrainingRun(settings, tmp_path / "run").trainer.batches

    first, other = batches(0), batches(1)
    count = first.windows_per_epoch
    assert count > 400

    def order(batches: sx.train.TrainBatches, epoch: int) -> tuple[int, ...]:
        rows = [batches.batch_at(epoch * count // 4 + step)["inputs"] for step in range(count // 4)]
        return tuple(int(row[0]) for batch in rows for row in batch)

    orders = {order(first, 0), order(first, 1), order(first, 2), order(other, 0)}
    assert len(orders) == 4, "another order in each epoch, and of each seed"

    taken = [next(first)["inputs"].tolist() for _ in range(3)]
    assert taken == [first.batch_at(step)["inputs"].tolist() for step in range(3)]
    again = batches(0)
    again.restore(first.state())
    assert next(again)["inputs"].tolist() == next(first)["inputs"].tolist()


def sample(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    greedy = ["--temperature", "0", "--length", "5"]
    assert main(["sample", *words, *greedy]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_run_and_published_model_sample_with_tokenizer(
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    lora: bool,
):
    tuned = request.getfixturevalue("adapted") if lora else tune(tmp_path, text)
    run = tuned.run
    printed = tuned.printed.partition("Sample:\n")[2].partition("\n")[0].split()
    assert printed[:8] == ["one", "two", "three", "four"] * 2
    prompts = ["--prompt", "two", "two three four"]
    first = "two three four one two three\n\n"
    expected = first + "two three four one two three four one\n"
    assert sample(capsys, str(run), *prompts) == expected
    assert sample(capsys, str(run / "checkpoints" / "00000030"), *prompts) == expected
    published = shutil.copytree(run / "model-00000030", tmp_path / "published")
    assert sample(capsys, "--from", str(published), *prompts) == expected
    (published / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    ended = "two three four\n"
    assert sample(capsys, "--from", str(published), "--prompt", "two") == ended
    (published / "tokenizer.json").unlink()
    words = ["--from", str(published), *prompts[:2]]
    assert sample(capsys, *words, "--tokenizer", str(tuned.model)) == ended


def test_byte_model_is_sampled_without_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path / "model", vocab_size=256)
    model = from_pretrained(tmp_path / "model")
    rows = sx.models.generate(model, [list(b"def "), list(b"x")], max_new_tokens=5, temperature=0)
    expected = [bytes(row.tolist()).decode(errors="replace") for row in rows]
    words = ["--from", str(tmp_path / "model"), "--prompt", "def ", "x"]
    assert sample(capsys, *words) == "\n\n".join(expected) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name one model: the folder of a run, or --from FOLDER."),
        (["{}", "--from", "{}"], "Name one model"),
        (
            ["--from", "{}"],
            "has no tokenizer.json. Name a folder that has the model's: --tokenizer",
        ),
        (["--from", "{}", "--tokenizer", "{}"], "tokenizer.json is not there"),
        (["--from", "{}", "--tokenizer", "{}/words", "--prompt", " "], "no token in it"),
        (["--from", "{}", "--tokenizer", "{}/words", "--prompt", "four"], "has the token 3, but"),
        (["--from", "{}/none"], "neither a folder nor a name of the hub"),
        (
            ["--from", "{}", "--tokenizer", "{}/words", "--prompt", "one " * 3000],
            "3,000 tokens, but the model was trained on texts of at most 2,048. Give the end",
        ),
    ],
)
def test_invalid_sampling_gives_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path / "model", vocab_size=3)
    (tmp_path / "model" / "words").mkdir()
    add_tokenizer(tmp_path / "model" / "words")
    assert main(["sample", *(word.format(tmp_path / "model") for word in words)]) > 0
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_damaged_settings_of_generation_give_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path / "model", vocab_size=5)
    add_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("[" * 10**5)
    assert main(["sample", "--from", str(tmp_path / "model"), "--prompt", "one"]) > 0
    said = capsys.readouterr().err
    assert "generation_config.json is no JSON" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "2"], "--lora needs --from"),
        (["--from", "{}"], "8 tokens are too few for bytes"),
        (["--from", "{}/none"], "neither a folder nor a name of the hub"),
        (["--from", "{}", "--lora", "0"], "--lora 0: give a number from 1"),
    ],
)
def test_invalid_finetuning_is_refused(
    options: list[str], message: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path / "model", vocab_size=8)
    filled = [option.format(tmp_path / "model") for option in options]
    out = ["--text", str(text), "--out", str(tmp_path / "run"), *SIZES]
    assert main(["train", *filled, *out]) > 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("content", "tokens"), [(" " * 4000, 0), ("one " * 3 + " " * 4000, 3)])
def test_text_with_fewer_tokens_than_a_window_is_refused(
    content: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path / "model", vocab_size=8)
    add_tokenizer(tmp_path / "model")
    (tmp_path / "blank.txt").write_text(content)

    words = ["--from", str(tmp_path / "model"), "--text", str(tmp_path / "blank.txt")]
    assert main(["train", *words, "--out", str(tmp_path / "run"), *SIZES]) > 0

    said = capsys.readouterr().err
    assert f"has {tokens} tokens, too few for --seq-len" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
