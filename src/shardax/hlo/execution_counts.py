# SPDX-License-Identifier: Apache-2.0
"""Execution counts of computations, and trip counts of loops.

A computation that a loop runs counts as often as the loop's trips, and one in a loop of a loop as
often as both together. Of a conditional the branch that costs most runs, and the others do not.
Computations that say how elements are combined (of a reduction, a sort, an all-reduce) are no part
of this.

The CPU and GPU compilers write the trip count into the loop where they know it. The TPU compiler
does not; there it follows from the loop itself: a *counter*, an integer in the loop's state, starts
at a constant, grows by a constant in the body, and is compared with a constant in the condition.
What is computed from counters is an affine expression of elements of the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardax.hlo import errors
from shardax.hlo.program import Computation, Instruction, Program

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"[su]\d+$")
_UNCHANGED = frozenset(
    {"copy", "bitcast", "convert", "reshape", "opt-barrier", "copy-done", "copy-start"}
)
_LARGEST_CALLEE = 64  # instructions of a called computation that may be arithmetic of counters

Cost = Callable[[Computation, Instruction], float]
"""What one run of an instruction costs, without that of what it calls."""


@dataclass(frozen=True)
class ExecutionCounts:
    """Numbers of runs of computations in one run of a program."""

    counts: Mapping[str, int]  # by name; those that do not run are left out
    unknown: frozenset[str]  # in a loop of unknown length, which counts once, or in a branch
    warnings: tuple[str, ...]


def count_executions(program: Program, cost: Cost) -> ExecutionCounts:
    """Counts the runs of the computations of a program."""
    return _ExecutionCounter(program, cost).count()


class _CallSite(NamedTuple):
    """Runs of a computation in one run of another."""

    caller: Instruction
    callee: str
    times: int = 1
    doubt: str = ""  # a sentence, if the number of runs is not known


class _ExecutionCounter:
    def __init__(self, program: Program, cost: Cost) -> None:
        self._program = program
        self._own_cost = cost
        self._costs: dict[str, float] = {}
        self._call_sites: dict[str, list[_CallSite]] = {}

    def count(self) -> ExecutionCounts:
        counts: dict[str, int] = {self._program.entry: 1}
        unknown: set[str] = set()
        warnings: dict[str, None] = {}
        for name in self._callers_first():
            for op, callee, times, doubt in self._calls(name):
                counts[callee] = counts.get(callee, 0) + counts[name] * times
                if doubt or name in unknown:
                    unknown.add(callee)

                # What costs nothing either way is no news.
                if doubt and self._cost(callee, op):
                    origin = op.source or op.op_name
                    where = f", {origin}" if origin else ""
                    warnings[f"{doubt} ({op.name}{where})."] = None
        return ExecutionCounts(counts, frozenset(unknown), tuple(warnings))

    def _callers_first(self) -> list[str]:
        """Names of the computations that run, callers before their callees."""
        done: dict[str, None] = {}
        begun: set[str] = set()

        def visit(name: str) -> None:
            begun.add(name)
            for call in self._calls(name):
                if call.callee not in begun:
                    visit(call.callee)
                elif call.callee not in done:
                    raise errors.recursive_computation(call.callee)
            done[name] = None

        visit(self._program.entry)
        return list(reversed(done))

    def _calls(self, name: str, caller: Instruction | None = None) -> list[_CallSite]:
        """What a computation runs: of a conditional, the branch that costs most."""
        if name not in self._call_sites:
            if name not in self._program.computations:
                raise errors.missing_computation(name, caller)
            self._call_sites[name] = list(self._find_calls(self._program.computations[name]))
        return self._call_sites[name]

    def _find_calls(self, computation: Computation) -> Iterator[_CallSite]:
        for op in computation.instructions:
            if op.opcode == "while":
                trips, doubt = trip_count(self._program, computation, op), ""
                if trips is None:
                    trips, doubt = 1, "One turn is counted of a loop of no known end"
                # The condition is asked once more, at the end.
                for times, key in ((trips, "body"), (trips + 1, "condition")):
                    yield from (_CallSite(op, name, times, doubt) for name in op.computations(key))
            elif op.branches:
                dearest = max(op.branches, key=lambda branch: self._cost(branch, op))
                doubt = "Of a conditional the dearest branch is counted"
                yield _CallSite(op, dearest, doubt=doubt)
            else:
                yield from (_CallSite(op, name) for name in op.called)

    def _cost(self, name: str, caller: Instruction) -> float:
        if name not in self._costs:
            calls = self._calls(name, caller)
            computation = self._program.computations[name]
            own_cost = sum(self._own_cost(computation, op) for op in computation.instructions)
            self._costs[name] = own_cost + sum(
                times * self._cost(callee, op) for op, callee, times, _ in calls
            )
        return self._costs[name]


# Trip counts.


@dataclass(frozen=True)
class AffineExpr:
    """A constant and multiples of elements of a loop's state."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, addend: AffineExpr, times: int = 1) -> AffineExpr:
        """Returns the sum of this and a multiple of another."""
        terms = dict(self.terms)
        for element, factor in addend.terms:
            terms[element] = terms.get(element, 0) + times * factor
        nonzero = tuple(sorted((element, factor) for element, factor in terms.items() if factor))
        return AffineExpr(self.constant + times * addend.constant, nonzero)


