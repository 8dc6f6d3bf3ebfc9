# SPDX-License-Identifier: Apache-2.0
"""What a compiler writes about arrays that it makes whole ends up in the report's warnings."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.plan import Layout, NamedShape, Target
from shardax.plan.compile.compilers import (
    full_rematerializations,
    record_stderr,
    rematerialization_warnings,
)
from shardax.plan.compile.pool import Evaluation, PoolEvaluator
from shardax.plan.inputs import Inputs
from tests.planner.plan.absent import GPU, TPU

SAID = (
    "W1122 07:28:23.779895 7118 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization."
    " The compiler cannot go from sharding {devices=[2,1,4]<=[8]} to {devices=[1,8,1]<=[8]}"
    " efficiently for HLO operation %param = f32[8,16,4]{2,1,0} parameter(0),"
    ' sharding={devices=[2,1,4]<=[8]}, metadata={op_name="x"}. As the last resort, SPMD will'
    " replicate the tensor and then partition it to obtain the target sharding.\n"
)
CHANGE = "f32[8,16,4] from {devices=[2,1,4]<=[8]} to {devices=[1,8,1]<=[8]}"


def step(x: jax.Array) -> jax.Array:
    return sx.constrain(jnp.sin(x), (None, "tokens", None)) * 2


def exchanged(
    tmp_path: Path, target: str = "tpu:v5e:2x4", compiler: str = "estimate", times: int = 1
) -> list[Evaluation]:
    """A step that splits by two dimensions, and then by the third: so many evaluations of it."""
    rules = (("rows", "a"), ("columns", "b"), ("tokens", ("a", "b")))
    layout = Layout("exchange", rules, (("a", 2), ("b", 4)))
    # Another program in each run: one that JAX's persistent cache has is not compiled again, and
    # then the compiler says nothing.
    columns = 8 * random.SystemRandom().randrange(2, 10_000)
    shape = NamedShape((16, 16, columns), "float32", ("rows", None, "columns"))
    options: dict[str, Any] = {"compiler": compiler, "processes": 1, "cache": tmp_path}
    inputs = Inputs(step, (shape,))
    with PoolEvaluator(inputs, Target.parse(target), **options) as pool:
        answers = [answer for _ in range(times) for answer in pool.evaluate([layout])]
    assert [answer.report.outcome for answer in answers] == ["fits"] * times
    return answers


def test_full_replication_by_partitioner_names_its_source() -> None:
    assert full_rematerializations(f"something else\n{SAID}{SAID}more") == (("x", CHANGE),)
    escaped = SAID.replace('"x"', "\"batch[\\'x\\']\"")  # as XLA prints a key
    assert full_rematerializations(escaped) == (("batch['x']", CHANGE),)
    unnamed = SAID.replace(', metadata={op_name="x"}', "")
    assert full_rematerializations(unnamed) == (("", CHANGE),)
    assert full_rematerializations("nothing of the kind") == ()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("x", "batch.inputs is made whole on every device"),
        ("jit(f)/sin", "The result of jit(f)/sin at model.py:3 is made whole on every device"),
        ("jit(f)/cos", "The result of jit(f)/cos is made whole on every device"),
        ("", "The result of an operation is made whole on every device"),
    ],
)
def test_warning_names_the_argument_or_the_line(name: str, start: str) -> None:
    found = ((name, CHANGE), (name, CHANGE))
    (warning,) = rematerialization_warnings(
        found, {"x": "batch.inputs"}, {"jit(f)/sin": "model.py:3"}
    )
    assert warning.startswith(start)
    assert warning.endswith(f"({CHANGE}).")


def test_full_replication_warns_also_for_cached_programs(tmp_path: Path) -> None:
    first, again = exchanged(tmp_path, times=2)
    why = (
        "is made whole on every device to be split in another way: XLA knows no exchange for it. "
        "Rules that split the same dimensions before and after, or a constraint half-way, avoid "
        "that ("
    )
    line = step.__code__.co_firstlineno + 1
    where = f"{Path(__file__).name}:{line}"
    assert [re.sub(r"f32\[.*", "", text) for text in first.report.warnings] == [
        f"x {why}",
        f"The result of jit(step)/sharding_constraint at {where} {why}",
    ]
    assert (first.cached, again.cached) == (False, True)
    assert again.report.warnings == first.report.warnings


@pytest.mark.parametrize("target", ["cpu:8", TPU, GPU])
def test_compilers_of_targets_are_heard_too(tmp_path: Path, target: str) -> None:
    (answer,) = exchanged(tmp_path, target, "target")
    starts = [text.partition(" is made whole")[0] for text in answer.report.warnings]
    # Where the operation's line is lost, it is called by its name.
    assert starts[0] == "x"
    assert starts[1].startswith("The result of jit(step)/sharding_constraint")


def test_error_stream_without_file_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        kept = os.dup(2)
        read, write = os.pipe()
        os.dup2(write, 2)
        try:
            heard = record_stderr()
            os.write(2, SAID.encode())
            assert heard() == ""
        finally:
            os.dup2(kept, 2)
            for each in (kept, read, write):
                os.close(each)


def test_record_stderr_returns_only_what_is_written_meanwhile(tmp_path: Path) -> None:
    kept = os.dup(2)
    try:
        with (tmp_path / "log").open("a+b") as file:
            os.dup2(file.fileno(), 2)
            os.write(2, b"before\n")
            heard = record_stderr()
            assert heard() == ""
            os.write(2, SAID.encode())
            assert heard() == SAID
        with (tmp_path / "log").open("ab") as file:  # for writing only, as a shell opens it
            os.dup2(file.fileno(), 2)
            heard = record_stderr()
            os.write(2, SAID.encode())
            assert heard() == ""
    finally:
        os.dup2(kept, 2)
        os.close(kept)
