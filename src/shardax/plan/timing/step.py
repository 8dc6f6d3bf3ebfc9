# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step: layers, pipelines, collectives and overlap.

The unit is a layer of a microbatch on one device. Its kernels run one after another; the host
launches them beside. Collectives of sharded parameters (FSDP) run beside the layer's arithmetic,
those of tensor and expert shards in sequence, as far as the software does not split them. A
pipeline adds its bubble, and sums of gradients hide behind the last backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.kernels import Kernels, Links, both
from shardax.plan.timing.transformer import Recompute, TrainingStep, TransformerShape

_HIDDEN_TENSOR = 0.9  # of the collectives of a tensor axis that are split on purpose
_MASTER_BYTES = 30  # of a parameter that Adam reads and writes, gradient and copy included


@dataclass
class Pass:
    """Seconds of a layer's passes on one device, by kind."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    experts: float = 0.0
    context: float = 0.0

    @property
    def arithmetic(self) -> float:
        """Seconds of the device's own kernels."""
        return self.products + self.attention + self.memory

    def add(self, part: Pass, times: float = 1.0) -> None:
        """Adds another layer's seconds."""
        for name, seconds in vars(part).items():
            setattr(self, name, getattr(self, name) + times * seconds)


class LayerModel:
    """Passes of the layers of a step, on one device."""

    def __init__(
        self,
        model: TransformerShape,
        step: TrainingStep,
        chip: Hardware,
        software: str,
        figures: Mapping[str, float],
    ) -> None:
        self.model, self.step, self.chip = model, step, chip
        self.software, self.figures = software, figures
        self.kernels = Kernels(chip, figures, step.precision)
        self.links = Links(chip, figures, step.device_count, step.slices)
        self.recompute = Recompute.parse(step.recompute, matrices=model.mlp_matrices)
        self.tokens = step.sequences * step.sequence / step.context
        # Experts are whole: each tensor shard sends its own part of the tokens to them.
        self.routed_tokens = self.tokens / step.tensor
        self.stream_shards = step.tensor if step.sequence_parallel else 1

    def figure(self, name: str) -> float:
        """Returns a figure of the software."""
        return self.figures[f"{self.software}.{name}"]

    def passes(self, *, sparse: bool) -> tuple[Pass, Pass]:
        """Forward and backward pass of a layer, recomputation in the latter."""
        forward, backward, again = Pass(), Pass(), self.recompute
        self._products(forward, backward, sparse)
        self._attention(forward, backward)
        self._elementwise(forward, backward, sparse)
        self._collectives(forward, backward, sparse)
        backward.attention += again.attention * forward.attention
        backward.memory += again.elementwise * forward.memory
        whole = min(again.projections, again.mlp)
        for name in ("tensor", "experts", "context"):
            setattr(backward, name, getattr(backward, name) + whole * getattr(forward, name))
        return forward, backward

    def _products(self, forward: Pass, backward: Pass, sparse: bool) -> None:
        model, step, tokens = self.model, self.step, self.tokens
        groups: list[tuple[float, float, float, float, float]] = [  # rows, in, out, count, repeated
            (tokens, inputs, outputs, 1, self.recompute.projections)
            for inputs, outputs in model.attention_products(step.tensor)
        ]
        gates = model.mlp_matrices - 1
        hidden = model.expert_width * model.shared_experts if sparse else model.mlp_hidden
        hidden /= step.tensor
        if hidden:
            groups += [
                (tokens, model.embed, gates * hidden, 1, self.recompute.mlp),
                (tokens, hidden, model.embed, 1, self.recompute.mlp),
            ]
        for rows, inputs, outputs, count, repeated in groups:
            self._product(forward, backward, rows, inputs, outputs, count, repeated, 1.0)
        if sparse:
            local = max(1.0, model.experts / step.expert)
            rows = self.routed_tokens * model.top_k / local
            slow = (1 + self.figures["kernels.grouped_rows"] / rows) / self.figures[
                "kernels.grouped_share"
            ]
            width = model.expert_width
            for inputs, outputs in ((model.embed, gates * width), (width, model.embed)):
                self._product(
                    forward, backward, rows, inputs, outputs, local, self.recompute.mlp, slow
                )

    def _product(
        self,
        forward: Pass,
        backward: Pass,
        rows: float,
        inputs: float,
        outputs: float,
        count: float,
        repeated: float,
        slow: float,
    ) -> None:
        """Adds a product, its two derivatives, and the narrowing of their operands."""
        kernels = self.kernels
        seconds = count * slow * kernels.product(rows, outputs, inputs)
        narrow = count * kernels.quantization(rows * inputs)
        forward.products += seconds
        forward.memory += narrow
        backward.products += repeated * seconds + count * slow * (
            kernels.product(rows, inputs, outputs) + kernels.product(inputs, outputs, rows)
        )
        backward.memory += repeated * narrow + count * kernels.quantization(rows * outputs)

    def _attention(self, forward: Pass, backward: Pass) -> None:
        model, step = self.model, self.step
        heads = model.heads / step.tensor
        sizes = heads, model.key_width, model.value_width
        if step.fused_attention:
            context = model.mean_context(step.sequence)
            seconds = self.kernels.attention(self.tokens, context, *sizes)
            seconds /= self.figure("attention")
            forward.attention += seconds
            backward.attention += self.kernels.attention_backward(seconds)
        else:
            seconds = self.kernels.plain_attention(self.tokens, step.sequence, *sizes)
            forward.attention += seconds
            backward.attention += 2 * seconds

    def _elementwise(self, forward: Pass, backward: Pass, sparse: bool) -> None:
        model, step = self.model, self.step
        stream = 10 * model.embed / self.stream_shards  # two norms, two sums
        rotated = 4 * (model.heads + model.key_heads) * model.key_width / step.tensor
        gate = 5 if model.mlp_matrices == 3 else 2.5
        hidden = gate * model.mlp_hidden / step.tensor
        if sparse:
            routed = model.top_k * (6 * model.embed + gate * model.expert_width) / step.tensor
            hidden = routed + gate * model.expert_width * model.shared_experts / step.tensor
        bytes_ = 2 * self.tokens * (stream + rotated + hidden)
        seconds = self.kernels.streamed(bytes_) * self.figure("passes")
        forward.memory += seconds
        backward.memory += 1.6 * seconds

    def _collectives(self, forward: Pass, backward: Pass, sparse: bool) -> None:
        model, step, links = self.model, self.step, self.links
        if step.tensor > 1:
            hidden = _HIDDEN_TENSOR if step.overlap_tensor else 0.0
            if self.chip.kind == "tpu" or step.sequence_parallel:
                hidden = max(hidden, self.figure("tensor_hidden"))
            seconds = links.reduce(2 * self.tokens * model.embed, step.tensor) * (1 - hidden)
            forward.tensor += 2 * seconds
            backward.tensor += 2 * seconds
        if step.context > 1:
            keys = model.key_heads / step.tensor * (model.key_width + model.value_width)
            bytes_ = 2 * self.tokens * keys * step.context
            seconds = links.gather(bytes_, step.context, step.tensor)
            forward.context += max(0.2 * seconds, seconds - 0.5 * forward.attention)
            backward.context += max(0.4 * seconds, 2 * seconds - 0.5 * backward.attention)
        if sparse and step.expert > 1:
            bytes_ = 2 * self.routed_tokens * model.top_k * model.embed
            seconds = links.exchange(bytes_, step.expert, 1, model.top_k)
            if step.overlap_experts:
                seconds *= 0.3
            forward.experts += 2 * seconds
            backward.experts += 2 * seconds

    def head(self) -> Pass:
        """Returns both passes of the output layer and the loss."""
        columns = self.model.vocab / self.step.tensor
        kernels, tokens, embed = self.kernels, self.tokens, self.model.embed
        return Pass(
            products=kernels.product(tokens, columns, embed, wide=True)
            + kernels.product(tokens, embed, columns, wide=True)
            + kernels.product(columns, embed, tokens, wide=True),
            memory=kernels.streamed(tokens * columns * self.figures["kernels.loss_bytes"]),
        )

    def launches(self, *, sparse: bool) -> float:
        """Returns the host's seconds for both passes of a layer."""
        seconds = self.figure("layer_launch") + sparse * self.figure("expert_launch")
        if self.recompute.projections and self.recompute.mlp:
            seconds *= 1 + 0.3 * max(self.recompute.mlp, self.recompute.projections)
        if self.step.graphs == "step":
            return 0.1 * seconds
        return seconds * (self.figures["jobs.graph_share"] if self.step.graphs else 1.0)


