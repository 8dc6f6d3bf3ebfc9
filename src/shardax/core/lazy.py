# SPDX-License-Identifier: Apache-2.0
"""Lazy values: parameters that exist as a recipe until someone needs the array.

A *lazy value* knows its shape and dtype and how to compute its array, but holds none. Building a
model from lazy values runs no JAX operation and takes no memory. To *materialise* is to run the
recipe: on first read, when a model is first passed to a compiled function, or by ``shardax.shard``,
    which writes each array straight into its shards.

A *key source* is the recipe of a random key: a root (an integer seed or a key) and the integers to
fold into it. It needs no JAX operation either, until its key is asked for.

Every recipe runs as one small compiled program per distinct (initializer, shape, dtype, sharding);
the same program whether sharded or not, so that the numbers are the same to the last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax.core._jax import Tracer
from shardax.core.errors import MissingRngsError
from shardax.core.static import Static

Initializer = Callable[..., Any]


class KeySource(NamedTuple):
    """The recipe of a random key.

    Attributes:
        root: An integer seed or a typed key array of shape ().
        folds: Integers folded into the root, in order (``jax.random.fold_in``).
    """

    root: Any
    folds: tuple[int, ...] = ()

    def fold(self, *data: int) -> KeySource:
        """Returns the source with more integers folded in."""
        return KeySource(self.root, self.folds + data)

    def root_key(self) -> jax.Array:
        """Returns the root as a typed key array of shape ()."""
        return _seed_key(self.root, _prng_name()) if isinstance(self.root, int) else self.root


def _prng_name() -> str:
    # JAX makes its settings attributes at run time, so the type checker cannot know them.
    return str(jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=256)
def _seed_key(seed: int, impl: str) -> jax.Array:
    with jax.ensure_compile_time_eval():
        return jax.random.key(seed, impl=impl)


def _fold_all(key: jax.Array, folds: Any, count: int) -> jax.Array:
    for position in range(count):
        key = jax.random.fold_in(key, folds[position])
    return key


class LazyValue:
    """Base of recipes. ``shape`` and ``dtype`` are known; ``compute`` makes the array.

    Attributes:
        shape: Shape of the array.
        dtype: Its dtype, canonical for the current JAX configuration.
    """

    __slots__ = ("dtype", "shape")
    shape: tuple[int, ...]
    dtype: Any

    def compute(self, sharding: Any = None) -> jax.Array:
        """Runs the recipe; with a sharding, straight into its shards."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Init(LazyValue):
    """A lazy value made by an initializer such as those of ``jax.nn.initializers``.

    Args:
        initializer: Called as ``initializer(key, shape, dtype)``.
        shape: Shape of the array.
        dtype: Its dtype; made canonical (float64 becomes float32 unless x64 is enabled).
        stream: Name of the random stream to draw the key from, or a stream itself
            (``rngs.params``).
        rngs: The ``Rngs`` that holds the stream. One draw is taken from it here, so the order in
            which a model's values are later materialised does not matter. Without it only
            initializers that ignore their key work.

    Example:
        >>> import jax, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> kernel = sx.Param(sx.Init(jax.nn.initializers.normal(), (2, 3), rngs=rngs), axes=("embed", "mlp"))
        >>> kernel.is_lazy, kernel.shape
        (True, (2, 3))
        >>> kernel.value.shape, kernel.is_lazy
        ((2, 3), False)
    """

    __slots__ = ("initializer", "source")

    def __init__(
        self,
        initializer: Initializer,
        shape: tuple[int, ...],
        dtype: Any = np.float32,
        stream: Any = "params",
        *,
        rngs: Any = None,
    ) -> None:
        self.initializer = initializer
        self.shape = tuple(int(size) for size in shape)
        self.dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not isinstance(stream, str):
            self.source = stream.draw_source()
        else:
            self.source = None if rngs is None else rngs[stream].draw_source()

    @property
    def is_traced(self) -> bool:
        """Whether the key is a tracer, so that the value must be computed where it is made."""
        return self.source is not None and isinstance(self.source.root, Tracer)

    def compute(self, sharding: Any = None) -> jax.Array:
        """Runs the initializer; with a sharding, straight into its shards.

        Args:
            sharding: A ``jax.sharding.Sharding``, or None for the default device.

        Returns:
            The array.

        Raises:
            MissingRngsError: If the initializer needs a key and this value was made without
                ``rngs``.
        """
        if self.source is None:
            return self._compute_without_key(sharding)
        program = _initializer_program(
            Static(self.initializer),
            self.shape,
            self.dtype,
            len(self.source.folds),
            sharding,
        )
        return program(self.source.root_key(), np.asarray(self.source.folds, np.uint32))

    def _compute_without_key(self, sharding: Any) -> jax.Array:
        program = _initializer_program(
            Static(self.initializer), self.shape, self.dtype, None, sharding
        )
        try:
            return program(None, None)
        except TypeError as error:
            raise MissingRngsError(
                f"The initializer {self.initializer!r} for a value of shape {self.shape} needs a "
                f"random key, but Init was given "
                f"no stream to draw it from. Pass one: Init(initializer, shape, dtype, rngs=rngs)."
            ) from error


class LazyKey(LazyValue):
    """A lazy random key: the key of a ``KeySource``, with shape ()."""

    __slots__ = ("source",)

    def __init__(self, source: KeySource) -> None:
        self.source = source
        self.shape = ()
        self.dtype = _key_dtype(_prng_name()) if isinstance(source.root, int) else source.root.dtype

    def compute(self, sharding: Any = None) -> jax.Array:
        """Folds the integers into the root key."""
        count = len(self.source.folds)
        if count == 0 and sharding is None:
            # A copy: the root key is shared by all streams of that seed, and this one may be
            # donated.
            return jax.random.clone(self.source.root_key())
        folds = np.asarray(self.source.folds, np.uint32)
        return _key_program(count, sharding)(self.source.root_key(), folds)


@functools.lru_cache(maxsize=8)
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@functools.lru_cache(maxsize=4096)
def _initializer_program(
    initializer: Static,
    shape: tuple[int, ...],
    dtype: Any,
    folds: int | None,
    sharding: Any,
) -> Callable[[Any, Any], jax.Array]:
    def initialise(root: Any, data: Any) -> jax.Array:
        key = None if folds is None else _fold_all(root, data, folds)
        return initializer.value(key, shape, dtype)

    return jax.jit(initialise, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _key_program(count: int, sharding: Hashable) -> Callable[[Any, Any], jax.Array]:
    return jax.jit(lambda root, data: _fold_all(root, data, count), out_shardings=sharding)
