# SPDX-License-Identifier: Apache-2.0
"""Layout checks: finding out before compiling what is wrong with a layout, and at which array.

A *record* is what a layout needs to know of one array: its path, axis names, shape and bytes. The
functions here turn records, a mesh and rules into ``PartitionSpec``s and findings (defined, with
their codes, in ``shardax.partition.findings``). They touch no devices and no models, so they serve
any tree, also an abstract one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AxisType, PartitionSpec

from shardax.core.errors import AxisNamesError, PartitionCheckError
from shardax.core.paths import Path, format_path
from shardax.partition.assignment import (
    UNCONSTRAINED,
    check_names,
    format_rule,
    mesh_axes_of,
    strings,
)
from shardax.partition.findings import NEAR, Finding
from shardax.partition.given_places import judge_place
from shardax.partition.judge import LaidOutArray, judge
from shardax.partition.mesh import AnyMesh
from shardax.partition.overrides import FREE, Choice
from shardax.partition.rule_findings import unknown_mesh_axes
from shardax.partition.rules import Rules

LARGE_BYTES = 2**20
"""An array is large above this many bytes ..."""
LARGE_FRACTION = 0.01
"""... if it also is more than this fraction of all arrays together."""


class ArrayRecord(NamedTuple):
    """What a layout needs to know of one array.

    Attributes:
        path: Where the array is.
        axes: One name per dimension (see ``logical_to_mesh_axes``), or None if it was given none.
        shape: The global shape.
        nbytes: The bytes of the global array.
        choice: What was said of it apart from the rules.
        own_rules: Rules of its own, which hold instead of the layout's, or None.
        own_mesh: A mesh of its own, likewise.
    """

    path: Path
    axes: Iterable[Any] | None
    shape: tuple[int, ...]
    nbytes: int
    choice: Choice = FREE
    own_rules: Rules | None = None
    own_mesh: AnyMesh | None = None


def spec_for(
    axes: Iterable[Any] | None,
    shape: Sequence[int],
    mesh: AnyMesh | None,
    rules: Rules,
    path: Path = (),
) -> tuple[PartitionSpec, list[Finding]]:
    """Lays out one array by its axis names, and says what is wrong with that.

    Args:
        axes: One name per dimension, or None for an array without names.
        shape: The global shape.
        mesh: The mesh, or None to apply the rules alone.
        rules: The rules.
        path: Where the array is, for messages.

    Returns:
        The ``PartitionSpec`` and the findings. Without names the array is replicated, ``P()``. With
        a mesh, mesh axes that it does not have are left out of the spec (each is an error among the
        findings), so that a ``NamedSharding`` can be made of it. Never ``UNCONSTRAINED``, which
        means nothing where an array is placed.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> rules = Rules({"embed": "data", "mlp": "model"})
        >>> spec, findings = spec_for(("embed", "mlp"), (64, 30), mesh, rules, ("up", "kernel"))
        >>> spec, [finding.code for finding in findings]
        (P('data', 'model'), ['indivisible'])
        >>> str(findings[0]).partition(",")[0]
        ".up.kernel: dimension 1 ('mlp') has size 30"
    """
    spec, findings, _ = _lay_out(ArrayRecord(path, axes, tuple(shape), 0), mesh, rules)
    return spec, findings


def specs_for(
    arrays: Iterable[ArrayRecord],
    mesh: AnyMesh | None,
    rules: Rules,
    *,
    placed: bool = True,
    large_bytes: int = LARGE_BYTES,
    large_fraction: float = LARGE_FRACTION,
) -> tuple[list[PartitionSpec], list[Finding]]:
    """Lays out many arrays, and says what is wrong with each of them and with the rules as a whole.

    Args:
        arrays: The arrays, each once.
        mesh: The mesh, or None to apply the rules alone.
        rules: The rules.
        placed: Whether the arrays are to be placed so. Otherwise the specs are for constraints
            inside programs, where ``UNCONSTRAINED`` means something and stays.
        large_bytes: An array that every device holds whole is reported above this many bytes ...
        large_fraction: ... if it also is more than this fraction of all arrays together.

    Returns:
        One ``PartitionSpec`` for each array, in order, and the findings: those of ``spec_for`` in
        order of arrays, then those about the rules, which have the path ``()``.

    Example:
        >>> arrays = [ArrayRecord(("up", "kernel"), ("embed", "mlp"), (8, 32), 1024)]
        >>> specs, findings = specs_for(arrays, None, Rules({"mlp": "model", "embd": None}))
        >>> specs, [finding.code for finding in findings]
        ([P(None, 'model')], ['unmapped-name', 'unused-rule'])
    """
    records = list(arrays)
    total = sum(record.nbytes for record in records)
    large = max(large_bytes, large_fraction * total)
    specs: list[PartitionSpec] = []
    findings: list[Finding] = []
    laid_out: list[LaidOutArray] = []
    for record in records:
        place, more = record.choice.place, record.choice.more_rules
        where = mesh if record.own_mesh is None else record.own_mesh
        if place is not None:
            spec, found = judge_place(place, record.path, record.shape, where, record.choice.source)
            specs.append(spec)
            findings.extend(found)
            continue
        its_rules = rules if record.own_rules is None else record.own_rules
        its_rules = its_rules if more is None else its_rules.override(more)
        spec, found, array = _lay_out(record, where, its_rules, placed)
        specs.append(spec)
        findings.extend(found)
        if array is not None and record.own_rules in (None, rules):
            laid_out.append(array)
        sound = not any(finding.severity == "error" for finding in found)
        if where is not None and sound and record.nbytes > large:
            findings.extend(_large_replicated(record, spec, where, array, total))
    findings.extend(_about_rules(laid_out, mesh, rules))
    return specs, findings


def raise_on_errors(findings: Iterable[Finding]) -> None:
    """Raises one error that lists all findings of severity ``"error"``; does nothing without any.

    Raises:
        PartitionCheckError: If there are errors among the findings.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise PartitionCheckError(errors)


