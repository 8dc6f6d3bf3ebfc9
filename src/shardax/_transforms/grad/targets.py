# SPDX-License-Identifier: Apache-2.0
"""Differentiated arguments, and the arrangement of their tangents.

Arguments are chosen by position and, for a Module, by filter. *Tangents* (gradients, directions)
are arranged like the argument: a ``State`` for a Module, with the paths of the chosen Variables; an
array for a Variable; for anything else the same pytree. A Variable that is reached twice has one
gradient, the sum over all its uses. Tangents have the shapes and dtypes of what they belong to;
integers and random keys have none. What was not given is zero, and stands as None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.errors import StateMismatchError
from shardax._core.graph.flatten import flatten
from shardax._core.graph.paths import Path, format_path
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.state.filters import to_predicate
from shardax._core.state.state import Origin, State, flatten_mapping, merged_values
from shardax._core.variable import Param, Variable
from shardax._transforms.errors import DifferentiationError, InconsistentAliasingError, TangentError
from shardax._transforms.lift.arguments import (
    RootTemplate,
    StaticTemplate,
    TreeTemplate,
    leaf_paths,
    plain_paths,
    root_places,
)
from shardax._transforms.lift.engine import LiftedCall


@contextlib.contextmanager
def explained_reverse_mode() -> Iterator[None]:
    """Explains which loops have a reverse-mode derivative."""
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work for lax.while_loop" not in str(error):
            raise
        raise DifferentiationError(
            "What is differentiated goes through a while loop, which has no reverse-mode "
            "derivative: nobody knows how many steps it would have to remember. Give it a limit, "
            "sx.bounded_while_loop(..., max_steps=100, differentiable='recompute'); if the number "
            "of steps is known, use sx.fori_loop with Python integers, or sx.scan; if the gradient "
            "shall not go through it, jax.lax.stop_gradient."
        ) from error


class Tangents:
    """Tangents on their way to the Variables they belong to."""

    def __init__(self, noun: str, values: Sequence[Any], strict: bool) -> None:
        self.noun = noun
        self.values = values
        self.strict = strict
        # The tangent of each Variable that was given one, by its place in the graph; None where one
        # of its arrays has none.
        self.by_index: dict[int, Any] = {}
        self._given: dict[int, tuple[Path, Any]] = {}

    def put(self, index: int, given: Any, path: Path) -> None:
        """Takes the tangent of one Variable."""
        if given is None:
            return
        first, known = self._given.setdefault(index, (path, given))
        if known is not given:
            raise InconsistentAliasingError(
                f"One Variable was given two {self.noun}s, by two paths:\n  {format_path(first)}\n"
                f"  {format_path(path)}\nA shared Variable is one Variable and has one. Give their "
                f"sum at one of the paths."
            )
        leaves, treedef = jax.tree.flatten(self.values[index])
        try:
            parts = treedef.flatten_up_to(given)
        except (ValueError, TypeError) as error:
            raise TangentError(
                f"The {self.noun} for {format_path(path)} is not arranged like its value: {error}"
            ) from error
        fitted = [self.fit(part, leaf, path) for part, leaf in zip(parts, leaves, strict=True)]
        self.by_index[index] = treedef.unflatten(fitted)

    def fit(self, given: Any, like: Any, path: Path) -> Any:
        """Returns a tangent for one array, or None."""
        if given is None:
            return None
        if not (hasattr(given, "dtype") or isinstance(given, (bool, int, float, complex))):
            raise TangentError(
                f"The {self.noun} for {format_path(path)} is of type {type(given).__name__}, but "
                f"must be an array like the value itself."
            )
        dtype = dtype_of(given)
        if not is_differentiable(like):
            if not self.strict or dtype == jax.dtypes.float0:
                return None
            raise TangentError(
                f"There is a {self.noun} for {format_path(path)}, which has dtype "
                f"{dtype_of(like)} and so no derivative. Leave it out, or give None."
            )
        shape, wanted = jnp.shape(given), dtype_of(like)
        weak = not hasattr(given, "dtype") or (
            isinstance(given, jax.Array) and jax.typeof(given).weak_type
        )
        fits = dtype == wanted or (weak and jnp.promote_types(dtype, wanted) == wanted)
        if shape == tuple(jnp.shape(like)) and fits:
            return given if dtype == wanted else jnp.asarray(given, wanted)
        raise TangentError(
            f"The {self.noun} for {format_path(path)} is {dtype}{list(shape)}, but must be "
            f"{wanted}{list(jnp.shape(like))}, like the value itself."
        )


def is_differentiable(leaf: Any) -> bool:
    """Whether the dtype of an array has derivatives."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, its shape, or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


