# SPDX-License-Identifier: Apache-2.0
"""The CPU tier: what partitioned programs become, against hand counts and real compilers.

Wire bytes (GB per device and step) of a scanned decoder of 24 layers and 1.74 billion parameters, a
batch of 32 x 2048 tokens and AdamW, on eight devices; what XLA's partitioner gives, the estimate,
and what the compilers of H100 (CUDA plugin 0.10.2) and v5p (libtpu 0.0.42.1, fast) make of it, all
read by ``read_program``; then GiB of peak memory, estimated and by these compilers:

========  =====  ===========  ========  ======  ======  ========  =====  =====
rules     mesh   partitioned  estimate  H100    v5p     GiB est.  H100   v5p
========  =====  ===========  ========  ======  ======  ========  =====  =====
dp        8x1    6.097        6.097     6.097   6.097   29.0      30.2   30.0
fsdp      8x1    11.679       8.745     8.745   10.943  7.2       7.9    7.2
tp        2x4    39.929       25.434    25.434  25.434  12.4      12.8   13.0
fsdp+tp   2x4    40.801       25.870    25.870  26.021  9.9       9.9    8.8
fsdp+tp   2x4    38.736       28.875    28.875  29.227  7.4       8.8    6.6
+sequence
========  =====  ===========  ========  ======  ======  ========  =====  =====

TPU compilers send the parts of a matrix product from device to device while they compute, a part
more than an all-gather; and v5e sums some gradients whole of which each device keeps a part.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import shardax as sx
from shardax.hlo import parse, read_program
from shardax.hlo.estimate import rewritten
from shardax.hlo.partitioner import partitioned_text
from shardax.hlo.program import Program
from tests.planner.hlo.cases import BATCH, CASES, HIDDEN, WIDTH

GOLDEN = Path(__file__).parent / "golden"


def estimate(name: str) -> Any:
    case = CASES[name]
    text = partitioned_text(case.lower(jax.devices(), jnp.bfloat16))
    return read_program(text, case.mesh, estimate=True)


@pytest.mark.parametrize(
    "name", ["tensor_parallel", "data_parallel", "fully_sharded", "decoder", "sharded_scan"]
)
def test_estimate_equals_h100_compiler_collectives(name: str) -> None:
    found = estimate(name)
    versions = [*GOLDEN.glob(f"jax-cuda12-plugin-*/h100/{name}.hlo.gz")]
    assert versions
    for path in versions:
        real = read_program(gzip.decompress(path.read_bytes()).decode(), CASES[name].mesh)
        assert found.wire_bytes() == real.wire_bytes()
        assert found.matmul_flops == real.matmul_flops


def test_sharded_weights_are_gathered_and_gradients_scattered() -> None:
    [up, down, *scatters] = sorted(estimate("fully_sharded").collectives, key=lambda e: e.kind)
    half = 7 / 8 * WIDTH * HIDDEN * 2  # a weight in bfloat16
    assert [(each.kind, each.wire_bytes) for each in (up, down)] == [("all-gather", half)] * 2
    assert [(each.kind, each.wire_bytes) for each in scatters] == [("reduce-scatter", half)] * 2


def test_tensor_parallel_activations_are_summed_forward_and_backward() -> None:
    found = estimate("tensor_parallel")
    rows = 2 * 3 / 4 * BATCH / 2 * WIDTH * 2  # the batch of two devices, in bfloat16
    over_model = [each.wire_bytes for each in found.collectives if each.axes == ("model",)]
    assert over_model == [rows, rows]


# --- one rewrite at a time, on programs of eight devices in groups {0,1,2,3} and {4,5,6,7} ---

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%largest (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %most = f32[] maximum(%a, %b)
}
"""
ROWS = "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add"
COLUMNS = ROWS.replace("{{0,1,2,3},{4,5,6,7}}", "[4,2]<=[2,4]T(1,0)")
LARGEST = ROWS.replace("%add", "%largest")
OFFSET = """
  %me = u32[] partition-id()
  %table = s32[8]{0} constant({0, 2, 4, 6, 0, 2, 4, 6})
  %found = s32[1]{0} dynamic-slice(%table, %me), dynamic_slice_sizes={1}
  %place = s32[] reshape(%found)
  %zero = s32[] constant(0)
"""
PARAMETERS = """
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[8,16]{1,0} parameter(1)
"""


