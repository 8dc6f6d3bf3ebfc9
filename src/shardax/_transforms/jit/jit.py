# SPDX-License-Identifier: Apache-2.0
"""Compiled functions over Modules, at the cost of ``jax.jit`` on bare arrays.

A call goes one of two ways.

``Jit.__call__`` is the fast way. It finds the ``CachedCall`` of the objects that it is given, reads
the values of their Variables from a flat list, calls one ``jax.jit`` of flat lists, and stores what
that wrote. It is current as long as no object was changed in structure: one integer is compared.

``Jit._call_slowly`` is the slow way, for everything else: a first call, other objects, a structural
change, arguments of other shapes, a call inside of another transform. It flattens the objects,
finds the ``Specialization`` of their structure, traces where that has no program, runs the program
and remembers the call.

A function may use objects that it is not given. Those that it finds in a certain way
(``lift.captures``), such as a closure cell or a global that its own code names, are inputs like its
arguments, and are looked up anew at every call. So if the name means another model now, that one is
read and written, and nothing is traced if it has the same structure. If a trace meets an object in
another way, such as an attribute of an imported module, the object becomes an input of a second
trace, and the call is not remembered: the next one is traced anew, after one warning.

Calls that write wait for each other, from reading the values to storing the new ones; a fast call
that only reads holds no lock, and nothing is traced under one (``_core.threads``). Which lock a
call holds is decided by its specialization, from what its traces wrote (``Specialization.lock``).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from shardax._core import threads
from shardax._core.cross_process import PickledByName
from shardax._core.errors import ConcurrentWriteError
from shardax._core.frames import is_eager
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.static import Static, function_identities
from shardax._core.init.lazy import materialize_all
from shardax._core.object import Object, Wrapper
from shardax._core.threads import local
from shardax._transforms import errors
from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.explain import retraces
from shardax._transforms.explain.error_context import explaining
from shardax._transforms.jit.abstract_eval import eval_shape
from shardax._transforms.jit.bound import BoundJit, bound_jit
from shardax._transforms.jit.cache import CompilationCache, cache_of
from shardax._transforms.jit.calls import (
    NEVER_MADE,
    CachedCall,
    FlatCall,
    flatten_call,
    have_tracers,
)
from shardax._transforms.jit.debugging import compare_over_processes, comparing
from shardax._transforms.jit.options import JitOptions, with_resolved_donation
from shardax._transforms.jit.programs import NeedsSlowCall
from shardax._transforms.jit.settings import note_settings
from shardax._transforms.jit.specialization import Specialization
from shardax._transforms.jit.tracing import Tracing, tracing_for
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import engine
from shardax._transforms.lift.captures import Functions, objects_in
from shardax._transforms.lift.effects import Effects, LiftedOutputs, apply_effects, check_no_leak
from shardax._transforms.lift.entries import is_one_entry
from shardax._transforms.lift.frames import UNNAMED
from shardax._transforms.lift.input_graph import InputGraph
from shardax._transforms.lift.signatures import (
    by_position,
    check_callable,
    parameter_name,
    resolve_arguments,
)
from shardax._transforms.lift.transformed import takes_options


class CallDescription(NamedTuple):
    """A call as its specialization is found by it."""

    key: tuple[Hashable, ...]
    graph: InputGraph
    arguments: inputs.SplitArguments
    positions: inputs.ArgumentPositions
    names: list[Path]


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
        "_is_of_user",
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
        self.options = with_resolved_donation(options, function)
        self.static_positions, self.static_names = resolve_arguments(
            function, options.static_argnums, options.static_argnames, "static", StaticArgumentError
        )
        self.memory = CompilationCache() if memory is None else memory
        self.specializations = self.memory.specializations
        self.calls = self.memory.calls

        self._wrapping_key = wrapping or self.options.key()
        # Whether all arguments are dynamic, and none is moved to another position.
        self._has_plain_signature = (
            not (self.static_positions or self.static_names) and options.in_shardings is None
        )
        self._static_types = self.options.static_types
        # Whether the user wrote ``sx.jit``, and not a transform that is called eagerly.
        self._is_of_user = not isinstance(function, Functions)

    # --- a call -----------------------------------------------------------------------------------

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the function: the fast way, if a like call was made before."""
        flat = self._flatten(args, kwargs)
        call = self.calls.get(flat.key, NEVER_MADE)
        try:
            with call.lock:
                kept, donated = call.read()
                result, written, fresh, effects = call.run(kept, donated, flat)
                if call.did_as_before(effects, written):
                    call.store(kept, donated, written)
                    return result
                outputs = LiftedOutputs(result, written, fresh, effects)
                return self._apply(call, kept, donated, outputs)
        except NeedsSlowCall:
            pass
        return self._call_slowly(args, kwargs, flat)

    def _flatten(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> FlatCall:
        """Returns the call taken apart; its key has everything that the fast way depends on."""
        if local.frame is not None or comparing:
            return FlatCall(None, args, kwargs, ())

        key: list[Hashable] = []
        if not self._has_plain_signature:
            args, kwargs, static = self._without_static(args, kwargs)
            key.append(static)

        # Objects that the function finds without being given them are looked up at every call.
        places = self.memory.places
        if places is None:
            places = self.memory.find_places(self.function)
        for place in places:
            if not place.is_fixed:
                key.append(place.signature())

        return flatten_call(args, kwargs, self.options, self._static_types, key)

    def _apply(
        self, call: CachedCall, kept: list[Leaf], donated: list[Leaf], outputs: LiftedOutputs
    ) -> PyTree:
        """Applies what a run did, where that is not what the last one did; returns the result."""
        effects = outputs.effects
        if call.lock is not call.specialization.lock:
            # Another thread has traced meanwhile that such calls write.
            raise NeedsSlowCall
        call.learn(effects)

        are_traced = have_tracers(outputs.written)
        if effects.simple and not are_traced:
            call.store(kept, donated, outputs.written)
            return outputs.result

        graph = call.graph()
        graph.read = call.specialization.join(kept, donated)
        if are_traced:
            check_no_leak(graph, outputs)
        try:
            return apply_effects(graph, outputs)
        except ConcurrentWriteError:
            if call.specialization.donates:
                raise
            raise NeedsSlowCall from None

    def _call_slowly(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], flat: FlatCall
    ) -> PyTree:
        """Calls the function: the slow way, which traces where no program is known."""
        if comparing and local.frame is None:
            compare_over_processes(self, args, kwargs)

        is_inside = local.frame is not None or not is_eager()
        used_by_earlier_traces: list[Object] = []
        lost_runs = 0
        while True:
            # Flatten the objects; find the specialization for them, or make it.
            specialization, graph, arguments = self.prepare(args, kwargs)
            call = CachedCall(specialization, graph)
            tracing = Tracing(specialization, graph, used_by_earlier_traces, is_inside)
            lock = specialization.lock_of_slow_call(is_inside)

            try:
                # Find the program, tracing where none is known, outside of the lock. If there are
                # other threads it is compiled here too; else the run below compiles it.
                with explaining(call), tracing_for(tracing):
                    specialization.layouts.place(dict(enumerate(graph.leaves)))
                    materialize_all(graph.leaves)
                    with lock:
                        flat_inputs = specialization.read_inputs(graph, arguments)
                    program = specialization.find_program(flat_inputs, tracing)
                    if threads.several and not is_inside:
                        program.compile(flat_inputs)

                with lock:
                    # Other threads may have changed objects or values since they were read.
                    if threads.several and not is_inside:
                        if specialization.changes_structure and call.has_changed(graph):
                            continue
                        with explaining(call):
                            flat_inputs = specialization.read_inputs(graph, arguments)

                    # Run, and apply what the function did.
                    with explaining(call), tracing_for(tracing):
                        outputs = specialization.run_program(program, flat_inputs)
                    check_no_leak(graph, outputs)
                    self._remember(call, graph, outputs.effects, flat, args, kwargs)
                    try:
                        return apply_effects(graph, outputs)
                    except ConcurrentWriteError:
                        # Another thread, or a callback, wrote meanwhile what the function writes.
                        lost_runs += 1
                        if specialization.donates or lost_runs == _MOST_LOST_RUNS:
                            raise

            except engine.RetraceRequest as request:
                # The trace is void: it lacked an input, a name was bound anew, or its program no
                # longer fits. ``provide`` prepares for that, and the next one begins.
                self.provide(request, specialization)
                used_by_earlier_traces = [*used_by_earlier_traces, *request.read]

    def _remember(
        self,
        call: CachedCall,
        graph: InputGraph,
        effects: Effects,
        flat: FlatCall,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        """Remembers a call for the fast way, unless it has to be traced at every call."""
        note_settings(self, call, graph, args, kwargs)

        specialization = call.specialization
        if specialization.uncertain_descriptions or specialization.uncertain_inputs:
            self._forget(specialization)
        elif flat.key is not None:
            call.lock = specialization.lock
            call.learn(effects)
            call.note_placed()
            call.note_slices(flat)
            self.memory.remember(flat.key, call, graph)

    # --- traces that need other inputs ------------------------------------------------------------

    def provide(self, request: engine.RetraceRequest, specialization: Specialization) -> None:
        """Prepares the inputs of the next trace by what the last one used.

        Raises:
            TransformError: If objects that it used were inputs already.
        """
        if request.objects:
            # Not those that another thread noted meanwhile.
            known = specialization.uncertain_inputs
            known_ids = {id(item) for item in known}
            new = [item for item in request.objects if id(item) not in known_ids]
            if not new:
                raise errors.unusable_captures(self, request.objects)
            self.memory.note_uncertain_inputs(specialization.base_key, [*known, *new])

        self.memory.rebound_places.update(request.rebound_places)
        if request.objects or request.rebound_places or request.drops_program:
            self.memory.drop(specialization)

    def _forget(self, specialization: Specialization) -> None:
        """Has calls traced anew whose trace met objects in no certain way; warns once."""
        self.memory.drop(specialization)
        if not specialization.uncertain_descriptions:
            # What the last trace met is returned, or no longer used.
            self.memory.uncertain_inputs.pop(specialization.base_key, None)
            return

        # One of the library's own names a function of the user's as its reason.
        if local.frame is None and not self.memory.has_warned and self._is_of_user:
            self.memory.has_warned = True
            warnings.warn(
                errors.uncertain_capture(self, specialization.uncertain_descriptions), stacklevel=5
            )

    # --- finding the specialization ---------------------------------------------------------------

    def prepare(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Specialization, InputGraph, inputs.SplitArguments]:
        """Returns the specialization for a call, made now or before, and the call taken apart."""
        key, graph, arguments, positions, names = self.describe(args, kwargs)
        met = self.memory.uncertain_inputs_of(key)
        if met:
            graph, names = self.input_graph(arguments, positions.labels, met)

        specialization = None if met else self.specializations.get(key)
        if specialization is None:
            arguments.refuse_copies()
            specialization = Specialization(
                self.function,
                self.options,
                key,
                graph,
                arguments,
                positions,
                names,
                self.memory.rebound_places,
            )
            if met:
                # Not found by another call: the objects may be met in another way then.
                specialization.key = (*key, object())
                specialization.uncertain_inputs = met
            elif self.specializations and retraces.listeners.get():
                retraces.report_specialization(self, specialization)
            self.memory.add(specialization)

        # It may have been made where a mesh was in scope.
        specialization.layouts.mesh_of_specs()
        return specialization, graph, arguments

    def describe(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> CallDescription:
        """Returns a call as its specialization is found by it."""
        args, kwargs, static = self._without_static(args, kwargs)
        arguments = self.options.split_arguments(args, kwargs, self.path_of)
        positions = inputs.ArgumentPositions(self.positional(len(arguments.templates)), static)
        self.memory.find_places(self.function)
        graph, names = self.input_graph(arguments, positions.labels)

        static_values = [
            *graph.flat.graphdef.static_values(),
            *arguments.static_values(),
            *(item.value for _, item in static),
        ]
        key = (
            graph.flat.graphdef,
            (len(arguments.roots), *self.memory.structure()),
            arguments.templates,
            arguments.named,
            static,
            function_identities(static_values),
        )
        return CallDescription(key, graph, arguments, positions, names)

    def _without_static(
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

    def input_graph(
        self, arguments: inputs.SplitArguments, labels: Sequence[str], met: Sequence[Object] = ()
    ) -> tuple[InputGraph, list[Path]]:
        """Returns the ``InputGraph`` of all objects that a call uses, and the path of each root.

        Args:
            arguments: The arguments.
            labels: The names of the positional ones.
            met: What an earlier trace met in no certain way.
        """
        captured = self.captured_objects()
        captured += [((UNNAMED, i), item) for i, item in enumerate(met)]
        names = [*inputs.root_names(labels, arguments), *(name for name, _ in captured)]
        roots = [*arguments.roots, *(item for _, item in captured)]
        return InputGraph(roots, names), names

    def captured_objects(self) -> list[tuple[Path, Object]]:
        """Returns (path, object) of what the function finds, in certain ways, without arguments."""
        captured: list[tuple[Path, Object]] = []
        for place in self.memory.places or ():
            items = list(objects_in(place.read()))
            name = (place.name,) if place.name else ()
            if len(items) == 1:
                captured.append((name, items[0]))
            else:
                captured += [((*name, i), item) for i, item in enumerate(items)]
        return captured

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
        dynamic_args, dynamic_named, static = self._without_static(args, kwargs)
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


# Against threads that write all the time without waiting, or a callback that writes at every run.
_MOST_LOST_RUNS = 100


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
