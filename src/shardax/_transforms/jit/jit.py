# SPDX-License-Identifier: Apache-2.0
"""Compiled functions over Modules, at the cost of ``jax.jit`` on bare arrays.

**A steady call**, one whose like was made before, is ``Jit.__call__``; the second call with the
same objects is one. Its steps are in ``jit.calls`` and ``jit.specialization``:

1. ``flatten_call`` makes the key of the call, by one look at each argument. A Module or Variable is
   one entry, its identity, whatever is in it. What the function finds without being given it (see
   below) is looked up now, and its identity is part of the key.
2. The key is looked up among the calls that were made: a ``CachedCall``, with the flat list of the
   Variables of these objects.
3. The lock of the call is taken, if it has one (see below).
4. ``CachedCall.read`` compares one integer, the structure epoch, which every change of structure of
   any object advances, and compares settings objects, if the Modules hold any. Variables with a
   declared sharding are moved back to it, if they were given other values. Then it reads the array
   of each Variable into a list. Of these the list takes longer with more Variables, and so does the
   look at those with a declared sharding.
5. ``CachedCall.run`` calls one function of ``jax.jit``, on that list and the arrays of the
   arguments. If the function was traced for several shapes of the arguments' arrays, it is found by
   these. JAX looks at each array, in C++, which takes longer with more Variables.
6. The function returns its result, the new arrays of the Variables that it wrote, and its
   ``Effects``, which say which these are. If they are the very object that the last run returned,
   this call does the same as the last one.
7. ``CachedCall.store`` puts each new array into its Variable. This takes longer with more
   Variables that are written.

No Module is walked, and no Variable is touched in another step. A function that returns objects is
steady up to 6; then ``CachedCall.apply`` flattens the objects. One that changes structure advances
the epoch, so its next call is a slow one.

**A slow call** is everything else (``jit.slow_call``): a first call, other objects, a call after a
change of structure anywhere (one walk, and the next one is steady again), arrays of other shapes, a
call inside of another transform. It finds what was traced for this structure, or traces it.

**What is traced again**: the function, if the structure of the objects, the tree of the arguments,
a static value, or the shape or dtype of an array is not one that it was traced for. The identity of
objects is no reason: another model of the same structure, and of the same shapes, is read and
written by the program of the first. A function object is traced by itself, whatever its code is;
which programs several functions share, see ``jit.cache``.

**Objects that the function is not given** are looked up at every call where it finds them in a
*certain way*: in a closure cell, in a global that its own code names, in a default of a parameter.
They are inputs like its arguments. So if the name means another model now, that one is read and
written, and nothing is traced if it has the same structure and shapes. An object that a trace meets
in another way, such as an attribute of an imported module, is an input of a second trace, and the
call is not remembered: every call is traced anew, and meets what is there then. The first one warns
(``lift.captures``).

**Locks**, for the whole process (``_core.threads``): from 3 to 7, a call
that writes Variables holds ``call_lock``, and takes ``write_lock`` while it stores; one that
donates holds both. A steady call that only reads holds none, nor does an eager read of an array. A
function's first run holds ``call_lock``, because nothing says yet whether it writes. Nothing is
traced under a lock, nor compiled, once there is a second thread. Which lock a call holds say its
options and what its traces did (``Specialization.lock``).

If a step of the function or of JAX raises, ``store`` is not reached: the Variables hold what they
held before, except that the arrays of a call that donates may be gone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardax._core.cross_process import PickledByName
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import Static
from shardax._core.object import Wrapper
from shardax._core.threads import local
from shardax._transforms.jit.abstract_eval import eval_shape
from shardax._transforms.jit.bound import BoundJit, bound_jit
from shardax._transforms.jit.cache import CompilationCache, cache_of
from shardax._transforms.jit.calls import CallKey, flatten_call
from shardax._transforms.jit.options import JitOptions, with_resolved_arguments
from shardax._transforms.jit.programs import NeedsSlowCall
from shardax._transforms.jit.slow_call import call_slowly, comparing
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.effects import LiftedOutputs
from shardax._transforms.lift.entries import is_one_entry
from shardax._transforms.lift.signatures import (
    as_tuple,
    by_position,
    check_callable,
    parameter_name,
)
from shardax._transforms.lift.transformed import takes_options


class Jit(PickledByName, Wrapper):
    """A compiled function over Modules; made by ``jit``.

    Attributes:
        function: The original function. ``__wrapped__`` is only shown, as of other functions.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> double = sx.jit(lambda v: v * 2)
        >>> type(double) is sx.Jit, double(sx.Param(jnp.ones(2))).tolist()
        (True, [2.0, 2.0])
    """

    # What a call needs is in slots, which ``functools.wraps`` cannot overwrite.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_has_plain_signature",
        "_static_types",
        "_wrapping_key",
        "calls",
        "function",
        "memory",
        "options",
        "specializations",
        "static_names",
        "static_positions",
    )

    def __init__(
        self,
        function: Callable[..., PyTree],
        options: JitOptions,
        wrapping: Hashable = None,
        memory: CompilationCache | None = None,
    ) -> None:
        check_callable(function, "jit")
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.options = with_resolved_arguments(options, function)
        self.static_positions = as_tuple(self.options.static_argnums)
        self.static_names = as_tuple(self.options.static_argnames)
        self.memory = CompilationCache() if memory is None else memory
        self.specializations = self.memory.specializations
        self.calls = self.memory.calls

        self._wrapping_key = wrapping or self.options.key()
        # Whether all arguments are dynamic, and none is moved to another position.
        self._has_plain_signature = (
            not (self.static_positions or self.static_names) and options.in_shardings is None
        )
        self._static_types = self.options.static_types

    # --- a call -----------------------------------------------------------------------------------

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the function: the fast way, if a like call was made before."""
        key, arrays = self._flatten(args, kwargs)
        call = self.calls.get(key)
        if call is None:
            return call_slowly(self, args, kwargs, key)
        try:
            with call.lock:
                kept, donated = call.read(arrays)
                result, written, fresh, effects = call.run(kept, donated)
                if not call.did_as_before(effects, written):
                    outputs = LiftedOutputs(result, written, fresh, effects)
                    return call.apply(kept, donated, outputs)
                call.store(kept, donated, written)
                return result
        except NeedsSlowCall:
            pass
        return call_slowly(self, args, kwargs, key)

    def _flatten(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[CallKey | None, list[Leaf]]:
        """Returns the key of a call, None if it is not remembered, and the arrays in it."""
        if local.frame is not None or comparing:
            return None, []

        besides: list[Hashable] = []
        if not self._has_plain_signature:
            args, kwargs, static = self.without_static(args, kwargs)
            besides.append(static)

        # Objects that the function finds without being given them are looked up at every call.
        places = self.memory.places
        if places is None:
            places = self.memory.find_places(self.function)
        for place in places:
            if not place.is_fixed:
                besides.append(place.signature())

        return flatten_call(args, kwargs, self.options, self._static_types, besides)

    # --- arguments --------------------------------------------------------------------------------

    def without_static(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree], tuple[tuple[int | str, Static], ...]]:
        """Returns (positional, by name, static) arguments, the latter by position or name."""
        args, kwargs = self.resolve(args, kwargs)
        if not (self.static_positions or self.static_names):
            return args, kwargs, ()

        by_place: dict[int | str, PyTree] = {**dict(enumerate(args)), **kwargs}
        places = [p for p in (*self.static_positions, *self.static_names) if p in by_place]
        static = tuple(
            (place, inputs.static_argument(by_place[place], self.function, place))
            for place in places
        )
        dynamic = [arg for i, arg in enumerate(args) if i not in places]
        named = {name: arg for name, arg in kwargs.items() if name not in places}
        return dynamic, named, static

    def resolve(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree]]:
        """Returns the arguments, those by name at the positions that have a declared sharding."""
        declared = self.options.in_shardings
        if declared is None or not kwargs:
            return args, kwargs

        most = None
        if not is_one_entry(declared):
            most = len(declared) + len(self.static_positions)
        return by_position(self.function, args, kwargs, most)

    def positional(self, count: int) -> list[tuple[int, str]]:
        """Returns (position, parameter name) of the first dynamic arguments."""
        dynamic = (i for i in itertools.count() if i not in self.static_positions)
        positions = itertools.islice(dynamic, count)
        return [(i, parameter_name(self.function, i)) for i in positions]

    def path_of(self, key: int | str) -> Path:
        """Returns an argument's path by name or position among dynamic ones."""
        return (self.positional(key + 1)[-1][1] if isinstance(key, int) else key,)

    # --- what users call --------------------------------------------------------------------------

    @property
    def inner(self) -> Callable[..., PyTree]:
        """The original function, under the name that Flax NNX has for it."""
        return self.function

    def trace(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Traces the function for these arguments without compiling; returns a ``Traced``."""
        from shardax._transforms.jit.stages import trace_jit  # stages stand above ``Jit``

        return trace_jit(self, args, kwargs)

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Lowers the function for these arguments, lazy Modules as they are."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the result, computing and changing nothing."""
        dynamic_args, dynamic_named, static = self.without_static(args, kwargs)
        arguments = self.options.split_arguments(dynamic_args, dynamic_named, self.path_of)
        static_positions = inputs.ArgumentPositions([], static)

        def call(roots, plain, plain_named):
            dynamic, named = arguments.restore(plain, plain_named, roots)
            dynamic, named = static_positions.insert_static(dynamic, named)
            return self.function(*dynamic, **named)

        return eval_shape(call, arguments.roots, list(arguments.plain), arguments.plain_named)

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        self.memory.clear()

    def _cache_size(self) -> int:
        return sum(len(each.signatures) for each in self.specializations.values())

    def __get__(self, instance: Any, owner: type | None = None) -> Jit | BoundJit:
        return self if instance is None else BoundJit(self, instance)

    def __repr__(self) -> str:
        return f"<sx.jit of {getattr(self.function, '__qualname__', self.function)!s}>"

    # --- as part of a model -----------------------------------------------------------------------

    def __reduce__(self) -> Any:  # without what it remembers of calls; where it has no name
        return Jit, (self.function, self.options)

    def _wrapping(self) -> Hashable:
        return self._wrapping_key

    def _maker(self) -> Callable[[Any], Jit]:
        return functools.partial(_compiled, self.options, self._wrapping_key)


def _compiled(options: JitOptions, wrapping: Hashable, function: Any) -> Jit:
    """Returns the compiled form of a callable, or of a hole."""
    if callable(function):
        return Jit(function, options, wrapping)

    # It has no arguments by which options could be checked.
    emptied = Jit(bound_jit, JitOptions(), wrapping)
    emptied.options = options
    emptied.function = function
    emptied.__dict__["__wrapped__"] = function
    return emptied


@takes_options
def jit(
    function: Callable[..., PyTree] | None = None,
    *,
    in_shardings: PyTree = None,
    out_shardings: PyTree = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    static: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function over Modules and carries back its writes.

    Modules and Variables may stand anywhere in the arguments, in the result, or be used through
    closures. Structural changes (attributes added, removed, swapped) are carried back too, and
    objects that come back are the caller's own: ``f(m) is m``. A call whose structure was seen
    before costs what ``jax.jit`` costs on the bare arrays.

    Args:
        function: A function, method, ``functools.partial`` or callable Module. Left out: returns a
            decorator.
        in_shardings: A prefix of the positional arguments (without static ones). For a Module: one
            sharding, a ``State`` of shardings, or a ``StateSharding``. Variables are moved there
            once and stay, lazy ones are made in their shards; those that are written or replaced
            keep the sharding of their path. An argument given by name has the entry of its
            position, or none.
        out_shardings: A prefix of the result, likewise.
        static_argnums: Positions of arguments to compile for by value. Types count at every depth:
            1, True and 1.0 differ.
        static_argnames: The same by name.
        static: ``"auto"`` makes every leaf of the arguments static that is no array, number, Module
            or Variable: strings, functions, flags. ``"numbers"`` makes Python's numbers static,
            too. Every call decides anew. None: only what the other two options name.
        donate_argnums: Positions of arguments whose memory may be reused. Variables of a donated
            Module stay usable, since all are returned.
        donate_argnames: The same by name.
        keep_unused: As in ``jax.jit``.
        inline: As in ``jax.jit``.
        compiler_options: As in ``jax.jit``.

    Returns:
        A ``Jit`` with ``trace``, ``lower``, ``eval_shape`` and ``clear_cache``.

    Raises:
        StaticArgumentError: When called with a static argument that is not hashable, is a Module,
            or holds what cannot be compared at the next call.
        PrefixError: When a sharding prefix does not fit its argument.
        TransformError: When a shared Variable is given two shardings; if an option is of the wrong
            kind, or what is compiled cannot be called.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> counter = sx.Variable(jnp.zeros((), jnp.int32))
        >>> @sx.jit
        ... def count(counter, by):
        ...     counter += by
        ...     return counter * 2
        >>> int(count(counter, 3)), int(counter)
        (6, 3)
    """
    options = JitOptions(  # in the order of its fields
        in_shardings,
        out_shardings,
        static_argnums,
        static_argnames,
        static,
        donate_argnums,
        donate_argnames,
        keep_unused,
        inline,
        compiler_options,
    )
    if function is None:
        return functools.partial(_jit, options=options)
    return _jit(function, options)


def _jit(function: Callable[..., object], options: JitOptions) -> Jit:
    check_callable(function, "jit")
    return Jit(function, options, memory=cache_of(function, options))