def program(body: str) -> Program:
    return parse(
        f"HloModule test, num_partitions=8\n{ADD}\n"
        f"ENTRY %main (x: f32[8,16], y: f32[8,16]) -> f32[8,16] {{{PARAMETERS}{body}}}\n"
    )


def collectives(found: Program) -> list[tuple[str, tuple[int, ...], str]]:
    """Opcode, shape of the operand, and groups of each collective."""
    return [
        (each.opcode, found.main.operands(each)[0].shapes[0].dims, groups(each.attributes))
        for each in found.main.instructions
        if each.opcode in ("all-reduce", "reduce-scatter")
    ]


def groups(attributes: str) -> str:
    return attributes.partition("replica_groups=")[2].partition(", use_global")[0]


FOUR, TWO = groups(ROWS), groups(COLUMNS)
ALL = "{{0,1,2,3,4,5,6,7}}"
WHOLE, PART = (8, 16), (2, 16)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  %b = f32[8,16]{{1,0}} all-reduce(%y), {ROWS}
  ROOT %sum = f32[8,16]{{1,0}} add(%a, %b)
""",
            [("all-reduce", WHOLE, FOUR)],
            id="sums that are added are added first",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  %t = f32[16,8]{{1,0}} transpose(%x), dimensions={{1,0}}
  %b = f32[16,8]{{1,0}} all-reduce(%t), {ROWS}
  %u = f32[8,16]{{1,0}} transpose(%b), dimensions={{1,0}}
  %ab = f32[8,16]{{1,0}} add(%a, %u)
  %c = f32[8,16]{{1,0}} all-reduce(%y), {ROWS}
  ROOT %sum = f32[8,16]{{1,0}} add(%ab, %c)
""",
            [("all-reduce", WHOLE, FOUR)],
            id="also several, and in another layout",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  %b = f32[8,16]{{1,0}} all-reduce(%y), {ROWS}
  %sum = f32[8,16]{{1,0}} add(%a, %b)
  ROOT %product = f32[8,16]{{1,0}} multiply(%sum, %a)
""",
            [("all-reduce", WHOLE, FOUR)] * 2,
            id="but not if one of them is needed itself",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  %b = f32[8,16]{{1,0}} all-reduce(%y), {COLUMNS}
  ROOT %sum = f32[8,16]{{1,0}} add(%a, %b)
""",
            [("all-reduce", WHOLE, FOUR), ("all-reduce", WHOLE, TWO)],
            id="or they are over other devices",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {LARGEST}
  %b = f32[8,16]{{1,0}} all-reduce(%y), {LARGEST}
  ROOT %sum = f32[8,16]{{1,0}} add(%a, %b)
""",
            [("all-reduce", WHOLE, FOUR)] * 2,
            id="or are no sums",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  ROOT %b = f32[8,16]{{1,0}} all-reduce(%a), {COLUMNS}
""",
            [("all-reduce", WHOLE, ALL)],
            id="a sum of a sum is one",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  ROOT %b = f32[8,16]{{1,0}} all-reduce(%a), {LARGEST}
""",
            [("all-reduce", WHOLE, FOUR)] * 2,
            id="a maximum of a sum is not",
        ),
        pytest.param(
            f"""{OFFSET}
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  ROOT %part = f32[2,16]{{1,0}} dynamic-slice(%a, %place, %zero), dynamic_slice_sizes={{2,16}}
""",
            [("reduce-scatter", WHOLE, FOUR)],
            id="a sum of which each device keeps its part is scattered",
        ),
        pytest.param(
            f"""{OFFSET}
  %a = f32[8,16]{{1,0}} all-reduce(%x), {COLUMNS}
  ROOT %part = f32[2,16]{{1,0}} dynamic-slice(%a, %place, %zero), dynamic_slice_sizes={{2,16}}
