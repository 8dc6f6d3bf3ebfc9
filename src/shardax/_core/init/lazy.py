# SPDX-License-Identifier: Apache-2.0
"""Lazy values: parameters computed on first use.

A *lazy value* has a shape and a dtype and can compute its array, but holds none. Building a model
from lazy values runs no JAX operation and takes no memory. To *materialise* is to compute the
array: on first read, when a model is first passed to a compiled function, or by ``shardax.shard``,
which writes each array straight into its shards. A *recipe* is a lazy value made of random keys
alone.

*Key sources.* A key source is a root (an integer seed or a key) and the integers to fold into it.
It needs no JAX operation until its key is asked for. The *words* of a key are its raw numbers,
``uint32[k]``, on the host; with the name of the generator (*impl*) they are the key. Many keys are
folded in one call of one small program of a fixed size, so a deep model calls it more often but
never compiles another.

*Initializer programs.* An *initializer* is a function ``(key, shape, dtype) -> array``, such as
those of ``jax.nn.initializers``. There is one small compiled program per distinct (initializer,
shape, dtype, sharding). Given a sharding, each device computes its own shard only, and the numbers
are the same to the last bit with every sharding. That is so where each element is computed by
itself (*elementwise*: random bits, and functions of them). A sum, a product of matrices or a
decomposition may round differently when it is cut in parts; an initializer that has one is computed
whole by every device, of which each then keeps its part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.errors import ModuleError, ShardaxError, VariableValueError
from shardax._core.frames import is_eager, realising
from shardax._core.graph.handlers import handler_of
from shardax._core.graph.static import Metadata, Static

# --- key sources ----------------------------------------------------------------------------------

CHUNK = 64  # keys made by one call of the folding program

# For ``jax.sharding.use_abstract_mesh``: as if no mesh were in scope.
NO_MESH = AbstractMesh((), ())


class KeySource(NamedTuple):
    """The recipe of a random key."""

    root: Any  # an integer seed or a typed key array of shape ()
    folds: tuple[int, ...] = ()  # integers folded into it, in order

    def fold(self, *data: int) -> KeySource:
        """Returns the source with more integers folded in."""
        return KeySource(self.root, self.folds + data)

    def root_key(self) -> jax.Array:
        """Returns the root as a typed key array of shape ()."""
        if not isinstance(self.root, int):
            return self.root
        # Words are kept, not keys: an array belongs to the mesh in scope when it was made.
        words = jax.numpy.asarray(_seed_words(self.root, prng_name()))
        return jax.random.wrap_key_data(words, impl=prng_name())

    @property
    def impl(self) -> Any:
        """The random generator that the key is for, as ``jax.random.key(seed, impl=...)``."""
        return prng_name() if isinstance(self.root, int) else jax.random.key_impl(self.root)


# JAX makes its settings attributes at run time, so type checkers cannot know them.
_DEFAULT_PRNG = "jax_default_prng_impl"


def prng_name() -> str:
    """Returns the name of JAX's default random generator."""
    return str(getattr(jax.config, _DEFAULT_PRNG))


def words_of(sources: Sequence[KeySource]) -> list[Any]:
    """Returns the words of several keys, together where possible."""
    if is_eager() and not any(isinstance(source.root, Tracer) for source in sources):
        return list(all_key_words(sources))
    return [key_words(source) for source in sources]


def key_words(source: KeySource) -> Any:
    """Returns the words of one key."""
    if is_eager() and not isinstance(source.root, Tracer):
        return all_key_words([source])[0]
    folds = np.asarray(source.folds, np.uint32)
    key = source.root_key()
    for position in range(len(source.folds)):
        key = jax.random.fold_in(key, folds[position])
    return jax.random.key_data(key)


