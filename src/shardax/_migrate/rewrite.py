# SPDX-License-Identifier: Apache-2.0
"""The changes of a plan, in the text: names, arguments, imports, and the line that ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import libcst as cst
from libcst import metadata

from shardax._migrate.plan import MigrationPlan
from shardax._migrate.program import (
    Importing,
    bound_name,
    code_of,
    dotted_words,
    imported_names,
    is_guard,
    is_no_use,
    library_of,
)

# Modules that the new text names, with what is imported.
_WRITTEN = {"functools": "functools", "jax": "jax", "typing": "typing", "sx": "shardax"}


class Imports:
    """Which imports go, and which come in their places."""

    def __init__(self, plan: MigrationPlan) -> None:
        self.plan = plan
        self.program = plan.program
        # The names that use what an import binds, by the import and what it binds.
        self._uses: dict[tuple[cst.CSTNode, str], list[cst.CSTNode]] = {}
        for node in self.program.all(cst.Name):
            if not is_no_use(node, self.program.parents[node]):
                self._note_use(node.value, node)
        for annotation in self.program.all(cst.Annotation):
            text = annotation.annotation
            for word in dotted_words(text.value) if isinstance(text, cst.SimpleString) else ():
                self._note_use(word.partition(".")[0], text)
        self._needed = self._needed_modules()
        self._words = {name.value for name in self.program.all(cst.Name)}
        self._aliases = {module: self._alias(module) for module in _WRITTEN}

    def _note_use(self, name: str, node: cst.CSTNode) -> None:
        origin = self.program.origin(name, node)
        for imported in origin.imports if origin is not None else ():
            self._uses.setdefault((imported, name), []).append(node)

    def code(self, target: str) -> str:
        """Returns the code of a target, by the names that are free in this file."""
        module, dot, rest = target.partition(".")
        return f"{self._aliases.get(module, module)}{dot}{rest}"

    def goes(self, node: Importing, alias: cst.ImportAlias, name: str) -> bool:
        """Whether all that an import binds is translated, so that it goes."""
        uses = self._uses.get((node, bound_name(alias)), [])
        is_translated = library_of(name) in self.plan.libraries or name == "flax"
        return is_translated and bool(uses) and all(use in self.plan.handled for use in uses)

    def unused(self) -> Iterator[tuple[int, str]]:
        """Yields imports of a library that the file does not use, with their lines."""
        for node in self.program.imports():
            for alias, name in imported_names(node):
                if library_of(name) and (node, bound_name(alias)) not in self._uses:
                    yield self.program.line(node), bound_name(alias)

    def new(self, node: Importing) -> list[str]:
        """Returns the modules to import in the place of an import."""
        lines: list[str] = []
        for module, whole in _WRITTEN.items():
            alias = self._aliases[module]
            is_present = alias == module and self._is_present(module, node)
            if module in self._needed.get(node, ()) and not is_present:
                lines.append(whole if alias == whole else f"{whole} as {alias}")
        return lines

    def _needed_modules(self) -> dict[cst.CSTNode, set[str]]:
        """Returns the modules that the new text names, by the imports that they replace."""
        needed: dict[cst.CSTNode, set[str]] = {}
        for reference in self.program.references:
            owner = self.program.parents.get(reference.parent)
            places = [reference.node, reference.parent, *([owner] if owner is not None else [])]
            codes = [self.plan.targets[place] for place in places if place in self.plan.targets]
            for place in places:
                codes += self.plan.calls[place].added.values() if place in self.plan.calls else ()
            modules = {code.partition(".")[0] for code in codes if "." in code}
            for node in reference.origin.imports:
                needed.setdefault(node, set()).update(modules)
        return needed

    def _alias(self, module: str) -> str:
        """Returns the name by which the new text reaches a module."""
        whole, bindings = _WRITTEN[module], list(self.program.bound(module))
        is_same = all(_binds(getattr(b, "node", None), module, whole) for b in bindings)
        # A name that one function binds is none for the others.
        is_everywhere = all(isinstance(b.scope, metadata.GlobalScope) for b in bindings)
        is_free = is_everywhere if bindings else module not in self._words
        if is_free and is_same and module not in self.program.hidden:
            return module
        candidates = [whole, f"_{whole}", *(f"_{whole}_{number}" for number in range(2, 99))]
        return next(
            name
            for name in candidates
            if name != module and name not in self._words and not [*self.program.bound(name)]
        )

    def _is_present(self, module: str, node: cst.CSTNode) -> bool:
        """Whether the file imports a module before anything uses it."""
        is_behind = False
        for statement in self.program.module.body:
            parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
            is_import = bool(parts) and all(isinstance(part, Importing) for part in parts)
            if is_behind and not is_import:
                return False
            if any(_binds(part, module, _WRITTEN[module]) for part in parts):
                return True
            is_behind = is_behind or self._is_within(node, statement)
        return False

    def _is_within(self, node: cst.CSTNode, owner: cst.CSTNode) -> bool:
        while node is not owner and node in self.program.parents:
            node = self.program.parents[node]
        return node is owner


def _binds(node: cst.CSTNode | None, name: str, module: str) -> bool:
    """Whether an import binds a name to a module."""
    names = imported_names(node) if isinstance(node, cst.Import) else []
    found = [(alias, whole) for alias, whole in names if bound_name(alias) == name]
    wholes = {whole if alias.asname else whole.partition(".")[0] for alias, whole in found}
    return wholes == {module}


class Rewriter(cst.CSTTransformer):
    """Makes the changes of a plan."""

    def __init__(self, plan: MigrationPlan, imports: Imports) -> None:
        super().__init__()
        self.plan = plan
        self.imports = imports

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Returns what a node becomes."""
        plan = self.plan
        if original_node in plan.removed:
            return cst.RemoveFromParent()
        new: Any = super().on_leave(original_node, updated_node)
        if original_node in plan.targets:
            code = cst.parse_expression(self.imports.code(plan.targets[original_node]))
            new = code.with_changes(lpar=new.lpar, rpar=new.rpar)
        if original_node in plan.calls and isinstance(new, cst.Call):
            call_plan = plan.calls[original_node]
            added = {name: self.imports.code(code) for name, code in call_plan.added.items()}
            new = new.with_changes(args=replace(call_plan, added=added).apply(new.args))
        if original_node in plan.changes:
            new = plan.changes[original_node](new)
        if original_node in plan.assignments:
            new = _assignment(cst.ensure_type(new, cst.Expr))
        if isinstance(new, cst.ClassDef) and not plan.removed.isdisjoint(original_node.children):
            rows = {"keywords": [*new.keywords], "bases": [*new.bases]}
            for name, row in rows.items():
                if row and (name == "keywords" or not new.keywords):
                    row[-1] = row[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            new = new.with_changes(**rows)
        if isinstance(new, cst.BaseStatement):
            return _with_comments(original_node, new)
        return new

    def leave_SimpleStatementLine(  # noqa: N802 (LibCST names it)
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Returns a line whose imports are replaced, each on a line of its own."""
        new, kept = self._replaced(original_node.body, updated_node.body)
        if kept is None:
            return updated_node
        lines: list[cst.BaseStatement] = [cst.SimpleStatementLine([part]) for part in new]
        block = self.plan.program.parents[original_node]
        is_alone = not isinstance(block, cst.Module) and len(block.children) == 1
        if kept or (not lines and is_alone):
            lines.append(updated_node.with_changes(body=kept or [cst.Pass()], leading_lines=[]))
        if not lines:
            return cst.FlattenSentinel([])

        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        if not kept:
            lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel([_with_comments(original_node, *lines), *lines[1:]])

    def leave_SimpleStatementSuite(  # noqa: N802 (LibCST names it)
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        """Returns what stands on the line of its branch, with other imports."""
        new, kept = self._replaced(original_node.body, updated_node.body)
        body = [*new, *(kept or [])] or [cst.Pass()]
        return updated_node if kept is None else updated_node.with_changes(body=body)

    def _replaced(
        self, old: Sequence[cst.BaseSmallStatement], new: Sequence[cst.BaseSmallStatement]
    ) -> tuple[list[cst.BaseSmallStatement], list[cst.BaseSmallStatement] | None]:
        """Returns the new imports and the other statements; None where nothing changes."""
        modules: dict[str, None] = {}
        kept: list[cst.BaseSmallStatement] = []
        for original, statement in zip(old, new, strict=True):
            if not isinstance(original, Importing):
                kept.append(statement)
                continue
            names = imported_names(original)
            stay = [alias for alias, name in names if not self.imports.goes(original, alias, name)]
            modules.update(dict.fromkeys(self.imports.new(original)))
            if len(stay) == len(names):
                kept.append(statement)
            elif stay:
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                kept.append(statement.with_changes(names=stay))
        lines = [cst.parse_statement(f"import {module}\n") for module in modules]
        parts = [cst.ensure_type(line, cst.SimpleStatementLine).body[0] for line in lines]
        is_changed = bool(modules) or kept != list(new)
        return parts, kept if is_changed else None


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


def _with_comments(
    old: cst.CSTNode, new: cst.BaseStatement, *others: cst.BaseStatement
) -> cst.BaseStatement:
    """Returns a statement with the comments that were beside what it lost, above it."""
    kept = Counter(comment for statement in (new, *others) for comment in _comments(statement))
    lost = list((Counter(_comments(old)) - kept).elements())
    if not lost or not hasattr(new, "leading_lines"):
        return new
    lines = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in lost]
    return new.with_changes(leading_lines=[*getattr(new, "leading_lines", ()), *lines])


def _comments(node: cst.CSTNode) -> list[str]:
    found: list[str] = []
    stack = [node]
    while stack:
        node = stack.pop()
        found += [node.value] if isinstance(node, cst.Comment) else []
        stack.extend(reversed(node.children))
    return found


def _assignment(statement: cst.Expr) -> cst.Assign:
    """Returns ``v.value = x`` for ``v.set_value(x)``."""
    call = cst.ensure_type(statement.value, cst.Call)
    function = cst.ensure_type(call.func, cst.Attribute)
    target = cst.AssignTarget(function.with_changes(attr=cst.Name("value")))
    return cst.Assign([target], call.args[0].value)
