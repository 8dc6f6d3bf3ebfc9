# SPDX-License-Identifier: Apache-2.0
"""Search for the best layouts of a step on hardware.

Candidates are *screened*: compiled fast, several at a time, in the order of a *rough estimate* of
their time. Of many candidates those come first whose estimate is at most a few times the least, and
the others only if too few of these fit. The best are compiled again with full effort; these are the
*finalists*, whose memory is what the program will need.

The rough estimate is made from the dimension model. A product is split along the mesh axes of its
dimensions, each axis once; what is summed over split dimensions is sent (twice its bytes), and an
operand that is split by an axis which another dimension has is gathered (its bytes); in a pipeline
the former of weights' gradients and the latter of weights happen for each microbatch. It is no
verdict among good candidates: these are compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardax._parallel.pipeline import bubble_share
from shardax.partition.context import parallel as parallel_scope
from shardax.partition.errors import PartitionError, did_you_mean
from shardax.partition.rules import mesh_axes_of, strings
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
from shardax.plan.searching.dimensions import DimensionModel, ProductDimension, trace_dimensions

OF_EACH_FORM = 6  # of pipelines, split sequences and others, are compiled in any case
FEW = 32  # of so many candidates all are compiled, however rough estimates differ
_MORE_FINALISTS = 3  # how many times as many are compiled, if some do not fit with full effort
_BYTES = 2  # of an element, as computed with
# Which of left operand, right operand and result have a dimension, by its role.
_OPERANDS = {"batch": (0, 1, 2), "left": (0, 2), "right": (1, 2), "sum": (0, 1)}


def search(
    step: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    mesh_axes: Sequence[str] = ("data", "model"),
    meshes: Sequence[Mapping[str, int]] | None = None,
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, Any] | None = None,
    batch: Sequence[int] | None = None,
    remat: Sequence[Any] | None = None,
    parallel: Mapping[str, Sequence[Any]] | None = None,
    top: int | None = 5,
    finalists: int = 3,
    effort: str = "full",
    within: float | None = 4.0,
    compiler: str = "auto",
    processes: int | None = None,
    cache: Any = "default",
    progress: bool = True,
) -> Plan:
    """Finds the best layouts of a step on hardware, present or not.

    Args:
        step: What is planned; see ``compare``. With ``batch`` or ``remat``: a function that makes
            it, called with those as keywords, which returns ``(step, args)``.
        args: Its positional arguments, as for ``compare``; ``()`` with ``batch`` or ``remat``.
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
        parallel: Values to compare by setting: ``"microbatches"``, ``"schedule"`` and ``"context"``
            of ``sx.parallel``, where the mesh has stages or splits the sequence (None: one, two and
            four microbatches a stage and both schedules; all-gather and ring-zigzag); ``"zero"``, 0
            or 1: whether the optimizer's state is split along axes that only split the batch;
            ``"optimizer_memory"``: None or a kind of memory for it, such as ``"pinned_host"``.
        top: How many layouts the plan has; None for all, those too that were not compiled.
        finalists: How many of the best are compiled with full effort.
        effort: ``"full"``; ``"screen"`` leaves out the finalists, so that peaks of memory may be up
            to a fifth too low.
        within: Of more than 32 candidates those are compiled first whose rough estimate is at most
            so many times the least, and of several forms of parallelism (pipelines, split
            sequences, experts) the 6 most promising of each; the next 32, if fewer than ``top`` of
            these fit, and so on. None compiles all.
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
    if effort not in ("screen", "full"):
        raise PlanInputError(f"effort is 'screen' or 'full', not {effort!r}.")
    for name, value, least in (("top", 1 if top is None else top, 1), ("finalists", finalists, 0)):
        if not isinstance(value, int) or value < least:
            raise PlanInputError(f"{name}={value!r}: give a number of at least {least}.")
    if within is not None and not within >= 1:
        raise PlanInputError(f"within={within!r}: give a number of at least 1, or None for all.")
    shapes = _meshes(target, mesh_axes, meshes)
    settings = _settings(parallel)
    variants = [
        _variant(label, examples, inputs, shapes, target, tie, fix, settings)
        for label, examples, inputs in _steps(step, args, batch, remat)
    ]
    inputs = variants[0].inputs
    with (
        progress_for(progress) as bar,
        make_evaluator(inputs, target, compiler, processes, cache) as evaluator,
    ):
        run = _Search(target, top, variants, cache_folder(cache), evaluator, bar)
        try:
            run.screen(within, max(top or 1, finalists))
            if effort == "full":
                run.confirm(finalists)
        except KeyboardInterrupt as error:
            raise run.interrupted() from error
    return run.plan()


