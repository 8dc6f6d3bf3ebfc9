# SPDX-License-Identifier: Apache-2.0
"""The global random stream, for eager random numbers without keys.

The *stream* is a base key and a count: the n-th draw uses the base key with n folded in, as a
stream of ``Rngs`` does. So ``seed(s)`` followed by draws gives the keys of ``Rngs(s)``. Its *state*
is a few integers. A stream that was never seeded starts from 128 bits of the operating system, so
processes started at the same moment differ.

One stream serves all threads, under a lock, so no two draws share a key; which thread gets which is
up to their timing. *Isolated* code draws from a stream of its own, which belongs to the context
(thread or ``asyncio`` task) that entered it, so its numbers do not depend on timing.

While a transform is tracing, a draw would happen once and its numbers stay in the program as
constants, and a tracer could end up in the stream; so there it raises, and ``Rngs`` is the way.

Each kind of draw is one compiled program, which folds the count into the base key and samples,
straight into the shards asked for. *Operands* are arrays that may change from draw to draw without
compiling again: bounds, probabilities, choices. *Options* are part of the program: shape, dtype,
axis. What cannot be drawn fails before the draw is taken, so the stream stays where it was.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import secrets
import threading
from collections.abc import Generator, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardax._core.errors import ModuleError, ShardaxError
from shardax._core.frames import is_eager
from shardax._core.graph.paths import PyTree
from shardax._core.init import keys, lazy, programs
from shardax._core.init.defaults import as_device, creation_device
from shardax._core.init.rng import key_value, seed_source
from shardax.partition.mesh import resolve_mesh


class DrawError(ShardaxError, ValueError, RuntimeError):
    """A draw with wrong arguments, or inside a JAX transform."""


WORD = 2**32  # a word of a key is below


@dataclass(frozen=True)
class StreamState:
    """The state of a stream: plain integers, for pickle and JSON.

    Attributes:
        impl: Name of the random generator, as in ``jax.random.key(seed, impl=...)``.
        words: The words of the base key, each in [0, 2**32).
        count: How many draws were taken.

    Raises:
        ModuleError: If they are not the words of a key of that generator, or not a count.

    Example:
        >>> import dataclasses, json, shardax as sx
        >>> sx.random.seed(7)
        >>> state = sx.random.get_state()
        >>> state
        StreamState(impl='threefry2x32', words=(0, 7), count=0)
        >>> sx.random.StreamState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state
        True
    """

    impl: str
    words: tuple[int, ...]
    count: int

    def __post_init__(self) -> None:
        words = tuple(self.words)
        object.__setattr__(self, "words", words)
        integers = all(type(number) is int for number in (*words, self.count))
        valid = integers and all(0 <= word < WORD for word in words) and self.count >= 0
        if not valid or len(words) != key_size(self.impl):
            raise ModuleError(
                f"StreamState(impl={self.impl!r}, words={words}, count={self.count!r}) is not the "
                f"state of a stream: a {self.impl} key has {key_size(self.impl)} words in "
                f"[0, 2**32), and the count is an integer from 0 (shardax.random.get_state())."
            )


@functools.lru_cache(maxsize=16)
def key_size(impl: object) -> int:
    """Number of words of a random generator's key."""
    try:
        return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).size
    except (ValueError, TypeError) as error:
        raise ModuleError(f"JAX knows no random generator {impl!r}: {error}") from error


class KeyStream:
    """A stream, thread-safe; without a source seeded at the first draw."""

    def __init__(self, source: keys.KeySource | StreamState | None) -> None:
        self._lock = threading.Lock()
        self.restart(source)

    def restart(self, source: keys.KeySource | StreamState | None) -> None:
        with self._lock:
            self._source = source
            self._key: tuple[str, np.ndarray] | None = None
            self._count = source.count if isinstance(source, StreamState) else 0

    @contextlib.contextmanager
    def drawing(self) -> Generator[tuple[str, np.ndarray, tuple[np.uint32, ...]]]:
        """Takes a draw at the end of the block, unless it raises."""
        with self._lock:
            impl, words = self._base_key()
            high, low = divmod(self._count, WORD)
            folds = (low, high) if high else (low,)
            yield impl, words, tuple(np.uint32(fold) for fold in folds)
            self._count += 1

    def state(self) -> StreamState:
        with self._lock:
            impl, words = self._base_key()
            return StreamState(impl, tuple(words.tolist()), self._count)

    def _base_key(self) -> tuple[str, np.ndarray]:
        """Generator and words of the base key, computed once; under the lock."""
        if self._key is None:
            source = self._source
            if isinstance(source, StreamState):
                self._key = (source.impl, np.asarray(source.words, np.uint32))
            else:
                if source is None and jax.process_count() > 1:
                    raise ModuleError(
                        f"shardax.random was not seeded, and this program runs in "
                        f"{jax.process_count()} processes, which would draw different numbers for "
                        f"one array. Give all the same seed first: shardax.random.seed(0)."
                    )
                source = source or seed_source(secrets.randbits(128))
                self._key = (str(source.impl), keys.known_key_words([source])[0])
        return self._key


