# SPDX-License-Identifier: Apache-2.0
"""Each package owns its errors; ``shardax.errors`` shows them all."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pickle
import re

from shardax import errors
from tests.house.sources import package_files

BASES = {"ShardaxError", "UserWarning"}


@functools.cache
def error_classes() -> dict[str, list[str]]:
    """Maps each error class to the modules that define it, by the names of base classes."""
    classes: dict[str, tuple[set[str], list[str]]] = {}
    for source in package_files():
        for name, bases in source.outline.classes:
            classes.setdefault(name, (bases, []))[1].append(source.module)
    found = set(BASES)
    while True:
        more = {name for name, (bases, _) in classes.items() if bases & found} - found
        if not more:
            break
        found |= more
    return {name: classes[name][1] for name in found if name in classes}


def shown() -> list[str]:
    """The errors that the face has; whoever collects these tests need not parse the package."""
    face = importlib.import_module("shardax.errors")
    return sorted(name for name in dir(face) if inspect.isclass(getattr(face, name)))


def test_errors_module_contains_every_error() -> None:
    assert shown() == sorted(error_classes())


def test_errors_are_known_by_the_face() -> None:
    """In tracebacks, and to pickle."""
    for name in shown():
        error = getattr(errors, name)
        assert error.__module__ == "shardax.errors"
        assert pickle.loads(pickle.dumps(error)) is error


def test_package_owns_its_errors() -> None:
    """An error is defined in a package that uses it, not below for somebody above."""
    defined = {name: where[0] for name, where in error_classes().items()}
    used: dict[str, set[str]] = {name: set() for name in defined}
    for source in package_files():
        package = ".".join(source.module.split(".")[:2])
        # Parsing takes long: only files with a name that their package was not yet seen to use.
        words = set(re.findall(r"\w+", source.text)) & used.keys()
        if package == "shardax.errors" or all(package in used[name] for name in words):
            continue
        for node in ast.walk(source.tree):
            name = getattr(node, "id", getattr(node, "attr", None))
            if name in used:
                used[name].add(package)
    astray = {
        name: (module, sorted(used[name]))
        for name, module in defined.items()
        if ".".join(module.split(".")[:2]) not in used[name] and name != "ShardaxError"
    }
    assert astray == {}
