# SPDX-License-Identifier: Apache-2.0
"""Processes that cannot come together say so in time, and end with status 1."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardax as sx
from shardax.cli import main
from shardax.errors import DistributedError
from tests.training.distributed.processes import SECONDS, environment, free_port

WAIT = 3  # seconds


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """The port of a program that accepts connections and says nothing."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_port_in_use_is_refused_before_jax_starts() -> None:
    with listener() as port, pytest.raises(DistributedError, match=f"cannot listen at port {port}"):
        sx.distributed.initialize(f"localhost:{port}", processes=2, process=0)
    assert sx.distributed.is_main() and sx.distributed.process_index() == 0


def test_absent_coordinator_is_named_in_time() -> None:
    begin, address = time.monotonic(), f"localhost:{free_port()}"
    with pytest.raises(DistributedError, match=f"nothing listens at {address}"):
        sx.distributed.initialize(address, processes=2, process=1, timeout=0.3)
    assert 0.3 <= time.monotonic() - begin < SECONDS


def test_unresolved_coordinator_host_is_named() -> None:
    with pytest.raises(DistributedError, match=r"nothing listens at no\.such\.host\.invalid:1"):
        sx.distributed.initialize("no.such.host.invalid:1", processes=2, process=1, timeout=0.1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "60", None])
def test_timeouts_that_are_no_seconds_are_refused(timeout: object) -> None:
    with pytest.raises(DistributedError, match="must be a number of seconds, such as timeout=60"):
        sx.distributed.initialize("localhost:9", processes=2, process=1, timeout=timeout)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("port", ["65536", "99999"])
def test_ports_out_of_range_are_refused(port: str) -> None:
    with pytest.raises(DistributedError, match="must be host:port"):
        sx.distributed.initialize(f"localhost:{port}", processes=2, process=1)


def test_start_timeout_of_commands_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--start-timeout", "0"]) == 2
    assert "--start-timeout 0.0: give a number of seconds" in capsys.readouterr().err


def _ended(command: list[str], folder: Path) -> tuple[int, list[str]]:
    """Status and lines of a process."""
    ended = subprocess.run(
        [sys.executable, *command],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return ended.returncode, ended.stderr.splitlines()


def test_absent_process_ends_the_command_by_one_line(tmp_path: Path) -> None:
    words = ["train", "--preset", "tiny", "--mesh", "data=2", "--devices", "1", "--processes", "2"]
    place = ["--coordinator", f"localhost:{free_port()}", "--process", "0"]
    limit = ["--start-timeout", str(WAIT), "--out", str(tmp_path / "run")]
    status, lines = _ended(["-m", "shardax", *words, *place, *limit], tmp_path)
    assert status == 1 and len(lines) == 1, lines
    assert lines[0].startswith(f"shardax: Process 0 waited {WAIT} s for all 2 processes to meet")


def test_silent_coordinator_ends_a_program_in_time(tmp_path: Path) -> None:
    with listener() as port:
        program = f"""if True:
            import shardax as sx
            sx.distributed.initialize("localhost:{port}", processes=2, process=1, timeout={WAIT})
        """
        status, lines = _ended(["-c", program], tmp_path)
    assert status == 1
    assert lines[-1].startswith(f"shardax.errors.DistributedError: Process 1 waited {WAIT} s")


def _command(address: str, process: int, limit: float, folder: Path) -> list[str]:
    words = ["train", "--preset", "tiny", "--mesh", "data=2", "--processes", "2"]
    place = ["--coordinator", address, "--process", str(process)]
    return [*words, *place, "--start-timeout", str(limit), "--out", str(folder / "run")]


def test_port_in_use_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listener() as port:
        assert main(_command(f"localhost:{port}", 0, WAIT, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shardax: Process 0 cannot listen at port {port}: ")
    assert not (tmp_path / "run").exists()


def test_absent_coordinator_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"localhost:{free_port()}"
    assert main(_command(address, 1, 0.2, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardax: Process 1 waited 0.2 s for process 0, but nothing listens at")


def test_silent_coordinator_ends_the_command(tmp_path: Path) -> None:
    with listener() as port:
        words = _command(f"localhost:{port}", 1, 1, tmp_path)
        status, lines = _ended(["-m", "shardax", *words], tmp_path)
    assert status == 1 and len(lines) == 1, lines
    assert lines[0].startswith("shardax: Process 1 waited 1 s for all 2 processes to meet")
