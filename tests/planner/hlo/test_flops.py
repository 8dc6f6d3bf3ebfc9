# SPDX-License-Identifier: Apache-2.0
"""Operations of products and convolutions, against formulas and against counting one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from shardax.errors import HloReadError
from shardax.hlo import MatrixProduct, matmul_flops, model_flops, parse, read_program
from tests.planner.hlo.compilers import COMPILERS

NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(*, strides: tuple[int, int] = (1, 1), padding: str = "VALID", **more: Any) -> Any:
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=NHWC, **more
    )


def gradients(f: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sum(f(a, b).astype(jnp.float32) ** 2), (0, 1))


# Outputs x products of each; rows of SAME padding meet 2 of 3 places at both ends of 16.
PLACES = 16 * 3 - 2
PRODUCTS: dict[str, tuple[Any, list[tuple[int, ...]], int]] = {
    "matrices": (jnp.dot, [(16, 32), (32, 24)], 2 * 16 * 24 * 32),
    "batched": (
        lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b),
        [(4, 128, 8, 64), (4, 128, 8, 64)],
        2 * 4 * 8 * 128 * 128 * 64,
    ),
    "gradients": (
        gradients(lambda a, b: jnp.einsum("bqd,bkd->bqk", a, b)),
        [(4, 64, 32), (4, 64, 32)],
        3 * 2 * 4 * 64 * 64 * 32,
    ),
    "convolution": (
        convolution(),
        [(8, 16, 16, 32), (3, 3, 32, 64)],
        2 * 8 * 14 * 14 * 64 * 9 * 32,
    ),
    "padded": (
        convolution(padding="SAME"),
        [(8, 16, 16, 32), (3, 3, 32, 64)],
        2 * 8 * PLACES * PLACES * 64 * 32,
    ),
    "strided": (
        convolution(strides=(2, 2)),
        [(8, 17, 17, 32), (3, 3, 32, 64)],
        2 * 8 * 8 * 8 * 64 * 9 * 32,
    ),
    "dilated": (
        convolution(rhs_dilation=(2, 2)),
        [(8, 16, 16, 32), (3, 3, 32, 64)],
        2 * 8 * 12 * 12 * 64 * 9 * 32,
    ),
    "grouped": (
        convolution(feature_group_count=4),
        [(8, 16, 16, 128), (3, 3, 32, 128)],
        2 * 8 * 14 * 14 * 128 * 9 * 32,
    ),
    "batch_grouped": (
        convolution(batch_group_count=2),
        [(8, 16, 16, 32), (3, 3, 32, 64)],
        2 * 4 * 14 * 14 * 64 * 9 * 32,
    ),
    "convolution_gradients": (
        gradients(convolution()),
        [(8, 16, 16, 32), (3, 3, 32, 64)],
        3 * 2 * 8 * 14 * 14 * 64 * 9 * 32,
    ),
}


@pytest.mark.parametrize(
    "hardware", [pytest.param(name, marks=COMPILERS[name].marks) for name in ("cpu", "v5e", "h100")]
)
@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_products_of_compiled_programs(hardware: str, name: str) -> None:
    compiler = COMPILERS[hardware]
    f, shapes, expected = PRODUCTS[name]
    place = SingleDeviceSharding(compiler.devices[0])
    arguments = [jax.ShapeDtypeStruct(s, compiler.dtype, sharding=place) for s in shapes]
    compiled = jax.jit(f).lower(*arguments).compile()
    assert read_program(compiled.as_text() or "", {"x": 1}).matmul_flops == expected


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_products_of_programs_that_are_only_lowered(name: str) -> None:
    f, shapes, expected = PRODUCTS[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert matmul_flops(parse(jax.jit(f).lower(*arguments).as_text("hlo"))) == expected


def one(line: str, *shapes: str) -> str:
    """A program of one instruction, of parameters of some types."""
    parameters = "".join(
        f"  %p{index} = {shape} parameter({index})\n" for index, shape in enumerate(shapes)
    )
    return f"HloModule m\n\nENTRY %main () -> f32[] {{\n{parameters}  ROOT %r = {line}\n}}\n"


@given(
    size=st.integers(1, 7),
    window=st.integers(1, 5),
    stride=st.integers(1, 4),
    low=st.integers(-2, 6),
    high=st.integers(0, 6),
    input_dilation=st.integers(1, 4),
    window_dilation=st.integers(1, 3),
)
def test_convolution_counts_only_positions_inside_the_input(**drawn: int) -> None:
    """Against every place of the window, one by one."""
    size, window, stride = drawn["size"], drawn["window"], drawn["stride"]
    low, inner, outer = drawn["low"], drawn["input_dilation"], drawn["window_dilation"]
    length = (size - 1) * inner + 1 + low + drawn["high"]
    outputs = max(0, (length - (window - 1) * outer - 1) // stride + 1)
    met = sum(
        (place := out * stride + index * outer - low) % inner == 0 and 0 <= place // inner < size
        for out in range(outputs)
        for index in range(window)
    )
    text = one(
        f"f32[2,{outputs},5] convolution(%p0, %p1), window={{size={window} stride={stride} "
        f"pad={low}_{drawn['high']} lhs_dilate={inner} rhs_dilate={outer}}}, "
        "dim_labels=b0f_0io->b0f",
        f"f32[2,{size},3]",
        f"f32[{window},3,5]",
    )
    assert matmul_flops(parse(text)) == 2 * met * 2 * 3 * 5


def test_products_of_nvidias_libraries() -> None:
    configuration = (
        'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    )
    for target in ("__cublas$lt$matmul", "__cublas$gemm", "__cublas$lt$matmul$f8"):
        text = one(
            "(f32[16,24], s8[4096]) custom-call(%p0, %p1), "
            f'custom_call_target="{target}", {configuration}',
            "f32[16,32]",
            "f32[32,24]",
        )
        facts = read_program(text, {"x": 1})
        assert (facts.matmul_flops, facts.warnings) == (2 * 16 * 24 * 32, ())


def test_ragged_products_count_each_row_once() -> None:
    rows = one(
        "f32[128,32] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}",
        *("f32[128,64]", "f32[4,64,32]", "s32[4]"),
    )
    sums = one(
        "f32[4,64,32] ragged-dot(%p0, %p1, %p2), lhs_contracting_dims={0}, "
        "rhs_contracting_dims={0}, lhs_ragged_dims={0}",
        *("f32[128,64]", "f32[128,32]", "s32[4]"),
    )
    assert [matmul_flops(parse(text)) for text in (rows, sums)] == [2 * 128 * 64 * 32] * 2


def test_kernel_calls_are_named_as_not_counted() -> None:
    text = one('f32[8] custom-call(%p0), custom_call_target="tpu_custom_call"', "f32[8]")
    facts = read_program(text, {"x": 1})
    assert facts.matmul_flops == 0
    assert facts.warnings == ("What 'tpu_custom_call' computes is not counted (1 calls).",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("f32[2,2] dot(%p0, %p0)", "names no contracted dimensions"),
        ("f32[2,2] dot(%p0, %p0), lhs_contracting_dims={5}", "no dimension 5"),
        ("f32[2,2] convolution(%p0, %p0)", "dim_labels are None"),
        (
            "f32[2,2] convolution(%p0, %p0), dim_labels=b0f_0io->b0f",
            "dim_labels are 'b0f_0io->b0f'",
        ),
        ("f32[2,2] dot(), lhs_contracting_dims={0}", "operand 0 is not"),
    ],
)
def test_unreadable_product_is_refused(line: str, why: str) -> None:
    with pytest.raises(HloReadError, match=rf"'r' cannot be counted: .*{why}"):
        matmul_flops(parse(one(line, "f32[2,2]")))


def attention_call(target: str, mask: str, window: int = 0) -> str:
    """A call of cuDNN's attention of 2 x 8 heads of 64, 256 queries and 128 keys."""
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", '
        f'"dimensions": ["2", "8", "256", "128"]}}, "mask_type": "{mask}", '
        f'"sliding_window_length": {window}}}}}'
    )
    operands = ["bf16[2,256,8,64]", "bf16[2,128,8,64]", "bf16[2,128,8,64]"]
    call = f'bf16[2,8,256,64] custom-call(%p0, %p1, %p2), custom_call_target="{target}"'
    return one(f"{call}, backend_config={config}", *operands)


