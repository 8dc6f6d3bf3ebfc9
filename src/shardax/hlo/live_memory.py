# SPDX-License-Identifier: Apache-2.0
"""How much memory a device needs to run a partitioned program: an estimate.

Arguments stay for the whole run; a donated one makes room for the result that takes its place. What
else is *live*, computed and needed later, changes from instruction to instruction, and the most at
a time is what counts. A loop's state takes memory once; an element of it that the body replaces
takes that of the old one, if nobody needs that any more.

Which instructions of a computation fill memory of their own, and which need whose.

A *buffer* is memory that one instruction fills, named after it; the elements of a tuple that a
loop's body is given, or that a loop gives, are buffers named ``loop#2``. Compilers compute most
elementwise operations on the way to what needs them, so these fill a buffer only for what cannot
take them so: a matrix product, a collective, a loop, or the computation's result. What is computed
on the way needs the buffers of all it is computed from.

An order of instructions in which little memory is live.

A partitioned program prints instructions in an order that suits no one: what computes the gradient
of a weight may stand behind everything else, while all that it needs stays live. Compilers choose
an order. Here, as in XLA's simplest scheduler, of the instructions that can run the one runs that
frees most and fills least.

Which results of a program are the next values of its arguments.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Mapping

from shardax.hlo.execution_counts import branches, called
from shardax.hlo.program import ArrayShape, Computation, Instruction, Program, balanced

# --- Live buffers ---

Element = frozenset[str]
"""The buffers that must be there for a value to be known."""

_ON_THE_WAY = frozenset(
    {
        *("abs", "add", "and", "atan2", "bitcast-convert", "broadcast", "cbrt", "ceil", "clamp"),
        *("compare", "complex", "concatenate", "constant", "convert", "cosine", "divide", "erf"),
        *("exponential", "exponential-minus-one", "floor", "imag", "iota", "is-finite", "log"),
        *("log-plus-one", "logistic", "map", "maximum", "minimum", "multiply", "negate", "not"),
        *("or", "pad", "partition-id", "popcnt", "power", "real", "reduce-precision", "remainder"),
        *("replica-id", "reverse", "round-nearest-afz", "round-nearest-even", "rsqrt", "select"),
        *("shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "slice"),
        *("sqrt", "subtract", "tan", "tanh", "transpose", "xor", "dynamic-slice"),
    }
)
_VIEWS = frozenset({"bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape"})
_NAMES = _VIEWS | {"parameter", "tuple", "get-tuple-element"}
# These take what is computed on the way to them; an update does but for what it updates.
_TAKES_ANY = frozenset({"reduce", "gather"})
_UPDATES = frozenset({"dynamic-update-slice", "scatter"})


class Buffers:
    """Buffers of a computation."""

    def __init__(
        self, inside: Computation, kept: dict[str, frozenset[int]], own: frozenset[int] | None
    ) -> None:
        self._inside = inside
        self._kept = kept
        self._own = own
        self._filled = self._find_filled()
        self._replaced: set[str] = set()  # what a loop starts with and writes over
        self.sizes: dict[str, int] = {}
        self.elements: dict[str, tuple[Element, ...]] = {}
        for each in inside.instructions:
            self.elements[each.name] = self._elements(each)

    def is_done(self, each: Instruction) -> bool:
        """Whether an instruction is done for itself, and not on the way to others."""
        on_the_way = each.opcode in _ON_THE_WAY and each.name not in self._filled
        return not on_the_way and each.opcode not in _NAMES

    def done(self) -> list[Instruction]:
        """Returns the instructions that are done for themselves, in the program's order."""
        return [each for each in self._inside.instructions if self.is_done(each)]

    def needed(self, each: Instruction) -> Element:
        """Returns the buffers that an instruction reads."""
        return frozenset().union(*(self._whole(name) for name in each.inputs))

    def _whole(self, name: str) -> Element:
        return frozenset().union(*self.elements[name])

    def _find_filled(self) -> set[str]:
        """Names of what would be computed on the way, but must fill a buffer for a user."""
        filled = set(self._origins(self._inside.root.name))
        for each in self._inside.instructions:
            if each.opcode in _ON_THE_WAY | _NAMES | _TAKES_ANY:
                continue
            names = each.operands[:1] if each.opcode in _UPDATES else each.operands
            for name in names:
                filled.update(self._origins(name))
        return filled

    def _origins(self, name: str) -> list[str]:
        """What must be computed for a value to be in memory."""
        each = self._inside.by_name[name]
        while each.opcode in _VIEWS:
            each = self._inside.by_name[each.operands[0]]
        if each.opcode == "tuple":
            return [origin for operand in each.operands for origin in self._origins(operand)]
        if each.opcode == "get-tuple-element":
            source = self._inside.by_name[each.operands[0]]
            while source.opcode in _VIEWS:
                source = self._inside.by_name[source.operands[0]]
            if source.opcode == "tuple":
                return self._origins(source.operands[each.element])
        return [each.name] if each.opcode in _ON_THE_WAY else []

    def _elements(self, each: Instruction) -> tuple[Element, ...]:
        match each.opcode:
            case "parameter":
                return self._given(each)
            case "tuple":
                return tuple(self._whole(name) for name in each.operands)
            case "get-tuple-element":
                elements = self.elements[each.operands[0]]
                number = each.element
                return (elements[number] if number < len(elements) else self._whole(each.name),)
            case "while":
                return self._of_loop(each)
            case "dynamic-update-slice" | "scatter" if self._is_in_place(each):
                return self.elements[each.operands[0]]
        if each.opcode in _VIEWS:
            return self.elements[each.operands[0]]
        if each.opcode in _ON_THE_WAY and each.name not in self._filled:
            return (self.needed(each),)
        self.sizes[each.name] = each.bytes
        return (frozenset({each.name}),) * max(1, len(each.shapes))

    def _given(self, each: Instruction) -> tuple[Element, ...]:
        if self._own is None:
            return (frozenset(),) * max(1, len(each.shapes))
        for number, shape in enumerate(each.shapes):
            if number not in self._own:
                self.sizes[f"{each.name}#{number}"] = shape.bytes
        return tuple(
            frozenset() if number in self._own else frozenset({f"{each.name}#{number}"})
            for number in range(len(each.shapes))
        )

    def _of_loop(self, each: Instruction) -> tuple[Element, ...]:
        """Elements of a loop's result: in the place of what it starts with, where that may be."""
        elements: list[Element] = []
        given = [self._inside.by_name[name] for name in each.operands]
        names = given[0].operands if given[0].opcode == "tuple" else [""] * len(each.shapes)
        starts = [element for name in each.operands for element in self.elements[name]]
        for number, (name, start, shape) in enumerate(zip(names, starts, each.shapes, strict=True)):
            if number not in self._kept.get(each.name, ()):
                if len(start) != 1 or name in self._replaced:
                    start = frozenset({f"{each.name}#{number}"})
                    self.sizes[f"{each.name}#{number}"] = shape.bytes
                self._replaced.add(name)
            elements.append(start)
        return tuple(elements)

    def _is_in_place(self, each: Instruction) -> bool:
        """Whether an update can be written where the array is: in a buffer, not an argument."""
        return len(self._whole(each.operands[0])) == 1


