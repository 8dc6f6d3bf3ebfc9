# SPDX-License-Identifier: Apache-2.0
"""The example trains and reports; its baselines are right by hand, and obey laws on any text."""

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.byte_language_model import byte_entropy, fitted_loss, main, pair_counts
from shardax.train import ByteText, EvalBatches, TextPart

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it"]


def whole(data: Any) -> TextPart:
    return ByteText.from_bytes(data).whole


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)])
def test_example_trains_and_prints_loss_and_baselines(
    mesh: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=9000)))
    out = tmp_path / "run"
    arguments = ["--steps", "20", "--text", str(text), "--out", str(out)]
    numbers = main([*arguments, "--mesh", *map(str, mesh)])
    assert numbers["held-out loss"] < numbers["unigram entropy"] < math.log(256)
    assert numbers["unigram entropy"] <= numbers["fitted unigram model"]
    assert numbers["bigram entropy"] <= numbers["fitted bigram model"]
    printed = capsys.readouterr().out
    for name, value in numbers.items():
        assert f"{name:22} {value:.4f} nats per byte" in printed
    assert "step 20/20  loss" in printed
    assert len(printed.splitlines()) <= 40, "few, meaningful lines"
    sample = printed.rsplit("nats per byte\n\n", 1)[1]
    assert sample.startswith("def ")
    assert (out / "log.jsonl").is_file() and any((out / "checkpoints").iterdir())


texts = st.binary(min_size=2, max_size=200) | st.text("ab ", min_size=2, max_size=200).map(
    str.encode
)


def test_entropies_worked_out_by_hand():
    # Pairs of "aabab": aa, ab, ba, ab. Predicted bytes: a, b, a, b, so H1 = log 2.
    # After a: a, b, b, so -(1/3 log 1/3 + 2/3 log 2/3) on 3 of 4 pairs; after b: a, nothing to add.
    after_a = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3))
    entropy = byte_entropy(whole(b"aabab"))
    assert pair_counts(whole(b"aabab")).sum() == 4
    assert entropy["unigram"] == pytest.approx(math.log(2), abs=1e-15)
    assert entropy["bigram"] == pytest.approx(3 / 4 * after_a, abs=1e-15)


def test_uniform_random_bytes_have_nearly_maximal_entropy():
    data = np.random.default_rng(0).integers(0, 256, 1 << 22, np.uint8)
    entropy = byte_entropy(whole(data))
    assert entropy["unigram"] == pytest.approx(math.log(256), abs=1e-4)
    assert entropy["bigram"] == pytest.approx(math.log(256), abs=0.01)


def test_periodic_text_has_unigram_entropy_only():
    entropy = byte_entropy(whole(b"abcd" * 1000 + b"a"))
    assert entropy["unigram"] == pytest.approx(math.log(4))
    assert entropy["bigram"] == 0.0


@given(texts)
def test_entropies_are_ordered_and_bounded(data: bytes):
    entropy = byte_entropy(whole(data))
    assert 0 <= entropy["bigram"] <= entropy["unigram"] <= math.log(256) + 1e-12
    assert pair_counts(whole(data)).sum() == len(data) - 1


@given(texts, st.randoms(use_true_random=False))
def test_unigram_entropy_is_independent_of_byte_order(data: bytes, random):
    shuffled = list(data[1:])
    random.shuffle(shuffled)
    other = byte_entropy(whole(data[:1] + bytes(shuffled)))
    assert other["unigram"] == pytest.approx(byte_entropy(whole(data))["unigram"], abs=1e-12)


@given(texts, st.permutations(range(256)))
def test_entropies_are_invariant_to_renaming_bytes(data: bytes, renamed: list[int]):
    entropy, other = byte_entropy(whole(data)), byte_entropy(whole(data.translate(bytes(renamed))))
    assert other["unigram"] == pytest.approx(entropy["unigram"], abs=1e-12)
    assert other["bigram"] == pytest.approx(entropy["bigram"], abs=1e-12)


