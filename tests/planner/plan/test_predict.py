# SPDX-License-Identifier: Apache-2.0
"""Predicted steps: what is counted by hand, what grows with what, and the command."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import shardax as sx
from shardax import plan
from shardax.errors import PlanError, PlanInputError, RowError
from shardax.plan.timing.figures import default_figures, figure_table
from shardax.plan.timing.kernels import Kernels, Links
from shardax.plan.timing.memory import memory_bytes, saved_bytes, state_bytes

LLAMA = plan.TransformerShape(
    layers=32, embed=4096, mlp_hidden=14336, heads=32, kv_heads=8, vocab=128256
)
MIXTURE = plan.TransformerShape(
    layers=4, embed=64, mlp_hidden=96, heads=4, vocab=100, experts=8, top_k=2, expert_hidden=32
)
STEP = plan.TrainingStep(global_batch=64, sequence=4096, data=8, zero=3, microbatch=2)
ROW = {  # github.com/mosaicml/llm-foundry, scripts/train/benchmarking, H100 80GB BF16
    "id": "published",
    "complete_strict": True,
    "source": "mosaicml/llm-foundry",
    "group": "llm-foundry",
    "kind": "gpu",
    "hw": "h100-sxm",
    "chips": 8,
    "model": "mpt-7b",
    "form": "FSDP",
    "outcome": "ran",
    "arch": {
        "layers": 32, "embed": 4096, "mlp_hidden": 16384, "heads": 32, "vocab": 50368,
        "mlp_mats": 2, "tied": True,
    },
    "seq_len": 4096,
    "global_batch_seqs": 256,
    "seqs_per_dp_rank_per_microbatch": 16,
    "layout": {"dp": 8, "fsdp": 8, "zero": 3},
    "precision": "amp_bf16",
    "recompute": "full activation checkpointing",
    "step_seconds": 15.2204,
}  # fmt: skip


@pytest.fixture(scope="module")
def published() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "published.py"
    spec = importlib.util.spec_from_file_location("published", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module


def seconds(step: plan.TrainingStep, hardware: str = "h100", **options: str) -> float:
    return plan.predict(LLAMA, step, hardware, **options).seconds


def test_parameters_of_llama_8b_by_hand() -> None:
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    assert LLAMA.parameters == 32 * layer + 4096 + 2 * 128256 * 4096


def test_tokens_use_their_experts_only() -> None:
    idle = 4 * (8 - 2) * 3 * 64 * 32
    assert MIXTURE.parameters - MIXTURE.active_parameters == idle


def test_window_shortens_mean_context() -> None:
    windowed = dataclasses.replace(LLAMA, window=2, windowed_share=1.0)
    # Of four tokens the first sees one, all others two.
    assert windowed.mean_context(4) == 7 / 4
    assert LLAMA.mean_context(4) == 10 / 4


def test_mfu_counts_operations_of_the_model() -> None:
    estimate = plan.predict(LLAMA, STEP, "h100")
    products = LLAMA.parameters - 128256 * 4096
    attention = 32 * 4097 / 2 * 4096 * 2
    operations = 6 * 64 * 4096 * (products + attention)
    peak = 8 * 9.89e14
    assert estimate.mfu == pytest.approx(operations / estimate.seconds / peak)


def test_parts_sum_to_the_step() -> None:
    estimate = plan.predict(LLAMA, STEP, "h100")
    assert sum(vars(estimate.parts).values()) == pytest.approx(estimate.seconds)
    assert estimate.low < estimate.seconds < estimate.high


@pytest.mark.parametrize(("virtual", "share"), [(1, 3 / 16), (2, 3 / 32)])
def test_bubble_is_stages_over_microbatches(virtual: int, share: float) -> None:
    step = plan.TrainingStep(
        global_batch=16, sequence=4096, pipeline=4, microbatch=1, virtual=virtual
    )
    figures = {"links.network_share": 0.95, "links.switch_share": 0.95}
    parts = plan.predict(LLAMA, step, "h100", figures=figures).parts
    steady = sum(vars(parts).values()) - parts.bubble - parts.optimizer - parts.gradients
    assert parts.bubble / (steady - parts.stragglers) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(
    ("zero", "bytes_"), [(0, 16), (1, 2 + 4 + 10 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_zero_stages_divide_state(zero: int, bytes_: float) -> None:
    held = state_bytes(LLAMA, STEP.like(zero=zero)) / state_bytes(LLAMA, STEP.like(zero=0))
    assert held == pytest.approx(bytes_ / 16)


def test_gather_sends_all_parts_but_its_own() -> None:
    figures = {**default_figures(), "links.switch_share": 0.5, "links.switch_latency": 0.0}
    chip = plan.find_hardware("h100")
    links = Links(chip, figures, devices=8)
    assert links.gather(8e9, 8) == pytest.approx(7e9 / (0.5 * chip.link_bandwidth))
    assert links.reduce(8e9, 8) == pytest.approx(2 * links.gather(8e9, 8))
    assert links.gather(8e9, 1) == 0


def test_last_wave_of_tiles_costs_a_whole_one() -> None:
    figures = {**default_figures(), "kernels.wave_share": 1.0, "kernels.depth_ramp": 0.0}
    kernels = Kernels(plan.find_hardware("h100"), figures)
    rows, columns, depth = 128 * 132, 256 * 16, 8192  # sixteen waves of 132 cores
    even = kernels.product(rows, columns, depth)
    assert even == pytest.approx(2 * rows * columns * depth / kernels.wide_peak)
    assert kernels.product(rows, columns + 1, depth) == pytest.approx(even * 17 / 16, rel=1e-3)


def test_more_work_takes_more_time() -> None:
    base = seconds(STEP)
    assert base < seconds(STEP.like(global_batch=128))
    assert base < seconds(STEP.like(sequence=8192))
    assert base < seconds(STEP.like(recompute="full"))
    assert base < seconds(STEP.like(fused_attention=False))
    assert base < seconds(STEP, "a100-80")
    assert base > seconds(STEP.like(precision="fp8"))


def test_virtual_stages_shorten_pipelines() -> None:
    step = plan.TrainingStep(global_batch=16, sequence=4096, pipeline=8, microbatch=1)
    bubbles = [
        plan.predict(LLAMA, step.like(virtual=parts), "h100").parts.bubble for parts in (1, 2, 4)
    ]
    assert bubbles == sorted(bubbles, reverse=True)


def test_recomputation_needs_less_memory() -> None:
    whole = plan.predict(LLAMA, STEP, "h100").memory_bytes
    assert plan.predict(LLAMA, STEP.like(recompute="full"), "h100").memory_bytes < whole


def test_sequence_shards_divide_saved_activations() -> None:
    step = STEP.like(data=4, context=1, global_batch=32)
    one, two = (
        saved_bytes(LLAMA, step.like(context=size, data=4 // size), "xla") for size in (1, 2)
    )
    assert one == 2 * two > 0


def test_step_without_room_does_not_fit() -> None:
    step = plan.TrainingStep(global_batch=8, sequence=4096)
    assert not plan.predict(LLAMA, step, "h100").fits
    assert plan.predict(LLAMA, STEP.like(data=64, recompute="full"), "h100").fits


def test_copies_and_updates_need_memory() -> None:
    step = plan.TrainingStep(global_batch=8, sequence=256, data=8, zero=1, recompute="full")
    layers, tables = 32 * (LLAMA.attention_parameters + 3 * 4096 * 14336 + 2 * 4096), 2 * 128256
    parameters = layers + tables * 4096
    assert state_bytes(LLAMA, step) == (2 + 4 + 10 / 8) * parameters
    copied = step.like(gradient_copy_bytes=2)
    assert state_bytes(LLAMA, copied) == (2 + 6 + 10 / 8) * parameters

    def gigabytes(step: plan.TrainingStep) -> float:
        figures = default_figures() | {"memory.gpu_share": 1.0, "memory.gpu_runtime": 0.0}
        return memory_bytes(LLAMA, step, plan.find_hardware("h100"), "pytorch", figures) / 1e9

    buckets = gigabytes(step.like(bucket_elements=5e8)) - gigabytes(step)
    assert buckets == pytest.approx(2 * 2 * 0.5)
    update = gigabytes(step.like(update_bytes=64))  # more than activations, which are gone then
    assert update == pytest.approx(state_bytes(LLAMA, step) / 1e9 + 64 * parameters / 8 / 1e9)


# Published memory of a device, in bytes: InternLM/InternEvo, doc/en/train_performance.md;
# pytorch/torchtitan, docs/performance.md; bigscience-workshop/bigscience, train/tr11-176B-ml.
EIGHT_BILLION = {
    "layers": 32, "embed": 4096, "mlp_hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256
}  # fmt: skip
TWENTY_BILLION = {"layers": 60, "embed": 5120, "mlp_hidden": 13824, "heads": 40, "vocab": 103168}
BLOOM = {
    "layers": 70, "embed": 14336, "mlp_hidden": 57344, "heads": 64, "vocab": 250880,
    "mlp_mats": 2, "tied": True,
}  # fmt: skip
MEMORY_ROWS = {
    "internevo": (78e9, {
        "arch": TWENTY_BILLION, "source": "InternLM/InternEvo", "hw": "a800-80", "chips": 8,
        "seq_len": 2048, "global_batch_seqs": 32, "seqs_per_dp_rank_per_microbatch": 1,
        "layout": {"dp": 8, "fsdp": 8, "zero": 3}, "recompute": "full",
    }),
    "torchtitan": (76.8 * 2**30, {
        "arch": EIGHT_BILLION, "source": "pytorch/torchtitan", "hw": "h100-hbm2e-96", "chips": 8,
        "seq_len": 8192, "global_batch_seqs": 16, "layout": {"dp": 8, "fsdp": 8, "zero": 3},
        "precision": "fp8", "recompute": "selective",
    }),
    "bigscience": (73e9, {
        "arch": BLOOM, "source": "bigscience-workshop/bigscience", "hw": "a100-80", "chips": 384,
        "seq_len": 2048, "global_batch_seqs": 2048, "seqs_per_dp_rank_per_microbatch": 4,
        "layout": {"dp": 8, "zero": 1, "tp": 4, "pp": 12}, "recompute": "full",
        "attention_kernel": "Megatron fused softmax",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_ROWS)
def test_published_memory_is_within_a_tenth(name: str) -> None:
    measured, row = MEMORY_ROWS[name]
    model, step, hardware, software = plan.read_row(row)
    estimate = plan.predict(model, step, hardware, software=software)
    assert estimate.memory_bytes == pytest.approx(measured, rel=0.1) and estimate.fits


def test_published_step_without_memory_does_not_fit() -> None:
    _, row = MEMORY_ROWS["bigscience"]
    whole = {**row, "layout": {"dp": 16, "zero": 1, "tp": 4, "pp": 6}}
    whole |= {"arch": BLOOM | {"layers": 100, "embed": 12288, "mlp_hidden": 49152}}
    model, step, hardware, software = plan.read_row(whole | {"seqs_per_dp_rank_per_microbatch": 1})
    assert not plan.predict(model, step, hardware, software=software).fits


def test_broadcasts_of_many_owners_take_longer() -> None:
    step = plan.TrainingStep(global_batch=512, sequence=2048, data=512, zero=1, gradient_bytes=2)
    sent = step.like(broadcast_parameters=True)
    whole, group = (seconds(s, "a100-80", software="pytorch") for s in (sent, sent.like(shards=8)))
    assert seconds(step, "a100-80", software="pytorch") < group < whole


def test_figures_have_units_and_lie_within_bounds() -> None:
    for name, figure in figure_table().items():
        low, high = figure.bounds
        assert low <= figure.value <= high and low <= figure.prior <= high, name
        assert figure.unit and figure.source and figure.what, name


def test_software_has_at_most_six_figures() -> None:
    sections = [name.partition(".")[0] for name in figure_table()]
    for software in ("xla", "megatron", "pytorch", "pytorch-compile"):
        assert sections.count(software) <= 6


def test_unknown_software_is_refused() -> None:
    with pytest.raises(PlanInputError, match="'xla', 'megatron'"):
        seconds(STEP, software="keras")


def test_impossible_steps_are_refused() -> None:
    with pytest.raises(PlanInputError, match="tensor is 0"):
        plan.TrainingStep(global_batch=1, sequence=8, tensor=0)
    with pytest.raises(PlanInputError, match="precision is 'int3'"):
        plan.TrainingStep(global_batch=1, sequence=8, precision="int3")


def test_calibration_moves_towards_measured_seconds() -> None:
    model, step, hardware, software = plan.read_row(ROW)
    measured = 1.3 * plan.predict(model, step, hardware, software=software).seconds
    figures = plan.calibrate([{**ROW, "step_seconds": measured}] * 12, rounds=10)
    fitted = plan.predict(model, step, hardware, software=software, figures=figures).seconds
    assert fitted == pytest.approx(measured, rel=0.1)


def test_row_is_predicted_without_its_result(published: ModuleType) -> None:
    prediction = published.predict_row(ROW)
    assert prediction == published.predict_row({**ROW, "step_seconds": None})
    assert prediction["seconds"] == pytest.approx(ROW["step_seconds"], rel=0.2)


def test_command_writes_skipped_rows_with_reasons(published: ModuleType, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "id": "bare", "arch": None}, {**ROW, "id": "odd", "hw": "abacus"}]
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert published.main(["--rows", str(source), "--json", str(out)]) == 0
    first, bare, odd = json.loads(out.read_text())
    assert list(first) == ["id", "seconds", "low", "high", "memory_bytes", "skipped"]
    assert first["skipped"] is None and first["low"] < first["seconds"] < first["high"]
    assert bare["seconds"] is None and "layers" in bare["skipped"]
    assert odd["seconds"] is None and "abacus" in odd["skipped"]


def test_command_prints_worst_rows(
    published: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(ROW))
    assert published.main(["--rows", str(source)]) == 0
    text = capsys.readouterr().out
    assert "median error" in text and "worst ten" in text and "mpt-7b, h100-sxm x 8" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": 3}, "global_batch=64 must be a multiple of data=3"),
        ({"data": 8.0}, r"data is 8\.0; a degree is an integer"),
        ({"devices": 7}, "devices=7 must be the product of degrees, 8"),
        ({"expert": 2}, "expert=2 must be 1, as the model has no experts"),
        ({"microbatch": 3}, "microbatch=3 must be a divisor of the 8 sequences"),
        ({"pipeline": 64}, "pipeline=64 must be at most 32 layers"),
        ({"recompute": "some"}, "recompute='some' must be 'none', 'full'"),
        ({"slices": 3}, "slices=3 must be a divisor of the 8 devices"),
        ({"tensor": 5}, "tensor=5 must be a divisor of 32 heads"),
        ({"virtual": 2}, "virtual=2 must be 1, as there is no pipeline"),
        ({"zero": 4}, "zero=4 must be 0, 1, 2 or 3"),
        ({"shards": 3}, "shards=3 must be a divisor of the 8 devices of data and context, or 0"),
        ({"shards": 16}, "shards=16 must be a divisor of the 8 devices"),
        ({"context": 3}, "context=3 must be a divisor of sequence=4096"),
        (
            {"context": 8, "tensor": 8, "context_kind": "ulysses"},
            "context=8 must be a divisor of the 4 heads of a tensor shard",
        ),
        ({"offloaded_layers": 33}, "offloaded_layers=33 must be at most 32 layers"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(changes: dict[str, Any], message: str) -> None:
    options: Any = {"global_batch": 64, "sequence": 4096, "data": 8, **changes}
    with pytest.raises(PlanInputError, match=message):
        plan.predict(LLAMA, plan.TrainingStep(**options), "h100")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sequence_parallel", "no", "True or False"),
        ("split_stream", 1, "True or False"),
        ("fused_attention", "false", "True or False"),
        ("broadcast_parameters", 0, "True or False"),
        ("overlap_experts", "off", "True or False"),
        ("host_optimizer", "no", "True or False"),
        ("overlap_tensor", "no", "True, False or None"),
        ("overlap_gradients", 1, "True, False or None"),
        ("state_bytes", -1, "a finite number of at least 0"),
        ("state_bytes", "16", "a finite number of at least 0"),
        ("gradient_bytes", float("nan"), "a finite number of at least 0"),
        ("gradient_copy_bytes", -2, "a finite number of at least 0"),
        ("update_bytes", float("inf"), "a finite number of at least 0"),
        ("bucket_elements", True, "a finite number of at least 0"),
        ("capacity_factor", "1", "a finite number of at least 0"),
        ("microbatch", "2", "a finite number of at least 0"),
        ("global_batch", float("inf"), "a finite number above 0"),
        ("sequence", float("inf"), "an integer of at least 1"),
        ("sequence", 4096.5, "an integer of at least 1"),
        ("offloaded_layers", -1, "an integer of at least 0"),
        ("offloaded", "query_proj", "a tuple of names"),
        ("recompute", True, "a text"),
    ],
)
def test_training_step_refuses_values_of_other_kinds(
    name: str, value: object, expected: str
) -> None:
    options: Any = {"global_batch": 64, "sequence": 4096, name: value}
    with pytest.raises(PlanInputError, match=f"^{name}={value!r} must be {expected}.$"):
        plan.TrainingStep(**options)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mlp_matrices", "3", "an integer of at least 1"),
        ("head_dim", 64.5, "an integer of at least 0"),
        ("experts", "8", "an integer of at least 0"),
        ("window", -1, "an integer of at least 0"),
        ("tied", "no", "True or False"),
        ("windowed_share", 1.5, "a number from 0 to 1"),
    ],
)
def test_transformer_shape_refuses_values_of_other_kinds(
    name: str, value: object, expected: str
) -> None:
    sizes: Any = {"layers": 2, "embed": 64, "mlp_hidden": 64, "heads": 2, "vocab": 64, name: value}
    with pytest.raises(PlanInputError, match=f"^{name}={value!r} must be {expected}.$"):
        plan.TransformerShape(**sizes)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(PlanInputError, match="kv_heads=5 must be a divisor of heads=32"):
        plan.TransformerShape(layers=2, embed=64, mlp_hidden=64, heads=32, kv_heads=5, vocab=64)


def test_cpu_and_unusable_figures_are_refused() -> None:
    step = plan.TrainingStep(global_batch=8, sequence=4096, data=8)
    with pytest.raises(PlanInputError, match="hardware='cpu' must be a GPU or TPU"):
        plan.predict(LLAMA, step, "cpu")
    with pytest.raises(PlanInputError, match=r"links\.switch_share=nan must be a finite number"):
        plan.predict(LLAMA, step, "h100", figures={"links.switch_share": float("nan")})
    text: Any = "x"
    with pytest.raises(PlanInputError, match=r"links\.switch_share='x' must be a finite number"):
        plan.predict(LLAMA, step, "h100", figures={"links.switch_share": text})
    with pytest.raises(PlanInputError, match="figures is a str, not a mapping of names"):
        plan.predict(LLAMA, step, "h100", figures=text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_second": 0.5}, r"^Row 1: A row has no 'step_second'"),
        ({"hw": "h1000"}, r"^Row 1: .*h1000"),
        ({"hw": "cpu"}, r"^Row 1: hw is 'cpu'; the time model is of GPUs and TPUs"),
        ({"optimizer": "adan"}, r"^Row 1: The row's optimizer 'adan' is not known"),
        ({"layout": {"dp": 3}}, r"^Row 1: devices=8 must be the product of degrees, 3"),
        ({"layout": {"data": 3}}, r"^Row 1: layout of a row has no 'data'"),
        ({"step_seconds": "0.5"}, r"^Row 1: step_seconds is '0.5'; it is a number, or None"),
    ],
)
def test_calibrate_refuses_rows_by_number(changes: dict[str, Any], message: str) -> None:
    bare = {name: value for name, value in ROW.items() if name != "step_seconds"}
    bare |= {"chips": 8, "devices": 8}
    with pytest.raises(RowError, match=message):
        plan.calibrate([ROW, {**bare, **changes}])


@pytest.mark.parametrize(
    ("rows", "rounds", "message"),
    [
        (ROW, 1, "rows is a dict, not a list of rows"),
        (None, 1, "rows is a NoneType, not a list of rows"),
        ([ROW], 0, "rounds=0 must be an integer of at least 1"),
        ([None], 1, "Row 0: A row is a NoneType"),
    ],
)
def test_calibrate_refuses_what_is_no_list_of_rows(rows: Any, rounds: int, message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        plan.calibrate(rows, rounds=rounds)


def test_rows_without_usable_seconds_are_left_out() -> None:
    sizes = {"layers": 2, "embed": 64, "mlp_hidden": 64, "heads": 2, "vocab": 64}
    row = {"arch": sizes, "hw": "h100", "chips": 8, "seq_len": 64, "global_batch_seqs": 16}
    for seconds_of_step in (float("nan"), -1.0, None):
        with pytest.raises(PlanInputError, match="No row can be predicted"):
            plan.calibrate([{**row, "step_seconds": seconds_of_step}])


RUN: dict[str, Any] = {
    "model": {"vocab_size": 256, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "mlp_dim": 256},
    "batch_size": 16,
    "seq_len": 64,
    "mesh": "data=4, model=2",
}


def write_run(folder: Path, log: str, **changes: Any) -> Path:
    (folder / "run.json").write_text(json.dumps({**RUN, **changes}))
    (folder / "log.jsonl").write_text(log)
    return folder


LOG = '{"step": 2, "eval_loss": 3.0}\n' + "".join(
    f'{{"step": {step}, "tokens_per_second": {rate}}}\n'
    for step, rate in ((5, 1024.0), (10, 2048.0), (15, 9999.0))
)


def test_run_is_a_row_with_its_median_step(tmp_path: Path) -> None:
    row = plan.read_run(write_run(tmp_path, LOG), "h100")
    assert row["step_seconds"] == 16 * 64 / 2048
    model, step, chip, software = plan.read_row(row)
    assert (model.layers, model.embed, chip.name, software) == (2, 64, "h100", "xla")
    assert (step.data, step.tensor, step.zero, step.device_count) == (4, 2, 0, 8)


@pytest.mark.parametrize(
    ("rules", "mesh", "degrees"),
    [
        ([["batch", "data"], ["embed", "data"]], "data=4", (4, 1, 3, 4)),
        ([["batch", ["data", "model"]]], "data=4, model=2", (8, 1, 0, 1)),
        ([["batch", "data"], ["mlp", "model"]], "data=4, model=2", (4, 2, 0, 1)),
    ],
)
def test_run_has_the_degrees_of_its_rules(
    rules: list[Any], mesh: str, degrees: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_run(tmp_path, LOG, rules={"rules": rules}, mesh=mesh)
    step = plan.read_row(plan.read_run(folder, "h100"))[1]
    assert (step.data, step.tensor, step.zero, step.shard_count) == degrees


@pytest.mark.parametrize(
    ("settings", "fused", "precision"),
    [
        ({}, False, "f32"),
        ({"attention": "xla", "precision": "fp8"}, False, "fp8"),
        ({"attention": "splash", "precision": "layers=fp8-delayed"}, True, "fp8"),
        ({"attention": "auto"}, True, "f32"),
    ],
)
def test_run_has_its_kernel_and_its_precision(
    settings: dict[str, Any], fused: bool, precision: str, tmp_path: Path
) -> None:
    step = plan.read_row(plan.read_run(write_run(tmp_path, LOG, **settings), "h100"))[1]
    assert (step.fused_attention, step.precision) == (fused, precision)


def test_calibration_by_a_run_moves_its_prediction(tmp_path: Path) -> None:
    model = {"vocab_size": 32000, "num_layers": 8, "embed_dim": 2048, "num_heads": 16}
    sizes = {"model": {**model, "mlp_dim": 8192, "dtype": "bfloat16"}, "seq_len": 2048}
    folder = write_run(tmp_path, LOG, **sizes, batch_size=64, mesh="data=8")
    row = dict(plan.read_run(folder, "h100"))
    shape, step, chip, software = plan.read_row(row)
    before = plan.predict(shape, step, chip, software=software)
    row["step_seconds"] = 1.3 * before.seconds
    mine = chip.like(name="mine", time_figures=plan.calibrate([row] * 8))
    after = plan.predict(shape, step, mine, software=software)
    assert after.seconds == pytest.approx(row["step_seconds"], rel=0.1)


@pytest.mark.parametrize(
    ("log", "changes", "message"),
    [
        ("", {}, "the log says no tokens_per_second yet"),
        (LOG, {"source": "llama"}, "trains a published model"),
        (LOG, {"precision": "attn=none,layers=fp8"}, "some products of the run were in fp8"),
        (LOG, {"mesh": "data"}, "run.json is damaged"),
        (LOG, {"mesh": "data=0"}, "data=0 must be an integer of at least 1"),
        (LOG, {"batch_size": "16"}, "batch_size='16' must be an integer"),
        ('{"tokens_per_second": Infinity}', {}, "no tokens_per_second yet"),
        ('{"tokens_per_second": true}', {}, "no tokens_per_second yet"),
        (LOG, {"model": None}, "trains a published model"),
        ("{", {}, "the run cannot be read"),
        ("[" * 10**5, {}, "the run cannot be read"),
    ],
)
def test_runs_without_a_measurement_are_refused(
    log: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        plan.read_run(write_run(tmp_path, log, **changes), "h100")


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is no run of shardax train"):
        plan.read_run(tmp_path, "h100")


def test_unknown_time_figures_of_hardware_are_refused() -> None:
    step = plan.TrainingStep(global_batch=8, sequence=4096, data=8)
    mine = plan.find_hardware("h100").like(time_figures={"hopper.speed": 1.0})
    with pytest.raises(PlanInputError, match=r"There is no figure 'hopper\.speed'"):
        plan.predict(LLAMA, step, mine)


def test_published_steps_are_the_nearest_of_each_model() -> None:
    steps = plan.published_steps("v5p", parameters=7e10, chips=512)
    assert [step.hardware for step in steps[:2]] == ["v5p", "v5p"]
    assert len({(step.model, step.hardware) for step in steps}) == len(steps) == 3
    assert all(0.1 < step.mfu < 0.8 and ":" in step.source for step in steps)
    assert plan.published_steps("cpu", parameters=7e10, chips=8) == ()


def test_plan_lists_published_steps_beside_expected_times() -> None:
    def loss(weight: Any, x: Any) -> Any:
        return (x @ weight.value).sum()

    weight = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 256)), axes=("embed", "mlp"))
    x = plan.NamedShape((4096, 64), "bfloat16", ("batch", "embed"))
    mine = plan.Target(plan.find_hardware("h100").like(name="mine"), (1, 8))
    for target, listed in (("gpu:h100:1x8", True), ("cpu:8", False), (mine, False)):
        found = plan.search(loss, (weight, x), target, effort="trace", meshes=[{"data": 8}])
        assert ("Published steps of models and hardware like these" in str(found)) == listed


def test_published_table_and_plot_are_written(published: ModuleType, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {**ROW, "outcome": "ran", "source": "mine:table", "complete_strict": True}
    rows.write_text(json.dumps(row) + "\n")
    table, plot = tmp_path / "table.json", tmp_path / "plot.svg"
    assert published.main(["--rows", str(rows), "--table", str(table)]) == 0
    [entry] = json.loads(table.read_text())["rows"]
    assert entry[-1] == "mine:table" and entry[2] == plan.read_row(row)[2].name
    assert published.main(["--rows", str(rows), "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()
