# SPDX-License-Identifier: Apache-2.0
"""Frames: ownership of objects while functions are traced.

Every lifted transform runs the user's function on a private copy of the objects it was given. A
*frame* is one such run. It knows its *parent* (the frame that called the transform, or ``None``
outside all of them), the JAX trace that it runs under, and which copy stands for which *original*.
An object made or copied inside a frame is *owned* by it.

User code may also touch an original inside a frame, through a closure or a global. *Resolving*
finds the object that stands for it here: the object itself if this frame owns it, its copy if it
was passed in, or else what the parent resolves it to, *captured* by this frame. How a Variable is
captured is each transform's own rule (``Frame.capture``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Self

import jax

from shardax._core import _jax, errors
from shardax._core.errors import ForeignMutationError, ModuleError
from shardax._core.graph.paths import PyTree
from shardax._core.threads import local


def is_eager() -> bool:
    """Whether no JAX transform is tracing right now."""
    return _jax.trace_state() == _jax.eager()


class CapturedVariable(NamedTuple):
    """A Variable that a frame uses without having been passed it."""

    outer: Any
    """The Variable of the parent."""

    stand_in: Any
    """The Variable of the frame."""

    value: Any
    """What the stand-in was given."""


class Frame:
    """One run of a user's function inside a lifted transform.

    Args:
        name: The name of the transform, for messages.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> from shardax import extend
        >>> class ClosedFrame(extend.Frame):
        ...     def capture(self, outer):
        ...         raise sx.errors.ClosureError(f"{self.name} takes Variables as arguments.")
        >>> pure = extend.lift(lambda function: function, "pure", make_frame=ClosedFrame)
        >>> scale = sx.Variable(jnp.ones(()))
        >>> pure(lambda x: x * scale)(2.0)
        Traceback (most recent call last):
        shardax.errors.ClosureError: pure takes Variables as arguments.
    """

    __slots__ = ("captured", "closed", "copies", "name", "nodes", "parent", "trace")
    # Whether values written to captured Variables are handed back.
    carries_captured = True

    def __init__(self, name: str) -> None:
        # The name of the transform, for messages: "jit".
        self.name = name
        self.parent = local.frame
        self.trace = _jax.trace_state()

        # (original, copy) by ``id`` of the original, which is held so that its id is not reused.
        self.copies: dict[int, tuple[Any, Any]] = {}
        # Likewise for pytree nodes that can be changed in place (_core.containers).
        self.nodes: dict[int, tuple[Any, Any]] = {}
        # Variables that were used without being passed in.
        self.captured: list[CapturedVariable] = []

        # Whether the run is over. A Variable that a closed frame owns has leaked.
        self.closed = False

    def __enter__(self) -> Self:
        local.frame = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        local.frame = self.parent
        self.closed = True

        # A Variable that leaked from the trace must not keep the caller's model alive.
        self.copies, self.nodes = {}, {}

        # JAX 0.10 to 0.12 refuses an object with a text of its own.
        reason = str(getattr(error, "__cause__", None))
        if _jax.ARRAYS_ONLY in reason:  # what ``refused_argument`` put below JAX's own error
            text = reason.removeprefix("Argument '").partition("' of type")[0]
            raise ModuleError(text) from error

    def take_in(self) -> None:
        """Stores what the function put into nodes that it was not given."""
        for _, node in self.nodes.values():
            node.children()

    def capture(self, outer: Any) -> PyTree:
        """Returns this frame's stand-in for a Variable of the parent."""
        # A copy reads the value as of now; transforms with a stricter rule override this.
        copy = outer._copy_into(self)
        value = copy._value
        copy._value = own(value)
        self.captured.append(CapturedVariable(outer, copy, value))
        return copy

    def reached(self, stand_in: PyTree) -> PyTree:
        """Returns the stand-in of an argument that was reached by a closure."""
        return stand_in


def own(value: object) -> Any:
    """Returns a value with dicts, lists and other nodes of its own."""
    # What a function changes in them in place is then seen as a write to the copy.
    return value if isinstance(value, jax.Array) else jax.tree.map(lambda leaf: leaf, value)


def is_ref(value: Any) -> bool:
    """Whether a value is a ``jax.Ref``, also one that is traced."""
    # Arrays are the usual case, and asking JAX about them takes longer.
    return type(value) is jax.Ref or (isinstance(value, _jax.Tracer) and isinstance(value, jax.Ref))


