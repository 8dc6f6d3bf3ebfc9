# SPDX-License-Identifier: Apache-2.0
"""Lazy values of an optimizer's state.

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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.arraylike import realise
from shardax.core.lazy import LazyValue
from shardax.core.variables import Variable
from shardax.train.optimizer_layout import (
    CopyOf,
    Fill,
    StateLeaf,
    Transformation,
    separate_arrays,
)


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
