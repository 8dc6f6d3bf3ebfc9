# SPDX-License-Identifier: Apache-2.0
"""Layout and lazy values of an optimizer's state.

Tracing a transformation's ``init`` on shapes tells for each array of its state where it is, its
shape and dtype, which parameter it follows (it stands at that parameter's path, so it is laid out
like it), and what it is computed from; nothing is computed. A ``StateValue`` computes its leaf when
it is first needed: mostly one number, written straight into the shards; else from the values that
the parameters have at that moment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax import State, Variable
from shardax.extend import (
    LazyValue,
    Path,
    PyTree,
    Static,
    dimensions_of_state,
    path_of_keys,
    stored_value,
)


class Transformation:
    """Gradient transformation as configuration."""

    # Identified by what it was when it was made: some schedules of optax change a variable of their
    # own when they are first called, which would make a program compiled for them look outdated.

    __slots__ = ("_key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = Static(value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transformation) and self._key == other._key

    def __repr__(self) -> str:
        return repr(self.value)


class InitialValue(NamedTuple):
    """Inputs of ``init`` for the value of a leaf."""

    needs: tuple[int, ...]  # positions of the parameters that it depends on
    number: Any = None  # of all elements, where they depend on none
    is_copy: bool = False  # of the one parameter that it needs, perhaps in a wider dtype


class StateLeaf(NamedTuple):
    """One array of an optimizer's state."""

    path: Path  # ends in the path of the parameter that the leaf follows
    shape: tuple[int, ...]
    dtype: Any
    follows: int | None  # position of a parameter
    dims: tuple[int | None, ...]  # for each dimension that of the parameter it corresponds to
    initial: InitialValue


class StateLayout(NamedTuple):
    """State of a transformation for parameters of given shapes."""

    leaves: tuple[StateLeaf, ...]  # in the order of the state's pytree
    treedef: Any
    static: dict[int, Any]  # leaves that are no arrays (strings, functions, ...), by position

    def join(self, arrays: Iterable[object]) -> PyTree:
        """Makes the state from its arrays: the inverse of ``separate_arrays``."""
        remaining = iter(arrays)
        count = len(self.leaves) + len(self.static)
        leaves = [self.static[i] if i in self.static else next(remaining) for i in range(count)]
        return self.treedef.unflatten(leaves)


class StatePath(NamedTuple):
    """Path of one leaf of a state."""

    outside: Path  # in what the transformation makes
    inside: Path | None  # from there in a State arranged like the parameters, if it is in one

    @property
    def whole(self) -> Path:
        """The path in the state."""
        return (*self.outside, *(self.inside or ()))


class SeparatedState(NamedTuple):
    """Arrays of a state with paths, and everything else."""

    paths: list[StatePath]
    arrays: list[Any]
    treedef: Any
    static: dict[int, Any]


def separate_arrays(state: object) -> SeparatedState:
    """Takes a transformation's state apart into arrays and everything else."""
    kinds = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    leaves = list(_leaves_with_path(state))
    paths = [path for path, leaf in leaves if isinstance(leaf, kinds)]
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, kinds)]
    static = {i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, kinds)}
    return SeparatedState(paths, arrays, jax.tree.structure(state), static)


def _leaves_with_path(tree: object) -> Iterator[tuple[StatePath, Any]]:
    """Yields the leaves of a transformation's state, or of parameters, in JAX's order."""
    parts = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda part: isinstance(part, State))
    for keys, part in parts:
        outside = path_of_keys(keys)
        if not isinstance(part, State):
            yield StatePath(outside, None), part
            continue
        for path, value in part.flat().items():
            for keys_below, leaf in jax.tree_util.tree_leaves_with_path(value):
                yield StatePath(outside, (*path, *path_of_keys(keys_below))), leaf


def layout_of(transformation: Transformation, params: object) -> StateLayout:
    """Finds the contents of a transformation's state for parameters or shapes."""
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    return _layout_of(transformation, treedef, shapes)


