# SPDX-License-Identifier: Apache-2.0
"""Modules around another Module, which call it in some way of their own.

The Module inside is the *body*. An attribute that is not the wrapper's own is the body's, read and
written, so that a wrapper can take a layer's place. Paths lead through it: what was at ``.kernel``
is at ``.body.kernel``.
"""

from __future__ import annotations

from typing import Any

from shardax.core.errors import LayerConfigError
from shardax.core.modules import Module


class Around(Module):
    """Base of Modules around another one.

    Args:
        module: The body, a Module that can be called.

    Attributes:
        body: It itself, not a copy.

    Raises:
        LayerConfigError: If it is no Module, or cannot be called.
    """

    body: Any
    _own = frozenset({"body"})
    """Names of the wrapper's own attributes."""

    def __init__(self, module: Module) -> None:
        if not isinstance(module, Module) or not callable(module):
            raise LayerConfigError(
                f"sx.{type(self).__name__} goes around a Module that can be called, but was given "
                f"{module!r} of type {type(module).__name__}. For a function, use sx.jit(f) or "
                f"sx.remat(f); for a method, put it around the Module that has it."
            )
        self.body = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            body = self.__dict__.get("body")
            if body is None or name.startswith("__"):
                raise
        return getattr(body, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or hasattr(Module, name):
            super().__setattr__(name, value)
        else:
            setattr(self.body, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._own:
            super().__delattr__(name)
        else:
            delattr(self.body, name)
