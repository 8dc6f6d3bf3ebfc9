# SPDX-License-Identifier: Apache-2.0
"""Targets: what of an argument is differentiated, and how gradients stand for it.

What is differentiated is chosen by argument and, for a Module, by filter. Its *tangents*
(gradients, directions) are arranged like the argument: a ``State`` for a Module, with the paths of
the chosen Variables; an array for a Variable; for anything else, the same pytree.

A Variable that is reached twice is one, so it has one gradient: the sum over all its uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.errors import DifferentiationError, StateMismatchError, TangentError
from shardax.core.filters import to_predicate
from shardax.core.lazy import LazyValue
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.state import Origin, State, flatten_mapping, merged_values
from shardax.core.structure import flatten
from shardax.core.variables import Param, Variable
from shardax.transforms.arguments import Fixed, Mixed, Root
from shardax.transforms.call import Call
from shardax.transforms.naming import leaf_paths, plain_paths, root_places
from shardax.transforms.tangents import Tangents


@dataclass(frozen=True)
class DiffState:
    """Which argument to differentiate, and which of its Variables.

    Attributes:
        argnum: Position of the argument.
        filter: Filter of the Variables (``core.filters``).

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> stats = sx.BatchStat(jnp.float32(3))
        >>> float(sx.grad(lambda v: v.value**2, argnums=sx.DiffState(0, sx.BatchStat))(stats))
        6.0
    """

    argnum: int
    filter: Any = Param


def replaced(items: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns a list with other items at some places."""
    changed = list(items)
    for place, item in zip(places, new, strict=True):
        changed[place] = item
    return changed


class Entry(NamedTuple):
    """A chosen Variable: its path below the object, its place in the graph, what it is."""

    path: Path
    leaf: int
    origin: Origin


class Choice(NamedTuple):
    """One object of a differentiated argument.

    Attributes:
        where: Its path, from the argument's name on.
        is_variable: Whether it is a Variable, and no Module.
        type_name: Its type, for messages.
        entries: The chosen Variables.
        others: Paths of the others.
    """

    where: Path
    is_variable: bool
    type_name: str
    entries: list[Entry]
    others: list[Path]


