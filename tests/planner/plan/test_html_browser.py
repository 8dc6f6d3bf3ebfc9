# SPDX-License-Identifier: Apache-2.0
"""The page of a plan in a browser: sort, unfold, on a wide screen and a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from shardax.plan.records import Plan
from tests.browsing import OVERFLOWING, PALE, chromium, show
from tests.needs import needs
from tests.planner.plan.samples import sample_reports

pytestmark = needs("chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    Plan("tpu:v5e:4x4", sample_reports(), ("8 of 80 candidates were compiled",)).to_html(file)
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(autouse=True)
def quiet(browser: Any) -> Iterator[None]:
    """Nothing is said on the console and nothing is loaded but the page itself."""
    yield
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert loaded == []
    assert browser.get_log("browser") == []


def sort_by(browser: Any, title: str) -> tuple[list[str], str]:
    """Presses a title of the table; returns the names in order, and what the title says then."""
    return tuple(
        browser.execute_script(
            """const heads = [...document.querySelectorAll('.sortable thead th')];
            const head = heads.find(h => h.querySelector('button').innerText === arguments[0]);
            head.querySelector('button').click();
            const rows = [...document.querySelectorAll('.sortable tbody tr')];
            const said = heads.filter(h => h.ariaSort).map(h => h.ariaSort);
            return [rows.map(r => r.cells[0].innerText), said.join()];""",
            title,
        )
    )


def test_column_headers_sort_figures_and_text_both_ways(browser: Any, page: Path) -> None:
    show(browser, page)
    fsdp, both, dp = "fsdp 16x1", "fsdp+tp 4x4", "dp 16x1"
    assert sort_by(browser, "peak") == ([both, fsdp, dp], "ascending")
    assert sort_by(browser, "peak") == ([dp, fsdp, both], "descending")
    assert sort_by(browser, "layout") == ([dp, fsdp, both], "ascending")
    assert sort_by(browser, "free") == ([dp, fsdp, both], "ascending")
    assert sort_by(browser, "wire model")[0][-1] == both


def test_link_of_the_table_unfolds_its_layout(browser: Any, page: Path) -> None:
    unfolded = "return [...document.querySelectorAll('details')].map(each => each.open)"
    show(browser, page)
    assert browser.execute_script(unfolded) == [True, False, False]
    browser.find_element("link text", "fsdp+tp 4x4").click()
    assert browser.execute_script(unfolded) == [True, True, False]
    browser.find_element("css selector", "#layout-1 > summary").click()
    assert browser.execute_script(unfolded) == [False, True, False]
    assert (
        "sums partial results of a product over mlp"
        in browser.find_element("css selector", "#layout-2 ol.sent").text
    )
    show(browser, page, part="#layout-3")
    assert browser.execute_script(unfolded) == [True, False, True]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_html_page_is_all_in_sight_and_can_be_read(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    show(browser, page, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERFLOWING) == []
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(24, 24, 24)") == (scheme == "dark")
    assert browser.execute_script(PALE) == []  # WCAG 2.2, level AA


def test_table_scrolls_and_sorts_by_keyboard(browser: Any, page: Path) -> None:
    show(browser, page, 390)
    keys = webdriver.Keys
    webdriver.ActionChains(browser).send_keys(keys.TAB).perform()
    focused = "return document.activeElement.className || document.activeElement.innerText"
    assert browser.execute_script(focused) == "wide"
    webdriver.ActionChains(browser).send_keys(keys.TAB, keys.ENTER).perform()
    assert browser.execute_script(focused) == "layout"
    assert sort_by(browser, "layout")[1] == "descending"
