# SPDX-License-Identifier: Apache-2.0
"""What of a call is differentiated, and how gradients are arranged like it.

The user chooses arguments by position and, of Modules and containers, Variables by a filter: a
``DiffState``. Applied to the arguments of one call it is a ``DiffArgument``. All of them are the
``DiffInputs`` of the call: the values of the chosen Variables, each once, and the plain parts of
the arguments. That pair is what JAX differentiates by. Everything else of the call, the *others*,
is constant.

Gradients come back as such a pair. ``DiffInputs.arrange`` gives each argument its own: a ``State``
for a Module, with the paths of the chosen Variables; an array for a Variable; for anything else the
same pytree. A Variable that is reached twice has one gradient, the sum over all its uses, at its
first path. ``DiffInputs.split_tangents`` is the inverse, for what users give: directions, and the
gradients that their own rules return.

What a function writes into Variables is carried back, but is no part of its result: it has no
tangent, and no cotangent arrives at it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.array_ops import dtype_of, is_differentiable
from shardax._core.errors import StateMismatchError
from shardax._core.frames import owner_here
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.flatten import build, flatten, is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path, plain_path
from shardax._core.init.lazy import LazyValue
from shardax._core.module import Module
from shardax._core.object import Object
from shardax._core.state.filters import Filter, Predicate, to_predicate
from shardax._core.state.split_merge import describe_plain_arrays
from shardax._core.state.state import Origin, State
from shardax._core.state.values_by_path import arranged_by_path, merged_values
from shardax._core.variable import Variable
from shardax._core.variable_types import Param
from shardax._transforms.grad import errors
from shardax._transforms.grad.tangents import Tangents, tangents_in
from shardax._transforms.lift.arguments import (
    RootTemplate,
    StaticTemplate,
    TreeTemplate,
    join_argument,
    plain_paths,
    root_places,
)
from shardax._transforms.lift.effects import returned_pair
from shardax._transforms.lift.engine import LiftedCall, SingleRunCall

# The differentiated inputs: values of Variables, and plain parts of arguments.
DiffPair = tuple[Sequence[PyTree], Sequence[PyTree]]


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
    filter: Filter = Param


# What users give for ``argnums`` and ``nondiff_argnums``.
Argnums = int | DiffState | tuple[int | DiffState, ...] | list[int | DiffState]


def diff_states(argnums: Argnums, wrt: Filter) -> tuple[list[DiffState], bool]:
    """Returns what ``argnums`` chooses, and whether it is a sequence."""
    is_sequence = isinstance(argnums, (tuple, list))
    items = argnums if is_sequence else [argnums]
    chosen = [_as_diff_state(item, wrt) for item in items]

    numbers = [item.argnum for item in chosen]
    _check_distinct(numbers, numbers)
    return chosen, is_sequence


def _as_diff_state(item: int | DiffState, wrt: Filter) -> DiffState:
    if isinstance(item, DiffState):
        return item
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise errors.not_an_argnum(item)
    return DiffState(operator.index(item), wrt)


def _check_distinct(positions: Sequence[int], argnums: Sequence[int]) -> None:
    """Raises if two entries of ``argnums`` are the same position."""
    if len(set(positions)) != len(positions):
        raise errors.argument_named_twice(argnums)


# --- one argument ---------------------------------------------------------------------------------


class DiffVariable(NamedTuple):
    """A chosen Variable: path below its object, index in the graph of the call, origin."""

    path: Path
    # A tuple's method of this name has no use here.
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    origin: Origin


class DiffObject(NamedTuple):
    """One object of a differentiated argument."""

    root: int  # its position among the roots of the call
    path: Path  # from the argument's name on
    is_variable: bool  # whether it is a Variable, and no Module
    type_name: str  # its type, for messages
    graphdef: GraphDef
    variables: list[DiffVariable]  # the chosen ones
    unchosen: list[Path]  # paths of the other Variables

    @classmethod
    def choose(
        cls,
        item: Object,
        root: int,
        path: Path,
        predicate: Predicate,
        is_argument: bool,
        indices: Mapping[int, int],
    ) -> DiffObject:
        """Returns an object with the Variables that a predicate chooses.

        Args:
            item: The object.
            root: Its position among the roots of the call.
            path: Its path, from the argument's name on.
            predicate: Of paths and Variables.
            is_argument: Whether the object is the argument itself, and not in a container.
            indices: Index of each Variable in the graph of the call, by ``id``.
        """
        flat = flatten(item)
        is_variable = isinstance(item, Variable)
        variables, unchosen = [], []

        for leaf_path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
            # A Variable that is the argument is chosen by its position; in a container, by the
            # filter, at its path there.
            chosen = is_variable and is_argument
            chosen = chosen or predicate(path[1:] if is_variable else leaf_path, leaf)
            if chosen:
                origin = Origin(type(leaf), leaf._metadata)
                variables.append(DiffVariable(leaf_path, indices[id(leaf)], origin))
            else:
                unchosen.append(leaf_path)

        type_name = type(item).__name__
        return cls(root, path, is_variable, type_name, flat.graphdef, variables, unchosen)

    def take_gradients(
        self, remaining: dict[int, PyTree], as_module: bool
    ) -> Object | State | PyTree:
        """Takes the gradients of its Variables out of ``remaining``; returns them arranged."""
        values: dict[Path, PyTree] = {}
        origins: dict[Path, Origin] = {}
        for variable in self.variables:
            if variable.index in remaining:
                values[variable.path] = remaining.pop(variable.index)
                origins[variable.path] = variable.origin

        if as_module:
            leaves = [values.get(path) for path in self.graphdef.leaf_paths]
            (root,), _ = build(self.graphdef, leaves, owner_here())
            return root
        if self.is_variable:
            return next(iter(values.values()), None)
        return State.from_flat(values, origins)

    def put_tangents(self, tangent: PyTree, position: int, tangents: Tangents) -> None:
        """Puts what was given for the object into ``tangents``, Variable by Variable."""
        noun = tangents.noun
        if self.is_variable:
            if not self.variables:
                raise errors.tangent_of_unchosen(noun, format_path(self.path), position)
            value = tangent.value if isinstance(tangent, Variable) else tangent
            tangents.put(self.variables[0].index, value, self.path)
            return

        if isinstance(tangent, Module):
            tangent = self._state_of(tangent, tangents)
        if not isinstance(tangent, Mapping) or isinstance(tangent, Object):
            raise errors.not_a_state(noun, self.type_name, self.path, tangent)

        index_of = {variable.path: variable.index for variable in self.variables}
        for path in arranged_by_path(tangent, index_of):
            if path in self.unchosen:
                where = f"{format_path(self.path)}{format_path(path)}"
                raise errors.tangent_of_unchosen(noun, where, position)

        try:
            values = merged_values([tangent], list(index_of))
        except StateMismatchError as error:
            raise errors.unlike_state(noun, self.path, error) from error
        for path, value in values.items():
            tangents.put(index_of[path], value, (*self.path, *path))

    def _state_of(self, module: Module, tangents: Tangents) -> State:
        """Returns the tangents in a Module, without those of integers: a Module holds all."""
        integers = {
            variable.path
            for variable in self.variables
            if not any(map(is_differentiable, jax.tree.leaves(tangents.values[variable.index])))
        }
        values = tangents_in(module).flat()
        return State.from_flat({p: value for p, value in values.items() if p not in integers})


class DiffArgument:
    """One differentiated argument of a call: its objects, with their Variables, and plain part.

    Attributes:
        position: Its position among the arguments.
        label: The name of its parameter.
        objects: The objects in it, in order.
        has_plain: Whether it has a plain part, which may be without arrays.
    """

    def __init__(self, call: LiftedCall, chosen: DiffState, as_module: bool = False) -> None:
        arguments = call.arguments
        count = len(arguments.templates)
        if not -count <= chosen.argnum < count:
            raise errors.argnum_out_of_range(chosen.argnum, count)

        self.argnum = chosen.argnum
        self.filter = chosen.filter
        self.position = chosen.argnum % count
        self.label = call.labels[self.position]
        self.template = arguments.templates[self.position]
        self.has_plain = not isinstance(self.template, (RootTemplate, StaticTemplate))
        self._as_module = as_module

        predicate = to_predicate(chosen.filter)
        is_argument = isinstance(self.template, RootTemplate)
        indices = {id(leaf): index for index, leaf in enumerate(call.graph.flat.leaves)}
        self.objects = [
            DiffObject.choose(arguments.roots[root], root, path, predicate, is_argument, indices)
            for root, path in root_places(self.label, self.template)
        ]
        self._holds_arrays = bool(jax.tree.leaves(arguments.plain[self.position]))

        # For an error: whether arrays were forgotten to be made Variables.
        self._plain_arrays = ""
        if not self.variables:
            texts = (
                describe_plain_arrays(arguments.roots[item.root], item.path)
                for item in self.objects
            )
            self._plain_arrays = next(filter(None, texts), "")

    @property
    def variables(self) -> list[DiffVariable]:
        """The chosen Variables of all its objects."""
        return [variable for item in self.objects for variable in item.variables]

    @property
    def holds_anything(self) -> bool:
        """Whether it has a chosen Variable or an array."""
        return bool(self.variables) or self._holds_arrays

    def check_chosen(self) -> None:
        """Raises if the argument holds nothing to differentiate."""
        if self.objects and not self.holds_anything:
            raise errors.nothing_to_differentiate(
                self.label, self.objects[0].type_name, self.filter, self.argnum, self._plain_arrays
            )

    def check_differentiable(self, call: LiftedCall, allow_int: bool, holomorphic: bool) -> None:
        """Raises if a chosen array holds numbers that have no gradient."""
        if allow_int:
            return

        needed = jnp.complexfloating if holomorphic else jnp.inexact
        for kind, path, arrays, remedy in self._chosen_arrays(call):
            for dtype in map(dtype_of, arrays):
                if not jnp.issubdtype(dtype, needed):
                    raise errors.dtype_without_gradient(kind, path, dtype, remedy)

    def _chosen_arrays(self, call: LiftedCall) -> Iterator[tuple[str, Path, list[Leaf], str]]:
        """Yields kind, path and arrays of all that is chosen, and what to do without it."""
        plain = call.arguments.plain[self.position]
        paths = plain_paths(self.template, plain)
        for path, leaf in zip(paths, jax.tree.leaves(plain), strict=True):
            # Floats have gradients, and what is not a number JAX refuses itself.
            if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int)):
                remedy = "Pass it apart (argnums leaves it out), convert it"
                yield "array", (self.label, *path), [leaf], remedy

        for item in self.objects:
            for path, index, origin in item.variables:
                value = call.graph.leaves[index]._value
                arrays = [value] if isinstance(value, LazyValue) else jax.tree.leaves(value)
                kind = origin.variable_type.__name__
                yield kind, (*item.path, *path), arrays, "Leave it out by a filter (wrt=...)"

    def gradient(self, remaining: dict[int, PyTree], plain: PyTree) -> PyTree:
        """Returns gradients arranged like the argument.

        Args:
            remaining: Gradients by index of their Variable; those of its Variables are taken out.
            plain: The gradients of its plain part.
        """
        by_root = {
            item.root: item.take_gradients(remaining, self._as_module) for item in self.objects
        }
        return join_argument(self.template, plain, by_root, with_static=False)

    def split_tangent(self, tangent: PyTree, plain: PyTree, tangents: Tangents) -> list[Leaf]:
        """Puts tangents of its Variables into ``tangents``; returns those of its plain arrays."""
        leaves, treedef = jax.tree.flatten(plain)
        if tangent is None:
            return [None] * len(leaves)

        of_objects: list[PyTree] = []
        of_plain: list[Leaf] = []
        if isinstance(self.template, RootTemplate):
            of_objects = [tangent]
        elif isinstance(self.template, TreeTemplate):
            every = self._flatten_up_to(self.template.treedef, tangent, tangents.noun)
            of_objects = [every[position] for position, _ in self.template.roots]
            elsewhere = {position for position, _ in (*self.template.roots, *self.template.static)}
            of_plain = [item for position, item in enumerate(every) if position not in elsewhere]
        else:
            of_plain = self._flatten_up_to(treedef, tangent, tangents.noun)

        for item, of_object in zip(self.objects, of_objects, strict=True):
            if of_object is not None:
                item.put_tangents(of_object, self.position, tangents)

        paths = plain_paths(self.template, plain)
        return [
            tangents.fit(item, leaf, (self.label, *path))
            for item, leaf, path in zip(of_plain, leaves, paths, strict=True)
        ]

    def _flatten_up_to(
        self, treedef: jax.tree_util.PyTreeDef, tangent: PyTree, noun: str
    ) -> list[PyTree]:
        try:
            return treedef.flatten_up_to(tangent)
        except (ValueError, TypeError) as error:
            raise errors.not_arranged_like_argument(noun, self.label, error) from error


# --- all of a call --------------------------------------------------------------------------------


class DiffInputs:
    """The differentiated inputs of one call.

    Attributes:
        arguments: The differentiated arguments, in the order that was asked for.
        indices: The chosen Variables of all of them, by their index in the graph of the call.
        positions: The positions of the arguments with a plain part.
    """

    def __init__(self, arguments: Sequence[DiffArgument]) -> None:
        self.arguments = arguments
        self.indices = sorted({v.index for each in arguments for v in each.variables})
        self.positions = [each.position for each in arguments if each.has_plain]

    def take(self, values: Sequence[PyTree], plain: Sequence[PyTree]) -> DiffPair:
        """Returns the differentiated inputs among all values and all plain parts."""
        of_variables = [values[index] for index in self.indices]
        of_arguments = [plain[position] for position in self.positions]
        return of_variables, of_arguments

    def insert(
        self, pair: DiffPair, values: Sequence[PyTree], plain: Sequence[PyTree]
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Returns all values and all plain parts, with these differentiated inputs in place."""
        all_values, all_plain = list(values), list(plain)
        for index, value in zip(self.indices, pair[0], strict=True):
            all_values[index] = value
        for position, part in zip(self.positions, pair[1], strict=True):
            all_plain[position] = part
        return all_values, all_plain

    def others(
        self, values: Sequence[PyTree], plain: Sequence[PyTree]
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Returns all values and all plain parts, with None for the differentiated ones."""
        nothing = [None] * len(self.indices), [None] * len(self.positions)
        return self.insert(nothing, values, plain)

    def arrange(self, gradients: DiffPair) -> tuple[PyTree, ...]:
        """Returns one gradient for each argument; that of a Variable is at its first path."""
        of_variables, of_arguments = gradients
        remaining = dict(zip(self.indices, of_variables, strict=True))
        plain = dict(zip(self.positions, of_arguments, strict=True))

        by_position: dict[int, PyTree] = {}
        for each in sorted(self.arguments, key=lambda argument: argument.position):
            by_position[each.position] = each.gradient(remaining, plain.get(each.position))
        return tuple(by_position[each.position] for each in self.arguments)

    def split_tangents(
        self,
        noun: str,
        given: Sequence[PyTree],
        values: Sequence[PyTree],
        plain: Sequence[PyTree],
        strict: bool,
    ) -> DiffPair:
        """Returns tangents like the differentiated inputs, None for what has none.

        The inverse of ``arrange``.

        Args:
            noun: What messages call a tangent.
            given: One tangent for each argument.
            values: The values of all Variables of the call, or their shapes.
            plain: The plain parts of all arguments, or their shapes.
            strict: Whether a tangent of an integer is refused.
        """
        tangents = Tangents(noun, values, strict)
        by_position: dict[int, PyTree] = {}
        for each, tangent in zip(self.arguments, given, strict=True):
            like = plain[each.position]
            leaves = each.split_tangent(tangent, like, tangents)
            by_position[each.position] = jax.tree.structure(like).unflatten(leaves)

        of_variables = [tangents.of(index) for index in self.indices]
        of_arguments = [by_position[position] for position in self.positions]
        return of_variables, of_arguments


def diff_inputs(
    call: LiftedCall, chosen: Sequence[DiffState], as_module: bool = False
) -> DiffInputs:
    """Returns the differentiated inputs of a call, none named twice and no filter without a match.

    Of several arguments with one filter, one has to match; the others have empty States.
    """
    arguments = [DiffArgument(call, item, as_module) for item in chosen]
    _check_distinct([each.position for each in arguments], [each.argnum for each in arguments])
    for each in arguments:
        others = [other for other in arguments if other.filter == each.filter]
        if not any(other.holds_anything for other in others):
            each.check_chosen()
    return DiffInputs(arguments)


# --- the call -------------------------------------------------------------------------------------

# Splits the result of the user's function into (what is differentiated, auxiliary result).
Split = Callable[[PyTree], tuple[PyTree, PyTree]]


class DifferentiatedCall(SingleRunCall):
    """One call of a function that JAX differentiates.

    Args:
        name: The transform's name.
        function: The user's function.
        args: Its positional arguments.
        kwargs: Those by name.
        split: Splits the result of the user's function.
    """

    inputs: DiffInputs  # what is differentiated, set by the transform

    def __init__(
        self,
        name: str,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        split: Split,
    ) -> None:
        super().__init__(name, function, args, kwargs)
        self.split = split
        self.values: list[PyTree] = []

    def take(self) -> DiffPair:
        """Reads the values of all Variables; returns the differentiated inputs."""
        self.values = self.graph.values()
        return self.inputs.take(self.values, self.arguments.plain)

    def pure(
        self, of_variables: Sequence[PyTree], of_arguments: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Runs the user's function, as a pure function of the differentiated inputs."""
        arguments = self.arguments
        pair = of_variables, of_arguments
        values, plain = self.inputs.insert(pair, self.values, arguments.plain)
        return self.run_once(values, plain, arguments.plain_named, self.split)


def separate_aux(result: PyTree, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    """Returns (what is differentiated, auxiliary result) of what a function returned."""
    if not has_aux:
        return result, None
    source = f"With has_aux=True the function given to sx.{name}"
    return returned_pair(result, source, "(result, aux)")


def separate_arrays(result: PyTree, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    """Returns (arrays, auxiliary result); raises if an object is among the arrays."""
    arrays, aux = separate_aux(result, has_aux, name)
    refuse_objects(arrays, name)
    return arrays, aux


def refuse_objects(result: PyTree, name: str) -> None:
    """Raises if a result that is differentiated holds objects."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_object):
        if isinstance(leaf, Object):
            raise errors.object_in_result(name, leaf, plain_path(keys))
