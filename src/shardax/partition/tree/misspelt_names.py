# SPDX-License-Identifier: Apache-2.0
"""Warnings of names in rules and arrays that look like misspellings of each other."""

from __future__ import annotations

from collections.abc import Hashable

from shardax._core.errors import warn
from shardax._core.graph.paths import Path, format_path
from shardax.partition import findings
from shardax.partition.context import told_warnings
from shardax.partition.rules import map_to_themselves
from shardax.partition.tree.layout import TreeLayout


def warn_of_names(layout: TreeLayout) -> None:
    """Warns of misspelt names in the rules and arrays of a layout."""
    if map_to_themselves(layout.rules):
        return  # replicated on purpose, or by names of mesh axes alone

    # The text about a name of arrays is one for all of them. The text about a rule lists paths
    # of the tree, which may be another tree's the next time, so the rule is its key.
    texts: dict[Hashable, str] = {}
    paths: dict[Hashable, list[Path]] = {}
    for diagnostic in layout.diagnostics:
        if diagnostic.code == "unmapped-name" and diagnostic.severity == "warning":
            text = diagnostic.message.removeprefix(f"{format_path(diagnostic.path)}: ")
            texts[text] = text
            paths.setdefault(text, []).append(diagnostic.path)
    for rule, diagnostic in layout.unused_rules:
        if diagnostic.code == "unused-rule" and diagnostic.severity == "warning":
            texts[rule] = diagnostic.message

    given_warnings = told_warnings()
    if given_warnings is not None:
        texts = {key: text for key, text in texts.items() if key not in given_warnings}
        given_warnings.update(texts)

    lines: list[str] = []
    for key, text in texts.items():
        paths_of_text = paths.get(key, [()])
        if paths_of_text != [()]:  # neither of a rule nor of the only array
            text = f"{findings.paths_text(paths_of_text)}: {text}"
        lines.append(text)
    if lines:
        warn("Names of axes look misspelt. " + "\n  ".join(lines))
