# SPDX-License-Identifier: Apache-2.0
"""Reports say what was compiled, and what the persistent cache had."""

from __future__ import annotations

import json
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx
from shardax.host.compile_reports import CompiledProgram
from tests.advice import run_advice
from tests.tools.host.exported_models import run_python

X = jnp.ones(3)


def compile_named(name: str) -> None:
    """Compiles a new function of a name."""

    def function(x: Any) -> Any:
        return x * 2 + len(name)

    function.__name__ = name
    jax.jit(function).lower(X).compile()


def names(report: sx.host.CompileReport) -> list[str]:
    return [program.name for program in report.programs]


def test_programs_are_listed_in_order_with_their_seconds() -> None:
    with sx.host.compile_report() as report:
        compile_named("first")
        compile_named("second")
    assert names(report) == ["first", "second"]
    assert all(program.seconds > 0 for program in report.programs)
    assert report.trace_seconds > 0
    assert report.lower_seconds > 0
    assert report.seconds >= report.compile_seconds > 0


def test_compile_report_counts_only_what_is_compiled_meanwhile() -> None:
    compile_named("before")
    report = sx.host.compile_report()
    compile_named("during")
    report.stop()
    compile_named("between")
    with report:
        compile_named("again")
    compile_named("after")
    assert names(report) == ["during", "again"]


def test_reports_do_not_disturb_each_other() -> None:
    with sx.host.compile_report() as outer:
        compile_named("one")
        with sx.host.compile_report() as inner:
            compile_named("two")
        compile_named("three")
    assert (names(outer), names(inner)) == (["one", "two", "three"], ["two"])


def test_call_already_compiled_is_not_listed(tmp_path: pathlib.Path) -> None:
    step = sx.jit(lambda x: x + 3)
    step(X)
    with sx.host.compile_report() as report:
        step(X)
    assert report.programs == []
    settings = dict(jax.config.values)
    try:
        names = {"sx": sx, "rest": tmp_path / "cache"}
        run_advice(str(report), "sx.configure(cache_dir=...)", names)
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    finally:
        for name, value in settings.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)


def test_compile_report_lists_other_threads_too() -> None:
    with sx.host.compile_report() as report:
        thread = threading.Thread(target=compile_named, args=("aside",))
        thread.start()
        thread.join()
    assert names(report) == ["aside"]


def test_text_has_totals_and_the_slowest_first() -> None:
    report = sx.host.compile_report()
    report.stop()
    report.programs = [
        CompiledProgram("quick", 0.5, "hit", saved=2.0),
        CompiledProgram("slow", 3.0, "stored"),
        CompiledProgram("printing", 1.0, "not stored"),
    ]
    report.trace_seconds, report.lower_seconds = 0.25, 0.125
    assert str(report) == (
        "3 programs in 4.875 s: 0.250 s tracing, 0.125 s lowering, 4.500 s compiling\n"
        "persistent cache: 1 hit, which saved 2.000 s; 2 misses, 1 of them stored\n"
        "  3.000 s  stored      slow\n"
        "  1.000 s  not stored  printing\n"
        "  0.500 s  hit         quick"
    )


CACHED = """
import json, sys, jax, jax.numpy as jnp
import shardax as sx
if sys.argv[1] != "none":
    sx.configure(cache_dir=sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jnp.ones(3)

def step(x):
    return jnp.sin(x) * 2

def printing(x):
    jax.debug.print("x")
    return x * 3

with sx.host.compile_report() as report:
    jax.jit(step).lower(x).compile()
    jax.jit(printing).lower(x).compile()
found = {program.name: program.cache for program in report.programs}
print(json.dumps([found, report.hits, report.misses, report.stored]))
"""


def test_cache_has_what_an_earlier_process_stored(tmp_path: pathlib.Path) -> None:
    runs = [json.loads(run_python(CACHED, tmp_path / "cache")) for _ in range(2)]
    if runs[0][0]["printing"] == "stored":  # JAX 0.12 stores programs with callbacks, too
        assert runs == [
            [{"step": "stored", "printing": "stored"}, 0, 2, 2],
            [{"step": "hit", "printing": "hit"}, 2, 0, 0],
        ]
    else:
        assert runs == [
            [{"step": "stored", "printing": "not stored"}, 0, 2, 1],
            [{"step": "hit", "printing": "not stored"}, 1, 1, 0],
        ]


def test_compile_report_without_cache_has_no_hits_or_misses() -> None:
    found = {"step": "off", "printing": "off"}
    assert json.loads(run_python(CACHED, "none")) == [found, 0, 0, 0]
