# SPDX-License-Identifier: Apache-2.0
"""Modules on the host: copies that hold NumPy arrays and cannot be written.

A host function that is given a Module gets a *host copy* of it: the same classes, attributes and
configuration, with a NumPy array as the value of every Variable. It is made when the function runs
and is gone afterwards.
"""

from __future__ import annotations

from typing import Any, NoReturn

from shardax.core.errors import ClosureError
from shardax.core.frames import Frame
from shardax.core.structure import GraphDef, VariableDef
from shardax.core.variables import ArrayAttribute, Variable

LOCK = (
    "Cannot write {what} inside a host function: it works on a copy, and may run any number of "
    "times. Return the new value, and write it in the program: model.count[...] = f(model, x)."
)


class HostVariable(Variable[Any]):
    """A Variable of a host copy: reading it makes no JAX array of the NumPy array in it."""

    @property
    def value(self) -> Any:
        """The value, of NumPy arrays."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._write(value)


class HostAttribute(HostVariable, ArrayAttribute[Any]):
    """An array attribute of a host copy."""


def on_host(graphdef: GraphDef) -> GraphDef:
    """Returns the structure of the host copies of some objects."""
    return GraphDef(tuple(_definition(item) for item in graphdef.objects), graphdef.roots)


def _definition(item: Any) -> Any:
    if type(item) is not VariableDef:
        return item
    kind = HostAttribute if issubclass(item.type, ArrayAttribute) else HostVariable
    return VariableDef(kind, item.metadata)


class HostFrame(Frame):
    """The frame of a run on the host, where the program's Variables are out of reach."""

    __slots__ = ()

    def adopt(self, outer: Any) -> NoReturn:
        """See ``Frame.adopt``."""
        raise ClosureError(
            f"The host function {self.name} uses a {type(outer).__name__} that it was not given. "
            f"It runs while a program does, when that Variable may have an old value or none. Pass "
            f"it, or the Module that holds it, as an argument."
        )
