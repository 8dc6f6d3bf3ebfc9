# SPDX-License-Identifier: Apache-2.0
"""Attribution of collectives: the parameters moved, and the reason.

A value is *carried* by instructions that pass on what they are given, as it is or in another form,
layout or place: conversions, copies, slices, collectives, the state of a loop. Backwards, a value
is followed through these to the arguments of the program and to what is *computed*. Forwards it is
followed also through elementwise arithmetic of arrays of its size, such as that of an optimizer, to
the program's results, which are the next values of arguments. The reason is told from both, from
the kind of the collective, and from the traced operation for which the partitioner put it there.
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardax.hlo.collectives import KINDS, Collective, LocatedCollective, rendezvous
from shardax.hlo.estimate import reduction
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

    computation: str  # name of the computation
    name: str  # name of the instruction
    element: int = _ALL  # number of an element of a tuple; -1 for the whole


class ValueSources(NamedTuple):
    """Sources of a value."""

    arguments: frozenset[int]  # numbers of the program's arguments
    computed: tuple[Instruction, ...]  # instructions that compute


class Dataflow:
    """Sources and destinations of a program's values."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        self._kept: dict[str, frozenset[int]] = {}
        # Of a send through the host, by its computation and its meeting, what receives; and the
        # reverse.
        self._meets: dict[tuple[str, str, str], Instruction] = {}
        for name, computation in program.computations.items():
            for op in computation.instructions:
                if op.opcode in ("send", "recv"):
                    self._meets[name, op.opcode, rendezvous(op)] = op
                for callee in (*op.called, *op.branches):
                    self._callers.setdefault(callee, []).append((name, op))

    def sources(self, value: ValueRef) -> ValueSources:
        arguments: set[int] = set()
        computed: dict[str, Instruction] = {}
        seen = {value}
        pending = [value]
        while pending:
            value_ref = pending.pop()
            op = self._at(value_ref)
            if op.opcode == "parameter" and value_ref.computation == self._program.entry:
                arguments.add(int(op.literal))
                continue

            # What carries nothing computes, or is known without any argument.
            sources = list(self._before(value_ref, op))
            if not sources and op.opcode not in _NOTHING:
                computed[op.name] = op
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        return ValueSources(frozenset(arguments), tuple(computed.values()))

    def results(self, value: ValueRef) -> frozenset[int]:
        """Returns the numbers of the program's results reached by a value."""
        return frozenset(
            result.element for result in self._forwards(value) if result.computation == ""
        )

    def needed_by(self, value: ValueRef) -> Instruction | None:
        """Returns the nearest user with a traced operation other than a conversion."""
        for value_ref in self._forwards(value):
            computation = self._program.computations.get(value_ref.computation)
            for user in computation.users[value_ref.name] if computation else ():
                named = user.op_name and not user.op_name.endswith(_CONVERTS)
                if named and user.opcode not in ("while", "call", "conditional"):
                    return user
        return None

    def _forwards(self, value: ValueRef) -> Iterator[ValueRef]:
        """Yields a value and its destinations, nearest first."""
        seen = {value}
        pending = deque([value])
        while pending:
            value_ref = pending.popleft()
            yield value_ref
            for next_ref in self._after(value_ref) if value_ref.computation else ():
                if next_ref not in seen:
                    seen.add(next_ref)
                    pending.append(next_ref)

    def _at(self, value: ValueRef) -> Instruction:
        return self._program.computations[value.computation].by_name[value.name]

    def _keeps(self, loop: Instruction, element: int) -> bool:
        (body,) = loop.computations("body")
        if body not in self._kept:
            self._kept[body] = kept_elements(self._program.computations[body])
        return element in self._kept[body]

    def _root(self, name: str, element: int) -> ValueRef:
        return ValueRef(name, self._program.computations[name].root.name, element)

    def _state(self, loop: Instruction, element: int) -> ValueRef:
        """The state that a loop's body is given."""
        (name,) = loop.computations("body")
        (state,) = self._program.computations[name].parameters.values()
        return ValueRef(name, state.name, element)

    def _before(self, value_ref: ValueRef, op: Instruction) -> Iterator[ValueRef]:
        """Yields the direct sources of a value."""
        computation, element = value_ref.computation, value_ref.element
        opcode, base = op.opcode, op.opcode.removesuffix("-start")

        # Tuples.
        if opcode == "get-tuple-element":
            yield ValueRef(computation, op.operands[0], op.element)
        elif opcode == "tuple":
            names = op.operands if element == _ALL else op.operands[element : element + 1]
            yield from (ValueRef(computation, name) for name in names)

        # What is given to computations, and what these give.
        elif opcode == "parameter":
            yield from self._before_parameter(value_ref, op)
        elif opcode == "while" and element != _ALL:
            if self._keeps(op, element):
                yield ValueRef(computation, op.operands[0], element)
            else:
                yield self._root(op.computations("body")[0], element)
        elif opcode in ("fusion", "call", "async-start", "conditional"):
            yield from (self._root(name, element) for name in (*op.called, *op.branches))

        # What travels, or goes on meanwhile.
        elif opcode.endswith(("-done", "-update")):
            yield ValueRef(computation, op.operands[0], element)
        elif opcode == "recv":
            sender = self._meets.get((computation, "send", rendezvous(op)))
            if sender is not None:
                yield ValueRef(computation, sender.operands[0])
        elif base in KINDS or base == "copy":
            names = op.operands[:1]
            if len(op.operands) > 1 and not base.endswith(("permute", "ragged-all-to-all")):
                names = op.operands if element == _ALL else op.operands[element:][:1]
            yield from (ValueRef(computation, name) for name in names)

        # Other forms and layouts.
        elif opcode in _CARRIES_FIRST:
            yield ValueRef(computation, op.operands[0], element)
        elif opcode in _CARRIES_SEVERAL:
            names = {"select": op.operands[1:], "concatenate": op.operands}
            yield from (ValueRef(computation, name) for name in names.get(opcode, op.operands[:2]))

    def _before_parameter(self, value_ref: ValueRef, op: Instruction) -> Iterator[ValueRef]:
        element = value_ref.element
        for outside, caller in self._callers.get(value_ref.computation, []):
            if caller.opcode == "while":
                yield ValueRef(outside, caller.operands[0], element)
                if element != _ALL and not self._keeps(caller, element):
                    yield self._root(caller.computations("body")[0], element)
            elif caller.opcode == "conditional":  # its first operand chooses the branch
                branch = caller.branches.index(value_ref.computation)
                yield ValueRef(outside, caller.operands[branch + 1], element)
            else:
                yield ValueRef(outside, caller.operands[int(op.literal)], element)

    def _after(self, value_ref: ValueRef) -> Iterator[ValueRef]:
        """Yields the direct destinations of a value; results are in computation ""."""
        computation = self._program.computations[value_ref.computation]
        op = computation.by_name[value_ref.name]
        if op is computation.root:
            yield from self._after_root(value_ref, computation)
        if op.opcode == "send":
            receiver = self._meets.get((value_ref.computation, "recv", rendezvous(op)))
            if receiver is not None:
                yield ValueRef(value_ref.computation, receiver.name)
        for user in computation.users[value_ref.name]:
            yield from self._into(value_ref, op, user)

    def _after_root(self, value_ref: ValueRef, computation: Computation) -> Iterator[ValueRef]:
        element = value_ref.element
        if computation.name == self._program.entry:
            yield ValueRef("", "", max(element, 0))
        for outside, caller in self._callers.get(computation.name, []):
            if caller.opcode != "while":
                yield ValueRef(outside, caller.name, element)
            elif computation.name in caller.computations("body"):
                yield ValueRef(outside, caller.name, element)
                yield self._state(caller, element)

    def _into(self, value_ref: ValueRef, op: Instruction, user: Instruction) -> Iterator[ValueRef]:
        """Yields where a user puts a value."""
        computation, element = value_ref.computation, value_ref.element
        opcode, base = user.opcode, user.opcode.removesuffix("-start")
        numbers = [number for number, name in enumerate(user.operands) if name == op.name]
        is_first = numbers[0] == 0
        # A reduction may be over dimensions of one.
        is_arithmetic = opcode in _ARITHMETIC or (opcode == "reduce" and is_first)

        # Tuples.
        if opcode == "tuple":
            yield from (ValueRef(computation, user.name, number) for number in numbers)
        elif opcode == "get-tuple-element":
            if element in (_ALL, user.element):
                yield ValueRef(computation, user.name)

        # Into computations.
        elif opcode in ("fusion", "call", "async-start"):
            for name in user.called:
                parameters = self._program.computations[name].parameters
                yield from (ValueRef(name, parameters[n].name, element) for n in numbers)
        elif opcode == "while":
            yield self._state(user, element)

        # What travels, goes on meanwhile, or has another form and layout.
        elif opcode == "send" and is_first:
            yield ValueRef(computation, user.name)
        elif base in KINDS and len(user.operands) > 1:
            yield from (ValueRef(computation, user.name, number) for number in numbers)
        elif opcode.endswith(("-done", "-update")) or base in KINDS or base in _CARRIES_FIRST:
            if is_first and opcode != "broadcast":
                yield ValueRef(computation, user.name, element)
        elif opcode in _CARRIES_SEVERAL:
            if opcode != "dynamic-update-slice" or numbers[0] < 2:
                yield ValueRef(computation, user.name)

        # Arithmetic of arrays of one size.
        elif is_arithmetic and _size(user) == _size(op, element):
            yield ValueRef(computation, user.name)


