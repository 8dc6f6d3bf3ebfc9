# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is not what was written is never read, and the damaged file is named."""

from __future__ import annotations

import gc
import random
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import (
    CheckpointDamagedError,
    CheckpointWriteError,
    PathNotFoundError,
    TrainError,
)
from shardax.train import Checkpoints, checkpoint
from shardax.train.run_folder import differences, settings_of
from tests.training.train.small_runs import Bigram, Quiet, make_trainer, state_of


class Net(sx.Module):
    def __init__(self, value: float = 0.0) -> None:
        self.kernel = sx.Param(jnp.full((8, 8), value))
        self.key = sx.RngState(jax.random.key(0))


def files_of(folder: Path) -> list[Path]:
    return sorted(item for item in folder.rglob("*") if item.is_file())


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(content)


def delete(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_first(file: Path) -> None:
    flip(file, 0)


def test_restore_detects_one_flipped_bit_in_any_file(tmp_path: Path) -> None:
    checkpoint.save((Net(), {"step": 3}), tmp_path / "saved", extra=[1e-5, "x"])
    chance = random.Random(0)
    found = files_of(tmp_path / "saved")
    assert len(found) >= 5
    for file in found:
        size = file.stat().st_size * 8
        for bit in {0, size - 1, *(chance.randrange(size) for _ in range(5))}:
            model, position = Net(1.0), {"step": 0}
            flip(file, bit)
            name = file.relative_to(tmp_path / "saved").as_posix()
            with pytest.raises(CheckpointDamagedError) as caught:
                checkpoint.restore((model, position), tmp_path / "saved")
            assert name in str(caught.value) and "\n" not in str(caught.value)
            assert float(model.kernel[0, 0]) == 1.0 and position == {"step": 0}
            flip(file, bit)
    checkpoint.restore((Net(), {"step": 0}), tmp_path / "saved")


@pytest.mark.parametrize("spoil", [delete, truncate, empty])
def test_missing_or_truncated_file_is_detected_and_named(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    checkpoint.save(Net(), tmp_path / "saved")
    for file in files_of(tmp_path / "saved"):
        content = file.read_bytes()
        spoil(file)
        with pytest.raises(CheckpointDamagedError, match=file.name):
            checkpoint.restore(Net(), tmp_path / "saved")
        file.write_bytes(content)
    shutil.rmtree(tmp_path / "saved" / "arrays")
    with pytest.raises(CheckpointDamagedError, match=r"arrays/.* is missing; .*; and \d+ more"):
        checkpoint.restore(Net(), tmp_path / "saved")


def saved_steps(folder: Path, *steps: int) -> Checkpoints:
    with Checkpoints(folder, keep=None) as checkpoints:
        for step in steps:
            checkpoints.save(step, Net(float(step)))
    return checkpoints


@pytest.mark.parametrize("name", ["00000057", "57", "100"])
@pytest.mark.parametrize("how", ["copied", "renamed"])
def test_folder_of_another_step_is_noticed(tmp_path: Path, name: str, how: str) -> None:
    checkpoints = saved_steps(tmp_path, 53, 54)
    source, target = tmp_path / "00000054", tmp_path / name
    _ = shutil.copytree(source, target) if how == "copied" else source.rename(target)
    for attempt in (
        lambda: checkpoints.restore(Net()),
        lambda: checkpoints.restore(Net(), int(name)),
        lambda: checkpoint.restore(Net(), target),
    ):
        with pytest.raises(CheckpointDamagedError, match=r"is of step 54.*copied or renamed"):
            attempt()


def test_copy_under_another_name_restores_the_same(tmp_path: Path) -> None:
    saved_steps(tmp_path / "run", 54)
    shutil.copytree(tmp_path / "run" / "00000054", tmp_path / "best")
    model = Net()
    checkpoint.restore(model, tmp_path / "best")
    assert float(model.kernel[0, 0]) == 54


@pytest.mark.parametrize("mixed", ["arrays", "description.json"])
def test_mixed_description_and_arrays_are_detected(tmp_path: Path, mixed: str) -> None:
    checkpoints = saved_steps(tmp_path, 1, 2)
    old, new = tmp_path / "00000001" / mixed, tmp_path / "00000002" / mixed
    if new.is_dir():
        shutil.rmtree(new)
        shutil.copytree(old, new)
    else:
        shutil.copy(old, new)
    with pytest.raises(CheckpointDamagedError, match="00000002 is damaged: "):
        checkpoints.restore(Net())


# --- going on with a run --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of six steps, with checkpoints of steps 2, 4 and 6."""
    return start(tmp_path_factory.mktemp("whole") / "run")


def start(folder: Path, **options: Any) -> Any:
    trainer = make_trainer(folder, 6, checkpoint_every=2, keep_checkpoints=3)
    trainer.run(display=Quiet(), **options)
    return trainer


@pytest.fixture
def copy(whole: Any, tmp_path: Path) -> Path:
    """The same run elsewhere, to be damaged."""
    return shutil.copytree(whole.directory, tmp_path / "run")


def resume(folder: Path, **options: Any) -> tuple[Any, Quiet]:
    trainer, display = make_trainer(folder, 6, checkpoint_every=2, keep_checkpoints=3), Quiet()
    trainer.run(resume=True, display=display, **options)
    return trainer, display


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"{step:08d}"


@pytest.mark.parametrize("spoil", [flip_first, truncate, delete])
@pytest.mark.parametrize("item", ["description.json", "arrays/manifest.ocdbt"])
def test_run_falls_back_to_newest_undamaged_checkpoint(
    whole: Any, copy: Path, spoil: Callable[[Path], None], item: str
) -> None:
    for step in (4, 6):
        spoil(step_folder(copy, step) / item)
    trainer, display = resume(copy)
    assert display.span == (2, 6) and display.steps == [3, 4, 5, 6]
    assert len(display.notes) == 2 and all("\n" not in note for note in display.notes)
    assert display.notes[0].startswith(f"The checkpoint of step 6 is damaged: {item}")
    assert "Going on from step 2; the damaged one is now" in display.notes[0]
    assert state_of(trainer) == state_of(whole)
    assert sx.train.read_jsonl(trainer.log_path)[-1]["step"] == 6
    names = sorted(item.name for item in trainer.checkpoint_directory.iterdir())
    kept = ["00000002", "00000004", "00000004.damaged", "00000006", "00000006.damaged"]
    assert names == kept


def test_resume_without_fallback_stops_at_damage_unchanged(copy: Path) -> None:
    flip_first(step_folder(copy, 6) / "description.json")
    before = {file: file.read_bytes() for file in files_of(copy)}
    with pytest.raises(CheckpointDamagedError, match=r"00000006 is damaged: description\.json"):
        resume(copy, fallback=False)
    assert {file: file.read_bytes() for file in files_of(copy)} == before


def test_copied_step_is_set_aside_on_resume(whole: Any, copy: Path) -> None:
    shutil.copytree(step_folder(copy, 4), step_folder(copy, 57))
    trainer, display = resume(copy)
    assert display.span == (6, 6) and "is of step 4" in display.notes[0]
    assert state_of(trainer) == state_of(whole)


def test_run_without_undamaged_checkpoint_is_refused_listing_damage(copy: Path) -> None:
    for step in (2, 4, 6):
        delete(step_folder(copy, step) / "description.json")
    with pytest.raises(CheckpointDamagedError, match=r"No checkpoint.*step 6: desc.*step 2: desc"):
        resume(copy)


def test_run_without_checkpoints_says_it_starts_again(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    _, display = resume(copy)
    assert display.span == (0, 6)
    assert display.notes == ["There is no checkpoint to go on from: starting again at step 0."]


def bigger_base(model: Any) -> Any:
    model.embed.scale = 500.0  # a setting that no array shows
    return model


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tx": optax.adam(1e-3)}, r"\.optimizer\.tx\..*: -0\.01 when saved, -0\.001 now"),
        ({"tx": optax.adam(1e-2, b1=0.8)}, r"\.b1: 0\.9 when saved, 0\.8 now"),
        ({"tx": optax.adam(lambda step: 1e-2)}, r"\.optimizer\.tx\."),
        ({"model": bigger_base(Bigram())}, r"\.model\.embed\.scale: nothing.*500\.0 now"),
    ],
)
def test_changed_settings_are_refused_without_override(
    copy: Path, options: dict[str, Any], named: str
) -> None:
    trainer = make_trainer(copy, 8, **options)
    with pytest.raises(TrainError, match=rf"other settings: [^\n]*{named}") as caught:
        trainer.run(resume=True, display=Quiet())
    assert "override=True" in str(caught.value)
    if "lambda" not in str(caught.value):  # whose state has another form
        assert trainer.run(resume=True, override=True, display=Quiet()).step == 8
        again = make_trainer(copy, 8, **options)  # the new settings are those of the run now
        assert again.run(resume=True, display=Quiet()).step == 8


def test_settings_of_functions_are_equal_across_instances() -> None:
    def settings(function: Any, slope: float) -> dict[str, str]:
        rngs = sx.Rngs(0)
        layers = [sx.Jitted(sx.nn.Linear(2, 2, rngs=rngs)), function, lambda x: x * slope]
        model = sx.nn.Sequential(*layers)
        model.named = {"f": function, "layer": sx.nn.Linear(2, 2, rngs=rngs)}
        return settings_of(model, sx.train.Optimizer(model, optax.sgd(0.1)))

    one, other = settings(jax.nn.relu, 2.0), settings(jnp.tanh, 3.0)
    assert differences(one, settings(jax.nn.relu, 2.0)) == []
    changed = [line.partition(": ")[0] for line in differences(one, other)]
    assert {place.partition(".wrapped")[0] for place in changed} == {
        ".model.layers[1]",
        ".model.layers[2].slope",
        ".model.named['f']",
    }
    assert not [name for name in one if "_hash" in name]  # which differs between processes


def test_run_settings_made_anew_are_the_same(copy: Path) -> None:
    trainer, display = resume(copy)
    assert display.notes == [] and trainer.run_settings[".model.head.out_features"] == "256"


# --- one trainer at a time ------------------------------------------------------------------------


def test_second_trainer_in_the_folder_is_refused(tmp_path: Path) -> None:
    said: list[str] = []

    def second(step: int) -> None:
        if step == 3:
            with pytest.raises(TrainError) as caught:
                make_trainer(tmp_path, 6).run(resume=True, display=Quiet())
            said.append(str(caught.value))

    result = make_trainer(tmp_path, 6, checkpoint_every=2).run(display=Quiet(second))
    assert result.step == 6 and len(said) == 1
    assert "is being trained in by process " in said[0] and "--out" in said[0]
    assert make_trainer(tmp_path, 6).run(resume=True, display=Quiet()).step == 6  # it is free


@pytest.mark.usefixtures("collecting_only_what_is_new")
@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
@pytest.mark.parametrize("every", [0, 1])
def test_lost_run_folder_ends_the_run_with_error(tmp_path: Path, how: str, every: int) -> None:
    run = tmp_path / "run"

    def lose(step: int) -> None:
        if step == 3:
            run.rename(tmp_path / "elsewhere")
            if how == "removed":
                shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
            if how == "replaced":
                run.mkdir()

    trainer = make_trainer(run, 50, log_every=5, checkpoint_every=every)
    with pytest.raises(TrainError, match=r"/run was removed, moved or replaced while"):
        trainer.run(display=Quiet(lose))
    assert not list(run.rglob("*.json*"))
    if how == "moved" and every:
        assert Checkpoints(tmp_path / "elsewhere" / "checkpoints").latest() in (1, 2)


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Limits the size of files that this process may write, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_full_disk_error_leaves_no_partial_checkpoint(
    tmp_path: Path, small_files: Callable[[int], None], capfd: Any, caplog: Any
) -> None:
    numbers = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, sx.Param(numbers))
    checkpoints.wait()
    small_files(100_000)
    checkpoints.save(2, sx.Param(numbers))
    with pytest.raises(CheckpointWriteError) as caught:
        checkpoints.wait()
    small_files(resource.RLIM_INFINITY)
    said = str(caught.value)
    assert "\n" not in said and "File too large" in said and "The last complete one is 1." in said
    assert [item.name for item in tmp_path.iterdir()] == ["00000001"]
    checkpoints.save(3, sx.Param(numbers))
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    gc.collect()
    assert capfd.readouterr().err == "" and caplog.text == ""


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_full_disk_ends_a_run_keeping_earlier_checkpoints(
    tmp_path: Path, small_files: Callable[[int], None], capfd: Any
) -> None:
    def fill(step: int) -> None:
        if step == 5:
            small_files(5_000)

    trainer = make_trainer(tmp_path, 6, checkpoint_every=2)
    with pytest.raises(CheckpointWriteError, match=r"The last complete one is [24]"):
        trainer.run(display=Quiet(fill))
    small_files(resource.RLIM_INFINITY)
    gc.collect()
    assert capfd.readouterr().err == ""
    assert make_trainer(tmp_path, 6).run(resume=True, display=Quiet()).step == 6


