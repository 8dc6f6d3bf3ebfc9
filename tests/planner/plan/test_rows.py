# SPDX-License-Identifier: Apache-2.0
"""Rows of published steps: what their words mean for model, step, hardware and software."""

from __future__ import annotations

from typing import Any

import pytest

from shardax import plan
from shardax.errors import PlanInputError, RowError

ROW: dict[str, Any] = {
    "arch": {"layers": 8, "embed": 1024, "mlp_hidden": 4096, "heads": 16, "vocab": 32000},
    "hw": "h100",
    "chips": 16,
    "seq_len": 2048,
    "global_batch_seqs": 64,
}


def model_of(**arch: Any) -> plan.TransformerShape:
    return plan.read_row({**ROW, "arch": {**ROW["arch"], **arch}})[0]


def step_of(**changes: Any) -> plan.TrainingStep:
    return plan.read_row({**ROW, **changes})[1]


def chip_of(**changes: Any) -> plan.Hardware:
    return plan.read_row({**ROW, **changes})[2]


def test_row_of_many_words_is_one_step() -> None:
    layout = {
        "dp": 4, "fsdp": 4, "tp": 2, "sp": True, "cp": 2, "pp": 2, "vpp": 2, "ep": 4,
        "async_tp": True, "moe_a2a_overlap": True, "cuda_graph_scope": "[attn]",
    }  # fmt: skip
    words = {"layout": layout, "grad_accum": 8, "precision": "fp8", "offload": "3 layers, to host"}
    mixture = ROW["arch"] | {"experts": 8}
    model, step, chip, software = plan.read_row(
        {**ROW, **words, "chips": 32, "arch": mixture, "source": "NVIDIA/Megatron-LM"}
    )
    assert (model.experts, model.top_k, chip.name, software) == (8, 1, "h100", "megatron")
    assert step == plan.TrainingStep(
        global_batch=64, sequence=2048, devices=32, data=4, zero=3, shards=4, tensor=2,
        sequence_parallel=True, context=2, pipeline=2, virtual=2, expert=4, microbatch=2,
        precision="fp8", recompute="none", state_bytes=18, gradient_bytes=4,
        overlap_tensor=True, overlap_experts=True, graphs="layer", offloaded_layers=3,
    )  # fmt: skip


def test_row_of_sizes_alone_has_common_defaults() -> None:
    model, step, chip, software = plan.read_row(ROW)
    assert model == plan.TransformerShape(
        layers=8, embed=1024, mlp_hidden=4096, heads=16, vocab=32000
    )
    assert step == plan.TrainingStep(
        global_batch=64, sequence=2048, devices=16, data=16, zero=1, state_bytes=18
    )
    assert (chip, software) == (plan.find_hardware("h100"), "untuned")


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (None, "bf16"),
        ("BF16 mixed", "bf16"),
        ("float32", "f32"),
        ("fp16 with loss scaling", "fp16"),
        ("FP8 current scaling", "fp8"),
        ("fp8 rowwise", "fp8-row"),
        ("FP8-MX", "mxfp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("int8", "int8"),
        ("AQT int8 (not fp8)", "int8"),
        ("fp8 e4m3 hybrid", "fp8"),
        ("bf16 with fp32 accumulation", "bf16"),
    ],
)
def test_precision_in_words_is_one_of_the_model(words: str | None, precision: str) -> None:
    assert step_of(precision=words).precision == precision


