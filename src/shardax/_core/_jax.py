# SPDX-License-Identifier: Apache-2.0
"""The parts of JAX that are public but not in the ``jax`` namespace itself, all in one place.

*Trace state*: an opaque token for "which transform is tracing right now". Two tokens are equal
exactly when they were taken under the same trace. ``jax.extend.core`` offers it for libraries that
hold mutable state.

*A program as a function*: the function that runs a jaxpr. A jaxpr can be changed before it is run,
which ``jax.jit`` of the original function could not know.

*User lines*: where the code stands that made an equation of a jaxpr, for messages.

*Varying axes*: the manual mesh axes over which the shards of a value may differ, inside
``shard_map``. ``jax.typeof`` has them; the attribute's name changed between versions.

``jax.extend`` is imported on first use: it imports Pallas, which takes a third of the time that
``import shardax`` would take.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import threading
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer as Tracer

if TYPE_CHECKING:
    from jax.extend.core import Literal as Literal
    from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun


def __getattr__(name: str) -> Any:
    if name in ("Literal", "jaxpr_as_fun"):
        return getattr(importlib.import_module("jax.extend.core"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _opaque_trace_state(convention: str) -> Any:
    """Puts the function of ``jax.extend.core`` in its own place, and calls it."""
    global _opaque_trace_state
    from jax.extend.core import get_opaque_trace_state

    _opaque_trace_state = get_opaque_trace_state
    return _opaque_trace_state(convention=convention)


def trace_state() -> Any:
    """Returns the token of the current trace (equal under one trace, different under another)."""
    return _opaque_trace_state(convention="nnx")


@functools.cache
def eager() -> Any:
    """Returns the token of eager execution: no transform is tracing.

    It is taken in a new thread: in this one something may be tracing.
    """
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(trace_state()))
    thread.start()
    thread.join()
    return found[0]


def is_eager() -> bool:
    """Whether no JAX transform is tracing right now."""
    return trace_state() == eager()


def user_line(equation: Any) -> str:
    """Returns the file and line that an equation of a jaxpr comes from, or "" if it is not known.

    Frames of JAX and of shardax are passed over.
    """
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    inside = tuple(str(pathlib.Path(path).parent) for path in (jax.__file__, _HERE))
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(inside):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


_HERE = pathlib.Path(__file__).parent
"""The folder ``core``; that of all of shardax is above it."""


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array's shards may differ."""
    kind = jax.typeof(array)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())
