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
from typing import Any, NamedTuple, cast

import libcst as cst
from libcst import metadata

from shardax._migrate.rules import LEFT, LIBRARIES, NNX

# LibCST's parser and visitors call themselves for each level of an expression.
_DEEPEST = 90
Importing = cst.Import | cst.ImportFrom


class UnreadableError(Exception):
    """A text that cannot be translated: it is no Python, or nested too deeply."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class ImportedName(NamedTuple):
    """What a name refers to, in full: ``flax.nnx.Linear``."""

    name: str
    imports: tuple[Importing, ...]
    doubt: str  # why it is not certain; empty where it is


@dataclass(frozen=True)
class Reference:
    """A reference to a name of a library that is translated."""

    node: cst.Name | cst.Attribute
    library: str
    name: str  # behind the library's: "Linear", "metrics.Accuracy"; "" for the library itself
    doubt: str

    @property
    def label(self) -> str:
        """The name as reports write it: ``nnx.Linear``."""
        return f"{self.library.rpartition('.')[2]}.{self.name}".rstrip(".")


@dataclass
class SourceProgram:
    """A file, with what its names refer to."""

    module: cst.Module
    scopes: Mapping[cst.CSTNode, metadata.Scope | None]
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    positions: Mapping[cst.CSTNode, metadata.CodeRange]
    nodes: dict[type, list[Any]] = field(default_factory=dict)  # by type, in the order of the file
    # Names that are bound in ways that scopes do not show, with how.
    hidden: dict[str, str] = field(default_factory=dict)
    # What sets an attribute, on whatever object, by its name, empty for a computed one: a target,
    # what a class defines, or a call of setattr.
    stores: dict[str, list[cst.CSTNode]] = field(default_factory=dict)
    references: dict[cst.CSTNode, Reference] = field(default_factory=dict)
    # The names that use what an import binds, by the import and what it binds.
    uses: dict[tuple[Importing, str], list[cst.CSTNode]] = field(default_factory=dict)
    # Annotations in quotes that name what is imported of a library.
    quoted: set[cst.CSTNode] = field(default_factory=set)

    def all(self, *types: type) -> list[Any]:
        """Returns all nodes of some types."""
        return [node for kind in types for node in self.nodes.get(kind, ())]

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line on which a node begins."""
        return self.positions[node].start.line

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes in which a node stands, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def imports(self) -> Iterator[tuple[Importing, str, str]]:
        """Yields all imports with what each binds, and its full name."""
        for node in self.all(cst.Import, cst.ImportFrom):
            for alias, name in imported_names(node):
                yield node, bound_name(alias), name

    def assignments(self) -> Iterator[metadata.BaseAssignment]:
        """Yields what the file binds, in all scopes."""
        for scope in {scope for scope in self.scopes.values() if scope is not None}:
            for binding in scope.assignments:
                if not isinstance(binding, metadata.BuiltinAssignment):
                    yield binding

    def stars(self) -> list[cst.ImportFrom]:
        """Returns all ``import *``."""
        return [node for node in self.all(cst.ImportFrom) if isinstance(node.names, cst.ImportStar)]

    def bindings(self, name: cst.CSTNode) -> list[metadata.BaseAssignment]:
        """Returns all bindings that a name can refer to."""
        scope = self.scopes.get(name)
        if scope is None or not isinstance(name, cst.Name):
            return []
        found = {*scope[name.value]}
        # The body of a class reads a name of its own, or else that of the scope around it.
        if isinstance(scope, metadata.ClassScope):
            found |= {*scope.parent[name.value]}
        return sorted(found, key=self._line_of_binding)

    def _line_of_binding(self, binding: metadata.BaseAssignment) -> int:
        node = getattr(binding, "node", None)
        return self.line(node) if node is not None else 0

    def only_binding(self, name: cst.CSTNode) -> cst.CSTNode | None:
        """Returns what alone binds a name: a definition, parameter, import or target."""
        bindings = self.bindings(name)
        return getattr(bindings[0], "node", None) if len(bindings) == 1 else None

    def is_builtin(self, name: cst.CSTNode) -> bool:
        """Whether a name is one of Python's own, which the file does not bind."""
        bindings = self.bindings(name)
        return bool(bindings) and all(isinstance(b, metadata.BuiltinAssignment) for b in bindings)

    def origin(self, node: cst.CSTNode) -> ImportedName | None:
        """Returns what a name with dots refers to, if any binding of it is an import."""
        root = root_of(node)
        rest = dotted(node).removeprefix(dotted(root))
        bindings = self.bindings(root)
        nodes = [getattr(binding, "node", None) for binding in bindings]
        imports = tuple(node for node in nodes if isinstance(node, Importing))
        names = {_imported_as(node, dotted(root)) + rest for node in imports}
        if not names or not dotted(node):
            return None

        doubt = self.hidden.get(dotted(root), "")
        if len(imports) < len(nodes) or len(names) > 1:
            lines = ", ".join(str(self._line_of_binding(binding)) for binding in bindings)
            doubt = f"{dotted(root)} is bound more than once (lines {lines})"
        # Of several origins, one of a library that is translated.
        return ImportedName(max(names, key=lambda name: (library_of(name), name)), imports, doubt)

    def certain(self, node: cst.CSTNode) -> str:
        """Returns the full name of what a node certainly refers to, else an empty text."""
        reference = self.references.get(node)
        if reference is not None:
            return "" if reference.doubt else f"{reference.library}.{reference.name}"
        origin = self.origin(node)
        return origin.name if origin is not None and not origin.doubt else ""

    def of_nnx(self, node: cst.CSTNode) -> str:
        """Returns the name of NNX that a node certainly is, else an empty text."""
        name = self.certain(node)
        return name.removeprefix(f"{NNX}.") if name.startswith(f"{NNX}.") else ""


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
    for name, node in _stores_in(program):
        program.stores.setdefault(name, []).append(node)
    for name in program.all(cst.Name):
        if not _is_no_use(name, program.parents[name]):
            _add_uses(program, name)
    for annotation in program.all(cst.Annotation):
        for node in walk(annotation):
            _add_quoted(program, node)
    return program


