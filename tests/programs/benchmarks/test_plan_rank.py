# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the planner's order runs, counts rightly, and says which bound does not hold."""

import json
import math
import sys

import plan_rank
import pytest

# Of a made-up setting: seconds of a step, and a prediction that is 1.5 times too long throughout.
MEASURED = [0.10, 0.112, 0.20, 0.40]
RIGHT = [0.15, 0.168, 0.30, 0.60]


def records(predicted, measured=MEASURED):
    return [
        {
            "measured": seconds,
            "predicted": guess,
            "compute": 0.05,
            "memory": guess - 0.05,
            "communication": 0.0,
            "flops": 1e9,
            "wire_bytes": -seconds,
        }
        for seconds, guess in zip(measured, predicted, strict=True)
    ]


def test_correct_order_passes_with_wrong_absolute_times():
    found = plan_rank.score(records(RIGHT), "planner")
    # 0.10 and 0.112 do not differ clearly, so five of the six pairs count.
    assert found == {"rho": 1.0, "in_order": 5, "clear_pairs": 5, "regret": 0.0}
    assert plan_rank.failures_of("made up", found) == []


def test_reversed_order_fails_by_pairs_and_regret():
    found = plan_rank.score(records(RIGHT[::-1]), "planner")
    assert found == {"rho": -1.0, "in_order": 0, "clear_pairs": 5, "regret": pytest.approx(3.0)}
    assert plan_rank.failures_of("made up", found) == [
        "made up: 0 of 5 pairs that differ clearly are in order, at least 95%",
        "made up: regret is 300.0%, under 10%",
    ]


def test_close_layouts_may_be_in_any_order():
    found = plan_rank.score(records([0.168, 0.15, 0.30, 0.60]), "planner")
    assert found == {
        "rho": pytest.approx(0.8),
        "in_order": 5,
        "clear_pairs": 5,
        "regret": pytest.approx(0.12),
    }
    assert plan_rank.failures_of("made up", found) == ["made up: regret is 12.0%, under 10%"]


def test_score_with_one_of_five_clear_pairs_reversed_fails():
    found = plan_rank.score(records([0.15, 0.168, 0.60, 0.30]), "planner")
    assert (found["in_order"], found["clear_pairs"], found["regret"]) == (4, 5, 0.0)
    assert len(plan_rank.failures_of("made up", found)) == 1


def test_equal_predictions_put_no_pair_in_order():
    assert plan_rank.score(records(RIGHT), "operations")["in_order"] == 0
    assert plan_rank.score(records(RIGHT), "operations")["rho"] == 0.0
    assert plan_rank.score(records(RIGHT), "wire bytes")["in_order"] == 0


def test_equal_values_share_their_rank():
    assert plan_rank.ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    assert math.isclose(plan_rank.spearman([1, 2, 3, 4], [1, 3, 2, 4]), 0.8)


def test_layouts_are_twelve_over_all_four_meshes():
    assert len(plan_rank.LAYOUTS) == 12
    assert {mesh for _, mesh in plan_rank.LAYOUTS.values()} == {(8, 1), (4, 2), (2, 4), (1, 8)}


def test_quick_run_predicts_and_measures_each_layout(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["plan_rank", "--quick", "--json", str(path)])
    assert plan_rank.main() == 0
    written = json.loads(path.read_text())
    *layouts, found = written["records"]
    assert [one["layout"] for one in layouts] == list(plan_rank.QUICK)
    assert all(one["measured"] > 0 and one["predicted"] > 0 for one in layouts)
    assert [len(one["seconds"]) for one in layouts] == [2, 2]
    assert layouts[0]["flops"] == layouts[1]["flops"] > 0
    assert set(found) == {"setting", "rho", "in_order", "clear_pairs", "regret"}
    assert plan_rank.times_of(path, "quick") == {
        one["layout"]: tuple(one["seconds"]) for one in layouts
    }
