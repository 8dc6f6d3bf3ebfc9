# SPDX-License-Identifier: Apache-2.0
"""The sources of this repository, parsed: what the tests of the house look at.

*Import*: one imported name at one line, as an absolute dotted path; ``from a.b import c`` imports
``a.b.c``. Imports inside functions and under ``TYPE_CHECKING`` count like any other.
*Module level*: where importing the module runs the code; not inside a function and not under
``TYPE_CHECKING``. *Outline*: what the tests look at of one file, taken in one walk over its
statements. Parsing all files takes long and trees take much memory, so it is done once and the tree
is let go.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardax"
# Folders with code of this project. Others (environments, runs, builds) are not looked into.
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef
# Fields with statements, or with parts that have them, in the order of the source.
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclass(frozen=True)
class Import:
    """One imported name."""

    name: str
    line: int
    at_module_level: bool


@dataclass(frozen=True)
class Description:
    """The docstring of one class or function, empty where there is none, by its qualified name."""

    name: str
    line: int
    docstring: str


@dataclass
class Outline:
    """What the tests look at of one file.

    Attributes:
        docstring: That of the file, empty where there is none.
        undocumented: Public classes and functions of the module without docstring: (line, name).
        descriptions: Classes and functions, inner ones too, with their docstrings.
        classes: Those at the top of the module, with the names of their bases.
        statements: Every import statement, and whether it stands at module level.
    """

    docstring: str
    undocumented: list[tuple[int, str]]
    descriptions: list[Description]
    classes: list[tuple[str, set[str]]]
    statements: list[tuple[ast.Import | ast.ImportFrom, bool]] = field(default_factory=list)


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
        """The dotted name, for a file of the package: ``shardax._core.state.state``."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.place)

    @functools.cached_property
    def outline(self) -> Outline:
        tree = self.tree
        outline = Outline(
            docstring=ast.get_docstring(tree) or "",
            undocumented=[
                (node.lineno, node.name)
                for node in tree.body
                if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
                if not ast.get_docstring(node)
            ],
            descriptions=[*_descriptions(tree.body)],
            classes=[
                (node.name, {base.id for base in node.bases if isinstance(base, ast.Name)})
                for node in tree.body
                if isinstance(node, ast.ClassDef)
            ],
        )
        _walk(tree, outline)
        return outline

    @functools.cached_property
    def jax_paths(self) -> set[str]:
        """Expressions with a dot that begin with ``jax`` or ``jaxlib``, as text."""
        return {
            ast.unparse(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute) and _first_name(node) in ("jax", "jaxlib")
        }

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import in the file."""
        return tuple(
            Import(f"{prefix}{alias.name}", statement.lineno, at_module_level)
            for statement, at_module_level in self.outline.statements
            for prefix in [
                f"{_origin(self, statement)}." if isinstance(statement, ast.ImportFrom) else ""
            ]
            for alias in statement.names
        )


def _walk(tree: ast.Module, outline: Outline) -> None:
    """Puts into the outline the statements of the tree, from top to bottom."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    while waiting:
        node, at_module_level = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            outline.statements.append((node, at_module_level))
        inside = at_module_level and not (
            isinstance(node, Function)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        )
        blocks = (getattr(node, name, ()) for name in BLOCKS)
        inner = [child for block in blocks for child in block]
        waiting.extend((child, inside) for child in reversed(inner))


def _descriptions(body: list[ast.stmt], prefix: str = "") -> Iterator[Description]:
    """Yields what the classes and functions of a block, and those inside them, are."""
    for node in body:
        if isinstance(node, Documented):
            name = f"{prefix}{node.name}"
            yield Description(name, node.lineno, ast.get_docstring(node) or "")
            inner = f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>."
            yield from _descriptions(node.body, inner)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _descriptions(node.body, prefix)


def _first_name(node: ast.AST) -> str:
    """The name that the text of an expression begins with, or nothing."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _origin(source: Source, statement: ast.ImportFrom) -> str:
    """The module that a ``from`` statement names, relative dots resolved."""
    if not statement.level:
        return statement.module or ""
    package = source.module.split(".")
    up = statement.level - (1 if source.path.name == "__init__.py" else 0)
    package = package[: len(package) - up]
    return ".".join([*package, statement.module] if statement.module else package)


@functools.cache
def python_files() -> list[Source]:
    """Every Python file of the project: package, tests, benchmarks, pages, the root."""
    paths = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        paths.extend((ROOT / folder).rglob("*.py"))
    return [Source(path) for path in sorted(paths) if "_build" not in path.parts]


@functools.cache
def package_files() -> list[Source]:
    """Every Python file of the package."""
    return [source for source in python_files() if PACKAGE in source.path.parents]


def faces() -> list[Source]:
    """The ``__init__.py`` of the package and of each subpackage: they list what is public."""
    return [source for source in package_files() if source.path.name == "__init__.py"]
