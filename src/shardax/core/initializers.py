# SPDX-License-Identifier: Apache-2.0
"""Initializer programs: one small compiled program per (initializer, shape, dtype, sharding).

An *initializer* is a function ``(key, shape, dtype) -> array``, such as those of
``jax.nn.initializers``. Its program takes the words of the key (``core.keys``) and, given a
sharding, writes the array straight into its shards: each device computes its own part only.

The numbers must not depend on the sharding. They do not where each element is computed by itself
(*elementwise*: random bits, and functions of them). A sum, a product of matrices or a decomposition
may round differently when it is cut in parts; an initializer that has one is computed whole by
every device, of which each then keeps its part.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardax.core.keys import NO_MESH
from shardax.core.static import Static

_ELEMENTWISE = """
abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type broadcast broadcast_in_dim
cbrt ceil clamp complex concatenate conj convert_element_type copy cos cosh custom_jvp_call
custom_vjp_call div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota
is_finite jit le log log1p logistic lt max min mul ne neg nextafter not or pad pjit population_count
pow random_bits random_fold_in random_seed random_split random_unwrap random_wrap real
reduce_precision rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh threefry2x32
transpose xor
"""
"""Primitives whose every element is the same however the array is cut. An unknown one costs
memory, not correctness: the array is then computed whole."""


class InitializerProgram:
    """A compiled initializer for one shape, dtype and sharding; call it with the key's words.

    Args:
        function: Takes the key's words (None without a key) and returns the array.
        words: Shape and dtype of the key's words, or None; any tree, if the function takes one.
        sharding: Where the array goes, or None for the default device.
    """

    __slots__ = ("_call", "_sharding", "_words", "compiled")

    def __init__(self, function: Callable[[Any], jax.Array], words: Any, sharding: Any) -> None:
        self._sharding = sharding
        self._words = words
        self._call = jax.jit(function, out_shardings=sharding)
        self.compiled = False

    def __call__(self, words: Any) -> jax.Array:
        if self._sharding is None:
            return self._call(words)
        # With explicit mesh axes in scope, JAX would lay out every intermediate array by its own
        # rules, which means whole on every device.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return self._call(words)

    def lower(self) -> Any:
        """Lowers the program for a key that is in host memory."""
        if self._sharding is None:
            return self._call.lower(self._words)
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return self._call.lower(self._words)


class _EmptyProgram(InitializerProgram):
    """The program of an array without elements, which is laid out afterwards.

    Where a program lays one out, JAX gives every device the whole shape, and the array cannot be
    read.
    """

    __slots__ = ("_place",)

    def __init__(self, function: Callable[[Any], jax.Array], words: Any, place: Any) -> None:
        super().__init__(function, words, None)
        self._place = place

    def __call__(self, words: Any) -> jax.Array:
        return jax.device_put(super().__call__(words), self._place)


@functools.lru_cache(maxsize=4096)
def initializer_program(
    initializer: Static,
    shape: tuple[int, ...],
    dtype: Any,
    impl: Any,
    sharding: Any,
    lead: tuple[int, ...] = (),
) -> InitializerProgram:
    """Returns the program of an initializer.

    Args:
        initializer: The function ``(key, shape, dtype) -> array``.
        shape: Shape of the array.
        dtype: Its dtype.
        impl: The generator of the key; None to call the initializer without a key.
        sharding: A ``jax.sharding.Sharding``, or None for the default device.
        lead: Leading dimensions: the program then makes one array per key of ``uint32[*lead, k]``
            words, the same as one at a time, in one array of shape ``(*lead, *shape)``.
    """
    words = None if impl is None else _words_of(impl)

    def initialise(given: Any) -> jax.Array:
        key = None if impl is None else jax.random.wrap_key_data(given, impl=impl)
        return initializer.value(key, shape, dtype)

    if impl is None:  # one that needs a key fails here, where it is known whose it is
        jax.eval_shape(initialise, None)
    if not lead and not isinstance(sharding, NamedSharding):  # nothing is cut or put together
        return InitializerProgram(initialise, words, sharding)
    freely = cuts_freely(initialise, words, impl)
    many = _repeated(
        initialise, lead, None if impl is None else jax.vmap if freely else _one_by_one
    )
    given_words = _many_words(words, lead)
    if 0 in (*lead, *shape) and isinstance(sharding, NamedSharding):
        return _EmptyProgram(many, given_words, sharding)
    return program_into(sharding, many, given_words, freely)


def program_into(
    sharding: Any, function: Callable[[Any], jax.Array], given: Any, freely: bool
) -> InitializerProgram:
    """Returns the program that writes what a function makes into a sharding.

    Args:
        sharding: A ``jax.sharding.Sharding``, or None for the default device.
        function: Makes the array of ``given``.
        given: Shapes and dtypes of what the function takes.
        freely: Whether each device may compute its part only (``cuts_freely``); otherwise each
            computes the whole array and keeps its part.
    """
    if freely or not isinstance(sharding, NamedSharding):
        return InitializerProgram(function, given, sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    def compute_whole(given: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(function(given), whole)

    return InitializerProgram(compute_whole, given, sharding)


def _repeated(
    function: Callable[[Any], jax.Array], lead: tuple[int, ...], repeat: Callable[..., Any] | None
) -> Callable[[Any], jax.Array]:
    """Returns the function over leading dimensions; without ``repeat`` all rows are the same."""
    if repeat is None:
        return lambda given: _broadcast(function(given), lead)
    for _ in lead:
        function = repeat(function)
    return function


def _broadcast(array: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(array, (*lead, *array.shape)) if lead else array


def _one_by_one(function: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """Returns the function over a leading dimension, as a loop.

    Some random generators give other numbers when they are batched, and some sums other roundings.
    """
    return lambda rows: jax.lax.map(function, rows)


def _many_words(words: Any, lead: tuple[int, ...]) -> Any:
    return None if words is None else jax.ShapeDtypeStruct((*lead, *words.shape), words.dtype)


@functools.lru_cache(maxsize=64)
def key_program(impl: Any, sharding: Any, lead: tuple[int, ...] = ()) -> InitializerProgram:
    """Returns the program that makes the keys themselves of their words, ``uint32[*lead, k]``."""
    return InitializerProgram(
        lambda words: jax.random.wrap_key_data(words, impl=impl),
        _many_words(_words_of(impl), lead),
        sharding,
    )


def compile_together(programs: Iterable[InitializerProgram]) -> None:
    """Compiles programs at the same time, as far as there are processors; each at most once.

    Args:
        programs: Programs, possibly repeated or compiled already.
    """
    pending = [program for program in dict.fromkeys(programs) if not program.compiled]
    lowered = [program.lower() for program in pending]
    if len(lowered) > 1:
        with ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda program: program.compile(), lowered))
    for program in pending:
        program.compiled = True


@functools.lru_cache(maxsize=16)
def _words_of(impl: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def cuts_freely(function: Callable[[Any], jax.Array], given: Any, impl: Any) -> bool:
    """Whether the numbers are the same to the last bit whichever way the array is cut.

    Args:
        function: Makes the array of ``given``.
        given: Shapes and dtypes of what the function takes.
        impl: The generator of its keys, or None.
    """
    with jax.sharding.use_abstract_mesh(NO_MESH):
        names = set(_primitives(jax.make_jaxpr(function)(given).jaxpr))
    draws = any(name.startswith("random") for name in names)
    return names <= set(_ELEMENTWISE.split()) and (not draws or impl == "threefry2x32")


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)
