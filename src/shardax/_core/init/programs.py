# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of initializers.

An *initializer* is a function ``(key, shape, dtype) -> array``, such as those of
``jax.nn.initializers``. There is one small compiled program per distinct (initializer, shape,
dtype, generator, sharding). It takes the words of a key (``_core.init.keys``).

Given a sharding, the numbers are the same to the last bit as without one. Each device computes its
own shard only, where the program is *elementwise*: every element is computed by itself, as random
bits and functions of them are. A sum, a product of matrices or a decomposition may round
differently when it is cut in parts, so a program that has one is computed whole by every device,
of which each then keeps its shard.

Given leading dimensions (``lead``), a program takes words ``uint32[*lead, k]`` and makes one array
per key, each the same as if it were made alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax._core._jax import inner_jaxprs
from shardax._core.errors import VariableValueError
from shardax._core.frames import is_eager
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import Static
from shardax._core.init.keys import NO_MESH, KeyImpl, words_type

if TYPE_CHECKING:
    from shardax._core._jax import Jaxpr

# Called as ``initializer(key, shape, dtype)``; returns an array, a number, or a box around one.
Initializer = Callable[..., Any]
Shape = tuple[int, ...]
# The function of a program. Its one argument is a tree of arrays, the *source*: the words of a key,
# or None where no key is needed; more where ``shardax.random`` draws with operands.
FromSource = Callable[[Any], jax.Array]

# Primitives whose every element is the same however the array is cut. An unknown one costs memory,
# not correctness: the array is then computed whole.
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

# Initializers of one number that take a key and ignore it.
_CONSTANTS = (jax.nn.initializers.zeros, jax.nn.initializers.ones)

SMALL = 2**20  # bytes of an array of one number that needs no program


