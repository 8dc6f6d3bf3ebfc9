# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx; pytest runs the code of the pages."""

import gc
import os

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
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

# A page for each public name, from the packages that list them.
autosummary_generate = True
autosummary_imported_members = True


def _also_above() -> list[str]:
    """Names of ``shardax.partition`` that are described as names of ``shardax``."""
    import shardax as sx

    inner = vars(sx.partition)
    return [name for name in inner if getattr(sx, name, None) is inner[name]]


autosummary_context = {"also_above": _also_above()}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes as fields of the class, so that those of dataclasses are not described twice.
napoleon_use_ivar = True
