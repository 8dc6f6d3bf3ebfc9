# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of transforms that are called outside of others.

Loops and branches are traced and compiled as a unit, ``remat``, ``custom_vjp`` and ``shard_map``
are traced. Inside a compiled function that happens once; an eager call would do it every time. So
an eager call whose functions, options and kinds of arguments came before runs as a function of
``sx.jit``, with the same specializations, effects and errors. Of programs that were called once the
last few are kept: functions made for one call leave nothing behind.

Calls are of one kind if their functions have equal behavior keys (``lift.behavior``), read anew at
every call. Modules and Variables that the functions reach are inputs of the program, found anew at
every call. What cannot be compared makes a call that is not remembered.

Nothing here keeps alive what a function closes over. The programs get functions by way of the
thread that calls, arrays and objects in keys are referred to weakly, and a program with an array of
a closure in it goes with the function.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shardax._core import frames
from shardax._core.errors import ConcurrentWriteError, DonationError, ShardaxError
from shardax._core.graph.paths import PyTree
from shardax._core.graph.settings import Identity
from shardax._transforms.jit.jit import Jit
from shardax._transforms.jit.specialization import JitOptions
from shardax._transforms.lift.behavior import Behavior

# A transform that takes its arguments apart: functions, options, positional and named arguments.
Lifted = Callable[[Sequence[Any], Any, Sequence[Any], Mapping[str, Any]], Any]

_MOST_PROGRAMS = 128
_MOST_CALLED_ONCE = 8


class _EagerProgram:
    """The program of calls of one kind."""

    __slots__ = ("anchors", "compiles", "program", "used")

    def __init__(self) -> None:
        self.program: Jit | None = None
        self.compiles = True
        self.used = 0
        # References to the functions of kinds of calls that are only remembered while these live.
        self.anchors: dict[_CallKind, list[Any]] = {}


class _CallKind(NamedTuple):
    """What calls with one program have in common."""

    lifted: Lifted
    behavior: Hashable
    arity: int  # of positional arguments
    functions: tuple[Hashable, ...] = ()  # by identity, if that matters


class _EagerCall(NamedTuple):
    """A call of a compiled program, while it lasts."""

    lifted: Lifted
    functions: Sequence[Callable[..., PyTree]]
    options: object
    arity: int  # of positional arguments; objects that the functions reach follow
    trace: list[str]  # "begun", and "done" once the transform has returned


class _Running(threading.local):
    """The innermost call of this thread."""

    call: _EagerCall | None = None


_running = _Running()
_ticks = itertools.count()
_entries: dict[_CallKind, _EagerProgram] = {}  # by the kind of a call
_called_once: deque[_EagerProgram] = deque()


def _program(*args: object, **kwargs: object):
    """Runs the transform that this thread is calling, in a trace."""
    call = _running.call
    assert call is not None
    call.trace.append("begun")
    result = call.lifted(call.functions, call.options, args[: call.arity], kwargs)
    call.trace.append("done")
    return result


def run(
    lifted: Lifted,
    functions: Sequence[Callable[..., PyTree]],
    options: Any,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> PyTree:
    """Calls a transform, by a compiled program where that is right."""
    config: Any = jax.config
    if frames.local.frame is not None or not frames.is_eager() or config.jax_disable_jit:
        return lifted(functions, options, args, kwargs)
    try:
        behavior = Behavior(functions, options)
        kind = _CallKind(lifted, behavior.key(), len(args))
        of_functions = kind._replace(functions=tuple(map(_identity, functions)))
        entry = None if behavior.closes_over_arrays else _entries.get(kind)
        entry = entry or _entries.get(of_functions)
    except TypeError:  # a part cannot be compared or hashed
        return lifted(functions, options, args, kwargs)
    if entry is not None and not entry.compiles:
        return lifted(functions, options, args, kwargs)
    program = None if entry is None else entry.program
    if program is None:
        program = Jit(_program, JitOptions())
    if entry is not None:
        entry.used, entry.program = next(_ticks), program
        with contextlib.suppress(ValueError):
            _called_once.remove(entry)
    outer, trace = _running.call, list[str]()
    _running.call = _EagerCall(lifted, functions, options, len(args), trace)
    failed, result = False, None
    try:
        result = program(*args, *behavior.objects, **kwargs)
    except DonationError:  # of the names that the user knows
        _running.call = outer
        return lifted(functions, options, args, kwargs)
    except Exception as error:
        # In the trace, or before it by what ``jit`` refuses: as it is, the call may be right, or
        # says in its own words what is wrong. What fails later fails there, too.
        refused = isinstance(error, ShardaxError) and not isinstance(error, ConcurrentWriteError)
        failed = trace[-1] == "begun" if trace else refused
        # JAX has no type for it. As it is, a transform moves arrays to its own mesh.
        failed = failed or "incompatible devices" in str(error)
        if not failed:
            raise
    finally:
        _running.call = outer
    if not (trace or failed):
        return result
    if failed:
        result = lifted(functions, options, args, kwargs)  # an error is not remembered
    if entry is None:
        entry = _called_once_by(program)
    # Objects from where the key does not see them might be others next time.
    if failed or program.memory.captured:
        entry.compiles, entry.program = False, None
    elif not program.memory.may_be_kept:
        entry.program = None
    with contextlib.suppress(TypeError):  # no longer comparable, or hashable
        key_before, key_after = behavior.keys_around_trace(functions, options)
        # An array is a constant of the program, so the program goes with the functions.
        if behavior.closes_over_arrays:
            _remember(of_functions._replace(behavior=key_after), entry, functions, True)
        else:
            _remember(kind._replace(behavior=key_after), entry)
        if key_before != key_after:
            # For another function with this behavior, the trace may have something to write.
            _remember(of_functions._replace(behavior=key_before), entry, functions)
    return result


def _identity(function: object) -> Hashable:
    if isinstance(function, types.MethodType):
        return Identity(function.__self__), Identity(function.__func__)
    return Identity(function)


def _called_once_by(program: Jit) -> _EagerProgram:
    """Returns an entry whose program is kept for a while."""
    entry = _EagerProgram()
    entry.program = program
    _called_once.append(entry)
    if len(_called_once) > _MOST_CALLED_ONCE:
        with contextlib.suppress(IndexError):  # another thread was first
            _called_once.popleft().program = None
    return entry


def _remember(
    kind: _CallKind,
    entry: _EagerProgram,
    functions: Sequence[Any] = (),
    goes_with_functions: bool = False,
) -> None:
    """Remembers the entry of calls of a kind, while the functions live."""
    if _entries.get(kind) is entry:
        return
    while len(_entries) >= _MOST_PROGRAMS:
        with contextlib.suppress(KeyError, ValueError):  # another thread was first
            _entries.pop(min(_entries.copy().items(), key=lambda item: item[1].used)[0], None)

    def forget(_: object) -> None:
        entry = _entries.pop(kind, None)
        if entry is not None and goes_with_functions:
            entry.program = None

    entry.used = next(_ticks)
    _entries[kind] = entry
    entry.anchors[kind] = [
        weakref.ref(f.__self__ if isinstance(f, types.MethodType) else f, forget) for f in functions
    ]
