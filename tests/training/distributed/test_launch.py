# SPDX-License-Identifier: Apache-2.0
"""``shardax launch``: all processes end together, and go on from the newest good checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardax as sx
from shardax.cli import main
from tests.child_processes import compiled_in
from tests.training.distributed.processes import SECONDS, environment

TRAIN = ["train", "--preset", "tiny", "--mesh", "data=4", "--batch-size", "8", "--seq-len", "16"]


def launch(folder: Path, *before: str, after: list[str]) -> subprocess.Popen[str]:
    text = folder / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    given = ["launch", "-n", "2", "--devices", "2", *before, "--", *TRAIN, "--text", str(text)]
    return subprocess.Popen(
        [sys.executable, "-m", "shardax", *given, "--out", str(folder / "run"), *after],
        # What the first processes have compiled serves those that begin again.
        env=environment() | compiled_in(folder / "compiled"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc, of Linux")
def test_killed_process_restarts_all_from_the_newest_checkpoint(tmp_path: Path):
    after = ["--steps", "40", "--checkpoint-every", "10"]
    launcher = launch(tmp_path, "--restarts", "1", after=after)
    try:
        checkpoint = tmp_path / "run" / "checkpoints" / "00000010"
        limit = time.monotonic() + SECONDS
        while not checkpoint.exists():
            assert launcher.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        killed = next(
            int(pid)
            for pid in children
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"--process\x001\x00")
        )
        os.kill(killed, signal.SIGKILL)
        out, err = launcher.communicate(timeout=SECONDS)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, err
    assert (
        "shardax: process 1 was ended by SIGKILL\nshardax: starting again, 0 restarts left" in err
    )
    assert "[0] held-out loss" in out and "\n[1] held-out loss" not in out
    steps = [r["step"] for r in sx.train.read_jsonl(tmp_path / "run" / "log.jsonl") if "loss" in r]
    assert steps == list(range(10, 41, 10)), "every step is logged once"
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_last_line_names_the_failed_process_and_cause(tmp_path: Path):
    launcher = launch(tmp_path, "--restarts", "3", after=["--mesh", "data=16", "--steps", "2"])
    _, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith("shardax: process ") and "starting again" not in err
    assert "ended with status 2: --mesh data=16 needs 16 devices, but there are 4. " in last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "-- is followed by nothing"),
        (["-n", "2", "--", "show", "runs/x"], "-- is followed by 'show'"),
        (["-n", "0", "--", "train"], "--processes 0: give a number from 1 to 4,096."),
        (["-n", "2", "--restarts", "-1", "--", "train"], "--restarts -1: give"),
        (["-n", "2", "--", "train", "--process", "1"], "--process is what shardax launch gives"),
        (["-n", "2", "--", "train", "--stepz", "1"], "--stepz"),
    ],
)
def test_commands_that_cannot_be_launched_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_process_needs_to_be_told_the_coordinator(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--processes", "2", "--process", "0"]) == 2
    assert "--processes needs --coordinator HOST:PORT" in capsys.readouterr().err
