# SPDX-License-Identifier: Apache-2.0
"""Search for the best layouts of a step on hardware.

Candidates are ordered by the expected time of the traced step (``traced.py``), those last whose
arguments and gradients alone do not fit. The first are *screened*: compiled fast, several at a
time, with the most promising of each form of parallelism; further ones only if too few of these
fit. The best are compiled again with full effort; these are the *finalists*, whose memory is what
the program will need. Compiled layouts are ranked by the same model of time, which then reads the
compiled program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax import parallel as parallel_scope
from shardax.errors import PartitionError
from shardax.extend import Options, PyTree, did_you_mean
from shardax.plan.compile.cache import cache_folder
from shardax.plan.compile.pool import LocalEvaluator, PoolEvaluator, make_evaluator
from shardax.plan.errors import PlanInputError, PlanInterrupted, TargetError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout, LayoutReport, Plan, rank
from shardax.plan.report.progress import SearchProgress as Progress
from shardax.plan.report.progress import progress_for
from shardax.plan.searching import candidates as candidate_search
from shardax.plan.searching.candidates import Candidates, Meshes, SearchSpace
from shardax.plan.searching.dimensions import DimensionModel, trace_dimensions
from shardax.plan.searching.division import division_note
from shardax.plan.searching.traced import Splits, traced_time
from shardax.plan.timing.workload import ExpectedTime

_OPTIONS = Options(PlanInputError)
FEW = 2  # so many candidates are compiled at least
OF_EACH_FORM = 1  # of pipelines, split sequences and others, are compiled with the first
_NO_ROOM = "its arguments and gradients alone need more than a device's memory"
_NOT_COMPILED = (
    "Nothing was compiled: the time is that of the traced step, and beside arguments and gradients "
    "the memory is not known. effort='screen' compiles."
)
_MORE_FINALISTS = 3  # how many times as many are compiled, if some do not fit with full effort


def search(
    step: Callable[..., PyTree],
    args: Sequence[PyTree],
    target: str | Target,
    *,
    mesh_axes: Sequence[str] = ("data", "model"),
    meshes: Sequence[Mapping[str, int]] | None = None,
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, Any] | None = None,
    batch: Sequence[int] | None = None,
    remat: Sequence[Any] | None = None,
    attention: Sequence[Any] | None = None,
    precision: Sequence[Any] | None = None,
    parallel: Mapping[str, Sequence[Any]] | None = None,
    top: int | None = 5,
    finalists: int = 3,
    effort: str = "full",
    within: float | None = 1.3,
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = True,
) -> Plan:
    """Finds the best layouts of a step on hardware, present or not.

    Args:
        step: What is planned; see ``compare``. With ``batch``, ``remat``, ``attention`` or
            ``precision``: a function that makes it, called with those as keywords, which returns
            ``(step, args)``.
        args: Its positional arguments, as for ``compare``; ``()`` if ``step`` makes them.
        target: The hardware, such as ``"tpu:v5e:4x4"``.
        mesh_axes: Names of mesh axes; all sizes that multiply to the target's devices are tried.
            Several slices have an axis ``"slice"`` before them, which only splits the batch. Three
            names are for a form of parallelism: ``"stage"`` splits layers into a pipeline,
            ``"context"`` the sequence, ``"expert"`` experts and the batch.
        meshes: Sizes of mesh axes by name, one mapping per mesh, instead of all.
        tie: Names that get the same mesh axes, such as ``[("heads", "kv_heads", "mlp")]``; None
            ties those that play the same part, such as inner dimensions of layers, ``[]`` none.
        fix: Mesh axes of names that are not searched, such as ``{"vocab": "model"}``.
        batch: Batch sizes to compare, by the time that one example takes.
        remat: Ways to rematerialise to compare, whatever these are for the step.
        attention: Kernels of attention to compare, such as ``["xla", "cudnn"]``.
        precision: Precisions to compare, such as ``["float32", "bfloat16"]``.
        parallel: Values to compare by setting: ``"microbatches"``, ``"schedule"`` and ``"context"``
            of ``sx.parallel``, where the mesh has stages or splits the sequence (None: one, two and
            four microbatches a stage and both schedules; all-gather and ring-zigzag); ``"zero"``, 0
            or 1: whether the optimizer's state is split along axes that only split the batch;
            ``"optimizer_memory"``: None or a kind of memory for it, such as ``"pinned_host"``.
        top: How many layouts the plan has; None for all, those too that were not compiled.
        finalists: How many of the best are compiled with full effort.
        effort: ``"full"``; ``"screen"`` leaves out the finalists, so that peaks of memory may be up
            to a fifth too low; ``"trace"`` compiles nothing: times are those of the traced step,
            and of memory only arguments and gradients are known, for any number of devices.
        within: Candidates are compiled in the order of their expected time, as traced: the first 2
            (``top``, if more) and the best of each form of parallelism (pipelines, split sequences,
            experts), as far as that time is at most so many times the least; then others until
            ``top`` of them fit. None compiles all.
        compiler: ``"auto"``, ``"target"`` or ``"estimate"``, as for ``compare``.
        processes: How many processes compile; None for one per core.
        cache: Folder for compiled programs, ``"default"`` for that of this user, None for none.
        progress: Whether to show on stderr what is being tried.

    Returns:
        The plan, best layout first. Its notes say how many candidates there were, and what became
        of them. It is the same for any number of processes, but for seconds.

    Raises:
        PlanInputError: If arguments have no names, the step needs values or cannot be sent to other
            processes, or names are unknown.
        TargetError: If there is no such target, or meshes do not have its devices.
        CompilerMissingError: If ``compiler="target"`` and it is not installed; names the extra.
        PlanInterrupted: After Ctrl-C; has the plan of what was done.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> def loss(weight, x):
        ...     return ((x @ weight.value) ** 2).sum()
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = plan.NamedShape((4096, 64), "float32", ("batch", "embed"))
        >>> found = plan.search(loss, (weight, x), "cpu:4", cache=None, progress=False)
        >>> found.best().layout.name
        'batch=data (4x1)'
    """
    target = Target.parse(target)
    if effort not in ("trace", "screen", "full"):
        raise PlanInputError(f"effort is 'trace', 'screen' or 'full', not {effort!r}.")
    _OPTIONS.integers(top=1 if top is None else top)
    _OPTIONS.integers(0, finalists=finalists)
    if batch is not None:
        _OPTIONS.instance("batch", batch, Iterable, "a sequence of sizes: batch=[32, 64]")
        batch = list(batch)  # once, as it may be an iterator
        for size in batch:
            _OPTIONS.integers(batch=size)
    fits = within is None or within >= 1
    _OPTIONS.check("within", within, fits, "a number of at least 1, or None for all")
    shapes = _meshes(target, mesh_axes, meshes)
    settings = _settings(parallel)
    variants = [
        _variant(label, examples, inputs, shapes, target, tie, fix, settings)
        for label, examples, inputs in _steps(
            step,
            args,
            {"batch": batch, "remat": remat, "attention": attention, "precision": precision},
        )
    ]
    inputs = variants[0].inputs
    if effort == "trace":
        return _traced_plan(target, variants, top)
    with (
        progress_for(progress) as bar,
        make_evaluator(inputs, target, compiler, processes, cache) as evaluator,
    ):
        run = _Search(target, top, variants, cache, evaluator, bar)
        try:
            finalists = finalists if effort == "full" else 0
            run.screen(within, max(top or 1, finalists), finalists)
            run.confirm(finalists)
        except KeyboardInterrupt as error:
            raise run.interrupted() from error
    return run.plan()


def _traced_plan(target: Target, variants: Sequence[_Variant], top: int | None) -> Plan:
    """Returns the plan of uncompiled candidates."""
    reports: list[LayoutReport] = []
    for candidate in _ordered(variants)[:top]:
        inputs = variants[candidate.variant].inputs
        chips = candidate.layout.devices / target.hardware.devices_per_chip
        report = LayoutReport(
            candidate.layout,
            "fits" if candidate.fitting else "does not fit",
            "" if candidate.fitting else _NO_ROOM,
            argument_bytes=dict(candidate.argument_bytes),
            limit_bytes=target.limit_bytes,
            expected=candidate.time,
            warnings=(_NOT_COMPILED,),
            examples=variants[candidate.variant].examples,
            tokens_per_second_per_chip=inputs.tokens / (candidate.time.seconds * chips),
            parameters=inputs.parameters,
        )
        reports.append(report)
    return Plan(target.text, tuple(reports), tuple(_notes(variants, target)))


def explore(
    step: Callable[..., object],
    args: Sequence[object],
    target: str | Target,
    *,
    mesh_axes: Sequence[str] = ("data", "model"),
    meshes: Sequence[Mapping[str, int]] | None = None,
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, object] | None = None,
    parallel: Mapping[str, Sequence[object]] | None = None,
) -> tuple[DimensionModel, Candidates]:
    """Returns the candidates of ``search``, without compiling.

    Args:
        step: As for ``search``.
        args: As for ``search``.
        target: As for ``search``.
        mesh_axes: As for ``search``.
        meshes: As for ``search``.
        tie: As for ``search``.
        fix: As for ``search``.
        parallel: As for ``search``.

    Returns:
        The dimension model, and the candidates in the order of trying, with those rejected.

    Example:
        >>> import jax, shardax as sx
        >>> from shardax import plan
        >>> weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
        >>> x = plan.NamedShape((4096, 64), "float32", ("batch", "embed"))
        >>> apply = lambda weight, x: x @ weight.value
        >>> dimensions, candidates = explore(apply, (weight, x), "cpu:4", meshes=[{"data": 4}])
        >>> dimensions.flops == 2 * 4096 * 64 * 256, dict(candidates.layouts[0].rules)["batch"]
        (True, 'data')
    """
    target = Target.parse(target)
    shapes = _meshes(target, mesh_axes, meshes)
    variant = _variant("", 1.0, Inputs(step, args), shapes, target, tie, fix, _settings(parallel))
    return variant.dimensions, dataclasses.replace(variant.candidates, layouts=variant.layouts)


def _meshes(
    target: Target, mesh_axes: Sequence[str], meshes: Sequence[Mapping[str, int]] | None
) -> Meshes:
    if meshes is not None:
        mesh_list = [meshes] if isinstance(meshes, Mapping) else list(meshes)
        if not mesh_list:
            raise PlanInputError("meshes is empty: give at least one, or None to try all sizes.")
        for mesh in mesh_list:
            target.check_mesh(mesh)
        return tuple(dict.fromkeys(tuple(mesh.items()) for mesh in mesh_list))
    shapes = candidate_search.mesh_shapes(target.device_count, mesh_axes, target.slices)
    possible: list[tuple[tuple[str, int], ...]] = []
    for mesh in shapes:
        with contextlib.suppress(TargetError):
            target.check_mesh(dict(mesh))
            possible.append(mesh)
    if not possible:
        target.check_mesh(dict(shapes[0]))  # raises, and says why
    return tuple(possible)


def _steps(
    step: Callable[..., PyTree], args: Sequence[PyTree], choices: Mapping[str, Sequence[Any] | None]
) -> Iterable[tuple[str, float, Inputs]]:
    """Yields name, examples a step and inputs of the steps to compare."""
    varied = {name: list(values) for name, values in choices.items() if values is not None}
    if not varied:
        yield "", 1.0, Inputs(step, args)
        return
    if args or not all(varied.values()):
        raise PlanInputError(
            f"With {' and '.join(varied)}, step is a function that is called with them as keywords "
            "and returns (step, args): plan.search(make_step, (), target, batch=[32, 64]). Give "
            "args=() and at least one value each."
        )
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values, strict=True))
        built = step(**chosen)
        if not isinstance(built, tuple) or len(built) != 2:
            raise PlanInputError(
                f"step(**{chosen}) returned {type(built).__name__}; with {', '.join(varied)} it "
                "returns (step, args)."
            )
        label = " ".join(f"{name}:{value}" for name, value in chosen.items())
        yield label, float(chosen.get("batch", 1.0)), Inputs(*built)


@dataclass(frozen=True)
class _Variant:
    """One of the compared steps, with its candidates."""

    label: str
    examples: float
    inputs: Inputs
    dimensions: DimensionModel
    space: SearchSpace
    candidates: Candidates
    layouts: tuple[Layout, ...]
    times: tuple[ExpectedTime, ...]  # of the layouts, as traced
    fitting: tuple[bool, ...]  # whether their arguments and gradients leave room
    argument_bytes: tuple[Mapping[str, int], ...]  # of a device by kind


def _variant(
    label: str,
    examples: float,
    inputs: Inputs,
    meshes: Meshes,
    target: Target,
    tie: Sequence[Sequence[str]] | None,
    fix: Mapping[str, object] | None,
    settings: Mapping[str, Sequence[object]],
) -> _Variant:
    axes = dict.fromkeys(axis for mesh in meshes for axis, _ in mesh)
    model = trace_dimensions(inputs, axes)
    space = candidate_search.search_space(
        model, meshes, activations=candidate_search.names_of_batch(inputs), tie=tie, fix=fix
    )
    limit = target.limit_bytes
    has_nodes = target.kind == "gpu" and target.topology[0] > 1
    candidates = candidate_search.find_candidates(
        model, space, inputs, limit, settings, keeps_near=has_nodes
    )
    entries: list[tuple[bool, ExpectedTime, Layout, Mapping[str, int]]] = []
    splits: Splits = {}
    for layout, sizes in zip(candidates.layouts, candidates.argument_bytes, strict=True):
        names = inputs.batch_names
        time = traced_time(
            layout, model, target, batch_names=names, argument_bytes=sizes, splits=splits
        )
        # Gradients are as large as parameters, and there before the optimizer's step.
        is_large = limit is not None and sum(sizes.values()) + sizes.get("parameters", 0) > limit
        entries.append((is_large, time, layout, sizes))
    entries.sort(key=lambda entry: (entry[0], entry[1].seconds))
    layouts = [layout for _, _, layout, _ in entries]
    if label:
        layouts = [dataclasses.replace(layout, name=f"{layout.name} {label}") for layout in layouts]
    return _Variant(
        label,
        examples,
        inputs,
        model,
        space,
        candidates,
        tuple(layouts),
        tuple(time for _, time, _, _ in entries),
        tuple(not is_large for is_large, _, _, _ in entries),
        tuple(sizes for _, _, _, sizes in entries),
    )


@dataclass(frozen=True)
class _Candidate:
    """An uncompiled layout of a variant."""

    variant: int
    layout: Layout
    time: ExpectedTime
    fitting: bool
    argument_bytes: Mapping[str, int] = dataclasses.field(hash=False, compare=False)
    share: float = 1.0  # of the least expected time of one example

    @property
    def form(self) -> frozenset[str]:
        """Mesh axes of its form of parallelism."""
        sizes = self.layout.sizes
        return frozenset(axis for axis in candidate_search.FORMS if sizes.get(axis, 1) > 1)


def _ordered(variants: Sequence[_Variant]) -> list[_Candidate]:
    """Returns the candidates of all variants, the most promising first."""
    candidates = [
        (time.seconds / variant.examples, _Candidate(number, layout, time, fits, argument_bytes))
        for number, variant in enumerate(variants)
        for layout, time, fits, argument_bytes in zip(
            variant.layouts, variant.times, variant.fitting, variant.argument_bytes, strict=True
        )
    ]
    candidates.sort(key=lambda pair: (not pair[1].fitting, pair[0]))
    least = min((seconds for seconds, _ in candidates), default=1.0) or 1.0
    return [
        dataclasses.replace(candidate, share=seconds / least) for seconds, candidate in candidates
    ]


def _notes(variants: Sequence[_Variant], target: Target) -> list[str]:
    """Counts the candidates of each variant, and says where sizes do not divide."""
    notes: list[str] = []
    for variant in variants:
        candidates = variant.candidates
        start = f"{variant.label}: " if variant.label else ""
        groups = ", ".join("+".join(group) for group in variant.space.groups)
        notes.append(
            f"{start}{candidates.tried:,} assignments of {groups} over "
            f"{len(variant.space.meshes)} meshes; {candidates.distinct} of them possible and "
            f"different; rejected without compiling: {len(candidates.repeating)} that repeat "
            f"work, {len(candidates.too_large)} whose arguments do not fit; "
            f"{len(candidates.layouts)} candidates"
        )
        divided = division_note(variant.dimensions, variant.inputs, variant.space, target)
        notes += [f"{start}{divided}"] if divided else []
    untold = (note for variant in variants for note in variant.dimensions.notes)
    notes += dict.fromkeys(f"as traced: {note}" for note in untold)
    return notes


def _best_of_forms(ordered: Sequence[_Candidate]) -> list[_Candidate]:
    """Returns the most promising layouts of each of several forms."""
    of_forms: dict[frozenset[str], list[_Candidate]] = {}
    for candidate in ordered:
        of_forms.setdefault(candidate.form, []).append(candidate)
    if len(of_forms) < 2:
        return []
    return [candidate for of_form in of_forms.values() for candidate in of_form[:OF_EACH_FORM]]


def _settings(parallel: Mapping[str, Sequence[Any]] | None) -> dict[str, Sequence[Any]]:
    """Checks the settings to compare."""
    settings = dict(parallel or {})
    for name, values in settings.items():
        if name not in candidate_search.SETTINGS:
            raise PlanInputError(
                f"parallel={{{name!r}: ...}} is no setting; there are "
                f"{', '.join(map(repr, candidate_search.SETTINGS))}."
                f"{did_you_mean(str(name), candidate_search.SETTINGS)}"
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise PlanInputError(
                f"parallel={{{name!r}: {values!r}}}: give a list of values to compare, such as "
                'parallel={"microbatches": [8, 16]}.'
            )
        for value in values:
            if name in ("microbatches", "schedule", "context"):
                try:
                    with parallel_scope(**{name: value}):  # which checks it
                        pass
                except PartitionError as error:
                    raise PlanInputError(f"parallel={{{name!r}: {values!r}}}: {error}") from error
            elif name == "zero" and value not in (0, 1):
                raise PlanInputError(
                    f'parallel={{"zero": {values!r}}}: levels to compare are 0 and 1. Level 2 is '
                    "level 1 with split gradients, which the step decides; level 3, split "
                    "parameters, is what rules of parameters do, and always among the candidates."
                )
    return settings


def _omission_report(candidate: _Candidate) -> LayoutReport:
    """Returns the report of an omitted candidate."""
    reason = (
        f"not compiled: as traced it takes {candidate.share:.2f} times as long as the most "
        "promising candidate; within=None compiles all"
    )
    if not candidate.fitting:
        reason = f"not compiled: {_NO_ROOM}; within=None compiles all"
    return LayoutReport(candidate.layout, "rejected", reason, expected=candidate.time)


class _Search:
    """A running search, with the reports so far."""

    def __init__(
        self,
        target: Target,
        top: int | None,
        variants: Sequence[_Variant],
        cache: object,
        evaluator: LocalEvaluator | PoolEvaluator,
        bar: Progress,
    ) -> None:
        self._target = target
        self._top = top
        self._variants = variants
        self._cache = cache
        self._evaluator = evaluator
        self._shown = bar
        self._reports: dict[str, LayoutReport] = {}
        self._left_out: list[LayoutReport] = []
        self._confirmed: set[str] = set()  # names of layouts compiled with full effort

    def screen(self, within: float | None, enough: int, finalists: int) -> None:
        """Compiles in the order of expected times until enough fit."""
        waiting = _ordered(self._variants)
        first_stage = waiting
        if within is not None and len(waiting) > FEW:
            near = [candidate for candidate in waiting if candidate.share <= within]
            chosen = [*near[: max(FEW, enough, 1)], *_best_of_forms(near)]
            first_stage = list(dict.fromkeys(chosen or waiting[:1]))
        stage = first_stage
        while stage:
            waiting = [candidate for candidate in waiting if candidate not in stage]
            # What is expected to be best is not compiled twice.
            missing = max(0, finalists - len(self._confirmed))
            layouts = [candidate.layout for candidate in stage]
            self._confirmed.update(layout.name for layout in layouts[:missing])
            self._compile(layouts[:missing], "full", "finalists")
            self._compile(layouts[missing:], "screen", "screening")
            fits = sum(report.outcome == "fits" for report in self._reports.values())
            stage = waiting[: max(enough - fits, 2)] if fits < enough else []
        self._left_out = [_omission_report(candidate) for candidate in waiting]

    def confirm(self, finalists: int) -> None:
        """Compiles the best with full effort, until enough of them fit."""
        confirmed = self._confirmed
        left = finalists * _MORE_FINALISTS
        while left > 0:
            ranked = sorted(self._reports.values(), key=rank)
            best = [report for report in ranked if report.outcome == "fits"][:finalists]
            chosen = [report.layout for report in best if report.layout.name not in confirmed][
                :left
            ]
            if not chosen:
                return
            left -= len(chosen)
            confirmed.update(layout.name for layout in chosen)
            self._compile(chosen, "full", "finalists")

    def _compile(self, layouts: Sequence[Layout], effort: str, stage_text: str) -> None:
        """Compiles layouts, variant by variant."""
        if not layouts:
            return
        self._shown.expect(len(layouts), stage_text)
        for variant in self._variants:
            names = {layout.name for layout in variant.layouts}
            of_variant = [layout for layout in layouts if layout.name in names]
            if of_variant:
                self._evaluator.take(variant.inputs)
            for outcome in self._evaluator.evaluate(of_variant, effort, begun=self._shown.begin):
                report = dataclasses.replace(outcome.report, examples=variant.examples)
                self._reports[report.layout.name] = report
                self._shown.end(outcome.report, outcome.cached)

    def plan(self, *more: str) -> Plan:
        """Returns the plan of the reports, with notes."""
        notes = list(more)
        notes += _notes(self._variants, self._target)
        outcomes = [report.outcome for report in self._reports.values()]
        counts = [f"{outcomes.count(o)} {o}" for o in dict.fromkeys(sorted(outcomes))]
        if counts:
            left = f"; left out by expected time: {len(self._left_out)}" * bool(self._left_out)
            notes.append(f"compiled: {', '.join(counts)}{left}")
        notes += self._distance()
        notes += dict.fromkeys(note for variant in self._variants for note in variant.space.notes)
        reports = sorted(self._reports.values(), key=rank)[: self._top]
        if self._top is None:
            reports += self._left_out
            reports += [report for v in self._variants for report in v.candidates.rejected]
        return Plan(self._target.text, tuple(reports), tuple(notes))

    def _distance(self) -> list[str]:
        """Compares times of traced and compiled steps."""
        traced = {
            layout.name: time.seconds
            for variant in self._variants
            for layout, time in zip(variant.layouts, variant.times, strict=True)
        }
        ratios = [
            traced[name] / report.expected.seconds
            for name, report in self._reports.items()
            if report.expected is not None and report.outcome == "fits"
        ]
        if not ratios:
            return []
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return [f"expected times before compiling: {spread} of those of the compiled programs"]

    def interrupted(self) -> PlanInterrupted:
        """Returns the error of an interrupted search, with its progress."""
        done = f"{self._shown.done} of {self._shown.total} layouts"
        again = (
            f"What was compiled is kept in {cache_folder(self._cache)}: the same call goes on from "
            "there."
            if self._cache is not None
            else "With cache='default' a search goes on where it was."
        )
        error = PlanInterrupted(f"The search was interrupted after {done}. {again}")
        error.plan = self.plan(f"interrupted after {done}")
        return error
