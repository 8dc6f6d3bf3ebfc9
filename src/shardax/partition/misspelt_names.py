# SPDX-License-Identifier: Apache-2.0
"""Warnings of names in rules and arrays that look like misspellings of each other."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable
from contextvars import ContextVar

from shardax._core.errors import warn
from shardax._core.graph.paths import Path, format_path
from shardax.partition import findings
from shardax.partition.rules import map_to_themselves
from shardax.partition.tree_layout import TreeLayout

# The warnings of names that a block has given; None where each call gives its own.
_given_warnings: ContextVar[set[Hashable] | None] = ContextVar("given_warnings", default=None)


@contextlib.contextmanager
def telling_once(told: set[Hashable]) -> Generator[None]:
    """Leaves warnings of misspelt names out that stand in a set, and adds the others to it."""
    token = _given_warnings.set(told)
    try:
        yield
    finally:
        _given_warnings.reset(token)


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

    given_warnings = _given_warnings.get()
    if given_warnings is not None:
        texts = {key: text for key, text in texts.items() if key not in given_warnings}
        given_warnings.update(texts)

    lines: list[str] = []
    for key, text in texts.items():
        paths_of_text = paths.get(key, [()])
        is_of_root = paths_of_text == [()]  # a rule, or the only array
        lines.append(text if is_of_root else f"{findings.paths_text(paths_of_text)}: {text}")
    if lines:
        warn("Names of axes look misspelt. " + "\n  ".join(lines))
