# SPDX-License-Identifier: Apache-2.0
"""Columns for comparing layouts, on a terminal and on the HTML page.

A column's *label* says what its figures are worth: ``exact`` (from shapes and shardings alone),
``compiler`` (reported by the target's own compiler), ``counted`` (from its program), ``estimate``
(a model, or the CPU's program in place of the target's). Its *unit* is chosen by the largest figure
in it, so that toy and large models are both readable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardax.plan.records import LayoutReport, TimeBand

Units = Sequence[tuple[str, float]]

BINARY = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
DECIMAL = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
OPERATIONS = (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15))
TIMES = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))

_OUTCOMES = {"fits": "yes", "does not fit": "no"}
_MEANINGS = {
    "layout": "The rules' name; the mesh's sizes are beside it.",
    "mesh": "Sizes of the mesh axes.",
    "fits": "Whether the step fits into a device's memory.",
    "peak": "Most memory that a device needs at a time.",
    "free": "Memory of a device that stays free; negative if the step does not fit.",
    "args": "What a device holds between steps: parameters, optimizer's state, batch.",
    "flops": "Operations of matrix products and convolutions on one device.",
    "replicated": "How often the devices together do each operation; 1 is without repetition.",
    "hbm": "Memory traffic: bytes that a device reads from its memory and writes to it.",
    "cross": "Wire bytes between slices or hosts.",
    "collectives": "Exchanges between devices in the program; one in a loop counts once.",
    "async": "Share of the wire bytes that can move while other work goes on.",
    "compute": "Arithmetic at the hardware's peak.",
    "memory": "Memory traffic at the memory's bandwidth.",
    "communication": "Wire bytes at the bandwidth of the links that their mesh axes use.",
    "band": "A step's time if everything overlaps, to a step's time if nothing does.",
    "example": "The middle of the band, of one example; layouts are ranked by it.",
    "bound": "What takes longest.",
    "compile": "How long the compiler took.",
}


@dataclass(frozen=True)
class Column:
    """One column of a comparison."""

    key: str  # unique in a table
    head: str
    unit: str
    label: str
    meaning: str  # a sentence
    text: Callable[[LayoutReport], str]
    value: Callable[[LayoutReport], float | str | None]  # to sort by; None comes last
    right: bool = True  # alignment


def scale(values: Iterable[float | None], units: Units) -> tuple[str, float]:
    """Returns a readable unit for the largest value, and its size."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    fitting = [unit for unit in units if unit[1] <= largest]
    return fitting[-1] if fitting else units[0]


def figure(value: float) -> str:
    """Formats a number with about three significant digits."""
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:.{digits}f}"


def quantity(value: float, units: Units) -> str:
    """Formats a number with the unit that suits it."""
    unit, size = scale([value], units)
    return f"{figure(value / size)} {unit}"


def axes_text(axes: Sequence[str]) -> str:
    """Names the mesh axes of a collective."""
    return "+".join(axes) or "other"


def band_text(band: TimeBand, size: float = 1.0) -> str:
    """Formats a time band in units of ``size`` seconds."""
    return f"{figure(band.lower / size)} - {figure(band.upper / size)}"


