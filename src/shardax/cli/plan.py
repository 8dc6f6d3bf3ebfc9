# SPDX-License-Identifier: Apache-2.0
"""``shardax plan``: which layouts of a step fit on hardware, and what each one costs.

``shardax plan explain`` and ``shardax plan diff`` (``cli.plan``) say more about layouts
of a plan that was written with ``--json``.

``shardax plan explain`` and ``shardax plan diff``: more about layouts of a plan in a file.

What ``shardax plan`` plans: a step of the user's own, or the training step of a preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import jax
import tyro

from shardax._core.init.rng import Rngs
from shardax._transforms.grad.grad import value_and_grad
from shardax._transforms.jit.jit import jit
from shardax.cli.inputs import (
    CommandError,
    decoder_optimizer,
    find_preset,
    is_target,
    load_layouts,
    load_rules,
    load_target,
    mesh_sizes,
)
from shardax.models import Decoder, next_token_loss
from shardax.partition.errors import did_you_mean
from shardax.plan import NamedShape, Plan
from shardax.plan.errors import PlanInputError, PlanInterrupted
from shardax.plan.records import Layout, LayoutReport
from shardax.plan.report.diff import diff
from shardax.plan.report.explanation import explain, headline
from shardax.plan.rules_file import named_rules, write_rules

if TYPE_CHECKING:
    from shardax.plan.result import Plan


# --- Plan step ---

_OPTIONS = ("tie", "fix", "meshes", "mesh_axes")
_KEYS = ("step", "args", *_OPTIONS)


@dataclass(frozen=True)
class PlannedStep:
    """A step with its arguments.

    Attributes:
        step: The function that is compiled.
        args: Its positional arguments, as ``plan.compare`` takes them.
        options: Those of ``plan.search`` that belong to the step: ``tie``, ``fix``, ``meshes``,
            ``mesh_axes``.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@jit(donate_argnums=(0, 1))
def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """The step of ``shardax train``: loss, gradients, update."""
    loss, gradients = value_and_grad(next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def preset_step(name: str, batch: int | None = None, seq_len: int | None = None) -> PlannedStep:
    """Returns the training step of a preset, whose model and optimizer hold no array.

    Args:
        name: The preset.
        batch: Windows a step, instead of the preset's.
        seq_len: Bytes a window, instead of the preset's.

    Raises:
        CommandError: If there is no such preset; or a size is not positive.

    Example:
        >>> planned = preset_step("tiny", batch=8)
        >>> planned.args[2]["inputs"].shape
        (8, 64)
    """
    from shardax.train import Optimizer

    preset = find_preset(name)
    rows = preset.batch_size if batch is None else batch
    length = preset.seq_len if seq_len is None else seq_len
    for option, size in (("batch", rows), ("seq-len", length)):
        if size < 1:
            raise CommandError(f"--{option} {size}: give at least 1.")
    model = Decoder(preset.model, rngs=Rngs(params=0))
    optimizer = Optimizer(model, decoder_optimizer(preset.steps, preset.learning_rate))
    tokens = NamedShape((rows, length), "int32", ("batch", "seq"))
    return PlannedStep(train_step, (model, optimizer, {"inputs": tokens, "targets": tokens}))


def own_step(target: str, batch: int | None = None) -> PlannedStep:
    """Returns the step that a function of the user's makes.

    Args:
        target: ``module:name`` of a function that returns ``(step, args)``; or a mapping or
            dataclass with ``step`` and ``args``, and if wanted ``tie``, ``fix``, ``meshes`` and
            ``mesh_axes``, as ``plan.search`` takes them.
        batch: What it is called with as ``batch``; None to call it without.

    Raises:
        CommandError: If there is no such function, it takes no batch, or returns something else.
    """
    found = load_target(target)
    if not callable(found):
        raise CommandError(
            f"{target!r} is {found!r}, which cannot be called. Name a function that returns "
            "(step, args)."
        )
    given: dict[str, Any] = {} if batch is None else {"batch": batch}
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        how = f"as {target.partition(':')[2]}(batch={batch})" if given else "without arguments"
        raise CommandError(f"{target!r} is called {how}: {error}.") from error
    return as_planned(found(**given), target)


def as_planned(made: Any, target: str) -> PlannedStep:
    """Returns what a user's function made, checked.

    Args:
        made: What it returned.
        target: What errors call the function.

    Raises:
        CommandError: If it is no step with arguments; says what it should be.

    Example:
        >>> as_planned((abs, [1]), "my:make").args
        (1,)
    """
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        names = [each.name for each in dataclasses.fields(made)]
        made = {name: getattr(made, name) for name in names}
    if isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) == 2:
        made = dict(zip(("step", "args"), made, strict=True))
    if not isinstance(made, Mapping) or not {"step", "args"} <= set(made):
        raise CommandError(
            f"{target!r} returned {type(made).__name__}. It should return (step, args), or a "
            f"mapping or dataclass with step and args, and if wanted {', '.join(_OPTIONS)}."
        )
    parts = dict(cast("Mapping[str, Any]", made))
    for name in parts:
        if name not in _KEYS:
            raise CommandError(
                f"{target!r} returned something with {name!r}; there are {', '.join(_KEYS)}."
                f"{did_you_mean(name, _KEYS)}"
            )
    if not callable(parts["step"]) or not isinstance(parts["args"], (tuple, list)):
        raise CommandError(
            f"{target!r} returned step={parts['step']!r} and args of type "
            f"{type(parts['args']).__name__}. step is the function that is compiled, and args the "
            "tuple of its positional arguments."
        )
    options = {name: parts[name] for name in _OPTIONS if parts.get(name) is not None}
    return PlannedStep(parts["step"], tuple(parts["args"]), options)


