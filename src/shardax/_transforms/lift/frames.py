# SPDX-License-Identifier: Apache-2.0
"""Frames of transforms: what happens to a Variable that a function was not given.

A function may reach a Variable through a closure or a global. The Variable is then *captured*: the
frame of the run makes a copy that stands in for it (``Frame.capture``). What may happen to the copy
is a rule of the transform:

- The plain ``Frame`` lets it be written, and the transform hands the value back (``lift.engine``).
- A ``CompiledFrame`` (``jit``) notes it, and the function is traced again with it as an input.
- A ``SealedFrame`` (``vmap``, ``shard_map``) refuses writes: each batch element or device would
  write one Variable.
- A ``LateFrame`` (derivative rules, which run when their call is over) refuses it altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardax._core import _jax, frames
from shardax._core.frames import a_kind_of, kind_of
from shardax._core.graph.flatten import Flat, flatten
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.variable import Variable
from shardax._transforms.errors import late_capture, uncertain_inside_of_jax
from shardax._transforms.lift.captures import objects_in, places_of
from shardax._transforms.lift.effects import holds_same_arrays

# First step of the paths of objects that a trace reached in no certain way (``lift.captures``).
UNNAMED = "closure"


class CompiledFrame(frames.Frame):
    """The frame of a function that ``jit`` traces.

    Attributes:
        met: The Variables that the function reached in no certain way (``lift.captures``).
        wanted: Where Variables are to be moved before the program runs, by ``id`` of the copy.
    """

    __slots__ = ("met", "wanted")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.met: list[Variable] = []
        self.wanted: dict[int, Any] = {}

    def capture(self, outer: Variable) -> Variable:
        """Returns a copy of a Variable that is no input of the program yet."""
        self._note_uncertain(outer)
        return super().capture(outer)

    def reached(self, stand_in: Variable) -> Variable:
        """Returns the copy of an input that the function found as the original."""
        # In a certain way, the function would have found the copy itself.
        self._note_uncertain(stand_in)
        return stand_in

    def _note_uncertain(self, variable: Variable) -> None:
        """Notes a Variable that was reached in no certain way; refuses it where JAX may keep it."""
        innermost = frames.local.frame
        if innermost is not None and _jax.trace_state() != innermost.trace:
            raise uncertain_inside_of_jax(variable)
        self.met.append(variable)


def request_placement(variables: Sequence[Variable], shardings: Sequence[Any]) -> None:
    """Asks the compiled function around to move Variables to shardings before it runs."""
    frame = frames.local.frame
    shardings_by_id = {
        id(variable): sharding for variable, sharding in zip(variables, shardings, strict=True)
    }

    # The frames on the way have copies. What is to be moved is what the frame above has for them.
    while frame is not None and not isinstance(frame, CompiledFrame):
        originals = {id(copy): original for original, copy in frame.copies.values()}
        above: dict[int, Any] = {}
        for copy_id, sharding in shardings_by_id.items():
            if copy_id in originals:
                variable = frames.resolve(originals[copy_id], frame.parent)
                above[id(variable)] = sharding
        shardings_by_id = above
        frame = frame.parent

    if frame is not None:
        frame.wanted.update(shardings_by_id)


class SealedFrame(frames.Frame):
    """A frame in which captured Variables can be read but not written.

    Args:
        name: The transform's name, for messages.
        functions: The user's functions, to say how they know a Variable.
        reason: Why a write has no meaning here, and what to do, for messages.
    """

    __slots__ = ("functions", "reason")
    carries_captured = False

    def __init__(self, name: str, functions: Sequence[Callable[..., PyTree]], reason: str) -> None:
        super().__init__(name)
        self.functions = functions
        self.reason = reason

    def capture(self, outer: Variable) -> Variable:
        """Returns a copy of a Variable that refuses writes."""
        stand_in = super().capture(outer)
        self.seal(stand_in, path_of(self.functions, outer))
        return stand_in

    def seal(self, stand_in: Variable, path: Path) -> None:
        """Makes the copy of a captured Variable refuse writes."""
        label = kind_of(stand_in)
        if path:
            label += f" {format_path(path).removeprefix('.')}"

        # ``frames.check_unlocked`` fills in what was to be written.
        label = label.replace("{", "{{").replace("}", "}}")
        stand_in._lock = (
            f"Cannot write {{what}} inside sx.{self.name}: the {label} was not passed in, "
            f"{self.reason}"
        )

    def check_unwritten(self) -> None:
        """Raises ForeignMutationError if a captured value was changed in place."""
        for captured in self.captured:
            if not holds_same_arrays(captured.value, captured.stand_in._value):
                frames.check_unlocked(captured.stand_in, f"to {a_kind_of(captured.outer)}")


class LateFrame(frames.Frame):
    """The frame of a run that happens when its call is over: it captures nothing."""

    __slots__ = ()

    def capture(self, outer: Variable) -> Variable:
        """Raises ClosureError: whose value should be read now?"""
        raise late_capture(self.name, outer)


def path_of(functions: Sequence[Callable[..., object]], variable: Variable) -> Path:
    """Returns the path of a captured Variable, for messages; empty if its way is not certain."""
    for name, flat in objects_at_places(functions):
        for path, leaf in zip(flat.leaf_paths, flat.leaves, strict=True):
            if leaf is variable or stands_for(variable, leaf):
                return (name, *path) if name else path
    return ()


def objects_at_places(functions: Sequence[Callable[..., object]]) -> Iterator[tuple[str, Flat]]:
    """Yields (name of the place, object) for what functions find in certain places."""
    for function in functions:
        for place in places_of(function):
            for captured_object in objects_in(place.read()):
                yield place.name, flatten(captured_object)


def stands_for(variable: Variable, original: Variable) -> bool:
    """Returns whether a Variable is the copy of an original in a frame around."""
    frame = frames.local.frame
    while frame is not None:
        pair = frame.copies.get(id(original))
        if pair is not None and pair[1] is variable:
            return True
        frame = frame.parent
    return False
