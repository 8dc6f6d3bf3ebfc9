# SPDX-License-Identifier: Apache-2.0
"""Settings that a search compares beside rules and meshes.

They are settings of ``sx.parallel``, and of where the optimizer's state is. A candidate has a
*variant* for each combination of settings that its layout leaves open.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardax import parallel as parallel_scope
from shardax.errors import PartitionError
from shardax.extend import did_you_mean
from shardax.plan.errors import PlanInputError
from shardax.plan.inputs import Inputs
from shardax.plan.records import Layout
from shardax.plan.searching.dimensions import DimensionModel
from shardax.plan.searching.space import SearchSpace

_OF_PARALLEL = ("microbatches", "schedule", "context")
SETTINGS = (*_OF_PARALLEL, "zero", "optimizer_memory")
_PER_STAGE = (1, 2, 4)  # microbatches of a stage, where none are given

Settings = Mapping[str, Sequence[Any]]  # values to compare, by setting


def checked_settings(parallel: Settings | None) -> Settings:
    """Returns the settings to compare, once they are checked."""
    settings = dict(parallel or {})
    for name, values in settings.items():
        if name not in SETTINGS:
            raise PlanInputError(
                f"parallel={{{name!r}: ...}} is no setting; there are "
                f"{', '.join(map(repr, SETTINGS))}.{did_you_mean(str(name), SETTINGS)}"
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise PlanInputError(
                f"parallel={{{name!r}: {values!r}}}: give a list of values to compare, such as "
                'parallel={"microbatches": [8, 16]}.'
            )

        if name in _OF_PARALLEL:
            for value in values:
                try:
                    with parallel_scope(**{name: value}):  # which checks it
                        pass
                except PartitionError as error:
                    raise PlanInputError(f"parallel={{{name!r}: {values!r}}}: {error}") from error
        if name == "zero" and not all(value in (0, 1) for value in values):
            raise PlanInputError(
                f'parallel={{"zero": {values!r}}}: levels to compare are 0 and 1. Level 2 is '
                "level 1 with split gradients, which the step decides; level 3, split "
                "parameters, is what rules of parameters do, and always among the candidates."
            )
    return settings


def with_settings(
    layout: Layout,
    dimensions: DimensionModel,
    space: SearchSpace,
    inputs: Inputs,
    settings: Settings,
) -> list[Layout]:
    """Returns a layout under all settings to compare."""
    choices: dict[str, Sequence[Any]] = {}
    stages = layout.sizes.get("stage", 1) if space.staged else 1
    if stages > 1:
        rows = _rows_of_device(layout, inputs)
        counts = settings.get("microbatches", [stages * times for times in _PER_STAGE])
        choices["microbatches"] = [count for count in counts if rows % count == 0]
        if not choices["microbatches"]:
            return []  # a pipeline needs rows to cut
        rounds = min(dimensions.sizes_of(space.staged[0]), default=stages) // stages
        choices["schedule"] = settings.get("schedule", ["gpipe", "circular"] if rounds > 1 else [])
    if layout.sizes.get("context", 1) > 1:
        choices["context"] = settings.get("context", ["all-gather", "ring-zigzag"])

    if "zero" in settings:
        zero_rules = _zero_rules(layout, dimensions, inputs, space)
        rules_of_levels = [zero_rules if level else () for level in settings["zero"]]
        choices["zero"] = list(dict.fromkeys(rules_of_levels))
    choices["optimizer_memory"] = [kind or "" for kind in settings.get("optimizer_memory", [])]

    variants = []
    choices = {name: values for name, values in choices.items() if values}
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        optimizer_rules = chosen.pop("zero", ())
        memory = chosen.pop("optimizer_memory", "")
        words = [layout.name, *(f"{name}:{value}" for name, value in chosen.items())]
        if optimizer_rules:
            words.append("zero:1")
        if memory:
            words.append(f"optimizer:{memory}")
        variant = dataclasses.replace(
            layout,
            name=" ".join(words),
            parallel=tuple(chosen.items()),
            optimizer_rules=optimizer_rules,
            optimizer_memory=memory,
        )
        variants.append(variant)
    return variants


def _rows_of_device(layout: Layout, inputs: Inputs) -> int:
    """Returns the number of rows of the batch of a device."""
    rows = 0
    for leaf in inputs.leaves_of("batch"):
        if leaf.axes and leaf.axes[0] in inputs.batch_names:
            ways = layout.ways(layout.axes_of.get(leaf.axes[0], ()))
            rows = math.gcd(rows, leaf.arrays[0].shape[0] // ways)
    return rows


def _zero_rules(
    layout: Layout, dimensions: DimensionModel, inputs: Inputs, space: SearchSpace
) -> tuple[tuple[str, Any], ...]:
    """Returns rules of the optimizer's state, along the axes that only split the batch."""
    axes_of = layout.axes_of
    stored = inputs.names_on("parameters")
    used = {axis for name in stored for axis in axes_of.get(name, ())}
    batch_names = [name for name in axes_of if name in inputs.batch_names]
    free = tuple(axis for name in batch_names for axis in axes_of[name] if axis not in used)
    if not free:
        return ()

    # Names that the search could split come first.
    searched = [name for name in space.searched if name in stored]
    not_looped = [name for name in stored if name not in dimensions.looped]
    ways = layout.ways(free)
    first, *others = free
    target = free if others else first
    return tuple(
        (name, target)
        for name in dict.fromkeys((*searched, *not_looped))
        if not axes_of.get(name) and all(size % ways == 0 for size in dimensions.sizes_of(name))
    )
