# SPDX-License-Identifier: Apache-2.0
"""Operations of a compiled program: how many it takes, and where in the source they come from.

Read from the program's text, as XLA prints it after all its passes, so what is counted is what one
device runs. A multiplication and the addition that follows are two operations; what is computed in
floating point element by element is one for each element, whatever it is; moving, comparing and
counting are none. Of a loop whose length the compiler does not know one iteration is counted, of
branches the longest.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

from shardax.hlo.program import Computation, Instruction, Program, parse
from shardax.hlo.runs import branches, called
from shardax.hlo.trips import trip_count

_FLOATING = re.compile(r"(?:f|bf|c)\d")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d",]*)')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")

_ELEMENTWISE = re.compile(
    "abs|add|atan2|cbrt|ceil|cosine|divide|erf|exponential|exponential-minus-one|floor|log|"
    "log-plus-one|logistic|maximum|minimum|multiply|negate|power|remainder|round-nearest-afz|"
    "round-nearest-even|rsqrt|sign|sine|sqrt|subtract|tan|tanh"
)

Shape = tuple[int, ...]


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
    read = parse(program)
    return _count(read, read.main)


def _count(program: Program, inside: Computation) -> Counter[str]:
    counts: Counter[str] = Counter()
    for each in inside.instructions:
        own = _own_operations(each, inside)
        if own:
            counts[_source(each, inside, program)] += own
        for found, times in _called(each, inside, program):
            for source, number in found.items():
                counts[source] += times * number
    return counts


def _source(each: Instruction, inside: Computation, program: Program) -> str:
    """What an instruction comes from.

    Some that the compiler rewrites lose their names; what uses their results first still says it.
    """
    if each.op_name:
        return each.op_name
    for user in inside.instructions:
        if each.name not in user.operands:
            continue
        if user.opcode != "fusion":
            return _source(user, inside, program)
        fused = program.computations[called(user)[0]]
        parameter = fused.parameters[user.operands.index(each.name)]
        return _source(dataclasses.replace(parameter, op_name=""), fused, program)
    return ""


def _called(
    each: Instruction, inside: Computation, program: Program
) -> Iterator[tuple[Counter[str], int]]:
    """Yields the counts of the computations that an instruction runs, and how often it does."""
    if each.opcode == "conditional":
        counts = [_count(program, program.computations[name]) for name in branches(each)]
        yield max(counts, key=lambda count: count.total()), 1
        return
    trips = trip_count(program, inside, each) if each.opcode == "while" else 1
    names = each.computations("body") if each.opcode == "while" else called(each)
    for name in names:
        yield _count(program, program.computations[name]), 1 if trips is None else trips


def _own_operations(each: Instruction, inside: Computation) -> int:
    """The operations of an instruction, without those of what it calls."""
    results = each.shapes[0].dims if each.shapes else ()
    is_floating = bool(each.shapes and _FLOATING.match(each.shapes[0].dtype))
    size = math.prod(results)
    operands = [found.shapes[0].dims for found in inside.operands(each) if found.shapes]
    if _ELEMENTWISE.fullmatch(each.opcode):
        return size * is_floating
    if each.opcode == "reduce" and operands:
        return math.prod(operands[0]) * is_floating
    if each.opcode == "reduce-window":
        window = _WINDOW.search(each.attributes)
        each_window = math.prod(map(int, window[1].split("x"))) if window else 0
        return size * each_window * is_floating
    if each.opcode in ("dot", "convolution", "custom-call") and len(operands) > 1:
        return 2 * size * _products(each.attributes, *operands[:2])
    return 0


def _products(rest: str, left: Shape, right: Shape) -> int:
    """How many products are summed for one element of a dot or convolution; 0 for neither."""
    labels, contracted = _LABELS.search(rest), _CONTRACTED.search(rest)
    if labels:
        return math.prod(right) // right[labels[1].index("o")]
    if contracted:
        return math.prod(left[int(d)] for d in re.findall(r"\d+", contracted[1]))
    return 0
