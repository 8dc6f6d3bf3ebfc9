# SPDX-License-Identifier: Apache-2.0
"""Each form that collectives have in programs, and that what is not known is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.errors import HloReadError
from shardax.hlo import Collective, ProgramFacts, read_program

MESH = {"data": 2, "model": 4}
ROWS = "replica_groups=[2,4]<=[8]"  # along model
COLUMNS = "replica_groups=[4,2]<=[2,4]T(1,0)"  # along data
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def facts(*lines: str, before: str = "", mesh: dict[str, int] | None = None, **more: Any) -> Any:
    """Reads a program of some lines, of parameters x: f32[64] and y: bf16[32, 4]."""
    sizes = MESH if mesh is None else mesh
    count = int(np.prod(list(sizes.values()))) // more.get("slices", 1)
    *inner, last = lines
    body = "".join(f"  {line}\n" for line in inner)
    return read_program(
        f"HloModule m, is_scheduled=true, num_partitions={count}\n{ADD}{before}\n"
        "ENTRY %main (x: f32[64], y: bf16[32,4]) -> f32[] {\n"
        f"  %x = f32[64] parameter(0)\n  %y = bf16[32,4] parameter(1)\n{body}  ROOT {last}\n}}\n",
        sizes,
        **more,
    )


def one(*lines: str, **more: Any) -> Collective:
    [each] = facts(*lines, **more).collectives
    return each


def sent(each: Collective) -> tuple[str, int, float, int, tuple[str, ...]]:
    return each.kind, each.payload, each.wire_bytes, each.group_size, each.axes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"f32[64] all-reduce(%x), {ROWS}, to_apply=%add",
            ("all-reduce", 256, 2 * 3 / 4 * 256, 4, ("model",)),
        ),
        (
            f"f32[256] all-gather(%x), {ROWS}, dimensions={{0}}",
            ("all-gather", 4 * 256, 3 / 4 * 4 * 256, 4, ("model",)),
        ),
        (
            f"f32[32] reduce-scatter(%x), {COLUMNS}, dimensions={{0}}, to_apply=%add",
            ("reduce-scatter", 256, 1 / 2 * 256, 2, ("data",)),
        ),
        (
            f"bf16[32,4] all-to-all(%y), {ROWS}, dimensions={{0}}",
            ("all-to-all", 256, 3 / 4 * 256, 4, ("model",)),
        ),
        (
            "f32[64] collective-permute(%x), source_target_pairs={{0,4},{4,0}}",
            ("collective-permute", 256, 256, 2, ("data",)),
        ),
        (f"f32[64] collective-broadcast(%x), {ROWS}", ("broadcast", 256, 256, 4, ("model",))),
        (
            f"(f32[64], bf16[32,4]) all-reduce(%x, %y), {ROWS}, to_apply=%add",
            ("all-reduce", 512, 2 * 3 / 4 * 512, 4, ("model",)),
        ),
        (
            f"(f32[128], bf16[64,4]) all-gather(%x, %y), {COLUMNS}, dimensions={{0}}",
            ("all-gather", 2 * 512, 512, 2, ("data",)),
        ),
        (
            f"(f32[64], f32[64], f32[64], f32[64]) all-to-all(%x, %x, %x, %x), {ROWS}",
            ("all-to-all", 4 * 256, 3 / 4 * 4 * 256, 4, ("model",)),
        ),
        (
            "(f32[64], bf16[32,4]) collective-permute(%x, %y), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 512, 512, 2, ("model",)),
        ),
        (
            "f32[64] all-reduce(%x), replica_groups={}, to_apply=%add",
            ("all-reduce", 256, 2 * 7 / 8 * 256, 8, ("data", "model")),
        ),
        (
            "f32[64] all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add",
            ("all-reduce", 256, 0, 1, ()),
        ),
        (
            "f32[64] collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            ("collective-permute", 256, 0, 0, ()),
        ),
    ],
)
def test_plain_collectives(line: str, expected: tuple[Any, ...]) -> None:
    each = one(f"%c = {line}")
    assert sent(each) == expected
    assert (each.runs, each.runs_known, each.asynchronous) == (1, True, False)


BEGUN = f"%s = (f32[64], f32[256]) all-gather-start(%x), {ROWS}, dimensions={{0}}"
ENDED = "%d = f32[256] all-gather-done(%s)"
WORK = "%w = bf16[32,4] negate(%y)"
MOVED = "%v = bf16[128] bitcast(%y)"


def test_asynchronous_means_work_between_start_and_done() -> None:
    assert sent(one(BEGUN, ENDED)) == ("all-gather", 1024, 768, 4, ("model",))
    assert one(BEGUN, WORK, ENDED).asynchronous
    assert not one(BEGUN, ENDED, WORK).asynchronous
    assert not one(BEGUN, MOVED, ENDED).asynchronous
    synchronous = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert not one(f"{BEGUN}{synchronous}", WORK, ENDED).asynchronous


def test_collective_in_a_computation_that_runs_meanwhile() -> None:
    wrapped = f"""
