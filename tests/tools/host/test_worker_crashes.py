# SPDX-License-Identifier: Apache-2.0
"""Workers that crash, hang or do not stop: what becomes of their calls, and of what they kept."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest

from shardax import errors
from shardax.host import Worker
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import has_ended, wait_for


@pytest.fixture(scope="module")
def worker():
    with Worker(kill_after=0.5, heartbeat=0.5, restarts=1) as worker:
        yield worker


def test_crash_loses_values_and_repeats_idempotent_calls_alone(worker, tmp_path):
    kept = worker.put(3)
    before = worker.submit(there.process).result()
    all_sent = tmp_path / "all_sent"
    worker.submit(there.hold, all_sent)  # so no call is made after the crash
    first = worker.request(there.crash_once, [str(tmp_path / "seen")], idempotent=True)
    waiting = worker.submit(there.nap, 0.0)
    second = worker.request(there.add, [1, 2], idempotent=True)
    all_sent.touch()
    with pytest.raises(errors.WorkerCrashedError, match=r"nap was lost before it began.*SIGKILL"):
        waiting.result()
    assert "idempotent=True" in str(waiting.exception())
    assert first.result() != before
    assert second.result() == 3
    assert worker.submit(there.process).result() == first.result()
    with pytest.raises(errors.WorkerError, match="started anew"):
        kept.get()


def test_uninterruptible_call_ends_the_worker_process(worker, tmp_path):
    path = tmp_path / "deaf"
    before = worker.submit(there.process).result()
    future = worker.submit(there.deaf, path)
    wait_for(path.exists)
    future.interrupt()
    with pytest.raises(
        errors.WorkerCrashedError, match=r"deaf was lost while it ran.*not be interrupted"
    ):
        future.result()
    assert path.exists()
    assert worker.submit(there.process).result() != before


def test_process_that_does_not_answer_is_replaced(worker):
    before = worker.submit(there.process).result()
    with pytest.raises(errors.WorkerCrashedError, match=r"did not answer for \d.* was killed"):
        worker.submit(there.stop_process).result()
    assert has_ended(before)
    assert worker.submit(there.process).result() != before


def test_restart_beside_a_crash_leaves_the_new_process(worker, monkeypatch):
    crashed = worker._connection
    pids = []

    def crash_first(*_):
        os.kill(worker_pid, signal.SIGKILL)
        wait_for(lambda: worker._connection is not crashed)
        pids.append(worker.info()["pid"])
        raise errors.WorkerCrashedError("it crashed")

    worker_pid = worker.submit(there.process).result()
    monkeypatch.setattr(crashed, "ask", crash_first)
    worker.restart()
    assert worker.submit(there.process).result() == pids[0] != worker_pid


def test_worker_that_only_crashes_is_given_up(worker):
    """The last test of this worker. An idempotent call that crashes is not repeated for ever."""
    poison = worker.request(there.crash, idempotent=True)
    with pytest.raises(errors.WorkerCrashedError, match=r"crash was lost while it ran.*SIGKILL"):
        poison.result()
    with pytest.raises(errors.WorkerCrashedError, match="2 times in a row"):
        worker.submit(abs, -1)
    assert repr(worker).endswith("lost)")


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_process_ends_when_its_worker_is_collected():
    worker = Worker()
    pid = worker.submit(there.process).result()
    del worker
    gc.collect()
    wait_for(lambda: has_ended(pid))


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_process_ends_with_the_parent_program(how):
    program = (
        "import os, signal, sys; from shardax.host import Worker; worker = Worker(); "
        "print(worker.info()['pid'], flush=True); "
        + ("os.kill(os.getpid(), signal.SIGKILL)" if how == "is killed" else "")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == (-signal.SIGKILL if how == "is killed" else 0)
    wait_for(lambda: has_ended(int(done.stdout)))
