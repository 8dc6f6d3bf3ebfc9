# SPDX-License-Identifier: Apache-2.0
"""Reports on layouts, and plans: ranked reports of one step.

A *layout* is rules and the sizes of mesh axes. Its *outcome* is ``"fits"``, ``"does not fit"`` (by
the compiler's verdict or by its memory), ``"rejected"`` (before any compile, with the reason), or
``"failed"`` (the compiler ended with an error or crashed). *Exact* figures follow from shapes and
shardings alone, *counted* ones from the compiled program; the others are estimates.

A layout is better if it fits; then if its expected time is lower, or the middle of its time band
where no time is expected (of one example, where batch sizes differ); then if it moves fewer bytes.
Layouts whose times cannot be told apart are *ties* (``shardax.plan.hardware.cost``), and the plan
says so rather than feign a difference.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardax import Rules
from shardax._files import write_whole
from shardax.extend import did_you_mean, mesh_axes_of, mesh_text
from shardax.hlo.collectives import Collective
from shardax.plan.errors import PlanFileError, PlanInputError
from shardax.plan.timing.step import StepParts
from shardax.plan.timing.workload import ExpectedTime


@dataclass(frozen=True)
class Layout:
    """Rules and the sizes of mesh axes, with a name.

    Attributes:
        name: For tables: of the rules, with the mesh if there are several meshes.
        rules: Pairs of a logical name and mesh axes (a name, several, or None), in order.
        mesh: Sizes of the mesh axes, in order.
        policies: The rules' ``on_conflict`` and ``on_unmapped``.
        parallel: Settings of ``sx.parallel``, pairs of name and value, under which it runs.
        optimizer_rules: Rules of the optimizer's state alone, before the others (ZeRO): those of
            ``overrides={sx.OptState: ...}``.
        optimizer_memory: Kind of memory of the optimizer's state, such as ``"pinned_host"``; "" for
            that of the devices.

    Example:
        >>> layout = Layout("tp", (("mlp", "model"),), (("data", 2), ("model", 4)))
        >>> layout.sizes, layout.as_rules
        ({'data': 2, 'model': 4}, Rules([('mlp', 'model')]))
    """

    name: str
    rules: tuple[tuple[str, Any], ...]
    mesh: tuple[tuple[str, int], ...]
    policies: tuple[Any, Any] = ("first", "replicate")
    parallel: tuple[tuple[str, Any], ...] = ()
    optimizer_rules: tuple[tuple[str, Any], ...] = ()
    optimizer_memory: str = ""

    def __post_init__(self) -> None:
        # Plans, rules files and keys of the cache hold the integers of Python.
        for name in ("mesh", "parallel"):
            pairs = tuple(
                (key, int(value) if isinstance(value, np.integer) else value)
                for key, value in getattr(self, name)
            )
            object.__setattr__(self, name, pairs)

    @property
    def as_rules(self) -> Rules:
        """The rules as ``sx.Rules``."""
        on_conflict, on_unmapped = self.policies
        return Rules(list(self.rules), on_conflict=on_conflict, on_unmapped=on_unmapped)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the layout beside rules and mesh, in words by name."""
        words = {name: str(value) for name, value in self.parallel}
        if self.optimizer_rules:
            pairs = [
                f"{name}={'+'.join(mesh_axes_of(axes))}" for name, axes in self.optimizer_rules
            ]
            words["optimizer"] = " ".join(pairs)
        if self.optimizer_memory:
            words["optimizer_memory"] = self.optimizer_memory
        return words

    @property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        """Mesh axes of each logical name."""
        return {name: mesh_axes_of(axes) for name, axes in self.rules}

    def ways(self, axes: Iterable[str]) -> int:
        """Returns over how many devices axes split together; those that the mesh lacks do not."""
        sizes = self.sizes
        return math.prod(sizes.get(axis, 1) for axis in axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes by name, in order."""
        return dict(self.mesh)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def mesh_text(self) -> str:
        """The mesh in words, such as ``data=8, model=2``."""
        return mesh_text(self.mesh) or "one device"


@dataclass(frozen=True)
class TimeBand:
    """Bounds of a step's time in seconds: a model, not a measurement.

    Attributes:
        lower: If all communication, memory traffic and arithmetic overlap.
        upper: If nothing does.
        compute: Arithmetic at the hardware's peak.
        memory: Traffic of the device's memory at its bandwidth.
        communication: Wire bytes at the bandwidth of the links that their mesh axes use.
        cross_slice: The part of ``communication`` between slices or hosts.
        binding: ``"compute"``, ``"memory"`` or ``"communication"``: the longest.

    Example:
        >>> band = TimeBand(0.5, 0.9, 0.5, 0.3, 0.1, 0.0, "compute")
        >>> band.upper / band.lower
        1.8
    """

    lower: float
    upper: float
    compute: float
    memory: float
    communication: float
    cross_slice: float
    binding: str

    @property
    def middle(self) -> float:
        """The middle of the band."""
        return (self.lower + self.upper) / 2


@dataclass(frozen=True)
class Provenance:
    """Sources of figures.

    Attributes:
        target: As it was asked for, such as ``"tpu:v5e:4x4"``.
        compiler: Its name and version, such as ``"libtpu 0.0.42.1"``.
        effort: ``"screen"`` (fast) or ``"full"``.
        tier: ``"target compiler"``, or ``"cpu estimate"``: the program of XLA's partitioner on
            CPU, with rewrites that stand for what the target's compiler would do.
        jax: Version of JAX.

    Example:
        >>> where = Provenance("tpu:v5e:4x4", "libtpu", "full", "target compiler", "0.10.2")
        >>> where.tier
        'target compiler'
    """

    target: str
    compiler: str
    effort: str
    tier: str
    jax: str


@dataclass(frozen=True)
class ArrayLayout:
    """The layout of one array of the arguments.

    Attributes:
        path: Where it is in the arguments, as text.
        kind: ``"parameters"``, ``"optimizer"``, ``"batch"`` or ``"other"``.
        shape: Of the whole array.
        dtype: Its name, such as ``"float32"``.
        names: Logical name of each dimension, or None.
        spec: Mesh axes of each dimension, the first varying slowest; empty: not split.

    Example:
        >>> kernel = ArrayLayout(
        ...     "up.kernel", "parameters", (8, 64), "float32", ("embed", "mlp"), ((), ("model",))
        ... )
        >>> dict(zip(kernel.names, kernel.spec))
        {'embed': (), 'mlp': ('model',)}
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str | None, ...]
    spec: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LayoutReport:
    """The planner's figures of one layout, by device and step.

    All bytes and operations are those of one device in one step.

    Attributes:
        layout: The layout.
        outcome: ``"fits"``, ``"does not fit"``, ``"rejected"`` or ``"failed"``.
        reason: Why it was rejected, failed or does not fit; the compiler's words where it has any.
        argument_bytes: By kind: ``"parameters"``, ``"optimizer"``, ``"batch"``, ``"other"``.
            Exact.
        peak_bytes: Most memory at a time, by the compiler; None if it did not compile.
        limit_bytes: Memory of a device.
        flops: Operations of matrix products. Counted.
        program_flops: The same of the whole program, unpartitioned, on all devices. Counted.
        hbm_bytes: Traffic of the device's memory. Estimate.
        collectives: All collectives. Counted.
        time: The time band; None if it did not compile.
        compile_seconds: How long the compiler took.
        warnings: What to know before trusting the figures or the layout.
        provenance: Where the figures come from; None if nothing was compiled.
        replicated: Paths of parameters that every device holds whole, largest first.
        examples: What a step does, in units by which steps of several batch sizes are compared: the
            time of one is what counts.
        arrays: The parameters and the batch, as the layout splits them; an optimizer's state and
            other arguments may be left out.
        bubble_share: Share of a pipeline's ticks in which a stage has nothing to do, 0 to 1; the
            largest of several pipelines, 0 without one. Part of ``flops``, and so of the time: idle
            stages compute what is thrown away.
        expected: Expected seconds with a band, by the model of ``plan.predict``; None on CPU, or if
            it did not compile.
        mfu: Operations of the model over those of the devices at their peak in bf16, in the
            expected time; recomputation does not count. 0 if it is not known.
        tokens_per_second_per_chip: Elements of the batch's first array of integers, over expected
            seconds and chips; 0 if there is none.
        parameters: Numbers in all parameters of the step, on all devices; 0 if it is not known.

    Example:
        >>> sums = Collective("all-reduce", "ar.1", "bf16", 800, 1400.0, 8, ("data",))
        >>> layout = Layout("dp", (("batch", "data"),), (("data", 8),))
        >>> report = LayoutReport(layout, "fits", peak_bytes=3, limit_bytes=10, collectives=(sums,))
        >>> report.headroom_bytes, report.wire_bytes()
        (7, {('data',): 1400.0})
    """

    layout: Layout
    outcome: str
    reason: str = ""
    argument_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    flops: float = 0.0
    program_flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    time: TimeBand | None = None
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    provenance: Provenance | None = None
    replicated: tuple[str, ...] = ()
    examples: float = 1.0
    arrays: tuple[ArrayLayout, ...] = ()
    bubble_share: float = 0.0
    expected: ExpectedTime | None = None
    mfu: float = 0.0
    tokens_per_second_per_chip: float = 0.0
    parameters: int = 0

    @property
    def compiled(self) -> bool:
        """Whether a compiler reported figures, or the memory it lacks."""
        return self.peak_bytes is not None or self.time is not None

    @property
    def seconds_per_example(self) -> float | None:
        """Expected time, or middle of the time band, per example."""
        if self.expected is not None:
            return self.expected.seconds / self.examples
        return None if self.time is None else self.time.middle / self.examples

    @property
    def replicated_compute(self) -> float:
        """Copies of each operation over all devices; 1: none repeated."""
        if not self.program_flops:
            return 1.0
        return self.flops * self.layout.devices / self.program_flops

    @property
    def headroom_bytes(self) -> int | None:
        """Free bytes of a device's memory, or negative."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return None
        return self.limit_bytes - self.peak_bytes

    def wire_bytes(self, by: str = "axes") -> dict[Any, float]:
        """Returns wire bytes by an attribute of the collectives, largest first.

        Args:
            by: ``"axes"``, ``"kind"``, ``"source"``, ``"dtype"``, ``"op_name"`` or
                ``"parameters"``.
        """
        totals: dict[Any, float] = {}
        for collective in self.collectives:
            key = getattr(collective, by)
            totals[key] = totals.get(key, 0.0) + collective.wire_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def total_wire_bytes(self) -> float:
        """Wire bytes of all collectives."""
        return sum(each.wire_bytes for each in self.collectives)

    @property
    def cross_slice_bytes(self) -> float:
        """Wire bytes of collectives between slices."""
        return sum(each.wire_bytes for each in self.collectives if each.crosses_slices)

    @property
    def asynchronous_share(self) -> float:
        """Share of asynchronous collectives in the wire bytes, 0 to 1."""
        total = self.total_wire_bytes
        if not total:
            return 0.0
        return sum(each.wire_bytes for each in self.collectives if each.asynchronous) / total


def to_data(report: LayoutReport) -> dict[str, Any]:
    """Returns a report as JSON data; ``from_data`` is its inverse."""
    # For other readers; null where nothing was compiled.
    total = None if report.time is None else report.total_wire_bytes
    return dataclasses.asdict(report) | {"total_wire_bytes": total}


def from_data(data: Mapping[str, object]) -> LayoutReport:
    """Returns the report written by ``to_data``, also after JSON."""
    fields = {name: _tuples(value) for name, value in data.items() if name != "total_wire_bytes"}
    fields["layout"] = Layout(**fields["layout"])
    fields["collectives"] = tuple(Collective(**entry) for entry in fields["collectives"])
    fields["arrays"] = tuple(ArrayLayout(**entry) for entry in fields.get("arrays", ()))
    if fields["time"]:
        fields["time"] = TimeBand(**fields["time"])
    if fields["provenance"]:
        fields["provenance"] = Provenance(**fields["provenance"])
    expected = fields.get("expected")
    if expected:
        parts = StepParts(**expected.pop("parts"))
        fields["expected"] = ExpectedTime(**expected, parts=parts)
    return LayoutReport(**fields)


def _tuples(value: object) -> Any:
    """Returns a value with tuples for the lists of JSON."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


