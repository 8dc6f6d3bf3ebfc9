# SPDX-License-Identifier: Apache-2.0
"""Why a forward derivative failed: which functions on its way have a vjp alone.

JAX refuses the forward mode of such a function with an error that names none. Inside of a compiled
function, a loop or ``remat`` JAX runs the rule when the call of the function is over, so it cannot
be known there that the mode is refused. So ``custom_vjp`` notes each rule that runs
(``note_vjp_rule``), and ``jvp``, ``jacfwd`` and ``hessian`` add a note to the error of JAX
(``explained_forward_mode``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import PyTree
from shardax._transforms.errors import FORWARD_MODE


class _RulesThatRan(threading.local):
    """Rules that ran in the innermost forward derivative of this thread; None outside of one."""

    rules: list[Callable[..., PyTree]] | None = None


_ran = _RulesThatRan()


def note_vjp_rule(function: Callable[..., PyTree]) -> None:
    """Notes that the rule of a function with a vjp alone ran."""
    if _ran.rules is not None:
        _ran.rules.append(function)


@contextlib.contextmanager
def explained_forward_mode(name: str) -> Generator[None]:
    """Adds to an error of JAX which functions have a vjp alone."""
    outer = _ran.rules
    rules = _ran.rules = []
    try:
        yield
    except TypeError as error:
        if not isinstance(error, ShardaxError):
            for text in dict.fromkeys(map(repr, rules)):
                error.add_note(f"sx.{name} goes through {text}. {FORWARD_MODE}")
        raise
    finally:
        _ran.rules = outer
