# SPDX-License-Identifier: Apache-2.0
"""The engine that lifts JAX transforms to functions over Modules.

Every lifted call has the same four steps.

1. *Split* (``lift.arguments``): arguments become *roots* (the objects in them) and *plain* values,
   with a hashable *template* to join them again. All roots are flattened together
   (``InputGraph``), so sharing between arguments counts.
2. *Bind* (``lift.binding``): inside the transform the graph is rebuilt as a private copy whose
   Variables hold the transform's tracers, owned by a frame.
3. *Run* the user's function on the copy (``LiftedCall.run``). The transform's own rule for what
   leaves is given a ``RunContext``: all that is known while the frame is open.
4. *Apply* (``lift.binding``; ``record_effects`` inside, ``apply_effects`` outside): ``Effects`` say
   what the function did besides returning arrays: the Variables that it wrote, how the structure of
   the given objects changed, which objects are new, and where objects stand in the result.

A transform adds only how values enter and leave the pure function.

A Variable that a function uses without being given it is *captured*. Reads see the value of the
calling frame. For writes a transform has one of three rules:

- return the value beside the result (``SingleRunCall``): ``grad``, ``remat``;
- make it an input and run again (``retry_captured``): loops and branches, which must know their
  inputs before they run;
- refuse (``SealedFrame``): ``vmap``, ``shard_map``, where one Variable would get many values.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from shardax._core import _jax, frames, threads
from shardax._core.errors import ConcurrentWriteError
from shardax._core.frames import a_kind_of, kind_of
from shardax._core.functions import NamedFunction
from shardax._core.graph import flatten as graphs
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object, epoch
from shardax._core.variable import Variable
from shardax._transforms import errors
from shardax._transforms.errors import ClosureError, TransformError, uncertain_inside_of_jax
from shardax._transforms.lift import arguments as inputs
from shardax._transforms.lift.binding import (
    Effects,
    InputGraph,
    LiftedOutputs,
    apply_effects,
    bind,
    check_no_leak,
    check_result,
    check_unchanged,
    record_effects,
    same_value,
)
from shardax._transforms.lift.captures import objects_in, places_of
from shardax._transforms.lift.tracer_errors import TRACER_ERRORS, InputForm, add_advice, name_inputs
from shardax._transforms.lift.transformed import Transformed


class RetraceRequest(Exception):
    """Stops a trace, to start again with other inputs or layouts."""

    def __init__(
        self,
        objects: Sequence[Any] = (),
        drops_program: bool = False,
        uncertain: Sequence[Hashable] = (),
        read: Sequence[Any] = (),
    ) -> None:
        super().__init__(objects)
        self.uncertain = list(uncertain)  # keys of places that were bound anew in the trace
        self.objects = list(objects)  # used by the function, and passed in by nobody
        self.read = list(read)  # those of them whose values were read or written
        self.drops_program = drops_program  # whether it was made for other layouts of results


# First step of the paths of objects that a trace met in no certain way.
UNNAMED = "closure"


class CompiledFrame(frames.Frame):
    """The frame of a compiled function."""

    __slots__ = ("met", "wanted")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Where Variables are to be moved before the program runs, by ``id`` of the copy.
        self.wanted: dict[int, Any] = {}
        # Variables that the function reached in no certain way (``lift.captures``).
        self.met: list[Any] = []

    def capture(self, outer: Any) -> PyTree:
        """See ``Frame.capture``."""
        self._note(outer)
        return super().capture(outer)

    def reached(self, stand_in: PyTree) -> PyTree:
        """See ``Frame.reached``."""
        # Through a certain way, the function would have found the stand-in itself.
        self._note(stand_in)
        return stand_in

    def _note(self, variable: Any) -> None:
        """Notes a Variable that was reached in no certain way; refuses it where JAX may keep it."""
        frame = frames.local.frame
        if frame is not None and _jax.trace_state() != frame.trace:
            raise uncertain_inside_of_jax(variable)
        self.met.append(variable)


def request_placement(variables: Sequence[object], shardings: Sequence[object]) -> None:
    """Asks the compiled function around to have Variables placed before it runs."""
    frame = frames.local.frame
    shardings_by_id = {
        id(variable): sharding for variable, sharding in zip(variables, shardings, strict=True)
    }
    while frame is not None and not isinstance(frame, CompiledFrame):
        outer = {id(copy): original for original, copy in frame.copies.values()}
        above = {
            key: frames.resolve(outer[key], frame.parent) for key in shardings_by_id if key in outer
        }
        shardings_by_id = {id(variable): shardings_by_id[key] for key, variable in above.items()}
        frame = frame.parent
    if frame is not None:
        frame.wanted.update(shardings_by_id)


P = ParamSpec("P")
R = TypeVar("R")


class _AcceptedOptions(NamedTuple):
    """What a transform takes."""

    name: str  # as users write it behind ``sx.``
    options: tuple[str, ...]  # what may be given by name
    makes_function: bool  # whether all but the function must be given by name

    def check(self, args: Sequence[object], options: Mapping[str, object]) -> None:
        """Raises for options, or arguments behind the first, that are refused."""
        unknown = [name for name in options if name not in self.options]
        if unknown or (args and self.makes_function):
            raise errors.unknown_options(self.name, unknown, self.options, self.makes_function)


def _accepted_options(transform: NamedFunction[..., object]) -> _AcceptedOptions:
    """Returns the options of a transform, or of a class."""
    parameters = inspect.signature(transform).parameters
    package = transform.__module__.split(".")[1]
    name = transform.__qualname__.removesuffix(".__init__")
    options = tuple(
        parameter.name
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name != "self"
    )
    first, *rest = parameters.values()
    makes_function = first.name == "function" and all(p.kind is p.KEYWORD_ONLY for p in rest)
    return _AcceptedOptions(
        name if package.startswith("_") else f"{package}.{name}", options, makes_function
    )


def takes_options(transform: NamedFunction[P, R]) -> Callable[P, R]:
    """Lets a transform, or an ``__init__``, refuse unknown options."""
    accepted = _accepted_options(transform)

    @functools.wraps(transform)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        accepted.check(args[1:], options)
        return transform(*args, **options)

    return checked


def decorator(transform: NamedFunction[P, PyTree]) -> Callable[P, Any]:
    """Lets a transform that is given no function return a decorator."""
    return _with_options(transform)


def _with_options(transform: NamedFunction[..., PyTree]) -> Callable[..., Any]:
    accepted = _accepted_options(transform)

    def with_options(function: Any = None, *args, **options):
        accepted.check(args, options)
        if function is None and not args:
            return functools.partial(with_options, **options)

        inputs.check_callable(function, transform.__name__)
        assert function is not None  # which is not callable
        made = transform(function, *args, **options)
        return Transformed.of(made, public, function, args, options)

    # What users call, by whose name a layer is shown and pickled.
    public = functools.wraps(transform)(with_options)
    return public


def wraps(function: Callable[..., PyTree]) -> Callable[[Any], Any]:
    """``functools.wraps``, for functions that may be Modules, whose attributes are not copied."""
    return functools.wraps(function, updated=())


class LiftedCall:
    """The arguments of one lifted call, and its functions."""

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
        label = functools.partial(inputs.argument_path, functions[0])
        self.arguments = inputs.SplitArguments(
            args, kwargs, auto_static, static, static_numbers, label
        )
        self.arguments.refuse_copies()
        self.captured_count = len(captured)
        count = len(self.arguments.templates)
        # The parameter name of each positional argument.
        self.labels = [inputs.parameter_name(functions[0], i) for i in range(count)]
        self.names: list[Path] = [  # the path of each root of the graph
            *([()] * len(functions)),
            *inputs.root_names(self.labels, self.arguments),
            *(path_of(functions, variable) for variable in captured),
        ]
        self.graph = InputGraph([*functions, *self.arguments.roots, *captured], self.names)
        self.graphdef = self.graph.flat.graphdef
        # Given arguments, returns them as the function shall see them.
        self.enter: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]
        self.enter = lambda args, kwargs: (args, kwargs)
        self._late: list[tuple[weakref.ref[Any], int]] | None = None
        self.new_captures: list[Any] = []  # of a run whose trace had to end

    def run(
        self,
        values: Sequence[Leaf],
        plain: Sequence[Leaf],
        plain_named: Mapping[str, Leaf],
        leave: Callable[[RunContext], PyTree],
        which: int = 0,
        graphdef: graphs.GraphDef | None = None,
    ) -> PyTree:
        """Runs a function inside the transform; returns what ``leave`` returns."""
        graphdef = graphdef or self.graphdef
        with self.make_frame(self.name) as frame:
            roots, copies = self._bind(frame, graphdef, values)
            end = len(roots) - self.captured_count
            bound_roots, captured = roots[len(self.functions) : end], roots[end:]
            if isinstance(frame, SealedFrame):
                for path, variable in zip(self.names[end:], captured, strict=True):
                    frame.seal(variable, path)
            args, kwargs = self.arguments.restore(plain, plain_named, bound_roots)
            # Containers of their own: the function may change those that it is given.
            plain_copy, plain_named_copy = jax.tree.map(
                lambda leaf: leaf, (list(plain), dict(plain_named))
            )
            args, kwargs = self.enter(args, kwargs)
            try:
                result = roots[which](*args, **kwargs)
            except TRACER_ERRORS as error:
                add_advice(error)
                raise
            frame.take_in()
            if isinstance(frame, SealedFrame):
                frame.check_unwritten()
            args, kwargs = self.arguments.restore(plain_copy, plain_named_copy, bound_roots)
            return leave(RunContext(self, frame, graphdef, copies, values, args, kwargs, result))

    def program(
        self, pure: Callable[..., object], form: InputForm, which: int = 0
    ) -> Callable[..., Any]:
        """Returns a pure function for JAX, which shows the user's names."""
        # ``pure`` takes the values of Variables, and plain arguments in the given form. Traces may
        # be nested, and a body may use what an outer one was given: names are of one level.
        level, frame = 0, frames.local.frame
        while frame is not None:
            level, frame = level + 1, frame.parent

        def named(*inputs) -> Any:
            try:
                return pure(*inputs)
            except TRACER_ERRORS as error:
                name_inputs(error, self, form, level)
                raise

        function: Any = self.functions[which]
        while isinstance(function, functools.partial):
            function = function.func
        named.__name__ = getattr(pure, "__name__", "program")
        named.__dict__["__wrapped__"] = (  # for its name and line
            type(function).__call__ if isinstance(function, Object) else function
        )
        kind = inspect.Parameter.POSITIONAL_ONLY
        labels = ("values", "plain", "named")[: 3 if form == "arguments" else 2]
        parameters = [inspect.Parameter(f"{label}_{level}", kind) for label in labels]
        named.__dict__["__signature__"] = inspect.Signature(parameters)
        return named

    def _bind(
        self, frame: frames.Frame, graphdef: graphs.GraphDef, values: Sequence[object]
    ) -> tuple[list[PyTree], list[PyTree]]:
        if self._late is None:
            return bind(frame, graphdef, values, self.graph.objects(), self.graph.leaves)
        roots, copies = graphs.build(graphdef, map(frames.own, values), frame)
        for reference, position in self._late:
            original = reference()
            if original is not None:
                frame.copies[id(original)] = (original, copies[position])
        return roots, copies

    def apply(self, outputs: LiftedOutputs) -> PyTree:
        """Applies, outside the transform, what a run did; returns its result."""
        check_no_leak(self.graph, outputs)
        return apply_effects(self.graph, outputs)

    def release(self, originals: Iterable[tuple[Any, int]]) -> None:
        """Lets go of the caller's objects; later runs are late ones."""
        self._late = [(weakref.ref(original), position) for original, position in originals]
        self.arguments.release()
        self.make_frame = LateFrame
        del self.graph


