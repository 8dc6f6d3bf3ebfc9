# SPDX-License-Identifier: Apache-2.0
"""The sources of this repository, parsed: what the tests of the house look at.

*Import*: one imported name at one line, as an absolute dotted path; ``from a.b import c`` imports
``a.b.c``. Imports inside functions and under ``TYPE_CHECKING`` count like any other.
*Module level*: where importing the module runs the code; not inside a function and not under
``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardax"
# Folders with code of this project. Others (environments, runs, builds) are not looked into.
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name."""

    name: str
    line: int
    at_module_level: bool


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path

    @property
    def place(self) -> str:
        """The path from the root of the repository, as errors print it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """The dotted name, for a file of the package: ``shardax.core.state``."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.place)

    def imports(self) -> Iterator[Import]:
        """Every import in the file."""
        yield from _imports_under(self, self.tree, at_module_level=True)


def _imports_under(source: Source, node: ast.AST, *, at_module_level: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = at_module_level and not (
            isinstance(child, Function | ast.Lambda)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        )
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(f"{_origin(source, child)}.{alias.name}", child.lineno, inside)
        yield from _imports_under(source, child, at_module_level=inside)


def _origin(source: Source, statement: ast.ImportFrom) -> str:
    """The module that a ``from`` statement names, relative dots resolved."""
    if not statement.level:
        return statement.module or ""
    package = source.module.split(".")
    up = statement.level - (1 if source.path.name == "__init__.py" else 0)
    package = package[: len(package) - up]
    return ".".join([*package, statement.module] if statement.module else package)


def python_files() -> list[Source]:
    """Every Python file of the project: package, tests, benchmarks, pages, the root."""
    paths = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        paths.extend((ROOT / folder).rglob("*.py"))
    return [Source(path) for path in sorted(paths) if "_build" not in path.parts]


def package_files() -> list[Source]:
    """Every Python file of the package."""
    return [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


def faces() -> list[Source]:
    """The ``__init__.py`` of the package and of each subpackage: they list what is public."""
    return [source for source in package_files() if source.path.name == "__init__.py"]
