# SPDX-License-Identifier: Apache-2.0
"""Public names change on purpose only, exist, show an example, and are on the page."""

from __future__ import annotations

import importlib
import inspect
import re
import types

from tests.house.public_api import faces, names_on, public_names, remembered_names
from tests.house.sources import ROOT


def test_public_names_equal_the_stored_list() -> None:
    """After a change on purpose: ``make api``, and commit the file with the change."""
    now, before = set(public_names()), set(remembered_names())
    assert {"added": sorted(now - before), "removed": sorted(before - now)} == {
        "added": [],
        "removed": [],
    }


def test_faces_show_exactly_what_they_list() -> None:
    for face in faces():
        module = importlib.import_module(face.module)
        listed = set(names_on(face))
        shown = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and name != "annotations"
            # A submodule becomes an attribute once something has imported it.
            and not (
                isinstance(value, types.ModuleType) and value.__name__ == f"{face.module}.{name}"
            )
        }
        assert {name for name in listed if not hasattr(module, name)} == set()
        assert shown - listed == set()


def test_faces_are_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    on_page = set(re.findall(r"^   (shardax\S*)$", page, flags=re.MULTILINE))
    with_names = {face.module for face in faces() if any(names_on(face))}
    # Modules that a face offers as such.
    modules = {"shardax.train.checkpoint", "shardax.train.metrics"}
    assert modules <= set(public_names())
    assert with_names | modules == on_page


def test_public_classes_and_functions_show_an_example() -> None:
    without = set()
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(value) or inspect.isfunction(value):
            where = f"{value.__module__}.{value.__qualname__}"
            if where.startswith("shardax.") and ">>> " not in (value.__doc__ or ""):
                without.add(where)
    assert sorted(without) == []
