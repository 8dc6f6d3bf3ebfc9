# SPDX-License-Identifier: Apache-2.0
"""The global stream in another process: restored states, unseeded streams, normal numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from typing import Any

import shardax as sx
from shardax.random.stream import KeyStream

PROGRAM = """
import json, sys
import jax
import shardax as sx
from jax.sharding import NamedSharding, PartitionSpec
from shardax.random.stream import KeyStream

sx.random.seed(1)
jax.config.update("jax_num_cpu_devices", 8)  # raises once a backend runs
found = {"devices": jax.device_count()}
sx.random.set_state(sx.random.StreamState(**json.loads(sys.argv[1])))
found["restored"] = sx.random.uniform(3).tolist()
found["unseeded"] = [KeyStream(None).state().words for _ in range(2)]

mesh = jax.make_mesh((2, 4), ("data", "model"))
sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
key = jax.random.key(0, impl="rbg")
sx.random.seed(key)
split = sx.random.normal((8, 16), sharding=sharding)
assert split.sharding == sharding
found["split"] = split.tolist()
found["whole"] = jax.random.normal(jax.random.fold_in(key, 0), (8, 16)).tolist()
print(json.dumps(found))
"""


@functools.cache
def of_another_process() -> dict[str, Any]:
    """Returns what the program found, which was given the state of seed 0."""
    # Without XLA's flags of the tests: normal numbers of rbg have last bits that depend, without
    # LLVM's optimizations, on how large the computed part is.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    state = json.dumps(dataclasses.asdict(sx.random.get_state()))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, state],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_seeding_starts_no_backend() -> None:
    assert of_another_process()["devices"] == 8


def test_saved_state_restores_numbers_in_another_process() -> None:
    assert of_another_process()["restored"] == sx.random.uniform(3).tolist()


def test_unseeded_streams_differ_between_processes() -> None:
    own = [KeyStream(None).state().words for _ in range(2)]
    assert len({tuple(key) for key in (*own, *of_another_process()["unseeded"])}) == 4


def test_rbg_normal_numbers_are_equal_whole_or_split() -> None:
    assert of_another_process()["split"] == of_another_process()["whole"]
