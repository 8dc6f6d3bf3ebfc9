# SPDX-License-Identifier: Apache-2.0
"""The structure epoch: one integer that tells whether a model may have changed its structure.

Walking a model on every call is what makes stateful libraries slow. shardax walks once, *marks*
every object it saw, and remembers the *epoch* at which it walked. A structural write (an attribute
set to something of another kind, a container or metadata changed) to a marked object advances the
epoch; a value written into a Variable does not, nor does building a new model, whose objects are
not marked yet. A remembered walk is valid exactly while the epoch is the one it was made at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

current: int = 0
"""The epoch now. Read as ``epoch.current`` (never imported by value)."""

_lock = threading.Lock()
_hooks: list[Callable[[], None]] = []


def on_advance(hook: Callable[[], None]) -> None:
    """Has ``hook`` called after every advance."""
    _hooks.append(hook)


def advance() -> None:
    """Declares every remembered walk out of date.

    The lock makes the epoch strictly increasing when several threads edit models at once; a lost
    increment could bring back an epoch at which an older walk was remembered.
    """
    global current
    with _lock:
        current += 1
    for hook in _hooks:
        hook()
