# SPDX-License-Identifier: Apache-2.0
"""What selections ask of Variables and of the objects that they change.

Everything in ``_select`` reads and writes objects by these functions or by public methods.
"""

from __future__ import annotations

import numpy as np

from shardax._core.frames import owner_here
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import EMPTY
from shardax._core.graph.views import VIEW_LOCK
from shardax._core.object import Object, epoch
from shardax._core.values import as_value
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute


def stored_value(variable: Variable) -> PyTree:
    """Returns the value of a Variable, a lazy one as it is."""
    value = variable._here()._value
    return variable.value if isinstance(value, np.ndarray) else value


def like(variable: Variable, value: PyTree) -> Variable:
    """Returns a Variable of the same type and metadata with another value, which must fit."""
    if isinstance(variable, ArrayAttribute):
        return unchecked_like(variable, value)
    return variable.replace(value)


def unchecked_like(variable: Variable, value: PyTree) -> Variable:
    """Returns a Variable of the same type and metadata with another value, of any rank."""
    metadata = variable._here()._metadata
    return variable._make(as_value(value, "array"), metadata, owner_here())


def array_attribute(value: PyTree) -> ArrayAttribute:
    """Returns the hidden Variable that a Module stores for an array."""
    return ArrayAttribute._make(value, EMPTY, owner_here())


def write(variable: Variable, value: PyTree) -> PyTree:
    """Writes a value as it is; returns the old one."""
    old = variable._here()._value
    variable._write(value)
    return old


def note_structural_change(holder: PyTree) -> None:
    """Makes compiled functions that know an object look at its structure again."""
    if isinstance(holder, Object) and holder._marked:
        epoch.advance(holder)


def is_view(item: Object) -> bool:
    """Whether an object is a view of one layer of a stack."""
    return item._lock is VIEW_LOCK or getattr(item, "_parent", None) is not None
