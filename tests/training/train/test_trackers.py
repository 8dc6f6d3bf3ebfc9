# SPDX-License-Identifier: Apache-2.0
"""Records of a run go to its log and to all trackers; a resumed run drops what is outdated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator as accumulator

import shardax as sx
from shardax.errors import TrainError
from shardax.train import JsonlLog, TensorBoardLog, read_jsonl
from tests.training.train.small_runs import Quiet, eval_batches, make_trainer


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: steps and values by name."""
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        name: [(each.step, each.value) for each in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


class Recorder:
    """A tracker without ``resume`` that remembers its records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = 0

    def write(self, /, **record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def stopped_at(step: int, trainer: Any) -> Quiet:
    """A display that stops a run after a step, without a request."""
    return Quiet(lambda now: now == step and setattr(trainer.callbacks, "stopping", True))


def test_run_writes_the_same_records_to_all(tmp_path: Path) -> None:
    recorder, board, copy = Recorder(), tmp_path / "board", tmp_path / "copy.jsonl"
    trainer = make_trainer(
        tmp_path / "run",
        6,
        held_out=eval_batches(),
        log_every=2,
        checkpoint_every=2,
        layout={"trackers": [recorder, TensorBoardLog(board), JsonlLog(copy)]},
    )
    trainer.run(display=Quiet())
    records = read_jsonl(trainer.log_path)
    assert recorder.closed == 1 and recorder.records == records == read_jsonl(copy)
    assert [record["step"] for record in records] == [2, 4, 6, 6]
    expected: dict[str, list[Any]] = {}
    for record in records:
        for name, number in record.items():
            if name != "step":
                shown = name.replace("eval_", "eval/")
                expected.setdefault(shown, []).append((record["step"], np.float32(number)))
    assert scalars(board) == expected


def test_resumed_run_shows_every_step_once(tmp_path: Path) -> None:
    def make() -> Any:
        trackers = (TensorBoardLog(tmp_path / "board"), JsonlLog(tmp_path / "copy.jsonl"))
        options: dict[str, Any] = {"log_every": 1, "checkpoint_every": 2}
        return make_trainer(tmp_path / "run", 6, layout={"trackers": trackers}, **options)

    class Killed(Exception):
        pass

    def die(step: int) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        make().run(display=Quiet(die))
    assert [record["step"] for record in read_jsonl(tmp_path / "copy.jsonl")] == [1, 2, 3, 4, 5]
    make().run(resume=True, display=Quiet())
    for records in (read_jsonl(tmp_path / "copy.jsonl"), read_jsonl(tmp_path / "run/log.jsonl")):
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    losses = [(r["step"], np.float32(r["loss"])) for r in read_jsonl(tmp_path / "copy.jsonl")]
    assert scalars(tmp_path / "board")["loss"] == losses


def test_event_files_hold_numbers_of_any_kind_only(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path) as log:
        log.write(step=0, a=1, b=jnp.float32(2), c=np.float64(math.inf), d="text", e=True, f=None)
        log.write(step=3, a=jnp.ones(()), eval_b=0.5, g=[1.0], h=jnp.ones(2))
    log.write(step=4, a=7)
    log.close()
    assert scalars(tmp_path) == {
        "a": [(0, 1.0), (3, 1.0), (4, 7.0)],
        "b": [(0, 2.0)],
        "c": [(0, math.inf)],
        "eval/b": [(3, 0.5)],
    }
    for record, message in (({"a": 1}, "has no step"), ({"step": 1.5}, "must be an int of 0 or")):
        with pytest.raises(TrainError, match=message):
            log.write(**record)


def test_log_is_cut_off_and_opened_again(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    for step in range(4):
        log.write(step=step)
    log.close()
    log.resume(1)
    log.write(step=2, again=True)
    assert read_jsonl(log.path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]
    log.close()


@pytest.mark.parametrize("given", [TensorBoardLog, [print], print, None, 3], ids=repr)
def test_trainer_refuses_what_is_no_tracker(tmp_path: Path, given: Any) -> None:
    if isinstance(given, type):
        given = given(tmp_path / "one")
    with pytest.raises(TrainError, match=r"trackers has a .*, in a tuple or list: trackers=\("):
        make_trainer(tmp_path, 1, layout={"trackers": given})


def test_failing_tracker_stops_the_run_closing_others(tmp_path: Path) -> None:
    class Failing(Recorder):
        def write(self, /, **record: Any) -> None:
            raise ConnectionError("the server is away")

    trackers = (Recorder(), Failing())
    trainer = make_trainer(tmp_path, 3, log_every=1, layout={"trackers": trackers})
    with pytest.raises(ConnectionError, match="the server is away"):
        trainer.run(display=Quiet())
    assert [each.closed for each in trackers] == [1, 1]
    assert [record["step"] for record in trackers[0].records] == [1]
    assert sx.train.read_jsonl(trainer.log_path)[0]["step"] == 1


def test_documented_wandb_tracker_works_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/training.md"
    code = next(
        block for block in page.read_text().split("```python") if "class WandbTracker" in block
    )
    names: dict[str, Any] = {}
    exec(code.partition("```")[0], names)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[Any] = []
    tracker = names["WandbTracker"](project="shardax", id="run-1", dir=str(tmp_path))
    close = tracker.close

    def look_and_close() -> None:
        logged.extend((dict(tracker.run.summary), tracker.run.step))
        close()

    tracker.close = look_and_close
    trainer = make_trainer(tmp_path / "run", 3, log_every=1, layout={"trackers": (tracker,)})
    trainer.run(display=Quiet())
    assert logged[0]["loss"] == pytest.approx(read_jsonl(trainer.log_path)[-2]["loss"])
    assert logged[1] == 3 and any(tmp_path.glob("wandb/offline-run-*/*.wandb"))