class RunContext(NamedTuple):
    """What is known while the frame of a run is open."""

    call: LiftedCall
    frame: frames.Frame
    graphdef: graphs.GraphDef
    copies: Sequence[Leaf]  # the private copy, in the order of ``graphdef.objects``
    bound: Sequence[Any]  # the value that was bound to each Variable
    args: Sequence[PyTree]  # with copies for objects, plain containers as they came
    kwargs: Mapping[str, PyTree]
    result: PyTree  # of the user's function

    def record_effects(self, rest: PyTree, emit: frozenset[int] = frozenset()) -> LiftedOutputs:
        """Records the function's effects; only ``rest`` of the result leaves."""
        return record_effects(self.frame, self.graphdef, self.copies, self.bound, rest, emit)

    def known(self) -> list[tuple[Any, int]]:
        """Returns every original that has a copy, with its position."""
        position = {id(copy): index for index, copy in enumerate(self.copies)}
        pairs = self.frame.copies.values()
        return [(item, position[id(copy)]) for item, copy in pairs if id(copy) in position]

    def here(self, item: Any) -> PyTree:
        """Returns the copy of an original; anything else as it is."""
        pair = self.frame.copies.get(id(item))
        return item if pair is None else pair[1]

    def variable(self, position: int) -> Variable:
        """Returns the copy of the Variable at a position."""
        return self.copies[self.graphdef.leaves[position]]

    def captured(self) -> list[frames.CapturedVariable]:
        """Returns the captured Variables that were written or given other metadata."""
        return [
            item
            for item in self.frame.captured
            if not same_value(item.value, item.stand_in._value)
            or item.outer._metadata != item.stand_in._metadata
        ]

    def require_inputs(self) -> None:
        """Raises ``RetraceRequest`` if captured Variables were changed."""
        retrace_with(self.captured())


