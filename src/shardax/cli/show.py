# SPDX-License-Identifier: Apache-2.0
"""``shardax show``: the parameters of a run, without loading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardax.cli.devices import parse_mesh, use_devices
from shardax.cli.run_files import find_run, read_settings


@dataclass(frozen=True)
class Show:
    """Print the table of a run's parameters.

    Attributes:
        path: Folder of a run, or of one of its checkpoints.
        mesh: Mesh to lay it out on, instead of the run's.
        devices: Use this many virtual CPU devices, instead of the run's.
    """

    path: Annotated[Path, tyro.conf.Positional]
    mesh: str | None = None
    devices: int | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        from shardax import models, view

        folder, _ = find_run(self.path)
        settings = read_settings(folder)
        use_devices(settings.devices if self.devices is None else self.devices)
        text = settings.mesh if self.mesh is None else self.mesh
        mesh = parse_mesh(text, models.DECODER_RULES.mesh_axes)
        print(view.table(settings.make_model(), mesh=mesh, rules=models.DECODER_RULES))
        return 0
