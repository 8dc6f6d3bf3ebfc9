# SPDX-License-Identifier: Apache-2.0
"""``shardax check``: what is wrong with a layout, before anything is trained.

The mesh is an abstract one, so the layout of a run on a thousand devices can be checked on a
laptop; nothing of the model is computed. What is to be said of several arrays alike is said once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from jax.sharding import AbstractMesh

from shardax.cli.devices import mesh_sizes
from shardax.cli.presets import PRESETS
from shardax.cli.run_files import RUN_FILE, find_run, read_settings
from shardax.core.errors import CommandError
from shardax.core.paths import format_path

if TYPE_CHECKING:
    from shardax.partition.findings import Finding

_MIB = 2**20
_LISTED = 4
_SHOWN = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True)
class Check:
    """Say what is wrong with the layout of a model and its optimizer over a mesh.

    The exit status is 1 if there are errors (with --strict also if there are warnings), else 0.

    Attributes:
        model: Folder of a run, or the name of a preset: tiny, demo or small.
        mesh: Sizes of the mesh axes data and model, such as data=2,model=4, instead of the run's.
            The devices need not be there.
        zero: Split the optimizer's state over the axis data too, by the dimension embed.
        large: A parameter that every device holds whole is a warning above this many MiB.
        quiet: Leave out the notes.
        strict: Let warnings count as errors.
    """

    model: Annotated[str, tyro.conf.Positional]
    mesh: str | None = None
    zero: bool = False
    large: float = 1.0
    quiet: bool = False
    strict: bool = False

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        import optax

        from shardax import models, train
        from shardax.core.variables import OptState
        from shardax.partition import check

        rules = models.DECODER_RULES
        model, text = self._find()
        mesh = _abstract_mesh(text, rules.mesh_axes)
        optimizer = train.Optimizer(model, optax.adamw(1e-3))
        findings = check(
            {"model": model, "optimizer": optimizer},
            mesh,
            rules,
            overrides={OptState: {"embed": "data"}} if self.zero else None,
            large_bytes=int(self.large * _MIB),
        )
        counts = Counter(finding.severity for finding in findings)
        self._print(findings, counts, dict(mesh.shape))
        return 1 if counts["error"] or (self.strict and counts["warning"]) else 0

    def _find(self) -> tuple[Any, str]:
        """Returns the model, lazy, and the mesh as text."""
        from shardax.core.rng import Rngs
        from shardax.models import Decoder

        path = Path(self.model)
        if self.model in PRESETS and not (path / RUN_FILE).is_file():
            if not self.mesh:
                raise CommandError(
                    f"The preset {self.model!r} has no mesh of its own; name one: shardax check "
                    f"{self.model} --mesh data=2,model=4"
                )
            return Decoder(PRESETS[self.model].model, rngs=Rngs(params=0)), self.mesh
        if not path.exists():
            raise CommandError(
                f"{self.model!r} is neither a folder of a run nor a preset; the presets are "
                f"{', '.join(PRESETS)}."
            )
        settings = read_settings(find_run(path)[0])
        text = settings.mesh if self.mesh is None else self.mesh
        if not text:
            raise CommandError(
                f"The run {self.model} used one device, where there is nothing to lay out; name a "
                f"mesh: shardax check {self.model} --mesh data=2,model=4"
            )
        return settings.make_model(), text

    def _print(
        self, findings: Sequence[Finding], counts: Counter[str], sizes: dict[str, int]
    ) -> None:
        for severity, word in _SHOWN.items():
            if not (self.quiet and severity == "info"):
                for text, paths in _grouped(findings, severity).items():
                    print(f"{word:8} {text}{_places(paths)}")
        over = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        told = [
            f"{counts[severity]} {word}{'' if counts[severity] == 1 else 's'}"
            for severity, word in _SHOWN.items()
        ]
        print(f"{self.model} over {over}: {', '.join(told)}")


def _grouped(findings: Sequence[Finding], severity: str) -> dict[str, list[str]]:
    """Returns the paths that each text is to be said of, in order."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        if finding.severity == severity:
            path = format_path(finding.path)
            text = str(finding).removeprefix(f"{path}: ")
            groups.setdefault(text, []).extend([path] if finding.path else [])
    return groups


def _places(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return f"\n{'':8} at {', '.join(paths[:_LISTED])}{more}"


def _abstract_mesh(text: str, axes: Sequence[str]) -> AbstractMesh:
    sizes = mesh_sizes(text, axes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))
