# SPDX-License-Identifier: Apache-2.0
"""Runs that were planned: the layout of a plan, and its prediction beside what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardax._files import write_whole
from shardax.cli import inputs
from shardax.cli.runs import RunSettings
from shardax.extend import mesh_text

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

    def check_layout(self, settings: RunSettings) -> None:
        """Refuses a run whose mesh or rules are not the planned ones."""
        from shardax import plan

        planned, sizes = self.report.layout, {}
        if settings.mesh:
            sizes = inputs.mesh_sizes(settings.mesh)
        remedy = "Leave --mesh, --rules and --zero out: the run takes them from the plan."

        # An axis of size 1 divides nothing.
        own_mesh, planned_mesh = _split_axes(sizes), _split_axes(planned.sizes)
        if own_mesh != planned_mesh:
            raise inputs.CommandError(
                f"--plan {self.file} is of the mesh {_mesh_words(planned_mesh)}, and the run has "
                f"{_mesh_words(own_mesh)}. {remedy}"
            )
        if settings.zero:
            raise inputs.CommandError(
                f"--plan {self.file} says how the optimizer's state is laid out, and so does "
                f"--zero. {remedy}"
            )
        own = settings.layout or plan.NamedRules("", settings.layout_rules)
        if _content(own) != _content(self.named_rules):
            raise inputs.CommandError(
                f"--plan {self.file} is of the layout {planned.name!r}, and the run has other "
                f"rules. {remedy}"
            )

    def check_model(self, model: object) -> None:
        """Refuses a run whose parameters are not the planned ones."""
        from shardax.plan.inputs import Inputs

        # Names of arguments are those of the planned function, and say nothing of the model.
        planned = sorted(a.shape for a in self.report.arrays if a.kind == "parameters")
        own = Inputs(_step_of, (model,)).parameter_shapes
        if planned and planned != own:
            raise inputs.CommandError(
                f"--plan {self.file} is of a model of {_numbers(planned)} parameters in "
                f"{len(planned)} arrays, and the run has {_numbers(own)} in {len(own)}, or of "
                "other shapes: give the --preset or --from that was planned, or plan this model."
            )

    def hold_against(self, folder: Path) -> RunCheck:
        """Prints predicted and measured seconds, and writes the run's row."""
        from shardax import plan

        check = plan.check_run(folder, self.report, self.target, measured=self._measured())
        write_whole(folder / ROW_FILE, json.dumps(check.row, indent=1) + "\n")

        # The time model that is calibrated is of GPUs and TPUs.
        use = "" if check.row["kind"] == "cpu" else ", for plan.calibrate"
        print(f"\n{check}\nrow         {folder / ROW_FILE}{use}")
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


def _split_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the mesh axes that divide something."""
    return {axis: size for axis, size in sizes.items() if size > 1}


def _mesh_words(sizes: Mapping[str, int]) -> str:
    """Returns a mesh as text."""
    return mesh_text(sizes, ",") or "none"


def _content(entry: NamedRules) -> str:
    """Returns what a layout lays out, without its name and its mesh."""
    from shardax.plan.rules_file import entry_to_data

    return json.dumps(entry_to_data(replace(entry, mesh=None)), sort_keys=True)


def _numbers(shapes: Iterable[tuple[int, ...]]) -> str:
    """Returns how many numbers arrays have, as text."""
    return f"{sum(math.prod(shape) for shape in shapes):,}"


def _step_of(model: object) -> object:
    """A step of a model alone, whose parameters are counted."""
    return model
