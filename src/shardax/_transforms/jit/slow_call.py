# SPDX-License-Identifier: Apache-2.0
"""The slow way of a call: the first of its kind, which may have to be traced.

``call_slowly`` is the whole of it, from top to bottom:

1. *Flatten* the objects and arguments, and find the ``Specialization`` of their structure, or make
   it (``prepare``). The structure is: attributes, static values, the tree of the arguments, and the
   class of each object, but no shapes, dtypes or identities.
2. *Find the program* for the shapes and dtypes. Only here something is traced: if these were not
   met before, or something was met in no certain way (``lift.captures``).
3. *Run* it, and *remember* the call by the identities of its objects, for the fast way.
4. *Apply* what the function did to the objects of the caller.

A trace can end with the wish for another one (``RetraceRequest``): it met an object that was not
among its inputs, a name was bound anew in it, or it found where Variables belong. Then all of this
begins again.

A slow call holds a lock in 3 and 4, where it reads values, runs and stores, and nothing holds one
while it is traced (``_core.threads``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardax._core import threads
from shardax._core.errors import ConcurrentWriteError, ModuleError
from shardax._core.frames import is_eager
from shardax._core.graph.paths import Path, PyTree
from shardax._core.graph.settings import Setting, note_trace, settings_among
from shardax._core.graph.static import function_identities
from shardax._core.init.lazy import materialize_all
from shardax._core.object import Object
from shardax._core.threads import local
from shardax._transforms import errors
from shardax._transforms.explain import retraces
from shardax._transforms.explain.error_context import explaining
from shardax._transforms.jit.cache import StructureKey
from shardax._transforms.jit.calls import CachedCall, CallKey
from shardax._transforms.jit.specialization import Specialization, Tracing, tracing_for
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.captures import Functions, objects_in
from shardax._transforms.lift.effects import Effects, apply_effects, check_no_leak
from shardax._transforms.lift.engine import RetraceRequest
from shardax._transforms.lift.frames import UNNAMED
from shardax._transforms.lift.input_graph import InputGraph
from shardax._transforms.lift.signatures import parameter_name

if TYPE_CHECKING:
    from shardax._transforms.jit.jit import Jit

# Not empty while calls compare their arguments over processes, which users turn on by
# ``sx.configure(debug_processes=True)``. Every call is then a slow one.
comparing: list[bool] = []

# Against threads that write all the time without waiting, or a callback that writes at every run.
_MOST_LOST_RUNS = 100


def call_slowly(
    jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], call_key: CallKey | None
) -> PyTree:
    """Calls a compiled function, tracing it where no program is known; returns its result."""
    if comparing and local.frame is None:
        _compare_over_processes(jit, args, kwargs)

    is_inside = local.frame is not None or not is_eager()
    used_by_earlier_traces: list[Object] = []
    lost_runs = 0
    while True:
        # Flatten the objects; find the specialization for them, or make it.
        specialization, graph, arguments = prepare(jit, args, kwargs)
        call = CachedCall(specialization, graph)
        tracing = Tracing(specialization, graph, used_by_earlier_traces, is_inside)
        # Inside of a transform copies belong to one thread.
        lock = threads.no_lock if is_inside else specialization.first_lock

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
                _remember(jit, call, graph, outputs.effects, args, kwargs, call_key)
                try:
                    result = apply_effects(graph, outputs)
                except ConcurrentWriteError:
                    # Another thread, or a callback, wrote meanwhile what the function writes.
                    lost_runs += 1
                    if specialization.donated or lost_runs == _MOST_LOST_RUNS:
                        raise
                    continue

        except RetraceRequest as request:
            # The trace is void: it lacked an input, a name was bound anew, or its program no
            # longer fits. ``provide`` prepares for that, and the next one begins.
            provide(jit, request, specialization)
            used_by_earlier_traces = [*used_by_earlier_traces, *request.read]
            continue

        # When everything is done: users may have warnings raised as errors.
        _warn_of_uncertain(jit, specialization)
        return result


def _compare_over_processes(jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> None:
    """Raises DistributedError if numbers given to a call differ over processes."""
    from shardax.distributed.processes import compare_arguments

    labels = [parameter_name(jit.function, i) for i in range(len(args))]
    arguments_by_name = dict(zip(labels, args, strict=True)) | dict(kwargs)
    compare_arguments(arguments_by_name, f"a call of {jit!r}")


# --- 1. the structure of a call, and its specialization -------------------------------------------


class _CallStructure(NamedTuple):
    """A call taken apart."""

    key: StructureKey
    graph: InputGraph
    arguments: inputs.SplitArguments
    positions: inputs.ArgumentPositions
    names: list[Path]


def prepare(
    jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Specialization, InputGraph, inputs.SplitArguments]:
    """Returns the specialization for a call, made now or before, and the call taken apart."""
    key, graph, arguments, positions, names = _structure_of(jit, args, kwargs)
    met = jit.memory.uncertain_inputs_of(key)
    if met:
        # Not found by another call: the objects may be met in another way then.
        graph, names = input_graph(jit, arguments, positions.labels, met)
        key = key._replace(call=object())

    specialization = jit.specializations.get(key)
    if specialization is None:
        arguments.refuse_copies()
        specialization = Specialization(
            jit.function,
            jit.options,
            key,
            graph,
            arguments,
            positions,
            names,
            met,
            jit.memory.rebound_places,
        )
        if not met and jit.specializations and retraces.listeners.get():
            retraces.report_specialization(jit, specialization)
        jit.memory.add(specialization)

    # It may have been made where a mesh was in scope.
    specialization.layouts.mesh_of_specs()
    return specialization, graph, arguments


def _structure_of(jit: Jit, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> _CallStructure:
    """Returns a call taken apart, with the key of its specialization."""
    args, kwargs, static = jit.without_static(args, kwargs)
    arguments = jit.options.split_arguments(args, kwargs, jit.path_of)
    positions = inputs.ArgumentPositions(jit.positional(len(arguments.templates)), static)
    jit.memory.find_places(jit.function)
    graph, names = input_graph(jit, arguments, positions.labels)

    static_values = [
        *graph.flat.graphdef.static_values(),
        *arguments.static_values(),
        *(item.value for _, item in static),
    ]
    key = StructureKey(
        graphdef=graph.flat.graphdef,
        root_count=len(arguments.roots),
        captured=jit.memory.structure(),
        templates=arguments.templates,
        named=arguments.named,
        arrays=arguments.plain_leaves()[1],
        static=static,
        functions=function_identities(static_values),
    )
    return _CallStructure(key, graph, arguments, positions, names)


def input_graph(
    jit: Jit, arguments: inputs.SplitArguments, labels: Sequence[str], met: Sequence[Object] = ()
) -> tuple[InputGraph, list[Path]]:
    """Returns the ``InputGraph`` of all objects that a call uses, and the path of each root.

    Args:
        jit: The compiled function.
        arguments: The arguments.
        labels: The names of the positional ones.
        met: What an earlier trace met in no certain way.
    """
    captured = list(captured_objects(jit))
    captured += [((UNNAMED, i), item) for i, item in enumerate(met)]
    names = [*inputs.root_names(labels, arguments), *(name for name, _ in captured)]
    roots = [*arguments.roots, *(item for _, item in captured)]
    return InputGraph(roots, names), names


def captured_objects(jit: Jit) -> Iterator[tuple[Path, Object]]:
    """Yields (path, object) of what a function finds, in certain ways, without arguments."""
    for place in jit.memory.places or ():
        items = list(objects_in(place.read()))
        name = (place.name,) if place.name else ()
        if len(items) == 1:
            yield name, items[0]
        else:
            yield from (((*name, i), item) for i, item in enumerate(items))


# --- 2. traces that need other inputs -------------------------------------------------------------


def provide(jit: Jit, request: RetraceRequest, specialization: Specialization) -> None:
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
            raise errors.unusable_captures(jit, request.objects)
        jit.memory.note_uncertain_inputs(specialization.base_key, [*known, *new])

    jit.memory.rebound_places.update(request.rebound_places)
    if request.objects or request.rebound_places or request.drops_program:
        jit.memory.drop(specialization)


# --- 3. what is remembered ------------------------------------------------------------------------


def _remember(
    jit: Jit,
    call: CachedCall,
    graph: InputGraph,
    effects: Effects,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    call_key: CallKey | None,
) -> None:
    """Remembers a call for the fast way, unless it has to be traced at every call."""
    specialization = call.specialization
    if specialization.is_uncertain:
        jit.memory.drop(specialization)
        if not specialization.uncertain_descriptions:
            # What the last trace met is returned, or no longer used.
            jit.memory.uncertain_inputs.pop(specialization.base_key, None)
        return

    note_settings(jit, call, graph, args, kwargs)
    if call_key is not None:
        call.lock = specialization.lock
        call.learn(effects)
        call.note_placed()
        jit.memory.remember(call_key, call, graph)


def note_settings(
    jit: Jit,
    call: CachedCall,
    graph: InputGraph,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> None:
    """Finds the specialization of a call, from now on, by what its trace wrote into settings.

    A settings object is an instance of a user's class that a function reads as configuration
    (``_core.graph.settings``). A function may write into one while it is traced. The next call then
    finds other settings than the one that was traced for, and would trace again, for ever.
    """
    specialization = call.specialization
    before = _settings_read(graph, specialization.key)
    if not before:
        return

    with contextlib.suppress(ModuleError, TypeError):  # the next call says what is wrong
        structure = _structure_of(jit, args, kwargs)
        after = _settings_read(structure.graph, structure.key)
        for old, new in zip(before, after, strict=False):
            if old.key.content != new.key.content:
                return  # another value, for which the next call traces
            note_trace(old.key, new.key)

        # Once more, with the notes.
        structure = _structure_of(jit, args, kwargs)
        known = jit.specializations.setdefault(structure.key, specialization)
        if known is specialization:
            specialization.accept_settings(structure.graph)
            call.settings = structure.graph.flat.settings


def _settings_read(graph: InputGraph, key: StructureKey) -> list[Setting]:
    """Returns the settings objects that a call was given, by the key of its specialization."""
    settings = list(graph.flat.settings)
    statics = [item for _, item in key.static]
    for template in (*key.templates, *(template for _, template in key.named)):
        if isinstance(template, inputs.TreeTemplate):
            statics += [leaf for _, leaf in template.static]
    if statics:
        settings += settings_among(statics)
    return settings


def _warn_of_uncertain(jit: Jit, specialization: Specialization) -> None:
    """Warns once of objects that a function met in no certain way."""
    # A function of the library's own names a function of the user's as its reason.
    is_of_user = not isinstance(jit.function, Functions)
    if local.frame is None and is_of_user and not jit.memory.has_warned:
        descriptions = specialization.uncertain_descriptions
        if descriptions:
            jit.memory.has_warned = True
            warnings.warn(errors.uncertain_capture(jit, descriptions), stacklevel=4)
