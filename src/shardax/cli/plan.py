# SPDX-License-Identifier: Apache-2.0
"""``shardax plan``: layouts for hardware, with their costs.

What is planned is a step of the user's own, or the training step of a preset.
``shardax plan explain`` and ``shardax plan diff`` describe layouts of a plan that was written with
``--json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import tyro

from shardax import Rngs, jit, plan, value_and_grad
from shardax.cli import inputs
from shardax.extend import PyTree, did_you_mean
from shardax.models import Decoder, next_token_loss
from shardax.plan.comparison import layouts_over, reports_of
from shardax.plan.errors import PlanFileError, PlanInterrupted, TargetError
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.report.explanation import headline
from shardax.plan.report.table import show
from shardax.train import Optimizer

_OPTIONS = ("tie", "fix", "meshes", "mesh_axes", "parallel")
_KEYS = ("step", "args", *_OPTIONS)
_LOCAL = 64  # devices of a CPU target that this process pretends to have, rather than start others
_DEVICES = "jax_num_cpu_devices"
_DEVICES_FLAG = "xla_force_host_platform_device_count"  # the user's own choice of their number


@dataclass(frozen=True)
class PlannedStep:
    """A step with its arguments, as ``plan.compare`` takes them."""

    step: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    options: dict[str, Any] = field(default_factory=dict)  # of ``plan.search``: see _OPTIONS


@jit(donate_argnums=(0, 1))
def train_step(model: PyTree, optimizer: Any, batch: PyTree) -> PyTree:
    """The step of ``shardax train``: loss, gradients, update."""
    loss, gradients = value_and_grad(next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def preset_step(name: str, batch: int | None = None, seq_len: int | None = None) -> PlannedStep:
    """Returns the training step of a preset, without arrays."""
    preset = inputs.find_preset(name)
    rows = preset.batch_size if batch is None else batch
    length = preset.seq_len if seq_len is None else seq_len
    model = Decoder(preset.model, rngs=Rngs(params=0))
    optimizer = Optimizer(model, inputs.decoder_optimizer(preset.steps, preset.learning_rate))
    tokens = plan.NamedShape((rows, length), "int32", ("batch", "seq"))
    return PlannedStep(train_step, (model, optimizer, {"inputs": tokens, "targets": tokens}))


def own_step(target: str, batch: int | None = None) -> PlannedStep:
    """Returns the step made by a function of the user's."""
    make_step = inputs.load_target(target)
    if not callable(make_step):
        raise inputs.CommandError(
            f"{target!r} is {make_step!r}, which cannot be called. Name a function that returns "
            "(step, args)."
        )
    arguments: dict[str, PyTree] = {} if batch is None else {"batch": batch}
    return as_planned(inputs.call(make_step, target, **arguments), target)


def as_planned(returned: object, target: str) -> PlannedStep:
    """Checks the result of a user's function."""
    parts: Any = returned
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        parts = {f.name: getattr(returned, f.name) for f in dataclasses.fields(returned)}
    elif isinstance(returned, tuple) and len(returned) == 2:
        parts = dict(zip(("step", "args"), returned, strict=True))

    if not isinstance(parts, Mapping) or not {"step", "args"} <= set(parts):
        kind = type(returned).__name__
        raise inputs.CommandError(
            f"{target!r} returned {kind}. It should return (step, args), or a "
            f"mapping or dataclass with step and args, and if wanted {', '.join(_OPTIONS)}."
        )

    for name in parts:
        if name not in _KEYS:
            raise inputs.CommandError(
                f"{target!r} returned something with {name!r}; there are {', '.join(_KEYS)}."
                f"{did_you_mean(name, _KEYS)}"
            )

    if not callable(parts["step"]) or not isinstance(parts["args"], (tuple, list)):
        raise inputs.CommandError(
            f"{target!r} returned step={parts['step']!r} and args of type "
            f"{type(parts['args']).__name__}. step is the function that is compiled, and args the "
            "tuple of its positional arguments."
        )

    options = {name: parts[name] for name in _OPTIONS if parts.get(name) is not None}
    return PlannedStep(parts["step"], tuple(parts["args"]), options)


