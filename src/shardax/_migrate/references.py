# SPDX-License-Identifier: Apache-2.0
"""References of a program to other libraries, by LibCST's scopes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import libcst as cst
from libcst import metadata

from shardax._migrate.table import EQUINOX, FORMS, LEFT, LINEN, NAMES, VARIABLES, Name

LIBRARIES: dict[str, Mapping[str, Name]] = {
    "flax.nnx": NAMES,
    "flax.linen": LINEN,
    "equinox": EQUINOX,
}
_NNX = "flax.nnx"
_Parents = Mapping[cst.CSTNode, cst.CSTNode]
_DEEP = re.compile(
    r"(?:nn\.\w+|training\.optimizer|transforms\.\w+|\w+lib|graph|module|object|helpers)\.(\w+)"
)
_LAYER_VARIABLES = frozenset({"kernel", "bias", "embedding", "scale", "mean", "var"})


@dataclass(frozen=True)
class Reference:
    """A reference to a name of another library."""

    node: cst.BaseExpression
    library: str
    name: str  # behind the library's: "Linear", "metrics.Accuracy"; "" for the library itself
    parent: cst.CSTNode
    line: int


@dataclass
class ParsedProgram:
    """References of a file to other libraries."""

    references: list[Reference] = field(default_factory=list)
    by_node: dict[cst.CSTNode, Reference] = field(default_factory=dict)
    lines: dict[cst.CSTNode, int] = field(default_factory=dict)
    parents: _Parents = field(default_factory=dict)
    calls: list[cst.Call] = field(default_factory=list)
    attributes: list[cst.Attribute] = field(default_factory=list)
    functions: list[cst.FunctionDef] = field(default_factory=list)
    classes: list[cst.ClassDef] = field(default_factory=list)
    stars: list[int] = field(default_factory=list)  # lines of `from flax.nnx import *`
    names: set[str] = field(default_factory=set)  # every name in the file
    imported: set[str] = field(default_factory=set)  # modules bound as themselves: "jax"
    other_flax: bool = False  # whether something else of Flax is reached by `flax.`
    variables: set[str] = field(default_factory=set)  # names that hold Variables
    optimizers: set[str] = field(default_factory=set)
    partials: set[cst.CSTNode] = field(default_factory=set)  # calls of functools.partial

    def uses(self, library: str) -> bool:
        """Whether the file refers to a library."""
        return any(reference.library == library for reference in self.references)

    def translated(self) -> set[str]:
        """Libraries to translate; of some, all names must be known."""
        chosen = {_NNX} if self.uses(_NNX) else set[str]()
        for library in LIBRARIES.keys() - {_NNX}:
            names = {r.name for r in self.references if r.library == library}
            if names and names <= LIBRARIES[library].keys():
                chosen.add(library)
        return chosen


def read(module: cst.MetadataWrapper) -> ParsedProgram:
    """Returns the references of a program."""
    visitor = _Reader()
    module.visit(visitor)
    program = visitor.program
    for reference in program.references:
        _note_holders(program, reference)
    return program


def dotted(node: cst.CSTNode) -> str:
    """Returns the code of a name with dots, else an empty text."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr.value}"
    return ""


def last_name(node: cst.CSTNode) -> str:
    """Returns the last part of a name with dots."""
    return dotted(node).rpartition(".")[2]


def imported_names(node: cst.Import | cst.ImportFrom) -> list[tuple[cst.ImportAlias, str]]:
    """Returns the aliases of an import with the full names."""
    if isinstance(node.names, cst.ImportStar):
        return []
    front = ""
    if isinstance(node, cst.ImportFrom):
        if node.relative or node.module is None:
            return []
        front = f"{dotted(node.module)}."
    return [(alias, front + dotted(alias.name)) for alias in node.names]


def library_of(name: str) -> str | None:
    """Returns the library of a full name."""
    for library in LIBRARIES:
        if name == library or name.startswith(f"{library}."):
            return library
    return None


def _shortened(name: str) -> str:
    """Returns a name of a submodule as the library itself offers it."""
    if name.startswith("nn.initializers."):
        return name.removeprefix("nn.")
    match = _DEEP.fullmatch(name)
    if match and (match[1] in NAMES or match[1] in LEFT):
        return match[1]
    return name


