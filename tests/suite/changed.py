# SPDX-License-Identifier: Apache-2.0
"""Which tests are near to what was changed since the main branch: ``make test-changed``.

Prints arguments for pytest: the tests of every package with a changed file; test files that were
changed, and those that import a changed helper; and the examples in the docstrings of changed
modules and of the modules that import these. What is farther away is not among them, so this gives
a first answer; ``make test`` gives the whole one.

    python -m tests.suite.changed [BRANCH]
"""

from __future__ import annotations

import subprocess
import sys

from tests.house.sources import ROOT, Source, python_files
from tests.suite.rooms import ROOMS

TESTS_OF_PACKAGE = {name: tests for room in ROOMS.values() for name, tests in room.items()}


def git(*arguments: str) -> list[str]:
    """Returns the lines that a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_files(branch: str) -> set[str]:
    """Returns files that differ from where this branch left another, with those not committed."""
    fork = git("merge-base", "HEAD", branch)[0]
    changed = git("diff", "--name-only", fork)
    untracked = git("ls-files", "--others", "--exclude-standard")
    return {path for path in [*changed, *untracked] if (ROOT / path).exists()}


def importers_of(changed: set[str]) -> set[str]:
    """Returns the files that import a changed one by its name, at any level."""
    modules = {module_of(source) for source in python_files() if source.place in changed}
    last_names = {module.rpartition(".")[2] for module in modules}
    importers = set()
    for source in python_files():
        # Parsing all files takes seconds, and few of them name a changed module.
        if not any(name in source.text for name in last_names):
            continue

        imported = {item.name for item in source.imports}
        imported |= {name.rpartition(".")[0] for name in imported}
        if imported & modules:
            importers.add(source.place)
    return importers


def module_of(source: Source) -> str:
    """Returns the dotted name by which a file is imported."""
    dotted = source.place.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")


def has_code(page: str) -> bool:
    """Whether a page has Python, which pytest runs."""
    is_page = page == "README.md" or page.startswith("docs/")
    return is_page and "```python" in (ROOT / page).read_text(encoding="utf-8")


def tests_near(changed: set[str]) -> list[str]:
    """Returns the folders and files that pytest is to run."""
    near = changed | importers_of(changed)
    sources = {path for path in near if path.startswith("src/") and path.endswith(".py")}
    packages = {path.split("/")[2] for path in changed & sources}
    folders = {TESTS_OF_PACKAGE[package] for package in packages}

    files = {
        path
        for path in near
        if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_")
    }
    pages = {path for path in changed if path.endswith(".md") and has_code(path)}
    return sorted(folders | files | pages | sources)


def main(branch: str = "main") -> None:
    """Prints the arguments, or nothing where nothing was changed."""
    print(*tests_near(changed_files(branch)))


if __name__ == "__main__":
    main(*sys.argv[1:])
