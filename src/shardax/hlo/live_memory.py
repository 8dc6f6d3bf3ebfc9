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

from shardax.hlo.program import VIEWS, ArrayShape, Computation, Instruction, Program, balanced

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
_NAMES = VIEWS | {"parameter", "tuple", "get-tuple-element"}
# What is fused into these fills no buffer; into an update, nothing but what it updates does.
_TAKES_ANY = frozenset({"reduce", "gather"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})


class BufferTable:
    """Buffers of a computation.

    Args:
        computation: What is run.
        kept_by_loop: By loop, the elements of its state that it leaves as they are.
        own_elements: Of a loop's body, those of the body itself.
    """

    def __init__(
        self,
        computation: Computation,
        kept_by_loop: Mapping[str, frozenset[int]],
        own_elements: frozenset[int] | None = None,
    ) -> None:
        self._inside = computation
        self._kept = kept_by_loop
        self._own = own_elements
        self._replaced: set[str] = set()  # what a loop starts with and writes over
        self.sizes: dict[str, int] = {}  # bytes, but for buffers that are given and kept
        self.elements: dict[str, tuple[Element, ...]] = {}  # of results; one if it is no tuple

        # Names of what could be fused, but must fill a buffer for a user.
        self._filled = set(self._origins(computation.root.name))
        for op in computation.instructions:
            if op.opcode in _FUSIBLE | _NAMES | _TAKES_ANY:
                continue
            for name in op.operands[:1] if op.opcode in UPDATES else op.operands:
                self._filled.update(self._origins(name))

        for op in computation.instructions:
            self.elements[op.name] = self._elements(op)

    def fills_buffer(self, op: Instruction) -> bool:
        """Whether an instruction runs by itself: neither fused nor a name."""
        fused = op.opcode in _FUSIBLE and op.name not in self._filled
        return not fused and op.opcode not in _NAMES

    def scheduled(self) -> list[Instruction]:
        """Returns the instructions with buffers of their own, in program order."""
        return [op for op in self._inside.instructions if self.fills_buffer(op)]

    def needed(self, op: Instruction) -> Element:
        """Returns the buffers read by an instruction."""
        return frozenset().union(*(self.held(name) for name in op.operands))

    def held(self, name: str) -> Element:
        """Returns the buffers of all elements of a result."""
        return frozenset().union(*self.elements[name])

    def filled_by(self, name: str) -> list[str]:
        """Returns those buffers of a result that its own instruction fills."""
        return [buffer for buffer in self.held(name) if buffer.partition("#")[0] == name]

    def _viewed(self, name: str) -> Instruction:
        op = self._inside.by_name[name]
        while op.opcode in VIEWS:
            op = self._inside.by_name[op.operands[0]]
        return op

    def _origins(self, name: str) -> list[str]:
        """Instructions computed for a value to be in memory."""
        op = self._viewed(name)
        if op.opcode == "tuple":
            return [origin for operand in op.operands for origin in self._origins(operand)]
        if op.opcode == "get-tuple-element":
            source = self._viewed(op.operands[0])
            if source.opcode == "tuple":
                return self._origins(source.operands[op.element])
        return [op.name] if op.opcode in _FUSIBLE else []

    def _elements(self, op: Instruction) -> tuple[Element, ...]:
        match op.opcode:
            case "parameter":
                return self._parameter(op)
            case "tuple":
                return tuple(self.held(name) for name in op.operands)
            case "get-tuple-element":
                elements = self.elements[op.operands[0]]
                return (elements[op.element],)
            case "while":
                return self._loop(op)
            # An update in place: in a buffer, not in an argument.
            case "dynamic-update-slice" | "scatter" if len(self.held(op.operands[0])) == 1:
                return self.elements[op.operands[0]]
        if op.opcode in VIEWS:
            return self.elements[op.operands[0]]
        if not self.fills_buffer(op):
            return (self.needed(op),)

        self.sizes[op.name] = op.bytes
        return (frozenset({op.name}),) * max(1, len(op.shapes))

    def _parameter(self, op: Instruction) -> tuple[Element, ...]:
        if self._own is None:
            return (frozenset(),) * max(1, len(op.shapes))
        elements: list[Element] = []
        for number, shape in enumerate(op.shapes):
            if number in self._own:
                elements.append(frozenset())
            else:
                elements.append(self._new_buffer(op, number, shape))
        return tuple(elements)

    def _loop(self, op: Instruction) -> tuple[Element, ...]:
        """Elements of a loop's result, in place of the initial ones."""
        operands = [self._inside.by_name[name] for name in op.operands]
        names = operands[0].operands if operands[0].opcode == "tuple" else [""] * len(op.shapes)
        starts = [element for name in op.operands for element in self.elements[name]]
        elements: list[Element] = []
        for number, (name, start, shape) in enumerate(zip(names, starts, op.shapes, strict=True)):
            element = start
            if number not in self._kept.get(op.name, ()):
                # What other loops or instructions still hold cannot be written over.
                if len(start) != 1 or name in self._replaced:
                    element = self._new_buffer(op, number, shape)
                self._replaced.add(name)
            elements.append(element)
        return tuple(elements)

    def _new_buffer(self, op: Instruction, number: int, shape: ArrayShape) -> Element:
        """Adds a buffer for an element of a result."""
        name = f"{op.name}#{number}"
        self.sizes[name] = shape.bytes
        return frozenset({name})


