# SPDX-License-Identifier: Apache-2.0
"""Which results of a program are written where its arguments were: the donated ones."""

from __future__ import annotations

import re

from shardax.hlo.program import Program
from shardax.hlo.text import balanced

_START = "input_output_alias="
_PAIR = re.compile(r"\{(\d*)[^{}]*\}: *\((\d+), *\{[^}]*\}")


def aliases(program: Program) -> dict[int, int]:
    """Returns the number of the argument whose place a result takes, by the result's number.

    Args:
        program: A compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo.program import parse
        >>> step = jax.jit(lambda x, y: (x.sum(), y + 1), donate_argnums=1)
        >>> aliases(parse(step.lower(jnp.ones(3), jnp.ones(3)).compile().as_text()))
        {1: 1}
    """
    start = program.header.find(_START)
    if start < 0:
        return {}
    start += len(_START)
    text = program.header[start : balanced(program.header, start)]
    return {int(result or 0): int(argument) for result, argument in _PAIR.findall(text)}