%wrapped (p: f32[64]) -> f32[32] {{
  %p = f32[64] parameter(0)
  ROOT %rs = f32[32] reduce-scatter(%p), {COLUMNS}, dimensions={{0}}, to_apply=%add
}}
"""
    begun = "%s = ((f32[64]), f32[32], u32[]) async-start(%x), calls=%wrapped"
    ended = "%d = f32[32] async-done(%s)"
    each = one(begun, WORK, ended, before=wrapped)
    assert sent(each) == ("reduce-scatter", 256, 128, 2, ("data",))
    assert each.asynchronous
    assert not one(begun, ended, before=wrapped).asynchronous


def test_call_that_runs_meanwhile() -> None:
    """As compilers print it where a core of its own runs the collective."""
    called = f"""
%called (p: f32[64], q: token[]) -> f32[64] {{
  %p = f32[64] parameter(0)
  %q = token[] parameter(1)
  ROOT %sum = f32[64] all-reduce(%p), {ROWS}, to_apply=%add
}}, execution_thread="sparsecore"
"""
    ready = '%t = token[] custom-call(), custom_call_target="PrepareAsyncCallDone"'
    begun = "%s = ((f32[64], token[]), f32[64]) call-start(%x, %t), to_apply=%called"
    each = one(ready, begun, WORK, "%d = f32[64] call-done(%s)", before=called)
    assert sent(each) == ("all-reduce", 256, 2 * 3 / 4 * 256, 4, ("model",))
    assert each.asynchronous


def test_call_with_late_operands_starts_at_them() -> None:
    """As libtpu of JAX 0.12 prints it."""
    called = f"""
%called (p: f32[64]) -> f32[64] {{
  %p = f32[64] parameter(0)
  ROOT %sum = f32[64] all-reduce(%p), {ROWS}, to_apply=%add
}}, execution_thread="sparsecore"
"""
    start = "%s = ((), (), (s32[1])) call-start(), to_apply=%called"
    given = "%u = ((f32[64]), f32[64]) call-update(%s, %x)"
    end = "%d = f32[64] call-done(%u)"
    each = one(start, given, WORK, end, before=called, arguments=("x", "y"))
    assert sent(each) == ("all-reduce", 256, 2 * 3 / 4 * 256, 4, ("model",))
    assert (each.asynchronous, each.parameters) == (True, ("x",))
    assert not one(start, WORK, given, end, before=called).asynchronous
    with pytest.raises(HloReadError, match="takes 's', which is not in computation"):
        facts(start, given, end, "%e = f32[64] call-done(%s)", before=called)


def test_unreachable_collective_is_refused() -> None:
    hidden = f"""
%hidden (p: f32[64]) -> f32[64] {{
  %p = f32[64] parameter(0)
  ROOT %sum = f32[64] all-reduce(%p), {ROWS}, to_apply=%add
}}
"""
    with pytest.raises(HloReadError, match="'sum' is in computation 'hidden', which nothing known"):
        facts("%s = f32[64] launch(%x), computation=%hidden", before=hidden)


PART = f"""
%all-reduce-scatter (p: f32[64]) -> f32[16] {{
  %p = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %all = f32[64] all-reduce(%p), channel_id=1, {ROWS}, to_apply=%add
  ROOT %part = f32[16] dynamic-slice(%all, %zero), dynamic_slice_sizes={{16}}
}}
"""


def test_sum_with_fused_slice_is_a_reduce_scatter() -> None:
    each = one(
        '%f = f32[16] fusion(%x), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="g"}',
        before=PART,
    )
    assert sent(each) == ("reduce-scatter", 256, 3 / 4 * 256, 4, ("model",))
    assert each.op_name == "g"  # of the fusion, for its own is not written


BOTH = f"(f32[64], bf16[32,4]) all-reduce(%p, %q), channel_id=1, {ROWS}, to_apply=%add"
PARTS = """
  %a = f32[64] get-tuple-element(%all), index=0
  %b = bf16[32,4] get-tuple-element(%all), index=1
  %i = s32[] constant(0)
  %u = f32[16] dynamic-slice(%a, %i), dynamic_slice_sizes={16}
  %v = bf16[8,4] dynamic-slice(%b, %i, %i), dynamic_slice_sizes={8,4}
