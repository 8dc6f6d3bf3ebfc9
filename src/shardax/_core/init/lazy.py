# SPDX-License-Identifier: Apache-2.0
"""Lazy values: parameters computed on first use.

A *lazy value* has a shape and a dtype and can compute its array, but holds none. A Variable that
was given one holds it in place of an array. A *recipe* is a lazy value made of random keys alone:
an ``Init``, which calls an initializer, or a ``LazyKey``. To *materialize* a Variable is to put the
array in the place of the lazy value. The rules, in the order of this file:

1. **Making** a lazy value runs no JAX operation and takes no memory. A recipe takes its draw from
   the random stream at once, so the order of later reads changes no number. A key that is a tracer
   is known inside of its trace only, so there a Variable computes the array when it is made.

2. **Computing** is done by one compiled program per distinct (initializer, shape, dtype, sharding),
   from the words of the key (``init.programs``, ``init.keys``). Without a sharding the array is
   where JAX puts a new array: on the default device; with a mesh in scope, whole on each of its
   devices. Given a sharding, the program makes the shards, and the numbers are the same to the last
   bit: an elementwise initializer computes each shard where it is; another one computes the whole
   array on every device, and keeps its shard (``program_into``). (A small array of one number, such
   as zeros, is filled by NumPy and needs no program.)

3. **Who materializes, and when.** Whoever is first in need of the numbers: a read (``v.value`` and
   every operator), without a sharding; a transform that is given the Variable or reaches it through
   a closure, before it copies it, likewise; ``shardax.shard``, and transforms with declared
   shardings (``in_shardings``, ``shard_map``), by these. Shape, dtype, ``repr``, structure,
   ``freeze`` and copies do not need them: a copy holds the same lazy value, and computes the same
   numbers again; pickling does. If an initializer raises, the Variable stays lazy.

4. **While JAX is tracing**, a Variable that no transform made is materialized outside of the trace:
   it outlives the trace, so its array must not be a tracer. One that a transform made is
   materialized inside of it.

5. **Threads.** One lock of the process, ``threads.lazy_lock``, is held while a Variable is
   materialized without a sharding. So of two threads that read one lazy Variable, the first
   computes, and the second waits and gets the same array; so does one that reads another lazy
   Variable. (``shard`` and declared shardings take no lock: a read meanwhile may compute too, and
   a write meanwhile is kept.) A write to a lazy Variable waits for the lock, once a second thread
   has used shardax (``threads.several``), so that the array is never stored over what was written.
   A Variable that holds an array does not take this lock.

6. **Many at once.** Two or more recipes that a transform is given outside of traces are
   materialized together (``materialize_all``): keys are folded together, programs compiled in
   parallel.

NumPy arrays and numbers in a Variable are materialized by the same rules: reading puts them on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardax._core.errors import ModuleError, VariableValueError
from shardax._core.frames import Frame, is_eager, outside_of_frames
from shardax._core.graph.static import Metadata, Static
from shardax._core.init.boxed import unboxed
from shardax._core.init.keys import (
    KeyImpl,
    KeySource,
    Words,
    default_impl,
    key_dtype,
    key_words,
    known_key_words,
)
from shardax._core.init.programs import (
    Initializer,
    InitializerProgram,
    Shape,
    compile_together,
    initializer_program,
    key_program,
    on_device,
)
from shardax._core.threads import lazy_lock

R = TypeVar("R")

if TYPE_CHECKING:
    from shardax._core.init.rng import Rngs, RngStream
    from shardax._core.variable import Variable

# --- 1. and 2. lazy values ------------------------------------------------------------------------


class LazyValue:
    """Base of lazy values: a subclass has ``compute``, and sets ``shape`` and ``dtype``.

    A Variable that holds one computes it when it is first read, and ``sx.shard`` where its shards
    are to be.

    Attributes:
        shape: The shape of the array.
        dtype: Its dtype.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class Count(extend.LazyValue):
        ...     def __init__(self, size):
        ...         self.shape, self.dtype = (size,), jnp.dtype("int32")
        ...     def compute(self, sharding=None):
        ...         return jax.device_put(jnp.arange(self.shape[0]), sharding)
        >>> positions = sx.Variable(Count(3))
        >>> positions
        Variable(int32[3], lazy)
        >>> positions.value.tolist()
        [0, 1, 2]
    """

    __slots__ = ("dtype", "shape")
    shape: tuple[int, ...]
    dtype: Any

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        """Returns the array, anew at every call; with a sharding, laid out so."""
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
    """Base of lazy values made of random keys alone."""

    __slots__ = ()

    @property
    def sources(self) -> tuple[KeySource, ...]:
        """The sources of the keys that the program takes."""
        raise NotImplementedError

    @property
    def is_known(self) -> bool:
        """Whether the keys are known outside of a trace."""
        return not any(source.is_traced for source in self.sources)

    @property
    def likeness(self) -> Hashable:
        """Equal for recipes that one program makes, each of its own keys."""
        raise NotImplementedError

    def program(self, sharding: Sharding | None = None, lead: Shape = ()) -> InitializerProgram:
        """Returns the program from words of keys to the array."""
        raise NotImplementedError

    def run(self, program: InitializerProgram, words: Sequence[Words]) -> jax.Array:
        """Runs the program on the words of ``sources``, in their order."""
        raise NotImplementedError

    def compute(self, sharding: Sharding | None = None) -> jax.Array:
        """Returns the array; with a sharding, written straight into its shards."""
        return self.run(self.program(sharding), key_words(self.sources))


class Init(Recipe):
    """A lazy value made by an initializer such as those of ``jax.nn.initializers``.

    Args:
        initializer: Called as ``initializer(key, shape, dtype)``. If it returns a box, such as one
            of ``partition.with_partitioning``, the names of the box become the axes of the
            Variable; for that a function that is not of ``jax.nn.initializers`` is traced here.
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

    __slots__ = ("initializer", "metadata", "source")
    initializer: Initializer  # of the bare array
    metadata: Metadata | None  # of the box that the given initializer returns
    source: KeySource | None

    def __init__(
        self,
        initializer: Initializer,
        shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike = np.float32,
        stream: str | RngStream = "params",
        *,
        rngs: Rngs | None = None,
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = jax.dtypes.canonicalize_dtype(dtype)
        self.source = _draw_source(stream, rngs)
        self.initializer, self.metadata = unboxed(initializer, self.shape, self.dtype, self._impl)

    @property
    def has_names(self) -> bool:
        """Whether the initializer's box has names of dimensions."""
        return self.metadata is not None and self.metadata.axes is not None

    @property
    def is_traced(self) -> bool:
        """Whether the key is a tracer."""
        return not self.is_known

    @property
    def sources(self) -> tuple[KeySource, ...]:
        return () if self.source is None else (self.source,)

    @property
    def likeness(self) -> Hashable:
        return Static(self.initializer), self.shape, self.dtype, self._impl

    @property
    def _impl(self) -> KeyImpl | None:
        return None if self.source is None else self.source.impl

    def program(self, sharding: Sharding | None = None, lead: Shape = ()) -> InitializerProgram:
        try:
            return initializer_program(
                Static(self.initializer), self.shape, self.dtype, self._impl, sharding, lead
            )
        except TypeError as error:
            self._check_needs_no_key(error)
            raise

    def run(self, program: InitializerProgram, words: Sequence[Words]) -> jax.Array:
        try:
            return program(words[0] if words else None)
        except TypeError as error:
            self._check_needs_no_key(error)
            raise

    def _check_needs_no_key(self, error: TypeError) -> None:
        """Raises if an initializer failed that was given no key."""
        if self.source is None and not isinstance(error, VariableValueError):
            raise ModuleError(
                f"The initializer {self.initializer!r} for a value of shape {self.shape} needs a "
                f"random key, but Init was given "
                f"no stream to draw it from. Pass one: Init(initializer, shape, dtype, rngs=rngs)."
            ) from error


def _draw_source(stream: str | RngStream, rngs: Rngs | None) -> KeySource | None:
    """Takes one draw of a stream, given itself or by name; None without ``rngs``."""
    if not isinstance(stream, str):
        return stream.draw_source()
    checked_rngs = check_rngs(rngs)
    return None if checked_rngs is None else checked_rngs[stream].draw_source()


def check_rngs(rngs: R) -> R:
    """Returns what is an ``Rngs`` or None; raises for anything else, such as a seed."""
    if rngs is None or hasattr(rngs, "streams"):
        return rngs

    description, seed = repr(rngs), "0"
    if isinstance(rngs, (jax.Array, np.ndarray, np.generic)):
        description, seed = f"an array {rngs.dtype}{list(rngs.shape)}", "key"
    elif type(rngs) is int:
        seed = str(rngs)
    raise ModuleError(
        f"rngs takes random streams by name, an sx.Rngs, but was given {description} of type "
        f"{type(rngs).__name__}. Make one and pass it to all layers, so that they draw different "
        f"numbers: rngs=sx.Rngs({seed})."
    )


class LazyKey(Recipe):
    """A lazy random key: the key of a ``KeySource``, with shape ()."""

    __slots__ = ("source",)

    def __init__(self, source: KeySource) -> None:
        self.source = source
        self.shape = ()
        root = source.root
        self.dtype = key_dtype(default_impl()) if isinstance(root, int) else root.dtype

    @property
    def sources(self) -> tuple[KeySource, ...]:
        return (self.source,)

    @property
    def likeness(self) -> Hashable:
        return self.source.impl

    def program(self, sharding: Sharding | None = None, lead: Shape = ()) -> InitializerProgram:
        return key_program(self.source.impl, sharding, lead)

    def run(self, program: InitializerProgram, words: Sequence[Words]) -> jax.Array:
        """Runs the program."""
        return program(words[0])


# --- 3., 4. and 5. one Variable -------------------------------------------------------------------


def is_pending(value: object) -> TypeGuard[LazyValue | np.ndarray]:
    """Whether a Variable puts an array in the place of its value when it is read."""
    return isinstance(value, (np.ndarray, LazyValue))


def materialize(variable: Variable) -> Any:
    """Puts the array in the place of a pending value; returns what the Variable then holds."""
    with lazy_lock:
        value = variable._value
        if is_pending(value):  # else another thread was first
            value = variable._value = _array_for(variable._owner, value)
        return value


def _array_for(owner: Frame | None, value: LazyValue | np.ndarray) -> jax.Array:
    """Returns the array of a pending value, for a Variable that ``owner`` made."""
    if is_eager():
        if isinstance(value, LazyValue):
            return value.compute()
        # jnp.asarray compiles a program for each shape, but lays out over a mesh in scope.
        if jax.sharding.get_abstract_mesh().empty:
            return on_device(value)
        return jnp.asarray(value)

    # Outside of the trace, and of the frames: a lazy value that reads Variables, such as one of an
    # optimizer's state, reads those that it was made for and not their copies. Not where nothing is
    # traced: there this would run the parts of an initializer one by one.
    if owner is None:
        with jax.ensure_compile_time_eval(), outside_of_frames():
            return value.compute() if isinstance(value, LazyValue) else jnp.asarray(value)

    return value.compute() if isinstance(value, LazyValue) else jnp.asarray(value)


# --- 6. many at once ------------------------------------------------------------------------------


def materialize_all(variables: Sequence[Variable]) -> None:
    """Materializes the recipes of several Variables together, outside of traces."""
    with lazy_lock:
        lazy = [
            variable
            for variable in variables
            if isinstance(variable._value, Recipe) and variable._owner is None
        ]
        if len(lazy) < 2 or not is_eager():
            return  # each is materialized when it is read

        arrays = compute_all([variable._value for variable in lazy], [None] * len(lazy))
        for variable, array in zip(lazy, arrays, strict=True):
            variable._value = array


def compute_all(
    values: Sequence[LazyValue], shardings: Sequence[Sharding | None]
) -> Iterator[jax.Array]:
    """Yields the arrays of many lazy values in order, outside of traces."""
    # All programs are compiled before the first array is made, so an initializer that does not
    # trace fails before anything changed.
    recipes = [value if isinstance(value, Recipe) and value.is_known else None for value in values]
    programs = [
        None if recipe is None else recipe.program(sharding)
        for recipe, sharding in zip(recipes, shardings, strict=True)
    ]
    compile_together(program for program in programs if program is not None)

    sources = [source for recipe in recipes if recipe is not None for source in recipe.sources]
    all_words = iter(known_key_words(sources))

    # Each array is made when it is asked for, so the caller decides how many are alive at a time.
    for value, recipe, program, sharding in zip(values, recipes, programs, shardings, strict=True):
        if recipe is None or program is None:
            yield value.compute(sharding)
        else:
            words = [next(all_words) for _ in recipe.sources]
            yield recipe.run(program, words)
