# SPDX-License-Identifier: Apache-2.0
"""Expected times of layouts: of a traced step, of its compiled program, and beside each other."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax import models, plan, train
from shardax.plan.inputs import Inputs
from shardax.plan.searching.dimensions import trace_dimensions
from shardax.plan.searching.traced import traced_workload

LENGTH = 256


@sx.jit(donate_argnums=(0, 1))
def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    loss, gradients = sx.value_and_grad(models.next_token_loss)(model, batch)
    optimizer.update(gradients)
    return loss


def decoder(batch: int = 64, **options: Any) -> tuple[Any, ...]:
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    config = models.TransformerConfig(
        vocab_size=4096, num_layers=4, embed_dim=1024,
        attention=models.AttentionConfig(**heads), mlp=models.MLPConfig(dim=4096),
        **({"dtype": "bfloat16", "scan_layers": True} | options),
    )  # fmt: skip
    model = models.Transformer(config, rngs=sx.Rngs(0))
    tokens = plan.NamedShape((batch, LENGTH), "int32", ("batch", "seq"))
    return model, train.Optimizer(model, optax.adamw(1e-3)), {"inputs": tokens, "targets": tokens}


@functools.cache
def decoder_dimensions() -> tuple[Inputs, Any]:
    """Inputs of the step of ``decoder``, and what its trace says, which no mesh changes."""
    inputs = Inputs(step, decoder())
    return inputs, trace_dimensions(inputs)


def traced(rules: list[Any], mesh: dict[str, int]) -> Any:
    inputs, dimensions = decoder_dimensions()
    layout = plan.Layout("layout", tuple(rules), tuple(mesh.items()))
    return traced_workload(layout, dimensions, inputs.batch_names, {})


FSDP = [("batch", "data"), ("embed", "data")]
TENSOR = [("heads", "model"), ("kv_heads", "model"), ("mlp", "model"), ("vocab", "model")]
LAYOUTS: dict[str, tuple[list[Any], dict[str, int]]] = {
    "fsdp": (FSDP, {"data": 8}),
    "tensor": ([("batch", "data"), *TENSOR], {"data": 4, "model": 2}),
}


@functools.cache
def compiled(name: str) -> plan.LayoutReport:
    """The report of a layout of ``LAYOUTS``, whose program is compiled once for all tests."""
    rules, mesh = LAYOUTS[name]
    [report] = plan.compare(
        step, decoder(), {name: rules}, mesh, "gpu:h100:1x8", compiler="estimate", cache=None
    )
    return report


def test_devices_share_operations_of_a_split_batch() -> None:
    whole, split = traced([], {"data": 1}), traced([("batch", "data")], {"data": 8})
    total = sum(product.flops for product in whole.products)
    assert sum(product.flops for product in split.products) == pytest.approx(total / 8)


def test_fsdp_gathers_a_weight_once_in_each_pass() -> None:
    transfers = traced(FSDP, {"data": 8}).transfers
    weights = 4 * 1024 * (4 * 1024 + 3 * 4096) + 1024 * 4096  # of layers, and the output
    gathered = sum(t.runs * t.payload for t in transfers if t.role == "parameters")
    # Forward and backward; the output layer's is gathered once, as no loop is between its uses.
    assert gathered == pytest.approx(2 * (2 * weights - 1024 * 4096))
    scattered = sum(t.runs * t.payload for t in transfers if t.role == "gradients")
    assert scattered == pytest.approx(2 * weights)
    assert {t.kind for t in transfers if t.role == "gradients"} == {"reduce-scatter"}
    assert not [t for t in transfers if t.role == "tensor"]


def test_tensor_shards_sum_activations_over_their_axis() -> None:
    transfers = traced(TENSOR, {"model": 4}).transfers
    assert {t.role for t in transfers} == {"tensor"}
    stream = 2 * 64 * LENGTH * 1024  # bytes in bfloat16
    sums = sum(t.runs for t in transfers if t.kind == "all-reduce" and t.payload == stream)
    # In a layer two forward, and backward one for each product that reads the stream: of gate and
    # up, queries, keys and values; one of the output layer.
    assert sums == 4 * (2 + 2 + 3) + 1


def expert_layer(kernel: Any, x: jax.Array, experts: jax.Array) -> Any:
    """Rows of two experts for each token, sorted by expert."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        order = jnp.argsort(experts.reshape(-1))
        counts = jnp.bincount(experts.reshape(-1), length=8).astype(jnp.int32)
        rows = jax.lax.ragged_dot(x[order // 2], kernel, counts)
        return (jnp.zeros((1024, 512)).at[order // 2].add(rows) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))(kernel.value, x)


def experts_work(rules: list[Any], mesh: dict[str, int], kind: str) -> Any:
    kernel = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 256, 512)), axes=("expert", "in", "up"))
    x = plan.NamedShape((1024, 256), "float32", ("batch", "in"))
    inputs = Inputs(expert_layer, (kernel, x, plan.NamedShape((1024, 2), "int32", ("batch", None))))
    layout = plan.Layout("layout", tuple(rules), tuple(mesh.items()))
    dimensions = trace_dimensions(inputs, mesh)
    return traced_workload(layout, dimensions, frozenset({"batch"}), {}, kind=kind)


EXPERTS = [("batch", "expert"), ("expert", "expert")]


def test_ragged_products_are_those_that_compilers_make() -> None:
    product = 2.0 * 2048 * 256 * 512  # of rows with the matrix of their expert
    gpu, tpu = (experts_work([("batch", "data")], {"data": 4}, kind) for kind in ("gpu", "tpu"))
    assert [p.flops for p in gpu.products] == [8 * product / 4] * 3  # all experts, masked
    assert sorted(p.flops for p in tpu.products) == [product / 4, product / 4, 8 * product / 4]
    grouped = min(tpu.products, key=lambda p: p.flops)
    assert (grouped.rows, grouped.batch) == (2048 / 4 / 8, 8)


def test_rows_are_sent_to_devices_of_their_experts() -> None:
    work = experts_work(EXPERTS, {"expert": 4}, "tpu")
    product = 2.0 * 2048 * 256 * 512 / 4
    # Room for the most rows that can come: two experts here, for each token of four devices.
    assert sorted(p.flops for p in work.products) == [4 * product, 4 * product, 2 * 4 * product]
    sent = [(t.role, t.payload, t.size, t.runs) for t in work.transfers if t.kind == "all-to-all"]
    # Tokens and their results; of the gradient that of results and of tokens.
    rows = 4 * 2048 / 4
    assert sorted(sent) == [("experts", 256 * rows, 4, 2), ("experts", 512 * rows, 4, 2)]
    assert not [t for t in work.transfers if t.role == "gradients"]  # each expert has one device


def test_experts_on_their_own_axis_are_cut() -> None:
    rules = [("batch", "data"), ("expert", "expert")]
    work = experts_work(rules, {"data": 2, "expert": 4}, "tpu")
    half = 2.0 * 2048 * 256 * 512 / 2  # of the rows, all of which can come to two experts
    assert sorted(p.flops for p in work.products) == [half, half, 2 * half]
    assert {p.batch for p in work.products} == {2}
    alone = experts_work(rules, {"data": 2, "expert": 1}, "tpu")
    assert sorted(p.flops for p in alone.products) == [half, half, 8 * half]


@settings(max_examples=10)
@given(data=st.sampled_from([1, 2, 4, 8]), model=st.sampled_from([1, 2, 4]))
def test_operations_do_not_depend_on_the_mesh(data: int, model: int) -> None:
    rules = [("batch", "data"), *TENSOR]
    work = traced(rules, {"data": data, "model": model})
    total = sum(product.flops for product in traced([], {"data": 1}).products)
    assert sum(product.flops for product in work.products) * data * model == pytest.approx(total)


@pytest.mark.parametrize("name", LAYOUTS)
def test_traced_and_compiled_times_agree(name: str) -> None:
    rules, mesh = LAYOUTS[name]
    report = compiled(name)
    fixed = dict.fromkeys(("batch", "embed", "heads", "kv_heads", "mlp", "vocab")) | dict(rules)
    searched = plan.search(
        step, decoder(), "gpu:h100:1x8", meshes=[mesh], fix=fixed, effort="trace"
    ).reports[0]
    assert report.expected is not None and searched.expected is not None
    assert searched.expected.seconds == pytest.approx(report.expected.seconds, rel=0.5)
    assert not searched.compiled and report.compiled


def test_traced_layouts_are_ranked_by_expected_time() -> None:
    model = decoder(512, remat="full")
    found = plan.search(
        step, model, "tpu:v5e:8x8", mesh_axes=("data", "model"), effort="trace", top=3
    )
    assert dict(found.best().layout.rules)["batch"] in ("data", ("data", "model"))
    assert all(report.expected is not None for report in found)
    seconds = [report.expected.seconds for report in found if report.expected]
    assert seconds == sorted(seconds)
    assert "Nothing was compiled" in str(found)


def test_expected_time_survives_json(tmp_path: Any) -> None:
    found = plan.search(step, decoder(), "tpu:v5e:4x4", effort="trace", top=2)
    found.to_json(tmp_path / "plan.json")
    assert plan.Plan.from_json(tmp_path / "plan.json") == found


def test_report_says_mfu_and_tokens() -> None:
    report = compiled("fsdp")
    assert report.expected is not None
    seconds = report.expected.seconds
    assert report.tokens_per_second_per_chip == pytest.approx(64 * LENGTH / seconds / 8)
    peak = 8 * plan.find_hardware("h100").peak("bf16")
    assert 0 < report.mfu <= report.flops * 8 / (seconds * peak) * 1.001
    assert "MFU" in str(plan.explain(report)) and "expected" in str(plan.explain(report))


def test_cpu_layouts_have_no_expected_time() -> None:
    def loss(weight: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ weight.value)

    weight = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 8)), axes=("in", "out"))
    x = plan.NamedShape((8, 8), "float32", ("batch", "in"))
    [report] = plan.compare(
        loss, (weight, x), {"dp": [("batch", "data")]}, {"data": 8}, "cpu:8", cache=None
    )
    assert report.expected is None and report.time is not None


