# SPDX-License-Identifier: Apache-2.0
"""What plans say of whole steps, against counts by hand, for each compiler and the estimate tier.

In formulas b is the batch, d the width, f the hidden size and s the bytes of an element; of n
devices an all-reduce sends 2 (n-1)/n of its bytes, others (n-1)/n. Steps are of Modules and rules;
that the reader of programs agrees with such counts to the byte is tested in ``tests/planner/hlo``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import plan
from shardax.models import DECODER_RULES, Decoder, DecoderConfig, next_token_loss
from tests.models import small
from tests.needs import needs_compiler

b, d, f = 512, 1024, 4096
LAYERS, EXPERTS, TOKENS = 6, 8, 256
TWO, FOUR, EIGHT = 1 / 2, 3 / 4, 7 / 8  # (n-1)/n of two, four and eight devices
Wire = dict[tuple[str, tuple[str, ...]], float]


# --- steps ----------------------------------------------------------------------------------------


def param(shape: tuple[int, ...], *axes: str | None) -> sx.Param[Any]:
    return sx.Param(sx.Init(jax.nn.initializers.ones, shape), axes=axes)


class Perceptron(sx.Module):
    """Float32 weights, computed in the dtype; the result is added to the input if residual."""

    def __init__(self, dtype: str, hidden: int = f, residual: bool = False) -> None:
        self.up = param((d, hidden), "embed", "mlp")
        self.down = param((hidden, d), "mlp", "embed")
        self.dtype, self.residual = jnp.dtype(dtype), residual

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = sx.constrain(x @ self.up.value.astype(self.dtype), ("batch", "mlp"))
        y = jnp.tanh(hidden) @ self.down.value.astype(self.dtype)
        return sx.constrain(x + y if self.residual else y, ("batch", None))


class Tower(sx.Module):
    def __init__(self, dtype: str, remat: str | None) -> None:
        self.layers = sx.nn.Stack(lambda: Perceptron(dtype, d, True), LAYERS, remat=remat)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers(x)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(model(x).astype(jnp.float32) ** 2)


def descend(model: Any, gradients: Any) -> None:
    new = jax.tree.map(lambda p, g: p - 0.1 * g, sx.state(model, sx.Param), gradients)
    sx.update(model, new)


@sx.jit(donate_argnums=0)
def train(model: Any, x: jax.Array) -> jax.Array:
    loss, gradients = sx.value_and_grad(loss_of)(model, x)
    descend(model, gradients)
    return loss


@sx.jit(donate_argnums=0)
def train_and_go_on(model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Also gives the gradient of the input, as to a layer before."""
    loss, (gradients, of_x) = sx.value_and_grad(loss_of, argnums=(0, 1))(model, x)
    descend(model, gradients)
    return loss, of_x


@sx.jit(donate_argnums=0)
def train_decoder(model: Any, batch: Any) -> jax.Array:
    loss, gradients = sx.value_and_grad(next_token_loss)(model, batch)
    descend(model, gradients)
    return loss


