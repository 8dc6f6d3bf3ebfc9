# SPDX-License-Identifier: Apache-2.0
"""Workers that the tests of this folder share, as each is a process that imports JAX."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import shardax as sx
from shardax import errors
from shardax.host import Worker
from tests.advice import run_advice


@pytest.fixture(scope="session")
def worker_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file to which the shared worker prints."""
    return tmp_path_factory.mktemp("worker") / "worker.log"


@pytest.fixture(scope="session")
def worker(worker_log: Path) -> Iterator[Worker]:
    """A worker that keeps few functions and refuses messages above a megabyte."""
    with Worker(max_message=1 << 20, functions=4, log=worker_log) as worker:
        yield worker


@pytest.fixture(scope="session")
def wide() -> jax.Array:
    """A value that a worker without 64 bits would cut."""
    with jax.enable_x64(True):
        return jax.numpy.asarray(np.float64(1))


@pytest.fixture(scope="session")
def other_worker(worker: Worker, wide: jax.Array) -> Iterator[Worker]:
    """A second worker, which the error about a value of 64 bits advises."""
    with pytest.raises(errors.WorkerError) as caught:
        worker.submit(abs, wide).result()
    with run_advice(caught.value, "sx.host.Worker(configure={'x64': True})", {"sx": sx}) as other:
        yield other