def explore(
    step: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    mesh_axes: Sequence[str] = ("data", "model"),
    meshes: Sequence[Mapping[str, int]] | None = None,
    tie: Sequence[Sequence[str]] | None = None,
    fix: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Sequence[Any]] | None = None,
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
        >>> dimensions.flops == 2 * 4096 * 64 * 256, candidates.layouts[0].rules
        (True, (('batch', 'data'), ('embed', None), ('mlp', None)))
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
    step: Callable[..., Any],
    args: Sequence[Any],
    batch: Sequence[int] | None,
    remat: Sequence[Any] | None,
) -> Iterable[tuple[str, float, Inputs]]:
    """Yields name, examples a step and inputs of the steps to compare."""
    varied = {n: list(v) for n, v in (("batch", batch), ("remat", remat)) if v is not None}
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
                f"step(**{chosen}) returned {type(built).__name__}; with batch= or remat= it "
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
    rough: tuple[float, ...]  # estimates of the layouts, as multiples of the least


def _variant(
    label: str,
    examples: float,
    inputs: Inputs,
    meshes: Meshes,
    target: Target,
    tie: Sequence[Sequence[str]] | None,
    fix: Mapping[str, Any] | None,
    settings: Mapping[str, Sequence[Any]],
) -> _Variant:
    axes = dict.fromkeys(axis for mesh in meshes for axis, _ in mesh)
    model = trace_dimensions(inputs, axes)
    space = candidate_search.search_space(
        model, meshes, activations=candidate_search.names_of_batch(inputs), tie=tie, fix=fix
    )
    candidates = candidate_search.find_candidates(model, space, inputs, target.limit_bytes)
    chip = target.hardware
    flops_per_byte = chip.peak("bf16") / (2 * chip.link_bandwidth)  # over one of its links
    possible = [
        layout
        for layout in candidates.layouts
        for layout in candidate_search.with_settings(layout, model, space, inputs, settings)
    ]
    costs = {layout: rough_cost(layout, model, flops_per_byte) for layout in possible}
    layouts = sorted(costs, key=lambda layout: costs[layout])  # the most promising first
    least = min(costs.values(), default=0.0) or 1.0
    rough = tuple(costs[layout] / least for layout in layouts)
    if label:
        layouts = [dataclasses.replace(layout, name=f"{layout.name} {label}") for layout in layouts]
    return _Variant(label, examples, inputs, model, space, candidates, tuple(layouts), rough)


def rough_cost(layout: Layout, dimensions: DimensionModel, flops_per_byte: float) -> float:
    """Returns operations of one device, bytes sent counted as operations."""
    axes_of = {name: mesh_axes_of(target) for name, target in layout.rules}
    place = {name: position for position, name in enumerate(axes_of)}
    sizes = layout.sizes
    pipeline = _pipeline_of(layout, dimensions)

    def priority(dim: ProductDimension) -> int:
        return min((place.get(name, 99) for name in dim.names), default=99)

    total = _BYTES * pipeline.moved * flops_per_byte
    for product in dimensions.products:
        used_axes: set[str] = set()
        whole, parts, gathered, summed = [1, 1, 1], [1, 1, 1], [1, 1, 1], 1
        names: list[set[str]] = [set(), set(), set()]
        for dim in sorted(product.dims, key=priority):
            dim_axes = {axis for name in dim.names for axis in axes_of.get(name, ())}
            ways = math.prod(sizes[axis] for axis in dim_axes - used_axes)
            lost = math.prod(sizes[axis] for axis in dim_axes & used_axes)
            used_axes |= dim_axes
            for array in _OPERANDS[dim.role]:
                whole[array] *= dim.size
                parts[array] *= ways
                gathered[array] *= lost
                names[array] |= dim.names
            if dim.role == "sum":
                summed *= ways
        sent = [whole[array] / parts[array] * (1 - 1 / gathered[array]) for array in range(3)]
        sent[2] += 2 * whole[2] / parts[2] * (1 - 1 / summed)
        flops = product.flops / math.prod(sizes[axis] for axis in used_axes)
        times = [1.0, 1.0, 1.0]
        if product.loops & pipeline.names:
            flops /= pipeline.stages * (1 - pipeline.bubble)
            # Weights are gathered, and their gradients summed, for each microbatch.
            times = [
                (pipeline.microbatches if counts and counts <= pipeline.weights else 1)
                / (pipeline.stages * (1 - pipeline.bubble))
                for counts in names
            ]
        # What a loop does not change is sent once, before it; what it adds up, after it.
        moved = sum(
            math.prod(factors) for factors in zip(sent, times, product.changes, strict=True)
        )
        total += flops + _BYTES * moved * flops_per_byte
    return total