"""
SCATTER = ("reduce-scatter", 512, 3 / 4 * 512, 4, ("model",))
FUSED = "fusion(%x, %y), kind=kCustom, calls=%all-reduce-scatter"


def joined(*lines: str, name: str = "all-reduce-scatter", before: str = "") -> str:
    """A computation of p: f32[64] and q: bf16[32,4] whose last line is its root."""
    *inner, last = lines
    return (
        f"{before}\n%{name} (p: f32[64], q: bf16[32,4]) -> (f32[16], bf16[8,4]) {{\n"
        "  %p = f32[64] parameter(0)\n  %q = bf16[32,4] parameter(1)\n"
        + "".join(f"  {line}\n" for line in inner)
        + f"  ROOT {last}\n}}\n"
    )


@pytest.mark.parametrize(
    ("lines", "root"),
    [
        ([f"%all = {BOTH}", PARTS], "(f32[16], bf16[8,4]) tuple(%u, %v)"),
        (  # of a tuple in a tuple
            [f"%all = {BOTH}", PARTS, "%w = (f32[16]) tuple(%u)"],
            "((f32[16]), bf16[8,4]) tuple(%w, %v)",
        ),
        (  # through other tuples
            [
                f"%sum = {BOTH}",
                "%n = (s32[], (f32[64], bf16[32,4])) tuple(%o, %sum)",
                "%all = (f32[64], bf16[32,4]) get-tuple-element(%n), index=1",
                PARTS,
            ],
            "(f32[16], bf16[8,4]) tuple(%u, %v)",
        ),
        (  # through other forms of the same numbers
            [
                f"%all = {BOTH}",
                PARTS.replace("(%a, %i)", "(%g, %i)"),
                "%c = f32[8,8] reshape(%a)",
                "%d = f32[8,8] transpose(%c), dimensions={1,0}",
                "%e = bf16[8,8] convert(%d)",
                "%g = bf16[64] bitcast(%e)",
            ],
            "(f32[16], bf16[8,4]) tuple(%u, %v)",
        ),
        (  # begun and ended
            [
                f"%s = {BOTH.replace('all-reduce(', 'all-reduce-start(')}",
                "%all = (f32[64], bf16[32,4]) all-reduce-done(%s)",
                PARTS,
            ],
            "(f32[16], bf16[8,4]) tuple(%u, %v)",
        ),
    ],
    ids=["two results", "nested results", "nested tuples", "other forms", "start and done"],
)
def test_jointly_summed_and_sliced_arrays_are_scattered(lines: list[str], root: str) -> None:
    number = ["%o = s32[] constant(0)"]
    before = joined(*number, *lines, f"%r = {root}")
    assert sent(one(f"%f = (f32[16], bf16[8,4]) {FUSED}", before=before)) == SCATTER


def test_slice_in_fusion_around_sum_is_recognized() -> None:
    sums = joined(f"%all = {BOTH}", name="sums")
    call = "%all = (f32[64], bf16[32,4]) fusion(%p, %q), kind=kCustom, calls=%sums"
    before = joined(call, PARTS, "%r = (f32[16], bf16[8,4]) tuple(%u, %v)", before=sums)
    assert sent(one(f"%f = (f32[16], bf16[8,4]) {FUSED}", before=before)) == SCATTER


def test_scattering_fusion_that_runs_meanwhile_is_asynchronous() -> None:
    fused = joined(f"%all = {BOTH}", PARTS, "%r = (f32[16], bf16[8,4]) tuple(%u, %v)")
    call = f"%f = (f32[16], bf16[8,4]) {FUSED.replace('%x, %y', '%p, %q')}"
    before = joined(call, name="meanwhile", before=fused)
    start = (
        "%s = ((f32[64], bf16[32,4]), (f32[16], bf16[8,4]), u32[]) "
        "async-start(%x, %y), calls=%meanwhile"
    )
    end = "%d = (f32[16], bf16[8,4]) async-done(%s)"
    each = one(start, WORK, end, before=before)
    assert (sent(each), each.asynchronous) == (SCATTER, True)
    assert not one(start, end, before=before).asynchronous


@pytest.mark.parametrize(
    "root",
    [
        "(f32[16], bf16[32,4]) tuple(%u, %b)",  # a device keeps the second whole
        "(f32[16], bf16[8,4], bf16[32,4]) tuple(%u, %v, %b)",  # beside its part
    ],
)
def test_jointly_summed_unsliced_arrays_stay_reduced(root: str) -> None:
    before = joined(f"%all = {BOTH}", PARTS, f"%r = {root}")
    program = f"%f = {root.partition(' tuple')[0]} {FUSED}"
    assert sorted(map(sent, facts(program, before=before).collectives)) == [
        ("all-reduce", 256, 2 * 3 / 4 * 256, 4, ("model",)),
        ("reduce-scatter", 256, 3 / 4 * 256, 4, ("model",)),
    ]


def test_more_than_a_devices_part_is_no_scatter() -> None:
    half = PART.replace("f32[16]", "f32[32]").replace("{16}", "{32}")
    fused = "fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    assert one(f"%f = f32[32] {fused}", before=half).kind == "all-reduce"


def test_slice_outside_fusion_is_no_reduce_scatter() -> None:
    all_reduce = f"%all = f32[64] all-reduce(%x), {ROWS}, to_apply=%add"
    cut = "%c = f32[16] dynamic-slice(%all, %zero), dynamic_slice_sizes={16}"
    assert one(all_reduce, "%zero = s32[] constant(0)", cut).kind == "all-reduce"


@pytest.mark.parametrize(
    ("line", "result", "expected"),
    [
        (
            f"(f32[256], bf16[128,4]) all-gather(%p, %q), {ROWS}, dimensions={{0}}",
            "(f32[256], bf16[128,4])",
            ("all-gather", 2048, 3 / 4 * 2048, 4, ("model",)),
        ),
        (
            f"(f32[16], bf16[8,4]) reduce-scatter(%p, %q), {ROWS}, dimensions={{0}}, to_apply=%add",
            "(f32[16], bf16[8,4])",
            SCATTER,
        ),
        (
            f"(f32[64], bf16[32,4]) all-to-all(%p, %q), {COLUMNS}",
            "(f32[64], bf16[32,4])",
            ("all-to-all", 512, 1 / 2 * 512, 2, ("data",)),
        ),
    ],
)
def test_fused_collectives_of_several_arrays_count_all_arrays(
    line: str, result: str, expected: tuple[Any, ...]
) -> None:
    before = joined(f"%c = {line}")
    assert sent(one(f"%f = {result} {FUSED}", before=before)) == expected


def stage(name: str, started: bool) -> str:
    start = ' custom-call(%ag), custom_call_target="AsyncCollectiveStart"'
    return f"""
