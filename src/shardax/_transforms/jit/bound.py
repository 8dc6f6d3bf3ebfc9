# SPDX-License-Identifier: Apache-2.0
"""Jitted methods, bound to their object."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from shardax._core.graph.paths import PyTree
from shardax._core.object import Wrapper


class BoundJit(Wrapper):
    """A jitted method bound to its object."""

    __slots__ = ("__dict__", "__func__", "__self__")

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance

    # Wrappers are not given another function: ``Jit`` keeps its own in a slot, this one makes it.
    @property
    def function(self) -> Any:  # ty: ignore[incompatible-property-override]
        """Returns the method that it runs."""
        return types.MethodType(self.__func__, self.__self__)

    @property
    def inner(self) -> Any:
        """The method that it runs, under the name that Flax NNX has for it."""
        return self.function

    @property
    def __wrapped__(self) -> Any:
        return self.__dict__.get("__wrapped__", self.function)

    @__wrapped__.setter
    def __wrapped__(self, shown: Any) -> None:  # as ``functools.wraps`` does
        self.__dict__["__wrapped__"] = shown

    def _wrapping(self):
        return self.__func__

    def _maker(self) -> Callable[[Any], Any]:
        return bound_jit

    def __reduce__(self) -> Any:
        return BoundJit, (self.__func__, self.__self__)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Traces the method; what is compiled of it is called without the object."""
        return self.__func__.trace(self.__self__, *args, **kwargs).bound_to(self.__self__)

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Any:
        """Lowers the method, lazy Modules as they are."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the result."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r}>"


def bound_jit(method: types.MethodType) -> BoundJit:
    """Returns the compiled form of a method."""
    return BoundJit(method.__func__, method.__self__)
