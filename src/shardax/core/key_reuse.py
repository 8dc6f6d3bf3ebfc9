# SPDX-License-Identifier: Apache-2.0
"""Finding random numbers that are drawn twice: a mode for tests and for looking for faults.

*Reuse* of a key: two draws from one key, which are equal or related while they should be
independent. JAX's own mode, ``jax.debug_key_reuse``, finds a key that is used twice, in programs
too. It cannot see that two keys are equal which were made apart, as streams make theirs: two
``Rngs`` of one seed, a model and its clone, a restored state.

So here every draw that a stream takes outside of programs is noted, by base key and count, with the
line that took it. A second draw of the same pair is an error that names both lines.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax

from shardax.core._jax import Tracer, is_eager
from shardax.core.errors import RepeatedKeyError
from shardax.core.keys import KeySource, all_key_words

Notes = dict[tuple[Any, bytes, int], str]
"""Where each (generator, base key, count) was drawn."""

_block: ContextVar[Notes | None] = ContextVar("shardax_drawn_keys", default=None)
_process: list[Notes] = []
_PACKAGE = str(Path(__file__).parents[1])


@contextlib.contextmanager
def debug_key_reuse() -> Iterator[None]:
    """Makes it an error to use a random key twice, in a ``with`` block or a function.

    It switches ``jax.debug_key_reuse`` on, and checks the draws of ``Rngs`` outside of programs.
    Inside of a program JAX checks keys, not how often a stream stood at the same count. Draws that
    are repeated on purpose, such as those of a restored model, belong outside of the block. It
    belongs to the thread that enters the block.

    Raises:
        RepeatedKeyError: Inside of the block: if a stream draws a key that was drawn in it before.
        jax.errors.KeyReuseError: Inside of the block: if a key is used twice.

    Example:
        >>> import shardax as sx
        >>> with sx.debug_key_reuse():
        ...     first = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        ...     second = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
        Traceback (most recent call last):
            ...
        shardax.core.errors.RepeatedKeyError: The stream 'default' drew key number 0 again...
    """
    token = _block.set({})
    try:
        with jax.debug_key_reuse(True):
            yield
    finally:
        _block.reset(token)


def check_whole_process(check: bool) -> None:
    """Switches the check of streams on or off for all threads of the process."""
    _process[:] = [{}] if check else []


def note_draw(stream: str, source: KeySource | None, count: Any) -> None:
    """Notes a draw, if somebody wants to know.

    Args:
        stream: Name of the stream.
        source: Its base key; None for one that is not a single key.
        count: Its count before the draw.

    Raises:
        RepeatedKeyError: If the same draw was noted before.
    """
    notes = _block.get()
    if notes is None:
        if not _process:
            return
        notes = _process[0]
    if source is None or isinstance(source.root, Tracer) or isinstance(count, Tracer):
        return
    if not is_eager():
        return
    drawn = (source.impl, all_key_words([source])[0].tobytes(), int(count))
    here = _line_of_the_caller()
    before = notes.setdefault(drawn, here)
    if before is not here:
        raise RepeatedKeyError(
            f"The stream {stream!r} drew key number {drawn[2]} again, at {here}; the same key was "
            f"drawn at {before}. Streams hand out the same keys when they are made of equal seeds, "
            f"copied, or restored, so what is drawn there is equal. Pass one Rngs on to both "
            f"places, or give each its own: rngs.fork(), rngs.scope('name'), or another seed."
        )


def _line_of_the_caller() -> str:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
