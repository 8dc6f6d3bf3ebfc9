# SPDX-License-Identifier: Apache-2.0
"""The code is formatted (``make format`` does it), lints clean, and its types hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import ROOT, package_files

CHECKS = {
    "formatted": ["ruff", "format", "--check", "--output-format=concise"],
    "free_of_lint": ["ruff", "check", "--output-format=concise"],
    "well_typed": ["ty", "check", "--output-format=concise"],
}


@pytest.mark.parametrize("check", ["formatted", "free_of_lint", "well_typed"])
def test_code_is(check: str) -> None:
    program, *arguments = CHECKS[check]
    beside_python = Path(sys.executable).with_name(program)
    done = subprocess.run(
        [beside_python, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{program} {' '.join(arguments)}\n{done.stdout}{done.stderr}", pytrace=False)


def test_public_functions_annotate_all_arguments() -> None:
    untyped = [
        f"{source.place}:{function.lineno} {function.name}({argument.arg})"
        for source in package_files()
        for function in _public_functions(source.tree.body)
        for argument in _arguments(function)
        if argument.annotation is None and argument.arg not in ("self", "cls")
    ]
    assert untyped == []


def _public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions and methods, special ones too, without those inside functions."""
    for node in body:
        is_private = getattr(node, "name", "").startswith("_")
        if isinstance(node, ast.FunctionDef):
            if not is_private or node.name.startswith("__"):
                yield node
        elif isinstance(node, ast.ClassDef) and not is_private:
            yield from _public_functions(node.body)


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    parameters = function.args
    variadic = [argument for argument in (parameters.vararg, parameters.kwarg) if argument]
    return [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, *variadic]
