# SPDX-License-Identifier: Apache-2.0
"""The errors of ``shardax.partition``, and ``Diagnostic``.

A *diagnostic* is one thing worth knowing about a layout: an ``"error"`` (the layout is impossible),
a ``"warning"`` (possible, but hardly as meant) or ``"info"``. Its ``code`` names the kind;
``shardax.partition.findings`` has one function for each code. ``raise_on_errors`` makes one
``PartitionCheckError`` of all diagnostics that are errors.

A ``PartitionError`` says that rules or names are malformed, before any layout, or that an array
cannot be constrained. The functions at the end make the errors of all files of the package; those
of boxes are in ``boxes.errors``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import PartitionSpec

from shardax._core.errors import ConcurrentWriteError, ShardaxError, first_of
from shardax._core.graph.paths import Path, format_path
from shardax._transforms.errors import NoMeshError, TransformError
from shardax.partition.assignment import AxisAssignment, Names, format_rule
from shardax.partition.mesh import AnyMesh, mesh_text

Severity = Literal["error", "warning", "info"]

NEAR = 0.85  # difflib ratio: "embd" is near "embed" (0.89), "kv_heads" is not near "heads" (0.77)


@dataclass(frozen=True)
class Diagnostic:
    """One thing worth knowing about a layout; ``str()`` gives the message.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        path: Path of the array; ``()`` for a diagnostic of the rules as a whole.
        code: Kind of diagnostic, such as ``"indivisible"``.
        message: What is wrong, where, why it matters and what to do.

    Example:
        >>> print(Diagnostic("error", ("up", "kernel"), "indivisible", ".up.kernel: size 30 ..."))
        .up.kernel: size 30 ...
    """

    severity: Severity
    path: Path
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a sentence with the most similar of the known names, or an empty text."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Returns the likely spelling of a misspelt name, or None."""
    similar = difflib.get_close_matches(name, names, 1, NEAR)
    if similar:
        return similar[0]

    # In a short name one exchange of letters is a large part of it: "mpl" for "mlp".
    for other in names:
        if other != name and sorted(other) == sorted(name):
            return other
    return None


class PartitionError(ShardaxError, ValueError, RuntimeError):
    """Rules, axis names, overrides or a constraint that cannot be followed."""


class PartitionCheckError(PartitionError):
    """A layout is impossible; lists every offending array.

    Attributes:
        findings: The diagnostics of severity ``"error"``, each with its path.
    """

    def __init__(self, findings: Iterable[Diagnostic]) -> None:
        self.findings: tuple[Diagnostic, ...] = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        problems = f"{count} problem{'' if count == 1 else 's'}"
        lines = "".join(f"\n  {finding}" for finding in self.findings)
        return f"The layout has {problems}; nothing was moved.{lines}"


def raise_on_errors(diagnostics: Iterable[Diagnostic]) -> None:
    """Raises one PartitionCheckError with all diagnostics of severity ``"error"``, if any."""
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    if errors:
        raise PartitionCheckError(errors)


# --- names and rules ------------------------------------------------------------------------------

_RULES_EXAMPLE = "Rules([('embed', None), ('mlp', 'model')])"


def names_in_one_string(names: str) -> PartitionError:
    """Returns the error of one string in place of a tuple of names."""
    return PartitionError(
        f"Axis names {names!r} are one string; give one name per dimension: ({names!r},)."
    )


def names_not_iterable(names: object) -> PartitionError:
    """Returns the error of something that is no sequence of names."""
    return PartitionError(
        f"Axis names are {names!r} of type {type(names).__name__}; give one entry per dimension, "
        "for instance ('embed', 'mlp')."
    )


def malformed_name(names: Names, position: int) -> PartitionError:
    """Returns the error of an entry that names no dimension."""
    entry = names[position]
    return PartitionError(
        f"Axis names {names}: entry {position} is {entry!r} of type {type(entry).__name__}. An "
        "entry is a string, None (unnamed), PartitionSpec.UNCONSTRAINED, or a tuple of strings for "
        "a merged dimension."
    )


def repeated_names(names: Names, repeated: Sequence[str]) -> PartitionError:
    """Returns the error of names that stand for several dimensions of one array."""
    listed = ", ".join(map(repr, repeated))
    return PartitionError(
        f"Axis names {names} hold {listed} more than once, but one array can use a mesh axis only "
        f"once. Name the dimensions apart, for instance {repeated[0] + '_in'!r} and "
        f"{repeated[0] + '_out'!r}, or None for one to replicate."
    )


