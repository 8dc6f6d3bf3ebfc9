# SPDX-License-Identifier: Apache-2.0
"""The page of a plan: whole by itself, nothing of it is code by accident, links lead somewhere."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardax.plan.records import Layout, Plan
from shardax.plan.report.charts import Bar, bar_figure
from shardax.plan.report.html import page
from tests.planner.plan.samples import gather, sample_reports

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Collects elements with their attributes, and texts; elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return page(Plan("tpu:v5e:4x4", sample_reports(), ("8 of 80 candidates were compiled",)))


def test_page_loads_nothing_external_and_links_resolve(text: str) -> None:
    read = Reader(text)
    assert {tag for tag, _ in read.found} & {"link", "img", "iframe", "object", "base"} == set()
    assert not any("src" in attributes for _, attributes in read.found)
    assert "url(" not in text and "@import" not in text
    ids = [attributes["id"] for _, attributes in read.found if "id" in attributes]
    assert ids == ["layout-1", "layout-2", "layout-3"]
    assert [a["href"] for a in read.all("a")] == [f"#{each}" for each in ids]


def test_html_page_says_what_the_plan_says(text: str) -> None:
    said = " ".join("".join(Reader(text).texts).split())
    for each in (
        "2 of 8 layouts fit; 2 too large, 3 rejected before compiling, 1 failed to compile.",
        "Best: fsdp 16x1; the model of time cannot tell it from fsdp+tp 4x4",
        "all-gather along data, 24 x 307 MB of bf16: 6.90 GB, while other work goes on",
        "dot_general needs the whole of a matrix that is split by embed",
        "decoder.py:240",
        "carries model.layers.mlp.gate.kernel, model.layers.mlp.up.kernel",
        "layers: 24, embed: 2048 / data, mlp: 8192",
        "HLO temporaries (43.40G) exceeds available HBM (15.75G) (tp 1x16)",
        "is not divisible by 16 (2: heads 12, heads 8)",
        "the compiler ended by signal 11",
        "Held whole by every device: model.norm.scale",
        "8 of 80 candidates were compiled",
        "libtpu 0.0.42.1 for tpu:v5e:4x4, full effort, JAX 0.10.2",
        "measured by the target's own compiler",
    ):
        assert each in said


def labels_of_pictures(text: str) -> list[str]:
    return [a["aria-label"] for a in Reader(text).all("div") if a.get("role") == "img"]


def test_charts_say_in_words_what_they_draw(text: str) -> None:
    memory, wire, time, *_ = labels_of_pictures(text)
    assert memory.startswith(
        "fsdp 16x1: peak 9.10 GiB of 15.8 GiB: parameters 418 MiB, optimizer 836 MiB, "
        "batch 1.00 MiB, temporaries 7.87 GiB; fsdp+tp 4x4: "
    )
    assert "fsdp+tp 4x4: 20.3 GB: data 7.20 GB, model 12.1 GB, data+model 1.00 GB" in wire
    assert time.startswith("fsdp 16x1: between 586 ms and 1.41 s, bound by memory; ")


def test_page_without_matplotlib_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    read = Reader(page(Plan("tpu:v5e:4x4", sample_reports())))
    assert "pip install 'shardax[view]'" in read.texts and read.all("svg") == []


def test_bars_lie_where_the_figures_are() -> None:
    bars = [
        Bar("long " * 20, {"a": 1.0, "b": 3.0}, "4 B", "", limit=5.0),
        Bar("short", {"a": 2.0}, "2 B", "", start=1.0),
    ]
    (axes,) = bar_figure(bars, {"a": "#4e79a7", "b": "#f28e2b"}).axes
    drawn = [bar for bar in axes.patches if bar.get_alpha() is None]
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn]
    assert spans == [(0.0, 1.0), (1.0, 4.0), (1.0, 3.0)]
    assert drawn[0].get_facecolor() == drawn[2].get_facecolor() != drawn[1].get_facecolor()
    name, *others = (text.get_text() for text in axes.texts)
    assert name.startswith("long long") and name.endswith("…") and len(name) < 40
    assert others == ["4 B", "short", "2 B"]


def test_names_and_reasons_are_escaped() -> None:
    evil = '<script>alert("x")</script>&\'"'
    first = sample_reports()[0]
    layout = Layout(evil, ((evil, "data"),), (("data", 16),))
    changed = replace(
        first,
        layout=layout,
        warnings=(evil,),
        reason=evil,
        replicated=(evil,),
        collectives=(gather(1e9, source=evil, why=evil, parameters=(evil,), op_name=evil),),
        arrays=tuple(replace(each, path=evil, names=(evil,) * 3) for each in first.arrays),
    )
    refused = replace(changed, outcome="rejected", layout=replace(layout, name=evil + "2"))
    read = Reader(page(Plan(evil, (changed, refused), (evil,))))
    assert len(read.all("script")) == 1
    assert any(evil in each for each in read.texts)
    assert not any(name.startswith("on") for _, attributes in read.found for name in attributes)


def test_plan_without_compiled_layout_has_a_page() -> None:
    rejected = [report for report in sample_reports() if report.outcome == "rejected"]
    said = "".join(Reader(page(Plan("cpu:8", tuple(rejected)))).texts)
    assert "None of them fits." in said and "parameters alone need 27.1 GiB" in said


def test_pictures_show_the_largest_parameters_of_distinct_forms(text: str) -> None:
    pictures = [label for label in labels_of_pictures(text) if label.endswith(" parts")]
    assert pictures[:3] == [
        "model.layers.mlp.gate.kernel in 16 parts",
        "model.embed.embedding in 16 parts",
        "model.norm.scale in 1 parts",
    ]
    assert len(pictures) == 9


def test_page_of_many_layouts_stays_small(tmp_path: Path) -> None:
    first = sample_reports()[0]
    many = tuple(
        replace(first, layout=replace(first.layout, name=f"layout {n}")) for n in range(160)
    )
    Plan("tpu:v5e:4x4", many).to_html(tmp_path / "plan.html")
    whole = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert len(re.findall('<tr><th scope="row"', whole)) == 160
    assert len(Reader(whole).all("details")) == 16
    assert len(whole) < 600_000


def said_of(**changes: Any) -> str:
    report = replace(sample_reports()[0], **changes)
    return " ".join("".join(Reader(page(Plan("tpu:v5e:4x4", (report,)))).texts).split())


def test_page_lists_settings_and_layouts_without_messages() -> None:
    layout = Layout("dp", (), (("data", 16),), parallel=(("microbatches", 8),))
    text = said_of(layout=layout, collectives=())
    assert "(microbatches)8" in text
    assert "Nothing: no device needs what another has." in text


def test_lines_that_send_least_are_summed() -> None:
    many = tuple(gather(1e9, source=f"m.py:{line}") for line in range(28))
    assert "3 more lines of code, 3.00 GB together" in said_of(collectives=many)
    assert "more lines of code" not in said_of(collectives=many[:25])


def test_arrays_in_very_many_parts_are_drawn_without_their_middle() -> None:
    layout = Layout("fsdp", (("embed", "data"),), (("data", 2048),))
    text = page(Plan("tpu:v5e:4x4", (replace(sample_reports()[0], layout=layout),)))
    read = Reader(text)
    assert len(read.all("figure")) == len(labels_of_pictures(text)) == 6  # with three charts
    assert any("device 2047" in each for each in read.texts) and "device 1000" not in text
