# SPDX-License-Identifier: Apache-2.0
"""Layout checks: finding out before compiling what is wrong with a layout, and at which array.

A *record* is what a layout needs to know of one array: its path, axis names, shape and bytes. The
functions here turn records, a mesh and rules into ``PartitionSpec``s and findings (defined, with
their codes, in ``shardax.partition.findings``). They touch no devices and no models, so they serve
any tree, also an abstract one.

Judging one array: what there is to say about what the rules make of its names.

The findings and their codes are defined in ``shardax.partition.findings``.

Given places: what is wrong with a spec or sharding that was said outright, not made by rules.

JAX would say some of this when the array is moved, one array at a time and without its path, when
others have been moved already. Here it is found before, by the same codes as for rules (see
``shardax.partition.findings``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardax._core.graph.paths import Path, format_path
from shardax.partition.errors import AxisNamesError, PartitionCheckError
from shardax.partition.findings import (
    NEAR,
    Finding,
    Severity,
    did_you_mean,
    format_mesh,
)
from shardax.partition.mesh import AnyMesh
from shardax.partition.overrides import FREE, Choice
from shardax.partition.rules import (
    UNCONSTRAINED,
    Assignment,
    Names,
    Rules,
    Target,
    check_names,
    explain_conflicts,
    explain_unmapped,
    format_rule,
    mesh_axes_of,
    strings,
    unknown_mesh_axes,
)

# --- Judge ---


class LaidOutArray(NamedTuple):
    """One array whose names are sound, with what the rules make of it; may hold errors still."""

    path: Path
    names: Names
    shape: tuple[int, ...]
    assignment: Assignment
    rules: Rules

    def finding(self, severity: Severity, code: str, text: str) -> Finding:
        return Finding(severity, self.path, code, f"{format_path(self.path)}: {text}")


def judge(array: LaidOutArray, mesh: AnyMesh | None) -> list[Finding]:
    """Returns all findings about one array.

    Args:
        array: The array, and what the rules make of it.
        mesh: The mesh, or None to judge the rules alone.
    """
    findings = [*_unmapped(array), *_conflicts(array), *_unconstrained(array)]
    if mesh is not None:
        sizes = dict(mesh.shape)
        findings += [
            *_unknown_mesh_axes(array, sizes),
            *_indivisible(array, sizes),
            *_axis_type_order(array, mesh),
        ]
    return findings


def _chosen_rules(array: LaidOutArray, dimension: int) -> str:
    """The rules behind one dimension, as text; of a box of mesh axes, whose names are the rules."""
    name = array.names[dimension]
    parts = name if isinstance(name, tuple) else (name,)
    chosen = array.assignment.chosen
    rules = [array.rules.pairs[chosen[part]] for part in parts if part in chosen]
    if all(rule[0] == rule[1] for rule in rules):
        return f"its own {'name' if len(rules) == 1 else 'names'}"
    return f"{'rule' if len(rules) == 1 else 'rules'} {', '.join(map(format_rule, rules))}"


def _unmapped(array: LaidOutArray) -> Iterable[Finding]:
    unmapped = array.assignment.unmapped
    if not unmapped:
        return
    if array.rules.on_unmapped == "error":
        text = explain_unmapped(array.assignment, array.rules)
        yield array.finding("error", "unmapped-name", text)
        return
    for name in unmapped:
        near = difflib.get_close_matches(name, array.rules.names, n=1, cutoff=NEAR)
        if near and near[0] not in array.names:
            text = (
                f"no rule mentions the axis name {name!r}, so its dimension is not split, but "
                f"there are rules for {near[0]!r}. If one of the two is misspelt, correct it; if "
                f"not, say so with the rule ({name!r}, None)."
            )
            yield array.finding("warning", "unmapped-name", text)


def _conflicts(array: LaidOutArray) -> Iterable[Finding]:
    assignment = array.assignment
    if not assignment.passed_over:
        return
    if array.rules.on_conflict == "error":
        yield array.finding("error", "mesh-axis-conflict", explain_conflicts(assignment))
        return
    for loss in assignment.passed_over:
        name = loss.rule[0]
        text = (
            f"the rule {format_rule(loss.rule)} was passed over, because mesh axis "
            f"{loss.mesh_axis!r} already splits {loss.winner[0]!r} of the same array by "
            f"{format_rule(loss.winner)}; "
        )
        if name in assignment.chosen:
            rescue = format_rule(array.rules.pairs[assignment.chosen[name]])
            text += f"the later rule {rescue} was used for {name!r}."
            yield array.finding("info", "mesh-axis-conflict", text)
        else:
            text += (
                f"{name!r} is not split at all. If that is not meant, add a later rule for "
                f"{name!r} with another mesh axis; if it is, add ({name!r}, None)."
            )
            yield array.finding("warning", "mesh-axis-conflict", text)


def _unconstrained(array: LaidOutArray) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        if target is UNCONSTRAINED:
            text = (
                f"dimension {dimension} is UNCONSTRAINED (names {array.names}). The "
                "compiler can choose a layout inside a program only, not where an array is "
                "placed, so the dimension is not split. Name a mesh axis or None."
            )
            yield array.finding("warning", "unconstrained", text)


def _unknown_mesh_axes(array: LaidOutArray, sizes: Mapping[str, int]) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        for axis in mesh_axes_of(target):
            if axis not in sizes:
                text = (
                    f"dimension {dimension} ({array.names[dimension]!r}) is to be split over mesh "
                    f"axis {axis!r} by {_chosen_rules(array, dimension)}, but the mesh has the "
                    f"axes {format_mesh(sizes)}.{did_you_mean(axis, sizes)} Correct that, or make "
                    f"the mesh with an axis {axis!r} (of size 1 to switch it off)."
                )
                yield array.finding("error", "unknown-mesh-axis", text)


def _indivisible(array: LaidOutArray, sizes: Mapping[str, int]) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        axes = [axis for axis in mesh_axes_of(target) if axis in sizes]
        parts = math.prod(sizes[axis] for axis in axes)
        size = array.shape[dimension]
        if size % parts:
            product = " * ".join(f"{axis} = {sizes[axis]}" for axis in axes)
            low, high = size // parts * parts, -(-size // parts) * parts
            better = f"{low} or {high}" if low else f"{high}"
            text = (
                f"dimension {dimension} ({array.names[dimension]!r}) has size {size}, which is not "
                f"divisible by {parts}, the number of parts it is to be cut into (mesh axes "
                f"{product}, {_chosen_rules(array, dimension)}). All devices must hold equal "
                f"parts. Make the size {better}, or split by fewer mesh axes, or not at all, by "
                "rules to None."
            )
            yield array.finding("error", "indivisible", text)


def _axis_type_order(array: LaidOutArray, mesh: AnyMesh) -> Iterable[Finding]:
    for dimension, target in enumerate(array.assignment.entries):
        text = explain_order(target, mesh)
        if text:
            where = f"dimension {dimension} ({array.names[dimension]!r})"
            rules = _chosen_rules(array, dimension)
            yield array.finding("warning", "axis-type-order", f"{where}, {rules}, {text}")


def explain_order(target: Target, mesh: AnyMesh) -> str:
    """Says what is wrong with the order of the mesh axes of one dimension; nothing if it is fine.

    Args:
        target: The dimension's mesh axes.
        mesh: The mesh, whose axes have types.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [axis for axis in mesh_axes_of(target) if mesh.shape.get(axis, 1) > 1]
    better = sorted(axes, key=lambda axis: types[axis] is not AxisType.Explicit)
    if axes == better:
        return ""
    explicit = ", ".join(repr(axis) for axis in axes if types[axis] is AxisType.Explicit)
    return (
        f"is to be split over {tuple(axes)}, an Auto axis before an Explicit one. It can be placed "
        f"so, but in a program its type says {explicit} alone, and that comes first: a program "
        "that takes the array moves it at every call, and one that writes it may leave it whole "
        f"along the Auto axes. Split by {tuple(better)}, or make all axes of one type."
    )