def all_key_words(sources: Sequence[KeySource]) -> list[np.ndarray]:
    """Returns the words of many keys, outside of traces."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return _fold_all(sources)


def _fold_all(sources: Sequence[KeySource]) -> list[np.ndarray]:
    roots: dict[int, np.ndarray] = {}
    words: list[Any] = [None] * len(sources)
    groups: dict[tuple[Any, int], list[int]] = {}
    for position, source in enumerate(sources):
        root = source.root
        if isinstance(root, int):
            words[position] = _seed_words(root, prng_name())
        else:
            if id(root) not in roots:
                roots[id(root)] = np.asarray(jax.random.key_data(root))
            words[position] = roots[id(root)]
        if source.folds:
            groups.setdefault((source.impl, len(source.folds)), []).append(position)
    for (impl, count), positions in groups.items():
        if str(impl) == "threefry2x32":
            keys = np.stack([words[position] for position in positions])
            for step in range(count):
                data = np.array([sources[i].folds[step] for i in positions], np.uint32)
                keys = threefry_fold(keys, data)
            for position, row in zip(positions, keys, strict=True):
                words[position] = row
    pending = [
        (
            chunk,
            _fold_chunk(impl, count, [words[i] for i in chunk], [sources[i].folds for i in chunk]),
        )
        for (impl, count), positions in groups.items()
        if str(impl) != "threefry2x32"
        for chunk in (positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK))
    ]
    for chunk, folded in pending:
        rows = np.asarray(folded)
        for position, row in zip(chunk, rows, strict=False):  # the last rows are padding
            words[position] = row
    return words


def threefry_fold(keys: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Folds ``data`` (n,) into keys (n, 2), as ``jax.random.fold_in``."""
    # Threefry-2x32 with 20 rounds (J. Salmon and others, "Parallel random numbers: as easy as 1, 2,
    # 3", 2011), on the host: the program for it takes longer to load than the first model to draw.
    schedule = (keys[:, 0], keys[:, 1], keys[:, 0] ^ keys[:, 1] ^ np.uint32(0x1BD11BDA))
    left, right = schedule[0].copy(), data.astype(np.uint32) + schedule[1]
    for group in range(5):
        for shift in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = left + right
            right = (right << np.uint32(shift) | right >> np.uint32(32 - shift)) ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return np.stack([left, right], axis=1)


def _fold_chunk(
    impl: object, count: int, roots: Sequence[np.ndarray], folds: Sequence[tuple[int, ...]]
) -> jax.Array:
    padded = np.zeros((CHUNK, len(roots[0])), np.uint32)
    padded[: len(roots)] = roots
    data = np.zeros((CHUNK, count), np.uint32)
    data[: len(folds)] = folds
    return _fold_program(impl, count)(padded, data)


