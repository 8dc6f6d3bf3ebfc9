# SPDX-License-Identifier: Apache-2.0
"""Running the code that errors advise.

``run_advice`` takes the code from the text of an error that was caught, fills in what the reader
has to fill in, and runs it. ``tests/house/test_advice.py`` finds in the sources which code errors
advise, and in the tests which of it is run.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_advice(error: BaseException | str, code: str, names: Mapping[str, Any]) -> Any:
    """Runs code of an error, or of its text, with the names that it uses; returns what it gives.

    Assignments are made in ``names``, if it is a dict. ``...`` in code stands for what the reader
    adds: it is the value of the name ``rest``, if there is one; as the key of a dict it is the
    filter of everything. The head of a ``with`` gets the body ``result = body()``.
    """
    assert code in str(error), f"the error does not advise {code!r}:\n{error}"
    is_head = code.startswith("with ")
    head = code.removesuffix("...").rstrip().rstrip(":")
    tree = ast.parse(f"{head}:\n    result = body()" if is_head else code)
    if "rest" in names:
        tree = ast.fix_missing_locations(_Filled().visit(tree))
    namespace = names if isinstance(names, dict) else dict(names)
    match tree.body:
        case [ast.Expr(value=value)]:
            return eval(compile(ast.Expression(value), "<advice>", "eval"), namespace)
    exec(compile(tree, "<advice>", "exec"), namespace)
    return namespace["result"] if is_head else None


def run_advice_first(error: BaseException, code: str, then: str) -> str:
    """Runs code of an error in a new process, before anything else; returns what ``then`` gives."""
    assert code in str(error), f"the error does not advise {code!r}:\n{error}"
    program = f"import jax, shardax as sx\n{code}\nprint({then})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class _Filled(ast.NodeTransformer):
    """Puts a name where code has ``...``."""

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Name("rest", ast.Load()) if node.value is ... else node
