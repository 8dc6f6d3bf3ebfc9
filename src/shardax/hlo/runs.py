# SPDX-License-Identifier: Apache-2.0
"""How often each computation runs in one run of a program.

A computation that a loop holds runs as often as the loop, and one in a loop of a loop as often as
both together. Of a conditional the branch that costs most runs, and the others do not. Computations
that say how elements are combined (of a reduction, a sort, an all-reduce) are no part of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardax.core.errors import HloReadError
from shardax.hlo.program import Computation, Instruction, Program
from shardax.hlo.trips import trip_count

Weight = Callable[[Computation, Instruction], float]
"""What one run of an instruction costs, without that of what it calls."""


@dataclass(frozen=True)
class Runs:
    """How often computations run.

    Attributes:
        counts: By the computation's name; those that do not run are left out.
        unknown: Names of computations whose number is not known: in a loop of unknown length, of
            which one turn is counted, or in a branch.
        warnings: What is not known, in words.
    """

    counts: Mapping[str, int]
    unknown: frozenset[str]
    warnings: tuple[str, ...]


def runs_of(program: Program, weight: Weight) -> Runs:
    """Counts how often the computations of a program run.

    Args:
        program: The program.
        weight: What an instruction costs; of branches the dearest is taken.

    Returns:
        The counts.

    Raises:
        HloReadError: If an instruction calls a computation that the program does not hold.
    """
    return _Counter(program, weight).count()


def called(each: Instruction) -> tuple[str, ...]:
    """Returns the computations that an instruction runs, but for a conditional's branches."""
    match each.opcode.removesuffix("-start"):
        case "fusion" | "async":
            return each.computations("calls")
        case "call":
            return each.computations("to_apply", "calls")
        case "while":
            return each.computations("body", "condition")
        case "custom-call":
            return each.computations("called_computations", "calls")
        case _:
            return ()


def branches(each: Instruction) -> tuple[str, ...]:
    """Returns the branches of a conditional; none of other instructions."""
    if each.opcode != "conditional":
        return ()
    return each.computations("branch_computations", "true_computation", "false_computation")


class _Counter:
    def __init__(self, program: Program, weight: Weight) -> None:
        self._program = program
        self._weight = weight
        self._weights: dict[str, float] = {}
        self._trips: dict[tuple[str, str], int | None] = {}

    def count(self) -> Runs:
        counts: dict[str, int] = {self._program.entry: 1}
        unknown: set[str] = set()
        warnings: dict[str, None] = {}
        for name in self._in_order():
            if name not in counts:
                continue
            for each, callee, times, doubt in self._calls(self._computation(name, None)):
                counts[callee] = counts.get(callee, 0) + counts[name] * times
                if doubt or name in unknown:
                    unknown.add(callee)
                if doubt and self._cost(callee, each):
                    where = each.source or each.op_name
                    warnings[f"{doubt} ({each.name}{f', {where}' if where else ''})."] = None
        return Runs(counts, frozenset(unknown), tuple(warnings))

    def _in_order(self) -> list[str]:
        """Names of computations, callers before what they call."""
        done: dict[str, None] = {}
        open_names: list[tuple[str, Iterator[str]]] = []

        def enter(name: str) -> None:
            inside = self._computation(name, None)
            open_names.append((name, iter([callee for _, callee, _, _ in self._calls(inside)])))

        enter(self._program.entry)
        while open_names:
            name, callees = open_names[-1]
            callee = next((each for each in callees if each not in done), None)
            if callee is None:
                done[name] = None
                open_names.pop()
            elif any(callee == other for other, _ in open_names):
                raise HloReadError(f"Computation {callee!r} calls itself.")
            else:
                enter(callee)
        return list(reversed(done))

    def _calls(self, inside: Computation) -> Iterator[tuple[Instruction, str, int, str]]:
        """Yields what a computation calls, how often, and what is in doubt about that."""
        for each in inside.instructions:
            names = called(each)
            if each.opcode == "while":
                trips = self._trip_count(inside, each)
                doubt = "" if trips is not None else "One turn is counted of a loop of no known end"
                times = 1 if trips is None else trips
                for name in each.computations("body"):
                    yield each, name, times, doubt
                for name in each.computations("condition"):
                    yield each, name, times + 1, doubt
            else:
                for name in names:
                    yield each, name, 1, ""
            choices = branches(each)
            if choices:
                name = max(choices, key=lambda choice: self._cost(choice, each))
                yield each, name, 1, "Of a conditional the dearest branch is counted"

    def _trip_count(self, inside: Computation, loop: Instruction) -> int | None:
        key = inside.name, loop.name
        if key not in self._trips:
            self._trips[key] = trip_count(self._program, inside, loop)
        return self._trips[key]

    def _cost(self, name: str, caller: Instruction) -> float:
        if name not in self._weights:
            inside = self._computation(name, caller)
            own = sum(self._weight(inside, each) for each in inside.instructions)
            self._weights[name] = own + sum(
                times * self._cost(callee, each) for each, callee, times, _ in self._calls(inside)
            )
        return self._weights[name]

    def _computation(self, name: str, caller: Instruction | None) -> Computation:
        found = self._program.computations.get(name)
        if found is None:
            where = f" that {caller.name!r} calls" if caller else ""
            raise HloReadError(
                f"The program does not hold computation {name!r}{where}; its text is cut or "
                "changed."
            )
        return found