@pytest.mark.parametrize(
    ("words", "software"),
    [
        ({"source": "AI-Hypercomputer/maxtext", "kind": "tpu"}, "xla"),
        ({"source": "pytorch/xla", "kind": "tpu"}, "xla"),
        ({"source": "AI-Hypercomputer/maxtext", "kind": "gpu"}, "xla"),
        ({"source": "pytorch/torchtitan"}, "pytorch-compile"),
        ({"group": "llm-foundry"}, "pytorch"),
        ({"source": "NVIDIA/NeMo"}, "megatron"),
        ({"source": "a paper", "form": "FSDP2"}, "untuned"),
        ({"source": "FlagOpen/FlagPerf:training/nvidia/llama3_8B-megatron"}, "untuned"),
        ({"source": "a paper", "kind": "tpu", "hw": "v5e"}, "untuned"),
        ({"source": "a paper", "software": "megatron"}, "megatron"),
        ({"source": "pytorch/pytorch", "compile": True}, "pytorch-compile"),
    ],
)
def test_software_is_that_of_the_source(words: dict[str, str], software: str) -> None:
    assert plan.read_row({**ROW, **words})[3] == software


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({"source": "jax"}, (2, 14, 0)),
        ({"source": "megatron"}, (4, 18, 0)),
        ({"source": "megatron", "precision": "mxfp8"}, (2, 16, 0)),
        ({"source": "megatron", "layout": {"mixed_precision_mode": "PURE"}}, (2, 12, 0)),
        ({"source": "pytorch"}, (4, 16, 4)),
        ({"source": "internlm/internevo"}, (2, 16, 10)),
        ({"source": "deepspeed", "precision": "fp16"}, (2, 16, 4)),
        ({"source": "deepspeed", "precision": "bf16"}, (4, 18, 4)),
    ],
)
def test_software_has_its_bytes_of_a_parameter(
    changes: dict[str, Any], states: tuple[int, ...]
) -> None:
    step = step_of(**changes)
    assert (step.gradient_bytes, step.state_bytes, step.update_bytes) == states


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        (None, "none"),
        ("minimal_with_context", "minimal_with_context"),
        ("selective: core_attn", "selective: core_attn"),
        ("full, block, 5 layers", "full, block, 5 layers"),
    ],
)
def test_policy_of_a_source_is_kept_in_its_words(words: str | None, policy: str) -> None:
    assert step_of(recompute=words).recompute == policy


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "step"),
        ({"cuda_graph_scope": "attn, mlp"}, "layer"),
        ({"cuda_graph_impl": "none"}, ""),
    ],
)
def test_graphs_are_of_layers_or_the_step(layout: dict[str, str], graphs: str) -> None:
    assert step_of(layout=layout).graphs == graphs


@pytest.mark.parametrize(
    ("words", "microbatch"),
    [({"grad_accum": 2}, 2), ({"seqs_per_dp_rank_per_microbatch": 1, "grad_accum": 2}, 1), ({}, 0)],
)
def test_accumulated_gradients_give_the_microbatch(words: dict[str, int], microbatch: int) -> None:
    assert step_of(**words).microbatch == microbatch


def test_shards_of_pytorch_span_context_too() -> None:
    layout = {"dp": 8, "cp": 2, "fsdp": 4}
    shards = [step_of(layout=layout, source=source).shards for source in ("pytorch", "nemo")]
    assert shards == [8, 4]
    grouped = step_of(layout={"dp": 16, "zero": 1, "zero1_group": 8})
    assert (grouped.zero, grouped.shard_count) == (1, 8)


@pytest.mark.parametrize(
    ("hardware", "note", "node_size", "gigabits"),
    [
        ("h100", "8 x 400 Gb InfiniBand", 8, 400),
        ("h100-sxm", "4 x 200 Gb", 8, 100),
        ("a100-80", "4 x HDR 200 Gb", 8, 100),
        ("a100-80", "800 Gbps node-node", 8, 100),
        ("v100-32", "16 nodes x 8 V100, 1 x 100 Gb", 8, 12.5),
        ("v100-32", "", 4, 100),
    ],
)
def test_notes_say_the_network_of_a_node(
    hardware: str, note: str, node_size: int, gigabits: float
) -> None:
    chip = chip_of(hw=hardware, hw_note=note)
    assert (chip.node_size, chip.network_bandwidth * 8 / 1e9) == (node_size, gigabits)


def test_chip_of_other_notes_leaves_hardware_as_it_is() -> None:
    known = plan.find_hardware("v5e")
    assert chip_of(hw="v5e", kind="tpu", hw_note="8 x 400 Gb") == known


@pytest.mark.parametrize(
    ("arch", "window", "share"),
    [
        ({"sliding_window": 512, "local_global": "5 local : 1 global"}, 512, 5 / 6),
        ({"sliding_window": 512}, 512, 0.5),
        ({"local_global": "5 local : 1 global"}, 0, 0.0),
    ],
)
def test_windowed_layers_are_those_called_local(
    arch: dict[str, Any], window: int, share: float
) -> None:
    model = model_of(**arch)
    assert (model.window, model.windowed_share) == (window, share)


def test_ranks_are_those_of_latent_attention_alone() -> None:
    ranks = {
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope": 32, "qk_rope": 16, "v_head": 24,
        "head_dim": 128,
    }  # fmt: skip
    latent, plain = model_of(**ranks, attention_type="mla"), model_of(**ranks)
    sizes: dict[str, Any] = {
        "layers": 8,
        "embed": 1024,
        "mlp_hidden": 4096,
        "heads": 16,
        "vocab": 32000,
    }
    assert latent == plan.TransformerShape(
        **sizes, q_rank=96, kv_rank=64, head_dim=32, rope_dim=16, value_dim=24
    )
    assert plain == plan.TransformerShape(**sizes, head_dim=128)


