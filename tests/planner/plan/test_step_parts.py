# SPDX-License-Identifier: Apache-2.0
"""Parts of predicted steps against what is counted by hand, on hardware without losses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from shardax import plan
from shardax.plan.timing.figures import default_figures
from shardax.plan.timing.kernels import Links

# Kernels and links at their peaks, which start at once, and nothing that hides another.
IDEAL = {
    "hopper.product_share": 1.0, "mxu128.product_share": 1.0, "kernels.memory_share": 1e9,
    "kernels.wave_share": 0.0, "kernels.depth_ramp": 0.0, "kernels.loss_bytes": 0.0,
    "kernels.attention_backward": 1.0, "kernels.grouped_share": 1.0, "kernels.grouped_rows": 0.0,
    "links.switch_share": 1.0, "links.network_share": 1.0, "links.torus_share": 1.0,
    "links.slices_share": 1.0, "links.exchange_share": 1.0,
    "links.switch_latency": 0.0, "links.network_latency": 0.0,
    "jobs.gpu_straggling": 0.0, "jobs.tpu_straggling": 0.0, "jobs.step_overhead": 0.0,
    "xla.contention": 1.0, "xla.tensor_hidden": 0.5,
    "memory.gpu_share": 1.0, "memory.gpu_runtime": 0.0,
}  # fmt: skip
DENSE = plan.TransformerShape(
    layers=4, embed=2048, mlp_hidden=8192, heads=16, kv_heads=8, vocab=32768
)
SPARSE = dataclasses.replace(DENSE, experts=16, top_k=2, expert_hidden=1024)
LATENT = dataclasses.replace(
    DENSE, kv_heads=0, head_dim=128, q_rank=768, kv_rank=512, rope_dim=64, value_dim=96
)
STEP = plan.TrainingStep(global_batch=16, sequence=2048, data=8)
TOKENS = 2 * 2048  # of a device in STEP
H100, V5E = plan.find_hardware("h100"), plan.find_hardware("v5e")


def estimate(
    model: plan.TransformerShape,
    step: plan.TrainingStep,
    hardware: str | plan.Hardware = H100,
    **figures: float,
) -> plan.StepEstimate:
    named = {name.replace("__", "."): value for name, value in figures.items()}
    return plan.predict(model, step, hardware, figures={**IDEAL, **named})


def parts(
    model: plan.TransformerShape,
    step: plan.TrainingStep,
    hardware: str | plan.Hardware = H100,
    **figures: float,
) -> plan.StepParts:
    return estimate(model, step, hardware, **figures).parts


# --- parameters and products ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_rank", "query"), [(1536, 7168 * 1536 + 1536 * 128 * 192), (0, 7168 * 128 * 192)]
)
def test_latent_attention_has_low_rank_parameters(q_rank: int, query: int) -> None:
    # Sizes of DeepSeek-V3, whose report says 671 billion parameters, 37 billion of them active.
    model = plan.TransformerShape(
        layers=61, embed=7168, mlp_hidden=18432, heads=128, vocab=129280, head_dim=128,
        experts=256, top_k=8, expert_hidden=2048, shared_experts=1, dense_layers=3,
        q_rank=q_rank, kv_rank=512, rope_dim=64, value_dim=128,
    )  # fmt: skip
    keys = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert model.attention_parameters == query + keys + 128 * 128 * 7168
    if q_rank:
        assert model.parameters / 1e9 == pytest.approx(671, abs=0.5)
        assert model.active_parameters / 1e9 == pytest.approx(37, abs=1)


ATTENTION = 2048 * (2048 + 2 * 1024) + 2048 * 2048
MLP, EXPERT, HEAD = 3 * 2048 * 8192, 3 * 2048 * 1024, 2048 * 32768
LOW_RANK = (
    2048 * 768 + 768 * 16 * 192  # queries
    + 2048 * (512 + 64) + 512 * 16 * (128 + 96)  # keys and values
    + 16 * 96 * 2048
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (DENSE, 4 * (ATTENTION + MLP) + HEAD),
        (dataclasses.replace(DENSE, mlp_matrices=2), 4 * (ATTENTION + MLP * 2 // 3) + HEAD),
        (dataclasses.replace(DENSE, extra_layers=1), 5 * (ATTENTION + MLP) + 2 * HEAD),
        (LATENT, 4 * (LOW_RANK + MLP) + HEAD),
        (
            dataclasses.replace(LATENT, q_rank=0),
            4 * (LOW_RANK - 768 * 5120 + 2048 * 3072 + MLP) + HEAD,
        ),
        (SPARSE, 4 * (ATTENTION + 2 * EXPERT) + HEAD),
        (dataclasses.replace(SPARSE, shared_experts=3), 4 * (ATTENTION + 5 * EXPERT) + HEAD),
        (
            dataclasses.replace(SPARSE, dense_layers=1, extra_layers=1),
            ATTENTION + MLP + 4 * (ATTENTION + 2 * EXPERT) + 2 * HEAD,
        ),
    ],
    ids=["gate", "no gate", "extra", "latent", "whole queries", "experts", "shared", "one dense"],
)
def test_products_take_operations_over_the_peak(
    model: plan.TransformerShape, weights: float
) -> None:
    seconds = parts(model, STEP).products
    assert seconds == pytest.approx(6 * TOKENS * weights / H100.peak("bf16"))


def test_few_rows_of_an_expert_slow_its_products() -> None:
    step = STEP.like(expert=8)
    whole = parts(SPARSE, step).products
    half = parts(SPARSE, step, kernels__grouped_share=0.5).products
    assert half - whole == pytest.approx(6 * TOKENS * 4 * 2 * EXPERT / H100.peak("bf16"))
    # Two experts on each device share two rows for each of its tokens.
    assert parts(SPARSE, step, kernels__grouped_rows=TOKENS).products == pytest.approx(half)
    assert parts(SPARSE, STEP, kernels__grouped_rows=TOKENS / 8).products == pytest.approx(half)


@pytest.mark.parametrize(
    ("policy", "projections", "attention", "mlp", "elementwise"),
    [
        ("full", 1, 1, 1, 1),
        ("selective", 0.5, 0, 0.5, 1),
        ("selective layer, every second", 0.5, 0.5, 0.5, 0.5),
        ("minimal", 0, 1, 0, 1),
        ("selective: core_attn", 0, 1, 0, 0),
        ("selective activation recomputation", 0, 1, 0, 0),
        ("selective: mla_up_proj layernorm", 0.3, 0, 0, 0.35),
        ("selective: moe, moe_act", 0, 0, 1, 0.8),
        ("custom: decoder_layer_input=offload", 1, 1, 2 / 3, 1),
        ("custom: out_proj=device", 0.6, 1, 2 / 3, 1),
        ("custom: query_proj=device, context=device, mlpwi=offload", 0.4, 0, 0, 1),
        ("save_qkv_proj", 0.4, 1, 2 / 3, 1),
    ],
)
def test_policy_repeats_its_share_of_the_forward_pass(
    policy: str, projections: float, attention: float, mlp: float, elementwise: float
) -> None:
    nothing, repeated = parts(DENSE, STEP), parts(DENSE, STEP.like(recompute=policy))
    again = 2 * TOKENS * 4 * (projections * ATTENTION + mlp * MLP) / H100.peak("bf16")
    assert repeated.products - nothing.products == pytest.approx(again, abs=1e-12)
    # Once forward; backward five products for two, and 1.6 times the traffic.
    assert repeated.attention / nothing.attention == pytest.approx((3.5 + attention) / 3.5)
    assert repeated.memory / nothing.memory == pytest.approx((2.6 + elementwise) / 2.6)


def test_narrow_products_pay_for_quantization() -> None:
    wide, plain, rows, blocks = (
        parts(DENSE, STEP.like(precision=precision), kernels__row_quantize=3.0)
        for precision in ("bf16", "fp8", "fp8-row", "mxfp8")
    )
    assert rows.memory - wide.memory == pytest.approx(3 * (plain.memory - wide.memory))
    assert blocks.memory == plain.memory > wide.memory
    assert plain.products < wide.products


def test_precision_beyond_hardware_is_the_next_wider() -> None:
    shares = {"hopper.fp8_share": 0.5}
    seconds = {
        precision: plan.predict(
            DENSE, STEP.like(precision=precision), "h100", figures={**IDEAL, **shares}
        ).parts.products
        for precision in ("fp8", "mxfp8", "nvfp4")
    }
    layers = 6 * TOKENS * 4 * (ATTENTION + MLP) / (0.5 * H100.peak("f8"))
    head = 6 * TOKENS * HEAD / H100.peak("bf16")
    assert seconds == dict.fromkeys(seconds, pytest.approx(layers + head))


# --- collectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "exposed"), [(1e12, 3.0), (1e-9, 0.6)])
def test_context_shards_send_keys_and_values(attention: float, exposed: float) -> None:
    step = STEP.like(data=4, context=2)
    waiting = parts(DENSE, step, xla__attention=attention).tensor
    # Of four sequences the half that another device has; backward, gradients travel as well.
    received = 2 * (4 * 2048) * 8 * (128 + 128) / 2
    assert waiting == pytest.approx(exposed * 4 * received / H100.link_bandwidth, rel=1e-3)


def test_latent_keys_are_sent_with_both_widths() -> None:
    step = STEP.like(data=4, context=2)
    waiting = parts(LATENT, step, xla__attention=1e12).tensor
    received = 2 * (4 * 2048) * 16 * (192 + 96) / 2
    assert waiting == pytest.approx(3 * 4 * received / H100.link_bandwidth, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "share"),
    [({}, 1.0), ({"overlap_tensor": True}, 0.1), ({"sequence_parallel": True}, 0.5)],
)
def test_tensor_shards_sum_activations_twice_each_pass(
    changes: dict[str, Any], share: float
) -> None:
    waiting = parts(DENSE, STEP.like(data=4, tensor=2, **changes)).tensor
    sent = 2 * (4 * 2048 * 2 * 2048) / 2  # of an all-reduce, there and back
    assert waiting == pytest.approx(share * 4 * 4 * sent / H100.link_bandwidth)


BYTES = 2 * TOKENS * 2048  # of a device's tokens in 16 bits


@pytest.mark.parametrize(
    ("top_k", "expert", "sent", "bandwidth"),
    [
        (1, 8, BYTES * 7 / 8, H100.link_bandwidth),
        (2, 8, 2 * BYTES * 7 / 8, H100.link_bandwidth),
        # Half of the nodes' tokens go to the other; with two experts three of four do.
        (1, 16, BYTES / 2, H100.network_bandwidth),
        (2, 16, BYTES * 3 / 4, H100.network_bandwidth),
    ],
)
def test_tokens_reach_each_node_of_their_experts_once(
    top_k: int, expert: int, sent: float, bandwidth: float
) -> None:
    model = dataclasses.replace(SPARSE, top_k=top_k)
    step = STEP.like(data=16, global_batch=32, expert=expert)
    seconds = 4 * 4 * sent / bandwidth  # there and back, in both passes of four layers
    assert parts(model, step).experts == pytest.approx(seconds)
    hidden = parts(model, step.like(overlap_experts=True)).experts
    assert hidden == pytest.approx(0.3 * seconds)


def test_tokens_cross_a_torus_in_both_dimensions() -> None:
    step = STEP.like(data=16, global_batch=32, expert=16)
    # On four by four chips a byte passes one link of each dimension.
    seconds = 4 * 4 * 2 * BYTES / (2 * V5E.link_bandwidth)
    assert parts(SPARSE, step, V5E).experts == pytest.approx(seconds)
    assert parts(SPARSE, step.like(expert=1), V5E).experts == 0.0


def test_recomputed_layers_repeat_their_collectives() -> None:
    step = STEP.like(expert=8, recompute="full")
    assert parts(SPARSE, step).experts == pytest.approx(
        1.5 * parts(SPARSE, step.like(recompute="none")).experts
    )


@pytest.mark.parametrize(("zero", "back"), [(0, 4), (1, 2)])
def test_sums_across_nodes_use_the_network_alone(zero: int, back: int) -> None:
    step = STEP.like(data=2, tensor=8, global_batch=4, zero=zero)
    stored = (4 * (ATTENTION + MLP) + 2 * HEAD) / 8 + 4 * 2 * 2048
    # Half of each device's gradients, 4 bytes there; what comes back are sums, or parameters.
    seconds = (4 + back) / 2 * stored / H100.network_bandwidth
    assert parts(DENSE, step).gradients == pytest.approx(seconds)


@pytest.mark.parametrize(("slices", "share"), [(1, 0.0), (2, 0.5), (4, 0.75)])
def test_slices_sum_gradients_over_the_network(slices: int, share: float) -> None:
    step = STEP.like(slices=slices)
    stored = 4 * (ATTENTION + MLP + 2 * 2048) + 2 * HEAD
    seconds = 2 * share * 4 * stored / V5E.network_bandwidth
    assert parts(DENSE, step, V5E).gradients == pytest.approx(seconds)


def test_slices_wait_for_the_slowest() -> None:
    found = parts(DENSE, STEP.like(slices=4), V5E, jobs__tpu_straggling=0.05)
    others = sum(vars(found).values()) - found.stragglers
    assert found.stragglers == pytest.approx(2 * 0.05 * others)


def test_sole_owner_broadcasts_nothing() -> None:
    step = STEP.like(zero=1, shards=1)
    sent = parts(DENSE, step.like(broadcast_parameters=True))
    assert sent == parts(DENSE, step)
    stored = 4 * (ATTENTION + MLP + 2 * 2048) + 2 * HEAD
    assert sent.gradients == pytest.approx(2 * 7 / 8 * 4 * stored / H100.link_bandwidth)


# --- host and memory ------------------------------------------------------------------------------


def test_offloaded_layers_move_their_activations_twice() -> None:
    step = STEP.like(offloaded_layers=3)
    slow, fast = (parts(DENSE, step, links__host_bandwidth=rate).host for rate in (1e8, 2e8))
    assert slow - fast == pytest.approx(3 * 2 * BYTES * (1 / 1e8 - 1 / 2e8))
    hidden = parts(DENSE, step, links__host_bandwidth=1e15).host
    assert hidden == pytest.approx(parts(DENSE, STEP).host)


@pytest.mark.parametrize(("graphs", "share"), [("step", 0.1), ("layer", 0.25)])
def test_graphs_are_launched_in_less_time(graphs: str, share: float) -> None:
    launched = parts(DENSE, STEP.like(graphs=graphs), xla__layer_launch=1, jobs__graph_share=0.25)
    assert launched.host == pytest.approx(parts(DENSE, STEP, xla__layer_launch=share).host)


def test_experts_take_launches_of_their_own() -> None:
    one = parts(SPARSE, STEP, xla__layer_launch=0, xla__expert_launch=2).host
    assert one == parts(SPARSE, STEP, xla__layer_launch=2, xla__expert_launch=0).host
    assert parts(DENSE, STEP, xla__layer_launch=0, xla__expert_launch=2).host == 0.0


def test_offloaded_inputs_of_layers_leave_the_device() -> None:
    full, offloaded, halved = (
        estimate(DENSE, STEP.like(recompute=policy)).memory_bytes
        for policy in ("full", "custom: out_proj=offload", "custom: decoder_layer_input=offload")
    )
    assert full - offloaded == 0
    assert full - halved == 4 * BYTES / 2  # the other half is on its way


def test_sequence_parallelism_gathers_the_stream_of_a_layer() -> None:
    step = STEP.like(data=4, tensor=2, split_stream=True)
    whole, split = (
        estimate(DENSE, step.like(sequence_parallel=is_split)).memory_bytes
        for is_split in (False, True)
    )
    assert split - whole == pytest.approx(3 * 2 * BYTES)


def test_offloaded_layers_save_nothing_on_the_device() -> None:
    bytes_of = [
        estimate(DENSE, STEP.like(recompute="full", offloaded_layers=layers)).memory_bytes
        for layers in range(5)
    ]
    steps = [before - after for before, after in itertools.pairwise(bytes_of)]
    assert steps == [BYTES] * 4


# --- kernels of attention -------------------------------------------------------------------------


def test_kernels_of_attention_reach_what_their_papers_say() -> None:
    step = STEP.like(sequence=16384, global_batch=8)
    kernels = ("flash2", "flash3", "cudnn")
    slow, fast, own = (
        parts(DENSE, step.like(attention_kernel=kernel)).attention for kernel in kernels
    )
    assert slow / fast == pytest.approx(0.62 / 0.36)  # of the peak, FlashAttention 2 and 3
    megatron = parts(DENSE, step, xla__attention=1.0).attention
    assert own == pytest.approx(megatron / figure("megatron.attention"))
    # Of one kernel Blackwell has more operations than it uses.
    before, after = (
        plan.predict(DENSE, step.like(attention_kernel=kernel), "b200").parts.attention
        for kernel in ("flash2", "flash4")
    )
    assert before / after == pytest.approx(0.65 / 0.18)


def figure(name: str) -> float:
    return default_figures()[name]


@pytest.mark.parametrize(("length", "least"), [(2048, 0.0), (131072, 0.5)])
def test_long_sequences_are_attention(length: int, least: float) -> None:
    step = plan.TrainingStep(global_batch=8, sequence=length, data=8)
    found = plan.predict(DENSE, step, "h100")
    share = found.parts.attention / found.seconds
    assert least < share < 0.5 + least


@pytest.mark.parametrize(("width", "slower"), [(80, 1.0), (100, 4.2), (128, 1.0)])
def test_heads_that_tensor_cores_cannot_read_slow_unfused_attention(
    width: int, slower: float
) -> None:
    model = dataclasses.replace(DENSE, head_dim=width)
    step = STEP.like(fused_attention=False)
    aligned, found = (
        parts(model, step, kernels__unaligned_heads=ratio).attention for ratio in (1.0, 4.2)
    )
    assert found / aligned == pytest.approx(slower)
    tpu = [parts(model, step, V5E, kernels__unaligned_heads=r).attention for r in (1.0, 4.2)]
    assert tpu[0] == tpu[1]  # which pads


# --- what is trained, and where -------------------------------------------------------------------


def test_adapters_leave_out_gradients_of_weights() -> None:
    whole, tuned = (parts(DENSE, STEP.like(adapter_rank=rank)) for rank in (0, 16))
    # Two products of three, and thin ones beside them.
    thin = tuned.products / whole.products - 2 / 3
    assert 0 < thin < 0.1
    assert tuned.gradients == tuned.optimizer == 0 < whole.gradients
    rank_64 = parts(DENSE, STEP.like(adapter_rank=64)).products
    assert rank_64 > tuned.products


def test_frozen_parameters_are_gathered_and_not_scattered() -> None:
    step = STEP.like(zero=3, recompute="none")
    whole, tuned = (parts(DENSE, step.like(adapter_rank=rank)).parameters for rank in (0, 16))
    # Of 2 bytes forward, 2 backward and gradients of 4; at least those are gone.
    assert tuned < whole


@pytest.mark.parametrize(("layers", "share"), [(0, 1.0), (1, 0.25), (3, 0.75), (9, 1.0)])
def test_some_layers_of_a_stage_are_recomputed(layers: int, share: float) -> None:
    nothing, full = parts(DENSE, STEP), parts(DENSE, STEP.like(recompute="full"))
    policy = f"full, block, {layers} layers" if layers else "full"
    found = parts(DENSE, STEP.like(recompute=policy))
    for name in ("products", "attention", "memory"):
        again = getattr(full, name) - getattr(nothing, name)
        assert getattr(found, name) - getattr(nothing, name) == pytest.approx(share * again)


def test_gradients_of_16_bits_take_half_the_time() -> None:
    step = STEP.like(data=16, global_batch=32)
    wide, narrow = (parts(DENSE, step.like(gradient_bytes=width)).gradients for width in (4, 2))
    assert narrow / wide == pytest.approx(0.5)


def test_sums_of_gradients_wait_where_nothing_overlaps_them() -> None:
    step = STEP.like(data=16, global_batch=32)
    contended = {"xla__contention": 0.0}
    said = [
        parts(DENSE, step.like(overlap_gradients=said), **contended).gradients
        for said in (None, True, False)
    ]
    assert said[0] == said[1] < said[2]


def test_host_updates_in_the_time_of_its_memory() -> None:
    step = STEP.like(zero=1)
    device, host = (parts(DENSE, step.like(host_optimizer=on)).optimizer for on in (False, True))
    stored = (4 * (ATTENTION + MLP + 2 * 2048) + 2 * HEAD) / 8
    moved = (4 + 2) * stored / figure("links.host_bandwidth")
    assert host == pytest.approx(moved + 28 * stored * 8 / figure("links.host_memory"))
    assert device < host


def test_named_activations_hide_behind_the_arithmetic() -> None:
    step = STEP.like(offloaded=("query_proj", "out_proj"))
    slow, fast = (parts(DENSE, step, links__host_bandwidth=rate).host for rate in (1e7, 2e7))
    # Both are as wide as the stream; they go once and come back once.
    assert slow - fast == pytest.approx(4 * 2 * 2 * BYTES * (1 / 1e7 - 1 / 2e7))
    hidden = parts(DENSE, step, links__host_bandwidth=1e15).host
    assert hidden == pytest.approx(parts(DENSE, STEP).host)


# --- experts and sequences ------------------------------------------------------------------------


def test_every_second_layer_has_experts() -> None:
    every, second = (dataclasses.replace(SPARSE, expert_every=step) for step in (1, 2))
    assert (every.sparse_layers, second.sparse_layers) == (4, 2)
    dense = 2 * 3 * (2048 * 8192) + 16 * 2048 * 0
    sparse = 2 * (16 * EXPERT + 2048 * 16)
    assert every.parameters - second.parameters == sparse - dense
    step = STEP.like(expert=8)
    assert parts(second, step).experts == pytest.approx(parts(every, step).experts / 2)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_capacity_is_computed_and_sent_full_or_not(factor: float) -> None:
    step = STEP.like(expert=8)
    plain, roomy = parts(SPARSE, step), parts(SPARSE, step.like(capacity_factor=factor))
    assert roomy.experts == pytest.approx(factor * plain.experts)
    more = 6 * TOKENS * 4 * 2 * EXPERT / H100.peak("bf16") * (factor - 1)
    assert roomy.products - plain.products == pytest.approx(more, abs=1e-12)


def test_tokens_whose_experts_are_on_few_nodes_are_sent_to_these() -> None:
    model = dataclasses.replace(SPARSE, experts=64, top_k=8)
    step = plan.TrainingStep(global_batch=128, sequence=2048, data=64, expert=64)
    anywhere, near = (parts(model, step.like(expert_nodes=n)).experts for n in (0, 2))
    nodes = 8 * (1 - (7 / 8) ** 8)
    assert near / anywhere == pytest.approx(2 / nodes)


@pytest.mark.parametrize(("kind", "ratio"), [("zigzag", 1.0), ("gather", 1.0), ("ring", 1.75)])
def test_last_shard_of_a_plain_ring_reads_nearly_all_keys(kind: str, ratio: float) -> None:
    step = STEP.like(data=2, context=4)
    dealt = parts(DENSE, step, xla__attention=1.0).attention
    found = parts(DENSE, step.like(context_kind=kind), xla__attention=1.0)
    assert found.attention / dealt == pytest.approx(ratio)
    gathered = parts(DENSE, step.like(context_kind="gather")).memory
    # Sums of partial results pass through the memory.
    assert (found.memory > gathered) == (kind != "gather")


def test_exchange_of_heads_sends_queries_too() -> None:
    step = STEP.like(data=4, context=2, context_kind="ulysses")
    waiting = parts(DENSE, step, xla__attention=1e12).tensor
    sent = 2 * (4 * 1024) * (16 + 8) * (128 + 128) / 2
    assert waiting == pytest.approx(2 * 4 * sent / H100.link_bandwidth, rel=1e-3)


# --- links ----------------------------------------------------------------------------------------


def test_pairs_without_a_switch_have_their_own_links() -> None:
    v100 = plan.read_row(
        {
            "arch": {"layers": 4, "embed": 2048, "mlp_hidden": 8192, "heads": 16, "vocab": 32768},
            "hw": "v100-32", "chips": 8, "seq_len": 2048, "global_batch_seqs": 16,
        }
    )[2]  # fmt: skip
    figures = {**default_figures(), "links.switch_share": 1.0, "links.switch_latency": 0.0}
    links = Links(v100, figures, devices=8)
    assert links.gather(1e9, 2) == pytest.approx(1e9 / 2 / 5e10)  # two links of 25 GB/s
    assert links.gather(1e9, 4) == pytest.approx(1e9 * 3 / 4 / 1.5e11)


def test_sums_over_many_nodes_take_the_logarithm_of_their_number() -> None:
    figures = {**default_figures(), "links.network_latency": 1.0}
    links = Links(H100, figures, devices=65_536)
    for nodes in (64, 8192):
        assert links.reduce(8.0, 8 * nodes) == pytest.approx(4 * math.log2(nodes), rel=1e-3)
        assert links.gather(8.0, 8 * nodes) == pytest.approx(nodes, rel=1e-3)


def test_unknown_software_has_the_widest_band() -> None:
    known, untuned = (
        plan.predict(DENSE, STEP, "h100", software=software) for software in ("xla", "untuned")
    )
    assert untuned.seconds > known.seconds
    assert known.high / known.low <= 1.8 + 1e-3
    assert untuned.high / untuned.low == pytest.approx(1.8, abs=5e-3)
    alone = plan.predict(DENSE, STEP.like(data=1, global_batch=2), "h100")
    assert alone.high / alone.low == pytest.approx(1.35, abs=5e-3)
    split = STEP.like(data=2, tensor=4, sequence_parallel=True)
    said = split.like(overlap_tensor=True, overlap_gradients=True)
    unsaid, widths = (
        (each.high / each.low)
        for each in (plan.predict(DENSE, step, "h100") for step in (split, said))
    )
    assert widths < unsaid