@dataclass(frozen=True)
class StepParts:
    """Seconds of the parts of a step; their sum is the step.

    Attributes:
        products: Matrix products.
        attention: Attention itself.
        memory: Norms, activations, quantization, the loss.
        tensor: Collectives of tensor and context shards that arithmetic does not hide.
        experts: All-to-alls of experts.
        parameters: Collectives of sharded parameters that arithmetic does not hide.
        gradients: Sums of gradients that the backward pass does not hide.
        bubble: Waiting of pipeline stages, and messages between them.
        host: Launching that the device waits for, and moving of activations to the host.
        optimizer: The optimizer's update.
        stragglers: Waiting for the slowest device of a large job.

    Example:
        >>> from shardax import plan
        >>> llama = plan.TransformerShape(
        ...     layers=32, embed=4096, mlp_hidden=14336, heads=32, kv_heads=8, vocab=128256
        ... )
        >>> step = plan.TrainingStep(global_batch=128, sequence=8192, data=64, zero=3)
        >>> parts = plan.predict(llama, step, "h100").parts
        >>> parts.products > parts.attention > parts.bubble
        True
    """

    products: float
    attention: float
    memory: float
    tensor: float
    experts: float
    parameters: float
    gradients: float
    bubble: float
    host: float
    optimizer: float
    stragglers: float

    @property
    def longest_wait(self) -> str:
        """Name of the longest wait, or "nothing"."""
        seconds = {**vars(self)}
        for name in ("products", "attention", "memory"):
            del seconds[name]
        name = max(seconds, key=lambda name: seconds[name])
        return name if seconds[name] else "nothing"


