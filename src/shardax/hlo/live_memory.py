# SPDX-License-Identifier: Apache-2.0
"""Liveness of a partitioned program's buffers, and its peak memory.

Arguments stay for the whole run; a donated one makes room for the result that takes its place. What
else is *live*, computed and needed later, changes from instruction to instruction, and the most at
a time is what counts. A loop's state takes memory once; an element of it that the body replaces
takes that of the old one, if nobody needs that any more.

A *buffer* is memory that one instruction fills, named after it; the elements of a tuple that a
loop's body is given, or that a loop gives, are buffers named ``loop#2``. Compilers *fuse* most
elementwise operations into what needs them, so these fill a buffer only for what cannot take them
so: a matrix product, a collective, a loop, or the computation's result. What is fused needs the
buffers of all it is computed from.

A partitioned program prints instructions in an order that suits no one: what computes the gradient
of a weight may stand behind everything else, while all that it needs stays live. Compilers
*schedule* them. Here, as in XLA's simplest scheduler, of the instructions that can run the one runs
that frees most and fills least.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Mapping

from shardax.hlo.execution_counts import branches, called
from shardax.hlo.program import ArrayShape, Computation, Instruction, Program, balanced

Element = frozenset[str]
"""The buffers that must be there for a value to be known."""

_FUSIBLE = frozenset(
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
VIEWS = frozenset({"bitcast", "copy", "opt-barrier", "optimization-barrier", "reshape"})
_NAMES = VIEWS | {"parameter", "tuple", "get-tuple-element"}
# What is fused into these fills no buffer; into an update, nothing but what it updates does.
_TAKES_ANY = frozenset({"reduce", "gather"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})


class BufferTable:
    """Buffers of a computation."""

    def __init__(
        self,
        inside: Computation,
        kept: Mapping[str, frozenset[int]],  # by loop, the elements that it leaves as they are
        own: frozenset[int] | None = None,  # of a loop's body, those of the body itself
    ) -> None:
        self._inside = inside
        self._kept = kept
        self._own = own
        self._replaced: set[str] = set()  # what a loop starts with and writes over
        self.sizes: dict[str, int] = {}  # bytes, but for buffers that are given and kept
        self.elements: dict[str, tuple[Element, ...]] = {}  # of results; one if it is no tuple
        # Names of what could be fused, but must fill a buffer for a user.
        self._filled = set(self._origins(inside.root.name))
        for each in inside.instructions:
            if each.opcode not in _FUSIBLE | _NAMES | _TAKES_ANY:
                names = each.operands[:1] if each.opcode in UPDATES else each.operands
                self._filled.update(origin for name in names for origin in self._origins(name))
        for each in inside.instructions:
            self.elements[each.name] = self._elements(each)

    def fills_buffer(self, each: Instruction) -> bool:
        """Whether an instruction runs by itself: neither fused nor a name."""
        fused = each.opcode in _FUSIBLE and each.name not in self._filled
        return not fused and each.opcode not in _NAMES

    def scheduled(self) -> list[Instruction]:
        """Returns the instructions that run by themselves, in the program's order."""
        return [each for each in self._inside.instructions if self.fills_buffer(each)]

    def needed(self, each: Instruction) -> Element:
        """Returns the buffers that an instruction reads."""
        return frozenset().union(*(self._whole(name) for name in each.inputs))

    def _whole(self, name: str) -> Element:
        return frozenset().union(*self.elements[name])

    def _viewed(self, name: str) -> Instruction:
        each = self._inside.by_name[name]
        while each.opcode in VIEWS:
            each = self._inside.by_name[each.operands[0]]
        return each

    def _origins(self, name: str) -> list[str]:
        """What must be computed for a value to be in memory."""
        each = self._viewed(name)
        if each.opcode == "tuple":
            return [origin for operand in each.operands for origin in self._origins(operand)]
        if each.opcode == "get-tuple-element":
            source = self._viewed(each.operands[0])
            if source.opcode == "tuple":
                return self._origins(source.operands[each.element])
        return [each.name] if each.opcode in _FUSIBLE else []

    def _elements(self, each: Instruction) -> tuple[Element, ...]:
        match each.opcode:
            case "parameter":
                return self._parameter(each)
            case "tuple":
                return tuple(self._whole(name) for name in each.operands)
            case "get-tuple-element":
                elements = self.elements[each.operands[0]]
                number = each.element
                return (elements[number] if number < len(elements) else self._whole(each.name),)
            case "while":
                return self._loop(each)
            # An update in place: in a buffer, not in an argument.
            case "dynamic-update-slice" | "scatter" if len(self._whole(each.operands[0])) == 1:
                return self.elements[each.operands[0]]
        if each.opcode in VIEWS:
            return self.elements[each.operands[0]]
        if not self.fills_buffer(each):
            return (self.needed(each),)
        self.sizes[each.name] = each.bytes
        return (frozenset({each.name}),) * max(1, len(each.shapes))

    def _parameter(self, each: Instruction) -> tuple[Element, ...]:
        if self._own is None:
            return (frozenset(),) * max(1, len(each.shapes))
        elements: list[Element] = []
        for number, shape in enumerate(each.shapes):
            name = f"{each.name}#{number}"
            if number not in self._own:
                self.sizes[name] = shape.bytes
            elements.append(frozenset() if number in self._own else frozenset({name}))
        return tuple(elements)

    def _loop(self, each: Instruction) -> tuple[Element, ...]:
        """Elements of a loop's result, in place of the initial ones."""
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


def kept_elements(body: Computation) -> frozenset[int]:
    """Returns the elements of its state that a loop's body keeps."""
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


