# SPDX-License-Identifier: Apache-2.0
"""``shardax train``: train a byte-level decoder on text, data and tensor parallel over a mesh."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardax._core.graph.paths import format_path
from shardax._core.state.split_merge import iter_variables
from shardax.cli.inputs import (
    CommandError,
    decoder_optimizer,
    find_preset,
    load_rules,
    parse_mesh,
    use_devices,
)
from shardax.cli.runs import RunSettings, read_settings, write_settings
from shardax.partition.mesh import mesh_text
from shardax.plan.rules_file import entry_to_data

_SAMPLE_PROMPT = "def "
_SAMPLE_LENGTH = 240
_DECIDES = {"preset": ("model", "eval_batches")}  # the settings that an option alone decides


@dataclass(frozen=True)
class Train:
    """Train a byte-level decoder on text.

    Attributes:
        preset: Size of model and training: tiny, demo or small.
        mesh: Sizes of the mesh axes data and model, such as data=2,model=4. Empty: one device.
        devices: Use this many virtual CPU devices.
        rules: Rules instead of the decoder's: a TOML file, such as shardax plan --write-rules makes
            (with FILE.toml:NAME one of its layouts), whose mesh is used unless --mesh is given; a
            JSON file; or module:name of rules.
        zero: Split the optimizer's state over the mesh axis data too, so that each device holds and
            updates its part of it.
        text: A text file or a folder of them. By default the source of Python's standard library.
        out: Folder of the run.
        resume: Go on with the run in the folder, with the settings it was started with; only mesh,
            rules, devices and zero may be others.
        steps: Optimizer steps, instead of the preset's.
        batch_size: Windows a step, instead of the preset's.
        seq_len: Bytes a window, instead of the preset's.
        learning_rate: Peak learning rate, instead of the preset's.
        checkpoint_every: Steps between checkpoints.
        seed: Seed of parameters and data order.
    """

    preset: str = "demo"
    mesh: str = ""
    devices: int | None = None
    rules: str | None = None
    zero: bool = False
    text: Path | None = None
    out: Path = Path("runs/demo")
    resume: bool = False
    steps: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    learning_rate: float | None = None
    checkpoint_every: int = 50
    seed: int = 0

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        settings = self._settings()
        if settings.zero and not settings.mesh:
            raise CommandError(
                "--zero splits the optimizer's state over the mesh axis data, but there is no "
                "mesh; name one, such as --mesh data=2,model=4."
            )
        if settings.rules is not None and not settings.mesh:
            raise CommandError(
                f"--rules {self.rules} names no mesh, and without one there is nothing to lay out; "
                "name it, such as --mesh data=2,model=4."
            )
        use_devices(settings.devices)
        job = _Job(settings, self.out)
        job.trainer.check(resume=self.resume)
        write_settings(self.out, settings)
        return job.run(self.resume)

    def _settings(self) -> RunSettings:
        return self._resumed(read_settings(self.out)) if self.resume else self._fresh()

    def _fresh(self) -> RunSettings:
        preset = find_preset(self.preset)
        given = None if self.rules is None else load_rules(self.rules)
        own_mesh = "" if given is None else mesh_text(given.mesh or (), ",")
        return RunSettings(
            model=preset.model,
            # Absolute, so that the run can be resumed from another folder.
            text=None if self.text is None else str(self.text.absolute()),
            batch_size=preset.batch_size if self.batch_size is None else self.batch_size,
            seq_len=preset.seq_len if self.seq_len is None else self.seq_len,
            steps=preset.steps if self.steps is None else self.steps,
            learning_rate=(
                preset.learning_rate if self.learning_rate is None else self.learning_rate
            ),
            seed=self.seed,
            mesh=self.mesh or own_mesh,
            devices=self.devices,
            eval_batches=preset.eval_batches,
            checkpoint_every=self.checkpoint_every,
            zero=self.zero,
            rules=None if given is None else entry_to_data(replace(given, mesh=None)),
        )

    def _resumed(self, saved: RunSettings) -> RunSettings:
        fresh, default = self._fresh(), Train()
        differing = [
            f"--{option.name.replace('_', '-')} {getattr(self, option.name)}"
            for option in fields(self)
            if option.name not in ("out", "resume", "mesh", "rules", "devices", "zero")
            and getattr(self, option.name) != getattr(default, option.name)
            and any(
                getattr(fresh, name) != getattr(saved, name)
                for name in _DECIDES.get(option.name, (option.name,))
            )
        ]
        if differing:
            raise CommandError(
                f"The run in {self.out} was started with other settings than "
                f"{', '.join(differing)}. Leave them out to go on with it, or start another run: "
                "no --resume, and another --out."
            )
        devices = saved.devices if self.devices is None else self.devices
        mesh, zero = fresh.mesh or saved.mesh, self.zero or saved.zero
        rules = saved.rules if fresh.rules is None else fresh.rules
        return replace(saved, mesh=mesh, devices=devices, zero=zero, rules=rules)


class _Job:
    """One run of the training command: the library's parts put together."""

    def __init__(self, settings: RunSettings, out: Path) -> None:
        from shardax import models, train

        self.settings = settings
        self.out = out
        self.mesh = parse_mesh(settings.mesh, settings.mesh_axes)
        text = train.open_text(settings.text)
        training, held_out = text.split()
        shape = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
        self.held_out = train.EvalBatches(held_out, **shape, max_batches=settings.eval_batches)
        self.model = settings.make_model()
        optimizer = decoder_optimizer(settings.steps, settings.learning_rate)
        self.trainer = train.Trainer(
            self.model,
            train.Optimizer(self.model, optimizer),
            models.next_token_loss,
            train.TrainBatches(training, **shape, seed=settings.seed),
            directory=out,
            settings=train.TrainerSettings(
                steps=settings.steps,
                eval_every=max(1, settings.steps // 2),
                checkpoint_every=settings.checkpoint_every,
            ),
            held_out=self.held_out,
            mesh=self.mesh,
            rules=settings.layout_rules,
            overrides=settings.overrides,
        )

    def run(self, resume: bool) -> int:
        from shardax import train, view

        table = view.table(self.model, mesh=self.mesh, rules=self.trainer.rules)
        print(table, "\n", sep="")
        entropy = _byte_entropy(self.held_out.part)
        started = time.monotonic()
        result = self.trainer.run(resume=resume)
        if result.stopped is not None:
            print(
                f"Stopped by {result.stopped.name} at step {result.step}. Go on with: shardax "
                f"train --resume --out {self.out}"
            )
            return 128 + result.stopped
        pictures = self._show_shardings()
        print(_comparison(result.eval_loss, entropy))
        sample = self._sample()
        print(f"\nSample:\n{sample}\n")
        report = view.write_report(
            self.out / "report.html",
            title=f"shardax run {self.out.name}",
            summary=self._summary(result, entropy, time.monotonic() - started),
            parameters=table,
            pictures=pictures,
            records=train.read_jsonl(result.log),
            references=entropy,
            sample=sample,
        )
        print(f"checkpoint  {result.checkpoint}\nlog         {result.log}\nreport      {report}")
        return 0

    def _show_shardings(self) -> dict[str, str]:
        """Prints pictures of two parameters and returns them as SVG by caption."""
        from shardax import view

        wanted = (".embed.embedding", ".layers[0].mlp.gate.kernel")
        by_path = {format_path(path): variable for path, variable in iter_variables(self.model)}
        chosen = {path: by_path[path] for path in wanted}
        for path, variable in chosen.items():
            print(f"\n{path} {variable.axes} {tuple(variable.shape)} over the devices:")
            view.show_sharding(variable)
        return {
            f"{path} {variable.axes}": view.sharding_svg(variable)
            for path, variable in chosen.items()
        }

    def _sample(self) -> str:
        from shardax import models

        self.model.eval()
        tokens = models.generate(
            self.model,
            list(_SAMPLE_PROMPT.encode()),
            _SAMPLE_LENGTH,
            window=self.settings.seq_len,
            temperature=0.7,
            seed=self.settings.seed,
        )
        return bytes(tokens.astype("uint8")).decode(errors="replace")

    def _summary(self, result: Any, entropy: dict[str, float], seconds: float) -> dict[str, Any]:
        settings = self.settings
        return {
            "text": settings.text or "Python's standard library",
            "model": settings.model,
            "mesh": settings.mesh or "one device",
            "steps": f"{result.step} of {settings.batch_size} x {settings.seq_len} bytes",
            "held-out loss": f"{result.eval_loss:.4f} nats per byte",
            "bigram entropy": f"{entropy['bigram']:.4f} nats per byte",
            "unigram entropy": f"{entropy['unigram']:.4f} nats per byte",
            "seconds": f"{seconds:.0f}",
        }


def _byte_entropy(part: Any) -> dict[str, float]:
    """Entropy of a part's predicted bytes in nats, without and with the byte before as context."""
    pairs = np.zeros(256 * 256, np.int64)
    for segment in part.segments():
        pairs += np.bincount(segment[:-1] * np.int64(256) + segment[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)

    def entropy(counts: np.ndarray, totals: Any) -> float:
        some = counts > 0
        information = np.log(np.broadcast_to(totals, counts.shape)[some] / counts[some])
        return float((counts[some] * information).sum() / pairs.sum())

    unigram = entropy(pairs.sum(axis=0), pairs.sum())
    # Rounding may break what holds exactly: context never raises the entropy.
    return {
        "unigram": unigram,
        "bigram": min(entropy(pairs, pairs.sum(axis=1, keepdims=True)), unigram),
    }


def _comparison(eval_loss: float | None, entropy: dict[str, float]) -> str:
    return (
        f"\nheld-out loss     {eval_loss:.4f} nats per byte\n"
        f"bigram entropy    {entropy['bigram']:.4f} of the same text\n"
        f"unigram entropy   {entropy['unigram']:.4f} of the same text"
    )
