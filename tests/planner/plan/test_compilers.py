# SPDX-License-Identifier: Apache-2.0
"""Compilers: which there are, meshes over absent devices, programs, and verdicts about memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax import hlo, plan
from shardax.errors import CompilerFailedError, CompilerMissingError, PlanInputError, TargetError
from shardax.plan.compile.compilers import CompilerInfo, EstimateCompiler, TpuCompiler, with_options
from shardax.plan.hardware.hardware import HARDWARE
from tests.needs import needs_compiler
from tests.planner.plan.absent import GPU, TPU

SIZES = {"data": 2, "model": 4}


def lowered_mlp(mesh: Mesh, rows: int = 256) -> jax.stages.Lowered:
    """A tensor-parallel MLP of 256 and 1024 features in float32, split over ``model``."""

    def shape(*sizes: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))

    x = shape(rows, 256, spec=PartitionSpec("data"))
    up = shape(256, 1024, spec=PartitionSpec(None, "model"))
    down = shape(1024, 256, spec=PartitionSpec("model"))
    explicit = AxisType.Explicit in mesh.axis_types

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        out = PartitionSpec("data") if explicit else None
        return jnp.matmul(jax.nn.relu(x @ up), down, out_sharding=out)

    out = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        return jax.jit(mlp, out_shardings=out).trace(x, up, down).lower()


# --- which compilers there are --------------------------------------------------------------------


def test_known_compilers_have_a_label_or_install_command() -> None:
    assert [info.kind for info in plan.known_compilers()] == ["cpu", "tpu", "gpu"]
    for info in plan.known_compilers():
        assert bool(info.label) == info.installed
        assert info.kind == "cpu" or info.install == f"pip install 'shardax[plan-{info.kind}]'"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither libtpu nor a CUDA plugin."""
    absent = tuple(
        CompilerInfo(each.kind, each.kind == "cpu", "XLA:CPU", each.install, each.note)
        for each in plan.known_compilers()
    )
    monkeypatch.setattr("shardax.plan.compile.compilers.known_compilers", lambda: absent)


@pytest.mark.parametrize(
    ("text", "extra"), [("tpu:v5e:2x4", "plan-tpu"), ("gpu:h100:1x8", "plan-gpu")]
)
def test_missing_compiler_error_names_its_extra(
    nothing_installed: None, text: str, extra: str
) -> None:
    target = plan.Target.parse(text)
    with pytest.raises(CompilerMissingError, match=rf"pip install 'shardax\[{extra}\]'"):
        plan.compiler_for(target, compiler="target")
    assert isinstance(plan.compiler_for(target), EstimateCompiler)


def test_libtpu_license_is_stated_before_installation(nothing_installed: None) -> None:
    with pytest.raises(CompilerMissingError, match="proprietary"):
        plan.compiler_for(plan.Target.parse("tpu:v5e:2x4"), compiler="target")


@pytest.mark.parametrize(
    ("text", "compiler", "tier"),
    [
        ("cpu:8", "auto", "target compiler"),
        ("cpu:8", "estimate", "target compiler"),
        ("tpu:v5e:2x4", "estimate", "cpu estimate"),
        ("gpu:h100:1x8", "estimate", "cpu estimate"),
    ],
)
def test_tiers(text: str, compiler: str, tier: str) -> None:
    found = plan.compiler_for(plan.Target.parse(text), compiler=compiler)
    assert (found.tier, found.devices_needed) == (tier, 8)
    assert found.label.endswith(", estimate") == (tier == "cpu estimate")


def test_choice_that_is_none_is_an_error() -> None:
    with pytest.raises(PlanInputError, match="'auto', 'target' or 'estimate', not 'gpu'"):
        plan.compiler_for(plan.Target.parse("cpu:8"), compiler="gpu")


def test_subprocess_environment_selects_cpu_and_device_count() -> None:
    found = plan.compiler_for(plan.Target.parse("gpu:h100:2x8"), compiler="estimate")
    assert found.environment() == {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "JAX_NUM_CPU_DEVICES": "16",
    }
    assert plan.compiler_for(plan.Target.parse("cpu:4")).environment()["JAX_NUM_CPU_DEVICES"] == "4"


# --- on CPU devices -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis_types", "expected"),
    [
        (None, (AxisType.Auto, AxisType.Auto)),
        (AxisType.Explicit, (AxisType.Explicit, AxisType.Explicit)),
        ({"model": AxisType.Explicit}, (AxisType.Auto, AxisType.Explicit)),
        ([AxisType.Manual, AxisType.Auto], (AxisType.Manual, AxisType.Auto)),
    ],
)
def test_mesh_has_requested_axes_and_types(axis_types: Any, expected: tuple[AxisType, ...]) -> None:
    mesh = plan.compiler_for(plan.Target.parse("cpu:8")).mesh(SIZES, axis_types)
    assert (dict(mesh.shape), mesh.axis_types) == (SIZES, expected)


def test_mesh_not_matching_target_is_refused() -> None:
    with pytest.raises(TargetError, match="has 4 devices"):
        plan.compiler_for(plan.Target.parse("cpu:8")).mesh({"data": 2, "model": 2})


