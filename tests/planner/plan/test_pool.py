# SPDX-License-Identifier: Apache-2.0
"""Processes that ask compilers: what breaks one layout breaks no other, and none is left over."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import plan
from shardax.partition.context import current_rules
from shardax.plan import Layout, Target
from shardax.plan.compile.evaluate import evaluate
from shardax.plan.compile.pool import PoolEvaluator
from shardax.plan.inputs import Inputs
from tests.planner.plan.steps import Perceptron, perceptron, perceptron_loss
from tests.tools.host.waiting import has_ended, wait_for

TARGET = Target.parse("cpu:2")


def layout(name: str, **rules: str) -> Layout:
    return Layout(name, tuple(rules.items()), (("data", 2),))


def fragile(model: Perceptron, x: jax.Array) -> jax.Array:
    """A step that breaks the process by which it is compiled, as some layouts do."""
    names = current_rules().names
    if "crash" in names:
        sys.stderr.write("the compiler's last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in names:
        time.sleep(60)
    if "raise" in names:
        raise MemoryError("of the compiler")
    return perceptron_loss(model, x)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


CHANGING = "def step(model, x):\n    return (x @ model.up.value).sum()\n"
DP = layout("dp", batch="data")


@pytest.fixture(scope="module")
def changing_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of the module ``changing_step``, which can be imported."""
    source = tmp_path_factory.mktemp("source") / "changing_step.py"
    source.write_text(CHANGING)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(source.parent)
        importlib.import_module(source.stem)
        yield source
    del sys.modules[source.stem]


@pytest.fixture(scope="module")
def pool(changing_source: Path) -> Iterator[PoolEvaluator]:
    """One process for all tests that are not about its start or end; each gives it a step."""
    with PoolEvaluator(Inputs(*perceptron()), TARGET, processes=1, cache=None) as pool:
        yield pool


def planned_by(pool: PoolEvaluator, inputs: Inputs) -> plan.LayoutReport:
    pool.take(inputs)
    (answer,) = pool.evaluate([DP])
    return answer.report


def test_process_failure_fails_one_layout_with_last_output(tmp_path: Path) -> None:
    _, args = perceptron()
    layouts = [
        layout("before", batch="data"),
        layout("crashes", crash="data"),
        layout("raises", **{"raise": "data"}),
        layout("hangs", hang="data"),
        layout("after", mlp="data"),
    ]
    with PoolEvaluator(
        Inputs(fragile, args), TARGET, processes=1, cache=tmp_path, seconds=600.0
    ) as pool:
        answers = list(pool.evaluate(layouts[:3]))
        pool._seconds = 0.5  # this step takes longer than that on any machine
        answers += pool.evaluate(layouts[3:4])
        pool._seconds = 600.0
        answers += pool.evaluate(layouts[4:])
    reports = {each.report.layout.name: each.report for each in answers}
    assert {name: report.outcome for name, report in reports.items()} == {
        "before": "fits",
        "crashes": "failed",
        "raises": "failed",
        "hangs": "failed",
        "after": "fits",
    }
    assert "was killed by SIGKILL" in reports["crashes"].reason
    assert reports["crashes"].reason.endswith("\n  the compiler's last words")
    assert reports["raises"].reason == "MemoryError: of the compiler"
    assert reports["hangs"].reason.startswith("it took longer than 0.5 seconds")


def interrupted_search(pids: list[int]) -> None:
    """Ctrl-C while one process compiles and the next is about to be started."""
    _, args = perceptron()
    with PoolEvaluator(Inputs(fragile, args), TARGET, processes=2, cache=None) as pool:

        def begun(_: Layout) -> None:
            pids.extend(each.process.pid or 0 for each in pool._slots.values())
            if pids:
                raise KeyboardInterrupt

        list(pool.evaluate([layout("one", hang="data"), layout("two", batch="data")], begun=begun))


