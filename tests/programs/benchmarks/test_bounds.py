# SPDX-License-Identifier: Apache-2.0
"""The bounds the programs hold shardax against say so when they do not hold."""

import bounded_while
import dispatch
import init
import program
import pytest
from _harness import Comparison, Samples


def dispatch_record(**changes):
    base = {"name": "shardax.jit", "work": "update", "donate": False, "size": 128}
    return base | {"ratio_median": 1.0, "extra_median_us": 0.0} | changes


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({"ratio_median": 1.09}, []),
        ({"ratio_median": 1.11}, ["update, 128 variables: 1.110 of jax.jit, at most 1.1"]),
        ({"ratio_median": 9.0, "name": "nnx.jit"}, []),
        ({"size": 16, "ratio_median": 2.0, "extra_median_us": 7.9}, []),
        (
            {"size": 16, "extra_median_us": 8.1, "donate": True},
            ["update donated, 16 variables: 8.1 us extra, at most 8.0"],
        ),
    ],
)
def test_dispatch_bounds_ratio_or_extra_time_by_size(changes, failures):
    assert dispatch.bound_failures(dispatch_record(**changes)) == failures


def init_record(name, layers, *, compiles=5, held=10, nnx_jit=0.1, nnx_eager=0.9):
    ratios = {"nnx.jit": nnx_jit, "nnx eager": nnx_eager}
    return {
        "name": name,
        "layers": layers,
        "compiles": compiles,
        "bytes_on_first_device": held,
        "ratio_to": ratios,
    }


def test_init_bounds_time_programs_and_equal_shards():
    opponents = [init_record(name, 24) for name in ("nnx.jit", "nnx eager")]
    good = init_record("shardax.shard", 24)
    assert init.failures_of([good, *opponents]) == []
    slow = init_record("shardax.shard", 24, held=11, nnx_jit=0.3, nnx_eager=1.2)
    shards = "{'shardax.shard': 11, 'nnx.jit': 10, 'nnx eager': 10}"
    assert init.failures_of([slow, *opponents]) == [
        f"24 layers: the methods made different shards: {shards}",
        "24 layers: 0.30 of nnx.jit, at most 0.2",
        "24 layers: 1.20 of nnx eager, at most 1.0",
    ]
    deeper = init_record("shardax.shard", 96, compiles=6)
    assert init.failures_of([good, deeper]) == ["programs compiled grow with depth: {24: 5, 96: 6}"]


def test_program_ratio_to_zero_is_one_or_infinite():
    assert (program.ratio(0.0, 0.0), program.ratio(3.0, 0.0)) == (1.0, float("inf"))
    assert program.ratio(3.0, 2.0) == 1.5


@pytest.mark.parametrize(
    ("found", "failures"),
    [
        ({256: 10, 4096: 20, 65536: 60}, []),
        (
            {256: 10, 4096: 20, 65536: 180},
            ["recompute: memory grows by 10 and then 160 bytes, at most 4.5x"],
        ),
        ({16: 1, 64: 100}, []),
    ],
)
def test_bounded_while_bounds_the_growth_of_memory(found, failures):
    assert bounded_while.growth_failures(found) == failures


@pytest.mark.parametrize(
    ("name", "ratio", "failures"),
    [
        ("bounded", 1.2, []),
        ("bounded", 1.5, ["forward: 1.50 of lax.while_loop, at most 1.3"]),
        ("scan + cond", 9.0, []),
    ],
)
def test_bounded_while_bounds_the_forward_time(name, ratio, failures):
    comparison = Comparison(Samples(name, (ratio,)), (ratio,), (0.0,))
    assert bounded_while.bound_failures("forward", comparison) == failures
