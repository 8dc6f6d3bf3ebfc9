# SPDX-License-Identifier: Apache-2.0
"""The columns in which layouts are compared, in the terminal and on the page.

A column has a *label*, which says what its figures are worth: ``exact`` (from shapes and shardings
alone), ``compiler`` (by the target's own compiler), ``counted`` (from its program), ``estimate``
(a model, or the CPU's program standing in for the target's). Its *unit* is chosen for the largest
figure in it, so that a toy and a large model can both be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardax.plan.records import LayoutReport, TimeBand

Value = float | str | None

BINARY = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
DECIMAL = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
OPERATIONS = (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15))
TIMES = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))

_OUTCOMES = {"fits": "yes", "does not fit": "no"}
_MEANINGS = {
    "layout": "The rules' name; the mesh's sizes are beside it.",
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
    """One column.

    Attributes:
        key: A short name, unique in a table.
        head: Its title.
        unit: Of its figures, or "".
        label: What the figures are worth (see the module docstring), or "".
        meaning: The same as a sentence.
        text: A report's cell.
        value: What to sort by; None comes last.
        right: Whether it is aligned to the right.
    """

    key: str
    head: str
    unit: str
    label: str
    meaning: str
    text: Callable[[LayoutReport], str]
    value: Callable[[LayoutReport], Value]
    right: bool = True


def scale(values: Iterable[float | None], units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Returns the unit in which the largest value can be read, and its size.

    Args:
        values: The values; None for those that are not known.
        units: Names and sizes, the smallest first.

    Example:
        >>> scale([None, 12.0, 3e9], BINARY)
        ('GiB', 1073741824.0)
    """
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    fitting = [unit for unit in units if unit[1] <= largest]
    return fitting[-1] if fitting else units[0]


def figure(value: float) -> str:
    """Formats a figure with three digits that count.

    Example:
        >>> figure(0.0), figure(0.01234), figure(9.1), figure(115.37), figure(12345.6)
        ('0', '0.012', '9.10', '115', '12346')
    """
    if value == 0:
        return "0"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:.{digits}f}"


