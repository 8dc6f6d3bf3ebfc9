# SPDX-License-Identifier: Apache-2.0
"""What several processes cost: the steps, the start, the agreement, the checkpoints.

One job trains a decoder on a mesh (data=4, model=2) of eight virtual CPU devices: eight of one
process, four of each of two, two of four, one of eight. All jobs are started once and kept; then
they take turns at blocks of steps, so the machine's other work slows all alike. On CPU devices
processes exchange by gloo over TCP, where one process copies memory: the step of several is the
upper bound of what they cost, not a measure of a fast network.

Beside the steps, for each number of processes and, with two, for each number of layers (unrolled,
as there the most grows): seconds to start together, to agree before the first step, to compare
programs and copies, to trace and compile, that a save holds up the loop, to save and restore; the
bytes of the facts that are compared and of the metadata of a checkpoint.

Bound on the median over repeats: a step of two processes takes at most twice that of one.

    python benchmarks/processes.py --json processes.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import Opponent, Report, arguments, compare, measure, table

BOUND = 2.0
DEVICES = 8
PHASES = ("start", "agree", "program", "copies", "compile", "held up", "save", "restore")
BATCH, SEQ = 16, 128


@dataclasses.dataclass
class Timed:
    """Seconds spent in functions of a module."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def of(self, module: Any, name: str, phase: str) -> None:
        """Counts the calls of a function from now on."""
        function = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                self.seconds[phase] = self.seconds.get(phase, 0) + spent

        setattr(module, name, timed)