def retrace_with(captured: Sequence[frames.CapturedVariable]) -> None:
    """Raises ``RetraceRequest`` if Variables were captured."""
    if captured:
        raise RetraceRequest([item.outer for item in captured])


def ending_well(
    run: Callable[..., object],
    call: LiftedCall,
    *inputs: object,
    otherwise: object,
    **options: object,
) -> PyTree:
    """Returns a traced run's result, ``otherwise`` if it captured writes."""
    # An exception that passes through a trace of JAX 0.10 leaves the trace and its constants in
    # memory for good. So the trace ends, and ``raise_new_captures`` raises after it.
    try:
        return run(*inputs, **options)
    except RetraceRequest as request:
        call.new_captures = request.objects
        return otherwise


def raise_new_captures(call: LiftedCall) -> None:
    """Raises ``RetraceRequest`` if a run that was traced captured what it wrote."""
    if call.new_captures:
        raise RetraceRequest(call.new_captures)


def retry_captured(attempt: Callable[[list[Variable]], object]) -> PyTree:
    """Runs ``attempt`` until no Variable is written that is not an input."""
    captured: list[Variable] = []
    while True:
        try:
            return attempt(captured)
        except RetraceRequest as request:
            captured_ids = {id(item) for item in captured}
            new = [item for item in request.objects if id(item) not in captured_ids]
            if not new:
                raise
            captured = [*captured, *new]