@dataclass(frozen=True)
class DiffState:
    """Which argument to differentiate, and which of its Variables.

    Attributes:
        argnum: Position of the argument.
        filter: Filter of the Variables (``_core.state.filters``).

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


class DiffVariable(NamedTuple):
    """A chosen Variable: path below its object, position, origin."""

    path: Path
    leaf: int
    origin: Origin


class DiffObject(NamedTuple):
    """One object of a differentiated argument."""

    where: Path  # its path, from the argument's name on
    is_variable: bool  # whether it is a Variable, and no Module
    type_name: str  # its type, for messages
    entries: list[DiffVariable]  # the chosen Variables
    others: list[Path]  # paths of the others


class DiffArgument:
    """One differentiated argument: which Variables of the graph, and which plain part."""

    def __init__(self, call: LiftedCall, chosen: DiffState) -> None:
        arguments = call.arguments
        count = len(arguments.templates)
        if not -count <= chosen.argnum < count:
            raise DifferentiationError(
                f"argnums={chosen.argnum} is out of range: the call has {count} positional "
                f"arguments. Arguments to differentiate must be passed by position."
            )
        self.argnum, self.filter = chosen.argnum, chosen.filter
        self.position = chosen.argnum % count  # position of the argument
        self.template = arguments.templates[self.position]
        self.label = call.labels[self.position]  # the name of its parameter
        # Whether it has a plain part.
        self.has_plain = not isinstance(self.template, (RootTemplate, StaticTemplate))
        predicate = to_predicate(chosen.filter)
        index = {id(leaf): i for i, leaf in enumerate(call.graph.flat.leaves)}
        self.objects = [
            _choose(arguments.roots[root], where, predicate, index)
            for root, where in root_places(self.label, self.template)
        ]

    @property
    def entries(self) -> list[DiffVariable]:
        """The chosen Variables of all its objects."""
        return [entry for item in self.objects for entry in item.entries]

    def check_chosen(self) -> None:
        """Raises if the argument holds nothing to differentiate."""
        if self.entries or self.has_plain or not self.objects:
            return
        shown = getattr(self.filter, "__name__", repr(self.filter))
        raise DifferentiationError(
            f"The argument {self.label!r} ({self.objects[0].type_name}) has no Variable that the "
            f"filter {shown} matches, so there is nothing to differentiate. Choose others with "
            f"wrt=... or argnums=sx.DiffState({self.argnum}, filter)."
        )

    def plain_places(self, plain: Any) -> list[Path]:
        """Returns the path of each leaf of the plain part."""
        if isinstance(self.template, TreeTemplate):
            paths: Sequence[Path] = plain_paths(self.template)
        else:
            paths = leaf_paths(jax.tree.structure(plain))
        return [(self.label, *path) for path in paths]

    def gradient(self, by_index: Mapping[int, Any], plain: Any) -> Any:
        """Arranges tangents like the argument."""
        found: list[Any] = []
        for item in self.objects:
            if item.is_variable:
                found.append(by_index[item.entries[0].leaf])
                continue
            values = {path: by_index[leaf] for path, leaf, _ in item.entries}
            origins = {path: origin for path, _, origin in item.entries}
            found.append(State.from_flat(values, origins))
        if isinstance(self.template, RootTemplate):
            return found[0]
        if isinstance(self.template, TreeTemplate):
            parts = [(place, found[n]) for n, (place, _) in enumerate(self.template.roots)]
            parts += [(place, None) for place, _ in self.template.static]
            leaves = list(plain)
            for place, item in sorted(parts, key=lambda part: part[0]):
                leaves.insert(place, item)
            return self.template.treedef.unflatten(leaves)
        return plain

    def place(self, given: Any, plain: Any, tangents: Tangents) -> list[Any]:
        """The inverse of ``gradient``: takes tangents apart, checking that they fit."""
        leaves, treedef = jax.tree.flatten(plain)
        if given is None:
            return [None] * len(leaves)
        if isinstance(self.template, RootTemplate):
            parts, rest = [given], []
        elif isinstance(self.template, TreeTemplate):
            every = self._up_to(self.template.treedef, given, tangents.noun)
            parts = [every[place] for place, _ in self.template.roots]
            taken = {place for place, _ in (*self.template.roots, *self.template.static)}
            rest = [item for place, item in enumerate(every) if place not in taken]
        else:
            parts, rest = [], self._up_to(treedef, given, tangents.noun)
        for item, part in zip(self.objects, parts, strict=True):
            if part is not None:
                self._place_object(item, part, tangents)
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

    def _place_object(self, item: DiffObject, given: Any, tangents: Tangents) -> None:
        if item.is_variable:
            value = given.value if isinstance(given, Variable) else given
            tangents.put(item.entries[0].leaf, value, item.where)
            return
        where = format_path(item.where)
        if not isinstance(given, Mapping) or isinstance(given, Object):
            raise TangentError(
                f"The {tangents.noun} for the {item.type_name} at {where} is of type "
                f"{type(given).__name__}; it must be a State or a nested mapping by path, such as "
                f"sx.grad returns, or None."
            )
        known = {path: leaf for path, leaf, _ in item.entries}
        for path in flatten_mapping(given, known):
            if path in item.others:
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
            tangents.put(known[path], value, (*item.where, *path))


def _choose(
    root: Any, where: Path, predicate: Callable[[Path, Any], bool], index: Mapping[int, int]
) -> DiffObject:
    flat = flatten(root)
    entries, others = [], []
    whole = isinstance(root, Variable)
    for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
        if whole or predicate(path, leaf):
            entries.append(DiffVariable(path, index[id(leaf)], Origin(type(leaf), leaf._metadata)))
        else:
            others.append(path)
    return DiffObject(where, whole, type(root).__name__, entries, others)


def check_differentiable(
    call: LiftedCall, target: DiffArgument, allow_int: bool, holomorphic: bool
) -> None:
    """Raises if a chosen array holds numbers that have no gradient."""
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
    for item in target.objects:
        for path, leaf, origin in item.entries:
            held = call.graph.leaves[leaf]._value
            for value in [held] if isinstance(held, LazyValue) else jax.tree.leaves(held):
                if not jnp.issubdtype(value.dtype, wanted):
                    raise DifferentiationError(
                        f"The {origin.variable_type.__name__} at "
                        f"{format_path((*item.where, *path))} has dtype {value.dtype}, which has "
                        f"no gradient. Leave it out by a filter (wrt=...), give it a Variable type "
                        f"of its own, or pass allow_int=True."
                    )
