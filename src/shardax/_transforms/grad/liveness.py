# SPDX-License-Identifier: Apache-2.0
"""Liveness: which inputs of a program its results depend on."""

from __future__ import annotations

from collections.abc import Sequence

from shardax._core import _jax


def used_inputs(jaxpr: _jax.Jaxpr, outputs_used: Sequence[bool] | None = None) -> list[bool]:
    """Returns for each input of a program whether its results depend on it.

    Programs inside an equation are looked into where their inputs and outputs are those of the
    equation, as for compiled, rematerialised and custom functions.

    Args:
        jaxpr: The program.
        outputs_used: For each of its results whether it counts; None if all do.
    """
    if outputs_used is None:
        outputs_used = [True] * len(jaxpr.outvars)
    live = {id(item) for item, used in zip(jaxpr.outvars, outputs_used, strict=True) if used}

    # Backward: what an equation reads is used if one of its results is, or if it has an effect.
    for equation in reversed(jaxpr.eqns):
        results_used = [id(item) in live for item in equation.outvars]
        if not any(results_used) and not equation.effects:
            continue

        operands_used = [True] * len(equation.invars)
        inner = _inner_program(equation)
        if inner is not None and not equation.effects:
            operands_used = used_inputs(inner, results_used)
        live |= {
            id(item) for item, used in zip(equation.invars, operands_used, strict=True) if used
        }

    return [id(item) in live for item in jaxpr.invars]


# What one round does not use, another may: their results are also inputs.
_LOOPS = frozenset({"scan", "while"})


def _inner_program(equation: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Returns the one program inside an equation that has its inputs and outputs."""
    if equation.primitive.name in _LOOPS:
        return None

    programs = list(_jax.inner_jaxprs(equation))
    if len(programs) != 1:
        return None

    (program,) = programs
    counts = len(program.invars), len(program.outvars)
    return program if counts == (len(equation.invars), len(equation.outvars)) else None
