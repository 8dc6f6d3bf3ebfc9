# SPDX-License-Identifier: Apache-2.0
"""Which parameters a collective moves, and why the program needs it.

What travels is followed through the program: backwards to the arguments that it is, forwards to the
arguments that it updates. The *why* of a collective is told from that, from its kind, and from the
traced operation for which the partitioner put it there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardax.hlo.aliases import aliases, likely_updates
from shardax.hlo.attribution_flow import Flow, Sources, Value
from shardax.hlo.collectives import Found
from shardax.hlo.estimate_graph import reduction
from shardax.hlo.facts import Collective
from shardax.hlo.program import Instruction, Program

_JOINED = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*:.*)\)$")
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_ASKED = re.compile(
    r"(?:psum\w*|pmean|pmax\w*|pmin\w*|all_gather\w*|all_to_all|ppermute|pshuffle|pbroadcast|"
    r"psum_scatter|reduce_scatter|ragged_all_to_all)$"
)
_EXTREMES = {"maximum": "takes the largest", "minimum": "takes the smallest"}


def attribute(
    program: Program, found: Sequence[Found], arguments: Sequence[str] = ()
) -> tuple[Collective, ...]:
    """Says of collectives which parameters travel, and why.

    Args:
        program: The program that holds them.
        found: The collectives in their places.
        arguments: Paths of the program's arguments, in order; "" for one without a path.

    Returns:
        The collectives, with ``parameters`` and ``why``, and with ``op_name`` and ``source`` of
        what they need where the compiler left them without.
    """
    attribution = _Attribution(program, arguments)
    return tuple(attribution.of(each) for each in found)


class _How(NamedTuple):
    """How a collective came about.

    Attributes:
        operations: The traced operations that need it.
        reduces: The opcode by which it reduces, or "".
        is_backward: Whether what travels was computed in a backward pass.
    """

    operations: list[str]
    reduces: str
    is_backward: bool


class _Attribution:
    def __init__(self, program: Program, arguments: Sequence[str]) -> None:
        self._program = program
        self._arguments = arguments
        self._flow = Flow(program)
        self._updates = aliases(program)
        self._likely = likely_updates(program)

    def of(self, found: Found) -> Collective:
        """Returns a collective with what was found out of it."""
        each = found.instruction
        # Of a permutation of buffers, and of a send, what stands behind the first is no data.
        single = found.collective.kind == "collective-permute" or each.opcode == "send"
        operands = each.operands[:1] if single else each.operands
        sources = [self._flow.sources(Value(found.inside.name, name)) for name in operands]
        moved = self._moved(sources)
        collective = _with_origin(found.collective, sources)
        if not collective.op_name:
            collective = self._with_need(collective, Value(found.inside.name, each.name))
        how = self._how(each, collective, sources)
        # A gradient is one also if it is a result itself, or the step keeps its arguments.
        updates = self._likely if how.is_backward else self._updates
        updated = () if moved else self._updated(found, len(operands), updates)
        return dataclasses.replace(
            collective,
            parameters=moved or updated,
            why=_why(collective, moved, updated, how),
        )

    def _with_need(self, collective: Collective, value: Value) -> Collective:
        """Gives a collective the origin of what takes its result."""
        user = self._flow.needed_by(value)
        if user is None:
            return collective
        source = collective.source or user.source
        return dataclasses.replace(collective, op_name=user.op_name, source=source)

    def _how(self, each: Instruction, collective: Collective, sources: Sequence[Sources]) -> _How:
        names = [collective.op_name, *(of.op_name for some in sources for of in some.computed)]
        is_backward = any("transpose(" in name for name in names)
        return _How(_operations(collective.op_name), reduction(self._program, each), is_backward)

    def _moved(self, sources: Sequence[Sources]) -> tuple[str, ...]:
        """Paths of arguments, if nothing else travels."""
        if any(each.computed or not each.arguments for each in sources):
            return ()
        numbers = sorted({number for each in sources for number in each.arguments})
        return tuple(path for number in numbers if (path := self._path(number)))

    def _updated(self, found: Found, count: int, updates: Mapping[int, int]) -> tuple[str, ...]:
        """Paths of the arguments that what travels is used to update."""
        paths: dict[str, None] = {}
        for element in range(count) if count > 1 else (-1,):
            value = Value(found.inside.name, found.instruction.name, element)
            results = self._flow.results(value)
            numbers = {updates[result] for result in results if result in updates}
            paths |= dict.fromkeys(_without_states([self._path(n) for n in sorted(numbers)]))
        return tuple(paths)

    def _path(self, number: int) -> str:
        return self._arguments[number] if number < len(self._arguments) else ""


def _without_states(paths: Sequence[str]) -> list[str]:
    """Leaves out paths of an optimizer's state, which end as that of its parameter."""
    ends = {path: path[min(_first(path, "."), _first(path, "[")) :] for path in paths if path}
    return [
        path
        for path in ends
        if not any(len(o) < len(path) and path.endswith(end) for o, end in ends.items() if end)
    ]


def _first(path: str, mark: str) -> int:
    place = path.find(mark)
    return place if place >= 0 else len(path)


def _with_origin(collective: Collective, sources: Sequence[Sources]) -> Collective:
    """Gives a collective that a compiler made the origin of what it takes, if it has none."""
    named = [each for source in sources for each in source.computed if each.op_name]
    if collective.op_name or not named:
        return collective
    source = collective.source or next((each.source for each in named if each.source), "")
    return dataclasses.replace(collective, op_name=named[0].op_name, source=source)


def _why(
    collective: Collective, moved: tuple[str, ...], updated: tuple[str, ...], how: _How
) -> str:
    operation = _listed(how.operations) or "what comes next"
    over = f" over {' and '.join(collective.axes)}" if collective.axes else ""
    asked = next((name for name in how.operations if _ASKED.match(name)), "")
    carries = collective.kind not in ("all-reduce", "reduce-scatter")
    what = _listed(moved) or "an activation"
    match collective.kind:
        case "all-reduce" | "reduce-scatter" if updated and how.is_backward:
            return f"sums the gradient of {_listed(updated)}{over}"
        case "all-gather" if updated and not how.is_backward:
            return f"gathers the new {_listed(updated)}{over}"
        case "collective-permute" if updated and how.is_backward:
            return f"passes on the gradient of {_listed(updated)}"
        case _ if asked and not (moved and carries):
            return f"asked for by {asked}{over}"
        case "all-reduce" | "reduce-scatter":
            if how.reduces in _EXTREMES:
                return f"{_EXTREMES[how.reduces]} of {operation}{over}"
            parts = "partial products" if _PRODUCTS & set(how.operations) else "parts"
            return f"sums {parts} of {operation}{over}"
        case "all-gather":
            return f"gathers {what} before {operation}"
        case "collective-permute" if moved:
            return f"passes on the parts of {what} for {operation}"
        case "collective-permute":
            return f"moves {what} to other devices for {operation}"
        case "broadcast":
            return f"sends {what} to all for {operation}"
        case _:
            return f"re-lays out {what} for {operation}"


def _operations(op_name: str) -> list[str]:
    """The traced operations of a name; compilers join the names of what they merge."""
    joined = _JOINED.search(op_name)
    parts = joined[1].split(":") if joined else [op_name]
    return list(dict.fromkeys(part.rpartition("/")[2] for part in parts if part))


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
