# SPDX-License-Identifier: Apache-2.0
"""The engine that lifts JAX transforms to functions over Modules.

JAX transforms pure functions of arrays. A lifted call makes one, in the same steps under every
transform:

1. *Split* the arguments into objects, plain values, and templates to join them again
   (``lift.arguments``).
2. *Flatten* the objects into a structure and the values of their Variables (``InputGraph`` in
   ``lift.input_graph``). Now JAX is called, with a pure function of these values and the plain
   ones. Inside of it:
3. *Bind*: the structure is built anew, as a private copy whose Variables hold JAX's tracers. A
   frame owns the copy (``_core.frames``).
4. *Run* the user's function on the copy (``LiftedCall.run``).
5. *Record* what it did besides returning arrays: the Variables that it wrote, how the structure of
   the objects changed, which objects are new (``record_effects`` in ``lift.effects``). JAX returns.
   Outside again:
6. *Apply* the effects to the caller's objects (``apply_effects`` in ``lift.effects``). Each
   transform asks for it in one line after that which calls JAX: ``call.finish(leaving)`` in
   ``grad/grad.py``, ``MappedCall.apply``, ``Loop.apply``.

A transform adds only how values enter and leave the pure function.

These rules hold:

- Steps 1 to 5 write to no object of the caller's (a lazy value that is read becomes an array).
  ``apply_effects`` in step 6 is the only function that writes, once JAX has returned; a steady call
  of ``jit`` stores plain values itself, at the same point. An exception in one of the steps, of the
  user's function or of JAX, ends the call before step 6. The copy is dropped, and the caller's
  objects hold what they held before.
- Modules, containers of theirs and Variables are copied. Any other Python object in an attribute is
  the caller's own, so what a function writes into it is done at once, as in plain Python.
- A Variable that is made in a run belongs to its frame. If it is in the result, or in a given
  object, step 6 makes one of its value for the caller. Kept in any other way, it is refused when
  the frame is closed (``frames.resolve``).
- Calls nest. The caller's objects of an inner call are the copies of the frame around it, so
  effects go outward one call at a time.

A Variable that a function reaches through a closure or a global is *captured* (``lift.frames``).
Reads see the value that it has in the calling frame. For writes a transform has one of three rules:

- return the value beside the result, and apply it with the other effects (``SingleRunCall``):
  ``grad``, ``remat``;
- make it an input and run again: loops and branches (``retry_captured``), which must know their
  inputs before they run, and ``jit`` (``CompiledFrame``);
- refuse (``SealedFrame``): ``vmap``, ``shard_map``, where one Variable would get many values.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core import frames
from shardax._core.frames import CapturedVariable
from shardax._core.graph import flatten as graphs
from shardax._core.graph.definitions import GraphDef
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.explain.tracer_errors import (
    TRACER_ERRORS,
    InputForm,
    add_advice,
    name_inputs,
)
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.effects import (
    Effects,
    LiftedOutputs,
    apply_effects,
    check_no_leak,
    check_result,
    holds_same_arrays,
    record_effects,
)
from shardax._transforms.lift.frames import LateFrame, SealedFrame, path_of
from shardax._transforms.lift.input_graph import InputGraph, bind
from shardax._transforms.lift.signatures import argument_path, parameter_name


class LiftedCall:
    """One lifted call: its arguments and functions.

    Attributes:
        name: The transform's name, for messages: "vmap".
        functions: The user's functions; branches are several.
        arguments: The arguments, split.
        labels: The parameter name of each positional argument.
        names: The path of each root of ``graph``.
        graph: The caller's objects: those that functions are bound to, those in the arguments, and
            captured Variables that an earlier attempt wrote (``retry_captured``).
        graphdef: Their structure.
        enter: Called with the (args, kwargs) that hold the copies; returns those that the function
            shall see.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., PyTree]],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        make_frame: Callable[[str], frames.Frame] = frames.Frame,
        captured: Sequence[Variable] = (),
        static: Container[int | str] = (),
        auto_static: bool = False,
        static_numbers: bool = False,
    ) -> None:
        self.name = name
        self.functions = tuple(functions)
        self.make_frame = make_frame
        self.captured_count = len(captured)
        self.enter: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]
        self.enter = lambda args, kwargs: (args, kwargs)

        # Split.
        label = functools.partial(argument_path, functions[0])
        self.arguments = inputs.SplitArguments(
            args, kwargs, auto_static, static, static_numbers, label
        )
        self.arguments.refuse_copies()

        # Flatten.
        positions = range(len(self.arguments.templates))
        self.labels = [parameter_name(functions[0], position) for position in positions]
        self.names: list[Path] = [
            *([()] * len(functions)),
            *inputs.root_names(self.labels, self.arguments),
            *(path_of(functions, variable) for variable in captured),
        ]
        self.graph = InputGraph([*functions, *self.arguments.roots, *captured], self.names)
        self.graphdef = self.graph.flat.graphdef

        # After ``release``: (weak reference to an original, position of its copy).
        self._released: list[tuple[weakref.ref[Any], int]] | None = None

    def run(
        self,
        values: Sequence[Leaf],
        plain: Sequence[Leaf],
        plain_named: Mapping[str, Leaf],
        leave: Callable[[RunContext], PyTree],
        which: int = 0,
        graphdef: GraphDef | None = None,
    ) -> PyTree:
        """Runs a function on a copy of the objects, inside the transform.

        Args:
            values: The value of each Variable of the graph, as the transform has it.
            plain: The plain part of each positional argument, likewise.
            plain_named: The plain parts of arguments by name.
            leave: Called when the function has run, while the frame is open. It usually records the
                effects.
            which: Which of the functions runs.
            graphdef: The structure of the copy, if it is another than that of the graph.

        Returns:
            What ``leave`` returned.
        """
        graphdef = graphdef or self.graphdef
        with self.make_frame(self.name) as frame:
            # Bind. Up to the end of the frame, the objects are copies that the frame owns.
            roots, copies = self._bind(frame, graphdef, values)
            first_argument = len(self.functions)
            first_captured = len(roots) - self.captured_count
            argument_roots = roots[first_argument:first_captured]
            if isinstance(frame, SealedFrame):
                captured = zip(self.names[first_captured:], roots[first_captured:], strict=True)
                for path, variable in captured:
                    frame.seal(variable, path)

            # Containers of their own: the function may change those that it is given.
            plain_copy, plain_named_copy = jax.tree.map(
                lambda leaf: leaf, (list(plain), dict(plain_named))
            )

            # Run. An exception ends the call here: nothing is recorded, so nothing is applied, and
            # what the function wrote is in the copy alone.
            args, kwargs = self.arguments.restore(plain, plain_named, argument_roots)
            args, kwargs = self.enter(args, kwargs)
            try:
                result = roots[which](*args, **kwargs)
            except TRACER_ERRORS as error:
                add_advice(error)
                raise
            frame.take_in()
            if isinstance(frame, SealedFrame):
                frame.check_unwritten()

            # Record.
            args, kwargs = self.arguments.restore(plain_copy, plain_named_copy, argument_roots)
            context = RunContext(
                call=self,
                frame=frame,
                graphdef=graphdef,
                copies=copies,
                bound=values,
                args=args,
                kwargs=kwargs,
                result=result,
            )
            return leave(context)

    def _bind(
        self, frame: frames.Frame, graphdef: GraphDef, values: Sequence[Leaf]
    ) -> tuple[list[PyTree], list[Object]]:
        """Returns (roots, objects) of the copy."""
        if self._released is None:
            return bind(frame, graphdef, values, self.graph.objects(), self.graph.leaves)

        roots, copies = graphs.build(graphdef, map(frames.own, values), frame)
        for reference, position in self._released:
            original = reference()
            if original is not None:
                frame.copies[id(original)] = (original, copies[position])
        return roots, copies

    def apply(
        self, outputs: LiftedOutputs, captured: Sequence[tuple[CapturedVariable, Leaf]] = ()
    ) -> PyTree:
        """Applies, outside the transform, what a run did; returns its result."""
        check_no_leak(self.graph, outputs)
        return apply_effects(self.graph, outputs, captured)

    def release(self, originals: Iterable[tuple[Object, int]]) -> None:
        """Lets go of the caller's objects, so that the function can run when the call is over.

        Derivative rules run then, and JAX keeps them: a model must not live as long.

        Args:
            originals: Every original with the position of its copy (``RunContext.known``).
        """
        self._released = [(weakref.ref(original), position) for original, position in originals]
        self.arguments.release()
        self.make_frame = LateFrame
        del self.graph

    def program(
        self, pure: Callable[..., PyTree], form: InputForm, which: int = 0
    ) -> Callable[..., Any]:
        """Returns a pure function for JAX that shows the user's names in errors and profiles.

        Args:
            pure: Called with the values of Variables, and with plain arguments.
            form: How ``pure`` takes the plain arguments.
            which: Which of the functions it runs.
        """
        # Traces may be nested, and an inner one may meet an input of an outer one. So the names of
        # inputs end with the number of frames around.
        level = 0
        frame = frames.local.frame
        while frame is not None:
            level, frame = level + 1, frame.parent

        def named(*inputs) -> Any:
            try:
                return pure(*inputs)
            except TRACER_ERRORS as error:
                name_inputs(error, self, form, level)
                raise

        # JAX reads the function's name and line from ``__wrapped__``, the names of inputs from the
        # signature.
        function: Any = self.functions[which]
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, Object):
            function = type(function).__call__
        labels = ("values", "plain", "named")[: 3 if form == "arguments" else 2]
        parameters = [
            inspect.Parameter(f"{label}_{level}", inspect.Parameter.POSITIONAL_ONLY)
            for label in labels
        ]
        named.__name__ = getattr(pure, "__name__", "program")
        named.__dict__["__wrapped__"] = function
        named.__dict__["__signature__"] = inspect.Signature(parameters)
        return named


