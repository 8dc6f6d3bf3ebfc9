# SPDX-License-Identifier: Apache-2.0
"""Running the code that errors advise.

``run_advice`` takes the code from the text of an error that was caught, fills in what the reader
has to fill in, and runs it. ``tests/house/test_advice.py`` finds in the sources which code errors
advise, and in the tests which of it is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


def run_advice(error: BaseException, code: str, names: Mapping[str, Any]) -> Any:
    """Runs code of an error's text with the names that it uses; returns what it gives.

    Assignments are made in ``names``, if it is a dict. ``...`` in code stands for what the reader
    adds: it is the value of the name ``rest``, if there is one.
    """
    assert code in str(error), f"the error does not advise {code!r}:\n{error}"
    tree = ast.parse(code)
    if "rest" in names:
        tree = ast.fix_missing_locations(_Filled().visit(tree))
    namespace = names if isinstance(names, dict) else dict(names)
    match tree.body:
        case [ast.Expr(value=value)]:
            return eval(compile(ast.Expression(value), "<advice>", "eval"), namespace)
    exec(compile(tree, "<advice>", "exec"), namespace)
    return None


class _Filled(ast.NodeTransformer):
    """Puts a name where code has ``...``."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Name("rest", ast.Load()) if node.value is ... else node