@functools.lru_cache(maxsize=64)
def _layout_of(transformation: Transformation, treedef, shapes: tuple[Any, ...]) -> StateLayout:
    separated = SeparatedState([], [], None, {})

    def init(leaves: list[Any]) -> list[Any]:
        nonlocal separated
        state = separate_arrays(transformation.value.init(treedef.unflatten(leaves)))
        separated = state._replace(arrays=[])  # those of a trace do not outlive it
        return state.arrays

    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    closed = jax.make_jaxpr(init)(structs)
    inputs = [InitialValue((position,), is_copy=True) for position in range(len(structs))]
    initials = _initial_values(closed.jaxpr, closed.consts, inputs)
    paths_of_params = _leaves_with_path(treedef.unflatten(structs))
    parameters = {path.inside: position for position, (path, _) in enumerate(paths_of_params)}
    leaves = []
    for path, state_path, aval, initial in zip(
        _unique([path.whole for path in separated.paths]),
        separated.paths,
        closed.out_avals,
        initials,
        strict=True,
    ):
        follows = _followed(state_path.inside, parameters)
        dims = None if follows is None else dimensions_of_state(aval.shape, shapes[follows][0])
        if dims is None:
            follows, dims = None, (None,) * len(aval.shape)
        if initial.number is not None:
            initial = InitialValue((), np.asarray(initial.number).astype(aval.dtype))
        leaves.append(StateLeaf(path, tuple(aval.shape), aval.dtype, follows, dims, initial))
    return StateLayout(tuple(leaves), separated.treedef, separated.static)


def _unique(paths: list[Path]) -> list[Path]:
    """Returns the paths, changed in case of collisions of leaves."""
    used: set[Path] = set()
    above = {path[:end] for path in paths for end in range(len(path))}
    unique = []
    for position, path in enumerate(paths):
        if not path or path in used or path in above:
            path = (*path, f"leaf_{position}")
        used.add(path)
        unique.append(path)
    return unique


def _followed(path: Path | None, parameters: dict[Path | None, int]) -> int | None:
    """Finds the parameter that a path in a State of the transformation leads to."""
    # The path may go on below the parameter.
    if path is None:
        return None
    ends = range(len(path), -1, -1)
    return next((parameters[path[:end]] for end in ends if path[:end] in parameters), None)


