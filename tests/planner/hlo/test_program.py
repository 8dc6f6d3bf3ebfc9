# SPDX-License-Identifier: Apache-2.0
"""Reading the text of programs: every form that compilers print, and what is no program."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardax.errors import HloReadError
from shardax.hlo import ArrayShape, Program, parse, read_program
from shardax.hlo.execution_counts import trip_count

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*/*/*.hlo.gz"))

TPU_LINES = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[]},~
 num_partitions=8

FileNames
1 "/opt/venv/lib/python3.12/site-packages/jax/_src/numpy/ufuncs.py"
2 "/home/me/shardax-runs/train.py"
3 "/home/me/model.py"
4 "/opt/venv/lib/python3.12/site-packages/shardax/nn/linear.py"
5 "/opt/venv/lib/python3.12/site-packages/shardax/models/decoder.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=2 end_column=4}
2 {file_name_id=3 function_name_id=1 line=12 end_line=12 column=2 end_column=4}
3 {file_name_id=4 function_name_id=1 line=40 end_line=40 column=2 end_column=4}
4 {file_name_id=1 function_name_id=1 line=99 end_line=99 column=2 end_column=4}
5 {file_name_id=5 function_name_id=1 line=240 end_line=240 column=2 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=3 parent_frame_id=2}
6 {file_location_id=5 parent_frame_id=2}
7 {file_location_id=3 parent_frame_id=1}


%fused (p.0: f32[4,8], p.1: (s32[], bf16[2])) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.1 = (s32[]{:T(128)}, bf16[2]{0:T(256)}) parameter(1), sharding={{replicated}, {replicated}}
  ROOT %neg = f32[4,8]{1,0:T(8,128)} negate(%p.0),~
 metadata={op_name="jit(f)/a{b}/neg" stack_frame_id=4},~
 backend_config={"flags":["} {",")"],"text":"say \\"hi\\""}
}, execution_thread="main"

ENTRY %main.1 (x: f32[4,8]) -> f32[] {
  %x = f32[4,8]{1,0:T(8,128)} parameter(0), sharding={devices=[2,4]<=[8]},~
 metadata={op_name="x"}
  %constant.2 = s32[]{:T(128)} constant(-3), metadata={op_name="c" stack_frame_id=5}
  %constant.3 = bf16[2]{0:T(256)} constant({1.5, inf})
  %tuple.1 = (s32[]{:T(128)}, /*index=1*/bf16[2]{0:T(256)}) tuple(%constant.2,~
 /*index=1*/%constant.3)
  %call_with.dots-1 = f32[4,8]{1,0} fusion(%x, %tuple.1), kind=kLoop, calls=%fused,~
 metadata={op_name="jit(f)/neg" stack_frame_id=6}
  %ag = ((f32[4,8]{1,0}), f32[8,8]{1,0}, u32[]{:S(2)}) all-gather-start(%call_with.dots-1),~
 replica_groups={{0,1}}, metadata={source_file="/home/me/old.py" source_line=3}
  %token = token[] after-all()
  ROOT %sum = f32[] reduce(%call_with.dots-1, %constant.2), dimensions={0,1},~
 to_apply=%fused, metadata={op_name="jit(f)/sum" stack_frame_id=7}
}
""".replace("~\n", "")  # where a line is broken


@pytest.fixture(scope="module")
def program() -> Program:
    return parse(TPU_LINES)


def test_computations_and_the_entry_are_found(program: Program) -> None:
    assert list(program.computations) == ["fused", "main.1"]
    assert program.entry == program.main.name == "main.1"
    assert program.device_count == 8
    assert "is_scheduled=true" in program.header


def test_instructions_have_their_opcodes_operands_and_shapes(program: Program) -> None:
    read = [(i.name, i.opcode, i.operands, i.shapes, i.is_root) for i in program.main.instructions]
    x, small = ArrayShape("f32", (4, 8)), ArrayShape("bf16", (2,))
    number, flag = ArrayShape("s32", ()), ArrayShape("u32", ())
    assert read == [
        ("x", "parameter", (), (x,), False),
        ("constant.2", "constant", (), (number,), False),
        ("constant.3", "constant", (), (small,), False),
        ("tuple.1", "tuple", ("constant.2", "constant.3"), (number, small), False),
        ("call_with.dots-1", "fusion", ("x", "tuple.1"), (x,), False),
        (
            "ag",
            "all-gather-start",
            ("call_with.dots-1",),
            (x, ArrayShape("f32", (8, 8)), flag),
            False,
        ),
        ("token", "after-all", (), (ArrayShape("token", ()),), False),
        ("sum", "reduce", ("call_with.dots-1", "constant.2"), (ArrayShape("f32", ()),), True),
    ]
    assert program.main.by_name["x"].literal == "0"
    assert program.main.by_name["constant.2"].literal == "-3"
    assert program.main.by_name["constant.3"].literal == "{1.5, inf}"
    assert program.main.root.name == "sum"
    assert program.computations["fused"].parameters[1].name == "p.1"


