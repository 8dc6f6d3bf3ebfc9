# SPDX-License-Identifier: Apache-2.0
"""A worker: calls, results, errors, timeouts, cancellation, values that stay, many clients."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import gc
import os
import socket
import threading
import warnings
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx
from shardax import errors
from shardax.host import Remote, Worker, WorkerFuture, remote
from tests.advice import run_advice
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import has_ended, wait_for


@pytest.fixture
def running(worker, tmp_path):
    """A call that runs until it is interrupted, and the file that it writes."""
    path = tmp_path / "count"
    future = worker.submit(there.count, str(path))
    wait_for(path.exists)
    yield future, path
    future.interrupt()


# --- calls ----------------------------------------------------------------------------------------


def test_worker_is_an_executor_in_another_process(worker):
    assert isinstance(worker, Executor)
    assert worker.submit(there.process).result() == worker.info()["pid"] != os.getpid()
    assert list(worker.map(there.add, [1, 2], [10, 20], timeout=600)) == [11, 22]


def test_functions_without_import_path_travel_with_their_closure(worker):
    offset = 3
    assert worker.submit(lambda x: x + offset, 1).result() == 4
    offset = 4
    assert worker.submit(lambda x: x + offset, 1).result() == 5


def test_closure_is_never_stale(worker):
    scale = jnp.float32(2)

    def scaled(x):
        return x * scale

    first = worker.submit(scaled, 3).result()
    scale = jnp.float32(5)
    assert (float(first), float(worker.submit(scaled, 3).result())) == (6.0, 15.0)


def test_compiled_functions_are_cached_across_calls_and_clients(worker):
    def traced_in(client):
        before = client.submit(there.traces).result()
        assert client.submit(there.by_jax, jnp.ones(7)).result().tolist() == [2.0] * 7
        return len(client.submit(there.traces).result()) - len(before)

    with Worker.connect(worker.address, worker.authkey) as other:
        assert [traced_in(worker), traced_in(worker), traced_in(other)] == [1, 0, 0]


def test_jitted_function_keeps_one_identity_across_calls(worker):
    double = sx.jit(lambda x: x * 2)
    for _ in range(2):
        assert int(double(jnp.int32(2))) == int(worker.submit(double, jnp.int32(2)).result()) == 4
    assert worker.info()["functions"][-1]["calls"] == 2


def test_least_recently_used_function_goes(worker):
    for function in (there.add, max, min, sum, there.add, abs):
        worker.submit(function, *([[1]] if function is not abs and function is not there.add else
                                  [1] if function is abs else [1, 2])).result()  # fmt: skip
    names = [kept["name"] for kept in worker.info()["functions"]]
    assert names == ["min", "sum", "add", "abs"]


def test_worker_has_the_settings_of_this_process(worker):
    devices, x64, cache = worker.submit(there.settings).result()
    here = (
        jax.local_device_count(),
        jax.config.jax_enable_x64,
        jax.config.jax_compilation_cache_dir,
    )
    assert (devices, x64, cache) == here


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int64").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), "float64")),
        np.zeros((0, 3), "complex64"),
        np.array("2020-01-01", "datetime64[D]"),
        np.array(["text", None], object),
        jnp.arange(6.0).reshape(2, 3),
        jnp.ones(3, "bfloat16"),
        jnp.float32(2),
        jnp.asarray(2.0),  # weakly typed
        jnp.zeros((0, 2), "int8"),
        jax.random.key(3),
        jax.random.split(jax.random.key(3, impl="rbg"), 2),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}{array.shape}",
)
def test_arrays_arrive_as_they_are(worker, array):
    back = worker.submit(copy.copy, array).result()
    assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
    if isinstance(array, jax.Array):
        assert jax.typeof(back) == jax.typeof(array)  # weak types too
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        back, array = jax.random.key_data(back), jax.random.key_data(array)
    assert np.array_equal(back, array)


def test_transferred_numpy_arrays_are_writable_on_both_sides(worker):
    array = np.zeros(50_000)
    future = worker.submit(copy.copy, array)
    array[:] = 1
    result = future.result()
    result[0] = 7
    assert result.tolist() == [7.0] + [0.0] * 49_999


def test_layout_by_name_arrives(worker, auto_mesh):
    array = jax.device_put(jnp.arange(8.0), NamedSharding(auto_mesh, PartitionSpec("model")))
    told = worker.submit(there.tell, array).result()
    assert told[:3] == ("ArrayImpl", "float32", (8,))
    assert told[3] == str(array.sharding)
    assert worker.submit(copy.copy, array).result().sharding == array.sharding


def test_models_arrive_and_are_copies(worker):
    model = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    x = jnp.ones((1, 2))
    expected = model(x)
    assert np.array_equal(worker.submit(there.by_shardax, model, x).result(), expected)
    worker.submit(there.train, model, 1.0).result()
    assert np.array_equal(model(x), expected)


def test_value_of_64_bits_is_not_cut(worker, other_worker, wide):
    with pytest.raises(errors.WorkerError, match=r"float64\[\]"):
        worker.submit(abs, wide).result()
    assert other_worker.submit(float, wide).result() == 1.0  # it has the settings of the advice


def test_submit_refuses_what_is_being_traced(worker):
    with pytest.raises(errors.WorkerError, match=r"argument 0 of a call.*traced"):
        jax.jit(lambda x: worker.submit(abs, x).result())(1.0)


def test_submit_names_what_cannot_be_pickled(worker):
    with pytest.raises(errors.WorkerError, match="argument 'y' of a call"):
        worker.submit(there.add, 1, y=threading.Lock())
    with pytest.raises(errors.WorkerError, match="lock"):
        worker.submit(threading.Lock).result()


def test_oversized_messages_are_refused_and_the_worker_survives(worker):
    array = np.zeros(1 << 20, "int8")
    with pytest.raises(errors.WorkerError, match="max_message") as caught:
        worker.submit(len, array)
    total = str(caught.value).partition(" is ")[2].partition(" bytes")[0]
    code = f"sx.host.Worker(max_message={total})"
    with run_advice(caught.value, code, {"sx": sx}) as wider:
        assert wider.submit(len, array).result() == 1 << 20
    with pytest.raises(errors.WorkerError, match="max_message"):
        worker.submit(there.make, 1 << 20).result()
    assert worker.submit(abs, -1).result() == 1


# --- errors ---------------------------------------------------------------------------------------


def test_remote_exception_is_raised_with_its_remote_traceback(worker):
    with pytest.raises(KeyError, match="lost") as caught:
        worker.submit(there.fails, "lost").result()
    assert "raise KeyError(what)" in str(caught.value.__cause__)
    assert "worker_functions.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("function", "last_line"),
    [(there.fails_unloadably, "Unloadable: one and two"), (there.leaves, "SystemExit: 3")],
)
def test_exception_not_loadable_here_is_reported_as_text(worker, function, last_line):
    with pytest.raises(errors.WorkerError, match=last_line) as caught:
        worker.submit(function).result()
    assert f"def {function.__name__}" not in str(caught.value)
    assert function.__name__ in str(caught.value.__cause__)
    assert worker.submit(abs, -1).result() == 1


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_errors_and_tracebacks_can_be_garbage_collected(worker):
    """Python up to 3.12.4 crashes when it collects a cycle with memory of a message in it."""
    for _ in range(5):
        for function in (there.fails_unloadably, threading.Lock, there.leaves):
            with contextlib.suppress(Exception):
                worker.submit(function).result()
        with contextlib.suppress(errors.WorkerError):
            worker.submit(there.add, np.ones(3), y=threading.Lock())
        gc.collect()
        worker.submit(gc.collect).result()


# --- timeouts, cancellation -----------------------------------------------------------------------


def test_call_that_takes_too_long_is_interrupted(worker, tmp_path):
    path = tmp_path / "count"
    future = worker.request(there.count, [str(path)], timeout=0.3)
    with pytest.raises(errors.WorkerTimeoutError, match=r"count .*timeout of 0\.3 seconds"):
        future.result()
    # Where much else runs, the time may be over before the function begins.
    assert not path.exists() or path.read_text() == "CallInterrupted"
    assert worker.submit(abs, -1).result() == 1


def test_time_in_the_queue_does_not_count(worker):
    first = worker.submit(there.nap, 1.1)
    second = worker.request(there.nap, [0.01], timeout=1.0)
    assert (first.result(), second.result()) == (1.1, 0.01)


def test_cancel_works_only_before_a_call_has_begun(worker, running, tmp_path):
    future, path = running
    second = worker.submit(there.count, str(tmp_path / "second"))
    assert (second.cancel(), second.cancelled(), second.cancel()) == (True, True, True)
    assert (future.cancel(), future.running()) == (False, True)
    future.interrupt()
    with pytest.raises(errors.CallCancelledError):
        future.result()
    assert isinstance(future.exception(), concurrent.futures.CancelledError)
    assert path.read_text() == "CallInterrupted"
    worker.submit(abs, 1).result()
    assert not (tmp_path / "second").exists()


def test_call_waiting_behind_another_client_is_interruptible(worker, running, tmp_path):
    with Worker.connect(worker.address, worker.authkey) as other:
        waiting = other.submit(there.count, str(tmp_path / "second"))
        wait_for(waiting.running)
        waiting.interrupt()
        with pytest.raises(errors.CallCancelledError):
            waiting.result(600)
        assert running[0].running()
        running[0].interrupt()
        assert other.submit(abs, -1).result(600) == 1
    assert not (tmp_path / "second").exists()


def test_dropped_value_survives_for_calls_submitted_before(worker):
    kept = worker.put([1, 2])
    worker.submit(there.nap, 0.2)
    size = worker.submit(len, kept)
    del kept
    assert size.result(600) == 2


def test_interrupting_a_call_that_is_over_does_nothing(worker):
    future = worker.submit(abs, -3)
    assert future.result() == 3
    future.interrupt()
    assert (future.result(), worker.submit(abs, -4).result()) == (3, 4)


def test_waiting_for_a_result_may_be_given_up(worker, running):
    with pytest.raises(TimeoutError):
        running[0].result(timeout=0.05)
    assert running[0].running()


# --- values that stay -----------------------------------------------------------------------------


def test_function_writes_the_model_that_is_kept(worker):
    kept = worker.put(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))
    before = float(kept.get().kernel.value.sum())
    after = [worker.submit(there.train, kept, 1.0).result() for _ in range(2)]
    assert after == pytest.approx([before - 6, before - 12], abs=1e-4)
    assert repr(kept).startswith(f"Remote({kept.key}: Linear(")


def test_results_can_stay(worker):
    kept = worker.request(there.make, [3 << 20], keep=True).result()  # too large to be sent
    assert worker.submit(len, kept).result() == 3 << 20


def test_unnamed_values_are_freed_with_their_handle(worker):
    kept = worker.put(1)
    key = kept.key
    del kept
    with pytest.raises(errors.WorkerError, match=str(key)):
        Remote(worker, key, "").get()


def test_named_values_are_shared_until_deleted(worker):
    with Worker.connect(worker.address, worker.authkey) as other:
        other.put([1, 2], name="pair")
        own = other.put(3)
    assert worker.value("pair").get() == [1, 2]
    assert worker.info()["values"] == ["pair"]
    worker.value("pair").delete()
    for gone in (worker.value("pair"), Remote(worker, own.key, "")):
        with pytest.raises(errors.WorkerError, match="keeps no value"):
            gone.get()


def test_put_result_cannot_be_used_elsewhere(worker):
    kept = worker.put(1)
    other = Worker.connect(worker.address, worker.authkey)
    with other, pytest.raises(errors.WorkerError, match="another worker"):
        other.submit(abs, kept)
    with pytest.raises(errors.WorkerError, match="cannot be pickled"):
        copy.deepcopy(kept)


# --- many clients ---------------------------------------------------------------------------------


def test_worker_serves_many_clients_and_threads_at_once(worker):
    def work(client, start):
        return list(client.map(there.add, range(start, start + 20), [1] * 20))

    clients = [Worker.connect(worker.address, worker.authkey) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, clients * 2, range(0, 160, 20)))
    assert [number for numbers in found for number in numbers] == list(range(1, 161))
    wait_for(lambda: worker.info()["clients"] == 5)  # those of other tests may be leaving
    for client in clients:
        client.shutdown()
    wait_for(lambda: worker.info()["clients"] == 1)


def test_client_that_goes_takes_its_calls_along(worker, tmp_path):
    path = tmp_path / "count"
    other = Worker.connect(worker.address, worker.authkey)
    running = other.submit(there.count, str(path))
    waiting = other.submit(there.count, str(tmp_path / "second"))
    wait_for(path.exists)
    other._connection.close()
    assert worker.submit(abs, -1).result(600) == 1
    assert path.read_text() == "CallInterrupted"
    assert not (tmp_path / "second").exists()
    for future in (running, waiting):
        assert isinstance(future.exception(600), errors.WorkerCrashedError)


# --- life -----------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A worker that was shut down during a call."""

    worker: Worker
    other: Worker  # another client of it
    pid: int
    running: WorkerFuture
    waiting: WorkerFuture


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """One that the error about something that is no executor advises."""
    with pytest.raises(errors.WorkerError, match="submit") as caught:
        remote(there.add, executor=3)
    worker = run_advice(caught.value, "sx.host.Worker()", {"sx": sx})
    other = Worker.connect(worker.address, worker.authkey)
    pid = worker.info()["pid"]
    cancelled = tmp_path_factory.mktemp("ended") / "cancelled"
    running, waiting = worker.submit(there.hold, cancelled), worker.submit(there.nap, 10)
    waiting.add_done_callback(lambda _: cancelled.touch())
    wait_for(running.running)
    worker.shutdown(cancel_futures=True)
    yield Ended(worker, other, pid, running, waiting)
    other.shutdown()


