# SPDX-License-Identifier: Apache-2.0
"""Imports of the new text, the line that ends a program, and comments of what went."""

from __future__ import annotations

from collections import Counter
from typing import Any

import libcst as cst

from shardax._migrate.program import (
    Importing,
    SourceProgram,
    bound_name,
    code_of,
    imported_names,
    walk,
)

GUARD = "shardax migrate left "
# Modules that the new text names, with what is imported.
_MODULES = {"functools": "functools", "jax": "jax", "typing": "typing", "sx": "shardax"}


class NewNames:
    """The names by which the new text reaches modules.

    Attributes:
        translated: First names of what is translated.
        replaced: What the imports of the file became, by which a second walk finds them.
    """

    def __init__(self, program: SourceProgram) -> None:
        self.program = program
        self.translated: set[cst.CSTNode] = set()
        self.replaced: dict[cst.CSTNode, Importing] = {}
        self._used: set[str] = set()
        self._present = {module for module in _MODULES if self._is_present(module)}
        self._aliases = {module: self._alias(module) for module in _MODULES}

    def _is_present(self, module: str) -> bool:
        """Whether the file imports a module under its name, before all references, and only so."""
        nodes = [
            getattr(each, "node", None)
            for each in self.program.assignments()
            if each.name == module
        ]
        lines = [self.program.line(node) for node in self.program.references]
        is_first = [
            isinstance(node, cst.Import)
            and _binds(node, module)
            and [*self.program.around(node)][1:] == [self.program.module]
            and self.program.line(node) < min(lines, default=0)
            for node in nodes
        ]
        return bool(nodes) and all(is_first) and module not in self.program.hidden

    def _alias(self, module: str) -> str:
        """Returns the name of a module, or one that the file does not use."""
        words = {each.name for each in self.program.assignments()}
        for name in self.program.all(cst.Name):
            around = self.program.around(name)
            place = next(each for each in around if not isinstance(each, cst.Attribute))
            # Of what is imported, only the name that it gets counts.
            if not isinstance(place, cst.ImportAlias | cst.ImportFrom):
                words.add(name.value)

        if module in self._present or module not in words:
            return module
        whole = _MODULES[module]
        candidates = [whole, f"_{whole}", *(f"_{whole}_{number}" for number in range(2, 99))]
        return next(name for name in candidates if name not in words)

    def code(self, target: str) -> str:
        """Returns the code of a target, by the names that are free in this file."""
        module, dot, rest = target.partition(".")
        if not dot or module not in _MODULES:
            return target
        self._used.add(module)
        return f"{self._aliases[module]}.{rest}"

    def imports(self) -> list[cst.BaseSmallStatement]:
        """Returns the imports of what the new text names and the file does not import."""
        found: list[cst.BaseSmallStatement] = []
        for module, whole in _MODULES.items():
            alias = self._aliases[module]
            if module in self._used - self._present:
                asname = None if alias == whole else cst.AsName(cst.Name(alias))
                found.append(cst.Import([cst.ImportAlias(cst.Name(whole), asname)]))
        return found


def _binds(node: cst.Import, name: str) -> bool:
    """Whether an import binds the name of a module to that module."""
    found = [pair for pair in imported_names(node) if bound_name(pair[0]) == name]
    wholes = {whole if alias.asname else whole.partition(".")[0] for alias, whole in found}
    return wholes == {_MODULES[name]}


class ImportRewriter(cst.CSTTransformer):
    """Takes away the imports of what is translated, and puts those of the new names there."""

    def __init__(self, names: NewNames) -> None:
        super().__init__()
        self.names = names
        self._is_imported = False  # for all of the file

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Returns what a node becomes; a statement keeps the comments of what it lost."""
        new: Any = super().on_leave(original_node, updated_node)
        if original_node in self.names.replaced:
            new = self._replaced(self.names.replaced[original_node], new)
        elif isinstance(original_node, cst.SimpleStatementLine):
            new = _on_lines_of_their_own(original_node, new)
        return with_lost_comments(original_node, new)

    def _replaced(self, old: Importing, new: Any) -> Any:
        """Returns the imports that stand for one: the new ones, and what stays of it."""
        is_translated = self.names.translated.__contains__
        program = self.names.program
        uses = [program.uses.get((old, bound_name(alias)), []) for alias, _ in imported_names(old)]
        if not any(is_translated(use) for each in uses for use in each):
            return new
        parts = [] if self._is_imported else self.names.imports()
        self._is_imported |= [*program.around(old)][1:] == [program.module]

        pairs = zip(new.names, uses, strict=True)
        stays = [alias for alias, each in pairs if not each or not all(map(is_translated, each))]
        if stays:
            stays[-1] = stays[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            parts.append(new.with_changes(names=stays))
        return cst.FlattenSentinel(parts)


def _on_lines_of_their_own(old: cst.SimpleStatementLine, new: cst.SimpleStatementLine) -> Any:
    """Returns a line, of which what came in front stands on lines of its own."""
    if not new.body:
        is_bare = not any(isinstance(node, cst.Comment) for node in walk(old))
        return cst.RemoveFromParent() if is_bare else new.with_changes(body=[cst.Pass()])
    count = max(len(new.body) - len(old.body), 0)
    lines = [cst.SimpleStatementLine([part]) for part in new.body[:count]]
    lines.append(new.with_changes(body=new.body[count:], leading_lines=[]))
    lines[0] = lines[0].with_changes(leading_lines=new.leading_lines)
    return cst.FlattenSentinel(lines)


def is_guard(statement: cst.CSTNode) -> bool:
    """Whether a statement is the line that ends a program of which something is left."""
    return code_of(statement).startswith(f'raise SystemExit("{GUARD}')


def with_guard(module: cst.Module, text: str) -> cst.Module:
    """Returns a module that ends at its first line with a text; without a text it goes on."""
    body = [statement for statement in module.body if not is_guard(statement)]
    if text:
        heads = [position for position, part in enumerate(body) if not _is_head(part, position)]
        position = heads[0] if heads else len(body)
        body.insert(position, cst.parse_statement(f'raise SystemExit("{text}")\n'))
    return module.with_changes(body=body)


def _is_head(statement: cst.CSTNode, position: int) -> bool:
    """Whether a statement must stand first: the docstring, or an import of ``__future__``."""
    part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(part, cst.Expr):
        return position == 0 and isinstance(part.value, cst.BaseString)
    return isinstance(part, cst.ImportFrom) and code_of(part).startswith("from __future__")


def with_lost_comments(old: cst.CSTNode, new: Any) -> Any:
    """Returns a statement, or what stands for it, with the comments that went above it."""
    if not isinstance(old, cst.BaseStatement) or isinstance(new, cst.RemovalSentinel):
        return new
    first, *others = [*new] if isinstance(new, cst.FlattenSentinel) else [new]
    lost = Counter(_comments(old))
    for statement in (first, *others):
        lost.subtract(_comments(statement))
    lines = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in lost.elements()]
    if not lines:
        return new
    first = first.with_changes(leading_lines=[*first.leading_lines, *lines])
    return cst.FlattenSentinel([first, *others])


def _comments(node: cst.CSTNode) -> list[str]:
    return [part.value for part in walk(node) if isinstance(part, cst.Comment)]
