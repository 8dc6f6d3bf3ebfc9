# SPDX-License-Identifier: Apache-2.0
"""The parts of JAX that are public but not in the ``jax`` namespace itself, all in one place.

*Trace state*: an opaque token for "which transform is tracing right now". Two tokens are equal
exactly when they were taken under the same trace. ``jax.extend.core`` offers it for libraries that
hold mutable state.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer as Tracer
from jax.extend.core import get_opaque_trace_state


def trace_state() -> Any:
    """Returns the token of the current trace (equal under one trace, different under another)."""
    return get_opaque_trace_state(convention="nnx")


with jax.ensure_compile_time_eval():
    EAGER: Any = trace_state()
"""The token of eager execution: no transform is tracing."""


def is_eager() -> bool:
    """Whether no JAX transform is tracing right now."""
    return trace_state() == EAGER
