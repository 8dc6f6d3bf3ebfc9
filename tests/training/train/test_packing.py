# SPDX-License-Identifier: Apache-2.0
"""Packed rows: each document as if it were alone, each token a target once, resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.models import DecoderConfig, next_token_loss
from tests.needs import needs
from tests.training.train.small_runs import Bigram, Quiet, make_trainer
from tests.values import with_values

PackedBatches = sx.train.PackedBatches
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(1, 256, size) for size in (5, 2, 1, 30, 9, 0, 14, 3, 8, 17, 6, 11)]


def pieces_of(batches: Any) -> list[tuple[int, ...]]:
    """The tokens of every segment, with its last target; checks what else a batch says."""
    found = []
    for batch in batches:
        assert batch["mask"].dtype == bool
        assert ((batch["segment_ids"] > 0) == batch["mask"]).all()
        for row in range(len(batch["mask"])):
            for segment in range(1, batch["segment_ids"][row].max(initial=0) + 1):
                places = np.flatnonzero(batch["segment_ids"][row] == segment)
                assert (np.diff(places) == 1).all()
                assert batch["positions"][row, places].tolist() == list(range(places.size))
                inputs, targets = (batch[name][row, places] for name in ("inputs", "targets"))
                assert (inputs[1:] == targets[:-1]).all()
                found.append((*inputs.tolist(), int(targets[-1])))
    return found


@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(lambda s: max(s) > 1),
    batch_size=st.integers(1, 3),
    seq_len=st.integers(1, 12),
    seed=st.none() | st.integers(0, 3),
)
def test_packed_batches_make_each_token_after_the_first_target_once(
    sizes: list[int], batch_size: int, seq_len: int, seed: int | None
):
    documents = [np.arange(size) + 100 * i for i, size in enumerate(sizes)]
    found = pieces_of(
        PackedBatches(documents, batch_size=batch_size, seq_len=seq_len, passes=1, seed=seed)
    )
    assert sorted(token for piece in found for token in piece[1:]) == sorted(
        int(token) for document in documents for token in document[1:]
    )
    for piece in found:
        assert [token - piece[0] for token in piece] == list(range(len(piece)))
    whole = {tuple(each.tolist()) for each in documents if 2 <= each.size <= seq_len + 1}
    assert whole <= set(found), "what fits into a row is not cut"


@pytest.mark.parametrize("scan_layers", [False, True])
def test_packed_loss_equals_the_loss_of_separate_documents(scan_layers: bool):
    config = DecoderConfig(num_layers=2, scan_layers=scan_layers)
    model = with_values(sx.models.Decoder(config, rngs=sx.Rngs(0)))
    documents = [RNG.integers(1, 256, size) for size in (5, 9, 9, 5, 9, 5, 9, 5, 9)]
    loss_of = sx.jit(next_token_loss)
    (batch,) = PackedBatches(documents, batch_size=4, seq_len=24, passes=1)
    assert batch["segment_ids"].max() > 2
    # A row each, of one length: no token sees what follows, and no target is there that is masked.
    rows = np.stack([np.pad(each, (0, 9 - each.size)) for each in documents])
    mask = np.stack([np.arange(8) < each.size - 1 for each in documents])
    alone = loss_of(model, {"inputs": rows[:, :-1], "targets": rows[:, 1:], "mask": mask})
    assert mask.sum() == batch["mask"].sum()
    packed = loss_of(model, batch)
    np.testing.assert_allclose(packed, alone, rtol=2e-6)
    # Positions that are not given count from the beginning of each segment.
    del batch["positions"]
    np.testing.assert_allclose(loss_of(model, batch), packed, rtol=2e-6)
    mixed = {name: batch[name] for name in ("inputs", "targets", "mask")}
    assert abs(loss_of(model, mixed) - packed) > 1e-4


def test_packed_document_gets_no_gradient_from_another():
    model = with_values(sx.models.Decoder(DecoderConfig(num_layers=1), rngs=sx.Rngs(0)))
    segments = np.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    rows = np.random.default_rng(0).normal(size=(1, 8, 64)).astype(np.float32)

    def read(x: Any) -> Any:
        return model.layers[0](x, positions=None, segment_ids=segments)[0, 5].sum()

    gradient = jax.jit(jax.grad(read))(rows)
    read_from = np.abs(np.asarray(gradient)).sum(-1)[0] > 0
    assert read_from.tolist() == [False] * 3 + [True] * 3 + [False] * 2


def test_model_without_segments_is_refused_packed_rows():
    batch = next(PackedBatches(DOCUMENTS, batch_size=2, seq_len=16))
    with pytest.raises(sx.errors.LayerInputError, match=r"segment_ids and positions.*Bigram takes"):
        next_token_loss(Bigram(), batch)


def sources() -> dict[str, Any]:
    rows = [{"input_ids": each.tolist()} for each in DOCUMENTS]

    def grain() -> Any:
        import grain

        return grain.MapDataset.source(DOCUMENTS).seed(1).shuffle().repeat()

    def huggingface() -> Any:
        import datasets

        dataset = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return dataset.shuffle(seed=2, buffer_size=4)

    return {
        "a list": (lambda: DOCUMENTS, {}),
        "a list, shuffled": (lambda: DOCUMENTS, {"seed": 3}),
        "grain": (grain, {}),
        "datasets": (huggingface, {"key": "input_ids"}),
    }


def text_of(batch: Any) -> str:
    """All numbers of a batch."""
    return str({name: np.asarray(array).tolist() for name, array in sorted(batch.items())})


@pytest.mark.parametrize(
    "name",
    ["a list", "a list, shuffled", "grain", pytest.param("datasets", marks=needs("datasets"))],
)
def test_restored_packing_gives_the_batches_that_followed(name: str):
    make, options = sources()[name]

    def packed() -> PackedBatches:
        return PackedBatches(make(), batch_size=2, seq_len=8, **options)

    straight, texts, states = packed(), [], []
    for _ in range(16):  # more than two passes over documents, with positions inside of long ones
        states.append(json.dumps(straight.state()))
        texts.append(text_of(next(straight)))
    assert len(set(texts)) > 8
    for taken in range(0, 15, 2):
        with sx.train.Prefetch(packed(), depth=2) as again:
            again.restore(json.loads(states[taken]))
            assert json.dumps(again.state()) == states[taken]
            assert [text_of(next(again)) for _ in range(2)] == texts[taken : taken + 2]


def test_selected_rows_equal_those_of_the_whole_batch():
    whole = next(PackedBatches(DOCUMENTS, batch_size=4, seq_len=8))
    some = next(PackedBatches(DOCUMENTS, batch_size=4, seq_len=8).by_rows(np.array([1, 3])))
    assert all((some[name] == whole[name][[1, 3]]).all() for name in whole)


def test_packed_rows_train_a_model_and_judge_it(tmp_path: Path):
    model = with_values(sx.models.Decoder(DecoderConfig(num_layers=1), rngs=sx.Rngs(0)))
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16}
    trainer = make_trainer(
        tmp_path,
        3,
        model=model,
        batches=PackedBatches(DOCUMENTS, seed=0, **sizes),
        held_out=list(PackedBatches(DOCUMENTS, passes=1, **sizes)),
    )
    result = trainer.run(display=Quiet())
    assert result.step == 3
    assert result.eval_loss is not None
    assert result.eval_loss < result.loss, "which is of the first steps"


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1], []], {}, "None of the 2 documents has two tokens"),
        ([], {}, "no documents to pack"),
        ([np.ones((2, 2), int)], {}, r"one-dimensional array.*shape \(2, 2\)"),
        ([np.ones(3)], {}, "dtype float64"),
        ([[1, -1]], {}, "ids from -1 to 1"),
        ([{"input_ids": [1, 2]}], {}, r"with 'input_ids'\. Say which"),
        (iter(DOCUMENTS), {}, "no sequence, and have no position"),
        (DOCUMENTS, {"seq_len": 0}, "seq_len=0"),
        (DOCUMENTS, {"seed": -1}, "seed=-1 must be"),
        (DOCUMENTS, {"passes": 0}, "passes=0"),
    ],
)
def test_packed_batches_refuse_what_cannot_be_packed(documents: Any, options: Any, message: str):
    with pytest.raises(sx.errors.DataError, match=message):
        PackedBatches(documents, **{"batch_size": 1, "seq_len": 4} | options)


def test_position_of_other_documents_or_sizes_is_refused():
    batches = PackedBatches(DOCUMENTS, batch_size=2, seq_len=8, seed=1)
    others = {
        "documents": PackedBatches(DOCUMENTS[1:], batch_size=2, seq_len=8, seed=1),
        "batch_size": PackedBatches(DOCUMENTS, batch_size=3, seq_len=8, seed=1),
        "seed": PackedBatches(DOCUMENTS, batch_size=2, seq_len=8),
    }
    for name, other in others.items():
        with pytest.raises(sx.errors.DataError, match=rf"\n  {name}: saved"):
            batches.restore(other.state())
    with pytest.raises(sx.errors.DataError, match="Not a position of packed batches"):
        batches.restore({"step": 1})
