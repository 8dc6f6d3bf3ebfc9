# SPDX-License-Identifier: Apache-2.0
"""How long a folder of published weights takes to be a model, and what host memory it needs.

The program writes a decoder into a temporary folder and loads it again and again, from the page
cache. `sx.models.from_pretrained` checks the config and all shapes, builds the model, and puts
kernels on the device in the order in which it multiplies, which is the transposed one of the files.
Opponents: `safe_open`, whose tensors are put on the device one by one, likewise transposed
(baseline) or as they stand; `safetensors.flax.load_file`, which does the latter; and reading the
bytes of the file. What was loaded must be what the file has, bit for bit.

Memory is the peak of anonymous host memory while loading over that before, which on CPU devices
holds the parameters too: its ratio to the size of the parameters is 1 if nothing is held twice.

Bounds: `from_pretrained` takes at most 1.10 of the baseline by the minima, with 20 ms for the
layers themselves, and 1.25 of the parameters in memory.

    python benchmarks/load.py --json load.json
"""

import ctypes
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _harness import Opponent, Report, arguments, compare, measure, table
from safetensors import safe_open
from safetensors.flax import load_file

import shardax as sx

BOUND, BUILDING_SECONDS, MEMORY_BOUND = 1.10, 0.02, 1.25
BASELINE, OURS = "safe_open, transposed", "sx.models.from_pretrained"
SIZES = {"num_layers": 8, "embed_dim": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64}
SIZES |= {"mlp_dim": 2816, "vocab_size": 8000}
QUICK = {"num_layers": 1, "embed_dim": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
STATUS = Path("/proc/self/status")

Load = Callable[[], Any]


def write_model(sizes: dict[str, int], dtype: str, folder: Path) -> Path:
    """The file of a model with random parameters."""
    config = sx.models.DecoderConfig(**sizes, param_dtype=dtype, dtype=dtype)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    sx.models.save_pretrained(model, folder)
    return folder / "model.safetensors"


def one_by_one(file: Path, transpose: bool) -> dict[str, jax.Array]:
    """The tensors, each put on the device as soon as it is read."""
    with safe_open(file, framework="np") as tensors:
        arrays = {}
        for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
            tensor = tensors.get_tensor(name)
            arrays[name] = jax.device_put(tensor.T if transpose else tensor)
    return arrays


def opponents(file: Path) -> dict[str, Load]:
    """Who competes, the baseline first."""

    def shardax() -> Any:
        return sx.split(sx.models.from_pretrained(file.parent))[1]

    return {
        BASELINE: lambda: one_by_one(file, transpose=True),
        OURS: shardax,
        "safe_open, as stored": lambda: one_by_one(file, transpose=False),
        "safetensors.flax.load_file": lambda: load_file(file),
        "bytes of the file": file.read_bytes,
    }


def check_equal(file: Path) -> None:
    """Raises unless the loaded parameters are the tensors, bit for bit."""
    model, tensors = sx.models.from_pretrained(file.parent), load_file(file)
    again = file.parent / "again"
    sx.models.save_pretrained(model, again)
    written = load_file(again / file.name)
    assert sorted(written) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(written[name]), np.asarray(tensor), err_msg=name)
    for path in again.iterdir():
        path.unlink()


def anonymous_bytes() -> int:
    """Memory of this process that is no file's, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_growth(load: Load) -> int:
    """How far memory grows while loading, looked at every millisecond."""
    jax.block_until_ready(load())  # what stays behind after the first call
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    before, done = anonymous_bytes(), threading.Event()
    peaks = [before]

    def watch() -> None:
        while not done.is_set():
            peaks.append(anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = jax.block_until_ready(load())
    peaks.append(anonymous_bytes())
    done.set()
    watcher.join()
    del result
    return max(peaks) - before


def repeated(load: Load) -> Callable[[int], Any]:
    """Loads again and again, holding the last result alone."""

    def run(calls: int) -> Any:
        for _ in range(calls - 1):
            load()
        return load()

    return run


def bound_failures(record: dict[str, Any]) -> list[str]:
    """Which bounds the record of shardax breaks, as sentences."""
    found, memory = [], record["memory"]
    if record["beyond_building"] > BOUND:
        found.append(f"{record['beyond_building']:.2f} of {BASELINE}, at most {BOUND}")
    if memory is not None and memory > MEMORY_BOUND:
        found.append(f"memory of {memory:.2f} of the parameters, at most {MEMORY_BOUND}")
    return found


def main() -> int:
    """Write a model, measure all ways to load it, and check the bounds."""
    parser = arguments(__doc__, repeats=9)
    parser.add_argument("--dtype", default="float32", help="of the parameters, or bfloat16")
    options = parser.parse_args()
    repeats = min(options.repeats, 2) if options.quick else options.repeats
    sizes = QUICK if options.quick else SIZES
    report = Report("load", {"repeats": repeats, "dtype": options.dtype, **sizes})
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(sizes, options.dtype, Path(folder, "model"))
        size = file.stat().st_size
        report.settings["bytes"] = size
        check_equal(file)
        competing = opponents(file)
        timed = [Opponent(name, repeated(load)) for name, load in competing.items()]
        samples = measure(timed, repeats=repeats, calls=1)
        least = samples[0].minimum
        for name, comparison in compare(samples, BASELINE).items():
            memory = peak_growth(competing[name]) / size if STATUS.exists() else None
            minimum = comparison.samples.minimum / least
            beyond = (comparison.samples.minimum - BUILDING_SECONDS) / least
            record = {"memory": memory, "minimum_ratio": minimum, "beyond_building": beyond}
            record |= comparison.record()
            report.records.append(record)
            if name == OURS and not options.quick:
                report.failures += bound_failures(record)
    print(f"\n### Loading {size / 2**20:,.0f} MiB of {options.dtype}\n")
    headers = ["way", "least time", "of minima", "median", "peak of memory / parameters"]
    rows = []
    for record in report.records:
        ratios = [f"{record[name]:.2f}x" for name in ("minimum_ratio", "ratio_median")]
        memory = "-" if record["memory"] is None else f"{record['memory']:.2f}"
        rows.append([record["name"], f"{record['min_us'] / 1e3:,.0f} ms", *ratios, memory])
    print(table(headers, rows))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