def test_attributes_are_read_through_brackets_and_quotes(program: Program) -> None:
    negate = program.computations["fused"].root
    assert negate.op_name == "jit(f)/a{b}/neg"
    assert negate.attribute("backend_config") == '{"flags":["} {",")"],"text":"say \\"hi\\""}'
    assert negate.attribute("stack_frame_id") is None  # it is within another attribute
    assert program.main.by_name["call_with.dots-1"].computations("calls") == ("fused",)
    assert program.main.root.attribute("dimensions") == "{0,1}"


def test_source_is_innermost_line_of_model_code(program: Program) -> None:
    main = program.main.by_name
    assert program.computations["fused"].root.source == "model.py:12"  # called by layers and jax
    assert main["constant.2"].source == "train.py:7"  # of a step without a model file
    assert main["call_with.dots-1"].source == "shardax/models/decoder.py:240"
    assert main["sum"].source == "shardax/nn/linear.py:40"  # only layers are on the stack
    assert main["ag"].source == "old.py:3"  # as older compilers write it
    assert main["x"].source == ""


def test_bytes_of_arrays() -> None:
    sizes = {"f32": 400, "bf16": 200, "pred": 100, "s4": 50, "f8e4m3fn": 100, "c64": 800}
    assert {dtype: ArrayShape(dtype, (10, 10)).bytes for dtype in sizes} == sizes
    assert ArrayShape("token", ()).bytes == 0
    with pytest.raises(HloReadError, match="'q7'"):
        _ = ArrayShape("q7", (2,)).bytes


ELEMENTS = """\
HloModule f, is_scheduled=true

%body (state.1: (s32[], (f32[4], /*index=1*/f32[2,3]))) -> (s32[], (f32[4], f32[2,3])) {
  %state.1 = (s32[], (f32[4]{0}, /*index=1*/f32[2,3]{1,0:T(8,128)})) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(STATE_0, %one)
  %w = f32[2,3]{1,0} negate(STATE_1_1)
  %pair = (f32[4], f32[2,3]) tuple(STATE_1_0, %w)
  ROOT %out = (s32[], (f32[4], f32[2,3])) tuple(%next, %pair)
}

%condition (state.2: (s32[], (f32[4], f32[2,3]))) -> pred[] {
  %state.2 = (s32[], (f32[4], f32[2,3])) parameter(0)
  %end = s32[] constant(7)
  ROOT %less = pred[] compare(OTHER_0, %end), direction=LT
}

ENTRY %main (x: f32[4], y: f32[2,3]) -> f32[2,3] {
  %x = f32[4] parameter(0)
  %y = f32[2,3] parameter(1)
  %zero = s32[] constant(0)
  %given = (f32[4], f32[2,3]) tuple(%x, %y)
  %start = (s32[], (f32[4], f32[2,3])) tuple(%zero, %given)
  %loop = (s32[], (f32[4], f32[2,3])) while(%start), condition=%condition, body=%body
  ROOT %sum = f32[2,3] add(LOOP_1_1, LOOP_1_1)
}
"""
NESTED = {"STATE": "%state.1", "OTHER": "%state.2", "LOOP": "%loop"}


def spelled_out(text: str) -> str:
    """The elements as instructions before what takes them."""
    types = {"0": "s32[]", "1": "(f32[4], f32[2,3])", "1_0": "f32[4]", "1_1": "f32[2,3]"}
    lines: list[str] = []
    for line in text.splitlines():
        for name, path in dict.fromkeys(re.findall(r"\b(STATE|OTHER|LOOP)_([\d_]+)", line)):
            source, taken = NESTED[name], ""
            for index in path.split("_"):
                taken = f"{taken}_{index}".removeprefix("_")
                element = f"{NESTED[name]}.e{taken}"
                made = f"  {element} = {types[taken]} get-tuple-element({source}), index={index}"
                lines += [made] * (made not in lines)
                source = element
            line = line.replace(f"{name}_{path}", source)
        lines.append(line)
    return "\n".join(lines)


def in_place(text: str, percent: str = "%") -> str:
    """The elements where they are taken, as XLA of JAX 0.12 prints them."""
    for name, source in NESTED.items():
        text = re.sub(rf"{name}_([\d_]+)", lambda m: f"{source}#{m[1].replace('_', '#')}", text)  # noqa: B023
    return text if percent else text.replace("%", "")


@pytest.mark.parametrize("percent", ["%", ""])
def test_inline_tuple_elements_are_read_as_instructions(percent: str) -> None:
    def form(program: Program) -> list[Any]:
        found = []
        for inside in program.computations.values():
            number = {each.name: i for i, each in enumerate(inside.instructions)}
            for each in inside.instructions:
                operands = [number[name] for name in each.operands]
                index = each.element if each.opcode == "get-tuple-element" else None
                found.append((each.opcode, each.shapes, operands, index))
        return found

    before, now = parse(spelled_out(ELEMENTS)), parse(in_place(ELEMENTS, percent))
    assert form(now) == form(before)
    (loop,) = [each for each in now.main.instructions if each.opcode == "while"]
    assert trip_count(now, now.main, loop) == trip_count(before, before.main, loop) == 7


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        ("%loop#2", "element 2 of 'loop'"),
        ("%loop#1#2", "element 2 of 'loop#1'"),
        ("%loop#0#0", "element 0 of 'loop#0'"),
        ("%nowhere#0", "element 0 of 'nowhere'"),
        ("%loop#{1,1}", "should be an instruction, but cannot be read"),
        ("%loop#", "should be an instruction, but cannot be read"),
    ],
)
def test_missing_or_unknown_tuple_element_is_refused(operand: str, message: str) -> None:
    text = in_place(ELEMENTS.replace("add(LOOP_1_1, LOOP_1_1)", f"add({operand}, {operand})"))
    with pytest.raises(HloReadError, match=re.escape(message)):
        parse(text)


