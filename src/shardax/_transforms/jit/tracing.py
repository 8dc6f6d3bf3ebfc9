# SPDX-License-Identifier: Apache-2.0
"""The call that a trace of a pure function is for.

JAX calls the pure function of a ``Specialization`` with tracers and nothing else. What it has to
know besides, such as which objects the tracers are the values of, is the ``Tracing`` of the thread.
Only the slow way of a call sets one. So a program that JAX would have to trace, in the fast way,
finds none, and says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardax._core.object import Object
from shardax._transforms.lift.input_graph import InputGraph

if TYPE_CHECKING:
    from shardax._transforms.jit.specialization import Specialization


class Tracing(NamedTuple):
    """What a trace has to know of the call that it is for."""

    specialization: Specialization
    graph: InputGraph

    used_by_earlier_traces: Sequence[Object] = ()
    """Objects in no certain way (``lift.captures``) that an earlier trace for this call used."""

    is_inside: bool = False
    """Whether the call is made inside of another trace."""

    moves_variables: bool = True
    """Whether Variables may be moved for the trace, and it made once more."""

    ends_well: bool = False
    """Whether a trace that lacks an input ends all the same; its ``Effects.missing`` says so."""


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


def current_tracing() -> Tracing | None:
    """Returns the ``Tracing`` of this thread; None where nobody asked for a trace."""
    return _current.tracing
