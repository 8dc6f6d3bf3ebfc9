# SPDX-License-Identifier: Apache-2.0
"""Who may reach a worker, and what may be sent to it: anything else ends that connection only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from multiprocessing.connection import Client, Listener

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.host import worker_functions as there
from tests.host.waiting import wait_for

from shardax import errors
from shardax.host import Worker
from shardax.host.workers import channel, server
from shardax.host.workers.channel import Channel, authenticate
from shardax.host.workers.messages import (
    FROM_CLIENT,
    KINDS,
    VERSION,
    Message,
    read_header,
)

LIMIT = 1 << 20


@pytest.fixture(scope="module", params=["Unix socket", "TCP"])
def worker(request):
    host = None if request.param == "Unix socket" else "127.0.0.1"
    with Worker(host=host, max_message=LIMIT) as worker:
        yield worker


@contextlib.contextmanager
def raw(worker):
    """An authenticated connection on which anything can be sent, after the greetings."""
    connection = Client(worker.address)
    authenticate(connection, worker.authkey, first=False)
    connection.send_bytes(Message("hello", about=server.greeting()).header())
    assert b'"hello"' in connection.recv_bytes()
    with connection:
        yield connection


def is_over(connection):
    """Whether the worker ends a connection, whatever it says before."""
    try:
        while connection.poll(20):
            connection.recv_bytes()
    except (EOFError, OSError):
        return True
    return False


def works(worker):
    return worker.submit(abs, -1).result(20) == 1


# --- the key --------------------------------------------------------------------------------------


def test_another_key_is_refused(worker):
    with pytest.raises(errors.WorkerAuthenticationError, match=r"worker\.authkey"):
        Worker.connect(worker.address, b"another key of enough bytes")
    assert works(worker)


@pytest.mark.parametrize("key", [b"", b"short", None, "a text of enough characters"], ids=repr)
def test_what_is_no_key_is_refused_before_connecting(key):
    with pytest.raises(errors.WorkerConfigError, match="16 bytes"):
        Worker.connect("/nowhere", key)


def test_a_worker_does_not_listen_without_a_key(tmp_path):
    with pytest.raises(errors.WorkerConfigError, match="0 bytes"):
        server.Server({"key": "", "folder": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [b"", b"#WELCOME#", b"x" * 32, b"\x80\x05."], ids=repr)
def test_without_the_key_nothing_is_read(worker, answer):
    with Client(worker.address) as connection:
        assert b"#CHALLENGE#" in connection.recv_bytes()
        connection.send_bytes(answer)
        with contextlib.suppress(OSError):  # it may have been cut off already
            connection.send_bytes(Message("exit").header())
        assert is_over(connection)
    assert works(worker)


def test_a_client_that_says_nothing_holds_up_nobody(worker):
    with Client(worker.address), Client(worker.address):
        assert works(worker)
        with Worker.connect(worker.address, worker.authkey) as other:
            assert works(other)


def test_who_does_not_answer_the_challenge_in_time_is_cut_off(monkeypatch, tmp_path):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.2)
    with Listener(str(tmp_path / "socket")) as listener, Client(listener.address) as silent:
        connection = listener.accept()
        with pytest.raises(EOFError):
            authenticate(connection, b"0123456789abcdef", first=True)
        assert is_over(silent)


def test_a_listener_without_the_key_is_no_worker(tmp_path):
    """The key is proved in both directions, so nothing is unpickled from an impostor."""
    with Listener(str(tmp_path / "socket")) as listener:
        connecting = socket.socket(socket.AF_UNIX)
        connecting.connect(listener.address)
        from threading import Thread

        def impostor():
            with listener.accept() as connection:
                connection.send_bytes(b"#CHALLENGE#" + b"0" * 20)
                connection.recv_bytes()
                connection.send_bytes(b"#WELCOME#")
                connection.recv_bytes()
                connection.send_bytes(b"made up")
                is_over(connection)

        connecting.close()
        listener.accept().close()
        thread = Thread(target=impostor)
        thread.start()
        with pytest.raises(errors.WorkerAuthenticationError):
            Worker.connect(listener.address, b"0123456789abcdef")
        thread.join()


def test_the_socket_and_its_folder_are_for_this_user_alone(worker):
    if isinstance(worker.address, tuple):
        assert worker.address[0] == "127.0.0.1"
        return
    modes = [os.stat(path).st_mode for path in (worker.address, os.path.dirname(worker.address))]
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o700]
    assert stat.S_ISSOCK(modes[0])


def test_keys_are_random_and_seen_by_nobody(worker):
    key = worker.authkey
    with Worker() as other:
        assert len({key, other.authkey}) == 2
    pid = worker.info()["pid"]
    for file in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{file}", "rb") as seen:
            content = seen.read()
        assert key not in content
        assert key.hex().encode() not in content
    assert key.hex() not in repr(worker)
    assert repr(key) not in repr(worker)


# --- what is sent ---------------------------------------------------------------------------------

VALID = {"v": VERSION, "kind": "ping", "id": 1, "about": {}, "sizes": []}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
headers = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(sorted(VALID)), json_values).map(
        lambda changes: json.dumps({**VALID, **changes}).encode()
    ),
    st.sampled_from([b"[" * 100_000, b"9" * 10_000, b"\xff\xfe", b"\x80\x05."]),
)


@given(headers)
def test_any_bytes_are_a_message_or_an_error(data):
    try:
        message, sizes = read_header(data, LIMIT)
    except errors.WorkerProtocolError:
        return
    assert message.kind in KINDS
    assert sum(sizes) <= LIMIT


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v": VERSION + 1}, "version 2"),
        ({"v": None}, "version None"),
        ({"kind": "reboot"}, "reboot"),
        ({"kind": ["ping"]}, "unknown kind"),
        ({"id": -1}, "number -1"),
        ({"id": True}, "number True"),
        ({"about": []}, "without facts"),
        ({"sizes": [-5]}, "sizes"),
        ({"sizes": [LIMIT, 1]}, "limit"),
        ({"sizes": [1 << 70]}, "sizes"),
        ({"sizes": [True]}, "sizes"),
        ({"kind": "result"}, "clients do not send"),
        ({"kind": "hello"}, "clients do not send"),
    ],
)
def test_a_malformed_message_ends_its_connection_and_says_why(worker, changes, says):
    with raw(worker) as connection:
        connection.send_bytes(json.dumps({**VALID, **changes}).encode())
        refusal = json.loads(connection.recv_bytes())
        assert refusal["kind"] == "refused"
        assert says in refusal["about"]["text"]
        assert is_over(connection)
    assert works(worker)


@settings(max_examples=15)
@given(st.lists(headers, min_size=1, max_size=3))
def test_fuzzed_messages_harm_nobody_else(worker, sent):
    with raw(worker) as connection, contextlib.suppress(OSError):
        for data in sent:
            connection.send_bytes(data)
    assert works(worker)


@pytest.mark.parametrize(
    "octets",
    [
        b"\xff\xff\xff\xff" + b"\xff" * 8,  # a length of 2**64 - 1
        b"\x7f\xff\xff\xff",  # a header of 2 GiB
        b"\x80\x00\x00\x00",  # a negative length
        b"\x00\x00\x00\x10abc",  # ends in the middle
    ],
    ids=["2**64", "2 GiB", "negative", "cut off"],
)
def test_lengths_are_not_believed(worker, octets):
    with raw(worker) as connection:
        os.write(connection.fileno(), octets)
        if len(octets) > 4 and octets[0] == 0:
            connection.close()
        else:
            assert is_over(connection)
    assert works(worker)


def test_parts_that_do_not_come_hold_up_nobody(worker):
    with raw(worker) as connection:
        header = {**VALID, "kind": "call", "sizes": [LIMIT]}
        connection.send_bytes(json.dumps(header).encode())
        connection.send_bytes(b"x" * 10)
        assert works(worker)


@pytest.mark.parametrize("frame", [b"", b"x" * 11], ids=["empty", "too long"])
def test_frames_that_do_not_fit_end_the_connection(worker, frame):
    with raw(worker) as connection:
        connection.send_bytes(json.dumps({**VALID, "kind": "call", "sizes": [10]}).encode())
        connection.send_bytes(frame)
        assert is_over(connection)
    assert works(worker)


about = st.fixed_dictionaries(
    {},
    optional={
        "name": json_values,
        "key": json_values,
        "modules": json_values,
        "function_parts": json_values | st.integers(0, 3),
        "timeout": json_values,
        "keep": json_values,
        "as": json_values,
        "value": json_values,
    },
)


@settings(max_examples=25)
@given(st.sampled_from(sorted(FROM_CLIENT - {"exit"})), about, st.lists(st.binary(), max_size=3))
def test_a_message_with_fuzzed_content_is_an_error_of_its_sender(worker, kind, about, parts):
    header = Message(kind, 1, about, parts).header()
    with raw(worker) as connection, contextlib.suppress(OSError):
        connection.send_bytes(header)
        for part in filter(None, parts):
            connection.send_bytes(part)
    assert works(worker)


def test_a_client_of_another_python_is_refused(worker):
    connection = Client(worker.address)
    authenticate(connection, worker.authkey, first=False)
    with connection:
        connection.send_bytes(Message("hello", about={"python": "2.7"}).header())
        assert b'"hello"' in connection.recv_bytes()
        assert "Python 2.7" in json.loads(connection.recv_bytes())["about"]["text"]
        assert is_over(connection)


def test_a_worker_of_another_version_is_refused(tmp_path):
    from threading import Thread

    key = b"0123456789abcdef"
    with Listener(str(tmp_path / "socket")) as listener:

        def of_another_version():
            connection = listener.accept()
            authenticate(connection, key, first=True)
            connection.send_bytes(json.dumps({**VALID, "v": 99, "kind": "hello"}).encode())
            is_over(connection)
            connection.close()

        thread = Thread(target=of_another_version)
        thread.start()
        with pytest.raises(errors.WorkerProtocolError, match="version 99"):
            Worker.connect(listener.address, key)
        thread.join()


def test_a_client_that_dies_in_a_call_or_in_a_message_takes_nothing_along(worker, tmp_path):
    path = tmp_path / "count"
    with Worker.connect(worker.address, worker.authkey) as other:
        other.submit(there.count, str(path))
        wait_for(path.exists)
        other._link.hang_up("as if it had died")
        assert works(worker)
    assert path.read_text() == "CallInterrupted"
    with raw(worker) as connection:
        connection.send_bytes(json.dumps({**VALID, "kind": "call", "sizes": [100]}).encode())
        connection.send_bytes(b"x" * 50)
    assert works(worker)


def test_a_channel_reads_what_another_wrote(tmp_path):
    with Listener(str(tmp_path / "socket")) as listener:
        one, two = Channel(Client(listener.address), 1 << 24), Channel(listener.accept(), 1 << 24)
        parts = [b"", b"x" * 10, os.urandom(3 * channel.FRAME_BYTES + 1)]
        one.send(Message("call", 7, {"name": "f"}, parts))
        got = two.receive()
        assert (got.kind, got.id, got.about) == ("call", 7, {"name": "f"})
        assert [bytes(part) for part in got.parts] == parts
        one.close()
        with pytest.raises(EOFError):
            two.receive()
        two.close()
