# SPDX-License-Identifier: Apache-2.0
"""Automatic batching: the batch axes of a nested problem, found by size.

A *problem* is a tree of arrays, Modules and configuration, in which some arrays hold one part per
batch element, and others are shared. Given the size of the batch, ``batch_axes`` finds the axis of
each array, and says why.

1. A *declaration* (``where``) comes first: a filter and an axis, ``None`` for what is shared, the
   logical name of the batched dimension, or ``...`` for an axis to be found.
2. Anything else is *guessed*: an array is batched along its leading dimension, if this one has the
   size of the batch.
3. A size is weak evidence, so a guess that may well be wrong is refused: if another dimension has
   that size, too; for a batch of one; for the state of a model (Variables, boxes, a State), whose
   sizes match by chance.

The problem is split into parts (``batch_problem``); each gets one axis.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardax._core.errors import FilterError, first_of
from shardax._core.graph.paths import PyTree, format_path
from shardax._core.state.filters import PathContains, first_match, to_predicates
from shardax._core.text import columns
from shardax._transforms.errors import PrefixError, TransformError
from shardax._transforms.lift.filter_mappings import is_axis
from shardax._transforms.lift.prefixes import consistent
from shardax._transforms.mapped.errors import filter_text
from shardax._transforms.vmap.batch_problem import BatchPart, BatchProblem

# An axis, None, a dimension's logical name, or ``...`` for one to be found.
AxisDeclaration = int | None | str | types.EllipsisType


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
        problem = BatchProblem([((), tree)])
        choices = self._choose(problem)
        (axes,) = problem.prefixes([choice.axis for choice in choices])
        return self._with_reasons(axes, problem, choices)

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
        named = [((name,), arg) for name, arg in kwargs.items()]
        problem = BatchProblem([*positional, *named])
        choices = self._choose(problem)

        prefixes = problem.prefixes([choice.axis for choice in choices])
        count = len(positional)
        axes = (prefixes[:count], dict(zip(kwargs, prefixes[count:], strict=True)))
        return self._with_reasons(axes, problem, choices)

    def _choose(self, problem: BatchProblem) -> list[AxisChoice]:
        return _AxisFinder(self).choose(problem.parts)

    def _with_reasons(
        self, axes: PyTree, problem: BatchProblem, choices: Sequence[AxisChoice]
    ) -> BatchAxes:
        rows = [
            BatchRow(part.paths[0], part.what, choice.axis, choice.reason)
            for part, choice in zip(problem.parts, choices, strict=True)
        ]
        return BatchAxes(self.size, axes, rows)

    def declarations(self) -> list[tuple[Any, AxisDeclaration]]:
        """Returns ``where`` as pairs of filter and entry.

        Raises:
            PrefixError: If an entry is of another kind.
        """
        if self.where is None:
            return []
        if not isinstance(self.where, Mapping):  # one filter: what it matches is batched
            return [(self.where, ...), (..., None)]

        for item, entry in self.where.items():
            if entry is None or entry is ... or isinstance(entry, str) or is_axis(entry):
                continue
            raise PrefixError(
                f"where gives {entry!r} for {_filter_repr(item)}; an entry is an axis (an int), "
                f"None for what is shared, the logical name of a dimension, or ... for an axis to "
                f"be found."
            )
        return list(self.where.items())


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
        declarations = batch.declarations()
        self.filters = [item for item, _ in declarations]
        self.predicates = to_predicates(self.filters)
        self.entries = [entry for _, entry in declarations]

    def choose(self, parts: Sequence[BatchPart]) -> list[AxisChoice]:
        """Returns the axis of each part; raises for those about which nothing decides."""
        self._check_paths(parts)
        choices: list[AxisChoice] = []
        ambiguous: list[tuple[BatchPart, str]] = []
        for part in parts:
            try:
                choices.append(self._choose_one(part))
            except _Ambiguity as ambiguity:
                ambiguous.append((part, str(ambiguity)))
        if ambiguous:
            raise self._ambiguous_parts(ambiguous)

        arrays = [part for part in parts if part.arrays and not part.is_stream]
        is_nothing_batched = all(choice.axis is None for choice in choices)
        if self.strict and arrays and is_nothing_batched:
            listed = ", ".join(f"{format_path(part.paths[0])} {part.what}" for part in arrays[:6])
            listed += ", ..." if len(arrays) > 6 else ""
            raise TransformError(
                f"Nothing is batched: no array that may be has a dimension of size {self.size} "
                f"({listed}). Check the size; if all batch elements really share everything, say "
                f"strict=False."
            )
        return choices

    def _check_paths(self, parts: Sequence[BatchPart]) -> None:
        """Raises if a declared path is not in the problem."""
        for item in self.filters:
            if not isinstance(item, PathContains):
                continue
            if any(item(path, part.item) for part in parts for path in part.paths):
                continue
            listed = first_of([format_path(part.paths[0]) for part in parts])
            raise FilterError(
                f"where has {_filter_repr(item)}, but no path of the problem matches it: {listed}. "
                f"What it was meant for would be guessed."
            )

    def _declaration_of(self, part: BatchPart) -> int | None:
        """Returns the index of the declaration of a part, or None."""
        matches = [(path, first_match(self.predicates, path, part.item)) for path in part.paths]
        declared = [(path, index) for path, index in matches if index is not None]
        entries = [(path, part.item, self.entries[index]) for path, index in declared]
        consistent(entries, "entries in where")
        return declared[0][1] if declared else None

    def _choose_one(self, part: BatchPart) -> AxisChoice:
        index = self._declaration_of(part)
        if index is None:
            if part.is_stream:
                reason = "a random stream: every batch element draws its own numbers"
                return self._choose_axis(part, 0, reason)
            return self._choose_by_size(part, is_declared=False)

        entry, reason = self.entries[index], f"declared by {_filter_repr(self.filters[index])}"
        if entry is None:
            return AxisChoice(None, reason)
        if isinstance(entry, str):
            return self._choose_by_name(part, entry)
        if isinstance(entry, int):
            return self._choose_axis(part, entry, reason)
        return self._choose_by_size(part, is_declared=True)

    def _choose_axis(self, part: BatchPart, axis: int, reason: str) -> AxisChoice:
        """Returns the choice of an axis; raises unless every array of the part has it."""
        shapes = [tuple(array.shape) for array in part.arrays]
        if part.is_stream and shapes == [()]:  # vmap makes one key for each batch element
            return AxisChoice(axis, reason)
        has_axis = [
            -len(shape) <= axis < len(shape) and shape[axis] == self.size for shape in shapes
        ]
        if shapes and all(has_axis):
            return AxisChoice(axis, reason)
        raise TransformError(
            f"The {part.what} at {format_path(part.paths[0])} is to be batched along axis {axis} "
            f"({reason}), but has no size {self.size} there."
        )

    def _choose_by_name(self, part: BatchPart, name: str) -> AxisChoice:
        """Returns the choice of the dimension that has a logical name."""
        if part.names is None:
            if part.axes_of_size(self.size):
                raise _Ambiguity(f"has no axis names among which {name!r} could be")
            return AxisChoice(None, f"no axis names, no dimension of size {self.size}")
        if name not in part.names:
            return AxisChoice(None, f"its axes {part.names} have no {name!r}")
        if part.is_named:
            raise _Ambiguity(
                f"is a NamedArray, and vmap maps its positional dimensions alone: "
                f"x.untag({name!r}) makes {name!r} one; sx.named.nmap maps names"
            )
        return self._choose_axis(part, part.names.index(name), f"its dimension {name!r}")

    def _choose_by_size(self, part: BatchPart, is_declared: bool) -> AxisChoice:
        """Returns the choice of an axis of the size of the batch."""
        if not part.arrays:
            return AxisChoice(None, "not an array")
        axes = part.axes_of_size(self.size)
        if not axes:
            return AxisChoice(None, f"no dimension of size {self.size}")

        if self.size == 1:
            raise _Ambiguity("has a dimension of size 1, as many arrays do that are no batch")
        if part.is_state and not is_declared:
            if not self.strict:
                return AxisChoice(None, "state of a model, shared unless declared")
            raise _Ambiguity(
                f"is state of a model, and its axis {axes[0]} may have this size by chance"
            )
        if len(axes) > 1 and self.strict:
            raise _Ambiguity(f"has {len(axes)} dimensions of this size, axes {axes}")
        if axes[0] != part.leading and not is_declared:
            raise _Ambiguity(f"has this size along axis {axes[0]}, which is not its leading one")

        reason = f"its leading dimension of size {self.size}"
        if len(axes) > 1:
            reason = f"the first of its {len(axes)} dimensions of size {self.size}"
        elif is_declared:
            reason = f"its one dimension of size {self.size}"
        return AxisChoice(axes[0], reason)

    def _ambiguous_parts(self, ambiguous: Sequence[tuple[BatchPart, str]]) -> TransformError:
        shown = ambiguous[:12]
        lines = [f"  {format_path(part.paths[0])}: {part.what} {why}" for part, why in shown]
        if len(ambiguous) > len(shown):
            lines.append(f"  and {len(ambiguous) - len(shown)} more")
        keys = dict.fromkeys(filter_text(part.kind, part.paths[0]) for part, _ in shown)
        where = f"where={{{', '.join(f'{key}: None' for key in keys)}}}"
        return TransformError(
            f"A batch of {self.size} cannot be found by sizes alone:\n" + "\n".join(lines) + "\n"
            f"Declare them, each with its axis, or None for what is shared: "
            f"batch=sx.Batch({self.size}, {where}) for sx.vmap, {where} for sx.batch_axes."
        )


def _filter_repr(item: object) -> str:
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