class _Reader(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (
        metadata.QualifiedNameProvider,
        metadata.PositionProvider,
        metadata.ParentNodeProvider,
    )

    def __init__(self) -> None:
        super().__init__()
        self.program = ParsedProgram()

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802 (LibCST names it)
        self.program.parents = cast(_Parents, self.metadata[metadata.ParentNodeProvider])

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802 (LibCST names it)
        for alias, name in imported_names(node):
            if alias.asname is None:
                self.program.imported.add(name.partition(".")[0])
            elif dotted(alias.asname.name) == name or name == "shardax":
                self.program.imported.add(f"{name} as {dotted(alias.asname.name)}")
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802 (LibCST names it)
        is_star = isinstance(node.names, cst.ImportStar)
        if is_star and node.module is not None and library_of(dotted(node.module)) == _NNX:
            self.program.stars.append(self._line(node))
        return False

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (LibCST names it)
        self.program.calls.append(node)
        self.program.lines[node] = self._line(node)
        if "functools.partial" in self._names(node.func):
            self.program.partials.add(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802 (LibCST names it)
        self.program.functions.append(node)
        self.program.lines[node] = self._line(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802 (LibCST names it)
        self.program.classes.append(node)
        self.program.lines[node] = self._line(node)

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802 (LibCST names it)
        self.program.lines[node] = self._line(node)
        # LibCST also names what a call returns: attributes of that are of no library.
        for name in self._names(node) if dotted(node) else ():
            library = library_of(name)
            if library is None:
                continue
            inner = _shortened(name.removeprefix(library).lstrip("."))
            # What a translated class has, such as Linear.__call__, goes with the class.
            owners = [_shortened(inner.rpartition(".")[0]), inner.rpartition(".")[0]]
            is_known = inner in LIBRARIES[library] or inner in FORMS or inner in LEFT
            if not is_known and any(owner in LIBRARIES[library] for owner in owners):
                return True
            self._add(node, library, inner)
            return False
        if any(name.startswith("flax.") for name in self._names(node)):
            self.program.other_flax = True
        self.program.attributes.append(node)
        return True

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:  # noqa: N802 (LibCST names it)
        self._in_attr = True

    def leave_Attribute_attr(self, node: cst.Attribute) -> None:  # noqa: N802 (LibCST names it)
        self._in_attr = False

    _in_attr = False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (LibCST names it)
        if self._in_attr:
            return
        self.program.names.add(node.value)
        for name in self._names(node):
            library = library_of(name)
            if library is not None:
                self._add(node, library, _shortened(name.removeprefix(library).lstrip(".")))
                return

    def _add(self, node: cst.BaseExpression, library: str, name: str) -> None:
        parent = self.program.parents[node]
        if isinstance(parent, (cst.Param, cst.Arg)) and node is not getattr(parent, "value", node):
            return  # the name of a parameter or keyword
        reference = Reference(node, library, name, parent, self._line(node))
        self.program.references.append(reference)
        self.program.by_node[node] = reference

    def _names(self, node: cst.CSTNode) -> list[str]:
        found = self.get_metadata(metadata.QualifiedNameProvider, node, set())
        source = metadata.QualifiedNameSource.IMPORT
        return sorted(item.name for item in found or () if item.source is source)

    def _line(self, node: cst.CSTNode) -> int:
        position = self.get_metadata(metadata.PositionProvider, node)
        assert isinstance(position, metadata.CodeRange)
        return position.start.line


def _note_holders(program: ParsedProgram, reference: Reference) -> None:
    """Notes which names hold what a reference makes or annotates."""
    parent = reference.parent
    if isinstance(parent, cst.Annotation):
        owner = program.parents[parent]
        targets: Sequence[cst.CSTNode] = [getattr(owner, "name", getattr(owner, "target", owner))]
    elif isinstance(parent, cst.Call) and parent.func is reference.node:
        owner = program.parents[parent]
        if isinstance(owner, cst.Assign):
            targets = [target.target for target in owner.targets]
        else:
            targets = [owner.target] if isinstance(owner, cst.AnnAssign) else []
    elif isinstance(parent, cst.Arg) and isinstance(program.parents[parent], cst.ClassDef):
        targets = []
        if reference.name in VARIABLES:  # a class of Variables
            owner = cst.ensure_type(program.parents[parent], cst.ClassDef)
            _note_instances(program, owner.name.value)
    else:
        targets = []
    names = {last_name(target) for target in targets} - {""}
    if reference.name in VARIABLES:
        program.variables |= names
    elif reference.name in ("Optimizer", "ModelAndOptimizer"):
        program.optimizers |= names


def _note_instances(program: ParsedProgram, class_name: str) -> None:
    for call in program.calls:
        owner = program.parents[call]
        if dotted(call.func) == class_name and isinstance(owner, cst.Assign):
            program.variables |= {last_name(target.target) for target in owner.targets} - {""}


def is_variable(program: ParsedProgram, node: cst.BaseExpression) -> bool:
    """Whether an expression is known to be a Variable."""
    # Also behind an index, as in layers[0].kernel.
    name = node.attr.value if isinstance(node, cst.Attribute) else last_name(node)
    known = program.variables | (_LAYER_VARIABLES if isinstance(node, cst.Attribute) else set())
    return bool(name) and name in known