# --- Plan ---

_HERE = 64  # devices of a CPU target that this process pretends to have, rather than start others
_DEVICES = "jax_num_cpu_devices"
_DEVICES_FLAG = "xla_force_host_platform_device_count"  # the user's own choice of their number


@dataclass(frozen=True)
class PlanCommand:
    """Find which layouts of a step fit on hardware that need not be there, and what each costs.

    Without MODULE:NAME, it plans the training step of a preset. A function of your own takes no
    arguments (with --batch, it takes batch) and returns (step, args), or a mapping or dataclass
    with step, args, and if wanted tie, fix, meshes, mesh_axes as plan.search takes them. Nothing is
    allocated: arguments are lazy models and optimizers, and plan.NamedShape for a batch.

    The exit status is 0 if a layout fits, 1 if none does or something is wrong.

    Of a plan written with --json: shardax plan explain PLAN.json LAYOUT says what a layout sends
    over the wire and which line of code needs it; shardax plan diff PLAN.json:A PLAN.json:B says
    what differs between two layouts.

    Attributes:
        step: MODULE:NAME of a function that makes the step and its arguments.
        target: Hardware, such as cpu:8, tpu:v5e:4x4, gpu:h100:8x8; or a TOML file of your own.
        rules: Compare these layouts instead of searching: a TOML file with one or several layouts
            (FILE.toml:NAME is one of them), a JSON file, or module:name of rules.
        mesh: Sizes of mesh axes, such as data=4,model=4; may be given several times. By default
            those of the rules' file, or all that multiply to the target's devices.
        batch: Batch size; several to compare them by the time that one example takes.
        seq_len: Bytes a window, instead of the preset's.
        preset: Size of the model that is planned without MODULE:NAME: tiny, demo or small.
        top: How many layouts to show of a search, the best ones.
        effort: How the compiler works: full as for a run, or screen, which is faster and may show
            up to a fifth less memory.
        compiler: The target's own, or an estimate by the CPU's; auto takes the former if it is
            installed.
        processes: How many processes compile.
        cache: Keep compiled programs, so that the same search is quick and goes on where it was.
        json: Write the plan to this file.
        html: Write a page with tables, pictures and explanations to this file.
        write_rules: Write the best layout that fits to this TOML file, for shardax train --rules.
    """

    step: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:NAME")] = None
    target: str = "cpu:8"
    rules: str | None = None
    mesh: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    batch: tuple[int, ...] = ()
    seq_len: int | None = None
    preset: str = "demo"
    top: int = 5
    effort: Literal["full", "screen"] = "full"
    compiler: Literal["auto", "target", "estimate"] = "auto"
    processes: int | None = None
    cache: bool = True
    json: Path | None = None
    html: Path | None = None
    write_rules: Path | None = None

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        from shardax.plan.hardware.targets import Target

        self._check()
        target = Target.parse(self.target)
        meshes = [mesh_sizes(text) for text in self.mesh]
        _pretend_devices(target.kind, target.device_count)
        try:
            if self.rules is None:
                plan = self._search(target, meshes)
            else:
                plan = self._compare(target, meshes, self.rules)
        except PlanInterrupted as error:
            self._tell(error.plan)  # what was done
            print(f"shardax: {error}", file=sys.stderr)
            return 130
        self._tell(plan)
        try:
            best = plan.best()
        except PlanInputError as error:
            raise CommandError(str(error)) from error
        if self.write_rules is not None:
            write_rules(self.write_rules, [named_rules(best.layout, _notes(best))])
            print(f"rules: {self.write_rules}")
        return 0

    def _check(self) -> None:
        """Refuses what cannot be, before anything is compiled."""
        for option in ("json", "html", "write_rules"):
            path: Path | None = getattr(self, option)
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                found = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
                raise CommandError(f"--{option.replace('_', '-')} {path}: {found}.")
        if self.step is not None and not is_target(self.step):
            raise CommandError(
                f"{self.step!r} is not MODULE:NAME of a function that makes a step, as in shardax "
                "plan my_package.training:make_step."
            )
        if self.step is not None and self.seq_len is not None:
            raise CommandError("--seq-len is of the presets; a step of your own has its lengths.")
        if self.rules is not None and len(self.batch) > 1:
            raise CommandError(
                f"--batch {' '.join(map(str, self.batch))}: with --rules give one batch size; "
                "several are compared by a search."
            )
        if self.top < 1 or (self.processes is not None and self.processes < 1):
            raise CommandError("--top and --processes take a number of at least 1.")

    def _make(self, batch: int | None = None) -> PlannedStep:
        if self.step is None:
            return preset_step(self.preset, batch, self.seq_len)
        return own_step(self.step, batch)

    def _search(self, target: Any, meshes: list[dict[str, int]]) -> Plan:
        from shardax import plan

        several = len(self.batch) > 1
        first = self._make(self.batch[0] if self.batch else None)
        options = {**first.options, **({"meshes": meshes} if meshes else {})}
        step: Callable[..., Any] = _varied(self._make) if several else first.step
        return plan.search(
            step,
            () if several else first.args,
            target,
            **options,
            batch=self.batch if several else None,
            top=self.top,
            effort=self.effort,
            compiler=self.compiler,
            processes=self.processes,
            cache="default" if self.cache else None,
        )

    def _compare(self, target: Any, meshes: list[dict[str, int]], rules: str) -> Plan:
        from shardax.plan.compare import reports_of
        from shardax.plan.inputs import Inputs
        from shardax.plan.result import Plan

        layouts = _layouts(rules, meshes)
        for layout in layouts:
            target.check_mesh(layout.sizes)
        made = self._make(self.batch[0] if self.batch else None)
        reports = reports_of(
            Inputs(made.step, made.args),
            layouts,
            target,
            self.effort,
            compiler=self.compiler,
            processes=self.processes,
            cache="default" if self.cache else None,
            progress=True,
        )
        return Plan(target.text, tuple(reports))

    def _tell(self, plan: Any) -> None:
        """Prints a plan, and writes what was asked for."""
        from shardax.plan.report.table import show

        show(plan, top=self.top if self.rules is None else len(plan))
        if self.json is not None:
            plan.to_json(self.json)
            print(f"plan: {self.json}")
        if self.html is not None:
            plan.to_html(self.html)
            print(f"page: {self.html}")