_of_all_threads = KeyStream(None)
_isolated: ContextVar[KeyStream | None] = ContextVar("shardax_random_stream", default=None)


def current(caller: str) -> KeyStream:
    """The stream of this context, for a public function; raises while tracing."""
    if not is_eager():
        raise DrawError(
            f"shardax.random.{caller} was called while a JAX transform is tracing. The global "
            f"stream is outside of the program: its numbers would stay in the program as "
            f"constants. Pass random state as an argument, rngs = shardax.Rngs(0), and inside "
            f"step(rngs, x) draw by jax.random.normal(rngs.noise(), x.shape). Or draw the numbers "
            f"outside and pass those."
        )
    return _isolated.get() or _of_all_threads


def as_source(seed: object) -> keys.KeySource | StreamState:
    """The start of a stream from a seed, key or state."""
    if isinstance(seed, StreamState):
        return seed
    key = key_value(seed)
    if isinstance(key, lazy.LazyKey):
        return key.source
    if key.ndim:
        raise ModuleError(
            f"A stream starts from one key, not {key.size} of shape {key.shape}: give key[0]."
        )
    return keys.KeySource(key)


def seed(seed: object) -> None:
    """Restarts the stream from a seed.

    Inside ``isolated`` code it restarts the stream there. Equal seeds give equal numbers in every
    process, on every platform, with 64 bits enabled or not. An integer runs no JAX operation.

    Args:
        seed: An integer of any size, or a random key of shape ().

    Raises:
        ModuleError: If it is neither.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.seed(0)
        >>> first = sx.random.normal(3)
        >>> sx.random.seed(0)
        >>> bool((sx.random.normal(3) == first).all())
        True
    """
    current("seed").restart(as_source(seed))


def get_state() -> StreamState:
    """Returns the state of the stream; starts JAX's backend.

    Returns:
        Plain integers, see ``StreamState``.

    Raises:
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> saved = sx.random.get_state()
        >>> numbers = sx.random.uniform(4)
        >>> sx.random.set_state(saved)
        >>> bool((sx.random.uniform(4) == numbers).all())
        True
    """
    return current("get_state").state()


def set_state(state: StreamState) -> None:
    """Continues the stream from a state.

    Args:
        state: A result of ``get_state``, in this process or another.

    Raises:
        ModuleError: If it is not a state.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.set_state(sx.random.StreamState("threefry2x32", (0, 7), count=3))
        >>> sx.random.get_state().count
        3
    """
    stream = current("set_state")
    if not isinstance(state, StreamState):
        raise ModuleError(
            f"The state of a stream is a shardax.random.StreamState, but set_state was given "
            f"{state!r} of type {type(state).__name__}. For a seed or a key there is "
            f"shardax.random.seed."
        )
    stream.restart(state)


@contextlib.contextmanager
def isolated(seed: object) -> Generator[None]:
    """Draws from a separate stream in a ``with`` block or function.

    The stream belongs to the context that enters the block: other threads and tasks do not see it.

    Args:
        seed: An integer, a random key of shape (), or a ``StreamState``.

    Yields:
        Nothing.

    Raises:
        ModuleError: If it is none of these.
        DrawError: While a transform is tracing.

    Example:
        >>> import shardax as sx
        >>> sx.random.seed(0)
        >>> with sx.random.isolated(1):
        ...     evaluation = sx.random.permutation(5)
        >>> sx.random.get_state().count
        0
    """
    current("isolated")
    token = _isolated.set(KeyStream(as_source(seed)))
    try:
        yield
    finally:
        _isolated.reset(token)


