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

Threads may share a model. What reads and writes a value in one step (a draw, ``v += 1``, the first
use of a lazy value) holds the lock ``exclusive``. What a thread reads and then writes itself,
``v[...] = v + 1``, is checked: every write outside of transforms leaves a *stamp* on the Variable,
a thread remembers the stamps of its latest reads, and a write over another thread's stamp that it
has not read is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax

from shardax._core import _jax
from shardax._core.errors import (
    ConcurrentWriteError,
    ForeignMutationError,
    ModuleError,
    TraceLeakError,
)
from shardax._core.graph.paths import Leaf, PyTree


def is_eager() -> bool:
    """Whether no JAX transform is tracing right now."""
    return _jax.trace_state() == _jax.eager()


class CapturedVariable(NamedTuple):
    """A Variable that a frame uses without having been passed it."""

    outer: Any  # the parent's Variable
    stand_in: PyTree  # the frame's own
    value: Any  # what the stand-in was given


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
    carries_captured = True  # whether values written to captured Variables are handed back

    def __init__(self, name: str) -> None:
        self.name = name  # of the transform, for messages: "jit"
        self.parent = local.frame
        self.trace = _jax.trace_state()
        # id(original) to (original, copy); holding the original keeps its id from being reused.
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.captured: list[CapturedVariable] = []
        # Likewise for pytree nodes that can be changed in place (_core.containers).
        self.nodes: dict[int, tuple[Any, Any]] = {}
        self.closed = False  # the run is over; a Variable owned by a closed frame has leaked

    def __enter__(self) -> Self:
        local.frame = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        local.frame = self.parent
        self.closed = True
        # A Variable that leaked from the trace must not keep the caller's model alive.
        self.copies, self.nodes = {}, {}
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


_threads: list[int] = []  # two at most
several: list[bool] = []  # not empty once two threads have used shardax; one needs no stamps


class _ThreadState(threading.local):
    frame: Frame | None = None  # the innermost
    probing: bool = False  # a pytree is only being searched for objects (flatten.has_objects)
    found: bool = False  # that search has met one
    call: Any = None  # the call that a transform is serving, for the trace that it may start

    def __init__(self) -> None:
        self.reads: dict[int, Stamp] = {}  # of the Variables read last, by ``id``
        if not several:
            _threads.append(threading.get_ident())
            several.extend([True] * (len(_threads) > 1))


local = _ThreadState()

# Held where a value is read and written in one step, also by a compiled call, which may wait for
# JAX to trace. So nothing that runs while a transform traces may wait for it (``in_one_step``).
exclusive = threading.RLock()
# Held while lazy values become real; its holder waits for initializers alone. After ``exclusive``.
realising = threading.RLock()
# Held while a Variable gets a stamp; its holder waits for nothing, so a read never waits for the
# initializer of another Variable. After the other two.
_stamping = threading.Lock()
_no_lock = contextlib.nullcontext()


def in_one_step() -> contextlib.AbstractContextManager[Any]:
    """Returns the lock of reading and writing; inside transforms copies are private."""
    return exclusive if local.frame is None else _no_lock


class Stamp(NamedTuple):
    """Mark of the last write outside of transforms."""

    variable: object  # stands for the Variable, whose ``id`` another one may get later
    thread: int


_MOST_READS = 8  # those of one expression, so that a value looked at long ago does not count


def note_read(target: Any) -> None:
    """Remembers that this thread has read a Variable."""
    stamp = target._stamp

    # Two threads that read it for the first time must remember the same stamp.
    if stamp is None:
        with _stamping:
            stamp = target._stamp = target._stamp or Stamp(object(), 0)

    _remember(target, stamp)


def _remember(target, stamp: Stamp) -> None:
    reads, key = local.reads, id(target)
    reads.pop(key, None)
    reads[key] = stamp
    if len(reads) > _MOST_READS:
        del reads[next(iter(reads))]


def note_writes(targets: Iterable[PyTree]) -> None:
    """Stamps Variables that a compiled function wrote; under the lock ``exclusive``."""
    thread, make = threading.get_ident(), tuple.__new__
    for target in targets:
        stamp = target._stamp
        if stamp is not None:  # otherwise nobody has read it
            target._stamp = make(Stamp, (stamp.variable, thread))


