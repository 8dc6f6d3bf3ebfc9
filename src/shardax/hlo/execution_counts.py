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

from shardax.hlo.program import Computation, HloReadError, Instruction, Program

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


def called(op: Instruction) -> tuple[str, ...]:
    """Returns the computations run by an instruction, without a conditional's branches."""
    match op.opcode.removesuffix("-start"):
        case "fusion" | "async":
            return op.computations("calls")
        case "call":
            return op.computations("to_apply", "calls")
        case "while":
            return op.computations("body", "condition")
        case "custom-call":
            return op.computations("called_computations", "calls")
        case _:
            return ()


def branches(op: Instruction) -> tuple[str, ...]:
    """Returns the branches of a conditional; none of other instructions."""
    if op.opcode != "conditional":
        return ()
    return op.computations("branch_computations", "true_computation", "false_computation")


def count_executions(program: Program, cost: Cost) -> ExecutionCounts:
    """Counts the runs of the computations of a program."""
    return _ExecutionCounter(program, cost).count()


class _ExecutionCounter:
    def __init__(self, program: Program, cost: Cost) -> None:
        self._program = program
        self._own_cost = cost
        self._costs: dict[str, float] = {}
        self._trips: dict[tuple[str, str], int | None] = {}

    def count(self) -> ExecutionCounts:
        counts: dict[str, int] = {self._program.entry: 1}
        unknown: set[str] = set()
        warnings: dict[str, None] = {}
        for name in self._callers_first():
            if name not in counts:
                continue
            for caller, callee, times, doubt in self._calls(self._computation(name)):
                counts[callee] = counts.get(callee, 0) + counts[name] * times
                if doubt or name in unknown:
                    unknown.add(callee)
                if doubt and self._cost(callee, caller):
                    where = caller.source or caller.op_name
                    warnings[f"{doubt} ({caller.name}{f', {where}' if where else ''})."] = None
        return ExecutionCounts(counts, frozenset(unknown), tuple(warnings))

    def _callers_first(self) -> list[str]:
        """Names of computations, callers before their callees."""
        done: dict[str, None] = {}
        begun: set[str] = set()

        def visit(name: str) -> None:
            begun.add(name)
            for _, callee, _, _ in self._calls(self._computation(name)):
                if callee not in begun:
                    visit(callee)
                elif callee not in done:
                    raise HloReadError(f"Computation {callee!r} calls itself.")
            done[name] = None

        visit(self._program.entry)
        return list(reversed(done))

    def _calls(self, inside: Computation) -> Iterator[tuple[Instruction, str, int, str]]:
        """Yields callers, callees, numbers of runs, and doubts."""
        for op in inside.instructions:
            if op.opcode == "while":
                key = inside.name, op.name
                if key not in self._trips:
                    self._trips[key] = trip_count(self._program, inside, op)
                trips = self._trips[key]
                doubt = "" if trips is not None else "One turn is counted of a loop of no known end"
                times = 1 if trips is None else trips
                for name in op.computations("body"):
                    yield op, name, times, doubt
                for name in op.computations("condition"):
                    yield op, name, times + 1, doubt
                continue
            for name in called(op):
                yield op, name, 1, ""
            choices = branches(op)
            if choices:
                name = max(choices, key=lambda choice: self._cost(choice, op))
                yield op, name, 1, "Of a conditional the dearest branch is counted"

    def _cost(self, name: str, caller: Instruction) -> float:
        if name not in self._costs:
            inside = self._computation(name, caller)
            own_cost = sum(self._own_cost(inside, op) for op in inside.instructions)
            self._costs[name] = own_cost + sum(
                times * self._cost(callee, op) for op, callee, times, _ in self._calls(inside)
            )
        return self._costs[name]

    def _computation(self, name: str, caller: Instruction | None = None) -> Computation:
        computation = self._program.computations.get(name)
        if computation is None:
            where = f" that {caller.name!r} calls" if caller else ""
            raise HloReadError(
                f"The program does not hold computation {name!r}{where}; its text is cut or "
                "changed."
            )
        return computation


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


