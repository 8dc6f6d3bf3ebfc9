# SPDX-License-Identifier: Apache-2.0
"""Gradients, and what is differentiated: chosen arguments and their tangents.

Arguments are chosen by position and, for a Module, by filter. *Tangents* (gradients, directions)
are arranged like the argument: a ``State`` for a Module, with the paths of the chosen Variables; an
array for a Variable; for anything else the same pytree. A Variable that is reached twice has one
gradient, the sum over all its uses. Tangents have the shapes and dtypes of what they belong to;
integers and random keys have none. What was not given is zero, and stands as None.

What a function writes into Variables is carried back, but is no part of its result: it has no
tangent, and no cotangent arrives at it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.array_ops import wider_dtype
from shardax._core.errors import ShardaxError, StateMismatchError
from shardax._core.frames import owner_here
from shardax._core.frozen import Origin
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.flatten import build, flatten
from shardax._core.graph.handlers import axes_of
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.init.lazy import LazyValue
from shardax._core.module import Module
from shardax._core.object import Object
from shardax._core.state.filters import to_predicate
from shardax._core.state.split_merge import describe_plain_arrays, state
from shardax._core.state.state import State
from shardax._core.state.values_by_path import arranged_by_path, merged_values
from shardax._core.variable import Param, Variable
from shardax._transforms import errors
from shardax._transforms.errors import TransformError
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding
from shardax._transforms.lift.engine import LiftedCall, SingleRunCall, decorator, wraps


@contextlib.contextmanager
def explained_reverse_mode() -> Generator[None]:
    """Explains which loops have a reverse-mode derivative."""
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work for lax.while_loop" not in str(error):
            raise
        raise TransformError(
            "What is differentiated goes through a while loop, which has no reverse-mode "
            "derivative: nobody knows how many steps it would have to remember. Give it a limit, "
            "sx.bounded_while_loop(condition, body, x, max_steps=100, differentiable='recompute'); "
            "if the number of steps is known, use sx.fori_loop with Python integers, or sx.scan; "
            "if the gradient shall not go through it, jax.lax.stop_gradient."
        ) from error


class _MetRules(threading.local):
    """Rules that a transform forward met in this thread."""

    rules: list[object] | None = None


_met = _MetRules()


def note_vjp(rule: object) -> None:
    """Notes that a function with a derivative backward alone is differentiated."""
    if _met.rules is not None:
        _met.rules.append(rule)


@contextlib.contextmanager
def explained_forward_mode(name: str) -> Generator[None]:
    """Adds to an error of JAX which functions have a derivative backward alone."""
    # Inside of a compiled function, a loop or ``remat`` the rule runs when the call of the function
    # is over, so it cannot be known there that JAX refused the mode.
    outer, _met.rules = _met.rules, []
    try:
        yield
    except TypeError as error:
        if not isinstance(error, ShardaxError):
            for text in dict.fromkeys(map(repr, _met.rules)):
                error.add_note(f"sx.{name} goes through {text}. {errors.FORWARD_MODE}")
        raise
    finally:
        _met.rules = outer


class Tangents:
    """Tangents on their way to the Variables they belong to."""

    def __init__(self, noun: str, values: Sequence[Leaf], strict: bool) -> None:
        self.noun = noun
        self.values = values
        self.strict = strict
        # The tangent of each Variable that was given one, by its place in the graph; None where one
        # of its arrays has none.
        self.by_index: dict[int, Any] = {}
        self._given: dict[int, tuple[Path, Any]] = {}

    def put(self, index: int, tangent: object, path: Path) -> None:
        """Takes the tangent of one Variable."""
        if tangent is None:
            return
        first, first_tangent = self._given.setdefault(index, (path, tangent))
        if first_tangent is not tangent:
            raise TransformError(
                f"One Variable was given two {self.noun}s, by two paths:\n  {format_path(first)}\n"
                f"  {format_path(path)}\nA shared Variable is one Variable and has one. Give their "
                f"sum at one of the paths."
            )
        leaves, treedef = jax.tree.flatten(self.values[index])
        try:
            parts = treedef.flatten_up_to(tangent)
        except (ValueError, TypeError) as error:
            raise TransformError(
                f"The {self.noun} for {format_path(path)} is not arranged like its value: {error}"
            ) from error
        fitted = [self.fit(part, leaf, path) for part, leaf in zip(parts, leaves, strict=True)]
        self.by_index[index] = treedef.unflatten(fitted)

    def fit(self, tangent: PyTree, like: Any, path: Path) -> PyTree:
        """Returns a tangent for one array, or None."""
        if tangent is None:
            return None
        if not (hasattr(tangent, "dtype") or isinstance(tangent, (bool, int, float, complex))):
            raise TransformError(
                f"The {self.noun} for {format_path(path)} is of type {type(tangent).__name__}, but "
                f"must be an array like the value itself."
            )
        dtype = dtype_of(tangent)
        if not is_differentiable(like):
            if not self.strict or dtype == jax.dtypes.float0:
                return None
            raise TransformError(
                f"There is a {self.noun} for {format_path(path)}, which has dtype "
                f"{dtype_of(like)} and so no derivative. Leave it out, or give None."
            )
        shape, expected = jnp.shape(tangent), dtype_of(like)
        weak = not hasattr(tangent, "dtype") or (
            isinstance(tangent, jax.Array) and jax.typeof(tangent).weak_type
        )
        fits = dtype == expected or (weak and wider_dtype(dtype, expected) == expected)
        if shape == tuple(jnp.shape(like)) and fits:
            return tangent if dtype == expected else jnp.asarray(tangent, expected)
        raise TransformError(
            f"The {self.noun} for {format_path(path)} is {dtype}{list(shape)}, but must be "
            f"{expected}{list(jnp.shape(like))}, like the value itself."
        )


def is_differentiable(leaf: object) -> bool:
    """Whether the dtype of an array has derivatives."""
    return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def dtype_of(leaf: Leaf) -> Any:
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
    filter: object = Param


def replaced(items: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Leaf]:
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

    root: int  # its position among the roots
    where: Path  # its path, from the argument's name on
    is_variable: bool  # whether it is a Variable, and no Module
    type_name: str  # its type, for messages
    entries: list[DiffVariable]  # the chosen Variables
    others: list[Path]  # paths of the others


class DiffArgument:
    """One differentiated argument: its Variables and its plain part."""

    def __init__(self, call: LiftedCall, chosen: DiffState, as_module: bool = False) -> None:
        arguments = call.arguments
        # The structure of each object, by its position, if gradients are arranged in one.
        self.graphdefs: dict[int, GraphDef] | None = None
        count = len(arguments.templates)
        if not -count <= chosen.argnum < count:
            raise TransformError(
                f"argnums={chosen.argnum} is out of range: the call has {count} positional "
                f"arguments. What can only be given by name is not differentiated."
            )
        self.argnum, self.filter = chosen.argnum, chosen.filter
        self.position = chosen.argnum % count  # position of the argument
        self.template = arguments.templates[self.position]
        self.label = call.labels[self.position]  # the name of its parameter
        # Whether it has a plain part.
        self.has_plain = not isinstance(self.template, (inputs.RootTemplate, inputs.StaticTemplate))
        predicate = to_predicate(chosen.filter)
        index = {id(leaf): i for i, leaf in enumerate(call.graph.flat.leaves)}
        self.objects = [
            _choose(
                arguments.roots[root],
                root,
                where,
                predicate,
                index,
                is_argument=isinstance(self.template, inputs.RootTemplate),
            )
            for root, where in inputs.root_places(self.label, self.template)
        ]
        if as_module:
            roots = arguments.roots
            self.graphdefs = {
                item.root: flatten(roots[item.root]).graphdef for item in self.objects
            }
        self.holds_plain = bool(jax.tree.leaves(arguments.plain[self.position]))
        # What an error says beside: whether arrays were forgotten to be made Variables.
        self.plain_arrays = "" if self.entries else self._describe_plain_arrays(arguments.roots)

    @property
    def entries(self) -> list[DiffVariable]:
        """The chosen Variables of all its objects."""
        return [entry for item in self.objects for entry in item.entries]

    def _describe_plain_arrays(self, roots: Sequence[object]) -> str:
        texts = [describe_plain_arrays(roots[item.root], item.where) for item in self.objects]
        return next(filter(None, texts), "")

    def check_chosen(self) -> None:
        """Raises if the argument holds nothing to differentiate."""
        if self.entries or self.holds_plain or not self.objects:
            return
        filter_name = getattr(self.filter, "__name__", repr(self.filter))
        raise TransformError(
            f"The argument {self.label!r} ({self.objects[0].type_name}) has no Variable that the "
            f"filter {filter_name} matches, so there is nothing to differentiate."
            f"{self.plain_arrays} Choose others: `wrt=filter`, or "
            f"`argnums=sx.DiffState({self.argnum}, filter)`."
        )

    def gradient(self, left: dict[int, Any], plain: object) -> PyTree:
        """Arranges gradients like the argument, taking out those of its Variables."""
        values_by_root: dict[int, Leaf] = {}
        for item in self.objects:
            if self.graphdefs is not None:
                by_path = {e.path: left.pop(e.leaf) for e in item.entries if e.leaf in left}
                values_by_root[item.root] = _holding(self.graphdefs[item.root], by_path)
                continue
            if item.is_variable:
                values_by_root[item.root] = (
                    left.pop(item.entries[0].leaf, None) if item.entries else None
                )
                continue
            present = [entry for entry in item.entries if entry.leaf in left]
            values = {path: left.pop(leaf) for path, leaf, _ in present}
            origins = {path: origin for path, _, origin in present}
            values_by_root[item.root] = State.from_flat(values, origins)
        return inputs.join_argument(self.template, plain, values_by_root, with_static=False)

    def place(self, tangent: object, plain: object, tangents: Tangents) -> list[Leaf]:
        """Takes tangents apart, checking them; the inverse of ``gradient``."""
        leaves, treedef = jax.tree.flatten(plain)
        if tangent is None:
            return [None] * len(leaves)
        if isinstance(self.template, inputs.RootTemplate):
            parts, leaves_given = [tangent], []
        elif isinstance(self.template, inputs.TreeTemplate):
            every = self._up_to(self.template.treedef, tangent, tangents.noun)
            parts = [every[place] for place, _ in self.template.roots]
            object_places = {place for place, _ in (*self.template.roots, *self.template.static)}
            leaves_given = [item for place, item in enumerate(every) if place not in object_places]
        else:
            parts, leaves_given = [], self._up_to(treedef, tangent, tangents.noun)
        for item, part in zip(self.objects, parts, strict=True):
            if part is not None:
                self._place_object(item, part, tangents)
        paths = inputs.plain_paths(self.template, plain)
        return [
            tangents.fit(item, leaf, (self.label, *path))
            for item, leaf, path in zip(leaves_given, leaves, paths, strict=True)
        ]

    def _up_to(self, treedef, tangent, noun: str) -> list[Leaf]:
        try:
            return treedef.flatten_up_to(tangent)
        except (ValueError, TypeError) as error:
            raise TransformError(
                f"The {noun} for the argument {self.label!r} is not arranged like it: {error}"
            ) from error

    def _place_object(self, item: DiffObject, tangent: object, tangents: Tangents) -> None:
        if item.is_variable and not item.entries:
            raise TransformError(
                f"There is a {tangents.noun} for {format_path(item.where)}, which the filter does "
                f"not choose to be differentiated. Leave it out, or choose it: "
                f"nondiff_argnums=sx.DiffState({self.position}, filter)."
            )
        if item.is_variable:
            value = tangent.value if isinstance(tangent, Variable) else tangent
            tangents.put(item.entries[0].leaf, value, item.where)
            return
        where = format_path(item.where)
        if isinstance(tangent, Module):
            fixed = {e.path for e in item.entries if not self._may_move(tangents.values[e.leaf])}
            values = tangents_in(tangent).flat()
            tangent = State.from_flat({p: v for p, v in values.items() if p not in fixed})
        if not isinstance(tangent, Mapping) or isinstance(tangent, Object):
            raise TransformError(
                f"The {tangents.noun} for the {item.type_name} at {where} is of type "
                f"{type(tangent).__name__}; it must be a State or a nested mapping by path, such "
                f"as sx.grad returns, a Module of the same structure, or None."
            )
        leaf_of = {path: leaf for path, leaf, _ in item.entries}
        for path in arranged_by_path(tangent, leaf_of):
            if path in item.others:
                raise TransformError(
                    f"There is a {tangents.noun} for {where}{format_path(path)}, which the "
                    f"filter does not choose to be differentiated. Leave it out, or choose it: "
                    f"nondiff_argnums=sx.DiffState({self.position}, filter)."
                )
        try:
            values = merged_values([tangent], list(leaf_of))
        except StateMismatchError as error:
            raise TransformError(f"The {tangents.noun} for {where}: {error}") from error
        for path, value in values.items():
            tangents.put(leaf_of[path], value, (*item.where, *path))

    @staticmethod
    def _may_move(value: object) -> bool:
        return any(map(is_differentiable, jax.tree.leaves(value)))


def _holding(graphdef: GraphDef, by_path: Mapping[Path, object]):
    """Returns objects of a structure that hold values by path, else None."""
    values = [by_path.get(path) for path in graphdef.leaf_paths]
    return build(graphdef, values, owner_here())[0][0]


def tangents_in(module: object) -> State:
    """Returns the gradients or tangents in a Module; None stands for none."""
    present = state(module)
    values = {path: v for path, v in present.flat().items() if jax.tree.leaves(v)}
    return State.from_flat(values, present.origins())


def arrange_gradients(
    targets: Sequence[DiffArgument],
    indices: Sequence[int],
    of_values: Sequence[object],
    of_plain: Mapping[int, object],
) -> tuple[PyTree, ...]:
    """Returns one gradient per argument, each Variable's at its first path."""
    left = dict(zip(indices, of_values, strict=True))
    in_order = sorted(targets, key=lambda target: target.position)
    gradients = {t.position: t.gradient(left, of_plain.get(t.position)) for t in in_order}
    return tuple(gradients[target.position] for target in targets)


