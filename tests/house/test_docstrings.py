# SPDX-License-Identifier: Apache-2.0
"""Every file names its licence and says what it is; what is public in a module has a docstring."""

from __future__ import annotations

import re

from tests.house.sources import package_files, python_files

LICENCE = "# SPDX-License-Identifier: Apache-2.0"


def test_every_file_opens_with_its_licence() -> None:
    without = []
    for source in python_files():
        lines = source.text.splitlines()
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if first != [LICENCE]:
            without.append(source.place)
    assert without == []


def test_every_file_says_what_it_is() -> None:
    without = [s.place for s in python_files() if not s.outline.docstring.strip()]
    assert without == []


def test_public_classes_and_functions_have_a_docstring() -> None:
    without = [
        f"{source.place}:{line} {name}"
        for source in package_files()
        for line, name in source.outline.undocumented
    ]
    assert without == []


def test_docstrings_hold_no_code_that_is_not_run() -> None:
    """Examples are doctests: no other kind of code block, and none that is skipped."""
    unrun = re.compile(r"```|\.\. code(-block)?::|doctest: *\+SKIP")
    found = [
        f"{source.place}: {match.group()}"
        for source in package_files()
        for match in unrun.finditer(source.text)
    ]
    assert found == []
