# SPDX-License-Identifier: Apache-2.0
"""Folders of training runs, and the commands that read them.

``run.json`` holds the settings of a run; beside it are ``log.jsonl``, ``report.html`` and
``checkpoints/``. ``shardax show`` prints the parameters of a run without loading them,
``shardax sample`` continues a prompt with a trained model.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from shardax import models, partition, train, view
from shardax._core.init.rng import Rngs
from shardax._core.variable import OptState
from shardax.cli.inputs import CommandError, parse_mesh, use_devices
from shardax.host.files import write_whole
from shardax.models import DECODER_RULES, Decoder, DecoderConfig
from shardax.partition.rules import Rules
from shardax.plan.rules_file import entry_from_data
from shardax.view.display import html_fragment
from shardax.view.page import html_page

# Splits an optimizer's state over the mesh axis data, by the dimension embed.
ZERO = {OptState: {"embed": "data"}}

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
_FORMAT = 1


@dataclass(frozen=True)
class RunSettings:
    """Everything that determines a run's numbers, and how it was laid out."""

    model: DecoderConfig
    text: str | None  # path, or None for Python's standard library
    batch_size: int  # windows a step
    seq_len: int  # bytes a window
    steps: int
    learning_rate: float  # the peak
    seed: int  # of parameters and data order
    mesh: str  # as text; "" for one device
    devices: int | None  # virtual CPU devices
    eval_batches: int  # that an evaluation reads
    checkpoint_every: int
    zero: bool = False  # whether the optimizer's state is split over the mesh axis data too
    rules: dict[str, Any] | None = None  # other than the decoder's: ``rules_file.entry_to_data``

    @property
    def layout_rules(self) -> Rules:
        """The rules that lay the model out."""
        if self.rules is None:
            return DECODER_RULES
        return entry_from_data(self.rules, RUN_FILE, "rules", "rules").rules

    @property
    def mesh_axes(self) -> tuple[str, ...] | None:
        """The possible mesh axes; None: any, with the user's own rules."""
        return DECODER_RULES.mesh_axes if self.rules is None else None

    @property
    def overrides(self) -> Any:
        """Exceptions from the rules, or None."""
        return ZERO if self.zero else None

    def make_model(self) -> Decoder:
        """Makes the model, lazy."""
        return Decoder(self.model, rngs=Rngs(params=self.seed))


def write_settings(directory: Path, settings: RunSettings) -> None:
    """Writes ``run.json``, replacing it in one step."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {"format": _FORMAT, **asdict(settings)}
    write_whole(directory / RUN_FILE, json.dumps(record, indent=2, default=str) + "\n")


def read_settings(directory: Path) -> RunSettings:
    """Reads ``run.json``."""
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
    except CommandError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(
            f"{file} cannot be read ({error}); it was changed, or is not a run's."
        ) from error


def find_run(path: Path) -> tuple[Path, int | None]:
    """Returns a path's run, and the step of a checkpoint's path."""
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


def sample_text(model: Any, prompt: str, length: int, **options: Any) -> str:
    """Continues a prompt byte by byte; options as for ``models.generate``."""
    model.eval()
    tokens = models.generate(model, list(prompt.encode()), length, **options)
    return bytes(tokens.astype("uint8")).decode(errors="replace")


@dataclass(frozen=True)
class Show:
    """Print the table of a run's parameters."""

    # Folder of a run, or of one of its checkpoints.
    path: Annotated[Path, tyro.conf.Positional]
    # Mesh to lay it out on, instead of the run's.
    mesh: str | None = None
    # Use this many virtual CPU devices, instead of the run's.
    devices: int | None = None
    # Also count what each part of the model takes, for a batch of the run's size.
    flops: bool = False
    # Write a page with the model and the table to this file.
    html: Path | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
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
            page = html_page(folder.name, html_fragment(planned) + table.html())
            self.html.write_text(page, encoding="utf-8")
            print(f"page: {self.html}")
        return 0


@dataclass(frozen=True)
class Sample:
    """Continue a prompt with a trained run, byte by byte."""

    # Folder of a run, or of one of its checkpoints.
    checkpoint: Annotated[Path, tyro.conf.Positional]
    # Text to continue.
    prompt: str = "def "
    # How many bytes to add.
    length: int = 300
    # 0 takes the likeliest byte; 1 samples from the model's distribution.
    temperature: float = 0.7
    # Seed of the sampling.
    seed: int = 0

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        folder, step = find_run(self.checkpoint)
        settings = read_settings(folder)
        model = settings.make_model()
        with contextlib.closing(train.Checkpoints(folder / CHECKPOINTS)) as checkpoints:
            step = checkpoints.latest() if step is None else step
            if step is None:
                raise CommandError(f"{folder} has no checkpoint yet.")
            checkpoints.restore((model,), step, partial=True)
        options = {"temperature": self.temperature, "seed": self.seed}
        print(sample_text(model, self.prompt, self.length, window=settings.seq_len, **options))
        return 0
