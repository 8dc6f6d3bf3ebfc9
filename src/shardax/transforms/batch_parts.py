# SPDX-License-Identifier: Apache-2.0
"""Parts of a problem: what can have an axis of its own in ``vmap``, found before anything runs.

A *part* is a Variable (once, with all paths that reach it), an entry of a State, a box or a named
array with what is in it, or any other leaf of a tree. A part knows shapes and names but no values:
lazy Variables stay lazy, and trees of ``jax.ShapeDtypeStruct`` do as well as arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax.core.frames import local, resolve
from shardax.core.lazy import LazyValue
from shardax.core.node import Object
from shardax.core.paths import Path, path_step
from shardax.core.state import Origin, State
from shardax.core.structure import flatten
from shardax.core.variables import ArrayAttribute, Variable
from shardax.transforms.aliases import alias_paths
from shardax.transforms.boxes import is_box
from shardax.transforms.prefix import ExactPath, StateAxes
from shardax.transforms.streams import streams_of

Place = int | dict[Path, int] | tuple[State, range]
"""Where the parts of a leaf are: its position; for an object those of its Variables by path; for a
State those of its entries."""


class Part(NamedTuple):
    """One part of a problem.

    Attributes:
        paths: All paths that reach it, the first one first.
        item: The Variable, box, named array or leaf; of a State, what the entry came from.
        kind: Its type, or that of the Variable it came from.
        arrays: Its arrays, as shapes and dtypes; none if it is no array.
        names: Logical names of its dimensions, or None.
        is_state: Whether it belongs to a model, and is not an array of data.
        is_stream: Whether it is the key or the counter of a random stream.
    """

    paths: tuple[Path, ...]
    item: Any
    kind: type
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[Any, ...] | None
    is_state: bool
    is_stream: bool = False

    @property
    def what(self) -> str:
        """Type, dtype and shape, for people."""
        shown = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.arrays)
        if not self.arrays:
            return self.kind.__name__
        plain = not (self.is_state or self.is_named) or self.kind is ArrayAttribute
        return shown if plain else f"{self.kind.__name__} {shown}"

    @property
    def is_named(self) -> bool:
        """Whether it is an array with named dimensions, of which ``vmap`` maps none."""
        return _is_named(self.item)

    def candidates(self, size: int) -> list[int]:
        """Returns the axes along which every array in it has a size and may be mapped."""
        found = [
            {axis for axis, each in enumerate(array.shape) if each == size} for array in self.arrays
        ]
        axes = set[int].intersection(*found) if found else set[int]()
        if self.is_named and self.names is not None:
            axes -= {axis for axis, name in enumerate(self.names) if name is not None}
        return sorted(axes)


class Problem:
    """Trees taken apart together, so that a Variable that several of them hold is one part.

    Args:
        trees: (path, pytree of objects, arrays and anything else) of each.

    Attributes:
        parts: Their parts, in order.
    """

    def __init__(self, trees: Iterable[tuple[Path, Any]]) -> None:
        self.parts: list[Part] = []
        self._known: dict[int, int] = {}
        self._trees = [self._take_apart(where, tree) for where, tree in trees]

    def _take_apart(self, where: Path, tree: Any) -> tuple[Any, list[Place]]:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_whole)
        places: list[Place] = []
        for key_path, leaf in pairs:
            path = (*where, *map(path_step, key_path))
            if isinstance(leaf, Object):
                places.append(self._add_object(leaf, path))
            elif isinstance(leaf, State):
                places.append((leaf, self._add_state(leaf, path)))
            else:
                places.append(len(self.parts))
                self.parts.append(_part_of_leaf(leaf, path))
        return treedef, places

    def _add_object(self, root: Object, where: Path) -> dict[Path, int]:
        """Adds the Variables of an object; returns the position of the part by path below it."""
        flat = flatten(root)
        streams = {at for s in streams_of(flat.graphdef) for at in (s.key, s.count)}
        further: dict[int, list[Path]] = {}
        for position, path in alias_paths(flat.graphdef):
            further.setdefault(position, []).append(path)
        places: dict[Path, int] = {}
        for position, (path, leaf) in enumerate(zip(flat.leaf_paths, flat.leaves, strict=True)):
            paths = tuple((*where, *each) for each in (path, *further.get(position, ())))
            index = self._known.setdefault(id(leaf), len(self.parts))
            if index == len(self.parts):
                self.parts.append(_part_of_variable(leaf, paths, position in streams))
            else:
                part = self.parts[index]
                self.parts[index] = _part_of_variable(leaf, (*part.paths, *paths), part.is_stream)
            places[path] = index
        return places

    def _add_state(self, state: State, where: Path) -> range:
        """Adds the entries of a State; returns the positions of their parts."""
        first, origins = len(self.parts), state.origins()
        self.parts += [
            _part_of_entry(value, origins[path], (*where, *path))
            for path, value in state.flat().items()
        ]
        return range(first, len(self.parts))

    def prefixes(self, axes: Sequence[int | None]) -> list[Any]:
        """Returns a prefix of each tree with the axes of its parts.

        Args:
            axes: One axis, or None, per part.
        """
        return [
            treedef.unflatten(_entry(place, axes) for place in places)
            for treedef, places in self._trees
        ]


def _entry(place: Place, axes: Sequence[int | None]) -> Any:
    if isinstance(place, int):
        return axes[place]
    if isinstance(place, tuple):
        state, positions = place
        found = zip(state.flat(), (axes[position] for position in positions), strict=True)
        return State.from_flat(dict(found), state.origins())
    entries = {path: axes[position] for path, position in place.items()}
    if len(set(entries.values())) <= 1:
        return next(iter(entries.values()), None)
    return StateAxes([(ExactPath(path), axis) for path, axis in entries.items()])


def _is_named(item: Any) -> bool:
    return hasattr(type(item), "partition_axes")  # see shardax.named.base


def _is_whole(item: Any) -> bool:
    return isinstance(item, (Object, State)) or is_box(item) or _is_named(item)


def _part_of_variable(leaf: Variable[Any], paths: tuple[Path, ...], is_stream: bool) -> Part:
    here = resolve(leaf, local.frame)
    return Part(paths, leaf, type(leaf), _arrays_in(here._value), here.axes, True, is_stream)


def _part_of_entry(value: Any, origin: Origin, path: Path) -> Part:
    return Part((path,), origin, origin.variable_type, _arrays_in(value), origin.axes, True)


def _part_of_leaf(leaf: Any, path: Path) -> Part:
    names = leaf.partition_axes if _is_named(leaf) else None
    if is_box(leaf):
        names = getattr(leaf, "names", None)
    return Part((path,), leaf, type(leaf), _arrays_in(leaf), names, is_box(leaf))


def _arrays_in(value: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    leaves = [value] if isinstance(value, LazyValue) else jax.tree.leaves(value)
    shaped = [leaf for leaf in leaves if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
    numbers = [leaf for leaf in leaves if isinstance(leaf, (bool, int, float, complex))]
    return (
        *(jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for leaf in shaped),
        *(jax.ShapeDtypeStruct((), jnp.result_type(leaf)) for leaf in numbers),
    )


def filter_text(kind: type, path: Path) -> str:
    """Returns a filter that matches something of a type at a path, as the user would write it.

    Example:
        >>> import jax, shardax as sx
        >>> filter_text(sx.Param, ("kernel",)), filter_text(jax.Array, ("data", "x"))
        ('sx.Param', "sx.PathContains('x')")
    """
    if issubclass(kind, Variable) and kind is not ArrayAttribute:
        return f"sx.{kind.__name__}" if kind.__module__.startswith("shardax.") else kind.__name__
    return f"sx.PathContains({path[-1]!r})" if path else "..."
