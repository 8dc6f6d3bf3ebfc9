# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N815 (names of ast.NodeVisitor)
"""Mutation score of the suite: seeded defects of the sources, and how many the tests notice.

    make coverage                           writes .coverage and times.json
    python -m tests.suite.mutants           150 mutants, about half an hour of two cores

A *mutant* is a copy of the package with one defect: another operator, another constant, a negated
condition, a dropped statement. It is *killed* if a test fails, the package cannot be imported, or a
test hangs; else it *lives*. The tests of a mutant are those that ran its line, the cheapest first,
at most ``BUDGET`` CPU-seconds and ``PER_FILE`` of one file.

The choice depends on the sources and the seed alone, so that two suites can be compared.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import ROOT

PACKAGES = ("_core", "_transforms", "partition", "_select", "nn", "models", "plan")
BUDGET = 12.0  # CPU-seconds of tests for one mutant
PER_FILE = 6
SECONDS = 300  # until tests count as hanging
# Plugins of pytest are imported before it runs.
IGNORED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
NOT_COPIED = (".git", ".venv*", ".compilers*", ".cache", "__pycache__", "runs", ".hypothesis")

OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.MatMult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


# Processes that have imported what takes long, but not shardax.
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["jax", "jax.numpy", "optax", "scipy.stats", "tests.suite.mutants"]


@dataclass(frozen=True)
class Mutant:
    """One defect: ``kind`` at a line of a file."""

    file: str
    line: int
    kind: str
    text: str  # the statement before the defect
    site: int  # position among the sites of the file


class Sites(ast.NodeTransformer):
    """Visits the places of a module that can be mutated; mutates the one at ``target``."""

    def __init__(self, target: int = -1) -> None:
        self.target = target
        self.found: list[tuple[str, int, str]] = []
        self.statements: list[ast.stmt] = []

    def site(self, kind: str, node: ast.AST) -> bool:
        """Counts a site; says whether it is the one to mutate."""
        text = ast.unparse(self.statements[-1]).splitlines()[0]
        self.found.append((kind, getattr(node, "lineno", 0), text))
        return len(self.found) - 1 == self.target

    def visit(self, node: ast.AST) -> Any:
        """Visits a node, keeping track of the statement that it is in."""
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        self.statements.append(node)
        try:
            return super().visit(node)
        finally:
            self.statements.pop()

    def visit_If(self, node: ast.If) -> Any:
        """A condition is negated."""
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        if self.site("condition", node):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Compare(self, node: ast.Compare) -> Any:
        """The first operator of a comparison is replaced."""
        if self.site("operator", node):
            node.ops[0] = OTHER_OPERATOR[type(node.ops[0])]()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        """An arithmetic operator is replaced; formatting and unions of types are left alone."""
        is_arithmetic = type(node.op) in OTHER_OPERATOR and not _is_text(node.left)
        if is_arithmetic and self.site("operator", node):
            node.op = OTHER_OPERATOR[type(node.op)]()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        """``and`` and ``or`` are exchanged."""
        if self.site("operator", node):
            node.op = OTHER_OPERATOR[type(node.op)]()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        """A number is one more, a truth value the other one."""
        if isinstance(node.value, bool | int | float) and self.site("constant", node):
            value = node.value
            return ast.Constant(not value if isinstance(value, bool) else value + 1)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        """Texts of errors and reports are left alone."""
        return node

    def _simple(self, node: Any) -> Any:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and self.site("dropped statement", node):
            return ast.Pass()
        return self.generic_visit(node)

    visit_Expr = visit_AugAssign = visit_Raise = _simple

    def visit_Assign(self, node: ast.Assign) -> Any:
        """An assignment to an attribute or an item is dropped; a name would be missing at once."""
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            return self._simple(node)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """Annotations are left alone."""
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        """Annotations and decorators are left alone."""
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.args.kw_defaults = [d and self.visit(d) for d in node.args.kw_defaults]
        node.body = [self.visit(statement) for statement in node.body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def choose(sources: Path, count: int, seed: int) -> list[Mutant]:
    """Returns ``count`` mutants, as many of each package."""
    chosen = []
    for index, package in enumerate(PACKAGES):
        sites = []
        for path in sorted((sources / "shardax" / package).rglob("*.py")):
            visitor = Sites()
            visitor.visit(ast.parse(path.read_text()))
            file = path.relative_to(sources).as_posix()
            sites += [
                Mutant(file, line, kind, text, site)
                for site, (kind, line, text) in enumerate(visitor.found)
            ]
        share = (count * (index + 1)) // len(PACKAGES) - (count * index) // len(PACKAGES)
        chosen += random.Random(f"{seed} {package}").sample(sites, share)
    return chosen


def mutated(text: str, mutant: Mutant) -> str:
    """Returns the source with the defect."""
    tree = ast.parse(text)
    visitor = Sites(mutant.site)
    changed = visitor.visit(copy.deepcopy(tree))
    return ast.unparse(ast.fix_missing_locations(changed))


class Reach:
    """Which tests ran a line, from the contexts of a coverage file, and what each costs."""

    def __init__(self, coverage_file: Path, times: Path, sources: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(coverage_file))
        self.data.read()
        self.sources = sources
        self.cpu = {
            test: spent["cpu"] for test, spent in json.loads(times.read_text())["tests"].items()
        }
        self.by_name = {
            Path(f).as_posix().rpartition("/src/")[2]: f for f in self.data.measured_files()
        }

    @functools.cache  # noqa: B019 (one object for the whole run)
    def lines_of(self, file: str) -> dict[int, list[str]]:
        """Returns the contexts of each line of a file, which takes long to read."""
        return self.data.contexts_by_lineno(file)

    def tests(self, mutant: Mutant) -> list[str]:
        """Returns the tests to run for a mutant, the cheapest first."""
        file = self.by_name.get(mutant.file)
        contexts: set[str] = set()
        if file is not None:
            lines = self.lines_of(file)
            contexts = set(lines.get(mutant.line, ())) - {""}
            if not contexts and mutant.line in lines:  # run once, when the file is imported
                contexts = {context for each in lines.values() for context in each} - {""}
        names = {context.rpartition("|")[0] for context in contexts}
        names = {n for n in names if n in self.cpu and not n.startswith("tests/house")}
        chosen, spent, per_file = [], 0.0, Counter[str]()
        for name in sorted(names, key=lambda name: (self.cpu[name], name)):
            test_file = name.partition("::")[0]
            if per_file[test_file] < PER_FILE and spent + self.cpu[name] <= BUDGET:
                chosen.append(name)
                spent += self.cpu[name]
                per_file[test_file] += 1
        return chosen


def _run_pytest(tree: Path, tests: Sequence[str], log: Path) -> None:
    """Runs tests in this process, a fork that has imported JAX and not yet shardax."""
    os.setsid()
    os.chdir(tree)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    own = {str(ROOT), str(ROOT / "src"), ""}
    sys.path[:] = [str(tree / "src"), str(tree), *(path for path in sys.path if path not in own)]
    os.environ |= {"PYTHONPATH": str(tree / "src"), "CI": "1"}
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *IGNORED]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def outcome_of(mutant: Mutant, tests: Sequence[str], tree: Path) -> str:
    """Runs the tests on the mutant in a copy of the tree."""
    if not tests:
        return "lives: no test runs it"
    path = tree / "src" / mutant.file
    log = tree / "log_of_mutant"
    original = path.read_text()
    path.write_text(mutated(original, mutant))
    process = FORKS.Process(target=_run_pytest, args=(tree, tests, log))
    try:
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            return "killed: a test hangs"
    finally:
        path.write_text(original)
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(process.pid, signal.SIGKILL)  # and what tests have left
        process.join()
    if process.exitcode == 0:
        return "lives"
    output = log.read_text()
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"killed: {failed[0] if failed else output[-300:]}"


def run(
    mutants: Sequence[Mutant], reach: Reach, workers: int, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Tries all mutants, each worker in a copy of the tree of its own."""
    waiting: queue.Queue[Mutant] = queue.Queue()
    for mutant in mutants:
        waiting.put(mutant)
    results: dict[Mutant, dict[str, Any]] = {}

    def work(folder: Path) -> None:
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            tests = reach.tests(mutant)
            outcome = outcome_of(mutant, tests, folder)
            results[mutant] = asdict(mutant) | {"tests": len(tests), "outcome": outcome}
            note(f"{len(results):4} {mutant.file}:{mutant.line} {mutant.kind}: {outcome[:120]}")

    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=work, args=(Path(folder) / str(index),))
            for index in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[mutant] for mutant in mutants]


def table_of(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table: killed of all, by package and kind."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        package = result["file"].split("/")[1]
        killed = result["outcome"].startswith("killed")
        for row in (package, result["kind"], "all"):
            rows[row]["mutants"] += 1
            rows[row]["killed"] += killed
    yield "| mutants of | made | killed |"
    yield "| --- | --: | --: |"
    for row, counts in rows.items():
        if row != "all":
            yield f"| {row} | {counts['mutants']} | {counts['killed']} |"
    yield f"| all | {rows['all']['mutants']} | {rows['all']['killed']} |"


def main() -> None:
    """Chooses, tries, writes and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, default=ROOT / "times.json")
    parser.add_argument("--out", type=Path, default=ROOT / "mutants.json")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported
    FORKS.set_forkserver_preload(PRELOADED)
    mutants = choose(ROOT / "src", options.count, options.seed)
    reach = Reach(options.coverage, options.times, ROOT / "src")
    results = run(mutants, reach, options.workers, lambda line: print(line, flush=True))
    options.out.write_text(json.dumps(results, indent=1))
    print("\n".join(table_of(results)))


if __name__ == "__main__":
    main()