def _choose(
    item,
    root: int,
    where: Path,
    predicate: Callable[[Path, Any], bool],
    index: Mapping[int, int],
    is_argument: bool,
) -> DiffObject:
    flat = flatten(item)
    entries, remaining = [], []
    whole = isinstance(item, Variable)
    for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
        # A Variable that is the argument is chosen by its position; in a container, by the filter,
        # at its path there.
        if (whole and is_argument) or predicate(where[1:] if whole else path, leaf):
            entries.append(DiffVariable(path, index[id(leaf)], Origin(type(leaf), leaf._metadata)))
        else:
            remaining.append(path)
    return DiffObject(root, where, whole, type(item).__name__, entries, remaining)


def _chosen_arrays(
    call: LiftedCall, target: DiffArgument
) -> Iterator[tuple[str, Path, Sequence[Any], str]]:
    """Yields kind, path, arrays and a way out of everything chosen."""
    plain = call.arguments.plain[target.position]
    paths = inputs.plain_paths(target.template, plain)
    for path, leaf in zip(paths, jax.tree.leaves(plain), strict=True):
        # Floats have gradients, and what is not a number JAX refuses itself.
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int)):
            way_out = "Pass it apart (argnums leaves it out), convert it"
            yield "array", (target.label, *path), [leaf], way_out
    for item in target.objects:
        for path, leaf, origin in item.entries:
            value = call.graph.leaves[leaf]._value
            arrays = [value] if isinstance(value, LazyValue) else jax.tree.leaves(value)
            where, kind = (*item.where, *path), origin.variable_type.__name__
            yield kind, where, arrays, "Leave it out by a filter (wrt=...)"