def test_too_few_cpu_devices_error_suggests_configure() -> None:
    compiler = plan.compiler_for(plan.Target.parse("tpu:v5e:4x4"), compiler="estimate")
    with pytest.raises(PlanInputError, match=r"needs 16 CPU devices and has 8.*configure"):
        compiler.mesh({"data": 4, "model": 4})


@pytest.mark.parametrize("effort", ["screen", "full"])
def test_cpu_program_memory_matches_hand_count(effort: str) -> None:
    """Arguments 128x256 + 2 x 256x256, result 128x256, temporaries at least the hidden 128x256."""
    compiler = plan.compiler_for(plan.Target.parse("cpu:8"))
    found = compiler.compile(lowered_mlp(compiler.mesh(SIZES)), effort)
    assert found.text is not None and "all-reduce" in found.text
    assert found.peak_bytes is not None and found.temp_bytes is not None
    assert found.peak_bytes - found.temp_bytes == 4 * (2 * 128 * 256 + 2 * 256 * 256)
    assert 4 * 128 * 256 <= found.temp_bytes <= 3 * 4 * 128 * 256
    assert (found.out_of_memory, found.estimate) == (None, False)
    assert found.seconds > 0


def test_effort_that_is_none_is_an_error() -> None:
    compiler = plan.compiler_for(plan.Target.parse("cpu:8"))
    with pytest.raises(PlanInputError, match="effort is 'screen' or 'full', not 'fast'"):
        compiler.compile(lowered_mlp(compiler.mesh(SIZES)), "fast")


def test_compiler_failure_is_raised_with_its_message() -> None:
    class Broken:
        def compile(self, compiler_options: Mapping[str, Any] | None = None) -> None:
            raise RuntimeError("INTERNAL: a bug\n" + "more\n" * 30)

    compiler = plan.compiler_for(plan.Target.parse("cpu:8"))
    with pytest.raises(CompilerFailedError, match=r"(?s)XLA:CPU .*a bug.*and 11 lines more"):
        compiler.compile(Broken())  # pyright: ignore[reportArgumentType]


def test_unknown_compiler_options_are_dropped() -> None:
    compiler = plan.compiler_for(plan.Target.parse("cpu:8"))
    lowered = lowered_mlp(compiler.mesh(SIZES))
    compiled = with_options(lowered, {"xla_of_another_version": 1})
    assert compiled.as_text() == compiler.compile(lowered, "full").text
    with pytest.raises(Exception, match="not a valid"):
        with_options(lowered, {"xla_backend_optimization_level": "not a number"})


def test_estimate_is_partitioned_program_before_rewriting() -> None:
    compiler = plan.compiler_for(plan.Target.parse("tpu:v5e:2x4"), compiler="estimate")
    found = compiler.compile(lowered_mlp(compiler.mesh(SIZES)))
    assert found.estimate and found.text is not None
    arguments = 4 * (128 * 256 + 2 * 256 * 256)
    assert found.peak_bytes is not None and arguments < found.peak_bytes < 2 * arguments
    facts = hlo.read_program(found.text, SIZES, estimate=True)
    assert facts.matmul_flops == 2 * 2 * 128 * 256 * 256
    assert facts.wire_bytes() == 2 * 3 / 4 * 4 * 128 * 256


# --- absent devices -------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("text", [TPU, GPU])
def test_absent_devices_make_meshes_and_programs(text: str, axis_types: AxisType) -> None:
    """The same operations and wire bytes as on CPU, and no device of theirs in this process."""
    compiler = plan.compiler_for(plan.Target.parse(text), compiler="target")
    mesh = compiler.mesh(SIZES, axis_types)
    found = compiler.compile(lowered_mlp(mesh))
    assert compiler.tier == "target compiler" and found.text is not None
    facts = hlo.read_program(found.text, SIZES)
    assert facts.matmul_flops == 2 * 2 * 128 * 256 * 256
    assert facts.wire_bytes() == 2 * 3 / 4 * 4 * 128 * 256
    arguments = 4 * (128 * 256 + 2 * 256 * 256)
    assert found.peak_bytes is not None and arguments <= found.peak_bytes <= 3 * arguments
    assert {device.platform for device in jax.devices()} == {"cpu"}


