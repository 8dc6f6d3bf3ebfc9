# SPDX-License-Identifier: Apache-2.0
"""A check of the reuse of random keys.

*Reuse* of a key: two draws from one key, which are equal or related while they should be
independent. JAX's own mode, ``jax.debug_key_reuse``, finds a key that is used twice, in programs
too. It cannot see that two keys are equal which were made apart, as streams make theirs: two
``Rngs`` of one seed, a model and its clone, a restored state. So here every draw that a stream
takes outside of programs is recorded, by base key and count, with the line that took it. A second
draw of the same pair is an error that names both lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax
import numpy as np

from shardax._core._jax import Tracer
from shardax._core.errors import RepeatedKeyError, user_frame
from shardax._core.frames import is_eager
from shardax._core.init.keys import KeyImpl, KeySource, known_key_words

# The line that drew each key, by generator, words of the base key, and count.
DrawnKeys = dict[tuple[KeyImpl, bytes, int], str]

_block: ContextVar[DrawnKeys | None] = ContextVar("shardax_drawn_keys", default=None)
_process: list[DrawnKeys] = []  # of all threads; empty while they are not checked


@contextlib.contextmanager
def debug_key_reuse() -> Generator[None]:
    """Makes the reuse of a random key an error in a block.

    It switches ``jax.debug_key_reuse`` on, and checks the draws of ``Rngs`` outside of programs.
    Inside of a program JAX checks keys, not how often a stream stood at the same count. Draws that
    are repeated on purpose, such as those of a restored model, belong outside of the block. It
    belongs to the thread that enters the block.

    Yields:
        None.

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
        shardax.errors.RepeatedKeyError: The stream 'default' drew key number 0 again...
    """
    token = _block.set({})
    try:
        with jax.debug_key_reuse(True):
            yield
    finally:
        _block.reset(token)


def check_whole_process(check: bool) -> None:
    """Switches the check of streams for all threads."""
    _process[:] = [{}] if check else []


def note_draw(stream: str, source: KeySource | None, count: np.ndarray | jax.Array) -> None:
    """Records a draw while key reuse is checked; raises if the key was drawn before.

    Args:
        stream: Name of the stream.
        source: Its base key; None if it has several.
        count: How many keys it handed out before.
    """
    drawn_keys = _block.get()
    if drawn_keys is None:
        if not _process:
            return
        drawn_keys = _process[0]

    # Inside of programs JAX checks keys itself.
    if source is None or source.is_traced or isinstance(count, Tracer) or not is_eager():
        return

    (words,) = known_key_words([source])
    key = (source.impl, words.tobytes(), int(count))
    frame = user_frame()
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    first_line = drawn_keys.setdefault(key, line)
    if first_line is not line:
        raise RepeatedKeyError(
            f"The stream {stream!r} drew key number {int(count)} again, at {line}; the same key "
            f"was drawn at {first_line}. Streams hand out the same keys when they are made of "
            f"equal seeds, "
            f"copied, or restored, so what is drawn there is equal. Pass one Rngs on to both "
            f"places, or give each its own: rngs.fork(), rngs.scope('name'), or another seed."
        )
