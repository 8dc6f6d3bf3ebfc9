# SPDX-License-Identifier: Apache-2.0
"""Liveness: which inputs of a program its results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def used_inputs(jaxpr: Any, wanted: Sequence[bool] | None = None) -> list[bool]:
    """Returns, for each input of a program, whether a result may depend on it.

    Programs inside an equation are looked into where their inputs and outputs are those of the
    equation, as for compiled, rematerialised and custom functions.

    Args:
        jaxpr: The program.
        wanted: Which results count; by default all.
    """
    flags = [True] * len(jaxpr.outvars) if wanted is None else wanted
    live = {id(item) for item, flag in zip(jaxpr.outvars, flags, strict=True) if flag}
    for equation in reversed(jaxpr.eqns):
        results = [id(item) in live for item in equation.outvars]
        if not any(results) and not equation.effects:
            continue
        inner = _same_shape(equation)
        needed = [True] * len(equation.invars)
        if inner is not None and not equation.effects:
            needed = used_inputs(inner, results)
        live |= {id(item) for item, flag in zip(equation.invars, needed, strict=True) if flag}
    return [id(item) in live for item in jaxpr.invars]


def _same_shape(equation: Any) -> Any:
    """Returns the one program inside an equation that has its inputs and outputs, or None."""
    if equation.primitive.name in _REPEATED:
        return None
    found = []
    for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and hasattr(inner, "invars"):
            found.append(inner)
    if len(found) != 1:
        return None
    same = (len(found[0].invars), len(found[0].outvars))
    return found[0] if same == (len(equation.invars), len(equation.outvars)) else None


_REPEATED = frozenset({"scan", "while"})
"""What one round does not use, another may: their results are also inputs."""