@pytest.mark.parametrize("text", [TPU, GPU])
def test_functions_of_shardax_compile_for_absent_devices(text: str) -> None:
    compiler = plan.compiler_for(plan.Target.parse(text), compiler="target")
    mesh = compiler.mesh(SIZES)
    linear = sx.nn.Linear(256, 512, kernel_axes=("in", "out"), use_bias=False, rngs=sx.Rngs(0))
    layer = sx.abstract(linear, mesh, sx.Rules([("out", "model")]))
    rows = jax.ShapeDtypeStruct(
        (64, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    with jax.set_mesh(mesh):
        lowered = sx.jit(lambda layer, x: layer(x).sum()).trace(layer, rows).lower()
    found = compiler.compile(lowered)  # pyright: ignore[reportArgumentType]
    assert found.text is not None
    assert hlo.read_program(found.text, SIZES).matmul_flops == 2 * 32 * 256 * 128


# --- TPU ------------------------------------------------------------------------------------------

SLICES = [
    ("tpu:v4:2x2x2", {"data": 2, "model": 4}),
    ("tpu:v5e:1x1", {"data": 1, "model": 1}),
    ("tpu:v5e:2*2x4", {"slice": 2, "data": 2, "model": 4}),
    ("tpu:v5e:16x16", {"data": 64, "model": 4}),
    ("tpu:v5p:4x4x8", {"data": 8, "model": 16}),
    ("tpu:v6e:2x4", {"data": 2, "model": 4}),
    ("tpu:v7x:2x2x1", {"data": 2, "model": 4}),
    ("tpu:v7x:2*2x2x2", {"data": 4, "model": 8}),
]


@needs_compiler("tpu")
@pytest.mark.parametrize(("text", "sizes"), SLICES)
def test_slice_mesh_follows_the_arrangement(text: str, sizes: dict[str, int]) -> None:
    target = plan.Target.parse(text)
    mesh = plan.compiler_for(target, compiler="target").mesh(sizes)
    places = target.arrangement(sizes).places
    kind = target.hardware.compiler["device_kind"]
    for device, place in zip(mesh.devices.flat, places, strict=True):
        found = (getattr(device, "slice_index", 0) or 0, *device.coords, device.core_on_chip)
        expected = place if len(place) == 5 else (*place[:3], 0, place[3])
        assert (found, device.device_kind) == (expected, kind)


@needs_compiler("tpu")
@pytest.mark.parametrize("text", ["tpu:v5e:4x4", "tpu:v5p:4x4x4", "tpu:v7x:2x2x2"])
def test_arrangement_without_libtpu_equals_that_of_jax(text: str) -> None:
    from jax.experimental import mesh_utils

    target = plan.Target.parse(text)
    sizes = {"data": target.device_count // 4, "model": 4}
    compiler = plan.compiler_for(target, compiler="target")
    assert isinstance(compiler, TpuCompiler)
    ours = compiler.mesh(sizes).devices
    theirs = mesh_utils.create_device_mesh(
        tuple(sizes.values()), compiler.devices(), allow_split_physical_axes=True
    )
    assert [device.id for device in ours.flat] == [device.id for device in theirs.flat]


@needs_compiler("tpu")
def test_unknown_libtpu_topology_is_refused_before_compiling() -> None:
    chip = HARDWARE["v5e"].like(name="odd", shapes=(), pod=(16, 16))
    with pytest.raises(TargetError, match=r"no topology 'v5e:3x4'"):
        plan.compiler_for(plan.Target(chip, (3, 4)), compiler="target").mesh({"data": 12})


@needs_compiler("tpu")
def test_custom_hardware_must_name_its_libtpu_kind() -> None:
    chip = HARDWARE["v5e"].like(name="mine", compiler={})
    with pytest.raises(TargetError, match="like='v5e'"):
        plan.compiler_for(plan.Target(chip, (2, 2)), compiler="target").mesh({"data": 4})


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (
            (
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
                "temporaries (43.40G) exceeds available HBM (15.75G)."
            ),
            43.4,
        ),
        (
            (
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
                "space hbm. Used 19.54G of 15.75G hbm. Exceeded hbm capacity by 3.79G."
            ),
            19.54,
        ),
        ("Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.", None),
        ("INTERNAL: something else", None),
    ],
)
def test_requested_bytes_are_parsed_from_the_message(message: str, gib: float | None) -> None:
    found = TpuCompiler(plan.Target.parse("tpu:v5e:2x2"))._requested_bytes(message)
    assert found == (None if gib is None else round(gib * 2**30))


@needs_compiler("tpu")
def test_tpu_program_exceeding_memory_is_a_verdict() -> None:
    """The hidden activations alone are 2^22 x 256 x 4 bytes, 4 GiB, and several of them live."""
    compiler = plan.compiler_for(plan.Target.parse("tpu:v5e:2x4"), compiler="target")
    found = compiler.compile(lowered_mlp(compiler.mesh(SIZES), rows=2**25))
    assert found.text is None
    assert found.out_of_memory is not None and "RESOURCE_EXHAUSTED" in found.out_of_memory
    assert found.peak_bytes is not None and found.peak_bytes > compiler.target.limit_bytes


@needs_compiler("gpu")
def test_gpu_program_exceeding_memory_is_judged_after_compiling() -> None:
    compiler = plan.compiler_for(plan.Target.parse("gpu:h100:1x8"), compiler="target")
    found = compiler.compile(lowered_mlp(compiler.mesh(SIZES), rows=2**26))
    assert found.text is not None
    assert found.peak_bytes is not None and found.peak_bytes > compiler.target.limit_bytes
    assert found.out_of_memory is not None
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in found.out_of_memory


@needs_compiler("gpu")
def test_own_gpus_need_what_the_compiler_asks_for() -> None:
    chip = HARDWARE["h100"].like(name="mine", compiler={"major": 9})
    with pytest.raises(TargetError, match="core_count, fpus_per_core"):
        plan.compiler_for(plan.Target(chip, (1, 8)), compiler="target").mesh({"data": 8})
