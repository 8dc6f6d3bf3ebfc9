# SPDX-License-Identifier: Apache-2.0
"""What the files of one project tell of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from shardax._migrate.rules import NNX

ANY_NAME = "*"  # of an attribute whose name is computed


@dataclass(frozen=True)
class StoringClass:
    """A class of some file: its bases by their last names, and the attributes that it sets."""

    file: str
    name: str
    bases: frozenset[str]
    stores: frozenset[str]


@dataclass(frozen=True)
class Project:
    """Facts about all files of a project."""

    uses_nnx: bool = False
    # By file, the names of Flax that other files can import from it.
    exports: Mapping[str, set[str]] = field(default_factory=dict)
    # Names that some file takes from another of the project, and whether there are several.
    taken: frozenset[str] = frozenset()
    is_whole: bool = False
    classes: tuple[StoringClass, ...] = ()

    def is_set_by_others(self, names: set[str], attribute: str, label: str) -> bool:
        """Whether a class of another file, derived from one of some names, sets an attribute.

        Args:
            names: Classes of the file.
            attribute: Name of the attribute.
            label: Label of the file.
        """
        storing = [
            each
            for each in self.classes
            if each.file != label and not each.stores.isdisjoint((attribute, ANY_NAME))
        ]
        if not storing:
            return False

        # The names of all classes that derive from those of the file.
        family, new = set(names), set(names)
        while new:
            new = {each.name for each in self.classes if each.bases & new} - family
            family |= new
        return any(each.bases & family for each in storing)

    def gives(self, name: str) -> bool:
        """Whether a full name is one of Flax that a file of the project offers."""
        module, _, last = name.rpartition(".")
        return last in self.exports.get(module.rpartition(".")[2], ())


def survey(files: Iterable[tuple[str, str]]) -> Project:
    """Reads the labels and texts of all files of a project."""
    imports: dict[str, list[tuple[str, str]]] = {}
    used: set[str] = set()
    classes: list[StoringClass] = []
    for label, text in files:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the translation tells
            continue
        path = PurePath(label)
        module = path.parent.name if path.stem == "__init__" else path.stem
        found = list(_imports_in(tree))
        imports.setdefault(module, []).extend(found)
        classes += _classes_of(tree, label, found)
        used |= _attributes_of(tree, {bound for bound, name in found if not _is_nnx(name)})

    uses_nnx = any(_is_nnx(name) for rows in imports.values() for _, name in rows)
    exports: dict[str, set[str]] = {module: set() for module in imports}
    names = [name for rows in imports.values() for _, name in rows if not _is_nnx(name)]
    taken = frozenset(name.rpartition(".")[2] for name in names) | used
    project = Project(uses_nnx, exports, taken, len(imports) > 1, tuple(classes))
    # A file may give on what another one gives.
    for _ in imports:
        for module, rows in imports.items():
            given = {bound for bound, name in rows if _is_nnx(name) or project.gives(name)}
            exports[module] |= given
    return project


def _classes_of(
    tree: ast.Module, label: str, imports: Iterable[tuple[str, str]]
) -> Iterable[StoringClass]:
    """Yields the classes of a file; a base that has several names is taken by all of them."""
    aliases = [(bound, name.rpartition(".")[2]) for bound, name in imports]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            last = ast.unparse(node.value).rpartition(".")[2]
            aliases += [(ast.unparse(target), last) for target in node.targets]

    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            bases = {_last_name(base) for base in owner.bases}
            while new := {last for bound, last in aliases if bound in bases} - bases:
                bases |= new
            yield StoringClass(label, owner.name, frozenset(bases), frozenset(_stores_of(owner)))


def _stores_of(owner: ast.ClassDef) -> Iterable[str]:
    """Yields the attributes that a class sets or defines, ``ANY_NAME`` for a computed name."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value
            else:
                yield ANY_NAME


def _last_name(base: ast.expr) -> str:
    """Returns the last name of a base, also of ``a.Net[int]``."""
    plain = base.value if isinstance(base, ast.Subscript) else base
    return ast.unparse(plain).rpartition(".")[2]


def _imports_in(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """Yields the names that a file binds by imports, with what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield alias.asname or alias.name, f"{module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name


def _attributes_of(tree: ast.Module, names: set[str]) -> set[str]:
    """Returns what a file takes from what it imports, as in ``layers.make``."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id in names}


def _is_nnx(name: str) -> bool:
    return name == NNX or name.startswith(f"{NNX}.")