class RunContext(NamedTuple):
    """What is known when the user's function has run and its frame is open."""

    call: LiftedCall
    frame: frames.Frame
    graphdef: GraphDef

    copies: Sequence[Any]
    """The private copy, in the order of ``graphdef.objects``."""

    bound: Sequence[Leaf]
    """The value that was bound to each Variable."""

    args: Sequence[PyTree]
    """The positional arguments, with copies for objects and plain containers as they came."""

    kwargs: Mapping[str, PyTree]
    """The arguments by name, likewise."""

    result: PyTree
    """What the user's function returned."""

    def record_effects(self, rest: PyTree, emit: frozenset[int] = frozenset()) -> LiftedOutputs:
        """Returns what leaves: the function's effects, and ``rest`` of its result."""
        return record_effects(self.frame, self.graphdef, self.copies, self.bound, rest, emit)

    def known(self) -> list[tuple[Object, int]]:
        """Returns every original that has a copy, with the copy's position."""
        positions = {id(copy): position for position, copy in enumerate(self.copies)}
        pairs = self.frame.copies.values()
        return [
            (original, positions[id(copy)]) for original, copy in pairs if id(copy) in positions
        ]

    def here(self, original: Any) -> PyTree:
        """Returns the copy of an original; anything else as it is."""
        pair = self.frame.copies.get(id(original))
        return original if pair is None else pair[1]

    def variable(self, position: int) -> Variable[Any]:
        """Returns the copy of the Variable at a position."""
        return self.copies[self.graphdef.leaves[position]]

    def captured(self) -> list[CapturedVariable]:
        """Returns the captured Variables that were written or given other metadata."""
        return [
            item
            for item in self.frame.captured
            if not holds_same_arrays(item.value, item.stand_in._value)
            or item.outer._metadata != item.stand_in._metadata
        ]


