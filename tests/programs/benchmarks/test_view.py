# SPDX-License-Identifier: Apache-2.0
"""The benchmark of pages runs, and it says when a bound does not hold."""

import json

import pytest
import view
from _harness import Samples


def test_quick_run_records_each_opponent(tmp_path):
    path = tmp_path / "figures.json"
    opponents = ["shardax, lazy", "shardax"]
    assert view.main(["--quick", "--json", str(path), "--opponents", *opponents]) == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("view", [])
    assert [record["name"] for record in written["records"]] == [view.BASELINE, *opponents]
    assert {record["variables"] for record in written["records"]} == {20}


@pytest.mark.parametrize(
    ("seconds", "failures"),
    [
        ({10: 0.1, 100: 1.0}, []),
        ({10: 0.1, 100: 2.1}, ["shardax: 1.05 of plain dicts, at most 1.0"]),
        (
            {10: 0.1, 100: 1.6},
            ["shardax: a Variable among 100 takes 1.60 of one among 10, at most 1.5"],
        ),
    ],
)
def test_page_time_is_bounded_against_plain_dicts(seconds, failures):
    samples = {
        size: [Samples(view.BASELINE, (2.0,)), Samples("shardax", (taken,))]
        for size, taken in seconds.items()
    }
    found = view.bound_failures(samples)
    assert found[: len(failures)] == failures
    assert bool(found) == bool(failures)
