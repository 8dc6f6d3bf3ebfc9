# SPDX-License-Identifier: Apache-2.0
"""Runs beside their plans: seconds by part, the part that is off, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardax as sx
from shardax import plan
from shardax.cli.inputs import PRESETS, CommandError
from shardax.cli.planned import PlannedRun
from shardax.cli.runs import RunSettings
from shardax.errors import PlanError, PlanInputError
from shardax.hlo import Collective, ProgramFacts

CPU = plan.find_hardware("cpu").like(
    peak_flops={"f32": 1e9},
    memory_bandwidth=1e9,
    link_latency=0.0,
    copy_bandwidth={"all-reduce": 1e9},
)
TARGET = plan.Target(CPU, (8,))
SUMS = Collective("all-reduce", "ar", "f32", 100_000_000, 175e6, 8, ("data",))
LAYOUT = plan.Layout("dp", (("batch", "data"),), (("data", 8),))
BATCH = plan.ArrayLayout("batch", "batch", (16, 64), "int32", ("batch", "seq"), (("data",), ()))


def report() -> plan.LayoutReport:
    """A layout with 0.3 s of arithmetic, 0.1 s of memory beside 0.1 s of wire."""
    facts = ProgramFacts((SUMS,), matmul_flops=3e8, hbm_bytes=3e8)
    time = plan.time_band(facts, TARGET, {"data": 8})
    return plan.LayoutReport(
        LAYOUT, "fits", flops=3e8, hbm_bytes=3e8, collectives=(SUMS,), time=time, arrays=(BATCH,)
    )


def run_of(folder: Path, seconds: float, **changes: Any) -> Path:
    model = {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "mlp_dim": 256}
    run = {"model": model, "batch_size": 16, "seq_len": 64, "mesh": "data=8", **changes}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "log.jsonl").write_text(json.dumps({"tokens_per_second": 16 * 64 / seconds}))
    return folder


def check(folder: Path, seconds: float, **changes: Any) -> plan.RunCheck:
    measured = CPU.like(**changes)
    return plan.check_run(run_of(folder, seconds), report(), TARGET, measured=measured)


def test_run_at_the_planned_rates_is_as_planned(tmp_path: Path) -> None:
    found = check(tmp_path, 0.51)
    predicted = {"arithmetic": 0.3, "memory": 0.1, "wire": 0.1, "host": 0.0}
    assert found.predicted == pytest.approx(predicted)
    assert found.measured == pytest.approx(predicted | {"host": 0.01})
    assert (found.off, found.seconds) == ("", pytest.approx(0.51))
    assert str(found).endswith("The step took 1.02 times the predicted one: as planned.")


@pytest.mark.parametrize(
    ("part", "changes", "seconds"),
    [
        ("arithmetic", {"peak_flops": {"f32": 0.5e9}}, 0.8),
        ("memory", {"memory_bandwidth": 0.25e9}, 0.8),
        ("wire", {"copy_bandwidth": {"all-reduce": 0.2e9}}, 0.9),
        ("host", {}, 0.9),
    ],
)
def test_part_that_is_off_is_named(
    part: str, changes: dict[str, Any], seconds: float, tmp_path: Path
) -> None:
    found = check(tmp_path, seconds, **changes)
    assert found.off == part
    assert sum(found.measured.values()) == pytest.approx(found.seconds)
    assert f"most of it by {part} (+{seconds - 0.5:.3f} s)" in str(found)


def test_row_of_a_checked_run_is_read_and_calibrated(tmp_path: Path) -> None:
    found = plan.check_run(run_of(tmp_path, 0.5), report(), "gpu:h100:1x8")
    assert found.measured == {} and "no part can be named" in str(found)
    model, step, chip, software = plan.read_row(found.row)
    assert (model.layers, step.data, chip.name, software) == (2, 8, "h100", "xla")
    assert plan.calibrate([found.row], rounds=1)


def test_traced_layouts_have_parts_of_their_expected_time(tmp_path: Path) -> None:
    parts = plan.StepParts(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    expected = plan.ExpectedTime(66, 60, 70, parts)
    traced = dataclasses.replace(report(), time=None, expected=expected)
    found = plan.check_run(run_of(tmp_path, 70.0), traced, TARGET, measured=CPU)
    assert found.predicted == {"arithmetic": 3, "memory": 13, "wire": 30, "host": 20}
    assert found.measured == {}


def test_layouts_without_a_time_are_refused(tmp_path: Path) -> None:
    failed = plan.LayoutReport(LAYOUT, "does not fit")
    with pytest.raises(PlanInputError, match="'dp' has no predicted time"):
        plan.check_run(run_of(tmp_path, 0.5), failed, TARGET)
    with pytest.raises(PlanError, match="is no run of shardax train"):
        plan.check_run(tmp_path / "none", report(), TARGET)


def test_planned_run_trains_in_the_layout_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    other = dataclasses.replace(report(), layout=dataclasses.replace(LAYOUT, name="other"))
    plan.Plan("cpu:8", (report(), other)).to_json(file)
    best, named = PlannedRun.read(str(file)), PlannedRun.read(f"{file}:other")
    assert (best.report.layout.name, named.report.layout.name) == ("dp", "other")
    assert dict(best.named_rules.mesh or ()) == {"data": 8}
    for text in (f"{file}:third", str(tmp_path / "none.json")):
        with pytest.raises(CommandError, match="--plan"):
            PlannedRun.read(text)


def test_run_of_another_batch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.Plan("cpu:8", (report(),)).to_json(file)
    planned = PlannedRun.read(str(file))
    sizes: Any = SimpleNamespace(batch_size=16, seq_len=64)
    planned.check_sizes(sizes)
    sizes.batch_size = 8
    with pytest.raises(CommandError, match=r"batch of \(16, 64\), and the run has \(8, 64\)"):
        planned.check_sizes(sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "data=1"}, "is of the mesh data=8, and the run has none"),
        ({"mesh": ""}, "is of the mesh data=8, and the run has none"),
        ({"mesh": "data=4,model=2"}, "is of the mesh data=8, and the run has data=4,model=2"),
        ({"zero": True}, "says how the optimizer's state is laid out, and so does --zero"),
        ({"rules": None}, "is of the layout 'dp', and the run has other rules"),
        ({"rules": {"rules": [["batch", "data"], ["mlp", "data"]]}}, "has other rules"),
    ],
)
def test_run_of_another_layout_is_refused(changes: dict[str, Any], message: str) -> None:
    planned = PlannedRun("plan.json", "cpu:8", report())
    settings = RunSettings(
        PRESETS["tiny"].model, None, 16, 64, 1, 1e-3, 0, "data=8,model=1", 8, 1, 1,
        rules={"rules": [["batch", "data"]]},
    )  # fmt: skip
    planned.check_layout(settings)
    with pytest.raises(CommandError, match=message):
        planned.check_layout(dataclasses.replace(settings, **changes))


def test_run_of_another_model_is_refused() -> None:
    def model_of(embed: int) -> sx.nn.Linear:
        names = ("embed", "mlp")
        return sx.nn.Linear(embed, 8, kernel_axes=names, use_bias=False, rngs=sx.Rngs(0))

    kernel = plan.ArrayLayout(
        "model.kernel", "parameters", (4, 8), "float32", ("embed", "mlp"), ((), ())
    )
    planned = PlannedRun("plan.json", "cpu:8", dataclasses.replace(report(), arrays=(kernel,)))
    planned.check_model(model_of(4))
    with pytest.raises(CommandError, match="of 32 parameters in 1 arrays, and the run has 16 in 1"):
        planned.check_model(model_of(2))


@pytest.mark.parametrize(
    ("target", "use"), [("cpu:8", ""), ("gpu:h100:2x8", ", for plan.calibrate")]
)
def test_row_of_a_cpu_is_not_offered_for_calibration(
    target: str,
    use: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "calibrate_cpu", lambda *args, **options: CPU)
    PlannedRun("plan.json", target, report()).hold_against(run_of(tmp_path, 0.5))
    assert capsys.readouterr().out.endswith(f"row         {tmp_path / 'row.json'}{use}\n")