def layer_parameters(
    model: TransformerShape, step: TrainingStep, *, sparse: bool
) -> tuple[float, float]:
    """A device's parameters of a layer: by tensor, and of experts."""
    dense = model.attention_parameters / step.tensor + 2 * model.embed
    if not sparse:
        return dense + model.dense_mlp_parameters / step.tensor, 0.0
    dense += model.shared_parameters / step.tensor
    return dense, model.experts * model.expert_parameters / step.expert


def _stage_layers(model: TransformerShape, step: TrainingStep, head_layers: float) -> float:
    """Layers' worth of work of the slowest stage."""
    if step.pipeline == 1:
        return model.layers + head_layers
    parts = step.pipeline * step.virtual
    even = (model.layers + head_layers) / step.pipeline
    if model.layers % parts == 0:
        return max(even, model.layers / step.pipeline + head_layers)
    return max(even, math.ceil(model.layers / parts - 0.5) * step.virtual)


def _exposed_parameters(layers: LayerModel, forward: Pass, backward: Pass, sparse: bool) -> float:
    """Seconds of a layer's gathers and scatters beyond what its passes hide."""
    model, step, links = layers.model, layers.step, layers.links
    if step.zero < 2 or step.shard_count < 2:
        return 0.0
    dense, experts = layer_parameters(model, step, sparse=sparse)
    is_narrow = step.precision.startswith(("fp8", "mxfp8")) and layers.software == "pytorch-compile"
    expert_group = max(1, step.shard_count // step.expert)

    def gather(bytes_each: float) -> float:
        seconds = links.gather(bytes_each * dense, step.shard_count, step.tensor)
        stride = step.tensor * step.expert
        return seconds + links.gather(bytes_each * experts, expert_group, stride)

    gathered, scattered = gather(1.0 if is_narrow else 2.0), gather(step.gradient_bytes)
    again = gathered if step.zero >= 3 else 0.0
    contention = layers.figure("contention")
    return sum(
        max(0.0, seconds - hidden) + contention * min(seconds, hidden)
        for seconds, hidden in (
            (gathered, forward.arithmetic),
            (scattered + again, backward.arithmetic),
        )
    )


def step_parts(
    model: TransformerShape,
    step: TrainingStep,
    chip: Hardware,
    software: str,
    figures: Mapping[str, float],
) -> StepParts:
    """Returns the seconds of a training step."""
    layers = LayerModel(model, step, chip, software, figures)
    links = layers.links
    contention = layers.figure("contention")
    microbatches = step.microbatches
    stride = step.tensor * step.context
    exposed_parameters = host = 0.0
    work = Pass()  # of a microbatch, all layers
    backward_seconds = 0.0
    sparse_layers = model.sparse_layers
    groups = [(model.layers - sparse_layers, False), (sparse_layers, True)]
    if model.extra_layers:
        groups.append((model.extra_layers, bool(model.experts)))
    for count, sparse in groups:
        if count <= 0:
            continue
        forward, backward = layers.passes(sparse=sparse)
        work.add(forward, count)
        work.add(backward, count)
        busy = sum(vars(forward).values()) + sum(vars(backward).values())
        launch = layers.launches(sparse=sparse)
        host += count * (both(busy, launch) - busy)
        backward_seconds += count * backward.arithmetic
        exposed_parameters += count * _exposed_parameters(layers, forward, backward, sparse)
    head = layers.head()
    runs = 1 + model.extra_layers
    head_seconds = head.arithmetic * runs
    whole_layers = model.layers + model.extra_layers
    layer_seconds = (sum(vars(work).values()) + host + exposed_parameters) / whole_layers
    stage = _stage_layers(model, step, head_seconds / layer_seconds + model.extra_layers)
    # Of the slowest stage the parts have the shares that they have in the whole.
    total = layer_seconds * whole_layers + head_seconds
    scale = stage * layer_seconds / total * microbatches
    work.add(head, runs)
    steady = stage * layer_seconds * microbatches
    bubble = 0.0
    if step.pipeline > 1:
        bubble = steady / microbatches * (step.pipeline - 1) / step.virtual
        message = links.send(2 * layers.tokens * model.embed / step.tensor, stride * step.data)
        bubble += (
            2
            * message
            * (step.pipeline - 1 + 0.5 * microbatches * (step.virtual if step.virtual > 1 else 1))
        )
    gradients = _gradient_sums(model, step, links, backward_seconds / step.pipeline, contention)
    if step.offloaded_layers:
        moved = 2 * layers.tokens * model.embed * step.offloaded_layers * 2 / step.tensor
        seconds = moved / figures["links.host_bandwidth"] * microbatches / step.pipeline
        host += max(0.0, seconds - 0.5 * steady) / max(scale, 1e-9)
    optimizer = (
        layers.kernels.streamed(_MASTER_BYTES * local_parameters(model, step, optimizer=True))
        + figures["jobs.step_overhead"]
    )
    parts = {
        "products": work.products * scale,
        "attention": work.attention * scale,
        "memory": work.memory * scale,
        "tensor": (work.tensor + work.context) * scale,
        "experts": work.experts * scale,
        "parameters": exposed_parameters * scale,
        "host": host * scale,
        "gradients": gradients,
        "bubble": bubble,
        "optimizer": optimizer,
    }
    waiting = straggling(chip, step.device_count, step.slices, figures)
    return StepParts(**parts, stragglers=sum(parts.values()) * waiting)


def straggling(chip: Hardware, devices: int, slices: int, figures: Mapping[str, float]) -> float:
    """Share of a step that a job waits for its slowest device."""
    if chip.kind == "tpu":
        return math.log2(slices) * figures["jobs.tpu_straggling"]
    nodes = max(1.0, devices / min(chip.node_size, 8))
    return math.log2(nodes) * figures["jobs.gpu_straggling"]


def local_parameters(model: TransformerShape, step: TrainingStep, *, optimizer: bool) -> float:
    """A device's parameters: of optimizer state, or stored whole."""
    dense = experts = 0.0
    for count, sparse in (
        (model.layers - model.sparse_layers, False),
        (model.sparse_layers + model.extra_layers, bool(model.experts)),
    ):
        layer_dense, layer_experts = layer_parameters(model, step, sparse=sparse)
        dense += count * layer_dense / step.pipeline
        experts += count * layer_experts / step.pipeline
    tables = 1 if model.tied or step.pipeline > 1 else 2
    dense += (tables * model.vocab + model.learned_positions) * model.embed / step.tensor
    if step.zero >= (1 if optimizer else 3):
        dense /= step.shard_count
        experts /= max(1.0, step.shard_count / step.expert)
    return dense + experts


def _gradient_sums(
    model: TransformerShape, step: TrainingStep, links: Links, window: float, contention: float
) -> float:
    """Seconds of sums of gradients beyond what a backward pass hides."""
    stored = local_parameters(model, step, optimizer=False)
    if links.chip.kind == "tpu":
        seconds = links.between_slices(step.gradient_bytes * stored)
        return max(0.0, seconds - window) + contention * min(seconds, window)
    replicas = step.data * step.context
    if step.zero >= 2:
        replicas //= max(1, step.shard_count)
        seconds = links.reduce(
            step.gradient_bytes * stored, replicas, step.tensor * step.shard_count
        )
    elif step.zero == 1 and step.shard_count < replicas:
        # State in groups: gradients are summed over all, parameters gathered in a group.
        seconds = links.reduce(step.gradient_bytes * stored, replicas, step.tensor)
        seconds += links.gather(2 * stored, step.shard_count, step.tensor)
    else:
        # All-reduce; with sharded state reduce-scatter, and all-gather of parameters in 16 bits.
        halves = step.gradient_bytes, 2 if step.zero else step.gradient_bytes
        seconds = links.reduce(stored * sum(halves) / 2, replicas, step.tensor)
    if replicas < 2:
        return 0.0
    sent = 0.0
    if step.zero == 1 and step.broadcast_parameters:  # by one owner after the other
        owners = step.shard_count
        sent = owners * links.broadcast(2 * stored / owners, owners, step.tensor)
        seconds -= links.gather(2 * stored, owners, step.tensor)
    return max(0.0, seconds - window) + contention * min(seconds, window) + sent
