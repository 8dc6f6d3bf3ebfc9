# SPDX-License-Identifier: Apache-2.0
"""Stacked values: the values of several like Variables, as one value with a leading dimension.

To *stack* is to put values together along a new first dimension; a *part* is one of them again.
Lazy values stay lazy: a ``LazyStack`` is the recipes of its parts, which one program runs together
where they are alike, each with keys of its own. So the numbers are those of the parts, to the last
bit. NumPy arrays stay NumPy arrays, and shapes alone stay shapes, so that stacking what was just
built runs no JAX operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.initializers import InitializerProgram
from shardax.core.keys import KeySource
from shardax.core.lazy import LazyValue, Recipe


class LazyStack(Recipe):
    """Lazy values of one shape and dtype, stacked.

    Args:
        parts: The lazy values.

    Example:
        >>> import jax, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> normal = jax.nn.initializers.normal()
        >>> parts = [sx.Init(normal, (2, 3), rngs=rngs) for _ in range(4)]
        >>> stacked = LazyStack(parts)
        >>> stacked, bool((stacked.compute()[1] == parts[1].compute()).all())
        (LazyStack(float32[4, 2, 3]), True)
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LazyValue]) -> None:
        self.parts = tuple(parts)
        self.shape = (len(self.parts), *self.parts[0].shape)
        self.dtype = self.parts[0].dtype

    @property
    def sources(self) -> tuple[KeySource, ...]:
        """The sources of all parts' keys, in order."""
        recipes = [part for part in self.parts if isinstance(part, Recipe)]
        return tuple(source for recipe in recipes for source in recipe.sources)

    @property
    def is_known(self) -> bool:
        """Whether one program makes all parts."""
        return super().is_known and self.likeness is not self

    @property
    def likeness(self) -> Hashable:
        """See ``Recipe``; of parts that are not alike, this object itself."""
        first = self.parts[0]
        if not isinstance(first, Recipe) or first.likeness is first:
            return self
        for part in self.parts[1:]:
            if type(part) is not type(first) or part.likeness != first.likeness:
                return self
        return len(self.parts), type(first), first.likeness

    def program(self, sharding: Any = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        """Returns the program of one part, repeated over all."""
        first = self.parts[0]
        assert isinstance(first, Recipe)
        return first.program(sharding, (*lead, len(self.parts)))

    def run(self, program: InitializerProgram, words: Sequence[Any]) -> jax.Array:
        """Runs the program."""
        if not words:
            return program(None)
        stacked = jnp.stack(words) if _is_traced(words) else np.stack(words)
        return program(stacked.reshape(*self._lead(), -1))

    def _lead(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (len(self.parts), *(first._lead() if isinstance(first, LazyStack) else ()))

    def compute(self, sharding: Any = None) -> jax.Array:
        """Makes the array; with a sharding, straight into its shards."""
        if self.likeness is not self:
            return super().compute(sharding)
        if isinstance(sharding, NamedSharding):
            there = without_lead(sharding)
            return _stack_program(sharding)([part.compute(there) for part in self.parts])
        stacked = jnp.stack([part.compute() for part in self.parts])
        return stacked if sharding is None else jax.device_put(stacked, sharding)


class LazyPart(LazyValue):
    """One part of a stacked value that is lazy but no stack of its parts.

    Args:
        read: Returns the stacked array.
        whole: The lazy stacked value.
        index: Which part.
    """

    __slots__ = ("index", "read")

    def __init__(self, read: Callable[[], Any], whole: LazyValue, index: int) -> None:
        self.read = read
        self.index = index
        self.shape = whole.shape[1:]
        self.dtype = whole.dtype

    def compute(self, sharding: Any = None) -> jax.Array:
        """Makes the stacked array and takes the part."""
        part = self.read()[self.index]
        return part if sharding is None else jax.device_put(part, sharding)


# --- putting together ----------------------------------------------------------------------------


def stack_values(values: Sequence[Any]) -> Any:
    """Stacks the values of like Variables.

    Args:
        values: At least one; pytrees of one structure, whose leaves have one shape and dtype.

    Returns:
        A value with a leading dimension of their number.

    Example:
        >>> import numpy as np
        >>> stack_values([np.uint32([1, 2]), np.uint32([3, 4])]).tolist()
        [[1, 2], [3, 4]]
    """
    first = values[0]
    if not _is_leaf(first):
        return jax.tree.map(lambda *leaves: stack_values(leaves), first, *values[1:])
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return _stacked_struct(values)
    if all(isinstance(value, LazyValue) for value in values):
        return LazyStack(values)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.stack(values)
    arrays = [value.compute() if isinstance(value, LazyValue) else value for value in values]
    sharding = None if _is_traced(arrays) else _named_sharding(arrays[0])
    if sharding is None:
        return jnp.stack(arrays)
    return _stack_program(with_lead(sharding))(arrays)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (LazyValue, jax.ShapeDtypeStruct)) or jax.tree_util.all_leaves(
        (value,)
    )


def _is_traced(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tracer) for value in values)


