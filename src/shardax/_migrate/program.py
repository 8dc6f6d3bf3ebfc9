# SPDX-License-Identifier: Apache-2.0
"""What the names of a program refer to, by the scopes of LibCST.

A name is certain where every binding that it can refer to imports the same thing. Names that are
bound again, deleted, or bound in a way that LibCST does not see, are uncertain, and so is every
name of a file with ``import *``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import libcst as cst
from libcst import metadata

from shardax._migrate.rules import FORMS, LEFT, LIBRARIES, NAMES, NNX

# LibCST's parser and visitors call themselves for each level of an expression.
_DEEPEST = 90
_DEEP_NAME = re.compile(
    r"(?:nn\.\w+|training\.optimizer|transforms\.\w+|\w+lib|graph|module|object|helpers)\.(\w+)"
)
_CODE_OF_TEXT = ("exec", "eval", "globals")
_IMPORTERS = ("import_module", "__import__", "importorskip", "find_spec", "patch")
_Importing = cst.Import | cst.ImportFrom


class UnreadableError(Exception):
    """A text that cannot be translated: it is no Python, or nested too deeply."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Origin:
    """What a name refers to, in full: ``flax.nnx.Linear``."""

    name: str
    imports: tuple[_Importing, ...]
    # Why it is not certain; empty where it is.
    doubt: str = ""


@dataclass(frozen=True)
class Reference:
    """A reference to a name of another library."""

    node: cst.BaseExpression
    library: str
    name: str  # behind the library's: "Linear", "metrics.Accuracy"; "" for the library itself
    origin: Origin
    parent: cst.CSTNode
    line: int


@dataclass
class Program:
    """A file, with what its names refer to."""

    module: cst.Module
    scopes: Mapping[cst.CSTNode, metadata.Scope | None]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    positions: Mapping[cst.CSTNode, metadata.CodeRange]
    calls: list[cst.Call] = field(default_factory=list)
    attributes: list[cst.Attribute] = field(default_factory=list)
    functions: list[cst.FunctionDef] = field(default_factory=list)
    classes: list[cst.ClassDef] = field(default_factory=list)
    imports: list[_Importing] = field(default_factory=list)
    targets: list[cst.CSTNode] = field(default_factory=list)  # of assignments
    annotations: list[cst.SimpleString] = field(default_factory=list)  # those in quotes
    words: set[str] = field(default_factory=set)  # every name that stands in the file
    uses: list[cst.Name] = field(default_factory=list)  # names that are read, not bound
    # Names that are bound in ways that scopes do not show, with how; and those that are set on the
    # library itself, as in ``nnx.relu = f``.
    hidden: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    references: list[Reference] = field(default_factory=list)
    by_node: dict[cst.CSTNode, Reference] = field(default_factory=dict)
    by_text: list[tuple[cst.CSTNode, str]] = field(default_factory=list)  # names in texts

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line on which a node begins."""
        return self.positions[node].start.line

    def uses_library(self, library: str) -> bool:
        """Whether the file refers to a library."""
        return any(reference.library == library for reference in self.references)

    def translated(self) -> set[str]:
        """Returns the libraries to translate; of some, all names must be known."""
        names = [name for node in self.imports for _, name in imported_names(node)]
        is_imported = any(library_of(name) == NNX for name in names)
        chosen = {NNX} if is_imported or self.uses_library(NNX) else set[str]()
        for library in LIBRARIES.keys() - {NNX}:
            names = {r.name for r in self.references if r.library == library}
            if names and names <= LIBRARIES[library].keys():
                chosen.add(library)
        return chosen

    def bindings(self, name: str, at: cst.CSTNode) -> list[metadata.BaseAssignment]:
        """Returns all bindings that a name can refer to, at a node."""
        scope = self.scopes.get(at)
        if scope is None:
            return []

        # The body of a class reads a name of its own, or else that of the scope around it.
        found = set(scope[name])
        if isinstance(scope, metadata.ClassScope):
            found |= set(scope.parent[name])
        return sorted(found, key=self._line_of_binding)

    def origin(self, text: str, at: cst.CSTNode) -> Origin | None:
        """Returns what dotted code refers to, if any binding of it is an import."""
        root, _, rest = text.partition(".")
        bindings = self.bindings(root, at)
        names: dict[str, None] = {}
        imports: list[_Importing] = []
        others = False
        for binding in bindings:
            name = _imported_as(binding, root) if _is_import(binding) else None
            if name is None:
                others = True
                continue
            names[f"{name}.{rest}" if rest else name] = None
            imports.append(cast(Any, binding).node)

        if not names:
            return None
        doubt = self.hidden.get(root, "")
        if others or len(names) > 1:
            lines = ", ".join(str(self._line_of_binding(binding)) for binding in bindings)
            doubt = f"{root} is bound more than once (lines {lines})"
        # Of several origins, one of a library that is translated.
        chosen = next((name for name in names if library_of(name)), next(iter(names)))
        return Origin(chosen, tuple(imports), doubt)

    def _line_of_binding(self, binding: metadata.BaseAssignment) -> int:
        node = getattr(binding, "node", None)
        return self.line(node) if node in self.positions else 0

    def doubt(self, reference: Reference) -> str:
        """Returns why a reference is not certain; empty where it is."""
        root = cst.ensure_type(root_of(reference.node), cst.Name).value
        if reference.name in self.replaced and isinstance(reference.node, cst.Attribute):
            return f"{reference.name} is set in this file"
        return reference.origin.doubt or self.hidden.get(root, "")

    def certain(self, node: cst.CSTNode, library: str = NNX) -> str:
        """Returns the name of a library that a node certainly is, else an empty text."""
        reference = self.by_node.get(node)
        if reference is None or reference.library != library or self.doubt(reference):
            return ""
        return reference.name

    def bound(self, name: str) -> Iterator[metadata.BaseAssignment]:
        """Yields every binding of a name, in all scopes."""
        for scope in {scope for scope in self.scopes.values() if scope is not None}:
            for binding in scope.assignments:
                if binding.name == name and not isinstance(binding, metadata.BuiltinAssignment):
                    yield binding


def parse(text: str) -> Program:
    """Returns a program with its references.

    Raises:
        UnreadableError: If it is no Python, or nested more deeply than LibCST can read.
    """
    try:
        depth = _depth(ast.parse(text))
        if depth > _DEEPEST:
            raise UnreadableError(1, f"it nests {depth} levels deep, and {_DEEPEST} can be read")
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        scopes = cast(Any, wrapper.resolve(metadata.ScopeProvider))
        parents = cast(Any, wrapper.resolve(metadata.ParentNodeProvider))
        positions = cast(Any, wrapper.resolve(metadata.PositionProvider))
        program = Program(wrapper.module, scopes, parents, positions)
        program.module.visit(_Reader(program))
        program.replaced = _set_on_library(program)
    except SyntaxError as error:
        raise UnreadableError(error.lineno or 1, f"this is no Python: {error.msg}") from None
    except cst.ParserSyntaxError as error:
        reason = f"this is no Python: {error.message.splitlines()[0]}"
        raise UnreadableError(error.raw_line, reason) from None
    except (RecursionError, MemoryError):
        raise UnreadableError(1, "it nests too deeply to be read") from None
    except ValueError as error:
        raise UnreadableError(1, f"this is no Python: {error}") from None
    return program


def _depth(tree: ast.AST) -> int:
    """Returns how many nodes stand in each other at most."""
    deepest, stack = 0, [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return deepest


def _set_on_library(program: Program) -> set[str]:
    return {
        reference.name
        for reference in program.references
        if isinstance(reference.node, cst.Attribute)
        and isinstance(reference.parent, cst.AssignTarget | cst.AugAssign | cst.Del)
        and getattr(reference.parent, "target", None) is reference.node
    }


def dotted(node: cst.CSTNode) -> str:
    """Returns the code of a name with dots, else an empty text."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr.value}"
    return ""


