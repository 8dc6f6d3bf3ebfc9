# SPDX-License-Identifier: Apache-2.0
"""Batches of other libraries resume bit for bit, wherever a run was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.errors import DataError
from shardax.train import Positioned
from shardax.train.data.sources import adapted, decoded, encoded, go_to, host_batch, saved_position
from tests.needs import needs
from tests.training.train.small_runs import Quiet, make_trainer, state_of

# Of torchdata 0.11 over newer versions of torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

ROWS = [{"inputs": [i, i + 1, i + 2], "targets": [i + 1, i + 2, i + 3]} for i in range(22)]


def numpy_rows() -> list[Any]:
    return [{name: np.array(row) for name, row in each.items()} for each in ROWS]


def grain_dataset() -> Any:
    import grain

    return grain.MapDataset.source(numpy_rows()).seed(3).shuffle().repeat(3).batch(4)


def grain_iterable() -> Any:
    return grain_dataset().to_iter_dataset()


def grain_loader() -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(22, shuffle=True, num_epochs=3, seed=1)
    operations = [grain.transforms.Batch(4)]
    return grain.DataLoader(data_source=numpy_rows(), sampler=sampler, operations=operations)


def hf_rows(shards: int = 2) -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


def torch_loader(**options: Any) -> Any:
    from torchdata import stateful_dataloader as stateful

    return stateful.StatefulDataLoader(numpy_rows(), batch_size=4, **options)


def torch_generator(**options: Any) -> Any:
    import torch

    return torch_loader(shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def torch_distributed() -> Any:
    from torch.utils.data import DistributedSampler

    dataset: Any = ROWS
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, seed=2)
    return torch_loader(sampler=sampler)


def torch_of_hf() -> Any:
    from torchdata import stateful_dataloader as stateful

    dataset = hf_rows().with_format("torch").shuffle(seed=1, buffer_size=7)
    return stateful.StatefulDataLoader(dataset, batch_size=4)


SOURCES: dict[str, Callable[[], Any]] = {
    "grain.MapDataset": grain_dataset,
    "grain.IterDataset": grain_iterable,
    "iterator of grain": lambda: iter(grain_dataset()),
    "grain.DataLoader": grain_loader,
    "datasets": lambda: hf_rows().batch(4),
    "datasets, arrays": lambda: hf_rows().batch(4).with_format("numpy"),
    "datasets, shuffled": lambda: hf_rows().shuffle(seed=2, buffer_size=8).batch(4),
    "datasets, tables mapped": lambda: (
        hf_rows()
        .with_format("arrow")
        .map(lambda table: table, batched=True, batch_size=3)
        .with_format("numpy")
        .batch(4)
    ),
    "datasets, split": lambda: hf_split().batch(4),
    "torchdata": torch_loader,
    "torchdata, shuffled": lambda: torch_loader(shuffle=True),
    "torchdata, its generator": torch_generator,
    "torchdata, last dropped": lambda: torch_generator(drop_last=True),
    "torchdata, DistributedSampler": torch_distributed,
    "torchdata of datasets": torch_of_hf,
}


def hf_split() -> Any:
    from datasets import distributed

    return distributed.split_dataset_by_node(hf_rows(4).shuffle(seed=1), 1, 2)


def named(*names: str) -> list[Any]:
    """Sources, marked by the packages in their names."""
    return [
        pytest.param(
            name, marks=[needs(each) for each in ("datasets", "torchdata") if each in name]
        )
        for name in names
    ]


def content(batch: Any) -> str:
    """A batch as text, dtypes and all; every leaf must be a NumPy array."""
    assert all(isinstance(each, np.ndarray) for each in batch.values())
    return str({name: (str(each.dtype), each.tolist()) for name, each in sorted(batch.items())})


@pytest.mark.parametrize("name", named(*SOURCES))
def test_restored_source_gives_the_batches_that_followed(name: str):
    source: Any = adapted(SOURCES[name](), resumable=True)
    assert isinstance(adapted(source, resumable=True), Positioned)
    texts, states = [], [json.dumps(saved_position(source, source.state()))]
    for _, batch in zip(range(14), source, strict=False):
        texts.append(content(batch))
        states.append(json.dumps(saved_position(source, source.state())))
    assert len(texts) == 14, "three epochs of 22 rows, or half as many"
    for taken in (0, 1, 5, 6, 7, 12):
        again = adapted(SOURCES[name](), resumable=True)
        go_to(again, json.loads(states[taken]))
        go_to(again, json.loads(states[taken]))  # once more changes nothing
        assert json.dumps(saved_position(again, again.state())) == states[taken]
        assert [content(batch) for _, batch in zip(range(14 - taken), again, strict=False)] == (
            texts[taken:]
        )
    go_to(source, json.loads(states[3]))  # and back, in the same object
    assert [content(next(source)) for _ in range(9)] == texts[3:12]


@pytest.mark.parametrize("name", named("grain.IterDataset", "datasets", "torchdata, its generator"))
def test_resumed_run_equals_the_uninterrupted_run(name: str, tmp_path: Path):
    def run(folder: str, steps: int, resume: bool = False) -> sx.train.Trainer:
        batches = sx.train.WholeBatches(SOURCES[name](), batch_size=4)
        if name != "grain.IterDataset":  # whose last batch is short; it ends after three epochs
            batches = SOURCES[name]()
        trainer = make_trainer(tmp_path / folder, steps, batches=batches, checkpoint_every=2)
        trainer.run(resume=resume, display=Quiet())
        return trainer

    whole = run("whole", 9)
    run("halves", 4)
    assert state_of(run("halves", 9, resume=True)) == state_of(whole)


@needs("torchdata")
def test_held_out_loader_is_read_by_each_evaluation(tmp_path: Path):
    held_out = torch_loader()
    numbers = [
        make_trainer(tmp_path / str(i), 1, held_out=data).run(display=Quiet()).eval_loss
        for i, data in enumerate((held_out, held_out, list(map(host_batch, torch_loader()))))
    ]
    assert numbers == [numbers[0]] * 3


class Batches:
    """A fresh iterator of numbered batches at each call, which cannot be sent back."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(100):
            yield {name: np.full((4, 3), i % 7 + j) for j, name in enumerate(("inputs", "targets"))}


