# SPDX-License-Identifier: Apache-2.0
"""The diagnostics of layouts, one function or more for each code.

Of one array (``ResolvedRules.spec`` and ``explicit_spec``):

* ``axis-names``: error; names or entries are malformed, or a name stands twice in one array.
* ``rank-mismatch``: error; not one name per dimension.
* ``unmapped-name``: no rule mentions a name. Error under ``on_unmapped="error"``; else a warning,
  and only for a name that looks misspelt or like one of a mesh axis.
* ``mesh-axis-conflict``: two dimensions of one array want one mesh axis. Of rules: error under
  ``on_conflict="error"``, else warning if a name goes without, info if a later rule serves it.
* ``unconstrained``: ``UNCONSTRAINED`` where an array is placed.
* ``unknown-mesh-axis``: error; the mesh has no such axis.
* ``indivisible``: error; a dimension cannot be cut into equal parts.
* ``axis-type-order``: warning; a dimension is split over an Auto mesh axis before an Explicit one.

Of rules by themselves (``Rules.check``; ``shardax.check``, of rules that no array chose, the errors
and warnings; the path is ``()``):

* ``unknown-mesh-axis``: error; a rule names an axis that the mesh does not have.
* ``shadowed-rule``: warning; an earlier rule for the same name leaves a rule nothing to do.
* ``unused-mesh-axis``: info; no rule names a mesh axis.

Of a tree (``shardax.partition.tree.diagnostics``, ``layout`` and ``overrides``):

* ``unused-rule``: info; no array chose a rule. Warning if its name looks misspelt.
* ``large-replicated``: warning; every device holds a large array whole.
* ``no-rules``: error; a box has logical names, and there are no rules.
* ``axes-of-many``: error; axis names for a Variable of several arrays.
* ``reduced-state``: an optimizer's state is in the box of its parameter and has another shape (see
  ``tree.reduced_states``). Info if that is clear, warning if it is replicated for want of names.
* ``unused-override``: warning; no leaf was decided by a filter.
* ``override-conflict``: error; two paths of one Variable are decided by different filters.

Of a tree and its live arrays (``shardax.partition.tree.check``):

* ``other-mesh``: warning; a box has a mesh of its own, which is not the one given.
* ``state-larger-than-parameter``: warning; an optimizer's state is split into fewer parts than its
  parameter, so that it takes more of each device than the parameter does.
* ``misplaced``: warning; a live array lies on the mesh's devices otherwise than its names say.
* ``elsewhere``: warning; a live array was put on other devices than the mesh's, while others of the
  tree are on the mesh.
* ``gathered-stack`` and others that a Module gives by its method ``_layout_warnings``.

Of arrays that ``shard`` and ``unshard`` cannot place: ``layer-view``, ``abstract``, ``ref``,
``deleted``, ``traced`` and ``not-addressable``, which are errors.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from shardax._core.errors import first_of
from shardax._core.graph.paths import Path, format_path
from shardax.partition.assignment import (
    AxisAssignment,
    Names,
    PassedOver,
    Rule,
    SpecEntry,
    format_rule,
    strings,
)
from shardax.partition.errors import (
    Diagnostic,
    PartitionError,
    Severity,
    conflict_text,
    did_you_mean,
    unmapped_text,
)
from shardax.partition.mesh import AnyMesh, mesh_text


def diagnostic_at(path: Path, severity: Severity, code: str, text: str) -> Diagnostic:
    """Returns the ``Diagnostic`` of one array, whose message begins with the path."""
    return Diagnostic(severity, path, code, f"{format_path(path)}: {text}")


# --- one array: its names -------------------------------------------------------------------------


def malformed_names(path: Path, error: PartitionError) -> Diagnostic:
    """Returns the ``axis-names`` error of names that ``check_names`` refuses."""
    return diagnostic_at(path, "error", "axis-names", str(error))


def rank_mismatch(path: Path, names: Names, shape: Sequence[int]) -> Diagnostic:
    """Returns the ``rank-mismatch`` error of names."""
    text = (
        f"{len(names)} axis names {names} for an array of {len(shape)} dimensions, shape "
        f"{tuple(shape)}. Give one entry per dimension, None for a dimension without a name."
    )
    return diagnostic_at(path, "error", "rank-mismatch", text)


def unmapped_names_error(
    path: Path, assignment: AxisAssignment, names_with_rules: Sequence[str]
) -> Diagnostic:
    """Returns the ``unmapped-name`` error, under ``on_unmapped="error"``."""
    text = unmapped_text(assignment.unmapped, names_with_rules)
    return diagnostic_at(path, "error", "unmapped-name", text)


def names_without_any_rules(path: Path, unmapped: Sequence[str], mesh: AnyMesh) -> Diagnostic:
    """Returns the ``unmapped-name`` warning where there are no rules at all."""
    text = (
        f"nothing maps the axis names {', '.join(map(repr, unmapped))}: there are no rules, and "
        f"the mesh has the axes ({mesh_text(mesh.shape)}). Their dimensions are not split. Pass "
        "rules, rules=..., or put them in scope: with sx.axis_rules(rules): ..."
    )
    return diagnostic_at(path, "warning", "unmapped-name", text)


def unmapped_name_of_mesh_axis(path: Path, name: str) -> Diagnostic:
    """Returns the ``unmapped-name`` warning of a name that is an axis of the mesh."""
    text = (
        f"the axis name {name!r} is an axis of the mesh, but no rule mentions it, so its dimension "
        f"is not split. Add the rule ({name!r}, {name!r}), or ({name!r}, None)."
    )
    return diagnostic_at(path, "warning", "unmapped-name", text)


def misspelt_name(path: Path, name: str, similar: str) -> Diagnostic:
    """Returns the ``unmapped-name`` warning of a name similar to one with a rule."""
    text = (
        f"no rule mentions the axis name {name!r}, so its dimension is not split, but there are "
        f"rules for {similar!r}. If one of the two is misspelt, correct it; if not, say so with "
        f"the rule ({name!r}, None)."
    )
    return diagnostic_at(path, "warning", "unmapped-name", text)


def mesh_axis_conflict_error(path: Path, assignment: AxisAssignment) -> Diagnostic:
    """Returns the ``mesh-axis-conflict`` error, under ``on_conflict="error"``."""
    return diagnostic_at(path, "error", "mesh-axis-conflict", conflict_text(assignment))


def passed_over(path: Path, loss: PassedOver, later_rule: Rule | None) -> Diagnostic:
    """Returns the ``mesh-axis-conflict`` of one rule passed over.

    Args:
        path: The path of the array.
        loss: The rule, and the one that has its mesh axis.
        later_rule: The later rule that was chosen for the same name, or None.
    """
    name = loss.rule[0]
    text = (
        f"the rule {format_rule(loss.rule)} was passed over, because mesh axis {loss.mesh_axis!r} "
        f"already splits {loss.winner[0]!r} of the same array by {format_rule(loss.winner)}; "
    )
    if later_rule is not None:
        text += f"the later rule {format_rule(later_rule)} was used for {name!r}."
        return diagnostic_at(path, "info", "mesh-axis-conflict", text)

    text += (
        f"{name!r} is not split at all. If that is not meant, add a later rule for {name!r} with "
        f"another mesh axis; if it is, add ({name!r}, None)."
    )
    return diagnostic_at(path, "warning", "mesh-axis-conflict", text)


# --- one array: its spec --------------------------------------------------------------------------


def rank_mismatch_of_spec(
    path: Path, source: str, spec: PartitionSpec, shape: Sequence[int]
) -> Diagnostic:
    """Returns the ``rank-mismatch`` error of a spec given outright."""
    text = (
        f"{source}: {spec} has {len(spec)} entries for an array of {len(shape)} dimensions, shape "
        f"{tuple(shape)}. Give at most one entry per dimension."
    )
    return diagnostic_at(path, "error", "rank-mismatch", text)


def malformed_entry(
    path: Path, source: str, spec: Sequence[SpecEntry], entry: object
) -> Diagnostic:
    """Returns the ``axis-names`` error of an entry of a spec given outright."""
    text = (
        f"{source}: {PartitionSpec(*spec)} has the entry {entry!r}. An entry is a mesh axis, a "
        "tuple of mesh axes or None."
    )
    return diagnostic_at(path, "error", "axis-names", text)


def unconstrained(path: Path, index: int, source: str, severity: Severity) -> Diagnostic:
    """Returns the ``unconstrained`` diagnostic of a dimension."""
    text = (
        f"dimension {index} is UNCONSTRAINED{source}. The compiler chooses layouts inside programs "
        "only, so where it is placed it is not split. Name a mesh axis or None."
    )
    return diagnostic_at(path, severity, "unconstrained", text)


def unconstrained_over_explicit_axes(path: Path, names: Names) -> Diagnostic:
    """Returns the ``unconstrained`` error of a mesh where the compiler chooses nothing."""
    text = (
        f"a dimension of the names {names} is UNCONSTRAINED, left to the compiler, but over "
        "Explicit axes the compiler chooses nothing. Name a mesh axis or None, or give the mesh "
        "Auto axes."
    )
    return diagnostic_at(path, "error", "unconstrained", text)


def unknown_mesh_axis(
    path: Path, dimension: str, reason: str, axis: str, mesh: AnyMesh
) -> Diagnostic:
    """Returns the ``unknown-mesh-axis`` error of a dimension."""
    text = (
        f"{dimension} is to be split over mesh axis {axis!r} by {reason}; there is no mesh axis "
        f"{axis!r}, the mesh has the axes "
        f"({mesh_text(mesh.shape)}).{did_you_mean(axis, mesh.shape)} Correct that, or make the "
        "mesh with such an axis (of size 1 to switch it off)."
    )
    return diagnostic_at(path, "error", "unknown-mesh-axis", text)


def repeated_mesh_axis(path: Path, dimension: str, reason: str, axis: str) -> Diagnostic:
    """Returns the ``mesh-axis-conflict`` error of an axis in two entries of one spec."""
    text = (
        f"{dimension}, {reason}: mesh axis {axis!r} stands twice, but one array can use it only "
        "once. Give one of the dimensions another mesh axis or None."
    )
    return diagnostic_at(path, "error", "mesh-axis-conflict", text)


def indivisible(
    path: Path,
    dimension: str,
    reason: str,
    size: int,
    mesh_axes: Sequence[str],
    mesh: AnyMesh,
    parts: int,
    way_out: str,
) -> Diagnostic:
    """Returns the ``indivisible`` error of a dimension.

    Args:
        path: The path of the array.
        dimension: The dimension as text.
        reason: What splits it, as text.
        size: Its size.
        mesh_axes: The mesh axes that split it.
        mesh: The mesh.
        parts: The number of parts.
        way_out: What replicates the dimension, such as "rules to".
    """
    product = " * ".join(f"{axis} = {mesh.shape[axis]}" for axis in mesh_axes)
    smaller = size // parts * parts
    larger = smaller + parts
    better = f"{smaller} or {larger}" if smaller else f"{larger}"
    text = (
        f"{dimension} has size {size}, which is not divisible by {parts}, the number of parts it "
        f"is to be cut into (mesh axes {product}, {reason}). All devices must hold equal parts. "
        f"Make the size {better}, or split by fewer mesh axes, or not at all, by {way_out} None."
    )
    return diagnostic_at(path, "error", "indivisible", text)


def axis_type_order(
    path: Path,
    dimension: str,
    reason: str,
    mesh_axes: Sequence[str],
    better_order: Sequence[str],
    explicit_axes: Sequence[str],
) -> Diagnostic:
    """Returns the ``axis-type-order`` warning of a dimension."""
    explicit = ", ".join(map(repr, explicit_axes))
    text = (
        f"{dimension}, {reason}, is to be split over {tuple(mesh_axes)}, an Auto axis before an "
        f"Explicit one. It can be placed so, but in a program its type says {explicit} alone, and "
        "that comes first: a program that takes the array moves it at every call, and one that "
        f"writes it may leave it whole along the Auto axes. Split by {tuple(better_order)}, or "
        "make all axes of one type."
    )
    return diagnostic_at(path, "warning", "axis-type-order", text)


# --- rules ----------------------------------------------------------------------------------------


def rule_of_unknown_mesh_axis(rule: Rule, axis: str, mesh: AnyMesh) -> Diagnostic:
    """Returns the ``unknown-mesh-axis`` error of a rule."""
    text = (
        f"The rule {format_rule(rule)} names the mesh axis {axis!r}, but the mesh has the axes "
        f"({mesh_text(mesh.shape)}).{did_you_mean(axis, mesh.shape)} Correct or remove it, or make "
        f"the mesh with an axis {axis!r} (of size 1 to switch it off)."
    )
    return Diagnostic("error", (), "unknown-mesh-axis", text)


def shadowed_rule(rule: Rule, earlier_rule: Rule, why: str) -> Diagnostic:
    """Returns the ``shadowed-rule`` warning."""
    other_way = "" if earlier_rule == rule else f", or move it above {format_rule(earlier_rule)}"
    text = f"The rule {format_rule(rule)} is never used: {why}. Remove it{other_way}."
    return Diagnostic("warning", (), "shadowed-rule", text)


def unused_mesh_axis(axis: str, size: int) -> Diagnostic:
    """Returns the ``unused-mesh-axis`` info."""
    text = (
        f"No rule names the mesh axis {axis!r} of size {size}: every array is held whole along it."
    )
    return Diagnostic("info", (), "unused-mesh-axis", text)


def unused_rule(rule: Rule, paths: Sequence[Path]) -> Diagnostic:
    """Returns the ``unused-rule`` info of a rule whose name is an axis of some arrays."""
    text = (
        f"The rule {format_rule(rule)} was used for no array: an earlier rule served {rule[0]!r}, "
        f"or took its mesh axis, in each that has such an axis, {paths_text(paths)}."
    )
    return Diagnostic("info", (), "unused-rule", text)


def unused_name(rule: Rule) -> Diagnostic:
    """Returns the ``unused-rule`` info of a rule whose name is an axis of no array."""
    text = (
        f"The rule {format_rule(rule)} was used for no array: none that rules lay out has an axis "
        f"{rule[0]!r}. It still serves constraints inside programs."
    )
    return Diagnostic("info", (), "unused-rule", text)


def misspelt_rule(rule: Rule, similar: str, paths: Sequence[Path]) -> Diagnostic:
    """Returns the ``unused-rule`` warning of a rule with a name similar to one of an array."""
    text = (
        f"The rule {format_rule(rule)} was used for no array: none that rules lay out has an axis "
        f"{rule[0]!r}. Did you mean {similar!r}, which has no rule? It is an axis of "
        f"{paths_text(paths)}."
    )
    return Diagnostic("warning", (), "unused-rule", text)


def paths_text(paths: Sequence[Path]) -> str:
    """Returns the first of some paths, and the number of others."""
    return first_of([format_path(path) for path in paths], most=4)


# --- trees ----------------------------------------------------------------------------------------


def large_replicated(
    path: Path, names: Names, shape: tuple[int, ...], nbytes: int, total: int, devices: int
) -> Diagnostic:
    """Returns the ``large-replicated`` warning of an array.

    Args:
        path: The path of the array.
        names: Its names, or an empty tuple.
        shape: Its shape.
        nbytes: Its bytes.
        total: The bytes of all arrays of the tree.
        devices: The number of devices of the mesh.
    """
    listed = ", ".join(map(repr, strings(names)))
    fix = "Give its dimensions names, axes=(...), and one of them a rule"
    if listed:
        fix = (
            f"Map one of its axes ({listed}) to a mesh axis, or say that it is meant: rules to None"
        )
    text = (
        f"{nbytes / 2**20:.1f} MiB ({100 * nbytes / total:.0f} % of all arrays), shape {shape}, "
        f"are held whole by each of {devices} devices. {fix}."
    )
    return diagnostic_at(path, "warning", "large-replicated", text)


def no_rules(path: Path, axes: object, mesh: AnyMesh) -> Diagnostic:
    """Returns the ``no-rules`` error of logical names."""
    text = (
        f"has the logical names {axes}, and there are no rules to map them to mesh axes "
        f"({mesh_text(mesh.shape)}). Pass them, rules=rules, or put them in scope: with "
        "sx.axis_rules(rules): ..."
    )
    return diagnostic_at(path, "error", "no-rules", text)


def axes_of_many(path: Path, axes: object, count: int) -> Diagnostic:
    """Returns the ``axes-of-many`` error of a Variable of several arrays."""
    text = (
        f"axis names {axes} for a value of {count} arrays. Axis names say what the dimensions of "
        "one array are: give each array a Variable of its own, or give no axes, and the arrays are "
        "replicated."
    )
    return diagnostic_at(path, "error", "axes-of-many", text)


def reduced_state(
    path: Path,
    axes: tuple[object, ...],
    shape: tuple[int, ...],
    names: Names | None,
    owner_path: Path,
    owner_shape: tuple[int, ...],
    severity: Severity,
) -> Diagnostic:
    """Returns the ``reduced-state`` diagnostic of a box of an optimizer's state.

    Args:
        path: The path of the box.
        axes: The names in the box, which are those of the parameter.
        shape: The shape of the state.
        names: The names by which it is laid out, or None if it is replicated.
        owner_path: The path of the parameter.
        owner_shape: Its shape.
        severity: Info, or warning if it is replicated for want of names.
    """
    how = "it is replicated" if names is None else f"it is laid out by the names {names}"
    text = (
        f"its box has the names {axes} of the parameter {format_path(owner_path)}, shape "
        f"{owner_shape}, but shape {shape}; {how}. If that is no state of an optimizer, give one "
        "name per dimension of its own."
    )
    return diagnostic_at(path, severity, "reduced-state", text)


def override_conflict(path: Path, option: str, decisions: Sequence[str]) -> Diagnostic:
    """Returns the ``override-conflict`` error of a Variable with several paths.

    Args:
        path: The first of the paths.
        option: The option of the filters, such as "overrides".
        decisions: The value of each path, as text.
    """
    text = (
        f"one Variable, reached by several paths, has more than one place by {option}: "
        f"{'; '.join(decisions)}. Give it one, by a filter that matches all of its paths and "
        "stands first."
    )
    return diagnostic_at(path, "error", "override-conflict", text)


def unused_override(option: str, filter_text: str) -> Diagnostic:
    """Returns the ``unused-override`` warning of a filter."""
    text = (
        f"{option} for {filter_text} was used for no Variable: none matches, or an earlier filter "
        "takes all that do."
    )
    return Diagnostic("warning", (), "unused-override", text)


def other_mesh(path: Path, own_mesh: AnyMesh, mesh: AnyMesh) -> Diagnostic:
    """Returns the ``other-mesh`` warning of a box."""
    text = (
        f"has a mesh of its own, ({mesh_text(own_mesh.shape)}), but is laid out over the mesh "
        f"given, ({mesh_text(mesh.shape)}). Unboxed it goes to its own again. Make the box without "
        "a mesh."
    )
    return diagnostic_at(path, "warning", "other-mesh", text)


def state_larger_than_parameter(
    path: Path, shape: tuple[int, ...], parts: int, owner_path: Path, owner_parts: int
) -> Diagnostic:
    """Returns the ``state-larger-than-parameter`` warning of an optimizer's state."""
    text = (
        f"this state of an optimizer, shape {shape}, is cut into {parts} "
        f"part{'' if parts == 1 else 's'}, but its parameter {format_path(owner_path)} into "
        f"{owner_parts}, so each device holds {owner_parts // parts} times as much of the one as "
        "of the other. Give the state the axes of the parameter, and no override that splits it "
        "less."
    )
    return diagnostic_at(path, "warning", "state-larger-than-parameter", text)