def _lay_out(
    record: ArrayRecord, mesh: AnyMesh | None, rules: Rules, placed: bool = True
) -> tuple[PartitionSpec, list[Finding], LaidOutArray | None]:
    path, shape = record.path, record.shape
    if record.axes is None:
        return PartitionSpec(), [], None
    where = format_path(path)
    try:
        names = check_names(record.axes)
    except AxisNamesError as error:
        found = Finding("error", path, "axis-names", f"{where}: {error}")
        return PartitionSpec(), [found], None
    if len(names) != len(shape):
        text = (
            f"{where}: {len(names)} axis names {names} for an array of {len(shape)} dimensions, "
            f"shape {shape}. Give one entry per dimension, None for a dimension without a name."
        )
        return PartitionSpec(), [Finding("error", path, "rank-mismatch", text)], None
    array = LaidOutArray(path, names, shape, rules.assign(names), rules)
    entries: Sequence[Any] = array.assignment.entries
    if mesh is not None:
        entries = [_known(to, mesh.shape) for to in entries]
    findings = judge(array, mesh)
    left_open = not placed and (mesh is None or AxisType.Auto in mesh.axis_types)
    if not placed:
        findings = [finding for finding in findings if finding.code != "unconstrained"]
    if not left_open:
        if not placed and UNCONSTRAINED in entries:
            findings.append(_nobody_to_choose(array))
        entries = [None if to is UNCONSTRAINED else to for to in entries]
    return PartitionSpec(*entries), findings, array


def _nobody_to_choose(array: LaidOutArray) -> Finding:
    text = (
        f"a dimension of the names {array.names} is UNCONSTRAINED, left to the compiler, but over "
        "Explicit axes the compiler chooses nothing. Name a mesh axis or None, or give the mesh "
        "Auto axes."
    )
    return array.finding("error", "unconstrained", text)


def _known(target: Any, sizes: Mapping[str, int]) -> Any:
    """The target without mesh axes that the mesh does not have."""
    axes = tuple(axis for axis in mesh_axes_of(target) if axis in sizes)
    if len(axes) == len(mesh_axes_of(target)):
        return target
    return axes or None


def _large_replicated(
    record: ArrayRecord,
    spec: PartitionSpec,
    mesh: AnyMesh,
    array: LaidOutArray | None,
    total: int,
) -> Iterable[Finding]:
    parts = math.prod(mesh.shape[axis] for entry in spec for axis in mesh_axes_of(entry))
    if mesh.size == 1 or parts > 1 or (array is not None and _on_purpose(array)):
        return
    share = 100 * record.nbytes / total
    names = "" if array is None else ", ".join(map(repr, strings(array.names)))
    fix = "Give its dimensions names, axes=(...), and one of them a rule"
    if names:
        fix = (
            f"Map one of its axes ({names}) to a mesh axis, or say that it is meant: rules to None"
        )
    text = (
        f"{format_path(record.path)}: {record.nbytes / 2**20:.1f} MiB ({share:.0f} % of all "
        f"arrays), shape {tuple(record.shape)}, are held whole by each of {mesh.size} devices. "
        f"{fix}."
    )
    yield Finding("warning", record.path, "large-replicated", text)


def _on_purpose(array: LaidOutArray) -> bool:
    """Whether every dimension has a name that a rule maps to None."""
    chosen = array.assignment.chosen
    return bool(array.names) and all(
        isinstance(name, str) and name in chosen and array.rules.pairs[chosen[name]][1] is None
        for name in array.names
    )


def _about_rules(
    arrays: Sequence[LaidOutArray], mesh: AnyMesh | None, rules: Rules
) -> Iterable[Finding]:
    """Findings about rules that no array chose: misspelt, shadowed, or for a missing mesh axis."""
    own = [array for array in arrays if array.rules == rules]
    served = {position for array in own for position in array.assignment.chosen.values()}
    elsewhere = {
        array.rules.pairs[i]
        for array in arrays
        if array.rules != rules
        for i in array.assignment.chosen.values()
    }
    lost = {loss.rule for array in arrays for loss in array.assignment.passed_over}
    present = {name for array in arrays for name in strings(array.names)}
    for position, rule in enumerate(rules.pairs):
        if position in served or rule in elsewhere:
            continue
        unknown = [] if mesh is None else unknown_mesh_axes(rule, mesh)
        if unknown:
            yield from unknown
        else:
            yield _unused(rule, rules, present, rule in lost)


def _unused(rule: tuple[str, Any], rules: Rules, present: set[str], lost: bool) -> Finding:
    name = rule[0]
    start = f"The rule {format_rule(rule)} was used for no array: "
    if name in present:
        why = (
            "its mesh axes were always taken" if lost else f"an earlier rule always served {name!r}"
        )
        return Finding("info", (), "unused-rule", f"{start}{why}.")
    loose = sorted(present.difference(rules.names))
    near = difflib.get_close_matches(name, loose, n=1, cutoff=NEAR)
    if near:
        text = f"{start}none has an axis {name!r}. Did you mean {near[0]!r}, which has no rule?"
        return Finding("warning", (), "unused-rule", text)
    text = f"{start}none has an axis {name!r}. It still serves constraints inside programs."
    return Finding("info", (), "unused-rule", text)