def dotted_words(code: str) -> list[str]:
    """Returns the names with dots that stand in code, the longest first."""
    return sorted(set(re.findall(r"[A-Za-z_][\w.]*", code)), key=len, reverse=True)


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    """Returns the first name of a name with dots."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def code_of(node: cst.CSTNode) -> str:
    """Returns the code of a node."""
    return cst.Module([]).code_for_node(node).strip()


def imported_names(node: _Importing) -> list[tuple[cst.ImportAlias, str]]:
    """Returns the aliases of an import with the full names; relative ones begin with a dot."""
    if isinstance(node.names, cst.ImportStar):
        return []
    front = ""
    if isinstance(node, cst.ImportFrom):
        module = dotted(node.module) if node.module is not None else ""
        front = f"{'.' * len(node.relative)}{module}."
    return [(alias, front + dotted(alias.name)) for alias in node.names]


def bound_name(alias: cst.ImportAlias) -> str:
    """Returns the name that an alias binds."""
    return dotted(alias.asname.name if alias.asname is not None else root_of(alias.name))


def library_of(name: str) -> str | None:
    """Returns the library of a full name."""
    for library in LIBRARIES:
        if name == library or name.startswith(f"{library}."):
            return library
    return None


def _is_import(binding: metadata.BaseAssignment) -> bool:
    return isinstance(getattr(binding, "node", None), cst.Import | cst.ImportFrom)


def _imported_as(binding: metadata.BaseAssignment, root: str) -> str | None:
    """Returns the full name of what an import binds to a name."""
    for alias, name in imported_names(cast(Any, binding).node):
        if bound_name(alias) == root:
            is_root = isinstance(cast(Any, binding).node, cst.Import) and alias.asname is None
            return root if is_root else name
    return None


def _shortened(name: str) -> str:
    """Returns a name of a submodule as the library itself offers it."""
    if name.startswith("nn.initializers."):
        return name.removeprefix("nn.")
    if name.startswith("training.metrics."):
        return name.removeprefix("training.")
    match = _DEEP_NAME.fullmatch(name)
    if match and (match[1] in NAMES or match[1] in LEFT):
        return match[1]
    return name


class _Reader(cst.CSTVisitor):
    """Fills a program: its nodes by kind, and its references."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._comprehensions = 0
        self._annotations = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._comprehensions += isinstance(node, cst.BaseComp)
        self._annotations += isinstance(node, cst.Annotation)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._comprehensions -= isinstance(original_node, cst.BaseComp)
        self._annotations -= isinstance(original_node, cst.Annotation)
        super().on_leave(original_node)

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802 (LibCST names it)
        self.program.imports.append(node)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802 (LibCST names it)
        self.program.imports.append(node)
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802 (LibCST names it)
        self.program.functions.append(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802 (LibCST names it)
        self.program.classes.append(node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802 (LibCST names it)
        if self._annotations:
            self.program.annotations.append(node)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (LibCST names it)
        self.program.calls.append(node)
        name = dotted(node.func)
        bindings = self.program.bindings(name, node.func) if name in _CODE_OF_TEXT else []
        if any(isinstance(binding, metadata.BuiltinAssignment) for binding in bindings):
            self.program.by_text.append((node, name))
        if name.rpartition(".")[2] in _IMPORTERS and node.args:
            text = node.args[0].value
            value = text.evaluated_value if isinstance(text, cst.SimpleString) else ""
            if isinstance(value, str) and library_of(value):
                self.program.by_text.append((node, f'{name}("{value}")'))

    # --- names that scopes do not show ------------------------------------------------------------

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:  # noqa: N802 (LibCST names it)
        if self._comprehensions:
            self._hide(node.target, "bound within a comprehension")

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802 (LibCST names it)
        self.program.targets.append(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802 (LibCST names it)
        self.program.targets.append(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802 (LibCST names it)
        self.program.targets.append(node.target)

    def visit_Del(self, node: cst.Del) -> None:  # noqa: N802 (LibCST names it)
        targets = node.target
        elements = targets.elements if isinstance(targets, cst.Tuple | cst.List) else ()
        for target in [element.value for element in elements] or [targets]:
            self._hide(target, "deleted")

    def visit_MatchAs(self, node: cst.MatchAs) -> None:  # noqa: N802 (LibCST names it)
        self._hide(node.name, "bound by a pattern")

    def visit_MatchStar(self, node: cst.MatchStar) -> None:  # noqa: N802 (LibCST names it)
        self._hide(node.name, "bound by a pattern")

    def visit_MatchMapping(self, node: cst.MatchMapping) -> None:  # noqa: N802 (LibCST names it)
        self._hide(node.rest, "bound by a pattern")

    def _hide(self, node: cst.CSTNode | None, how: str) -> None:
        if isinstance(node, cst.Name):
            line = self.program.line(node)
            self.program.hidden[node.value] = f"{node.value} is {how} (line {line})"

    # --- references -------------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802 (LibCST names it)
        code = dotted(node)
        origin = self.program.origin(code, root_of(node)) if code else None
        library = library_of(origin.name) if origin is not None else None
        if origin is None or library is None:
            self.program.attributes.append(node)
            return True

        # What a translated class has, such as Linear.__call__, goes with the class.
        inner = _shortened(origin.name.removeprefix(library).lstrip("."))
        owners = {_shortened(inner.rpartition(".")[0]), inner.rpartition(".")[0]}
        is_known = inner in LIBRARIES[library] or inner in FORMS or inner in LEFT
        if not is_known and owners & LIBRARIES[library].keys():
            self.program.attributes.append(node)
            return True
        self._add(node, library, inner, origin)
        return False

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:  # noqa: N802 (LibCST names it)
        self._in_attr = True

    def leave_Attribute_attr(self, node: cst.Attribute) -> None:  # noqa: N802 (LibCST names it)
        self._in_attr = False

    _in_attr = False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (LibCST names it)
        if self._in_attr:
            return
        parent = self.program.parents[node]
        if isinstance(parent, cst.Arg) and node is parent.keyword:
            return
        self.program.words.add(node.value)
        if isinstance(parent, cst.Param | cst.FunctionDef | cst.ClassDef) and node is parent.name:
            return
        if isinstance(parent, cst.AssignTarget | cst.NameItem | cst.AsName):
            return
        origin = self.program.origin(node.value, node)
        library = library_of(origin.name) if origin is not None else None
        if origin is not None and library is not None:
            inner = _shortened(origin.name.removeprefix(library).lstrip("."))
            self._add(node, library, inner, origin)
        elif origin is not None:
            self.program.uses.append(node)

    def _add(self, node: cst.BaseExpression, library: str, name: str, origin: Origin) -> None:
        parent = self.program.parents[node]
        reference = Reference(node, library, name, origin, parent, self.program.line(node))
        self.program.references.append(reference)
        self.program.by_node[node] = reference
        root = root_of(node)
        assert isinstance(root, cst.Name)
        self.program.uses.append(root)
