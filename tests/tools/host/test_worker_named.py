# SPDX-License-Identifier: Apache-2.0
"""Workers with a name outlive programs, and are found again by programs of the same user only."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from shardax import errors
from shardax.host import Worker
from tests.child_processes import run_here
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import has_ended, wait_for

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from shardax.host import Worker
TRACES = []

@jax.jit
def double(x):
    TRACES.append(1)
    return x * 2

def doubled(x):
    return double(x), len(TRACES)

worker = Worker(name="lab", idle_timeout=30.0)
result, traces = worker.submit(doubled, jnp.arange(3)).result()
print(json.dumps([result.tolist(), traces, worker.info()["pid"]]))
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where these tests have their workers; the one with the name "lab" ends with them."""
    parent = tmp_path_factory.mktemp("runtime")
    folder = parent / f"shardax-workers-{os.getuid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(parent))
        yield folder
    if (folder / "lab.json").exists():
        kept = json.loads((folder / "lab.json").read_text())
        with contextlib.suppress(errors.WorkerCrashedError):  # it has ended
            Worker.connect(kept["address"], kept["key"].encode()).stop()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder for one test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"shardax-workers-{os.getuid()}"


@pytest.fixture
def lab():
    """A client of one worker for all tests, which starts where it is not running."""
    worker = Worker(name="lab", idle_timeout=30.0)
    yield worker
    worker.shutdown()


def test_named_worker_outlives_its_client_with_what_it_kept(lab):
    pid = lab.info()["pid"]
    lab.put({"step": 3}, name="state")
    lab.shutdown()
    again = Worker(name="lab", idle_timeout=30.0)
    assert again.info()["pid"] == pid
    assert again.value("state").get() == {"step": 3}
    again.shutdown()


def test_programs_share_named_worker_and_its_compiled_functions(lab, capsys):
    """One program is another process, and this process is the other."""
    run_here(PROGRAM)["worker"].shutdown()
    here = capsys.readouterr().out
    other = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True)
    assert json.loads(here) == json.loads(other.stdout) == [[0, 2, 4], 1, lab.info()["pid"]]


def test_its_key_is_for_this_user_alone(lab, folder):
    kept = folder / "lab.json"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert lab.authkey.decode() == json.loads(kept.read_text())["key"]


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_folder_that_others_can_enter_is_refused(own_folder, mode):
    own_folder.mkdir()
    own_folder.chmod(mode)
    with pytest.raises(errors.WorkerError, match="chmod 700"):
        Worker(name="lab")


def test_folder_that_is_a_link_is_refused(own_folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.WorkerError, match="chmod 700"):
        Worker(name="lab")


def test_named_worker_that_crashed_is_started_anew(lab):
    pid = lab.info()["pid"]
    with pytest.raises(errors.WorkerCrashedError, match="'lab' was lost"):
        lab.submit(there.crash).result()
    assert lab.submit(there.process).result() != pid
    assert lab.submit(there.add, jnp.ones(2), 1).result().tolist() == [2.0, 2.0]


def test_named_worker_refuses_other_options_than_it_runs_with(lab, folder):
    """The last test of this worker, which it stops."""
    pid = lab.info()["pid"]
    with pytest.raises(errors.WorkerError, match="other options"):
        Worker(name="lab", configure={"x64": True})
    assert lab.submit(abs, -1).result() == 1
    wait_for(lambda: lab.info()["clients"] == 1)
    lab.stop()
    wait_for(lambda: has_ended(pid))
    time.sleep(0.5)  # who was refused does not start another one
    with pytest.raises(errors.WorkerCrashedError):
        Worker.connect(lab.address, lab.authkey)
    assert len(list(folder.glob("*.json"))) == 1
    assert f'"pid": {pid},' in (folder / "lab.json").read_text()


def test_named_worker_without_clients_ends_after_a_while():
    """Its time without clients begins when the first has gone, however long that took to come."""
    worker = Worker(name="short", idle_timeout=0.01)
    pid = worker.info()["pid"]
    time.sleep(0.5)
    assert worker.info()["pid"] == pid
    worker.shutdown()
    wait_for(lambda: has_ended(pid))
