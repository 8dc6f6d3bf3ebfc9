# SPDX-License-Identifier: Apache-2.0
"""Paths of layers in the tree of a model, and in the same model unrolled.

A *tree path* leads to a layer in a model as it is. An *unrolled path* leads to the same layer in a
model whose layers stand in plain lists. ``record`` gives activations by unrolled paths, and
``patch`` takes values by them.

A layer that does not hold the layers below it in a plain list, as ``nn.Stack`` does not, has a
method ``unrolled_paths``. Its result is a mapping. The keys are tree paths, relative to the layer.
The value of a key is the unrolled path of that layer. Where the Variables at a key have a leading
dimension for several layers, a *stack*, the value is a list of unrolled paths, one for each. Where
a path begins with several keys, the first key of the mapping is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardax import Module, iter_modules
from shardax.extend import Path, PyTree, attributes_of, format_path
from shardax.surgery import errors
from shardax.surgery.edits import TransparentWrapper


def check_unrolled_paths(model: PyTree) -> None:
    """Raises SelectionError if ``unrolled_paths`` of a layer returns no valid mapping."""
    for _, module in iter_modules(model):
        _unrolled_paths_of(module)


def _unrolled_paths_of(layer: PyTree) -> Mapping[Path, list[Path] | Path]:
    """Returns what a layer says of the layers below it; of most layers nothing."""
    # By the class, as a wrapper has the attributes of its body.
    method = getattr(type(layer), "unrolled_paths", None)
    if not callable(method):
        return {}

    paths: Any = method(layer)
    problem = _problem_of(paths)
    if problem is not None:
        raise errors.unusable_unrolled_paths(layer, problem)
    return paths


def _problem_of(paths: object) -> str | None:
    """Returns what is wrong with the result of ``unrolled_paths``, or None."""
    if not isinstance(paths, Mapping):
        return f"returned {paths!r}, no mapping"

    for below, unrolled in paths.items():
        unrolled_paths = unrolled if isinstance(unrolled, list) else [unrolled]
        for path in (below, *unrolled_paths):
            if not _is_path(path):
                return f"has {path!r}, which is no path: a tuple of one step or more"
        repeated = next((p for p in unrolled_paths if unrolled_paths.count(p) > 1), None)
        if repeated is not None:
            return f"gives {format_path(repeated)} to two layers at {format_path(below)}"
    return None


def _is_path(value: object) -> bool:
    """Whether a value is a tuple of at least one step, and no step is a tuple or list."""
    if not isinstance(value, tuple) or not value:
        return False
    return not any(isinstance(step, (tuple, list)) for step in value)


# --- from tree paths to unrolled paths ---


class StackSteps(NamedTuple):
    """What a stack adds to an unrolled path: one of its own paths, and the steps after it."""

    layers: Sequence[Path]  # the unrolled path of each layer, relative to the holder of the stack
    after: Path  # the steps up to the next stack, or to the end


def unrolled_path(place: Path, modules: Mapping[Path, Module]) -> tuple[Path, list[StackSteps]]:
    """Returns the unrolled form of a tree path, of which each stack on the way has several.

    The path to layer i of one stack is ``(*before, *stacks[0].layers[i], *stacks[0].after)``. Steps
    into the body of a wrapper are left out.

    Args:
        place: The tree path.
        modules: All Modules of the model, by tree path.

    Returns:
        The steps before the first stack, which are the whole path where there is no stack; and the
        stacks, the outermost one first.
    """
    holders = [modules.get(place[:position]) for position in range(len(place))]
    steps = [
        (step, holder)
        for step, holder in zip(place, holders, strict=True)
        if not (step == "body" and isinstance(holder, TransparentWrapper))
    ]
    keys = tuple(step for step, _ in steps)

    before: Path = ()
    stacks: list[StackSteps] = []
    position = 0
    while position < len(keys):
        remaining = keys[position:]
        paths = _unrolled_paths_of(steps[position][1])
        below = next((path for path in paths if remaining[: len(path)] == path), remaining[:1])
        position += len(below)

        unrolled = paths.get(below, below)
        if isinstance(unrolled, list):
            stacks.append(StackSteps(unrolled, ()))
        elif stacks:
            stacks[-1] = stacks[-1]._replace(after=(*stacks[-1].after, *unrolled))
        else:
            before = (*before, *unrolled)
    return before, stacks


# --- from unrolled paths to tree paths ---


class LayerPosition(NamedTuple):
    """Where a layer is in the tree of a model."""

    path: Path  # the tree path, which all layers of a stack share
    layers: tuple[int, ...] = ()  # which layer, of each stack around it
    lengths: tuple[int, ...] = ()  # how many layers each of these stacks has


def position_of(model: PyTree, path: Path) -> LayerPosition:
    """Returns where the layer of an unrolled path is.

    Raises:
        LookupError: If there is none; AttributeError or TypeError where an item below a Module that
            is no Module refuses the step.
    """
    position, item, steps = LayerPosition(()), model, path
    while steps:
        below, taken, layer = _first_steps(_without_wrappers(item), steps)
        steps = steps[taken:]
        if layer is not None:
            index, length = layer
            position = position._replace(
                layers=(*position.layers, index), lengths=(*position.lengths, length)
            )

        for step in below:
            while isinstance(item, TransparentWrapper) and step != "body":
                position = position._replace(path=(*position.path, "body"))
                item = item.body
            position = position._replace(path=(*position.path, step))
            item = _child(item, step)
    return position


def _first_steps(layer: PyTree, steps: Path) -> tuple[Path, int, tuple[int, int] | None]:
    """Returns how an unrolled path goes on from a layer.

    Args:
        layer: The layer.
        steps: The rest of the unrolled path, from the layer on.

    Returns:
        The first steps of the tree path; how many steps of the unrolled path they replace; and,
        where they lead into a stack, (which layer, of how many).
    """
    for below, unrolled in _unrolled_paths_of(layer).items():
        if not isinstance(unrolled, list):
            if steps[: len(unrolled)] == unrolled:
                return below, len(unrolled), None
            continue

        for index, path in enumerate(unrolled):
            if steps[: len(path)] == path:
                return below, len(path), (index, len(unrolled))
    return steps[:1], 1, None


def _without_wrappers(layer: PyTree) -> PyTree:
    while isinstance(layer, TransparentWrapper):
        layer = layer.body
    return layer


def _child(item: PyTree, step: Any) -> PyTree:
    """Returns what is one step below."""
    if isinstance(step, str) and step in attributes_of(item):
        return getattr(item, step)
    # ``stack[0]`` is a view of the stack's arrays, which has no tree path.
    if _unrolled_paths_of(item):
        raise LookupError(step)
    return item[step]