def _varied(make: Callable[[int], PlannedStep]) -> Callable[..., Any]:
    """The step as ``plan.search`` asks for it, by batch size."""

    def step(batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        made = make(batch)
        return made.step, made.args

    return step


def _layouts(rules: str, meshes: list[dict[str, int]]) -> list[Layout]:
    """The layouts of a rules file, each over its own mesh or over those of the command line."""
    from shardax.plan.compare import layouts_over

    found = load_layouts(rules) if rules.endswith(".toml") else (load_rules(rules),)
    layouts: list[Layout] = []
    for entry in found:
        over = meshes or ([dict(entry.mesh)] if entry.mesh else [])
        if not over:
            raise CommandError(
                f"--rules {rules}: the layout {entry.name!r} names no mesh; name it, such as "
                "--mesh data=4,model=2, or in the file: mesh = { data = 4, model = 2 }."
            )
        layouts += layouts_over(entry.name, entry.rules, over)
    return layouts


def _pretend_devices(kind: str, count: int) -> None:
    """Gives this process the devices of a CPU target, and nothing else, if it can still be done."""
    chosen = _DEVICES_FLAG in os.environ.get("XLA_FLAGS", "")
    fewer = getattr(jax.config, _DEVICES) < count
    with contextlib.suppress(RuntimeError):  # the backend is up; then others compile
        jax.config.update("jax_platforms", "cpu")
        if kind == "cpu" and count <= _HERE and fewer and not chosen:
            jax.config.update(_DEVICES, count)


def _notes(report: LayoutReport) -> list[str]:
    """What the comment above the best layout says."""
    where = report.provenance
    found = [] if where is None else [f"Found by shardax plan for {where.target}."]
    found.append(headline(report))
    if where is not None:
        found.append(f"By {where.compiler}, {where.effort} effort, {where.tier}.")
    return found


# --- Plan reports ---


@dataclass(frozen=True)
class Explain:
    """Say what a layout sends over the wire, and which line of the model's code needs it.

    Attributes:
        plan: A file that shardax plan --json wrote.
        layout: Name of the layout; by default the best that fits.
        axis: Only what travels along this mesh axis.
        by: Grouped by line of code, by the parameter that travels, or by kind of collective.
    """

    plan: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]
    layout: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="LAYOUT")] = None
    axis: str | None = None
    by: Literal["source", "parameter", "kind"] = "source"

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        found = Plan.from_json(self.plan)
        report = found.best() if self.layout is None else found[self.layout]
        print(explain(report, self.axis, self.by))
        return 0


