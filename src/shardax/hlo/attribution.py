# SPDX-License-Identifier: Apache-2.0
"""Attribution of collectives: the parameters that they move, and the reason.

A value is *carried* by instructions that pass on what they are given, as it is or in another form,
layout or place: conversions, copies, slices, collectives, the state of a loop. Backwards, a value
is followed through these to the arguments of the program and to what is *computed*. Forwards it is
followed also through elementwise arithmetic of arrays of its size, such as that of an optimizer, to
the program's results, which are the next values of arguments. The reason is told from both, from
the kind of the collective, and from the traced operation for which the partitioner put it there.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardax.hlo.collectives import KINDS, Collective, LocatedCollective, rendezvous
from shardax.hlo.estimate import reduction
from shardax.hlo.execution_counts import branches, called
from shardax.hlo.live_memory import aliases, kept_elements, likely_updates
from shardax.hlo.program import Computation, Instruction, Program

_ALL = -1
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


class ValueRef(NamedTuple):
    """The result of an instruction, or an element of it."""

    inside: str  # name of the computation
    name: str  # name of the instruction
    element: int = _ALL  # number of an element of a tuple; -1 for the whole


class ValueSources(NamedTuple):
    """What a value is carried from."""

    arguments: frozenset[int]  # numbers of the program's arguments
    computed: tuple[Instruction, ...]  # instructions that compute


class Dataflow:
    """Where the values of a program come from and go."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        self._kept: dict[str, frozenset[int]] = {}
        # Of a send through the host, by its place and its meeting, what receives; and the reverse.
        self._meets: dict[tuple[str, str, str], Instruction] = {}
        for name, inside in program.computations.items():
            for each in inside.instructions:
                if each.opcode in ("send", "recv"):
                    self._meets[name, each.opcode, rendezvous(each)] = each
                for callee in (*called(each), *branches(each)):
                    self._callers.setdefault(callee, []).append((name, each))

    def sources(self, value: ValueRef) -> ValueSources:
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
        return ValueSources(frozenset(arguments), tuple(computed.values()))

    def results(self, value: ValueRef) -> frozenset[int]:
        """Returns the numbers of the program's results that a value gets to."""
        return frozenset(each.element for each in self._forwards(value) if each.inside == "")

    def needed_by(self, value: ValueRef) -> Instruction | None:
        """Returns the nearest user with a traced operation other than a conversion."""
        for here in self._forwards(value):
            inside = self._program.computations.get(here.inside)
            for user in inside.users[here.name] if inside else ():
                named = user.op_name and not user.op_name.endswith(_CONVERTS)
                if named and user.opcode not in ("while", "call", "conditional"):
                    return user
        return None

    def _forwards(self, value: ValueRef) -> Iterator[ValueRef]:
        """Yields a value and what it is carried to, nearest first."""
        seen = {value}
        pending = deque([value])
        while pending:
            here = pending.popleft()
            yield here
            for new in self._after(here) if here.inside else ():
                if new not in seen:
                    seen.add(new)
                    pending.append(new)

    def _at(self, value: ValueRef) -> Instruction:
        return self._program.computations[value.inside].by_name[value.name]

    def _keeps(self, loop: Instruction, element: int) -> bool:
        (body,) = loop.computations("body")
        if body not in self._kept:
            self._kept[body] = kept_elements(self._program.computations[body])
        return element in self._kept[body]

    def _root(self, name: str, element: int) -> ValueRef:
        return ValueRef(name, self._program.computations[name].root.name, element)

    def _before(self, here: ValueRef, each: Instruction) -> Iterator[ValueRef]:
        """What a value is carried from directly."""
        inside, element = here.inside, here.element
        opcode = each.opcode
        base = opcode.removesuffix("-start")
        if opcode == "parameter":
            yield from self._before_parameter(here, each)
        elif opcode == "get-tuple-element":
            yield ValueRef(inside, each.operands[0], each.element)
        elif opcode == "tuple":
            chosen = each.operands if element == _ALL else each.operands[element : element + 1]
            yield from (ValueRef(inside, name) for name in chosen)
        elif opcode == "while" and element != _ALL:
            if self._keeps(each, element):
                yield ValueRef(inside, each.operands[0], element)
            else:
                yield self._root(each.computations("body")[0], element)
        elif opcode in ("fusion", "call", "async-start", "conditional"):
            for name in (*called(each), *branches(each)):
                yield self._root(name, element)
        elif opcode.endswith(("-done", "-update")):
            yield ValueRef(inside, each.operands[0], element)
        elif opcode == "recv":
            sender = self._meets.get((inside, "send", rendezvous(each)))
            if sender is not None:
                yield ValueRef(inside, sender.operands[0])
        elif base in KINDS or base == "copy":
            several = len(each.operands) > 1 and not base.endswith(("permute", "ragged-all-to-all"))
            number = element if several and element != _ALL else 0
            names = each.operands if several and element == _ALL else each.operands[number:][:1]
            yield from (ValueRef(inside, name) for name in names)
        elif opcode in _CARRIES_FIRST:
            yield ValueRef(inside, each.operands[0], element)
        elif opcode in _CARRIES_SEVERAL:
            names = {"select": each.operands[1:], "concatenate": each.operands}
            yield from (ValueRef(inside, name) for name in names.get(opcode, each.operands[:2]))

    def _before_parameter(self, here: ValueRef, each: Instruction) -> Iterator[ValueRef]:
        number, element = int(each.operands[0]), here.element
        for outside, caller in self._callers.get(here.inside, []):
            if caller.opcode == "while":
                yield ValueRef(outside, caller.operands[0], element)
                if element != _ALL and not self._keeps(caller, element):
                    yield self._root(caller.computations("body")[0], element)
            elif caller.opcode == "conditional":
                yield ValueRef(
                    outside, caller.operands[branches(caller).index(here.inside) + 1], element
                )
            else:
                yield ValueRef(outside, caller.operands[number], element)

    def _after(self, here: ValueRef) -> Iterator[ValueRef]:
        """What a value is carried to directly; results are in computation ""."""
        inside = self._program.computations[here.inside]
        each = inside.by_name[here.name]
        if each is inside.root:
            yield from self._after_root(here, inside)
        if each.opcode == "send":
            receiver = self._meets.get((here.inside, "recv", rendezvous(each)))
            if receiver is not None:
                yield ValueRef(here.inside, receiver.name)
        for user in inside.users[here.name]:
            places = [place for place, name in enumerate(user.operands) if name == here.name]
            yield from self._into(here, each, user, places)

    def _after_root(self, here: ValueRef, inside: Computation) -> Iterator[ValueRef]:
        if inside.name == self._program.entry:
            yield ValueRef("", "", max(here.element, 0))
        for outside, caller in self._callers.get(inside.name, []):
            if caller.opcode != "while":
                yield ValueRef(outside, caller.name, here.element)
            elif inside.name in caller.computations("body"):
                yield ValueRef(outside, caller.name, here.element)
                (state,) = inside.parameters.values()
                yield ValueRef(inside.name, state.name, here.element)

    def _into(
        self, here: ValueRef, each: Instruction, user: Instruction, places: list[int]
    ) -> Iterator[ValueRef]:
        inside, opcode = here.inside, user.opcode
        base = opcode.removesuffix("-start")
        if opcode == "tuple":
            yield from (ValueRef(inside, user.name, place) for place in places)
        elif opcode == "get-tuple-element":
            if here.element in (_ALL, user.element):
                yield ValueRef(inside, user.name)
        elif opcode in ("fusion", "call", "async-start"):
            for name in called(user):
                parameters = self._program.computations[name].parameters
                yield from (
                    ValueRef(name, parameters[place].name, here.element) for place in places
                )
        elif opcode == "send" and places[0] == 0:
            yield ValueRef(inside, user.name)
        elif opcode == "while":
            for name in user.computations("body"):
                (state,) = self._program.computations[name].parameters.values()
                yield ValueRef(name, state.name, here.element)
        elif base in KINDS and len(user.operands) > 1:
            yield from (ValueRef(inside, user.name, place) for place in places)
        elif opcode.endswith(("-done", "-update")) or base in KINDS or base in _CARRIES_FIRST:
            if places[0] == 0 and opcode != "broadcast":
                yield ValueRef(inside, user.name, here.element)
        elif opcode in _CARRIES_SEVERAL:
            if opcode != "dynamic-update-slice" or places[0] < 2:
                yield ValueRef(inside, user.name)
        elif opcode == "reduce" and places[0] == 0 and _size(user) == _size(each, here.element):
            yield ValueRef(inside, user.name)  # over dimensions of one
        elif opcode in _ARITHMETIC and _size(user) == _size(each, here.element):
            yield ValueRef(inside, user.name)


