# SPDX-License-Identifier: Apache-2.0
"""``remote``: one function, on a worker, a process pool, or a cluster of Dask."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import errors
from shardax.host import remote
from tests.tools.host import worker_functions as there


def test_remote_works_as_call_decorator_and_with_options(worker):
    @remote(executor=worker)
    def negative(x):
        return -x

    @remote(executor=worker, keep=True, timeout=30, idempotent=True)
    def kept(x):
        return x

    assert remote(there.process, executor=worker)() == worker.info()["pid"]
    assert (negative(3), negative.submit(x=4).result(), kept([5]).get()) == (-3, -4, [5])
    assert repr(negative).startswith("RemoteFunction(test_remote_works")


def test_methods_partials_and_modules_run_on_a_copy(worker):
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    x = jnp.ones((1, 2))
    for function in (model, model.__call__, sx.jit(model)):
        assert np.array_equal(remote(function, executor=worker)(x), model(x))


def test_options_reach_the_worker(worker):
    with pytest.raises(errors.WorkerTimeoutError):
        remote(there.nap, executor=worker, timeout=0.1)(60)


def test_default_executor_is_one_worker_per_process():
    one, other = remote(there.process)(), remote(there.process)()
    assert one == other != os.getpid()


@pytest.mark.parametrize(
    "option", [{"timeout": 3}, {"idempotent": True}, {"keep": "name"}], ids=str
)
def test_options_of_workers_are_refused_for_other_executors(option):
    with ThreadPoolExecutor() as pool, pytest.raises(errors.WorkerError, match=next(iter(option))):
        remote(there.add, executor=pool, **option)


def test_remote_sends_bytes_to_other_executors_and_returns_futures(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        add = remote(there.add, executor=pool)
        assert add(jnp.arange(2), 1).tolist() == [1, 2]
        with pytest.raises(KeyError, match="lost"):
            remote(there.fails, executor=pool)("lost")
        cancelled = tmp_path / "cancelled"
        running = remote(there.hold, executor=pool).submit(cancelled)
        waiting = remote(there.nap, executor=pool).submit(60)
        assert waiting.cancel()
        cancelled.touch()
        assert running.result() == "released"


def test_process_pool_keeps_what_was_compiled():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        double = remote(lambda x: there.by_jax(x), executor=pool)
        assert [double(jnp.ones(3)).tolist() for _ in range(2)] == [[2.0] * 3] * 2
        assert remote(there.traces, executor=pool)() == ["by_jax"]


@pytest.mark.filterwarnings("ignore")  # those of Dask and Tornado, about themselves
def test_dask_cluster_serves_as_executor(tmp_path):
    import distributed

    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    scale = 2.0

    @sx.jit
    def scaled(model, x):
        return model(x) * scale

    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        futures = [
            remote(scaled, executor=executor).submit(model, jnp.full((1, 2), i)) for i in range(4)
        ]
        for i, future in enumerate(futures):
            assert np.allclose(future.result(600), scaled(model, jnp.full((1, 2), i)), atol=1e-6)
        naps = [remote(there.process_after, executor=executor).submit(0.3, i) for i in range(4)]
        assert len({future.result(600) for future in naps} - {os.getpid()}) == 2
        with pytest.raises(KeyError, match="lost"):
            remote(there.fails, executor=executor)("lost")