%{name} (p: f32[64]) -> f32[256] {{
  %p = f32[64] parameter(0)
  %ag = f32[256] all-gather(%p), channel_id=4, {ROWS}, dimensions={{0}}, \
backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %r = f32[256]{start if started else " copy(%ag)"}
}}
"""


def test_collective_across_fusions_counts_at_its_start() -> None:
    lines = [f"%{name} = f32[256] fusion(%x), kind=kCustom, calls=%{name}" for name in "abc"]
    stages = [stage("a", True), stage("b", False), stage("c", False)]
    each = one(*lines, before="".join(stages))
    assert sent(each) == ("all-gather", 1024, 768, 4, ("model",))
    assert each.asynchronous
    with pytest.raises(HloReadError, match="the start, a call of AsyncCollectiveStart, is not in"):
        facts(*lines[1:], before="".join(stages[1:]))


def test_collective_in_loops_counts_per_iteration() -> None:
    body = """
%body (s: f32[64]) -> f32[64] {
  %s = f32[64] parameter(0)
  ROOT %c = f32[64] all-reduce(%s), replica_groups=[2,4]<=[8], to_apply=%add
}

%condition (s: f32[64]) -> pred[] {
  %s = f32[64] parameter(0)
  ROOT %t = pred[] constant(true)
}

