# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what it was started with, so that it can be resumed, shown and sampled.

``run.json`` holds the settings; beside it are ``log.jsonl``, ``report.html`` and ``checkpoints/``.

``shardax show``: the parameters of a run, without loading them.

``shardax sample``: continue a prompt with a trained run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardax._core.init.rng import Rngs
from shardax._core.variable import OptState
from shardax.cli.inputs import CommandError, parse_mesh, use_devices
from shardax.host.files import write_whole
from shardax.models import DECODER_RULES, Decoder, DecoderConfig
from shardax.partition.rules import Rules
from shardax.plan.rules_file import entry_from_data

# --- Run files ---

ZERO = {OptState: {"embed": "data"}}
"""Overrides that split an optimizer's state over the mesh axis data, by the dimension embed."""

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Everything that determines a run's numbers, and how it was laid out.

    Attributes:
        model: The decoder's configuration.
        text: Path of the text, or None for Python's standard library.
        batch_size: Windows a step.
        seq_len: Bytes a window.
        steps: Optimizer steps.
        learning_rate: Peak learning rate.
        seed: Seed of parameters and data order.
        mesh: The mesh as text.
        devices: Number of virtual CPU devices, or None.
        eval_batches: Held-out batches an evaluation reads.
        checkpoint_every: Steps between checkpoints.
        zero: Whether the optimizer's state is split over the mesh axis data too.
        rules: Rules other than the decoder's, as ``plan.rules_file.entry_to_data`` writes them.
    """

    model: DecoderConfig
    text: str | None
    batch_size: int
    seq_len: int
    steps: int
    learning_rate: float
    seed: int
    mesh: str
    devices: int | None
    eval_batches: int
    checkpoint_every: int
    zero: bool = False
    rules: dict[str, Any] | None = None

    @property
    def layout_rules(self) -> Rules:
        """The rules that lay the model out."""
        if self.rules is None:
            return DECODER_RULES
        return entry_from_data(self.rules, RUN_FILE, "rules", "rules").rules

    @property
    def mesh_axes(self) -> tuple[str, ...] | None:
        """The mesh axes that there can be; None: any, because the rules are the user's own."""
        return DECODER_RULES.mesh_axes if self.rules is None else None

    @property
    def overrides(self) -> Any:
        """What lies otherwise than the rules say, or None."""
        return ZERO if self.zero else None

    def make_model(self) -> Decoder:
        """Makes the model, lazy."""
        return Decoder(self.model, rngs=Rngs(params=self.seed))


def write_settings(directory: Path, settings: RunSettings) -> None:
    """Writes ``run.json``, replacing it in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {"format": _FORMAT, **dataclasses.asdict(settings)}
    write_whole(directory / RUN_FILE, json.dumps(record, indent=2, default=str) + "\n")


def read_settings(directory: Path) -> RunSettings:
    """Reads ``run.json``.

    Raises:
        CommandError: If the folder holds no run, or one of a newer format.
    """
    file = directory / RUN_FILE
    if not file.is_file():
        raise CommandError(
            f"{directory} holds no run: there is no {RUN_FILE}. Start one with: shardax train "
            f"--out {directory}"
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.pop("format", None) != _FORMAT:
            raise CommandError(
                f"{file} was written by another version of shardax; train anew or use that version."
            )
        settings = RunSettings(model=DecoderConfig(**record.pop("model")), **record)
        _ = settings.layout_rules  # which raises if they are malformed
        return settings
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, CommandError):
            raise
        raise CommandError(
            f"{file} cannot be read ({error}); it was changed, or is not a run's."
        ) from error


def find_run(path: Path) -> tuple[Path, int | None]:
    """Finds the run that a path belongs to.

    Args:
        path: A run's folder, its ``checkpoints``, or one checkpoint in there.

    Returns:
        The run's folder, and the step of the checkpoint if the path is one.

    Raises:
        CommandError: If the path is none of these.
    """
    path = path.resolve()
    if (path / RUN_FILE).is_file():
        return path, None
    if path.name == CHECKPOINTS and (path.parent / RUN_FILE).is_file():
        return path.parent, None
    run = path.parent.parent
    if path.parent.name == CHECKPOINTS and path.name.isdecimal() and (run / RUN_FILE).is_file():
        return run, int(path.name)
    raise CommandError(
        f"{path} is no run (it has no {RUN_FILE}) and no checkpoint of one "
        f"(RUN/{CHECKPOINTS}/STEP)."
    )


# --- Show ---


@dataclass(frozen=True)
class Show:
    """Print the table of a run's parameters.

    Attributes:
        path: Folder of a run, or of one of its checkpoints.
        mesh: Mesh to lay it out on, instead of the run's.
        devices: Use this many virtual CPU devices, instead of the run's.
        flops: Also count what each part of the model takes, for a batch of the run's size.
        html: Write a page with the model and the table to this file.
    """

    path: Annotated[Path, tyro.conf.Positional]
    mesh: str | None = None
    devices: int | None = None
    flops: bool = False
    html: Path | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        import jax

        from shardax import partition, view
        from shardax.view.page import html_page
        from shardax.view.show import html_fragment

        folder, _ = find_run(self.path)
        settings = read_settings(folder)
        use_devices(settings.devices if self.devices is None else self.devices)
        text = settings.mesh if self.mesh is None else self.mesh
        mesh, rules = parse_mesh(text, settings.mesh_axes), settings.layout_rules
        model = settings.make_model()
        batch = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), "int32")
        table = view.table(model, mesh=mesh, rules=rules, inputs=[batch] if self.flops else None)
        print(table)
        if self.html is not None:
            planned = partition.abstract(model, mesh, rules)
            body = html_fragment(planned) + table.html()
            self.html.write_text(html_page(folder.name, body), encoding="utf-8")
            print(f"page: {self.html}")
        return 0


# --- Sample ---


@dataclass(frozen=True)
class Sample:
    """Continue a prompt with a trained run, byte by byte.

    Attributes:
        checkpoint: Folder of a run, or of one of its checkpoints.
        prompt: Text to continue.
        length: How many bytes to add.
        temperature: 0 takes the likeliest byte; 1 samples from the model's distribution.
        seed: Seed of the sampling.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    prompt: str = "def "
    length: int = 300
    temperature: float = 0.7
    seed: int = 0

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        from shardax import models, train

        folder, step = find_run(self.checkpoint)
        settings = read_settings(folder)
        model = settings.make_model()
        with contextlib.closing(train.Checkpoints(folder / CHECKPOINTS)) as checkpoints:
            step = checkpoints.latest() if step is None else step
            if step is None:
                raise CommandError(f"{folder} has no checkpoint yet.")
            checkpoints.restore((model,), step, partial=True)
        model.eval()
        tokens = models.generate(
            model,
            list(self.prompt.encode()),
            self.length,
            window=settings.seq_len,
            temperature=self.temperature,
            seed=self.seed,
        )
        print(bytes(tokens.astype("uint8")).decode(errors="replace"))
        return 0