def test_kernels_and_precisions_are_compared_together() -> None:
    def make(attention: str | None, precision: str) -> Any:
        def loss(weight: Any, x: jax.Array) -> jax.Array:
            heads = (x.astype(precision) @ weight.value.astype(precision)).reshape(64, 512, 8, 128)
            out = jax.nn.dot_product_attention(heads, heads, heads, implementation=attention)
            return out.astype("float32").sum()

        weight = sx.Param(sx.Init(jax.nn.initializers.ones, (1024, 1024)), axes=("embed", "heads"))
        return loss, (weight, plan.NamedShape((64, 512, 1024), "float32", ("batch", None, "embed")))

    found = plan.search(
        make, (), "gpu:h100:1x8", effort="trace", meshes=[{"data": 8}], top=None,
        fix={"batch": "data"}, attention=[None, "xla"], precision=["float32", "bfloat16"],
    )  # fmt: skip
    labels = {report.layout.name.partition(" attention:")[2] for report in found}
    assert labels == {
        f"{kernel} precision:{dtype}"
        for kernel in (None, "xla")
        for dtype in ("float32", "bfloat16")
    }
    # Products in bfloat16 run at twice the rate of those in float32, and move half of the bytes.
    assert found.best().layout.name.endswith("bfloat16")


def test_choices_need_a_function_of_them() -> None:
    with pytest.raises(sx.errors.PlanInputError, match="With precision, step is a function"):
        plan.search(step, decoder(), "gpu:h100:1x8", precision=["bfloat16"])