@dataclass(frozen=True)
class Diff:
    """Say what differs between two layouts: rules, splits, memory, time, and which collectives.

    Attributes:
        a: A file that shardax plan --json wrote, a colon, and the name of a layout; without a name
            the best that fits.
        b: The same for the other; or the name of another layout of the first file.
    """

    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A.json:LAYOUT")]
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B.json:LAYOUT")]

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        file, name = _parted(self.a)
        other, second = _parted(self.b)
        first = Plan.from_json(file or self.a)
        if other is None:  # the name of a layout alone
            print(diff(_report(first, name), first[self.b]))
        else:
            print(diff(_report(first, name), _report(Plan.from_json(other), second)))
        return 0


def _report(plan: Plan, name: str) -> LayoutReport:
    return plan[name] if name else plan.best()


def _parted(text: str) -> tuple[str | None, str]:
    """Returns the file that a text begins with, if it does, and the name after it.

    >>> _parted("out.json:fsdp 8x2"), _parted("out.json"), _parted("fsdp")
    (('out.json', 'fsdp 8x2'), ('out.json', ''), (None, 'fsdp'))
    """
    if Path(text).is_file():
        return text, ""
    start, json, rest = text.partition(".json")
    if json and (not rest or rest.startswith(":")):
        return start + json, rest[1:]
    return None, text
