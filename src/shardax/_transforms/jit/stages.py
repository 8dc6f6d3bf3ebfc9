# SPDX-License-Identifier: Apache-2.0
"""Stages of compilation, as in JAX, for functions over Modules.

Each wraps JAX's own stage and offers everything that it does. What JAX reports per argument is
arranged as the user passed it: a Module appears as a ``State`` with one entry per Variable. A
``Compiled`` is called like the function (without static arguments), on any objects of the structure
that it was compiled for, and writes state back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

from shardax._core.graph.definitions import GraphDef, Ref, VariableDef, definition_paths
from shardax._core.graph.flatten import flatten
from shardax._core.graph.paths import Path, PyTree, plain_path
from shardax._core.state.state import Origin, State
from shardax._transforms import errors
from shardax._transforms.errors import TransformError
from shardax._transforms.explain import retraces
from shardax._transforms.explain.error_context import explain_values, in_user_terms, name_inputs
from shardax._transforms.explain.retraces import call_differences
from shardax._transforms.jit.abstract_eval import abstract_graph
from shardax._transforms.jit.calls import CachedCall
from shardax._transforms.jit.jit import Jit
from shardax._transforms.jit.options import JitOptions, check_compiler_options
from shardax._transforms.jit.slow_call import input_graph, note_settings, prepare, provide
from shardax._transforms.jit.specialization import Specialization, Tracing, tracing_for
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import engine
from shardax._transforms.lift.effects import Effects, LiftedOutputs, apply_effects, check_no_leak
from shardax._transforms.lift.input_graph import InputGraph, abstract
from shardax._transforms.lift.placement import mesh_in_scope

# What the function that JAX compiles (see ``Specialization``) calls its inputs.
_INPUTS = "flat"


def trace_jit(jit: Jit, args: Sequence[object], kwargs: Mapping[str, object]) -> Traced:
    """Traces a ``Jit`` for some arguments; lazy values stay lazy."""
    trace = _trace(jit, args, kwargs)
    specialization, graph = trace.specialization, trace.graph
    note_settings(jit, CachedCall(specialization, graph), graph, args, kwargs)
    effects = trace.stage.out_info[3]
    states = _states(graph, trace.arguments)
    source = _StageSource(jit, specialization, states, effects, mesh_in_scope())
    return Traced(source, trace.stage)


def shapes_of_call(
    jit: Jit, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[PyTree, bool]:
    """Returns the result of a call with shapes in place of arrays, changing nothing.

    Args:
        jit: The compiled function.
        args: The positional arguments.
        kwargs: Those by name.

    Returns:
        The result, with abstract copies of objects; and whether the trace is kept, as the function
        met all objects in certain ways (``lift.captures``).
    """
    token = retraces.listeners.set(())  # nothing is traced that users would ask about
    try:
        trace = _trace(jit, args, kwargs)
    finally:
        retraces.listeners.reset(token)

    is_certain = not trace.specialization.is_uncertain
    if not is_certain:
        jit.memory.drop(trace.specialization)
    outputs = LiftedOutputs(*trace.stage.out_info)
    return apply_effects(abstract_graph(trace.graph), outputs), is_certain


class _JitTrace(NamedTuple):
    """JAX's ``Traced`` of a specialization, and the call that it was made for."""

    stage: Any
    specialization: Specialization
    graph: InputGraph
    arguments: inputs.SplitArguments


def _trace(jit: Jit, args: Sequence[object], kwargs: Mapping[str, object]) -> _JitTrace:
    """Traces a ``Jit`` until it lacks no input."""
    while True:
        specialization, graph, arguments = prepare(jit, args, kwargs)
        arrays = arguments.plain_leaves()[0]
        flat_inputs = specialization.partition([*abstract(graph.leaves), *arrays])
        tracing = Tracing(specialization, graph, moves_variables=False)

        try:
            with tracing_for(tracing):
                jitted = specialization.own(flat_inputs)
                stage = specialization.trace(jitted, flat_inputs)
        except engine.RetraceRequest as request:
            provide(jit, request, specialization)
            continue
        except Exception as error:
            name_inputs(error, specialization)
            raise
        return _JitTrace(stage, specialization, graph, arguments)


class _StageSource(NamedTuple):
    """What a stage was made from."""

    jit: Jit
    specialization: Specialization
    # Of each object in the arguments: positions of its Variables, and what they are, by path.
    states: list[tuple[dict[Path, int], dict[Path, Origin]]]
    effects: Effects
    mesh: Mesh | None  # in scope when it was traced, which declared specs mean
    owner: Any = None  # of a bound method, the object that a call need not be given


