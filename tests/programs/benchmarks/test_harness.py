# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: turns, ratios, tables, the JSON it leaves and the exit status."""

import gc
import json

import _harness
import pytest
from _harness import Comparison, Opponent, Report, Samples


def recorder(name: str, log: list[tuple[str, int]]) -> Opponent:
    """An opponent that writes down each block it is asked for."""
    return Opponent(name, lambda calls: log.append((name, calls)))


def test_opponents_take_turns_in_rotating_order():
    log: list[tuple[str, int]] = []
    opponents = [recorder(name, log) for name in "ABC"]
    samples = _harness.measure(opponents, repeats=3, calls=7, warm_up=False)
    assert log == [(name, 7) for name in "ABCBCACAB"]
    assert [(one.name, one.calls, len(one.seconds)) for one in samples] == [
        ("A", 7, 3),
        ("B", 7, 3),
        ("C", 7, 3),
    ]


def test_warm_up_calls_precede_timed_blocks():
    log: list[tuple[str, int]] = []
    _harness.measure([recorder("A", log), recorder("B", log)], repeats=1, calls=5)
    assert log == [("A", 1), ("A", 1), ("B", 1), ("B", 1), ("A", 5), ("B", 5)]


def test_ratios_are_formed_within_each_repeat():
    base = Samples("base", (1.0, 10.0, 2.0))
    other = Samples("other", (2.0, 10.0, 3.0))
    compared = _harness.compare([base, other], "base")
    assert compared == {
        "base": Comparison(base, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
        "other": Comparison(other, (2.0, 1.0, 1.5), (1.0, 0.0, 1.0)),
    }
    assert compared["other"].record() == {
        "name": "other",
        "calls_per_block": 1,
        "repeats": 3,
        "min_us": 2e6,
        "median_us": 3e6,
        "ratio_min": 1.0,
        "ratio_median": 1.5,
        "extra_median_us": 1e6,
    }


def test_blocks_are_calibrated_to_the_requested_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_harness, "time_block", lambda run, calls: calls * 1e-4)
    assert _harness.calls_for(lambda calls: None, 0.03) == 300
    assert _harness.calls_for(lambda calls: None, 1e-9) == 1
    assert _harness.calls_for(lambda calls: None, 1e9, most=64) == 64


def test_garbage_collection_is_off_only_inside_a_block():
    seen: list[bool] = []

    def fail(calls: int) -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        _harness.time_block(fail, 1)
    assert (seen, gc.isenabled()) == ([False], True)


def test_table_is_markdown_with_numbers_right_aligned():
    assert _harness.table(["call", "time"], [["jax.jit", "9 us"], ["other", "120 us"]]) == (
        "| call    |   time |\n| ------- | -----: |\n| jax.jit |   9 us |\n| other   | 120 us |"
    )


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--check"], 1)])
def test_report_writes_json_and_fails_only_with_check(tmp_path, capsys, flags, status):
    path = tmp_path / "deep" / "report.json"
    options = _harness.arguments(__doc__, repeats=3).parse_args([*flags, "--json", str(path)])
    report = Report("name", {"size": 2}, records=[{"a": 1}], failures=["too slow"])
    assert report.finish(options) == status
    written = json.loads(path.read_text())
    machine = written.pop("machine")
    load = written.pop("load_average")
    assert written == {
        "benchmark": "name",
        "settings": {"size": 2},
        "records": [{"a": 1}],
        "failures": ["too slow"],
    }
    assert set(load) == {"before", "after"}
    assert {"processor", "cores", "python", "versions", "devices", "commit"} <= set(machine)
    assert "jax" in machine["versions"]
    assert "OUT OF BOUNDS: too slow" in capsys.readouterr().out
