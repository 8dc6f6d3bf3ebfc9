# SPDX-License-Identifier: Apache-2.0
"""Who may reach a worker: the loopback, TLS, credentials that nobody else sees."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from distributed import Security

import shardax as sx
from shardax import errors
from shardax.host import Worker, connections
from shardax.host.worker_process import credentials_of
from tests.advice import run_advice
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import wait_for


def works(worker):
    return worker.submit(abs, -1).result(20) == 1


def port_of(worker):
    return int(worker.address.rpartition(":")[2])


def raw(worker):
    return socket.create_connection(("127.0.0.1", port_of(worker)), 20)


def is_over(connection):
    """Whether a worker ends a connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


# --- credentials ----------------------------------------------------------------------------------


def test_connect_refuses_other_credentials(worker):
    other = credentials_of(Security.temporary())
    with pytest.raises(errors.WorkerAuthenticationError, match=r"worker\.authkey") as caught:
        Worker.connect(worker.address, other)
    code = "sx.host.Worker.connect(worker.address, worker.authkey)"
    with run_advice(caught.value, code, {"sx": sx, "worker": worker}) as client:
        assert works(client)
    assert works(worker)


def test_client_without_a_certificate_is_refused(worker):
    """One that trusts the worker, and has nothing to show itself."""
    certificate = worker.authkey.decode().partition("-----BEGIN PRIVATE KEY")[0]
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with (
        raw(worker) as plain,
        context.wrap_socket(plain) as connection,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        connection.recv(100)  # with TLS 1.3 the refusal comes with the first that is read
    assert works(worker)


@pytest.mark.parametrize(
    "key", [b"", b"short", None, "a text", b"-----BEGIN A-----\nx\n-----END A-----\n"], ids=repr
)
def test_connect_refuses_what_are_no_credentials_before_connecting(key):
    with pytest.raises(errors.WorkerError, match=r"worker\.authkey"):
        Worker.connect("tls://127.0.0.1:1", key)


@pytest.mark.parametrize("sent", [b"", b"hello", b"\x16\x03\x01" + b"\xff" * 200, b"\x80\x05."])
def test_worker_reads_nothing_without_tls(worker, sent):
    with raw(worker) as connection:
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # it may have been cut off already
            connection.shutdown(socket.SHUT_WR)
        assert is_over(connection)
    assert works(worker)


def test_client_that_says_nothing_holds_up_nobody(worker):
    with raw(worker), raw(worker):
        assert works(worker)
        with Worker.connect(worker.address, worker.authkey) as other:
            assert works(other)


def test_listener_without_the_credentials_is_no_worker(worker, monkeypatch):
    """They are proved in both directions, so nothing is unpickled from an impostor."""
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.sendall(b"\x80\x05cos\n_exit\n")

        threading.Thread(target=impostor, daemon=True).start()
        address = f"tls://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises((errors.WorkerAuthenticationError, errors.WorkerCrashedError)):
            Worker.connect(address, worker.authkey)
        listener.shutdown(socket.SHUT_RDWR)


def test_worker_with_other_credentials_is_rejected(worker, other_worker):
    with pytest.raises(errors.WorkerAuthenticationError):
        Worker.connect(other_worker.address, worker.authkey)


def test_worker_listens_at_the_loopback_only(worker):
    assert worker.address == f"tls://127.0.0.1:{port_of(worker)}"
    inode_ports = []
    with open("/proc/net/tcp") as table, contextlib.suppress(StopIteration):
        next(table)
        for line in table:
            _, local, _, state = line.split()[:4]
            address, port = local.split(":")
            if state == "0A" and int(port, 16) == port_of(worker):
                inode_ports.append(address)
    assert inode_ports == ["0100007F"]


def test_credentials_are_random_and_seen_by_nobody(worker, other_worker):
    key = worker.authkey
    assert b"PRIVATE KEY" in key
    assert len({key, other_worker.authkey}) == 2
    pid = worker.info()["pid"]
    lines = [line for line in key.splitlines() if not line.startswith(b"-----")]
    for file in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{file}", "rb") as seen:
            content = seen.read()
        assert not any(line in content for line in lines)
    assert not any(line.decode() in repr(worker) for line in lines)


# --- what is sent ---------------------------------------------------------------------------------


def test_worker_of_another_python_is_refused(worker, monkeypatch):
    from shardax.host import worker_process

    monkeypatch.setattr(worker_process, "python_version", lambda: "2.7")
    with pytest.raises(errors.WorkerError, match=r"this process Python 2\.7"):
        Worker.connect(worker.address, worker.authkey)
    assert works(worker)


PROGRAM = """
import os, signal, sys
from shardax.host import Worker
from tests.tools.host import worker_functions as there
from tests.tools.host.waiting import wait_for
worker = Worker.connect(sys.argv[1], sys.stdin.buffer.read())
future = worker.submit(there.count, sys.argv[2])
wait_for(future.running)
wait_for(lambda: os.path.exists(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_client_killed_during_call_leaves_worker_running(worker, tmp_path):
    path = tmp_path / "count"
    kept = worker.put(3)
    subprocess.run(
        [sys.executable, "-c", PROGRAM, worker.address, str(path)],
        input=worker.authkey,
        check=False,
        cwd=os.getcwd(),
    )
    assert works(worker)
    assert path.read_text() == "CallInterrupted"
    assert kept.get() == 3
    wait_for(lambda: worker.info()["clients"] == 1)


def test_procedure_that_there_is_not_harms_nobody(worker):
    connection = worker._connection
    for message in ({"op": "reboot"}, {"no": "op"}, {"op": "run"}, ["run"], None):

        async def send(message=message):
            comm = await connections_of(worker)
            await comm.write(message)
            comm.abort()

        connection._run(send())
        assert works(worker)


async def connections_of(worker):
    from distributed.core import connect

    return await connect(worker.address, **worker._connection._rpc.connection_args)


def test_call_of_nobody_is_not_run(worker):
    """Whoever has the credentials may send anything; only attached clients can call."""
    connection = worker._connection
    call = {"client": "nobody", "number": 1}
    request = {"name": "f", "head": b"", "parts": [], "keep": False, "timeout": None}
    assert connection._run(connection._rpc.run(**call, **request)) is None
    assert connection._run(connection._rpc.interrupt(**call)) is False
    assert works(worker)


def test_call_runs_in_the_main_thread(worker):
    assert worker.submit(there.thread_name).result() == "MainThread"
