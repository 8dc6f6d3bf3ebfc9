# SPDX-License-Identifier: Apache-2.0
"""The size and shape of the package in figures, beside their aims: ``make house``.

*Code*: lines that are neither blank, nor a comment, nor part of a docstring. *Files on the way*:
files of shardax of which a function runs during the first call of a transform on a Module with
lazy parameters, or during one ``plan.search`` (in the calling process). A search compiles and reads
programs, so the files of ``jit``, ``shard`` and ``hlo`` are on its way too; those of ``plan`` are
what its aim is for. *Importer*: a module that imports another, at module level or inside a
function.
"""

from __future__ import annotations

import ast
import collections
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house.public_api import remembered_names
from tests.house.sources import PACKAGE, ROOT, Source, package_files
from tests.house.words import package_words, private_test_files

WAYS = ("jit", "vmap", "scan", "shard", "grad", "plan.search")

# Runs each transform once in a fresh process and prints the files whose functions ran.
TRACE = """
import json, sys
import jax
import jax.numpy as jnp
import shardax as sx

jax.config.update("jax_num_cpu_devices", 8)
package = sys.argv[1]
x = jnp.ones((8, 8))
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


class Affine(sx.Module):
    def __init__(self, rngs):
        lazy = sx.Init(jax.nn.initializers.normal(), (8, 8), jnp.float32, rngs=rngs)
        self.kernel = sx.Param(lazy, axes=("embed", "mlp"))
        zeros = sx.Init(jax.nn.initializers.zeros, (8,), jnp.float32)
        self.bias = sx.Param(zeros, axes=("mlp",))

    def __call__(self, x):
        return x @ self.kernel.value + self.bias.value


def model():
    return Affine(sx.Rngs(0))


def files(call):
    seen = set()

    def enter(frame, event, _):  # of Python's functions only, so cheaper than a profile
        code = frame.f_code
        if code.co_name != "<module>" and code.co_filename.startswith(package):
            seen.add(code.co_filename[len(package) + 1 :])

    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    return sorted(seen)


class Square(sx.Module):
    def __init__(self):
        self.kernel = sx.Param(jnp.ones((8, 8)), axes=("embed", "mlp"))

    def __call__(self, x):
        return x @ self.kernel.value


ways = {}
m = model()
ways["jit"] = files(lambda: sx.jit(lambda m, x: m(x))(m, x))
m = model()
ways["vmap"] = files(lambda: sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x))
m = model()
both = (sx.Carry, 0)
inside = []
scanned = sx.scan(lambda m, x: (m, m(x)), in_axes=both, out_axes=both)
# An eager loop is a call of jit, whose own way is above.
sx.jit(lambda m, x: inside.append(files(lambda: scanned(m, x))))(m, x)
ways["scan"] = inside[0]
m = model()
rules = [("embed", "data"), ("mlp", "model")]
ways["shard"] = files(lambda: sx.shard(m, mesh, rules=rules))
m = model()
ways["grad"] = files(lambda: sx.grad(lambda m, x: m(x).sum())(m, x))
from shardax import plan

batch = plan.NamedShape((8, 8), "float32", ("batch", "embed"))
arguments = (Square(), batch)
options = {"target": "cpu:8", "progress": False, "cache": None}
step = lambda m, x: sx.grad(lambda m: m(x).sum())(m)
ways["plan.search"] = files(lambda: plan.search(step, arguments, **options))
print(json.dumps(ways))
"""


@dataclass(frozen=True)
class Lines:
    """How the lines of one file, or of all, divide."""

    total: int
    code: int
    imports: int


