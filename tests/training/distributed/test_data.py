# SPDX-License-Identifier: Apache-2.0
"""Batches over several processes: by what the devices hold, never by the process's number."""

import signal
from pathlib import Path

import pytest

import shardax as sx
from shardax.train.checkpoint_files import verify
from tests.training.distributed.processes import ends, run, started
from tests.training.distributed.programs import rows_of_this_process
from tests.training.train.small_runs import Quiet, make_trainer

BATCHES = [
    {"row": list(range(first, first + 8)), "pair": [[row, -row] for row in range(first, first + 8)]}
    for first in (0, 8)
]


def test_batches_of_each_process_are_the_rows_of_its_devices(tmp_path: Path):
    meshes = [
        ({"data": 4}, False),
        ({"data": 2, "model": 2}, False),  # a process is one part of data
        ({"data": 2, "model": 2}, True),  # a process is one part of model: both need all rows
        ({"data": 4}, True),
    ]
    first, second = run("batches_on_meshes", meshes, tmp_path)
    low, high, all_rows = [0, 1, 2, 3], [4, 5, 6, 7], list(range(8))
    assert [rows for _, rows, _ in first[:4]] == [low, low, all_rows, low]
    assert [rows for _, rows, _ in second[:4]] == [high, high, all_rows, high]
    for here in (first, second):
        assert [values for values, _, _ in here[:4]] == [BATCHES] * 4
        assert [step for _, _, step in here[:4]] == [2] * 4
        assert here[4] == BATCHES
        assert "not known which rows of a global batch a list gives" in here[5]
        assert "train.WholeBatches(batches, batch_size=...)" in here[5]


def test_local_batches_resume_bit_for_bit_after_kill(tmp_path: Path):
    with started("local_run", {"dies": True}, tmp_path) as running:
        died = ends(running, tmp_path)
    assert [each.status for each in died] == [-signal.SIGKILL] * 2, died
    checkpoints = sx.train.Checkpoints(tmp_path / "run" / "checkpoints")
    description = verify(checkpoints.path(checkpoints.steps()[-1]))
    first, second = description["extra"]["data"]["states"]
    assert first != second, "each process has a position of its own"

    here, there = run("local_run", {"dies": False}, tmp_path)
    assert here == there
    resumed, whole, shared, uneven = here
    assert resumed == whole
    assert "DataError: LocalBatches need a batch of which each process holds 4" in shared
    assert "train.WholeBatches" in shared
    assert "DistributedError: The 2 processes differ in\n  batch" in uneven

    alone = sx.train.LocalBatches(rows_of_this_process(8), batch_size=8)
    with pytest.raises(sx.errors.DataError, match=r"saved by 2 process.*Resume with 2"):
        make_trainer(tmp_path / "run", 9, batches=alone).run(resume=True, display=Quiet())
