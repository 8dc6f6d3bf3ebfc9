# SPDX-License-Identifier: Apache-2.0
"""A plan as text: what fits stands first, every figure has a unit and a label, lines fit."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from shardax.plan.records import Plan, TimeBand
from shardax.plan.report.table import Note, columns_of, outcome_line, render, show, tied_with_best
from tests.planner.plan.samples import report, sample_reports

GOLDEN = """
tpu:v5e:4x4: 2 of 8 layouts fit; 2 too large, 3 rejected before compiling, 1 failed to
compile

    layout       data x model  fits  peak   free  args  time of a step  bound by  wire
                                      GiB    GiB   GiB               s              GB
1=  fsdp 16x1    16 x 1        yes   9.10   6.65  1.23     0.59 - 1.41  memory    10.3
2=  fsdp+tp 4x4  4 x 4         yes   8.20   7.55  1.23     0.61 - 1.50  compute   20.3
 3  dp 16x1      16 x 1        no    29.8  -14.0  1.23     0.59 - 1.41  memory    10.3

    layout       wire data  wire model  wire data+model  cross-slice  collectives  async
                        GB          GB               GB           GB                   %
1=  fsdp 16x1         10.3           0                0            0            3   67.9
2=  fsdp+tp 4x4       7.20        12.1             1.00         1.00            3    100
 3  dp 16x1           10.3           0                0            0            3   67.9

    layout        work  repeat  traffic  compute  memory  comm.  compiling
                 TFLOP       x       GB        s       s      s          s
1=  fsdp 16x1      115    1.00      480     0.59    0.59   0.23       7.40
2=  fsdp+tp 4x4    144    1.25      480     0.61    0.50   0.35       7.40
 3  dp 16x1        115    1.00      480     0.59    0.59   0.23       7.40

Ties (=)
  fsdp 16x1, fsdp+tp 4x4: their times cannot be told apart by this model

Does not fit
  HLO temporaries (43.40G) exceeds available HBM (15.75G) (tp 1x16)

Rejected before compiling
  model.attn.q.kernel: dimension 1 of size 12 is not divisible by 16 (2: heads 12, heads 8)
  parameters alone need 27.1 GiB (odd)

Failed to compile
  the compiler ended by signal 11 Check failed: x == y (crash)

Warnings
  model.norm.scale is held whole by every device (fsdp+tp 4x4)

Notes
  8 of 80 candidates were compiled