def unmapped_names(
    names: Names, assignment: AxisAssignment, names_with_rules: Sequence[str]
) -> PartitionError:
    """Returns the error of names without a rule, under ``on_unmapped="error"``."""
    text = unmapped_text(assignment.unmapped, names_with_rules)
    return PartitionError(f"Axis names {names}: {text}")


def mesh_axis_conflict(names: Names, assignment: AxisAssignment) -> PartitionError:
    """Returns the error of names that want one mesh axis, under ``on_conflict="error"``."""
    return PartitionError(f"Axis names {names}: {conflict_text(assignment)}")


def unknown_policy(option: str, value: object, policies: Sequence[str]) -> PartitionError:
    """Returns the error of a policy of rules that does not exist."""
    expected = " or ".join(map(repr, policies))
    return PartitionError(f"{option}={value!r} must be {expected}.")


def no_pairs(pairs: object) -> PartitionError:
    """Returns the error of something that rules cannot be made of."""
    return PartitionError(
        f"Rules are made of pairs or a mapping, not of {pairs!r} ({type(pairs).__name__}). Write "
        f"for instance {_RULES_EXAMPLE}; Rules([]) has no rules."
    )


def no_pair(position: int, pair: object) -> PartitionError:
    """Returns the error of a rule that is no pair."""
    return PartitionError(
        f"Rule {position} is {pair!r}, not a pair of a logical name and a target. Write for "
        f"instance {_RULES_EXAMPLE}."
    )


def malformed_rule_name(position: int, pair: Sequence[object]) -> PartitionError:
    """Returns the error of a rule whose name is no string."""
    name = pair[0]
    return PartitionError(
        f"Rule {position} is {tuple(pair)!r}: the logical name {name!r} is of type "
        f"{type(name).__name__}; names are strings."
    )


def malformed_target(position: int, name: str, target: object) -> PartitionError:
    """Returns the error of a target that is no target."""
    return PartitionError(
        f"Rule {position} for {name!r} has the target {target!r} of type {type(target).__name__}. "
        "A target is a mesh axis, a tuple of mesh axes, None (replicate) or "
        "PartitionSpec.UNCONSTRAINED."
    )


def malformed_target_axis(position: int, name: str, mesh_axes: Sequence[object]) -> PartitionError:
    """Returns the error of a target of several mesh axes, one of which is no string."""
    return PartitionError(
        f"Rule {position} for {name!r} has the target {mesh_axes!r}: a tuple holds names of mesh "
        f"axes only. To offer a second choice, write a second rule for {name!r} after this one."
    )


def repeated_target_axis(position: int, name: str, mesh_axes: Sequence[str]) -> PartitionError:
    """Returns the error of a target that has a mesh axis twice."""
    return PartitionError(
        f"Rule {position} for {name!r} has the target {mesh_axes!r}, which holds a mesh axis "
        "twice; one array can use a mesh axis only once. Write "
        f"{tuple(dict.fromkeys(mesh_axes))!r}."
    )


def conflict_text(assignment: AxisAssignment) -> str:
    """Returns the text about every rule passed over, under ``on_conflict="error"``."""
    conflicts = [
        f"mesh axis {loss.mesh_axis!r} is wanted by {loss.rule[0]!r} through the rule "
        f"{format_rule(loss.rule)}, but {loss.winner[0]!r} already has it through "
        f"{format_rule(loss.winner)}"
        for loss in assignment.passed_over
    ]
    return (
        f"{'; '.join(conflicts)}. One array can use a mesh axis only once. Give one of the names "
        "another mesh axis or None, or let the earlier rule win with on_conflict='first'."
    )


def unmapped_text(unmapped: Sequence[str], names_with_rules: Sequence[str]) -> str:
    """Returns the text about names without a rule, under ``on_unmapped="error"``."""
    suggestions = [
        f"{similar!r} for {name!r}"
        for name in unmapped
        for similar in difflib.get_close_matches(name, names_with_rules, n=1)
    ]
    hint = f" Did you mean {' and '.join(suggestions)}?" if suggestions else ""

    context = "there are no rules"
    if names_with_rules:
        context = f"names with rules: {', '.join(map(repr, names_with_rules))}"

    return (
        f"no rule mentions {', '.join(map(repr, unmapped))} ({context}).{hint} Add the rule "
        f"({unmapped[0]!r}, None) to replicate on purpose, or use on_unmapped='replicate'."
    )


def immutable_rules(name: str) -> AttributeError:
    """Returns the error of an attribute of rules that is set or deleted."""
    return AttributeError(
        f"Rules are immutable: cannot change {name!r}. Make new ones with rules.replace(...), "
        f"rules.extend(...) or rules.override(...)."
    )


