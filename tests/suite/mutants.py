# SPDX-License-Identifier: Apache-2.0
"""Mutation score of the suite: seeded defects of the sources, and how many the tests notice.

    make coverage                           writes .coverage and times.json
    python -m tests.suite.mutants           150 mutants, about a quarter of an hour

cosmic-ray makes the *mutants*, copies of the package with one defect each. A mutant is *killed* if
a test fails, the package cannot be imported, or a test hangs; else it *lives*. cosmic-ray would run
one command for all mutants. Here each has the tests that ran its line, the cheapest first, at most
``BUDGET`` CPU-seconds and ``PER_FILE`` of one file.

The choice depends on the sources and the seed alone, so that two suites can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parso
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome
from coverage import CoverageData

from tests.house.sources import ROOT

PACKAGES = ("_core", "_transforms", "partition", "_select", "nn", "models", "plan")
BUDGET = 12.0  # CPU-seconds of tests for one mutant
PER_FILE = 6
SECONDS = 900  # until tests count as hanging, also on a busy machine
NOT_COPIED = (".git", ".venv*", ".compilers*", ".cache", "__pycache__", "runs", ".hypothesis")

# cosmic-ray puts each operator in place of each other; one of them is enough. `|` is of types here.
BINARY = "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_FloorDiv"
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is"
OPERATORS = [
    "here/DropStatement",
    *(f"core/{name}" for name in ("AddNot", "NumberReplacer", "ZeroIterationForLoop")),
    *(f"core/Replace{name}" for name in ("AndWithOr", "OrWithAnd", "TrueWithFalse")),
    *(f"core/Replace{name}" for name in ("FalseWithTrue", "ContinueWithBreak")),
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in BINARY.split()),
    *(f"core/ReplaceComparisonOperator_{pair}" for pair in COMPARISON.split()),
    *(f"core/ReplaceUnaryOperator_{pair}" for pair in ("Delete_Not", "USub_UAdd")),
]


class DropStatement:
    """``pass`` in place of a call, a ``raise``, or an assignment to an attribute or an item."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yields where the statement is. A name without its assignment would be missing at once."""
        if node.type == "simple_stmt":
            first = node.children[0]
            target = first.children[0] if first.type == "expr_stmt" else first
            if target.type in ("atom_expr", "raise_stmt", "yield_expr"):
                yield first.start_pos, first.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Puts ``pass`` there."""
        node.children[0] = parso.parse(node.children[0].get_first_leaf().prefix + "pass")
        return node


plugins.OPERATOR_PROVIDERS["here"] = {"DropStatement": DropStatement}


def choose(sources: Path, count: int, seed: int) -> Iterator[MutationSpec]:
    """Yields ``count`` mutants, as many of each package."""
    for index, package in enumerate(PACKAGES):
        sites = []
        for path in sorted((sources / "shardax" / package).rglob("*.py")):
            nodes = list(ast_nodes(get_ast(path.read_text())))
            for name in OPERATORS:
                positions = plugins.get_operator(name)().mutation_positions
                places = [place for node in nodes for place in positions(node)]
                sites += [MutationSpec(path, name, n, *place) for n, place in enumerate(places)]
        random.Random(f"{seed} {package}").shuffle(sites)
        share = (count * (index + 1)) // len(PACKAGES) - (count * index) // len(PACKAGES)
        is_program = filter(_compiles, sites)
        yield from (next(is_program) for _ in range(share))


def _compiles(mutant: MutationSpec) -> bool:
    """False where ``*`` only marks arguments, which cosmic-ray takes for a product."""
    operator = plugins.get_operator(mutant.operator_name)()
    text = mutate_code(mutant.module_path.read_text(), operator, mutant.occurrence)
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Reach:
    """Which tests ran a line, from the contexts of a coverage file, and what each costs."""

    def __init__(self, coverage_file: Path, times: Path) -> None:
        self.data = CoverageData(str(coverage_file))
        self.data.read()
        tests = json.loads(times.read_text())["tests"]
        self.cpu = {
            name: t["cpu"] for name, t in tests.items() if not name.startswith("tests/house")
        }

    def tests(self, file: str, line: int) -> list[str]:
        """Returns the tests to run for a mutant, the cheapest first."""
        measured = (each for each in self.data.measured_files() if each.endswith(file))
        lines = self.data.contexts_by_lineno(next(measured, ""))
        contexts = set(lines.get(line, ())) - {""}
        if not contexts and line in lines:  # run once, when the file is imported
            contexts = {context for each in lines.values() for context in each}
        names = {context.rpartition("|")[0] for context in contexts} & self.cpu.keys()
        chosen, spent, per_file = [], 0.0, Counter[str]()
        for name in sorted(names, key=lambda name: (self.cpu[name], name)):
            test_file = name.partition("::")[0]
            if per_file[test_file] < PER_FILE and spent + self.cpu[name] <= BUDGET:
                chosen.append(name)
                spent += self.cpu[name]
                per_file[test_file] += 1
        return chosen


def is_killed(mutant: MutationSpec, tests: list[str]) -> bool:
    """Runs the tests on the mutant, which is written into the working directory meanwhile."""
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command = shlex.join([sys.executable, "-m", "pytest", *options, *tests])
    result = mutate_and_test([mutant], command, SECONDS)
    if result.worker_outcome is not WorkerOutcome.NORMAL:
        raise RuntimeError(result.output)
    return result.test_outcome is TestOutcome.KILLED


def main() -> None:
    """Chooses, tries and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, default=ROOT / "times.json")
    options = parser.parse_args()
    reach = Reach(options.coverage, options.times)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree / "src"), "CI": "1"}
        for mutant in choose(Path("src"), options.count, options.seed):
            file, line = mutant.module_path.as_posix(), mutant.start_pos[0]
            tests = reach.tests(file, line)
            outcome = "killed" if tests and is_killed(mutant, tests) else "lives"
            print(
                f"{file}:{line} {mutant.operator_name}: {outcome}, {len(tests)} tests", flush=True
            )
            for row in (file.split("/")[2], "all"):
                rows[row].update([outcome])
    print("| mutants of | made | killed |\n| --- | --: | --: |")
    for row in (*PACKAGES, "all"):
        print(f"| {row} | {rows[row].total()} | {rows[row]['killed']} |")


if __name__ == "__main__":
    main()
