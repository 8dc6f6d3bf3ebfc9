# SPDX-License-Identifier: Apache-2.0
"""Files stay within 500 lines, functions under 60 lines of code."""

from __future__ import annotations

import ast

from tests.house.sources import Function, Source, python_files

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 59


def lines_of_code(function: Function) -> int:
    """Lines from ``def`` to the end without the docstring, which may be as long as is useful."""
    first = function.body[0]
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    return lines - ((first.end_lineno or first.lineno) - first.lineno + 1)


def long_functions(source: Source) -> list[str]:
    return [
        f"{source.place}:{node.lineno} {node.name} has {lines_of_code(node)} lines of code"
        for node in ast.walk(source.tree)
        if isinstance(node, Function) and lines_of_code(node) > MOST_LINES_OF_A_FUNCTION
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