def _size(each: Instruction, element: int = _ALL) -> int:
    shape = each.shapes[element if 0 <= element < len(each.shapes) else 0]
    return math.prod(shape.dims)


_JOINED = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*:.*)\)$")
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_CONVERTS = "/convert_element_type"
_ASKED = re.compile(
    r"(?:psum\w*|pmean|pmax\w*|pmin\w*|all_gather\w*|all_to_all|ppermute|pshuffle|pbroadcast|"
    r"psum_scatter|reduce_scatter|ragged_all_to_all)$"
)
_EXTREMES = {"maximum": "takes the largest", "minimum": "takes the smallest"}


def attribute(
    program: Program, found: Sequence[LocatedCollective], arguments: Sequence[str] = ()
) -> tuple[Collective, ...]:
    """Fills in ``parameters``, ``why`` and missing origins of collectives."""
    flow = Dataflow(program)
    known_updates, likely = aliases(program), likely_updates(program)

    def path(number: int) -> str:
        return arguments[number] if number < len(arguments) else ""

    def updated_by(
        value: ValueRef, elements: Sequence[int], updates: Mapping[int, int]
    ) -> tuple[str, ...]:
        """Paths of the arguments that what travels is used to update."""
        paths: dict[str, None] = {}
        for element in elements:
            results = flow.results(value._replace(element=element))
            numbers = sorted({updates[result] for result in results if result in updates})
            paths |= dict.fromkeys(_without_states([path(number) for number in numbers]))
        return tuple(paths)

    attributed: list[Collective] = []
    for inside, each, collective, numbers in found:
        value = ValueRef(inside.name, each.name)
        sources = [flow.sources(ValueRef(inside.name, each.operands[i])) for i in numbers]
        computed = [instruction for source in sources for instruction in source.computed]
        moved: tuple[str, ...] = ()
        if not computed and all(source.arguments for source in sources):
            numbers = sorted({number for source in sources for number in source.arguments})
            moved = tuple(name for number in numbers if (name := path(number)))
        collective = _with_origin(collective, [each for each in computed if each.op_name])
        if not collective.op_name:
            user = flow.needed_by(value)
            collective = _with_origin(collective, [user] if user else [])
        names = [collective.op_name, *(instruction.op_name for instruction in computed)]
        is_backward = any("transpose(" in name for name in names)
        # A gradient is one also if it is a result itself, or the step keeps its arguments.
        updates = likely if is_backward else known_updates
        elements = numbers if len(each.operands) > 1 and each.opcode != "send" else (_ALL,)
        updated = () if moved else updated_by(value, elements, updates)
        # What takes an array converted needs it, not the conversion.
        user = flow.needed_by(value) if moved and collective.op_name.endswith(_CONVERTS) else None
        operation = user.op_name if user else collective.op_name
        reduces = reduction(program, each)
        why = _why(collective, operation, moved, updated, reduces, is_backward)
        attributed.append(dataclasses.replace(collective, parameters=moved or updated, why=why))
    return tuple(attributed)


