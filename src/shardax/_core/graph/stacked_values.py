# SPDX-License-Identifier: Apache-2.0
"""Values stacked along a new first dimension, and their parts.

``stack_values`` puts like values together; ``part_of`` takes one *part* out again, and
``with_part`` replaces one. Lazy values stay lazy: a ``LazyStack`` is the recipes of its parts,
which one program runs together where they are alike, each with keys of its own, so the numbers are
those of the parts to the last bit. NumPy arrays and shapes alone stay what they are, so stacking
what was just built runs no JAX operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.init.keys import KeySource
from shardax._core.init.lazy import LazyValue, Recipe
from shardax._core.init.programs import InitializerProgram

# --- lazy values ----------------------------------------------------------------------------------


class LazyStack(Recipe):
    """Lazy values of one shape and dtype, stacked."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LazyValue]) -> None:
        self.parts = tuple(parts)
        self.shape = (len(self.parts), *self.parts[0].shape)
        self.dtype = self.parts[0].dtype

    @property
    def sources(self) -> tuple[KeySource, ...]:
        recipes = [part for part in self.parts if isinstance(part, Recipe)]
        return tuple(source for recipe in recipes for source in recipe.sources)

    @property
    def is_known(self) -> bool:
        return super().is_known and self._parts_are_alike()

    @property
    def likeness(self) -> Hashable:
        # One that has parts of several kinds is like itself alone.
        first = self.parts[0]
        if not isinstance(first, Recipe) or first.likeness is first:
            return self
        for part in self.parts[1:]:
            if type(part) is not type(first) or part.likeness != first.likeness:
                return self
        return len(self.parts), type(first), first.likeness

    def _parts_are_alike(self) -> bool:
        """Whether one program makes all parts."""
        return self.likeness is not self

    def program(
        self, sharding: Sharding | None = None, lead: tuple[int, ...] = ()
    ) -> InitializerProgram:
        first = self.parts[0]
        assert isinstance(first, Recipe)
        return first.program(sharding, (*lead, len(self.parts)))

    def run(self, program: InitializerProgram, words: Sequence[Leaf]) -> jax.Array:
        """Runs the program."""
        if not words:
            return program(None)
        stacked = jnp.stack(words) if _is_traced(words) else np.stack(words)
        return program(stacked.reshape(*self._stacked_sizes(), -1))

    def _stacked_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the leading dimensions that stacking made."""
        first = self.parts[0]
        if isinstance(first, LazyStack):
            return (len(self.parts), *first._stacked_sizes())
        return (len(self.parts),)

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        if self._parts_are_alike():
            return super().compute(sharding)

        if isinstance(sharding, NamedSharding):
            part_sharding = without_lead(sharding)
            return _stack_program(sharding)([part.compute(part_sharding) for part in self.parts])

        stacked = jnp.stack([part.compute() for part in self.parts])
        return stacked if sharding is None else jax.device_put(stacked, sharding)


class LazyPart(LazyValue):
    """One part of a lazy value that is no stack of parts."""

    __slots__ = ("index", "read")

    def __init__(self, read: Callable[[], jax.Array], stacked: LazyValue, index: int) -> None:
        self.read = read  # returns the stacked array
        self.index = index
        self.shape = stacked.shape[1:]
        self.dtype = stacked.dtype

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        part = self.read()[self.index]
        return part if sharding is None else jax.device_put(part, sharding)


# --- stacking -------------------------------------------------------------------------------------


def stack_values(values: Sequence[PyTree]) -> PyTree:
    """Returns the values of like Variables, stacked."""
    first = values[0]
    if not _is_leaf(first):
        return jax.tree.map(lambda *leaves: stack_values(leaves), first, *values[1:])

    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return _stack_shapes(values)
    if all(isinstance(value, LazyValue) for value in values):
        return LazyStack(values)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)

    arrays = [value.compute() if isinstance(value, LazyValue) else value for value in values]
    sharding = None if _is_traced(arrays) else named_sharding(arrays[0])
    if sharding is None:
        return jnp.stack(arrays)
    return _stack_program(with_lead(sharding))(arrays)


def _stack_shapes(values: Sequence[Leaf]) -> jax.ShapeDtypeStruct:
    """Returns the shape of stacked values, of which at least one is only a shape."""
    shardings = [named_sharding(value) for value in values]
    sharding = next((with_lead(item) for item in shardings if item is not None), None)
    shape = (len(values), *values[0].shape)
    return jax.ShapeDtypeStruct(shape, values[0].dtype, sharding=sharding)


@functools.lru_cache(maxsize=256)
def _stack_program(sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(lambda arrays: jnp.stack(arrays), out_shardings=sharding)


# --- parts ----------------------------------------------------------------------------------------


def part_of(value: PyTree, index: int, read: Callable[[], Any] | None = None) -> PyTree:
    """Returns one part of a stacked value; lazy ones stay lazy.

    Args:
        value: The stacked value.
        index: Which part.
        read: Returns the stacked array of a lazy value; by default it is computed for the part.
    """
    if not _is_leaf(value):
        return jax.tree.map(lambda leaf: part_of(leaf, index), value)

    if isinstance(value, LazyStack):
        return value.parts[index]
    if isinstance(value, LazyValue):
        return LazyPart(read or value.compute, value, index)
    if isinstance(value, jax.ShapeDtypeStruct):
        stacked_sharding = named_sharding(value)
        sharding = None if stacked_sharding is None else without_lead(stacked_sharding)
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype, sharding=sharding)
    return np.array(value[index]) if isinstance(value, np.ndarray) else value[index]


def with_part(value: PyTree, index: int, new: PyTree) -> PyTree:
    """Returns a stacked value with one part replaced."""
    return jax.tree.map(lambda leaf, part: _with_part(leaf, index, part), value, new)


def _with_part(leaf: Leaf, index: int, part: Leaf) -> np.ndarray[Any, Any] | jax.Array:
    if isinstance(leaf, np.ndarray) and isinstance(part, np.ndarray):
        changed = leaf.copy()
        changed[index] = part
        return changed

    leaf = jnp.asarray(leaf)
    sharding = None if _is_traced([leaf, part]) else named_sharding(leaf)
    if sharding is None:
        return leaf.at[index].set(part)
    part = jax.device_put(part, without_lead(sharding))
    return _write_program(sharding)(leaf, part, index)


@functools.lru_cache(maxsize=256)
def _write_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def write(leaf: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0)

    return jax.jit(write, out_shardings=sharding)


# --- where parts are ------------------------------------------------------------------------------


def named_sharding(value: object) -> NamedSharding | None:
    """Returns an array's sharding over a mesh of devices, or None."""
    if isinstance(value, (LazyValue, Tracer)):
        return None
    sharding: Sharding | None = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    return None


def with_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of stacked arrays: parts are where they were."""
    spec = PartitionSpec(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def without_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one part of a stacked array."""
    spec = PartitionSpec(*sharding.spec[1:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


# --- kinds and forms of values --------------------------------------------------------------------


def _is_leaf(value: object) -> bool:
    is_value = isinstance(value, (LazyValue, jax.ShapeDtypeStruct))
    return is_value or jax.tree_util.all_leaves((value,))


def _is_traced(values: Sequence[object]) -> bool:
    return any(isinstance(value, Tracer) for value in values)


def form_of(value: PyTree, lead: int = 0) -> Hashable:
    """Returns structure, shapes and dtypes of a value, without some leading dimensions."""
    leaves, treedef = jax.tree.flatten(value)
    return treedef, tuple((tuple(leaf.shape[lead:]), leaf.dtype) for leaf in leaves)


def form_text(value: PyTree, lead: int = 0) -> str:
    """Returns shapes and dtypes of a value in words, without some leading dimensions."""
    forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[lead:])}", value)
    text = forms if isinstance(forms, str) else str(forms).replace("'", "")
    return f"the abstract {text}" if isinstance(value, jax.ShapeDtypeStruct) else text