def test_pages_show_expected_times_by_part(tmp_path: Any) -> None:
    found = plan.search(step, decoder(), "tpu:v5e:4x4", effort="trace", top=2)
    found.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "Expected time of a step" in text and "waits for" in text
    assert "Published steps of models and hardware like these" in text
    assert text.count("products") >= 2  # in the legend and in the bars' descriptions


# --- plans that compile nothing -------------------------------------------------------------------


@functools.cache
def traced_plan(target: str) -> plan.Plan:
    options: dict[str, Any] = {"effort": "trace", "cache": None, "progress": False}
    return plan.search(step, decoder(), target, **options)


def test_traced_plan_says_seconds_and_has_no_empty_columns() -> None:
    found = traced_plan("gpu:h100:1x8")
    text = str(found)
    table = text[text.index("layout  ") : text.index("Warnings")]
    for words in ("  -", "peak", "free", "time of a step", "collectives", " ns", "compiling"):
        assert words not in table, words
    assert {"expected", "range", "tokens", "waits for", "args"} <= set(re.split(r"  +|\n", table))
    expected = found.best().expected
    assert expected is not None and f"{1e3 * expected.seconds:.1f}" in table and " ms" in table


@pytest.mark.parametrize("scanned", [True, False])
def test_traced_plan_lists_published_steps_of_its_size(scanned: bool) -> None:
    options: dict[str, Any] = {"effort": "trace", "top": 1, "cache": None, "progress": False}
    found = plan.search(step, decoder(scan_layers=scanned), "gpu:h100:1x8", **options)
    attention, mlp = 1024 * 1024 * 4, 3 * 1024 * 4096
    parameters = 4 * (attention + mlp + 2 * 1024) + 2 * 4096 * 1024 + 1024
    assert [report.parameters for report in found] == [parameters]
    for published in plan.published_steps("h100", parameters, 8):
        assert " ".join(published.summary.split()) in " ".join(str(found).split())


def test_plan_names_the_next_number_of_devices_that_sizes_divide() -> None:
    def note(nodes: int) -> str:
        text = " ".join(traced_plan(f"gpu:h100:{nodes}x8").notes)
        return text[text.index("devices are") - 3 :] if "devices are" in text else ""

    assert note(1) == note(2) == ""
    assert note(3).startswith("24 devices are 2^3 x 3, which the step's sizes do not divide")
    assert note(3).endswith("The next number of devices that they divide is 32.")


def test_search_splits_parameters_within_a_part_of_the_batch() -> None:
    options: dict[str, Any] = {"effort": "trace", "top": None, "cache": None, "progress": False}
    found = plan.search(
        step, decoder(8192), "gpu:h100:512x8", meshes=[{"data": 512, "model": 8}], **options
    )
    near, far = (
        found[f"batch=data+model embed={axis} (512x8)"].expected for axis in ("model", "data")
    )
    # Within a node parameters are gathered at the rate of its switch.
    assert near.parts.parameters < 0.2 * far.parts.parameters and near.seconds < far.seconds
    # Of eight shards there are these alone, and none that are far from each other.
    fewer = plan.search(
        step, decoder(8192), "gpu:h100:512x8", meshes=[{"data": 8, "model": 512}], **options
    )
    both = plan.search(
        step,
        decoder(8192),
        "gpu:h100:512x8",
        meshes=[{"data": 8, "model": 512}, {"data": 512, "model": 8}],
        **options,
    )
    assert "batch=data+model embed=data (8x512)" in [report.layout.name for report in fewer]
    assert "batch=data+model embed=data (8x512)" not in [report.layout.name for report in both]