def _named_sharding(value: Any) -> NamedSharding | None:
    sharding = getattr(value, "sharding", None)
    known = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if known else None


def with_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of stacked arrays: parts are where they were."""
    spec = PartitionSpec(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def without_lead(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one part of a stacked array."""
    spec = PartitionSpec(*sharding.spec[1:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _stacked_struct(values: Sequence[Any]) -> jax.ShapeDtypeStruct:
    known = [_named_sharding(value) for value in values]
    sharding = next((with_lead(item) for item in known if item is not None), None)
    shape = (len(values), *values[0].shape)
    return jax.ShapeDtypeStruct(shape, values[0].dtype, sharding=sharding)


@functools.lru_cache(maxsize=256)
def _stack_program(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(lambda arrays: jnp.stack(arrays), out_shardings=sharding)


# --- taking apart --------------------------------------------------------------------------------


def part_of(value: Any, index: int, read: Callable[[], Any] | None = None) -> Any:
    """Returns one part of a stacked value; lazy ones stay lazy.

    Args:
        value: A value of which every array has a leading dimension.
        index: Which part, from 0.
        read: Returns the value materialised, for lazy values that cannot be taken apart; None to
            compute it.

    Example:
        >>> import numpy as np
        >>> part_of({"a": np.arange(6).reshape(3, 2)}, 1)["a"].tolist()
        [2, 3]
    """
    if not _is_leaf(value):
        return jax.tree.map(lambda leaf: part_of(leaf, index), value)
    if isinstance(value, LazyStack):
        return value.parts[index]
    if isinstance(value, LazyValue):
        return LazyPart(read or value.compute, value, index)
    if isinstance(value, jax.ShapeDtypeStruct):
        known = _named_sharding(value)
        sharding = None if known is None else without_lead(known)
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype, sharding=sharding)
    return np.array(value[index]) if isinstance(value, np.ndarray) else value[index]


def with_part(value: Any, index: int, new: Any) -> Any:
    """Returns a stacked value with one part replaced.

    Args:
        value: Of arrays, none of them lazy.
        index: Which part, from 0.
        new: Its new value, of the same structure, shapes and dtypes.

    Example:
        >>> import numpy as np
        >>> with_part(np.zeros((2, 2), np.int32), 1, np.int32([3, 4])).tolist()
        [[0, 0], [3, 4]]
    """
    return jax.tree.map(lambda leaf, part: _with_part(leaf, index, part), value, new)


def _with_part(leaf: Any, index: int, part: Any) -> Any:
    if isinstance(leaf, np.ndarray) and isinstance(part, np.ndarray):
        changed = leaf.copy()
        changed[index] = part
        return changed
    leaf = jnp.asarray(leaf)
    sharding = None if _is_traced([leaf, part]) else _named_sharding(leaf)
    if sharding is None:
        return leaf.at[index].set(part)
    part = jax.device_put(part, without_lead(sharding))
    return _write_program(sharding)(leaf, part, index)


@functools.lru_cache(maxsize=256)
def _write_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def write(leaf: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, part, index, 0)

    return jax.jit(write, out_shardings=sharding)
