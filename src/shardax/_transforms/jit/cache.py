# SPDX-License-Identifier: Apache-2.0
"""When two functions share what was traced and compiled, and where that is kept.

What is *traced* belongs to one function object. A function keeps one ``CompilationCache`` for equal
options (``kept_by``), so ``sx.jit(f)`` written twice for one ``f`` traces it once, as under
``jax.jit``. A function that is made anew, by a ``def`` or ``lambda`` that runs again, is another
object with a cache of its own, whatever its code is: its first call traces it.

What is *compiled* is looked up by the jaxpr of that trace, for a function of the same name and with
equal options (``jit.programs``). So of two functions with equal source both are traced, and the
second is compiled only if

- its jaxpr differs: it read another Python number, say, which is a literal in it, or its arguments
  have other shapes or dtypes (arrays that it closes over are inputs of the program: their values
  do not count);
- or its jaxpr cannot be shared: in it is a ``jax.Ref``, a Python function (``jax.pure_callback``),
  or an inner ``jax.jit`` that closes over an array; or an array that it closes over is committed to
  other devices than its inputs, or read under another mesh;
- or settings of JAX, or the mesh in scope, are others.

A ``CompilationCache`` has specializations, by the structure of their arguments, and cached calls,
by the identities of their objects. Both are bounded. A specialization costs a trace, so the least
recently used one is dropped; a cached call costs a flattening, so all are dropped together.
"""

from __future__ import annotations

import operator
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax

from shardax._core.frames import has_leaked
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.static import PROGRAMS_ATTRIBUTE, Static
from shardax._core.object import Object
from shardax._transforms.jit.calls import CachedCall
from shardax._transforms.jit.options import JitOptions
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.captures import CapturePlace, places_of, signature_of
from shardax._transforms.lift.input_graph import InputGraph
from shardax._transforms.lift.transformed import Transformed

if TYPE_CHECKING:
    from shardax._transforms.jit.specialization import Specialization

# How many specializations one compiled function remembers.
MAX_SPECIALIZATIONS = 512

_MAX_CALLS = 4096

# How many calls; fewer where objects from closures, which may be many, are part of the key.
_MAX_CALLS_WITH_PLACES = 64


class StructureKey(NamedTuple):
    """What a specialization is found by.

    If one of these is new, a call is traced. It is traced as well if all are known and the shape or
    dtype of an array is new (``Specialization.find_program``).
    """

    graphdef: GraphDef
    """The structure of the objects: classes, static attributes, and what holds what."""

    root_count: int
    """How many of them stand in the arguments."""

    captured: tuple[Hashable, ...]
    """What the places hold at which the function finds objects (``lift.captures``)."""

    templates: tuple[inputs.Template, ...]
    """How each positional argument is put together."""

    named: tuple[tuple[str, inputs.Template], ...]
    """The same of each argument by name."""

    arrays: jax.tree_util.PyTreeDef
    """The tree of the arrays in the arguments."""

    static: tuple[tuple[int | str, Static], ...]
    """The static arguments, by position or name."""

    functions: Hashable
    """The identities of functions among static values, which their values do not tell apart."""

    call: object = None
    """What makes the key that of one call, whose trace met objects in no certain way."""


