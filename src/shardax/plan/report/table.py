# SPDX-License-Identifier: Apache-2.0
"""Plans as text: tables as wide as the screen, with notes below.

A column's *label* says what its figures are worth: ``exact`` (from shapes and shardings alone),
``compiler`` (reported by the target's own compiler), ``counted`` (from its program), ``estimate``
(a model, or the CPU's program in place of the target's). Its *unit* is chosen by the largest figure
in it, so that toy and large models are both readable. Columns that do not fit beside the others go
into another table below, whose rows begin with the same number and name.

``render`` is the text of ``str(plan)``; ``show`` prints it, in colour on a terminal. A *note* is a
text about some layouts. Texts that differ in numbers alone are one note, in the words of the first:
twelve layouts that fail to divide a dimension are one line.
"""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardax._tables import Column, DisplayTable, TableCell
from shardax._terminal import has_rich
from shardax.extend import join_first
from shardax.plan.errors import HardwareError, PlanFileError, TargetError
from shardax.plan.hardware.cost import ties
from shardax.plan.records import LayoutReport, TimeBand
from shardax.plan.timing.published import published_steps

if TYPE_CHECKING:
    from shardax.plan.records import Plan


Units = Sequence[tuple[str, float]]
FigureOf = Callable[[LayoutReport], float | None]

BINARY = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
DECIMAL = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
OPERATIONS = (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15))
TIMES = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))

_OUTCOMES = {"fits": "yes", "does not fit": "no"}
_MEANINGS = {
    "layout": "The rules' name; the mesh's sizes are beside it.",
    "settings": "How it runs beside the rules: of sx.parallel, and where the optimizer's state is.",
    "mesh": "Sizes of the mesh axes.",
    "fits": "Whether the step fits into a device's memory, with what it donates.",
    "peak": "Most memory that a device needs at a time.",
    "free": "Memory of a device that stays free; negative if the step does not fit.",
    "args": "What a device holds between steps: parameters, optimizer's state, batch.",
    "flops": "Operations of matrix products and convolutions on one device.",
    "replicated": "How often the devices together do each operation; 1 is without repetition.",
    "hbm": "Memory traffic: bytes that a device reads from its memory and writes to it.",
    "wire": "Bytes that a device sends, along all mesh axes.",
    "cross": "Wire bytes between slices or hosts.",
    "collectives": "Exchanges between devices in the program; one in a loop counts once.",
    "async": "Share of the wire bytes that can move while other work goes on.",
    "compute": "Arithmetic at the hardware's peak.",
    "memory": "Memory traffic at the memory's bandwidth.",
    "communication": "Wire bytes at the bandwidth of the links that their mesh axes use.",
    "band": "A step's time if everything overlaps, to a step's time if nothing does.",
    "example": "Time of one example, expected or the middle of the band; layouts are ranked by it.",
    "expected": "Expected time, by the model that plan.predict has; layouts are ranked by it.",
    "range": "What nine measured steps of ten lie in, around the expected time.",
    "mfu": "Operations of the model over those at the peak; recomputation does not count.",
    "tokens": "Tokens of the batch in a second, by chip.",
    "waits": "What takes longest of the expected time beside the device's own kernels.",
    "bound": "What takes longest.",
    "compile": "How long the compiler took.",
    "bubble": "Share of a pipeline's ticks in which a stage has nothing to do.",
}


@dataclass(frozen=True, kw_only=True)
class FigureColumn(Column):
    """One column of a comparison, with the text and the value of each layout."""

    key: str  # unique in a table
    text: Callable[[LayoutReport], str]
    value: Callable[[LayoutReport], float | str | None]  # to sort by; None comes last
    right: bool = True

    def cell(self, report: LayoutReport) -> TableCell:
        """Returns the cell of a layout."""
        text = self.text(report)
        # The style of the page colours the outcomes.
        return TableCell(text, sort_key=self.value(report), kind=text if self.key == "fits" else "")


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
    """Formats a number with a suitable unit."""
    unit, size = scale([value], units)
    return f"{figure(value / size)} {unit}"


def peak_text(report: LayoutReport) -> str:
    """Formats the most memory that a device needs, beside what it has; "" if it is not known."""
    sizes = (report.peak_bytes, report.limit_bytes)
    return " of ".join(quantity(size, BINARY) for size in sizes if size is not None)


def axes_text(axes: Sequence[str]) -> str:
    """Names the mesh axes of a collective."""
    return "+".join(axes) or "other"