class Target:
    """One differentiated argument: which Variables of the graph, and which plain part.

    Args:
        call: The call.
        chosen: The argument, and a filter.

    Attributes:
        position: Position of the argument.
        label: The name of its parameter.
        choices: Its objects.
        has_plain: Whether it has a plain part.

    Raises:
        DifferentiationError: If there is no such argument.
    """

    def __init__(self, call: Call, chosen: DiffState) -> None:
        arguments = call.arguments
        count = len(arguments.templates)
        if not -count <= chosen.argnum < count:
            raise DifferentiationError(
                f"argnums={chosen.argnum} is out of range: the call has {count} positional "
                f"arguments. Arguments to differentiate must be passed by position."
            )
        self.argnum, self.filter = chosen.argnum, chosen.filter
        self.position = chosen.argnum % count
        self.template = arguments.templates[self.position]
        self.label = call.labels[self.position]
        self.has_plain = not isinstance(self.template, (Root, Fixed))
        predicate = to_predicate(chosen.filter)
        index = {id(leaf): i for i, leaf in enumerate(call.graph.flat.leaves)}
        self.choices = [
            _choose(arguments.roots[root], where, predicate, index)
            for root, where in root_places(self.label, self.template)
        ]

    @property
    def entries(self) -> list[Entry]:
        """The chosen Variables of all its objects."""
        return [entry for choice in self.choices for entry in choice.entries]

    def check_chosen(self) -> None:
        """Raises if the argument holds nothing to differentiate.

        Raises:
            DifferentiationError: Naming argument and filter.
        """
        if self.entries or self.has_plain or not self.choices:
            return
        shown = getattr(self.filter, "__name__", repr(self.filter))
        raise DifferentiationError(
            f"The argument {self.label!r} ({self.choices[0].type_name}) has no Variable that the "
            f"filter {shown} matches, so there is nothing to differentiate. Choose others with "
            f"wrt=... or argnums=sx.DiffState({self.argnum}, filter)."
        )

    def plain_places(self, plain: Any) -> list[Path]:
        """Returns the path of each leaf of the plain part, from the argument's name on."""
        if isinstance(self.template, Mixed):
            paths: Sequence[Path] = plain_paths(self.template)
        else:
            paths = leaf_paths(jax.tree.structure(plain))
        return [(self.label, *path) for path in paths]

    def gradient(self, by_index: Mapping[int, Any], plain: Any) -> Any:
        """Arranges tangents like the argument.

        Args:
            by_index: The tangent of each chosen Variable, by its place in the graph.
            plain: Those of the plain part, like it.
        """
        found: list[Any] = []
        for choice in self.choices:
            if choice.is_variable:
                found.append(by_index[choice.entries[0].leaf])
                continue
            values = {path: by_index[leaf] for path, leaf, _ in choice.entries}
            origins = {path: origin for path, _, origin in choice.entries}
            found.append(State.from_flat(values, origins))
        if isinstance(self.template, Root):
            return found[0]
        if isinstance(self.template, Mixed):
            parts = [(place, found[n]) for n, (place, _) in enumerate(self.template.roots)]
            parts += [(place, None) for place, _ in self.template.static]
            leaves = list(plain)
            for place, item in sorted(parts, key=lambda part: part[0]):
                leaves.insert(place, item)
            return self.template.treedef.unflatten(leaves)
        return plain

    def place(self, given: Any, plain: Any, tangents: Tangents) -> list[Any]:
        """The inverse of ``gradient``: takes tangents apart, checking that they fit.

        Args:
            given: Arranged like the argument; None, and what is missing, is zero.
            plain: The plain part of the argument.
            tangents: Takes those of Variables.

        Returns:
            The tangent of each leaf of the plain part, or None.

        Raises:
            TangentError: If something does not fit; naming the path.
        """
        leaves, treedef = jax.tree.flatten(plain)
        if given is None:
            return [None] * len(leaves)
        if isinstance(self.template, Root):
            parts, rest = [given], []
        elif isinstance(self.template, Mixed):
            every = self._up_to(self.template.treedef, given, tangents.noun)
            parts = [every[place] for place, _ in self.template.roots]
            taken = {place for place, _ in (*self.template.roots, *self.template.static)}
            rest = [item for place, item in enumerate(every) if place not in taken]
        else:
            parts, rest = [], self._up_to(treedef, given, tangents.noun)
        for choice, part in zip(self.choices, parts, strict=True):
            if part is not None:
                self._place_object(choice, part, tangents)
        places = self.plain_places(plain)
        return [
            tangents.fit(item, leaf, path)
            for item, leaf, path in zip(rest, leaves, places, strict=True)
        ]

    def _up_to(self, treedef: Any, given: Any, noun: str) -> list[Any]:
        try:
            return treedef.flatten_up_to(given)
        except (ValueError, TypeError) as error:
            raise TangentError(
                f"The {noun} for the argument {self.label!r} is not arranged like it: {error}"
            ) from error

    def _place_object(self, choice: Choice, given: Any, tangents: Tangents) -> None:
        if choice.is_variable:
            value = given.value if isinstance(given, Variable) else given
            tangents.put(choice.entries[0].leaf, value, choice.where)
            return
        where = format_path(choice.where)
        if not isinstance(given, Mapping) or isinstance(given, Object):
            raise TangentError(
                f"The {tangents.noun} for the {choice.type_name} at {where} is of type "
                f"{type(given).__name__}; it must be a State or a nested mapping by path, such as "
                f"sx.grad returns, or None."
            )
        known = {path: leaf for path, leaf, _ in choice.entries}
        for path in flatten_mapping(given, known):
            if path in choice.others:
                raise TangentError(
                    f"There is a {tangents.noun} for {where}{format_path(path)}, which the "
                    f"filter does not choose to be differentiated. Leave it out, or choose it: "
                    f"sx.DiffState({self.position}, filter)."
                )
        try:
            values = merged_values([given], list(known))
        except StateMismatchError as error:
            raise TangentError(f"The {tangents.noun} for {where}: {error}") from error
        for path, value in values.items():
            tangents.put(known[path], value, (*choice.where, *path))


def _choose(
    root: Any, where: Path, predicate: Callable[[Path, Any], bool], index: Mapping[int, int]
) -> Choice:
    flat = flatten(root)
    entries, others = [], []
    whole = isinstance(root, Variable)
    for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
        if whole or predicate(path, leaf):
            entries.append(Entry(path, index[id(leaf)], Origin(type(leaf), leaf._metadata)))
        else:
            others.append(path)
    return Choice(where, whole, type(root).__name__, entries, others)


def check_differentiable(call: Call, target: Target, allow_int: bool, holomorphic: bool) -> None:
    """Raises if a chosen array holds numbers that have no gradient.

    Raises:
        DifferentiationError: Naming the path.
    """
    wanted = jnp.complexfloating if holomorphic else jnp.inexact
    if allow_int:
        return
    plain = call.arguments.plain[target.position]
    places = target.plain_places(plain) if target.has_plain else []
    for path, leaf in zip(places, jax.tree.leaves(plain), strict=True):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int)):
            continue  # floats have gradients, and what is not a number JAX refuses itself
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, wanted):
            raise DifferentiationError(
                f"The array at {format_path(path)} has dtype {dtype}, which has no gradient. Pass "
                f"it as an argument of its own that argnums leaves out, convert it to a float, or "
                f"pass allow_int=True."
            )
    for choice in target.choices:
        for path, leaf, origin in choice.entries:
            held = call.graph.leaves[leaf]._value
            for value in [held] if isinstance(held, LazyValue) else jax.tree.leaves(held):
                if not jnp.issubdtype(value.dtype, wanted):
                    raise DifferentiationError(
                        f"The {origin.variable_type.__name__} at "
                        f"{format_path((*choice.where, *path))} has dtype {value.dtype}, which has "
                        f"no gradient. Leave it out by a filter (wrt=...), give it a Variable type "
                        f"of its own, or pass allow_int=True."
                    )