@pytest.mark.parametrize(
    ("target", "mask", "window", "pairs", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 256 * 128, 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 128 * 129 // 2 + 128 * 128, 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 16, 16 * 17 // 2 + 240 * 16, 2),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 0, 256 * 128, 5),
    ],
)
def test_fused_attention_counts_pairs_that_a_mask_leaves(
    target: str, mask: str, window: int, pairs: int, products: int
) -> None:
    facts = read_program(attention_call(target, mask, window), {})
    assert facts.matmul_flops == products * 2 * 2 * 8 * pairs * 64
    assert [(each.rows, each.columns, each.depth, each.fused) for each in facts.products] == [
        (256, 128, 64, True)
    ]
    assert facts.warnings == ()


@pytest.mark.parametrize(
    ("kernel", "scope", "pairs", "products"),
    [
        ("fwd_residuals", "splash[causal]", 256 * 257 // 2, 2),
        ("dq_no_residuals", "splash[full]", 256 * 256, 3),
        ("dkv_no_residuals", "splash[causal,window=16]", 16 * 17 // 2 + 240 * 16, 4),
        ("fwd_no_residuals", "splash[window=9]", 256 * 17 - 2 * sum(range(1, 9)), 2),
        ("fwd_no_residuals", "f", 256 * 256, 2),
    ],
)
def test_splash_counts_pairs_of_its_scopes_mask(
    kernel: str, scope: str, pairs: int, products: int
) -> None:
    operands = ["s8[1,2,2]", "bf16[2,8,256,128]", "bf16[2,4,256,128]", "bf16[2,4,256,128]"]
    call = 'bf16[2,8,256,128] custom-call(%p0, %p1, %p2, %p3), custom_call_target="tpu_custom_call"'
    settings = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}'
    name = f'metadata={{op_name="jit(f)/jvp({scope})/splash_mha_{kernel}/pallas_call"}}'
    facts = read_program(one(f"{call}, {settings}, {name}", *operands), {})
    assert facts.matmul_flops == products * 2 * 2 * 8 * pairs * 128
    assert facts.warnings == ()


def test_pallas_kernel_counts_what_it_says() -> None:
    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    cost = pl.CostEstimate(flops=12_345, transcendentals=0, bytes_accessed=4096)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(double, out_shape=x, cost_estimate=cost)
    text = jax.jit(call).trace(x).lower(lowering_platforms=("tpu",)).as_text("hlo")
    assert "\n" in text.partition("cost_estimate")[2][:40]  # its settings are several lines
    facts = read_program(text, {})
    assert (facts.matmul_flops, facts.hbm_bytes, facts.warnings) == (12_345, 4096, ())


def test_grouped_kernels_of_tpus_count_rows_once() -> None:
    def call(name: str) -> str:
        target = 'custom_call_target="tpu_custom_call"'
        return f'custom-call(%p0, %p1, %p2), {target}, metadata={{op_name="jit(f)/{name}"}}'

    operands = ["s32[9]", "bf16[4096,1024]", "bf16[8,1024,2048]"]
    text = one(f"bf16[4096,2048] {call('ragged-dot-none')}", *operands)
    facts = read_program(text, {})
    operations = 2.0 * 4096 * 1024 * 2048
    assert facts.products == (MatrixProduct(operations, 512, 2048, 1024, 8, "bf16"),)
    starts = read_program(one(f"s32[9] {call('ragged-dot-metadata')}", *operands), {})
    assert (facts.warnings, starts.matmul_flops, starts.warnings) == ((), 0, ())


@pytest.mark.parametrize(
    ("result", "operands"),
    [
        ("bf16[4096,2048]", ["bf16[4096,1024]", "bf16[8,1024,2048]"]),
        ("bf16[4096,1024]", ["bf16[4096,2048]", "bf16[8,2048,1024]"]),
        ("bf16[8,1024,2048]", ["bf16[4096,1024]", "bf16[4096,2048]"]),
    ],
    ids=["forward", "rows", "kernels"],
)
def test_grouped_kernels_of_tokamax_count_rows_once(result: str, operands: list[str]) -> None:
    name = '{op_name="jit(f)/transpose(jvp(tokamax[experts]))/pallas_call"}'
    target = 'custom_call_target="__gpu$xla.gpu.triton"'
    call = f"{result} custom-call(%p0, %p1, %p2), {target}, metadata={name}"
    facts = read_program(one(call, *operands, "s32[8]"), {})
    assert (facts.matmul_flops, facts.warnings) == (2.0 * 4096 * 1024 * 2048, ())


def test_kernel_without_a_cost_is_named() -> None:
    facts = read_program(one('f32[] custom-call(), custom_call_target="tpu_custom_call"'), {})
    assert facts.matmul_flops == 0
    assert facts.warnings == ("What 'tpu_custom_call' computes is not counted (1 calls).",)


def test_products_of_a_program_have_their_shapes() -> None:
    text = jax.jit(jnp.matmul).lower(jnp.ones((6, 4, 3)), jnp.ones((6, 3, 5))).as_text("hlo")
    [product] = read_program(text, {}).products
    assert product == MatrixProduct(2 * 6 * 4 * 3 * 5, 4, 5, 3, 6, "f32")


def test_branches_in_shard_map_count_on_each_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def squares(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x)

    text = squares.lower(jnp.ones((8 * 4, 4))).as_text("hlo", debug_info=True)
    assert model_flops(parse(text)).by_dtype == {"f32": 8 * 2 * 4**3}
