# SPDX-License-Identifier: Apache-2.0
"""How often loops run, as written by compilers and as it follows from loops."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardax.errors import HloReadError
from shardax.hlo import matmul_flops, parse, read_program
from shardax.hlo.execution_counts import count_executions, trip_count
from shardax.hlo.products import own_flops

LOOP = """\
HloModule loop

%body (s: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %s = (s32[], f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=2
  %step = s32[] constant({step})
  %copied = s32[] copy(%i)
  %next = s32[] add(%copied, %step)
  %x = f32[4] get-tuple-element(%s), index=1
  ROOT %out = (s32[], f32[4], s32[]) tuple(%next, %x, %n)
}}

%test (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %less = pred[] compare(%a, %b), direction={direction}
}}

%condition (s: (s32[], f32[4], s32[])) -> pred[] {{
  %s = (s32[], f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=2
  ROOT %fused = pred[] fusion(%i, %n), kind=kLoop, calls=%test
}}

ENTRY %main (x: f32[4], m: s32[]) -> (s32[], f32[4], s32[]) {{
  %x = f32[4] parameter(0)
  %m = s32[] parameter(1)
  %first = s32[] constant({first})
  %limit = s32[] constant({limit})
  %start = (s32[], f32[4], s32[]) tuple(%first, %x, %{bound})
  ROOT %loop = (s32[], f32[4], s32[]) while(%start), condition=%condition, body=%body{written}
}}
"""
HOLDS = {
    "LT": lambda i, n: i < n,
    "LE": lambda i, n: i <= n,
    "GT": lambda i, n: i > n,
    "GE": lambda i, n: i >= n,
    "NE": lambda i, n: i != n,
}


def trips(
    first: int,
    limit: int,
    step: int,
    direction: str = "LT",
    bound: str = "limit",
    written: str = "",
) -> int | None:
    program = parse(
        LOOP.format(
            first=first, limit=limit, step=step, direction=direction, bound=bound, written=written
        )
    )
    return trip_count(program, program.main, program.main.root)


@given(
    st.integers(-20, 20), st.integers(-20, 20), st.integers(-4, 4), st.sampled_from(sorted(HOLDS))
)
def test_count_is_that_of_running_the_loop(
    first: int, limit: int, step: int, direction: str
) -> None:
    count, i = 0, first
    while HOLDS[direction](i, limit) and count <= 100:
        count, i = count + 1, i + step
    assert trips(first, limit, step, direction) == (count if count <= 100 else None)


def test_trips_are_taken_as_the_compiler_wrote_them() -> None:
    written = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0"}}'
    assert trips(0, 5, 1, written=written) == 7


def test_loop_limit_from_argument_is_unknown() -> None:
    assert trips(0, 5, 1, bound="m") is None


def loops(x: Any, w: Any, n: Any) -> Any:
    """3 x (5 + 4) products in loops of known ends, and a loop of n products."""

    def inner(_: Any, x: Any) -> Any:
        x = lax.fori_loop(0, 5, lambda _, x: x @ w, x)
        down = lax.while_loop(lambda c: c[0] >= 3, lambda c: (c[0] - 2, c[1] @ w), (10, x))
        return down[1] + 1

    x = lax.fori_loop(0, 3, inner, x)
    return lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)


def compiled(f: Any, *arguments: Any) -> str:
    return jax.jit(f).lower(*arguments).compile().as_text() or ""


W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)


def test_nested_loops_multiply_and_unknown_length_counts_once() -> None:
    facts = read_program(compiled(loops, W, W, N), {"x": 1})
    assert facts.matmul_flops == (3 * (5 + 4) + 1) * 2 * 8**3
    [warning] = facts.warnings
    assert re.search(
        r"One turn is counted of a loop of no known end \(.*test_execution_counts.py:\d+", warning
    )


def test_counts_are_derived_from_loop_conditions() -> None:
    text = compiled(loops, W, W, N)
    stripped = re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)
    assert stripped != text
    assert matmul_flops(parse(stripped)) == matmul_flops(parse(text))


def test_lowered_program_counts_as_the_compiled_one() -> None:
    lowered = jax.jit(loops).lower(W, W, N)
    assert matmul_flops(parse(lowered.as_text("hlo"))) == (3 * 9 + 1) * 2 * 8**3


def test_conditional_counts_costliest_branch_with_warning() -> None:
    def f(x: Any, w: Any, n: Any) -> Any:
        return lax.switch(n, [lambda x: x, lambda x: x @ w @ w, lambda x: x @ w], x)

    facts = read_program(compiled(f, W, W, N), {"x": 1})
    assert facts.matmul_flops == 2 * 2 * 8**3
    assert ["dearest branch" in warning for warning in facts.warnings] == [True]


def test_parts_without_products_or_collectives_never_warn() -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, x)

    assert read_program(compiled(f, W), {"x": 1}).warnings == ()


def test_program_missing_called_computation_is_refused() -> None:
    text = LOOP.format(first=0, limit=3, step=1, direction="LT", bound="limit", written="")
    with pytest.raises(HloReadError, match="does not hold computation 'body'"):
        count_executions(parse(text.replace("%body (s", "%other (s")), own_flops)
    with pytest.raises(HloReadError, match="'test' calls itself"):
        count_executions(
            parse(
                text.replace(
                    "%less = pred[] compare(%a, %b), direction=LT",
                    "%less = pred[] call(%a, %b), to_apply=%test",
                )
            ),
            own_flops,
        )
