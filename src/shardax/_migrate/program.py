# SPDX-License-Identifier: Apache-2.0
"""What the names of a program refer to, by the scopes of LibCST.

A name is certain where every binding that it can refer to imports the same thing. Names that are
bound again, deleted, or bound in a way that LibCST does not see, are in doubt.
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
Importing = cst.Import | cst.ImportFrom
GUARD = "shardax migrate left "


class UnreadableError(Exception):
    """A text that cannot be translated: it is no Python, or nested too deeply."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class ImportedName:
    """What a name refers to, in full: ``flax.nnx.Linear``."""

    name: str
    imports: tuple[Importing, ...]
    doubt: str  # why it is not certain; empty where it is


@dataclass(frozen=True)
class Reference:
    """A reference to a name of another library."""

    node: cst.BaseExpression
    library: str
    name: str  # behind the library's: "Linear", "metrics.Accuracy"; "" for the library itself
    origin: ImportedName
    parent: cst.CSTNode
    line: int


@dataclass
class SourceProgram:
    """A file, with what its names refer to."""

    module: cst.Module
    scopes: Mapping[cst.CSTNode, metadata.Scope | None]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    positions: Mapping[cst.CSTNode, metadata.CodeRange]
    nodes: dict[type, list[Any]] = field(default_factory=dict)  # by type, in the order of the file
    # Names that are bound in ways that scopes do not show, with how; and names that are set on the
    # library itself, as in ``nnx.relu = f``.
    hidden: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    references: list[Reference] = field(default_factory=list)
    by_node: dict[cst.CSTNode, Reference] = field(default_factory=dict)

    def all(self, *types: type) -> list[Any]:
        """Returns all nodes of some types."""
        return [node for kind in types for node in self.nodes.get(kind, ())]

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line on which a node begins."""
        return self.positions[node].start.line

    def translated(self) -> set[str]:
        """Returns the libraries to translate; of some, all names must be known."""
        imported = [name for node in self.imports() for _, name in imported_names(node)]
        chosen = {NNX} if any(library_of(name) == NNX for name in imported) else set[str]()
        for library in LIBRARIES.keys() - {NNX}:
            names = {r.name for r in self.references if r.library == library}
            if names and names <= LIBRARIES[library].keys():
                chosen.add(library)
        return chosen | ({NNX} & {reference.library for reference in self.references})

    def imports(self) -> list[Importing]:
        """Returns all imports."""
        return self.all(cst.Import, cst.ImportFrom)

    def bindings(self, name: str, at: cst.CSTNode) -> list[metadata.BaseAssignment]:
        """Returns all bindings that a name can refer to, at a node."""
        scope = self.scopes.get(at)
        if scope is None:
            return []
        # The body of a class reads a name of its own, or else that of the scope around it.
        is_class = isinstance(scope, metadata.ClassScope)
        found = {*scope[name], *(scope.parent[name] if is_class else ())}
        return sorted(found, key=self._line_of_binding)

    def only_binding(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns what alone binds a name: a definition, parameter, import or target."""
        bindings = self.bindings(node.value, node) if isinstance(node, cst.Name) else []
        return getattr(bindings[0], "node", None) if len(bindings) == 1 else None

    def origin(self, text: str, at: cst.CSTNode) -> ImportedName | None:
        """Returns what dotted code refers to, if any binding of it is an import."""
        root, _, rest = text.partition(".")
        bindings = self.bindings(root, at)
        nodes = [getattr(binding, "node", None) for binding in bindings]
        imports = tuple(node for node in nodes if isinstance(node, Importing))
        names = {_imported_as(node, root) + (f".{rest}" if rest else "") for node in imports}
        if not names:
            return None
        doubt = self.hidden.get(root, "")
        if len(imports) < len(nodes) or len(names) > 1:
            lines = ", ".join(str(self._line_of_binding(binding)) for binding in bindings)
            doubt = f"{root} is bound more than once (lines {lines})"
        # Of several origins, one of a library that is translated.
        return ImportedName(
            max(names, key=lambda name: (library_of(name) or "", name)), imports, doubt
        )

    def _line_of_binding(self, binding: metadata.BaseAssignment) -> int:
        node = getattr(binding, "node", None)
        return self.line(node) if node is not None else 0

    def origin_of(self, node: cst.CSTNode) -> ImportedName | None:
        """Returns what a name with dots refers to."""
        code = dotted(node)
        return self.origin(code, root_of(node)) if code else None

    def doubt(self, reference: Reference) -> str:
        """Returns why a reference is not certain; empty where it is."""
        if reference.name in self.replaced and isinstance(reference.node, cst.Attribute):
            return f"{reference.name} is set in this file"
        root = dotted(root_of(reference.node))
        if root.startswith("__") and not root.endswith("__"):
            return f"{root} has another name within a class"
        return reference.origin.doubt

    def certain(self, node: cst.CSTNode) -> str:
        """Returns the name of NNX that a node certainly is, else an empty text."""
        reference = self.by_node.get(node)
        if reference is None or reference.library != NNX or self.doubt(reference):
            return ""
        return reference.name

    def bound(self, name: str) -> Iterator[metadata.BaseAssignment]:
        """Yields every binding of a name, in all scopes."""
        for scope in {scope for scope in self.scopes.values() if scope is not None}:
            for binding in scope.assignments:
                if binding.name == name and not isinstance(binding, metadata.BuiltinAssignment):
                    yield binding