def band_text(band: TimeBand, size: float = 1.0) -> str:
    """Formats a time band in units of ``size`` seconds."""
    return f"{figure(band.lower / size)} - {figure(band.upper / size)}"


def columns_of(reports: Sequence[LayoutReport]) -> tuple[FigureColumn, ...]:
    """Returns the columns for the reports of one plan."""
    number = functools.partial(_number, reports)

    # Times have one unit, and so have bytes on the wire. Of traced steps there is an expected time
    # alone.
    longest = [report.time.upper for report in reports if report.time]
    longest += [report.expected.high for report in reports if report.expected]
    seconds = scale(longest, TIMES)
    wire = [scale([report.total_wire_bytes for report in reports], DECIMAL)]

    def along(axes: tuple[str, ...]) -> FigureColumn:
        name = axes_text(axes)
        return number(
            f"wire-{name}",
            "counted",
            lambda r: r.wire_bytes().get(axes, 0.0),
            wire,
            f"wire {name}",
            meaning=f"Bytes that a device sends along {name}.",
        )

    def part(key: str, head: str = "") -> FigureColumn:
        return number(key, "estimate", lambda r: getattr(r.time, key, None), [seconds], head)

    columns = [_words("layout", lambda r: r.layout.name), _mesh(reports)]
    if any(report.layout.settings for report in reports):
        columns.append(_words("settings", _settings_text))

    measured = measured_label(reports)
    columns += [
        _words("fits", lambda r: _OUTCOMES.get(r.outcome, r.outcome)),
        number("peak", measured, lambda r: r.peak_bytes, BINARY),
        number("free", measured, lambda r: r.headroom_bytes, BINARY),
        number("args", "exact", _argument_bytes, BINARY),
        *_expected_columns(reports, seconds),
        number(
            "band",
            "estimate",
            lambda r: r.time.middle if r.time else None,
            [seconds],
            "time of a step",
            text=lambda r: band_text(r.time, seconds[1]) if r.time else "-",
        ),
    ]
    if any(report.examples != 1 for report in reports):
        # What steps of several batch sizes are compared by.
        columns.append(
            number("example", "estimate", lambda r: r.seconds_per_example, TIMES, "per example")
        )
    columns.append(
        _words("bound", lambda r: r.time.binding if r.time else "-", "estimate", "bound by")
    )

    axes = wire_axes(reports)
    if len(axes) > 1:
        columns.append(number("wire", "counted", lambda r: r.total_wire_bytes, wire))
    columns += map(along, axes)
    if any(report.cross_slice_bytes for report in reports):
        columns.append(
            number("cross", "counted", lambda r: r.cross_slice_bytes, wire, "cross-slice")
        )

    columns += [
        number(
            "collectives",
            "counted",
            lambda r: len(r.collectives),
            [("", 1.0)],
            form="{:.0f}".format,
        ),
        number(
            "async",
            "counted",
            lambda r: 100 * r.asynchronous_share if r.collectives else None,
            [("%", 1.0)],
        ),
        number("flops", "counted", lambda r: r.flops, OPERATIONS, "work"),
        number(
            "replicated",
            "counted",
            lambda r: r.replicated_compute if r.program_flops else None,
            [("x", 1.0)],
            "repeat",
            form="{:.2f}".format,
        ),
    ]
    if any(report.bubble_share for report in reports):
        idle = _compiled(lambda r: 100 * r.bubble_share)
        columns.append(number("bubble", "exact", idle, [("%", 1.0)]))
    columns += [
        number("hbm", "estimate", _compiled(lambda r: r.hbm_bytes), DECIMAL, "traffic"),
        part("compute"),
        part("memory"),
        part("communication", "comm."),
        number("compile", "", lambda r: r.compile_seconds or None, [("s", 1.0)], "compiling"),
    ]

    # A plan that compiled nothing has no columns of what a compiler says.
    if reports and not any(report.compiled for report in reports):
        columns = [
            column
            for column in columns
            if column.key in _ALWAYS or any(column.text(report) != "-" for report in reports)
        ]
    return tuple(columns)


_ALWAYS = ("layout", "mesh", "fits")