def commit(targets: Sequence[PyTree], read: Sequence[Any], written: Sequence[Leaf]) -> bool:
    """Writes values, unless another thread wrote after they were read."""
    with exclusive:
        pairs = zip(targets, read, strict=True)
        if several and any(target._value is not value for target, value in pairs):
            return False
        for target, value in zip(targets, written, strict=True):
            target._value = value
        note_writes(targets)
    return True


def check_unwritten(target: Any) -> None:
    """Raises if another thread has written since this one read; under ``exclusive``."""
    stamp, thread = target._stamp, threading.get_ident()
    read = local.reads.get(id(target))
    if (
        not (read is None or stamp is None or stamp is read or stamp.thread == thread)
        and stamp.variable is read.variable
    ):
        raise ConcurrentWriteError(
            f"This {kind_of(target)} was written by another thread after this one read it, "
            f"and that would be lost; nothing was written. Hold one lock around reading and "
            f"writing, with lock: v[...] = v + 1; or update it in one step, v += 1."
        )


def note_write(target: Any) -> None:
    """Stamps a Variable after it was written; under the lock ``exclusive``."""
    thread = threading.get_ident()

    # A reader takes the stamp before the value: with the new stamp it has the new value.
    with _stamping:
        stamp = target._stamp
        variable = object() if stamp is None else stamp.variable
        new_stamp = target._stamp = Stamp(variable, thread)

    _remember(target, new_stamp)


def resolve(variable: Any, frame: Frame | None) -> PyTree:
    """Returns the Variable that stands for another one in a frame."""
    owner = variable._owner
    if owner is frame or (type(owner) is PlainTrace and owner.parent is frame):
        return variable
    if frame is None:
        if owner is None or not owner.closed:
            return variable
        raise TraceLeakError(
            f"A{a_kind_of(variable)[1:]} made inside sx.{owner.name} was used after that call "
            f"ended. Its value exists only during the trace. Return it from the function (or "
            f"assign it to an attribute of a Module that is an argument); then the caller gets it "
            f"with a real array."
        )
    pair = frame.copies.get(id(variable))
    if pair is not None:
        return frame.reached(_usable(pair))
    outer = resolve(variable, frame.parent)
    pair = frame.copies.get(id(outer))  # passed in by the parent under the name it has there
    if pair is not None:
        stand_in = frame.reached(_usable(pair))
    else:
        stand_in = frame.capture(outer) if outer._parent is None else outer._stand_in(frame)
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
        raise ModuleError(
            f"Cannot write {what}: this {kind_of(target)} is a copy that JAX rebuilt inside "
            f"a plain transform (jax.jit, jax.grad, jax.vmap, ...), so the write would be lost "
            f"when the function returns. Use the shardax transform of the same name (sx.jit, "
            f"sx.grad, ...), which carries writes back; or, if you return the copy, make it "
            f"writable first:\n\n    model = sx.mutable(model)\n    ...\n    return model"
        )
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
    hint = " (Writing values of its Variables works either way.)" if frame.carries_captured else ""
    raise ForeignMutationError(
        f"Cannot change the structure of {what} inside sx.{frame.name}: the "
        f"{kind_of(target)} was reached through a closure or global, so the change would "
        f"happen once, while tracing, and not when the compiled function runs. Pass the Module as "
        f"an argument of the function; then its structural changes are carried back.{hint}"
    )


def check_trace(target: Any, what: str | None = None) -> None:
    """Raises if a write would be lost or leak a tracer."""
    owner = target._owner
    home = _jax.eager() if owner is None else owner.trace
    if _jax.trace_state() == home:
        return
    what = what or f"to {a_kind_of(target)}"
    raise TraceLeakError(
        f"Cannot write {what} from inside a plain JAX transform that did not receive it: the write "
        f"would happen once, while tracing, and a traced value would outlive its trace. Use the "
        f"shardax transform of the same name (sx.jit, sx.grad, ...) and pass the Module as an "
        f"argument; or return the new value and write it outside."
    )