def test_text_without_percent_signs_reads_the_same() -> None:
    [short] = parse(
        "HloModule m\n\nENTRY main {\n  x = f32[2,<=4] parameter(0)\n"
        "  ROOT y = f32[2] dot(f32[2,4] x, f32[4] x), lhs_contracting_dims={1}\n}\n"
    ).computations.values()
    assert [each.operands for each in short.instructions] == [(), ("x", "x")]
    assert short.instructions[0].literal == "0"
    assert short.instructions[0].shapes == (ArrayShape("f32", (2, 4)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line that starts with 'HloModule'"),
        ("module @jit_f {\n}\n", "no line that starts with 'HloModule'"),
        ("HloModule m\n", "no computation marked ENTRY"),
        (
            "HloModule m\n\nENTRY %m () -> f32[] {\n  %a = f32[] add(%b,\n}\n",
            "Line 4 .*instruction",
        ),
        ("HloModule m\n\nENTRY %m () -> f32[] {\n  what is this\n}\n", "'what is this'"),
        ("HloModule m\n\nENTRY %m () -> f32[] {\n  %a = f32[] constant(1)\n", "ends inside .*'m'"),
        ("HloModule m\n\nENTRY %m () -> f32[] {\n}\n", "'m'.* is empty"),
        ("HloModule m\n\n%m () -> f32[] {\n  %a = f32[] constant(1)\n}\n", "marked ENTRY"),
        ("HloModule m\n\n%a = f32[] constant(1)\n", "head of a computation"),
    ],
)
def test_incomplete_program_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(HloReadError, match=message):
        parse(text)


def test_golden_program_operands_are_all_instructions() -> None:
    programs = {file: parse(gzip.decompress(file.read_bytes()).decode()) for file in GOLDEN}
    missing = [
        (file, inside.name, each.name, operand)
        for file, read in programs.items()
        for inside in read.computations.values()
        for each in inside.instructions
        for operand in each.operands
        if operand not in inside.by_name
    ]
    assert missing == []


UNARY: dict[str, Callable[[Any], Any]] = {
    "sine": jnp.sin,
    "tanh": jnp.tanh,
    "negate": jnp.negative,
    "exponential": jnp.exp,
    "abs": jnp.abs,
}


@settings(max_examples=8)
@given(st.lists(st.sampled_from(sorted(UNARY)), max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_law_operations_of_programs_match_their_traces(
    names: list[str], rows: int, products: int
) -> None:
    def f(x: Any, w: Any) -> Any:
        for name in names:
            x = UNARY[name](x)
        for _ in range(products):
            x = x @ w
        return x

    x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    lowered = jax.jit(f).lower(x, jax.ShapeDtypeStruct((3, 3), jnp.float32))
    whole = parse(lowered.as_text("hlo"))
    opcodes = Counter(i.opcode for c in whole.computations.values() for i in c.instructions)
    traced = Counter(names)
    assert {name: opcodes[name] for name in UNARY} == {name: traced[name] for name in UNARY}
    assert opcodes["dot"] == products


SLICED = gzip.decompress(
    next(file for file in GOLDEN if file.parts[-2:] == ("v5e", "fully_sharded.hlo.gz")).read_bytes()
).decode()
WIRE = read_program(SLICED, {"data": 8}).wire_bytes()


@settings(max_examples=25)
@given(st.integers(0, len(SLICED) - 10))
def test_law_truncated_program_is_refused(length: int) -> None:
    with pytest.raises(HloReadError):
        read_program(SLICED[:length], {"data": 8})


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_law_deleted_line_is_refused_or_changes_nothing(choice: int) -> None:
    lines = SLICED.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("%"))
    inner = [i for i in range(start, len(lines)) if " = " in lines[i] and "ROOT" not in lines[i]]
    gone = inner[choice % len(inner)]
    text = "\n".join(lines[:gone] + lines[gone + 1 :])
    used = lines[gone].split(" = ")[0].strip()
    if f"({used}" not in text and f", {used}" not in text:
        return  # nothing takes it: without it this is another program
    with pytest.raises(HloReadError, match=r"is cut or changed|would not be counted"):
        read_program(text, {"data": 8})


def test_operation_names_are_unescaped() -> None:
    compiled = jax.jit(lambda tree: tree["w"] * 2).lower({"w": jnp.ones(3)}).compile()
    program = parse(compiled.as_text())
    entry = program.computations[program.entry].instructions
    assert [each.op_name for each in entry if each.opcode == "parameter"] == ["tree['w']"]
