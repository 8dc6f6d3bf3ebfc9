# SPDX-License-Identifier: Apache-2.0
"""Code that errors advise is run by the tests that raise them.

*Advice* is code in the text of an error: in backticks, or a call of ``sx.``. A name, keyword or
constant alone, such as ```...```, is none, nor is code behind "for", which other code replaces. A
test runs advice by ``tests.advice.run_advice(error, code, names)``, which takes it from the text.
Texts go through variables and helpers on their way to an error, so every text of the package is
looked at that is no docstring.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator

from tests.house.sources import ROOT, package_files

HOLE = "{}"  # what an f-string fills in

_RUN_BY = ("run_advice", "run_advice_first")
_QUOTED = re.compile(r"(for )?`([^`]+)`")
_CALL = re.compile(r"\bsx\.[\w.]+\(")


def text_of(node: ast.expr) -> str:
    """The text that an expression gives, with a hole for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def calls_in(text: str) -> Iterator[str]:
    """Yields the calls of ``sx.`` in a text, with their arguments; calls in these are theirs."""
    position = 0
    while match := _CALL.search(text, position):
        position, depth = match.end(), 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                position = end + 1
                yield text[match.start() : position]
                break


def is_mention(quoted: str) -> bool:
    """Whether quoted text is a name, keyword or constant alone, which cannot be run."""
    if keyword.iskeyword(quoted):
        return True
    try:
        expression = ast.parse(quoted.replace(HOLE, "hole"), mode="eval").body
    except SyntaxError:
        return False
    return isinstance(expression, (ast.Name, ast.Attribute, ast.Constant))


def advice_in(text: str) -> Iterator[str]:
    """Yields the code in the text of an error."""
    for replaced, quoted in _QUOTED.findall(text):
        if not replaced and not is_mention(quoted):
            yield quoted
    yield from calls_in(_QUOTED.sub("", text))


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Yields the texts of a module but its docstrings, with holes for what is filled in."""
    parts: set[int] = set()  # of a text that was seen, or docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))
        elif id(node) not in parts and isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            parts |= {id(part) for part in ast.iter_child_nodes(node)}
            yield text_of(node)


def all_advice() -> set[str]:
    """All code that texts of the package advise, as ``module: code``."""
    return {
        f"{source.module}: {' '.join(code.split())}"
        for source in package_files()
        for text in texts_in(source.tree)
        for code in advice_in(text)
    }


def code_that_is_run() -> set[str]:
    """The code that tests give to ``run_advice``."""
    found = set()
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text()
        if "run_advice" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found |= code_run_in(node)
    return found


def code_run_in(function: ast.FunctionDef) -> set[str]:
    """The code that a function gives to ``run_advice``, itself or by a local name."""
    texts: dict[str, list[ast.expr]] = {}
    calls = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts.setdefault(node.targets[0].id, []).append(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _RUN_BY:
            calls.append(node.args[1])
    codes = set()
    for code in calls:
        choices = texts.get(code.id, []) if isinstance(code, ast.Name) else [code]
        for choice in choices:
            parts = [choice.body, choice.orelse] if isinstance(choice, ast.IfExp) else [choice]
            codes |= {text_of(part) for part in parts} - {HOLE}
    return codes


def is_run(advice: str, run: set[str]) -> bool:
    """Whether a test runs advice, alone or in larger code, with something in its holes."""
    code = advice.partition(": ")[2]
    pattern = re.compile(".+?".join(map(re.escape, code.split(HOLE))), re.DOTALL)
    return any(pattern.search(" ".join(text.split())) for text in run)


def test_advice_is_all_run() -> None:
    run = code_that_is_run()
    missing = sorted(advice for advice in all_advice() if not is_run(advice, run))
    assert missing == [], "run these where they are raised (tests/advice.py)"


def test_advice_is_found_in_texts() -> None:
    text = "Write `v[...] = x`, or sx.cond(x > f(0), sx.jit(g)), but not sx.cond or `...`."
    text += " Use `x[0]` for `float(x)`, `y[0]`."
    assert [*advice_in(text)] == ["v[...] = x", "x[0]", "y[0]", "sx.cond(x > f(0), sx.jit(g))"]
    assert is_run("m: sx.grad(f, {})", {"slope = sx.grad(f, wrt=sx.Param)"})
    assert not is_run("m: sx.grad(f, {})", {"sx.vjp(f, wrt=sx.Param)"})
