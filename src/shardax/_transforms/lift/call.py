# SPDX-License-Identifier: Apache-2.0
"""Calls: the arguments of one lifted call, and one run of a function on them.

A *call* takes its arguments apart once. Each *run* of one of its functions happens inside a
transform, in a frame of its own, and ends with a transform's own rule for what leaves (``leave``),
which is given an ``Inside``: everything that is known while the frame is open.

A Variable that a function uses without being given it is *captured*. Reads see the value of the
calling frame. For writes a transform has one of three rules:

- hand the value back beside the result (``Inside.captured``): ``grad``, ``remat``;
- make it an input and run again (``retry_captured``): loops and branches, which must know their
  inputs before they run;
- refuse, where the write has no meaning (``SealedFrame``): ``vmap``, ``shard_map``.

Lifted calls that run once: what ``grad``, ``remat``, ``eval_shape`` and the like share.

The user's function is run one time per call, so what it did can be kept in this object instead of
leaving the transform. Variables that the function uses without being given them are read as they
are in the calling frame; written values leave beside the result and are stored back.

Checks of what control flow is given: what *decides* how it goes, and what it works on.

A predicate, an index or a bound decides. It is one number: a Python number, an array of shape (),
or a Variable that holds one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.frames import CapturedVariable, Frame, local
from shardax._core.graph.flatten import GraphDef, build, flatten, is_object
from shardax._core.graph.paths import Path, format_path
from shardax._core.object import epoch
from shardax._core.variable import Variable
from shardax._transforms.errors import ArgumentError, ClosureError, DecisionError
from shardax._transforms.lift.arguments import Arguments, Mixed, leaf_paths, plain_paths, root_names
from shardax._transforms.lift.engine import (
    Carried,
    Graph,
    Record,
    bind,
    carry_in,
    carry_out,
    check_no_leak,
    same_value,
)
from shardax._transforms.lift.functions import (
    argument_path,
    find_sources,
    objects_in,
    parameter_name,
)

# --- Call ---


class Captured(Exception):
    """Stops a trace that used objects nobody passed in; it runs again with them as inputs."""

    def __init__(self, objects: Sequence[Any]) -> None:
        super().__init__(objects)
        self.objects = list(objects)


def wraps(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """``functools.wraps``, for functions that may be Modules, whose attributes are not copied."""
    return functools.wraps(function, updated=())


class Call:
    """The arguments of one lifted call, and the functions that may run on them.

    Args:
        name: The transform's name, for messages.
        functions: The user's functions; all take the same arguments.
        args: The positional arguments.
        kwargs: The keyword arguments.
        make_frame: Makes the frame of a run from the transform's name.
        captured: Variables that the functions use without being given them, as inputs.
        static: Positions and names of arguments that are passed on as they are.
        auto_static: Whether leaves that are neither arrays nor objects are passed on so.
        static_numbers: Whether Python's numbers are, too.

    Attributes:
        arguments: The arguments taken apart.
        labels: The parameter name of each positional argument.
        graph: Functions, objects in the arguments, and captured Variables, flattened together.
        graphdef: Their structure.
        names: The path of each of these roots.
        enter: Given arguments, returns them as the function shall see them.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], Frame] = Frame,
        captured: Sequence[Variable[Any]] = (),
        static: Container[int | str] = (),
        auto_static: bool = False,
        static_numbers: bool = False,
    ) -> None:
        self.name = name
        self.functions = tuple(functions)
        self.make_frame = make_frame
        self.arguments = Arguments(
            args,
            kwargs,
            auto_static,
            static,
            static_numbers,
            functools.partial(argument_path, functions[0]),
        )
        self.captured_count = len(captured)
        count = len(self.arguments.templates)
        self.labels = [parameter_name(functions[0], i) for i in range(count)]
        self.names: list[Path] = [
            *([()] * len(functions)),
            *root_names(self.labels, self.arguments),
            *(path_of(functions, variable) for variable in captured),
        ]
        self.graph = Graph([*functions, *self.arguments.roots, *captured], self.names)
        self.graphdef = self.graph.flat.graphdef
        self.enter: Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, Any]]
        self.enter = lambda args, kwargs: (args, kwargs)
        self._late: list[tuple[weakref.ref[Any], int]] | None = None

    def run(
        self,
        values: Sequence[Any],
        plain: Sequence[Any],
        plain_named: Mapping[str, Any],
        leave: Callable[[Inside], Any],
        which: int = 0,
        graphdef: GraphDef | None = None,
    ) -> Any:
        """Runs a function inside the transform.

        Args:
            values: One value per Variable of the graph.
            plain: Plain parts of the positional arguments.
            plain_named: Plain parts of the keyword arguments.
            leave: Called while the frame is open; returns what leaves the transform.
            which: Which of the functions.
            graphdef: Structure to bind, if it differs from the caller's in metadata.

        Returns:
            What ``leave`` returned.
        """
        graphdef = graphdef or self.graphdef
        with self.make_frame(self.name) as frame:
            roots, copies = self._bind(frame, graphdef, values)
            inputs = len(roots) - self.captured_count
            given, captured = roots[len(self.functions) : inputs], roots[inputs:]
            if isinstance(frame, SealedFrame):
                for path, variable in zip(self.names[inputs:], captured, strict=True):
                    frame.seal(variable, path)
            args, kwargs = self.arguments.restore(plain, plain_named, given)
            kept, kept_named = jax.tree.map(lambda leaf: leaf, (list(plain), dict(plain_named)))
            args, kwargs = self.enter(args, kwargs)
            result = roots[which](*args, **kwargs)
            args, kwargs = self.arguments.restore(kept, kept_named, given)
            return leave(Inside(self, frame, graphdef, copies, values, args, kwargs, result))

    def _bind(
        self, frame: Frame, graphdef: GraphDef, values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        if self._late is None:
            return bind(frame, graphdef, values, self.graph.objects(), self.graph.leaves)
        roots, copies = build(graphdef, values, frame)
        for reference, position in self._late:
            original = reference()
            if original is not None:
                frame.copies[id(original)] = (original, copies[position])
        return roots, copies

    def release(self, known: Iterable[tuple[Any, int]]) -> None:
        """Lets go of the caller's objects and arrays; later runs happen when the call is over.

        Args:
            known: What those runs shall know: objects with the position, in the structure, of what
                stands for them (``Inside.known``).
        """
        self._late = [(weakref.ref(original), position) for original, position in known]
        self.arguments.release()
        self.make_frame = LateFrame
        del self.graph


class Inside:
    """What is known while the frame of a run is open.

    Attributes:
        call: The call.
        frame: The frame.
        copies: The objects of the private copy, in the order of ``graphdef.objects``.
        args: The positional arguments, with copies for objects; plain containers are as they came,
            though the function may have changed those that it was given.
        kwargs: The keyword arguments, likewise.
        result: What the user's function returned.
        bound: The values that were bound, one per Variable.
    """

    def __init__(
        self,
        call: Call,
        frame: Frame,
        graphdef: GraphDef,
        copies: Sequence[Any],
        bound: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        self.call = call
        self.frame = frame
        self.graphdef = graphdef
        self.copies = copies
        self.bound = bound
        self.args = args
        self.kwargs = kwargs
        self.result = result

    def carry_out(self, rest: Any, emit: frozenset[int] = frozenset()) -> Carried:
        """Records what the function did; ``rest`` is the part of the result that leaves with it."""
        return carry_out(self.frame, self.graphdef, self.copies, self.bound, rest, emit)

    def known(self) -> list[tuple[Any, int]]:
        """Returns every object that something stands for here, with the position of that."""
        position = {id(copy): index for index, copy in enumerate(self.copies)}
        pairs = self.frame.copies.values()
        return [(item, position[id(copy)]) for item, copy in pairs if id(copy) in position]

    def here(self, item: Any) -> Any:
        """Returns the object that stands here for one of the caller's; anything else as it is."""
        known = self.frame.copies.get(id(item))
        return item if known is None else known[1]

    def variable(self, position: int) -> Variable[Any]:
        """Returns the copy of a Variable, by its position among the graph's Variables."""
        return self.copies[self.graphdef.leaves[position]]

    def captured(self) -> list[CapturedVariable]:
        """Returns the captured Variables that were written or given other metadata."""
        return [
            item
            for item in self.frame.captured
            if not same_value(item.value, item.stand_in._value)
            or item.outer._metadata != item.stand_in._metadata
        ]

    def require_inputs(self) -> None:
        """Raises ``Captured`` if captured Variables were changed."""
        changed = self.captured()
        if changed:
            raise Captured([item.outer for item in changed])


def retry_captured(attempt: Callable[[list[Variable[Any]]], Any]) -> Any:
    """Runs ``attempt`` until no Variable is written that is not an input.

    Args:
        attempt: Called with the captured Variables that are known so far.
    """
    captured: list[Variable[Any]] = []
    while True:
        try:
            return attempt(captured)
        except Captured as found:
            known = {id(item) for item in captured}
            new = [item for item in found.objects if id(item) not in known]
            if not new:
                raise
            captured = [*captured, *new]


def path_of(functions: Sequence[Callable[..., Any]], variable: Variable[Any]) -> Path:
    """Returns the path of a captured Variable, beginning with the name that a function uses."""
    for function in functions:
        for source in find_sources(function):
            for item in objects_in(source.read()):
                flat = flatten(item)
                for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
                    if leaf is variable or stands_for(variable, leaf):
                        return (source.name, *path)
    return (type(variable).__name__,)


def stands_for(variable: Variable[Any], original: Variable[Any]) -> bool:
    """Whether a Variable is what a frame around has in place of an original."""
    frame = local.frame
    while frame is not None:
        known = frame.copies.get(id(original))
        if known is not None and known[1] is variable:
            return True
        frame = frame.parent
    return False


class LateFrame(Frame):
    """The frame of a run that happens when its call is over, so that nothing new can be found."""

    __slots__ = ()

    def capture(self, outer: Any) -> Any:
        """See ``Frame.capture``."""
        raise ClosureError(
            f"A function given to sx.{self.name} uses a {type(outer).__name__} that it did not use "
            f"when it was called, but only now that it is differentiated. Pass it as an argument."
        )


class SealedFrame(Frame):
    """A frame in which captured Variables can be read but not written.

    Attributes:
        reason: Why a write has no meaning here, and what to do, for the message.
        functions: The user's functions, to say how they know a Variable.
    """

    __slots__ = ("functions", "reason")
    carries_captured = False

    def __init__(self, name: str, functions: Sequence[Callable[..., Any]], reason: str) -> None:
        super().__init__(name)
        self.functions = functions
        self.reason = reason

    def capture(self, outer: Any) -> Any:
        """See ``Frame.capture``."""
        stand_in = super().capture(outer)
        self.seal(stand_in, path_of(self.functions, outer))
        return stand_in

    def seal(self, stand_in: Any, path: Path) -> None:
        """Makes the stand-in of a captured Variable refuse writes; ``path`` is for the message."""
        label = f"{type(stand_in).__name__} {format_path(path).removeprefix('.')}"
        label = label.replace("{", "{{").replace("}", "}}")
        stand_in._lock = (
            f"Cannot write {{what}} inside sx.{self.name}: the {label} was not passed in, "
            f"{self.reason}"
        )


# --- Once ---


class Once:
    """One lifted call.

    Args:
        name: The transform's name, for messages.
        function: The user's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        make_frame: Makes the frame; by default an ordinary one.
        static: Positions and names of arguments that are passed on as they are.
        auto_static: Whether leaves that are neither arrays nor objects are passed on so.
        static_numbers: Whether Python's numbers are, too.

    Attributes:
        call: The call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        make_frame: Callable[[str], Frame] = Frame,
        static: Container[int | str] = (),
        auto_static: bool = False,
        static_numbers: bool = False,
    ) -> None:
        self.call = Call(
            name,
            [function],
            args,
            kwargs,
            make_frame,
            static=static,
            auto_static=auto_static,
            static_numbers=static_numbers,
        )
        self._record: Record | None = None
        self._captured: list[CapturedVariable] = []

    @property
    def arguments(self) -> Arguments:
        """The arguments taken apart."""
        return self.call.arguments

    @property
    def graph(self) -> Graph:
        """The function and the objects in the arguments, flattened together."""
        return self.call.graph

    def run(
        self,
        values: Sequence[Any],
        plain: Sequence[Any],
        plain_named: Mapping[str, Any],
        split: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Runs the user's function inside the transform.

        Args:
            values: One value per Variable of the graph.
            plain: Plain parts of the positional arguments.
            plain_named: Plain parts of the keyword arguments.
            split: Separates the function's result into a part that the transform itself needs
                (arrays only) and the rest, which may hold objects.

        Returns:
            (the transform's part, what else must leave the transform: a tuple of pytrees of
            arrays).
        """

        def leave(inside: Inside) -> tuple[Any, tuple[Any, ...]]:
            head, rest = split(inside.result)
            carried = inside.carry_out(rest)
            self._record = carried.record
            self._captured = inside.captured()
            captured = [item.stand_in.value for item in self._captured]
            return head, (carried.result, carried.written, carried.fresh, captured)

        return self.call.run(values, plain, plain_named, leave)

    def finish(self, leaving: tuple[Any, ...]) -> Any:
        """Stores what was written and returns the result, with objects in place.

        Args:
            leaving: The second part of what ``run`` returned, as it came out of the transform.
        """
        carried = self._carried(leaving)
        check_no_leak(self.graph, carried)
        for item, value in zip(self._captured, leaving[3], strict=True):
            item.outer._write(value)
            if item.outer._metadata != item.stand_in._metadata:
                item.outer._metadata = item.stand_in._metadata
                epoch.advance()
        return carry_in(self.graph, carried)

    def finish_on(self, graph: Graph, leaving: tuple[Any, ...]) -> Any:
        """Returns the result with the objects of a copy in place of the caller's.

        Args:
            graph: A copy of the call's graph; what was written is stored there.
            leaving: As for ``finish``.
        """
        return carry_in(graph, self._carried(leaving))

    def _carried(self, leaving: tuple[Any, ...]) -> Carried:
        assert self._record is not None
        result, written, fresh, _ = leaving
        return Carried(result, written, fresh, self._record)


# --- Decide ---

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def as_predicate(value: Any, what: str) -> Any:
    """Returns a predicate as a boolean of shape ().

    Args:
        value: What was given; a number counts as true unless it is zero, as in Python.
        what: How messages call it.

    Raises:
        DecisionError: If it is not one boolean or real number.
    """
    number = _one_number(value, what, "one boolean", "Reduce it: x.all(), x.any(), x[0] > 0.")
    kind = jnp.result_type(number)
    if kind == jnp.bool_:
        return number
    if jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating):
        return number != 0
    raise DecisionError(f"{what} must be one boolean, but has dtype {kind}. Compare it: x != y.")


def as_integer(value: Any, what: str) -> Any:
    """Returns an index or bound, an integer of shape ().

    Args:
        value: What was given.
        what: How messages call it.

    Raises:
        DecisionError: If it is not one integer.
    """
    number = _one_number(value, what, "one integer", "Take one of them: x[0].")
    kind = jnp.result_type(number)
    if jnp.issubdtype(kind, jnp.integer):
        return number
    hint = "jnp.int32(x)" if kind == jnp.bool_ else "x.astype(int)"
    raise DecisionError(f"{what} must be one integer, but has dtype {kind}. Convert it: {hint}.")


def _one_number(value: Any, what: str, wanted: str, hint: str) -> Any:
    number = value.value if isinstance(value, Variable) else value
    if not isinstance(number, _NUMBERS):
        raise DecisionError(f"{what} must be {wanted}, but is a {type(value).__name__}.")
    if jnp.shape(number) != ():
        raise DecisionError(f"{what} must be {wanted}, but has shape {jnp.shape(number)}. {hint}")
    return number


def check_operands(
    call: Call, advice: str = "give it to the functions by functools.partial or a closure"
) -> None:
    """Raises if an argument is neither arrays nor objects.

    Args:
        call: The call.
        advice: What to do if it is configuration, for the message.

    Raises:
        ArgumentError: Naming it.
    """
    arguments = call.arguments
    positional = zip(call.labels, arguments.templates, arguments.plain, strict=True)
    named = ((name, template, arguments.plain_named[name]) for name, template in arguments.named)
    for label, template, plain in (*positional, *named):
        leaves, treedef = jax.tree.flatten(plain)
        paths = plain_paths(template) if isinstance(template, Mixed) else leaf_paths(treedef)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, _NUMBERS) or hasattr(leaf, "dtype") or is_object(leaf):
                continue
            raise ArgumentError(
                f"{format_path((label, *path))} of sx.{call.name} is a {type(leaf).__name__}, "
                f"which is neither an array or number nor a Module, Variable or pytree of these. "
                f"If it is configuration, {advice}."
            )
