# SPDX-License-Identifier: Apache-2.0
"""Activations of selected layers beside the result of a call.

Selected layers are wrapped for the time of one call, in a copy of the model that shares its
Variables. The layers of a ``nn.Stack`` compute their activations in one scan; these are cut by
layer, so that paths and values do not depend on how a model runs its layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from shardax import Module, Selection, iter_modules, select
from shardax.errors import SelectionError
from shardax.extend import Path, PyTree, attributes_of
from shardax.models.layers.transformer_layer import TransformerBlock
from shardax.models.transformer import Transformer
from shardax.nn.stack import Stack
from shardax.surgery.edits import LayerWrapper, checked_selection, wrap_selected


class _Recording(LayerWrapper):
    """A layer with saved results."""

    _own = frozenset({"body", "activation"})

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        result = self.body(*args, **kwargs)
        self.sow("activation", result)
        return result


def record(model: PyTree, *selections: Selection | Callable[[Selection], Selection]) -> PyTree:
    """Makes a call of a model also return activations of selected layers.

    Args:
        model: A Module that can be called.
        *selections: Layers of it, or functions that it calls; layers of one selection may be inside
            those of another. Each is a selection of the model, or a function of
            ``sx.select(model)`` that returns one.

    Returns:
        A function of the model's arguments that returns (result, activations). These are a dict of
        path to what was returned there, or to a tuple for a layer that was called more than once;
        layers that were not called are absent. Layers of a ``nn.Stack`` have the paths and values
        of unrolled ones. What the call writes into the model remains, without the activations.

    Raises:
        SelectionError: If a selection is of another tree, if something selected is not called, or
            if nothing is selected; when called, if the model has no such places any more.
        TransformError: When called, if a selected layer is called in a branch of ``sx.cond``; when
            called, if it is called in a loop other than ``sx.scan``.
        ForeignMutationError: Likewise, if it is reached through a closure.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> model = sx.nn.Stack(lambda: sx.nn.MLP(2, 4, rngs=rngs), 3)
        >>> mlps = sx.select(model).at_instances_of(sx.nn.MLP)
        >>> y, activations = sx.surgery.record(model, mlps)(jnp.ones((1, 2)))
        >>> list(activations), bool((activations[2,] == y).all())
        ([(0,), (1,), (2,)], True)
        >>> up = lambda model: model.at_instances_of(sx.nn.MLP).at(lambda mlp: mlp.up)
        >>> y, activations = sx.surgery.record(model, mlps, up)(jnp.ones((1, 2)))
        >>> list(activations)[:3], activations[1, "up"].shape
        ([(0,), (0, 'up'), (1,)], (1, 4))
    """
    paths: dict[Path, None] = {}
    for item in selections:
        _check_selection(model, item)
        selection = item
        if callable(selection) and not isinstance(selection, Selection):
            selection = selection(select(model))
        selection = checked_selection("record", selection)
        if selection.tree is not model:
            raise SelectionError(
                "record takes layers of the model that it calls, and a selection is of another "
                "tree. Select in the model: `sx.surgery.record(model, "
                "sx.select(model).at_instances_of(sx.nn.Linear))`."
            )
        paths.update(dict.fromkeys(selection.keypaths()))
    if not paths:
        raise SelectionError(
            "record was given no layers to record. Select some: `sx.surgery.record(model, "
            "sx.select(model).at_instances_of(sx.nn.Linear))`."
        )
    _recording(model, paths)  # refuses what is not called

    @functools.wraps(model, updated=())
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        recording = _recording(model, paths)
        copies = [
            (copy, original, dict(vars(copy))) for copy, original in _copies(recording, model)
        ]
        result = recording(*args, **kwargs)
        for copy, original, before in copies:
            _take_over(copy, original, before)
        return result, _activations(recording)

    return run


def _check_selection(model: object, item: object) -> None:
    """Raises for what is to be selected by, and is no selection."""
    if isinstance(item, type):
        code = f"sx.select(model).at_instances_of({item.__name__})"
        raise SelectionError(
            f"record takes selections of layers, and not the class {item.__name__}. Select its "
            f"instances: `sx.surgery.record(model, {code})`."
        )
    if isinstance(item, Module):
        paths = [path for path, module in iter_modules(model) if module is item and path]
        path = paths[0] if paths else "..."
        raise SelectionError(
            f"record takes selections of layers, and not a {type(item).__name__} itself. Select "
            f"it by its path: `sx.surgery.record(model, sx.select(model).at_keypaths({path}))`."
        )


def _recording(model: object, paths: Iterable[Path]) -> Any:
    """Returns a copy with recorders at paths, and the model's Variables."""
    # What is inside another selected layer is wrapped before the path to it becomes longer.
    for _, group in itertools.groupby(sorted(paths, key=len, reverse=True), key=len):
        inner = select(model).at_keypaths(*group)
        model = wrap_selected("record", inner, lambda _, layer: _Recording(layer))
    return model


