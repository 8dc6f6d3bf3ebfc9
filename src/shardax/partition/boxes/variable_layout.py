# SPDX-License-Identifier: Apache-2.0
"""The box that a Variable was made of, which stands among its metadata without the value.

``layout_of_variable`` says how such a Variable is laid out: as the box would be. ``box_around``
makes the box again, of the value and axes that the Variable has now.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import BOX_ENTRY
from shardax.partition.assignment import Names, strings
from shardax.partition.boxes.axis_metadata import AxisMetadata, fitted, with_value
from shardax.partition.boxes.partitioned import Partitioned, with_names
from shardax.partition.boxes.protocol import unboxed
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules


class VariableLayout(NamedTuple):
    """How a Variable made of a box is laid out, besides its axes."""

    box: AxisMetadata[Any] | None  # the box, empty, if the Variable has its names
    mesh: AnyMesh | None
    rules: Rules | None
    added_names: frozenset[str]  # names of the Variable that its box does not have


def layout_of_variable(
    axes: Names | None, entries: Mapping[str, object], value: object
) -> VariableLayout | None:
    """Returns the layout of a Variable made of a box; None of others.

    Args:
        axes: The axes of the Variable.
        entries: Its other metadata.
        value: Its value.
    """
    box = entries.get(BOX_ENTRY)
    if axes is None or not isinstance(box, AxisMetadata):
        return None
    names, rules = with_value(box, value).layout()
    own_names = tuple(names or ())

    # The axes may have been set since, to others of the mesh. Rules of a class of the user's are
    # for what it says itself.
    if type(box).layout in (AxisMetadata.layout, Partitioned.layout):
        rules = box._rules_of(axes)

    # Names of dimensions that transforms added since, which those rules do not know.
    added_names: set[str] = set()
    if len(axes) > len(own_names) or not isinstance(box, Partitioned):
        added_names = set(strings(axes)).difference(strings(own_names))

    has_same_names = fitted(own_names, len(axes)) == axes
    own_box = box if has_same_names else None
    return VariableLayout(own_box, getattr(box, "mesh", None), rules, frozenset(added_names))


def box_around(box: object, names: Names | None, value: object) -> AxisMetadata[Any] | None:
    """Returns the box of a Variable, or None where it would say other names or another value.

    Args:
        box: The entry of the Variable's metadata.
        names: The axes of the Variable.
        value: Its value.
    """
    if not isinstance(box, AxisMetadata):
        return None
    if isinstance(box, Partitioned) and not _has_names(with_value(box, value), names):
        box = with_names(box, names)
    if not _gives_back(box, value):
        return None

    box_of_value = box.replace_boxed(value)
    own_names, _ = box_of_value.layout()
    if (own_names is None) != (names is None):
        return None
    return box_of_value if names is None or _has_names(box_of_value, names) else None


def _has_names(box: AxisMetadata[Any], names: Names | None) -> bool:
    """Whether the names of a box are those, but for None at the end."""
    own_names, _ = box.layout()
    return names is not None and names == fitted(tuple(own_names or ()), len(names))


def _gives_back(box: AxisMetadata[Any], value: object) -> bool:
    """Whether a box unboxes what was put into it, and nothing computed of that."""
    box_type = type(box)
    is_standard_unbox = box_type.unbox in (AxisMetadata.unbox, Partitioned.unbox)
    if is_standard_unbox and box_type.replace_boxed is AxisMetadata.replace_boxed:
        return True

    answers: list[bool] = []

    def compare(boxed_value: PyTree) -> None:
        unboxed_value = unboxed(box.replace_boxed(boxed_value), apply_constraint=False)
        leaves, treedef = jax.tree.flatten(boxed_value)
        unboxed_leaves, unboxed_treedef = jax.tree.flatten(unboxed_value)
        is_same = treedef == unboxed_treedef and all(map(operator.is_, leaves, unboxed_leaves))
        answers.append(is_same)

    # Without numbers, so that nothing is computed and lazy values stay lazy.
    try:
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)
        jax.eval_shape(compare, structs)
    except Exception:  # noqa: BLE001 - a method of the user's that does more than to hold a value
        return False
    return answers == [True]