class CompilationCache:
    """The specializations and cached calls of one compiled function.

    Attributes:
        specializations: By the key of the structure of a call.
        calls: By the key of a call (``calls.CallKey``).
        places: Where the function finds objects that it is not given (``lift.captures``); None
            before the first call. They are looked for anew whenever the slow way is taken.
        uncertain_inputs: The objects that a trace met in no certain way, by the key of the
            structure. The next trace of such a call begins with them as inputs, so that it need not
            begin again.
        rebound_places: Keys of places that a trace bound anew, which are no certain ones.
        has_warned: Whether the user was told of objects that were met so.
    """

    def __init__(self) -> None:
        self.specializations: dict[Hashable, Specialization] = {}
        self.calls: dict[Hashable, CachedCall] = {}
        self.places: list[CapturePlace] | None = None
        self.uncertain_inputs: dict[Hashable, list[weakref.ref[Object]]] = {}
        self.rebound_places: set[Hashable] = set()
        self.has_warned = False

    # --- objects that the function is not given ---------------------------------------------------

    def find_places(self, function: Callable[..., Any]) -> list[CapturePlace]:
        """Returns the places where a function holds objects now, looked for anew."""
        places = [place for place in places_of(function) if place.key not in self.rebound_places]
        keys = [place.key for place in places]
        if self.places is None or keys != [place.key for place in self.places]:
            # Remembered calls are found by what the places held.
            self.calls.clear()
            self.places = places
        return self.places

    def structure(self) -> tuple[Hashable, ...]:
        """Returns what the places hold now, without the identities of objects."""
        return tuple([signature_of(place.read(), type) for place in self.places or ()])

    def uncertain_inputs_of(self, key: Hashable) -> list[Object]:
        """Returns the objects that the last trace for a call met in no certain way."""
        references = self.uncertain_inputs.get(key, ())
        alive = (reference() for reference in references)
        # An object of a surrounding trace that has ended is of no use.
        return [item for item in alive if item is not None and not has_leaked(item)]

    def note_uncertain_inputs(self, key: Hashable, objects: Sequence[Object]) -> None:
        """Notes the objects that a trace for a call met in no certain way."""
        if len(self.uncertain_inputs) >= MAX_SPECIALIZATIONS:
            self.uncertain_inputs.clear()
        self.uncertain_inputs[key] = [weakref.ref(item) for item in objects]

    # --- specializations and calls ----------------------------------------------------------------

    def add(self, specialization: Specialization) -> None:
        """Adds a specialization; a full cache drops the least recently used."""
        while len(self.specializations) >= MAX_SPECIALIZATIONS:
            known = [*self.specializations.values()]
            self.drop(min(known, key=operator.attrgetter("used")))
        self.specializations[specialization.key] = specialization

    def drop(self, specialization: Specialization) -> None:
        """Forgets a specialization, under every key by which it is found, and its calls."""
        for key, known in [*self.specializations.items()]:
            if known is specialization:
                self.specializations.pop(key, None)
        for key, call in [*self.calls.items()]:
            if call.specialization is specialization:
                self.calls.pop(key, None)

    def remember(self, key: Hashable, call: CachedCall, graph: InputGraph) -> None:
        """Remembers a call until one of its objects is gone."""
        most = _MAX_CALLS_WITH_PLACES if self.places else _MAX_CALLS
        if len(self.calls) >= most:
            self.calls.clear()

        calls = self.calls  # not self: the callback must keep no program alive

        def forget(_: object) -> None:
            calls.pop(key, None)

        call.hold_weakly(graph, forget)
        self.calls[key] = call

    def clear(self) -> None:
        """Forgets everything."""
        for specialization in self.specializations.values():
            specialization.clear_cache()
        self.specializations.clear()
        self.calls.clear()
        self.uncertain_inputs.clear()


# --- what a function keeps ------------------------------------------------------------------------

# How many caches, for different options or transforms, one function keeps.
_MAX_CACHES = 128

T = TypeVar("T")

# Held while something is made that a function keeps, which is not traced.
_keeping = threading.RLock()


class _KeptByFunction:
    """What is kept for one function, compared by identity: a copied attribute must be hashable."""

    __slots__ = ("by_key", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        # A decorator may copy attributes of a function to another one.
        self.function = weakref.ref(function)
        self.by_key: dict[Hashable, Any] = {}

    def __reduce__(self) -> Any:  # a function may be pickled by value, with its attributes
        return dict, ()


def kept_by(function: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
    """Returns what is kept for a function under a key, made by ``make`` the first time."""
    with _keeping:
        # An attribute of the function, so that both go together.
        kept = function.__dict__.get(PROGRAMS_ATTRIBUTE)
        if type(kept) is not _KeptByFunction or kept.function() is not function:
            kept = _KeptByFunction(function)
            function.__dict__[PROGRAMS_ATTRIBUTE] = kept

        made = kept.by_key.get(key)
        if made is None:
            while len(kept.by_key) >= _MAX_CACHES:
                oldest = next(iter(kept.by_key))
                del kept.by_key[oldest]
            made = kept.by_key[key] = make()
        return made


def cache_of(function: object, options: JitOptions) -> CompilationCache:
    """Returns the cache of a function for equal options; a new one where it cannot keep one."""
    key = options.key()
    can_keep = isinstance(function, (types.FunctionType, Transformed))
    is_comparable = type(key) is not object
    if not (can_keep and is_comparable):
        return CompilationCache()
    return kept_by(function, ("jit", key), CompilationCache)