def _expected_columns(
    reports: Sequence[LayoutReport], seconds: tuple[str, float]
) -> Sequence[FigureColumn]:
    """Returns the columns of expected times, if there are any."""
    if not any(report.expected for report in reports):
        return []
    number = functools.partial(_number, reports)

    return [
        number(
            "expected", "estimate", lambda r: r.expected.seconds if r.expected else None, [seconds]
        ),
        number(
            "range",
            "estimate",
            lambda r: r.expected.high if r.expected else None,
            [seconds],
            text=lambda r: _range_text(r, seconds[1]),
        ),
        number("mfu", "estimate", lambda r: 100 * r.mfu or None, [("%", 1.0)], "MFU"),
        number(
            "tokens", "estimate", lambda r: r.tokens_per_second_per_chip or None, [("/s/chip", 1)]
        ),
        _words(
            "waits", lambda r: r.expected.waits_for if r.expected else "-", "estimate", "waits for"
        ),
    ]


def _words(
    key: str, text: Callable[[LayoutReport], str], label: str = "", head: str = ""
) -> FigureColumn:
    return FigureColumn(
        key=key,
        head=head or key,
        label=label,
        meaning=_MEANINGS[key],
        text=text,
        value=text,
        right=False,
    )


def _number(
    reports: Sequence[LayoutReport],
    key: str,
    label: str,
    value: FigureOf,
    units: Units,
    head: str = "",
    form: Callable[[float], str] = figure,
    meaning: str = "",
    text: Callable[[LayoutReport], str] | None = None,
) -> FigureColumn:
    if label == "counted":  # in a program, of which not every layout has one
        value = _compiled(value)
    unit, size = scale([value(report) for report in reports], units)

    def text_of(report: LayoutReport) -> str:
        amount = value(report)
        return "-" if amount is None else form(amount / size)

    return FigureColumn(
        key=key,
        head=head or key,
        unit=unit,
        label=label,
        meaning=meaning or _MEANINGS[key],
        text=text or text_of,
        value=value,
    )


def _compiled(value: FigureOf) -> FigureOf:
    """A figure of the program; None for a layout without one."""
    return lambda report: value(report) if report.time else None


def _settings_text(report: LayoutReport) -> str:
    pairs = (f"{name} {value}" for name, value in report.layout.settings.items())
    return ", ".join(pairs) or "-"


def _range_text(report: LayoutReport, size: float) -> str:
    expected = report.expected
    return f"{figure(expected.low / size)} - {figure(expected.high / size)}" if expected else "-"


def _argument_bytes(report: LayoutReport) -> float | None:
    return sum(report.argument_bytes.values()) if report.argument_bytes else None


def _mesh(reports: Sequence[LayoutReport]) -> FigureColumn:
    """The meshes; common axes are the title."""
    axes = {tuple(axis for axis, _ in report.layout.mesh) for report in reports}
    names = next(iter(axes)) if len(axes) == 1 else ()

    def text(report: LayoutReport) -> str:
        layout = report.layout
        return " x ".join(str(size) for _, size in layout.mesh) if names else layout.mesh_text

    return _words("mesh", text, head=" x ".join(names) or "mesh")


def wire_axes(reports: Iterable[LayoutReport]) -> tuple[tuple[str, ...], ...]:
    """Returns the sets of mesh axes with traffic, single ones first."""
    order: dict[str, int] = {}
    all_axes: set[tuple[str, ...]] = set()
    for report in reports:
        for axis, _ in report.layout.mesh:
            order.setdefault(axis, len(order))
        all_axes.update(report.wire_bytes())
    places = {axes: tuple(order.get(axis, len(order)) for axis in axes) for axes in all_axes}
    return tuple(sorted(all_axes, key=lambda axes: (len(axes) or 99, places[axes], axes)))


def measured_label(reports: Iterable[LayoutReport]) -> str:
    """Returns the label of figures reported by compilers."""
    tiers = {report.provenance.tier for report in reports if report.provenance}
    return "compiler" if tiers <= {"target compiler"} else "estimate"


LABELS = {
    "exact": "from shapes and shardings alone",
    "compiler": "measured by the target's own compiler",
    "counted": "counted in the program that the compiler made",
    "estimate": "a model, or the CPU's program standing in for the target's; no measurement",
}
"""What each label of a column means."""

