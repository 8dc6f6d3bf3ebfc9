# SPDX-License-Identifier: Apache-2.0
"""The layout of an optimizer's state: what it will hold, found without computing it.

A *transformation* is a gradient transformation in the sense of optax: an object with ``init(params)
-> state`` and ``update(updates, state, params) -> (updates, state)``. Its state is some pytree. A
*state leaf* is one array in it. The layout says for each leaf where it is, its shape and dtype,
which parameter it *follows* (it stands at that parameter's path, so it should be laid out like it),
and its *origin*: what ``init`` computes it from.

All of it comes from tracing ``init`` on shapes. Nothing is computed and nothing is allocated, so an
optimizer can be made for a model that does not exist yet.

Lazy values of an optimizer's state.

A *state value* knows its shape and dtype and computes its array when it is first needed. Most
leaves start as one number; each is then written by a small program straight into its shards. A leaf
that depends on parameters (a slow copy of the weights) is computed from the values that the model
has at that moment.

Unless it is told where to go, a state value goes where its parameter is: a state made after the
model was sharded, or before, ends up sharded like it. A leaf that follows no parameter is
replicated over the mesh that the parameters are on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Literal, Tracer
from shardax._core.array_ops import realise
from shardax._core.graph.paths import Path, PathKey
from shardax._core.graph.static import Static
from shardax._core.init.lazy import LazyValue
from shardax._core.variable import Variable
from shardax.partition.inventory import dimensions_of_state, plain_path

# --- Optimizer layout ---


class Transformation:
    """A gradient transformation as configuration.

    Its identity is what it was when it was made. Some schedules of optax change a variable of their
    own when they are first called, which would make a program compiled for them look outdated.

    Args:
        value: An object with ``init`` and ``update``, for instance from optax.
    """

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


class Fill(NamedTuple):
    """Origin of a leaf whose elements are all one number, whatever the parameters are."""

    value: Any

    @property
    def needs(self) -> tuple[int, ...]:
        """Positions of the parameters that the leaf depends on."""
        return ()


class CopyOf(NamedTuple):
    """Origin of a leaf that starts as a copy of a parameter."""

    position: int

    @property
    def needs(self) -> tuple[int, ...]:
        """Positions of the parameters that the leaf depends on."""
        return (self.position,)


class Computed(NamedTuple):
    """Origin of every other leaf: ``init`` must be run, with the parameters it needs."""

    needs: tuple[int, ...]


Origin = Fill | CopyOf | Computed


class StateLeaf(NamedTuple):
    """One array of an optimizer's state.

    Attributes:
        path: Where it is in the state; for a leaf that follows a parameter it ends in that
            parameter's path.
        shape: Its shape.
        dtype: Its dtype.
        follows: Position of the parameter it follows, or None.
        dims: For each dimension the dimension of that parameter it corresponds to, or None.
        origin: What ``init`` computes it from.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    follows: int | None
    dims: tuple[int | None, ...]
    origin: Origin


class StateLayout(NamedTuple):
    """The state of a transformation for parameters of given shapes.

    Attributes:
        leaves: The arrays, in the order of the state's pytree.
        treedef: The state's pytree, with arrays and static leaves.
        static: The leaves that are not arrays (strings, functions, ...), by position.
    """

    leaves: tuple[StateLeaf, ...]
    treedef: Any
    static: dict[int, Any]

    def join(self, arrays: Iterable[Any]) -> Any:
        """Makes the state from its arrays: the inverse of ``separate_arrays``."""
        remaining = iter(arrays)
        count = len(self.leaves) + len(self.static)
        leaves = [self.static[i] if i in self.static else next(remaining) for i in range(count)]
        return self.treedef.unflatten(leaves)


class Separated(NamedTuple):
    """A state taken apart.

    Attributes:
        keys: JAX key path of each array.
        arrays: The arrays.
        treedef: The state's pytree.
        static: The leaves that are not arrays, by position.
    """

    keys: list[Any]
    arrays: list[Any]
    treedef: Any
    static: dict[int, Any]