_FORMAT = 1  # of the JSON files; raised when older ones can no longer be read

_OUTCOMES = ("fits", "does not fit", "rejected", "failed")


def rank(report: LayoutReport) -> tuple[Any, ...]:
    """Returns the sort key of a report, the best first."""
    seconds = report.seconds_per_example
    return (
        _OUTCOMES.index(report.outcome),
        math.inf if seconds is None else seconds,
        report.total_wire_bytes,
        report.peak_bytes or 0,
        report.layout.name,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Reports of layouts; made by ``compare`` and ``search``.

    Printed, it is a table. ``plan["name"]`` is a report by the name of its layout.

    Attributes:
        target: The hardware, as it was asked for.
        reports: One per layout, best first.
        notes: What else there is to know, such as how many candidates there were.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> found = LayoutReport(Layout("fsdp", (("embed", "data"),), (("data", 8),)), "fits")
        >>> plan = Plan("cpu:8", (found,))
        >>> plan.best().layout.name, plan["fsdp"] is found, len(plan)
        ('fsdp', True, 1)
    """

    target: str
    reports: tuple[LayoutReport, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reports", tuple(sorted(self.reports, key=rank)))
        object.__setattr__(self, "notes", tuple(self.notes))

    def __len__(self) -> int:
        return len(self.reports)

    def __iter__(self) -> Iterator[LayoutReport]:
        return iter(self.reports)

    def __getitem__(self, name: str) -> LayoutReport:
        for report in self.reports:
            if report.layout.name == name:
                return report
        names = [report.layout.name for report in self.reports]
        raise PlanInputError(
            f"The plan has no layout {name!r}; it has {', '.join(map(repr, names))}."
            f"{did_you_mean(name, names)}"
        )

    def best(self, fits: float = 1.0) -> LayoutReport:
        """Returns the best fitting layout.

        Args:
            fits: Share of a device's memory that it may need, to leave room for what the compiler
                does not see, such as fragmentation and buffers of communication.

        Raises:
            PlanInputError: If there is none; says what keeps the nearest from fitting.
        """
        for report in self.reports:
            peak, limit = report.peak_bytes or 0, report.limit_bytes
            if report.outcome == "fits" and (limit is None or peak <= fits * limit):
                return report

        if not self.reports:
            raise PlanInputError(
                f"No layout was compiled for {self.target}. {'; '.join(self.notes)}".strip()
            )

        start = f"None of {len(self)} layouts fits into {fits:g} of the memory of {self.target}. "
        measured = [r for r in self.reports if r.peak_bytes is not None and r.limit_bytes]
        if not measured:
            reasons = "; ".join(f"{r.layout.name!r}: {r.reason}" for r in self.reports[:3])
            raise PlanInputError(start + reasons)

        nearest = min(measured, key=lambda report: report.peak_bytes or 0)
        raise PlanInputError(
            f"{start}{nearest.layout.name!r} needs least: {nearest.peak_bytes:,} of "
            f"{nearest.limit_bytes:,} bytes. Use more devices, a smaller batch, or "
            "rematerialisation (remat)."
        )

    def __str__(self) -> str:
        from shardax.plan.report.table import render

        return render(self)

    __repr__ = __str__

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file for ``from_json``, in one step.

        Args:
            path: The file.
        """
        data = {
            "shardax plan": _FORMAT,
            "target": self.target,
            "notes": list(self.notes),
            "reports": [to_data(report) for report in self.reports],
        }
        write_whole(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Args:
            path: The file.

        Raises:
            PlanFileError: If there is no such file, or it holds no plan.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise PlanFileError(f"{path}: there is no such file.") from error
        except (OSError, ValueError, RecursionError) as error:
            raise PlanFileError(f"{path}: cannot be read as JSON: {error}.") from error

        written = data.get("shardax plan") if isinstance(data, dict) else None
        if written != _FORMAT:
            content = "no plan of shardax" if written is None else f"a plan of format {written}"
            raise PlanFileError(
                f"{path} holds {content}; this version reads format {_FORMAT}. Make it anew: "
                "shardax plan ... --json FILE."
            )

        try:
            reports = tuple(from_data(report_data) for report_data in data["reports"])
            return cls(data["target"], reports, tuple(data["notes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFileError(f"{path}: the plan in it is damaged: {error!r}.") from error

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page with tables, pictures and explanations.

        Args:
            path: The file.
        """
        from shardax.plan.report.html import page

        write_whole(path, page(self))
