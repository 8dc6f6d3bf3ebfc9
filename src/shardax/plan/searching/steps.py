# SPDX-License-Identifier: Apache-2.0
"""The steps that a search compares, with the listed candidates of each.

A search has one step, or one for each combination of batch size, rematerialisation, kernel of
attention and precision. A step is traced once, on shapes. Its candidates are listed from that
trace (``candidates.py``), and so is the expected time of each (``traced.py``): listing them all
compiles nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.extend import PyTree
from shardax.plan.errors import PlanInputError, TargetError
from shardax.plan.hardware.targets import Target
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout
from shardax.plan.searching.candidates import Candidates, find_candidates
from shardax.plan.searching.dimensions import DimensionModel, trace_dimensions
from shardax.plan.searching.division import division_note
from shardax.plan.searching.settings import Settings
from shardax.plan.searching.space import FORMS, Meshes, SearchSpace, mesh_shapes, search_space
from shardax.plan.searching.traced import sharded_products, traced_workload
from shardax.plan.timing.workload import ExpectedTime, expected_time


@dataclass(frozen=True)
class ComparedStep:
    """A step, its trace, and the candidates listed from it."""

    label: str  # what tells it from the others, such as "batch:64"; "" for the only one
    examples: float  # of its batch, if batch sizes are compared; or 1
    inputs: Inputs
    dimensions: DimensionModel
    space: SearchSpace
    listed: Candidates

    def counts(self) -> str:
        """Returns the sentence that counts its candidates."""
        groups = ", ".join("+".join(group) for group in self.space.groups)
        return (
            f"{self.listed.tried:,} assignments of {groups} over {len(self.space.meshes)} meshes; "
            f"{self.listed.distinct} of them possible and different; "
            f"rejected without compiling: {len(self.listed.repeating)} that repeat work, "
            f"{len(self.listed.too_large)} whose arguments do not fit; "
            f"{len(self.listed.layouts)} candidates"
        )


@dataclass(frozen=True, eq=False)
class TimedCandidate:
    """A candidate, with its expected time as traced."""

    step: ComparedStep
    layout: Layout
    time: ExpectedTime
    fits: bool  # whether its arguments and gradients leave room
    argument_bytes: Mapping[str, int]  # of a device by kind

    @property
    def seconds_per_example(self) -> float:
        """Expected seconds of one example."""
        return self.time.seconds / self.step.examples

    @property
    def form(self) -> frozenset[str]:
        """Mesh axes of its form of parallelism."""
        sizes = self.layout.sizes
        return frozenset(axis for axis in FORMS if sizes.get(axis, 1) > 1)


def list_candidates(
    label: str,
    examples: float,
    inputs: Inputs,
    meshes: Meshes,
    target: Target,
    tie: Sequence[Sequence[str]] | None,
    fix: Mapping[str, object] | None,
    settings: Settings,
) -> ComparedStep:
    """Traces a step once, and returns it with its candidates."""
    axes = dict.fromkeys(axis for mesh in meshes for axis, _ in mesh)
    dimensions = trace_dimensions(inputs, axes)
    activations = inputs.names_on("batch")
    space = search_space(dimensions, meshes, activations=activations, tie=tie, fix=fix)

    # Between nodes of GPUs it is faster if shards are on near devices.
    has_nodes = target.kind == "gpu" and target.topology[0] > 1
    listed = find_candidates(
        dimensions, space, inputs, target.limit_bytes, settings, keeps_near=has_nodes
    )
    return ComparedStep(label, examples, inputs, dimensions, space, listed)


def most_promising_first(steps: Sequence[ComparedStep], target: Target) -> list[TimedCandidate]:
    """Returns the candidates of all steps, by the expected time of one example as traced.

    Those whose arguments and gradients alone do not fit come last.
    """
    candidates = [candidate for step in steps for candidate in _timed(step, target)]
    return sorted(candidates, key=lambda each: (not each.fits, each.seconds_per_example))


def _timed(step: ComparedStep, target: Target) -> list[TimedCandidate]:
    limit = math.inf if target.limit_bytes is None else target.limit_bytes
    batch_names = step.inputs.batch_names
    candidates: list[TimedCandidate] = []

    # Layouts that differ in settings alone follow each other, and split products alike: of 1,935
    # candidates with stages, splitting once takes a third off the time.
    listed = zip(step.listed.layouts, step.listed.argument_bytes, strict=True)
    for _, group in itertools.groupby(listed, key=lambda pair: (pair[0].rules, pair[0].mesh)):
        variants = list(group)
        sharded = sharded_products(variants[0][0], step.dimensions, batch_names)
        for layout, argument_bytes in variants:
            work = traced_workload(
                layout,
                step.dimensions,
                batch_names,
                argument_bytes,
                kind=target.hardware.kind,
                sharded=sharded,
            )
            time = expected_time(work, target.hardware, layout.sizes, slices=target.slices)

            # Gradients are as large as parameters, and there before the optimizer's step.
            needed = sum(argument_bytes.values()) + argument_bytes.get("parameters", 0)
            if step.label:
                layout = dataclasses.replace(layout, name=f"{layout.name} {step.label}")
            candidate = TimedCandidate(step, layout, time, needed <= limit, argument_bytes)
            candidates.append(candidate)
    return candidates


def notes_of_steps(steps: Sequence[ComparedStep], target: Target) -> list[str]:
    """Counts the candidates of each step, and says where sizes do not divide."""
    notes: list[str] = []
    for step in steps:
        divided = division_note(step.dimensions, step.inputs, step.space, target)
        sentences = [step.counts(), divided] if divided else [step.counts()]
        notes += [f"{step.label}: {text}" if step.label else text for text in sentences]

    untold = dict.fromkeys(note for step in steps for note in step.dimensions.notes)
    return notes + [f"as traced: {note}" for note in untold]


def searched_meshes(
    target: Target, mesh_axes: Sequence[str], meshes: Sequence[Mapping[str, int]] | None
) -> Meshes:
    """Returns the meshes to search: those that are given, or all that the target can have."""
    if meshes is not None:
        mesh_list = [meshes] if isinstance(meshes, Mapping) else list(meshes)
        if not mesh_list:
            raise PlanInputError("meshes is empty: give at least one, or None to try all sizes.")
        for mesh in mesh_list:
            target.check_mesh(mesh)
        return tuple(dict.fromkeys(tuple(mesh.items()) for mesh in mesh_list))

    shapes = mesh_shapes(target.device_count, mesh_axes, target.slices)
    possible: list[tuple[tuple[str, int], ...]] = []
    for mesh in shapes:
        with contextlib.suppress(TargetError):
            target.check_mesh(dict(mesh))
            possible.append(mesh)
    if not possible:
        target.check_mesh(dict(shapes[0]))  # raises, and says why
    return tuple(possible)


def varied_steps(
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
