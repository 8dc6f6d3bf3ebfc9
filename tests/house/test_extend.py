# SPDX-License-Identifier: Apache-2.0
"""Rooms above the core take public names and ``shardax.extend`` from it, and nothing private.

A *private attribute* begins with one underscore. A file may read those of ``self`` and ``cls``, and
those that it defines itself; what ``namedtuple`` and ``os`` call so is public.
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

PUBLIC_UNDERSCORES = {
    *("_asdict", "_field_defaults", "_fields", "_replace"),  # of named tuples
    "_exit",  # of os
    "_repr_html_",  # of notebooks
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


def private_imports(source: Source) -> set[str]:
    """The names that a file imports from the insides of the core."""
    return {
        found.name
        for found in source.imports
        if found.name.split(".")[0] == "shardax"
        and home(found.name) in CORE
        and not is_public_name(found.name)
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


def private_attributes(source: Source) -> set[str]:
    """The private attributes that a file reads of other files' classes."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        is_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
        is_dunder = node.attr.startswith("__")
        if not (is_own or is_super or is_dunder):
            found.add(node.attr)
    return found - own_names(source.tree) - PUBLIC_UNDERSCORES


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
            from shardax import Module, partition
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
            """
        )
    )
    return Source(path)


def test_private_imports_are_found(source: Source) -> None:
    assert private_imports(source) == {
        "shardax._core.frames.local",
        "shardax.partition.rules.assign",
    }


def test_private_attributes_are_found(source: Source) -> None:
    assert private_attributes(source) == {"_frame", "_value"}
