# SPDX-License-Identifier: Apache-2.0
"""What one structure of arguments compiles to.

A ``Specialization`` has a *pure function* of two lists, ``kept`` and ``donated``. Together they are
its *inputs*: the value of each Variable of the objects, then each array of the arguments. The pure
function binds the values to private copies of the objects, calls the user's function on these, and
returns ``LiftedOutputs``.

There are three steps, and only the slow way of a call (``jit.slow_call``) takes the first two.

1. *Trace* (``trace``): JAX traces the pure function, for the call that a ``Tracing`` describes.
2. *Find the program* (``find_program``): one that other functions with an equal jaxpr share
   (``jit.programs``), or, where that cannot be, the ``jax.jit`` of the pure function itself.
3. *Run* (``run``): calls the program that is known for arrays of these shapes. It never traces: for
   other types it raises ``NeedsSlowCall``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Container, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core import threads
from shardax._core.frames import a_kind_of, is_ref
from shardax._core.functions import NamedFunction
from shardax._core.graph.flatten import is_object
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms.errors import changed_capture, describe_variable
from shardax._transforms.explain import retraces
from shardax._transforms.explain.error_context import explain_inputs
from shardax._transforms.explain.tracer_errors import TRACER_ERRORS, add_advice
from shardax._transforms.jit.cache import StructureKey
from shardax._transforms.jit.options import JitOptions, Layouts, spread_prefix
from shardax._transforms.jit.programs import (
    FlatInputs,
    NeedsSlowCall,
    OwnCall,
    SharedCall,
    constants_of,
    current_context,
    forget_program,
    shared_program,
)
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift import engine
from shardax._transforms.lift.captures import Functions, StandIns
from shardax._transforms.lift.effects import (
    TEXTS,
    Effects,
    LiftedOutputs,
    MissingInputs,
    check_result,
    record_effects,
)
from shardax._transforms.lift.frames import UNNAMED, CompiledFrame
from shardax._transforms.lift.input_graph import InputGraph, bind

# Counts uses of all specializations.
_uses = itertools.count(1)


class Tracing(NamedTuple):
    """The call that a trace is for.

    JAX calls the pure function of a ``Specialization`` with tracers and nothing else. What it has
    to know besides, such as which objects the tracers are the values of, is the ``Tracing`` of the
    thread. Only the slow way of a call sets one. So a program that JAX would have to trace, in the
    fast way, finds none, and says so.
    """

    specialization: Specialization
    graph: InputGraph

    used_by_earlier_traces: Sequence[Object] = ()
    """Objects in no certain way (``lift.captures``) that an earlier trace for this call used."""

    is_inside: bool = False
    """Whether the call is made inside of another trace."""

    moves_variables: bool = True
    """Whether Variables may be moved for the trace, and it made once more."""


class _CurrentTracing(threading.local):
    tracing: Tracing | None = None


# What this thread traces. JAX calls the pure function, so it cannot be an argument.
_current = _CurrentTracing()


@contextlib.contextmanager
def tracing_for(tracing: Tracing) -> Generator[None]:
    """Lets JAX trace the pure function of a specialization within a block."""
    outer = _current.tracing
    _current.tracing = tracing
    try:
        yield
    finally:
        _current.tracing = outer


class Specialization:
    """One compiled form of a function.

    Attributes:
        key: What it is found by.
        names: The path of each root of the graph.
        leaf_paths: The path of each Variable.
        array_names: What messages call each array of the arguments.
        graphdef: The structure of the objects.
        donated: Positions of the inputs that are donated.
        layouts: Where arrays belong, by declared shardings.
        uncertain_descriptions: What the last trace met in no certain way (``lift.captures``), as
            texts for a message.
        uncertain_inputs: The objects that an earlier trace met so, which are among the inputs.
        signatures: The types of the inputs of every trace.
        writes: Whether some trace wrote Variables, or changed objects.
        changes_structure: Whether some trace changed objects.
        used: When it was last used, by a count of all uses.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        options: JitOptions,
        key: StructureKey,
        graph: InputGraph,
        arguments: inputs.SplitArguments,
        positions: inputs.ArgumentPositions,
        names: Sequence[Path],
        uncertain_inputs: Sequence[Object],
        rebound_places: Container[Hashable],
    ) -> None:
        self.function = function
        self.options = options
        self.key = key
        self.names = names
        self.positions = positions
        self.rebound_places = rebound_places
        self.graphdef = graph.flat.graphdef
        self.leaf_paths = graph.flat.leaf_paths
        self.variable_count = len(self.leaf_paths)
        self.array_names = arguments.plain_names(positions.labels)

        self.donated = self._find_donated(graph, arguments)
        self.donated_variables = frozenset(i for i in self.donated if i < self.variable_count)
        self.layouts = Layouts(options, graph, arguments, positions)

        self.uncertain_descriptions: list[str] = []
        self.uncertain_inputs = uncertain_inputs
        self.signatures: list[list[PyTree]] = []
        self.writes = False
        self.changes_structure = False
        self.used = next(_uses)

        self._pure_function = self._named_pure()
        self._tracer: Any = None
        self._own: Any = None
        # The tree of outputs that ``_own`` declares shardings for.
        self._own_tree: Hashable = None
        # Whether a trace has looked where a ``shard_map`` wants Variables.
        self._knows_shard_map = False
        # What runs, by the shapes of the arrays in the arguments.
        self._programs: dict[Hashable, SharedCall | OwnCall] = {}
        # The ``call`` of the only one of these, so that most steady calls look for no shapes.
        self._only_call: Callable[..., tuple[Any, ...]] | None = None

    @property
    def input_names(self) -> list[str]:
        """What messages call each input of the pure function."""
        of_variables = [format_path(path).removeprefix(".") for path in self.leaf_paths]
        return of_variables + self.array_names

    @property
    def base_key(self) -> StructureKey:
        """The same key for all calls of this structure, whatever their traces met."""
        return self.key._replace(call=None)

    @property
    def is_uncertain(self) -> bool:
        """Whether calls are traced every time, since objects were met in no certain way."""
        return bool(self.uncertain_descriptions or self.uncertain_inputs)

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """The lock that a steady call holds from reading values to storing the new ones."""
        if self.donated:
            return threads.both_locks
        return threads.call_lock if self.writes else threads.no_lock

    @property
    def first_lock(self) -> contextlib.AbstractContextManager[Any]:
        """The lock of a call that may be the first: nothing says yet whether it writes."""
        return threads.both_locks if self.donated else threads.call_lock

    def accept_settings(self, graph: InputGraph) -> None:
        """Takes the settings objects to be as the last trace left them."""
        self.graphdef = graph.flat.graphdef

    # --- inputs -----------------------------------------------------------------------------------

    def partition(self, items: Sequence[Any], first: int = 0) -> tuple[list[Any], list[Any]]:
        """Returns (kept, donated) of items that stand for inputs, from a position on."""
        if not self.donated:
            return list(items), []
        kept = [item for i, item in enumerate(items, first) if i not in self.donated]
        donated = [item for i, item in enumerate(items, first) if i in self.donated]
        return kept, donated

    def join(self, kept: Sequence[Any], donated: Sequence[Any]) -> list[Any]:
        """Returns the items in the order of the inputs: the inverse of ``partition``."""
        remaining_kept, remaining_donated = iter(kept), iter(donated)
        return [
            next(remaining_donated if i in self.donated else remaining_kept)
            for i in range(len(kept) + len(donated))
        ]

    def read_inputs(self, graph: InputGraph, arguments: inputs.SplitArguments) -> FlatInputs:
        """Returns the inputs of the pure function, with the values that Variables have now."""
        values = graph.values(refs=True, donated=self.donated_variables)
        return self.partition([*values, *arguments.plain_leaves()[0]])

    def _find_donated(self, graph: InputGraph, arguments: inputs.SplitArguments) -> frozenset[int]:
        """Returns the positions, among the inputs, of Variables and arrays that are donated."""
        donated: set[int] = set()
        donated_ids: set[int] = set()
        positions: list[int | None] = [position for position, _ in self.positions.positional]
        positions += [None] * len(arguments.named)

        end = self.variable_count
        parts = arguments.parts(self.positions.labels)
        for position, (name, template, plain) in zip(positions, parts, strict=True):
            start, end = end, end + len(jax.tree.leaves(plain))
            if not self.options.donates(position, name):
                continue

            donated.update(range(start, end))
            for root, _ in inputs.root_places("", template):
                flat = InputGraph([arguments.roots[root]]).flat
                donated_ids.update(map(id, flat.leaves))

        leaves = enumerate(graph.flat.leaves)
        return frozenset(donated.union(i for i, leaf in leaves if id(leaf) in donated_ids))

    # --- running ----------------------------------------------------------------------------------

    def run(self, kept: list[Leaf], donated: list[Leaf]) -> tuple[Any, ...]:
        """Returns what the program returns: the result, written and new values, and effects.

        Raises:
            NeedsSlowCall: If no program is known for inputs of these shapes or types.
        """
        self.used = next(_uses)
        call = self._only_call
        if call is None:
            program = self._programs.get(self._shapes_of((kept, donated)))
            if program is None:
                raise NeedsSlowCall
            call = program.call
        return call(kept, donated)

    def _shapes_of(self, flat_inputs: FlatInputs) -> Hashable:
        """Returns the shapes of the arrays in the arguments."""
        kept, donated = flat_inputs
        donated_count = len(self.donated_variables)
        kept_count = self.variable_count - donated_count
        arrays = (*kept[kept_count:], *donated[donated_count:])
        return tuple([getattr(array, "shape", ()) for array in arrays])

    def run_program(self, program: SharedCall | OwnCall, flat_inputs: FlatInputs) -> LiftedOutputs:
        """Returns what a program returns for inputs that it was found for."""
        try:
            return LiftedOutputs(*program.call(*flat_inputs))
        except NeedsSlowCall:
            # Another thread has stored values of other types since.
            return LiftedOutputs(*self.own(flat_inputs)(*flat_inputs))

    # --- finding the program ----------------------------------------------------------------------

    def find_program(self, flat_inputs: FlatInputs, tracing: Tracing) -> SharedCall | OwnCall:
        """Returns the program for inputs, tracing where none is known.

        Raises:
            RetraceRequest: If the trace needs other inputs.
        """
        self.used = next(_uses)

        shapes = self._shapes_of(flat_inputs)
        known = self._programs.get(shapes)
        shared = None if tracing.is_inside else known
        if isinstance(shared, SharedCall) and shared.accepts(flat_inputs):
            return shared

        # Within other traces a program is part of theirs, and may be differentiated.
        if tracing.is_inside or isinstance(known, OwnCall):
            own = self.own(flat_inputs)
            self.trace(own, flat_inputs)
            return OwnCall(own)

        program = self._trace_and_share(flat_inputs)
        if program is None or (known is not None and known.program is not program.program):
            # It cannot be shared. Or the shapes do not tell it apart from another one, since only
            # dtypes, Variables of other types or settings of JAX differ: the function's own
            # ``jax.jit`` does, from now on.
            program = OwnCall(self.own(flat_inputs))
        elif isinstance(self.function, Functions):
            # JAX keeps a trace as long as the function that was traced. The jaxpr of a transform
            # may refer to what keeps its program (a ``custom_vjp``): neither would be freed.
            self._jit_for_traces().clear_cache()

        self._programs[shapes] = program
        self._only_call = program.call if len(self._programs) == 1 else None
        return program

    def _trace_and_share(self, flat_inputs: FlatInputs) -> SharedCall | None:
        """Returns the shared program of a new trace; None if it cannot be shared."""
        traced = self.trace(self._jit_for_traces(), flat_inputs)
        outputs = traced.out_info
        effects = outputs[3]

        # The effects of a ``jax.Ref`` belong to one trace.
        if any(map(is_ref, (*jax.tree.leaves(flat_inputs), *traced.jaxpr.consts))):
            return None

        options = self._options_of_shared(effects, outputs)
        program = shared_program(
            traced.jaxpr,
            self._pure_function.__name__,
            jax.tree.structure(flat_inputs),
            jax.tree.structure(outputs[:3]),
            options,
        )
        constants = constants_of(traced.jaxpr, flat_inputs)
        if program is None or constants is None:
            return None
        # Settings of JAX may be such that it keeps no trace (``jax_check_tracer_leaks``).
        if program.context is not current_context():
            return None
        return SharedCall(program, constants, effects, flat_inputs)

    def _options_of_shared(self, effects: Effects, outputs: tuple[PyTree, ...]) -> dict[str, Any]:
        """Returns the options of a shared program, whose last input are the constants."""
        options = self._options()
        if "in_shardings" in options:
            options["in_shardings"] = (*options["in_shardings"], None)
        if self.options.declares_shardings:
            pairs = zip(effects.shardings, outputs[:3], strict=True)
            options["out_shardings"] = tuple(spread_prefix(*pair) for pair in pairs)
        return options

    def own(self, flat_inputs: FlatInputs) -> Any:
        """Returns the ``jax.jit`` of the pure function that runs it."""
        if self._own is None:
            own = self._jit_for_traces()

            # Shardings of outputs are known once it was traced. Nothing is kept of a trace that
            # raises: its ``jax.jit`` does not have them.
            if self.options.declares_shardings:
                effects = own.trace(*flat_inputs).out_info[3]
                self._own_tree = effects.tree_key
                shardings = (*effects.shardings, None)
                own = jax.jit(self._pure_function, out_shardings=shardings, **self._options())
            self._own = own
        return self._own

    def _jit_for_traces(self) -> Any:
        """Returns the ``jax.jit`` of the pure function that traces it, for any result."""
        if self._tracer is None:
            self._tracer = jax.jit(self._pure_function, **self._options())
        return self._tracer

    def _options(self) -> dict[str, Any]:
        """Returns the options of ``jax.jit`` for the pure function, but for ``out_shardings``."""
        options: dict[str, Any] = {
            "keep_unused": self.options.keep_unused,
            "inline": self.options.inline,
        }
        if self.options.compiler_options is not None:
            options["compiler_options"] = self.options.compiler_options
        if self.donated:
            options["donate_argnums"] = (1,)
        if self.options.in_shardings is not None:
            of_inputs = [*self.layouts.of_variables, *self.layouts.of_arrays]
            options["in_shardings"] = self.partition(of_inputs)
        return options

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        for program in self._programs.values():
            if isinstance(program, SharedCall):
                forget_program(program.program)
        self._programs, self._only_call = {}, None

        for jitted in (self._tracer, self._own):
            if jitted is not None:
                jitted.clear_cache()

    # --- tracing ----------------------------------------------------------------------------------

    def trace(self, jitted: Any, flat_inputs: FlatInputs) -> Any:
        """Returns the ``Traced`` of JAX, of a ``jax.jit`` of the pure function.

        Raises:
            RetraceRequest: If the trace needs other inputs.
        """
        # An exception that passes through a trace of JAX 0.10 to 0.12 leaves its constants in
        # memory for good. So a trace that lacks an input ends well, and raises here. It may have
        # been made by another thread: JAX lets one trace, and gives both the outcome.
        try:
            traced = jitted.trace(*flat_inputs)
        except (TypeError, ValueError) as error:
            explain_inputs(error, self, flat_inputs)
            raise

        effects: Effects = traced.out_info[3]
        if effects.missing is not None:
            objects = [reference() for reference in effects.missing.objects]
            read = [reference() for reference in effects.missing.read]
            raise engine.RetraceRequest(objects, read=read)
        return traced

    def _named_pure(self) -> NamedFunction[..., tuple[Any, ...]]:
        """Returns the pure function under the user's name and source line."""
        # Profiles and JAX's errors show them. JAX follows ``__wrapped__`` for the line, but must
        # not take the user's parameters for those of the pure function.

        def pure(*flat: PyTree) -> tuple[Any, ...]:
            return self._pure(*flat)

        named: Any = self.function
        while isinstance(named, functools.partial):
            named = named.func
        pure.__name__ = getattr(named, "__name__", type(named).__name__)
        if isinstance(named, Object):
            named = type(named).__call__
        pure.__dict__["__signature__"] = inspect.signature(pure)
        pure.__dict__["__wrapped__"] = named
        return pure

    def _pure(self, kept: list[Leaf], donated: list[Leaf]) -> tuple[Any, ...]:
        """Returns ``LiftedOutputs`` of the user's function, on private copies of the objects."""
        tracing = _current.tracing
        if tracing is None or tracing.specialization is not self:
            # JAX began a trace that no slow call of this specialization asked for: a fast call has
            # inputs that JAX does not know. The slow way makes it.
            raise NeedsSlowCall

        graph = tracing.graph
        flat = self.join(kept, donated)
        self._note_signature(flat)
        values = flat[: self.variable_count]
        plain, named = self.key.arrays.unflatten(flat[self.variable_count :])

        with CompiledFrame("jit") as frame:
            # Run the user's function on the copies.
            originals = graph.objects()
            roots, copies = bind(frame, self.graphdef, values, originals, graph.leaves)
            result = self._call_user(originals, copies, roots, plain, named)
            frame.take_in()
            self.uncertain_descriptions = [
                self._describe_met(variable, copies) for variable in frame.met
            ]
            self._check_met_again(tracing, frame, originals, copies)

            # Say what it did.
            check_result(result, "jit", TEXTS)
            emitted = self._find_emitted(result, copies)
            outputs = record_effects(frame, self.graphdef, copies, values, result, emitted)
            effects = outputs.effects

            # Say what it lacks: what it used and was not given.
            captured = [item.outer for item in frame.captured]
            if captured or effects.foreign:
                used = [*captured, *effects.foreign.values()]

                # Only what is missing is returned; the requests below are raised through JAX.
                effects.missing = MissingInputs(
                    objects=list(map(weakref.ref, used)), read=list(map(weakref.ref, captured))
                )

            # Find where arrays belong.
            if tracing.moves_variables and frame.parent is None and not self._knows_shard_map:
                self._knows_shard_map = True
                wanted = [frame.wanted.get(id(copies[index])) for index in self.graphdef.leaves]
                if self.layouts.take_wanted(wanted, graph.leaves, effects.written):
                    raise engine.RetraceRequest
            if self.options.declares_shardings:
                if self._own_tree not in (None, effects.tree_key):
                    raise engine.RetraceRequest(drops_program=True)
                effects.shardings = self.layouts.of_outputs(
                    outputs, self.graphdef, copies, result, plain, roots
                )

        self.writes = self.writes or bool(effects.written) or not effects.simple
        self.changes_structure = self.changes_structure or bool(effects.updates)
        return tuple(outputs)

    def _note_signature(self, flat: Sequence[Leaf]) -> None:
        """Notes the types of a trace's inputs, and reports that it is not the first."""
        signature = [jax.tree.map(jax.typeof, value) for value in flat]
        if self.signatures and retraces.listeners.get():
            retraces.report_trace(self, self.signatures, signature)
        self.signatures.append(signature)

    def _call_user(
        self,
        originals: Sequence[Object],
        copies: Sequence[Object],
        roots: Sequence[Object],
        plain: Sequence[Leaf],
        named: Mapping[str, PyTree],
    ) -> PyTree:
        """Returns the result of the user's function, which finds copies where it looks."""
        args, kwargs = inputs.join_arguments(self.key, plain, named, roots[: self.key.root_count])
        args, kwargs = self.positions.insert_static(args, kwargs)
        stand_ins = StandIns(zip(originals, copies, strict=True), self.rebound_places)

        try:
            result = stand_ins.function(self.function)(*args, **kwargs)
        except engine.RetraceRequest:
            stand_ins.bound_anew()  # for what it undoes
            raise
        except Exception as error:
            # What the function stored before it raised is seen by the user, as in plain Python.
            self._check_bound_anew(stand_ins)
            if isinstance(error, TRACER_ERRORS):
                add_advice(error)
            raise

        self._check_bound_anew(stand_ins)
        return result

    def _check_bound_anew(self, stand_ins: StandIns) -> None:
        """Asks for another trace where the function bound the name of a place anew."""
        bound_anew = stand_ins.bound_anew()
        if bound_anew:
            raise engine.RetraceRequest(rebound_places=bound_anew)

    def _check_met_again(
        self,
        tracing: Tracing,
        frame: CompiledFrame,
        originals: Sequence[Object],
        copies: Sequence[Object],
    ) -> None:
        """Raises unless a second trace for one call used what the first one did."""
        original_of = {id(copy): item for item, copy in zip(originals, copies, strict=True)}
        met = {id(original_of.get(id(item), item)) for item in frame.met}
        for item in tracing.used_by_earlier_traces:
            if id(item) not in met:
                raise changed_capture(self.function, item)

    def _describe_met(self, variable: Variable, copies: Sequence[Object]) -> str:
        """Returns what a message calls a Variable that was met in no certain way."""
        for path, index in zip(self.leaf_paths, self.graphdef.leaves, strict=True):
            if copies[index] is variable and path and path[0] != UNNAMED:
                return f"{a_kind_of(variable)} at {format_path(path)}"
        return describe_variable(variable)

    def _find_emitted(self, result: PyTree, copies: Sequence[Object]) -> frozenset[int]:
        """Returns the positions of Variables that are outputs even if they are unchanged."""
        # The donated ones, and those in the result when its shardings are declared.
        if self.options.out_shardings is None:
            return self.donated_variables

        returned_ids: set[int] = set()
        for leaf in jax.tree.leaves(result, is_leaf=is_object):
            if isinstance(leaf, Object):
                returned_ids.update(map(id, InputGraph([leaf]).flat.leaves))

        returned = (
            position
            for position, index in enumerate(self.graphdef.leaves)
            if id(copies[index]) in returned_ids
        )
        return self.donated_variables.union(returned)
