# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed ends as one that was not, to the last bit.

Real processes, really killed: `kill -9` leaves no time to save, so what counts is what was on disk
at that moment.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shardax as sx
from shardax.cli.run_files import read_settings
from shardax.train import read_jsonl

STEPS = 24
TRAIN = [sys.executable, "-m", "shardax", "train"]
SIZES = ["--preset", "tiny", "--batch-size", "8", "--seq-len", "32"]
NEW = [*SIZES, "--checkpoint-every", "3", "--mesh", "data=2,model=4"]

pytestmark = pytest.mark.slow


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, "--out", str(out), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def start_new(out: Path) -> subprocess.Popen[str]:
    return start(out, *NEW, "--devices", "8", "--steps", str(STEPS))


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Returns once a checkpoint of `step` or a later one is complete, or the process is over."""
    folder = out / "checkpoints"
    while process.poll() is None:
        if folder.exists() and max(sx.train.Checkpoints(folder).steps(), default=0) >= step:
            return
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return process.returncode


def parameters(out: Path) -> dict[str, bytes]:
    """The bytes of every parameter in the last checkpoint, by path."""
    model = read_settings(out).make_model()
    with sx.train.Checkpoints(out / "checkpoints") as checkpoints:
        assert checkpoints.latest() == STEPS
        checkpoints.restore((model,), partial=True)
    return {
        str(path): np.asarray(value).tobytes() for path, value in sx.state(model).flat().items()
    }


def test_killed_at_random_moments_and_resumed_ends_bit_identical(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start_new(whole))
    moments = random.Random(0)
    process = start_new(broken)
    for least in (3, 9, 15):
        wait_for_step(broken, least, process)
        time.sleep(moments.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        process = start(broken, "--resume")
    finish(process)
    assert parameters(broken) == parameters(whole)
    records = read_jsonl(broken / "log.jsonl")
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == sorted(set(steps))
    assert [r["loss"] for r in records if r["step"] == STEPS and "loss" in r] == [
        r["loss"] for r in read_jsonl(whole / "log.jsonl") if r["step"] == STEPS and "loss" in r
    ]


def test_a_request_to_stop_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_new(out)
    wait_for_step(out, 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "--resume" in output
    stopped_at = sx.train.Checkpoints(out / "checkpoints").latest()
    assert stopped_at is not None
    assert 3 <= stopped_at <= STEPS