def test_shutdown_refuses_calls_and_ends_the_process(ended):
    assert (ended.running.result(), ended.waiting.cancelled()) == ("released", True)
    with pytest.raises(RuntimeError, match="shut"):
        ended.worker.submit(abs, 1)
    with pytest.raises(RuntimeError, match=r"shut down.*sx\.host\.Worker\(\)"):
        ended.worker.restart()
    _, port = ended.worker.address.rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
    with pytest.raises(ProcessLookupError):
        os.kill(ended.pid, 0)
    ended.worker.shutdown()


def test_connecting_to_an_ended_worker_is_refused(ended):
    wait_for(lambda: not ended.other.is_running)
    with pytest.raises(errors.WorkerCrashedError):
        ended.other.submit(abs, -1)
    with pytest.raises(errors.WorkerCrashedError, match="No worker listens"):
        Worker.connect(ended.worker.address, ended.worker.authkey)
    ended.other.shutdown()
    assert has_ended(ended.pid)


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"heartbeat": -1.0}, {"functions": "many"}, {"name": "a/b"}],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(errors.WorkerError):
        Worker(**options)


def test_late_worker_is_given_more_time():
    with pytest.raises(errors.WorkerError, match=r"within 0\.01 seconds") as caught:
        Worker(start_timeout=0.01)
    with pytest.raises(errors.WorkerError, match=r"within 0\.02 seconds"):
        run_advice(caught.value, "sx.host.Worker(start_timeout=0.02)", {"sx": sx})


