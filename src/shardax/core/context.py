# SPDX-License-Identifier: Apache-2.0
"""The trace context: settings in scope that change what a trace produces.

A function that reads such a setting while it is traced (axis rules, for example) compiles to a different program under a different
setting. So compiled programs are looked up by the context too. A setting is set with ``scoped`` and must be hashable.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Hashable, Iterator

_EMPTY: frozenset[tuple[str, Hashable]] = frozenset()
_context: contextvars.ContextVar[frozenset[tuple[str, Hashable]]] = (
    contextvars.ContextVar("shardax_trace_context", default=_EMPTY)
)

current = _context.get
"""Returns the settings in scope, as a hashable set of (name, setting)."""


def setting(name: str) -> Hashable | None:
    """Returns one setting in scope, or None."""
    return dict(_context.get()).get(name)


@contextlib.contextmanager
def scoped(name: str, value: Hashable | None) -> Iterator[None]:
    """Sets a setting for the duration of a ``with`` block in this thread (and tasks started from it).

    Args:
        name: The setting's name.
        value: Its value; None removes it.

    Example:
        >>> from shardax.core import context
        >>> with context.scoped("rules", ("a", "b")):
        ...     context.setting("rules")
        ('a', 'b')
        >>> context.setting("rules")
    """
    settings = {**dict(_context.get()), name: value}
    token = _context.set(
        frozenset((key, item) for key, item in settings.items() if item is not None)
    )
    try:
        yield
    finally:
        _context.reset(token)
