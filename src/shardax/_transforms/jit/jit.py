# SPDX-License-Identifier: Apache-2.0
"""Compiled functions over Modules, at the cost of ``jax.jit`` on bare arrays.

A ``Specialization`` is what one structure of arguments compiles to: a ``jax.jit`` of a pure
function of flat lists of values. A ``CachedCall`` remembers, for particular objects, the
specialization and the flat list of their Variables; it is valid while the structure epoch stays. A
steady call checks one integer, gathers values, calls the specialization's program, and stores what
the trace wrote.

A function may use objects that it is not given. Those that it finds in a certain way
(``lift.captures``) are inputs like its arguments, and are looked up anew at every call. If a trace
meets another one, the object becomes an input of a second trace, and the call is not remembered:
the next one is traced anew, after one warning.

Under ``static="auto"`` every call decides anew which leaves are static: one flattening of all
arguments by JAX and a look at the type of each leaf (``flatten_call``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core.cross_process import PickledByName
from shardax._core.errors import ConcurrentWriteError, ModuleError
from shardax._core.frames import commit, exclusive, local, several
from shardax._core.graph.flatten import has_objects
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.graph.settings import Setting, have_changed, note_trace, settings_among
from shardax._core.graph.static import Static, function_identities
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, Wrapper, epoch
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import StaticArgumentError
from shardax._transforms.jit import retraces
from shardax._transforms.jit import specialization as special
from shardax._transforms.jit.abstract_eval import eval_shape
from shardax._transforms.jit.cache import CompilationCache, cache_of
from shardax._transforms.jit.call_arguments import (
    ARRAY_TYPES,
    FlatCall,
    all_dynamic,
    flatten_call,
    leaf_spans,
    note_types,
    plain_parts,
)
from shardax._transforms.jit.error_context import explain_error
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import binding, engine
from shardax._transforms.lift import prefix as prefixes
from shardax._transforms.lift.captures import Functions, objects_in


class BoundJit(Wrapper):
    """A jitted method bound to its object."""

    __slots__ = ("__dict__", "__func__", "__self__")

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    # Wrappers are not given another function: ``Jit`` keeps its own in a slot, this one makes it.
    @property
    def function(self) -> Any:  # ty: ignore[incompatible-property-override]
        """Returns the method that it runs."""
        return types.MethodType(self.__func__, self.__self__)

    @property
    def inner(self) -> Any:
        """The method that it runs, under the name that Flax NNX has for it."""
        return self.function

    @property
    def __wrapped__(self) -> Any:
        return self.__dict__.get("__wrapped__", self.function)

    @__wrapped__.setter
    def __wrapped__(self, shown: Any) -> None:  # as ``functools.wraps`` does
        self.__dict__["__wrapped__"] = shown

    def _wrapping(self):
        return self.__func__

    def _maker(self) -> Callable[[Any], Any]:
        return _bound

    def __reduce__(self) -> Any:
        return BoundJit, (self.__func__, self.__self__)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Traces the method; what is compiled of it is called without the object."""
        return self.__func__.trace(self.__self__, *args, **kwargs).bound_to(self.__self__)

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Lowers the method, lazy Modules as they are."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the result."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r}>"


# Held by a call that writes what other threads use, from reading to writing. Not ``exclusive``: JAX
# lets a call wait for another thread's trace of the same program, and that may wait for the latter.
# A program that donates holds both, when it is compiled: nothing reads what it uses up.
calling = threading.RLock()

# Not empty while calls compare their arguments over processes, for debugging.
comparing: list[bool] = []

# Not empty once a call has donated Variables: others must not read them while it runs.
donating: list[bool] = []


