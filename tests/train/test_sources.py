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
from shardax.train.data.sources import Positioned, decoded, encoded, go_to, saved_position
from shardax.train.data.sources import require_position as required
from tests.train.small_runs import Quiet, make_trainer, state_of

ROWS = [{"inputs": [i, i + 1, i + 2], "targets": [i + 1, i + 2, i + 3]} for i in range(22)]


def numpy_rows() -> list[Any]:
    return [{name: np.array(row) for name, row in each.items()} for each in ROWS]


def grain_dataset() -> Any:
    grain = pytest.importorskip("grain", reason="install shardax[data]")
    return grain.MapDataset.source(numpy_rows()).seed(3).shuffle().repeat(3).batch(4)


def grain_iterable() -> Any:
    return grain_dataset().to_iter_dataset()


def grain_loader() -> Any:
    grain = pytest.importorskip("grain", reason="install shardax[data]")
    sampler = grain.samplers.IndexSampler(22, shuffle=True, num_epochs=3, seed=1)
    operations = [grain.transforms.Batch(4)]
    return grain.DataLoader(data_source=numpy_rows(), sampler=sampler, operations=operations)


def hf_rows(shards: int = 2) -> Any:
    datasets = pytest.importorskip("datasets", reason="install shardax[data]")
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


def torch_loader(**options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="install shardax[data]")
    return stateful.StatefulDataLoader(numpy_rows(), batch_size=4, **options)


def torch_generator(**options: Any) -> Any:
    torch = pytest.importorskip("torch", reason="install shardax[data]")
    return torch_loader(shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def torch_distributed() -> Any:
    pytest.importorskip("torch", reason="install shardax[data]")
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(ROWS, num_replicas=2, rank=1, seed=2)  # type: ignore[arg-type]
    return torch_loader(sampler=sampler)


def torch_of_hf() -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="install shardax[data]")
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
    "datasets, mapped": lambda: (
        hf_rows()
        .map(lambda rows: {**rows, "inputs": rows["inputs"] + 0}, batched=True, batch_size=3)
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
    distributed = pytest.importorskip("datasets.distributed", reason="install shardax[data]")
    return distributed.split_dataset_by_node(hf_rows(4).shuffle(seed=1), 1, 2)


def content(batch: Any) -> str:
    """A batch as text, dtypes and all; every leaf must be a NumPy array."""
    assert all(isinstance(each, np.ndarray) for each in batch.values())
    return str({name: (str(each.dtype), each.tolist()) for name, each in sorted(batch.items())})


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_goes_on_with_the_very_batches_that_followed(name: str):
    source = required(SOURCES[name](), resumable=True)
    assert isinstance(source, Positioned)
    texts, states = [], [json.dumps(saved_position(source, source.state()))]
    for _, batch in zip(range(14), source, strict=False):
        texts.append(content(batch))
        states.append(json.dumps(saved_position(source, source.state())))
    assert len(texts) == 14, "three epochs of 22 rows, or half as many"
    for taken in (0, 1, 5, 6, 7, 12):
        again = required(SOURCES[name](), resumable=True)
        go_to(again, json.loads(states[taken]))
        go_to(again, json.loads(states[taken]))  # once more changes nothing
        assert json.dumps(saved_position(again, again.state())) == states[taken]
        assert [content(batch) for _, batch in zip(range(14 - taken), again, strict=False)] == (
            texts[taken:]
        )
    go_to(source, json.loads(states[3]))  # and back, in the same object
    assert [content(next(source)) for _ in range(9)] == texts[3:12]
