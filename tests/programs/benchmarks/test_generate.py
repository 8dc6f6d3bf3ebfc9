# SPDX-License-Identifier: Apache-2.0
"""The benchmark of generation runs, its opponents agree, and it says when a bound does not hold."""

import json
import sys

import generate
import numpy as np
import pytest

import shardax as sx

KINDS = ("decoder", "experts", "hybrid", "encoder-decoder")


# The program itself compares the tokens of both.
def test_quick_run_records_each_kind_and_opponent(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(generate, "PEER_MODULES", ("no_such_module",))
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["generate", "--quick", "--json", str(path)])
    assert generate.main() == 0
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["failures"]) == ("generate", [])
    rows = [(record["kind"], record["rows"], record["name"]) for record in written["records"]]
    expected = [(kind, 2, name) for kind in KINDS for name in (generate.BASELINE, generate.OURS)]
    assert rows == expected
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [(row[0], int(row[2]), row[1]) for row in cells] == expected
    assert {len(row) for row in cells} == {7}


def test_loop_by_hand_equals_greedy_decoding_without_cache():
    model = generate.model_of(generate.SMALL)
    prompts = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
    tokens = np.concatenate([prompts, np.zeros((2, 5), np.int32)], axis=1)
    logits = sx.jit(model)  # one program for all lengths, as later tokens change nothing before
    for place in range(4, 9):
        tokens[:, place] = np.argmax(logits(tokens)[:, place - 1], -1)
    np.testing.assert_array_equal(generate.by_hand(model, 5)(prompts), tokens[:, 4:])


@pytest.mark.parametrize(
    ("ratio", "to_peer", "failures"),
    [
        (1.1, 0.99, []),
        (1.1, None, []),
        (1.11, None, ["hybrid, 8 prompts: 1.11 of the loop by hand, at most 1.1"]),
        (1.0, 1.0, ["hybrid, 8 prompts: 1.00 of transformers, which must be below 1"]),
    ],
)
def test_ratios_to_both_opponents_are_bounded(ratio, to_peer, failures):
    record = {"kind": "hybrid", "rows": 8, "ratio_median": ratio}
    record["new"] = generate.NEW
    assert generate.bound_failures(record, to_peer) == failures