def work(given: dict[str, Any]) -> None:
    """One process of a job: a run of one step, then blocks of steps as asked on stdin."""
    begin = time.perf_counter()
    import jax
    import optax

    import shardax as sx
    from shardax.train import agreement

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    place = (given["coordinator"], given["processes"], given["process"])
    sx.distributed.initialize(*place) if given["processes"] > 1 else jax.devices()
    seconds = {"start": time.perf_counter() - begin}
    timed = Timed(seconds)
    timed.of(agreement, "agree_to_start", "agree")
    timed.of(agreement, "compare_programs", "program")
    timed.of(agreement, "compare_copies", "copies")
    sizes_of_facts: list[int] = []
    facts_of = agreement.facts_of

    def measured_facts(*args: Any) -> dict[str, str]:
        facts = facts_of(*args)
        sizes_of_facts.append(len(json.dumps(facts)))
        return facts

    agreement.facts_of = measured_facts
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((DEVICES // 2, 2), ("data", "model"), axis_types=kinds)
    sizes = {"embed_dim": given["embed"], "num_layers": given["layers"], "num_heads": 8}
    config = sx.models.DecoderConfig(
        **sizes, num_kv_heads=4, head_dim=given["embed"] // 8, mlp_dim=4 * given["embed"]
    )
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    text = sx.train.ByteText.from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    folder = Path(given["folder"])
    trainer = sx.train.Trainer(
        model,
        sx.train.Optimizer(model, optax.adamw(1e-3)),
        sx.models.next_token_loss,
        sx.train.TrainBatches(text.whole, batch_size=BATCH, seq_len=given["length"]),
        directory=folder / "run",
        settings=sx.train.TrainerSettings(steps=1),
        mesh=mesh,
        rules=sx.models.DECODER_RULES,
    )
    trainer.run()
    state = (trainer.model, trainer.optimizer)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with sx.train.Prefetch(trainer.batches, rows) as batches:
        batch = next(batches)
    begin = time.perf_counter()
    with jax.set_mesh(mesh), sx.axis_rules(trainer.rules):
        # A program of its own, as that of the run is compiled already.
        lowered = trainer.train_step.lower(*state, batch)
        lowered.compile({"xla_backend_optimization_level": given["optimization"]})
        seconds["compile"] = time.perf_counter() - begin
        with sx.train.Checkpoints(folder / "own") as checkpoints:
            begin = time.perf_counter()
            checkpoints.save(1, state)  # returns when the values are copied
            seconds["held up"] = time.perf_counter() - begin
            checkpoints.wait()
            seconds["save"] = time.perf_counter() - begin
            begin = time.perf_counter()
            checkpoints.restore(state, mesh=mesh, rules=trainer.rules)
            seconds["restore"] = time.perf_counter() - begin
        step = trainer.train_step
        found = {"seconds": seconds, "facts": sum(sizes_of_facts)}
        print(json.dumps(found), file=replies, flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                loss, _ = step(*state, batch)
            print(json.dumps(float(loss)), file=replies, flush=True)  # waits for it


class Job:
    """The processes of one training."""

    def __init__(self, processes: int, layers: int, folder: Path, settings: dict[str, int]) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.name = f"{processes} x {DEVICES // processes}"
        self.folder = folder
        count = str(DEVICES // processes)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count}
        self.running = []
        for process in range(processes):
            given = settings | {"processes": processes, "process": process, "layers": layers}
            given |= {"coordinator": f"localhost:{port}", "folder": str(folder)}
            self.running.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--job", json.dumps(given)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=open(folder / f"err{process}", "w"),  # noqa: SIM115
                    text=True,
                )
            )
        found = self.replies()[0]
        self.seconds, self.facts = found["seconds"], found["facts"]

    def replies(self) -> list[Any]:
        """Waits for a line of each process."""
        lines = [each.stdout.readline() for each in self.running]  # pyright: ignore[reportOptionalMemberAccess]
        for process, line in enumerate(lines):
            if not line:
                raise RuntimeError((self.folder / f"err{process}").read_text()[-2000:])
        return [json.loads(line) for line in lines]

    def run(self, calls: int) -> float:
        """Takes so many steps in all processes; returns the loss after them."""
        for each in self.running:
            each.stdin.write(f"{calls}\n")  # pyright: ignore[reportOptionalMemberAccess]
            each.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        return self.replies()[0]

    def end(self) -> None:
        """Ends the processes."""
        for each in self.running:
            each.kill()
            each.wait()

    def metadata_bytes(self) -> int:
        """Returns the bytes of a checkpoint beside its arrays."""
        files = [file for file in (self.folder / "own").rglob("*") if file.is_file()]
        return sum(file.stat().st_size for file in files if "/d/" not in str(file))


def record_of(job: Job, processes: int, layers: int) -> dict[str, Any]:
    """Returns what a job measured of itself."""
    found = {"processes": processes, "layers": layers, "facts_bytes": job.facts}
    found["metadata_bytes"] = job.metadata_bytes()
    return found | {f"{name}_seconds": job.seconds.get(name, 0.0) for name in PHASES}


def main() -> int:
    """Runs the benchmark."""
    parser = arguments(__doc__, repeats=12)
    parser.add_argument("--job", help="as one process of a job: its settings, in JSON")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--embed", type=int, default=128)
    options = parser.parse_args()
    if options.job:
        work(json.loads(options.job))
        return 0
    counts = [1, 2] if options.quick else options.processes
    layers = [1] if options.quick else options.layers
    embed = 16 if options.quick else options.embed
    length, optimization = (16, 0) if options.quick else (SEQ, 3)
    settings = {"embed": embed, "length": length, "optimization": optimization}
    repeats = 2 if options.quick else options.repeats
    report = Report("processes", {"counts": counts, "layers": layers, "embed": embed})
    jobs, rows = list[Job](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:

        def started(processes: int, depth: int) -> Job:
            folder = Path(name) / f"{processes} of {depth}"
            folder.mkdir()
            jobs.append(Job(processes, depth, folder, settings))
            rows.append(record_of(jobs[-1], processes, depth))
            return jobs[-1]

        try:
            kept = [started(count, layers[0]) for count in counts]
            samples = measure(
                [Opponent(job.name, job.run) for job in kept],
                repeats=repeats,
                block_seconds=0.05 if options.quick else 2.0,
            )
            for job in kept:
                job.end()
            for depth in layers[1:]:
                started(2, depth).end()
        finally:
            for job in jobs:
                job.end()
    found = compare(samples, kept[0].name)
    report.records += [{"steps": each.record()} for each in found.values()]
    report.records += rows
    print("### A step: processes x devices of each\n")
    print(
        table(
            ["processes", "least ms", "median ms", "ratio, least", "ratio, median"],
            [
                [
                    each.samples.name,
                    f"{each.samples.minimum * 1e3:.1f}",
                    f"{each.samples.median * 1e3:.1f}",
                    f"{min(each.ratios):.2f}",
                    f"{each.record()['ratio_median']:.2f}",
                ]
                for each in found.values()
            ],
        )
    )
    print("\n### Once: seconds\n")
    print(
        table(
            ["processes, layers", *PHASES, "facts", "metadata"],
            [
                [
                    f"{row['processes']}, {row['layers']}",
                    *(f"{row[f'{phase}_seconds']:.2f}" for phase in PHASES),
                    f"{row['facts_bytes'] / 1e3:.0f} kB",
                    f"{row['metadata_bytes'] / 1e3:.0f} kB",
                ]
                for row in rows
            ],
        )
    )
    if not options.quick and (two := found.get("2 x 4")) is not None:
        ratio = two.record()["ratio_median"]
        if ratio > BOUND:
            report.failures.append(f"a step of two processes takes {ratio:.2f} of that of one")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
