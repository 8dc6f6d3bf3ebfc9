# SPDX-License-Identifier: Apache-2.0
"""Which instructions of a computation fill memory of their own, and which need whose.

A *buffer* is memory that one instruction fills, named after it; the elements of a tuple that a
loop's body is given, or that a loop gives, are buffers named ``loop#2``. Compilers compute most
elementwise operations on the way to what needs them, so these fill a buffer only for what cannot
take them so: a matrix product, a collective, a loop, or the computation's result. What is computed
on the way needs the buffers of all it is computed from.
"""

from __future__ import annotations

from shardax.hlo.program import Computation, Instruction

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
    """Buffers of a computation.

    Args:
        inside: The computation.
        kept: For the name of a loop in it, the numbers of the elements that the loop leaves as they
            are.
        own: The same for the computation itself, if it is the body of a loop.

    Attributes:
        sizes: Bytes of each buffer, but for those that are given and kept.
        elements: Of each instruction the elements of its result, one if it is no tuple.
    """

    def __init__(
        self, inside: Computation, kept: dict[str, frozenset[int]], own: frozenset[int] | None
    ) -> None:
        """See the class."""
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
        names = () if each.opcode in ("parameter", "constant") else each.operands
        return frozenset().union(*(self._whole(name) for name in names))

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
                return self._origins(source.operands[_index(each)])
        return [each.name] if each.opcode in _ON_THE_WAY else []

    def _elements(self, each: Instruction) -> tuple[Element, ...]:
        match each.opcode:
            case "parameter":
                return self._given(each)
            case "tuple":
                return tuple(self._whole(name) for name in each.operands)
            case "get-tuple-element":
                elements = self.elements[each.operands[0]]
                number = _index(each)
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
        if each.opcode != "get-tuple-element" or _index(each) != number:
            continue
        if body.by_name[each.operands[0]].opcode == "parameter":
            kept.add(number)
    return frozenset(kept)


def _index(each: Instruction) -> int:
    return int(each.attribute("index") or 0)
