# SPDX-License-Identifier: Apache-2.0
"""Operations of a compiled program: how many it takes, and where in the source they come from.

Read from the program's text, as XLA prints it after all its passes, so what is counted is what one
device runs. A multiplication and the addition that follows are two operations; what is computed in
floating point element by element is one for each element, whatever it is; moving, comparing and
counting are none. Of a loop whose length the compiler does not know one iteration is counted, of
branches the longest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_FLOATING = re.compile(r"\(?(?:f|bf|c)\d")
_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?(%[^,}\s]+(?:, %[^,}\s]+)*)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d",]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_PARENTHESIS = re.compile(r"[()]")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")

_ELEMENTWISE = re.compile(
    "abs|add|atan2|cbrt|ceil|cosine|divide|erf|exponential|exponential-minus-one|floor|log|"
    "log-plus-one|logistic|maximum|minimum|multiply|negate|power|remainder|round-nearest-afz|"
    "round-nearest-even|rsqrt|sign|sine|sqrt|subtract|tan|tanh"
)

Shape = tuple[int, ...]


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name: Its name in the computation.
        opcode: What it does.
        is_floating: Whether what it computes are floating-point numbers.
        shapes: Shapes of its results.
        operands: Names of what it takes; of a parameter its number.
        rest: Its attributes, as text.
    """

    name: str
    opcode: str
    is_floating: bool
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str


Computations = dict[str, list[Instruction]]
"""The parts of a program, by name."""


def operations(program: str) -> Counter[str]:
    """Counts the operations of a program by the names of what they come from.

    Args:
        program: Its text (``compiled.as_text()``).

    Returns:
        For each name (such as ``jit(f)/layer/dot_general``), how many operations one device runs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).compile()
        >>> operations(compiled.as_text()).total()  # 2 x 4 sums of 3 products
        48
    """
    computations, entry = _parse(program)
    return _count(computations, entry)


def _parse(program: str) -> tuple[Computations, str]:
    computations: Computations = {}
    entry, current = "", []
    for line in program.splitlines():
        found = _COMPUTATION.match(line)
        if found:
            current = computations[found[1]] = []
            entry = found[1] if line.startswith("ENTRY") else entry
            continue
        found = _INSTRUCTION.match(line)
        if found:
            current.append(_instruction(found[1], found[2]))
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    shape, text = _split_balanced(text) if text.startswith("(") else text.split(" ", 1)
    opcode, _, text = text.strip().partition("(")
    operands, rest = _split_balanced(f"({text}")
    return Instruction(
        name,
        opcode,
        bool(_FLOATING.match(shape)),
        tuple(tuple(map(int, filter(None, s.split(",")))) for s in _ARRAY.findall(shape)),
        tuple(re.findall(r"\d+" if opcode == "parameter" else r"%([\w.\-]+)", operands)),
        rest,
    )


def _split_balanced(text: str) -> tuple[str, str]:
    """Splits after the parenthesis that closes the first one."""
    depth = 0
    for found in _PARENTHESIS.finditer(text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return text[: found.end()], text[found.end() :]
    return text, ""


def _count(computations: Computations, name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    instructions = computations.get(name, [])
    shapes = {each.name: each.shapes for each in instructions}
    for each in instructions:
        own = _own_operations(each, shapes)
        if own:
            counts[_source(each, instructions, computations)] += own
        for called, times in _called(each, computations):
            for source, number in called.items():
                counts[source] += times * number
    return counts


def _source(each: Instruction, among: list[Instruction], computations: Computations) -> str:
    """What an instruction comes from.

    Some that the compiler rewrites lose their names; what uses their results first still says it.
    """
    own = _NAME.search(each.rest)
    if own:
        return own[1]
    for user in among:
        if each.name not in user.operands:
            continue
        if user.opcode != "fusion":
            return _source(user, among, computations)
        number = str(user.operands.index(each.name))
        inner = computations[_names_of_called(user)[0]]
        parameter = next(i for i in inner if i.opcode == "parameter" and i.operands == (number,))
        return _source(parameter._replace(rest=""), inner, computations)
    return ""


def _names_of_called(each: Instruction) -> list[str]:
    names = [name for found in _CALLED.findall(each.rest) for name in found.split(", ")]
    return [name.removeprefix("%") for name in names]


def _called(each: Instruction, computations: Computations) -> Iterator[tuple[Counter[str], int]]:
    """Yields the counts of the computations that an instruction runs, and how often it does."""
    if each.opcode not in ("fusion", "call", "while", "conditional", "async-start", "custom-call"):
        return  # what `reduce` applies is counted as one operation for each element
    counts = [_count(computations, name) for name in _names_of_called(each)]
    if each.opcode == "conditional":
        counts = [max(counts, key=lambda count: count.total())] if counts else []
    trips = _TRIPS.search(each.rest)
    for count in counts:
        yield count, int(trips[1]) if trips and each.opcode == "while" else 1


def _own_operations(each: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> int:
    """The operations of an instruction, without those of what it calls."""
    results = each.shapes[0] if each.shapes else ()
    size = math.prod(results)
    operands = [shape for name in each.operands for shape in shapes.get(name, ())[:1]]
    if _ELEMENTWISE.fullmatch(each.opcode):
        return size * each.is_floating
    if each.opcode == "reduce" and operands:
        return math.prod(operands[0]) * each.is_floating
    if each.opcode == "reduce-window":
        window = _WINDOW.search(each.rest)
        each_window = math.prod(map(int, window[1].split("x"))) if window else 0
        return size * each_window * each.is_floating
    if each.opcode in ("dot", "convolution", "custom-call") and len(operands) > 1:
        return 2 * size * _products(each.rest, *operands[:2])
    return 0


def _products(rest: str, left: Shape, right: Shape) -> int:
    """How many products are summed for one element of a dot or convolution; 0 for neither."""
    labels, contracted = _LABELS.search(rest), _CONTRACTED.search(rest)
    if labels:
        return math.prod(right) // right[labels[1].index("o")]
    if contracted:
        return math.prod(left[int(d)] for d in re.findall(r"\d+", contracted[1]))
    return 0
