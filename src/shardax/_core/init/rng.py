# SPDX-License-Identifier: Apache-2.0
"""Random streams.

A *stream* hands out keys: its n-th key is its base key with n folded in. Base key and counter are
Variables (``RngState``), so a stream advances through ``jit``, splits under ``vmap`` and replays
under ``remat`` like any other state. ``Rngs`` is a set of streams by name (``params`` for
initialisation, ``dropout``, ...), with an optional default for names it does not hold. A *scope* is
a child whose keys depend on its name and not on how many keys were drawn before, so that inserting
a layer does not reshuffle the others. Names enter keys through a stable hash, so the same program
draws the same numbers in every process.

Outside of programs a stream computes no key: it keeps the *source* of its base key, and a draw for
a lazy value is that source with the count folded in (``init.keys``).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core._jax import Tracer, is_prng_key
from shardax._core.errors import ModuleAttributeError, ModuleError
from shardax._core.frames import owner_here
from shardax._core.graph.static import Metadata
from shardax._core.init.key_reuse import note_draw
from shardax._core.init.keys import KeySource
from shardax._core.init.lazy import LazyKey
from shardax._core.module import Module
from shardax._core.threads import in_one_step
from shardax._core.variable import Variable
from shardax._core.variable_types import RngState


def _name_hash(name: str) -> int:
    return zlib.crc32(name.encode())


# The functions of ``jax.random`` that are methods of streams. Not ``f`` and ``t``, for names of
# streams come first.
_DRAWS = """
ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet exponential gamma
geometric gumbel laplace logistic lognormal maxwell multinomial multivariate_normal normal
orthogonal pareto permutation poisson rademacher randint rayleigh triangular truncated_normal
uniform wald weibull_min
"""
DRAWS = frozenset(_DRAWS.split())


class RngStream(Module):
    """One named stream of random keys.

    Calling it returns the next key, a typed key array of shape (). Functions of ``jax.random`` that
    draw numbers are its methods, without a key: ``stream.normal((2, 3))``.

    Args:
        source: An integer seed, a key (typed, or raw uint32), or a ``KeySource``. An array of keys
            is for ``vmap`` and ``scan``, one for each part.
        name: The stream's name; also the metadata tag of its Variables, so the filter ``"dropout"``
            selects them.

    Example:
        >>> import shardax as sx
        >>> stream = sx.Rngs(dropout=0).dropout
        >>> first, second = stream(), stream()
        >>> bool(first == second), int(stream.count)
        (False, 2)
        >>> stream.normal((2, 3)).shape
        (2, 3)
    """

    def __init__(self, source: Any, name: str) -> None:
        tag = Metadata(None, {"tag": name})
        self.name = name
        key = key_value(source)
        self.key = RngState._make(key, tag, owner_here())
        counts = np.zeros(key.shape, np.uint32)  # one for each key
        self.count = RngState._make(counts, tag, owner_here())

    def __getattr__(self, name: str) -> Any:
        if name not in DRAWS:
            return super().__getattr__(name)
        return lambda *args, **kwargs: getattr(jax.random, name)(self(), *args, **kwargs)

    def __call__(self) -> jax.Array:
        count = self._advance()
        return jax.random.fold_in(self.key.value, count)

    def _advance(self) -> np.ndarray | jax.Array:
        """Returns the count and advances it, in one step for all threads."""
        with in_one_step():
            count = self.count._here()._value
            note_draw(self.name, self._base_source(), count)

            # NumPy stays NumPy, so that building a model runs no JAX operation.
            if isinstance(count, np.ndarray):
                self.count._write(np.asarray(count + np.uint32(1)))
            else:
                self.count._write(count + jnp.uint32(1))
        return count

    def draw_source(self) -> KeySource:
        """Takes one draw and returns the source of its key."""
        base = self._base_source()
        if base is None or base.is_traced:
            return KeySource(self())

        count = self._advance()
        if isinstance(count, Tracer):
            return KeySource(jax.random.fold_in(self.key.value, count))
        return base.fold(int(count))

    def _base_source(self) -> KeySource | None:
        """Returns the source of the base key; None if there are several base keys."""
        key = self.key._here()._value
        if isinstance(key, LazyKey):
            return key.source
        return None if key.ndim else KeySource(key)

    def derive(self, *data: int) -> KeySource | jax.Array:
        """Returns the base key with ``data`` folded in, or its source, without a draw."""
        key = self.key._here()._value
        if isinstance(key, LazyKey):
            return key.source.fold(*data)
        for item in data:
            key = jax.random.fold_in(key, item)
        return key


def is_integer(source: Any) -> bool:
    """Whether a seed is an integer, not a bool."""
    if isinstance(source, np.ndarray):
        return source.ndim == 0 and np.issubdtype(source.dtype, np.integer)
    return isinstance(source, (int, np.integer)) and not isinstance(source, bool)


def seed_source(seed: int) -> KeySource:
    """Returns the key source of an integer seed of any size."""
    # jax.random.key keeps the lowest 32 bits alone unless 64 bits are enabled, so that seeds such
    # as 2**32 and 0 give one key. Here every seed gives a key of its own, the same with 64 bits and
    # without; from 0 to 2**32 - 1 it is that of jax.random.key.
    if 0 <= seed <= _LOWEST_32_BITS:
        return KeySource(seed)

    # The lowest 32 bits are the root; the others, and the sign at last, are folded in.
    root = seed & _LOWEST_32_BITS
    folds = []
    seed >>= 32
    while seed not in (0, -1):
        folds.append(seed & _LOWEST_32_BITS)
        seed >>= 32
    sign = seed & _LOWEST_32_BITS
    return KeySource(root, (*folds, sign))


_LOWEST_32_BITS = 2**32 - 1


def key_value(source: Any) -> LazyKey | jax.Array:
    """Returns a typed key, or a ``LazyKey`` for an integer."""
    if isinstance(source, Variable):
        source = source.value
    if isinstance(source, KeySource):
        return LazyKey(source)
    if is_integer(source):
        return LazyKey(seed_source(int(source)))
    if isinstance(source, (jax.Array, np.ndarray)):
        if isinstance(source, jax.Array) and is_prng_key(source):
            return source
        if source.ndim == 0 and jnp.issubdtype(source.dtype, np.integer):
            return jax.random.key(source)
        if source.ndim > 0 and source.dtype == np.uint32:
            with contextlib.suppress(TypeError):  # not as many numbers as a key has
                return jax.random.wrap_key_data(jnp.asarray(source))

    is_array = isinstance(source, (jax.Array, np.ndarray))
    shown = f"an array {source.dtype}{list(source.shape)}" if is_array else repr(source)
    raise ModuleError(
        f"A random stream needs an integer seed or a random key, but was given {shown} of type "
        f"{type(source).__name__}. Use Rngs(0), or Rngs(jax.random.key(0)), or name the stream: "
        f"Rngs(params=0); of streams that there are, rngs.fork() makes others."
    )


class Rngs(Module):
    """Named random streams.

    The default stream draws numbers too: ``rngs.normal((2, 3))`` is that of ``jax.random`` with its
    next key.

    Args:
        default: Seed or key of the stream used for names that are not given; None for no default.
        **streams: Seed or key by stream name. Two streams with the same seed are still different
            streams.

    Example:
        >>> import shardax as sx
        >>> rngs = sx.Rngs(0, dropout=1)
        >>> key = rngs.dropout()
        >>> key.shape, rngs.params is rngs.default
        ((), True)
        >>> rngs.normal((2, 3)).shape, rngs.dropout.bernoulli(0.5, (4,)).dtype.name
        ((2, 3), 'bool')
        >>> sx.Rngs(params=0).noise
        Traceback (most recent call last):
            ...
        shardax.errors.ModuleAttributeError: Rngs has no stream 'noise' and no default; it has:
        params. Make it with Rngs(params=..., noise=0), or give a default: Rngs(0, params=...).
    """

    def __init__(self, default: object = None, *others: object, **streams: object) -> None:
        if others or isinstance(default, (dict, Rngs, RngStream)):
            given = ", ".join(type(each).__name__ for each in (default, *others))
            raise ModuleError(
                f"Rngs takes one default seed or key, and others by name, but was given ({given}). "
                f"Write Rngs(0, dropout=1), or Rngs(**seeds); for other streams of the same "
                f"numbers, rngs.fork()."
            )

        if default is not None:
            self.default = RngStream(default, "default")
        for name, source in streams.items():
            if hasattr(Rngs, name):
                raise ModuleAttributeError(
                    f"A random stream cannot be named {name!r}, which is a method of Rngs; choose "
                    f"another name."
                )
            setattr(self, name, RngStream(_named(source, name), name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        default = self.__dict__.get("default")
        if default is not None:
            return getattr(default, name) if name in DRAWS else default
        raise _no_stream(name, list(self.__dict__))

    def __getitem__(self, name: str) -> RngStream:
        # As an attribute, the name of a function of jax.random would be that function.
        if name in DRAWS and name not in self.__dict__:
            return self.__dict__["default"]
        return getattr(self, name)

    def __call__(self) -> jax.Array:
        """Returns the next key of the default stream."""
        return self["default"]()

    def streams(self) -> Iterator[tuple[str, RngStream]]:
        """Yields (name, stream) pairs."""
        for name, attribute in self.__dict__.items():
            if isinstance(attribute, RngStream):
                yield name, attribute

    def scope(self, name: str) -> Rngs:
        """Returns a child whose keys depend on ``name`` alone.

        They do not depend on what was drawn before.

        Args:
            name: Any string; the same name gives the same child.

        Example:
            >>> import shardax as sx
            >>> a, b = sx.Rngs(0), sx.Rngs(0)
            >>> _ = b.params()
            >>> bool(a.scope("block").params() == b.scope("block").params())
            True
        """
        if not isinstance(name, str):
            raise ModuleError(f"A scope has a name, rngs.scope('block'), not {name!r}.")
        return self._child(lambda stream: stream.derive(_SCOPE, _name_hash(name)))

    def fork(self, split: int | None = None) -> Rngs:
        """Returns a child with streams forked from these.

        That takes one draw from each stream.

        Args:
            split: If given, each stream of the child has ``split`` keys on a leading axis, for
                ``vmap`` and ``scan``.

        Example:
            >>> import shardax as sx
            >>> sx.Rngs(0).fork(split=4).default.key.shape
            (4,)
        """
        if split is None:
            return self._child(lambda stream: stream.draw_source())
        count = _count(split)
        return self._child(lambda stream: jax.random.split(stream(), count))

    def split(self, count: int) -> Rngs:
        """Returns a child whose streams have ``count`` keys: ``fork(split=count)``."""
        return self.fork(split=_count(count))

    def broadcast(self, count: int) -> Rngs:
        """Returns a child whose streams have one new key ``count`` times.

        Args:
            count: How often, on a leading axis for ``vmap`` and ``scan``.

        Example:
            >>> import shardax as sx
            >>> key = sx.Rngs(0).broadcast(3).default.key
            >>> key.shape, bool(key[0] == key[2])
            ((3,), True)
        """
        size = _count(count)
        return self._child(lambda stream: jnp.broadcast_to(stream(), (size,)))

    def reseed(self, default: object = None, **streams: object) -> None:
        """Restarts streams from other seeds, in place.

        Args:
            default: Seed or key of the default stream; None to leave it.
            **streams: Seed or key by stream name; the others go on as they are.

        Raises:
            ModuleAttributeError: If there is no such stream; nothing is changed.
            ModuleError: If something is neither a seed nor a key; nothing is changed.

        Example:
            >>> import shardax as sx
            >>> rngs = sx.Rngs(0, dropout=1)
            >>> _ = rngs.dropout()
            >>> rngs.reseed(dropout=2)
            >>> bool(rngs.dropout() == sx.Rngs(dropout=2).dropout())
            True
        """
        sources = streams if default is None else {"default": default, **streams}
        new_keys: dict[str, LazyKey | jax.Array] = {}
        for name, source in sources.items():
            if name not in self.__dict__:
                raise ModuleAttributeError(
                    f"Rngs has no stream {name!r} to reseed; it has: {', '.join(self.__dict__)}."
                )
            new_keys[name] = key_value(source if name == "default" else _named(source, name))

        # All are right, so now all are changed.
        for name, key in new_keys.items():
            stream = self.__dict__[name]
            stream.key.value = key
            stream.count.value = np.zeros(key.shape, np.uint32)

    def _child(self, keys: Callable[[RngStream], object]) -> Rngs:
        """Returns Rngs of the same names with streams of other keys."""
        child = Rngs()
        for name, stream in self.streams():
            setattr(child, name, RngStream(keys(stream), name))
        return child


def _no_stream(name: str, present: list[str]) -> ModuleAttributeError:
    """Returns the error of a stream that is not there, without a default."""
    listed = ", ".join(present) or "none"
    others = "".join(f"{other}=..., " for other in present)
    with_default = "".join(f", {other}=..." for other in present)
    return ModuleAttributeError(
        f"Rngs has no stream {name!r} and no default; it has: {listed}. Make it with "
        f"Rngs({others}{name}=0), or "
        f"give a default: Rngs(0{with_default})."
    )


def _count(number: object) -> int:
    if isinstance(number, (int, np.integer)) and not isinstance(number, bool) and number > 0:
        return int(number)
    raise ModuleError(f"Keys are split into a number of them, such as split=4, not {number!r}.")


_SCOPE = 0x5C09E  # separates the keys of scopes from the keys that a stream hands out


def _named(source: Any, name: str) -> KeySource | LazyKey | jax.Array:
    """Returns a seed with the name of a stream folded in; a key as it is."""
    if is_integer(source):
        return seed_source(int(source)).fold(_name_hash(name))
    key = key_value(source)

    # An integer in a JAX array, of which ``key_value`` made a key.
    is_seed = key is not source and getattr(source, "ndim", None) == 0
    if is_seed and isinstance(key, jax.Array):
        return jax.random.fold_in(key, _name_hash(name))
    return key
