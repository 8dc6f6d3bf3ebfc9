# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what it was started with, so that it can be resumed, shown and sampled.

``run.json`` holds the settings; beside it are ``log.jsonl``, ``report.html`` and ``checkpoints/``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from shardax.core.errors import CommandError
from shardax.core.files import write_whole
from shardax.core.rng import Rngs
from shardax.core.variables import OptState
from shardax.models import DECODER_RULES, Decoder, DecoderConfig
from shardax.partition.rules import Rules
from shardax.plan.rules_file import entry_from_data

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
