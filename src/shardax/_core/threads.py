# SPDX-License-Identifier: Apache-2.0
"""Threads that share a model: which waits for which.

There are three locks, each for the whole process, so it does not matter which model a call is for:
``call_lock`` of compiled calls, ``write_lock`` of writes, and ``lazy_lock`` of lazy values. What
holds which, and for how long:

- A call of a compiled function that *writes* Variables holds ``call_lock``, from reading the values
  to storing the new ones. It takes ``write_lock`` besides while it stores.
- A call that *donates* arrays holds both, as long.
- A call that *only reads* holds none. If its arrays were donated before it ran, it is made again,
  holding ``call_lock``. The first call of any function holds it too: nothing says yet whether
  it writes.
- An eager step that reads and writes (``v += 1``, ``v[i] = x``, a draw of a random key:
  ``in_one_step``), or writes (``v.value = x``), holds ``write_lock``.
- An eager read of an array holds none. It finds the old array or the new one; one that was donated
  meanwhile is deleted, and raises ``DonationError``.
- Who reads a lazy value holds ``lazy_lock`` until it is computed, which may take long.
- Nothing is held while a function is traced; nor while it is compiled, once there is a second
  thread. (JAX lets a call wait for another thread's trace of the same program, so what is traced
  must wait for no lock. Inside of a transform, copies belong to one thread.)

So calls that write wait for each other, and so do eager steps. Neither waits for the other while a
program runs: a host callback of the program may be such a step, in a thread of XLA that the call
waits for. A compiled call that finds at its end that a value was written eagerly since it read it
stores nothing, and is made again; one that donates could not be, so it holds both locks.

A thread that needs several takes ``call_lock``, ``write_lock`` and ``lazy_lock`` in this order.

Where a thread itself reads first and writes later, ``v[...] = v + 1``, only the user could hold a
lock around both. So such a write is *checked*: every write leaves a ``Stamp`` on the Variable, a
thread remembers the stamps of the Variables that it read last, and the write is refused if another
thread has written since. A process with one thread makes no stamps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardax._core import errors
from shardax._core.graph.paths import Path, format_path

if TYPE_CHECKING:
    from shardax._core.frames import Frame
    from shardax._core.variable import Variable

call_lock = threading.RLock()
write_lock = threading.RLock()
lazy_lock = threading.RLock()
no_lock = contextlib.nullcontext()


class _BothLocks:
    """``call_lock`` and ``write_lock``, as one lock."""

    def __enter__(self) -> None:
        call_lock.acquire()
        write_lock.acquire()

    def __exit__(self, *_: object) -> None:
        write_lock.release()
        call_lock.release()


both_locks = _BothLocks()

several = False
"""Whether a second thread has used shardax. Read it as ``threads.several``: it changes."""

_first_thread: int | None = None


class Stamp:
    """A write of a Variable, or of those that one call wrote; compared by identity."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _ThreadState(threading.local):
    """What each thread has for itself."""

    # The innermost frame; None outside of all transforms.
    frame: Frame | None = None
    # Whether JAX flattens a pytree only to look for objects in it, and whether it has met one
    # (``flatten.has_objects``).
    probing: bool = False
    found: bool = False

    def __init__(self) -> None:
        global _first_thread, several

        # The Variables read last, and their stamps then, by ``id``.
        self.reads: dict[int, tuple[weakref.ref[Variable], Stamp | None]] = {}

        if _first_thread is None:
            _first_thread = threading.get_ident()
        else:
            several = True


local = _ThreadState()


def in_one_step() -> contextlib.AbstractContextManager[Any]:
    """Returns the lock of an eager step that reads and writes; none inside of transforms."""
    return write_lock if local.frame is None else no_lock


# --- values that compiled calls write -------------------------------------------------------------


def store(variables: Sequence[Variable], read: Sequence[Any], values: Sequence[Any]) -> bool:
    """Stores the values that a compiled call wrote, and returns whether it has.

    Args:
        variables: The Variables.
        read: What the call read of them. If one holds another value now, nothing is stored.
        values: What they shall hold.
    """
    with write_lock:
        if any(variable._value is not value for variable, value in zip(variables, read)):  # noqa: B905
            return False

        stamp = Stamp()
        for variable, value in zip(variables, values):  # noqa: B905 (equal lengths; hot path)
            variable._value = value
            variable._stamp = stamp
    return True


# --- eager reads and writes -----------------------------------------------------------------------

# Those of one expression, so that a value looked at long ago does not count.
_MOST_READS = 8


def note_read(variable: Variable) -> None:
    """Remembers which write of a Variable this thread is about to read."""
    # The stamp is taken before the value, and written after it: with a new stamp goes a new value.
    reads = local.reads
    reads.pop(id(variable), None)
    reads[id(variable)] = (weakref.ref(variable), variable._stamp)

    if len(reads) > _MOST_READS:
        oldest = next(iter(reads))
        del reads[oldest]


def check_unwritten(variable: Variable, kind: str) -> None:
    """Raises if another thread has written since this one read; under ``write_lock``.

    Args:
        variable: What is about to be written.
        kind: What messages call it.
    """
    latest = variable._stamp
    if latest is None or latest.thread == threading.get_ident():
        return

    reference, stamp = local.reads.get(id(variable), (None, None))
    if reference is not None and reference() is variable and stamp is not latest:
        raise errors.written_since_read(kind)


def note_write(variable: Variable) -> None:
    """Stamps a Variable that this thread has written eagerly; under ``write_lock``."""
    variable._stamp = Stamp()
    note_read(variable)


# --- objects that one thread at a time may use ----------------------------------------------------


class OneThread:
    """Owners of objects during blocks, by ``id``."""

    def __init__(self, doing: str, consequence: str) -> None:
        # What another thread does: "captures from the Module".
        self.doing = doing
        self.consequence = consequence
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, paths: Mapping[int, Path]) -> Generator[None]:
        """Refuses objects, given by ``id``, that another thread holds."""
        thread = threading.get_ident()

        with self._lock:
            for item, path in paths.items():
                if self._threads.get(item, thread) != thread:
                    where = format_path(path) or "the root"
                    raise errors.held_by_other_thread(self.doing, where, self.consequence)
            added = paths.keys() - self._threads.keys()
            self._threads.update(dict.fromkeys(added, thread))

        try:
            yield
        finally:
            with self._lock:
                for item in added:
                    del self._threads[item]
