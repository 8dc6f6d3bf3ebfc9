# SPDX-License-Identifier: Apache-2.0
"""Which candidates a search compiles first, and what it says of those that it leaves out.

That a search finds by itself which family of layouts suits a step is tested on small steps in
``test_search.py``, and on a decoder by ``docs/plan-cases.md``, which is executed with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardax import plan
from shardax.plan.searching import stages
from tests.planner.plan.test_accuracy import MESH, Perceptron, rows, train


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of these tests: which programs are compiled does not depend on it."""
    return tmp_path_factory.mktemp("programs")


def perceptron_search(monkeypatch: pytest.MonkeyPatch, programs: Path, **options: Any) -> plan.Plan:
    monkeypatch.setattr(stages, "FEW", 1)
    return plan.search(
        train,
        (Perceptron("float32"), rows("float32")),
        "cpu:8",
        meshes=[MESH],
        top=options.pop("top", None),
        effort="screen",
        cache=programs,
        progress=False,
        **options,
    )


def test_least_promising_candidates_are_skipped_with_a_note(
    monkeypatch: pytest.MonkeyPatch, programs: Path
) -> None:
    every = perceptron_search(monkeypatch, programs, within=None)
    compiled = [each.layout.name for each in every if each.outcome == "fits"]
    few = perceptron_search(monkeypatch, programs, within=1.0, finalists=0)
    left = [each for each in few if "as traced" in each.reason]
    assert {each.outcome for each in left} == {"rejected"}
    kept = [each.layout.name for each in few if each.outcome == "fits"]
    assert kept and left
    assert {*kept, *(each.layout.name for each in left)} == set(compiled)
    assert any(f"left out by expected time: {len(left)}" in note for note in few.notes)


def test_compiling_continues_until_enough_layouts_fit(
    monkeypatch: pytest.MonkeyPatch, programs: Path
) -> None:
    assert len(perceptron_search(monkeypatch, programs, within=1.0, top=3, finalists=0)) == 3