def _copies(recording: object, model: object) -> Iterator[tuple[Module, Module]]:
    """Yields copied Modules of a recording with the originals."""
    originals = dict(iter_modules(model))
    modules = dict(iter_modules(recording))
    for place, module in modules.items():
        original = originals.get(_path_in_model(place, modules))
        if not isinstance(module, _Recording) and original not in (None, module):
            yield module, original


def _path_in_model(place: Path, modules: Mapping[Path, Module]) -> Path:
    """Returns a path without the steps into bodies of recorders."""
    return tuple(
        key
        for position, key in enumerate(place)
        if not (key == "body" and isinstance(modules.get(place[:position]), _Recording))
    )


def _attributes(module: Module) -> dict[str, object]:
    """Returns the attributes of a Module, those of arrays by value."""
    own = vars(module)
    return {
        name: value if name in own else value.value for name, value in attributes_of(module).items()
    }


def _take_over(copy: Module, original: Module, before: Mapping[str, object]) -> None:
    """Gives a Module the attributes that a call gave its copy."""
    after = _attributes(copy)
    for name in before.keys() - after.keys():
        delattr(original, name)
    for name, value in after.items():
        if name not in before or before[name] is not value:
            setattr(original, name, value)


class _LayerBlocks(NamedTuple):
    """Scanned layers of several kinds, in blocks, and those left over."""

    position: int  # of ``layers`` or ``rest`` in the path
    size: int  # layers of one block
    total: int  # layers of all blocks

    def unrolled(self, path: Path) -> Path:
        """Returns the path in a model with a list of layers."""
        before: Path = path[: self.position]
        steps: list[Any] = [*path[self.position :]]
        if steps[0] == "rest" and len(steps) > 1:
            return (*before, "layers", self.total + steps[1], *steps[2:])
        if steps[0] != "layers" or len(steps) < 2:
            return path
        if steps[2:3] == ["layers"] and len(steps) > 3:
            return (*before, "layers", steps[1] * self.size + steps[3], *steps[4:])
        # What a block returns is what its last layer returns.
        return (*before, "layers", (steps[1] + 1) * self.size - 1, *steps[2:])


class _Recorded(NamedTuple):
    """What one recorder saw, and the stacks that it is in."""

    path: Path
    stacks: tuple[tuple[int, int], ...]  # (position of "stacked" in the path, number of layers)
    calls: tuple[object, ...]
    blocks: tuple[_LayerBlocks, ...] = ()


def _activations(recording: object) -> dict[Path, object]:
    """Returns what recorders saw by path in the model, cut by layer."""
    modules = dict(iter_modules(recording))
    entries: list[_Recorded] = []
    for place, module in modules.items():
        saved = module.__dict__.get("activation") if isinstance(module, _Recording) else None
        if saved is None:
            continue
        path: list[Any] = []
        stacks: list[tuple[int, int]] = []
        blocks: list[_LayerBlocks] = []
        for position, key in enumerate(place):
            holder = modules.get(place[:position])
            if isinstance(holder, _Recording) and key == "body":
                continue
            body = _without_recorder(holder)
            if isinstance(body, Stack) and key == "stacked":
                stacks.append((len(path), body.length))
            scanned = _without_recorder(body.layers) if isinstance(body, Transformer) else None
            if isinstance(scanned, Stack):
                block = _without_recorder(scanned.stacked)
                if isinstance(block, TransformerBlock):
                    size = len(block.layers)
                    blocks.append(_LayerBlocks(len(path), size, size * scanned.length))
            path.append(key)
        entries.append(_Recorded(tuple(path), tuple(stacks), saved.value, tuple(blocks)))
    return dict(_by_layer(entries))


def _without_recorder(module):
    """Returns what a recorder wraps, or a module as it is."""
    return module.body if isinstance(module, _Recording) else module


def _by_layer(entries: Iterable[_Recorded]) -> Iterable[tuple[Path, object]]:
    """Yields (path, activation) in the order of unrolled layers."""
    for stack, group in itertools.groupby(entries, key=_outermost_stack):
        if stack is None:
            for entry in group:
                path = entry.path
                for blocks in reversed(entry.blocks):
                    path = blocks.unrolled(path)
                yield path, entry.calls[0] if len(entry.calls) == 1 else entry.calls
            continue
        inside = list(group)
        (position, length), before = inside[0].stacks[0], inside[0].path[: len(stack) - 1]
        for layer in range(length):
            yield from _by_layer(
                _Recorded(
                    (*before, layer, *entry.path[position + 1 :]),
                    entry.stacks[1:],
                    jax.tree.map(lambda array: array[layer], entry.calls),  # noqa: B023
                    entry.blocks,
                )
                for entry in inside
            )


def _outermost_stack(entry: _Recorded) -> Path | None:
    """Returns the path of the outermost stacked layer, if any."""
    return entry.path[: entry.stacks[0][0] + 1] if entry.stacks else None
