# SPDX-License-Identifier: Apache-2.0
"""Lazy values: parameters that exist as a recipe until someone needs the array.

A *lazy value* knows its shape and dtype and how to compute its array, but holds none. Building a
model from lazy values runs no JAX operation and takes no memory. To *materialise* is to run the
recipe: on first read, when a model is first passed to a compiled function, or by ``shardax.shard``,
which writes each array straight into its shards.

A *recipe* is a lazy value made of random keys alone. Its keys are folded from key sources
(``core.keys``), and the array is made by one small compiled program per distinct (initializer,
shape, dtype, sharding) (``core.initializers``). The numbers are the same to the last bit with every
sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shardax.core._jax import Tracer
from shardax.core.errors import MissingRngsError
from shardax.core.initializers import (
    InitializerProgram,
    compile_together,
    initializer_program,
    key_program,
)
from shardax.core.keys import KeySource as KeySource
from shardax.core.keys import all_key_words, prng_name, words_of
from shardax.core.static import Static

Initializer = Callable[..., Any]


class LazyValue:
    """Base of lazy values. ``shape`` and ``dtype`` are known; ``compute`` makes the array.

    Attributes:
        shape: Shape of the array.
        dtype: Its dtype, canonical for the current JAX configuration.
    """

    __slots__ = ("dtype", "shape")
    shape: tuple[int, ...]
    dtype: Any

    def compute(self, sharding: Any = None) -> jax.Array:
        """Makes the array; with a sharding, straight into its shards."""
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


class Recipe(LazyValue):
    """Base of lazy values whose program and keys are known before they run."""

    __slots__ = ()

    @property
    def sources(self) -> tuple[KeySource, ...]:
        """The sources of the keys that the program takes."""
        raise NotImplementedError

    @property
    def is_known(self) -> bool:
        """Whether the program and the keys are known outside of the trace that made this."""
        return not any(isinstance(source.root, Tracer) for source in self.sources)

    @property
    def likeness(self) -> Hashable:
        """Equal for recipes that one program makes, each of its own keys."""
        raise NotImplementedError

    def program(self, sharding: Any = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        """Returns the program that makes the array of the words of the keys.

        Args:
            sharding: A ``jax.sharding.Sharding``, or None for the default device.
            lead: Leading dimensions, for a program that makes as many arrays in one.
        """
        raise NotImplementedError

    def run(self, program: InitializerProgram, words: Sequence[Any]) -> jax.Array:
        """Runs the program.

        Args:
            program: What ``program`` returned.
            words: The words of the key of each of ``sources``.
        """
        raise NotImplementedError

    def compute(self, sharding: Any = None) -> jax.Array:
        """Runs the recipe; with a sharding, straight into its shards.

        Args:
            sharding: A ``jax.sharding.Sharding``, or None for the default device.

        Returns:
            The array.

        Raises:
            MissingRngsError: If the initializer needs a key and this value was made without
                ``rngs``.
        """
        return self.run(self.program(sharding), words_of(self.sources))


class Init(Recipe):
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
        >>> normal = jax.nn.initializers.normal()
        >>> kernel = sx.Param(sx.Init(normal, (2, 3), rngs=rngs), axes=("embed", "mlp"))
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

    @property
    def sources(self) -> tuple[KeySource, ...]:
        """The source of the key, if there is one."""
        return () if self.source is None else (self.source,)

    @property
    def likeness(self) -> Hashable:
        """See ``Recipe``."""
        impl = None if self.source is None else self.source.impl
        return Static(self.initializer), self.shape, self.dtype, impl

    def program(self, sharding: Any = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        """Returns the program that makes the array of the words of the key."""
        impl = None if self.source is None else self.source.impl
        try:
            return initializer_program(
                Static(self.initializer), self.shape, self.dtype, impl, sharding, lead
            )
        except TypeError as error:
            self._explain(error)
            raise

    def run(self, program: InitializerProgram, words: Sequence[Any]) -> jax.Array:
        """Runs the program, explaining what goes wrong without a key."""
        try:
            return program(words[0] if words else None)
        except TypeError as error:
            self._explain(error)
            raise

    def _explain(self, error: TypeError) -> None:
        if self.source is None:
            raise MissingRngsError(
                f"The initializer {self.initializer!r} for a value of shape {self.shape} needs a "
                f"random key, but Init was given "
                f"no stream to draw it from. Pass one: Init(initializer, shape, dtype, rngs=rngs)."
            ) from error


class LazyKey(Recipe):
    """A lazy random key: the key of a ``KeySource``, with shape ()."""

    __slots__ = ("source",)

    def __init__(self, source: KeySource) -> None:
        self.source = source
        self.shape = ()
        self.dtype = _key_dtype(prng_name()) if isinstance(source.root, int) else source.root.dtype

    @property
    def sources(self) -> tuple[KeySource, ...]:
        """The source of the key."""
        return (self.source,)

    @property
    def likeness(self) -> Hashable:
        """See ``Recipe``."""
        return self.source.impl

    def program(self, sharding: Any = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        """Returns the program that makes the key of its words."""
        return key_program(self.source.impl, sharding, lead)

    def run(self, program: InitializerProgram, words: Sequence[Any]) -> jax.Array:
        """Runs the program."""
        return program(words[0])


@functools.lru_cache(maxsize=8)
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def compute_all(values: Sequence[LazyValue], shardings: Sequence[Any]) -> Iterator[jax.Array]:
    """Runs many recipes: keys together, programs compiled together, arrays one after another.

    Only outside of traces. Everything is compiled before the first array is made, so an initializer
    that does not trace fails before anything changed.

    Args:
        values: The recipes.
        shardings: Where each array goes, or None for the default device.

    Yields:
        The arrays, in order; each is made when it is asked for, so that the caller decides what is
        alive at the same time.
    """
    known = [value if isinstance(value, Recipe) and value.is_known else None for value in values]
    programs = [
        None if value is None else value.program(sharding)
        for value, sharding in zip(known, shardings, strict=True)
    ]
    compile_together(program for program in programs if program is not None)
    sources = [source for recipe in known if recipe is not None for source in recipe.sources]
    words = iter(all_key_words(sources))
    for value, recipe, program, sharding in zip(values, known, programs, shardings, strict=True):
        if recipe is None or program is None:
            yield value.compute(sharding)
        else:
            yield recipe.run(program, [next(words) for _ in recipe.sources])
