# SPDX-License-Identifier: Apache-2.0
"""How often each computation runs in one run of a program.

A computation that a loop holds runs as often as the loop, and one in a loop of a loop as often as
both together. Of a conditional the branch that costs most runs, and the others do not. Computations
that say how elements are combined (of a reduction, a sort, an all-reduce) are no part of this.

How often loops run.

The CPU and GPU compilers write the number into the loop where they know it. The TPU compiler does
not; there it follows from the loop itself: a *counter*, an integer in the loop's state, starts at
a constant, grows by a constant in the body, and is compared with a constant in the condition. What
is computed from counters is followed as a sum of multiples of elements of the state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardax.hlo.program import Computation, HloReadError, Instruction, Program

# --- Trips ---

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"[su]\d+$")
_UNCHANGED = frozenset(
    {"copy", "bitcast", "convert", "reshape", "opt-barrier", "copy-done", "copy-start"}
)
_DIRECTIONS = ("LT", "LE", "GT", "GE", "NE")


@dataclass(frozen=True)
class Linear:
    """A constant and multiples of elements of a loop's state, by their number."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Linear, times: int = 1) -> Linear:
        """Returns the sum of this and a multiple of another."""
        terms = dict(self.terms)
        for element, factor in other.terms:
            terms[element] = terms.get(element, 0) + times * factor
        kept = tuple(sorted((element, factor) for element, factor in terms.items() if factor))
        return Linear(self.constant + times * other.constant, kept)


Value = Linear | tuple["Value", ...] | None
"""A number, a tuple, or what is not known."""


def trip_count(program: Program, inside: Computation, loop: Instruction) -> int | None:
    """Returns how often a loop runs."""
    found = _TRIPS.search(loop.attributes)
    if found:
        return int(found[1])
    condition = program.computations.get(next(iter(loop.computations("condition")), ""))
    body = program.computations.get(next(iter(loop.computations("body")), ""))
    if condition is None or body is None or not loop.operands:
        return None
    state = tuple(Linear(0, ((element, 1),)) for element in range(len(loop.shapes)))
    test = _test(program, condition, state)
    if test is None:
        return None
    difference, direction = test  # the loop runs on while `difference direction 0`
    start = _Reader(program, inside, ()).value(loop.operands[0])
    after = _Reader(program, body, (state,)).value(body.root.name)
    return _solve(difference, direction, start, after)


def _solve(difference: Linear, direction: str, start: Value, after: Value) -> int | None:
    if not isinstance(start, tuple) or not isinstance(after, tuple):
        return None
    first, step = Linear(difference.constant), Linear(0)
    for element, factor in difference.terms:
        initial, next_value = _at(start, element), _at(after, element)
        if not isinstance(initial, Linear) or not isinstance(next_value, Linear):
            return None
        first = first.plus(initial, factor)
        step = step.plus(next_value.plus(Linear(0, ((element, 1),)), -1), factor)
    if first.terms or step.terms:
        return None
    return _steps(first.constant, step.constant, direction)


def _steps(first: int, step: int, direction: str) -> int | None:
    """How many of ``first``, ``first + step``, ... are LT, LE, GT, GE or NE 0, until one is not."""
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
    elif direction != "GT":
        return None
    if first <= 0:
        return 0
    return -(first // step) if step < 0 else None


def _test(program: Program, condition: Computation, state: Value) -> tuple[Linear, str] | None:
    """What the condition compares with 0, and how."""
    reader = _Reader(program, condition, (state,))
    root = condition.root
    while root.opcode in _UNCHANGED:
        root = reader.inside.by_name[root.operands[0]]
    if root.opcode in ("fusion", "call"):
        called = program.computations.get(next(iter(root.computations("calls", "to_apply")), ""))
        if called is None:
            return None
        reader = _Reader(program, called, tuple(reader.value(name) for name in root.operands))
        root = called.root
    if root.opcode != "compare" or len(root.operands) != 2:
        return None
    left, right = (reader.value(name) for name in root.operands)
    if not isinstance(left, Linear) or not isinstance(right, Linear):
        return None
    direction = root.attribute("direction") or ""
    return (left.plus(right, -1), direction) if direction in _DIRECTIONS else None


class _Reader:
    """Follows numbers through a computation."""

    def __init__(self, program: Program, inside: Computation, arguments: Sequence[Value]) -> None:
        self._program = program
        self.inside = inside
        self._arguments = arguments
        self._values: dict[str, Value] = {}

    def value(self, name: str) -> Value:
        if name not in self._values:
            self._values[name] = None  # of a value that needs itself
            self._values[name] = self._read(self.inside.by_name[name])
        return self._values[name]

    def _read(self, each: Instruction) -> Value:
        opcode = each.opcode
        if opcode == "parameter":
            number = int(each.operands[0])
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "tuple":
            return tuple(self.value(name) for name in each.operands)
        if opcode == "get-tuple-element":
            index = each.attribute("index") or ""
            return _at(self.value(each.operands[0]), int(index) if index.isdigit() else -1)
        if opcode in _UNCHANGED and each.operands:
            return self.value(each.operands[0])
        if opcode in ("fusion", "call"):
            called = self._program.computations.get(
                next(iter(each.computations("calls", "to_apply")), "")
            )
            if called is None or len(called.instructions) > 64:  # no arithmetic of counters
                return None
            arguments = tuple(self.value(name) for name in each.operands)
            return _Reader(self._program, called, arguments).value(called.root.name)
        return self._arithmetic(each)

    def _arithmetic(self, each: Instruction) -> Value:
        if not each.shapes or each.shapes[0].size != 1 or not _INTEGER.match(each.shapes[0].dtype):
            return None
        if each.opcode == "constant":
            literal = each.literal.strip("{} ")
            return Linear(int(literal)) if re.fullmatch(r"-?\d+", literal) else None
        if each.opcode not in ("add", "subtract", "multiply", "negate"):
            return None
        values = [self.value(name) for name in each.operands]
        if not all(isinstance(value, Linear) for value in values):
            return None
        left, *others = [value for value in values if isinstance(value, Linear)]
        if each.opcode == "negate":
            return Linear(0).plus(left, -1)
        if each.opcode == "multiply":
            left, right = (left, others[0]) if not others[0].terms else (others[0], left)
            return Linear(0).plus(left, right.constant) if not right.terms else None
        return left.plus(others[0], 1 if each.opcode == "add" else -1)


def _at(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) and 0 <= index < len(value) else None


# --- Runs ---

Weight = Callable[[Computation, Instruction], float]
"""What one run of an instruction costs, without that of what it calls."""


@dataclass(frozen=True)
class Runs:
    """How often computations run."""

    counts: Mapping[str, int]  # by the computation's name; those that do not run are left out
    # names of computations whose number is not known: in a loop of unknown length, of which one
    # turn is counted, or in a branch
    unknown: frozenset[str]
    warnings: tuple[str, ...]  # what is not known, in words


def runs_of(program: Program, weight: Weight) -> Runs:
    """Counts how often the computations of a program run."""
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
