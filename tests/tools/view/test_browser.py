# SPDX-License-Identifier: Apache-2.0
"""Pages in a browser: unfold, fold, point at a value, and read it all in the dark.

treescope draws into a shadow root, so what is on the page is looked up there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from selenium import webdriver

import shardax as sx
from tests.browsing import chromium
from tests.needs import needs

pytestmark = needs("chromium")
ROOT = "const root = document.querySelector('treescope-container').shadowRoot;"


class Model(sx.Module):
    """A model with something of everything that a drawing has to show."""

    def __init__(self) -> None:
        self.embed = sx.nn.Embed(8, 4, rngs=sx.Rngs(0))
        self.layers = [sx.nn.Linear(4, 8, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))]
        self.head = self.embed.embedding
        self.table = sx.Param(jnp.arange(12.0).reshape(3, 4), axes=("row", "column"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium("--window-size=1200,900") as driver:
        yield driver


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that shows a value in the browser, on a light or a dark system."""

    def show(value: Any, scheme: str = "light") -> Any:
        page = tmp_path / "page.html"
        page.write_text(sx.view.to_html(value), encoding="utf-8")
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(page.as_uri())
        # The element is there before what it shows is rendered.
        wait_for(lambda: text(browser))
        return browser

    return show


def wait_for(condition: Callable[[], Any]) -> Any:
    for _ in range(600):
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("the page did not get there within half a minute")


def text(browser: Any) -> str:
    """What is to be seen: text of folded parts is not rendered."""
    shown = "root.querySelector('.treescope_root')?.innerText ?? ''"
    return browser.execute_script(f"{ROOT} return {shown}")


def click(browser: Any, label: str) -> None:
    """Folds or unfolds the outermost part whose first line begins with a text."""
    script = f"""{ROOT}
        const labels = [...root.querySelectorAll('.foldable_node > label')];
        const begins = label => label.innerText.replace(/^[▼▶]/, '').startsWith(arguments[0]);
        const found = labels.find(begins);
        if (found) found.click();
        return Boolean(found);"""
    wait_for(lambda: browser.execute_script(script, label))


def unfold(browser: Any, label: str, sight: str) -> None:
    """Unfolds a part, unless what it holds is to be seen already."""
    if sight not in text(browser):
        click(browser, label)
    wait_for(lambda: sight in text(browser))


def errors(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]


def test_model_unfolds_and_folds(open_page: Callable[..., Any]) -> None:
    page = open_page(Model())
    assert "# 84 parameters" in text(page)
    assert "embedding=Param(float32[8, 4], lazy, axes=('vocab', 'embed'))" in text(page)
    assert "<same Param as .embed.embedding>" in text(page)
    lines = text(page).count("\n")
    click(page, "Embed(")
    assert text(page).count("\n") < lines
    assert "embedding=Param" in text(page)  # folded, in one line
    click(page, "Embed(")
    assert text(page).count("\n") == lines
    assert errors(page) == []


def test_page_that_arrives_in_pieces_is_whole(browser: Any) -> None:
    page = sx.view.to_html(Model())
    # Between the tag of a script and its text, as a busy browser or network would.
    pieces = re.split(r"(?<=<script type=\"application/octet-stream\">)", page)
    assert len(pieces) > 2

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece.encode())
                self.wfile.flush()
                time.sleep(0.1)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://localhost:{server.server_port}/")
        wait_for(lambda: "# 84 parameters" in text(browser))
        server.shutdown()
    assert errors(browser) == []


def test_pointer_reads_a_value_off_a_picture(open_page: Callable[..., Any]) -> None:
    page = open_page(Model())
    assert page.execute_script(f"{ROOT} return root.querySelectorAll('canvas').length") == 0
    click(page, "Param(float32[3, 4]")
    canvas = wait_for(lambda: page.execute_script(f"{ROOT} return root.querySelector('canvas')"))
    assert "row (axis 0): 3" in text(page) and "column (axis 1): 4" in text(page)
    pointer = webdriver.ActionChains(page)
    pointer.move_to_element_with_offset(canvas, 3, 3).perform()  # from the middle, in pixels
    tip = wait_for(
        lambda: page.execute_script(f"{ROOT} return root.querySelector('.hovertip').innerText")
    )
    assert tip == "array[1, 2]\n  = 6"
    assert errors(page) == []


def test_shardings_and_meshes_have_pictures(open_page: Callable[..., Any], auto_mesh: Mesh) -> None:
    layer = sx.nn.Linear(4, 8, use_bias=False, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
    planned = sx.abstract(layer, auto_mesh, {"mlp": "model"})
    page = open_page([auto_mesh, planned])
    assert "<mesh data=2, model=4" in text(page)
    unfold(page, "<mesh data=2", "data: 2/2")
    assert "model: 4/4" in text(page)
    unfold(page, "Param(float32[4, 8]", "mlp: 8/4")
    assert "embed: 4/1" in text(page)
    assert errors(page) == []


def test_selection_page_shows_what_is_selected(open_page: Callable[..., Any]) -> None:
    layers = [sx.nn.Linear(2, 2, rngs=sx.Rngs(0)) for _ in range(30)]
    model = sx.nn.Sequential(*layers)
    page = open_page(sx.select(model).at(lambda m: m.layers[20].bias))
    assert "Selection of 1 place in Sequential(" in text(page)
    assert "➤ bias=Param(float32[2], lazy" in text(page)
    assert errors(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_readable(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(Model(), scheme)
    click(page, "Param(float32[3, 4]")
    wait_for(lambda: page.execute_script(f"{ROOT} return root.querySelector('canvas')"))
    corner = pixels(page, {"x": 2, "y": 2, "width": 2, "height": 2, "scale": 1})
    assert (luminance(corner).max() < 0.1) == (scheme == "dark")
    for line in ("Model(", "num_embeddings", "<same Param", "Param(float32[3, 4]", "# 84 param"):
        assert contrast(pixels(page, box_of(page, line))) > 4.5, line  # WCAG 2.2, level AA
    assert errors(page) == []


def box_of(browser: Any, start: str) -> dict[str, float]:
    """Where the first text is that begins so."""
    return browser.execute_script(
        f"""{ROOT}
        const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {{
            const range = document.createRange();
            range.selectNodeContents(texts.currentNode);
            const box = range.getBoundingClientRect();
            if (texts.currentNode.data.trim().startsWith(arguments[0]) && box.width)
                return {{x: box.x, y: box.y, width: box.width, height: box.height, scale: 1}};
        }}""",
        start,
    )


def pixels(browser: Any, clip: dict[str, float]) -> np.ndarray:
    """The colours of a part of the page as they are on the screen: (pixels, 3), 0 to 1."""
    options = {"format": "png", "clip": clip}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"]
    channels = browser.execute_async_script(
        """const [shot, done] = arguments;
        const image = new Image();
        image.onload = () => {
            const canvas = new OffscreenCanvas(image.width, image.height);
            const context = canvas.getContext('2d');
            context.drawImage(image, 0, 0);
            done([...context.getImageData(0, 0, image.width, image.height).data]);
        };
        image.src = 'data:image/png;base64,' + shot;""",
        shot,
    )
    return np.array(channels).reshape(-1, 4)[:, :3] / 255


def luminance(colors: np.ndarray) -> np.ndarray:
    """Relative luminance, as WCAG 2.2 defines it."""
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(colors: np.ndarray) -> float:
    """Contrast between the lightest and the darkest colour, by WCAG 2.2."""
    found = luminance(colors)
    return float((found.max() + 0.05) / (found.min() + 0.05))