def separate_arrays(state: Any) -> Separated:
    """Takes a transformation's state apart into arrays and everything else."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(state)
    keys = [key for key, leaf in keyed if _is_array(leaf)]
    arrays = [leaf for _, leaf in keyed if _is_array(leaf)]
    static = {i: leaf for i, (_, leaf) in enumerate(keyed) if not _is_array(leaf)}
    return Separated(keys, arrays, treedef, static)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def layout_of(transformation: Transformation, params: Any) -> StateLayout:
    """Finds what the state of a transformation holds.

    Args:
        transformation: The transformation.
        params: The parameters as a ``State``, of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        The layout, remembered for transformations that do the same and parameters of the same
        paths, shapes and dtypes.

    Example:
        >>> import jax, jax.numpy as jnp, optax, shardax as sx
        >>> params = sx.State({"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
        >>> for leaf in layout_of(Transformation(optax.sgd(0.1, momentum=0.9)), params).leaves:
        ...     print(leaf.path, leaf.shape, leaf.dims, float(leaf.origin.value))
        (0, 'trace', 'kernel') (2, 3) (0, 1) 0.0
    """
    leaves, treedef = jax.tree.flatten(params)
    kinds = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    return _layout_of(transformation, treedef, kinds)


@functools.lru_cache(maxsize=64)
def _layout_of(transformation: Transformation, treedef: Any, kinds: tuple[Any, ...]) -> StateLayout:
    separated = Separated([], [], None, {})

    def init(leaves: list[Any]) -> list[Any]:
        nonlocal separated
        separated = separate_arrays(transformation.value.init(treedef.unflatten(leaves)))
        return separated.arrays

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    closed = jax.make_jaxpr(init)(shapes)
    inputs = [CopyOf(position) for position in range(len(shapes))]
    origins = _origins(closed.jaxpr, closed.consts, inputs)
    keyed = jax.tree_util.tree_flatten_with_path(treedef.unflatten(shapes))[0]
    known = {plain_path(key): position for position, (key, _) in enumerate(keyed)}
    paths = _unique([plain_path(key) for key in separated.keys])
    leaves = []
    for path, key, aval, origin in zip(
        paths, separated.keys, closed.out_avals, origins, strict=True
    ):
        follows = _followed(key, known)
        dims = None if follows is None else dimensions_of_state(aval.shape, kinds[follows][0])
        if dims is None:
            follows, dims = None, (None,) * len(aval.shape)
        if isinstance(origin, Fill):
            origin = Fill(np.asarray(origin.value).astype(aval.dtype))
        leaves.append(StateLeaf(path, tuple(aval.shape), aval.dtype, follows, dims, origin))
    return StateLayout(tuple(leaves), separated.treedef, separated.static)


# --- paths ----------------------------------------------------------------------------------------


def _unique(paths: list[Path]) -> list[Path]:
    """Returns the paths, changed where two leaves collide or one would stand above another."""
    taken: set[Path] = set()
    above = {path[:end] for path in paths for end in range(len(path))}
    found = []
    for position, path in enumerate(paths):
        if not path or path in taken or path in above:
            path = (*path, f"leaf_{position}")
        taken.add(path)
        found.append(path)
    return found


def _followed(key_path: Sequence[Any], known: dict[Path, int]) -> int | None:
    """Finds the parameter whose path a leaf's key path ends in (or passes through)."""
    for start, key in enumerate(key_path):
        if isinstance(key, PathKey):
            steps = plain_path(key_path[start:])
            for end in range(len(steps), -1, -1):
                if steps[:end] in known:
                    return known[steps[:end]]
    return None


# --- origins --------------------------------------------------------------------------------------


def _origins(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Origin]) -> list[Origin]:
    """Finds the origin of each output of a jaxpr, given those of its inputs."""
    known: dict[Any, Origin] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))

    def read(atom: Any) -> Origin:
        return _constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = _outputs(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constant(value: Any) -> Origin:
    return Fill(value) if np.ndim(value) == 0 and _has_number(value) else Computed(())


def _has_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is None or not jax.numpy.issubdtype(dtype, jax.dtypes.extended)


def _outputs(equation: Any, inputs: Sequence[Origin]) -> list[Origin]:
    name, params = equation.primitive.name, equation.params
    if name in ("jit", "pjit", "closed_call"):
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        return _origins(inner.jaxpr, inner.consts, inputs)
    if len(inputs) == 1 and name == "copy":
        return [inputs[0]]
    if len(inputs) == 1 and isinstance(inputs[0], Fill):
        if name == "broadcast_in_dim":
            return [inputs[0]]
        if name == "convert_element_type":
            return [Fill(np.asarray(inputs[0].value).astype(params["new_dtype"]))]
    needs = tuple(sorted({position for origin in inputs for position in origin.needs}))
    return [Computed(needs)] * len(equation.outvars)


# --- Optimizer values ---


class Parameters:
    """The parameters that an optimizer's state was made for, as the state's lazy values see them.

    Args:
        transformation: The gradient transformation.
        variables: The parameters, in the order of the ``State`` given to it.
        treedef: The pytree of that ``State``.
    """

    def __init__(
        self, transformation: Transformation, variables: Sequence[Variable[Any]], treedef: Any
    ) -> None:
        self.transformation = transformation
        self.treedef = treedef
        self.places = [
            (variable, position)
            for variable in variables
            for position in range(len(jax.tree.leaves(variable._value)))
        ]

    def peek(self, position: int) -> Any:
        """Returns a parameter's array, or its stand-in if it is lazy or abstract."""
        variable, inner = self.places[position]
        return jax.tree.leaves(variable._value)[inner]

    def array(self, position: int) -> Any:
        """Returns a parameter's array, materialising it if it is lazy."""
        variable, inner = self.places[position]
        value = variable._value
        if isinstance(value, (np.ndarray, LazyValue)):
            value = variable._value = realise(value, variable._owner)
        return jax.tree.leaves(value)[inner]

    def sharding_for(self, leaf: StateLeaf) -> Any:
        """Returns where a state leaf belongs by where the parameters are, or None."""
        if leaf.follows is None:
            known = (_named_sharding(self.peek(i)) for i in range(len(self.places)))
            found = next((sharding for sharding in known if sharding is not None), None)
            return None if found is None else NamedSharding(found.mesh, PartitionSpec())
        sharding = _named_sharding(self.peek(leaf.follows))
        if sharding is None:
            return None
        entries = dict(enumerate(sharding.spec))
        spec = PartitionSpec(*(None if d is None else entries.get(d) for d in leaf.dims))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _named_sharding(value: Any) -> NamedSharding | None:
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return None
    return value.sharding if isinstance(value.sharding, NamedSharding) else None


class StateValue(LazyValue):
    """A leaf of an optimizer's state that has not been computed yet.

    Args:
        leaf: What is known of it.
        parameters: The parameters it belongs to.
        position: Which leaf of the state it is.
    """

    __slots__ = ("leaf", "parameters", "position")

    def __init__(self, leaf: StateLeaf, parameters: Parameters, position: int) -> None:
        self.leaf = leaf
        self.parameters = parameters
        self.position = position
        self.shape = leaf.shape
        self.dtype = leaf.dtype

    def compute(self, sharding: Any = None) -> jax.Array:
        """Computes the leaf; without a sharding, where its parameter is."""
        leaf, parameters = self.leaf, self.parameters
        if sharding is None:
            sharding = parameters.sharding_for(leaf)
        origin = leaf.origin
        if isinstance(origin, Fill):
            return _fill_program(leaf.shape, leaf.dtype, sharding)(origin.value)
        arrays = [parameters.array(position) for position in origin.needs]
        if isinstance(origin, CopyOf):
            return _copy_program(sharding)(arrays[0])
        kinds = tuple((tuple(p.shape), p.dtype) for p in map(parameters.peek, self._positions()))
        program = _leaf_program(
            parameters.transformation,
            parameters.treedef,
            kinds,
            origin.needs,
            self.position,
            sharding,
        )
        return program(*arrays)

    def _positions(self) -> range:
        return range(len(self.parameters.places))


@functools.lru_cache(maxsize=4096)
def _fill_program(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    def fill(value: Any) -> jax.Array:
        return jnp.full(shape, value, dtype)

    return jax.jit(fill, out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def _copy_program(sharding: Any) -> Callable[[Any], jax.Array]:
    # A copy in memory, because a train step that donates the model and the optimizer must not
    # donate one buffer twice.
    return jax.jit(lambda value: jnp.copy(value), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _leaf_program(
    transformation: Transformation,
    treedef: Any,
    kinds: tuple[Any, ...],
    needs: tuple[int, ...],
    position: int,
    sharding: Any,
) -> Callable[..., jax.Array]:
    """Makes a program that runs ``init`` for one leaf; the compiler drops the rest."""

    def compute_leaf(*arrays: Any) -> jax.Array:
        given = dict(zip(needs, arrays, strict=True))
        leaves = [
            given[i] if i in given else jnp.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(kinds)
        ]
        leaf = separate_arrays(transformation.value.init(treedef.unflatten(leaves))).arrays[
            position
        ]
        return jnp.asarray(leaf)

    return jax.jit(compute_leaf, out_shardings=sharding)
