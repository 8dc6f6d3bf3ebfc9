# SPDX-License-Identifier: Apache-2.0
"""Folders show the architecture, imports have no cycles, one class name has one meaning."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator

from tests.house import public_api
from tests.house.sources import PACKAGE, Source, package_files

MOST_FILES_OF_A_FOLDER = 18
MOST_FILES_WITH_ONE_PREFIX = 3

# Modules with the name of another public thing of their package, until they are renamed, and why.
SHADOWING: dict[str, str] = {
    "shardax.host.export": "loads before the face sets the function; named by pickles of exports",
    "shardax.host.host_function": "loads before the face sets the function",
}


def test_folder_holds_at_most_18_files() -> None:
    counts = collections.Counter(source.path.parent for source in package_files())
    too_full = {str(folder): n for folder, n in counts.items() if n > MOST_FILES_OF_A_FOLDER}
    assert too_full == {}


def test_files_with_one_prefix_form_a_folder() -> None:
    families: dict[str, list[str]] = collections.defaultdict(list)
    for source in package_files():
        prefix, separator, _ = source.path.stem.partition("_")
        if separator and prefix:
            families[f"{source.path.parent.relative_to(PACKAGE)}/{prefix}"].append(source.place)
    assert {p: f for p, f in families.items() if len(f) >= MOST_FILES_WITH_ONE_PREFIX} == {}


def shadowing(face: Source) -> set[str]:
    """Modules of a package that have the name of something else that its face exports."""
    folder = face.path.parent
    modules = {each.stem for each in folder.glob("*.py")}
    modules |= {each.parent.name for each in folder.glob("*/__init__.py")}
    # A face may make its modules themselves public, as ``from shardax import nn as nn`` does.
    public = {
        alias.asname
        for statement in ast.walk(face.tree)
        if isinstance(statement, ast.ImportFrom) and statement.module == face.module
        for alias in statement.names
    }
    names = set(public_api.names_on(face)) - public
    return {f"{face.module}.{name}" for name in modules & names}


def test_module_names_equal_no_other_export() -> None:
    """Importing such a module anew would put it in the place of the function."""
    found = {module for face in public_api.faces() for module in shadowing(face)}
    assert found == SHADOWING.keys()


def class_names() -> dict[str, list[str]]:
    """Maps each class name, without leading underscores, to the modules that define it."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for source in package_files():
        for name, _ in source.outline.classes:
            found[name.lstrip("_")].append(source.module)
    return found


def ambiguous_class_names() -> dict[str, list[str]]:
    """Class names that stand for more than one class.

    Public classes of different faces may share a name, as ``nn.Linear`` and ``named.Linear`` do.
    """
    public = set(public_api.remembered_names())
    return {
        name: where
        for name, where in class_names().items()
        if len(where) > 1
        and not all(f"shardax.{module.split('.')[1]}.{name}" in public for module in where)
    }


def test_class_name_has_one_meaning() -> None:
    assert ambiguous_class_names() == {}


def import_cycles() -> list[list[str]]:
    """Finds groups of modules that import each other when they are imported."""
    modules = {source.module for source in package_files()}
    edges: dict[str, set[str]] = {}
    for source in package_files():
        imported = {
            item.name if item.name in modules else item.name.rpartition(".")[0]
            for item in source.imports
            if item.at_module_level
        }
        edges[source.module] = (imported & modules) - {source.module}
    return [sorted(group) for group in _components(edges) if len(group) > 1]


def _components(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yields the sets of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(edges[node])
        reach[start] = seen
    done: set[str] = set()
    for start in edges:
        if start not in done:
            group = {node for node in reach[start] if start in reach[node]} | {start}
            done |= group
            yield group


def test_imports_are_acyclic() -> None:
    assert import_cycles() == []