@functools.cache
def lines_of(source: Source) -> Lines:
    """Counts the lines of one file."""
    docstrings: set[int] = set()
    imports: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_span(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            strings.update(_span(node))
        elif (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(_span(node.body[0]))
    # Inside a string of several lines nothing is a comment, and a blank line is part of it.
    lines = source.text.splitlines()
    code = strings.union(
        number
        for number, line in enumerate(lines, start=1)
        if (text := line.lstrip()) and not text.startswith("#")
    )
    return Lines(len(lines), len(code - docstrings), len(imports))


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def all_lines() -> Lines:
    """Counts the lines of the package."""
    each = [lines_of(source) for source in package_files()]
    return Lines(
        sum(lines.total for lines in each),
        sum(lines.code for lines in each),
        sum(lines.imports for lines in each),
    )


def importers() -> dict[str, set[str]]:
    """Maps each module of the package to the modules that import it."""
    modules = {source.module: source for source in package_files()}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for source in package_files():
        for item in source.imports:
            owner = item.name if item.name in modules else item.name.rpartition(".")[0]
            if owner in found and owner != source.module:
                found[owner].add(source.module)
    return found


def import_cycles() -> list[list[str]]:
    """Finds groups of modules that import each other when they are imported."""
    modules = {source.module for source in package_files()}
    edges: dict[str, set[str]] = {}
    for source in package_files():
        imported = {
            item.name if item.name in modules else item.name.rpartition(".")[0]
            for item in source.imports
            if item.at_module_level
        }
        edges[source.module] = (imported & modules) - {source.module}
    return [sorted(group) for group in _components(edges) if len(group) > 1]


def _components(edges: dict[str, set[str]]) -> Iterator[set[str]]:
    """Yields the sets of nodes that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(edges[node])
        reach[start] = seen
    done: set[str] = set()
    for start in edges:
        if start not in done:
            group = {node for node in reach[start] if start in reach[node]} | {start}
            done |= group
            yield group


def class_names() -> dict[str, list[str]]:
    """Maps each class name, without leading underscores, to the modules that define it."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for source in package_files():
        for name, _ in source.outline.classes:
            found[name.lstrip("_")].append(source.module)
    return found


def ambiguous_class_names() -> dict[str, list[str]]:
    """Class names that stand for more than one class.

    Public classes of different faces may share a name, as ``nn.Linear`` and ``named.Linear`` do.
    """
    public = set(remembered_names())
    return {
        name: where
        for name, where in class_names().items()
        if len(where) > 1
        and not all(f"shardax.{module.split('.')[1]}.{name}" in public for module in where)
    }


def files_on_the_ways() -> dict[str, list[str]]:
    """Runs each transform in a fresh process; maps it to the files on its way."""
    environment = {k: v for k, v in os.environ.items() if k != "SHARDAX_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(PACKAGE)],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Figure:
    """One figure of the package with its aim.

    ``most`` is what the tests allow: the aim or, where it is not reached yet, what has been.
    """

    name: str
    value: float
    aim: float
    reached: float | None = None

    @property
    def most(self) -> float:
        """The most that the figure may be."""
        return self.aim if self.reached is None else self.reached

    def row(self) -> str:
        """The figure as a line of the table."""
        mark = "" if self.value <= self.aim else "  <- above its aim"
        if self.name.endswith("%"):
            return f"| {self.name:38} | {self.value:9.1f} | {self.aim:9.1f} |{mark}"
        return f"| {self.name:38} | {self.value:9,.0f} | {self.aim:9,.0f} |{mark}"


def figures() -> list[Figure]:
    """Measures the package against the aims of the project."""
    lines, files = all_lines(), len(package_files())
    ways = files_on_the_ways()
    own = [file for file in ways["plan.search"] if file.startswith("plan/")]
    words = package_words()
    return [
        Figure("files per 10,000 lines", 10_000 * files / lines.total, 40),
        Figure("lines that are imports, %", 100 * lines.imports / lines.total, 4.5, reached=5.5),
        # Part 22: captures, shared programs, settings objects, and arguments sorted by type.
        *(
            Figure(f"files on the way of {way}", len(ways[way]), 14, reached=18)
            for way in WAYS[:-1]
        ),
        # A search asks the model of time before and after it compiles.
        Figure("plan's own files on the way of search", len(own), 14, reached=15),
        Figure("  with those of jit, shard and hlo", len(ways["plan.search"]), 55, reached=57),
        Figure("class names with several meanings", len(ambiguous_class_names()), 0),
        Figure("error classes", len(words.errors), 60, reached=61),
        Figure("test files with private imports", len(private_test_files()), 40),
    ]


def main() -> int:
    """Prints the table; the status is 1 where a figure is above what has been reached."""
    found = figures()
    print(f"| {'figure':38} | {'now':>9} | {'at most':>9} |")
    print(f"| {'-' * 38} | {'-' * 8}: | {'-' * 8}: |")
    for figure in found:
        print(figure.row())
    return int(any(figure.value > figure.most for figure in found))


if __name__ == "__main__":
    sys.exit(main())
