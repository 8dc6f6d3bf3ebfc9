# SPDX-License-Identifier: Apache-2.0
"""Rooms above the core take public names and ``shardax.extend`` from it, and nothing private.

The core is reached in two ways. A name is imported, or is an attribute of an imported module
(``partition.rules``), or a text says where it is (``import_module("shardax._core")``). A *private
attribute* of an object begins with one underscore, and is read as such or by ``getattr`` and its
like. A file may read those of ``self`` and ``cls``, and those that it defines itself; what
others call so is not ours.
"""

from __future__ import annotations

import ast
import functools
import importlib
import textwrap
from pathlib import Path

import pytest

from tests.house import public_api, sources
from tests.house.sources import Source, package_files
from tests.house.test_imports import defining_modules, home
from tests.suite.rooms import ROOMS

MOST_NAMES = 60

CORE = {package.removesuffix(".py") for package in ROOMS["core"]} | {"face"}

# Of others: what they call so is public, or there is no public way, as of iterators over data.
NOT_OURS = {
    *("_asdict", "_field_defaults", "_fields", "_replace"),  # of named tuples
    "_exit",  # of os
    "_repr_html_",  # of notebooks
    *("_ex_iterable", "_starting_state_dict"),  # of datasets
}


def room_files() -> list[Source]:
    """The files of packages above the core."""
    # The processes of a program stand below the transforms, and so below ``extend``.
    below = CORE | {"distributed"}
    return [source for source in package_files() if home(f"{source.module}.") not in below]


def is_public_name(name: str) -> bool:
    """Whether a name of the core is one that users and rooms may import."""
    return name in face_modules() or name in public_api.remembered_names() or is_error(name)


@functools.cache
def face_modules() -> set[str]:
    """The packages that list public names."""
    return {face.module for face in public_api.faces()}


def is_error(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return module == "shardax.errors" and hasattr(importlib.import_module(module), attribute)


def is_inside_of_core(name: str) -> bool:
    """Whether a dotted name is of the core, and not public."""
    return name.split(".")[0] == "shardax" and home(name) in CORE and not is_public_name(name)


def private_imports(source: Source) -> set[str]:
    """The names of the insides of the core that a file imports, or reaches in another way."""
    tree = source.tree
    names = {found.name for found in source.imports}
    names |= attributes_of_modules(tree)
    names |= names_in_calls(tree)
    return {name for name in names if is_inside_of_core(name)}


def attributes_of_modules(tree: ast.Module) -> set[str]:
    """The dotted names of attributes of imported modules of the package."""
    module_of: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                module_of |= {alias.asname or alias.name: alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    module_of[alias.asname or alias.name] = f"{module}.{alias.name}"

    names: set[str] = set()
    for node in ast.walk(tree):
        steps: list[str] = []
        while isinstance(node, ast.Attribute):
            steps.insert(0, node.attr)
            node = node.value
        name = module_of.get(node.id, "") if isinstance(node, ast.Name) and steps else ""
        while steps and name in face_modules():
            name = f"{name}.{steps.pop(0)}"
        names.add(name)
    return names - {""}


def names_in_calls(tree: ast.Module) -> set[str]:
    """The dotted names under ``shardax._`` that a file has in arguments of calls, as texts."""
    return {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if argument.value.startswith("shardax._") and argument.value.replace(".", "").isidentifier()
    }


def own_names(tree: ast.Module) -> set[str]:
    """The names that a file defines: functions, classes, variables, attributes, slots."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                texts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
                names.update(text for text in texts if isinstance(text, str))
    return names


# Functions that are told the name of an attribute.
TAKES_NAMES = {
    *("getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"),
    *("__getattribute__", "__setattr__", "__delattr__"),
}


def private_attributes(source: Source) -> set[str]:
    """The private attributes that a file reads of other files' classes."""
    found: set[str] = set()
    tree = source.tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= named_attributes(node)
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        is_dunder = node.attr.startswith("__")
        if not (is_own or is_super or is_dunder):
            found.add(node.attr)
    return found - own_names(tree) - NOT_OURS


def named_attributes(call: ast.Call) -> set[str]:
    """The private attributes that a call names by a text: ``getattr(variable, "_value")``."""
    if ast.unparse(call.func).rpartition(".")[2] not in TAKES_NAMES:
        return set()
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    return {
        text
        for text in texts
        if isinstance(text, str) and text.startswith("_") and not text.startswith("__")
    }


def test_rooms_import_public_names_and_those_of_extend() -> None:
    found = {source.module: private_imports(source) for source in room_files()}
    assert {module: names for module, names in found.items() if names} == {}


def test_rooms_read_no_private_attributes_of_other_files() -> None:
    found = {source.module: private_attributes(source) for source in room_files()}
    assert {module: names for module, names in found.items() if names} == {}


def test_extend_has_at_most_60_names_each_with_an_example() -> None:
    names = [name for name in public_api.public_names() if name.startswith("shardax.extend.")]
    assert len(names) <= MOST_NAMES
    # Aliases and constants have no docstring of their own: that of their module shows them.
    files = [source for source in package_files() if source.module.startswith("shardax.extend.")]
    examples = "".join(source.outline.docstring for source in files)
    without = [
        name for name in names if not has_example(name) and f"extend.{name[15:]}" not in examples
    ]
    assert without == []


def has_example(name: str) -> bool:
    """Whether the docstring of a name of ``shardax.extend`` has an example."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    is_own = getattr(value, "__module__", "").startswith("shardax.")
    return is_own and ">>> " in (value.__doc__ or "")


# --- The tests above can fail ---


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    # Of the package itself, which is found by the names below.
    defining_modules()
    face_modules()
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "shardax")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    path = tmp_path / "shardax" / "nn" / "layer.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        textwrap.dedent(
            """
            import importlib
            import shardax as sx
            from shardax import Module, extend, partition
            from shardax.errors import ModuleError
            from shardax.extend import Options
            from shardax.partition import Rules
            from shardax._core.frames import local
            from shardax.partition.rules import assign
            from shardax._files import flush

            class Layer(Module):
                def __init__(self):
                    self._own = local._frame
                def __call__(self, other):
                    return other._own, other._value, self._value, other._replace(x=1)
                def by_other_ways(self, other):
                    importlib.import_module("shardax._core.variable")
                    sx.partition.shard, sx.Param, sx.partition.specs, extend.layouts, extend.align
                    partition.inventory.walk(other)
                    return getattr(other, "_metadata", None), getattr(other, "__dict__")
            """
        )
    )
    return Source(path)


def test_private_imports_are_found(source: Source) -> None:
    assert private_imports(source) == {
        "shardax._core.frames.local",
        "shardax._core.variable",
        "shardax.extend.layouts",
        "shardax.partition.inventory",
        "shardax.partition.specs",
        "shardax.partition.rules.assign",
    }


def test_private_attributes_are_found(source: Source) -> None:
    assert private_attributes(source) == {"_frame", "_metadata", "_value"}
