# SPDX-License-Identifier: Apache-2.0
"""Measured figures of the devices of this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardax import hlo, plan
from shardax.errors import HardwareError, PlanInputError
from shardax.plan.hardware.calibration import _collectives, _DeviceFigures, _on_each
from shardax.plan.hardware.hardware import hardware_of
from tests.advice import run_advice_first

GIB = 2**30


def test_cpu_figures_are_measured_and_marked_as_such() -> None:
    cpu = plan.calibrate_cpu(8, matrix=64, megabytes=0.1, repeats=1)
    assert plan.Target(cpu, (8,)).text == "cpu:8"
    assert "measured on this machine" in cpu.sources["link_bandwidth"]
    assert 1e6 < cpu.peak("f32") < 1e14
    assert 1e6 < cpu.memory_bandwidth < 1e13
    assert 1e5 < cpu.link_bandwidth < 1e13
    assert 0 < cpu.link_latency < 1
    assert sorted(cpu.copy_bandwidth) == [
        "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"
    ]  # fmt: skip
    assert all(1e5 < rate < 1e13 for rate in cpu.copy_bandwidth.values())


@pytest.mark.parametrize(
    "kind", ["all-reduce", "all-gather", "reduce-scatter", "collective-permute"]
)
def test_measured_collective_has_no_copies_around_it(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    each = jax.ShapeDtypeStruct((8, 800), jnp.float32, sharding=sharding)
    measured = _on_each(mesh, _collectives(8)[kind])
    program = hlo.parse(jax.jit(measured).lower(each).compile().as_text())
    opcodes = [i.opcode for i in program.main.instructions]
    assert sorted(opcodes) == sorted(["parameter", "bitcast", kind, "bitcast"])


def test_measuring_takes_the_clock_that_it_is_given() -> None:
    ticks = iter(range(1_000_000))
    cpu = plan.calibrate_cpu(
        2, matrix=8, megabytes=0.001, repeats=1, clock=lambda: 3.0 * next(ticks)
    )
    # Every run takes 3 seconds by this clock, an empty call as well: a twentieth of them is left.
    assert cpu.peak("f32") == pytest.approx(2 * 8**3 / 0.15)


def test_calibrating_more_cpu_devices_than_exist_is_refused() -> None:
    with pytest.raises(PlanInputError, match="has 8 CPU devices, not 9") as caught:
        plan.calibrate_cpu(9)
    count = run_advice_first(caught.value, "sx.configure(devices=9)", "jax.device_count()")
    assert count == "9"
    with pytest.raises(PlanInputError, match=r"devices=0, but .* at least one"):
        plan.calibrate_cpu(0)


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A process with two GPUs, of which what is measured is known."""
    kind = "NVIDIA H100 80GB HBM3"
    limit = {"bytes_limit": 70 * GIB}
    device = SimpleNamespace(platform="gpu", device_kind=kind, memory_stats=lambda: limit)
    asked: list[Any] = []

    def measure(devices: Any, dtypes: Any, *sizes: Any) -> _DeviceFigures:
        asked.append((len(devices), dtypes, sizes[:3]))
        link = None if len(devices) == 1 else 3e11
        return _DeviceFigures({"f32": 4e14, "bf16": 7e14}, 3e12, 2e-6, {}, link)

    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setitem(plan.calibrate_gpu.__globals__, "_measure", measure)
    return asked


def test_gpu_calibration_keeps_and_marks_unmeasured_figures(two_gpus: list[Any]) -> None:
    gpu, known = plan.calibrate_gpu(matrix=64, repeats=3), plan.find_hardware("h100")
    assert two_gpus == [(2, ("float32", "bfloat16"), (64, 512.0, 3))]
    assert (gpu.name, gpu.peak("f32"), gpu.peak("bf16")) == ("h100", 4e14, 7e14)
    assert (gpu.peak("s8"), gpu.network_bandwidth) == (known.peak("s8"), known.network_bandwidth)
    assert (gpu.memory_bandwidth, gpu.link_bandwidth, gpu.link_latency) == (3e12, 3e11, 2e-6)
    assert (gpu.usable_bytes, gpu.memory_bytes) == (70 * GIB, known.memory_bytes)
    measured = {name for name, text in gpu.sources.items() if "plan.calibrate_gpu" in text}
    assert measured == {
        "peak_flops", "memory_bandwidth", "link_bandwidth", "link_latency", "usable_bytes",
        "memory_bytes",
    }  # fmt: skip
    assert plan.Target(gpu, (1, 2)).text == "gpu:h100:1x2"


def test_single_gpu_keeps_data_sheet_link_bandwidth(two_gpus: list[Any]) -> None:
    gpu, known = plan.calibrate_gpu(1), plan.find_hardware("h200")
    assert "plan.calibrate_gpu" not in gpu.sources["link_bandwidth"]
    assert plan.calibrate_gpu(1, like="h200").link_bandwidth == known.link_bandwidth


def test_unknown_gpus_are_refused_with_a_hint(
    two_gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = SimpleNamespace(platform="gpu", device_kind="NVIDIA X1", memory_stats=lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [unknown])
    with pytest.raises(PlanInputError, match=r"'NVIDIA X1'.*calibrate_gpu\(like='h100'\)"):
        plan.calibrate_gpu()
    assert plan.calibrate_gpu(like="h100").name == "h100"
    with pytest.raises(HardwareError, match="no hardware 'h10'"):
        plan.calibrate_gpu(like="h10")
    assert two_gpus == [(1, ("float32", "bfloat16"), (8192, 512.0, 25))]


@pytest.mark.parametrize("count", [None, 0, 3])
def test_calibrating_missing_gpus_is_refused(count: int | None) -> None:
    if jax.default_backend() == "gpu" and count is None:
        pytest.skip("this process has GPUs")
    with pytest.raises(PlanInputError, match=r"has \d GPUs.*shardax\[cuda\].*calibrate_cpu"):
        plan.calibrate_gpu(count)


def test_measured_gpu_is_near_its_data_sheet() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("this process has no GPU: run it with JAX_PLATFORMS=cuda on a machine with one")
    gpu, known = plan.calibrate_gpu(), hardware_of(jax.devices()[0])
    assert known is not None
    assert 0.3 < gpu.peak("bf16") / known.peak("bf16") < 1.2
    assert 0.5 < gpu.memory_bandwidth / known.memory_bandwidth < 1.2
