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
