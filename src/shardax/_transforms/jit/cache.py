# SPDX-License-Identifier: Apache-2.0
"""What compiled functions remember, and which of them remember together.

Both memories of a ``CompilationCache`` are bounded. A specialization costs a trace, so the least
recently used one is dropped; a cached call costs a flattening, so all are dropped together. What
``jit`` makes of one function with equal options has one cache, as long as the function does the
same (``lift.behavior``).
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from shardax._core.frames import exclusive
from shardax._core.graph.flatten import static_values
from shardax._transforms.jit import specialization as special
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import engine
from shardax._transforms.lift.behavior import Behavior, NotComparable, is_lasting

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import CachedCall

# How many specializations one compiled function remembers.
MAX_SPECIALIZATIONS = 512

_MAX_CALLS = 4096

# How many calls; fewer where objects from closures, which may be many, are part of the key.
_MAX_CALLS_WITH_SOURCES = 64


class CompilationCache:
    """The specializations and cached calls of one compiled function."""

    def __init__(self, behavior: Any = None) -> None:
        # What the function did at every trace; None if that changed, or the cache is not shared.
        self.behavior = behavior
        self.by_behavior: Any = None  # under what it is shared by functions that are made anew
        # Where the function takes objects from; looked for at the first call, as names may be bound
        # later.
        self.sources: list[inputs.ClosureSource] | None = None
        self.captured: list[weakref.ref[Any]] = []
        self.specializations: dict[Any, special.Specialization] = {}
        self.calls: dict[Any, CachedCall] = {}  # by what identifies a call
        # Counts calls; ``Specialization.used`` is the count at the last use.
        self.ticks = itertools.count(1)

    def add(self, program: special.Specialization) -> None:
        """Adds a specialization; a full cache drops the least recently used."""
        while len(self.specializations) >= MAX_SPECIALIZATIONS:
            oldest = min([*self.specializations.values()], key=operator.attrgetter("used"))
            self.specializations.pop(oldest.key, None)
            for key, entry in [*self.calls.items()]:
                if entry.specialization is oldest:
                    self.calls.pop(key, None)
        self.specializations[program.key] = program
        if self.by_behavior is not None and not can_be_kept(self):
            _by_behavior.pop(self.by_behavior, None)

    def remember(self, key: Any, entry: CachedCall, graph: engine.InputGraph, few: bool) -> None:
        """Remembers a call until one of its objects is gone."""
        if len(self.calls) >= (_MAX_CALLS_WITH_SOURCES if few else _MAX_CALLS):
            self.calls.clear()

        calls = self.calls  # not self: the callback must keep no program alive

        def forget(_: Any) -> None:
            calls.pop(key, None)

        entry.keep_weakly(graph, forget)
        self.calls[key] = entry

    def clear(self) -> None:
        """Forgets everything."""
        for program in self.specializations.values():
            program.clear_cache()
        self.specializations.clear()
        self.calls.clear()


_PROGRAMS = "__shardax_programs__"
_MOST_OPTIONS = 16


class _SharedCache(NamedTuple):
    """The cache of a function."""

    function: weakref.ref[Any]  # a decorator may copy attributes to another function
    cache: CompilationCache

    def __reduce__(self) -> Any:  # a function may be pickled by value, with its attributes
        return dict, ()


# Caches of functions that close over nothing, by what they do.
_by_behavior: dict[Any, CompilationCache] = {}
_MOST_BY_BEHAVIOR = 64


def shared_cache(function: Any, options: special.JitOptions) -> CompilationCache:
    """Returns the cache of a function for equal options."""
    key = options.key()
    if type(function) is not types.FunctionType or type(key) is object:
        return CompilationCache()
    behavior = behavior_of(function)
    if behavior is None:
        return CompilationCache()
    with exclusive:
        if function.__closure__ is None and not behavior.objects:
            return _cache_by_behavior(key, behavior)
        # An attribute of the function, so that both go together.
        caches = function.__dict__.setdefault(_PROGRAMS, {})
        known = caches.get(key)
        is_own = known is None or known.function() is function
        if known and is_own and known.cache.behavior == behavior.key:
            return known.cache
        if len(caches) >= _MOST_OPTIONS or not is_own:
            caches = function.__dict__[_PROGRAMS] = {}
        made = CompilationCache(behavior.key)
        caches[key] = _SharedCache(weakref.ref(function), made)
        return made


def can_be_kept(cache: CompilationCache) -> bool:
    """Whether static values of its programs can hold no model."""
    # A model whose attribute is a function that closes over it would never be freed.
    definitions = (d for key in [*cache.specializations] for d in key[0].objects)
    return all(is_lasting(v) for d in definitions for _, v in static_values(d, ()))


def _cache_by_behavior(options_key: Any, behavior: Behavior) -> CompilationCache:
    """Returns the cache of functions made anew, like a lambda."""
    key = options_key, behavior.key
    made = _by_behavior.pop(key, None)
    # Objects from where the key does not see them might be others for the next function.
    if made is None or made.behavior != behavior.key or made.captured:
        made = CompilationCache(behavior.key)
    made.by_behavior = key
    while len(_by_behavior) >= _MOST_BY_BEHAVIOR:
        _by_behavior.pop(next(iter(_by_behavior)))
    _by_behavior[key] = made  # the latest used is the last
    return made


def behavior_of(function: Any) -> Behavior | None:
    """Returns what a function depends on, None if not comparable."""
    try:
        behavior = Behavior([function])
        hash(behavior.key)
    except (NotComparable, TypeError):
        return None
    return behavior
