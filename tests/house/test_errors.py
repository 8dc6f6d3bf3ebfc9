# SPDX-License-Identifier: Apache-2.0
"""Each package owns its errors; ``shardax.errors`` shows them all."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import subprocess
import sys

import pytest

from shardax import errors
from tests.house.sources import package_files

BASES = {"ShardaxError", "UserWarning"}


def error_classes() -> dict[str, list[str]]:
    """Maps each error class to the modules that define it, by the names of base classes."""
    classes: dict[str, tuple[set[str], list[str]]] = {}
    for source in package_files():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                classes.setdefault(node.name, (bases, []))[1].append(source.module)
    found = set(BASES)
    while True:
        more = {name for name, (bases, _) in classes.items() if bases & found} - found
        if not more:
            break
        found |= more
    return {name: classes[name][1] for name in found if name in classes}


def test_errors_module_contains_every_error() -> None:
    face = importlib.import_module("shardax.errors")
    shown = {name for name in dir(face) if inspect.isclass(getattr(face, name))}
    assert shown == set(error_classes())


@pytest.mark.parametrize("name", sorted(error_classes()))
def test_an_error_is_known_by_the_face(name: str) -> None:
    """In tracebacks, and to pickle."""
    error = getattr(importlib.import_module("shardax.errors"), name)
    assert error.__module__ == "shardax.errors"
    assert pickle.loads(pickle.dumps(error)) is error


@pytest.mark.parametrize(("old", "new"), sorted(errors._NEW_NAME.items()))
def test_old_error_names_warn_and_still_catch(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"errors.{old} is shardax.errors.{new} now"):
        assert getattr(errors, old) is getattr(errors, new)


def test_importing_errors_imports_no_further_package() -> None:
    program = "import sys, shardax.errors; print(sorted(m for m in sys.modules if 'shardax.' in m))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & {"shardax.plan", "shardax.train", "shardax.host", "shardax.view"}


def test_a_package_owns_its_errors() -> None:
    """An error is defined in a package that uses it, not below for somebody above."""
    defined = {name: where[0] for name, where in error_classes().items()}
    used: dict[str, set[str]] = {name: set() for name in defined}
    for source in package_files():
        package = ".".join(source.module.split(".")[:2])
        for node in ast.walk(source.tree):
            name = getattr(node, "id", getattr(node, "attr", None))
            if name in used and package != "shardax.errors":
                used[name].add(package)
    astray = {
        name: (module, sorted(used[name]))
        for name, module in defined.items()
        if ".".join(module.split(".")[:2]) not in used[name] and name != "ShardaxError"
    }
    assert astray == {}