@dataclass(frozen=True)
class PlanCommand:
    """Find the layouts that fit on hardware, with their costs."""

    details: ClassVar[str] = (
        "The hardware need not be there. Without MODULE:NAME, it plans the training step of a "
        "preset. A function of your own takes no arguments (with --batch, it takes batch) and "
        "returns (step, args), or a mapping or dataclass with step, args, and if wanted tie, fix, "
        "meshes, mesh_axes, parallel as plan.search takes them. Nothing is allocated: arguments "
        "are lazy models and optimizers, and plan.NamedShape for a batch.\n\n"
        "The exit status is 0 if a layout fits, 1 if none does or something is wrong.\n\n"
        "Of a plan written with --json: shardax plan explain PLAN.json LAYOUT says what a layout "
        "sends over the wire and which line of code needs it; shardax plan diff PLAN.json:A "
        "PLAN.json:B says what differs between two layouts."
    )

    # MODULE:NAME of a function that makes the step and its arguments.
    step: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:NAME")] = None
    # Hardware, such as cpu:8, tpu:v5e:4x4, gpu:h100:8x8; or a TOML file of your own.
    target: str = "cpu:8"
    # Compare these layouts instead of searching: a TOML file with one or several layouts
    # (FILE.toml:NAME is one of them), a JSON file, or module:name of rules.
    rules: str | None = None
    # Sizes of mesh axes, such as data=4,model=4; may be given several times. By default those of
    # the rules' file, or all that multiply to the target's devices.
    mesh: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # Batch size; several to compare them by the time that one example takes.
    batch: tuple[int, ...] = ()
    # Bytes a window, instead of the preset's.
    seq_len: int | None = None
    # Size of the model that is planned without MODULE:NAME: tiny, demo or small.
    preset: str = "demo"
    # How many layouts to show of a search, the best ones.
    top: int = 5
    # How the compiler works: full as for a run, or screen, which is faster and may show up to a
    # fifth less memory.
    effort: Literal["full", "screen"] = "full"
    # The target's own, or an estimate by the CPU's; auto takes the former if it is installed.
    compiler: Literal["auto", "target", "estimate"] = "auto"
    # How many processes compile.
    processes: int | None = None
    # Keep compiled programs, so that the same search is quick and goes on where it was.
    cache: bool = True
    # Write the plan to this file.
    json: Path | None = None
    # Write a page with tables, pictures and explanations to this file.
    html: Path | None = None
    # Write the best layout that fits to this TOML file, for shardax train --rules.
    write_rules: Path | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        self._check()
        try:
            target = plan.Target.parse(self.target)
        except TargetError as error:
            raise inputs.CommandError(f"--target {self.target}: {error}") from error

        meshes = [inputs.mesh_sizes(text) for text in self.mesh]

        _pretend_devices(target.kind, target.device_count)
        try:
            if self.rules is None:
                layout_plan = self._search(target, meshes)
            else:
                layout_plan = self._compare(target, meshes, self.rules)
        except PlanInterrupted as error:
            self._print(error.plan)  # what was done
            print(f"shardax: {error}", file=sys.stderr)
            return 130
        except Exception as error:
            if self.step is None or inputs.frames_of(self.step, error) is None:
                raise  # not of the user's step
            raise inputs.user_error(self.step, error) from error

        self._print(layout_plan)
        best = layout_plan.best()
        if self.write_rules is not None:
            plan.write_rules(self.write_rules, [plan.named_rules(best.layout, _comments(best))])
            print(f"rules: {self.write_rules}")
        return 0

    def _check(self) -> None:
        """Refuses impossible options, before anything is compiled."""
        inputs.check_values(vars(self))
        inputs.check_outputs(
            {option: getattr(self, option) for option in ("json", "html", "write_rules")}
        )

        if self.step is not None and not inputs.is_target(self.step):
            raise inputs.CommandError(
                f"{self.step!r} is not MODULE:NAME of a function that makes a step, as in shardax "
                "plan my_package.training:make_step."
            )
        if self.step is not None and self.seq_len is not None:
            raise inputs.CommandError(
                "--seq-len is of the presets; a step of your own has its lengths."
            )

        if self.rules is not None and len(self.batch) > 1:
            raise inputs.CommandError(
                f"--batch {' '.join(map(str, self.batch))}: with --rules give one batch size; "
                "several are compared by a search."
            )

    def _make(self, batch: int | None) -> PlannedStep:
        """Returns the step of the preset, or the user's own."""
        if self.step is None:
            return preset_step(self.preset, batch, self.seq_len)
        return own_step(self.step, batch)

    def _compile_options(self) -> dict[str, Any]:
        """Returns the options of how layouts are compiled."""
        options = {name: getattr(self, name) for name in ("effort", "compiler", "processes")}
        return options | {"cache": "default" if self.cache else None}

    def _search(self, target: plan.Target, meshes: list[dict[str, int]]) -> plan.Plan:
        """Returns the plan of a search, over several batch sizes if they are given."""
        first = self._make(self.batch[0] if self.batch else None)
        options: dict[str, Any] = {**first.options, **self._compile_options(), "top": self.top}
        if meshes:
            options["meshes"] = meshes
        if len(self.batch) < 2:
            return plan.search(first.step, first.args, target, **options)

        def step(batch: int) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
            planned = self._make(batch)
            return planned.step, planned.args

        return plan.search(step, (), target, batch=self.batch, **options)

    def _compare(self, target: plan.Target, meshes: list[dict[str, int]], rules: str) -> plan.Plan:
        """Returns the plan of the layouts of a file, each over the meshes that are given."""
        layouts: list[Layout] = []
        is_file = rules.endswith(".toml")
        for named in inputs.load_layouts(rules) if is_file else (inputs.load_rules(rules),):
            over = meshes or ([dict(named.mesh)] if named.mesh else [])
            if not over:
                raise inputs.CommandError(
                    f"--rules {rules}: the layout {named.name!r} names no mesh; name it, such as "
                    "--mesh data=4,model=2, or in the file: mesh = { data = 4, model = 2 }."
                )

            parallelism = {
                "parallel": named.parallel,
                "optimizer_rules": named.optimizer_rules,
                "optimizer_memory": named.optimizer_memory,
            }
            over_meshes = layouts_over(named.name, named.rules, over)
            layouts += [dataclasses.replace(layout, **parallelism) for layout in over_meshes]

        for layout in layouts:
            target.check_mesh(layout.sizes)

        step = self._make(self.batch[0] if self.batch else None)
        reports = reports_of(
            Inputs(step.step, step.args), layouts, target, progress=True, **self._compile_options()
        )
        return plan.Plan(target.text, tuple(reports))

    def _print(self, layout_plan) -> None:
        """Prints a plan, and writes the files asked for."""
        show(layout_plan, top=self.top if self.rules is None else len(layout_plan))
        if self.json is not None:
            layout_plan.to_json(self.json)
            print(f"plan: {self.json}")
        if self.html is not None:
            layout_plan.to_html(self.html)
            print(f"page: {self.html}")


