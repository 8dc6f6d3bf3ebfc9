# SPDX-License-Identifier: Apache-2.0
"""A run that was damaged, changed or taken says so, on the command line too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardax as sx
from shardax.cli import main

pytestmark = pytest.mark.usefixtures("one_layer")

OPTIONS = ["--preset", "tiny", "--steps", "4", "--batch-size", "8", "--seq-len", "16"]
OPTIONS += ["--checkpoint-every", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, one_layer: None) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 200)
    words = ["train", *OPTIONS, "--text", str(folder / "text.txt"), "--out", str(folder / "run")]
    assert main(words) == 0
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The same run elsewhere, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "run")


def said(capsys: Any, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(words)
    return status, *capsys.readouterr()


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def change(run: Path, **changes: Any) -> None:
    record = json.loads((run / "run.json").read_text())
    for name, value in changes.items():
        (record["model"] if name in record["model"] else record)[name] = value
    (run / "run.json").write_text(json.dumps(record))


def some_array_file(run: Path, step: int) -> Path:
    files = (run / "checkpoints" / f"{step:08d}" / "arrays").rglob("*")
    return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)


def test_verify_reports_the_state_of_every_checkpoint(run: Path, capsys: Any) -> None:
    status, printed, _ = said(capsys, "verify", str(run))
    lines = printed.splitlines()
    assert status == 0 and lines[2] == f"{run}: all is good"
    assert lines[0].startswith("good: 00000002, ") and lines[1].startswith("good: 00000004, ")
    spoil(file := some_array_file(run, 2))
    (run / "log.jsonl").write_text("not a log\n")
    status, printed, _ = said(capsys, "verify", str(run))
    assert status == 1 and printed.splitlines()[-1] == f"{run}: 2 problems"
    assert re.search(rf"problem: step 2 is damaged: arrays/.*{file.name} has not the", printed)
    assert "good: 00000004" in printed and "is no JSON object" in printed
    assert said(capsys, "verify", str(run / "checkpoints" / "00000002"))[0] == 1


@pytest.mark.parametrize("spoilt", ["array", "description", "copied"])
def test_resume_falls_back_to_an_intact_checkpoint(
    run: Path, whole: Path, capsys: Any, spoilt: str
) -> None:
    step = 4
    if spoilt == "copied":
        step = 7
        shutil.copytree(run / "checkpoints" / "00000004", run / "checkpoints" / "00000007")
    else:
        newest = run / "checkpoints" / "00000004" / "description.json"
        spoil(newest if spoilt == "description" else some_array_file(run, 4))
    words = ["train", "--resume", "--out", str(run)]
    status, printed, error = said(capsys, *words, "--no-fallback")
    assert (status, error.count("\n")) == (1, 1)
    assert f"{step:08d} is damaged: " in error
    status, printed, error = said(capsys, *words)
    assert (status, error) == (0, "")
    notes = [line for line in printed.splitlines() if "damaged" in line]
    assert len(notes) == 1 and notes[0].startswith(f"The checkpoint of step {step} is damaged: ")
    assert sx.train.Checkpoints(run / "checkpoints").latest() == 4
    assert (run / "checkpoints" / f"{step:08d}.damaged").is_dir()

    def losses(folder: Path) -> list[Any]:
        records = sx.train.read_jsonl(folder / "log.jsonl")
        return [(each["step"], each.get("loss"), each.get("eval_loss")) for each in records]

    assert losses(run) == losses(whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 0.5}, r"\.optimizer\.tx"),
        ({"rope_base": 500.0}, ".model.config.rope_base: 10000.0 when saved, 500.0 now"),
        ({"dtype": "bfloat16"}, ".model.config.dtype: 'float32' when saved, 'bfloat16' now"),
        ({"steps": 6}, "decay_steps"),
    ],
)
def test_changed_settings_are_refused_without_override(
    run: Path, capsys: Any, changes: dict[str, Any], named: str
) -> None:
    change(run, **changes)
    status, printed, error = said(capsys, "train", "--resume", "--out", str(run))
    assert (status, printed) == (1, "") and "other settings" in error and "--override" in error
    assert named.replace("\\", "") in error and error.count("\n") == 1
    status, printed, _ = said(capsys, "verify", str(run))
    assert status == 1 and "step 4 was trained with other settings than run.json has" in printed


def test_override_changes_the_settings_of_a_run(run: Path, capsys: Any) -> None:
    change(run, rope_base=500.0, dtype="bfloat16")  # of the file, and others as options
    words = ["train", "--resume", "--override", "--out", str(run)]
    assert said(capsys, *words, "--steps", "6", "--learning-rate", "0.001")[0] == 0
    record = json.loads((run / "run.json").read_text())
    assert (record["steps"], record["learning_rate"], record["batch_size"]) == (6, 0.001, 8)
    assert (record["model"]["rope_base"], record["model"]["dtype"]) == (500.0, "bfloat16")
    assert sx.train.Checkpoints(run / "checkpoints").latest() == 6
    assert said(capsys, "train", "--resume", "--out", str(run))[0] == 0
    assert said(capsys, "verify", str(run))[0] == 0


@pytest.mark.parametrize("option", ["--seed=3", "--preset=small", "--seq-len=32"])
def test_fixed_settings_cannot_be_overridden(run: Path, capsys: Any, option: str) -> None:
    before = (run / "run.json").read_bytes()
    assert said(capsys, "train", "--resume", "--override", "--out", str(run), option)[0] == 1
    assert (run / "run.json").read_bytes() == before
    name = option.removeprefix("--").partition("=")[0].replace("-", "_")
    if name != "preset":
        change(run, **{name: 3})
        status, printed, _ = said(capsys, "verify", str(run))
        assert status == 1 and f"{name}: " in printed


HOLDER = """
import sys, pathlib, time
from shardax.train.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(100)
"""


def test_run_held_by_another_process_is_refused(run: Path, capsys: Any) -> None:
    before = (run / "run.json").read_bytes()
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        words = ["train", "--resume", "--out", str(run)]
        status, printed, error = said(capsys, *words, "--mesh", "data=2", "--devices", "8")
        assert (status, printed, error.count("\n")) == (1, "", 1)
        assert f"{run} is being trained in by process {holder.pid} on " in error
        assert (run / "run.json").read_bytes() == before
        holder.kill()
    assert said(capsys, *words)[0] == 0


def test_damaged_checkpoint_is_not_sampled(run: Path, capsys: Any) -> None:
    spoil(some_array_file(run, 4))
    status, printed, error = said(capsys, "sample", str(run), "--length", "2")
    assert (status, printed, error.count("\n")) == (1, "", 1)
    assert "00000004 is damaged" in error and "nearby" in error and "00000002" in error
    good = str(run / "checkpoints" / "00000002")
    assert said(capsys, "sample", good, "--length", "2")[0] == 0