def _initial_values(
    jaxpr, consts: Sequence[Any], inputs: Sequence[InitialValue]
) -> list[InitialValue]:
    """Finds the inputs needed by each output of a jaxpr."""
    values: dict[Any, InitialValue] = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))

    def read(atom) -> InitialValue:
        # A literal has its value; a variable of the program has none.
        return _constant(atom.val) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        outputs = _outputs(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constant(value) -> InitialValue:
    dtype = getattr(value, "dtype", None)
    is_number = dtype is None or not jnp.issubdtype(dtype, jax.dtypes.extended)
    return InitialValue((), value if np.ndim(value) == 0 and is_number else None)


def _outputs(equation, inputs: Sequence[InitialValue]) -> list[InitialValue]:
    name, params = equation.primitive.name, equation.params

    if name in ("jit", "pjit", "closed_call"):
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        return _initial_values(inner.jaxpr, inner.consts, inputs)

    if len(inputs) == 1:
        (only,) = inputs
        if name == "copy" or (name == "broadcast_in_dim" and only.number is not None):
            return [only]
        if name == "convert_element_type" and only.number is not None:
            return [InitialValue((), np.asarray(only.number).astype(params["new_dtype"]))]
        if name == "convert_element_type" and only.is_copy:
            narrow, wide = equation.invars[0].aval.dtype, params["new_dtype"]
            if wider_dtype(narrow, wide) == wide:
                return [only]

    needs = tuple(sorted({position for value in inputs for position in value.needs}))
    return [InitialValue(needs)] * len(equation.outvars)


def wider_dtype(first: jax.typing.DTypeLike, second: jax.typing.DTypeLike) -> np.dtype:
    """Returns what two dtypes promote to, also where a user forbids promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(first, second)


def named_sharding(value: object) -> NamedSharding | None:
    """Returns an array's sharding over a mesh of devices, or None."""
    if isinstance(value, (LazyValue, Tracer)):
        return None
    sharding = getattr(value, "sharding", None)
    is_named = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if is_named else None


class TrainedParameters:
    """Parameters of an optimizer, for the lazy values of its state."""

    def __init__(
        self, transformation: Transformation, variables: Sequence[Variable], treedef: Any
    ) -> None:
        self.transformation = transformation
        self.treedef = treedef  # of the State of parameters
        self.places = [
            (variable, position)
            for variable in variables
            for position in range(len(jax.tree.leaves(stored_value(variable))))
        ]

    def peek(self, position: int) -> Any:
        """Returns a parameter's array, or its lazy or abstract stand-in."""
        variable, inner = self.places[position]
        return jax.tree.leaves(stored_value(variable))[inner]

    def array(self, position: int) -> Any:
        """Returns a parameter's array, materialising it if it is lazy."""
        variable, inner = self.places[position]
        return jax.tree.leaves(variable.value)[inner]

    def sharding_for(self, leaf: StateLeaf) -> NamedSharding | None:
        """Returns the sharding of a state leaf, from the parameters' places."""
        if leaf.follows is None:
            for position in range(len(self.places)):
                if (sharding := named_sharding(self.peek(position))) is not None:
                    return NamedSharding(sharding.mesh, PartitionSpec())
            return None
        sharding = named_sharding(self.peek(leaf.follows))
        if sharding is None:
            return None
        entries = dict(enumerate(sharding.spec))
        spec = PartitionSpec(*(None if d is None else entries.get(d) for d in leaf.dims))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


class StateValue(LazyValue):
    """Lazy value of one leaf of an optimizer's state."""

    __slots__ = ("leaf", "parameters", "position")

    def __init__(self, leaf: StateLeaf, parameters: TrainedParameters, position: int) -> None:
        self.leaf = leaf
        self.parameters = parameters
        self.position = position  # of the leaf in the state
        self.shape = leaf.shape
        self.dtype = leaf.dtype

    def own_sharding(self) -> NamedSharding | None:
        """Returns the sharding that follows from that of its parameter."""
        return self.parameters.sharding_for(self.leaf)

    def compute(self, sharding: Any = None) -> jax.Array:
        """Computes the leaf; without a sharding, at its parameter's place."""
        leaf, parameters, initial = self.leaf, self.parameters, self.leaf.initial
        if sharding is None:
            sharding = self.own_sharding()
        if initial.number is not None:
            if _is_small(leaf) and _is_reached(sharding):  # sooner than a program for the shape
                return _on_device(np.full(leaf.shape, initial.number, leaf.dtype), sharding)
            return _fill_program(leaf.shape, leaf.dtype, sharding)(initial.number)
        arrays = [parameters.array(position) for position in initial.needs]
        if initial.is_copy:
            return _copy_program(sharding, leaf.dtype)(arrays[0])
        peeked = map(parameters.peek, range(len(parameters.places)))
        shapes = tuple((tuple(array.shape), array.dtype) for array in peeked)
        key = (parameters.transformation, parameters.treedef, shapes, initial.needs, self.position)
        return _leaf_program(*key, sharding)(*arrays)


def _on_device(array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """Returns an array of NumPy in device memory of its own."""
    # On CPUs what is placed may still be NumPy's memory, also with may_alias=False, which a step
    # that donates it could not reuse. The copy is awaited, as that memory may change.
    placed = jax.device_put(array, sharding)
    return jax.block_until_ready(jax.device_put(placed, may_alias=False))


_SMALL = 2**20  # bytes of an array of one number that needs no program


def _is_small(leaf: StateLeaf) -> bool:
    return math.prod(leaf.shape) * leaf.dtype.itemsize <= _SMALL


def _is_reached(sharding: NamedSharding | None) -> bool:
    """Whether this process writes all shards, or no mesh decides."""
    if sharding is None:
        return jax.sharding.get_abstract_mesh().empty
    return sharding.is_fully_addressable


@functools.lru_cache(maxsize=4096)
def _fill_program(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, sharding
) -> Callable[[Any], jax.Array]:
    def fill(value) -> jax.Array:
        return jnp.full(shape, value, dtype)

    return jax.jit(fill, out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def _copy_program(sharding, dtype: jax.typing.DTypeLike) -> Callable[[Any], jax.Array]:
    # A copy in memory, because a train step that donates the model and the optimizer must not
    # donate one buffer twice.
    return jax.jit(lambda value: jnp.copy(value).astype(dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _leaf_program(
    transformation: Transformation,
    treedef,
    shapes: tuple[Any, ...],
    needs: tuple[int, ...],
    position: int,
    sharding: object,
) -> Callable[..., jax.Array]:
    """Makes a program of ``init`` for one leaf."""
    # The compiler drops the rest.

    def compute_leaf(*arrays: object) -> jax.Array:
        inputs = dict(zip(needs, arrays, strict=True))
        leaves = [
            inputs[i] if i in inputs else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(shapes)
        ]
        state = transformation.value.init(treedef.unflatten(leaves))
        return jnp.asarray(separate_arrays(state).arrays[position])

    return jax.jit(compute_leaf, out_shardings=sharding)
