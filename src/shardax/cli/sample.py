# SPDX-License-Identifier: Apache-2.0
"""``shardax sample``: continue a prompt with a trained run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardax.cli.run_files import CHECKPOINTS, find_run, read_settings
from shardax.core.errors import CommandError


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