def _best_of_forms(pairs: Sequence[tuple[float, Layout]]) -> set[Layout]:
    """Returns the most promising layouts of each of several forms."""
    layouts_of_form: dict[frozenset[str], list[Layout]] = {}
    for _, layout in pairs:  # the most promising first
        sizes = layout.sizes
        form = frozenset(axis for axis in candidate_search.FORMS if sizes.get(axis, 1) > 1)
        layouts_of_form.setdefault(form, []).append(layout)
    if len(layouts_of_form) < 2:
        return set()
    return {layout for of_form in layouts_of_form.values() for layout in of_form[:OF_EACH_FORM]}


@dataclass(frozen=True)
class _PipelineCost:
    """Figures of a layout's pipeline for a rough estimate."""

    names: frozenset[str] = frozenset()  # of the dimensions that its stages split
    weights: frozenset[str] = frozenset()  # names on the parameters of its layers
    stages: int = 1
    microbatches: int = 1
    bubble: float = 0.0
    moved: float = 0.0  # elements of weights that one device sends to bring them into rounds


def _pipeline_of(layout: Layout, dimensions: DimensionModel) -> _PipelineCost:
    sizes, chosen = layout.sizes, dict(layout.parallel)
    stages = sizes.get("stage", 1)
    names = {name for name, axes in layout.rules if "stage" in mesh_axes_of(axes)}
    names &= dimensions.looped
    if stages == 1 or not names or "microbatches" not in chosen:
        return _PipelineCost()
    count, how = chosen["microbatches"], chosen.get("schedule", "gpipe")
    inside = [(s, set(strings(n))) for s, n in dimensions.arguments if names & set(strings(n))]
    rounds = 1
    if how == "circular":
        rounds = min(size for name in names for size in dimensions.sizes_of(name)) // stages
    axes_of = {name: mesh_axes_of(axes) for name, axes in layout.rules}
    moved = 0.0
    for shape, dim_names in inside if rounds > 1 else ():  # there, and its gradient back
        axes = {axis for name in dim_names for axis in axes_of.get(name, ())}
        ways = math.prod(sizes[axis] for axis in axes)
        moved += 2 * math.prod(shape) / ways * (1 - 1 / stages)
    return _PipelineCost(
        frozenset(names),
        frozenset(name for _, dim_names in inside for name in dim_names) - names,
        stages,
        count,
        bubble_share(how, stages, count, rounds),
        moved,
    )


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
                    parallel_scope(**{name: value})
                except PartitionError as error:
                    raise PlanInputError(f"parallel={{{name!r}: {values!r}}}: {error}") from error
            elif name == "zero" and value not in (0, 1):
                raise PlanInputError(
                    f'parallel={{"zero": {values!r}}}: levels to compare are 0 and 1. Level 2 is '
                    "level 1 with split gradients, which the step decides; level 3, split "
                    "parameters, is what rules of parameters do, and always among the candidates."
                )
    return settings


