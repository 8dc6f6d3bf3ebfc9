# SPDX-License-Identifier: Apache-2.0
"""The changes of a plan, in the text: names, arguments, imports, and the line that ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import libcst as cst

from shardax._migrate.arguments import CallPlan
from shardax._migrate.plan import Plan
from shardax._migrate.program import (
    Program,
    bound_name,
    code_of,
    dotted_words,
    imported_names,
    library_of,
)

# Modules that the new text names.
_WRITTEN = frozenset({"sx", "jax", "functools", "typing"})
_MODULES = {"sx": "shardax"}
GUARD = "shardax migrate left "


class Imports:
    """Which imports go, and which come in their places."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.program = plan.program
        self._uses = self._uses_of_imports()
        self._needed = self._needed_modules()
        self._aliases = {module: self._alias(module) for module in self._modules()}

    def code(self, target: str) -> str:
        """Returns the code of a target, by the names that are free in this file."""
        module, dot, rest = target.partition(".")
        return f"{self._aliases.get(module, module)}{dot}{rest}"

    def goes(self, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, name: str) -> bool:
        """Whether all that an import binds is translated, so that it goes."""
        uses = self._uses.get((node, bound_name(alias)), [])
        is_translated = library_of(name) in self.plan.libraries or name == "flax"
        return is_translated and bool(uses) and all(use in self.plan.handled for use in uses)

    def unused(self) -> Iterator[tuple[int, str]]:
        """Yields imports of Flax that the file does not use: another file may take them from it."""
        for node in self.program.imports:
            for alias, name in imported_names(node):
                is_library = library_of(name) is not None
                if is_library and not self._uses.get((node, bound_name(alias))):
                    yield self.program.line(node), bound_name(alias)

    def new(self, node: cst.Import | cst.ImportFrom) -> list[str]:
        """Returns the modules to import in the place of an import."""
        lines: list[str] = []
        for module in sorted(self._needed.get(node, ()), key=lambda name: (name == "sx", name)):
            alias, whole = self._aliases[module], _MODULES.get(module, module)
            if not self._is_present(module, node) or alias != module:
                lines.append(whole if alias == whole else f"{whole} as {alias}")
        return lines

    # --- what is used, and what is needed ---------------------------------------------------------

    def _uses_of_imports(self) -> dict[tuple[cst.CSTNode, str], list[cst.CSTNode]]:
        uses: dict[tuple[cst.CSTNode, str], list[cst.CSTNode]] = {}
        for name in self.program.uses:
            origin = self.program.origin(name.value, name)
            for node in origin.imports if origin is not None else ():
                uses.setdefault((node, name.value), []).append(name)
        for text in self.program.annotations:
            for word in dotted_words(text.value):
                origin = self.program.origin(word, text)
                for node in origin.imports if origin is not None else ():
                    uses.setdefault((node, word.partition(".")[0]), []).append(text)
        return uses

    def _needed_modules(self) -> dict[cst.CSTNode, set[str]]:
        needed: dict[cst.CSTNode, set[str]] = {}
        for reference in self.program.references:
            modules = {self._module_of(reference.node), self._module_of(reference.parent)}
            plan = self.plan.calls.get(reference.parent)
            owner = self.program.parents.get(reference.parent)
            plan = plan or (self.plan.calls.get(owner) if owner is not None else None)
            for code in plan.added.values() if plan is not None else ():
                modules.add(code.partition(".")[0] if "." in code else "")
            for node in reference.origin.imports:
                needed.setdefault(node, set()).update(modules & _WRITTEN)
        for text in self.plan.quoted:
            for word in dotted_words(cst.ensure_type(text, cst.SimpleString).value):
                origin = self.program.origin(word, text)
                for node in origin.imports if origin is not None else ():
                    needed.setdefault(node, set()).add("sx")
        return needed

    def _module_of(self, node: cst.CSTNode) -> str:
        return self.plan.targets.get(node, "").partition(".")[0]

    def _modules(self) -> set[str]:
        return {module for modules in self._needed.values() for module in modules}

    # --- names that are free ----------------------------------------------------------------------

    def _alias(self, module: str) -> str:
        """Returns the name by which the new text reaches a module."""
        whole = _MODULES.get(module, module)
        bindings = list(self.program.bound(module))
        is_same = all(_binds(getattr(b, "node", None), module, whole) for b in bindings)
        if module not in self.program.words and not bindings:
            return module
        if bindings and is_same and module not in self.program.hidden:
            return module
        candidates = [whole, f"_{whole}", *(f"_{whole}_{number}" for number in range(2, 99))]
        taken = self.program.words | {module}
        return next(
            name for name in candidates if name not in taken and not [*self.program.bound(name)]
        )

    def _is_present(self, module: str, node: cst.CSTNode) -> bool:
        """Whether the file imports a module before anything uses it."""
        whole = _MODULES.get(module, module)
        body = self.program.module.body
        position = next(
            i for i, statement in enumerate(body) if _is_within(self.program, node, statement)
        )
        for index, statement in enumerate(body):
            if index > position and not _is_import_line(statement):
                return False
            parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
            if any(_binds(part, module, whole) for part in parts):
                return True
        return False