def quantity(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Formats a figure with the unit that suits it.

    Example:
        >>> quantity(1536, BINARY), quantity(0.0021, TIMES)
        ('1.50 KiB', '2.10 ms')
    """
    unit, size = scale([value], units)
    return f"{figure(value / size)} {unit}"


def axes_text(axes: Sequence[str]) -> str:
    """Names the mesh axes of a collective.

    Example:
        >>> axes_text(("data",)), axes_text(("data", "model")), axes_text(())
        ('data', 'data+model', 'other')
    """
    return "+".join(axes) or "other"


def columns_of(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    """Returns the columns for some reports: with one for each set of mesh axes that bytes travel.

    Args:
        reports: Those of one plan.

    Example:
        >>> from shardax.plan import Layout, LayoutReport
        >>> report = LayoutReport(Layout("dp", (), (("data", 8),)), "fits", peak_bytes=3 * 2**20)
        >>> [(c.head, c.unit, c.text(report)) for c in columns_of([report])][:4]
        [('layout', '', 'dp'), ('data', '', '8'), ('fits', '', 'yes'), ('peak', 'MiB', '3.00')]
    """
    return (
        _words("layout", "layout", lambda report: report.layout.name),
        _mesh(reports),
        _words("fits", "fits", lambda report: _OUTCOMES.get(report.outcome, report.outcome)),
        *_memory(reports),
        *_times(reports),
        *_wire(reports),
        *_work(reports),
        *_parts(reports),
    )


def _words(key: str, head: str, text: Callable[[LayoutReport], str], label: str = "") -> Column:
    return Column(key, head, "", label, _MEANINGS[key], text, text, right=False)


def _mesh(reports: Sequence[LayoutReport]) -> Column:
    """Sizes only, if all meshes have the same axes, which then are the title."""
    axes = {tuple(axis for axis, _ in report.layout.mesh) for report in reports}
    meaning = "Sizes of the mesh axes."
    if len(axes) == 1 and (names := next(iter(axes))):

        def sizes(report: LayoutReport) -> str:
            return " x ".join(str(size) for _, size in report.layout.mesh)

        return Column("mesh", " x ".join(names), "", "", meaning, sizes, sizes, right=False)

    def text(report: LayoutReport) -> str:
        return report.layout.mesh_text

    return Column("mesh", "mesh", "", "", meaning, text, text, right=False)


def _figures(
    key: str,
    label: str,
    reports: Sequence[LayoutReport],
    value: Callable[[LayoutReport], float | None],
    units: Sequence[tuple[str, float]],
    head: str = "",
    meaning: str = "",
) -> Column:
    unit, size = scale([value(report) for report in reports], units)

    def text(report: LayoutReport) -> str:
        found = value(report)
        return "-" if found is None else figure(found / size)

    return Column(key, head or key, unit, label, meaning or _MEANINGS[key], text, value)


def _memory(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    label = measured_label(reports)

    def arguments(report: LayoutReport) -> float | None:
        return sum(report.argument_bytes.values()) if report.argument_bytes else None

    return (
        _figures("peak", label, reports, lambda report: report.peak_bytes, BINARY),
        _figures("free", label, reports, lambda report: report.headroom_bytes, BINARY),
        _figures("args", "exact", reports, arguments, BINARY),
    )


def _work(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    def factor(report: LayoutReport) -> float | None:
        return report.replicated_compute if report.time and report.program_flops else None

    def factor_text(report: LayoutReport) -> str:
        found = factor(report)
        return "-" if found is None else f"{found:.2f}"

    return (
        _figures("flops", "counted", reports, _if_compiled("flops"), OPERATIONS, "work"),
        Column(
            "replicated", "repeat", "x", "counted", _MEANINGS["replicated"], factor_text, factor
        ),
        _figures("hbm", "estimate", reports, _if_compiled("hbm_bytes"), DECIMAL, "traffic"),
    )


def _wire(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    axes = wire_axes(reports)
    unit = scale([total for r in reports for total in r.wire_bytes().values()], DECIMAL)
    columns = [
        _figures(
            f"wire-{axes_text(each)}",
            "counted",
            reports,
            _along(each),
            [unit],
            f"wire {axes_text(each)}",
            f"Bytes that a device sends along {axes_text(each)}.",
        )
        for each in axes
    ]
    if any(report.cross_slice_bytes for report in reports):
        cross = _if_compiled("cross_slice_bytes")
        columns.append(_figures("cross", "counted", reports, cross, [unit], "cross-slice"))

    def count(report: LayoutReport) -> float | None:
        return len(report.collectives) if report.time else None

    def count_text(report: LayoutReport) -> str:
        return str(len(report.collectives)) if report.time else "-"

    def share(report: LayoutReport) -> float | None:
        return 100 * report.asynchronous_share if report.time and report.collectives else None

    percent = [("%", 1.0)]
    return (
        *columns,
        Column(
            "collectives", "collectives", "", "counted", _MEANINGS["collectives"], count_text, count
        ),
        _figures("async", "counted", reports, share, percent),
    )


def _times(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    unit = _time_unit(reports)

    def band(report: LayoutReport) -> str:
        return band_text(report.time, unit[1]) if report.time else "-"

    def middle(report: LayoutReport) -> float | None:
        return report.time.middle if report.time else None

    def bound(report: LayoutReport) -> str:
        return report.time.binding if report.time else "-"

    return (
        Column("band", "time of a step", unit[0], "estimate", _MEANINGS["band"], band, middle),
        *_per_example(reports),
        Column("bound", "bound by", "", "estimate", _MEANINGS["bound"], bound, bound, right=False),
    )


def _per_example(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    """What steps of several batch sizes are compared by."""

    def time(report: LayoutReport) -> float | None:
        return report.seconds_per_example

    if all(report.examples == 1 for report in reports):
        return ()
    return (_figures("example", "estimate", reports, time, TIMES, "per example"),)


def _parts(reports: Sequence[LayoutReport]) -> tuple[Column, ...]:
    """What the time band is made of, and what it took to know it."""
    unit = _time_unit(reports)

    def seconds(report: LayoutReport) -> float | None:
        return report.compile_seconds or None

    return (
        *(
            _figures(key, "estimate", reports, _time(key), [unit], head)
            for key, head in (("compute", ""), ("memory", ""), ("communication", "comm."))
        ),
        _figures("compile", "", reports, seconds, [("s", 1.0)], "compiling"),
    )


def _time_unit(reports: Sequence[LayoutReport]) -> tuple[str, float]:
    return scale([report.time.upper for report in reports if report.time], TIMES)


def band_text(band: TimeBand, size: float = 1.0) -> str:
    """Writes a time band in units of ``size`` seconds.

    Example:
        >>> band_text(TimeBand(0.5, 0.9, 0.5, 0.2, 0.2, 0.0, "compute"))
        '0.50 - 0.90'
    """
    return f"{figure(band.lower / size)} - {figure(band.upper / size)}"


def wire_axes(reports: Iterable[LayoutReport]) -> tuple[tuple[str, ...], ...]:
    """Returns the sets of mesh axes that bytes travel, single ones first, in the meshes' order."""
    order: dict[str, int] = {}
    found: set[tuple[str, ...]] = set()
    for report in reports:
        for axis, _ in report.layout.mesh:
            order.setdefault(axis, len(order))
        found.update(report.wire_bytes())
    places = {axes: tuple(order.get(axis, len(order)) for axis in axes) for axes in found}
    return tuple(sorted(found, key=lambda axes: (len(axes) or 99, places[axes], axes)))


def measured_label(reports: Iterable[LayoutReport]) -> str:
    """Returns the label of what compilers report: that of the target, or an estimate."""
    tiers = {report.provenance.tier for report in reports if report.provenance}
    return "compiler" if tiers <= {"target compiler"} else "estimate"


def _if_compiled(attribute: str) -> Callable[[LayoutReport], float | None]:
    return lambda report: getattr(report, attribute) if report.time else None


def _along(axes: tuple[str, ...]) -> Callable[[LayoutReport], float | None]:
    return lambda report: report.wire_bytes().get(axes, 0.0) if report.time else None


def _time(key: str) -> Callable[[LayoutReport], float | None]:
    return lambda report: getattr(report.time, key) if report.time else None
