# SPDX-License-Identifier: Apache-2.0
"""The report of a run in a browser: on a wide screen and a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.view.page import write_report
from tests.browsing import OVERFLOWING, PALE, chromium, show
from tests.needs import needs

pytestmark = needs("chromium")
SCREENS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]
# Texts of the chart that lie over each other.
COVERED = """
const texts = [...document.querySelectorAll('.chart svg text, .legend li')]
  .map(element => [element.textContent, element.getBoundingClientRect()]);
return texts.flatMap(([a, p], n) => texts.slice(n + 1)
  .filter(([b, q]) => p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom)
  .map(([b]) => [a, b]));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = sx.models.DecoderConfig(vocab_size=256, num_layers=2, scan_layers=True)
    losses = [3.2, 2.6, 2.4, 2.36, 2.2, 1.9]
    numbers = {"learning_rate": 3.3e-4, "grad_norm": 0.5, "tokens_per_second": 1_234_567.8}
    records = [{"step": 100_000 * n, "loss": loss, **numbers} for n, loss in enumerate(losses, 1)]
    return write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        title="shardax run " + "x" * 60,
        summary={"text": "Python's standard library", "model": config, "folder": "/" + "a" * 90},
        parameters=sx.view.table(sx.models.Decoder(config, rngs=sx.Rngs(0))),
        pictures={f"kernel {'of a layer ' * 9}": sx.view.sharding_html(jnp.zeros((2, 2)))},
        records=[
            *records,
            {"step": 300_000, "eval_loss": 2.41},
            {"step": 600_000, "eval_loss": 2.4},
        ],
        # References near each other and near the last losses.
        references={"bigram": 2.4, "bigram of bytes": 2.41, "unigram": 3.2},
        facts={"Model": {"layers": "2 of width 64"}, "Optimizer": {"schedule": "a cosine " * 20}},
        loss_unit="nats per byte",
        sample="def " + "mer(pace_monmelf " * 20 + "\n" + "x" * 200,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_report_is_in_sight_and_can_be_read(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERFLOWING) == []
    assert browser.execute_script(PALE) == []
    assert browser.execute_script(COVERED) == []


def test_numbers_keep_their_size_on_a_phone(browser: Any, page: Path) -> None:
    show(browser, page, 390)
    texts = "[...document.querySelectorAll('.chart .narrow-page text')]"
    sizes = f"return {texts}.map(e => [e.textContent, getComputedStyle(e).fontSize])"
    numbers = browser.execute_script(sizes)
    assert ["200,000", "13px"] in numbers and ["600,000", "13px"] in numbers

    # Drawn as wide as it is shown, so that nothing is scaled.
    pictures = "[...document.querySelectorAll('.chart svg')].filter(e => e.checkVisibility())"
    scales = (
        f"return {pictures}.map(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
    )
    assert browser.execute_script(scales) == [1, 1, 1, 1]


def test_sample_wraps_and_table_scrolls(browser: Any, page: Path) -> None:
    show(browser, page, 390)
    hidden = "const box = document.querySelector('%s'); return box.scrollWidth - box.clientWidth"
    assert browser.execute_script(hidden % "pre") == 0
    assert browser.execute_script(hidden % ".wide") > 100
    assert browser.execute_script("return document.querySelector('.wide').tabIndex") == 0