def expert(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Tokens [of a device, expert, d] go to the device of their expert and come back."""
    x = lax.all_to_all(x, "expert", 1, 0, tiled=True)
    return lax.all_to_all(jnp.einsum("tew,ewv->tev", x, weight), "expert", 0, 1, tiled=True)


@sx.jit
def experts(weight: Any, x: jax.Array) -> jax.Array:
    specs = {"in_specs": (P("expert"), P("expert")), "out_specs": P("expert")}
    return sx.shard_map(expert, **specs)(x, weight.value.astype(x.dtype))


def _ring(x: jax.Array) -> jax.Array:
    """One of each: sums, gathers, scatters, exchanges and moves rows over model."""
    whole = lax.all_gather(x, "model", tiled=True)
    x = lax.psum_scatter(whole * 2, "model", tiled=True)
    devices = lax.axis_size("model")
    x = lax.ppermute(x, "model", [(i, (i + 1) % devices) for i in range(devices)])
    x = lax.all_to_all(x, "model", 1, 0, tiled=True)
    return lax.psum(jnp.sin(x), "data")


@sx.jit
def collectives(x: jax.Array) -> jax.Array:
    return sx.shard_map(_ring, in_specs=P(("data", "model")), out_specs=P("model"))(x)


# --- counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Count:
    """What is known by hand of one device.

    Attributes:
        flops: Operations of matrix products.
        wire: Wire bytes by kind and axes, without those of gradients over ``data``.
        gradients: What a reduce-scatter of the gradients over ``data`` sends; an all-reduce sends
            it twice.
    """

    flops: float = 0.0
    wire: Wire = field(default_factory=dict)
    gradients: float = 0.0


def tensor_parallel(s: int) -> Count:
    # y and the gradient of x, [b/2, d], are summed over model; the loss, 4 bytes, over data.
    wire = {
        ("all-reduce", ("model",)): 2 * (2 * FOUR * b / 2 * d * s),
        ("all-reduce", ("data",)): 2 * TWO * 4,
    }
    return Count(12 * b * d * f / 8, wire, gradients=TWO * 2 * d * f / 4 * s)


def data_parallel(s: int) -> Count:
    loss: Wire = {("all-reduce", ("data",)): 2 * EIGHT * 4}
    return Count(10 * b * d * f / 8, loss, gradients=EIGHT * 2 * d * f * s)


def fully_sharded(s: int) -> Count:
    # Both weights are gathered once: the backward pass takes what the forward pass gathered.
    count = data_parallel(s)
    gathers: Wire = {("all-gather", ("data",)): EIGHT * 2 * d * f * s}
    return Count(count.flops, count.wire | gathers, count.gradients)


def both(s: int) -> Count:
    # A device has an eighth of the weights and gathers a quarter, of the second weight once more
    # for the gradient of the hidden layer; y is summed over model.
    wire = {
        ("all-gather", ("data",)): TWO * 3 * d * f / 4 * s,
        ("all-reduce", ("model",)): 2 * FOUR * b / 2 * d * s,
        ("all-reduce", ("data",)): 2 * TWO * 4,
    }
    return Count(10 * b * d * f / 8, wire, gradients=TWO * 2 * d * f / 4 * s)


def scan(s: int) -> Count:
    # 6 layers; the gradient of x, which the layer before needs, is summed in each of them.
    wire = {
        ("all-reduce", ("model",)): LAYERS * 2 * (2 * FOUR * b / 2 * d * s),
        ("all-reduce", ("data",)): 2 * TWO * 4,
    }
    return Count(LAYERS * 12 * b * d * d / 8, wire, gradients=LAYERS * TWO * 2 * d * d / 4 * s)


def remat(s: int) -> Count:
    # Of a layer only the first product is computed anew; nothing needs the second.
    once = scan(s)
    return Count(LAYERS * 14 * b * d * d / 8, once.wire, once.gradients)


def sharded_remat(s: int) -> Count:
    gathers = LAYERS * 2 * (EIGHT * 2 * d * d * s)  # forward, and anew in the backward pass
    wire = {("all-gather", ("data",)): gathers, ("all-reduce", ("data",)): 2 * EIGHT * 4}
    return Count(LAYERS * 14 * b * d * d / 8, wire, gradients=gathers / 2)


def mixture(s: int) -> Count:
    sent = EIGHT * TOKENS / 8 * EXPERTS * d * s
    return Count(2 * TOKENS * d * d, {("all-to-all", ("expert",)): 2 * sent})


def written_out(s: int) -> Count:
    shard = b / 8 * d * s
    wire = {
        ("all-gather", ("model",)): FOUR * 4 * shard,
        ("reduce-scatter", ("model",)): FOUR * 4 * shard,
        ("collective-permute", ("model",)): shard,
        ("all-to-all", ("model",)): FOUR * shard,
        ("all-reduce", ("data",)): 2 * TWO * shard,
    }
    return Count(0, wire)


TP = {"batch": "data", "mlp": "model"}
FSDP = {"batch": "data", "embed": "data"}
MESH, LINE = {"data": 2, "model": 4}, {"data": 8}


def rows(dtype: str) -> plan.NamedShape:
    return plan.NamedShape((b, d), dtype, ("batch", None))


@dataclass(frozen=True)
class Case:
    """A step, its arguments by dtype, its layout, and the count by bytes of an element."""

    step: Callable[..., Any]
    args: Callable[[str], tuple[Any, ...]]
    rules: Mapping[str, str]
    mesh: Mapping[str, int]
    count: Callable[[int], Count]


def perceptron(dtype: str) -> tuple[Any, ...]:
    return Perceptron(dtype), rows(dtype)


def tower(dtype: str) -> tuple[Any, ...]:
    return Tower(dtype, None), rows(dtype)


def rematerialised(dtype: str) -> tuple[Any, ...]:
    return Tower(dtype, "full"), rows(dtype)


def tokens_of_experts(dtype: str) -> tuple[Any, ...]:
    x = plan.NamedShape((TOKENS, EXPERTS, d), dtype, ("expert", None, None))
    return param((EXPERTS, d, d), "expert", None, None), x


CASES = {
    "tensor parallel": Case(train_and_go_on, perceptron, TP, MESH, tensor_parallel),
    "data parallel": Case(train, perceptron, {"batch": "data"}, LINE, data_parallel),
    "fully sharded": Case(train, perceptron, FSDP, LINE, fully_sharded),
    "both": Case(train, perceptron, FSDP | TP, MESH, both),
    "scan": Case(train, tower, TP, MESH, scan),
    "remat": Case(train, rematerialised, TP, MESH, remat),
    "sharded remat": Case(train, rematerialised, FSDP, LINE, sharded_remat),
    "experts": Case(experts, tokens_of_experts, {"expert": "expert"}, {"expert": 8}, mixture),
    "written out": Case(
        collectives,
        lambda dtype: (plan.NamedShape((b, d), dtype, ("batch", None)),),
        {"batch": "data"},
        MESH,
        written_out,
    ),
}


# --- compilers ------------------------------------------------------------------------------------

SHARES = {"cpu": 0.0, "estimate": 1.0}
"""Share of sharded gradients that is reduce-scattered; of the others the version decides."""


def dtype_of(compiler: str) -> str:
    """The CPU compiler turns collectives of bfloat16 into such of float32."""
    return "float32" if compiler == "cpu" else "bfloat16"


@functools.cache
def planned(name: str, compiler: str) -> plan.LayoutReport:
    case = CASES[name]
    target = {"cpu": "cpu:8", "gpu": "gpu:h100:1x8"}.get(compiler, "tpu:v5e:2x4")
    (report,) = plan.compare(
        case.step,
        case.args(dtype_of(compiler)),
        {name: case.rules},
        case.mesh,
        target,
        compiler="estimate" if compiler == "estimate" else "target",
        processes=None if compiler in SHARES else 1,
        cache=None,
    )
    return report


def wire_of(report: plan.LayoutReport) -> Wire:
    wire: Wire = {}
    for each in report.collectives:
        key = each.kind, each.axes
        wire[key] = wire.get(key, 0.0) + each.wire_bytes
    return wire


def with_gradients(count: Count, scattered: float) -> Wire:
    wire = dict(count.wire)
    for kind, sent in (
        ("reduce-scatter", scattered * count.gradients),
        ("all-reduce", (1 - scattered) * 2 * count.gradients),
    ):
        if sent:
            wire[kind, ("data",)] = wire.get((kind, ("data",)), 0.0) + sent
    return wire


EACH = [
    pytest.param(name, compiler, marks=() if compiler in SHARES else needs_compiler(compiler))
    for name in CASES
    for compiler in ("cpu", "estimate", "tpu", "gpu")
]


@pytest.mark.parametrize(("name", "compiler"), EACH)
def test_flops_and_wire_bytes_equal_hand_counts(name: str, compiler: str) -> None:
    report = planned(name, compiler)
    assert report.outcome == "fits", report.reason
    count = CASES[name].count(4 if compiler == "cpu" else 2)
    assert report.flops == count.flops
    assert report.replicated_compute == 1
    assert [w for w in report.warnings if "fewer than" in w or "promoted" in w] == []
    if compiler in SHARES:
        sharded = "embed" in CASES[name].rules
        assert wire_of(report) == with_gradients(count, SHARES[compiler] * sharded)
        return
    found, gradients = wire_of(report), {("all-reduce", ("data",)), ("reduce-scatter", ("data",))}
    expected = {key: sent for key, sent in count.wire.items() if key not in gradients}
    if (name, compiler) == ("both", "tpu"):  # it sees that the second weight is gathered twice
        expected["all-gather", ("data",)] *= 2 / 3
    assert {key: sent for key, sent in found.items() if key not in gradients} == expected
    over_data = sum(found.get(key, 0.0) for key in gradients)
    small_sums = count.wire.get(("all-reduce", ("data",)), 0.0)
    assert count.gradients <= over_data <= 2 * count.gradients + small_sums


def test_remat_recomputes_one_product_and_sends_nothing_more() -> None:
    kept, anew = planned("scan", "estimate"), planned("remat", "estimate")
    assert anew.flops / kept.flops == pytest.approx(14 / 12)
    assert anew.total_wire_bytes == kept.total_wire_bytes


# --- decoders -------------------------------------------------------------------------------------


def test_decoder_split_both_ways_matches_hand_counts() -> None:
    layers, width, hidden, vocab, heads, head = 3, 128, 256, 512, 8, 16
    batch, length = 8, 64
    config = DecoderConfig(
        vocab_size=vocab,
        num_layers=layers,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head,
        mlp_dim=hidden,
        scan_layers=True,
        remat="full",
        dtype="bfloat16",
    )
    tokens = plan.NamedShape((batch, length), "int32", ("batch", "seq"))
    args = Decoder(config, rngs=sx.Rngs(0)), {"inputs": tokens, "targets": tokens}
    rules = [(n, "data" if n == "embed" else axes) for n, axes in DECODER_RULES]
    (report,) = plan.compare(
        train_decoder, args, {"both": rules}, MESH, "tpu:v5e:2x4", compiler="estimate", cache=None
    )
    # Of one device: tokens of half the batch, weights of a layer and of the head over model.
    tokens_here = batch / 2 * length
    layer = (4 * width * heads * head + 3 * width * hidden) / 4
    head_weights = width * vocab / 4
    attention = 2 * (2 * tokens_here * length * heads / 4 * head)
    forward = 2 * tokens_here * layer + attention
    unneeded = 2 * tokens_here * hidden / 4 * width  # the last product of what is computed anew
    flops = layers * (4 * forward - unneeded) + 3 * 2 * tokens_here * head_weights
    assert report.flops == flops
    wire = {(each.kind, each.axes): 0.0 for each in report.collectives}
    for each in report.collectives:
        if each.dtype == "bf16":  # norms, the loss and tokens are float32 and integers
            wire[each.kind, each.axes] += each.wire_bytes
    assert wire["all-gather", ("data",)] == 2 * TWO * (2 * layers * layer + head_weights)
    # By the version of XLA the gradient of the embedding, or its activations, go to other devices.
    embedding = [each for each in report.collectives if "model.embed" in "".join(each.parameters)]
    tables = (1 + len(embedding)) * head_weights
    assert wire["reduce-scatter", ("data",)] == 2 * TWO * (layers * layer + tables)
    # Out and down; out anew; of the gradients qkv, and gate with up. And embedding and head once.
    activation = 2 * FOUR * tokens_here * width * 2
    assert wire["all-reduce", ("model",)] == (5 * layers + 2) * activation
    # The softmax over a split vocabulary: maximum, sum, the target's, and the sum of the gradient,
    # float32 of each token. The lookup takes the tokens apart along model and together again.
    softmax, ids = 4 * 2 * FOUR * tokens_here * 4, tokens_here * 4
    assert report.wire_bytes()["model",] == (5 * layers + 2) * activation + softmax + ids
    # Where the gradient of the embedding goes to other devices, XLA says that it makes it whole.
    told = [each for each in report.warnings if "bf16[4,64,128]" in each]
    assert report.warnings == tuple(told) and len(told) <= len(embedding)


@pytest.mark.parametrize(("scan_layers", "norms"), [(False, 5), (True, 3)])
def test_tensor_parallel_decoder_layout_has_known_wire_bytes(scan_layers: bool, norms: int) -> None:
    """Those of ``tests/models/test_meshes.py``, which another reader of the program counted."""
    config = dataclasses.replace(small.SMALL, num_layers=2, scan_layers=scan_layers)
    tokens = plan.NamedShape((4, 8), "int32", ("batch", None))
    # Float32 of 16 tokens of a device. Of a layer: out, down; of the gradients q, k, v, gate with
    # up, which this compiler leaves apart or not. Embedding and head once; the softmax as above.
    activation, softmax = 4 * 16 * 16, 4 * (4 * 16)
    over_model = 2 * 7 * activation + 2 * activation + softmax
    # Gradients of the weights of a device: of two layers, of embedding, head and last norm; the sum
    # of the loss and the number of targets.
    layer = (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32) / 4 + 2 * 16
    over_data = 4 * (2 * layer + 2 * 32 * 16 / 4 + 16) + 4 + 4
    report = plan.assert_layout(
        train_decoder,
        (Decoder(config, rngs=sx.Rngs(0)), {"inputs": tokens, "targets": tokens}),
        DECODER_RULES,
        MESH,
        wire_bytes={"model": 2 * FOUR * over_model, "data": 2 * TWO * over_data},
        replicated_params=norms,
    )
    assert {each.kind for each in report.collectives} == {"all-reduce"}
    returned = sum(each.payload * each.runs for each in report.collectives)
    assert returned == over_model + over_data == 24_136


def test_unknown_axis_size_warns_of_unknown_operations() -> None:
    fixed = [(i, (i + 1) % 4) for i in range(4)]

    @sx.jit
    def step(weight: Any, x: jax.Array) -> jax.Array:
        def shift(x: jax.Array) -> jax.Array:
            return lax.ppermute(x, "model", fixed)

        return sx.shard_map(shift, in_specs=P("model"), out_specs=P("model"))(x @ weight.value)

    args = param((d, d), "embed", "mlp"), rows("float32")
    (report,) = plan.compare(step, args, {"": {"batch": "model"}}, {"model": 4}, "cpu:4")
    assert (report.outcome, report.flops) == ("fits", 2 * b * d * d / 4)
    assert wire_of(report) == {("collective-permute", ("model",)): b / 4 * d * 4}
    [warning] = [each for each in report.warnings if "axis_size" in each]
    assert "the operations of the whole program are unknown" in warning
