# SPDX-License-Identifier: Apache-2.0
"""Which results of a program are written where its arguments were: the donated ones."""

from __future__ import annotations

import re

from shardax.hlo.program import Program
from shardax.hlo.text import balanced

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


def _value(header: str, key: str) -> str:
    """The text of a value in brackets; "" if the header does not hold the key."""
    start = header.find(key)
    if start < 0:
        return ""
    start += len(key)
    return header[start : balanced(header, start)]