class InitializerProgram:
    """A compiled initializer, called with the source of its numbers."""

    __slots__ = ("_call", "_sharding", "_source_type", "compiled")

    def __init__(
        self, function: FromSource, source_type: PyTree, sharding: Sharding | None
    ) -> None:
        self._sharding = sharding
        self._source_type = source_type
        self._call = jax.jit(function, out_shardings=sharding)
        self.compiled = False

    def __call__(self, source: PyTree) -> jax.Array:
        with self._mesh_in_scope():
            return self._call(source)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program for a source that is in host memory."""
        with self._mesh_in_scope():
            return self._call.lower(self._source_type)

    def _mesh_in_scope(self) -> contextlib.AbstractContextManager[object]:
        # With explicit mesh axes in scope, JAX would lay out every intermediate array by its own
        # rules, which means whole on every device.
        if self._sharding is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(NO_MESH)


class _EmptyProgram(InitializerProgram):
    """The program of an array without elements, which is laid out afterwards."""

    # Where a program lays one out, JAX gives every device the whole shape, and the array cannot be
    # read.

    __slots__ = ("_destination",)

    def __init__(
        self, function: FromSource, source_type: PyTree, destination: NamedSharding
    ) -> None:
        super().__init__(function, source_type, None)
        self._destination = destination

    def __call__(self, source: PyTree) -> jax.Array:
        return jax.device_put(super().__call__(source), self._destination)


class _FilledProgram(InitializerProgram):
    """The program of a small array of one number, which NumPy fills outside of traces."""

    __slots__ = ("_filled",)

    def __init__(self, function: FromSource, source_type: PyTree, filled: np.ndarray) -> None:
        super().__init__(function, source_type, None)
        self._filled = filled
        self.compiled = True  # not compiled ahead, since it is seldom needed

    def __call__(self, source: PyTree) -> jax.Array:
        if is_eager() and jax.sharding.get_abstract_mesh().empty:
            return on_device(self._filled)
        return super().__call__(source)


def on_device(array: np.ndarray, sharding: NamedSharding | None = None) -> jax.Array:
    """Puts an array of NumPy into device memory of its own."""
    placed = jax.device_put(array, sharding)
    # On CPUs it may still be NumPy's memory, also with may_alias=False, which a step that donates
    # it could not reuse. The copy is awaited, as that memory may change.
    return jax.block_until_ready(jax.device_put(placed, may_alias=False))


@functools.lru_cache(maxsize=4096)
def initializer_program(
    initializer: Static,
    shape: Shape,
    dtype: jax.typing.DTypeLike | None,
    impl: KeyImpl | None,
    sharding: Sharding | None,
    lead: Shape = (),
) -> InitializerProgram:
    """Returns the program of an initializer; without a generator (impl) it is given no key."""
    source_type = None if impl is None else words_type(impl)

    def initialize(words: jax.Array | None) -> jax.Array:
        key = None if words is None else jax.random.wrap_key_data(words, impl=impl)
        return _checked_array(initializer.value(key, shape, dtype), initializer.value)

    # An initializer that needs a key fails here, where it is known whose it is.
    if impl is None:
        jax.eval_shape(initialize, None)

    # One array, neither cut nor put together with others.
    if not lead and not isinstance(sharding, NamedSharding):
        is_constant = impl is None or any(initializer.value is value for value in _CONSTANTS)
        if is_constant and sharding is None:
            filled = _filled_by(initialize, source_type)
            if filled is not None:
                return _FilledProgram(initialize, source_type, filled)
        return InitializerProgram(initialize, source_type, sharding)

    is_elementwise = cuts_freely(initialize, source_type, impl)
    initialize_all = _over_lead(initialize, lead, impl is not None, is_elementwise)
    source_types = None if source_type is None else _with_lead(source_type, lead)

    if 0 in (*lead, *shape) and isinstance(sharding, NamedSharding):
        return _EmptyProgram(initialize_all, source_types, sharding)
    return program_into(sharding, initialize_all, source_types, is_elementwise)


def program_into(
    sharding: Sharding | None, function: FromSource, source_type: PyTree, is_elementwise: bool
) -> InitializerProgram:
    """Returns the program that writes what a function makes into a sharding."""
    if is_elementwise or not isinstance(sharding, NamedSharding):
        return InitializerProgram(function, source_type, sharding)

    on_every_device = NamedSharding(sharding.mesh, PartitionSpec())

    def compute_whole(source: PyTree) -> jax.Array:
        return jax.lax.with_sharding_constraint(function(source), on_every_device)

    return InitializerProgram(compute_whole, source_type, sharding)


@functools.lru_cache(maxsize=64)
def key_program(impl: KeyImpl, sharding: Sharding | None, lead: Shape = ()) -> InitializerProgram:
    """Returns the program that makes keys of words ``uint32[*lead, k]``."""
    return InitializerProgram(
        lambda words: jax.random.wrap_key_data(words, impl=impl),
        _with_lead(words_type(impl), lead),
        sharding,
    )


def compile_together(programs: Iterable[InitializerProgram]) -> None:
    """Compiles programs in parallel, each at most once."""
    pending = [program for program in dict.fromkeys(programs) if not program.compiled]

    if len(pending) > 1:
        # The first ones are compiled while the others are traced.
        with ThreadPoolExecutor(min(len(pending), os.cpu_count() or 1)) as pool:
            for compilation in [pool.submit(program.lower().compile) for program in pending]:
                compilation.result()
    elif pending:
        pending[0].lower()  # one alone is compiled when it is called

    for program in pending:
        program.compiled = True


def _checked_array(value: object, initializer: Initializer) -> Any:
    """Returns what an initializer returned; raises if that is no array."""
    if hasattr(value, "shape") or isinstance(value, (bool, int, float, complex)):
        return value
    raise VariableValueError(
        f"The initializer {initializer!r} returned {type(value).__name__} and not an array. "
        "Return the array, and give names of dimensions by axes=, or kernel_axes= of a layer."
    )


def _with_lead(words: jax.ShapeDtypeStruct, lead: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*lead, *words.shape), words.dtype)


def _over_lead(
    function: FromSource, lead: Shape, takes_key: bool, is_elementwise: bool
) -> FromSource:
    """Returns the function of words with leading dimensions."""
    if not takes_key:  # all arrays are the same
        return lambda words: _broadcast(function(words), lead)

    # Batched by vmap, some generators give other numbers and some sums round differently.
    for _ in lead:
        function = (
            jax.vmap(function) if is_elementwise else functools.partial(jax.lax.map, function)
        )
    return function


def _broadcast(array: jax.Array, lead: Shape) -> jax.Array:
    return jnp.broadcast_to(array, (*lead, *array.shape)) if lead else array


# --- what a program does, by its jaxpr ------------------------------------------------------------


def _jaxpr_of(function: FromSource, source_type: PyTree) -> Jaxpr:
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(function)(source_type).jaxpr


def cuts_freely(function: FromSource, source_type: PyTree, impl: KeyImpl | None) -> bool:
    """Whether no sharding changes a bit of the result: it is elementwise."""
    primitives = set(_primitives_in(_jaxpr_of(function, source_type)))

    # Other generators than threefry may give each shard other bits.
    draws = any(name.startswith("random") for name in primitives)
    if draws and impl != "threefry2x32":
        return False
    return primitives <= set(_ELEMENTWISE.split())


def _primitives_in(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from _primitives_in(inner)


def _filled_by(function: FromSource, source_type: PyTree) -> np.ndarray | None:
    """Returns what a function makes if that is a small array of one number, else None."""
    jaxpr = _jaxpr_of(function, source_type)
    if jaxpr.effects or not jaxpr.eqns:  # an effect, such as a print, must happen
        return None

    # The last equation broadcasts a literal to the result.
    last = jaxpr.eqns[-1]
    (result,) = jaxpr.outvars
    if last.primitive.name != "broadcast_in_dim" or last.outvars[0] is not result:
        return None
    number = getattr(last.invars[0], "val", None)
    if number is None or np.ndim(number):
        return None

    # NumPy makes the same array: of a dtype that NumPy has, and not weakly typed.
    array_type = result.aval
    if not isinstance(array_type, ShapedArray):
        return None
    if not isinstance(array_type.dtype, np.dtype) or array_type.weak_type:
        return None
    if math.prod(array_type.shape) * array_type.dtype.itemsize > SMALL:
        return None
    return np.full(array_type.shape, number, array_type.dtype)
