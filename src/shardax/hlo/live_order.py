# SPDX-License-Identifier: Apache-2.0
"""An order of instructions in which little memory is live.

A partitioned program prints instructions in an order that suits no one: what computes the gradient
of a weight may stand behind everything else, while all that it needs stays live. Compilers choose
an order. Here, as in XLA's simplest scheduler, of the instructions that can run the one runs that
frees most and fills least.
"""

from __future__ import annotations

import heapq

from shardax.hlo.live_buffers import Buffers
from shardax.hlo.program import Computation, Instruction


def least_memory_order(inside: Computation, buffers: Buffers) -> list[Instruction]:
    """Returns the instructions that are done for themselves, in an order of little memory.

    Args:
        inside: The computation.
        buffers: Its buffers.
    """
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
        names = () if each.opcode in ("parameter", "constant") else each.operands
        before = frozenset().union(*(reached[name] for name in names))
        if each.name in place:
            needs[each.name] = set(before)
            reached[each.name] = frozenset({each.name})
        else:
            reached[each.name] = before
    return needs