def check_differentiable(
    call: LiftedCall, target: DiffArgument, allow_int: bool, holomorphic: bool
) -> None:
    """Raises if a chosen array holds numbers that have no gradient."""
    kind_needed = jnp.complexfloating if holomorphic else jnp.inexact
    for kind, path, arrays, way_out in () if allow_int else _chosen_arrays(call, target):
        for dtype in map(dtype_of, arrays):
            if not jnp.issubdtype(dtype, kind_needed):
                raise TransformError(
                    f"The {kind} at {format_path(path)} has dtype {dtype}, which has no gradient. "
                    f"{way_out}, or pass allow_int=True."
                )


def _as_diff_state(item, wrt) -> DiffState:
    if isinstance(item, DiffState):
        return item
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TransformError(
            f"argnums has {item!r} of type {type(item).__name__}, but holds positions of arguments "
            "or DiffStates: argnums=0, argnums=(0, sx.DiffState(1, sx.Param)). To choose Variables "
            "of a Module, use wrt=..."
        )
    return DiffState(operator.index(item), wrt)


def _check_distinct(positions: Sequence[int], numbers: Sequence[int]) -> None:
    if len(set(positions)) != len(positions):
        raise TransformError(
            f"argnums names an argument twice: {[*numbers]}. Join the filters instead: "
            f"sx.DiffState({numbers[0]}, (filter, other_filter))."
        )