def test_full_disk_error_leaves_no_partial_log_line(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    with sx.train.JsonlLog(tmp_path / "log.jsonl") as log:
        log.write(step=1, loss=1.0)
        small_files(30)
        with pytest.raises(OSError, match=r"File too large: .*log\.jsonl"):
            log.write(step=2, loss=2.0)
        small_files(resource.RLIM_INFINITY)
        log.write(step=2, loss=2.0)
    assert [each["step"] for each in sx.train.read_jsonl(tmp_path / "log.jsonl")] == [1, 2]


def test_run_clears_away_what_killed_processes_left(copy: Path) -> None:
    for name in ("00000002.deleted", "00000008.orbax-checkpoint-tmp"):
        (copy / "checkpoints" / name / "arrays").mkdir(parents=True)
    trainer, _ = resume(copy)
    names = sorted(item.name for item in trainer.checkpoint_directory.iterdir())
    assert names == ["00000002", "00000004", "00000006"]


def test_nothing_at_a_path_is_not_damage(tmp_path: Path) -> None:
    with pytest.raises(PathNotFoundError):
        checkpoint.restore(Net(), tmp_path / "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saved_steps(tmp_path, 1).latest() == 1


def test_option_that_is_off_is_none() -> None:
    assert differences({"a": "1"}, {"a": "1", "b": "None", "c": "False"}) == []
    assert differences({"a": "1"}, {"b": "2"}) == [
        "a: 1 when saved, nothing now",
        "b: nothing when saved, 2 now",
    ]


def test_folders_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(TrainError, match=r"Cannot write into the run's folder .*file.*: "):
            make_trainer(place, 1).run(display=Quiet())
    assert (tmp_path / "file").read_text() == ""