def parse(text: str) -> SourceProgram:
    """Returns a program with its references.

    Raises:
        UnreadableError: If it is no Python, or nested more deeply than LibCST can read.
    """
    try:
        depth = _depth(ast.parse(text))
        if depth > _DEEPEST:
            raise UnreadableError(1, f"it nests {depth} levels deep, and {_DEEPEST} can be read")
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        providers = metadata.ScopeProvider, metadata.ParentNodeProvider, metadata.PositionProvider
        program = SourceProgram(wrapper.module, *(cast(Any, wrapper.resolve(p)) for p in providers))
    except SyntaxError as error:
        raise UnreadableError(error.lineno or 1, f"this is no Python: {error.msg}") from None
    except cst.ParserSyntaxError as error:
        reason = f"this is no Python: {error.message.splitlines()[0]}"
        raise UnreadableError(error.raw_line, reason) from None
    except ValueError as error:
        raise UnreadableError(1, f"this is no Python: {error}") from None

    for node in walk(wrapper.module):
        program.nodes.setdefault(type(node), []).append(node)
    _find_hidden(program)
    for attribute in program.all(cst.Attribute):
        _add_reference(program, attribute)
    for name in program.all(cst.Name):
        _add_reference(program, name)
    return program


def is_guard(statement: cst.CSTNode) -> bool:
    """Whether a statement is the line that ends a program of which something is left."""
    return code_of(statement).startswith(f'raise SystemExit("{GUARD}')


