# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of forms of parallelism run: their opponents compute the same."""

import json
import sys
from pathlib import Path
from types import ModuleType

import gpu_step
import jax
import parallel
import pipelines
import plan_models
import pytest


def test_parallel_times_every_form_beside_raw_jax(monkeypatch, tmp_path):
    written = run_here(parallel, tmp_path, monkeypatch)
    names = " ".join(record["name"] for record in written["records"])
    forms = ("gpipe", "circular", "ring", "experts, dropless", "experts, capacity", "ZeRO",
             "hierarchical sum", "stages, 1f1b")  # fmt: skip
    for form in forms:
        assert form.lower() in names.lower(), names
    assert all(record["median_us"] > 0 for record in written["records"])


def test_pipelines_of_all_kinds_agree_on_gradients(monkeypatch, tmp_path):
    written = run_here(pipelines, tmp_path, monkeypatch, "--rows=16", "--width=8", "--hidden=16")
    ways = {record["name"] for record in written["records"]}
    assert {"rule, gpipe", "rule, circular", "stages, 1f1b", "stages, zero-bubble"} <= ways
    assert written["failures"] == []


def test_search_of_a_published_model_includes_its_layout(monkeypatch, tmp_path):
    options = ["--compiler=estimate", "--within=1e6", "--top=3"]
    written = run_here(plan_models, tmp_path, monkeypatch, *options)
    (record,) = written["records"]
    assert record["model"] == "llama-8b" and record["target"] == "gpu:h100:1x8"
    assert "layouts fit" in record["found"] and "published" in record["published"]
    assert "schedule gpipe" in record["found"] and "failed" not in record["found"]


def test_gpu_step_reports_speed_and_memory(monkeypatch, tmp_path):
    options = ["--attention", "xla", "splash", "--others", "--precision", "fp8"]
    options += ["--decoding", "bf16", "int4"]
    written = run_here(gpu_step, tmp_path, monkeypatch, "--cpu", *options)
    steps = {record["case"]: record for record in written["records"] if "case" in record}
    assert steps.keys() == {"attention=xla", "attention=splash", "fp8"}
    assert "runs on TPUs" in steps.pop("attention=splash")["refused"]
    for record in steps.values():
        assert record["held_bytes"] == record["planned_bytes"] > 1e5
        assert record["flops"] > 1e6 and record["speed_median"] > 0
    limits = {r["decoding"]: r["limit"] for r in written["records"] if "decoding" in r}
    names = ["raw jax", "bf16, cache bf16", "bf16, cache int8", "int4, cache bf16"]
    assert list(limits) == names
    assert limits[names[0]] == limits[names[1]] < limits[names[2]] < limits[names[3]]


def run_here(program: ModuleType, folder: Path, patch: pytest.MonkeyPatch, *options: str) -> dict:
    """What a benchmark writes, run in this process, which has its devices."""
    file = folder / "figures.json"
    argv = [program.__name__, "--quick", "--json", str(file), *options]
    patch.setattr(sys, "argv", argv)
    with jax.numpy_rank_promotion("allow"):
        assert program.main() == 0
    return json.loads(file.read_text())
