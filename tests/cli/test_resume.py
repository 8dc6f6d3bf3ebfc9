# SPDX-License-Identifier: Apache-2.0
"""A training process may die at any moment: resumed, it ends as if it had not, to the last bit.

What is killed or stopped by signals are real processes of the command line, over a mesh of 8
devices. What runs to its end does so in the process of the tests, which has as many devices.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import shardax as sx
from shardax.cli import main
from shardax.train import checkpoint_files
from shardax.train.checkpoint_format import stored_arrays
from tests.child_processes import compiled_in

STEPS, EVERY = 40, 5
OPTIONS = (
    f"--preset tiny --steps {STEPS} --batch-size 8 --seq-len 32 --checkpoint-every {EVERY} "
    "--devices 8 --mesh data=2,model=4"
).split()
PATIENCE = 120.0  # seconds until a test gives up on a process


class Runs:
    """Starts training processes and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = folder / "text.txt"
        words = random.Random(0).choices(
            ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"], k=9000
        )
        text.write_text(" ".join(words))
        self.options = [*OPTIONS, "--text", str(text)]
        # What one process has compiled serves the next: the same programs, sooner.
        self.environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            **compiled_in(folder / "programs"),
        }
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, out: Path) -> subprocess.Popen[str]:
        """Starts a run in a folder, or goes on with the one that is there."""
        go_on = ["--resume"] if (out / "run.json").exists() else []
        process = subprocess.Popen(
            [sys.executable, "-m", "shardax", "train", *self.options, "--out", str(out), *go_on],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )
        self.processes.append(process)
        return process

    def finish(self, out: Path) -> None:
        """Runs to the end, in this process; its programs serve those that are started."""
        go_on = ["--resume"] if (out / "run.json").exists() else []
        before = jax.config.values["jax_compilation_cache_dir"]
        keep_programs(self.environment["JAX_COMPILATION_CACHE_DIR"])
        try:
            assert main(["train", *self.options, "--out", str(out), *go_on]) == 0
        finally:
            keep_programs(before)

    def whole(self) -> Path:
        """The folder of a run that nothing interrupted."""
        out = self.folder / "whole"
        if not out.exists():
            self.finish(out)
        return out

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def keep_programs(folder: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with contextlib.ExitStack() as stack:
        started = Runs(tmp_path_factory.mktemp("runs"))
        stack.callback(started.end)
        yield started


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits in small steps, so that what follows comes right after."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if process.poll() is not None:
            printed = "" if process.stdout is None else process.stdout.read()
            pytest.fail(f"the process ended with {process.returncode} too early:\n{printed}")
        assert time.monotonic() < deadline, "the process did not get that far in time"
        time.sleep(0.001)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL


def raw_arrays(out: Path, steps: int = STEPS) -> dict[str, bytes]:
    """The bytes of every array of the last checkpoint, by path."""
    latest = sx.train.Checkpoints(out / "checkpoints").latest()
    assert latest == steps
    place = sx.train.Checkpoints(out / "checkpoints").path(latest)
    description = checkpoint_files.verify(place)
    records = list(stored_arrays(description).values())
    arrays = checkpoint_files.read_arrays(
        place, records, [record.dtype for record in records], [None] * len(records)
    )
    return {
        record.path: np.asarray(array).tobytes()
        for record, array in zip(records, arrays, strict=True)
    }


def losses_of(out: Path) -> list[tuple[int, str, float]]:
    """Every loss that was logged, in order, with its step."""
    records = sx.train.read_jsonl(out / "log.jsonl")
    return [
        (record["step"], name, record[name])
        for record in records
        for name in ("loss", "eval_loss")
        if name in record
    ]


def saved_from(out: Path, step: int) -> Callable[[], bool]:
    """Whether a checkpoint of that step or a later one is complete."""

    def reached() -> bool:
        names = os.listdir(out / "checkpoints") if (out / "checkpoints").exists() else []
        return any(name.isdecimal() and int(name) >= step for name in names)

    return reached


def writing_from(out: Path, step: int) -> Callable[[], bool]:
    """Whether a checkpoint of that step or a later one is just being written."""

    def reached() -> bool:
        names = os.listdir(out / "checkpoints") if (out / "checkpoints").exists() else []
        return any(
            checkpoint_files.TEMPORARY in name and int(name.partition(".")[0]) >= step
            for name in names
        )

    return reached


def test_run_killed_three_times_resumes_bit_for_bit(runs: Runs) -> None:
    whole, killed = runs.whole(), runs.folder / "killed"
    chance = random.Random(os.environ.get("SHARDAX_TEST_SEED", "0"))

    # At the start: while it imports, builds the model, or compiles.
    process = runs.start(killed)
    wait_until((killed / "run.json").exists, process)
    time.sleep(chance.uniform(0.0, 2.0))
    kill(process)
    # In the middle of a step, some of which have no checkpoint.
    process = runs.start(killed)
    wait_until(saved_from(killed, chance.choice((5, 10))), process)
    time.sleep(chance.uniform(0.0, 0.15))
    kill(process)
    # While a checkpoint is being written.
    process = runs.start(killed)
    wait_until(writing_from(killed, chance.choice((25, 30))), process)
    time.sleep(chance.uniform(0.0, 0.02))
    kill(process)

    runs.finish(killed)
    assert raw_arrays(killed) == raw_arrays(whole)
    assert losses_of(killed) == losses_of(whole)
    assert [step for step, name, _ in losses_of(killed) if name == "loss"] == [10, 20, 30, 40]
    assert (killed / "report.html").exists()


def test_sigterm_saves_says_so_and_exits_with_143(runs: Runs) -> None:
    whole, stopped = runs.whole(), runs.folder / "stopped"
    process = runs.start(stopped)
    wait_until(saved_from(stopped, EVERY), process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM == 143
    step = sx.train.Checkpoints(stopped / "checkpoints").latest()
    assert step is not None and EVERY <= step < STEPS
    assert f"stopped by SIGTERM; saved at step {step}" in printed
    assert f"Go on with: shardax train --resume --out {stopped}" in printed

    runs.finish(stopped)
    assert raw_arrays(stopped) == raw_arrays(whole)
    assert losses_of(stopped) == losses_of(whole)


def test_sigterm_saves_though_the_text_hangs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hung = runs.folder / "hung"
    read = sx.train.TrainBatches.batch_at

    def read_until_it_hangs(self: sx.train.TrainBatches, step: int, rows: object = None) -> object:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        return read(self, step, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(sx.train.TrainBatches, "batch_at", read_until_it_hangs)
        words = ["train", *runs.options, "--out", str(hung), "--stop-within", "0.05"]
        assert main(words) == 128 + signal.SIGTERM == 143
    assert f"Go on with: shardax train --resume --out {hung}" in capsys.readouterr().out
    assert sx.train.Checkpoints(hung / "checkpoints").steps() == [3]