# --- Given places ---


def judge_place(
    place: PartitionSpec | NamedSharding,
    path: Path,
    shape: tuple[int, ...],
    mesh: AnyMesh | None,
    source: str,
) -> tuple[PartitionSpec, list[Finding]]:
    """Checks a place that was given for one array.

    Args:
        place: A spec over ``mesh``, or a sharding, which has a mesh of its own.
        path: Where the array is.
        shape: Its global shape.
        mesh: The mesh of the layout, or None to judge the spec alone.
        source: What gave the place, for messages.

    Returns:
        The spec, without mesh axes that cannot be used, and the findings.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> spec, findings = judge_place(PartitionSpec("data"), ("bias",), (3,), mesh, "override")
        >>> spec, [finding.code for finding in findings]
        (P('data',), ['indivisible'])
    """
    where = mesh if isinstance(place, PartitionSpec) else place.mesh
    spec = place if isinstance(place, PartitionSpec) else place.spec
    sizes = None if where is None else dict(where.shape)
    judge = _Judge(path, source)
    if len(spec) > len(shape):
        judge.add(
            "rank-mismatch",
            f"{spec} has {len(spec)} entries for an array of {len(shape)} dimensions, shape "
            f"{shape}. Give at most one entry per dimension",
        )
        return PartitionSpec(), judge.findings
    entries = list(judge.entries(spec, sizes))
    if where is not None:
        judge.divisible(entries, shape, dict(where.shape))
        judge.ordered(entries, where)
    return PartitionSpec(*entries), judge.findings