def _with_origin(collective: Collective, named: Sequence[Instruction]) -> Collective:
    """Gives a collective without ``op_name`` that of an operation."""
    if collective.op_name or not named:
        return collective
    source = collective.source or next((each.source for each in named if each.source), "")
    return dataclasses.replace(collective, op_name=named[0].op_name, source=source)


def _without_states(paths: Sequence[str]) -> list[str]:
    """Leaves out optimizer states, whose paths end as those of parameters."""
    ends = {path: re.sub(r"^[^.\[]*", "", path) for path in paths if path}
    return [
        path
        for path in ends
        if not any(len(o) < len(path) and path.endswith(end) for o, end in ends.items() if end)
    ]


def _why(
    collective: Collective,
    op_name: str,
    moved: tuple[str, ...],
    updated: tuple[str, ...],
    reduces: str,
    is_backward: bool,
) -> str:
    # Compilers join the names of the traced operations that they merge.
    joined = _JOINED.search(op_name)
    parts = joined[1].split(":") if joined else [op_name]
    operations = list(dict.fromkeys(part.rpartition("/")[2] for part in parts if part))
    operation = _listed(operations) or "what comes next"
    over = f" over {' and '.join(collective.axes)}" if collective.axes else ""
    asked = next((name for name in operations if _ASKED.match(name)), "")
    carries = collective.kind not in ("all-reduce", "reduce-scatter")
    what = _listed(moved) or "an activation"
    match collective.kind:
        case "all-reduce" | "reduce-scatter" if updated and is_backward:
            return f"sums the gradient of {_listed(updated)}{over}"
        case "all-gather" if updated and not is_backward:
            return f"gathers the new {_listed(updated)}{over}"
        case "collective-permute" if updated and is_backward:
            return f"passes on the gradient of {_listed(updated)}"
        case _ if asked and not (moved and carries):
            return f"asked for by {asked}{over}"
        case "all-reduce" | "reduce-scatter":
            if reduces in _EXTREMES:
                return f"{_EXTREMES[reduces]} of {operation}{over}"
            parts = "partial products" if _PRODUCTS & set(operations) else "parts"
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


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