Where the figures come from
  libtpu 0.0.42.1 for tpu:v5e:4x4, full effort, JAX 0.10.2
  exact (from shapes and shardings alone): args
  compiler (measured by the target's own compiler): peak, free
  counted (counted in the program that the compiler made): wire, wire data, wire model, wire
    data+model, cross-slice, collectives, async, work, repeat
  estimate (a model, or the CPU's program standing in for the target's; no measurement):
    time of a step, bound by, traffic, compute, memory, comm.
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan("tpu:v5e:4x4", sample_reports(), ("8 of 80 candidates were compiled",))


def test_printed_plan_starts_with_decision_ends_with_provenance(plan: Plan) -> None:
    assert render(plan, 92) == GOLDEN.strip("\n")


@pytest.mark.parametrize("width", [72, 100, 120, 200])
def test_lines_fit_the_terminal_without_losing_columns(plan: Plan, width: int) -> None:
    text = render(plan, width)
    assert max(map(len, text.splitlines())) <= width
    assert str(plan) == render(plan, 110)
    tables = text[: text.index("Ties")]
    for column in columns_of([r for r in plan.reports if r.peak_bytes or r.time]):
        assert column.head in tables


def test_long_names_are_truncated_before_figures() -> None:
    found = replace(sample_reports()[0], layout=replace(sample_reports()[0].layout, name="n" * 90))
    text = render(Plan("tpu:v5e:4x4", (found,)), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "n" * 39 + "…" in text


def test_cpu_substitute_program_is_labeled_as_estimate(plan: Plan) -> None:
    first = plan.reports[0]
    assert first.provenance is not None
    where = replace(first.provenance, compiler="XLA CPU", tier="cpu estimate", effort="screen")
    text = render(Plan("tpu:v5e:4x4", (replace(first, provenance=where),)), 300)
    assert "(cpu estimate: the CPU's program in place of the target's); fast compiles" in text
    [estimates] = [line for line in text.splitlines() if line.startswith("  estimate (")]
    assert ": peak, free, time of a step" in estimates
    assert "compiler (measured" not in text


def test_tie_notes_refer_to_the_best_layout() -> None:
    reports = [
        report(name, (("data", 16),), time=TimeBand(low, 1.41, low, 0.4, 0.2, 0.0, "compute"))
        for name, low in (("a", 0.5), ("b", 0.65), ("c", 0.8))
    ]
    assert tied_with_best(reports) == ("a", "b")
    assert tied_with_best(reports[2:]) == ()
    assert tied_with_best([]) == ()
    alone, *pair = (replace(each, examples=1.0) for each in (reports[0], reports[2], reports[2]))
    assert tied_with_best([alone, *pair]) == ()  # the two behind it are


def test_note_names_only_a_readable_number_of_layouts() -> None:
    assert Note("no", ()).source() == ""
    assert Note("no", ("a",)).source() == "(a)"
    assert Note("no", ("a", "b", "c", "d", "e")).source() == "(5: a, b, c and 2 more)"


def test_outcome_line_tells_of_no_layout_at_all() -> None:
    assert outcome_line("cpu:8", []) == "cpu:8: 0 of 0 layouts fit"


def test_render_shows_time_per_example_for_several_batch_sizes() -> None:
    small, large = (
        report(
            f"batch:{n}",
            (("data", 16),),
            examples=float(n),
            time=TimeBand(t, t, t, 0, 0, 0, "compute"),
        )
        for n, t in ((32, 0.032), (64, 0.048))
    )
    lines = render(Plan("tpu:v5e:4x4", (small, large)), 120).splitlines()
    assert "time of a step  per example" in lines[2]
    assert [line.split()[7:11] for line in lines[4:6]] == [
        ["48.0", "-", "48.0", "0.75"],
        ["32.0", "-", "32.0", "1.00"],
    ]


def test_render_shows_only_the_best_of_many(plan: Plan) -> None:
    text = render(plan, 110, top=1)
    assert "fsdp 16x1    16 x 1" not in text and "1=  fsdp 16x1" in text
    assert " 3  dp 16x1" not in text
    assert "  2 more were compiled and are not shown" in text


def test_terminal_output_is_colored_and_file_output_plain(plan: Plan) -> None:
    screen, file = io.StringIO(), io.StringIO()
    show(plan, Console(file=screen, force_terminal=True, color_system="standard", width=110))
    show(plan, Console(file=file))
    assert file.getvalue() == str(plan) + "\n"
    assert "\x1b[32myes" in screen.getvalue() and "\x1b[31mno" in screen.getvalue()
    words = [line.split() for line in str(plan).splitlines()]
    coloured = screen.getvalue()
    assert all(word in coloured for line in words for word in line)


def test_show_without_rich_prints_plain_text(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    show(plan)
    assert capsys.readouterr().out == f"{plan}\n"


def test_compilers_are_named_with_their_layouts() -> None:
    first, second, *_ = sample_reports()
    assert first.provenance is not None and second.provenance is not None
    screened = replace(second, provenance=replace(second.provenance, effort="screen"))
    text = render(Plan("tpu:v5e:4x4", (first, screened)), 200)
    start = "  libtpu 0.0.42.1 for tpu:v5e:4x4, "
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    fast = "; fast compiles show up to a fifth less memory than full ones"
    assert lines == [
        "full effort, JAX 0.10.2: fsdp 16x1",
        f"screen effort, JAX 0.10.2{fast}: fsdp+tp 4x4",
    ]


def test_plan_of_rejected_layouts_has_no_table() -> None:
    refused = [each for each in sample_reports() if each.outcome == "rejected"]
    text = render(Plan("cpu:8", tuple(refused)), 120)
    assert text.splitlines()[0] == "cpu:8: 0 of 3 layouts fit; 3 rejected before compiling"
    assert "parameters alone need 27.1 GiB (odd)" in text and "data x model" not in text
