# SPDX-License-Identifier: Apache-2.0
"""A run's folder says what the run was started with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardax.cli.inputs import PRESETS, find_preset
from shardax.cli.runs import RunSettings, find_run, read_settings, write_settings
from shardax.errors import CommandError

SETTINGS = RunSettings(
    model=PRESETS["tiny"].model,
    text=None,
    batch_size=8,
    seq_len=16,
    steps=10,
    learning_rate=1e-3,
    seed=7,
    mesh="data=2,model=4",
    devices=8,
    eval_batches=2,
    checkpoint_every=5,
)


def test_settings_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    write_settings(folder, SETTINGS)
    assert read_settings(folder) == SETTINGS
    changed = dataclasses.replace(SETTINGS, text="/some/text", devices=None)
    write_settings(folder, changed)
    assert read_settings(folder) == changed
    assert [file.name for file in folder.iterdir()] == ["run.json"]


def test_settings_without_zero_are_read(tmp_path: Path) -> None:
    write_settings(tmp_path, SETTINGS)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record.pop("zero") is False
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_settings(tmp_path) == SETTINGS
    assert SETTINGS.overrides is None
    assert dataclasses.replace(SETTINGS, zero=True).overrides is not None


def test_model_is_lazy_and_depends_on_seed() -> None:
    model = SETTINGS.make_model()
    assert model.embed.embedding.is_lazy
    again, other = SETTINGS.make_model(), dataclasses.replace(SETTINGS, seed=8).make_model()
    assert (model.embed.embedding.value == again.embed.embedding.value).all()
    assert not (model.embed.embedding.value == other.embed.embedding.value).any()


def test_error_for_empty_folder_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=f"shardax train --out {tmp_path}"):
        read_settings(tmp_path)


def spoil(**changes: Any) -> str:
    record = {"format": 1, **dataclasses.asdict(SETTINGS), **changes}
    return json.dumps({name: value for name, value in record.items() if value != "absent"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (spoil(format=2), "another version of shardax"),
        (spoil(format="absent"), "another version of shardax"),
        (spoil(steps="absent"), "cannot be read.*steps"),
        (spoil(colour="red"), "cannot be read.*colour"),
        (spoil(model="absent"), "cannot be read.*model"),
        (spoil(model={"layers": 3}), "cannot be read.*layers"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_unreadable_settings_error_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CommandError, match=f"run.json.*{message}"):
        read_settings(tmp_path)


def test_run_is_found_by_folder_or_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "7"  # a folder may be called like a step
    write_settings(run, SETTINGS)
    (run / "checkpoints" / "00000010").mkdir(parents=True)
    assert find_run(run) == (run, None)
    assert find_run(run / "checkpoints") == (run, None)
    assert find_run(run / "checkpoints" / "00000010") == (run, 10)
    assert find_run(run / "checkpoints" / "10") == (run, 10)
    monkeypatch.chdir(run / "checkpoints")
    assert find_run(Path("..")) == (run, None)
    assert find_run(Path()) == (run, None)
    assert find_run(Path("00000010")) == (run, 10)


@pytest.mark.parametrize("place", ["", "run/typo", "run/checkpoints/latest", "run/a/b", "none"])
def test_path_that_is_no_run_is_refused(tmp_path: Path, place: str) -> None:
    write_settings(tmp_path / "run", SETTINGS)
    with pytest.raises(CommandError, match=r"is no run.*RUN/checkpoints/STEP"):
        find_run(tmp_path / place)


def test_presets_are_found_and_fit_demo_mesh() -> None:
    for name, preset in PRESETS.items():
        assert find_preset(name) is preset
        model = preset.model
        parts = (model.num_heads, model.num_kv_heads, model.mlp_dim, model.vocab_size)
        assert all(size % 4 == 0 for size in parts) and preset.batch_size % 2 == 0
    with pytest.raises(CommandError, match="'huge' is unknown; there are: tiny, demo, small"):
        find_preset("huge")
