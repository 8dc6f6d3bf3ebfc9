# SPDX-License-Identifier: Apache-2.0
"""Compiled methods, bound to their object.

``jax.jit`` binds its methods too, but loses ``lower`` and the like on the way; a ``BoundJit`` keeps
everything that the compiled function offers.
"""

from __future__ import annotations

import types
from typing import Any

from shardax.core.node import Wrapper


class BoundJit(Wrapper):
    """A jitted method bound to its object: a ``Jit`` with its first argument given."""

    __slots__ = ("__func__", "__self__")

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self.__self__)

    def _wrapping(self) -> Any:
        return self.__func__

    def _wrap(self, wrapped: Any) -> Any:
        return BoundJit(wrapped.__func__, wrapped.__self__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """See ``Jit.trace``."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """See ``Jit.lower``."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """See ``Jit.eval_shape``."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r}>"