def validation_without_mesh() -> NoMeshError:
    """Returns the error of rules that are validated against no mesh."""
    return NoMeshError(
        "Rules are validated against a mesh: none was given and none is in scope. Pass one, "
        "rules.validate(mesh); rules.check() checks rules alone."
    )


def decorated_generator(scope: str, function: object) -> PartitionError:
    """Returns the error of a scope that decorates a generator or coroutine function."""
    return PartitionError(
        f"{scope} cannot decorate {function!r}: a generator or coroutine runs after the call that "
        f"made it. Write `with {scope}(...)` inside, around code that neither yields nor awaits."
    )


def batch_without_rules(names: Names, name: str, mesh: AnyMesh) -> PartitionError:
    """Returns the error of a batch with a name that is no mesh axis, without rules."""
    return PartitionError(
        f"batch_sharding({names}): no rules were given, none are in scope, and {name!r} is no axis "
        f"of the mesh ({mesh_text(mesh.shape)}). Pass rules=rules, or give None in the place of a "
        "name."
    )


# --- overrides ------------------------------------------------------------------------------------

_OVERRIDES = "overrides={sx.OptState: {'embed': 'data'}, sx.PathContains('bias'): PartitionSpec()}"


def no_overrides(option: str, value: object) -> PartitionError:
    """Returns the error of an option that is neither a mapping from filters nor pairs."""
    return PartitionError(
        f"{option}={value!r} of type {type(value).__name__} is no mapping from filters and no list "
        f"of pairs. Write for instance {_OVERRIDES}."
    )


def no_rules_in_override(override: str, error: PartitionError) -> PartitionError:
    """Returns the error of an override whose mapping or list is no rules."""
    return PartitionError(f"{override} has no rules in it: {error}")


def no_place_in_override(override: str, value: object) -> PartitionError:
    """Returns the error of an override that says no place."""
    return PartitionError(
        f"{override}: {value!r} of type {type(value).__name__} is no place. Give a PartitionSpec "
        "over the mesh, a NamedSharding, rules (a mapping, a list of pairs, or Rules) that come "
        f"before the layout's own, or None. For instance {_OVERRIDES}."
    )


def no_memory_kind(override: str, value: object) -> PartitionError:
    """Returns the error of a memory kind that is no string."""
    return PartitionError(
        f"{override}: {value!r} of type {type(value).__name__} is no memory kind; give a string "
        "such as 'pinned_host' or 'device'."
    )


def unknown_memory_kind(override: str, error: ValueError) -> PartitionError:
    """Returns the error of a memory that the mesh's devices do not have."""
    return PartitionError(f"{override}: the mesh's devices have no such memory. {error}")


# --- placement ------------------------------------------------------------------------------------


def written_while_placed(paths: Sequence[Path]) -> ConcurrentWriteError:
    """Returns the error of Variables that another thread wrote while they were moved."""
    listed = first_of([format_path(path) for path in paths])
    return ConcurrentWriteError(
        f"Another thread wrote {listed} while the model was laid out. They hold what it wrote, "
        "where it put it; all other Variables are at their new place. Let threads take turns by a "
        "lock, and lay the model out again: sx.shard(model, mesh, rules)."
    )


def device_refused(
    paths: Sequence[Path], done: int, total: int, error: Exception
) -> PartitionError:
    """Returns the error of a device without room.

    Args:
        paths: The Variables that it refused.
        done: How many values are at their new place.
        total: How many have one.
        error: The error of JAX.
    """
    return PartitionError(
        f"{first_of([format_path(path) for path in paths])}: a device refused: {error}\n{done} of "
        f"{total} values are at their new place and the others where they were; all are valid. "
        "Make room (a State or another model may hold the old arrays), split by more mesh axes, or "
        "use another memory_kind, and call again: what is in place is not moved a second time."
    )


def not_a_device(device: object) -> TransformError:
    """Returns the error of an argument of ``unshard`` that is no device."""
    return TransformError(
        f"unshard gathers on one device, but device={device!r} is of type {type(device).__name__}. "
        "Give a device, such as jax.devices()[0], or None for the default one. To lay the model "
        "out over another mesh use shard(model, mesh, rules)."
    )


def initialise_in_program() -> TransformError:
    """Returns the error of ``initialise`` inside a program."""
    return TransformError(
        "initialise places arrays and cannot be called inside a program. Call it outside; or, "
        "inside, call the initializer itself and unbox(result), which constrains the values."
    )


# --- constraints ----------------------------------------------------------------------------------

