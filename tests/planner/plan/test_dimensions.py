# SPDX-License-Identifier: Apache-2.0
"""The dimension model: matrix products and the names of their dimensions, without compiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardax as sx
from shardax.plan import Layout, NamedShape, Target
from shardax.plan.compile.evaluate import evaluate
from shardax.plan.inputs import Inputs
from shardax.plan.searching.classes import matching_groups
from shardax.plan.searching.dimensions import DimensionModel, trace_dimensions
from tests.planner.plan.steps import decoder, param, perceptron

Described = dict[tuple[str, ...], float]


def model_of(step: Callable[..., Any], *args: Any) -> DimensionModel:
    return trace_dimensions(Inputs(step, args))


def described(dimensions: DimensionModel) -> Described:
    """Operations by the names of dimensions, as ``role:name+name``."""
    found: Described = {}
    for product in dimensions.products:
        key = tuple(sorted(f"{d.role}:{'+'.join(sorted(d.names))}" for d in product.dims))
        found[key] = found.get(key, 0.0) + product.flops
    return found


def named(*shape_and_names: tuple[int, str]) -> NamedShape:
    sizes, names = zip(*shape_and_names, strict=True)
    return NamedShape(sizes, "float32", names)


# --- products -------------------------------------------------------------------------------------


def test_perceptron_step_has_hand_counted_products() -> None:
    step, args = perceptron(batch=32, embed=16, mlp=64)
    each = 2.0 * 32 * 16 * 64
    assert described(model_of(step, *args)) == {
        ("left:batch", "right:mlp", "sum:embed"): 2 * each,  # up; of down, what hidden gets
        ("left:batch", "right:embed", "sum:mlp"): each,  # down
        ("left:embed", "right:mlp", "sum:batch"): each,  # what up gets
        ("left:mlp", "right:embed", "sum:batch"): each,  # what down gets
    }


def test_names_of_constraints_reach_the_products() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        return sx.constrain(x.reshape(4, 6, 8), ("batch", "seq", "embed")) @ weight.value

    found = model_of(step, param((8, 16), "embed", "mlp"), named((24, "rows"), (8, "embed")))
    assert found.constraints == (((4, 6, 8), ("batch", "seq", "embed")),)
    assert described(found) == {
        ("left:batch+rows", "left:rows+seq", "right:mlp", "sum:embed"): 2.0 * 4 * 6 * 8 * 16
    }


def test_loop_products_count_per_iteration_and_get_layers() -> None:
    def step(weights: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights.value)[0]

    found = model_of(step, param((5, 8, 8), "layers", "in", "out"), named((4, "batch"), (8, "in")))
    assert [(p.flops, p.runs) for p in found.products] == [(5 * 2.0 * 4 * 8 * 8, 5)]
    assert found.looped == {"layers"}


def test_loop_invariants_and_sums_are_sent_once() -> None:
    def step(weight: Any, blocks: jax.Array) -> jax.Array:
        def block(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            y = x @ weight.value.astype(jnp.float32)
            return total + (x.T @ y).astype(jnp.float32), None

        return jax.lax.scan(block, jnp.zeros((8, 8)), blocks)[0]

    blocks = named((5, "block"), (4, "batch"), (8, "in"))
    found = model_of(step, param((8, 8), "in", "out"), blocks)
    assert {(p.runs, p.changes) for p in found.products} == {(5, (5, 1, 5)), (5, (0, 5, 1))}

    def plain(blocks: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros((4, 8)), blocks)[0]

    assert model_of(plain, blocks).products == ()

    def residual(weights: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x + x @ w, None), x, weights.value)[0]

    (product,) = model_of(
        residual, param((5, 8, 8), "layers", "in", "out"), named((4, "batch"), (8, "in"))
    ).products
    assert product.changes == (5, 5, 5)  # the sum is what the next layer reads


def test_merged_dimension_shares_names_with_its_parts() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        return x.reshape(-1, 8) @ weight.value.reshape(8, 12)

    weight = param((8, 3, 4), "embed", "heads", "head_dim")
    found = model_of(step, weight, named((2, "batch"), (6, "seq"), (8, "embed")))
    assert list(described(found)) == [("left:batch+seq", "right:head_dim+heads", "sum:embed")]


def test_merge_and_split_restore_the_same_dimensions() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        flat = (x.reshape(-1, 8) @ weight.value).reshape(2, 6, 4)
        return jnp.einsum("bse,bte->bst", flat, flat)

    found = model_of(step, param((8, 4), "embed", "out"), named((2, "b"), (6, "s"), (8, "embed")))
    assert ("batch:b", "left:s", "right:s", "sum:out") in described(found)


def test_rows_of_rows_have_the_names_of_all() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        rows = x.reshape(6, 1, 8)  # and each of them four times, as for its experts
        return jnp.broadcast_to(rows, (6, 4, 8)).reshape(24, 8) @ weight.value

    found = model_of(step, param((8, 5), "a", "b"), named((2, "n"), (3, "s"), (8, "a")))
    assert described(found) == {("left:n+s", "right:b", "sum:a"): 2.0 * 24 * 8 * 5}


def test_embedding_lookup_keeps_token_rows_and_vectors() -> None:
    def step(table: Any, weight: Any, tokens: jax.Array) -> jax.Array:
        return table.value[tokens] @ weight.value

    tokens = NamedShape((4, 6), "int32", ("batch", "seq"))
    table, weight = param((32, 8), "vocab", "embed"), param((8, 16), "embed", "mlp")
    found = model_of(step, table, weight, tokens)
    assert list(described(found)) == [("left:batch", "left:seq", "right:mlp", "sum:embed")]


def test_convolution_sums_over_its_window_and_channels() -> None:
    def step(kernel: Any, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel.value, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    kernel = param((3, 3, 4, 6), "h", "w", "channels", "features")
    x = named((2, "batch"), (8, "rows"), (8, "columns"), (4, "channels"))
    found = model_of(step, kernel, x)
    assert described(found) == {
        ("left:batch", "left:columns", "left:rows", "right:features", "sum:channels"): (
            2.0 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
        )
    }


def test_grouped_convolution_does_not_sum_over_its_channels() -> None:
    def step(kernel: Any, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel.value, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=4,
        )  # fmt: skip

    kernel = param((3, 1, 4), "window", "one", "features")
    found = model_of(step, kernel, named((2, "batch"), (8, "rows"), (4, "channels")))
    assert described(found) == {
        ("left:batch", "left:rows", "right:features"): 2.0 * (2 * 8 * 4) * 3
    }


def test_transposing_reshape_relates_no_names() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        return jax.lax.reshape(x, (8, 8), dimensions=(1, 0)) @ weight.value

    found = model_of(step, param((8, 6), "a", "b"), named((8, "n"), (8, "a")))
    assert list(described(found)) == [("left:", "right:b", "sum:a")]


def test_regrouped_dimensions_relate_no_names() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        return x.reshape(3, 8) @ weight.value

    found = model_of(step, param((8, 5), "a", "b"), named((4, "n"), (6, "m")))
    assert list(described(found)) == [("left:", "right:b", "sum:a")]


def test_padding_keeps_the_names_of_dimensions() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((1, 1), (0, 0))) @ weight.value

    found = model_of(step, param((8, 5), "a", "b"), named((4, "n"), (8, "a")))
    assert described(found) == {("left:n", "right:b", "sum:a"): 2.0 * 6 * 8 * 5}


def test_step_on_no_rows_repeats_no_work() -> None:
    found = model_of(
        lambda weight, x: x @ weight.value, param((8, 5), "a", "b"), named((0, "n"), (8, "a"))
    )
    assert (found.flops, found.replicated_compute({}, {"data": 8})) == (0.0, 1.0)
    assert matching_groups((2, 0), (0, 3)) == []


def test_custom_kernels_are_noted_and_not_counted() -> None:
    from jax.experimental import pallas

    def double(source: Any, result: Any) -> None:
        result[...] = source[...] * 2

    def step(weight: Any, x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(double, out_shape=shape)(x) @ weight.value

    found = model_of(step, param((8, 5), "a", "b"), named((8, "n"), (8, "a")))
    assert found.flops == 2.0 * 8 * 8 * 5
    assert found.notes == ("operations of custom kernels are not counted",)


def ragged_step(weight: Any, x: jax.Array, sizes: jax.Array) -> Any:
    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.lax.ragged_dot(x, weight, sizes) ** 2).sum()

    return jax.grad(loss, (0, 1))(weight.value, x)


def test_rows_of_groups_meet_one_matrix_each() -> None:
    sizes = NamedShape((4,), "int32", (None,))
    weight = param((4, 8, 16), "expert", "embed", "mlp")
    found = model_of(ragged_step, weight, named((24, "batch"), (8, "embed")), sizes)
    product = 2.0 * 24 * 8 * 16
    assert described(found) == {
        ("group:expert", "right:mlp", "rows:batch", "sum:embed"): product,
        ("group:expert", "right:embed", "rows:batch", "sum:mlp"): product,  # what rows get
        ("left:embed", "right:mlp", "sums:expert", "terms:batch"): product,  # what matrices get
    }
    assert found.masked_flops() == found.masked_flops(recomputed=False) == 3 * 3 * product


def test_groups_in_a_batch_have_their_own_products() -> None:
    def step(weight: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.vmap(jax.lax.ragged_dot, (0, 0, 0))(x, weight.value, sizes)

    weight = param((3, 4, 8, 16), "layers", "expert", "embed", "mlp")
    x = named((3, "layers"), (24, "batch"), (8, "embed"))
    found = model_of(step, weight, x, NamedShape((3, 4), "int32", ("layers", None)))
    assert described(found) == {
        ("batch:layers", "group:expert", "right:mlp", "rows:batch", "sum:embed"): (
            3 * 2.0 * 24 * 8 * 16
        )
    }


def test_products_that_nothing_needs_are_not_counted() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        jnp.tanh(x @ weight.value)
        return x.sum()

    assert model_of(step, param((8, 8), "a", "b"), named((4, "n"), (8, "a"))).products == ()


def test_loops_of_unknown_length_and_conditions_are_noted() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ weight.value, x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ weight.value, lambda x: x, x)

    found = model_of(step, param((8, 8), "a", "b"), named((4, "n"), (8, "a")))
    assert found.notes == (
        "a loop of unknown length counts once",
        "all branches of a condition count",
    )
    assert found.flops == 2 * 2.0 * 4 * 8 * 8


def test_operations_without_a_count_are_noted() -> None:
    def step(weight: Any, x: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        spec = jax.sharding.PartitionSpec()
        local = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return jnp.linalg.cholesky(local(x, weight.value)) + jax.random.normal(jax.random.key(0))

    found = model_of(step, param((8, 8), "a", "b"), named((8, "n"), (8, "a")))
    assert found.flops == 2.0 * 8 * 8 * 8
    assert found.notes == ("operations of cholesky are not counted",)


def test_functions_inside_are_walked_where_they_are_called() -> None:
    twice = jax.jit(lambda x, w: x @ w)

    def step(first: Any, second: Any, x: jax.Array) -> jax.Array:
        return jax.checkpoint(twice)(twice(x, first.value), second.value)

    args = param((8, 6), "a", "b"), param((6, 4), "b", "c"), named((2, "n"), (8, "a"))
    assert set(described(model_of(step, *args))) == {
        ("left:n", "right:b", "sum:a"),
        ("left:n", "right:c", "sum:b"),
    }


def test_grouped_attention_ties_key_heads_to_heads() -> None:
    step, args = decoder()
    found = model_of(step, *args)
    assert found.looped == {"layers"}
    scores = ("batch:batch", "batch:heads+kv_heads", "left:heads", "left:seq", "right:seq")
    assert any(set(scores) <= set(key) for key in described(found))


@pytest.mark.parametrize("compile_by", [sx.jit, jax.jit, None])
def test_steps_are_traced_however_they_are_compiled(compile_by: Any) -> None:
    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        return sx.constrain(x @ weight, ("batch", "mlp"))

    made = compile_by(step) if compile_by else step
    found = model_of(made, named((8, "embed"), (16, "mlp")), named((4, "batch"), (8, "embed")))
    assert list(described(found)) == [("left:batch", "right:mlp", "sum:embed")]
    assert found.constraints == (((4, 16), ("batch", "mlp")),)


def test_step_reading_values_is_refused_with_its_line() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(sx.errors.PlanInputError, match=r"concrete values at .*test_dimensions.py"):
        model_of(step, named((4, "batch")))


# --- replicated compute ---------------------------------------------------------------------------


def test_unnamed_dimension_counts_as_split_up_to_size() -> None:
    x = NamedShape((3, 8), "float32", (None, "embed"))
    found = model_of(lambda w, x: x @ w.value, param((8, 16), "embed", "mlp"), x)
    assert found.replicated_compute({}, {"data": 2}) == 1.0
    assert found.replicated_compute({}, {"data": 12}) == 4.0
    assert found.replicated_compute({"mlp": "data"}, {"data": 12}) == 1.0


RULES = {
    "all": {"batch": "data", **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "model")},
    "sequence": {"batch": "data", "seq": "model"},
}  # fmt: skip
MESH = {"data": 4, "model": 2}


@pytest.fixture(scope="module")
def traced() -> tuple[Inputs, DimensionModel]:
    step, args = decoder(num_layers=1)
    inputs = Inputs(step, args)
    return inputs, trace_dimensions(inputs)


@pytest.mark.parametrize("name", RULES)
def test_law_replicated_compute_is_a_lower_bound(
    name: str, traced: tuple[Inputs, DimensionModel]
) -> None:
    inputs, found = traced
    layout = Layout(name, tuple(RULES[name].items()), tuple(MESH.items()))
    report = evaluate(inputs, layout, Target.parse("cpu:8"))
    bound = found.replicated_compute(RULES[name], MESH)
    assert found.flops == report.program_flops
    assert bound <= report.replicated_compute * 1.001
    assert bound == pytest.approx(report.replicated_compute, rel=0.05)


@given(st.dictionaries(st.sampled_from(["batch", "embed", "mlp"]), st.sampled_from("abc")))
def test_replicated_compute_never_grows_with_another_rule(rules: dict[str, str]) -> None:
    sizes = {"a": 2, "b": 3, "c": 4}
    found = PERCEPTRON
    less = found.replicated_compute(rules, sizes)
    for name in rules:
        fewer = {other: axis for other, axis in rules.items() if other != name}
        assert 1.0 <= less <= found.replicated_compute(fewer, sizes) <= 24.0


_STEP, _ARGS = perceptron(batch=48, embed=24, mlp=48)
PERCEPTRON = model_of(_STEP, *_ARGS)


# --- shapes ---------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=5), st.data())
def test_law_reshape_groups_have_equal_products(sizes: list[int], data: st.DataObject) -> None:
    other = data.draw(factorisation(math.prod(sizes)))
    groups = matching_groups(sizes, other)
    for taken, made in groups:
        assert math.prod(sizes[i] for i in taken) == math.prod(other[i] for i in made)
    assert [i for taken, _ in groups for i in taken] == [i for i, n in enumerate(sizes) if n > 1]
    assert [i for _, made in groups for i in made] == [i for i, n in enumerate(other) if n > 1]


@st.composite
def factorisation(draw: st.DrawFn, product: int) -> list[int]:
    """Sizes of a given product, in any order, with ones."""
    sizes: list[int] = []
    while product > 1:
        factor = draw(st.sampled_from([n for n in range(2, product + 1) if product % n == 0]))
        sizes.append(factor)
        product //= factor
    return sizes
