# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests with several processes: functions from JSON to JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx


def mesh_of(sizes: dict[str, int], *, transposed: bool = False) -> Any:
    """A mesh over all devices; transposed: neighbours along the first axis share a process."""
    devices = np.array(jax.devices())
    order = devices.reshape(tuple(sizes.values())[::-1]).T if transposed else devices
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(order.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def whole(array: Any) -> Any:
    """All numbers of an array, as a list."""
    replicated = NamedSharding(array.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(array)).tolist()


def read_rows(start: int, stop: int) -> dict[str, Any]:
    """Rows that hold their own numbers."""
    rows = np.arange(start, stop)
    return {"row": rows, "pair": np.stack([rows, -rows], axis=1)}


def batches_on_meshes(meshes: list[Any], folder: Path) -> list[Any]:
    """For each mesh: the numbers of two batches, which rows were read here, and the position."""
    found = []
    rows: Any = None
    for sizes, transposed in meshes:
        mesh = mesh_of(sizes, transposed=transposed)
        read: list[int] = []

        def source(start: int, stop: int, read: list[int] = read) -> Any:
            read.extend(range(start, stop))
            return read_rows(start, stop)

        rows = NamedSharding(mesh, PartitionSpec("data"))
        pairs = NamedSharding(mesh, PartitionSpec("data", "model" if "model" in sizes else None))
        batches = sx.train.RowBatches(source, batch_size=8)
        with sx.train.Prefetch(batches, {"row": rows, "pair": pairs}) as taken:
            values = [jax.tree.map(whole, next(taken)) for _ in range(2)]
            state = taken.state()
        found.append([values, sorted({row for row in read if row < 8}), state["step"]])
    same_everywhere = [read_rows(0, 8), read_rows(8, 16)]
    with sx.train.Prefetch(sx.train.WholeBatches(same_everywhere, batch_size=8), rows) as taken:
        found.append([jax.tree.map(whole, batch) for batch in taken])
    try:
        sx.train.Prefetch(same_everywhere, rows)
    except sx.errors.PrefetchError as error:
        found.append(str(error))
    return found


def main() -> None:
    """Runs one program as one of the processes."""
    program, arguments, coordinator, processes, process, folder = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(processes), int(process))
    result = globals()[program](json.loads(arguments), Path(folder))
    Path(folder, f"result{process}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
