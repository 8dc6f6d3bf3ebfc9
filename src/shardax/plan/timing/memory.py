# SPDX-License-Identifier: Apache-2.0
"""Bytes of a device in a training step: state, activations, logits, buffers and the allocator."""

from __future__ import annotations

from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.step import layer_parameters, local_parameters
from shardax.plan.timing.transformer import Recompute, TrainingStep, TransformerShape

_RUNTIME_BYTES = {"gpu": 2.5e9, "tpu": 0.5e9, "cpu": 0.0}  # CUDA's context, collectives' buffers
_FRAGMENTS = {"gpu": 1.04, "tpu": 1.0, "cpu": 1.0}  # what an allocator holds over what is in use


def state_bytes(model: TransformerShape, step: TrainingStep) -> float:
    """Returns the bytes of parameters, gradients and optimizer state of a device.

    By ZeRO's stages: 2 bytes for a parameter, as many as ``gradient_bytes`` for its gradient (4 at
    most), and the rest of ``state_bytes`` for the master copy and Adam's moments.
    """
    sharded = local_parameters(model, step, optimizer=True)
    whole = local_parameters(model, step.like(zero=0), optimizer=False)
    parameter = 2.0
    gradient = min(step.gradient_bytes, step.state_bytes - parameter)
    moments = step.state_bytes - parameter - gradient
    return (
        parameter * (sharded if step.zero >= 3 else whole)
        + gradient * (sharded if step.zero >= 2 else whole)
        + moments * sharded
    )


def activation_bytes(model: TransformerShape, step: TrainingStep) -> float:
    """Returns the bytes of saved activations of a device, at the peak."""
    tokens = step.sequences * step.sequence / step.context
    again = Recompute.parse(step.recompute, matrices=model.mlp_matrices)
    # A partitioner splits the residual stream as it splits the products beside it.
    is_split = step.sequence_parallel or step.split_stream
    stream_shards = step.tensor if is_split else 1
    width = model.embed
    heads = (model.heads + 2 * model.key_heads) * model.key_width / step.tensor
    output = model.heads * model.value_width / step.tensor
    gates = model.mlp_matrices
    hidden = gates * (
        model.top_k * model.expert_width + model.shared_experts * model.expert_width / step.tensor
        if model.experts
        else model.mlp_hidden / step.tensor
    )
    scores = 0.0
    if not step.fused_attention:
        scores = 5 * model.heads / step.tensor * step.sequence / 2
    narrow = 0.6 if step.precision in ("mxfp8", "nvfp4", "fp8") and again.mlp < 1 else 1.0
    whole = narrow * (
        3 * width / stream_shards * (1 - 0.75 * again.elementwise)
        + (heads + output) * (1 - again.projections)
        + hidden * (1 - again.mlp)
        + scores * (1 - again.attention)
    )
    boundary = width / stream_shards
    if "offload" in step.recompute:  # saved on the host
        whole = 0.5 * boundary if "input=offload" in step.recompute else boundary
        boundary = min(boundary, whole)
    saved = 2 * tokens * max(boundary, whole)
    layers = model.layers / step.pipeline
    in_flight = min(step.microbatches, step.pipeline)
    if step.virtual > 1 and step.microbatches > 1:
        in_flight *= 1 + (step.pipeline - 1) / (step.pipeline * step.virtual)
    live = tokens * (4 * width / stream_shards + heads + output + 2 * hidden + scores)
    offloaded = min(step.offloaded_layers, layers)
    return saved * (layers - offloaded) * in_flight + live


def memory_bytes(model: TransformerShape, step: TrainingStep, chip: Hardware) -> float:
    """Returns the bytes that a device needs, with those of the runtime and the allocator."""
    tokens = step.sequences * step.sequence / step.context
    logits = (4.0 if chip.kind == "tpu" else 6.0) * tokens * model.vocab / step.tensor
    if step.pipeline > 1:
        logits *= 0.5  # the last stage has fewer microbatches in flight
    gathered = 0.0
    if step.zero >= 3 and step.shard_count > 1:
        dense, experts = layer_parameters(model, step, sparse=bool(model.experts))
        gathered = (dense + experts) * (2 * 2 + step.gradient_bytes)
    used = state_bytes(model, step) + activation_bytes(model, step) + logits + gathered
    return used * _FRAGMENTS[chip.kind] + _RUNTIME_BYTES[chip.kind]