# --- captured Variables that are returned beside the result -----------------------------------


class SingleRunCall(LiftedCall):
    """A call whose function runs once, in order: ``run_once`` inside, then ``finish`` outside.

    Captured Variables that it writes are applied with the other effects.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        make_frame: Callable[[str], frames.Frame] = frames.Frame,
        **options: Any,
    ) -> None:
        super().__init__(name, [function], args, kwargs, make_frame, **options)
        self.effects: Effects | None = None
        self.captured: list[CapturedVariable] = []

    def run_once(
        self,
        values: Sequence[Leaf],
        plain: Sequence[Leaf],
        plain_named: Mapping[str, Leaf],
        split: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Runs the function inside the transform.

        Args:
            values: As for ``run``.
            plain: As for ``run``.
            plain_named: As for ``run``.
            split: Separates the result into what the transform itself needs, which holds arrays
                alone, and the rest.

        Returns:
            What the transform itself needs, and what else leaves: the argument of ``finish``.
        """

        def leave(context: RunContext) -> tuple[PyTree, tuple[PyTree, ...]]:
            needed, rest = split(context.result)
            result, written, fresh, self.effects = context.record_effects(rest)
            self.captured = context.captured()
            captured_values = [item.stand_in.value for item in self.captured]
            return needed, (result, written, fresh, captured_values)

        return self.run(values, plain, plain_named, leave)

    def run_whole(self, values: Leaf, plain: Leaf, plain_named: Leaf) -> tuple[PyTree, ...]:
        """Runs the function; all of its result leaves, arrays and objects."""

        def split(result: PyTree) -> tuple[None, PyTree]:
            check_result(result, self.name)
            return None, result

        return self.run_once(values, plain, plain_named, split)[1]

    def finish(self, leaving: tuple[Leaf, ...]) -> PyTree:
        """Applies what the function did to the caller's objects; returns the rest of its result.

        It is called when the transform has returned, so not at all after an exception.
        """
        captured_values = leaving[3]
        return self.apply(
            self._outputs(leaving), list(zip(self.captured, captured_values, strict=True))
        )

    def finish_on(self, graph: InputGraph, leaving: tuple[Leaf, ...]) -> PyTree:
        """Applies what the function did to a copy of the caller's objects; returns the result."""
        return apply_effects(graph, self._outputs(leaving))

    def _outputs(self, leaving: tuple[Leaf, ...]) -> LiftedOutputs:
        assert self.effects is not None
        result, written, fresh, _ = leaving
        return LiftedOutputs(result, written, fresh, self.effects)