def _states(
    graph: InputGraph, arguments: inputs.SplitArguments
) -> list[tuple[dict[Path, int], dict[Path, Origin]]]:
    index = {id(leaf): i for i, leaf in enumerate(graph.flat.leaves)}
    states = []
    for root in arguments.roots:
        flat = flatten(root)
        pairs = list(zip(flat.leaf_paths, flat.leaves, strict=True))
        origins = {path: Origin(type(leaf), leaf._metadata) for path, leaf in pairs}
        states.append(({path: index[id(leaf)] for path, leaf in pairs}, origins))
    return states


def _result_view(specialization: Specialization, tree):
    """Returns the user's result from a tree shaped like a ``LiftedOutputs``."""
    # A Module appears as the State of what the function returns of it.
    result, written, fresh, effects = tree
    if effects.result is None:
        return result

    objects = [*specialization.graphdef.objects, *effects.fresh]
    for position, definition in effects.updates.items():
        objects[position] = definition

    # The values of Variables that were written or are new, by the position of their object.
    values = {
        specialization.graphdef.leaves[p]: value
        for p, value in zip(effects.written, written, strict=True)
    }
    new = [
        len(specialization.graphdef.objects) + i
        for i, item in enumerate(effects.fresh)
        if type(item) is VariableDef
    ]
    values.update(zip(new, fresh, strict=True))

    leaves = list(result)
    for place, position in effects.result.roots:
        paths = definition_paths(GraphDef(tuple(objects), (Ref(position),)))
        chosen = {path: i for i, path in paths.items() if i in values}
        origins = {path: Origin(objects[i].type, objects[i].metadata) for path, i in chosen.items()}
        state = State.from_flat({path: values[i] for path, i in chosen.items()}, origins)
        leaves.insert(place, state)
    return effects.result.treedef.unflatten(leaves)


def _of_arguments(name: str, doc: str):
    """Makes a property of a stage: what JAX reports for each argument."""
    return property(lambda stage: stage._view(getattr(stage._stage, name)), doc=doc)


def _of_result(name: str, doc: str):
    """Makes a property of a stage: what JAX reports for the result."""

    def view(stage: _Stage):
        source = stage._source
        return _result_view(
            source.specialization, (*getattr(stage._stage, name)[:3], source.effects)
        )

    return property(view, doc=doc)


class _Stage:
    """JAX's stage, with arguments and results arranged for the user."""

    def __init__(self, origin: _StageSource, stage) -> None:
        self._source = origin
        self._stage = stage

    def bound_to(self, owner: object) -> Self:
        """Returns the stage of a method that is bound to an object."""
        return type(self)(self._source._replace(owner=owner), self._stage)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    args_info = _of_arguments("args_info", "(args, kwargs) with ``ArgInfo`` for each array.")
    in_avals = _of_arguments("in_avals", "(args, kwargs) with an abstract value for each array.")
    out_info = _of_result("out_info", "The result with shape and dtype for each array.")

    @property
    def input_paths(self) -> dict[str, Path]:
        """Paths of the program's inputs, by JAX's names of them."""
        # Compiled programs call their parameters by these names (``flat[0][3]``). A path begins
        # with the position or name of the argument.
        flat = self._stage.in_avals
        names = jax.tree.map_with_path(
            lambda path, _: f"{_INPUTS}{jax.tree_util.keystr(path[1:])}", flat
        )
        args, kwargs = self._view(names)
        path_by_input: dict[str, Path] = {}
        for tree in (dict(enumerate(args)), kwargs):
            leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda v: isinstance(v, State))
            for path, leaf in leaves:
                below = leaf.flat() if isinstance(leaf, State) else {(): leaf}
                start = plain_path(path)
                for below_path, name in below.items():
                    path_by_input.setdefault(name, (*start, *below_path))
        return path_by_input

    @property
    def in_tree(self) -> Any:
        """Structure of ``args_info``."""
        return jax.tree.structure(self.args_info)

    @property
    def out_tree(self) -> Any:
        """Structure of ``out_info``."""
        return jax.tree.structure(self.out_info)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions, among the leaves of ``args_info``, of what is donated."""
        leaves = jax.tree.leaves(self.args_info)
        return tuple(i for i, info in enumerate(leaves) if info.donated)

    def _view(self, tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) from a tree shaped like the pure function's arguments."""
        specialization = self._source.specialization
        if len(tree) == 2 and isinstance(tree[1], dict):
            tree = tree[0]
        flat = specialization.join(*tree)
        values = flat[: specialization.variable_count]
        plain, named = specialization.key.arrays.unflatten(flat[specialization.variable_count :])
        states = [
            State.from_flat({path: values[i] for path, i in indices.items()}, origins)
            for indices, origins in self._source.states
        ]
        args, kwargs = inputs.join_arguments(
            specialization.key, plain, named, states, with_static=False
        )
        return tuple(args), kwargs

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._source.jit!r}>"


