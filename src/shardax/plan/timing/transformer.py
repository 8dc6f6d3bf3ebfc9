# SPDX-License-Identifier: Apache-2.0
"""Transformers and their training steps, as sizes.

``TransformerShape`` has the sizes of a decoder, and counts its parameters. ``TrainingStep`` says
how a step of it is laid out: degrees of parallelism, batch, precision and recomputation. Neither
holds an array, and neither depends on a library's model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

import numpy as np

from shardax.extend import Options
from shardax.plan.errors import PlanInputError
from shardax.plan.timing.words import ACTIVATIONS, ATTENTION_KERNELS, CONTEXT_KINDS

PRECISIONS = ("f32", "bf16", "fp16", "fp8", "fp8-row", "mxfp8", "nvfp4", "int8")
_OPTIONS = Options(PlanInputError)
SOFTWARE = ("xla", "megatron", "pytorch", "pytorch-compile", "untuned")
GRAPHS = ("", "layer", "step")


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a decoder.

    Attributes:
        layers: Blocks of attention and MLP.
        embed: Width of the residual stream.
        mlp_hidden: Hidden width of a dense MLP.
        heads: Query heads.
        kv_heads: Heads of keys and values; 0 for as many as ``heads``.
        head_dim: Width of a head; 0 for ``embed / heads``.
        vocab: Rows of the embedding.
        mlp_matrices: 3 with a gate, 2 without.
        tied: Whether the output layer is the embedding.
        experts: Experts of a layer; 0 is a dense model.
        top_k: Experts of a token.
        expert_hidden: Hidden width of an expert; 0 for ``mlp_hidden``.
        shared_experts: Experts of every token.
        dense_layers: First layers of a sparse model with a dense MLP.
        expert_every: Of the other layers every so many has experts: 2 is every second.
        q_rank: Rank of compressed queries (latent attention); 0 if they are not.
        kv_rank: Rank of compressed keys and values; 0 is ordinary attention.
        rope_dim: Of latent attention: width of the rotated part of a head, beside ``head_dim``.
        value_dim: Width of a value head; 0 for ``head_dim``.
        extra_layers: Layers that predict further tokens, each with an output layer of its own run.
        window: Tokens that a windowed layer attends to; 0 for all.
        windowed_share: Share of the layers with a window.
        learned_positions: Whether positions have parameters, as many as the sequence is long.

    Raises:
        PlanInputError: A size is no positive integer, heads cannot share ``kv_heads``, or ``top_k``
            is more than ``experts``.

    Example:
        >>> from shardax import plan
        >>> llama = plan.TransformerShape(
        ...     layers=32, embed=4096, mlp_hidden=14336, heads=32, kv_heads=8, vocab=128256
        ... )
        >>> round(llama.parameters / 1e9, 2)
        8.03
    """

    layers: int
    embed: int
    mlp_hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    mlp_matrices: int = 3
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    expert_every: int = 1
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    extra_layers: int = 0
    window: int = 0
    windowed_share: float = 0.0
    learned_positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "mlp_hidden", "heads", "vocab"):
            _OPTIONS.integers(**{name: getattr(self, name)})
        _OPTIONS.integers(expert_every=self.expert_every, mlp_matrices=self.mlp_matrices)
        for name in (
            *("head_dim", "experts", "top_k", "expert_hidden", "shared_experts", "dense_layers"),
            *("q_rank", "kv_rank", "rope_dim", "value_dim", "extra_layers", "window"),
            "learned_positions",
        ):
            _OPTIONS.integers(0, **{name: getattr(self, name)})
        _OPTIONS.choice("tied", self.tied, (True, False))
        share = self.windowed_share
        fits = _is_finite(share) and 0 <= share <= 1
        _OPTIONS.check("windowed_share", share, fits, "a number from 0 to 1")

        # Sizes that depend on each other.
        shares = Options.is_integer(self.kv_heads) and self.kv_heads >= 0
        shares = shares and self.heads % self.key_heads == 0
        _OPTIONS.check("kv_heads", self.kv_heads, shares, f"a divisor of heads={self.heads}, or 0")
        fits = not self.experts or 0 < self.top_k <= self.experts
        _OPTIONS.check("top_k", self.top_k, fits, f"from 1 to experts={self.experts}")

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def key_width(self) -> int:
        """Width of a head of queries and keys, rotated part included."""
        return (self.head_dim or self.embed // self.heads) + (self.rope_dim if self.kv_rank else 0)

    @property
    def value_width(self) -> int:
        """Width of a value's head."""
        return self.value_dim or self.head_dim or self.embed // self.heads

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return (self.layers - self.dense_layers) // self.expert_every if self.experts else 0

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.expert_hidden or self.mlp_hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of a layer."""
        return round(sum(inputs * outputs for inputs, outputs in self.attention_products()))

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of a dense MLP."""
        return self.mlp_matrices * self.embed * self.mlp_hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of an expert."""
        return self.mlp_matrices * self.embed * self.expert_width

    @property
    def shared_parameters(self) -> int:
        """Parameters of a sparse layer that every token uses, without attention."""
        return self.embed * self.experts + self.shared_experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, and of an output layer."""
        tables = self.vocab * (1 if self.tied else 2) + self.learned_positions
        return tables * self.embed

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._total(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters used by a token."""
        return self._total(self.top_k)

    def _total(self, experts: int) -> int:
        layers = self.layers + self.extra_layers
        sparse = self.sparse_layers + (self.extra_layers if self.experts else 0)
        norms = 2 * self.embed * layers + self.embed
        return (
            layers * self.attention_parameters
            + (layers - sparse) * self.dense_mlp_parameters
            + sparse * (experts * self.expert_parameters + self.shared_parameters)
            + norms
            + self.embedding_parameters
        )

    def attention_products(self, shards: int = 1) -> list[tuple[float, float]]:
        """Inputs and outputs of attention's projections, of one tensor shard."""
        queries = self.heads * self.key_width / shards
        values = self.heads * self.value_width / shards
        if not self.kv_rank:
            # Fewer key heads than shards are repeated.
            keys = max(self.key_heads / shards, 1) * (self.key_width + self.value_width)
            return [(self.embed, queries + keys), (values, self.embed)]
        nope = self.key_width - self.rope_dim
        query = [(self.embed, self.q_rank), (self.q_rank, queries)]
        return [
            *(query if self.q_rank else [(self.embed, queries)]),
            (self.embed, self.kv_rank + self.rope_dim),
            (self.kv_rank, self.heads * (nope + self.value_width) / shards),
            (values, self.embed),
        ]

    def mean_context(self, length: int) -> float:
        """Mean number of tokens read by a token, over causal layers."""
        whole = (length + 1) / 2
        if not self.window or self.window >= length:
            return whole
        windowed = self.window - self.window * (self.window - 1) / (2 * length)
        return self.windowed_share * windowed + (1 - self.windowed_share) * whole


@dataclass(frozen=True)
class Recompute:
    """Shares of the forward pass in the backward pass, 0 to 1."""

    projections: float = 0.0  # of attention
    attention: float = 0.0
    mlp: float = 0.0  # its products
    elementwise: float = 0.0  # norms and activations
    layers: int = 0  # of each stage that are repeated; 0 for all

    @staticmethod
    def parse(text: str | None, *, matrices: int = 3) -> Recompute:
        """Returns the shares of a framework's policy."""
        # Such as "full", "selective", "minimal", or the names of modules.
        policy = (text or "none").lower()
        if policy.startswith(("none", "no ", "off", "false")) or policy == "everything_saveable":
            return Recompute()
        if policy.startswith(("custom", "save_")) or "qkv_proj" in policy:
            return _named_policy(policy, matrices)
        is_named = policy in ("dots_saveable", "checkpoint_dots")
        if policy.startswith(("minimal", "dots_with_no_batch_dims")) or is_named:
            return Recompute(elementwise=1.0, attention=1.0)  # products are saved
        if "per op" in policy or "selective op" in policy or policy == "selective":
            # Every second product is saved, and attention is.
            return Recompute(projections=0.5, mlp=0.5, elementwise=1.0)
        if "selective layer" in policy:
            return Recompute(0.5, 0.5, 0.5, 0.5)
        if policy.startswith("selective"):
            return _modules(text, policy)

        is_full = policy.startswith(("full", "block", "uniform")) or "checkpoint" in policy
        is_full = is_full or policy in ("nothing_saveable", "on", "true", "yes", "all")
        expected = "'none', 'full', 'full, block, N layers', 'selective', 'selective: MODULES', "
        expected += "'minimal', or a policy that names activations"
        _OPTIONS.check("recompute", text, is_full, expected)

        # Megatron's "block" repeats the first layers of a stage; "uniform" repeats all, in groups
        # of so many.
        counted = re.search(r"(\d+) layers?", policy)
        layers = int(counted[1]) if counted and "uniform" not in policy else 0
        return Recompute(1.0, 1.0, 1.0, 1.0, layers)

    def share(self, stage_layers: float, parts: int = 1) -> float:
        """Returns the share of a stage's layers that are repeated; ``parts`` are virtual stages."""
        if not self.layers:
            return 1.0
        return min(1.0, self.layers * parts / stage_layers)


MODULES = (
    *("core_attn", "attention", "layernorm", "norm", "mlp", "moe", "moe_act", "act"),
    *("mla_up_proj", "shared_expert", "shared_experts"),
)
"""Modules that a selective policy names."""


def _modules(text: str | None, policy: str) -> Recompute:
    """Returns the shares of a list of modules that are repeated."""
    listed = policy.replace("core attention", "core_attn")
    listed = re.sub(r"^selective|modules|activations?|recomput(e|ation)", " ", listed)
    names = set(re.sub(r"checkpointing|[():,]", " ", listed).split()) or {"core_attn"}

    unknown = sorted(names - set(MODULES))
    if unknown:
        known = ", ".join(MODULES)
        raise PlanInputError(f"recompute={text!r} names {unknown[0]!r}; modules are {known}.")

    whole_mlp = not names.isdisjoint({"mlp", "moe"})
    norms = not names.isdisjoint({"layernorm", "norm"})
    activations = not names.isdisjoint({"moe_act", "act"})
    return Recompute(
        projections=0.3 * ("mla_up_proj" in names),
        attention=float(not names.isdisjoint({"core_attn", "attention"})),
        mlp=float(whole_mlp),
        elementwise=min(1.0, 0.35 * norms + 0.4 * activations + 0.4 * whole_mlp),
    )


def _named_policy(policy: str, matrices: int) -> Recompute:
    """Shares of MaxText's policies, which name saved activations."""
    named = set(re.findall(r"(\w+)=", policy))
    unknown = sorted(named - set(ACTIVATIONS))
    if unknown:
        known = ", ".join(ACTIVATIONS)
        raise PlanInputError(f"recompute={policy!r} names {unknown[0]!r}; activations are {known}.")

    def saved(*names: str) -> bool:
        return any(f"{name}={place}" in policy for name in names for place in ("device", "offload"))

    heads = saved("query_proj", "qkv_proj") or "qkv_proj" in policy.partition("=")[0]
    output = saved("out_proj")
    up = saved("mlpwi", "mlpwi_0", "mlpwi_1")
    # What the last product of a layer gives is needed by no derivative.
    mlp = 0.0 if up else (matrices - 1) / matrices
    return Recompute(
        projections=0.6 * (not heads) + 0.4 * (not output),
        attention=0.0 if saved("context") else 1.0,
        mlp=mlp,
        elementwise=1.0,
    )


def _is_finite(value: object) -> bool:
    """Whether a value is a finite number, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return math.isfinite(value)


@dataclass(frozen=True)
class TrainingStep:
    """A training step's layout: degrees of parallelism, batch, precision and recomputation.

    Attributes:
        global_batch: Sequences of a step, over all devices.
        sequence: Tokens of a sequence.
        devices: How many, which is the product of the degrees; 0 is the same.
        data: Batch shards.
        zero: 0 for whole parameters and optimizer state on each device, 1 for sharded optimizer
            state, 2 with gradients, 3 with parameters (FSDP).
        shards: Devices over which ``zero`` shards; 0 for all of ``data`` times ``context``.
        tensor: Shards of heads and hidden units.
        sequence_parallel: Whether norms are split over the tensor axis too.
        split_stream: Whether activations between layers are split over the tensor axis, as a
            partitioner does it, without sequence parallelism.
        context: Shards of the sequence.
        pipeline: Stages.
        virtual: Parts of the model on each stage.
        expert: Shards of the experts, of the devices of ``data`` and ``context``.
        slices: TPU slices, joined by the network.
        microbatch: Sequences of a device (its tensor, context and pipeline group) at a time; 0
            for all.
        precision: Of the products, one of ``f32``, ``bf16``, ``fp16``, ``fp8``, ``fp8-row``,
            ``mxfp8``, ``nvfp4``, ``int8``. Hardware without it computes in the next wider one.
        recompute: Policy, as ``Recompute.parse`` reads it.
        fused_attention: Whether scores stay on the chip.
        attention_kernel: Kernel of attention, such as ``"flash2"``, ``"flash3"`` or ``"cudnn"``;
            "" for that of the software and the hardware.
        state_bytes: Bytes of a parameter with its gradient and optimizer state.
        gradient_bytes: Bytes of a gradient that devices send.
        gradient_copy_bytes: Bytes of a further copy of a gradient, such as that in 16 bits beside
            sums in 32.
        broadcast_parameters: Whether owners broadcast parameters of ``zero=1`` one after another,
            and do not gather them at a time.
        update_bytes: Bytes of a parameter that its optimizer's update needs beside its state.
        bucket_elements: Elements of each of two buffers in which gradients and parameters travel.
        overlap_tensor: Whether tensor collectives are split to run beside products; None if
            nothing says so, and the software decides.
        overlap_gradients: Whether sums of gradients run beside the backward pass; None if nothing
            says so, and the software decides.
        overlap_experts: Whether all-to-alls run beside another microbatch.
        graphs: Whether layers (``"layer"``) or the whole step (``"step"``) are launched as CUDA
            graphs.
        offloaded_layers: Layers whose activations are moved to the host.
        offloaded: Activations of every layer that are moved to the host, by name, such as
            ``("query_proj", "out_proj")``.
        host_optimizer: Whether optimizer state and update are the host's.
        adapter_rank: Rank of trained low-rank adapters (LoRA), beside weights that stay; 0 trains
            the weights.
        capacity_factor: Rows of each expert over its even share, which are computed and sent
            whether full or not; 0 for as many as come.
        expert_nodes: Nodes on which the experts of a token lie, at most; 0 for any.
        context_kind: How shards of the sequence share attention: ``"zigzag"`` (a ring that deals
            the sequence out evenly), ``"ring"`` (in order, so that the last shard has most to do),
            ``"gather"`` or ``"ulysses"`` (an exchange of heads).

    Raises:
        PlanInputError: A value is of another type, a degree is no integer of at least 1, a number
            is negative or not finite, the policy is unknown, or batch, sequence, microbatch,
            devices, shards and slices do not divide.

    Example:
        >>> from shardax import plan
        >>> step = plan.TrainingStep(global_batch=64, sequence=8192, data=8, zero=3, tensor=2)
        >>> step.device_count, step.microbatches
        (16, 1)
    """

    global_batch: float
    sequence: int
    devices: int = 0
    data: int = 1
    zero: int = 0
    shards: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    split_stream: bool = False
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    slices: int = 1
    microbatch: float = 0
    precision: str = "bf16"
    recompute: str = "none"
    fused_attention: bool = True
    state_bytes: float = 16
    gradient_bytes: float = 4
    gradient_copy_bytes: float = 0
    broadcast_parameters: bool = False
    update_bytes: float = 0
    bucket_elements: float = 0
    overlap_tensor: bool | None = None
    overlap_gradients: bool | None = None
    overlap_experts: bool = False
    graphs: str = ""
    offloaded_layers: int = 0
    attention_kernel: str = ""
    offloaded: tuple[str, ...] = ()
    host_optimizer: bool = False
    adapter_rank: int = 0
    capacity_factor: float = 0.0
    expert_nodes: int = 0
    context_kind: str = "zigzag"

    def __post_init__(self) -> None:
        self._check_values()
        self._check_division()
        Recompute.parse(self.recompute)

    def _check_values(self) -> None:
        """Refuses values of other types, and numbers that are none."""
        # Truth values, and numbers.
        for name in (
            *("sequence_parallel", "split_stream", "fused_attention", "broadcast_parameters"),
            *("overlap_experts", "host_optimizer"),
        ):
            _OPTIONS.choice(name, getattr(self, name), (True, False))
        for name in ("overlap_tensor", "overlap_gradients"):
            _OPTIONS.choice(name, getattr(self, name), (True, False, None))
        for name in (
            *("microbatch", "state_bytes", "gradient_bytes", "gradient_copy_bytes"),
            *("update_bytes", "bucket_elements", "capacity_factor"),
        ):
            value = getattr(self, name)
            fits = _is_finite(value) and value >= 0
            _OPTIONS.check(name, value, fits, "a finite number of at least 0")
        batch = self.global_batch
        fits = _is_finite(batch) and batch > 0
        _OPTIONS.check("global_batch", batch, fits, "a finite number above 0")

        # Degrees and counts.
        for name in ("data", "tensor", "context", "pipeline", "virtual", "expert", "slices"):
            degree = getattr(self, name)
            if not Options.is_integer(degree) or degree < 1:
                raise PlanInputError(f"{name} is {degree!r}; a degree is an integer of at least 1.")
        _OPTIONS.integers(sequence=self.sequence)
        _OPTIONS.integers(
            0,
            offloaded_layers=self.offloaded_layers,
            devices=self.devices,
            shards=self.shards,
            adapter_rank=self.adapter_rank,
            expert_nodes=self.expert_nodes,
        )

        # Words.
        is_text = isinstance(self.recompute, str)
        _OPTIONS.check("recompute", self.recompute, is_text, "a text")
        if self.precision not in PRECISIONS:
            raise PlanInputError(
                f"precision is {self.precision!r}; it is one of {', '.join(PRECISIONS)}."
            )
        _OPTIONS.choice("zero", self.zero, range(4))
        _OPTIONS.choice("graphs", self.graphs, GRAPHS)
        _OPTIONS.choice("attention_kernel", self.attention_kernel, ("", *ATTENTION_KERNELS))
        _OPTIONS.choice("context_kind", self.context_kind, CONTEXT_KINDS)
        # The letters of a text would be taken for names.
        is_tuple = isinstance(self.offloaded, tuple)
        _OPTIONS.check("offloaded", self.offloaded, is_tuple, "a tuple of names")
        for name in self.offloaded:
            _OPTIONS.choice("offloaded", name, ACTIVATIONS)

    def _check_division(self) -> None:
        """Refuses degrees that do not divide devices, batch and sequence."""
        is_pipeline = self.virtual == 1 or self.pipeline > 1
        _OPTIONS.check("virtual", self.virtual, is_pipeline, "1, as there is no pipeline")

        # Devices.
        product = self.data * self.tensor * self.context * self.pipeline
        is_product = self.devices in (0, product)
        _OPTIONS.check("devices", self.devices, is_product, f"the product of degrees, {product}")
        replicas = self.data * self.context
        divides = not self.shards or replicas % self.shards == 0
        expected = f"a divisor of the {replicas} devices of data and context, or 0"
        _OPTIONS.check("shards", self.shards, divides, expected)
        divides = product % self.slices == 0
        _OPTIONS.check("slices", self.slices, divides, f"a divisor of the {product} devices")

        # Tokens.
        divides = self.sequence % self.context == 0
        expected = f"a divisor of sequence={self.sequence}"
        _OPTIONS.check("context", self.context, divides, expected)
        fits = self.global_batch % self.data == 0
        expected = f"a multiple of data={self.data}, as each batch shard has as many"
        _OPTIONS.check("global_batch", self.global_batch, fits, expected)
        is_divisor = self.microbatch >= 0 and abs(self.replica_batch % self.sequences) < 1e-6
        expected = f"a divisor of the {self.replica_batch:g} sequences of a batch shard, or 0"
        _OPTIONS.check("microbatch", self.microbatch, is_divisor, expected)

    @property
    def device_count(self) -> int:
        """Devices of the step."""
        return self.devices or self.data * self.tensor * self.context * self.pipeline

    @property
    def replica_batch(self) -> float:
        """Sequences of one batch shard in a step."""
        return self.global_batch / self.data

    @property
    def sequences(self) -> float:
        """Sequences of one batch shard in a microbatch."""
        return min(self.microbatch or self.replica_batch, self.replica_batch)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return max(1, math.ceil(self.replica_batch / self.sequences - 1e-6))

    @property
    def shard_count(self) -> int:
        """Devices over which ``zero`` shards."""
        return (self.shards or self.data * self.context) if self.zero else 1

    def like(self, **changes: object) -> TrainingStep:
        """Returns the step with some attributes changed."""
        return dataclasses.replace(self, **changes)
