# SPDX-License-Identifier: Apache-2.0
"""One concept a file, whole; folders show the architecture; one class name, one meaning."""

from __future__ import annotations

import ast
import collections

from tests.house import public_api
from tests.house.figures import ambiguous_class_names, import_cycles, importers, lines_of
from tests.house.sources import PACKAGE, Source, lines_of_code, package_files, python_files

MOST_LINES_OF_A_FILE = 900
MOST_CODE_OF_A_FUNCTION = 80
MOST_FILES_OF_A_FOLDER = 18
LEAST_CODE_WITH_ONE_IMPORTER = 80
MOST_FILES_WITH_ONE_PREFIX = 3

# Small modules with one importer that stay, and why.
SMALL_ON_PURPOSE: dict[str, str] = {
    "shardax.models.families.glm": "models have a file by architecture, for the reader"
}

# Modules with the name of another public thing of their package, until they are renamed, and why.
SHADOWING: dict[str, str] = {
    "shardax.host.export": "loads before the face sets the function; named by pickles of exports",
    "shardax.host.host_function": "loads before the face sets the function",
}


def long_functions(source: Source) -> list[str]:
    return [
        f"{source.place}:{found.line} {found.name} has {found.lines} lines of code"
        for found in source.outline.functions
        if found.lines > MOST_CODE_OF_A_FUNCTION
    ]


def is_face(source: Source) -> bool:
    """Whether a file only hands names on: a package face, or the errors of a package."""
    return source.path.name in ("__init__.py", "__main__.py", "errors.py")


def test_a_file_is_at_most_900_lines() -> None:
    lengths = {source.place: len(source.text.splitlines()) for source in python_files()}
    assert {p: n for p, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_function_has_at_most_80_lines() -> None:
    assert [line for source in python_files() for line in long_functions(source)] == []


def test_no_small_module_has_one_importer() -> None:
    """A package face holds no code, so what only a face imports has nowhere else to be."""
    imported_by = importers()
    faces = {source.module for source in package_files() if is_face(source)}
    small = {
        source.module: sorted(imported_by[source.module])
        for source in package_files()
        if not is_face(source)
        and lines_of(source).code < LEAST_CODE_WITH_ONE_IMPORTER
        and len(imported_by[source.module]) == 1
        and not imported_by[source.module] & faces
    }
    assert small.keys() - SMALL_ON_PURPOSE.keys() == set(), small
    assert SMALL_ON_PURPOSE.keys() - small.keys() == set(), "no longer exceptions"


def test_a_folder_holds_at_most_18_files() -> None:
    counts = collections.Counter(source.path.parent for source in package_files())
    too_full = {str(folder): n for folder, n in counts.items() if n > MOST_FILES_OF_A_FOLDER}
    assert too_full == {}


def test_files_with_one_prefix_form_a_folder() -> None:
    families: dict[str, list[str]] = collections.defaultdict(list)
    for source in package_files():
        prefix, separator, _ = source.path.stem.partition("_")
        if separator and prefix:
            families[f"{source.path.parent.relative_to(PACKAGE)}/{prefix}"].append(source.place)
    assert {p: f for p, f in families.items() if len(f) >= MOST_FILES_WITH_ONE_PREFIX} == {}


def shadowing(face: Source) -> set[str]:
    """Modules of a package that have the name of something else that its face exports."""
    folder = face.path.parent
    modules = {each.stem for each in folder.glob("*.py")}
    modules |= {each.parent.name for each in folder.glob("*/__init__.py")}
    # A face may make its modules themselves public, as ``from shardax import nn as nn`` does.
    public = {
        alias.asname
        for statement in ast.walk(face.tree)
        if isinstance(statement, ast.ImportFrom) and statement.module == face.module
        for alias in statement.names
    }
    names = set(public_api.names_on(face)) - public
    return {f"{face.module}.{name}" for name in modules & names}


def test_no_module_name_equals_another_export() -> None:
    """Importing such a module anew would put it in the place of the function."""
    found = {module for face in public_api.faces() for module in shadowing(face)}
    assert found == SHADOWING.keys()


def test_a_class_name_has_one_meaning() -> None:
    assert ambiguous_class_names() == {}


def test_imports_are_acyclic() -> None:
    assert import_cycles() == []


def test_a_docstring_is_not_counted_as_code() -> None:
    text = 'def f(x):\n    """What.\n\n    Why.\n    """\n\n    return x\n'
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lines_of_code(function) == 3
