# SPDX-License-Identifier: Apache-2.0
"""Texts of the errors of boxes, which are ``PartitionError``."""

from __future__ import annotations

from collections.abc import Mapping

from shardax._core.graph.paths import Path, format_path
from shardax.partition.assignment import Names
from shardax.partition.errors import PartitionCheckError, PartitionError

# --- one box --------------------------------------------------------------------------------------


def unhashable_attribute(
    kind: str, attributes: Mapping[str, object], error: TypeError
) -> PartitionError:
    """Returns the error of a static attribute that has no hash."""
    return PartitionError(
        f"{kind}: a static attribute is not hashable ({error}): {dict(attributes)!r}. Compiled "
        "programs are found by them. Use tuples instead of lists, frozen dataclasses instead of "
        "dicts, and keep arrays in the box's value."
    )


def no_place_for_axis(box: object, names: Names, index: int, name: object) -> PartitionError:
    """Returns the error of an axis that is added before the first dimension."""
    least = -len(names) - 1
    return PartitionError(
        f"{box!r}: cannot add an axis {name!r} at {index} to the names {names}: give a place from "
        f"{least} on. A box has one name per dimension, None for one without."
    )


def no_axis_to_remove(box: object, names: Names, index: int, name: object) -> PartitionError:
    """Returns the error of an axis that is removed where there is none."""
    return PartitionError(
        f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: there are "
        f"{len(names)}."
    )


def other_axis_to_remove(
    box: object, names: Names, index: int, name: object, found: object
) -> PartitionError:
    """Returns the error of an axis that is removed where another one is."""
    hint = f" The name {name!r} stands at {names.index(name)}." if name in names else ""
    return PartitionError(
        f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: {found!r} "
        f"stands there.{hint} remove_axis undoes add_axis, so it takes the same index and name."
    )


def axis_without_name(
    box: object, verb: str, index: int, params: Mapping[object, object]
) -> PartitionError:
    """Returns the error of an axis that is added or removed without its name."""
    return PartitionError(
        f"{box!r}: cannot {verb} an axis at {index} without a name for it; {dict(params)} does not "
        f"give one. Write {verb}_axis(tree, {index}, {{PARTITION_NAME: 'layers'}}), or None for a "
        "dimension without a name."
    )


def no_mesh(box: object) -> PartitionError:
    """Returns the error of a sharding of a box where no mesh is known."""
    return PartitionError(f"{box!r}: there is no mesh. Write box.get_sharding(mesh).")


def logical_names_without_rules(box: object, action: str, way_out: str) -> PartitionError:
    """Returns the error of logical names over a mesh, and no rules for them."""
    return PartitionError(
        f"Cannot {action} {box!r} over a mesh: its names are logical, and it has no rules, nor are "
        "any in scope. Put them in scope, with sx.axis_rules(rules): ..., or give the box "
        f"rules=rules{way_out}."
    )


def box_in_box(box: object) -> PartitionError:
    """Returns the error of a Variable that is to be made of a box around another one."""
    return PartitionError(
        f"{box!r}: holds another box, so it is no Variable. Make one of its value: "
        "sx.Param(sx.unbox(box), axes=...)."
    )


# --- trees of boxes -------------------------------------------------------------------------------


def at_path(path: Path, error: PartitionError) -> PartitionError:
    """Returns an error of a method of a box, with the path of the box."""
    if not isinstance(error, PartitionCheckError):
        return PartitionError(f"{format_path(path)}: {error}")
    lines = "".join(f"\n  {finding}" for finding in error.findings)
    return PartitionError(f"{format_path(path)}: cannot be laid out as its box says:{lines}")


def other_structure(reason: object) -> PartitionError:
    """Returns the error of values that do not have the structure of the boxed tree."""
    return PartitionError(
        f"The values do not fit the boxed tree: {reason}. Give them in the form that unbox(tree) "
        "has."
    )


def names_of_other_structure(names: object, treedef: object, error: Exception) -> PartitionError:
    """Returns the error of names that are no prefix of the pytree to be laid out."""
    return PartitionError(
        f"The names {names!r} do not fit the pytree {treedef}: {error}. Give names for each array "
        "in a pytree of the same form, or once for all below a place."
    )


def module_among_boxes(path: Path, kind: str) -> PartitionError:
    """Returns the error of an axis that is added to a Module."""
    return PartitionError(
        f"{format_path(path)}: a {kind} is no box, and its Variables have their own axes, which "
        "sx.vmap and sx.scan keep true: sx.vmap(make, metadata={PARTITION_NAME: 'layers'})."
    )


def variables_in_module(kind: str) -> PartitionError:
    """Returns the error of a Module whose Variables are to become boxes."""
    return PartitionError(
        f"A {kind} has Variables, and its boxes would be lost in it: take them out first, "
        "to_boxes(dict(sx.iter_variables(model)))."
    )