def columns_of(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    """Returns the columns for the reports of one plan."""
    number = functools.partial(_number, reports)
    measured = measured_label(reports)
    seconds = scale([report.time.upper for report in reports if report.time], TIMES)
    wire = [scale([total for r in reports for total in r.wire_bytes().values()], DECIMAL)]

    def along(axes: tuple[str, ...]) -> Column:
        name = axes_text(axes)
        sent = _compiled(lambda report: report.wire_bytes().get(axes, 0.0))
        meaning = f"Bytes that a device sends along {name}."
        return number(f"wire-{name}", "counted", sent, wire, f"wire {name}", meaning=meaning)

    def part(key: str, head: str = "") -> Column:
        return number(key, "estimate", lambda r: getattr(r.time, key, None), [seconds], head)

    band = Column(
        "band",
        "time of a step",
        seconds[0],
        "estimate",
        _MEANINGS["band"],
        lambda report: band_text(report.time, seconds[1]) if report.time else "-",
        lambda report: report.time.middle if report.time else None,
    )
    # What steps of several batch sizes are compared by.
    example = number("example", "estimate", lambda r: r.seconds_per_example, TIMES, "per example")
    cross = _compiled(lambda r: r.cross_slice_bytes)
    work = _compiled(lambda r: r.flops)
    repeat = _compiled(lambda r: r.replicated_compute if r.program_flops else None)
    collectives = _compiled(lambda r: len(r.collectives))
    share = _compiled(lambda r: 100 * r.asynchronous_share if r.collectives else None)
    return (
        _words("layout", lambda r: r.layout.name),
        _mesh(reports),
        _words("fits", lambda r: _OUTCOMES.get(r.outcome, r.outcome)),
        number("peak", measured, lambda r: r.peak_bytes, BINARY),
        number("free", measured, lambda r: r.headroom_bytes, BINARY),
        number("args", "exact", _argument_bytes, BINARY),
        band,
        *([example] if any(report.examples != 1 for report in reports) else []),
        _words("bound", lambda r: r.time.binding if r.time else "-", "estimate", "bound by"),
        *map(along, wire_axes(reports)),
        *(
            [number("cross", "counted", cross, wire, "cross-slice")]
            if any(report.cross_slice_bytes for report in reports)
            else []
        ),
        number("collectives", "counted", collectives, [("", 1.0)], form="{:.0f}".format),
        number("async", "counted", share, [("%", 1.0)]),
        number("flops", "counted", work, OPERATIONS, "work"),
        number("replicated", "counted", repeat, [("x", 1.0)], "repeat", "{:.2f}".format),
        number("hbm", "estimate", _compiled(lambda r: r.hbm_bytes), DECIMAL, "traffic"),
        part("compute"),
        part("memory"),
        part("communication", "comm."),
        number("compile", "", lambda r: r.compile_seconds or None, [("s", 1.0)], "compiling"),
    )


def _words(
    key: str, text: Callable[[LayoutReport], str], label: str = "", head: str = ""
) -> Column:
    return Column(key, head or key, "", label, _MEANINGS[key], text, text, right=False)


def _number(
    reports: Sequence[LayoutReport],
    key: str,
    label: str,
    value: Callable[[LayoutReport], float | None],
    units: Units,
    head: str = "",
    form: Callable[[float], str] = figure,
    meaning: str = "",
) -> Column:
    unit, size = scale([value(report) for report in reports], units)

    def text(report: LayoutReport) -> str:
        found = value(report)
        return "-" if found is None else form(found / size)

    return Column(key, head or key, unit, label, meaning or _MEANINGS[key], text, value)


def _compiled(value: Callable[[LayoutReport], float | None]) -> Callable[..., float | None]:
    """A figure of the program; None for a layout without one."""
    return lambda report: value(report) if report.time else None


def _argument_bytes(report: LayoutReport) -> float | None:
    return sum(report.argument_bytes.values()) if report.argument_bytes else None


def _mesh(reports: Sequence[LayoutReport]) -> Column:
    """The meshes; axes that all of them have are the title."""
    axes = {tuple(axis for axis, _ in report.layout.mesh) for report in reports}
    names = next(iter(axes)) if len(axes) == 1 else ()

    def text(report: LayoutReport) -> str:
        layout = report.layout
        return " x ".join(str(size) for _, size in layout.mesh) if names else layout.mesh_text

    head = " x ".join(names) or "mesh"
    return Column("mesh", head, "", "", _MEANINGS["mesh"], text, text, right=False)


def wire_axes(reports: Iterable[LayoutReport]) -> tuple[tuple[str, ...], ...]:
    """Returns the sets of mesh axes that bytes travel, single ones first."""
    order: dict[str, int] = {}
    found: set[tuple[str, ...]] = set()
    for report in reports:
        for axis, _ in report.layout.mesh:
            order.setdefault(axis, len(order))
        found.update(report.wire_bytes())
    places = {axes: tuple(order.get(axis, len(order)) for axis in axes) for axes in found}
    return tuple(sorted(found, key=lambda axes: (len(axes) or 99, places[axes], axes)))


def measured_label(reports: Iterable[LayoutReport]) -> str:
    """Returns the label of figures that compilers report."""
    tiers = {report.provenance.tier for report in reports if report.provenance}
    return "compiler" if tiers <= {"target compiler"} else "estimate"