def test_learned_positions_are_as_many_as_tokens() -> None:
    learned = model_of(pos="learned absolute")
    assert learned.parameters - model_of(pos="rope").parameters == 2048 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": None}, "The row says no seq_len"),
        ({"global_batch_seqs": None}, "The row says no global_batch_seqs"),
        ({"chips": None}, r"The row says no chips, devices or layout\.dp"),
        ({"arch": {"layers": 8}}, "The row says no embed, mlp_hidden, heads, vocab of the model"),
        ({"arch": None}, "The row says no layers, embed, mlp_hidden, heads, vocab"),
        ({"layout": {"dp": 3}}, "devices=16 must be the product of degrees, 3"),
    ],
)
def test_rows_without_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        plan.read_row({**ROW, **changes})


MIXTURE = {**ROW["arch"], "experts": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "lorra"}, "task 'lorra' is not known; it is 'pretrain', 'sft', 'lora'"),
        ({"precision": "bf61"}, "precision 'bf61' is not known; it is 'bf16', 'fp16'"),
        ({"precision": "mxfp4"}, "precision 'mxfp4' is not known"),
        ({"precision": "half"}, "precision 'half' is not known"),
        ({"attention_kernel": "sotfmax"}, "attention_kernel 'sotfmax' is not known; it is 'flash'"),
        ({"recompute": "our own policy"}, "recompute='our own policy' must be 'none', 'full'"),
        ({"recompute": "selective: layernrom"}, "names 'layernrom'; modules are core_attn"),
        ({"recompute": "custom (outproj=device)"}, "names 'outproj'; activations are decoder_"),
        ({"offload": "everything"}, "offload 'everything' is not known; it is 'none', "),
        ({"optimizer": "sofia"}, "optimizer 'sofia' is not known; it is 'adam'"),
        ({"software": "keras"}, "software 'keras' is not known; it is 'xla', 'megatron'"),
        ({"seqlen": 8}, r"A row has no 'seqlen'\. Did you mean 'seq_len'\? It may have arch, "),
        ({"arch": {**ROW["arch"], "expertz": 8}}, "arch of a row has no 'expertz'"),
        ({"arch": {**ROW["arch"], "attention_type": "sparse"}}, "attention_type 'sparse' is not"),
        ({"layout": {"pipeline": 4}}, "layout of a row has no 'pipeline'"),
        ({"layout": {"cp_kind": "circle"}}, "cp_kind 'circle' is not known; it is 'ring'"),
        ({"optimizer": "not adam"}, "optimizer 'not adam' is not known"),
        ({"optimizer": "adamant"}, "optimizer 'adamant' is not known"),
        ({"attention_kernel": "no flash"}, "attention_kernel 'no flash' is not known"),
        ({"seq_len": "2048"}, "seq_len is '2048'; it is an integer of at least 1"),
        ({"seq_len": 2048.5}, "seq_len is 2048.5; it is an integer"),
        ({"global_batch_seqs": 0}, "global_batch_seqs is 0; it is a positive number"),
        ({"global_batch_seqs": float("nan")}, "global_batch_seqs is nan; it is a positive"),
        ({"chips": 0}, "chips is 0; it is an integer of at least 1"),
        ({"grad_accum": "four"}, "grad_accum is 'four'; it is a positive number"),
        ({"layout": "fsdp"}, "layout is 'fsdp'; it is a table"),
        ({"arch": "llama"}, "arch is 'llama'; it is a table"),
        ({"arch": {**ROW["arch"], "tied": "no"}}, "tied is 'no'; it is true or false"),
        ({"layout": {"sp": "no"}}, "sp is 'no'; it is true or false"),
        ({"layout": {"moe_a2a_overlap": "false"}}, "moe_a2a_overlap is 'false'; it is true or"),
        ({"layout": {"tp": -2}}, "tp is -2; it is an integer of at least 1"),
        ({"layout": {"tp": 2.7}}, "tp is 2.7; it is an integer of at least 1"),
        ({"layout": {"tp": "two"}}, "tp is 'two'; it is an integer of at least 1"),
        ({"layout": {"ep": 0.5}}, "ep is 0.5; it is an integer of at least 1"),
        ({"layout": {"fsdp": -4}}, "fsdp is -4; it is an integer of at least 0"),
        ({"layout": {"moe_router_num_groups": "x"}}, "moe_router_num_groups is 'x'; it is an int"),
        ({"layout": {"capacity_factor": float("nan")}}, "capacity_factor is nan; it is a number"),
        ({"layout": {"zero": 4}}, "zero is 4; it is 0, 1, 2 or 3"),
        ({"layout": {"async_tp": "yes"}}, "async_tp is 'yes'; it is true or false"),
        ({"layout": {"grad_reduce_dtype": "int4"}}, "grad_reduce_dtype 'int4' is not known"),
        ({"layout": {"capacity_factor": "big"}}, "capacity_factor is 'big'; it is a number"),
    ],
)
def test_unknown_words_of_a_row_are_refused_with_known_ones(
    changes: dict[str, Any], message: str
) -> None:
    row = {**ROW, **changes, "step_seconds": 0.5}
    with pytest.raises(RowError, match=message):
        plan.read_row(row)
    with pytest.raises(RowError, match=message):
        plan.calibrate([ROW, row])


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ({"task": "lora"}, "adapter_rank", 16),
        ({"task": "lora", "layout": {"lora_rank": 64}}, "adapter_rank", 64),
        ({"attention_kernel": "flash attention 2"}, "attention_kernel", "flash2"),
        ({"attention_kernel": "FA3"}, "attention_kernel", "flash3"),
        ({"attention_kernel": "flash_attention_2"}, "attention_kernel", "flash2"),
        ({"layout": {"overlap_grad_reduce": True}}, "overlap_gradients", True),
        ({"layout": {"tp_comm_overlap": True}}, "overlap_tensor", True),
        ({"attention_kernel": "TE"}, "attention_kernel", "cudnn"),
        ({"attention_kernel": "Megatron fused softmax"}, "fused_attention", False),
        ({"offload": "activation CPU offload, 5 layers"}, "offloaded_layers", 5),
        ({"offload": "activation CPU offload"}, "offloaded_layers", 8),
        ({"offload": "host offload of query_proj"}, "offloaded", ("query_proj",)),
        ({"offload": "optimizer states/step on CPU"}, "host_optimizer", True),
        ({"layout": {"async_tp": False}}, "overlap_tensor", False),
        ({"overlap_gradients": True}, "overlap_gradients", True),
        ({"layout": {"grad_reduce_dtype": "bf16"}}, "gradient_bytes", 2),
        ({"precision": "bf16, fp32 gradient accumulation"}, "gradient_bytes", 4),
        ({"layout": {"capacity_factor": 1.25}}, "capacity_factor", 1.25),
        ({"layout": {"cp": 2, "cp_kind": "a2a"}}, "context_kind", "ulysses"),
        ({"layout": {"cp": 2, "cp_balanced": False}}, "context_kind", "ring"),
    ],
)
def test_words_of_a_row_are_attributes_of_its_step(
    words: dict[str, Any], name: str, value: object
) -> None:
    step = step_of(**words)
    assert getattr(step, name) == value != getattr(step_of(), name) or name == "gradient_bytes"


def test_limit_of_groups_is_one_of_nodes() -> None:
    groups = {"n_group": 8, "topk_group": 4}
    assert step_of(arch={**MIXTURE, **groups}, layout={"ep": 64}, chips=64).expert_nodes == 4


def test_every_second_layer_has_experts() -> None:
    assert model_of(experts=8, moe_every=2).sparse_layers == 4


def test_rows_without_a_size_calibrate_nothing() -> None:
    row = {**ROW, "step_seconds": 0.5}
    others = [{**row, "seq_len": None}, {**row, "arch": None}]
    assert plan.calibrate([*others, row], rounds=1) == plan.calibrate([row], rounds=1)


@pytest.mark.parametrize("from_priors", [False, True])
def test_measured_seconds_are_met_from_either_start(from_priors: bool) -> None:
    model, step, chip, software = plan.read_row(ROW)
    measured = 1.2 * plan.predict(model, step, chip, software=software).seconds
    rows = [{**ROW, "step_seconds": measured}] * 8
    figures = plan.calibrate(rows, from_priors=from_priors, rounds=8)
    fitted = plan.predict(model, step, chip, software=software, figures=figures).seconds
    assert fitted == pytest.approx(measured, rel=0.1)
