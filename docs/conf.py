# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx; pytest runs the code of the pages."""

import gc
import json
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser

# At Python's default threshold, garbage collection takes a quarter of the time of a build.
gc.set_threshold(50_000, 10, 10)

# autodoc imports shardax; that needs no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "shardax"
author = "The shardax authors"
project_copyright = "The shardax authors"
html_title = "shardax"
html_theme = "furo"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

# A page for each public name, from the packages that list them.
autosummary_generate = True
autosummary_imported_members = True


def _left_out() -> dict[str, list[str]]:
    """By module, names that have no page below it: they are described above, or internal."""
    import shardax as sx

    inner = vars(sx.partition)
    found = {"shardax.partition": [n for n in inner if getattr(sx, n, None) is inner[n]]}
    found["shardax.models"] = ["Rope"]  # of shardax.nn
    # Modules and no packages, so all that they import and use is in them too.
    for module in (sx.train.checkpoint, sx.train.metrics):
        found[module.__name__] = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) != module.__name__
            or not (isinstance(value, type) or "Args:" in (value.__doc__ or ""))
            or hasattr(sx.train, name)
        ]
    return found


autosummary_context = {"left_out": _left_out()}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
myst_heading_anchors = 3


def _table_of_families() -> str:
    """Returns the families of published models as a Markdown table, from what reads them."""
    from shardax.models.families.registry import FAMILIES

    header = ["| `model_type` | classes | fields with these values only |", "| --- | --- | --- |"]
    rows = [
        f"| `{model_type}` | {_codes(family.architectures)} | {_values(family.neutral)} |"
        for model_type, family in sorted(FAMILIES.items())
    ]
    return "\n".join(header + rows)


def _codes(names: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _values(fields: Mapping[str, tuple[Any, ...]]) -> str:
    return ", ".join(
        f"`{name}={' or '.join(map(repr, values))}`" for name, values in fields.items()
    )


def _table_of_hardware() -> str:
    """Returns the known hardware as a Markdown table."""
    from shardax.plan.hardware.hardware import HARDWARE

    header = [
        "| | bf16, 10^12 operations/s | usable GiB | its GB/s | a link, GB/s | network, GB/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = []
    for chip in HARDWARE.values():
        if chip.kind == "cpu":  # each is another one
            continue
        rates = (chip.memory_bandwidth, chip.link_bandwidth, chip.network_bandwidth)
        figures = [chip.peak("bf16") / 1e12, chip.usable_bytes / 2**30, *(r / 1e9 for r in rates)]
        rows.append(f"| `{chip.name}` |" + "".join(f" {figure:.1f} |" for figure in figures))
    return "\n".join(header + rows)


# A page shows one of these by its name in double braces.
myst_substitutions = {"families": _table_of_families(), "hardware": _table_of_hardware()}

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes as fields of the class, so that those of dataclasses are not described twice.
napoleon_use_ivar = True


class NotebookParser(MystParser):
    """Reads a notebook as a page: its prose, its code and the outputs that are stored in it."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Reads the notebook's text, JSON, into the document."""
        title, *cells = json.loads(inputstring)["cells"]
        name = os.path.basename(document["source"])
        pages = ["".join(title["source"]), f"{{download}}`Download this notebook <{name}>`"]
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                pages.append(source)
            else:
                pages += [_block("{code-block} python", source), *map(_shown, cell["outputs"])]
        super().parse("\n\n".join(pages) + "\n", document)


def _shown(output: dict[str, Any]) -> str:
    """An output as MyST: HTML as it is, or text, whose lines of prose are wrapped."""
    data = output.get("data", {})
    if "text/html" in data:
        html = f'<div class="notebook-output">{"".join(data["text/html"])}</div>'
        return _block("{raw} html", html)
    lines = "".join(output.get("text") or data["text/plain"]).rstrip().splitlines()
    wrapped = (
        line if "  " in line.strip() or "│" in line else textwrap.fill(line, 84) for line in lines
    )
    return _block("{code-block} text", ":class: notebook-output\n\n" + "\n".join(wrapped))


def _block(kind: str, text: str) -> str:
    return f"`````{kind}\n{text}\n`````"


def setup(app: Any) -> None:
    """Makes pages of notebooks; they are not executed here but by `make notebooks`."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
