# SPDX-License-Identifier: Apache-2.0
"""Files stay within 500 lines, functions under 60 lines of code."""

from __future__ import annotations

import ast

from tests.house.sources import Source, lines_of_code, python_files

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 59


def long_functions(source: Source) -> list[str]:
    return [
        f"{source.place}:{found.line} {found.name} has {found.lines} lines of code"
        for found in source.outline.functions
        if found.lines > MOST_LINES_OF_A_FUNCTION
    ]


def test_files_stay_within_500_lines() -> None:
    lengths = {source.place: len(source.text.splitlines()) for source in python_files()}
    assert {p: n for p, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_functions_stay_under_60_lines_of_code() -> None:
    assert [line for source in python_files() for line in long_functions(source)] == []


def test_a_docstring_is_not_counted_as_code() -> None:
    text = 'def f(x):\n    """What.\n\n    Why.\n    """\n\n    return x\n'
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lines_of_code(function) == 3
