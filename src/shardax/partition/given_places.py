# SPDX-License-Identifier: Apache-2.0
"""Given places: what is wrong with a spec or sharding that was said outright, not made by rules.

JAX would say some of this when the array is moved, one array at a time and without its path, when
others have been moved already. Here it is found before, by the same codes as for rules (see
``shardax.partition.findings``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardax.core.paths import Path, format_path
from shardax.partition.assignment import UNCONSTRAINED, mesh_axes_of
from shardax.partition.findings import Finding, Severity, did_you_mean, format_mesh
from shardax.partition.judge import explain_order
from shardax.partition.mesh import AnyMesh


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
