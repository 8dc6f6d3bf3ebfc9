# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step: layers, pipelines, collectives and overlap.

The unit is a layer of a microbatch on one device. Its kernels run one after another; the host
launches them beside. Collectives of sharded parameters (FSDP) run beside the layer's arithmetic,
those of tensor and expert shards in sequence, as far as the software does not split them. A
pipeline adds its bubble, and sums of gradients hide behind the last backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardax.plan.hardware.hardware import Hardware
from shardax.plan.timing.kernels import Kernels, Links, both
from shardax.plan.timing.transformer import Recompute, TrainingStep, TransformerShape

_HIDDEN_TENSOR = 0.9  # of the collectives of a tensor axis that are split on purpose
_COMPILED_FIGURES = ("passes", "layer_launch", "expert_launch")
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
        self.kernels = Kernels(chip, figures, step.precision, software)
        self.links = Links(chip, figures, step.device_count, step.slices)
        self.recompute = Recompute.parse(step.recompute, matrices=model.mlp_matrices)
        # The share of the layers that the policy is about.
        self.repeated = self.recompute.share(model.layers / step.pipeline, step.virtual)
        self.tokens = step.sequences * step.sequence / step.context
        # Experts are whole: each tensor shard sends its own part of the tokens to them.
        self.routed_tokens = self.tokens / step.tensor
        self.stream_shards = step.tensor if step.sequence_parallel else 1

    def figure(self, name: str) -> float:
        """Returns a figure of the software."""
        # A TPU runs compiled programs, whoever wrote them: no host launches their kernels.
        software = self.software
        if self.chip.kind == "tpu" and name in _COMPILED_FIGURES:
            software = "xla"
        return self.figures[f"{software}.{name}"]

    @property
    def hides_gradients(self) -> bool:
        """Whether sums of gradients run beside the backward pass."""
        if self.step.overlap_gradients is not None:
            return self.step.overlap_gradients
        return self.software != "untuned"

    def passes(self, *, sparse: bool) -> tuple[Pass, Pass]:
        """Forward and backward pass of a layer, recomputation in the latter."""
        forward, backward, again = Pass(), Pass(), self.recompute
        self._products(forward, backward, sparse)
        self._attention(forward, backward)
        self._elementwise(forward, backward, sparse)
        self._collectives(forward, backward, sparse)
        backward.attention += self.repeated * again.attention * forward.attention
        backward.memory += self.repeated * again.elementwise * forward.memory
        whole = self.repeated * min(again.projections, again.mlp)
        for name in ("tensor", "experts", "context"):
            setattr(backward, name, getattr(backward, name) + whole * getattr(forward, name))
        return forward, backward

    def _products(self, forward: Pass, backward: Pass, sparse: bool) -> None:
        model, step, figures = self.model, self.step, self.figures
        add = functools.partial(self._product, forward, backward)
        for inputs, outputs in model.attention_products(step.tensor):
            add(self.tokens, inputs, outputs, self.recompute.projections)

        # The MLP, or the experts of every token.
        gates = model.mlp_matrices - 1
        hidden = model.expert_width * model.shared_experts if sparse else model.mlp_hidden
        hidden /= step.tensor
        if hidden:
            add(self.tokens, model.embed, gates * hidden, self.recompute.mlp)
            add(self.tokens, hidden, model.embed, self.recompute.mlp)

        # The other experts, each of its own rows.
        if sparse:
            local = max(1.0, model.experts / step.expert)
            rows = self.routed_tokens * model.top_k * (step.capacity_factor or 1.0) / local
            slow = 1 + figures["kernels.grouped_rows"] / rows
            slow /= figures["kernels.grouped_share"]
            width = model.expert_width
            add(rows, model.embed, gates * width, self.recompute.mlp, local, slow)
            add(rows, width, model.embed, self.recompute.mlp, local, slow)

    def _product(
        self,
        forward: Pass,
        backward: Pass,
        rows: float,
        inputs: float,
        outputs: float,
        repeated: float,
        count: float = 1,
        slow: float = 1.0,
    ) -> None:
        """Adds a product, its two derivatives, and the narrowing of their operands."""
        kernels = self.kernels
        seconds = count * slow * kernels.product(rows, outputs, inputs)
        narrow = count * kernels.quantization(rows * inputs)
        forward.products += seconds
        forward.memory += narrow
        repeated *= self.repeated
        backward.products += repeated * seconds
        backward.products += count * slow * kernels.product(rows, inputs, outputs)
        backward.memory += repeated * narrow + count * kernels.quantization(rows * outputs)
        rank = self.step.adapter_rank
        if not rank:
            backward.products += count * slow * kernels.product(inputs, outputs, rows)
            return

        # Weights that stay have no derivative; adapters beside them are two thin products.
        thin = kernels.product(rows, rank, inputs, wide=True)
        thin += kernels.product(rows, outputs, rank, wide=True)
        forward.products += count * thin
        backward.products += (2 + repeated) * count * thin

    def _attention(self, forward: Pass, backward: Pass) -> None:
        model, step = self.model, self.step
        heads = model.heads / step.tensor
        sizes = heads, model.key_width, model.value_width
        if step.fused_attention:
            context = model.mean_context(step.sequence)
            seconds = self.kernels.attention(self.tokens, context, *sizes, step.attention_kernel)
            seconds *= self._ring_loss(forward, backward)
            forward.attention += seconds
            backward.attention += self.kernels.attention_backward(seconds)
        else:
            seconds = self.kernels.plain_attention(self.tokens, step.sequence, *sizes)
            forward.attention += seconds
            backward.attention += 2 * seconds

    def _ring_loss(self, forward: Pass, backward: Pass) -> float:
        """Returns the slowest shard's share of attention; adds the sums of partial results."""
        step, model = self.step, self.model
        if step.context == 1 or step.context_kind not in ("ring", "zigzag"):
            return 1.0
        # Each step of a ring reads and writes a sum in 32 bits, of values and of their derivatives.
        width = model.heads / step.tensor * model.value_width
        moved = self.kernels.streamed((step.context - 1) * 8 * self.tokens * width)
        forward.memory += moved
        backward.memory += 2 * moved
        # In order, the last shard's queries read nearly all keys, and the others wait.
        return 2 - 1 / step.context if step.context_kind == "ring" else 1.0

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

        # Partial sums of attention and of the MLP.
        if step.tensor > 1:
            hidden = _HIDDEN_TENSOR if step.overlap_tensor else 0.0
            may_hide = self.chip.kind == "tpu" or step.sequence_parallel
            if may_hide and step.overlap_tensor is not False:
                hidden = max(hidden, self.figure("tensor_hidden"))
            seconds = links.reduce(2 * self.tokens * model.embed, step.tensor) * (1 - hidden)
            forward.tensor += 2 * seconds
            backward.tensor += 2 * seconds

        # Keys and values of the whole sequence, behind attention.
        if step.context > 1:
            keys = model.key_heads / step.tensor * (model.key_width + model.value_width)
            if step.context_kind == "ulysses":
                # Queries, keys, values and results change from shards of tokens to shards of heads.
                queries = model.heads / step.tensor * (model.key_width + model.value_width)
                sent = 2 * self.tokens * (queries + keys)
                exchanged = links.exchange(sent, step.context, step.tensor)
                forward.context += exchanged
                backward.context += exchanged
                keys = 0.0
            bytes_ = 2 * self.tokens * keys * step.context
            seconds = links.gather(bytes_, step.context, step.tensor)
            forward.context += max(0.2 * seconds, seconds - 0.5 * forward.attention)
            backward.context += max(0.4 * seconds, 2 * seconds - 0.5 * backward.attention)

        # Tokens to their experts and back.
        if sparse and step.expert > 1:
            rows = self.routed_tokens * model.top_k * (step.capacity_factor or 1.0)
            bytes_ = 2 * rows * model.embed
            seconds = links.exchange(bytes_, step.expert, 1, model.top_k, step.expert_nodes)
            if step.overlap_experts:
                seconds *= 0.3
            forward.experts += 2 * seconds
            backward.experts += 2 * seconds

    def head(self) -> Pass:
        """Returns both passes of the output layer and the loss."""
        columns = self.model.vocab / self.step.tensor
        kernels, tokens, embed = self.kernels, self.tokens, self.model.embed
        products = kernels.product(tokens, columns, embed, wide=True)
        products += kernels.product(tokens, embed, columns, wide=True)
        if not self.step.adapter_rank:
            products += kernels.product(columns, embed, tokens, wide=True)
        return Pass(
            products=products,
            memory=kernels.streamed(tokens * columns * self.figures["kernels.loss_bytes"]),
        )

    def launches(self, *, sparse: bool) -> float:
        """Returns the host's seconds for both passes of a layer."""
        seconds = self.figure("layer_launch") + sparse * self.figure("expert_launch")
        if self.recompute.projections and self.recompute.mlp:
            again = max(self.recompute.mlp, self.recompute.projections)
            seconds *= 1 + 0.3 * self.repeated * again
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

    gathered = gather(1.0 if is_narrow else 2.0)
    scattered = 0.0 if step.adapter_rank else gather(step.gradient_bytes)
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
    microbatches = step.microbatches

    # All layers of a microbatch, those with experts and those without.
    work = Pass()
    exposed_parameters = host = forward_seconds = backward_seconds = 0.0
    groups = [
        (model.layers - model.sparse_layers, False),
        (model.sparse_layers, True),
        (model.extra_layers, bool(model.experts)),
    ]
    for count, sparse in groups:
        if count <= 0:
            continue
        forward, backward = layers.passes(sparse=sparse)
        work.add(forward, count)
        work.add(backward, count)
        busy = sum(vars(forward).values()) + sum(vars(backward).values())
        launch = layers.launches(sparse=sparse)
        host += count * (both(busy, launch) - busy)
        forward_seconds += count * forward.arithmetic
        backward_seconds += count * backward.arithmetic
        exposed_parameters += count * _exposed_parameters(layers, forward, backward, sparse)

    # The slowest stage, with the output layer as so many layers' worth.
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

    # Stages wait for the first microbatch and the last, and for messages.
    bubble = 0.0
    if step.pipeline > 1:
        steady = stage * layer_seconds * microbatches
        bubble = steady / microbatches * (step.pipeline - 1) / step.virtual
        stride = step.tensor * step.context * step.data
        message = links.send(2 * layers.tokens * model.embed / step.tensor, stride)
        bubble += 2 * message * (step.pipeline - 1 + 0.5 * microbatches * step.virtual)

    # Gradients are summed beside the last backward pass, where the software does it so.
    window = backward_seconds / step.pipeline if layers.hides_gradients else 0.0
    gradients = _gradient_sums(model, step, links, window, layers.figure("contention"))

    moved = _offloaded_bytes(model, step, layers.tokens)
    if moved:
        # To the host in the forward pass and back in the backward pass, beside the arithmetic of
        # each.
        seconds = moved / figures["links.host_bandwidth"] / step.pipeline
        busy = backward_seconds / step.pipeline, forward_seconds / step.pipeline
        exposed = sum(max(0.0, seconds - hidden) for hidden in busy) * microbatches
        host += exposed / max(scale, 1e-9)

    # Adapters are too small to count.
    optimizer = figures["jobs.step_overhead"]
    updated = 0.0 if step.adapter_rank else local_parameters(model, step, optimizer=True)
    if step.host_optimizer:
        optimizer += _host_update(step, figures, updated, chip)
    else:
        optimizer += layers.kernels.streamed(_MASTER_BYTES * updated)

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


