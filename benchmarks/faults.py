# SPDX-License-Identifier: Apache-2.0
"""What random faults do to a job of several processes, and whether it goes on all the same.

Each round starts `shardax train` in several processes (two virtual devices each), injects one fault
at a random moment, waits for the end of all processes, and resumes the run to its last step. No
launcher ends anything here. The rounds of one kind of fault go, in a random order, through the
coordinator's process and another one, between checkpoints and while one is being written.

- `kill`: SIGKILL to one process, the coordinator too.
- `hang`: SIGSTOP to one process, for good.
- `slow`: SIGSTOP to one process, for three seconds.
- `term`, `int`: SIGTERM or SIGINT to one process.
- `term all`: SIGTERM to all, 50 ms apart.
- `disk`: no file of the main process may grow beyond 64 KiB, as on a full disk.

Reported: how the processes ended, how long after the fault, at which step the run resumed, and
whether its last checkpoint has the bits of a run without faults.

Bounds: every job ends within 60 seconds (a hung process is not asked to), every run resumes, and
all of them end in the same bits.

    python benchmarks/faults.py --faults 12 --seed 1 --json faults.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("kill", "hang", "slow", "term", "int", "term all", "disk")
BOUND = 60.0
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "slow": signal.SIGSTOP}
SIGNALS |= {"term": signal.SIGTERM, "int": signal.SIGINT}


def start(
    folder: Path, processes: int, steps: int, *, resume: bool, small_files: bool
) -> list[Any]:
    """Starts the processes of a job."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    (folder / "text.txt").write_bytes(TEXT)
    words = ["train", "--preset", "tiny", "--mesh", f"data={2 * processes}", "--steps", str(steps)]
    words += ["--batch-size", str(4 * processes), "--seq-len", "16", "--checkpoint-every", "5"]
    words += ["--text", str(folder / "text.txt"), "--out", str(folder / "run")]
    words += ["--coordinator", f"localhost:{port}", "--processes", str(processes)]
    words += ["--resume"] if resume else []
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    running = []
    for index in range(processes):
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "shardax", *words, "--process", str(index)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=open(folder / f"err{index}{'b' * resume}", "w"),  # noqa: SIM115
            )
        )
    if small_files:
        resource.prlimit(running[0].pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    return running


def inject(kind: str, running: list[Any], victim: int) -> None:
    """Does to the processes what the fault is."""
    if kind == "term all":
        for each in running:
            each.send_signal(signal.SIGTERM)
            time.sleep(0.05)
    elif kind in SIGNALS:
        running[victim].send_signal(SIGNALS[kind])
    if kind == "slow":
        time.sleep(3)
        running[victim].send_signal(signal.SIGCONT)


def wait_for_moment(folder: Path, running: list[Any], *, writing: bool, step: int) -> None:
    """Waits for a checkpoint of a step, or for one that is being written after it."""
    checkpoints = folder / "run" / "checkpoints"
    while all(each.poll() is None for each in running):
        names = [item.name for item in checkpoints.iterdir()] if checkpoints.is_dir() else []
        done = [int(name) for name in names if name.isdecimal()]
        if max(done, default=0) >= step and (not writing or any("tmp" in name for name in names)):
            return
        time.sleep(0.005)


def digest_of(folder: Path) -> str:
    """Returns the digest of the parameters in the last checkpoint of a run."""
    import numpy as np

    import shardax as sx
    from shardax.cli.runs import read_settings

    model = read_settings(folder / "run").make_model()
    sx.train.Checkpoints(folder / "run" / "checkpoints").restore((model,), partial=True)
    found = hashlib.sha256()
    for path, variable in sx.iter_variables(model):
        found.update(str(path).encode() + np.asarray(variable).tobytes())
    return found.hexdigest()


def cases(chance: random.Random, processes: int) -> Iterator[tuple[int, bool]]:
    """Yields victims and whether a checkpoint is being written, all in turn, in random order."""
    while True:
        order = [(main, writing) for main in (True, False) for writing in (True, False)]
        chance.shuffle(order)
        for main, writing in order:
            yield 0 if main else chance.randrange(1, processes), writing


def round_of(
    kind: str, victim: int, writing: bool, chance: random.Random, processes: int, steps: int
) -> dict[str, Any]:
    """Injects one fault into a job and resumes it; returns what happened."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = start(folder, processes, steps, resume=False, small_files=kind == "disk")
        seconds = -1.0  # not ended
        try:
            # A full disk is met when the first checkpoint is written.
            step = 0 if kind == "disk" else 5 * chance.randrange(1, max(2, steps // 10))
            wait_for_moment(folder, running, writing=writing or kind == "disk", step=step)
            begin = time.monotonic()
            inject(kind, running, victim)
            waited = [each for i, each in enumerate(running) if kind != "hang" or i != victim]
            for each in waited:
                each.wait(max(1.0, 3 * BOUND - (time.monotonic() - begin)))
            seconds = time.monotonic() - begin
            statuses = [each.returncode for each in waited]
        except subprocess.TimeoutExpired:
            statuses = [each.poll() for each in running]
        finally:
            for each in running:
                each.kill()
                each.wait()
        saved = folder / "run" / "checkpoints"
        steps_saved = (
            [int(p.name) for p in saved.iterdir() if p.name.isdecimal()] if saved.is_dir() else []
        )
        running = start(folder, processes, steps, resume=True, small_files=False)
        resumed = [each.wait(600) for each in running]
        return {
            "fault": kind,
            "process": victim,
            "while writing": writing,
            "statuses": statuses,
            "seconds": seconds,
            "resumed at": max(steps_saved, default=0),
            "resumed": resumed == [0] * processes,
            "digest": digest_of(folder) if resumed == [0] * processes else "",
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--faults", type=int, default=len(KINDS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one kill of the coordinator")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is broken")
    given = parser.parse_args()
    if given.quick:
        given.kinds, given.faults, given.steps = ["kill"], 1, 12
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as programs:
        # What one process has compiled serves the next.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        return rounds_of(given)


def rounds_of(given: argparse.Namespace) -> int:
    """Injects the faults, and compares each run with one that had none."""
    chance = random.Random(given.seed)
    drawn = {kind: cases(chance, given.processes) for kind in given.kinds}
    with tempfile.TemporaryDirectory() as name:
        running = start(Path(name), given.processes, given.steps, resume=False, small_files=False)
        assert [each.wait(600) for each in running] == [0] * given.processes
        reference = digest_of(Path(name))
    print("| fault | process | statuses | seconds to the end | resumed at | same bits |")
    print("| --- | --- | --- | --- | --- | --- |")
    records = []
    for number in range(given.faults):
        kind = given.kinds[number % len(given.kinds)]
        victim, writing = (0, True) if given.quick else next(drawn[kind])
        victim = 0 if kind == "disk" else victim
        found = round_of(kind, victim, writing, chance, given.processes, given.steps)
        found["same bits"] = found["digest"] == reference
        found["held"] = found["same bits"] and 0 <= found["seconds"] <= BOUND
        records.append(found)
        shown = f"{found['fault']}{', writing' if found['while writing'] else ''}"
        print(
            f"| {shown} | {found['process']} | {found['statuses']} | {found['seconds']:.1f} | "
            f"{found['resumed at']} | {found['same bits']} |",
            flush=True,
        )
    held = sum(found["held"] for found in records)
    print(f"\n{held} of {len(records)} rounds within the bounds")
    if given.json:
        given.json.write_text(json.dumps({"benchmark": "faults", "records": records}, indent=2))
    return int(given.check and held < len(records))


if __name__ == "__main__":
    sys.exit(main())
