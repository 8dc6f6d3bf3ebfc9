# SPDX-License-Identifier: Apache-2.0
"""Flax's own examples and published programs: translated they compute the same, or are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.interop.migrate.published import PROGRAMS, ROOT
from tests.needs import needs

# How many places the report leaves; of none, the results are compared.
OF_FLAX = {
    "array_leaves": 0,
    "data_parallel": 0,
    "fsdp_and_optimizer": 1,
    "gemma_helpers": 3,
    "gemma_transformer": 4,
    "hijax_basic": 3,
    "hijax_demo": 3,
    "lifted_transforms": 0,
    "mnist": 0,
    "parameter_surgery": 0,
    "save_load_checkpoints": 0,
    "scan_over_layers": 0,
    "train_state": 1,
    "vae": 0,
}
OF_OTHERS = {"jimmy_dropout": 2, "llama3": 0, "mamba2": 0, "ppo": 1, "ppo_normalizer": 11}
# Of batches whose rows are equal, where a variance is nothing but rounding.
TOLERANCE = 1e-3


def outcomes_of(names: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Runs programs in a process of their own, whose draws depend on shapes alone."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.migrate.published", *names]
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_FLAX, marks=needs("flax_examples"), id="of_flax"),
        pytest.param(
            OF_OTHERS, marks=needs("mamba2_jax", "jimmy", "nnx_ppo", "tunix"), id="of_others"
        ),
    ],
)
def test_published_programs_compute_the_same_or_are_left(names: dict[str, int]) -> None:
    outcomes = outcomes_of(names)
    assert {name: outcome.get("left", outcome) for name, outcome in outcomes.items()} == names
    ended = {name for name, outcome in outcomes.items() if outcome.get("ends")}
    assert ended == {name for name, left in names.items() if left}
    differences = {name: outcome.get("difference", 0.0) for name, outcome in outcomes.items()}
    assert {name: value for name, value in differences.items() if value > TOLERANCE} == {}


def test_every_published_program_has_its_row() -> None:
    assert OF_FLAX.keys() | OF_OTHERS.keys() == PROGRAMS.keys()