def _offloaded_bytes(model: TransformerShape, step: TrainingStep, tokens: float) -> float:
    """Returns the bytes of a microbatch's activations that a device moves to the host."""
    stream = model.embed / step.tensor
    queries = model.heads * model.key_width / step.tensor
    keys = model.key_heads * model.key_width / step.tensor
    hidden = model.mlp_hidden / step.tensor
    widths = {
        "decoder_layer_input": stream,
        "query_proj": queries,
        "key_proj": keys,
        "value_proj": keys,
        "kv_proj": 2 * keys,
        "qkv_proj": queries + 2 * keys,
        "context": model.heads * model.value_width / step.tensor,
        "out_proj": stream,
        "mlpwi": (model.mlp_matrices - 1) * hidden,
        "mlpwi_0": hidden,
        "mlpwi_1": hidden,
        "mlpwo": stream,
    }

    named = sum(widths[name] for name in step.offloaded)
    return 2 * tokens * (stream * step.offloaded_layers + named * model.layers)


def _host_update(
    step: TrainingStep, figures: Mapping[str, float], updated: float, chip: Hardware
) -> float:
    """Returns the seconds of an optimizer's update by the host, of a device's parameters."""
    # Gradients go there and parameters come back; Adam streams through the host's memory, of
    # which each device of a node has its part.
    moved = (step.gradient_bytes + 2) * updated / figures["links.host_bandwidth"]
    devices = min(chip.node_size or 4, step.device_count)
    memory = figures["links.host_memory"] / devices
    return moved + (_MASTER_BYTES - 2) * updated / memory


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
    if step.adapter_rank:  # those of adapters are small
        return 0.0
    stored = local_parameters(model, step, optimizer=False)
    if links.chip.kind == "tpu":
        seconds = links.between_slices(step.gradient_bytes * stored)
        return max(0.0, seconds - window) + contention * min(seconds, window)

    replicas = step.data * step.context
    if step.zero >= 2:
        # Those of a shard are scattered with its layers; what is left is between groups of shards.
        replicas //= max(1, step.shard_count)
        stride = step.tensor * step.shard_count
        seconds = links.reduce(step.gradient_bytes * stored, replicas, stride)
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
