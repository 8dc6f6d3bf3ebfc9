# SPDX-License-Identifier: Apache-2.0
"""Training over several processes is training in one; processes that differ are refused."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from tests.models import forms
from tests.training.distributed.processes import SECONDS, ends, run, started
from tests.training.distributed.programs import Large, digest_of, elastic_trainer
from tests.training.train import small_runs
from tests.values import with_values


def of_gloo(line: str) -> bool:
    """Whether JAX's collectives wrote it; threads of theirs break each other's lines in pieces."""
    return "[Gloo]" in line or re.fullmatch(r"\s*\d*\s*|.*connected peer ranks.*", line) is not None


@pytest.mark.parametrize(
    ("processes", "meshes"),
    [
        # A process is one part of data; or of model, so that both need all rows.
        (2, [({"data": 2, "model": 2}, False), ({"data": 2, "model": 2}, True)]),
        # Two processes share rows; all four do.
        (4, [({"data": 2, "model": 2}, False), ({"data": 1, "model": 4}, False)]),
    ],
    ids=["two", "four"],
)
def test_processes_give_the_parameters_and_losses_of_one(
    processes: int, meshes: list[Any], tmp_path: Path
):
    first, *others = run("trained", meshes, tmp_path, processes=processes, devices=4 // processes)
    assert others == [first] * (processes - 1)
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
    alone = small_runs.make_trainer(
        tmp_path / "alone",
        4,
        mesh=mesh,
        held_out=small_runs.eval_batches(max_batches=2),
        model=small_runs.Bigram(dropout=0.1),
        log_every=1,
    )
    result = alone.run(display=small_runs.Quiet())
    losses = [r["loss"] for r in sx.train.read_jsonl(result.log) if "loss" in r]
    assert result.eval_loss is not None
    for number, (_, kernel, loss, eval_loss) in enumerate(first):
        np.testing.assert_allclose(kernel, alone.model.head.kernel.value, atol=1e-5)
        np.testing.assert_allclose([loss, eval_loss], [result.loss, result.eval_loss], rtol=1e-5)
        log = sx.train.read_jsonl(tmp_path / f"run{number}" / "log.jsonl")
        assert [r["step"] for r in log] == [1, 2, 3, 4, 4]
        np.testing.assert_allclose([r["loss"] for r in log if "loss" in r], losses, rtol=1e-5)
    printed = [
        (tmp_path / f"out{process}").read_text().splitlines() for process in range(processes)
    ]
    own, *rest = [[line for line in lines if not of_gloo(line)] for lines in printed]
    assert any("step 4/4" in line for line in own)
    assert rest == [[]] * (processes - 1), "only the main process prints"


NAMES = [form.name for form in forms.FORMS if np.prod(list(form.sizes.values())) == 4]


def run_in_two(program: str, arguments: Any, folder: Path) -> Any:
    """What both of two processes returned, which is the same."""
    first, second = run(program, arguments, folder)
    assert first == second
    return first


def test_hierarchical_gradient_reduction_trains_as_one_process(tmp_path: Path):
    first = run_in_two("reduced", "bfloat16", tmp_path)
    alone = small_runs.make_trainer(tmp_path / "alone", 4)
    alone.run(display=small_runs.Quiet())
    # Adam's first steps are as long as its rate, 0.01, also by a gradient next to nothing.
    apart = np.abs(np.subtract(first[1], alone.model.head.kernel.value))
    assert apart.mean() < 1e-4


def test_parallelism_over_processes_gives_gradients_of_one_device(tmp_path: Path):
    first = run_in_two("in_forms", NAMES, tmp_path)
    assert len(first) == len(NAMES) == 2
    loss, gradients = forms.step(with_values(sx.clone(forms.whole())), forms.make_batch())
    for value, found in first:
        assert value == pytest.approx(float(loss), abs=1e-5)
        for path, wanted in gradients.flat().items():
            np.testing.assert_allclose(found[str(path)], wanted, atol=2e-5, err_msg=str(path))


def test_stop_by_one_process_ends_all_together(tmp_path: Path) -> None:
    stopped = [({"data": 2, "model": 2}, False)]
    ((step, eval_loss, best, share),) = run_in_two("stopped_by_one", stopped, tmp_path)
    own = tmp_path / "run0"
    records = [r for r in sx.train.read_jsonl(own / "log.jsonl") if "eval_loss" in r]
    shares = {record["step"]: record["eval_accuracy"] for record in records}
    assert (step, records[-1]["eval_loss"]) == (3, eval_loss)
    assert (best, share) == (max(shares, key=lambda at: shares[at]), max(shares.values()))
    assert (own / "checkpoints" / f"{best:08}").is_dir()


def test_distributed_error_names_which_process_differs_in_what(tmp_path: Path):
    first, second = run("disagreeing", None, tmp_path)
    second["folder"] = second["folder"].replace("own1", "own0")
    assert first == second, "every process raises the same"
    start = "DistributedError: The 2 processes differ in\n"
    for name, shown in {
        "learning rate": "-0.01 in process 0; -0.02 in process 1",
        "seed": "random key of",
        "batch size": "(16, 16)",
        "layout": "sharding of [1].opt_state",
        "steps": "log_every: 1 in process 0; 2 in process 1",
        "value": "value of [0].scale",
        "whole batches": "batch: ",
        "program": "program of a step: ",
        "agree": "width.b[1]: 4 in process 0; 3 in process 1",
    }.items():
        assert first[name].startswith(start), (name, first[name])
        assert shown in first[name], (name, first[name])
    assert first["repr"] == "Param(float32[256, 256] over processes 0, 1)"
    for device in (0, 1):
        cell = f"{device} (process 0); {device + 2048} (process 1)"
        assert f"CPU {cell}" in first["picture"] and cell in first["page"]
    start_of = {name: first[name].partition(": float")[0] for name in ("numpy", "number")}
    assert start_of == {"numpy": f"{start}  options.rate", "number": f"{start}  shift"}
    assert first["own numpy"] == first["equal numpy"] == "nothing was raised"
    assert "Copies of one array differ between processes" in first["copies"]
    assert ".model.scale: " in first["copies"]
    assert "after placing, before the first step" in first["copies"]
    assert "own0 of processes [1] is another one than that of process 0" in first["folder"]
    assert "There are 2 processes, but the Trainer has no mesh" in first["no mesh"]
    assert "a mesh without devices of processes [1]" in first["part of a mesh"]
    assert (
        "different places of the program: there in process 0; here in process 1" in first["barrier"]
    )
    assert first["again"] == "2"
    for name in ("np.asarray", "tolist", "named", "host"):
        assert first[name].startswith("ModuleError: "), first[name]
        assert "sx.distributed.gather(x)" in first[name]
    assert first["arrays"] == [".embed.embedding", ".scale"]
    assert first["gathered"] == first["pickled"] == 256


def test_run_resumes_with_more_or_fewer_processes(tmp_path: Path):
    def mesh(shape: tuple[int, int]) -> jax.sharding.Mesh:
        kinds = (AxisType.Auto,) * 2
        devices = jax.devices()[: shape[0] * shape[1]]
        return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=devices)

    straight = elastic_trainer(tmp_path / "straight", 6, mesh((2, 2)))
    straight.run(display=small_runs.Quiet())
    alone = elastic_trainer(tmp_path, 2, mesh((2, 2)))
    alone.run(display=small_runs.Quiet())
    digest, step = digest_of(alone), 2
    for processes, sizes in ((4, {"data": 4, "model": 1}), (2, {"data": 1, "model": 4})):
        step += 2
        folder = tmp_path / f"{processes} processes"
        folder.mkdir()
        (folder / "run").symlink_to(tmp_path / "run", target_is_directory=True)
        devices = 4 // processes
        settings = {"steps": step, "mesh": sizes}
        found = run("resumed", settings, folder, processes=processes, devices=devices)
        assert found == [found[0]] * processes
        restored, digest_after, position = found[0]
        assert (restored, position) == (digest, step)
        digest = digest_after
    logs = [
        sx.train.read_jsonl(folder / "run" / "log.jsonl")
        for folder in (tmp_path / "straight", tmp_path)
    ]
    losses = [[(r["step"], r["loss"]) for r in log if "loss" in r] for log in logs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes of memory, as Linux does")
def test_process_restores_its_shards_never_a_whole_array(tmp_path: Path):
    rows = 1 << 17  # of 4 KiB
    model = Large(rows)
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=kinds)
    sx.shard(model, mesh, small_runs.RULES)
    sx.train.checkpoint.save(model, tmp_path / "large")
    settings = {"rows": rows, "path": str(tmp_path / "large")}
    found = run("restored_large", settings, tmp_path, processes=4, devices=1, new=True)
    whole = rows * 4096
    assert [held for _, held, _ in found] == [whole // 4] * 4
    assert [first for _, _, first in found] == [rows // 4 * process for process in range(4)]
    # What is read is there twice for a while: as read, and on the device.
    assert all(most < 0.85 * whole for most, _, _ in found), found


@pytest.mark.parametrize(
    "signals",
    [[(1, signal.SIGINT)], [(0, signal.SIGTERM), (1, signal.SIGTERM)]],
    ids=["SIGINT to one", "SIGTERM to all"],
)
def test_signal_to_any_process_stops_and_saves_all(
    signals: list[tuple[int, signal.Signals]], tmp_path: Path
):
    with started("long_run", {"steps": 10**6}, tmp_path) as running:
        log = tmp_path / "run" / "log.jsonl"
        wait_for(lambda: log.exists() and log.read_text().count("\n") > 3, running)
        for index, number in signals:
            running[index].send_signal(number)
        found = ends(running, tmp_path)
    assert [each.status for each in found] == [0, 0], [each.err for each in found]
    first, second = [each.result for each in found]
    assert first == second and first[1] == "15"
    saved = [int(item.name) for item in (tmp_path / "run" / "checkpoints").iterdir()]
    assert max(saved) == first[0]
    assert f"stopped by SIGTERM; saved at step {first[0]}" in found[0].out
    assert json.loads(log.read_text().splitlines()[-1])["step"] == first[0]


def test_error_in_one_process_ends_all_and_shows(tmp_path: Path):
    with started("long_run", {"steps": 10**6, "fails": 1}, tmp_path) as running:
        begin = time.monotonic()
        found = ends(running, tmp_path)
    assert all(each.status not in (0, None) for each in found)
    assert "OSError: the disk of this process is gone" in found[1].err.splitlines()[-1]
    assert time.monotonic() - begin < SECONDS / 2


def wait_for(condition, running) -> None:
    """Waits until a condition holds; no process may end before."""
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit and all(each.poll() is None for each in running)
        time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_run_notes_other_processes_on_an_error_at_run_time(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: sx.train.Event) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: Gloo all-reduce failed")

    trainer = small_runs.make_trainer(tmp_path / "run", 2, callbacks=[fail], log_every=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="FAILED_PRECONDITION") as caught:
        trainer.run(display=small_runs.Quiet())
    notes = [note for note in getattr(caught.value, "__notes__", []) if "resume=True" in note]
    assert len(notes) == processes - 1