Scalars = AffineExpr | tuple["Scalars", ...] | None
"""A number, a tuple, or what is not known."""


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trips of a ``while``; None if unknown before the run."""
    match = _TRIPS.search(loop.attributes)
    if match:
        return int(match[1])
    condition = _callee(program, loop, "condition")
    body = _callee(program, loop, "body")
    if condition is None or body is None or not loop.operands:
        return None

    # The loop's state before the first turn and after each, as far as it is affine.
    state = tuple(AffineExpr(0, ((element, 1),)) for element in range(len(loop.shapes)))
    start = _ScalarEvaluator(program, computation, ()).value(loop.operands[0])
    next_values = _ScalarEvaluator(program, body, (state,)).value(body.root.name)
    test = _test(program, condition, state)
    if test is None or not isinstance(start, tuple) or not isinstance(next_values, tuple):
        return None

    # The loop runs on while `difference direction 0`, and each turn adds the same to it.
    difference, direction = test
    first, step = AffineExpr(difference.constant), AffineExpr(0)
    for element, factor in difference.terms:
        initial, next_value = _at(start, element), _at(next_values, element)
        if not isinstance(initial, AffineExpr) or not isinstance(next_value, AffineExpr):
            return None
        first = first.plus(initial, factor)
        step = step.plus(next_value.plus(state[element], -1), factor)
    if first.terms or step.terms:
        return None
    return _steps(first.constant, step.constant, direction)


def _steps(first: int, step: int, direction: str) -> int | None:
    """Number of ``first``, ``first + step``, ... that compare true with 0."""
    if direction == "NE":
        if first == 0:
            return 0
        if step == 0 or first % step or -first // step < 0:
            return None
        return -first // step

    # All others are "greater than 0", mirrored or of the next integer.
    if direction in ("LT", "LE"):
        first, step = -first, -step
    if direction in ("LE", "GE"):
        first += 1
    if first <= 0:
        return 0
    return -(first // step) if step < 0 else None


def _test(
    program: Program, condition: Computation, state: Scalars
) -> tuple[AffineExpr, str] | None:
    """The value compared with 0 by the condition, and the comparison."""
    evaluator = _ScalarEvaluator(program, condition, (state,))
    root = condition.root
    while _keeps_values(root):
        root = condition.by_name[root.operands[0]]

    # The comparison may stand in a fusion.
    if root.opcode in ("fusion", "call"):
        callee = _callee(program, root, "calls", "to_apply")
        if callee is None:
            return None
        arguments = tuple(evaluator.value(name) for name in root.operands)
        evaluator, root = _ScalarEvaluator(program, callee, arguments), callee.root
    if root.opcode != "compare" or len(root.operands) != 2:
        return None

    left, right = (evaluator.value(name) for name in root.operands)
    direction = root.attribute("direction")
    if not isinstance(left, AffineExpr) or not isinstance(right, AffineExpr):
        return None
    if direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    return left.plus(right, -1), direction


class _ScalarEvaluator:
    """Evaluates the integers of a computation, as far as they are affine."""

    def __init__(
        self, program: Program, computation: Computation, arguments: Sequence[Scalars]
    ) -> None:
        self._program = program
        self._inside = computation
        self._arguments = arguments
        self._values: dict[str, Scalars] = {}

    def value(self, name: str) -> Scalars:
        if name not in self._values:
            self._values[name] = None  # of a value that needs itself
            self._values[name] = self._evaluate(self._inside.by_name[name])
        return self._values[name]

    def _evaluate(self, op: Instruction) -> Scalars:
        # Parameters, tuples and calls pass values on.
        if op.opcode == "parameter":
            number = int(op.literal)
            return self._arguments[number] if number < len(self._arguments) else None
        if op.opcode == "tuple":
            return tuple(self.value(name) for name in op.operands)
        if op.opcode == "get-tuple-element":
            return _at(self.value(op.operands[0]), op.element)
        if _keeps_values(op) and op.operands:
            return self.value(op.operands[0])
        if op.opcode in ("fusion", "call"):
            callee = _callee(self._program, op, "calls", "to_apply")
            if callee is None or len(callee.instructions) > _LARGEST_CALLEE:
                return None
            arguments = tuple(self.value(name) for name in op.operands)
            return _ScalarEvaluator(self._program, callee, arguments).value(callee.root.name)

        if not op.shapes or op.shapes[0].size != 1 or not _INTEGER.match(op.shapes[0].dtype):
            return None
        if op.opcode == "constant":
            literal = op.literal.strip("{} ")
            return AffineExpr(int(literal)) if re.fullmatch(r"-?\d+", literal) else None
        return self._arithmetic(op)

    def _arithmetic(self, op: Instruction) -> AffineExpr | None:
        if op.opcode not in ("add", "subtract", "multiply", "negate"):
            return None
        numbers: list[AffineExpr] = []
        for name in op.operands:
            value = self.value(name)
            if not isinstance(value, AffineExpr):
                return None
            numbers.append(value)

        if op.opcode == "negate":
            return AffineExpr(0).plus(numbers[0], -1)
        left, right = numbers
        if op.opcode == "add":
            return left.plus(right)
        if op.opcode == "subtract":
            return left.plus(right, -1)

        # A product is affine if one side is a constant.
        if left.terms:
            left, right = right, left
        return None if left.terms else AffineExpr(0).plus(right, left.constant)


def _keeps_values(op: Instruction) -> bool:
    # Programs that are only lowered annotate shardings by custom calls.
    annotates = op.opcode == "custom-call" and op.call_target == "Sharding"
    return annotates or op.opcode in _UNCHANGED


def _callee(program: Program, op: Instruction, *keys: str) -> Computation | None:
    return program.computations.get(next(iter(op.computations(*keys)), ""))


def _at(value: Scalars, index: int) -> Scalars:
    return value[index] if isinstance(value, tuple) and 0 <= index < len(value) else None
