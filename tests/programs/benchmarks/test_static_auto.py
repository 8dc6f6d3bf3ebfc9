# SPDX-License-Identifier: Apache-2.0
"""The benchmark of automatic statics runs, its opponents agree, and its bound is held."""

import json
import sys

import numpy as np
import pytest
import static_auto
from _harness import Comparison, Samples


def test_quick_run_records_each_opponent(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    argv = ["static_auto", "--quick", "--json", str(path), "--opponents", "auto", "keywords"]
    monkeypatch.setattr(sys, "argv", argv)
    assert static_auto.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("static_auto", [])
    assert [r["name"] for r in written["records"]] == [static_auto.BASELINE, "auto", "keywords"]


def test_opponents_all_compute_the_same():
    found = [np.asarray(call()) for call in static_auto.calls().values()]
    for result in found:
        np.testing.assert_allclose(result, np.tanh([2.0] * 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "ratio", "failures"),
    [
        ("auto", 2.9, []),
        ("auto", 3.5, ["auto: 3.50 of jax.jit, at most 3.0"]),
        ("equinox.filter_jit", 6.0, []),
    ],
)
def test_ratio_to_jax_is_bounded(name, ratio, failures):
    comparison = Comparison(Samples(name, (ratio,)), (ratio,), (ratio - 1,))
    assert static_auto.bound_failures(comparison) == failures