def kept_elements(body: Computation) -> frozenset[int]:
    """Returns the elements of its state kept by a loop's body."""
    if body.root.opcode != "tuple":
        return frozenset()
    kept: set[int] = set()
    for number, name in enumerate(body.root.operands):
        op = body.by_name[name]
        while op.opcode in ("copy", "bitcast"):
            op = body.by_name[op.operands[0]]
        is_element = op.opcode == "get-tuple-element" and op.element == number
        if is_element and body.by_name[op.operands[0]].opcode == "parameter":
            kept.add(number)
    return frozenset(kept)


def least_memory_schedule(computation: Computation, buffers: BufferTable) -> list[Instruction]:
    """Schedules the instructions with buffers of their own for little memory."""
    scheduled = buffers.scheduled()
    position = {op.name: number for number, op in enumerate(scheduled)}

    # What must run before what: an instruction needs those that its operands are computed from.
    origins_of: dict[str, frozenset[str]] = {}
    users: dict[str, list[str]] = {}
    waiting: dict[str, int] = {}  # by name, how many others must run before
    for op in computation.instructions:
        origins = frozenset().union(*(origins_of[name] for name in op.operands))
        origins_of[op.name] = origins
        if op.name in position:
            origins_of[op.name] = frozenset({op.name})
            waiting[op.name] = len(origins)
            for origin in origins:
                users.setdefault(origin, []).append(op.name)

    # What is still to read each buffer; "" is who called, who needs the result.
    reads = {op.name: buffers.needed(op) for op in scheduled}
    readers: dict[str, set[str]] = {}
    for name, read in reads.items():
        for buffer in read:
            readers.setdefault(buffer, set()).add(name)
    for buffer in buffers.held(computation.root.name):
        readers.setdefault(buffer, set()).add("")

    def cost(name: str) -> int:
        """Bytes that an instruction fills, less those that it frees."""
        fills = sum(buffers.sizes.get(buffer, 0) for buffer in buffers.filled_by(name))
        last_read = [buffer for buffer in reads[name] if readers[buffer] == {name}]
        return fills - sum(buffers.sizes.get(buffer, 0) for buffer in last_read)

    # A cost changes with what has run; the heap may hold an instruction several times.
    ready = [(cost(name), position[name]) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: dict[str, Instruction] = {}
    while ready:
        _, number = heapq.heappop(ready)
        op = scheduled[number]
        if op.name in order:
            continue
        order[op.name] = op

        changed = set(users.get(op.name, []))
        for user in changed:
            waiting[user] -= 1
        for buffer in reads[op.name]:
            readers[buffer].discard(op.name)
            if len(readers[buffer]) == 1:
                changed |= readers[buffer] - {""}
        for name in changed:
            if not waiting[name] and name not in order:
                heapq.heappush(ready, (cost(name), position[name]))
    return list(order.values())


_ALIAS = re.compile(r"\{(\d*)[^{}]*\}: *\((\d+), *\{[^}]*\}")
_DONOR = re.compile(r"\((\d+), *\{[^}]*\}\)")


def aliases(program: Program) -> dict[int, int]:
    """Returns the argument aliased by each result, by number."""

    def value(key: str) -> str:
        _, _, tail = program.header.partition(key)
        return tail[: balanced(tail, 0)]

    pairs = _ALIAS.findall(value("input_output_alias="))
    argument_of = {int(result or 0): int(argument) for result, argument in pairs}

    # The compiler chooses for other donated arguments; XLA takes the first result of the type.
    for argument in map(int, _DONOR.findall(value("buffer_donor="))):
        shapes = program.main.parameters[argument].shapes
        for result, shape in enumerate(program.main.root.shapes):
            if result not in argument_of and shapes == (shape,):
                argument_of[result] = argument
                break
    return argument_of


def likely_updates(program: Program) -> dict[int, int]:
    """Returns the argument likely updated by each result, by number."""
    # A result that takes the place of an argument is its next value.
    argument_of = aliases(program)
    aliased = set(argument_of.values())

    # Of the others, those of one type are taken to be the next values, or the gradients, of the
    # arguments of this type, in order, if there are as many; else nothing is guessed.
    results: dict[tuple[ArrayShape, ...], list[int]] = {}
    for number, shape in enumerate(program.main.root.shapes):
        if number not in argument_of:
            results.setdefault((shape,), []).append(number)
    arguments: dict[tuple[ArrayShape, ...], list[int]] = {}
    for number, op in sorted(program.main.parameters.items()):
        if number not in aliased:
            arguments.setdefault(op.shapes, []).append(number)
    for shapes, numbers in results.items():
        if len(numbers) == len(arguments.get(shapes, ())):
            argument_of.update(zip(numbers, arguments[shapes], strict=True))
    return argument_of


def peak_bytes(program: Program) -> int:
    """Estimates a partitioned program's peak memory, arguments and results included."""
    arguments = sum(parameter.bytes for parameter in program.main.parameters.values())
    return arguments + _most(program, program.main, in_place=frozenset(aliases(program)))


def _most(
    program: Program,
    computation: Computation,
    own_elements: frozenset[int] | None = None,  # as of ``BufferTable``
    in_place: frozenset[int] = frozenset(),  # results that take the place of something given
) -> int:
    """The peak of a computation, beyond its arguments."""
    # What computations take that an instruction calls.
    kept_by_loop: dict[str, frozenset[int]] = {}
    called_bytes = dict.fromkeys(computation.by_name, 0)
    for op in computation.instructions:
        if op.opcode == "while":
            body = program.computations[op.computations("body")[0]]
            kept_by_loop[op.name] = kept_elements(body)
            called_bytes[op.name] = _most(program, body, kept_by_loop[op.name])
        elif op.opcode in ("call", "conditional"):
            names = (*op.called, *op.branches)
            called_bytes[op.name] = max(_most(program, program.computations[n]) for n in names)

    buffers = BufferTable(computation, kept_by_loop, own_elements)
    results = buffers.elements[computation.root.name]
    sizes = dict(buffers.sizes)
    for number in in_place:
        sizes.update(dict.fromkeys(results[number], 0))

    orders = (buffers.scheduled(), least_memory_schedule(computation, buffers))
    return min(_peak(order, computation, buffers, sizes, called_bytes) for order in orders)


def _peak(
    order: list[Instruction],
    computation: Computation,
    buffers: BufferTable,
    sizes: Mapping[str, int],
    called_bytes: Mapping[str, int],
) -> int:
    """The most bytes at a time if instructions run in an order."""
    # The positions in the order where each buffer is filled, -1 if that is before, and last read.
    begins = dict.fromkeys(buffers.sizes, -1)
    ends: dict[str, int] = {}
    for position, op in enumerate(order):
        ends.update(dict.fromkeys(buffers.needed(op), position))
        begins.update(dict.fromkeys(buffers.filled_by(op.name), position))
        for buffer in buffers.held(op.name):
            ends.setdefault(buffer, position)
    ends.update(dict.fromkeys(buffers.held(computation.root.name), len(order)))

    begun: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for buffer, position in begins.items():
        begun[position] += sizes[buffer]
        if buffer in ends:
            ended[ends[buffer]] += sizes[buffer]

    # An all-reduce gives its result in the memory of its operand.
    argument_bytes = live = most = begun[-1]
    for position, op in enumerate(order):
        reused = min(begun[position], ended[position]) if op.opcode == "all-reduce" else 0
        most = max(most, live + begun[position] - reused + called_bytes[op.name])
        live += begun[position] - ended[position]
    return most - argument_bytes
