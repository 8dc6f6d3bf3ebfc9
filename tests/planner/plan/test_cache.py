# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept on disk: known by everything that they depend on, never out of date."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import pytest

import shardax as sx
from shardax.plan import Layout, Target
from shardax.plan.compile.cache import ProgramCache, cache_folder, program_key, program_text
from shardax.plan.compile.compilers import CompileResult, TargetCompiler, compiler_for
from shardax.plan.compile.evaluate import evaluate, lower
from shardax.plan.inputs import Inputs
from tests.planner.plan.steps import perceptron

KEY = "ab" * 32
PROGRAM = CompileResult("HloModule m", 100, 60, None, 2.5)


class Lowered:
    """Stands for a lowered program of a given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self, debug_info: bool = False) -> str:
        return f"{self.text} at line 3" if debug_info else self.text


class Counting(TargetCompiler):
    """A compiler that counts its compiles."""

    label = "counting 1"

    def __init__(self, target: str = "cpu:8") -> None:
        super().__init__(Target.parse(target))
        self.compiles = 0

    def _devices(self, sizes: Mapping[str, int]) -> Any:
        raise NotImplementedError

    def _compile(self, lowered: Any, effort: str) -> CompileResult:
        self.compiles += 1
        return PROGRAM


def test_entries_are_found_only_by_their_key(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "not" / "there")
    assert cache.get(KEY) is None
    cache.put(KEY, PROGRAM)
    assert ProgramCache(cache.folder).get(KEY) == PROGRAM
    assert cache.get("cd" * 32) is None
    assert (cache.found, cache.missed) == (0, 2)


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_damaged_file_is_said_and_written_anew(tmp_path: Path, damage: bytes | None) -> None:
    cache = ProgramCache(tmp_path)
    cache.put(KEY, PROGRAM)
    (path,) = tmp_path.glob("*/*.gz")
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert cache.get(KEY) is None
    cache.put(KEY, PROGRAM)
    assert cache.get(KEY) == PROGRAM


def test_file_for_another_program_is_not_taken(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path)
    cache.put(KEY, PROGRAM)
    (path,) = tmp_path.glob("*/*.gz")
    path.rename(path.with_name(f"{KEY[:2]}{'0' * 62}.json.gz"))
    with pytest.warns(RuntimeWarning, match="and for"):
        assert cache.get(f"{KEY[:2]}{'0' * 62}") is None


def test_unwritable_folder_is_reported_and_caches_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="was not kept"):
        ProgramCache(tmp_path / "file").put(KEY, PROGRAM)


def test_least_recently_used_entries_are_evicted(tmp_path: Path) -> None:
    keys = [f"{number:02x}" * 32 for number in range(4)]
    size = 0
    for age, key in zip((40, 30, 20), keys, strict=False):
        ProgramCache(tmp_path).put(key, PROGRAM)
        (path,) = tmp_path.glob(f"*/{key}.json.gz")
        os.utime(path, (time.time() - age,) * 2)
        size = path.stat().st_size
    asked = ProgramCache(tmp_path, most_bytes=3 * size + size // 2)
    assert asked.get(keys[0]) == PROGRAM
    asked.put(keys[3], PROGRAM)
    left = {path.name.partition(".")[0] for path in tmp_path.glob("*/*")}
    assert left == {keys[0], keys[2], keys[3]}


def test_cached_program_takes_no_compile_time(tmp_path: Path) -> None:
    counting, lowered = Counting(), cast("Any", Lowered("f"))
    ProgramCache(tmp_path).compile(counting, {}, lowered, "screen")
    made = ProgramCache(tmp_path).compile(counting, {}, lowered, "screen")
    assert counting.compiles == 1
    assert made == CompileResult("HloModule m", 100, 60, None, 0.0)


def test_key_changes_with_every_input_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"data": 4, "model": 2}
    keys = [
        program_key(Counting(), sizes, Lowered("f"), "screen"),
        program_key(Counting(), sizes, Lowered("g"), "screen"),
        program_key(Counting(), sizes, Lowered("f"), "full"),
        program_key(Counting("cpu:16"), sizes, Lowered("f"), "screen"),
        program_key(Counting(), {"model": 2, "data": 4}, Lowered("f"), "screen"),
    ]
    monkeypatch.setattr(Counting, "label", "counting 2")
    keys.append(program_key(Counting(), sizes, Lowered("f"), "screen"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_test")
    keys.append(program_key(Counting(), sizes, Lowered("f"), "screen"))
    assert len(set(keys)) == len(keys)
    assert keys[-1] == program_key(Counting(), sizes, Lowered("f"), "screen")


def test_cached_report_equals_fresh_one_except_seconds(tmp_path: Path) -> None:
    inputs = Inputs(*perceptron())
    layout = Layout("dp", (("batch", "data"),), (("data", 8),))
    cache = ProgramCache(tmp_path)
    reports = [evaluate(inputs, layout, Target.parse("cpu:8"), cache=cache) for _ in range(2)]
    assert (cache.found, cache.missed) == (1, 1)
    assert reports[0].compile_seconds > 0.0 == reports[1].compile_seconds
    assert [(r.outcome, r.time, r.collectives, r.peak_bytes) for r in reports[:1]] == [
        (r.outcome, r.time, r.collectives, r.peak_bytes) for r in reports[1:]
    ]


def test_folder_comes_from_environment_or_user_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDAX_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path / "plan"
    monkeypatch.delenv("SHARDAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "shardax" / "plan"
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "Library" / "Caches" / "shardax" / "plan"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "shardax" / "plan"
    monkeypatch.delenv("LOCALAPPDATA")
    assert cache_folder() == tmp_path / "AppData" / "Local" / "shardax" / "plan"
    with pytest.raises(sx.errors.PlanInputError, match="cache=True"):
        cache_folder(True)


def test_program_text_is_independent_of_the_caller() -> None:
    inputs = Inputs(*perceptron())
    layout = Layout("dp", (("batch", "data"),), (("data", 8),))
    mesh = compiler_for(Target.parse("cpu:8")).mesh(layout.sizes)

    def lowered() -> str:
        lowered, _ = lower(inputs, layout, inputs.place(layout, mesh), mesh)
        return lowered.as_text(debug_info=True)

    one = lowered()
    jax.clear_caches()  # or the step, one function, is not traced again
    other = lowered()  # of another line
    assert one != other
    assert program_text(one) == program_text(other)
    assert "steps.py" in program_text(one)
    assert "test_cache.py" not in program_text(one)


def test_moving_a_step_line_changes_the_text() -> None:
    text = 'add loc(#loc2)\n#loc1 = loc("step.py":3:4 to :9)\n#loc2 = loc("add"(#loc1))'
    assert program_text(text) != program_text(text.replace(":3:4", ":4:4"))
    assert program_text(text) == program_text(text.replace("#loc1", "#loc7"))