@functools.lru_cache(maxsize=64)
def _fold_program(impl: object, count: int) -> Callable[[Any, Any], jax.Array]:
    def fold(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        words, data = row
        key = jax.random.wrap_key_data(words, impl=impl)
        for position in range(count):
            key = jax.random.fold_in(key, data[position])
        return jax.random.key_data(key)

    # A loop, not vmap: some generators give other numbers when they are batched.
    return jax.jit(lambda words, data: jax.lax.map(fold, (words, data)))


@functools.lru_cache(maxsize=256)
def _seed_words(seed: int, impl: str) -> np.ndarray:
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(NO_MESH):
        return np.asarray(jax.random.key_data(jax.random.key(seed, impl=impl)))


# --- initializer programs -------------------------------------------------------------------------

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


class InitializerProgram:
    """A compiled initializer, called with the words of a key."""

    __slots__ = ("_call", "_sharding", "_words", "compiled")

    def __init__(self, function: Callable[[Any], jax.Array], words: Any, sharding: Any) -> None:
        self._sharding = sharding
        self._words = words
        self._call = jax.jit(function, out_shardings=sharding)
        self.compiled = False

    def __call__(self, words: object) -> jax.Array:
        with self._mesh():
            return self._call(words)

    def lower(self) -> Any:
        """Lowers the program for a key that is in host memory."""
        with self._mesh():
            return self._call.lower(self._words)

    def _mesh(self) -> contextlib.AbstractContextManager[Any]:
        # With explicit mesh axes in scope, JAX would lay out every intermediate array by its own
        # rules, which means whole on every device.
        if self._sharding is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(NO_MESH)


class _EmptyProgram(InitializerProgram):
    """The program of an array without elements, which is laid out afterwards."""

    # Where a program lays one out, JAX gives every device the whole shape, and the array cannot be
    # read.

    __slots__ = ("_place",)

    def __init__(self, function: Callable[[Any], jax.Array], words, place) -> None:
        super().__init__(function, words, None)
        self._place = place

    def __call__(self, words: object) -> jax.Array:
        return jax.device_put(super().__call__(words), self._place)


class _FilledProgram(InitializerProgram):
    """The program of a small array of one number, seldom compiled."""

    __slots__ = ("_filled",)

    def __init__(self, function: Callable[[Any], jax.Array], words, filled: np.ndarray) -> None:
        super().__init__(function, words, None)
        self._filled = filled
        self.compiled = True

    def __call__(self, words: object) -> jax.Array:
        if not (is_eager() and jax.sharding.get_abstract_mesh().empty):
            return super().__call__(words)
        return on_device(self._filled)


_CONSTANTS = (jax.nn.initializers.zeros, jax.nn.initializers.ones)
SMALL = 2**20  # bytes of an array of one number that needs no program


def on_device(array: np.ndarray, sharding: NamedSharding | None = None) -> jax.Array:
    """Puts an array of NumPy into device memory of its own."""
    placed = jax.device_put(array, sharding)
    # On CPUs it may still be NumPy's memory, also with may_alias=False, which a step that donates
    # it could not reuse. The copy is awaited, as that memory may change.
    return jax.block_until_ready(jax.device_put(placed, may_alias=False))


def _filled_by(function: Callable[[Any], jax.Array], words) -> np.ndarray | None:
    """What a function makes, if a small array of one number."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        jaxpr = jax.make_jaxpr(function)(words).jaxpr
    (result,) = jaxpr.outvars
    made, kind = jaxpr.eqns[-1:], result.aval
    if not made or made[0].primitive.name != "broadcast_in_dim" or made[0].outvars[0] is not result:
        return None
    if jaxpr.effects:  # such as a print, which must happen
        return None
    number = getattr(made[0].invars[0], "val", None)
    if number is None or np.ndim(number) or not isinstance(kind.dtype, np.dtype) or kind.weak_type:
        return None
    is_small = math.prod(kind.shape) * kind.dtype.itemsize <= SMALL
    return np.full(kind.shape, number, kind.dtype) if is_small else None


@functools.lru_cache(maxsize=4096)
def initializer_program(
    initializer: Static,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike | None,
    impl: Any,
    sharding: object,
    lead: tuple[int, ...] = (),
) -> InitializerProgram:
    """Returns the program of an initializer."""
    # With leading dimensions it takes words uint32[*lead, k] and makes one array per key, the same
    # as one at a time. Without a generator (impl) the initializer is called without a key.
    words = None if impl is None else _words_of(impl)

    def initialise(key_data) -> jax.Array:
        key = None if impl is None else jax.random.wrap_key_data(key_data, impl=impl)
        return _array_of(initializer.value(key, shape, dtype), initializer.value)

    if impl is None:  # one that needs a key fails here, where it is known whose it is
        jax.eval_shape(initialise, None)
    if not lead and not isinstance(sharding, NamedSharding):  # nothing is cut or put together
        is_constant = impl is None or any(initializer.value is value for value in _CONSTANTS)
        filled = _filled_by(initialise, words) if is_constant and sharding is None else None
        if filled is not None:
            return _FilledProgram(initialise, words, filled)
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
    sharding: object, function: Callable[[Any], jax.Array], source: object, freely: bool
) -> InitializerProgram:
    """Returns the program that writes what a function makes into a sharding."""
    # Freely: each device may compute its part only. Otherwise each computes the whole array.
    if freely or not isinstance(sharding, NamedSharding):
        return InitializerProgram(function, source, sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    def compute_whole(source: object) -> jax.Array:
        return jax.lax.with_sharding_constraint(function(source), whole)

    return InitializerProgram(compute_whole, source, sharding)


def _repeated(
    function: Callable[[Any], jax.Array], lead: tuple[int, ...], repeat: Callable[..., Any] | None
) -> Callable[[Any], jax.Array]:
    """Maps a function over leading dimensions, or broadcasts its result."""
    if repeat is None:
        return lambda source: _broadcast(function(source), lead)
    for _ in lead:
        function = repeat(function)
    return function


def _broadcast(array: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(array, (*lead, *array.shape)) if lead else array


def _one_by_one(function: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    """Returns the function over a leading dimension, as a loop."""
    # Some generators give other numbers when they are batched, and some sums other roundings.
    return lambda rows: jax.lax.map(function, rows)


def _many_words(words, lead: tuple[int, ...]):
    return None if words is None else jax.ShapeDtypeStruct((*lead, *words.shape), words.dtype)


@functools.lru_cache(maxsize=64)
def key_program(impl: object, sharding: object, lead: tuple[int, ...] = ()) -> InitializerProgram:
    """Returns the program that makes keys of words ``uint32[*lead, k]``."""
    return InitializerProgram(
        lambda words: jax.random.wrap_key_data(words, impl=impl),
        _many_words(_words_of(impl), lead),
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
        pending[0].lower()
    for program in pending:
        program.compiled = True


@functools.lru_cache(maxsize=16)
def _words_of(impl: object) -> jax.ShapeDtypeStruct:
    found = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    # Kept for all calls, so without its sharding: that is over the mesh in scope now.
    return jax.ShapeDtypeStruct(found.shape, found.dtype)


def cuts_freely(function: Callable[[Any], jax.Array], source: object, impl: object) -> bool:
    """Whether no sharding changes a bit of the result."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        names = set(_primitives(jax.make_jaxpr(function)(source).jaxpr))
    draws = any(name.startswith("random") for name in names)
    return names <= set(_ELEMENTWISE.split()) and (not draws or impl == "threefry2x32")


def _primitives(jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


# --- lazy values ----------------------------------------------------------------------------------

Initializer = Callable[..., Any]


_ANNOUNCED = "_shardax_announced"


def announce(wrapper: Initializer, plain: Initializer, metadata: Metadata) -> None:
    """Marks an initializer that puts the value of another into a box."""
    # With a reference to whom it is about: functools.wraps copies attributes to other functions.
    setattr(wrapper, _ANNOUNCED, (weakref.ref(wrapper), plain, metadata))


def announced(initializer: Initializer) -> tuple[Initializer, Metadata | None]:
    """The initializer of the bare value, and the box's metadata."""
    if isinstance(initializer, functools.partial):
        plain, metadata = announced(initializer.func)
        if metadata is None:
            return initializer, None
        return functools.partial(plain, *initializer.args, **initializer.keywords), metadata
    announcement = getattr(initializer, _ANNOUNCED, None)
    if announcement is None or announcement[0]() is not initializer:
        return initializer, None
    return announced(announcement[1])[0], announcement[2]


@dataclasses.dataclass(frozen=True)
class UnboxedInitializer:
    """The initializer of what another one puts into a box."""

    boxed: Initializer

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns what the box unboxes."""
        value = self.boxed(key, shape, dtype)
        contents = handler_of(value).contents
        return value if contents is None else contents(value)[0]


def unboxed(
    initializer: Initializer, shape: tuple[int, ...], dtype: Any, impl: object
) -> tuple[Initializer, Metadata | None]:
    """The initializer of the bare value, and the metadata of the box that it comes in, if any.

    What ``with_partitioning`` returns tells its names; any other function is traced for them.

    Raises:
        ShardaxError: If the box holds another one.
    """
    plain, metadata = announced(initializer)
    function = plain.func if isinstance(plain, functools.partial) else plain
    if getattr(function, "__globals__", None) is _OF_JAX:
        return plain, metadata
    try:
        # Without a key to come, for the names alone.
        box_contents = _contents_of_box(Static(plain), shape, dtype, impl or prng_name())
    except Exception:  # noqa: BLE001 - what does not trace fails where its value is asked for
        return plain, metadata
    if box_contents is None:
        return plain, metadata
    if isinstance(box_contents, ShardaxError):
        raise box_contents
    return UnboxedInitializer(plain), metadata or box_contents


# The functions of this module return arrays, so they need not be traced.
_OF_JAX = jax.nn.initializers.normal.__globals__


@functools.lru_cache(maxsize=4096)
def _contents_of_box(
    initializer: Static, shape: tuple[int, ...], dtype: Any, impl: Any
) -> Metadata | ShardaxError | None:
    """Metadata of the box that an initializer returns, or what is wrong with the box."""
    outcome: list[Metadata | ShardaxError] = []

    def trace(words: Any) -> None:
        key = jax.random.wrap_key_data(words, impl=impl)
        value = initializer.value(key, shape, dtype)
        contents = handler_of(value).contents
        if contents is None:
            return
        try:
            outcome.append(contents(value)[1])
        except ShardaxError as error:
            outcome.append(error)

    jax.eval_shape(trace, _words_of(impl))
    return outcome[0] if outcome else None


def _array_of(value: object, initializer: Initializer) -> Any:
    """What an initializer returned, or raises if it is no array."""
    if hasattr(value, "shape") or isinstance(value, (bool, int, float, complex)):
        return value
    raise VariableValueError(
        f"The initializer {initializer!r} returned {type(value).__name__} and not an array. "
        "Return the array, and give names of dimensions by axes=, or kernel_axes= of a layer."
    )


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

    def compute(self, sharding: object = None) -> jax.Array:
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
        return not any(isinstance(source.root, Tracer) for source in self.sources)

    @property
    def likeness(self) -> Hashable:
        """Equal for recipes that one program makes, each of its own keys."""
        raise NotImplementedError

    def program(self, sharding: object = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        """Returns the program from words of keys to the array."""
        raise NotImplementedError

    def run(self, program: InitializerProgram, words: Sequence[object]) -> jax.Array:
        """Runs the program."""
        raise NotImplementedError

    def compute(self, sharding: object = None) -> jax.Array:
        """Runs the recipe; with a sharding, straight into its shards."""
        return self.run(self.program(sharding), words_of(self.sources))


def check_rngs(rngs: Any) -> Any:
    """Returns an ``Rngs`` or None, or raises, as for a seed."""
    if rngs is None or hasattr(rngs, "streams"):
        return rngs
    is_key = hasattr(rngs, "dtype")
    described = f"an array {rngs.dtype}{list(rngs.shape)}" if is_key else repr(rngs)
    fix = "key" if is_key else rngs if type(rngs) is int else 0
    raise ModuleError(
        f"rngs takes random streams by name, an sx.Rngs, but was given {described} of type "
        f"{type(rngs).__name__}. Make one and pass it to all layers, so that they draw different "
        f"numbers: rngs=sx.Rngs({fix})."
    )


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

    def __init__(
        self,
        initializer: Initializer,
        shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike = np.float32,
        stream: Any = "params",
        *,
        rngs: Any = None,
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not isinstance(stream, str):
            self.source = stream.draw_source()
        else:
            self.source = None if rngs is None else check_rngs(rngs)[stream].draw_source()
        self.initializer, self.metadata = unboxed(initializer, self.shape, self.dtype, self._impl)

    @property
    def has_names(self) -> bool:
        """Whether the initializer's box has names of dimensions."""
        return self.metadata is not None and self.metadata.axes is not None

    @property
    def is_traced(self) -> bool:
        """Whether the key is a tracer."""
        return self.source is not None and isinstance(self.source.root, Tracer)

    @property
    def sources(self) -> tuple[KeySource, ...]:
        return () if self.source is None else (self.source,)

    @property
    def likeness(self) -> Hashable:
        return Static(self.initializer), self.shape, self.dtype, self._impl

    @property
    def _impl(self) -> Any:
        return None if self.source is None else self.source.impl

    def program(self, sharding: object = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        try:
            return initializer_program(
                Static(self.initializer), self.shape, self.dtype, self._impl, sharding, lead
            )
        except TypeError as error:
            self._explain(error)
            raise

    def run(self, program: InitializerProgram, words: Sequence[object]) -> jax.Array:
        try:
            return program(words[0] if words else None)
        except TypeError as error:
            self._explain(error)
            raise

    def _explain(self, error: TypeError) -> None:
        if self.source is None and not isinstance(error, VariableValueError):
            raise ModuleError(
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
        return (self.source,)

    @property
    def likeness(self) -> Hashable:
        return self.source.impl

    def program(self, sharding: object = None, lead: tuple[int, ...] = ()) -> InitializerProgram:
        return key_program(self.source.impl, sharding, lead)

    def run(self, program: InitializerProgram, words: Sequence[object]) -> jax.Array:
        """Runs the program."""
        return program(words[0])


@functools.lru_cache(maxsize=8)
def _key_dtype(impl: str):
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def compute_all(values: Sequence[LazyValue], shardings: Sequence[Any]) -> Iterator[jax.Array]:
    """Computes many lazy values outside of traces, yielding the arrays in order."""
    # Keys are folded and programs compiled together. All is compiled before the first array is
    # made, so an initializer that does not trace fails before anything changed. Each array is made
    # when it is asked for, so that the caller decides what is alive at the same time.
    known_recipes = [
        value if isinstance(value, Recipe) and value.is_known else None for value in values
    ]
    programs = [
        None if value is None else value.program(sharding)
        for value, sharding in zip(known_recipes, shardings, strict=True)
    ]
    compile_together(program for program in programs if program is not None)
    sources = [
        source for recipe in known_recipes if recipe is not None for source in recipe.sources
    ]
    words = iter(all_key_words(sources))
    for value, recipe, program, sharding in zip(
        values, known_recipes, programs, shardings, strict=True
    ):
        if recipe is None or program is None:
            yield value.compute(sharding)
        else:
            yield recipe.run(program, [next(words) for _ in recipe.sources])


def realise_all(variables: Sequence[Any]) -> None:
    """Materialises the lazy values of several Variables in one go."""
    with realising:
        lazy = [v for v in variables if isinstance(v._value, Recipe) and v._owner is None]
        if len(lazy) > 1 and is_eager():  # in a trace they materialise one by one
            arrays = compute_all([v._value for v in lazy], [None] * len(lazy))
            for variable, array in zip(lazy, arrays, strict=True):
                variable._value = array
