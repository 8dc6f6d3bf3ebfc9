# SPDX-License-Identifier: Apache-2.0
"""Where values of a program come from and where they go.

A value is *carried* by instructions that give on what they are given, as it is or in other form,
layout or place: conversions, copies, slices, collectives, the state of a loop. Backwards, a value
is followed through these to the arguments of the program and to what is *computed*. Forwards it is
followed also through elementwise arithmetic of arrays of its size, such as that of an optimizer, to
the program's results.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from shardax.hlo.live_buffers import kept_elements
from shardax.hlo.program import Computation, Instruction, Program
from shardax.hlo.runs import branches, called
from shardax.hlo.slices import rendezvous

_ALL = -1
_COLLECTIVES = frozenset(
    {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
        *("ragged-all-to-all", "collective-broadcast"),
    }
)
_CARRIES_FIRST = frozenset(
    {
        *("convert", "copy", "reshape", "transpose", "bitcast", "bitcast-convert", "broadcast"),
        *("opt-barrier", "optimization-barrier", "dynamic-slice", "slice", "pad", "reverse"),
        *("reduce-precision", "add-dependency", "domain"),
    }
)
_CARRIES_SEVERAL = frozenset({"concatenate", "dynamic-update-slice", "select"})
_NOTHING = frozenset({"constant", "iota", "partition-id", "replica-id", "after-all"})
_ARITHMETIC = frozenset(
    {
        *("abs", "add", "cbrt", "clamp", "divide", "exponential", "log", "maximum", "minimum"),
        *("multiply", "negate", "power", "rsqrt", "sign", "sqrt", "subtract", "tanh"),
    }
)


class Value(NamedTuple):
    """The result of an instruction, or an element of it.

    Attributes:
        inside: Name of the computation.
        name: Name of the instruction.
        element: Number of an element of a tuple; -1 for the whole.
    """

    inside: str
    name: str
    element: int = _ALL


class Sources(NamedTuple):
    """What a value is carried from.

    Attributes:
        arguments: Numbers of the program's arguments.
        computed: Instructions that compute.
    """

    arguments: frozenset[int]
    computed: tuple[Instruction, ...]


class Flow:
    """Where the values of a program come from and go.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        """See the class."""
        self._program = program
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        self._users: dict[str, dict[str, list[Instruction]]] = {}
        self._kept: dict[str, frozenset[int]] = {}
        # Of a send through the host, by its place and its meeting, what receives; and the reverse.
        self._meets: dict[tuple[str, str, str], Instruction] = {}
        for name, inside in program.computations.items():
            users = self._users.setdefault(name, {})
            for each in inside.instructions:
                if each.opcode in ("send", "recv"):
                    self._meets[name, each.opcode, rendezvous(each)] = each
                for callee in (*called(each), *branches(each)):
                    self._callers.setdefault(callee, []).append((name, each))
                for operand in set(_operands(each)):
                    users.setdefault(operand, []).append(each)

    def sources(self, value: Value) -> Sources:
        """Returns what a value is carried from."""
        arguments: set[int] = set()
        computed: dict[str, Instruction] = {}
        seen = {value}
        pending = [value]
        while pending:
            here = pending.pop()
            each = self._at(here)
            if each.opcode == "parameter" and here.inside == self._program.entry:
                arguments.add(int(each.operands[0]))
                continue
            before = list(self._before(here, each))
            if not before and each.opcode not in _NOTHING:
                computed[each.name] = each
            for new in before:
                if new not in seen:
                    seen.add(new)
                    pending.append(new)
        return Sources(frozenset(arguments), tuple(computed.values()))

    def results(self, value: Value) -> frozenset[int]:
        """Returns the numbers of the program's results that a value gets to."""
        found: set[int] = set()
        seen = {value}
        pending = [value]
        while pending:
            for new in self._after(pending.pop()):
                if new.inside == "":
                    found.add(new.element)
                elif new not in seen:
                    seen.add(new)
                    pending.append(new)
        return frozenset(found)

    def needed_by(self, value: Value) -> Instruction | None:
        """Returns the nearest instruction with a traced operation that takes a value, if any."""
        seen = {value}
        pending = deque([value])
        while pending:
            here = pending.popleft()
            if here.inside == "":
                continue
            for user in self._users[here.inside].get(here.name, []):
                if user.op_name and user.opcode not in ("while", "call", "conditional"):
                    return user
            for new in self._after(here):
                if new not in seen:
                    seen.add(new)
                    pending.append(new)
        return None

    def _at(self, value: Value) -> Instruction:
        return self._program.computations[value.inside].by_name[value.name]

    def _keeps(self, loop: Instruction, element: int) -> bool:
        (body,) = loop.computations("body")
        if body not in self._kept:
            self._kept[body] = kept_elements(self._program.computations[body])
        return element in self._kept[body]

    def _root(self, name: str, element: int) -> Value:
        return Value(name, self._program.computations[name].root.name, element)

    def _before(self, here: Value, each: Instruction) -> Iterator[Value]:
        """What a value is carried from directly; nothing if it is computed or a constant."""
        inside, element = here.inside, here.element
        opcode = each.opcode
        base = opcode.removesuffix("-start")
        if opcode == "parameter":
            yield from self._before_parameter(here, each)
        elif opcode == "get-tuple-element":
            yield Value(inside, each.operands[0], int(each.attribute("index") or 0))
        elif opcode == "tuple":
            chosen = each.operands if element == _ALL else each.operands[element : element + 1]
            yield from (Value(inside, name) for name in chosen)
        elif opcode == "while" and element != _ALL:
            if self._keeps(each, element):
                yield Value(inside, each.operands[0], element)
            else:
                yield self._root(each.computations("body")[0], element)
        elif opcode in ("fusion", "call", "async-start", "conditional"):
            for name in (*called(each), *branches(each)):
                yield self._root(name, element)
        elif opcode.endswith(("-done", "-update")):
            yield Value(inside, each.operands[0], element)
        elif opcode == "recv":
            sender = self._meets.get((inside, "send", rendezvous(each)))
            if sender is not None:
                yield Value(inside, sender.operands[0])
        elif base in _COLLECTIVES or base == "copy":
            several = len(each.operands) > 1 and not base.endswith(("permute", "ragged-all-to-all"))
            number = element if several and element != _ALL else 0
            names = each.operands if several and element == _ALL else each.operands[number:][:1]
            yield from (Value(inside, name) for name in names)
        elif opcode in _CARRIES_FIRST:
            yield Value(inside, each.operands[0], element)
        elif opcode in _CARRIES_SEVERAL:
            names = {"select": each.operands[1:], "concatenate": each.operands}
            yield from (Value(inside, name) for name in names.get(opcode, each.operands[:2]))

    def _before_parameter(self, here: Value, each: Instruction) -> Iterator[Value]:
        number, element = int(each.operands[0]), here.element
        for outside, caller in self._callers.get(here.inside, []):
            if caller.opcode == "while":
                yield Value(outside, caller.operands[0], element)
                if element != _ALL and not self._keeps(caller, element):
                    yield self._root(caller.computations("body")[0], element)
            elif caller.opcode == "conditional":
                yield Value(
                    outside, caller.operands[branches(caller).index(here.inside) + 1], element
                )
            else:
                yield Value(outside, caller.operands[number], element)

    def _after(self, here: Value) -> Iterator[Value]:
        """What a value goes to directly; a result of the program is in the computation ""."""
        inside = self._program.computations[here.inside]
        each = inside.by_name[here.name]
        if each is inside.root:
            yield from self._after_root(here, inside)
        if each.opcode == "send":
            receiver = self._meets.get((here.inside, "recv", rendezvous(each)))
            if receiver is not None:
                yield Value(here.inside, receiver.name)
        for user in self._users[here.inside].get(here.name, []):
            places = [place for place, name in enumerate(user.operands) if name == here.name]
            yield from self._into(here, each, user, places)

    def _after_root(self, here: Value, inside: Computation) -> Iterator[Value]:
        if inside.name == self._program.entry:
            yield Value("", "", max(here.element, 0))
        for outside, caller in self._callers.get(inside.name, []):
            if caller.opcode != "while":
                yield Value(outside, caller.name, here.element)
            elif inside.name in caller.computations("body"):
                yield Value(outside, caller.name, here.element)
                (state,) = inside.parameters.values()
                yield Value(inside.name, state.name, here.element)

    def _into(
        self, here: Value, each: Instruction, user: Instruction, places: list[int]
    ) -> Iterator[Value]:
        inside, opcode = here.inside, user.opcode
        base = opcode.removesuffix("-start")
        if opcode == "tuple":
            yield from (Value(inside, user.name, place) for place in places)
        elif opcode == "get-tuple-element":
            if here.element in (_ALL, int(user.attribute("index") or 0)):
                yield Value(inside, user.name)
        elif opcode in ("fusion", "call", "async-start"):
            for name in called(user):
                parameters = self._program.computations[name].parameters
                yield from (Value(name, parameters[place].name, here.element) for place in places)
        elif opcode == "send" and places[0] == 0:
            yield Value(inside, user.name)
        elif opcode == "while":
            for name in user.computations("body"):
                (state,) = self._program.computations[name].parameters.values()
                yield Value(name, state.name, here.element)
        elif base in _COLLECTIVES and len(user.operands) > 1:
            yield from (Value(inside, user.name, place) for place in places)
        elif opcode.endswith(("-done", "-update")) or base in _COLLECTIVES | _CARRIES_FIRST:
            if places[0] == 0 and opcode != "broadcast":
                yield Value(inside, user.name, here.element)
        elif opcode in _CARRIES_SEVERAL:
            if opcode != "dynamic-update-slice" or places[0] < 2:
                yield Value(inside, user.name)
        elif opcode == "reduce" and places[0] == 0 and _size(user) == _size(each, here.element):
            yield Value(inside, user.name)  # over dimensions of one
        elif opcode in _ARITHMETIC and _size(user) == _size(each, here.element):
            yield Value(inside, user.name)


def _operands(each: Instruction) -> tuple[str, ...]:
    return () if each.opcode in ("parameter", "constant") else each.operands


def _size(each: Instruction, element: int = _ALL) -> int:
    shape = each.shapes[element if 0 <= element < len(each.shapes) else 0]
    return math.prod(shape.dims)