# --- captured Variables that become inputs ----------------------------------------------------


class RetraceRequest(Exception):
    """Ends a trace that is to begin again with other inputs or layouts.

    Args:
        objects: Objects that the function used and that are to be inputs.
        drops_program: Whether the program was made for other layouts of results (``jit``).
        rebound_places: Keys of places that the function bound anew (``jit``, ``lift.captures``).
        read: Those of ``objects`` whose values were read or written (``jit``).
    """

    def __init__(
        self,
        objects: Sequence[Any] = (),
        drops_program: bool = False,
        rebound_places: Sequence[Hashable] = (),
        read: Sequence[Any] = (),
    ) -> None:
        super().__init__(objects)
        self.objects = list(objects)
        self.drops_program = drops_program
        self.rebound_places = list(rebound_places)
        self.read = list(read)


def retry_captured(attempt: Callable[[list[Variable]], PyTree]) -> PyTree:
    """Calls ``attempt`` with more inputs until it writes no captured Variable that is none."""
    captured: list[Variable] = []
    while True:
        try:
            return attempt(captured)
        except RetraceRequest as request:
            captured_ids = {id(variable) for variable in captured}
            new = [variable for variable in request.objects if id(variable) not in captured_ids]
            if not new:
                raise
            captured = [*captured, *new]


def retrace_with(captured: Sequence[CapturedVariable]) -> None:
    """Raises ``RetraceRequest`` for captured Variables, if there are any."""
    if captured:
        raise RetraceRequest([item.outer for item in captured])


# --- operands ---------------------------------------------------------------------------------


ARRAY_OR_NUMBER = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def check_operands(
    call: LiftedCall, advice: str = "give it to the functions by functools.partial or a closure"
) -> None:
    """Raises TransformError if an argument holds what is neither an array nor an object."""
    for path, leaf in _plain_leaves(call):
        is_array = isinstance(leaf, ARRAY_OR_NUMBER) or hasattr(leaf, "dtype")
        if not is_array and not graphs.is_object(leaf):
            raise errors.unusable_operand(call.name, path, leaf, advice)


def _plain_leaves(call: LiftedCall) -> Iterator[tuple[Path, Leaf]]:
    """Yields the leaves of arguments besides objects, with paths."""
    for label, template, plain in call.arguments.parts(call.labels):
        paths = inputs.plain_paths(template, plain)
        for path, leaf in zip(paths, jax.tree.leaves(plain), strict=True):
            yield (label, *path), leaf
