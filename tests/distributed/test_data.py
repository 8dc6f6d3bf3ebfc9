# SPDX-License-Identifier: Apache-2.0
"""Batches over several processes: by what the devices hold, never by the process's number."""

from pathlib import Path

from tests.distributed.processes import run

BATCHES = [
    {"row": list(range(first, first + 8)), "pair": [[row, -row] for row in range(first, first + 8)]}
    for first in (0, 8)
]


def test_each_process_reads_the_rows_of_its_devices_on_any_mesh(tmp_path: Path):
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