def _size(op: Instruction, element: int = _ALL) -> int:
    return op.shapes[element if 0 <= element < len(op.shapes) else 0].size


_JOINED = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*:.*)\)$")
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
_CONVERTS = "/convert_element_type"
_ASKED = re.compile(
    r"(?:psum\w*|pmean|pmax\w*|pmin\w*|all_gather\w*|all_to_all|ppermute|pshuffle|pbroadcast|"
    r"psum_scatter|reduce_scatter|ragged_all_to_all)$"
)
_EXTREMES = {"maximum": "takes the largest", "minimum": "takes the smallest"}


def attribute(
    program: Program, located: Sequence[LocatedCollective], arguments: Sequence[str] = ()
) -> tuple[Collective, ...]:
    """Fills in ``parameters``, ``why`` and missing origins of collectives."""
    attribution = _Attribution(program, arguments)
    return tuple(attribution.attributed(collective) for collective in located)


class _Attribution:
    def __init__(self, program: Program, arguments: Sequence[str]) -> None:
        self._program = program
        self._arguments = arguments
        self._flow = Dataflow(program)
        self._updates = aliases(program)
        self._likely_updates = likely_updates(program)

    def attributed(self, located: LocatedCollective) -> Collective:
        """Returns the collective with its parameters, origin and reason."""
        computation, op, collective, numbers = located
        flow, value = self._flow, ValueRef(computation.name, op.name)
        sources = [flow.sources(ValueRef(computation.name, op.operands[n])) for n in numbers]
        computed = [instruction for source in sources for instruction in source.computed]

        # Parameters that travel as they are.
        moved: tuple[str, ...] = ()
        if not computed and all(source.arguments for source in sources):
            arguments = {number for source in sources for number in source.arguments}
            paths = [self._path(number) for number in sorted(arguments)]
            moved = tuple(path for path in paths if path)

        # The operation is that of what is sent, or else of what needs it.
        collective = _with_origin(collective, [op for op in computed if op.op_name])
        if not collective.op_name:
            user = flow.needed_by(value)
            collective = _with_origin(collective, [user] if user else [])
        names = [collective.op_name, *(instruction.op_name for instruction in computed)]
        is_backward = any("transpose(" in name for name in names)

        updated: tuple[str, ...] = ()
        if not moved:
            elements = numbers if len(op.operands) > 1 and op.opcode != "send" else (_ALL,)
            # A gradient is one also if it is a result itself, or the step keeps its arguments.
            updates = self._likely_updates if is_backward else self._updates
            updated = self._updated_by(value, elements, updates)

        # What takes an array converted needs it, not the conversion.
        operation = collective.op_name
        user = flow.needed_by(value) if moved and operation.endswith(_CONVERTS) else None
        if user:
            operation = user.op_name
        reduces = reduction(self._program, op)
        why = _why(collective, operation, moved, updated, reduces, is_backward)
        return dataclasses.replace(collective, parameters=moved or updated, why=why)

    def _path(self, number: int) -> str:
        return self._arguments[number] if number < len(self._arguments) else ""

    def _updated_by(
        self, value: ValueRef, elements: Sequence[int], updates: Mapping[int, int]
    ) -> tuple[str, ...]:
        """Paths of the arguments updated with the values sent."""
        paths: dict[str, None] = {}
        for element in elements:
            results = self._flow.results(value._replace(element=element))
            numbers = sorted({updates[result] for result in results if result in updates})
            paths |= dict.fromkeys(_without_states([self._path(number) for number in numbers]))
        return tuple(paths)