# --- live arrays ----------------------------------------------------------------------------------


def elsewhere(path: Path, devices: str, others_on_mesh: int, mesh: AnyMesh) -> Diagnostic:
    """Returns the ``elsewhere`` warning of an array on other devices."""
    text = (
        f"is on {devices}, but {others_on_mesh} other arrays are on the mesh {dict(mesh.shape)}; a "
        "program that takes both fails. Place all of it: shard(model, mesh, rules)."
    )
    return diagnostic_at(path, "warning", "elsewhere", text)


def misplaced(path: Path, expected: str, actual: str) -> Diagnostic:
    """Returns the ``misplaced`` warning of an array on the devices of the mesh."""
    text = (
        f"its names say {expected}, but it lies as {actual}. Programs that expect it where its "
        "names say move it at every call. Place it, shard(model, mesh, rules), or correct its "
        "axes, v.set_metadata(axes=...)."
    )
    return diagnostic_at(path, "warning", "misplaced", text)


def layer_view(path: Path, stack_type: str) -> Diagnostic:
    """Returns the ``layer-view`` error of one layer of a stacked Variable."""
    text = (
        f"is a view of one layer of a stacked {stack_type}, and all layers are one array. Give the "
        "stack itself, shard(stack, mesh, rules), or a copy of the layer, sx.clone(stack[i])."
    )
    return diagnostic_at(path, "error", "layer-view", text)


