# SPDX-License-Identifier: Apache-2.0
"""Artifacts on disk: whole or not there, read as they were written or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ExportError, PathNotFoundError
from shardax.host.export import exporting, signature
from tests.advice import run_advice
from tests.tools.host.exported_models import Counter


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """A complete artifact."""
    return sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")


def rewrite_signature(path: pathlib.Path, **changes: Any) -> None:
    """Changes a signature as somebody would who keeps its checksum right."""
    entries = json.loads((path / "signature.json").read_text())
    entries.update(changes)
    entries["checksum"] = signature.own_checksum(entries)
    (path / "signature.json").write_text(json.dumps(entries))


# --- what is written ------------------------------------------------------------------------------


def test_artifact_is_three_files_of_data(path: pathlib.Path) -> None:
    assert {item.name for item in path.iterdir()} == {
        "signature.json",
        "program.bin",
        "weights.safetensors",
    }
    modes = {item.stat().st_mode for item in path.iterdir()}
    assert len(modes) == 1


def test_weights_file_can_be_read_by_other_programs(path: pathlib.Path) -> None:
    from safetensors.numpy import load_file

    weights = load_file(path / "weights.safetensors")
    assert {name: array.tolist() for name, array in weights.items()} == {
        ".scale": [1.0, 2.0],
        ".total": [0.0, 0.0],
    }


def test_loading_unpickles_nothing(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert sx.host.load(path)(jnp.ones(2)).tolist() == [1.0, 2.0]


def test_signature_describes_inputs_outputs_and_state(path: pathlib.Path) -> None:
    said = json.loads((path / "signature.json").read_text())
    form = {"shape": [2], "dtype": "float32"}
    assert said["signature"] == {
        "name": "Counter",
        "inputs": [{"name": "x", "by_name": False, "tree": 0, "forms": [form]}],
        "output": 0,
        "output_forms": [form],
        "state": [
            {"path": ".scale", "form": form, "type": "Param", "axes": None, "written": False},
            {"path": ".total", "form": form, "type": "Variable", "axes": None, "written": True},
        ],
        "mesh": None,
        "devices": 1,
        "platforms": [jax.devices()[0].platform],
        "vjp_order": 0,
        "constraints": [],
    }


@pytest.mark.parametrize("step", ["write_weights", "write_signature"])
def test_failure_on_the_way_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(exporting, step, fail)
    with pytest.raises(sx.errors.ExportError, match=r"disk full\. Nothing was left there"):
        sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")
    assert list(tmp_path.iterdir()) == []


def test_artifact_appears_when_it_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    write = exporting.write_signature

    def watch(folder: pathlib.Path, entries: Any) -> None:
        write(folder, entries)
        seen.append([item.name for item in tmp_path.iterdir() if not item.name.startswith(".")])

    monkeypatch.setattr(exporting, "write_signature", watch)
    path = sx.host.export(Counter(), jnp.ones(2), to=tmp_path / "counter")
    assert (seen, os.listdir(tmp_path)) == ([[]], [path.name])


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["program.bin", "weights.safetensors"])
def test_load_checks_every_byte_of_a_file(path: pathlib.Path, name: str) -> None:
    file = path / name
    content = file.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(ExportError, match=name):
            sx.host.load(path)
    file.write_bytes(content[:-1])
    with pytest.raises(ExportError, match=name):
        sx.host.load(path)
    file.write_bytes(content)
    assert sx.host.load(path)(jnp.ones(2)).tolist() == [1.0, 2.0]


def test_checking_the_files_can_be_left_out(path: pathlib.Path) -> None:
    file = path / "weights.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-8:-4] = np.float32(5.0).tobytes()  # the total before the last
    file.write_bytes(changed)
    loaded = sx.host.load(path, verify=False)
    assert 5.0 in np.concatenate([v.value for v in loaded.variables.values()])


def test_changed_signature_is_noticed(path: pathlib.Path) -> None:
    file = path / "signature.json"
    file.write_text(file.read_text().replace('"Counter"', '"Kounter"'))
    with pytest.raises(ExportError, match=r"signature\.json was changed"):
        sx.host.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\x00", "[" * 10**5])
def test_signature_that_is_none_is_noticed(path: pathlib.Path, text: str) -> None:
    (path / "signature.json").write_text(text)
    with pytest.raises(ExportError, match=r"signature\.json"):
        sx.host.load(path)


def test_signature_that_lacks_entries_is_noticed(path: pathlib.Path) -> None:
    rewrite_signature(path, signature={"name": "Counter"})
    with pytest.raises(ExportError, match=r"signature\.json"):
        sx.host.load(path)


@pytest.mark.parametrize("name", ["program.bin", "weights.safetensors"])
def test_missing_file_is_named(path: pathlib.Path, name: str) -> None:
    (path / name).unlink()
    with pytest.raises(ExportError, match=f"{name} is missing"):
        sx.host.load(path)


def test_place_without_an_artifact_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PathNotFoundError, match="no artifact"):
        sx.host.load(tmp_path)
    with pytest.raises(PathNotFoundError, match="nothing"):
        sx.host.load(tmp_path / "away")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "'other'"),
        ({"calling_convention": 10_000}, "calling convention 10000"),
        ({"calling_convention": 1}, "calling convention 1"),
    ],
)
def test_load_names_other_versions(path: pathlib.Path, changes: Any, said: str) -> None:
    rewrite_signature(path, **changes)
    with pytest.raises(ExportError, match=said):
        sx.host.load(path)


def test_program_unreadable_by_jax_reports_another_version(path: pathlib.Path) -> None:
    (path / "program.bin").write_bytes(b"not a program" * 10)
    with pytest.raises(ExportError, match=f"JAX {jax.__version__} cannot read"):
        sx.host.load(path, verify=False)


# --- where it is read -----------------------------------------------------------------------------


def test_program_for_another_platform_is_named(tmp_path: pathlib.Path) -> None:
    other = "tpu" if jax.devices()[0].platform != "tpu" else "cuda"
    path = sx.host.export(lambda x: x, 1.0, to=tmp_path / "f", platforms=(other,))
    with pytest.raises(ExportError, match=other):
        sx.host.load(path)


def test_program_of_64_bits_needs_64_bits(tmp_path: pathlib.Path) -> None:
    with jax.enable_x64(True):
        path = sx.host.export(lambda x: x * 2, np.ones(2), to=tmp_path / "f")
        assert sx.host.load(path)(np.ones(2)).dtype == np.float64
    with pytest.raises(ExportError, match="float64") as caught:
        sx.host.load(path)
    try:
        run_advice(caught.value, "sx.configure(x64=True)", {"sx": sx})
        assert sx.host.load(path)(np.ones(2)).dtype == np.float64
    finally:
        sx.configure(x64=False)