def _binds(node: cst.CSTNode | None, name: str, module: str) -> bool:
    """Whether an import binds a name to a module."""
    if not isinstance(node, cst.Import):
        return False
    found = [(alias, whole) for alias, whole in imported_names(node) if bound_name(alias) == name]
    return bool(found) and all(
        (whole if alias.asname is not None else whole.partition(".")[0]) == module
        for alias, whole in found
    )


def _is_within(program: Program, node: cst.CSTNode, owner: cst.CSTNode) -> bool:
    while node is not owner and node in program.parents:
        node = program.parents[node]
    return node is owner


def _is_import_line(statement: cst.CSTNode) -> bool:
    parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    return bool(parts) and all(isinstance(part, cst.Import | cst.ImportFrom) for part in parts)


class Rewriter(cst.CSTTransformer):
    """Makes the changes of a plan."""

    def __init__(self, plan: Plan, imports: Imports) -> None:
        super().__init__()
        self.plan = plan
        self.imports = imports

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        new = super().on_leave(original_node, updated_node)
        if not isinstance(new, cst.CSTNode):
            return new
        plan = self.plan
        if original_node in plan.removed:
            return cst.RemoveFromParent()
        if original_node in plan.targets:
            old = cast(cst.BaseExpression, new)
            code = self.imports.code(plan.targets[original_node])
            new = cst.parse_expression(code).with_changes(lpar=old.lpar, rpar=old.rpar)
        if original_node in plan.calls:
            call = cst.ensure_type(new, cst.Call)
            new = call.with_changes(args=self._arguments(plan.calls[original_node], call.args))
        if original_node in plan.quoted:
            code = plan.quoted[original_node].replace("sx.", self.imports.code("sx."))
            new = cst.SimpleString(code)
        if original_node in plan.changes:
            new = plan.changes[original_node](cast(cst.BaseExpression, new))
        if original_node in plan.assignments:
            new = _assignment(cst.ensure_type(new, cst.Expr))
        if original_node in plan.bare_classes:
            new = _without_pytree_option(cst.ensure_type(new, cst.ClassDef))
        if isinstance(new, cst.BaseStatement) and isinstance(original_node, cst.BaseStatement):
            return _with_comments(original_node, new)
        return new

    def _arguments(self, plan: CallPlan, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        added = {keyword: self.imports.code(code) for keyword, code in plan.added.items()}
        return CallPlan(plan.keywords, plan.dropped, plan.values, added).apply(args)

    # --- imports ----------------------------------------------------------------------------------

    def leave_SimpleStatementLine(  # noqa: N802 (LibCST names it)
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        new, kept = self._replaced(original_node.body, updated_node.body)
        if kept is None:
            return updated_node
        lines: list[cst.BaseStatement] = [cst.parse_statement(f"import {name}\n") for name in new]
        block = self.plan.program.parents[original_node]
        is_alone = not isinstance(block, cst.Module) and len(block.children) == 1
        if kept or (not lines and is_alone):
            lines.append(updated_node.with_changes(body=kept or [cst.Pass()], leading_lines=[]))
        if not lines:
            return cst.FlattenSentinel([])

        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        if not kept:
            lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        lines[0] = _with_comments(original_node, lines[0], lines[1:])
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(  # noqa: N802 (LibCST names it)
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        new, kept = self._replaced(original_node.body, updated_node.body)
        if kept is None:
            return updated_node
        parts = [
            cst.ensure_type(cst.parse_statement(f"import {name}\n"), cst.SimpleStatementLine).body[
                0
            ]
            for name in new
        ]
        return updated_node.with_changes(body=[*parts, *kept] or [cst.Pass()])

    def _replaced(
        self, old: Sequence[cst.BaseSmallStatement], new: Sequence[cst.BaseSmallStatement]
    ) -> tuple[list[str], list[cst.BaseSmallStatement] | None]:
        """Returns the modules to import, and the other statements; None where nothing changes."""
        modules: dict[str, None] = {}
        kept: list[cst.BaseSmallStatement] = []
        is_changed = False
        for original, statement in zip(old, new, strict=True):
            if not isinstance(original, cst.Import | cst.ImportFrom):
                kept.append(statement)
                continue
            names = imported_names(original)
            stay = [alias for alias, name in names if not self.imports.goes(original, alias, name)]
            coming = self.imports.new(original)
            modules.update(dict.fromkeys(coming))
            is_changed |= bool(coming) or len(stay) < len(names)
            if len(stay) == len(names):
                kept.append(statement)
            elif stay:
                stay[-1] = stay[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
                kept.append(statement.with_changes(names=stay))
        return list(modules), kept if is_changed else None


# --- the line that ends the program ---------------------------------------------------------------


def with_guard(module: cst.Module, text: str) -> cst.Module:
    """Returns a module that ends at its first line with a text; without a text it goes on."""
    body = [statement for statement in module.body if not _is_guard(statement)]
    if text:
        heads = [position for position, part in enumerate(body) if not _is_head(part, position)]
        guard = cst.parse_statement(f'raise SystemExit("{text}")\n')
        body.insert(heads[0] if heads else len(body), guard)
    return module.with_changes(body=body)


def _is_guard(statement: cst.CSTNode) -> bool:
    return code_of(statement).startswith(f'raise SystemExit("{GUARD}')


def _is_head(statement: cst.CSTNode, position: int) -> bool:
    """Whether a statement must stand first: the docstring, or an import of ``__future__``."""
    part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(part, cst.Expr):
        return position == 0 and isinstance(part.value, cst.BaseString)
    if not isinstance(part, cst.ImportFrom) or part.module is None:
        return False
    return isinstance(part.module, cst.Name) and part.module.value == "__future__"


def _with_comments(
    old: cst.BaseStatement, new: cst.BaseStatement, others: Sequence[cst.BaseStatement] = ()
) -> cst.BaseStatement:
    """Returns a statement with the comments that were beside what it lost, above it."""
    kept = Counter(comment for statement in (new, *others) for comment in _comments(statement))
    lost = list((Counter(_comments(old)) - kept).elements())
    if not lost or not hasattr(new, "leading_lines"):
        return new
    lines = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in lost]
    return new.with_changes(leading_lines=[*new.leading_lines, *lines])  # pyright: ignore[reportAttributeAccessIssue]


def _comments(node: cst.CSTNode) -> Iterator[str]:
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, cst.Comment):
            yield node.value
        stack.extend(reversed(node.children))


def _assignment(statement: cst.Expr) -> cst.Assign:
    call = cst.ensure_type(statement.value, cst.Call)
    function = cst.ensure_type(call.func, cst.Attribute)
    target = cst.AssignTarget(function.with_changes(attr=cst.Name("value")))
    return cst.Assign([target], call.args[0].value)


def _without_pytree_option(owner: cst.ClassDef) -> cst.ClassDef:
    keywords = [
        arg for arg in owner.keywords if arg.keyword is None or arg.keyword.value != "pytree"
    ]
    bases = list(owner.bases)
    last = keywords or bases
    if last:
        last[-1] = last[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return owner.with_changes(bases=bases, keywords=keywords)
