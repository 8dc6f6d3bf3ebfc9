# SPDX-License-Identifier: Apache-2.0
"""The words of the package: names, annotations, refusals and first lines, counted.

*Vague names* say that a value was found, given or made, and not what it is; counted are names that
are assigned and parameters. *Guards* are ``raise`` statements, ``if`` blocks and handlers that end
with one, and functions with names like ``_check_shape``. A *relative clause* in the first line of a
docstring is one with ``that``, ``which``, ``whose``, ``what``, ``where``, ``how`` or ``who``.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.house.sources import ROOT, package_files

_VAGUE_TEXT = """
    each found given known some one other others wanted made shown asked taken kept own gone here
    there rest held beside around turned before after what
"""
VAGUE = frozenset(_VAGUE_TEXT.split())
_RELATIVE = re.compile(r"\b(that|which|whose|what|where|how|who)\b", re.IGNORECASE)
_GUARD = re.compile(r"_?(check|refuse|require|explain|validate|unfit|not_|did_you|near|require)")
_PRIVATE_IMPORT = re.compile(r"^\s*(from|import) shardax[.\w]*\._", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Words:
    """What was counted."""

    names: collections.Counter[str] = field(default_factory=collections.Counter)
    annotations_any: int = 0
    raises: int = 0
    guard_lines: int = 0
    first_lines: int = 0
    relative: list[str] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)

    @property
    def vague_share(self) -> float:
        """Share of vague names in all that are assigned, in percent."""
        vague = sum(count for name, count in self.names.items() if name.lstrip("_") in VAGUE)
        return 100 * vague / max(1, self.names.total())


def count(tree: ast.Module, words: Words, place: str = "") -> None:
    """Adds what a module has."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        guard = _guarded(node)
        if guard is not None:
            lines.update(range(guard[0], guard[1] + 1))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            words.names[node.id] += 1
        elif isinstance(node, ast.arg):
            words.names[node.arg] += 1
        elif isinstance(node, ast.Name):
            words.annotations_any += node.id == "Any"
        elif isinstance(node, ast.Raise):
            words.raises += 1
        elif isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Interrupted")):
            words.errors.add(node.name)
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text:
            words.first_lines += 1
            first = text.splitlines()[0]
            if _RELATIVE.search(first):
                words.relative.append(f"{place}:{getattr(node, 'lineno', 1)} {first}")
    words.guard_lines += len(lines)


def _guarded(node: ast.AST) -> tuple[int, int] | None:
    """First and last line of a guard."""
    if isinstance(node, ast.Raise):
        return node.lineno, node.end_lineno or node.lineno
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        return node.lineno, node.body[-1].end_lineno or node.lineno
    if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
        return node.lineno, node.end_lineno or node.lineno
    if isinstance(node, ast.FunctionDef) and _GUARD.match(node.name):
        return node.lineno, node.end_lineno or node.lineno
    return None


@functools.cache
def package_words() -> Words:
    """Counts the words of the package."""
    words = Words()
    for source in package_files():
        count(source.tree, words, source.place)
    return words


def private_test_files() -> list[Path]:
    """Test files that import private modules."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return [path for path in files if _PRIVATE_IMPORT.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Prints the 100 most frequent names, and the first lines with relative clauses."""
    words = package_words()
    names = [f"{name} {number}" for name, number in words.names.most_common(100)]
    print(", ".join(names), *words.relative, sep="\n")


if __name__ == "__main__":
    main()
