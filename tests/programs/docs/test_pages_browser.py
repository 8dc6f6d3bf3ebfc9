# SPDX-License-Identifier: Apache-2.0
"""Built pages in a browser: wide tables, programs and notebooks, on a wide screen and a phone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsing import OVERFLOWING, chromium, show
from tests.house.sources import ROOT
from tests.needs import needs

pytestmark = needs("chromium")
PAGES = ["comparison", "index", "plan", "notebooks/sharding"]
WIDTHS = [390, 1100, 1280, 1440, 1920]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the pages, built alone: links to the others lead nowhere."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "docs" / "_static", folder / "_static")
    shutil.copytree(ROOT / "docs" / "_templates", folder / "_templates")
    (folder / "notebooks").mkdir()
    for name in ("conf.py", "comparison.md", "index.md", "plan.md", "notebooks/sharding.ipynb"):
        shutil.copy(ROOT / "docs" / name, folder / name)
    build = [sys.executable, "-m", "sphinx", "-Q", "-b", "html", str(folder), str(folder / "html")]
    assert subprocess.run(build, check=False).returncode == 0
    return folder / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_no_wider_than_the_screen(browser: Any, pages: Path, name: str) -> None:
    for width in WIDTHS:
        show(browser, pages / f"{name}.html", width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        # Furo's side bars wait beyond the edge of a phone.
        inside = OVERFLOWING.replace("'body *'", "'article *'")
        assert browser.execute_script(inside) == []


def test_features_stay_in_sight_while_the_table_scrolls(browser: Any, pages: Path) -> None:
    show(browser, pages / "comparison.html", 390)
    places = """
    const box = document.querySelector('.table-wrapper'), row = box.querySelector('tbody tr');
    box.scrollLeft = box.scrollWidth;
    const left = cell => Math.round(cell.getBoundingClientRect().left - box.offsetLeft);
    const [feature, shardax, last] = [0, 1, 4].map(column => row.cells[column]);
    return [Math.abs(left(feature)) < 5, left(shardax) < -50, last.offsetWidth > 90];
    """
    assert browser.execute_script(places) == [True, True, True]


def test_columns_of_the_comparison_fit_a_screen(browser: Any, pages: Path) -> None:
    hidden = """
    return [...document.querySelectorAll('.table-wrapper')]
      .map(box => Math.max(0, box.scrollWidth - box.clientWidth));
    """
    for width in WIDTHS[1:]:
        show(browser, pages / "comparison.html", width)
        assert browser.execute_script(hidden) == [0, 0, 0]


def test_table_of_plans_is_whole(browser: Any, pages: Path) -> None:
    show(browser, pages / "plan.html", 1280)
    hidden = "return [...document.querySelectorAll('pre')].filter(e => e.innerText.includes(%r))"
    hidden += ".map(e => e.scrollWidth - e.clientWidth)"
    assert browser.execute_script(hidden % "layouts fit") == [0]