_WIDTH = 110  # characters of a line, where no terminal says another number
_TOP = 20  # rows of a table, where no one says another number
_NARROWEST = 40
_SHORTEST_NAME = 16
_GAP = 2
_NAMED = 3
_STYLES = {"yes": "green", "no": "red", "rejected": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Note:
    """A text about some layouts, by their names in the plan's order, or about the plan."""

    text: str
    layouts: tuple[str, ...] = ()

    def source(self) -> str:
        """Counts and names the layouts, in parentheses; "" for none."""
        count = f"{len(self.layouts)}: " if len(self.layouts) > 1 else ""
        return f"({count}{join_first(self.layouts, most=_NAMED)})" if self.layouts else ""


def outcome_line(target: str, reports: Sequence[LayoutReport]) -> str:
    """Counts the layouts of a plan by outcome."""
    outcomes = [report.outcome for report in reports]
    fits = outcomes.count("fits")
    words = {
        "does not fit": "too large",
        "rejected": "rejected before compiling",
        "failed": "failed to compile",
    }
    more_counts = [
        f"{outcomes.count(outcome)} {word}"
        for outcome, word in words.items()
        if outcome in outcomes
    ]
    start = f"{target}: {fits} of {len(reports)} layouts {'fits' if fits == 1 else 'fit'}"
    return "; ".join([start, ", ".join(more_counts)]) if more_counts else start


def tied_with_best(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Names the layouts with the best time, as far as known."""
    fitting = [report for report in reports if report.outcome == "fits" and report.time]
    for group in ties(fitting):
        if group[0] is fitting[0]:
            return tuple(report.layout.name for report in group)
    return ()


def notes_of(plan: Plan, left_out: int = 0) -> list[tuple[str, tuple[Note, ...]]]:
    """Returns texts below a plan's figures by title: reasons, warnings, notes, published steps.

    Args:
        plan: The plan.
        left_out: How many of its compiled layouts have no row.
    """
    titles = {
        "does not fit": "Does not fit",
        "rejected": "Rejected before compiling",
        "failed": "Failed to compile",
    }
    notes_by_title: dict[str, tuple[Note, ...]] = {}
    for outcome, title in titles.items():
        reports = [report for report in plan.reports if report.outcome == outcome]
        notes_by_title[title] = _joined((report.reason.strip(), report) for report in reports)
    notes_by_title["Warnings"] = _joined(
        (text, report) for report in plan.reports for text in report.warnings
    )

    more = [f"{left_out} more were compiled and are not shown"] if left_out > 0 else []
    notes_by_title["Notes"] = tuple(Note(text) for text in (*more, *plan.notes))
    published = tuple(map(Note, published_lines(plan)))
    notes_by_title["Published steps of models and hardware like these"] = published
    return [(title, notes) for title, notes in notes_by_title.items() if notes]


def _joined(texts: Iterable[tuple[str, LayoutReport]]) -> tuple[Note, ...]:
    """Joins texts equal but for numbers."""
    groups: dict[str, tuple[str, dict[str, None]]] = {}
    for text, report in texts:
        if text:
            alike = re.sub(r"\d[\d,.]*", "#", text)
            _, names = groups.setdefault(alike, (text, {}))
            names[report.layout.name] = None
    notes = [Note(text, tuple(names)) for text, names in groups.values()]
    return tuple(sorted(notes, key=lambda note: -len(note.layouts)))


def provenance_lines(reports: Iterable[LayoutReport]) -> tuple[str, ...]:
    """Names the compilers behind the figures, one line each."""
    names_by_line: dict[str, list[str]] = {}
    for report in reports:
        where = report.provenance
        if where is None:
            continue
        line = f"{where.compiler} for {where.target}, {where.effort} effort, JAX {where.jax}"
        if where.tier != "target compiler":
            line += f" ({where.tier}: the CPU's program in place of the target's)"
        if where.effort == "screen":
            line += "; fast compiles show up to a fifth less memory than full ones"
        names_by_line.setdefault(line, []).append(report.layout.name)

    # One compiler for all is not said of each layout.
    if len(names_by_line) < 2:
        return tuple(names_by_line)
    return tuple(
        f"{line}: {join_first(names, most=_NAMED)}" for line, names in names_by_line.items()
    )


def _label_lines(reports: Sequence[LayoutReport]) -> list[str]:
    """Lists the columns by the worth of their figures."""
    heads: dict[str, dict[str, None]] = {}
    for column in columns_of(reports) if reports else ():
        heads.setdefault(column.label, {})[column.head] = None
    return [
        f"{label} ({meaning}): {', '.join(heads[label])}"
        for label, meaning in LABELS.items()
        if label in heads
    ]


def render(plan: Plan, width: int = _WIDTH, top: int = _TOP) -> str:
    """Returns a plan as text, with the best ``top`` layouts in tables."""
    width = max(width, _NARROWEST)
    blocks = [textwrap.fill(outcome_line(plan.target, plan.reports), width)]
    blocks += ["\n".join(table.lines()) for table in _tables(plan, width, top)]
    blocks += ["\n".join([title, *_wrapped(lines, width)]) for title, lines in _sections(plan, top)]
    return "\n\n".join(blocks)


def show(plan: Plan, console: Any = None, top: int = _TOP) -> None:
    """Prints a plan on a rich console, by default standard output."""
    if not has_rich():
        sys.stdout.write(render(plan, top=top) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    to = Console() if console is None else console
    if not to.is_terminal:
        to.file.write(render(plan, top=top) + "\n")
        return

    text = Text(render(plan, to.width, top))
    text.highlight_regex(r"(?:^|\n\n)(?P<bold>.+)", style_prefix="")  # first lines of blocks
    for word, style in _STYLES.items():
        text.highlight_regex(rf"(?m)(?<=  ){word}(?=  |$)", style)  # a cell of a table
    to.print(text, soft_wrap=True)


def _tables(plan: Plan, width: int, top: int) -> list[DisplayTable]:
    """Returns the tables of the compiled layouts, each as wide as ``width`` at the most."""
    tied = tied_with_best(plan.reports)
    ranked = [
        (f"{number}{'=' if report.layout.name in tied else ''}", report)
        for number, report in enumerate(plan.reports, 1)
        if has_figures(report)
    ][:top]
    if not ranked:
        return []

    # The name of a layout is shorter where it stands again, to tell the rows of a further table.
    reports = [report for _, report in ranked]
    first, *more_columns = columns_of(reports)
    name, again = (_shortened(first, share * width // 5) for share in (2, 1))
    rank_width = max(len(rank) for rank, _ in ranked)

    # A column that does not fit beside the others begins the next table.
    groups: list[list[FigureColumn]] = []
    used = width + 1
    for column in more_columns:
        wide = _GAP + _width(column, reports)
        if used + wide > width:
            groups.append([again if groups else name])
            used = rank_width + _GAP + _width(groups[-1][0], reports)
        groups[-1].append(column)
        used += wide

    tables: list[DisplayTable] = []
    for columns in groups:
        rows = [[rank, *(column.cell(report) for column in columns)] for rank, report in ranked]
        tables.append(DisplayTable.of([Column(head="", right=True), *columns], rows))
    return tables


def has_figures(report: LayoutReport) -> bool:
    """Whether a layout was compiled or traced."""
    return report.compiled or bool(report.expected and report.outcome != "rejected")


def _shortened(column: FigureColumn, most: int) -> FigureColumn:
    """Cuts the names of layouts, for room for figures."""
    most = max(most, _SHORTEST_NAME)

    def text(report: LayoutReport) -> str:
        whole = column.text(report)
        return whole if len(whole) <= most else f"{whole[: most - 1]}…"

    return replace(column, text=text, value=text)


def _width(column: FigureColumn, reports: Sequence[LayoutReport]) -> int:
    return max(len(column.head), len(column.unit), *(len(column.text(r)) for r in reports))


def _sections(plan: Plan, top: int) -> list[tuple[str, list[str]]]:
    """Returns the sections below the tables: titles with lines."""
    sections: list[tuple[str, list[str]]] = []
    if tied := tied_with_best(plan.reports):
        text = f"{', '.join(tied)}: their times cannot be told apart by this model"
        sections.append(("Ties (=)", [text]))

    compiled = [report for report in plan.reports if report.compiled]
    for title, notes in notes_of(plan, left_out=len(compiled) - top):
        lines = [f"{' '.join(note.text.split())} {note.source()}" for note in notes]
        sections.append((title, lines))

    sources = [*provenance_lines(plan.reports), *_label_lines(compiled)]
    if sources:
        sections.append(("Where the figures come from", sources))
    return sections


def published_lines(plan: Plan) -> list[str]:
    """Returns published steps near the best layout, a line each."""
    report = next((report for report in plan.reports if report.expected), None)
    if report is None:
        return []
    from shardax.plan.hardware.targets import Target

    parameters = report.parameters
    if not parameters:
        return []
    try:
        chip = Target.parse(plan.target).hardware
        chips = max(1, report.layout.devices // chip.devices_per_chip)
        return [step.summary for step in published_steps(chip.name, parameters, chips)]
    except (HardwareError, PlanFileError, TargetError):  # hardware that only its maker knows
        return []


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(
        width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return [part for line in lines for part in wrapper.wrap(line)]