%outer (s: f32[64]) -> f32[64] {
  %s = f32[64] parameter(0)
  ROOT %w = f32[64] while(%s), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    loop = "%w = f32[64] while(%x), condition=%condition, body=%outer"
    each = one(f'{loop}, backend_config={{"known_trip_count":{{"n":"3"}}}}', before=body)
    assert (each.runs, each.runs_known, each.wire_bytes) == (15, True, 15 * 2 * 3 / 4 * 256)
    unknown = facts(loop, before=body)
    assert [(c.runs, c.runs_known) for c in unknown.collectives] == [(5, False)]
    assert unknown.warnings == ("One turn is counted of a loop of no known end (w).",)


def test_sends_between_devices_and_to_the_host() -> None:
    token = "%t = token[] after-all()"
    send = "%s = (f32[64], u32[], token[]) send(%x, %t), channel_id=1"
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3}}"}'
    done = "%d = token[] send-done(%s)"
    assert sent(one(token, f"{send}, {pairs}", done)) == (
        "collective-permute",
        256,
        256,
        4,
        ("model",),
    )
    assert facts(token, f"{send}, is_host_transfer=true", done).collectives == ()
    with pytest.raises(HloReadError, match=r"send 's' looks like a collective .* does not name"):
        facts(token, send, done)


@pytest.mark.parametrize(
    ("target", "kind", "axes"),
    [
        ('"{1,2}x{0:3}"', "ALL_REDUCE", ("slice",)),
        ('"{1,2}x{0,2}"', "ALL_REDUCE", ("slice",)),
        ("{{100000,200000},{100001,200001}}", "ALL_GATHER", ("slice",)),
        ("{{100000,100001,200000,200001}}", "ALL_TO_ALL", ("slice", "data")),
        ("{{100000->200000},{200000->100000}}", "ONE_TO_ONE", ("slice",)),
    ],
)
def test_collectives_between_slices(target: str, kind: str, axes: tuple[str, ...]) -> None:
    each = between(target, kind)
    assert each.axes == axes
    assert each.crosses_slices


