# SPDX-License-Identifier: Apache-2.0
"""The benchmark of generation runs, its opponents agree, and it says when a bound does not hold."""

import json
import sys

import generate
import numpy as np
import pytest

import shardax as sx


def test_quick_run_records_each_opponent_and_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "PEER_MODULES", ("no_such_module",))
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["generate", "--quick", "--json", str(path)])
    assert generate.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("generate", [])
    rows = [(record["rows"], record["name"]) for record in written["records"]]
    assert rows == [(rows, name) for rows in (1, 8) for name in (generate.BASELINE, generate.OURS)]


def test_loop_by_hand_equals_greedy_decoding_without_cache():
    config = sx.models.DecoderConfig(**generate.QUICK)
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    prompts = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
    tokens = prompts
    for _ in range(5):
        tokens = np.concatenate([tokens, np.argmax(model(tokens)[:, -1:], -1)], axis=1)
    np.testing.assert_array_equal(generate.by_hand(model, 5)(prompts), tokens[:, 4:])


@pytest.mark.parametrize(
    ("ratio", "to_peer", "failures"),
    [
        (1.1, 0.99, []),
        (1.1, None, []),
        (1.11, None, ["8 prompts: 1.11 of the loop by hand, at most 1.1"]),
        (1.0, 1.0, ["8 prompts: 1.00 of transformers, which must be below 1"]),
    ],
)
def test_the_ratios_to_both_opponents_are_bounded(ratio, to_peer, failures):
    assert generate.bound_failures({"rows": 8, "ratio_median": ratio}, to_peer) == failures
