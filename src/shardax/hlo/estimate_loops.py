# SPDX-License-Identifier: Apache-2.0
"""Loops without what they compute for nobody.

The state of a loop is a tuple. An element that neither the condition, nor another element that is
needed, nor anything after the loop reads is computed for nobody, and compilers leave it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shardax.hlo.program import Computation, Instruction, Program
from shardax.hlo.runs import branches, called

_EFFECTS = frozenset({"send", "recv", "send-done", "recv-done", "outfeed", "infeed", "custom-call"})


def without_unused_results(program: Program) -> Program:
    """Returns a program whose loops leave elements alone that nobody needs.

    Args:
        program: A program; its loops may hold loops.

    Returns:
        The program. An element that is not needed goes through its loop unchanged, so the shapes of
        states stay; what computed it is gone.
    """
    computations = dict(program.computations)
    pending = [program.entry]
    while pending:  # outer loops first, as they say what inner ones are needed for
        computation = computations[pending.pop()]
        for loop in computation.instructions:
            pending.extend(called(loop) if loop.opcode == "call" else branches(loop))
            if loop.opcode != "while":
                continue
            (name,) = loop.computations("body")
            (condition,) = loop.computations("condition")
            read = _read_after(computation, loop)
            body = computations[name]
            if read is not None and _has_plain_state(body):
                read |= _elements_read(computations[condition], None)
                computations[name] = _without(body, read)
            pending.append(name)
    return dataclasses.replace(program, computations=computations)


def _read_after(computation: Computation, loop: Instruction) -> set[int] | None:
    """Elements of a loop's state that are read after it; None if it is used as a whole."""
    if loop.is_root:
        return None
    users = [each for each in computation.instructions if loop.name in _uses(each)]
    if any(each.opcode != "get-tuple-element" for each in users):
        return None
    return {int(each.attribute("index") or 0) for each in users}


def _has_plain_state(body: Computation) -> bool:
    """Whether a body takes its state apart and puts it together, element by element."""
    (state,) = body.parameters.values()
    uses = [each for each in body.instructions if state.name in _uses(each)]
    return body.root.opcode == "tuple" and all(e.opcode == "get-tuple-element" for e in uses)


def _elements_read(computation: Computation, needed: set[str] | None) -> set[int]:
    """Elements of a computation's only argument that it reads, for the named ones of it."""
    return {
        int(each.attribute("index") or 0)
        for each in computation.instructions
        if each.opcode == "get-tuple-element" and (needed is None or each.name in needed)
        if each.operands == (next(iter(computation.parameters.values())).name,)
    }


def _without(body: Computation, read: set[int]) -> Computation:
    """A body without what computes other elements than those read after it."""
    root = body.root
    by_name = body.by_name
    while True:
        kept = [operand for index, operand in enumerate(root.operands) if index in read]
        needed = _needed(body.instructions, by_name, kept)
        more = read | _elements_read(body, needed)
        if more == read:
            break
        read = more
    (state,) = body.parameters.values()
    unread = [index for index in range(len(root.operands)) if index not in read]
    passed = {index: f"{root.name}.unread.{index}" for index in unread}
    through = [
        Instruction(
            passed[index],
            "get-tuple-element",
            by_name[root.operands[index]].shapes,
            (state.name,),
            f"index={index}",
        )
        for index in unread
    ]
    operands = tuple(passed.get(index, name) for index, name in enumerate(root.operands))
    inside = [each for each in body.instructions if each.name in needed or each is state]
    return Computation(body.name, (*inside, *through, dataclasses.replace(root, operands=operands)))


def _needed(
    instructions: tuple[Instruction, ...], by_name: Mapping[str, Instruction], names: list[str]
) -> set[str]:
    """Names of what instructions need, and of what has an effect of its own with what it needs."""
    needed: set[str] = set()
    pending = [*names, *(each.name for each in instructions if each.opcode in _EFFECTS)]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending.extend(_uses(by_name[name]))
    return needed


def _uses(each: Instruction) -> tuple[str, ...]:
    return () if each.opcode in ("parameter", "constant") else each.operands