def test_settings_that_do_not_fit_say_so():
    with pytest.raises(errors.WorkerError, match=r"ConfigureError.*x64='maybe'"):
        Worker(configure={"x64": "maybe"})


# --- what it prints -------------------------------------------------------------------------------


def test_worker_output_goes_to_its_readable_log(worker, worker_log, capfd):
    worker.submit(os.write, 2, b"of the call\n").result()
    # The read itself prints nothing, so both see the same.
    assert worker.submit(os.pread, 2, 100_000, 0).result() == worker_log.read_bytes()
    assert worker_log.read_text().endswith("of the call\n")
    assert capfd.readouterr() == ("", "")


def test_named_worker_refuses_a_log_argument(tmp_path):
    with pytest.raises(errors.WorkerError, match=r"omit log=\."):
        Worker(name="shardax-test-log", log=tmp_path / "worker.log")


# --- forks ----------------------------------------------------------------------------------------


def in_fork(action):
    """Calls a function in a fork of this process; returns the text of its result or error."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX: the fork uses nothing of it
        child = os.fork()
    if child == 0:
        try:
            text = repr(action())
        except BaseException as error:  # noqa: BLE001 (told to the parent)
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_fork_of_its_owner_gets_an_error_at_once(worker, running):
    kept, (future, _), process = worker.value("kept"), running, worker.info()["pid"]
    for use in (
        lambda: worker.submit(abs, -1),
        lambda: list(worker.map(abs, [-1])),
        lambda: worker.put(1),
        worker.info,
        worker.restart,
        worker.stop,
        kept.get,
        kept.delete,
        future.result,
        future.exception,
    ):
        told = in_fork(use)
        assert told.startswith(f"WorkerError: This worker belongs to process {os.getpid()}, of")
    assert in_fork(lambda: worker.is_running) == "False"
    assert f"of process {os.getpid()})" in in_fork(worker.__repr__)
    assert in_fork(worker.shutdown) == "None", "of a block that the fork leaves"
    assert (worker.info()["pid"], future.running()) == (process, True), "it is as it was"


def test_fork_connects_as_advised(worker):
    def connect():
        try:
            worker.submit(abs, -1)
        except errors.WorkerError as error:
            names = {"sx": sx, "worker": worker}
            code = "other = sx.host.Worker.connect(worker.address, worker.authkey)"
            run_advice(error, code, names)
            return names["other"].submit(abs, -2).result()

    assert in_fork(connect) == "2"
