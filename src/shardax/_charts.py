# SPDX-License-Identifier: Apache-2.0
"""Charts by matplotlib, for pages.

A picture that is scaled to a phone has texts that cannot be read there. So nothing is scaled: a
chart is drawn as wide as a phone, or for a wide page and for a narrow one, of which the style in
``view/page.html`` shows one. Texts are texts of the page, in its colour.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import threading
from collections.abc import Generator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from shardax.extend import needs_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_COLOR = "#010203"  # which nothing else has, to be replaced by the page's own
NO_CHARTS = (
    "<p>Charts are drawn by matplotlib, which is not installed: "
    "<code>pip install 'shardax[view]'</code> brings it.</p>"
)

# matplotlib's settings are of the process: of two charts that overlapped, the second would restore
# those of the first in the place of the user's.
_STYLE_LOCK = threading.RLock()
_TEXT_PIXELS = 13
_POINTS = 72  # of an inch; matplotlib's points become the page's pixels


class LegendEntry(NamedTuple):
    """A text of a legend, beside a line of a colour."""

    line: str  # such as "2px dashed"
    color: str
    text: str


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def chart_style() -> Generator[None]:
    """Draws by matplotlib's defaults, whatever the user's settings of matplotlib say.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    with needs_package("A chart", "shardax[view]"):
        from matplotlib import style

    settings = {
        "font.size": _TEXT_PIXELS,
        "figure.dpi": _POINTS,
        "axes.edgecolor": "none",
        "text.color": TEXT_COLOR,
        "axes.labelcolor": TEXT_COLOR,
        "xtick.color": TEXT_COLOR,
        "ytick.color": TEXT_COLOR,
        "svg.fonttype": "none",
        "svg.hashsalt": "shardax",  # equal charts are equal texts
    }
    with _STYLE_LOCK, style.context(["default", settings]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in pixels."""
    from matplotlib.figure import Figure

    # Without pyplot there is no window, and nothing that the user draws changes.
    return Figure(figsize=(width / _POINTS, height / _POINTS), layout="constrained")


@chart_style()
def svg_of(figure: Figure) -> str:
    """Returns a figure as an ``<svg>`` element whose texts are of the page."""
    stream = io.StringIO()
    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=without)
    svg = stream.getvalue()[stream.getvalue().index("<svg") :]

    # matplotlib's points become pixels, and its font the page's. Its rule for all elements would be
    # one for the whole page, where names of elements would stand several times.
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    return svg.replace(TEXT_COLOR, "currentColor")


def chart_html(
    label: str, figures: Sequence[Figure], legend: Sequence[LegendEntry], unit: str = ""
) -> str:
    """Returns a chart as HTML.

    Args:
        label: What it shows, for screen readers.
        figures: The chart; or the one for wide pages, and the one for narrow ones.
        legend: Its lines.
        unit: What its values are.
    """
    names = ("wide-page", "narrow-page") if len(figures) > 1 else ("",)
    pictures = "".join(
        f'<div class="{name}">{svg_of(figure)}</div>'
        for name, figure in zip(names, figures, strict=True)
    )
    entries = "".join(
        f'<li><i style="border-top:{line} {color}"></i>{escape(text)}</li>'
        for line, color, text in legend
    )
    of_unit = f'<p class="unit">{escape(unit)}</p>' if unit else ""
    return (
        f'<figure class="chart">{of_unit}<div role="img" aria-label="{escape(label)}">{pictures}'
        f'</div><ul class="legend">{entries}</ul></figure>'
    )