class _Search:
    """A running search, with the reports so far."""

    def __init__(
        self,
        target: Target,
        top: int | None,
        variants: Sequence[_Variant],
        folder: Path | None,
        evaluator: LocalEvaluator | PoolEvaluator,
        bar: Progress,
    ) -> None:
        self._target = target
        self._top = top
        self._variants = variants
        self._folder = folder
        self._evaluator = evaluator
        self._shown = bar
        self._reports: dict[str, LayoutReport] = {}
        self._left_out: list[LayoutReport] = []

    def screen(self, within: float | None, enough: int) -> None:
        """Compiles in stages by rough estimate, each stage whole, until enough fit."""
        many = sum(len(variant.layouts) for variant in self._variants) > FEW
        limit = within if within is not None and many else float("inf")
        waiting = [
            list(zip(variant.rough, variant.layouts, strict=True)) for variant in self._variants
        ]
        # Forms of parallelism differ in what a rough estimate leaves out, so each is compiled.
        first = [_best_of_forms(pairs) for pairs in waiting]
        while any(waiting):
            chosen = [
                [pair for pair in pairs if pair[0] <= limit or pair[1] in best]
                for pairs, best in zip(waiting, first, strict=True)
            ]
            stages = [[layout for _, layout in pairs] for pairs in chosen]
            waiting = [
                [pair for pair in pairs if pair[0] > limit and pair[1] not in best]
                for pairs, best in zip(waiting, first, strict=True)
            ]
            self._compile(stages, "screen", "screening")
            if sum(report.outcome == "fits" for report in self._reports.values()) >= enough:
                break
            # At least one more, so that every stage brings the end nearer.
            following = sorted(rough for queue in waiting for rough, _ in queue)[: max(FEW, 1)]
            limit = following[-1] if following else limit
        self._left_out = [
            LayoutReport(
                layout,
                "rejected",
                f"not compiled: by a rough estimate it takes {rough:.1f} times as long as the most "
                "promising candidate; within=None compiles all",
            )
            for queue in waiting
            for rough, layout in queue
        ]

    def confirm(self, finalists: int) -> None:
        """Compiles the best with full effort, until enough of them fit."""
        confirmed: set[str] = set()
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
            layouts_of_variants = [
                {layout.name for layout in variant.layouts} for variant in self._variants
            ]
            stages = [
                [layout for layout in chosen if layout.name in names]
                for names in layouts_of_variants
            ]
            self._compile(stages, "full", "finalists")

    def _compile(self, stages: Sequence[Sequence[Layout]], effort: str, stage_text: str) -> None:
        """Compiles layouts of each variant."""
        self._shown.expect(sum(map(len, stages)), stage_text)
        for variant, layouts in zip(self._variants, stages, strict=True):
            if layouts:
                self._evaluator.take(variant.inputs)
            for outcome in self._evaluator.evaluate(layouts, effort, begun=self._shown.begin):
                report = dataclasses.replace(outcome.report, examples=variant.examples)
                self._reports[report.layout.name] = report
                self._shown.end(outcome.report, outcome.cached)

    def plan(self, *more: str) -> Plan:
        """Returns the plan of the reports, with notes."""
        notes = list(more)
        for variant in self._variants:
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
        outcomes = [report.outcome for report in self._reports.values()]
        counts = [f"{outcomes.count(o)} {o}" for o in dict.fromkeys(sorted(outcomes))]
        if counts:
            left = f"; left out by a rough estimate: {len(self._left_out)}" * bool(self._left_out)
            notes.append(f"compiled: {', '.join(counts)}{left}")
        notes += dict.fromkeys(note for variant in self._variants for note in variant.space.notes)
        reports = sorted(self._reports.values(), key=rank)[: self._top]
        if self._top is None:
            reports += self._left_out
            reports += [report for v in self._variants for report in v.candidates.rejected]
        return Plan(self._target.text, tuple(reports), tuple(notes))

    def interrupted(self) -> PlanInterrupted:
        """Returns the error of an interrupted search, with its progress."""
        done = f"{self._shown.done} of {self._shown.total} layouts"
        again = (
            f"What was compiled is kept in {self._folder}: the same call goes on from there."
            if self._folder
            else "With cache='default' a search goes on where it was."
        )
        error = PlanInterrupted(f"The search was interrupted after {done}. {again}")
        error.plan = self.plan(f"interrupted after {done}")
        return error
