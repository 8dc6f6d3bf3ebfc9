# SPDX-License-Identifier: Apache-2.0
"""Names of places in a call: where each root stands, as the user would write it.

The path of a root begins with the name of the parameter it was passed for, so that the Variables of
two models in one call have different paths: ``.teacher.kernel`` and ``.student.kernel``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardax.core.paths import Path
from shardax.transforms.arguments import leaf_paths as leaf_paths
from shardax.transforms.lift import Arguments, Mixed, Root


def template_roots(template: Any) -> list[int]:
    """Returns the positions among the roots that an argument's template uses."""
    if isinstance(template, Root):
        return [template.position]
    return [root for _, root in template.roots] if isinstance(template, Mixed) else []


def root_places(label: str, template: Any) -> list[tuple[int, Path]]:
    """Returns (position among the roots, path) of each object of an argument."""
    if isinstance(template, Root):
        return [(template.position, (label,))]
    if not isinstance(template, Mixed):
        return []
    paths = leaf_paths(template.treedef)
    return [(root, (label, *paths[leaf])) for leaf, root in template.roots]


def root_names(labels: Iterable[str], arguments: Arguments) -> list[Path]:
    """Returns the path of each root.

    Args:
        labels: Name of the parameter of each positional argument.
        arguments: The arguments.
    """
    names: list[Path] = [()] * len(arguments.roots)
    for label, template in [*zip(labels, arguments.templates, strict=True), *arguments.named]:
        for root, path in root_places(label, template):
            names[root] = path
    return names


def plain_paths(template: Mixed) -> list[Path]:
    """Returns the paths of the arrays that stand beside the objects of an argument."""
    others = {leaf for leaf, _ in (*template.roots, *template.static)}
    paths = leaf_paths(template.treedef)
    return [path for leaf, path in enumerate(paths) if leaf not in others]