@needs("datasets")
def test_source_without_position_is_refused_or_restarts(tmp_path: Path):
    import datasets

    with pytest.raises(sx.errors.TrainError, match="resumable=False") as refused:
        make_trainer(tmp_path, 1, batches=Batches()).check()
    assert all(
        each in str(refused.value)
        for each in ("state() and restore()", "grain", "StatefulDataLoader", "Batches")
    )
    with pytest.raises(sx.errors.TrainError, match=r"dataset\.to_iterable_dataset\(\)\.batch"):
        make_trainer(tmp_path, 1, batches=datasets.Dataset.from_list(ROWS)).check()
    with pytest.raises(sx.errors.TrainError, match="int, which cannot be iterated over"):
        make_trainer(tmp_path, 1, batches=3, resumable=False).check()

    seen: list[int] = []

    def run(steps: int, batches: Any, resume: bool = False) -> Quiet:
        seen.clear()
        quiet = Quiet()
        trainer = make_trainer(
            tmp_path / "run", steps, batches=batches, resumable=False, log_every=1
        )
        step = trainer.train_step

        def watched(model: Any, optimizer: Any, batch: Any) -> Any:
            seen.append(int(np.asarray(batch["inputs"])[0, 0]))
            return step(model, optimizer, batch)

        trainer.train_step = watched
        trainer.run(resume=resume, display=quiet)
        return quiet

    assert not any("anew" in note for note in run(3, iter(Batches())).notes)
    assert seen == [0, 1, 2], "not one is lost to what looks at batches before the first step"
    notes = run(5, sx.train.WholeBatches(Batches(), batch_size=4), resume=True).notes
    assert "The batches have no position to go on from: they start anew." in notes
    assert seen == [0, 1]


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, "b": [1.5, None, "x", True]},
        (1, [2, (3,)]),
        {1: "int key", (2, 3): b"bytes"},
        {"__kind__": "tuple"},
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.float32(0.1),
        np.array(3),
    ],
)
def test_position_round_trips_through_json(state: Any):
    back = decoded(json.loads(json.dumps(encoded(state, "a source"))))
    assert type(back) is type(state)
    assert str(back) == str(state)
    if isinstance(state, np.ndarray | np.generic):
        assert isinstance(back, np.ndarray | np.generic)
        assert (back.dtype, back.shape) == (state.dtype, state.shape)
    assert back == state if not isinstance(state, np.ndarray) else (back == state).all()


