# SPDX-License-Identifier: Apache-2.0
"""Tests read as specifications: names of their own, public imports, lists of what exists."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT, Source, python_files
from tests.suite import compat

MOST_FILES_INSIDE = 40
PRIVATE_IMPORT = re.compile(r"^\s*(from|import) shardax[.\w]*\._", re.MULTILINE)


def files() -> Iterator[Path]:
    yield from sorted((ROOT / "tests").rglob("*.py"))


def names_of_tests(file: Path) -> list[str]:
    functions = sources_by_path()[file].outline.functions
    return [each.name for each in functions if each.name.startswith("test_")]


@functools.cache
def sources_by_path() -> dict[Path, Source]:
    return {source.path: source for source in python_files()}


def test_no_name_twice_in_a_file() -> None:
    twice = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files()
        for name, count in Counter(names_of_tests(file)).items()
        if count > 1
    ]
    assert not twice, "\n".join(twice)


def test_few_files_import_private_modules() -> None:
    inside = [
        str(file.relative_to(ROOT))
        for file in files()
        if PRIVATE_IMPORT.search(file.read_text(encoding="utf-8"))
    ]
    assert len(inside) <= MOST_FILES_INSIDE, "\n".join(inside)


def test_tests_chosen_for_ci_exist() -> None:
    missing = []
    for test in sorted(compat.read()):
        path, _, name = test.partition("::")
        file = ROOT / path
        function = name.rpartition("::")[2].partition("[")[0]
        if file.suffix == ".py" and path.startswith("tests/") and name:
            if not file.exists() or function not in names_of_tests(file):
                missing.append(test)
        elif not file.exists():
            missing.append(test)
    assert not missing, "run `make coverage compat`:\n" + "\n".join(missing)
