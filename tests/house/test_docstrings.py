# SPDX-License-Identifier: Apache-2.0
"""Public names are documented in full, internals in one line, and every file names its licence.

*Public*: what a package face or a public module lists, and the methods of public classes and of
their bases. All other classes and functions are internal: one line says what they are, comments say
why.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import re

from tests.house.public_api import public_names
from tests.house.sources import Source, package_files, python_files

LICENCE = "# SPDX-License-Identifier: Apache-2.0"


@functools.cache
def public_places() -> set[tuple[str, str]]:
    """Module and qualified name of what is public, with the bases of public classes."""
    places = set()
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        value = inspect.unwrap(getattr(importlib.import_module(module), attribute))
        if inspect.ismodule(value):  # such as sx.train.metrics: all that it defines is public
            places |= {(value.__name__, each) for each in vars(value) if each[0] != "_"}
        for owner in value.__mro__ if inspect.isclass(value) else (value,):
            if getattr(owner, "__module__", "").startswith("shardax"):
                places.add((owner.__module__, getattr(owner, "__qualname__", name)))
    return places


def is_public(source: Source, name: str) -> bool:
    """Whether a class, function or method belongs to what users see."""
    top = name.split(".")[0]
    is_error = hasattr(importlib.import_module("shardax.errors"), top)
    if (source.module, top) not in public_places() and not is_error:
        return False
    return not any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_files_open_with_their_license() -> None:
    without = []
    for source in python_files():
        lines = source.text.splitlines()
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if first != [LICENCE]:
            without.append(source.place)
    assert without == []


def test_files_say_what_they_are() -> None:
    without = [s.place for s in python_files() if not s.outline.docstring.strip()]
    assert without == []


def test_public_classes_and_functions_have_a_docstring() -> None:
    without = [
        f"{source.place}:{line} {name}"
        for source in package_files()
        for line, name in source.outline.undocumented
    ]
    assert without == []


def sections_that_lack(name: str) -> list[str]:
    """Returns which sections the docstring of a public function should have and has not."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if not inspect.isfunction(value):
        return []

    lacking = []
    docstring = inspect.getdoc(value) or ""
    signature = inspect.signature(value)
    if signature.parameters and "\nArgs:\n" not in docstring:
        lacking.append(f"{name}: Args")
    returns = str(signature.return_annotation) not in ("None", "<class 'inspect._empty'>")
    if returns and not re.search(r"^(Returns|Yields):|^Returns ", docstring, flags=re.MULTILINE):
        lacking.append(f"{name}: Returns")
    return lacking


def test_public_functions_name_their_arguments_and_results() -> None:
    assert [line for name in public_names() for line in sections_that_lack(name)] == []


def test_sections_of_errors_name_each_class_once() -> None:
    twice = [
        f"{source.place}:{each.line} {each.name}: {error}"
        for source in package_files()
        for each in source.outline.descriptions
        for section in re.findall(r"^Raises:\n((?:    .*\n?)+)", each.docstring, flags=re.MULTILINE)
        for error, count in collections.Counter(
            re.findall(r"^    (\w+): ", section, flags=re.MULTILINE)
        ).items()
        if count > 1
    ]
    assert twice == []


def test_docstrings_hold_no_code_that_is_not_run() -> None:
    """Examples are doctests: no other kind of code block, and none that is skipped."""
    unrun = re.compile(r"```|\.\. code(-block)?::|doctest: *\+SKIP")
    found = [
        f"{source.place}: {match.group()}"
        for source in package_files()
        for match in unrun.finditer(source.text)
    ]
    assert found == []
