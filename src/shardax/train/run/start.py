# SPDX-License-Identifier: Apache-2.0
"""Where a run goes on: its newest good checkpoint, or the beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from shardax import shard
from shardax.train.checkpoint import Checkpoints, restore_verified
from shardax.train.checkpoint_files import set_aside, verify
from shardax.train.checkpoint_format import check_fit, contents_of, stored_arrays
from shardax.train.data import sources
from shardax.train.errors import CheckpointDamagedError, TrainError
from shardax.train.progress import StopRequest
from shardax.train.run_folder import differences

if TYPE_CHECKING:
    from shardax.train.trainer import Trainer


class RunStart(NamedTuple):
    """The checkpoint a run goes on from, if there is one."""

    step: int = -1
    path: Any = None
    description: dict[str, Any] | None = None
    damaged: Sequence[tuple[int, str]] = ()  # newer steps, and what is wrong with them

    @classmethod
    def find(
        cls,
        trainer: Trainer,
        checkpoints: Checkpoints,
        *,
        fallback: bool,
        override: bool,
        sizes_only: bool = False,
    ) -> RunStart:
        """Finds the newest good checkpoint, or raises what ``Trainer.run`` says."""
        damaged: list[tuple[int, str]] = []
        for step in reversed(checkpoints.all_steps()):
            path = checkpoints.path(step)
            try:
                description = verify(path, sizes_only=sizes_only)
            except CheckpointDamagedError as error:
                if not fallback:
                    raise
                damaged.append((step, error.problems))
                continue

            # Settings are compared before arrays: the message says what was changed, not what no
            # longer fits.
            saved = (description["extra"] or {}).get("settings")
            changed = [] if saved is None else differences(saved, trainer.run_settings)
            if changed and not override:
                omitted = f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
                raise TrainError(
                    f"The checkpoint {path} was trained with other settings: "
                    f"{'; '.join(changed[:8])}{omitted}. Put them back, or go on with the new "
                    "ones: override=True (on the command line --override)."
                )
            contents, positions = contents_of(trainer.trained), description["positions"]
            stored = stored_arrays(description)
            check_fit(stored, contents, positions, str(path), partial=False, cast=False)
            return cls(step, path, description, damaged)

        if damaged:
            raise CheckpointDamagedError(
                f"No checkpoint in {checkpoints.directory} is good: "
                + "; ".join(f"step {step}: {problems}" for step, problems in damaged)
                + ". Put back the files, or start another run in another directory."
            )
        return cls()

    @property
    def steps_done(self) -> int:
        """How many steps are done already."""
        return max(self.step, 0)

    @property
    def extra(self) -> dict[str, Any]:
        """What the run saved beside its arrays; nothing at the beginning."""
        return (self.description or {}).get("extra") or {}

    def take(self, checkpoints: Checkpoints) -> Iterator[str]:
        """Sets the damaged checkpoints aside; yields messages about them."""
        for step, problems in self.damaged:
            place = set_aside(checkpoints.path(step)) if jax.process_index() == 0 else ""
            yield (
                f"The checkpoint of step {step} is damaged: {problems}. Going on from step "
                f"{self.step}; the damaged one is now {place}."
            )

    def place(self, trainer: Trainer, stop: StopRequest) -> bool:
        """Places model and optimizer; returns False if only the data starts anew."""
        if self.description is None:
            trainer.callbacks.begin(None)
            if trainer.mesh is not None:
                shard(trainer.trained, trainer.mesh, trainer.rules, **trainer.where)
            return True

        layout = (trainer.mesh, trainer.rules, trainer.where)
        extra = restore_verified(trainer.trained, self.path, self.description, *layout)
        with stop.bounded("a callback"):
            trainer.callbacks.begin(extra.get("callbacks"))
        with stop.bounded("the batches"):
            return sources.go_to(trainer.batches, extra["data"], resumable=trainer.resumable)
