# SPDX-License-Identifier: Apache-2.0
"""Subclasses of Modules whose methods are wrapped."""

from __future__ import annotations

import types
from collections.abc import Callable

from shardax._core.graph.paths import PyTree
from shardax._core.module import Module


def subclass(kind: type[Module], around: Callable[[str, PyTree], object]) -> type[Module]:
    """A subclass of the same name with wrapped public methods."""
    methods = {
        name: around(name, method)
        for base in reversed(kind.__mro__)
        if issubclass(base, Module) and base is not Module
        for name, method in vars(base).items()
        if isinstance(method, types.FunctionType) and (name == "__call__" or name[0] != "_")
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = type(kind)(kind.__name__, (kind,), methods | names)
    assert issubclass(made, kind)
    return made
