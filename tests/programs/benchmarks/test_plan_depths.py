# SPDX-License-Identifier: Apache-2.0
"""The benchmark of traced beside compiled times."""

from __future__ import annotations

import plan_depths

from tests.programs.benchmarks.test_parallel import run_here


def test_pairs_count_where_compiled_times_differ_clearly() -> None:
    times = [(1.0, 1.0), (1.1, 1.01), (2.0, 3.0), (2.5, 2.0)]
    # Of the six pairs the first two are alike, and the last two are in the other order.
    assert plan_depths.pairs_in_order(times) == (4, 5)


def test_sampled_layouts_have_both_times(monkeypatch, tmp_path) -> None:
    written = run_here(plan_depths, tmp_path, monkeypatch)
    assert len(written["records"]) == 2 and written["failures"] == []
    assert all(0.3 < float(record["ratio"]) < 3.0 for record in written["records"])