def _pretend_devices(kind: str, count: int) -> None:
    """Gives this process the devices of a CPU target if possible."""
    chosen = _DEVICES_FLAG in os.environ.get("XLA_FLAGS", "")
    fewer = getattr(jax.config, _DEVICES) < count
    with contextlib.suppress(RuntimeError):  # the backend is up; then others compile
        jax.config.update("jax_platforms", "cpu")
        if kind == "cpu" and count <= _LOCAL and fewer and not chosen:
            jax.config.update(_DEVICES, count)


def _comments(report: LayoutReport) -> list[str]:
    """The comment above the best layout in a rules file."""
    origin = report.provenance
    if origin is None:
        return [headline(report)]
    return [
        f"Found by shardax plan for {origin.target}.",
        headline(report),
        f"By {origin.compiler}, {origin.effort} effort, {origin.tier}.",
    ]


@dataclass(frozen=True)
class Explain:
    """Explain what a layout sends over the wire, by line of code."""

    # A file that shardax plan --json wrote.
    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]
    # Name of the layout; by default the best that fits.
    layout: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")] = None
    # Only what travels along this mesh axis.
    axis: str | None = None
    # Grouped by line of code, by the parameter that travels, or by kind of collective.
    by: Literal["source", "parameter", "kind"] = "source"

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        layout_plan = _read_plan(self.plan)
        report = layout_plan.best() if self.layout is None else layout_plan[self.layout]
        print(plan.explain(report, self.axis, self.by))
        return 0


@dataclass(frozen=True)
class Diff:
    """List the differences between two layouts."""

    # A file that shardax plan --json wrote, a colon, and the name of a layout; without a name the
    # best that fits.
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A.json:LAYOUT")]
    # The same for the other; or the name of another layout of the first file.
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B.json:LAYOUT")]

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        file, name = _file_and_name(self.a)
        first = _read_plan(file or self.a)
        second_file, second = _file_and_name(self.b)
        second_plan = first if second_file is None else _read_plan(second_file)
        pairs = ((first, name), (second_plan, second))
        print(plan.diff(*(p[name] if name else p.best() for p, name in pairs)))
        return 0


def _read_plan(file: str | Path) -> plan.Plan:
    try:
        return plan.Plan.from_json(file)
    except PlanFileError as error:
        raise inputs.CommandError(str(error)) from error
    except RecursionError as error:
        raise inputs.CommandError(f"{file}: it is nested too deeply.") from error


def _file_and_name(text: str) -> tuple[str | None, str]:
    """Splits ``FILE.json:NAME``; a name alone has no file."""
    if Path(text).is_file():
        return text, ""
    start, json, name = text.partition(".json")
    if json and name[:1] in ("", ":"):
        return start + json, name[1:]
    return None, text
