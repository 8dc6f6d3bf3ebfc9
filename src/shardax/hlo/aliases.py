# SPDX-License-Identifier: Apache-2.0
"""Which results of a program are the next values of its arguments."""

from __future__ import annotations

import re

from shardax.hlo.program import Program
from shardax.hlo.text import ArrayShape, balanced

Type = tuple[ArrayShape, ...]

_ALIAS = re.compile(r"\{(\d*)[^{}]*\}: *\((\d+), *\{[^}]*\}")
_DONOR = re.compile(r"\((\d+), *\{[^}]*\}\)")


def aliases(program: Program) -> dict[int, int]:
    """Returns the number of the argument whose place a result takes, by the result's number.

    Where the program leaves to the compiler which result takes the place of a donated argument, it
    is the first of the argument's type that has no place yet, as in XLA.

    Args:
        program: A compiled or partitioned program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo.program import parse
        >>> step = jax.jit(lambda x, y: (x.sum(), y + 1), donate_argnums=1)
        >>> aliases(parse(step.lower(jnp.ones(3), jnp.ones(3)).compile().as_text()))
        {1: 1}
    """
    found = {
        int(result or 0): int(argument)
        for result, argument in _ALIAS.findall(_value(program.header, "input_output_alias="))
    }
    donors = [int(number) for number in _DONOR.findall(_value(program.header, "buffer_donor="))]
    for argument in donors:
        shapes = program.main.parameters[argument].shapes
        for result, shape in enumerate(program.main.root.shapes):
            if result not in found and shapes == (shape,):
                found[result] = argument
                break
    return found


def likely_updates(program: Program) -> dict[int, int]:
    """Returns which argument's next value a result likely is, by the result's number.

    A result that takes the place of an argument is its next value. Of the others, those of one type
    are taken to be the next values, or the gradients, of the arguments of this type, in order, if
    there are as many; else nothing is guessed.

    Args:
        program: A compiled or partitioned program.
    """
    found = aliases(program)
    taken = set(found.values())
    results: dict[Type, list[int]] = {}
    arguments: dict[Type, list[int]] = {}
    for number, shape in enumerate(program.main.root.shapes):
        if number not in found:
            results.setdefault((shape,), []).append(number)
    for number, each in sorted(program.main.parameters.items()):
        if number not in taken:
            arguments.setdefault(each.shapes, []).append(number)
    for shapes, numbers in results.items():
        if len(numbers) == len(arguments.get(shapes, ())):
            found.update(zip(numbers, arguments[shapes], strict=True))
    return found


def _value(header: str, key: str) -> str:
    """The text of a value in brackets; "" if the header does not hold the key."""
    start = header.find(key)
    if start < 0:
        return ""
    start += len(key)
    return header[start : balanced(header, start)]