_TO_IGNORE = "To run without a mesh or rules too, say constrain(..., on_no_mesh='ignore')."


def _constraint_text(array: jax.Array, names: Names) -> str:
    """Returns the beginning of the text about a constraint."""
    return f"Cannot constrain an array {array.dtype}{list(array.shape)} by {names}:"


def constraint_of_no_array(value: object, names: Names) -> PartitionError:
    """Returns the error of a constraint of something that is no array."""
    return PartitionError(
        f"Cannot constrain a value of type {type(value).__name__} by {names}: it is no array. "
        "The arrays of a tree are constrained one by one, each by names of its own; shapes "
        "without numbers get their shardings from sx.abstract(tree, mesh, rules)."
    )


def constraint_of_other_rank(array: jax.Array, names: Names) -> PartitionError:
    """Returns the error of a constraint by more or fewer names than dimensions."""
    return PartitionError(
        f"{_constraint_text(array, names)} there are {len(names)} axis names for {array.ndim} "
        "dimensions. Give one entry per dimension, None for a dimension without a name."
    )


def constraint_without_mesh(array: jax.Array, names: Names) -> NoMeshError:
    """Returns the error of a constraint where no mesh is known."""
    return NoMeshError(
        f"{_constraint_text(array, names)} no mesh was given, none is in scope, and the array is "
        "not laid out over one. Put one in scope, with jax.set_mesh(mesh): ..., or pass mesh=mesh. "
        f"{_TO_IGNORE}"
    )


def constraint_without_devices(array: jax.Array, names: Names, mesh: AnyMesh) -> TransformError:
    """Returns the error of a constraint over a mesh that JAX would not follow."""
    return TransformError(
        f"{_constraint_text(array, names)} {mesh} has no devices, and nothing says which the "
        "program is for, so JAX would drop the constraint. Call the compiled function under "
        "jax.set_mesh(mesh), not use_abstract_mesh; or pass mesh=mesh; or give it arrays that "
        f"are laid out over one, or jax.ShapeDtypeStruct(..., sharding=...). {_TO_IGNORE}"
    )


def constraint_without_rules(
    array: jax.Array, names: Names, name: str, mesh: AnyMesh
) -> PartitionError:
    """Returns the error of a constraint with a name that is no mesh axis, without rules."""
    return PartitionError(
        f"{_constraint_text(array, names)} no rules were given, none are in scope, and {name!r} is "
        f"no axis of the mesh ({mesh_text(mesh.shape)}). Put rules in scope, with "
        f"sx.axis_rules(rules): ..., or pass rules=rules. {_TO_IGNORE}"
    )


def impossible_constraint(
    array: jax.Array, names: Names, diagnostics: Iterable[Diagnostic]
) -> PartitionError:
    """Returns the error of a constraint that the array cannot have."""
    # A message begins with the path of its array, and this one has none.
    root = format_path(()) + ": "
    texts = [str(each).removeprefix(root) for each in diagnostics if each.severity == "error"]
    return PartitionError("\n  ".join([_constraint_text(array, names), *texts]))


def refused_constraint(
    array: jax.Array, names: Names, spec: PartitionSpec, mesh: AnyMesh, error: Exception
) -> PartitionError:
    """Returns the error of a constraint that JAX refuses."""
    return PartitionError(
        f"{_constraint_text(array, names)} JAX refuses {spec} over {mesh} here: "
        f"{error}\nUnder vmap, a mesh axis that splits the mapped dimension (by an Explicit "
        "type or spmd_axis_name) is taken: give the names inside the mapped function other "
        "mesh axes, or None, by rules of their own."
    )


def constraint_of_other_mesh(mesh: AnyMesh, scope_mesh: AnyMesh) -> TransformError:
    """Returns the error of a mesh other than that of the ``shard_map`` around."""
    return TransformError(
        f"mesh={mesh} differs from {scope_mesh}, the mesh of the shard_map around this code. Pass "
        "the same mesh, or none to take the one in scope."
    )


def constraint_over_manual_axes(mesh: AnyMesh) -> TransformError:
    """Returns the error of a mesh with Manual axes outside of ``shard_map``."""
    return TransformError(
        f"{mesh} has axes of type Manual, which are for the inside of jax.shard_map, and this code "
        "is not inside. Make the mesh with axes of type Auto or Explicit."
    )


def constraint_outside_of_program(mesh: AnyMesh) -> TransformError:
    """Returns the error of a concrete array and a mesh without devices."""
    return TransformError(
        f"Outside of a compiled function an array cannot be laid out over {mesh}, which has no "
        "devices. Pass the mesh itself, or call constrain inside a jitted function."
    )