def least_memory_schedule(inside: Computation, buffers: BufferTable) -> list[Instruction]:
    """Schedules the instructions that run by themselves for little memory."""
    scheduled = buffers.scheduled()
    place = {each.name: number for number, each in enumerate(scheduled)}
    reached: dict[str, frozenset[str]] = {}  # by name, what a value is computed from directly
    users: dict[str, list[str]] = {}
    waiting: dict[str, int] = {}  # by name, how many others must run before
    for each in inside.instructions:
        before = frozenset().union(*(reached[name] for name in each.inputs))
        reached[each.name] = before
        if each.name in place:
            reached[each.name] = frozenset({each.name})
            waiting[each.name] = len(before)
            for other in before:
                users.setdefault(other, []).append(each.name)
    reads = {each.name: buffers.needed(each) for each in scheduled}
    left: dict[str, set[str]] = {}  # by buffer, what is still to read it
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
    order: dict[str, Instruction] = {}
    while ready:
        _, number = heapq.heappop(ready)
        each = scheduled[number]
        if each.name in order:
            continue
        order[each.name] = each
        changed = set(users.get(each.name, []))
        for user in changed:
            waiting[user] -= 1
        for buffer in reads[each.name]:
            left[buffer].discard(each.name)
            if len(left[buffer]) == 1:
                changed |= left[buffer] - {""}
        for name in changed:
            if not waiting[name] and name not in order:
                heapq.heappush(ready, (cost(name), place[name]))
    return list(order.values())


_ALIAS = re.compile(r"\{(\d*)[^{}]*\}: *\((\d+), *\{[^}]*\}")
_DONOR = re.compile(r"\((\d+), *\{[^}]*\}\)")


def aliases(program: Program) -> dict[int, int]:
    """Returns the argument whose memory a result takes, by number."""

    def value(key: str) -> str:
        _, _, rest = program.header.partition(key)
        return rest[: balanced(rest, 0)]

    pairs = _ALIAS.findall(value("input_output_alias="))
    found = {int(result or 0): int(argument) for result, argument in pairs}
    # The compiler chooses for other donated arguments; XLA takes the first result of the type.
    for argument in map(int, _DONOR.findall(value("buffer_donor="))):
        shapes = program.main.parameters[argument].shapes
        for result, shape in enumerate(program.main.root.shapes):
            if result not in found and shapes == (shape,):
                found[result] = argument
                break
    return found


def likely_updates(program: Program) -> dict[int, int]:
    """Returns the argument that a result likely updates, by number."""
    # A result that takes the place of an argument is its next value. Of the others, those of one
    # type are taken to be the next values, or the gradients, of the arguments of this type, in
    # order, if there are as many; else nothing is guessed.
    found = aliases(program)
    taken = set(found.values())
    results: dict[tuple[ArrayShape, ...], list[int]] = {}
    arguments: dict[tuple[ArrayShape, ...], list[int]] = {}
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


def peak_bytes(program: Program) -> int:
    """Estimates a partitioned program's peak memory, arguments and results included."""
    arguments = sum(each.bytes for each in program.main.parameters.values())
    return arguments + _most(program, program.main, placed=frozenset(aliases(program)))


def _most(
    program: Program,
    inside: Computation,
    own: frozenset[int] | None = None,  # of a loop's body, elements of the state that it keeps
    placed: frozenset[int] = frozenset(),  # results that take the place of something given
) -> int:
    """The peak of a computation, beyond what it is given."""
    kept: dict[str, frozenset[int]] = {}
    within: dict[str, int] = {}  # what computations take that an instruction calls
    for each in inside.instructions:
        within[each.name] = 0
        if each.opcode == "while":
            body = program.computations[each.computations("body")[0]]
            kept[each.name] = kept_elements(body)
            within[each.name] = _most(program, body, kept[each.name])
        elif each.opcode in ("call", "conditional"):
            names = (*called(each), *branches(each))
            within[each.name] = max(_most(program, program.computations[name]) for name in names)
    buffers = BufferTable(inside, kept, own)
    results = buffers.elements[inside.root.name]
    sizes = dict(buffers.sizes)
    for number in placed:
        sizes.update(dict.fromkeys(results[number], 0))
    orders = (buffers.scheduled(), least_memory_schedule(inside, buffers))
    return min(_peak(order, inside, buffers, sizes, within) for order in orders)


def _peak(
    order: list[Instruction],
    inside: Computation,
    buffers: BufferTable,
    sizes: Mapping[str, int],
    within: Mapping[str, int],
) -> int:
    """The most bytes at a time if instructions run in an order."""
    begins = dict.fromkeys(buffers.sizes, -1)  # before the first
    ends: dict[str, int] = {}
    for place, each in enumerate(order):
        ends.update(dict.fromkeys(buffers.needed(each), place))
        for buffer in frozenset().union(*buffers.elements[each.name]):
            if buffer.partition("#")[0] == each.name:
                begins[buffer] = place
            ends.setdefault(buffer, place)
    for element in buffers.elements[inside.root.name]:
        ends.update(dict.fromkeys(element, len(order)))
    begun: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for buffer, place in begins.items():
        begun[place] += sizes[buffer]
        if buffer in ends:
            ended[ends[buffer]] += sizes[buffer]
    given = live = most = begun[-1]
    for place, each in enumerate(order):
        reused = min(begun[place], ended[place]) if each.opcode == "all-reduce" else 0
        most = max(most, live + begun[place] - reused + within[each.name])
        live += begun[place] - ended[place]
    return most - given
