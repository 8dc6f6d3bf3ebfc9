# SPDX-License-Identifier: Apache-2.0
"""The base of all errors. ``shardax.core.errors`` is the face that lists them."""

from __future__ import annotations

FACE = "shardax.core.errors"


class ShardaxError(Exception):
    """Base of all errors raised on purpose by shardax.

    Example:
        >>> import shardax as sx
        >>> issubclass(sx.errors.StaticAttributeError, sx.errors.ShardaxError)
        True
    """

    __module__ = FACE

    def __init_subclass__(cls) -> None:
        """Lets errors be known by the face that lists them, in tracebacks and pickles."""
        super().__init_subclass__()
        if cls.__module__.startswith("shardax.core."):
            cls.__module__ = FACE
