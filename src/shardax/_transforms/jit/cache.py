# SPDX-License-Identifier: Apache-2.0
"""What the compiled form of one function remembers.

Both memories of a ``CompilationCache`` are bounded. A specialization costs a trace, so the least
recently used one is dropped; a cached call costs a flattening, so all are dropped together.

A function has one cache for equal options, so ``sx.jit(f)`` written twice traces ``f`` once, as
under ``jax.jit``. A function that is made anew has a cache of its own, whatever its code is; what
it compiles is shared by the jaxpr (``jit.programs``).
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from shardax._core.frames import exclusive, has_leaked
from shardax._core.graph.static import PROGRAMS_ATTRIBUTE
from shardax._core.object import Object
from shardax._transforms.jit import specialization as special
from shardax._transforms.lift import binding
from shardax._transforms.lift.captures import CapturePlace, places_of, signature_of
from shardax._transforms.lift.transformed import Transformed

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import CachedCall

# How many specializations one compiled function remembers.
MAX_SPECIALIZATIONS = 512

_MAX_CALLS = 4096

# How many calls; fewer where objects from closures, which may be many, are part of the key.
_MAX_CALLS_WITH_PLACES = 64


class CompilationCache:
    """The specializations and cached calls of one compiled function."""

    def __init__(self) -> None:
        # Where the function finds objects that it is not given; looked for whenever it is traced.
        self.places: list[CapturePlace] | None = None
        self.specializations: dict[Hashable, special.Specialization] = {}
        self.calls: dict[Hashable, CachedCall] = {}  # by what identifies a call
        # What a trace met in no certain way, by the key of the call. The next trace of such a call
        # begins with these objects as inputs, so that it need not begin again.
        self.met: dict[Hashable, list[weakref.ref[Any]]] = {}
        # Keys of places that a trace bound anew, which are no certain ones.
        self.uncertain: set[Hashable] = set()
        self.has_warned = False
        # Counts calls; ``Specialization.used`` is the count at the last use.
        self.ticks = itertools.count(1)

    def find_places(self, function: Callable[..., Any]) -> list[CapturePlace]:
        """Returns the places of the function that hold objects now."""
        places = [place for place in places_of(function) if place.key not in self.uncertain]
        keys = [place.key for place in places]
        if self.places is None or keys != [place.key for place in self.places]:
            # Remembered calls are found by what the places held.
            self.calls.clear()
            self.places = places
        return self.places

    def signature(self) -> tuple[Hashable, ...]:
        """Returns what the places hold now, as part of what a call is found by."""
        return tuple([place.signature() for place in self.places or () if not place.is_fixed])

    def structure(self) -> tuple[Hashable, ...]:
        """Returns the same without the identities of objects."""
        return tuple([signature_of(place.read(), type) for place in self.places or ()])

    def objects_met(self, key: Hashable) -> list[Object]:
        """Returns the objects that the last trace for a call met in no certain way."""
        references = self.met.get(key, ())
        alive = (reference() for reference in references)
        # An object of a surrounding trace that has ended is of no use.
        return [item for item in alive if item is not None and not has_leaked(item)]

    def note_met(self, key: Hashable, objects: list[Any]) -> None:
        """Notes the objects that a trace for a call met in no certain way."""
        if len(self.met) >= MAX_SPECIALIZATIONS:
            self.met.clear()
        self.met[key] = [weakref.ref(item) for item in objects]

    def add(self, program: special.Specialization) -> None:
        """Adds a specialization; a full cache drops the least recently used."""
        while len(self.specializations) >= MAX_SPECIALIZATIONS:
            self.drop(min([*self.specializations.values()], key=operator.attrgetter("used")))
        self.specializations[program.key] = program

    def drop(self, program: special.Specialization) -> None:
        """Forgets a specialization, under every key by which it is found, and its calls."""
        for key, known in [*self.specializations.items()]:
            if known is program:
                self.specializations.pop(key, None)
        for key, entry in [*self.calls.items()]:
            if entry.specialization is program:
                self.calls.pop(key, None)

    def remember(self, key: Hashable, entry: CachedCall, graph: binding.InputGraph) -> None:
        """Remembers a call until one of its objects is gone."""
        most = _MAX_CALLS_WITH_PLACES if self.places else _MAX_CALLS
        if len(self.calls) >= most:
            self.calls.clear()

        calls = self.calls  # not self: the callback must keep no program alive

        def forget(_: object) -> None:
            calls.pop(key, None)

        entry.keep_weakly(graph, forget)
        self.calls[key] = entry

    def clear(self) -> None:
        """Forgets everything."""
        for program in self.specializations.values():
            program.clear_cache()
        self.specializations.clear()
        self.calls.clear()
        self.met.clear()


# How many caches, for different options or transforms, one function keeps.
_MAX_CACHES = 128

T = TypeVar("T")


class _CachesOf:
    """What is kept for one function, compared by identity: a copied attribute must be hashable."""

    __slots__ = ("by_key", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        # A decorator may copy attributes of a function to another one.
        self.function = weakref.ref(function)
        self.by_key: dict[Hashable, Any] = {}

    def __reduce__(self) -> Any:  # a function may be pickled by value, with its attributes
        return dict, ()


def kept_by(function: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
    """Returns what is kept for a function under a key, making it the first time."""
    with exclusive:
        # An attribute of the function, so that both go together.
        caches = function.__dict__.get(PROGRAMS_ATTRIBUTE)
        if type(caches) is not _CachesOf or caches.function() is not function:
            caches = _CachesOf(function)
            function.__dict__[PROGRAMS_ATTRIBUTE] = caches
        kept = caches.by_key.get(key)
        if kept is None:
            while len(caches.by_key) >= _MAX_CACHES:
                del caches.by_key[next(iter(caches.by_key))]
            kept = caches.by_key[key] = make()
        return kept


def cache_of(function: object, options: special.JitOptions) -> CompilationCache:
    """Returns the cache of a function for equal options."""
    key = options.key()
    if not isinstance(function, (types.FunctionType, Transformed)) or type(key) is object:
        return CompilationCache()
    return kept_by(function, ("jit", key), CompilationCache)
