# SPDX-License-Identifier: Apache-2.0
"""``shardax check``: diagnostics of a layout, before anything is trained.

The mesh is abstract, so the layout of a run on a thousand devices can be checked on a laptop;
nothing of the model is computed. Diagnostics that several arrays share are printed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from shardax import Module, Param, Rngs, iter_variables, partition, train
from shardax.cli import inputs
from shardax.cli.runs import RUN_FILE, ZERO, RunSettings, find_run, read_settings
from shardax.extend import did_you_mean, format_path, mesh_text
from shardax.models import DECODER_RULES, Decoder
from shardax.partition import Diagnostic
from shardax.plan.inputs import auto_mesh

_MIB = 2**20
_LISTED = 4
_SHOWN: dict[Literal["error", "warning", "info"], str] = {
    "error": "error",
    "warning": "warning",
    "info": "note",
}


@dataclass(frozen=True)
class Check:
    """Report what is wrong with a model's layout over a mesh."""

    details: ClassVar[str] = (
        "For a model of your own: shardax check my_package.models:make_model --rules rules.json "
        "--mesh data=2,model=4, where make_model is called without arguments.\n\n"
        "The exit status is 1 if there are errors (with --strict also if there are warnings), "
        "else 0."
    )

    # Folder of a run; or the name of a preset: tiny, demo or small; or module:name of a function
    # without arguments that returns a model.
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    # Sizes of the mesh axes, such as data=2,model=4, instead of the run's. The devices need not be
    # there.
    mesh: str | None = None
    # Rules to check instead of the decoder's or the run's: a TOML file, such as shardax plan
    # --write-rules makes (with FILE.toml:NAME one of its layouts), whose mesh is used unless --mesh
    # is given; a JSON file with a list of pairs such as [["embed", null], ["mlp", "model"]], or
    # with an object; or module:name of rules.
    rules: str | None = None
    # Split the optimizer's state over the axis data too, by the dimension embed.
    zero: bool = False
    # A parameter that every device holds whole is a warning above this many MiB.
    large: float = 1.0
    # Leave out the notes.
    quiet: bool = False
    # Let warnings count as errors.
    strict: bool = False

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        inputs.check_values(vars(self))
        if self.rules is None and inputs.is_target(self.model):
            raise inputs.CommandError(
                f"Name the rules for {self.model}: --rules FILE.toml, --rules FILE.json, or "
                "--rules module:name."
            )

        layout = None if self.rules is None else inputs.load_rules(self.rules)
        mesh_given = self.mesh or (mesh_text(layout.mesh or (), ",") if layout is not None else "")
        model, text, run = self._find(mesh_given)

        has_own_rules = layout is not None or (run is not None and run.rules is not None)
        standard = DECODER_RULES if run is None else run.layout_rules
        rules = standard if layout is None else layout.rules
        own_overrides = None if run is None else run.overrides
        if layout is not None:
            own_overrides = layout.overrides

        # One's own rules are checked too: an axis that they misspell must not be one of the mesh's.
        sizes = inputs.mesh_sizes(text, None if has_own_rules else rules.mesh_axes)
        mesh = auto_mesh(sizes)

        findings = partition.check(
            _with_optimizer(model),
            mesh,
            rules,
            overrides=ZERO if self.zero else own_overrides,
            large_bytes=int(self.large * _MIB),
        )
        # Mesh axes that are not there have been found already, where there are arrays.
        findings += [f for f in rules.check(mesh) if f.code != "unknown-mesh-axis"]

        counts = Counter(finding.severity for finding in findings)
        totals: list[str] = []
        for severity, word in _SHOWN.items():
            totals.append(f"{counts[severity]} {word}{'' if counts[severity] == 1 else 's'}")
            if not (self.quiet and severity == "info"):
                _print(word, [finding for finding in findings if finding.severity == severity])
        print(f"{self.model} over {mesh_text(sizes)}: {', '.join(totals)}")

        return 1 if counts["error"] or (self.strict and counts["warning"]) else 0

    def _find(self, mesh: str) -> tuple[Any, str, RunSettings | None]:
        """Returns the lazy model, the mesh as text, and the run's settings."""
        path = Path(self.model)
        if not (path / RUN_FILE).is_file() and (
            self.model in inputs.PRESETS or inputs.is_target(self.model)
        ):
            if not mesh:
                raise inputs.CommandError(
                    f"{self.model!r} has no mesh of its own; name one: shardax check {self.model} "
                    "--mesh data=2,model=4"
                )
            if inputs.is_target(self.model):
                return inputs.load_model(self.model), mesh, None
            return Decoder(inputs.PRESETS[self.model].model, rngs=Rngs(params=0)), mesh, None

        if not path.exists():
            raise inputs.CommandError(
                f"{self.model!r} is no folder of a run, no preset (there are "
                f"{', '.join(inputs.PRESETS)}) and no module:name of a model."
                f"{did_you_mean(self.model, inputs.PRESETS)}"
            )

        settings = read_settings(find_run(path)[0])
        text = mesh or settings.mesh
        if not text:
            raise inputs.CommandError(
                f"The run {self.model} used one device, where there is nothing to lay out; name a "
                f"mesh: shardax check {self.model} --mesh data=2,model=4"
            )
        return settings.make_model(), text, settings


def _with_optimizer(model: object) -> dict[str, Any]:
    """The model, with an Adam optimizer if it has parameters."""
    import optax

    if not isinstance(model, Module) or next(iter_variables(model, Param), None) is None:
        return {"model": model}
    return {"model": model, "optimizer": train.Optimizer(model, optax.adamw(1e-3))}


def _print(word: str, findings: Sequence[Diagnostic]) -> None:
    """Prints each text once, with its paths in order."""
    paths: dict[str, list[str]] = {}
    for finding in findings:
        path = format_path(finding.path)
        text = str(finding).removeprefix(f"{path}: ")
        paths.setdefault(text, []).extend([path] if finding.path else [])
    for text, about in paths.items():
        omitted = f" and {len(about) - _LISTED} more" if len(about) > _LISTED else ""
        places = f"\n{'':8} at {', '.join(about[:_LISTED])}{omitted}" if about else ""
        print(f"{word:8} {text}{places}")
