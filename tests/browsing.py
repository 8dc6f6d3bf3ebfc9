# SPDX-License-Identifier: Apache-2.0
"""A headless browser for tests of pages, which are marked ``needs("chromium")``.

It is of Debian's packages ``chromium`` and ``chromium-driver``; selenium from the extra ``test``
drives it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")

# Elements beyond the edge of the page, but for those in a box that scrolls.
OVERFLOWING = """
const boxed = element => ['auto', 'scroll'].includes(getComputedStyle(element).overflowX);
const scrolls = element => element && (boxed(element) || scrolls(element.parentElement));
const reaches = element => element.getBoundingClientRect().right > innerWidth + 1;
return [...document.querySelectorAll('body *')]
  .filter(element => reaches(element) && !scrolls(element.parentElement))
  .map(element => element.outerHTML.slice(0, 80));
"""
# Texts of less contrast than WCAG 2.2 asks for at level AA.
PALE = """
const luminance = color => {
  const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const clear = color => color === 'rgba(0, 0, 0, 0)';
const ground = element => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (!clear(color)) return color;
  }
  return getComputedStyle(document.body).backgroundColor;
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const pale = [];
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || element.closest('svg, script, style')) continue;
  const [a, b] = [getComputedStyle(element).color, ground(element)].map(luminance);
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) pale.push([texts.currentNode.data.slice(0, 40), contrast]);
}
return pale;
"""


def is_here() -> bool:
    """Whether this machine has the browser and its driver."""
    return CHROMIUM is not None and DRIVER is not None


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


def show(browser: Any, page: Path, width: int = 1280, scheme: str = "light", part: str = "") -> Any:
    """Opens a page, on a light or a dark system; less than 500 pixels wide is a phone."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get("about:blank")
    browser.get(page.as_uri() + part)
    return browser