def path_of(functions: Sequence[Callable[..., object]], variable: Variable) -> Path:
    """Returns the path of a captured Variable, for messages; empty if its way is not certain."""
    for function in functions:
        for place in places_of(function):
            for item in objects_in(place.read()):
                flat = graphs.flatten(item)
                for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
                    if leaf is variable or stands_for(variable, leaf):
                        return (place.name, *path) if place.name else path
    return ()


def stands_for(variable: Variable, original: Variable) -> bool:
    """Whether a Variable is an outer frame's copy of an original."""
    frame = frames.local.frame
    while frame is not None:
        pair = frame.copies.get(id(original))
        if pair is not None and pair[1] is variable:
            return True
        frame = frame.parent
    return False


class LateFrame(frames.Frame):
    """The frame of a run that happens when its call is over."""

    __slots__ = ()

    def capture(self, outer: Any) -> PyTree:
        """Refuse: the call is over."""
        raise ClosureError(
            f"A function given to sx.{self.name} uses, when differentiated, a "
            f"{type(outer).__name__} that it did not use when called. Pass it as an argument."
        )


class SealedFrame(frames.Frame):
    """A frame in which captured Variables can be read but not written."""

    __slots__ = ("functions", "reason")
    carries_captured = False

    def __init__(self, name: str, functions: Sequence[Callable[..., PyTree]], reason: str) -> None:
        super().__init__(name)
        self.functions = functions  # the user's functions, to say how they know a Variable
        self.reason = reason  # why a write has no meaning here, and what to do, for the message

    def capture(self, outer: Any) -> PyTree:
        """Copies the Variable, sealed."""
        stand_in = super().capture(outer)
        self.seal(stand_in, path_of(self.functions, outer))
        return stand_in

    def check_unwritten(self) -> None:
        """Raises if the value of a captured Variable was changed in place."""
        for item in self.captured:
            if not same_value(item.value, item.stand_in._value):
                frames.check_unlocked(item.stand_in, f"to {a_kind_of(item.outer)}")

    def seal(self, stand_in: PyTree, path: Path) -> None:
        """Makes the copy of a captured Variable refuse writes."""
        label = kind_of(stand_in)
        if path:
            label += f" {format_path(path).removeprefix('.')}"
        label = label.replace("{", "{{").replace("}", "}}")
        stand_in._lock = (
            f"Cannot write {{what}} inside sx.{self.name}: the {label} was not passed in, "
            f"{self.reason}"
        )


