# SPDX-License-Identifier: Apache-2.0
"""HTML pages: one file that needs no other, light or dark as the reader's system is.

treescope draws on white and knows no dark mode. On a dark page its drawing is therefore shown
inverted, with the hues turned back: what was black on pale red is white on deep red, and white is
the colour of the page. A notebook says by its body whether it is dark, whatever the system is.
"""

from __future__ import annotations

from html import escape

_PAGE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid #eee;
  font-family: ui-monospace, monospace; vertical-align: top; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
figure { display: inline-block; margin: 0 1.5rem 1rem 0; }
figcaption { font-size: 13px; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; }
  pre { background: #222; }
  th, td { border-color: #333; }
  .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
}
"""

_FRAGMENT = """
.shardax-view treescope-container { color: #000; }
body[data-jp-theme-light="false"] .shardax-view treescope-container,
body.vscode-dark .shardax-view treescope-container,
html[theme="dark"] .shardax-view treescope-container { filter: invert(0.906) hue-rotate(180deg); }
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """Returns a whole page.

    Args:
        title: Its title, as text.
        body: Its contents, as HTML.
        style: More CSS.

    Example:
        >>> page = html_page("Layers <1>", "<p>Two.</p>")
        >>> page.startswith("<!doctype html>"), "<title>Layers &lt;1&gt;</title>" in page
        (True, True)
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_PAGE}{style}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def fragment(content: str) -> str:
    """Returns HTML to stand in a page or in the output of a notebook.

    Args:
        content: What treescope drew, or any other HTML.

    Example:
        >>> fragment("<p>Two.</p>").endswith("<p>Two.</p></div>")
        True
    """
    return f'<div class="shardax-view"><style>{_FRAGMENT}</style>{content}</div>'
