# SPDX-License-Identifier: Apache-2.0
"""Axes and entries of a Variable, as they are given.

Names of dimensions are given by ``axes=``, one per dimension, or by a *box*: what Flax and others
put around an array with names. A Variable takes the array and the names out of the box. Where both
are given, they must agree. Other entries are hashable, and hold no Variables or Modules, since a
model would know nothing of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from shardax._core.explain import variable_errors as errors
from shardax._core.graph.handlers import axes_of, handler_of
from shardax._core.graph.held import ObjectSearch
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import EMPTY, Axes, Metadata, check_axes
from shardax._core.init.lazy import Init
from shardax._core.object import Object

if TYPE_CHECKING:
    from shardax._core.variable import Variable

# By these names other libraries give the names of dimensions.
_OTHER_NAMES = frozenset(("names", "out_sharding", "sharding", "sharding_names"))


def out_of_box(
    variable_type: type[Variable], axes: Iterable[object] | None, value: PyTree
) -> tuple[PyTree, Metadata | None]:
    """Returns the value in a box and the metadata of the box; another value as it is.

    Args:
        variable_type: Type of the Variable that takes the value.
        axes: Names that were given beside the box, or that the Variable has; None for a new
            Variable, which takes those of the box.
        value: What the Variable is given.

    Raises:
        MetadataError: If the box has other names than ``axes``.
    """
    if isinstance(value, jax.Array):
        return value, None

    # An initializer that returns a box was split into its value and metadata when it was made.
    if isinstance(value, Init):
        if value.metadata is None:
            return value, None
        names = value.metadata.axes
        if names is None and axes is not None:
            return value, None  # the box knows no names, and so no rules for these
        if names is not None:
            names += (None,) * (value.ndim - len(names))
        _check_same_names(variable_type, axes, names, "an initializer")
        return value, Metadata(names, value.metadata.entries)

    contents = handler_of(value).contents
    if contents is None or variable_type._holds_boxes:
        return value, None
    bare_value, metadata = contents(value)
    _check_same_names(variable_type, axes, metadata.axes, "a box")
    return bare_value, metadata


def _check_same_names(
    variable_type: type[Variable],
    axes: Iterable[object] | None,
    names: tuple[object, ...] | None,
    source: str,
) -> None:
    if axes is not None and names is not None and tuple(axes) != names:
        raise errors.names_twice(variable_type, axes, names, source)


def new_metadata(variable: Variable, axes: Any, entries: dict[str, object]) -> Metadata:
    """Returns the metadata of a new Variable, which has its value; raises for wrong ones."""
    if entries:
        entries = checked_entries(type(variable), entries)
    names = check_axes(axes)
    check_rank(variable, names)
    return EMPTY if names is None and not entries else Metadata(names, entries)


def checked_entries(
    variable_type: type[Variable], entries: Mapping[str, object]
) -> dict[str, object]:
    """Returns entries without names that are None; raises for other names and for objects."""
    checked = {}
    for name, entry in entries.items():
        if name in _OTHER_NAMES:
            if entry is not None:
                raise errors.names_by_another_option(variable_type, name, entry)
            continue
        held = None if isinstance(entry, Object) else ObjectSearch().held_by(entry)
        if held is not None:
            where = f"the metadata entry {name!r} of a {variable_type.__name__}"
            raise held.error(entry, where)
        checked[name] = entry
    return checked


def check_rank(variable: Variable, axes: Axes | None) -> None:
    """Raises if axes are not one per dimension of the array of a Variable."""
    value = variable._value
    if axes is None or not hasattr(value, "ndim"):
        return
    if axes_of(value) is not None:
        raise errors.axes_of_named_array(type(variable), axes, value)
    if len(axes) != value.ndim:
        raise errors.axes_of_other_rank(type(variable), axes, tuple(value.shape))
