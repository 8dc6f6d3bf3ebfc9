# SPDX-License-Identifier: Apache-2.0
"""Snapshots are used where they fit and where the caller trusts them, and nowhere else."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
from tests.host.exported_models import Counter, run_python

import shardax as sx
from shardax.host.errors import ArtifactDamagedError
from shardax.host.export import artifact as snapshots
from shardax.host.export import loading


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """An artifact with a snapshot."""
    return sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter", snapshot=True)


def test_without_asking_there_is_none(tmp_path: pathlib.Path) -> None:
    path = sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")
    assert not (path / "snapshot.bin").exists()
    loaded = sx.host.load(path, trust_snapshot=True)
    assert loaded.program.snapshot_unused == "the artifact has no snapshot"


def test_a_snapshot_is_not_read_unless_trusted(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("the snapshot was read")

    monkeypatch.setattr(loading, "read_snapshot", refuse)
    loaded = sx.host.load(path)
    assert loaded.program.snapshot is None
    assert loaded(jnp.ones(2)).tolist() == [1.0, 2.0]


def test_a_trusted_snapshot_runs_without_compiling(path: pathlib.Path) -> None:
    x = jnp.ones(2)
    with sx.host.compile_report() as report:
        loaded = sx.host.load(path, trust_snapshot=True)
        results = [loaded(x), loaded(x)]
    assert loaded.program.snapshot_unused == ""
    assert (report.programs, [r.tolist() for r in results]) == ([], [[1.0, 2.0], [2.0, 4.0]])


def test_another_process_uses_it(path: pathlib.Path) -> None:
    code = """
import json, sys, jax
jax.config.update("jax_num_cpu_devices", 8)
import shardax as sx
loaded = sx.host.load(sys.argv[1], trust_snapshot=True)
one = sx.random.normal((2,)) * 0 + 1
print(json.dumps([loaded.program.snapshot_unused, loaded(one).tolist(), loaded(one).tolist()]))
"""
    assert json.loads(run_python(code, path)) == ["", [1.0, 2.0], [2.0, 4.0]]


def test_inside_a_transform_the_program_itself_is_used(path: pathlib.Path) -> None:
    loaded = sx.host.load(path, trust_snapshot=True)
    assert sx.jit(lambda f, x: f(x) + 1)(loaded, jnp.ones(2)).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("what", ["jax", "processor", "device", "flags"])
def test_a_snapshot_of_another_machine_is_left_alone(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    own = snapshots.fingerprint

    def elsewhere(devices: Any) -> dict[str, Any]:
        return {**own(devices), what: "another"}

    monkeypatch.setattr(snapshots, "fingerprint", elsewhere)
    loaded = sx.host.load(path, trust_snapshot=True)
    assert loaded.program.snapshot is None
    assert what in loaded.program.snapshot_unused
    assert loaded(jnp.ones(2)).tolist() == [1.0, 2.0]


def test_a_damaged_snapshot_is_named(path: pathlib.Path) -> None:
    (path / "snapshot.bin").write_bytes(b"nonsense")
    with pytest.raises(ArtifactDamagedError, match=r"snapshot\.bin"):
        sx.host.load(path, trust_snapshot=True)
    with pytest.raises(ArtifactDamagedError, match="cannot be loaded"):
        sx.host.load(path, trust_snapshot=True, verify=False)
