# SPDX-License-Identifier: Apache-2.0
"""How much memory a device needs to run a partitioned program: an estimate.

Arguments stay for the whole run; a donated one makes room for the result that takes its place. What
else is *live*, computed and needed later, changes from instruction to instruction, and the most at
a time is what counts. A loop's state takes memory once; an element of it that the body replaces
takes that of the old one, if nobody needs that any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardax.hlo.aliases import aliases
from shardax.hlo.live_buffers import Buffers, kept_elements
from shardax.hlo.live_order import least_memory_order
from shardax.hlo.program import Computation, Instruction, Program
from shardax.hlo.runs import branches, called


def peak_bytes(program: Program) -> int:
    """Estimates the most memory that a device needs at a time.

    Args:
        program: A partitioned program, best after ``rewritten``; which arguments are donated it
            says itself.

    Returns:
        Bytes, with those of arguments and results.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax.hlo.program import parse
        >>> from shardax.hlo.partitioned import partitioned_text
        >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> lowered = jax.jit(lambda x: jnp.tanh(x @ x) * 2).lower(x)
        >>> peak_bytes(parse(partitioned_text(lowered))) // x.size  # x, its product, the result
        12
    """
    arguments = sum(each.bytes for each in program.main.parameters.values())
    placed = frozenset(aliases(program))
    return arguments + _most(program, program.main, placed=placed)


def _most(
    program: Program,
    inside: Computation,
    own: frozenset[int] | None = None,
    placed: frozenset[int] = frozenset(),
) -> int:
    """The most bytes that a computation takes at a time, beyond what it is given.

    Args:
        program: The program.
        inside: The computation.
        own: Of a loop's body, the numbers of the elements of the state that it leaves as they are.
        placed: Numbers of the results that take the place of something given.
    """
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
