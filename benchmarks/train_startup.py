# SPDX-License-Identifier: Apache-2.0
"""How long `shardax train` takes from starting the process to the end of its first step.

Opponents, each in a fresh process, in turn; both with one persistent compilation cache that has all
their programs (`JAX_COMPILATION_CACHE_DIR`). Timed from starting the process until the line of the
first step is read, which it prints when the loss is there.

- `raw jax`: `raw_train.py`, the same run by hand: one program makes all state, another is the step.
- `shardax train`: the preset `tiny`. It also checks the layout, prints the table of parameters,
  prepares checkpoints that can be resumed, and refuses to write over another run.

Beside wall time, which a busy machine lengthens, stands processor time, of all threads. The bound
holds for the smaller of the two median ratios: at most 1.15.

    python benchmarks/train_startup.py --json train_startup.json
    python benchmarks/train_startup.py --mesh 2,4 --devices 8
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Report, Samples, arguments, compare, table

BOUND = 1.15
HERE = Path(__file__).parent
TEXT = HERE.parent / "CHANGELOG.md"
OPPONENTS = ("raw jax", "shardax train")


def command(opponent: str, out: Path, mesh: str, devices: int | None) -> list[str]:
    """The command line of an opponent."""
    more = [] if devices is None else ["--devices", str(devices)]
    where = ["--text", str(TEXT), "--out", str(out), *more]
    if opponent == "raw jax":
        return [
            sys.executable,
            str(HERE / "raw_train.py"),
            *where,
            *(["--mesh", mesh] * bool(mesh)),
        ]
    sizes = mesh.split(",")
    named = ["--mesh", f"data={sizes[0]},model={sizes[1]}"] if mesh else []
    run = ["train", "--preset", "tiny", "--steps", "1"]
    return [sys.executable, "-m", "shardax", *run, *where, *named]


def first_step(words: list[str], cache: str) -> tuple[float, float]:
    """Seconds from starting a process to its first step, and its processor time."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    start = time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("step 1/"):
            break
    else:
        child.stdout.close()
        raise RuntimeError(f"{' '.join(words)} ended with {child.wait()} before its first step")
    seconds = time.perf_counter() - start
    child.send_signal(signal.SIGKILL)  # what follows the first step is not measured
    child.stdout.close()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return seconds, usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measures, prints a table, and checks the bound."""
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--mesh", default="", help="sizes of data and model, such as 2,4")
    parser.add_argument("--devices", type=int, help="virtual CPU devices")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    report = Report("train_startup", {"repeats": repeats, "mesh": options.mesh})
    seconds: dict[str, list[float]] = {name: [] for name in OPPONENTS}
    processor: dict[str, list[float]] = {name: [] for name in OPPONENTS}
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "cache")
        # The first round, which a quick run leaves out, fills the cache and writes bytecode.
        for repeat in range(0 if options.quick else -1, repeats):
            for turn in range(len(OPPONENTS)):
                name = OPPONENTS[(repeat + turn) % len(OPPONENTS)]
                out = Path(folder) / f"{name.replace(' ', '-')}-{repeat}"
                words = command(name, out, options.mesh, options.devices)
                wall, used = first_step(words, cache)
                if repeat >= 0:
                    seconds[name].append(wall)
                    processor[name].append(used)
    rows, ratios = [], []
    for kind, found in (("wall", seconds), ("processor", processor)):
        compared = compare([Samples(n, tuple(found[n])) for n in OPPONENTS], OPPONENTS[0])
        for name in OPPONENTS:
            record = compared[name].record()
            record["name"] = f"{name}, {kind} time"
            report.records.append(record)
            times = (f"{record[key] / 1e3:.0f} ms" for key in ("min_us", "median_us"))
            shares = (f"{record[key]:.2f}" for key in ("ratio_min", "ratio_median"))
            rows.append([record["name"], *times, *shares])
        ratios.append(statistics.median(b / a for a, b in zip(*found.values(), strict=True)))
    print(table(["program", "least", "median", "least ratio", "median ratio"], rows))
    print(f"Median of the ratios of pairs: wall {ratios[0]:.2f}, processor {ratios[1]:.2f}.")
    if not options.quick and min(ratios) > BOUND:
        report.failures.append(f"shardax train takes {min(ratios):.2f} of raw JAX, bound {BOUND}")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