def diff_states(argnums: object, wrt: object) -> tuple[list[DiffState], bool]:
    """Returns what ``argnums`` chooses, and whether it is a sequence."""
    many = isinstance(argnums, (tuple, list))
    chosen = [_as_diff_state(item, wrt) for item in (argnums if many else [argnums])]
    numbers = [item.argnum for item in chosen]
    _check_distinct(numbers, numbers)
    return chosen, many


def diff_arguments(
    call: LiftedCall, chosen: Sequence[DiffState], as_module: bool = False
) -> list[DiffArgument]:
    """Returns the differentiated arguments of a call, checked."""
    targets = [DiffArgument(call, item, as_module) for item in chosen]
    _check_distinct([t.position for t in targets], [item.argnum for item in chosen])
    for target in targets:
        target.check_chosen()
    return targets


def _scalar(value: object, holomorphic: bool):
    """Returns the number that is differentiated."""
    number = value.value if isinstance(value, Variable) else value
    if axes_of(number) is not None:
        (number,) = jax.tree.leaves(number)
    kind_needed = jnp.complexfloating if holomorphic else jnp.floating
    is_array = isinstance(number, (jax.Array, np.ndarray, np.generic, float, complex))
    if is_array and jnp.ndim(number) == 0 and jnp.issubdtype(jnp.result_type(number), kind_needed):
        return number
    description = (
        f"{jnp.result_type(number)}{list(jnp.shape(number))}"
        if is_array
        else f"a {type(value).__name__}"
    )
    raise TransformError(
        f"Only a function that returns one {'complex' if holomorphic else 'real'} number has a "
        f"gradient, but it returned {description}. Reduce it (loss.mean(), loss.sum()), return "
        f"more with has_aux=True as (loss, aux), or use jax.jacobian for arrays."
    )