def trip_count(program: Program, inside: Computation, loop: Instruction) -> int | None:
    """Returns the trips of a ``while``; None if unknown before the run."""
    match = _TRIPS.search(loop.attributes)
    if match:
        return int(match[1])
    condition = _callee(program, loop, "condition")
    body = _callee(program, loop, "body")
    if condition is None or body is None or not loop.operands:
        return None
    state = tuple(AffineExpr(0, ((element, 1),)) for element in range(len(loop.shapes)))
    test = _test(program, condition, state)
    start = _ScalarEvaluator(program, inside, ()).value(loop.operands[0])
    next_values = _ScalarEvaluator(program, body, (state,)).value(body.root.name)
    if test is None or not isinstance(start, tuple) or not isinstance(next_values, tuple):
        return None
    difference, direction = test  # the loop runs on while `difference direction 0`
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
    if direction in ("LT", "LE"):
        first, step = -first, -step
        direction = "GT" if direction == "LT" else "GE"
    if direction == "NE":
        if first == 0:
            return 0
        if step == 0 or first % step or -first // step < 0:
            return None
        return -first // step
    if direction == "GE":
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
    if root.opcode in ("fusion", "call"):
        callee = _callee(program, root, "calls", "to_apply")
        if callee is None:
            return None
        arguments = tuple(evaluator.value(name) for name in root.operands)
        evaluator, root = _ScalarEvaluator(program, callee, arguments), callee.root
    if root.opcode != "compare" or len(root.operands) != 2:
        return None
    left, right = (evaluator.value(name) for name in root.operands)
    direction = root.attribute("direction") or ""
    if not isinstance(left, AffineExpr) or not isinstance(right, AffineExpr):
        return None
    return (
        (left.plus(right, -1), direction) if direction in ("LT", "LE", "GT", "GE", "NE") else None
    )


class _ScalarEvaluator:
    """Evaluates the integers of a computation, as far as they are affine."""

    def __init__(self, program: Program, inside: Computation, arguments: Sequence[Scalars]) -> None:
        self._program = program
        self._inside = inside
        self._arguments = arguments
        self._values: dict[str, Scalars] = {}

    def value(self, name: str) -> Scalars:
        if name not in self._values:
            self._values[name] = None  # of a value that needs itself
            self._values[name] = self._evaluate(self._inside.by_name[name])
        return self._values[name]

    def _evaluate(self, op: Instruction) -> Scalars:
        opcode = op.opcode
        if opcode == "parameter":
            number = int(op.operands[0])
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "tuple":
            return tuple(self.value(name) for name in op.operands)
        if opcode == "get-tuple-element":
            index = op.attribute("index") or ""
            return _at(self.value(op.operands[0]), int(index) if index.isdigit() else -1)
        if _keeps_values(op) and op.operands:
            return self.value(op.operands[0])
        if opcode in ("fusion", "call"):
            callee = _callee(self._program, op, "calls", "to_apply")
            if callee is None or len(callee.instructions) > _LARGEST_CALLEE:
                return None
            arguments = tuple(self.value(name) for name in op.operands)
            return _ScalarEvaluator(self._program, callee, arguments).value(callee.root.name)
        if not op.shapes or op.shapes[0].size != 1 or not _INTEGER.match(op.shapes[0].dtype):
            return None
        if opcode == "constant":
            literal = op.literal.strip("{} ")
            return AffineExpr(int(literal)) if re.fullmatch(r"-?\d+", literal) else None
        if opcode not in ("add", "subtract", "multiply", "negate"):
            return None
        numbers = [value for n in op.operands if isinstance(value := self.value(n), AffineExpr)]
        if len(numbers) < len(op.operands):
            return None
        left, *rights = numbers
        if opcode == "negate":
            return AffineExpr(0).plus(left, -1)
        if opcode == "multiply":
            left, right = (left, rights[0]) if not rights[0].terms else (rights[0], left)
            return AffineExpr(0).plus(left, right.constant) if not right.terms else None
        return left.plus(rights[0], 1 if opcode == "add" else -1)


def _keeps_values(op: Instruction) -> bool:
    # Programs that are only lowered annotate shardings by custom calls.
    annotates = op.opcode == "custom-call" and op.call_target == "Sharding"
    return annotates or op.opcode in _UNCHANGED


def _callee(program: Program, op: Instruction, *keys: str) -> Computation | None:
    return program.computations.get(next(iter(op.computations(*keys)), ""))


def _at(value: Scalars, index: int) -> Scalars:
    return value[index] if isinstance(value, tuple) and 0 <= index < len(value) else None
