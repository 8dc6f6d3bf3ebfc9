# SPDX-License-Identifier: Apache-2.0
"""What is read from a compiled program: collectives, operations, bytes.

A *collective* is an instruction by which devices exchange data. *Wire bytes* are those that one
device sends, on a ring of its group, in one run of the program: of n devices and an array of B
bytes, ``2 (n-1)/n B`` for an all-reduce, ``(n-1)/n B`` for an all-gather (B of its result), a
reduce-scatter (B of its operand) and an all-to-all, and B for a permutation. An instruction in a
loop counts as often as the loop runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``,
            ``"collective-permute"`` or ``"broadcast"``.
        name: The instruction's name in the program.
        dtype: Of what travels, as HLO names it (``"bf16"``); of several arrays the first's.
        payload: Bytes of the whole array of a group, of one run: of the result of an all-gather, of
            the operand of the others.
        wire_bytes: Bytes that one device sends in all runs.
        group_size: Devices of a group.
        axes: Mesh axes that the groups run along, in the mesh's order; empty if they are not those
            of any set of mesh axes.
        runs: How often it runs in one run of the program.
        runs_known: Whether that is known; it counts once for a loop of unknown length.
        asynchronous: Whether other work can go on meanwhile.
        crosses_slices: Whether its groups hold devices of several slices.
        op_name: The operation that it comes from, such as ``jit(step)/layers/dot_general``.
        source: The user's line that it comes from, ``"model.py:12"``, or "".
        parameters: Paths of the arguments that travel, as far as can be told.
        why: What the source line does that needs it, in a few words, or "".

    Example:
        >>> each = Collective("all-gather", "ag.1", "bf16", 64, 48.0, 4, ("model",), runs=1)
        >>> each.wire_bytes / each.payload
        0.75
    """

    kind: str
    name: str
    dtype: str
    payload: int
    wire_bytes: float
    group_size: int
    axes: tuple[str, ...]
    runs: int = 1
    runs_known: bool = True
    asynchronous: bool = False
    crosses_slices: bool = False
    op_name: str = ""
    source: str = ""
    parameters: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class ProgramFacts:
    """What one device does in one run of a program.

    Attributes:
        collectives: All of them, in the program's order.
        matmul_flops: Operations of matrix products and convolutions, two for a product and a sum.
        hbm_bytes: Bytes read from and written to the device's memory; an estimate.
        warnings: What could not be told, such as a loop of unknown length.

    Example:
        >>> sums = Collective("all-reduce", "ar.1", "f32", 4, 7.0, 8, ("data",))
        >>> ProgramFacts((sums, sums), matmul_flops=0.0, hbm_bytes=0.0).wire_bytes()
        14.0
    """

    collectives: tuple[Collective, ...]
    matmul_flops: float
    hbm_bytes: float
    warnings: tuple[str, ...] = field(default=())

    def wire_bytes(self) -> float:
        """Returns the wire bytes of all collectives."""
        return sum(each.wire_bytes for each in self.collectives)