""",
            [("all-reduce", PART, TWO)],
            id="what a whole group keeps is cut out before it is summed",
        ),
        pytest.param(
            f"""
  %me = u32[] partition-id()
  %four = u32[] constant(4)
  %rank = u32[] remainder(%me, %four)
  %two = u32[] constant(2)
  %first = u32[] multiply(%rank, %two)
  %place = s32[] convert(%first)
  %zero = s32[] constant(0)
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  ROOT %part = f32[2,16]{{1,0}} dynamic-slice(%a, %place, %zero), dynamic_slice_sizes={{2,16}}
""",
            [("reduce-scatter", WHOLE, FOUR)],
            id="the part may be found by arithmetic",
        ),
        pytest.param(
            f"""
  %place = s32[] parameter(2)
  %zero = s32[] constant(0)
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  ROOT %part = f32[2,16]{{1,0}} dynamic-slice(%a, %place, %zero), dynamic_slice_sizes={{2,16}}
""",
            [("all-reduce", WHOLE, FOUR)],
            id="a part that depends on data is no device's own",
        ),
        pytest.param(
            f"""
  %a = f32[8,16]{{1,0}} all-reduce(%x), {ROWS}
  %b = f32[8,16]{{1,0}} all-reduce(%y), {ROWS}
  ROOT %c = f32[8,16]{{1,0}} negate(%b)
""",
            [("all-reduce", WHOLE, FOUR)],
            id="what nothing needs is not done",
        ),
    ],
)
def test_rewrites(body: str, expected: list[tuple[str, tuple[int, ...], str]]) -> None:
    found = rewritten(program(body))
    assert collectives(found) == expected
    names = [each.name for each in found.main.instructions]
    for place, each in enumerate(found.main.instructions):  # it is still a program
        assert set(each.operands) <= set(names[:place])
    assert found.main.root.shapes == program(body).main.root.shapes


def test_narrow_sum_keeps_dtype_when_scattered() -> None:
    narrow = f"""{OFFSET}
  %n = bf16[8,16]{{1,0}} convert(%x)
  %a = bf16[8,16]{{1,0}} all-reduce(%n), {ROWS}
  %w = f32[8,16]{{1,0}} convert(%a)
  ROOT %part = f32[2,16]{{1,0}} dynamic-slice(%w, %place, %zero), dynamic_slice_sizes={{2,16}}
"""
    [each] = read_program(rewritten(program(narrow)), {"data": 2, "model": 4}).collectives
    assert (each.kind, each.dtype, each.payload) == ("reduce-scatter", "bf16", 8 * 16 * 2)


def test_loop_does_not_compute_for_nobody() -> None:
    text = f"""HloModule test, num_partitions=8
{ADD}
%body (s: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %y = f32[8]{{0}} get-tuple-element(%s), index=2
  %needed = f32[8]{{0}} all-reduce(%x), {ROWS}
  %unneeded = f32[8]{{0}} all-reduce(%y), {ROWS}
  ROOT %state = (s32[], f32[8], f32[8]) tuple(%next, %needed, %unneeded)
}}

%condition (s: (s32[], f32[8], f32[8])) -> pred[] {{
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %five = s32[] constant(5)
  ROOT %more = pred[] compare(%i, %five), direction=LT
}}

ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = f32[8]{{0}} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8], f32[8]) tuple(%zero, %x, %y)
  %loop = (s32[], f32[8], f32[8]) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""
    mesh = {"data": 2, "model": 4}
    both = read_program(text, mesh).collectives
    assert [(each.name, each.runs) for each in both] == [("needed", 5), ("unneeded", 5)]
    [one] = read_program(text, mesh, estimate=True).collectives
    assert (one.name, one.runs) == ("needed", 5)


# --- the text of a partitioned program ---


def test_program_of_one_device_is_not_partitioned() -> None:
    lowered = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert read_program(partitioned_text(lowered), {}, estimate=True).matmul_flops == 2 * 8**3


def test_persistent_cache_does_not_hide_the_program(tmp_path: Path) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        assert partitioned_text(lowered) == partitioned_text(lowered)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_partitioned_text_says_what_cannot_be_compiled() -> None:
    @jax.jit
    def calls_what_is_not_there(x: Any) -> Any:
        return jax.ffi.ffi_call("shardax_no_such_call", jax.ShapeDtypeStruct((8,), jnp.float32))(x)

    lowered = calls_what_is_not_there.lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    with pytest.raises(sx.errors.CompilerFailedError, match="shardax_no_such_call"):
        partitioned_text(lowered)