@needs("datasets", "torchdata")
def test_mismatched_position_is_refused_and_changes_nothing():
    source = adapted(SOURCES["datasets"](), resumable=True)
    other = adapted(SOURCES["torchdata"](), resumable=True)
    shuffled = adapted(SOURCES["datasets, shuffled"](), resumable=True)
    first = [content(next(each)) for each in (source, other, shuffled)]
    for each, state in (
        (source, shuffled.state()),
        (shuffled, source.state()),
        (source, other.state()),
        (other, 3),
    ):
        with pytest.raises(sx.errors.DataError, match="cannot be continued with this"):
            each.restore(state)
    assert [content(next(each)) for each in (source, other, shuffled)] != first
    for each, builder in ((source, "datasets"), (other, "torchdata")):
        plain = adapted(SOURCES[builder](), resumable=True)
        assert [content(next(plain)) for _ in range(3)][2] == content(next(each))
    with pytest.raises(sx.errors.TrainError, match="holds a object, which cannot be written"):
        encoded({"x": object()}, "a source")


def test_local_batches_resume_only_with_equal_process_count(tmp_path: Path):
    local = sx.train.LocalBatches(SOURCES["grain.MapDataset"](), batch_size=4)
    saved = saved_position(local, local.state())
    assert saved == {"__kind__": "processes", "states": [local.state()]}
    saved["states"] *= 2
    with pytest.raises(sx.errors.DataError, match=r"saved by 2 process.*Resume with 2"):
        go_to(local, saved)
    whole = sx.train.WholeBatches(SOURCES["grain.MapDataset"](), batch_size=4)
    with pytest.raises(sx.errors.DataError, match="saved of LocalBatches, but the run now"):
        go_to(whole, saved)
    with pytest.raises(sx.errors.DataError, match="saved of other batches, but the run"):
        go_to(local, whole.state())


class Rows:
    """Batches whose own position is a number of rows."""

    def __init__(self) -> None:
        self.at = 0
        self.restored: list[Any] = []

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> dict[str, Any]:
        self.at += 1
        return {name: np.full((4, 3), self.at % 7) for name in ("inputs", "targets")}

    def state(self) -> Any:
        return {"at": self.at}

    def restore(self, state: Any) -> None:
        self.at = state["at"]
        self.restored.append(state)


def test_missing_position_is_not_handed_to_source(tmp_path: Path):
    def run(steps: int, batches: Any, *, resumable: bool, resume: bool = True) -> Quiet:
        quiet = Quiet()
        trainer = make_trainer(tmp_path, steps, batches=batches, resumable=resumable)
        trainer.run(resume=resume, display=quiet)
        return quiet

    run(2, iter(Batches()), resumable=False, resume=False)
    rows = Rows()
    with pytest.raises(DataError, match=r"on batches without a position.*Rows.*=False"):
        run(3, rows, resumable=True)
    assert rows.restored == []
    text = sx.train.ByteText.from_bytes(b"so it goes. " * 40).split(0.1)[0]
    windows = sx.train.TrainBatches(text, batch_size=4, seq_len=3)
    with pytest.raises(DataError, match="on batches without a position"):
        run(3, windows, resumable=True)
    anew = "The batches have no position to go on from: they start anew."
    assert anew in run(3, rows, resumable=False).notes
    assert all(set(state) == {"at"} for state in rows.restored)
    again = Rows()
    assert anew not in run(4, again, resumable=True).notes
    assert again.at >= 2, "it goes on after the batch of step 3"


def test_position_that_looks_like_an_internal_one_is_the_sources_own():
    position = {"step": 3, "resumable": False, "__kind__": "none"}

    class Similar(Rows):
        def state(self) -> Any:
            return position

        def restore(self, state: Any) -> None:
            self.restored.append(state)

    source = Similar()
    assert go_to(source, json.loads(json.dumps(saved_position(source, source.state()))))
    assert source.restored == [position]


def test_own_error_of_restore_names_the_source():
    with pytest.raises(DataError, match=r"with this Rows: KeyError\('at'\)"):
        go_to(Rows(), {"epoch": 1})