class SingleRunCall(LiftedCall):
    """A call that runs once, and keeps its effects."""

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
        self.captured: list[frames.CapturedVariable] = []

    def run_once(
        self,
        values: Sequence[Leaf],
        plain: Sequence[Leaf],
        plain_named: Mapping[str, Leaf],
        split: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Runs the function; returns (what the transform itself needs, what else leaves)."""
        # ``split`` separates these in the function's result; only the rest may hold objects.

        def leave(context: RunContext) -> tuple[PyTree, tuple[PyTree, ...]]:
            head, remainder = split(context.result)
            result, written, fresh, self.effects = context.record_effects(remainder)
            self.captured = context.captured()
            captured = [item.stand_in.value for item in self.captured]
            return head, (result, written, fresh, captured)

        return self.run(values, plain, plain_named, leave)

    def run_whole(self, values: Leaf, plain: Leaf, plain_named: Leaf) -> tuple[PyTree, ...]:
        """Runs the function; all of its result leaves, arrays and objects."""

        def split(result) -> tuple[None, PyTree]:
            check_result(result, self.name)
            return None, result

        return self.run_once(values, plain, plain_named, split)[1]

    def finish(self, leaving: tuple[Leaf, ...]) -> PyTree:
        """Stores what was written and returns the result, with objects in place."""
        outputs = self._outputs(leaving)
        check_no_leak(self.graph, outputs)
        with threads.in_one_step():
            check_unchanged(self.graph, outputs.effects)
            self._write_captured(leaving[3])
            return apply_effects(self.graph, outputs)

    def _write_captured(self, values: Sequence[object]) -> None:
        for item in self.captured:
            if item.outer._owner is None and item.outer._value is not item.value:
                raise ConcurrentWriteError(
                    f"Another thread wrote the {type(item.outer).__name__} that sx.{self.name} "
                    "used through a closure while it ran; nothing was written. Pass it as an "
                    "argument of a function made by sx.jit, or hold a threading.Lock around calls."
                )
        for item, value in zip(self.captured, values, strict=True):
            item.outer._write(value)
            if item.outer._metadata != item.stand_in._metadata:
                item.outer._metadata = item.stand_in._metadata
                epoch.advance(item.outer)

    def finish_on(self, graph: InputGraph, leaving: tuple[Leaf, ...]) -> PyTree:
        """Returns the result with the objects of a copied graph."""
        return apply_effects(graph, self._outputs(leaving))

    def _outputs(self, leaving: tuple[Leaf, ...]) -> LiftedOutputs:
        assert self.effects is not None
        result, written, fresh, _ = leaving
        return LiftedOutputs(result, written, fresh, self.effects)


ARRAY_OR_NUMBER = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def check_operands(
    call: LiftedCall, advice: str = "give it to the functions by functools.partial or a closure"
) -> None:
    """Raises if an argument is neither arrays nor objects."""
    for path, leaf in _plain_leaves(call):
        if isinstance(leaf, ARRAY_OR_NUMBER) or hasattr(leaf, "dtype") or graphs.is_object(leaf):
            continue
        raise TransformError(
            f"{format_path(path)} of sx.{call.name} is a {type(leaf).__name__}, which is neither "
            "an array or number nor a Module, Variable or pytree of these. If it is "
            f"configuration, {advice}."
        )


def _plain_leaves(call: LiftedCall) -> Iterator[tuple[Path, Any]]:
    """Yields the leaves of arguments besides objects, with paths."""
    arguments = call.arguments
    positional = zip(call.labels, arguments.templates, arguments.plain, strict=True)
    named = ((name, template, arguments.plain_named[name]) for name, template in arguments.named)
    for label, template, plain in (*positional, *named):
        paths = inputs.plain_paths(template, plain)
        for path, leaf in zip(paths, jax.tree.leaves(plain), strict=True):
            yield (label, *path), leaf
