# SPDX-License-Identifier: Apache-2.0
"""Memory of a device in a training step.

The peak is that of the backward pass or of the optimizer's update, whichever is larger. Beside
states of parameters a device holds saved activations, what one layer's backward pass computes, what
FSDP gathers, and logits with their gradients; the allocator and the runtime add theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.step import layer_parameters, local_parameters
from shardax.plan.timing.transformer import Recompute, TrainingStep, TransformerShape

# Of a logit: in 16 bits, in 32 for the loss, and its gradient, which fused losses hold in place
# (flash-attention's, of llm-foundry and InternEvo; Megatron's but for 16 bits); XLA fuses all but
# one in 32 bits.
_LOGIT_BYTES = {"pytorch": 4.0, "pytorch-compile": 10.0, "megatron": 8.0, "xla": 4.0}
_LOGIT_BYTES |= {"untuned": 8.0}
_SAVES_NARROW = ("megatron",)  # what saves inputs of products as these read them
_LIVE_SCORES = 1.4  # of saved scores: what their derivative needs beside


def memory_bytes(
    model: TransformerShape,
    step: TrainingStep,
    chip: Hardware,
    software: str,
    figures: Mapping[str, float],
) -> float:
    """Returns the bytes of a device, with those of runtime and allocator."""
    # Activations, and logits with their gradients.
    saved = saved_bytes(model, step, software)
    tokens = step.sequences * step.sequence / step.context
    logits = _LOGIT_BYTES[software] * tokens * model.vocab / step.tensor
    live = layer_bytes(model, step, software)
    in_flight = min(step.microbatches, step.pipeline)
    if step.virtual > 1 and step.microbatches > 1:
        in_flight *= 1 + (step.pipeline - 1) / (step.pipeline * step.virtual)
    if step.pipeline > 1:  # the first stage has most activations, the last the logits
        work = max(saved * in_flight + live, saved + live + logits)
    else:
        work = saved + live + logits
    work += _gathered_bytes(model, step, chip)

    # States, and what the update needs in place of activations.
    states = state_bytes(model, step)
    if step.data > 1:  # of reduced gradients, and of gathered parameters
        stored = local_parameters(model, step, optimizer=False)
        states += 2 * 2.0 * min(step.bucket_elements, stored)
    updated = step.update_bytes * local_parameters(model, step, optimizer=True)
    used = states + max(work, updated)
    return used * figures[f"memory.{chip.kind}_share"] + figures[f"memory.{chip.kind}_runtime"]


def state_bytes(model: TransformerShape, step: TrainingStep) -> float:
    """Returns the bytes of parameters, gradients and optimizer state of a device."""
    # By ZeRO's stages: 2 bytes for a parameter, as many as ``gradient_bytes`` for its gradient (4
    # at most), and the rest of ``state_bytes`` for the master copy and Adam's moments.
    sharded = local_parameters(model, step, optimizer=True)
    whole = local_parameters(model, step.like(zero=0), optimizer=False)
    parameter = 2.0
    gradient = min(step.gradient_bytes, step.state_bytes - parameter)
    moments = step.state_bytes - parameter - gradient
    gradient += step.gradient_copy_bytes
    return (
        parameter * (sharded if step.zero >= 3 else whole)
        + gradient * (sharded if step.zero >= 2 else whole)
        + moments * sharded
    )


def _widths(model: TransformerShape, step: TrainingStep) -> tuple[float, float, float, float]:
    """Elements of a token: stream, attention, MLP and scores."""
    # A partitioner splits the residual stream as it splits the products beside it.
    is_split = step.sequence_parallel or step.split_stream
    stream = model.embed / (step.tensor if is_split else 1)
    heads = (model.heads + 2 * model.key_heads) * model.key_width / step.tensor
    heads += model.heads * model.value_width / step.tensor
    hidden = model.mlp_matrices * (
        model.top_k * model.expert_width + model.shared_experts * model.expert_width / step.tensor
        if model.experts
        else model.mlp_hidden / step.tensor
    )
    scores = 0.0
    if not step.fused_attention:  # before and after their softmax and dropout, and its mask
        scores = 2.5 * model.heads / step.tensor * step.sequence
    return stream, heads, hidden, scores


def saved_bytes(model: TransformerShape, step: TrainingStep, software: str) -> float:
    """Returns the bytes of activations saved by a stage for a microbatch."""
    tokens = step.sequences * step.sequence / step.context
    again = Recompute.parse(step.recompute, matrices=model.mlp_matrices)
    stream, heads, hidden, scores = _widths(model, step)
    whole = (
        3 * stream * (1 - 0.75 * again.elementwise)
        + heads * (1 - again.projections)
        + hidden * _saved_share(again, model.mlp_matrices)
        + scores * (1 - again.attention)
    )
    is_narrow = step.precision in ("mxfp8", "nvfp4", "fp8") and software in _SAVES_NARROW
    if is_narrow and again.mlp < 1:
        whole *= 0.6

    # At the least, what a layer is given, from which the rest is computed again.
    boundary = stream
    if "offload" in step.recompute:  # saved on the host
        whole = 0.5 * boundary if "input=offload" in step.recompute else boundary
        boundary = min(boundary, whole)

    layers = model.layers / step.pipeline
    return 2 * tokens * max(boundary, whole) * (layers - min(step.offloaded_layers, layers))


def _saved_share(again: Recompute, matrices: int) -> float:
    """Share of an MLP's activations that are saved."""
    # Without elementwise operations the results of its products but the last; the last product's
    # derivatives need no result, so that all others are all of what is repeated.
    products = (matrices - 1) / matrices
    share = 1 - again.elementwise * (1 - products)
    return (
        share * max(0.0, 1 - again.mlp / products)
        if again.mlp in (products, 1.0)
        else share * (1 - again.mlp)
    )


def layer_bytes(model: TransformerShape, step: TrainingStep, software: str) -> float:
    """Returns the bytes of one layer's backward pass, beside saved ones."""
    tokens = step.sequences * step.sequence / step.context
    stream, heads, hidden, scores = _widths(model, step)
    gradients = 0 if software == "xla" else hidden  # XLA fuses those of a gate with products
    elements = 4 * stream + heads + hidden + gradients + _LIVE_SCORES * scores
    if step.sequence_parallel and step.tensor > 1:
        elements += 3 * model.embed  # gathered inputs, and partial sums before they are scattered
    return 2 * tokens * elements


def _gathered_bytes(model: TransformerShape, step: TrainingStep, chip: Hardware) -> float:
    """Returns the bytes of whole parameters and gradients in FSDP."""
    if step.zero < 3 or step.shard_count < 2:
        return 0.0
    dense, experts = layer_parameters(model, step, sparse=bool(model.experts))
    layers = (dense + experts) * (2 * 2 + step.gradient_bytes)  # and the next layer's
    if chip.kind == "tpu":
        return layers
    # The embedding and the output layer are gathered for all of a step.
    return layers + model.embedding_parameters / step.tensor * (2 + step.gradient_bytes)