class _Judge:
    """Collects the findings about one array."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.source = source
        self.findings: list[Finding] = []

    def add(self, code: str, text: str, severity: Severity = "error") -> None:
        """Adds a finding."""
        message = f"{format_path(self.path)}: {self.source}: {text}."
        self.findings.append(Finding(severity, self.path, code, message))

    def entries(self, spec: PartitionSpec, sizes: Mapping[str, int] | None) -> Iterable[Any]:
        """Yields the usable part of each entry."""
        taken: set[str] = set()
        for dimension, entry in enumerate(spec):
            if entry is UNCONSTRAINED:
                self.add(
                    "unconstrained",
                    f"dimension {dimension} is UNCONSTRAINED, which means something inside a "
                    "program only. Name a mesh axis or None",
                )
                yield None
                continue
            if entry is not None and not all(isinstance(axis, str) for axis in _parts(entry)):
                self.add(
                    "axis-names",
                    f"{spec} has the entry {entry!r}. An entry is a mesh axis, a tuple of mesh "
                    "axes or None",
                )
                yield None
                continue
            axes = tuple(axis for axis in mesh_axes_of(entry) if self._usable(axis, taken, sizes))
            yield entry if axes == mesh_axes_of(entry) else axes or None

    def _usable(self, axis: str, taken: set[str], sizes: Mapping[str, int] | None) -> bool:
        if sizes is not None and axis not in sizes:
            self.add(
                "unknown-mesh-axis",
                f"there is no mesh axis {axis!r}; the mesh has the axes {format_mesh(sizes)}."
                f"{did_you_mean(axis, sizes)} Correct the override, or make the mesh with such an "
                "axis",
            )
            return False
        if axis in taken:
            self.add(
                "mesh-axis-conflict",
                f"mesh axis {axis!r} stands twice, but one array can use it only once. Give one of "
                "the dimensions another mesh axis or None",
            )
            return False
        taken.add(axis)
        return True

    def divisible(
        self, entries: Iterable[Any], shape: tuple[int, ...], sizes: Mapping[str, int]
    ) -> None:
        """Adds an error for each dimension that cannot be cut into equal parts."""
        for dimension, entry in enumerate(entries):
            parts = math.prod(sizes[axis] for axis in mesh_axes_of(entry))
            if shape[dimension] % parts:
                self.add(
                    "indivisible",
                    f"dimension {dimension} has size {shape[dimension]}, which is not divisible by "
                    f"{parts}, the number of parts it is to be cut into ({format_mesh(sizes)}). "
                    "Split it by fewer mesh axes or not at all",
                )

    def ordered(self, entries: Iterable[Any], mesh: AnyMesh) -> None:
        """Adds a warning for each dimension with an Auto axis before an Explicit one."""
        for dimension, entry in enumerate(entries):
            text = explain_order(entry, mesh)
            if text:
                text = f"dimension {dimension} {text.removesuffix('.')}"
                self.add("axis-type-order", text, "warning")


def _parts(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


# --- Check ---

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