def _depth(tree: ast.AST) -> int:
    """Returns how many nodes stand in each other at most."""
    deepest, stack = 0, [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return deepest


def walk(tree: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields the nodes of a tree in the order of the file."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


# --- names that scopes do not show ----------------------------------------------------------------


def _find_hidden(program: SourceProgram) -> None:
    """Finds names that are bound by patterns, deleted, or bound within comprehensions."""
    for pattern in program.all(cst.MatchAs, cst.MatchStar, cst.MatchMapping):
        _hide(program, getattr(pattern, "name", None), "bound by a pattern")
        _hide(program, getattr(pattern, "rest", None), "bound by a pattern")
    for statement in program.all(cst.Del):
        targets = statement.target
        elements = targets.elements if isinstance(targets, cst.Tuple | cst.List) else ()
        for target in [element.value for element in elements] or [targets]:
            _hide(program, target, "deleted")
    for walrus in program.all(cst.NamedExpr):
        if program.scopes.get(walrus.target).__class__ is metadata.ComprehensionScope:
            _hide(program, walrus.target, "bound within a comprehension")


def _hide(program: SourceProgram, node: cst.CSTNode | None, how: str) -> None:
    if isinstance(node, cst.Name):
        program.hidden[node.value] = f"{node.value} is {how} (line {program.line(node)})"


# --- references -----------------------------------------------------------------------------------


def _add_reference(program: SourceProgram, node: cst.Attribute | cst.Name) -> None:
    parent = program.parents[node]
    if isinstance(node, cst.Name) and (is_no_use(node, parent) or _is_within(program, node)):
        return
    origin = program.origin_of(node)
    library = library_of(origin.name) if origin is not None else None
    if origin is None or library is None or _is_within(program, node):
        return

    # What a translated class has, such as Linear.__call__, goes with the class.
    inner = _shortened(origin.name.removeprefix(library).lstrip("."))
    owners = {_shortened(inner.rpartition(".")[0]), inner.rpartition(".")[0]}
    is_known = inner in LIBRARIES[library] or inner in FORMS or inner in LEFT
    if not is_known and isinstance(node, cst.Attribute) and owners & LIBRARIES[library].keys():
        return

    reference = Reference(node, library, inner, origin, parent, program.line(node))
    program.references.append(reference)
    program.by_node[node] = reference
    if isinstance(node, cst.Attribute) and isinstance(parent, WRITES) and is_target(node, parent):
        program.replaced.add(inner)


def is_no_use(node: cst.Name, parent: cst.CSTNode) -> bool:
    """Whether a name is an attribute's, a keyword's, or one that is bound here."""
    if isinstance(parent, cst.Attribute | cst.Arg):
        return node is not parent.value
    if isinstance(parent, cst.Param | cst.FunctionDef | cst.ClassDef):
        return node is parent.name
    return isinstance(parent, cst.AssignTarget | cst.NameItem | cst.AsName | cst.ImportAlias)


def _is_within(program: SourceProgram, node: cst.CSTNode) -> bool:
    """Whether a name is the front of a longer one that is a reference."""
    parent = program.parents[node]
    while isinstance(parent, cst.Attribute) and parent.value is node:
        if parent in program.by_node:
            return True
        node, parent = parent, program.parents[parent]
    return False


def _shortened(name: str) -> str:
    """Returns a name of a submodule as the library itself offers it."""
    if name.startswith("nn.initializers."):
        return name.removeprefix("nn.")
    if name.startswith("training.metrics."):
        return name.removeprefix("training.")
    match = _DEEP_NAME.fullmatch(name)
    return match[1] if match and (match[1] in NAMES or match[1] in LEFT) else name


# --- nodes ----------------------------------------------------------------------------------------

WRITES = cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.Del


def is_target(node: cst.CSTNode, statement: cst.CSTNode) -> bool:
    """Whether a statement sets or deletes a node."""
    return getattr(statement, "target", None) is node


def is_set(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> bool:
    """Whether a node is set, also as one of several, by a loop, or by a ``with``."""
    parent = parents[node]
    if isinstance(parent, cst.Element | cst.StarredElement):
        return is_set(parents[parent], parents)
    is_target_of = isinstance(parent, WRITES | cst.For | cst.CompFor) and is_target(node, parent)
    return is_target_of or isinstance(parent, cst.AsName)


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


def imported_names(node: Importing) -> list[tuple[cst.ImportAlias, str]]:
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
    return next((lib for lib in LIBRARIES if name == lib or name.startswith(f"{lib}.")), None)


def _imported_as(node: Importing, root: str) -> str:
    """Returns the full name of what an import binds to a name."""
    found = [pair for pair in imported_names(node) if bound_name(pair[0]) == root]
    is_root = isinstance(node, cst.Import) and all(alias.asname is None for alias, _ in found)
    return root if is_root or not found else found[0][1]
