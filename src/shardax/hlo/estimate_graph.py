# SPDX-License-Identifier: Apache-2.0
"""A computation of a program that can be changed: instructions by name, with who uses them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from shardax.hlo.program import Computation, Instruction, Program

Groups = tuple[tuple[int, ...], ...]

_METADATA = re.compile(r',? *metadata=\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
COLLECTIVES = frozenset(
    {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
)
_EFFECTS = frozenset({"send", "recv", "send-done", "recv-done", "outfeed", "infeed", "custom-call"})
_UNIQUE = (
    _EFFECTS
    | COLLECTIVES
    | {
        *("parameter", "while", "conditional", "call", "rng", "rng-bit-generator"),
        *("opt-barrier", "fusion", "after-all"),
    }
)


class Graph:
    """A computation that can be changed.

    Args:
        program: The program that holds it; the computations that it calls are read there.
        computation: The computation.

    Attributes:
        program: The program.
        device_count: How many devices run it together.
        instructions: By name, in an order in which each comes after its operands.
        users: Names of the instructions that use one, by its name.
        root: Name of the instruction whose result is that of the computation.
    """

    def __init__(self, program: Program, computation: Computation) -> None:
        """See the class."""
        self.program = program
        self.device_count = program.device_count
        self.instructions = {each.name: each for each in computation.instructions}
        self.root = computation.root.name
        self._name = computation.name
        self.users: dict[str, list[str]] = {}
        self._find_users()

    def computation(self) -> Computation:
        """Returns it as it is now."""
        return Computation(
            self._name,
            tuple(
                dataclasses.replace(each, is_root=each.name == self.root)
                for each in self.instructions.values()
            ),
        )

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that one takes its operands from."""
        if instruction.opcode == "parameter":
            return []
        return [self.instructions[name] for name in instruction.operands]

    def only_user(self, name: str) -> Instruction | None:
        """Returns the instruction that alone uses another, once; None if there is no such one."""
        users = self.users.get(name, [])
        return self.instructions[users[0]] if len(users) == 1 and name != self.root else None

    def replace(self, changed: Mapping[str, Instruction | tuple[Instruction, ...]]) -> None:
        """Puts others in the place of instructions.

        Args:
            changed: By the name of what goes; of several the last takes its place for its users,
                and must have its name.
        """
        updated: dict[str, Instruction] = {}
        for name, each in self.instructions.items():
            new = changed.get(name, each)
            for one in new if isinstance(new, tuple) else (new,):
                updated[one.name] = one
        self.instructions = updated
        self._find_users()

    def rename_uses(self, names: Mapping[str, str]) -> None:
        """Lets the users of instructions use others that come before."""
        self.instructions = {
            name: each
            if each.opcode == "parameter"
            else dataclasses.replace(each, operands=tuple(names.get(o, o) for o in each.operands))
            for name, each in self.instructions.items()
        }
        self.root = names.get(self.root, self.root)
        self._find_users()

    def remove_unused(self) -> None:
        """Removes what nothing uses and has no effect of its own."""
        needed = {self.root}
        for name, each in reversed(self.instructions.items()):
            if name in needed or each.opcode == "parameter" or each.opcode in _EFFECTS:
                needed.add(name)
                needed.update(() if each.opcode == "parameter" else each.operands)
        self.instructions = {n: each for n, each in self.instructions.items() if n in needed}
        self._find_users()

    def merge_equal(self) -> None:
        """Lets one of several equal instructions do for all; collectives stay, as in compilers."""
        first: dict[object, str] = {}
        same: dict[str, str] = {}
        for name, each in self.instructions.items():
            if each.opcode in _UNIQUE or "..." in each.literal:
                continue
            operands = tuple(same.get(operand, operand) for operand in each.operands)
            attributes = _METADATA.sub("", each.attributes)
            key = (each.opcode, each.shapes, operands, each.literal, attributes)
            if first.setdefault(key, name) != name:
                same[name] = first[key]
        self.rename_uses(same)
        self.remove_unused()

    def _find_users(self) -> None:
        self.users = {}
        for name, each in self.instructions.items():
            for operand in () if each.opcode == "parameter" else each.operands:
                self.users.setdefault(operand, []).append(name)


def reduction(program: Program, collective: Instruction) -> str:
    """Returns the opcode by which a collective reduces (``"add"``), or "" if it does not."""
    for name in collective.computations("to_apply"):
        return program.computations[name].root.opcode
    return ""


def chains(graph: Graph, opcodes: frozenset[str], start: Instruction) -> Iterator[Instruction]:
    """Yields an instruction and what uses it alone, one after another, while these are of opcodes.

    The last that is yielded is of another opcode, if there is a last that one alone uses.
    """
    current: Instruction | None = start
    while current is not None:
        yield current
        if current is not start and current.opcode not in opcodes:
            return
        current = graph.only_user(current.name)