class Traced(_Stage):
    """A traced function: its program as a jaxpr, not lowered yet.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> traced = sx.jit(lambda v, x: v * x).trace(sx.Param(jnp.ones(3)), jnp.ones(3))
        >>> traced.out_info.shape, len(traced.jaxpr.eqns)
        ((3,), 1)
    """

    out_avals = _of_result("out_avals", "The result with an abstract value for each array.")

    @property
    def lifted_outputs(self) -> LiftedOutputs:
        """The shapes of all that leaves the program, and its effects on objects."""
        result, written, fresh, _ = self._stage.out_info
        return LiftedOutputs(result, written, fresh, self._source.effects)

    def lower(self, **options: object) -> Lowered:
        """Lowers to the compiler's input language; ``options`` as JAX's ``Traced.lower``."""
        return Lowered(self._source, self._stage.lower(**options))


class Lowered(_Stage):
    """A lowered function: StableHLO, not compiled yet.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> lowered = sx.jit(lambda v, x: v * x).lower(sx.Param(jnp.ones(3)), jnp.ones(3))
        >>> "stablehlo.multiply" in lowered.as_text()
        True
    """

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compiles for the devices of the arguments.

        Args:
            compiler_options: As JAX's ``Lowered.compile``.
        """
        check_compiler_options(compiler_options)
        options = {} if compiler_options is None else {"compiler_options": compiler_options}
        return Compiled(self._source, self._stage.compile(**options))


class Compiled(_Stage):
    """A compiled function. Calling it runs the program and writes state back.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> def add(v, x):
        ...     v += x
        >>> first, second = sx.Param(jnp.zeros(2)), sx.Param(jnp.zeros(2))
        >>> compiled = sx.jit(add).lower(first, jnp.ones(2)).compile()
        >>> compiled(second, jnp.ones(2))
        >>> first.value.tolist(), second.value.tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """

    input_shardings = _of_arguments("input_shardings", "(args, kwargs) with a sharding each.")
    output_shardings = _of_result("output_shardings", "The result with a sharding for each array.")
    input_formats = _of_arguments("input_formats", "(args, kwargs) with layout and sharding each.")
    input_layouts = _of_arguments("input_formats", "``input_formats`` under the name of Flax NNX.")
    output_formats = _of_result("output_formats", "The result with a format for each array.")

    def call(self, /, *args: object, **kwargs: object) -> PyTree:
        """The same as calling it."""
        return self(*args, **kwargs)

    def __call__(self, /, *args: object, **kwargs: object) -> PyTree:
        """Runs the specialization.

        Args:
            *args: As for the function, without static arguments; objects may be others than those
                that it was compiled for. What was compiled of a bound method runs for its object,
                unless it is given another one first.
            **kwargs: Likewise.

        Raises:
            TransformError: If the structure of the arguments differs from what was
                compiled; the message says where.
        """
        jit, specialization = self._source.jit, self._source.specialization
        positional, by_name = self._with_owner(args, kwargs)
        arguments = specialization.options.split_arguments(positional, by_name, jit.path_of)
        labels = [label for _, label in jit.positional(len(positional))]
        # (A ``Jit`` is a descriptor, but not here.)
        graph, names = input_graph(jit, arguments, labels)  # pyright: ignore[reportArgumentType]
        self._check(arguments, graph, names)
        specialization.layouts.place(dict(enumerate(graph.leaves)), self._source.mesh)
        flat_inputs = specialization.read_inputs(graph, arguments)
        try:
            outputs = LiftedOutputs(*self._stage(*flat_inputs))
        except (TypeError, ValueError) as error:
            # JAX refuses inputs of other types than it compiled for.
            explain_values(error, CachedCall(specialization, graph))
            raise TransformError(in_user_terms(str(error), specialization)) from error
        check_no_leak(graph, outputs)
        return apply_effects(graph, outputs)

    def _with_owner(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> tuple[Sequence[PyTree], Mapping[str, PyTree]]:
        """Returns the arguments of the function, the object of a bound method among them."""
        jit, owner = self._source.jit, self._source.owner
        given = jit.resolve(args, kwargs)
        if owner is None or len(given[0]) == len(self._source.specialization.key.templates):
            return given
        return jit.resolve((owner, *args), kwargs)

    def _check(
        self, arguments: inputs.SplitArguments, graph: InputGraph, names: Sequence[Path]
    ) -> None:
        """Raises TransformError if arguments are of another structure than what was compiled."""
        jit, compiled = self._source.jit, self._source.specialization
        # What is not passed to a ``Compiled`` counts as it was.
        key = compiled.key._replace(
            graphdef=graph.flat.graphdef,
            root_count=len(arguments.roots),
            templates=arguments.templates,
            named=arguments.named,
            arrays=arguments.plain_leaves()[1],
        )
        if key == compiled.key._replace(graphdef=compiled.graphdef):
            return

        labels = jit.positional(len(arguments.templates))
        positions = compiled.positions._replace(positional=labels)
        given = Specialization(
            jit.function, JitOptions(), key, graph, arguments, positions, names, (), ()
        )
        raise errors.other_structure(jit, call_differences(compiled, given))