def between(target: str, kind: str = "ALL_REDUCE", **more: Any) -> Collective:
    send = (
        "%s = (f32[64], u32[], token[]) send(%x, %t), is_host_transfer=true, frontend_attributes="
        f'{{_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    sizes = {"slice": 2, "data": 4}
    return one("%t = token[] after-all()", send, mesh=sizes, slices=2, **more)


def test_cross_slice_transfer_ends_at_its_receive() -> None:
    """What is sent is gone at once; the result of all is there when the receive is done."""
    named = (
        "is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="
        '"sum",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    begun = [
        "%t = token[] after-all()",
        f"%s = (f32[64], u32[], token[]) send(%x, %t), {named}",
        f"%r = (f32[64], u32[], token[]) recv(%t), {named}",
        "%sd = token[] send-done(%s)",
    ]
    ended = "%rd = (f32[64], token[]) recv-done(%r)"
    more: dict[str, Any] = {"mesh": {"slice": 2, "data": 4}, "slices": 2}
    assert one(*begun, WORK, ended, **more).asynchronous
    assert not one(*begun, ended, WORK, **more).asynchronous


def test_devices_of_slices_are_found_by_their_ids() -> None:
    ids = [100003, 100001, 100002, 100000, 200000, 200001, 200002, 200003]
    assert between("{{100003,200000}}", device_ids=ids).axes == ("slice",)
    assert between("{{100000,200000}}", device_ids=ids).axes == ("slice", "data")


def test_unknown_cross_slice_transfers_are_refused() -> None:
    with pytest.raises(HloReadError, match="'GOSSIP'; known are ALL_REDUCE"):
        between("{{100000,200000}}", kind="GOSSIP")
    with pytest.raises(HloReadError, match=r"cannot be read: .* 2 slices of 4 devices"):
        between("{{100000,300000}}")
    with pytest.raises(HloReadError, match="target of send 's'"):
        between('"all"')


def test_groups_within_a_slice_do_not_cross_slices() -> None:
    sizes = {"slice": 2, "data": 4}
    within = one(
        "%c = f32[64] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        mesh=sizes,
        slices=2,
    )
    assert (within.axes, within.crosses_slices, within.group_size) == (("data",), False, 4)


@pytest.mark.parametrize(
    "line",
    [
        f"f32[64] all-shuffle(%x), {ROWS}".replace("all-shuffle", "collective-shuffle"),
        f"f32[64] all-gather-scatter(%x), {ROWS}",
        'f32[64] custom-call(%x), custom_call_target="__nccl_all_reduce"',
        'f32[64] custom-call(%x), custom_call_target="AllToAllV2"',
        'f32[64] custom-call(%x), custom_call_target="CollectiveMatmul"',
    ],
)
def test_unknown_collective_opcodes_are_refused(line: str) -> None:
    with pytest.raises(HloReadError, match="'c' looks like a collective that is not known"):
        facts(f"%c = {line}")


def test_ragged_exchange_counts_upper_bound_with_warning() -> None:
    found: ProgramFacts = facts(
        "%o = s32[4] constant({0,1,2,3})",
        f"%c = bf16[32,4] ragged-all-to-all(%y, %y, %o, %o, %o, %o), {ROWS}",
    )
    assert [sent(each) for each in found.collectives] == [("all-to-all", 256, 192, 4, ("model",))]
    [warning] = found.warnings
    assert warning.startswith("1 ragged all-to-alls count as if all of their operands were sent")


def test_mesh_must_be_that_of_the_program() -> None:
    line = f"%c = f32[64] all-reduce(%x), {ROWS}, to_apply=%add"
    text = f"HloModule m, num_partitions=8\n{ADD}\nENTRY %main (x: f32[64]) -> f32[64] {{\n"
    text += f"  %x = f32[64] parameter(0)\n  ROOT {line}\n}}\n"
    with pytest.raises(HloReadError, match=r"runs on 8 devices, and the mesh \(data=2\) has 2"):
        read_program(text, {"data": 2})
    with pytest.raises(HloReadError, match=r"cannot be of 3 slices"):
        read_program(text, MESH, slices=3)


def compiled(collective: Callable[[Any], Any], out: Any, dtype: Any = jnp.float32) -> Any:
    grid = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(grid, tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((64, 64), dtype, sharding=NamedSharding(mesh, P("data", "model")))
    f = jax.shard_map(
        collective, mesh=mesh, in_specs=P("data", "model"), out_specs=out, check_vma=False
    )
    return read_program(jax.jit(f).lower(x).compile().as_text() or "", MESH)


WHOLE = P("data", "model")
B = 32 * 16 * 4  # bytes of a device's part


@pytest.mark.parametrize(
    ("collective", "out", "expected"),
    [
        (lambda x: lax.pmax(x, "data"), P(None, "model"), ("all-reduce", B, B, 2, ("data",))),
        (
            lambda x: lax.psum(x, "model", axis_index_groups=[[0, 1], [2, 3]]),
            WHOLE,
            ("all-reduce", B, B, 2, ("model",)),
        ),
        (
            lambda x: lax.ppermute(x, ("data", "model"), [(i, (i + 3) % 8) for i in range(8)]),
            WHOLE,
            ("collective-permute", B, B, 8, ("data", "model")),
        ),
        (
            lambda x: lax.all_gather(x.astype(jnp.int8), "model"),
            WHOLE,
            ("all-gather", B, 3 / 4 * B, 4, ("model",)),
        ),
        (
            lambda x: lax.fori_loop(
                0, 5, lambda _, x: lax.ppermute(x, "model", [(0, 1), (1, 0)]), x
            ),
            WHOLE,
            ("collective-permute", B, 5 * B, 2, ("model",)),
        ),
    ],
)
def test_collectives_that_are_written_out(collective: Any, out: Any, expected: Any) -> None:
    [each] = compiled(collective, out).collectives
    assert sent(each) == expected
    assert re.fullmatch(r"test_collectives\.py:\d+", each.source)


def test_cpu_programs_say_that_they_reduce_in_float32() -> None:
    found = compiled(lambda x: lax.psum(x, "model"), P("data"), jnp.bfloat16)
    assert [(each.dtype, each.payload) for each in found.collectives] == [("f32", B)]
    assert ["on accelerators they send half" in warning for warning in found.warnings] == [True]
