# SPDX-License-Identifier: Apache-2.0
"""The report is one whole page that shows what it was given, and replaces the one before."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.view.page import write_report

VOID = {"meta", "link", "br", "img"}
RECORDS: list[dict[str, Any]] = [
    {"step": 10, "loss": 3.0, "tokens_per_second": 5.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "eval_loss": 2.5},
]


class Page(html.parser.HTMLParser):
    """Reads a page: every element must be closed by its own end tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def model() -> Any:
    return sx.nn.Linear(2, 3, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))


def write(path: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "title": "a run",
        "summary": {"steps": 20},
        "parameters": sx.view.table(model()),
        "pictures": {"kernel": sx.view.sharding_html(jnp.zeros((2, 2)))},
        "records": RECORDS,
        "references": {"bigram": 2.3},
        "sample": "once upon a time",
    }
    return write_report(path, **{**given, **changes})


def test_page_has_facts_curve_picture_sample_and_table(tmp_path: Path) -> None:
    path = write(tmp_path / "report.html")
    page = Page(path.read_text(encoding="utf-8"))
    assert page.texts[0] == "a run"
    assert [t for t in page.texts if t in ("Loss", "Shardings", "Sample", "Parameters")] == [
        "Loss",
        "Shardings",
        "Sample",
        "Parameters",
    ]
    for text in ("steps", "20", "once upon a time", ".kernel", "2x3", "embed, mlp"):
        assert text in page.texts
    assert sx.view.table(model()).totals() in page.texts
    # Two of the loss, and one of another number that was recorded.
    assert len(page.all("svg")) == 3
    assert "CPU 0" in [text.strip() for text in page.texts]


def test_page_without_matplotlib_has_its_tables_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    page = Page(write(tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "pip install 'shardax[view]'" in page.texts
    assert sx.view.table(model()).totals() in page.texts
    assert page.all("svg") == [] and "CPU 0" in page.texts


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = Page(write(tmp_path / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert all("href" not in attributes and "src" not in attributes for _, attributes in page.tags)


def test_texts_are_escaped_wherever_they_come_from(tmp_path: Path) -> None:
    nasty = "<script>alert('&amp;')</script>"
    path = write(
        tmp_path / "report.html",
        title=nasty,
        summary={nasty: nasty},
        pictures={nasty: sx.view.sharding_html(jnp.zeros(2))},
        references={nasty: 2.3},
        sample=nasty,
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert page.all("script") == []
    assert sum(nasty in text for text in page.texts) == 7  # the title stands in head and body


def test_report_has_a_chart_of_each_number_with_its_unit_and_tables_of_facts(
    tmp_path: Path,
) -> None:
    numbers = {"loss": 2.0, "learning_rate": 3e-4, "grad_norm": 0.5, "tokens_per_second": 12345.6}
    path = write(
        tmp_path / "report.html",
        records=[{"step": step, **numbers} for step in (10, 20)],
        facts={"Model": {"layers": "2 of width 64"}, "Optimizer": {"weight decay": "0.01"}},
        loss_unit="nats per token",
    )
    page = Page(path.read_text(encoding="utf-8"))
    labels = [
        attributes["aria-label"] for attributes in page.all("div") if "aria-label" in attributes
    ]
    assert labels[:4] == [
        "Loss over 2 steps; training 2.000 at step 20",
        "Learning rate over 2 steps; learning rate 3.00e-04 at step 20",
        "Gradients over 2 steps; gradient norm 0.500 at step 20",
        "Speed over 2 steps; tokens per second 12,346 at step 20",
    ]
    for text in ("nats per token", "norm of all gradients", "Model", "2 of width 64", "Optimizer"):
        assert text in page.texts


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "report.html", pictures={}, sample="", records=[])
    page = Page(path.read_text(encoding="utf-8"))
    assert not {"Shardings", "Sample", "Training"} & {*page.texts}
    assert "No losses were recorded." in page.texts


def test_new_report_replaces_previous_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "report.html", title="first")
    first = path.read_text(encoding="utf-8")

    def disk_full(self: Path, target: Any) -> Path:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", disk_full)
        with pytest.raises(OSError, match="disk full"):
            write(path, title="second")
    assert path.read_text(encoding="utf-8") == first
    write(path, title="third")
    assert "third" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