class CachedCall:
    """What a steady call needs, for particular objects."""

    __slots__ = (
        "donated",
        "epoch",
        "input_graph",
        "is_sharing",
        "kept",
        "last",
        "leaves",
        "mesh",
        "request",
        "roots",
        "seen",
        "settings",
        "settings_read",
        "settles",
        "spans",
        "specialization",
        "watched",
        "writes",
    )

    def __init__(self, program: special.Specialization, graph: binding.InputGraph) -> None:
        self.specialization = program
        self.epoch = graph.flat.epoch  # structure epoch at which this was made
        self.leaves: list[Leaf] = graph.leaves  # all of them, in graph order
        self.kept, self.donated = program.partition(graph.leaves)
        # Called, each returns a root; held weakly, so that remembering a call keeps no model alive.
        self.roots = [_weak(root) for root in graph.roots]
        # The effects of the last call and the Variables it wrote.
        self.last: tuple[PyTree, list[PyTree]] = (None, [])
        self.writes = True  # whether it wrote any, or changed structure
        # Variables with a declared sharding, by position, and what they held.
        self.watched: dict[int, Any] = {}
        self.seen: list[int] = []
        self.mesh: jax.sharding.Mesh | None = None  # over which specs placed them
        # Where the dynamic leaves of each argument stand, under ``static="auto"``.
        self.spans: Any = None
        # The objects of the call, while it may trace.
        self.input_graph: binding.InputGraph | None = None
        # Whether a trace is running that nothing is compiled of yet, and what it asks for.
        self.is_sharing = False
        self.request: engine.RetraceRequest | None = None
        self.settles = True  # whether Variables may be moved for the trace
        # The settings objects in Modules, compared at every call; and all that the call read.
        self.settings = graph.flat.settings
        self.settings_read: list[Setting] = graph.flat.settings

    def learn(self, effects: binding.Effects) -> list[Any]:
        """Notes what the program does; returns the Variables that it writes."""
        targets = [self.leaves[position] for position in effects.written]
        self.writes = bool(targets) or not effects.simple
        if self.specialization.donates and not donating:
            donating.append(True)
        # Where others are that have a declared sharding; these the program returns where they
        # belong.
        declared, done = enumerate(self.specialization.leaf_shardings), {*effects.written}
        self.watched = {
            i: self.leaves[i]
            for i, entry in declared
            if i not in done and (entry is not None or i in self.specialization.wanted)
        }
        self.seen = []
        self.last = (effects, targets)
        return targets

    def place(self, mesh: jax.sharding.Mesh | None) -> None:
        """Moves the watched Variables that were given other arrays, or mesh."""
        if [id(v._value) for v in self.watched.values()] != self.seen or mesh is not self.mesh:
            self.specialization.place(self.watched)
            self.seen, self.mesh = [id(v._value) for v in self.watched.values()], mesh

    def note_placed(self, values: Sequence[Leaf]) -> None:
        """Notes the values of watched Variables that were just placed."""
        self.seen = [id(values[position]) for position in self.watched]
        self.mesh = self.specialization.mesh_of_specs()

    def graph(self) -> binding.InputGraph:
        """Flattens the roots anew; for calls that trace or change structure."""
        return binding.InputGraph([root() for root in self.roots], self.specialization.names)

    def keep_weakly(self, graph: binding.InputGraph, forget: Callable[[Any], None]) -> None:
        """Lets go of everything that the caller may drop."""
        self.roots = [
            weakref.ref(root, forget) if isinstance(root, Object) else _weak(root)
            for root in graph.roots
        ]
        bare = {id(root) for root in graph.roots if isinstance(root, Variable)}
        if bare:  # these have no Module that keeps them alive, and whose end would be noticed
            self.leaves = [weakref.proxy(v) if id(v) in bare else v for v in graph.leaves]
            self.kept, self.donated = self.specialization.partition(self.leaves)


def _weak(root: object) -> Callable[[], Any]:
    return weakref.ref(root) if isinstance(root, Object) else lambda: root


class _Description(NamedTuple):
    """A call as its specialization is found by it."""

    key: Any
    graph: binding.InputGraph
    arguments: inputs.SplitArguments
    positions: inputs.ArgumentPositions
    names: list[Path]


_NOTHING: dict[str, Any] = {}  # the keyword arguments of a call without any

_MOST_RACES = 100  # against threads that write without a call

_NO_LOCK = contextlib.nullcontext()