# --- Programs ---


def draw(
    name: str,
    operands: Mapping[str, PyTree] | None = None,
    *,
    device: Any = None,
    sharding: Any = None,
    **options: Hashable,
) -> jax.Array:
    """Takes the next draw, by a function of ``jax.random``."""
    # ``"key"`` draws the key itself. ``operands`` are arrays by name of the argument.
    if options.get("shape") is not None:
        options["shape"] = _shape(name, options["shape"])
    stream = current(name)
    operands = operands or {}
    place = placement(f"shardax.random.{name}", device, sharding)
    # Of NumPy's 64 bits JAX makes 32, and warns of it where they are asked for by name.
    specs = tuple(
        (name, array.shape, jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True))
        for name, array in operands.items()
    )
    chosen = tuple(options.items())
    with stream.drawing() as (impl, words, folds):
        program = _program(name, impl, len(folds), specs, chosen, place)
    given = (words, folds, operands)
    if place is not None:
        return program(given)
    with creation_device():
        return program(given)


def _shape(name: str, shape) -> tuple[int, ...]:
    """A shape as a tuple."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    with contextlib.suppress(TypeError):
        checked = tuple(map(operator.index, sizes))
        if all(size >= 0 for size in checked):
            return checked
    raise DrawError(
        f"shardax.random.{name} was given the shape {shape!r}; a shape is an integer or a tuple of "
        f"integers, none below 0."
    )


@functools.lru_cache(maxsize=1024)
def _program(
    name: str,
    impl: str,
    folds: int,
    operands: tuple[tuple[str, tuple[int, ...], PyTree], ...],
    options: tuple[tuple[str, Hashable], ...],
    place: Sharding | None,
) -> programs.InitializerProgram:
    sampler = jax.random.clone if name == "key" else getattr(jax.random, name)

    def sample(given: tuple[Any, ...]) -> jax.Array:
        words, counts, arrays = given
        key = jax.random.wrap_key_data(words, impl=impl)
        for count in counts:
            key = jax.random.fold_in(key, count)
        return sampler(key, **arrays, **dict(options))

    given = (
        jax.ShapeDtypeStruct((key_size(impl),), np.uint32),
        (jax.ShapeDtypeStruct((), np.uint32),) * folds,
        {operand: jax.ShapeDtypeStruct(shape, dtype) for operand, shape, dtype in operands},
    )
    with jax.sharding.use_abstract_mesh(keys.NO_MESH):
        made = jax.eval_shape(sample, given)  # raises for wrong arguments
    if not isinstance(place, NamedSharding):
        return programs.InitializerProgram(sample, given, place)
    try:
        place.shard_shape(made.shape)
    except ValueError as error:
        raise DrawError(
            f"shardax.random.{name} cannot lay out {made.dtype}{list(made.shape)} by {place}: "
            f"{error} Choose a shape that the mesh divides, or another sharding."
        ) from error
    return programs.program_into(place, sample, given, programs.cuts_freely(sample, given, impl))


def placement(
    function: str, device: object, sharding: object, refused: type[ShardaxError] = DrawError
) -> Sharding | None:
    """Sharding for a new array, or None for the default device."""
    given = f"{function} was given"
    if device is None and sharding is None:
        return None
    if device is not None and sharding is not None:
        raise refused(
            f"{given} device={device!r} and sharding={sharding!r}; a sharding names its devices, "
            f"so give one of them."
        )
    place = sharding if device is None else device
    if isinstance(place, Sharding):
        return place
    if isinstance(place, PartitionSpec):
        mesh = resolve_mesh()
        if mesh is None:
            raise refused(
                f"{given} sharding={place}, which needs a mesh, and none is in scope. Put one "
                f"there with jax.set_mesh(mesh), or give a NamedSharding(mesh, {place})."
            )
        return NamedSharding(mesh, place)
    if device is None:
        raise refused(
            f"{given} sharding={sharding!r} of type {type(sharding).__name__}. Give a Sharding, or "
            f"a PartitionSpec over the mesh in scope; for a device there is device=."
        )
    return SingleDeviceSharding(as_device(device))