def test_interrupting_a_compile_ends_all_processes() -> None:
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_search(pids)
    assert pids
    assert not any(map(is_running, pids))


def test_unpicklable_step_is_refused_before_processes_start() -> None:
    lock = threading.Lock()
    _, args = perceptron()
    with pytest.raises(sx.errors.PlanInputError) as error:
        PoolEvaluator(Inputs(lambda model, x: (lock, perceptron_loss(model, x))[1], args), TARGET)
    assert "the step cannot be sent" in str(error.value)
    assert "defined at the top of a module" in str(error.value)


def test_missing_cloudpickle_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    _, args = perceptron()
    with pytest.raises(sx.errors.PlanInputError) as error:
        PoolEvaluator(Inputs(lambda model, x: perceptron_loss(model, x), args), TARGET)
    assert "cannot be sent without cloudpickle (pip install 'shardax[plan]'): " in str(error.value)


def test_unimportable_step_is_an_input_error(
    pool: PoolEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    only_here = types.ModuleType("only_here")
    exec("def step(model, x):\n    return (x @ model.up.value).sum()", only_here.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    step, (_, args) = only_here.step, perceptron()
    with pytest.raises(sx.errors.PlanInputError, match=r"plan\]'\): .*only_here"):
        planned_by(pool, Inputs(step, args))


def test_pool_evaluator_sends_only_shapes() -> None:
    step, (model, x) = perceptron(embed=512, mlp=2048)
    with PoolEvaluator(Inputs(step, (model, x)), TARGET, processes=1) as pool:
        assert pool._task.stat().st_size < 20_000  # the weights are 8 MiB
    assert model.up.is_lazy


@pytest.mark.parametrize("processes", [0, -1, 1.5])
def test_numbers_of_processes_are_positive(processes: Any) -> None:
    with pytest.raises(sx.errors.PlanInputError, match="give a positive number"):
        PoolEvaluator(Inputs(*perceptron()), TARGET, processes=processes)


W = plan.NamedShape((16, 64), "float32", ("embed", "mlp"))
X = plan.NamedShape((32, 16), "float32", ("batch", "embed"))


def descent(w: Any, x: Any, rate: float = 0.1) -> Any:
    return w - rate * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


def of_batch(x: Any, w: Any) -> Any:
    return descent(w, x)


@jax.jit
def decorated(w: Any, x: Any) -> Any:
    return descent(w, x)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def of_static_rate(w: Any, x: Any, rate: int) -> Any:
    return descent(w, x, float(rate))


class Trainer:
    """Its rate is the same for all steps."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def plain(self, w: Any, x: Any) -> Any:
        return descent(w, x, self.rate)

    compiled = functools.partial(jax.jit, static_argnums=0, donate_argnums=1)(plain)
    lifted = functools.partial(sx.jit, static_argnums=0, donate_argnums=1)(plain)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def __call__(self, w: Any, x: Any) -> Any:
        return self.plain(w, x)


def closure() -> Any:
    rate = jnp.float32(0.1)
    return jax.jit(lambda w, x: descent(w, x, rate), donate_argnums=0)


STEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "function of a module": perceptron(),
    "wider": perceptron(mlp=128),
    "jit": (jax.jit(descent), (W, X)),
    "jit that donates": (jax.jit(descent, donate_argnums=0), (W, X)),
    "decorated": (decorated, (W, X)),
    "static argument": (of_static_rate, (W, X, 2)),
    "closure": (closure(), (W, X)),
    "jit of a partial": (jax.jit(functools.partial(descent, rate=0.2)), (W, X)),
    "partial of jit": (functools.partial(jax.jit(descent, donate_argnums=0), rate=0.2), (W, X)),
    "partial of a batch": (
        functools.partial(jax.jit(of_batch, donate_argnums=1), np.ones((32, 16), np.float32)),
        (W,),
    ),
    "jit of a method": (jax.jit(Trainer(0.1).plain), (W, X)),
    "method": (Trainer(0.1).compiled, (W, X)),
    "object": (Trainer(0.1), (W, X)),
    "sx.jit": (sx.jit(descent, donate_argnums=0), (W, X)),
    "partial of sx.jit": (functools.partial(sx.jit(descent, donate_argnums=0), rate=0.2), (W, X)),
    "method of sx.jit": (Trainer(0.1).lifted, (W, X)),
}


def test_process_reports_equal_local_ones_for_all_steps(pool: PoolEvaluator) -> None:
    def found(report: plan.LayoutReport) -> Any:
        wire = report.wire_bytes("kind")
        return report.outcome, report.reason, report.peak_bytes, report.flops, wire

    here, there = {}, {}
    for name, (step, args) in STEPS.items():
        inputs = Inputs(step, args)
        there[name] = found(planned_by(pool, inputs))
        here[name] = found(evaluate(inputs, DP, TARGET))
    assert there == here
    assert {outcome for outcome, *_ in here.values()} == {"fits"}
    assert there["wider"][3] == 2 * there["function of a module"][3] > 0  # operations


def test_module_level_jitted_step_is_sent_by_name(
    pool: PoolEvaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    report = planned_by(pool, Inputs(decorated, (W, X)))
    assert (report.outcome, report.reason) == ("fits", "")


def test_numbers_beside_arrays_reach_the_step(pool: PoolEvaluator) -> None:
    def step(state: dict[str, Any], x: Any, rate: float, rule: str) -> Any:
        assert rule == "descent"
        return {**state, "w": descent(state["w"], x, rate * state["scale"])}

    jitted = jax.jit(step, static_argnames="rule", donate_argnums=0)
    args = ({"w": W, "scale": 2.0, "steps": 3}, X, 0.1, "descent")
    report = planned_by(pool, Inputs(jitted, args))
    assert (report.outcome, report.reason) == ("fits", "")


def test_source_changed_during_search_is_refused_with_hint(
    pool: PoolEvaluator, changing_source: Path
) -> None:
    inputs = Inputs(importlib.import_module("changing_step").step, perceptron()[1])
    try:
        changing_source.write_text(CHANGING.replace("sum", "mean"))
        with pytest.raises(sx.errors.PlanInputError) as error:
            planned_by(pool, inputs)
    finally:
        changing_source.write_text(CHANGING)
    assert "Start again" in str(error.value)
    assert str(error.value).endswith("The file is that of the module changing_step.")
    assert planned_by(pool, inputs).outcome == "fits"


SCRIPT = """
import jax, shardax as sx

def loss(weight, x):
    return ((x @ weight.value) ** 2).sum()

weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
x = sx.plan.NamedShape((4096, 64), "float32", ("batch", "embed"))
options = dict(processes=1, cache=None, progress=False, finalists=0)
print(sx.plan.search(loss, (weight, x), "cpu:2", meshes=[{"data": 2}], **options).best())
"""


HANGING = """
import os, pathlib, time

main = os.getpid()

def hanging(weight, x):
    if os.getpid() != main:
        pathlib.Path({noted!r}).write_text(str(os.getpid()))
        time.sleep(600)
    return loss(weight, x)

sx.plan.search(hanging, (weight, x), "cpu:2", meshes=[{{"data": 2}}], **options)
"""


def test_script_needs_no_guard_and_its_processes_end(tmp_path: Path) -> None:
    """A search at the top of a script; the process of a second one ends with the script."""
    script, noted = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(SCRIPT + HANGING.format(noted=str(noted)))
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen([sys.executable, "-u", script], stdout=file, stderr=file)
    try:
        wait_for(lambda: run.poll() is not None or (noted.exists() and noted.read_text()), 1800)
        assert run.poll() is None, log.read_text()
    finally:
        run.kill()
        run.wait()
    assert "batch=data (2)" in log.read_text()
    pid = int(noted.read_text())
    assert pid != run.pid
    wait_for(lambda: has_ended(pid), 1800)
