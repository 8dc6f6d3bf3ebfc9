# SPDX-License-Identifier: Apache-2.0
"""What compiled functions remember, and which of them remember together.

Both memories of a ``CompilationCache`` are bounded. A specialization costs a trace, so the least
recently used one is dropped; a cached call costs a flattening, so all are dropped together. What
``jit`` makes of one function with equal options has one cache, as long as the function does the
same (``lift.behavior``).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from shardax._core.frames import exclusive
from shardax._core.graph.flatten import static_values
from shardax._core.graph.static import PROGRAMS_ATTRIBUTE
from shardax._transforms.jit import specialization as special
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding
from shardax._transforms.lift.behavior import Behavior, is_lasting

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import CachedCall

# How many specializations one compiled function remembers.
MAX_SPECIALIZATIONS = 512

_MAX_CALLS = 4096

# How many calls; fewer where objects from closures, which may be many, are part of the key.
_MAX_CALLS_WITH_SOURCES = 64


class CompilationCache:
    """The specializations and cached calls of one compiled function."""

    def __init__(self, behaviors: tuple[Hashable, ...] = (), options: Any = None) -> None:
        # The behavior keys for which its programs are right; empty if it is not shared.
        self.behaviors = {*behaviors}
        # The key of options, if functions that are made anew share it by what they do.
        self.options_by_behavior = options
        self.may_be_kept = True  # whether static values of its programs can hold no model
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
            self.drop(oldest)
            for key, entry in [*self.calls.items()]:
                if entry.specialization is oldest:
                    self.calls.pop(key, None)
        self.specializations[program.key] = program
        if self.behaviors:
            reference = weakref.ref(self)  # the cache must go with the last that uses it
            program.tracing = lambda function: _tracing(reference(), function)
        # A model whose attribute is a function that closes over it would never be freed.
        values = (v for d in program.key[0].objects for _, v in static_values(d, ()))
        if not all(map(is_lasting, values)):
            self.may_be_kept = False
            self._leave_table(self.behaviors)

    def drop(self, program: special.Specialization) -> None:
        """Forgets a specialization, under every key by which it is found."""
        for key, known in [*self.specializations.items()]:
            if known is program:
                self.specializations.pop(key, None)

    def unshare(self) -> None:
        """Leaves the cache to those who have it."""
        self._leave_table(self.behaviors)
        self.behaviors = set()

    def note_writes(self, behavior: Behavior, function: object) -> None:
        """Notes what a function did before and does after a trace."""
        try:
            key_before, key_after = behavior.keys_around_trace([function])
            self.behaviors |= {key_before, key_after}
        except TypeError:  # no longer comparable, or hashable
            return
        if key_before != key_after:
            # Elsewhere a function may depend on what its trace writes.
            self._leave_table([key_before])
            self.join_table(key_after)

    def join_table(self, behavior: Hashable) -> None:
        """Lets functions of a behavior find the cache."""
        if self.options_by_behavior is not None and self.may_be_kept:
            _by_behavior.pop((self.options_by_behavior, behavior), None)
            while len(_by_behavior) >= _MOST_BY_BEHAVIOR:
                _by_behavior.pop(next(iter(_by_behavior)))
            _by_behavior[self.options_by_behavior, behavior] = self  # the latest used is the last

    def _leave_table(self, behaviors: Iterable[Hashable]) -> None:
        for behavior in behaviors:
            key = self.options_by_behavior, behavior
            if _by_behavior.get(key) is self:
                del _by_behavior[key]

    def remember(
        self, key: object, entry: CachedCall, graph: binding.InputGraph, few: bool
    ) -> None:
        """Remembers a call until one of its objects is gone."""
        if len(self.calls) >= (_MAX_CALLS_WITH_SOURCES if few else _MAX_CALLS):
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


_MOST_OPTIONS = 16


class _SharedCache(NamedTuple):
    """The cache of a function."""

    function: weakref.ref[Any]  # a decorator may copy attributes to another function
    cache: CompilationCache

    def __reduce__(self) -> Any:  # a function may be pickled by value, with its attributes
        return dict, ()


# Caches of functions that close over nothing, by options and what they do.
_by_behavior: dict[Any, CompilationCache] = {}
_MOST_BY_BEHAVIOR = 64


@contextlib.contextmanager
def _tracing(cache: CompilationCache | None, function: object) -> Iterator[None]:
    """Notes what a function does before and after a trace."""
    if cache is None or not cache.behaviors:
        yield
        return
    behavior = behavior_of(function)
    if behavior is None or behavior.key() not in cache.behaviors:
        cache.unshare()  # its programs differ in what the function did
        yield
        return
    try:
        yield
    finally:
        cache.note_writes(behavior, function)


def shared_cache(function: object, options: special.JitOptions) -> CompilationCache:
    """Returns the cache of a function for equal options."""
    key = options.key()
    if type(function) is not types.FunctionType or type(key) is object:
        return CompilationCache()
    behavior = behavior_of(function)
    if behavior is None:
        return CompilationCache()
    with exclusive:
        # An attribute of the function, so that both go together.
        caches = function.__dict__.setdefault(PROGRAMS_ATTRIBUTE, {})
        shared = caches.get(key)
        is_own = shared is None or shared.function() is function
        if shared and is_own and behavior.key() in shared.cache.behaviors:
            return shared.cache
        if len(caches) >= _MOST_OPTIONS or not is_own:
            caches = function.__dict__[PROGRAMS_ATTRIBUTE] = {}
        if function.__closure__ is None and not behavior.objects:
            cache = _cache_by_behavior(key, behavior.key())
        else:
            cache = CompilationCache((behavior.key(),))
        caches[key] = _SharedCache(weakref.ref(function), cache)
        return cache


def _cache_by_behavior(options_key: object, behavior: Hashable) -> CompilationCache:
    """Returns the cache of functions made anew, like a lambda."""
    cache = _by_behavior.get((options_key, behavior))
    # Objects from where the key does not see them might be others for the next function.
    if cache is None or cache.captured:
        cache = CompilationCache((behavior,), options_key)
    cache.join_table(behavior)
    return cache


def behavior_of(function: object) -> Behavior | None:
    """Returns what a function depends on, None if not comparable."""
    try:
        behavior = Behavior([function])
        hash(behavior.key())
    except TypeError:
        return None
    return behavior
