# SPDX-License-Identifier: Apache-2.0
"""Runs that were planned: the layout of a plan, and its prediction beside what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardax._files import write_whole
from shardax.cli import inputs
from shardax.cli.runs import RunSettings

if TYPE_CHECKING:  # slow to import, and needed by planned runs alone
    from shardax.plan import Hardware, LayoutReport, NamedRules, RunCheck

ROW_FILE = "row.json"


@dataclass(frozen=True)
class PlannedRun:
    """The layout of a plan that a run trains in."""

    file: str
    target: str
    report: LayoutReport

    @classmethod
    def read(cls, text: str) -> PlannedRun:
        """Reads the layout of ``PLAN.json`` or ``PLAN.json:NAME``."""
        from shardax import plan
        from shardax.plan.errors import PlanError

        file, _, name = text.partition(".json:")
        file = f"{file}.json" if name else text
        try:
            whole = plan.Plan.from_json(file)
            report = whole[name] if name else whole.best()
        except PlanError as error:
            raise inputs.CommandError(f"--plan {text}: {error}") from error
        return cls(file, whole.target, report)

    @property
    def named_rules(self) -> NamedRules:
        """The layout as rules with their mesh."""
        from shardax import plan

        return plan.named_rules(self.report.layout)

    def check_sizes(self, settings: RunSettings) -> None:
        """Refuses a run whose batch is not the planned one."""
        shapes = [array.shape for array in self.report.arrays if array.kind == "batch"]
        own = settings.batch_size, settings.seq_len
        if shapes and shapes[0] != own:
            rows, *length = shapes[0]
            options = f"--batch-size {rows}" + "".join(f" --seq-len {size}" for size in length[:1])
            raise inputs.CommandError(
                f"--plan {self.file} is of a batch of {shapes[0]}, and the run has {own}: give "
                f"{options}, or plan this batch."
            )

    def hold_against(self, folder: Path) -> RunCheck:
        """Prints predicted and measured seconds, and writes the run's row."""
        from shardax import plan

        check = plan.check_run(folder, self.report, self.target, measured=self._measured())
        write_whole(folder / ROW_FILE, json.dumps(check.row, indent=1) + "\n")
        print(f"\n{check}\nrow         {folder / ROW_FILE}, for plan.calibrate")
        return check

    def _measured(self) -> Hardware | None:
        """Returns the rates of this machine's devices, where they can be measured."""
        from shardax import plan

        target = plan.Target.parse(self.target)
        devices = math.prod(self.report.layout.sizes.values())
        if target.kind == "cpu":
            return plan.calibrate_cpu(devices, matrix=256, megabytes=2.0, repeats=10)
        if target.kind == "gpu" and target.topology[0] == 1:
            return plan.calibrate_gpu(devices)
        return None
