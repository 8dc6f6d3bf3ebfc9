# SPDX-License-Identifier: Apache-2.0
"""The estimate of peak memory, on programs whose peak is known by hand.

Against compilers, for 11 train steps of a decoder of 3 layers on eight devices, with and without
rematerialization, unrolled and scanned, on meshes of two and three axes: 4 to 39% below what the
compiler of H100 took, and, of six, 1 to 34% above that of v5e. Of the five layouts of
``test_estimate`` 16% below to 0% above that of H100, and 5% below to 13% above that of v5p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardax.hlo import parse
from shardax.hlo.live_memory import peak_bytes
from shardax.hlo.partitioner import partitioned_text

SIDE = 64
ONE = SIDE * SIDE * 4


def squares(*leading: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leading, SIDE, SIDE), jnp.float32)


def peak(f: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> float:
    """The peak in squares."""
    lowered = jax.jit(f, donate_argnums=donate, keep_unused=True).lower(*args)
    return peak_bytes(parse(partitioned_text(lowered))) / ONE


def test_arguments_and_results_count() -> None:
    assert peak(lambda x: (x + 1, x * 2), squares()) == pytest.approx(3, abs=0.01)


def test_peak_counts_nothing_for_elementwise_values_on_the_way() -> None:
    # The argument, the first product (whose tanh is written for the second), and the result.
    found = peak(lambda x: jnp.exp(jnp.tanh(x + 1) * 2).sum(), squares())
    assert found == pytest.approx(1, abs=0.01)


def test_products_take_memory_while_they_are_needed() -> None:
    def chain(x: Any) -> Any:
        for _ in range(5):
            x = x @ x
        return x

    assert peak(chain, squares()) == 3  # the argument, one product and the next


def test_results_take_the_place_of_donated_arguments() -> None:
    def step(x: Any, y: Any) -> Any:
        return x + y, y * 2

    assert peak(step, squares(), squares()) == 4
    assert peak(step, squares(), squares(), donate=(0, 1)) == 2


def test_loop_holds_one_state_and_one_iteration() -> None:
    def stack(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, ws)[0]

    # Of a turn: the product, its tanh, and the result, which may take the place of the state.
    found = peak(stack, squares(10), squares())
    assert 10 + 1 + 1 + 2 <= found <= 10 + 1 + 1 + 4


def test_residuals_for_backward_pass_are_stacked() -> None:
    def loss(ws: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0].sum()

    # Weights and input; inputs of all layers; gradients of all weights; and what one turn takes.
    found = peak(jax.grad(loss), squares(10), squares())
    assert 10 + 1 + 10 + 10 + 1 <= found <= 10 + 1 + 10 + 10 + 6


def test_loop_states_from_one_array_are_distinct_buffers() -> None:
    def loop(w: Any) -> Any:
        zeros = jnp.zeros((SIDE, SIDE))
        return lax.fori_loop(0, 9, lambda i, s: (s[0] @ w, s[1] + s[0] @ w), (zeros, zeros))

    assert peak(loop, squares()) >= 1 + 2


def test_instructions_run_in_an_order_that_frees_memory() -> None:
    def sums(xs: Any) -> Any:
        products = [x @ x for x in xs]  # printed first, all of them
        return jnp.stack([(product @ product).sum() for product in products])

    found = peak(sums, [squares() for _ in range(8)])
    assert 8 + 2 <= found <= 8 + 4


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: lax.fori_loop(
            0, 3, lambda i, y: lax.fori_loop(0, 4, lambda j, z: z @ w, y), x
        ),
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: jnp.sin(x)),
        lambda x, w: lax.while_loop(lambda s: s.sum() < 9, lambda s: jnp.tanh(s @ w) @ w, x),
        jax.grad(lambda x, w: jax.nn.softmax(jax.nn.softmax(x @ w) @ w).max()),
        lambda x, w: jnp.sort(x @ w, axis=0) + jnp.fft.fft(x).real,
    ],
    ids=["nested loops", "branches", "unknown end", "softmax", "sort"],
)
def test_estimate_is_near_cpu_buffer_assignment(f: Callable[..., Any]) -> None:
    compiled = jax.jit(f).lower(squares(), squares()).compile()
    memory = compiled.memory_analysis()
    assigned = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assigned += memory.temp_size_in_bytes
    assert peak(f, squares(), squares()) * ONE == pytest.approx(assigned, rel=0.35)