def abstract_array(path: Path, array: jax.ShapeDtypeStruct) -> Diagnostic:
    """Returns the ``abstract`` error of an array without numbers."""
    text = (
        f"is abstract, {array.dtype}{list(array.shape)}, without numbers. Shard the model that "
        "this one was made from, or restore a checkpoint into it."
    )
    return diagnostic_at(path, "error", "abstract", text)


def array_in_ref(path: Path) -> Diagnostic:
    """Returns the ``ref`` error of an array in a ``jax.Ref``."""
    text = (
        "holds a jax.Ref, which stays where it is. Lay the model out first: "
        "sx.with_vars(sx.shard(model, mesh), ref=True)."
    )
    return diagnostic_at(path, "error", "ref", text)


def deleted_array(path: Path) -> Diagnostic:
    """Returns the ``deleted`` error of an array that was donated."""
    text = (
        "its array was deleted, usually by donation through another Variable. Copy before sharing: "
        "sx.update(copy, jax.tree.map(jnp.copy, sx.state(copy)))."
    )
    return diagnostic_at(path, "error", "deleted", text)


def traced_array(path: Path) -> Diagnostic:
    """Returns the ``traced`` error of ``unshard`` inside a program."""
    text = (
        "is being traced, and inside a program the compiler places arrays. Call unshard outside, "
        "or constrain the array: sx.constrain(x, (None,) * x.ndim)."
    )
    return diagnostic_at(path, "error", "traced", text)


def not_addressable(path: Path) -> Diagnostic:
    """Returns the ``not-addressable`` error of an array of several processes."""
    text = (
        "parts of it are on devices of other processes. Replicate it on every device first, "
        "shard(model, mesh, {}), in all processes; or take NumPy arrays of it, "
        "sx.distributed.gather(model)."
    )
    return diagnostic_at(path, "error", "not-addressable", text)
