# SPDX-License-Identifier: Apache-2.0
"""From the state of unrolled layers to that of stacked ones, and back.

A model may hold its layers in a list or in a ``Stack``. In the *unrolled* layout a layer's value is
at ``.layers[2].kernel``; in the *stacked* one it is part 2 of the value at
``.layers.stacked.kernel``. What all layers share stands once in either, in the unrolled layout with
the first layer. Whoever has a checkpoint of one layout and a model of the other restores it into a
model of its own layout, and brings the state over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax.core.errors import StateMismatchError
from shardax.core.functional import iter_modules, iter_variables
from shardax.core.paths import Path, format_path
from shardax.core.stacked import part_of, stack_values
from shardax.core.state import Origin, State
from shardax.nn.stack import Stack


def stack_state(state: State | Mapping[Any, Any], model: Any) -> State:
    """Turns the state of unrolled layers into that of stacked ones.

    Args:
        state: Values of a model that has lists of layers where ``model`` has stacks; all of them or
            some.
        model: The model with the stacks, lazy or not; or a tuple or dict with it and an optimizer,
            whose state follows.

    Returns:
        The values by the paths of ``model``; for ``sx.update(model, ...)``.

    Raises:
        StateMismatchError: If some layers have a value and others do not, or values that belong
            together differ in shape or dtype.

    Example:
        >>> import shardax as sx
        >>> layers = sx.nn.Sequential(*(sx.nn.Linear(4, 4, rngs=sx.Rngs(i)) for i in range(3)))
        >>> stacked = sx.nn.Sequential()
        >>> stacked.layers = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(9)), 3)
        >>> sx.update(stacked, stack_state(sx.state(layers), stacked))
        >>> bool((stacked.layers[2].kernel == layers.layers[2].kernel).all())
        True
    """
    given = _as_state(state)
    values, origins = given.flat(), given.origins()
    layout = _Layout(model)
    found: dict[Path, Any] = {}
    kinds: dict[Path, Origin] = {}
    for path, variable in iter_variables(model):
        levels = layout.levels(path)
        parts = {indices: _unrolled(path, levels, indices) for indices in _indices(levels)}
        present = [part for part in parts.values() if part in values]
        if not present or not levels:
            continue
        missing = [part for part in parts.values() if part not in values]
        if missing:
            raise StateMismatchError(
                f"Of the layers that are stacked at {format_path(path)}, {len(present)} have a "
                f"value, but {len(missing)} have none: {_listed(missing)}. The state is of another "
                f"number of layers, or of layers that are not alike."
            )
        _check_alike(path, present, values)
        found[path] = _gathered(lambda i, parts=parts: values.pop(parts[i]), levels)
        kinds[path] = Origin(type(variable), variable._here()._metadata)
    return State.from_flat({**values, **found}, {**origins, **kinds})


def unstack_state(state: State | Mapping[Any, Any], model: Any) -> State:
    """Turns the state of stacked layers into that of unrolled ones: the inverse of ``stack_state``.

    Args:
        state: Values of ``model``, all of them or some.
        model: The model with the stacks, lazy or not; or a tuple or dict with it and an optimizer,
            whose state follows.

    Returns:
        The values by the paths of a model that has lists of layers instead.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.Sequential()
        >>> model.layers = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 3)
        >>> kernels = sx.state(model, sx.PathContains("kernel"))
        >>> list(unstack_state(kernels, model).flat())
        [('layers', 0, 'kernel'), ('layers', 1, 'kernel'), ('layers', 2, 'kernel')]
    """
    given = _as_state(state)
    origins, layout = given.origins(), _Layout(model)
    values: dict[Path, Any] = {}
    kinds: dict[Path, Origin] = {}
    for path, value in given.flat().items():
        levels = layout.levels(path)
        kind = origins[path]
        for level in levels:
            if level.length is not None and kind.all_metadata.axes is not None:
                kind = Origin(kind.variable_type, kind.all_metadata.without_axis(0))
        for indices in _indices(levels):
            part = value
            for index, level in zip(indices, levels, strict=True):
                part = part if level.length is None else part_of(part, index)
            place = _unrolled(path, levels, indices)
            values[place], kinds[place] = part, kind
    return State.from_flat(values, kinds)


def _as_state(state: State | Mapping[Any, Any]) -> State:
    return state if isinstance(state, State) else State(state)


# --- where stacks stand in a path -----------------------------------------------------------------


class _Level(NamedTuple):
    """A stack on the way to a Variable.

    Attributes:
        place: Where in the path the step ``stacked`` stands.
        length: The stack's length; None if its layers share what the path leads to.
    """

    place: int
    length: int | None


class _Layout:
    """The stacks of a tree.

    Args:
        tree: A model, or a tree with one.
    """

    def __init__(self, tree: Any) -> None:
        modules = dict(iter_modules(tree))
        self.modules = modules.keys()
        self.stacks = {path: item for path, item in modules.items() if isinstance(item, Stack)}

    def levels(self, path: Path) -> list[_Level]:
        """Returns the stacks on the way to a Variable, from the outside."""
        found = []
        for place, step in enumerate(path):
            stack = self._stack_at(path[:place]) if step == "stacked" else None
            if stack is not None:
                below = path[place + 1 :]
                shared = any(below[: len(item)] == item for item in stack.shared)
                found.append(_Level(place, None if shared else stack.length))
        return found

    def _stack_at(self, path: Path) -> Stack | None:
        """Returns the stack at a path; in an optimizer's state, that of the parameters there."""
        if path in self.modules:
            return self.stacks.get(path)
        common = {place: _common_end(place, path) for place in self.stacks}
        longest = max(common.values(), default=0)
        nearest = [self.stacks[place] for place, count in common.items() if count == longest]
        if longest == 0:
            return None
        if len({(stack.length, stack.shared) for stack in nearest}) > 1:
            raise StateMismatchError(
                f"The state at {format_path(path)} may belong to several stacks of different "
                f"lengths. Convert the model and its optimizer one by one."
            )
        return nearest[0]


def _common_end(one: Path, other: Path) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _indices(levels: Sequence[_Level]) -> Iterator[tuple[int, ...]]:
    """Yields the places of the layers that a path stands for; those that share count once."""
    return itertools.product(*(range(level.length or 1) for level in levels))


def _unrolled(path: Path, levels: Sequence[_Level], indices: Sequence[int]) -> Path:
    steps = list(path)
    for level, index in zip(levels, indices, strict=True):
        steps[level.place] = index
    return tuple(steps)


# --- values ---------------------------------------------------------------------------------------


def _check_alike(path: Path, parts: Sequence[Path], values: Mapping[Path, Any]) -> None:
    forms = {part: _form(values[part]) for part in parts}
    for part, form in forms.items():
        if form != forms[parts[0]]:
            raise StateMismatchError(
                f"The layers that are stacked at {format_path(path)} differ: {forms[parts[0]]} at "
                f"{format_path(parts[0])}, {form} at {format_path(part)}."
            )


def _form(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return str(jax.tree.map(_form, value))


def _gathered(
    read: Callable[[tuple[int, ...]], Any],
    levels: Sequence[_Level],
    indices: tuple[int, ...] = (),
) -> Any:
    """Stacks values from the inside out."""
    if len(indices) == len(levels):
        return read(indices)
    level = levels[len(indices)]
    if level.length is None:
        return _gathered(read, levels, (*indices, 0))
    return stack_values(
        [_gathered(read, levels, (*indices, index)) for index in range(level.length)]
    )


def _listed(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(format_path, paths[:4]))
    return shown if len(paths) <= 4 else f"{shown} and {len(paths) - 4} more"
