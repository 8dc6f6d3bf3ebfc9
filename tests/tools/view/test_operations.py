# SPDX-License-Identifier: Apache-2.0
"""Operations of compiled programs and of Modules, against what is known by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh

import shardax as sx
from shardax.view.operations import module_operations, operations
from tests.advice import run_advice


def count(f: Any, *args: Any) -> int:
    return operations(jax.jit(f).lower(*args).compile().as_text()).total()


def ones(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("f", "args", "expected"),
    [
        (jnp.dot, [ones(8, 3), ones(3, 4)], 2 * 8 * 3 * 4),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [ones(5, 8, 3), ones(5, 3, 4)], 960),
        (jnp.dot, [ones(1, 3), ones(3, 4)], 2 * 3 * 4),
        (lambda x: jnp.exp(x) * x, [ones(6, 7)], 2 * 6 * 7),
        (jnp.sum, [ones(6, 7)], 6 * 7),
        (lambda x: x.T.reshape(3, 2, 7), [ones(7, 6)], 0),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            [ones(2, 8, 8, 3), ones(3, 3, 3, 5)],
            2 * (2 * 8 * 8 * 5) * (3 * 3 * 3),
        ),
    ],
)
def test_operations_of_a_program(f: Any, args: list[Any], expected: int) -> None:
    assert count(f, *args) == expected


def test_loop_counts_iterations_and_conditional_longest_branch() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 10, lambda i, x: x @ x, x)

    assert count(loop, ones(8, 8)) == 10 * 2 * 8**3

    def choice(n: Any, x: Any) -> Any:
        return jax.lax.switch(n, [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x], x)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    assert count(choice, index, ones(8, 8)) == 2 * 2 * 8**3


def test_unknown_length_loop_counts_one_iteration_without_condition() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: jnp.exp(x).sum() < 1e6, lambda x: 1.5 * x, x)

    assert count(loop, ones(8)) == 8


def test_products_that_libraries_compute_are_counted_too() -> None:
    text = """HloModule m

ENTRY %main (a: f32[8,3], b: f32[3,4]) -> f32[8,4] {
  %a = f32[8,3]{1,0} parameter(0)
  %b = f32[3,4]{1,0} parameter(1)
  %product = (f32[8,4]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
metadata={op_name="jit(dot)/dot_general"}, backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %other = f32[8,4]{1,0} custom-call(%a, %b), custom_call_target="unknown"
  ROOT %c = f32[8,4]{1,0} get-tuple-element(%product), index=0
}
"""
    assert dict(operations(text)) == {"jit(dot)/dot_general": 2 * 8 * 3 * 4}


def test_operations_without_loops_equal_xla() -> None:
    model = sx.abstract(sx.models.Decoder(sx.models.DecoderConfig(), rngs=sx.Rngs(0)))

    def step(model: Any, tokens: Any) -> Any:
        return sx.grad(lambda model: model(tokens).sum())(model)

    tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    compiled = sx.jit(step).lower(model, tokens).compile()
    found = operations(compiled.as_text()).total()
    assert found == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


# --- by Module ---


class Tower(sx.Module):
    def __init__(self, rngs: sx.Rngs) -> None:
        self.embed = sx.nn.Embed(16, 8, rngs=rngs)
        self.layers = [sx.nn.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)]
        self.unused = sx.nn.Linear(8, 8, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


TOKENS = jax.ShapeDtypeStruct((4,), jnp.int32)


def test_module_counts_include_its_callees() -> None:
    model = Tower(sx.Rngs(0))
    counts = module_operations(model, [TOKENS])
    layer = 2 * 4 * 8 * 8
    assert counts[("layers", 0)] == counts[("layers", 1)] == layer
    assert counts[("embed",)] >= 2 * 4 * 8 * 16  # as the head, called by a method of its own
    assert counts[()] == 2 * layer + counts[("embed",)]
    assert counts[("unused",)] == 0
    assert type(model) is Tower and model.unused.kernel.is_lazy  # nothing happened to it


def test_stacked_layers_count_per_iteration() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(8, 8, use_bias=False, rngs=sx.Rngs(0)), 5)
    counts = module_operations(stack, [ones(4, 8)])
    assert counts[("stacked",)] == 5 * 2 * 4 * 8 * 8


def test_any_call_can_be_counted() -> None:
    model = Tower(sx.Rngs(0))

    def step(model: Any, tokens: Any) -> Any:
        return sx.grad(lambda model: model(tokens).sum())(model)

    forward, backward = (module_operations(model, [TOKENS], call) for call in (None, step))
    # The forward pass, the gradient of the input and that of the kernel.
    assert backward[("layers", 1)] == 3 * forward[("layers", 1)]


def test_device_runs_its_part(auto_mesh: Mesh) -> None:
    layer = sx.nn.Linear(8, 8, use_bias=False, kernel_axes=("embed", "mlp"), rngs=sx.Rngs(0))
    whole, part = (
        module_operations(layer, [ones(4, 8)], mesh=mesh, rules={"mlp": "model"})[()]
        for mesh in (None, auto_mesh)
    )
    assert whole == 4 * part == 2 * 4 * 8 * 8


def test_table_shows_operations_on_request(auto_mesh: Mesh) -> None:
    model = Tower(sx.Rngs(0))
    assert sx.view.table(model).modules == ()
    table = sx.view.table(model, inputs=[TOKENS])
    assert [row.path for row in table.modules] == [
        *("(root)", ".embed", ".layers[0]", ".layers[1]", ".unused")
    ]
    assert [row.size for row in table.modules] == [128 + 64 + 64 + 72, 128, 64, 64, 72]
    assert table.modules[0].bytes_per_device == table.bytes_per_device
    lines = str(table).splitlines()
    assert lines[-5].split()[:2] == ["(root)", "Tower"] and lines[-5].endswith("100.0%")
    assert '<table class="modules"><thead><tr><th>module</th>' in table.html()


def test_counts_of_programs_kept_by_jax_are_right() -> None:
    model = Tower(sx.Rngs(0))

    class Holder(sx.Module):
        def __init__(self) -> None:
            self.layer = model

    # JAX's compilation cache ignores names, by which operations are counted, and the programs of
    # the two differ in names alone.
    held = module_operations(Holder(), [TOKENS], call=lambda holder, x: holder.layer(x))
    own = module_operations(model, [TOKENS])
    layers = {held[("layer", "layers", i)] for i in range(2)} | {
        own[("layers", i)] for i in range(2)
    }
    assert layers == {2 * 4 * 8 * 8}


def test_table_refuses_what_cannot_be_counted() -> None:
    model = Tower(sx.Rngs(0))

    class Holder(sx.Module):
        def __init__(self) -> None:
            self.layer = model

    holder = Holder()
    with pytest.raises(sx.errors.ViewError, match="cannot be called") as caught:
        sx.view.table(holder, inputs=[TOKENS])
    code = "sx.view.table(model, inputs=(x,), call=lambda model, x: model.layer(x))"
    table = run_advice(caught.value, code, {"sx": sx, "model": holder, "x": TOKENS})
    assert table.modules[0].flops == sx.view.table(model, inputs=[TOKENS]).modules[0].flops
    mesh = AbstractMesh((2,), ("model",))
    with pytest.raises(sx.errors.ViewError, match=r"\.embed\.embedding has no devices"):
        sx.view.table(model, mesh=mesh, inputs=[TOKENS])
