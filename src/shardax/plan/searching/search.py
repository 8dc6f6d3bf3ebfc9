# SPDX-License-Identifier: Apache-2.0
"""Search for the best layouts of a step on hardware.

1. *Traced* is the step, on shapes: once, or once for each combination of ``batch``, ``remat``, ...;
   not for each candidate. What is compiled later is traced again, on its own mesh.
2. *Tried* are all assignments of mesh axes to groups of names, over all meshes of the target's
   devices. 64 devices have 7 meshes of two axes; a group takes no axis, one that is larger than 1,
   or both, which are 4 choices, or 2 where one axis has all devices: 5 * 4**g + 2 * 2**g
   assignments of g groups. Few of them are listed as candidates: ``candidates.py`` says which, and
   the notes of a plan count both. The expected time of each follows from the trace (``traced.py``).
3. *Compiled* are the most promising candidates: those of which arguments and gradients have room
   come first, and of these the ones with the least expected times, if that is at most ``within``
   times the least of all. ``top`` or ``finalists`` are compiled, whichever is more, and others
   while fewer than that fit, two or more at a time, however long they take (``stages.py``).
4. *Ordered* are the compiled layouts by ``records.rank``: those that fit come first, and of these
   the one with the least expected time of an example, which the same model of time now reads off
   the compiled program.

With ``top=3``, all else by default and one form of parallelism, these are the 3 most promising
candidates, with full effort, if all of them fit. If only two of them are ``within`` the limit,
these two are compiled first and two more after them, the first of these with full effort, and the
other one too if it is then among the best three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardax.extend import Options, PyTree
from shardax.plan.compile.pool import make_evaluator
from shardax.plan.errors import PlanInputError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import LayoutReport, Plan
from shardax.plan.report.progress import progress_for
from shardax.plan.searching.candidates import Candidates
from shardax.plan.searching.dimensions import DimensionModel
from shardax.plan.searching.settings import checked_settings
from shardax.plan.searching.stages import NO_ROOM, StagedSearch
from shardax.plan.searching.steps import (
    ComparedStep,
    list_candidates,
    most_promising_first,
    notes_of_steps,
    searched_meshes,
    varied_steps,
)

_OPTIONS = Options(PlanInputError)
_NOT_COMPILED = (
    "Nothing was compiled: the time is that of the traced step, and beside arguments and gradients "
    "the memory is not known. effort='screen' compiles."
)


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
        within: Candidates are compiled in the order of their expected time, as traced: the first
            ``top`` or ``finalists``, whichever is more, and the best of each form of parallelism
            (pipelines, split sequences, experts), as far as that time is at most so many times the
            least; then others until as many fit. None compiles all.
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
    _check_options(effort, top, finalists, within)
    if batch is not None:
        _OPTIONS.instance("batch", batch, Iterable, "a sequence of sizes: batch=[32, 64]")
        batch = list(batch)  # once, as it may be an iterator
        for size in batch:
            _OPTIONS.integers(batch=size)

    # Listed and traced: candidates of each variant of the step, which is traced once.
    shapes = searched_meshes(target, mesh_axes, meshes)
    settings = checked_settings(parallel)
    choices = {"batch": batch, "remat": remat, "attention": attention, "precision": precision}
    steps = [
        list_candidates(label, examples, inputs, shapes, target, tie, fix, settings)
        for label, examples, inputs in varied_steps(step, args, choices)
    ]
    if effort == "trace":
        return _traced_plan(target, steps, top)

    # Compiled: the most promising candidates, and the best of them with full effort.
    finalists = finalists if effort == "full" else 0
    with (
        progress_for(progress) as bar,
        make_evaluator(steps[0].inputs, target, compiler, processes, cache) as evaluator,
    ):
        run = StagedSearch(target, top, finalists, steps, cache, evaluator, bar)
        try:
            run.compile_promising(within)
            run.confirm()
        except KeyboardInterrupt as error:
            raise run.interrupted() from error
    return run.plan()


def _check_options(effort: str, top: int | None, finalists: int, within: float | None) -> None:
    if effort not in ("trace", "screen", "full"):
        raise PlanInputError(f"effort is 'trace', 'screen' or 'full', not {effort!r}.")
    _OPTIONS.integers(top=1 if top is None else top)
    _OPTIONS.integers(0, finalists=finalists)
    fits = within is None or within >= 1
    _OPTIONS.check("within", within, fits, "a number of at least 1, or None for all")


def _traced_plan(target: Target, steps: Sequence[ComparedStep], top: int | None) -> Plan:
    """Returns the plan of uncompiled candidates, in the order of their times as traced."""
    reports: list[LayoutReport] = []

    for candidate in most_promising_first(steps, target)[:top]:
        inputs = candidate.step.inputs
        chips = candidate.layout.devices / target.hardware.devices_per_chip
        report = LayoutReport(
            candidate.layout,
            "fits" if candidate.fits else "does not fit",
            "" if candidate.fits else NO_ROOM,
            argument_bytes=dict(candidate.argument_bytes),
            limit_bytes=target.limit_bytes,
            expected=candidate.time,
            warnings=(_NOT_COMPILED,),
            examples=candidate.step.examples,
            tokens_per_second_per_chip=inputs.tokens / (candidate.time.seconds * chips),
            parameters=inputs.parameters,
        )
        reports.append(report)
    return Plan(target.text, tuple(reports), tuple(notes_of_steps(steps, target)))


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
    shapes = searched_meshes(target, mesh_axes, meshes)
    settings = checked_settings(parallel)
    listed = list_candidates("", 1.0, Inputs(step, args), shapes, target, tie, fix, settings)

    ordered = most_promising_first([listed], target)
    candidates = dataclasses.replace(
        listed.listed,
        layouts=tuple(candidate.layout for candidate in ordered),
        argument_bytes=tuple(candidate.argument_bytes for candidate in ordered),
    )
    return listed.dimensions, candidates
