# SPDX-License-Identifier: Apache-2.0
"""Paths of layers in the tree of a model, and in the same model unrolled.

A layer that holds others in another form than a list, as ``nn.Stack`` does, has a method
``unrolled_paths``. It returns, by the path of a layer below it, the path that this has in an
unrolled model; of layers that are one with a leading dimension, the list of theirs. Where a path
begins with several of them, the first counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardax import Module, iter_modules
from shardax.extend import Path, PyTree, attributes_of, format_path
from shardax.surgery import errors
from shardax.surgery.edits import TransparentWrapper


def check_unrolled_paths(model: PyTree) -> None:
    """Raises SelectionError if what a layer of a model says of the layers below it cannot be."""
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
        several = unrolled if isinstance(unrolled, list) else [unrolled]
        for path in (below, *several):
            if not _is_path(path):
                return f"has {path!r}, which is no path: a tuple of one step or more"
        repeated = next((path for path in several if several.count(path) > 1), None)
        if repeated is not None:
            return f"gives {format_path(repeated)} to two layers at {format_path(below)}"
    return None


def _is_path(value: object) -> bool:
    """Whether a value is a path that leads anywhere."""
    if not isinstance(value, tuple) or not value:
        return False
    return not any(isinstance(step, (tuple, list)) for step in value)


# --- from the tree ---


class StackSteps(NamedTuple):
    """Steps of a path into a stack, and on to the next one."""

    layers: Sequence[Path]  # of each layer, in an unrolled model
    after: Path


def unrolled_path(place: Path, modules: Mapping[Path, Module]) -> tuple[Path, list[StackSteps]]:
    """Returns the unrolled path of a place up to the outermost stack, and the stacks.

    Args:
        place: The path in the tree of a model.
        modules: All Modules of the model, by path.
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


# --- into the tree ---


class LayerPosition(NamedTuple):
    """Where a layer is in the tree of a model."""

    path: Path  # in the tree, where layers of a stack are one
    layers: tuple[int, ...] = ()  # which one, in each of the stacks around
    lengths: tuple[int, ...] = ()  # the number of layers of each


def position_of(model: PyTree, path: Path) -> LayerPosition:
    """Returns where the layer of an unrolled path is.

    Raises:
        LookupError: If there is none; or AttributeError, or TypeError.
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
    """Returns the first steps from a layer.

    Returns:
        Those in the tree; of how many steps of the unrolled path they are; and, into a stack,
        (which layer, of how many).
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
    if _unrolled_paths_of(item):  # the items of a stack are views, which are not in the tree
        raise LookupError(step)
    return item[step]
