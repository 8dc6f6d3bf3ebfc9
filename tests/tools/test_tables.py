# SPDX-License-Identifier: Apache-2.0
"""One description of columns and rows is a table as text and as HTML."""

from __future__ import annotations

from xml.etree import ElementTree

from shardax._tables import Column, DisplayTable, TableCell, facts_html

COLUMNS = (
    Column(head="layout"),
    Column(head="peak", unit="GiB", right=True, label="exact", meaning="Most memory."),
)


def test_text_has_titles_units_and_figures_on_the_right() -> None:
    table = DisplayTable.of(COLUMNS, [["dp", "15.8"], ["fsdp & tp", TableCell("9", kind="yes")]])
    assert table.lines() == [
        "layout     peak",
        "            GiB",
        "dp         15.8",
        "fsdp & tp     9",
    ]


def test_text_without_units_has_one_line_of_titles() -> None:
    assert DisplayTable.of([Column(head="a")], [["b"]]).texts() == [("a",), ("b",)]


def test_html_has_escaped_cells_and_alignment_of_columns() -> None:
    table = DisplayTable.of(COLUMNS, [["<tp>", "15.8"], [TableCell("dp", html="<b>dp</b>"), "9"]])
    page = ElementTree.fromstring(table.html("plans", label="Plans & more"))
    assert page.attrib["aria-label"] == "Plans & more"
    assert [each.attrib["class"] for each in page.iter("table")] == ["plans"]
    assert [each.text for each in page.iter("td")] == ["<tp>", "15.8", None, "9"]
    assert page.find(".//b") is not None
    sides = [each.attrib.get("style") for each in page.iter("td")]
    assert sides == [None, "text-align:right"] * 2


def test_sortable_html_has_buttons_and_values_to_sort_by() -> None:
    rows = [
        [TableCell("dp", sort_key="dp"), TableCell("15.8", sort_key=15.8, kind="no")],
        ["tp", "-"],
    ]
    text = DisplayTable.of(COLUMNS, rows).html("sortable", sortable=True)
    page = ElementTree.fromstring(text.replace("&nbsp;", " "))
    assert [each.text for each in page.iter("button")] == ["layout", "peak"]
    assert [each.text for each in page.iter("small")] == [" ", "GiB, exact"]
    heads = [each for each in page.iter("th") if each.attrib["scope"] == "col"]
    assert [each.attrib["data-kind"] for each in heads] == ["text", "number"]
    assert heads[1].attrib["title"] == "Most memory."
    assert [each.attrib["data-value"] for each in page.iter("td")] == ["15.8", ""]
    assert [each.text for each in page.iter("th") if each.attrib["scope"] == "row"] == ["dp", "tp"]


def test_facts_are_names_and_texts() -> None:
    assert facts_html([("a<b", "c")], "facts") == (
        '<table class="facts"><tr><td>a&lt;b</td><td>c</td></tr></table>'
    )