def kept_elements(body: Computation) -> frozenset[int]:
    """Returns the numbers of the elements that a loop's body gives back as they were."""
    if body.root.opcode != "tuple":
        return frozenset()
    kept = set()
    for number, name in enumerate(body.root.operands):
        each = body.by_name[name]
        while each.opcode in ("copy", "bitcast"):
            each = body.by_name[each.operands[0]]
        if each.opcode != "get-tuple-element" or each.element != number:
            continue
        if body.by_name[each.operands[0]].opcode == "parameter":
            kept.add(number)
    return frozenset(kept)


# --- Live order ---


def least_memory_order(inside: Computation, buffers: Buffers) -> list[Instruction]:
    """Returns the instructions that are done for themselves, in an order of little memory."""
    done = buffers.done()
    place = {each.name: number for number, each in enumerate(done)}
    needs = _needs(inside, place)
    users: dict[str, list[str]] = {}
    for name, before in needs.items():
        for other in before:
            users.setdefault(other, []).append(name)
    waiting = {name: len(before) for name, before in needs.items()}
    reads = {each.name: buffers.needed(each) for each in done}
    left: dict[str, set[str]] = {}
    for name, read in reads.items():
        for buffer in read:
            left.setdefault(buffer, set()).add(name)
    for element in buffers.elements[inside.root.name]:
        for buffer in element:
            left.setdefault(buffer, set()).add("")  # the result is needed by who called

    def cost(name: str) -> int:
        own = {b for e in buffers.elements[name] for b in e if b.partition("#")[0] == name}
        fills = sum(buffers.sizes.get(buffer, 0) for buffer in own)
        frees = sum(buffers.sizes.get(b, 0) for b in reads[name] if left[b] == {name})
        return fills - frees

    ready = [(cost(name), place[name]) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[Instruction] = []
    gone: set[str] = set()
    while ready:
        _, number = heapq.heappop(ready)
        each = done[number]
        if each.name in gone:
            continue
        gone.add(each.name)
        order.append(each)
        changed = set(users.get(each.name, []))
        for user in changed:
            waiting[user] -= 1
        for buffer in reads[each.name]:
            left[buffer].discard(each.name)
            if len(left[buffer]) == 1:
                changed |= left[buffer] - {""}
        for name in changed:
            if not waiting[name] and name not in gone:
                heapq.heappush(ready, (cost(name), place[name]))
    return order


def _needs(inside: Computation, place: dict[str, int]) -> dict[str, set[str]]:
    """By name, the instructions that must run before one: those it takes from, on any way."""
    reached: dict[str, frozenset[str]] = {}
    needs: dict[str, set[str]] = {}
    for each in inside.instructions:
        before = frozenset().union(*(reached[name] for name in each.inputs))
        if each.name in place:
            needs[each.name] = set(before)
            reached[each.name] = frozenset({each.name})
        else:
            reached[each.name] = before
    return needs


# --- Aliases ---

Type = tuple[ArrayShape, ...]

_ALIAS = re.compile(r"\{(\d*)[^{}]*\}: *\((\d+), *\{[^}]*\}")
_DONOR = re.compile(r"\((\d+), *\{[^}]*\}\)")


def aliases(program: Program) -> dict[int, int]:
    """Returns the number of the argument whose place a result takes, by the result's number."""
    # Where the program leaves to the compiler which result takes the place of a donated argument, it
    # is the first of the argument's type that has no place yet, as in XLA.
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


def likely_updates(program: Program) -> dict[int, int]:
    """Returns which argument's next value a result likely is, by the result's number."""
    # A result that takes the place of an argument is its next value. Of the others, those of one type
    # are taken to be the next values, or the gradients, of the arguments of this type, in order, if
    # there are as many; else nothing is guessed.
    found = aliases(program)
    taken = set(found.values())
    results: dict[Type, list[int]] = {}
    arguments: dict[Type, list[int]] = {}
    for number, shape in enumerate(program.main.root.shapes):
        if number not in found:
            results.setdefault((shape,), []).append(number)
    for number, each in sorted(program.main.parameters.items()):
        if number not in taken:
            arguments.setdefault(each.shapes, []).append(number)
    for shapes, numbers in results.items():
        if len(numbers) == len(arguments.get(shapes, ())):
            found.update(zip(numbers, arguments[shapes], strict=True))
    return found


def _value(header: str, key: str) -> str:
    """The text of a value in brackets; "" if the header does not hold the key."""
    start = header.find(key)
    if start < 0:
        return ""
    start += len(key)
    return header[start : balanced(header, start)]


# --- Live memory ---


def peak_bytes(program: Program) -> int:
    """Estimates the most memory that a device needs at a time."""
    arguments = sum(each.bytes for each in program.main.parameters.values())
    placed = frozenset(aliases(program))
    return arguments + _most(program, program.main, placed=placed)


def _most(
    program: Program,
    inside: Computation,
    own: frozenset[int] | None = None,
    placed: frozenset[int] = frozenset(),
) -> int:
    """The most bytes that a computation takes at a time, beyond what it is given."""
    kept = {
        each.name: kept_elements(program.computations[each.computations("body")[0]])
        for each in inside.instructions
        if each.opcode == "while"
    }
    buffers = Buffers(inside, kept, own)
    results = buffers.elements[inside.root.name]
    sizes = dict(buffers.sizes)
    for number in placed:
        sizes.update(dict.fromkeys(results[number], 0))
    within = {each.name: _within(program, each, kept) for each in inside.instructions}
    orders = (buffers.done(), least_memory_order(inside, buffers))
    return min(_peak(order, inside, buffers, sizes, within) for order in orders)


def _peak(
    order: list[Instruction],
    inside: Computation,
    buffers: Buffers,
    sizes: Mapping[str, int],
    within: Mapping[str, int],
) -> int:
    """The most bytes at a time if instructions run in an order."""
    begins, ends = _lifetimes(order, inside, buffers)
    begun_at, ended_at = (_bytes_at(places, sizes) for places in (begins, ends))
    given = live = most = begun_at[-1]
    for place, each in enumerate(order):
        begun, ended = begun_at[place], ended_at[place]
        reused = min(begun, ended) if each.opcode == "all-reduce" else 0
        most = max(most, live + begun - reused + within[each.name])
        live += begun - ended
    return most - given


def _bytes_at(places: Mapping[str, int], sizes: Mapping[str, int]) -> Counter[int]:
    """Bytes of all buffers by their place."""
    total: Counter[int] = Counter()
    for buffer, place in places.items():
        total[place] += sizes[buffer]
    return total


def _within(program: Program, each: Instruction, kept: dict[str, frozenset[int]]) -> int:
    """What the computations of a loop, a call or a conditional take beyond what they are given."""
    match each.opcode:
        case "while":
            (body,) = each.computations("body")
            return _most(program, program.computations[body], kept[each.name])
        case "call" | "conditional":
            names = (*called(each), *branches(each))
            return max(_most(program, program.computations[name]) for name in names)
        case _:
            return 0


def _lifetimes(
    order: list[Instruction], inside: Computation, buffers: Buffers
) -> tuple[dict[str, int], dict[str, int]]:
    """The places where buffers begin to be filled and are needed last; -1 is before the first."""
    begins = dict.fromkeys(buffers.sizes, -1)
    ends: dict[str, int] = {}
    for place, each in enumerate(order):
        ends.update(dict.fromkeys(buffers.needed(each), place))
        for buffer in frozenset().union(*buffers.elements[each.name]):
            if buffer.partition("#")[0] == each.name:
                begins[buffer] = place
            ends.setdefault(buffer, place)
    for element in buffers.elements[inside.root.name]:
        ends.update(dict.fromkeys(element, len(order)))
    return begins, {buffer: place for buffer, place in ends.items() if buffer in begins}