def _depth(tree: ast.AST) -> int:
    """Returns how many nodes stand in each other at most."""
    deepest, stack = 0, [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        stack.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return deepest


def _find_hidden(program: SourceProgram) -> None:
    """Finds names that are bound by patterns, deleted, or bound within comprehensions."""
    hidden: list[tuple[cst.CSTNode | None, str]] = []
    for pattern in program.all(cst.MatchAs, cst.MatchStar):
        hidden.append((pattern.name, "bound by a pattern"))
    for pattern in program.all(cst.MatchMapping):
        hidden.append((pattern.rest, "bound by a pattern"))
    for statement in program.all(cst.Del):
        hidden += [(node, "deleted") for node in walk(statement)]
    for walrus in program.all(cst.NamedExpr):
        if isinstance(program.scopes.get(walrus.target), metadata.ComprehensionScope):
            hidden.append((walrus.target, "bound within a comprehension"))

    for node, how in hidden:
        if isinstance(node, cst.Name):
            program.hidden[node.value] = f"{node.value} is {how} (line {program.line(node)})"


def _stores_in(program: SourceProgram) -> Iterator[tuple[str, cst.CSTNode]]:
    """Yields the names of attributes with what sets them; a computed name is empty."""
    for attribute in program.all(cst.Attribute):
        if is_set(attribute, program.parents):
            yield attribute.attr.value, attribute
    for binding in program.assignments():
        if isinstance(binding.scope, metadata.ClassScope):
            yield binding.name, cast(metadata.Assignment, binding).node
    for call in program.all(cst.Call):
        if dotted(call.func).endswith("setattr"):
            yield text_of(call.args[1].value) if len(call.args) > 1 else "", call


def _add_uses(program: SourceProgram, root: cst.Name) -> None:
    """Adds a name to the uses of its imports, and the reference that begins with it."""
    origin = program.origin(root)
    if origin is None:
        return
    for imported in origin.imports:
        program.uses.setdefault((imported, root.value), []).append(root)

    # The longest name that the tables have. What a translated class has, such as
    # `Linear.__call__`, goes with the class.
    reference: Reference | None = None
    node: cst.CSTNode = root
    name = origin.name
    while isinstance(node, cst.Name | cst.Attribute):
        library = library_of(name)
        inner = name.removeprefix(library).lstrip(".")
        if library and (reference is None or not reference.name or _is_known(library, inner)):
            doubt = _doubt_of(program, root, name) or origin.doubt
            reference = Reference(node, library, inner, doubt)
        node = program.parents[node]
        if isinstance(node, cst.Attribute):
            name = f"{name}.{node.attr.value}"
    if reference is not None:
        program.references[reference.node] = reference


def _add_quoted(program: SourceProgram, text: cst.CSTNode) -> None:
    """Adds an annotation in quotes to the uses of the imports that it names."""
    words = set(re.findall(r"[A-Za-z_]\w*", text_of(text)))
    for imported, name, whole in program.imports():
        if name in words and library_of(whole):
            program.uses.setdefault((imported, name), []).append(text)
            program.quoted.add(text)


def _is_known(library: str, name: str) -> bool:
    return name in LIBRARIES[library] or (library == NNX and name in LEFT)


def _doubt_of(program: SourceProgram, root: cst.Name, name: str) -> str:
    """Returns why a name of a library may be something else."""
    for store in program.stores.get(name.rpartition(".")[2], ()):
        origin = program.origin(store) if isinstance(store, cst.Attribute) else None
        if origin is not None and origin.name == name:
            return f"{name.rpartition('.')[2]} is set in this file"
    if root.value.startswith("__") and not root.value.endswith("__"):
        return f"{root.value} has another name within a class"
    return ""


def _is_no_use(node: cst.Name, parent: cst.CSTNode) -> bool:
    """Whether a name is an attribute's, a keyword's, or one that is bound here."""
    if isinstance(parent, cst.Attribute | cst.Arg):
        return node is not parent.value
    if isinstance(parent, cst.Param | cst.FunctionDef | cst.ClassDef):
        return node is parent.name
    return isinstance(parent, cst.AssignTarget | cst.NameItem | cst.AsName | cst.ImportAlias)


# --- nodes ----------------------------------------------------------------------------------------


def walk(tree: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields the nodes of a tree in the order of the file."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def is_set(node: cst.CSTNode, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> bool:
    """Whether a node is set or deleted, also as one of several, by a loop, or by a ``with``."""
    parent = parents[node]
    if isinstance(parent, cst.Element | cst.StarredElement):
        return is_set(parents[parent], parents)
    return isinstance(parent, cst.AsName) or getattr(parent, "target", None) is node


def dotted(node: cst.CSTNode) -> str:
    """Returns the code of a name with dots, else an empty text."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr.value}"
    return ""


def root_of(node: cst.CSTNode) -> cst.CSTNode:
    """Returns the first name of a name with dots."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def code_of(node: cst.CSTNode) -> str:
    """Returns the code of a node."""
    return cst.Module([]).code_for_node(node).strip()


def keyword_of(arg: cst.Arg) -> str:
    """Returns the keyword of an argument, empty where it has none."""
    return arg.keyword.value if arg.keyword is not None else ""


def text_of(node: cst.CSTNode) -> str:
    """Returns the text of a literal, else an empty one."""
    return str(node.evaluated_value) if isinstance(node, cst.SimpleString) else ""


# --- imports --------------------------------------------------------------------------------------


def imported_names(node: Importing) -> list[tuple[cst.ImportAlias, str]]:
    """Returns the aliases of an import with the full names; relative ones begin with a dot."""
    if isinstance(node.names, cst.ImportStar):
        return []
    front = f"{module_of(node)}." if isinstance(node, cst.ImportFrom) else ""
    return [(alias, front + dotted(alias.name)) for alias in node.names]


def module_of(node: cst.ImportFrom) -> str:
    """Returns the module of which an import takes names."""
    return "." * len(node.relative) + (dotted(node.module) if node.module is not None else "")


def bound_name(alias: cst.ImportAlias) -> str:
    """Returns the name that an alias binds."""
    return dotted(alias.asname.name if alias.asname is not None else root_of(alias.name))


def library_of(name: str) -> str:
    """Returns the library of a full name, empty where it is of none."""
    return next((lib for lib in LIBRARIES if name == lib or name.startswith(f"{lib}.")), "")


def _imported_as(node: Importing, root: str) -> str:
    """Returns the full name of what an import binds to a name."""
    for alias, name in imported_names(node):
        if bound_name(alias) == root:
            is_whole = isinstance(node, cst.ImportFrom) or alias.asname is not None
            return name if is_whole else root
    return root
