# SPDX-License-Identifier: Apache-2.0
"""Automatic batching: the batch axes of a nested problem, found by size.

A *problem* is a tree of arrays, Modules and configuration, in which some arrays hold one part per
batch element, and others are shared. Given the size of the batch, ``batch_axes`` finds the axis of
each array, and says why. A *declaration* (``where``) comes first: a filter and an axis, ``None``
for what is shared, the logical name of the batched dimension, or ``...`` for an axis to be found.
Anything else is *guessed*: an array whose leading dimension, and no other, has that size is batched
along it. A size is weak evidence, so a guess is refused where it may well be wrong: another
dimension of that size; a batch of one; the state of a model (Variables, boxes, a State), whose
sizes match by chance.

A *part* is a Variable (once, with all paths that reach it), an entry of a State, a box or a named
array with what is in it, or any other leaf. It knows shapes and names but no values, so lazy
Variables stay lazy, and ``jax.ShapeDtypeStruct`` does as well as an array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardax._core.errors import FilterError
from shardax._core.frames import local, resolve
from shardax._core.graph.flatten import flatten
from shardax._core.graph.handlers import axes_of, is_whole
from shardax._core.graph.paths import Path, PyTree, format_path, plain_path
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.filters import PathContains, first_match, to_predicates
from shardax._core.state.state import State
from shardax._core.text import columns
from shardax._core.variable import ArrayAttribute, Variable
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift.prefix import ExactPath, StateAxes, alias_paths, consistent, is_axis
from shardax._transforms.vmap.axes import is_box, streams_of

# Where the parts of a leaf are: its position; for an object those of its Variables by path; for a
# State those of its entries.
PartPosition = int | dict[Path, int] | tuple[State, range]


class BatchPart(NamedTuple):
    """One part of a problem."""

    paths: tuple[Path, ...]  # all paths that reach it, the first one first
    item: object  # the Variable, box, named array or leaf; of a State, what the entry came from
    kind: type  # its type, or that of the Variable it came from
    # Its arrays, as shapes and dtypes; none if it is no array.
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[Any, ...] | None  # logical names of its dimensions, or None
    is_state: bool  # whether it belongs to a model, and is not an array of data
    is_stream: bool = False  # whether it is the key or the counter of a random stream

    @property
    def what(self) -> str:
        """Type, dtype and shape, for people."""
        listed = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.arrays)
        if not self.arrays:
            return self.kind.__name__
        plain = not (self.is_state or self.is_named) or self.kind is ArrayAttribute
        return listed if plain else f"{self.kind.__name__} {listed}"

    @property
    def is_named(self) -> bool:
        """Whether it is an array with named dimensions."""
        return axes_of(self.item) is not None

    def candidates(self, size: int) -> list[int]:
        """Returns the mappable axes on which every array has a size."""
        axes_by_array = [
            {axis for axis, axis_size in enumerate(array.shape) if axis_size == size}
            for array in self.arrays
        ]
        axes = set[int].intersection(*axes_by_array) if axes_by_array else set[int]()
        return sorted(axes - set(self.named_dimensions))

    @property
    def named_dimensions(self) -> list[int]:
        """The dimensions of a named array that ``vmap`` cannot map."""
        names = (self.names or ()) if self.is_named else ()
        return [axis for axis, name in enumerate(names) if name is not None]

    @property
    def leading(self) -> int:
        """The first mappable axis."""
        return next(axis for axis in itertools.count() if axis not in self.named_dimensions)


class BatchProblem:
    """Trees split together, so that a shared Variable is one part."""

    def __init__(self, trees: Iterable[tuple[Path, PyTree]]) -> None:
        self.parts: list[BatchPart] = []  # their parts, in order
        self._known: dict[int, int] = {}
        self._trees = [self._take_apart(where, tree) for where, tree in trees]

    def _take_apart(self, where: Path, tree: object) -> tuple[Any, list[PartPosition]]:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda item: is_whole(item) or is_box(item)
        )
        places: list[PartPosition] = []
        for key_path, leaf in pairs:
            path = (*where, *plain_path(key_path))
            if isinstance(leaf, Object):
                places.append(self._add_object(leaf, path))
            elif isinstance(leaf, State):
                places.append((leaf, self._add_state(leaf, path)))
            else:
                places.append(len(self.parts))
                box = is_box(leaf)
                names = getattr(leaf, "names", None) if box else axes_of(leaf)
                arrays = _arrays_in(leaf)
                self.parts.append(BatchPart((path,), leaf, type(leaf), arrays, names, box))
        return treedef, places

    def _add_object(self, root: Object, where: Path) -> dict[Path, int]:
        """Adds the Variables of an object; returns positions by path."""
        flat = flatten(root)
        streams = {at for s in streams_of(flat.graphdef) for at in s}
        further: dict[int, list[Path]] = {}
        for position, path in alias_paths(flat.graphdef):
            further.setdefault(position, []).append(path)
        places: dict[Path, int] = {}
        for position, (path, leaf) in enumerate(zip(flat.leaf_paths, flat.leaves, strict=True)):
            paths = tuple(
                (*where, *path_of_part) for path_of_part in (path, *further.get(position, ()))
            )
            index = self._known.setdefault(id(leaf), len(self.parts))
            if index == len(self.parts):
                stand_in, is_stream = resolve(leaf, local.frame), position in streams
                form = (type(leaf), _arrays_in(stand_in._value), stand_in.axes)
                self.parts.append(BatchPart(paths, leaf, *form, True, is_stream))
            else:
                part = self.parts[index]
                self.parts[index] = part._replace(paths=(*part.paths, *paths))
            places[path] = index
        return places

    def _add_state(self, state: State, where: Path) -> range:
        """Adds the entries of a State; returns the positions of their parts."""
        first, origins = len(self.parts), state.origins()
        for path, value in state.flat().items():
            origin, paths = origins[path], ((*where, *path),)
            form = (origin.variable_type, _arrays_in(value), origin.axes)
            self.parts.append(BatchPart(paths, origin, *form, True))
        return range(first, len(self.parts))

    def prefixes(self, axes: Sequence[int | None]) -> list[PyTree]:
        """Returns a prefix of each tree with the axes of its parts."""
        return [
            treedef.unflatten(_entry(place, axes) for place in places)
            for treedef, places in self._trees
        ]


def _entry(place: PartPosition, axes: Sequence[int | None]):
    if isinstance(place, int):
        return axes[place]
    if isinstance(place, tuple):
        state, positions = place
        entries = zip(state.flat(), (axes[position] for position in positions), strict=True)
        return State.from_flat(dict(entries), state.origins())
    entries = {path: axes[position] for path, position in place.items()}
    if len(set(entries.values())) <= 1:
        return next(iter(entries.values()), None)
    return StateAxes([(ExactPath(path), axis) for path, axis in entries.items()])


def _arrays_in(value: object) -> tuple[jax.ShapeDtypeStruct, ...]:
    leaves = [value] if isinstance(value, LazyValue) else jax.tree.leaves(value)
    shaped = [leaf for leaf in leaves if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
    numbers = [leaf for leaf in leaves if isinstance(leaf, (bool, int, float, complex))]
    return (
        *(jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for leaf in shaped),
        *(jax.ShapeDtypeStruct((), jnp.result_type(leaf)) for leaf in numbers),
    )


def filter_text(kind: type, path: Path) -> str:
    """Returns a filter for a type at a path, as source text."""
    if issubclass(kind, Variable) and kind is not ArrayAttribute:
        return f"sx.{kind.__name__}" if kind.__module__.startswith("shardax.") else kind.__name__
    return f"sx.PathContains({path[-1]!r})" if path else "..."


# An axis, None, a dimension's logical name, or ``...`` for one to be found.
AxisDeclaration = Any


class AxisChoice(NamedTuple):
    """What was decided: an axis, or None for shared, and why."""

    axis: int | None
    reason: str


class BatchRow(NamedTuple):
    """The axis of one part of a problem, with the reason.

    Attributes:
        path: Where it stands.
        what: Its type, and dtype and shape if it is an array.
        axis: The axis along which it is batched; None if it is shared.
        reason: Why.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> sx.batch_axes(jnp.ones((4, 2)), 4).rows[0].axis
        0
    """

    path: tuple[Any, ...]
    what: str
    axis: int | None
    reason: str


class BatchAxes:
    """The batch axes of a problem, with reasons; prints as a table.

    Attributes:
        size: The size of the batch.
        axes: A prefix of the problem: an axis, or None, for each array, ``StateAxes`` for each
            Module. For a tuple of arguments it is what ``in_axes`` of ``sx.vmap`` takes; without
            Modules also what that of ``jax.vmap`` takes.
        rows: One ``BatchRow`` per leaf, in the order of the problem.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> problem = {"x": jnp.ones((4, 3)), "scale": jnp.ones(3), "kind": "l2"}
        >>> found = sx.batch_axes(problem, 4)
        >>> found.axes
        {'kind': None, 'scale': None, 'x': 0}
        >>> print(found)
        batch of 4:
          .kind   str            shared  not an array
          .scale  float32[3]     shared  no dimension of size 4
          .x      float32[4, 3]  axis 0  its leading dimension of size 4
    """

    def __init__(self, size: int, axes: Any, rows: Sequence[BatchRow]) -> None:
        self.size = size
        self.axes = axes
        self.rows = tuple(rows)

    def __repr__(self) -> str:
        cells = [
            (format_path(path), what, "shared" if axis is None else f"axis {axis}", reason)
            for path, what, axis, reason in self.rows
        ]
        lines = columns(cells) if cells else []
        return "\n".join([f"batch of {self.size}:", *(f"  {line}" for line in lines)])


@dataclass(frozen=True)
class Batch:
    """The arguments of ``batch_axes``, for ``sx.vmap``.

    Attributes:
        size: The size of the batch.
        where: As for ``batch_axes``.
        strict: As for ``batch_axes``.

    Raises:
        TransformError: If the size is no whole number, or negative.
        PrefixError: If ``where`` has an entry of another kind.
        FilterError: If ``where`` has a key that is no filter.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> square = jnp.arange(16.0).reshape(4, 4)
        >>> mix = lambda x, weights: weights @ x
        >>> batch = sx.Batch(4, where={sx.PathContains("weights"): None, sx.PathContains("x"): 0})
        >>> sx.vmap(mix, in_axes="auto", batch=batch)(square, jnp.eye(4)).shape
        (4, 4)
    """

    size: int
    where: object = None
    strict: bool = True

    def __post_init__(self) -> None:
        if not is_axis(self.size) or self.size < 0:
            raise TransformError(
                f"A batch has a size, but was given {self.size!r}: sx.batch_axes(problem, 8)."
            )
        to_predicates([item for item, _ in self.declarations()])

    def find(self, tree: object) -> BatchAxes:
        """Finds the axes of a problem; see ``batch_axes``.

        Args:
            tree: The problem.

        Returns:
            The axes and the reasons.
        """
        return self._found_in(BatchProblem([((), tree)]), lambda prefixes: prefixes[0])

    def find_call(
        self, labels: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> BatchAxes:
        """Finds the axes of a call's arguments.

        Args:
            labels: The names of the positional arguments.
            args: These.
            kwargs: The others.

        Returns:
            The axes, as a list with one prefix per positional argument and a dict of the others,
            and the reasons.
        """
        positional = [((label,), arg) for label, arg in zip(labels, args, strict=True)]
        problem = BatchProblem([*positional, *(((name,), kwargs[name]) for name in kwargs)])
        count = len(positional)
        return self._found_in(
            problem,
            lambda choices: (choices[:count], dict(zip(kwargs, choices[count:], strict=True))),
        )

    def _found_in(self, problem: BatchProblem, arrange: Callable[[list[Any]], object]) -> BatchAxes:
        chosen = _AxisFinder(self).decide(problem.parts)
        rows = [
            BatchRow(part.paths[0], part.what, *choice)
            for part, choice in zip(problem.parts, chosen, strict=True)
        ]
        axes = arrange(problem.prefixes([choice.axis for choice in chosen]))
        return BatchAxes(self.size, axes, rows)

    def declarations(self) -> list[tuple[Any, AxisDeclaration]]:
        """Returns ``where`` as pairs of filter and entry.

        Raises:
            PrefixError: If an entry is of another kind.
        """
        where = self.where
        if where is None:
            return []
        if not isinstance(where, Mapping):
            return [(where, ...), (..., None)]
        for item, entry in where.items():
            if not (entry is None or entry is ... or isinstance(entry, str) or is_axis(entry)):
                raise PrefixError(
                    f"where gives {entry!r} for {_shown(item)}; an entry is an axis (an int), None "
                    f"for what is shared, the logical name of a dimension, or ... for an axis to "
                    f"be found."
                )
        return list(where.items())


def batch_axes(tree: object, size: int, where: object = None, strict: bool = True) -> BatchAxes:
    """Finds the batch axes of the arrays of a nested problem.

    Args:
        tree: A pytree of arrays, Modules, and anything else. Lazy and abstract values stay so.
        size: The size of the batch. Of a batch of 1 nothing is guessed: declare it.
        where: What is declared. A mapping from filters to entries, the first match counts: an axis;
            ``None`` for what the whole batch shares; a name, for the dimension that has it among
            the ``axes`` of a Variable or box, which is shared if none has; ``...`` for an axis to
            be found. Filters are asked about arrays, too, by path. Or one filter: what it matches
            is batched, all else is shared. None: everything is guessed, that is, an array is
            batched if its leading axis has the size.
        strict: Whether doubt is an error. If not, the leading one of several dimensions is taken,
            and state of a model that nobody declared is shared; the report says where.

    Returns:
        The axes (``.axes``, for ``in_axes``) and the reasons; ``print`` shows them.

    Raises:
        TransformError: If arrays could be batched or not, or in several ways; lists all of them by
            path, with what to declare; if a declared axis is missing or has another size, or
            nothing is batched; if a Variable that is reached by two paths is declared twice,
            differently.
        FilterError: If ``where`` names a path that the problem does not have.
        PrefixError: If ``where`` has an entry of another kind.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> problem = {"points": jnp.ones((5, 2)), "weights": jnp.ones((2, 5)), "power": 2}
        >>> sx.batch_axes(problem, 5, where={sx.PathContains("weights"): None}).axes
        {'points': 0, 'power': None, 'weights': None}
        >>> layer = sx.nn.Linear(2, 5, rngs=sx.Rngs(0))
        >>> found = sx.batch_axes((layer, jnp.ones((5, 2))), 5, where={sx.Param: None})
        >>> sx.vmap(lambda m, x: m(x), in_axes=found.axes)(layer, jnp.ones((5, 2))).shape
        (5, 5)
    """
    return Batch(size, where, strict).find(tree)


class _Ambiguity(Exception):
    """Why nothing decides about a part."""


class _AxisFinder:
    """Finds the axis of each part of a problem."""

    def __init__(self, batch: Batch) -> None:
        self.size = batch.size
        self.strict = batch.strict
        declared = batch.declarations()
        self.filters = [item for item, _ in declared]
        self.predicates = to_predicates(self.filters)
        self.entries = [entry for _, entry in declared]

    def decide(self, parts: Sequence[BatchPart]) -> list[AxisChoice]:
        """Returns the axis of each part."""
        self._check_paths(parts)
        chosen: list[AxisChoice] = []
        doubts: list[tuple[BatchPart, str]] = []
        for part in parts:
            try:
                chosen.append(self._one(part))
            except _Ambiguity as doubt:
                doubts.append((part, str(doubt)))
        if doubts:
            raise TransformError(self._explain(doubts))
        arrays = [part for part in parts if part.arrays and not part.is_stream]
        if self.strict and arrays and all(choice.axis is None for choice in chosen):
            listed = ", ".join(f"{format_path(p.paths[0])} {p.what}" for p in arrays[:6])
            raise TransformError(
                f"Nothing is batched: no array that may be has a dimension of size {self.size} "
                f"({listed}{', ...' if len(arrays) > 6 else ''}). Check the size; if all batch "
                f"elements really share everything, say strict=False."
            )
        return chosen

    def _check_paths(self, parts: Sequence[BatchPart]) -> None:
        for item in self.filters:
            if isinstance(item, PathContains) and not any(
                item(path, part.item) for part in parts for path in part.paths
            ):
                listed = ", ".join(format_path(part.paths[0]) for part in parts[:8])
                raise FilterError(
                    f"where has {_shown(item)}, but no path of the problem matches it: {listed}"
                    f"{', ...' if len(parts) > 8 else ''}. What it was meant for would be guessed."
                )

    def _declaration(self, part: BatchPart) -> int | None:
        """Returns the position of the declaration for a part."""
        positions = {path: first_match(self.predicates, path, part.item) for path in part.paths}
        declared = {path: position for path, position in positions.items() if position is not None}
        entries = [(path, part.item, self.entries[position]) for path, position in declared.items()]
        consistent(entries, "entries in where")
        return next(iter(declared.values()), None)

    def _one(self, part: BatchPart) -> AxisChoice:
        position = self._declaration(part)
        if position is None:
            if part.is_stream:
                reason = "a random stream: every batch element draws its own numbers"
                return self._choice_along(part, 0, reason)
            return self._found(part, declared=False)
        entry, name = self.entries[position], _shown(self.filters[position])
        if entry is None:
            return AxisChoice(None, f"declared by {name}")
        if entry is ...:
            return self._found(part, declared=True)
        if isinstance(entry, str):
            return self._named(part, entry)
        return self._choice_along(part, entry, f"declared by {name}")

    def _named(self, part: BatchPart, name: str) -> AxisChoice:
        """Chooses the dimension that has a logical name."""
        if part.names is None:
            if part.candidates(self.size):
                raise _Ambiguity(f"has no axis names among which {name!r} could be")
            return AxisChoice(None, f"no axis names, no dimension of size {self.size}")
        if name not in part.names:
            return AxisChoice(None, f"its axes {part.names} have no {name!r}")
        if part.is_named:
            raise _Ambiguity(
                f"is a NamedArray, and vmap maps its positional dimensions alone: "
                f"x.untag({name!r}) makes {name!r} one; sx.named.nmap maps names"
            )
        return self._choice_along(part, part.names.index(name), f"its dimension {name!r}")

    def _choice_along(self, part: BatchPart, axis: int, reason: str) -> AxisChoice:
        """Chooses an axis that every array of the part has."""
        shapes = [tuple(array.shape) for array in part.arrays]
        splits = part.is_stream and shapes == [()]  # vmap makes one key for each batch element
        fits = all(-len(s) <= axis < len(s) and s[axis] == self.size for s in shapes)
        if splits or (shapes and fits):
            return AxisChoice(axis, reason)
        raise TransformError(
            f"The {part.what} at {format_path(part.paths[0])} is to be batched along axis {axis} "
            f"({reason}), but has no size {self.size} there."
        )

    def _found(self, part: BatchPart, declared: bool) -> AxisChoice:
        """Chooses an axis by size."""
        if not part.arrays:
            return AxisChoice(None, "not an array")
        axes = part.candidates(self.size)
        if not axes:
            return AxisChoice(None, f"no dimension of size {self.size}")
        if self.size == 1:
            raise _Ambiguity("has a dimension of size 1, as many arrays do that are no batch")
        if part.is_state and not declared:
            if not self.strict:
                return AxisChoice(None, "state of a model, shared unless declared")
            raise _Ambiguity(
                f"is state of a model, and its axis {axes[0]} may have this size by chance"
            )
        if len(axes) > 1 and self.strict:
            raise _Ambiguity(f"has {len(axes)} dimensions of this size, axes {axes}")
        if axes[0] != part.leading and not declared:
            raise _Ambiguity(f"has this size along axis {axes[0]}, which is not its leading one")
        kind = "one" if declared else "leading"
        several = f"the first of its {len(axes)} dimensions of size {self.size}"
        return AxisChoice(
            axes[0], several if axes[1:] else f"its {kind} dimension of size {self.size}"
        )

    def _explain(self, doubts: Sequence[tuple[BatchPart, str]]) -> str:
        lines = [f"  {format_path(p.paths[0])}: {p.what} {text}" for p, text in doubts[:12]]
        if len(doubts) > 12:
            lines.append(f"  and {len(doubts) - 12} more")
        keys = dict.fromkeys(filter_text(part.kind, part.paths[0]) for part, _ in doubts[:12])
        where = f"where={{{', '.join(f'{key}: None' for key in keys)}}}"
        return (
            f"A batch of {self.size} cannot be found by sizes alone:\n" + "\n".join(lines) + "\n"
            f"Declare them, each with its axis, or None for what is shared: "
            f"batch=sx.Batch({self.size}, {where}) for sx.vmap, {where} for sx.batch_axes."
        )


def _shown(item) -> str:
    """Returns a filter as the user would write it."""
    if item is ...:
        return "..."
    if isinstance(item, PathContains):
        return f"sx.PathContains({item.key!r})"
    return item.__name__ if isinstance(item, type) else repr(item)


def automatic_batch(in_axes: str, batch: PyTree, axis_size: int | None) -> Batch:
    """Returns how ``vmap`` is to find the axes of its arguments."""
    if in_axes != "auto":
        raise PrefixError(
            f"in_axes gives {in_axes!r}; an entry is an axis (an int) or None, or all of in_axes "
            f"is 'auto', with batch= the size of the batch."
        )
    if batch is None:
        batch = axis_size
    if batch is None:
        raise PrefixError(
            "in_axes='auto' finds arrays by the size of the batch: sx.vmap(f, in_axes='auto', "
            "batch=8), or batch=sx.Batch(8, where={filter: 0}) with declarations."
        )
    batch = batch if isinstance(batch, Batch) else Batch(batch)
    if axis_size not in (None, batch.size):
        raise PrefixError(f"axis_size={axis_size}, but batch has the size {batch.size}; give one.")
    return batch
