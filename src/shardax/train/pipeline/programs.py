# SPDX-License-Identifier: Apache-2.0
"""A traced function cut into programs, run one after another.

The forward pass of a chunk, the gradient of its input and that of its parameters are results of one
function. Cut by what each result needs, they are programs of their own: the first computes some
results, and the next the others, from what the first leaves. What depends on parameters alone, as a
cast of them, is computed in each program that needs it, so that it is not kept for every
microbatch.

A loop, or a function that is rematerialised, is one operation: where it computes the gradients of
inputs and of parameters together, they stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from shardax.extend import PyTree, function_of_jaxpr, open_jaxpr

Value = Any  # a variable of a jaxpr, or a literal


class ProgramPart:
    """One part of a function, from values to values."""

    def __init__(
        self, closed: Any, part: Sequence[int], takes: list[Value], gives: list[Value]
    ) -> None:
        self.takes = takes
        self.gives = gives
        jaxpr = open_jaxpr(closed)
        used = {v for n in part for v in _variables(jaxpr.eqns[n].invars)} | set(gives)
        constants = zip(jaxpr.constvars, closed.consts, strict=True)
        self._known = {v: value for v, value in constants if v in used}
        parts = {"invars": [*self._known, *takes], "outvars": gives, "constvars": []}
        body = jaxpr.replace(eqns=[jaxpr.eqns[n] for n in part], **parts)
        # Before JAX 0.11 a program is in an object with its constants.
        self._call = function_of_jaxpr(
            body if closed is jaxpr else closed.replace(jaxpr=body, consts=[])
        )

    def __call__(self, *values: object) -> list[PyTree]:
        """Computes its outputs, while a transform traces."""
        return self._call(*self._known.values(), *values)


class Cut(NamedTuple):
    """Programs in their order, and the roles of their values."""

    programs: list[ProgramPart]
    arguments: list[Value]  # by leaf
    results: tuple[PyTree, ...]  # of each program a tree of values


def cut(function: Callable[..., PyTree], args: Sequence[PyTree], constant_count: int) -> Cut:
    """Cuts a function of several results into a program for each."""
    # The first ``constant_count`` leaves are the same at every call; every program may take them.
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = open_jaxpr(closed)

    results = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars)
    outputs = [_variables(jax.tree.leaves(group)) for group in results]

    stable = {*jaxpr.invars[:constant_count], *jaxpr.constvars}  # the same for every microbatch
    repeated: set[int] = set()
    for number, equation in enumerate(jaxpr.eqns):
        if not equation.effects and stable.issuperset(_variables(equation.invars)):
            repeated.add(number)
            stable.update(equation.outvars)

    parts: list[list[int]] = []
    done: set[int] = set()
    for group in outputs:
        part = [n for n in _needed(jaxpr.eqns, group) if n not in done]
        done.update(n for n in part if n not in repeated)
        parts.append(part)

    # An equation with effects alone, such as a print, runs with the first part that has its inputs.
    place_of = {v: place for place, part in enumerate(parts) for v in _made(jaxpr, part)}
    for number, equation in enumerate(jaxpr.eqns):
        if equation.effects and number not in done:
            takes = _variables(equation.invars)
            place = max((place_of.get(v, 0) for v in takes), default=0)
            needed = {n for n in _needed(jaxpr.eqns, takes) if n not in done or n in repeated}
            parts[place] = sorted({*parts[place], *needed, number})
            done.update(needed - repeated)

    return Cut(_programs(closed, parts, outputs), list(jaxpr.invars), results)


def _programs(
    closed: object, parts: list[list[int]], outputs: list[list[Value]]
) -> list[ProgramPart]:
    jaxpr = open_jaxpr(closed)
    consts = set(jaxpr.constvars)
    defs = [set(_made(jaxpr, part)) for part in parts]
    takes: list[list[Value]] = []
    for place, part in enumerate(parts):
        used = (v for n in part for v in _variables(jaxpr.eqns[n].invars))
        outside = (v for v in (*used, *outputs[place]) if v not in defs[place] and v not in consts)
        takes.append(list(dict.fromkeys(outside)))
    programs: list[ProgramPart] = []
    for place, part in enumerate(parts):
        later = (v for taken_later in takes[place + 1 :] for v in taken_later if v in defs[place])
        gives = list(dict.fromkeys((*outputs[place], *later)))
        programs.append(ProgramPart(closed, part, takes[place], gives))
    return programs


def _made(jaxpr, part: Iterable[int]) -> list[Value]:
    """Returns the values computed by equations."""
    return [v for n in part for v in jaxpr.eqns[n].outvars]


def _needed(equations: Sequence[Any], values: Iterable[Value]) -> list[int]:
    """Returns the numbers of the equations needed for values."""
    live, numbers = set(values), list[int]()
    for number in reversed(range(len(equations))):
        if live.intersection(equations[number].outvars):
            numbers.append(number)
            live.update(_variables(equations[number].invars))
    return numbers[::-1]


def _variables(atoms: Iterable[Value]) -> list[Value]:
    return [atom for atom in atoms if not _is_literal(atom)]


def _is_literal(atom: Value) -> bool:
    return hasattr(atom, "val")