def _is_of_deleted(error: Exception) -> bool:
    """Whether an array of an argument was deleted."""
    return "deleted" in str(error)  # JAX has no type for it


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
        "_auto",
        "_is_of_user",
        "_simple",
        "_static_types",
        "_ticks",
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
        options: special.JitOptions,
        wrapping: Any = None,
        memory: CompilationCache | None = None,
    ) -> None:
        inputs.check_callable(function, "jit")
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.options = special.with_resolved_donation(options, function)
        self.static_positions, self.static_names = inputs.resolve_arguments(
            function, options.static_argnums, options.static_argnames, "static", StaticArgumentError
        )
        self.memory = CompilationCache() if memory is None else memory
        self.specializations, self.calls = self.memory.specializations, self.memory.calls
        self._wrapping_key = wrapping or self.options.key()
        self._simple = not (self.static_positions or self.static_names)
        self._auto = self.options.auto_static
        self._static_types = self.options.static_types
        self._ticks = self.memory.ticks
        # Whether the user wrote ``sx.jit``, and not a transform that is called eagerly.
        self._is_of_user = not isinstance(function, Functions)

    def __reduce__(self) -> Any:  # without what it remembers of calls; where it has no name
        return Jit, (self.function, self.options)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if not self._simple or kwargs or local.frame is not None or comparing:
            return self._call_by_template(args, kwargs)
        if self._auto and not all_dynamic(args, self._static_types):
            return self._call_by_template(args, kwargs)
        key: list[Any] = []
        plain: list[Leaf] = []
        traced = False
        for arg in args:
            if type(arg) in ARRAY_TYPES:
                key.append(0)
                plain.append(arg)
            elif isinstance(arg, Object):
                key.append(id(arg))
                plain.append(None)
            elif has_objects(arg):
                return self._call_by_template(args, kwargs)
            else:
                traced = traced or note_types(arg)
                key.append(0)
                plain.append(arg)
        places = self.memory.places
        if places is None:
            places = self.memory.find_places(self.function)
        for place in places:
            if not place.is_fixed:
                key.append(place.signature())
        entry = self.calls.get(tuple(key))
        if (
            entry is None
            or traced
            or entry.epoch != epoch.current
            or (entry.settings and have_changed(entry.settings))
        ):
            return self._trace(args, kwargs, tuple(key))
        return self._repeat(entry, plain, _NOTHING, args, kwargs)

    def _call_by_template(self, args: Sequence[object], kwargs: Mapping[str, object]):
        """Calls with keywords, static arguments or objects inside containers."""
        # Takes the arguments apart, which costs something per argument but nothing per Variable.
        if local.frame is not None:
            return self._trace(args, kwargs)
        if comparing:
            self._compare(args, kwargs)
        args, kwargs = self.resolve(args, kwargs)
        if self._auto and self._simple:
            call = flatten_call(args, kwargs, self._static_types)
            if call is not None:
                return self._call_flat(call, args, kwargs)
        arguments, static = self._take_apart(args, kwargs)
        if self.memory.places is None:
            self.memory.find_places(self.function)
        key = (
            tuple(map(id, arguments.roots)),
            self.memory.signature(),
            (arguments.templates, arguments.named, static),
        )
        entry = self.calls.get(key)
        if (
            entry is None
            or entry.epoch != epoch.current
            or (entry.settings and have_changed(entry.settings))
        ):
            return self._trace(args, kwargs, key)
        return self._repeat(entry, list(arguments.plain), arguments.plain_named, args, kwargs)

    def _compare(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raises DistributedError if numbers given to this call differ over processes."""
        from shardax.distributed.processes import compare_arguments

        labels = [inputs.parameter_name(self.function, i) for i in range(len(args))]
        arguments_by_name = dict(zip(labels, args, strict=True)) | dict(kwargs)
        compare_arguments(arguments_by_name, f"a call of {self!r}")

    def _call_flat(self, call: FlatCall, args: Sequence[object], kwargs: Mapping[str, object]):
        """Calls with leaves that are static, found by type."""
        if self.memory.places is None:
            self.memory.find_places(self.function)
        if self.memory.places:
            call.key.extend(self.memory.signature())
        key = tuple(call.key)
        entry = self.calls.get(key)
        if (
            entry is None
            or entry.epoch != epoch.current
            or (entry.settings and have_changed(entry.settings))
        ):
            return self._trace(args, kwargs, key)
        if entry.spans is None:
            entry.spans = leaf_spans(entry.specialization, call.args, kwargs)
        plain, named = plain_parts(call, kwargs, entry.spans)
        return self._repeat(entry, plain, named, args, kwargs)

    def _repeat(
        self,
        entry: CachedCall,
        plain: list[object],
        named: Mapping[str, object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        has_turn: bool = False,
    ):
        """Makes a call again: the fast way."""
        if several and not has_turn and (entry.writes or donating):  # calls of other threads wait
            with calling, exclusive if entry.specialization.donates else _NO_LOCK:
                return self._repeat(entry, plain, named, args, kwargs, has_turn=True)
        program = entry.specialization
        mesh = None
        if program.specs:  # asked here, as a call costs as much as the rest of a short one
            mesh = program.mesh_of_specs()
        program.used = next(self._ticks)
        outer_call, local.call = local.call, entry
        try:
            if entry.watched:
                entry.place(mesh)
            undonated, donated = [v._value for v in entry.kept], [v._value for v in entry.donated]
            result, written, fresh, effects = program.run(undonated, donated, plain, named)
        except Exception as error:
            if several and _is_of_deleted(error):  # another call has donated what was read
                return self._trace(args, kwargs, races=1)
            if isinstance(error, engine.RetraceRequest):
                self.provide(error, program)
            elif not any(isinstance(v._value, LazyValue) for v in entry.leaves):
                explain_error(error, program, entry.graph())
                raise
            self.calls.clear()
            return self._trace(args, kwargs)
        finally:
            local.call = outer_call
        last_effects, targets = entry.last
        if effects is not last_effects:
            targets = entry.learn(effects)
            if program.met:
                self._forget(program)
            if entry.settings_read:  # JAX may have traced for other shapes
                self._keep_settings(entry, args, kwargs)
        is_plain = not written or (not several and type(written[0]) in ARRAY_TYPES)
        if not (is_plain and effects.simple):
            outputs = binding.LiftedOutputs(result, written, fresh, effects)
            return self._apply(entry, outputs, program.join(undonated, donated), args, kwargs)
        for variable, value in zip(targets, written):  # noqa: B905 (equal lengths; hot path)
            variable._value = value
        return result

    def _apply(
        self,
        entry: CachedCall,
        outputs: binding.LiftedOutputs,
        read: list[object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ):
        """Applies effects that others see: structure, or values that threads share."""
        effects, written = outputs.effects, outputs.written
        has_tracers = bool(written) and note_types(written)
        if effects.simple and not has_tracers:
            values_read = [read[position] for position in effects.written]
            if commit(entry.last[1], values_read, written):
                return outputs.result
            return self._trace(args, kwargs, races=1)
        graph = entry.graph()
        graph.read = read
        if has_tracers:
            binding.check_no_leak(graph, outputs)
        try:
            return binding.apply_effects(graph, outputs)
        except ConcurrentWriteError:
            return self._trace(args, kwargs, races=1)

    def _trace(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        key: object = None,
        races: int = 0,
    ):
        """Binds, traces, specializes, calls and applies effects: the slow way."""
        # Once a call has lost a race against other threads, their calls wait.
        shares, is_alone = several and local.frame is None, False
        asked_for: list[Object] = []
        with contextlib.ExitStack() as turn:
            while True:
                if races:
                    turn.enter_context(calling)
                program, graph, arguments = self.prepare(args, kwargs)
                program.asked_for = asked_for
                if races and program.donates and not is_alone:
                    turn.enter_context(exclusive)
                    is_alone = True
                    continue
                outer_call, entry = local.call, CachedCall(program, graph)
                local.call, entry.input_graph = entry, graph
                outputs = None
                try:
                    program.place(dict(enumerate(graph.leaves)))
                    values = graph.values(refs=True, donated=program.donated_leaves)
                    if shares and program.donates and not races:  # no call may use what it donates
                        with calling:
                            program.compile(values, arguments)
                        races = 1
                        continue
                    outputs = program.call(values, arguments)
                    binding.check_no_leak(graph, outputs)
                    self.after_trace(entry, graph, args, kwargs)
                    if program.met or program.met_objects:
                        self._forget(program)
                    elif key is not None and local.frame is None:
                        entry.learn(outputs.effects)
                        entry.note_placed(values)
                        self.memory.remember(key, entry, graph)
                    return binding.apply_effects(graph, outputs)
                except engine.RetraceRequest as need:
                    self.provide(need, program)
                    asked_for = [*asked_for, *need.read]
                except ConcurrentWriteError:
                    if not shares or races > _MOST_RACES:
                        raise
                    races += 1
                except Exception as error:
                    if shares and not races and _is_of_deleted(error):
                        races = 1  # another call donates what was read
                        continue
                    if outputs is None:
                        explain_error(error, program, graph)
                    raise
                finally:
                    local.call, entry.input_graph = outer_call, None

    def provide(self, need: engine.RetraceRequest, program: special.Specialization) -> None:
        """Prepares for the trace after one that stopped."""
        if need.objects:
            # Not those that another thread noted meanwhile.
            known = program.met_objects
            known_ids = {id(item) for item in known}
            new = [item for item in need.objects if id(item) not in known_ids]
            if not new:
                raise errors.unusable_captures(self, need.objects)
            self.memory.note_met(program.base_key, [*known, *new])
        self.memory.uncertain.update(need.uncertain)
        if need.objects or need.uncertain or need.drops_program:
            self.memory.drop(program)

    def _forget(self, program: special.Specialization) -> None:
        """Has calls traced anew whose trace met objects in no certain way."""
        self.memory.drop(program)
        if not program.met:
            # What the last trace met is returned, or no longer used.
            self.memory.met.pop(program.base_key, None)
            return
        # One of the library's own names a function of the user's as its reason.
        if local.frame is None and not self.memory.has_warned and self._is_of_user:
            self.memory.has_warned = True
            warnings.warn(errors.uncertain_capture(self, program.met), stacklevel=4)

    def prepare(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[special.Specialization, binding.InputGraph, inputs.SplitArguments]:
        """Finds or makes the specialization for a call."""
        key, graph, arguments, positions, names = self._describe(args, kwargs)
        met = self.memory.objects_met(key)
        if met:
            graph, names = self.input_graph(arguments, positions.labels, met)

        program = None if met else self.specializations.get(key)
        if program is None:
            arguments.refuse_copies()
            program = special.Specialization(
                self.function,
                self.options,
                key,
                graph,
                arguments,
                positions,
                names,
                self.memory.uncertain,
            )
            if met:
                # Not found by another call: the objects may be met in another way then.
                program.key = (*key, object())
                program.met_objects = met
            elif self.specializations and retraces.listeners.get():
                retraces.report_specialization(self, program)
            self.memory.add(program)
        program.mesh_of_specs()  # it may have been made where a mesh was in scope
        program.used = next(self._ticks)
        return program, graph, arguments

    def _describe(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> _Description:
        """Returns a call as its specialization is found by it."""
        arguments, static = self._take_apart(args, kwargs)
        positions = inputs.ArgumentPositions(self.positional(len(arguments.templates)), static)
        self.memory.find_places(self.function)
        graph, names = self.input_graph(arguments, positions.labels)
        key = self._key_of(graph, arguments, static)
        return _Description(key, graph, arguments, positions, names)

    def after_trace(
        self,
        entry: CachedCall,
        graph: binding.InputGraph,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        """Looks at what a trace wrote into settings objects."""
        entry.settings_read = self._settings_read(graph, entry.specialization.key)
        if entry.settings_read:
            self._keep_settings(entry, args, kwargs)

    def _settings_read(self, graph: binding.InputGraph, key: Any) -> list[Setting]:
        """Returns the settings objects that a call was given."""
        templates, named, static = key[2:5]
        leaves = [
            leaf
            for template in (*templates, *(template for _, template in named))
            if isinstance(template, inputs.TreeTemplate)
            for _, leaf in template.static
        ]
        return [*graph.flat.settings, *settings_among([*leaves, *(v for _, v in static)])]

    def _keep_settings(
        self, entry: CachedCall, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> None:
        """Finds the program by what its trace left in settings objects."""
        program = entry.specialization
        with contextlib.suppress(ModuleError, TypeError):  # the next call says what is wrong
            before = entry.settings_read
            found = self._describe(args, kwargs)
            after = self._settings_read(found.graph, found.key)
            for old, new in zip(before, after, strict=False):
                if old.key.content != new.key.content:
                    return  # another value, for which the next call traces
                note_trace(old.key, new.key)
            found = self._describe(args, kwargs)  # with the notes
            if self.specializations.setdefault(found.key, program) is program:
                program.graphdef_after = found.graph.flat.graphdef
                entry.settings = found.graph.flat.settings
                entry.settings_read = self._settings_read(found.graph, found.key)

    def _key_of(
        self,
        graph: binding.InputGraph,
        arguments: inputs.SplitArguments,
        static: tuple[tuple[int | str, Static], ...],
    ) -> tuple[Hashable, ...]:
        """Returns what a specialization is found by."""
        values = [*graph.flat.graphdef.static_values(), *arguments.static_values()]
        values += [item.value for _, item in static]
        return (
            graph.flat.graphdef,
            (len(arguments.roots), *self.memory.structure()),
            arguments.templates,
            arguments.named,
            static,
            function_identities(values),
        )

    def input_graph(
        self, arguments: inputs.SplitArguments, labels: Sequence[str], met: Sequence[Object] = ()
    ) -> tuple[binding.InputGraph, list[Path]]:
        """Flattens the arguments and what the function uses from outside."""
        hidden = [*self.hidden(), *(((engine.UNNAMED, i), item) for i, item in enumerate(met))]
        names = [*inputs.root_names(labels, arguments), *(name for name, _ in hidden)]
        roots = [*arguments.roots, *(item for _, item in hidden)]
        return binding.InputGraph(roots, names), names

    def hidden(self) -> list[tuple[Path, Any]]:
        """Returns (path, object) of what the function uses from outside, found in a certain way."""
        if self.memory.places is None:
            self.memory.find_places(self.function)
        hidden_objects: list[tuple[Path, Any]] = []
        for place in self.memory.places or ():
            items = list(objects_in(place.read()))
            name = (place.name,) if place.name else ()
            hidden_objects.extend(
                (name if len(items) == 1 else (*name, i), item) for i, item in enumerate(items)
            )
        return hidden_objects

    def resolve(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree]]:
        """Moves keyword arguments to positions where these have a declared sharding."""
        declared = self.options.in_shardings
        if declared is None or not kwargs:
            return args, kwargs
        most = None
        if not prefixes.is_one_entry(declared):
            most = len(declared) + len(self.static_positions)
        return inputs.by_position(self.function, args, kwargs, most)

    def positional(self, count: int) -> list[tuple[int, str]]:
        """Returns (position, parameter name) of the first dynamic arguments."""
        dynamic = (i for i in itertools.count() if i not in self.static_positions)
        places = itertools.islice(dynamic, count)
        return [(i, inputs.parameter_name(self.function, i)) for i in places]

    def path_of(self, key: int | str) -> Path:
        """Returns an argument's path by name or position among dynamic ones."""
        return (self.positional(key + 1)[-1][1] if isinstance(key, int) else key,)

    def _take_apart(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[inputs.SplitArguments, tuple[tuple[int | str, Static], ...]]:
        """Returns the dynamic arguments, split, and the static ones by place."""
        args, kwargs = self.resolve(args, kwargs)
        static_arguments: list[tuple[int | str, Static]] = []
        if not self._simple:
            arguments_by_place: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
            static = [
                place
                for place in (*self.static_positions, *self.static_names)
                if place in arguments_by_place
            ]
            static_arguments = [
                (p, inputs.static_argument(arguments_by_place[p], self.function, p)) for p in static
            ]
            args = [arg for i, arg in enumerate(args) if i not in static]
            kwargs = {name: arg for name, arg in kwargs.items() if name not in static}
        return self.options.split_arguments(args, kwargs, self.path_of), tuple(static_arguments)

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
        arguments, static = self._take_apart(args, kwargs)

        def call(roots, plain, plain_named):
            dynamic, named = arguments.restore(plain, plain_named, roots)
            dynamic, named = inputs.ArgumentPositions([], static).insert_static(dynamic, named)
            return self.function(*dynamic, **named)

        return eval_shape(call, arguments.roots, list(arguments.plain), arguments.plain_named)

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        self.memory.clear()

    def _cache_size(self) -> int:
        return sum(len(program.signatures) for program in self.specializations.values())

    def _wrapping(self):
        return self._wrapping_key

    def _maker(self) -> Callable[[Any], Any]:
        return functools.partial(_compiled, self.options, self._wrapping_key)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundJit(self, instance)

    def __repr__(self) -> str:
        return f"<sx.jit of {getattr(self.function, '__qualname__', self.function)!s}>"


def _bound(method: types.MethodType) -> BoundJit:
    """Returns the compiled form of a method."""
    return BoundJit(method.__func__, method.__self__)


def _compiled(options: special.JitOptions, wrapping: Any, function: Any) -> Jit:
    """Returns the compiled form of a callable, or of a hole."""
    if callable(function):
        return Jit(function, options, wrapping)
    # It has no arguments by which options could be checked.
    emptied = Jit(_bound, special.JitOptions(), wrapping)
    emptied.options = options
    emptied.function = function
    emptied.__dict__["__wrapped__"] = function
    return emptied


@engine.takes_options
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
    options = special.JitOptions(  # in the order of its fields
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


def _jit(function: Callable[..., object], options: special.JitOptions) -> Jit:
    inputs.check_callable(function, "jit")
    return Jit(function, options, memory=cache_of(function, options))
