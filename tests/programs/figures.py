# SPDX-License-Identifier: Apache-2.0
"""How many files of the package a reader of one call has to open: ``make house``.

*Files on the way*: files of shardax of which a function runs during the first call of a transform
on a Module with lazy parameters, or during one ``plan.search`` (in the calling process). A search
compiles and reads programs, so the files of ``jit``, ``shard`` and ``hlo`` are on its way too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from tests.house.sources import PACKAGE, ROOT

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


def files_on_the_ways() -> dict[str, list[str]]:
    """Returns the files on the way of each transform, by its name, from a fresh process."""
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
    """The number of files on one way.

    Attributes:
        name: What the number counts.
        value: The number.
        aim: What it is to be at most.
        most: What the test allows: where the aim is not reached yet, what has been.
    """

    name: str
    value: int
    aim: int
    most: int

    def row(self) -> str:
        """Returns the figure as a line of the table."""
        mark = "" if self.value <= self.aim else "  <- above its aim"
        return f"| {self.name:38} | {self.value:3} | {self.aim:7} |{mark}"


def figures() -> list[Figure]:
    """Returns the figures of the package beside their aims."""
    ways = files_on_the_ways()
    of_search = ways.pop("plan.search")
    own = [file for file in of_search if file.startswith("plan/")]
    return [
        # One story a file, of at most 600 lines, makes more of them: definitions beside the walk,
        # kinds of values beside Variables, effects beside the engine.
        *(
            Figure(f"files on the way of {way}", len(files), aim=14, most=29)
            for way, files in ways.items()
        ),
        # A search asks the model of time before and after it compiles. It is told in three files:
        # what is counted and in which order, the stages of compiling, the variants of the step;
        # what is searched in seven: the walk of the step, classes of dimensions, the model of them,
        # the space, its settings, candidates and their times.
        Figure("plan's own files on the way of search", len(own), aim=14, most=22),
        Figure("  with those of jit, shard and hlo", len(of_search), aim=55, most=95),
    ]


def main() -> None:
    """Prints the table."""
    print(f"| {'figure':38} | now | at most |")
    print(f"| {'-' * 38} | --: | ------: |")
    for figure in figures():
        print(figure.row())


if __name__ == "__main__":
    main()