def _with_origin(collective: Collective, named: Sequence[Instruction]) -> Collective:
    """Gives a collective without ``op_name`` an operation's."""
    if collective.op_name or not named:
        return collective
    source = collective.source or next((op.source for op in named if op.source), "")
    return dataclasses.replace(collective, op_name=named[0].op_name, source=source)


def _without_states(paths: Sequence[str]) -> list[str]:
    """Leaves out optimizer states, with paths that end like parameters'."""
    ends = {path: re.sub(r"^[^.\[]*", "", path) for path in paths if path}

    def is_state(path: str) -> bool:
        return any(
            end and len(other) < len(path) and path.endswith(end) for other, end in ends.items()
        )

    return [path for path in ends if not is_state(path)]


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
    merged = joined[1].split(":") if joined else [op_name]
    operations = list(dict.fromkeys(name.rpartition("/")[2] for name in merged if name))
    operation = _listed(operations) or "what comes next"
    constraint = next((name for name in operations if _ASKED.match(name)), "")

    over = f" over {' and '.join(collective.axes)}" if collective.axes else ""
    moved_text = _listed(moved) or "an activation"
    reduces_all = collective.kind in ("all-reduce", "reduce-scatter")
    match collective.kind:
        # What travels for a parameter.
        case "all-reduce" | "reduce-scatter" if updated and is_backward:
            return f"sums the gradient of {_listed(updated)}{over}"
        case "all-gather" if updated and not is_backward:
            return f"gathers the new {_listed(updated)}{over}"
        case "collective-permute" if updated and is_backward:
            return f"passes on the gradient of {_listed(updated)}"

        # What travels for an operation, written or not.
        case _ if constraint and (reduces_all or not moved):
            return f"asked for by {constraint}{over}"
        case "all-reduce" | "reduce-scatter" if reduces in _EXTREMES:
            return f"{_EXTREMES[reduces]} of {operation}{over}"
        case "all-reduce" | "reduce-scatter":
            summed = "partial products" if _PRODUCTS & set(operations) else "parts"
            return f"sums {summed} of {operation}{over}"
        case "all-gather":
            return f"gathers {moved_text} before {operation}"
        case "collective-permute" if moved:
            return f"passes on the parts of {moved_text} for {operation}"
        case "collective-permute":
            return f"moves {moved_text} to other devices for {operation}"
        case "broadcast":
            return f"sends {moved_text} to all for {operation}"
        case _:
            return f"re-lays out {moved_text} for {operation}"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"
