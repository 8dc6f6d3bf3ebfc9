# SPDX-License-Identifier: Apache-2.0
"""A headless browser for tests of pages, where the machine has one.

Debian's packages ``chromium`` and ``chromium-driver`` and selenium from the extra ``test`` drive
it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="apt-get install chromium chromium-driver"
)


@contextlib.contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A browser that keeps what is said on the console; it ends with the context."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.chrome.service.Service(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