@contextlib.contextmanager
def outside_of_frames() -> Generator[None]:
    """Runs a block as the caller of the outermost transform would."""
    frame = local.frame
    local.frame = None
    try:
        yield
    finally:
        local.frame = frame


class PlainTrace(Frame):
    """Owner of objects made inside a plain JAX transform."""

    __slots__ = ()


def owner_here() -> Frame | None:
    """Returns the owner of an object made now; None outside all transforms."""
    frame = local.frame
    home = _jax.eager() if frame is None else frame.trace
    if _jax.trace_state() == home:
        return frame
    return PlainTrace("plain JAX transform")


def resolve(variable: Any, frame: Frame | None) -> PyTree:
    """Returns the Variable that stands for another one in a frame."""
    owner = variable._owner
    if owner is frame or (type(owner) is PlainTrace and owner.parent is frame):
        return variable
    if frame is None:
        if owner is None or not owner.closed:
            return variable
        raise errors.used_after_trace(a_kind_of(variable), owner.name)

    # Passed in, or met before.
    pair = frame.copies.get(id(variable))
    if pair is not None:
        return frame.reached(_usable(pair))

    # Passed in as what stands for it in the parent.
    outer = resolve(variable, frame.parent)
    pair = frame.copies.get(id(outer))
    if pair is not None:
        stand_in = frame.reached(_usable(pair))
    elif outer._parent is not None:
        # A view of one layer: its stack is captured.
        stand_in = outer._stand_in(frame)
    else:
        stand_in = frame.capture(outer)

    frame.copies[id(variable)] = (variable, stand_in)
    frame.copies[id(outer)] = (outer, stand_in)
    return stand_in


def has_leaked(item: Any) -> bool:
    """Whether an object was made in a run that is over."""
    return item._owner is not None and item._owner.closed


class Blocked(NamedTuple):
    """Entry of ``Frame.copies`` for a Variable that is refused there."""

    refuse: Callable[[Any], Any]  # called with the Variable, raises the error


def _usable(pair: tuple[object, object]):
    return pair[1].refuse(pair[0]) if type(pair[1]) is Blocked else pair[1]


def is_writable(target: Any) -> bool:
    """Whether a write to an object is neither refused nor lost."""
    home = _jax.eager() if target._owner is None else target._owner.trace
    return target._lock is None and _jax.trace_state() == home


# Lock of objects that JAX rebuilt inside a plain transform: a write would be lost.
READ_ONLY = "copy inside a plain JAX transform"


def kind_of(item: object) -> str:
    """Returns what messages call an object."""
    return getattr(type(item), "_kind", type(item).__name__)


def a_kind_of(item: object) -> str:
    """Returns what messages call an object, with its article."""
    kind = kind_of(item)
    return f"{'an' if kind[0] in 'aeioAEIO' else 'a'} {kind}"


def check_unlocked(target: Any, what: str | None = None) -> None:
    """Raises if an object is locked."""
    what = what or f"to {a_kind_of(target)}"
    if target._lock is READ_ONLY:
        raise errors.write_to_rebuilt_copy(what, kind_of(target))
    if target._lock is not None:  # a transform that carries no writes made it; says why
        raise ForeignMutationError(target._lock.format(what=what))


def check_structural_write(target: Any, what: str) -> None:
    """Raises if an object's structure must not be changed here."""
    if target._lock is not None:
        check_unlocked(target, what)
    owner, frame = target._owner, local.frame
    if owner is frame or (type(owner) is PlainTrace and owner.parent is frame):
        check_trace(target, f"the structure of {what}")
        return
    if frame is None:  # made in a transform and kept by the user: its structure is ordinary Python
        if not is_eager():
            check_trace(target, f"the structure of {what}")
        return
    raise errors.change_of_captured(what, frame.name, kind_of(target), frame.carries_captured)


def check_trace(target: Any, what: str | None = None) -> None:
    """Raises if a write would be lost or leak a tracer."""
    owner = target._owner
    home = _jax.eager() if owner is None else owner.trace
    if _jax.trace_state() == home:
        return
    what = what or f"to {a_kind_of(target)}"
    raise errors.write_from_plain_transform(what)