@decorator
def value_and_grad(
    function: Any = None,
    *,
    argnums: object = 0,
    has_aux: bool = False,
    wrt: object = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> PyTree:
    """Makes a function that returns value and gradient of a function.

    Values that the function writes into Variables are carried back, as by every lifted transform.

    Args:
        function: Returns a real scalar, or (scalar, aux) with ``has_aux``. Left out: returns a
            decorator.
        argnums: Position of the argument to differentiate, a ``DiffState``, or a sequence of these.
        has_aux: Whether the function returns (value, aux); aux may hold Modules and Variables.
        wrt: Filter of the Variables to differentiate in Modules and containers that are given by
            position alone. A Variable that is itself the argument is differentiated.
        holomorphic: As in ``jax.value_and_grad``.
        allow_int: As in ``jax.value_and_grad``.
        as_module: Whether the gradient of a Module is a Module of the same structure, whose
            Variables hold gradients (None where there is none), and that of a Variable a Variable.

    Returns:
        A function of the same arguments that returns (value, gradient), or ((value, aux),
        gradient). The gradient of a Module is a ``State``; of a Variable, an array like its value;
        of anything else, as in JAX. A sequence of argnums gives a tuple. A Variable that stands in
        several places has its gradient at the first path; a State leaves the others out, and None
        stands for a Variable by itself.

    Raises:
        TransformError: When called, if nothing matches the filter or a matching Variable is
            not of a differentiable dtype.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Linear(2, 1, rngs=sx.Rngs(0))
        >>> layer.kernel[...] = jnp.ones((2, 1))
        >>> loss = lambda layer, x: layer(x).sum()
        >>> value, grads = sx.value_and_grad(loss)(layer, jnp.array([1.0, 2.0]))
        >>> float(value), grads["kernel"].ravel().tolist()
        (3.0, [1.0, 2.0])
    """
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
    return _value_and_grad("value_and_grad", function, argnums, has_aux, wrt, as_module, options)


def _value_and_grad(
    name: str,
    function: Callable[..., PyTree],
    argnums: object,
    has_aux: bool,
    wrt: object,
    as_module: bool,
    options: dict[str, Any],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Lifts the transform that messages call ``name``."""
    chosen, many = diff_states(argnums, wrt)

    def split(result) -> tuple[PyTree, PyTree]:
        value, aux = separate_aux(result, has_aux, name)
        return _scalar(value, options["holomorphic"]), aux

    @wraps(function)
    def value_and_grad_function(*args, **kwargs):
        args, kwargs = inputs.by_position(function, args, kwargs, fill="gaps")
        once = SingleRunCall(name, function, args, kwargs)
        targets = diff_arguments(once, chosen, as_module)
        for target in targets:
            check_differentiable(once, target, **options)
        values, plain = once.graph.values(), list(once.arguments.plain)
        indices = sorted({entry.leaf for target in targets for entry in target.entries})
        positions = [target.position for target in targets if target.has_plain]

        def pure(some_values: list[object], some_plain: list[object]) -> tuple[PyTree, PyTree]:
            all_values = replaced(values, indices, some_values)
            all_plain = replaced(plain, positions, some_plain)
            return once.run_once(all_values, all_plain, once.arguments.plain_named, split)

        transformed = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True, **options)
        with explained_reverse_mode():
            (value, leaving), (value_grads, plain_grads) = transformed(
                [values[i] for i in indices], [plain[p] for p in positions]
            )
        aux = once.finish(leaving)
        of_plain = dict(zip(positions, plain_grads, strict=True))
        gradients = arrange_gradients(targets, indices, value_grads, of_plain)
        return ((value, aux) if has_aux else value), gradients if many else gradients[0]

    return value_and_grad_function


@decorator
def grad(
    function: Any = None,
    *,
    argnums: object = 0,
    has_aux: bool = False,
    wrt: object = Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    as_module: bool = False,
) -> Any:
    """Makes a function that returns the gradient of a scalar function.

    Args:
        function: As for ``value_and_grad``.
        argnums: As for ``value_and_grad``.
        has_aux: As for ``value_and_grad``; the result is then (gradient, aux).
        wrt: As for ``value_and_grad``.
        holomorphic: As in ``jax.grad``.
        allow_int: As in ``jax.grad``.
        as_module: As for ``value_and_grad``.

    Returns:
        A function of the same arguments that returns the gradient, or (gradient, aux).

    Raises:
        TransformError: As for ``value_and_grad``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> w = sx.Param(jnp.float32(3))
        >>> float(sx.grad(lambda w: w**2)(w))
        6.0
        >>> layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        >>> grads = sx.grad(lambda layer: layer(jnp.ones(2)).sum(), as_module=True)(layer)
        >>> type(grads).__name__, grads.bias.value.tolist()
        ('Linear', [1.0, 1.0, 1.0])
    """
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
    run = _value_and_grad("grad", function, argnums, has_aux, wrt, as_module, options)

    @wraps(function)
    def grad_function(*args: object, **kwargs: object):
        value, gradient = run(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_function


def separate_aux(result: object, has_aux: bool, name: str) -> tuple[PyTree, PyTree]:
    """Returns (what is differentiated, aux) of what a function returned."""
    if not has_aux:
        return result, None
    source = f"With has_aux=True the function given to sx.{name}"
    return binding.returned_pair(result, source, "(result, aux)")