@given(texts)
def test_counts_are_those_of_consecutive_bytes(data: bytes):
    expected = np.zeros((256, 256), int)
    for a, b in pairwise(data):
        expected[a, b] += 1
    assert (pair_counts(whole(data)) == expected).all()


def test_pair_counts_have_no_pair_across_two_segments():
    text = ByteText.from_bytes(b"abXcd")
    counts = pair_counts(TextPart(text, np.array([0, 3]), np.array([2, 5])))
    assert [tuple(map(chr, pair)) for pair in np.argwhere(counts)] == [("a", "b"), ("c", "d")]
    touching = pair_counts(TextPart(text, np.array([0, 2]), np.array([2, 5])))
    assert touching.sum() == 3, "segments that touch are still two"


@given(data=texts, seq_len=st.integers(1, 30), limit=st.integers(1, 4))
def test_entropies_equal_evaluation_losses_of_best_models(data: bytes, seq_len: int, limit: int):
    batches = EvalBatches(
        ByteText.from_bytes(data).whole, batch_size=2, seq_len=seq_len, max_batches=limit
    )
    entropy = byte_entropy(batches.part)
    pairs = pair_counts(batches.part)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_unigram = np.log(pairs.sum(axis=0) / pairs.sum())
        log_bigram = np.log(pairs / pairs.sum(axis=1, keepdims=True))
    unigram_loss = bigram_loss = 0.0
    for batch in batches:
        inputs, targets = batch["inputs"][batch["mask"]], batch["targets"][batch["mask"]]
        unigram_loss -= log_unigram[targets].sum()
        bigram_loss -= log_bigram[inputs, targets].sum()
    assert pairs.sum() == batches.targets
    assert entropy["unigram"] == pytest.approx(unigram_loss / batches.targets, abs=1e-9)
    assert entropy["bigram"] == pytest.approx(bigram_loss / batches.targets, abs=1e-9)


@given(train=texts, held_out=texts, concentration=st.floats(0.01, 1000))
def test_fitted_loss_is_never_below_the_entropy(
    train: bytes, held_out: bytes, concentration: float
):
    fitted = fitted_loss(whole(train), whole(held_out), concentration)
    entropy = byte_entropy(whole(held_out))
    assert math.isfinite(fitted["bigram"])
    assert fitted["unigram"] >= entropy["unigram"] - 1e-12
    assert fitted["bigram"] >= entropy["bigram"] - 1e-12


def test_fitted_losses_worked_out_by_hand():
    # Trained on "abab": predicted bytes b, a, b, so p(a) = 1.5 / 131, p(b) = 2.5 / 131.
    # Judged on "ba": p(a|b) = (1 + 2 p(a)) / (1 + 2).
    fitted = fitted_loss(whole(b"abab"), whole(b"ba"), concentration=2.0)
    assert fitted["unigram"] == pytest.approx(-math.log(1.5 / 131))
    assert fitted["bigram"] == pytest.approx(-math.log((1 + 2 * 1.5 / 131) / 3))


def test_fitted_loss_approaches_entropy_with_more_text():
    chain = np.random.default_rng(0)
    steps = chain.choice(4, size=1 << 20, p=[0.7, 0.1, 0.1, 0.1]).cumsum() % 4
    train, held_out = ByteText.from_bytes(steps.astype(np.uint8)).split(0.1)
    entropy, fitted = byte_entropy(held_out), fitted_loss(train, held_out)
    assert entropy["bigram"] == pytest.approx(-0.7 * math.log(0.7) - 0.3 * math.log(0.1), abs=0.01)
    assert fitted["bigram"] - entropy["bigram"] < 1e-3
    assert fitted["unigram"] - entropy["unigram"] < 1e-3


def test_text_without_targets_is_refused():
    for function in (byte_entropy, lambda part: fitted_loss(whole(b"ab"), part)):
        with pytest.raises(ValueError, match="nothing to predict"):
            function(whole(b"a"))
