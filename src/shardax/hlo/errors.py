# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.hlo``, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardax.errors import ShardaxError

if TYPE_CHECKING:
    from shardax.hlo.program import Computation, Instruction

_NEW_VERSION = (
    "The text is cut or changed, or a version of XLA printed it that shardax does not know."
)
_REPORT = "Please report it with the versions of jax and of the compiler."
_OTHER_MESH = "Pass the mesh that it was compiled for."


class CompilerFailedError(ShardaxError, RuntimeError):
    """A compiler failed for another reason than a lack of memory."""


class HloReadError(ShardaxError, ValueError):
    """A compiled program holds something unknown; names the instruction.

    It is an error because what was left out would be counted as nothing.
    """


# The text of a program.


def no_program() -> HloReadError:
    """Returns the error of a text without the first line of a program."""
    return HloReadError(
        "The text holds no line that starts with 'HloModule', so it is no compiled program. "
        "Pass what compiled.as_text() returns."
    )


def unread_line(line: str, number: int, expected: str) -> HloReadError:
    """Returns the error of a line that is not what stands there."""
    return HloReadError(
        f"Line {number} of the program should be {expected}, but cannot be read: "
        f"{_excerpt(line.strip(), 120)!r}. {_NEW_VERSION}"
    )


def unknown_dtype(dtype: str) -> HloReadError:
    """Returns the error of an array whose elements have an unknown size."""
    return HloReadError(
        f"The program holds an array of dtype {dtype!r}, which is not known, so its bytes "
        "cannot be counted."
    )


def empty_computation(name: str, number: int) -> HloReadError:
    """Returns the error of a computation without instructions."""
    return HloReadError(f"Computation {name!r}, closed in line {number}, is empty.")


def open_computation(name: str) -> HloReadError:
    """Returns the error of a text that ends inside a computation."""
    return HloReadError(f"The text ends inside computation {name!r}; it is not a whole program.")


def no_entry() -> HloReadError:
    """Returns the error of a text without the computation that runs first."""
    return HloReadError("The text holds no computation marked ENTRY; it is not whole.")


def missing_operand(op: Instruction, operand: str, computation: Computation) -> HloReadError:
    """Returns the error of an instruction that takes what is not there."""
    return HloReadError(
        f"{op.opcode} {op.name!r} takes {operand!r}, which is not in computation "
        f"{computation.name!r}; the text is cut or changed."
    )


def missing_parameter(computation: Computation) -> HloReadError:
    """Returns the error of a computation with a gap in the numbers of its parameters."""
    return HloReadError(
        f"Computation {computation.name!r} has parameters {sorted(computation.parameters)}, so "
        "one is missing; the text is cut or changed."
    )


def missing_computation(name: str, caller: Instruction | None) -> HloReadError:
    """Returns the error of a call of a computation that is not there."""
    where = f" that {caller.name!r} calls" if caller else ""
    return HloReadError(
        f"The program does not hold computation {name!r}{where}; its text is cut or changed."
    )


def recursive_computation(name: str) -> HloReadError:
    """Returns the error of a computation that calls itself."""
    return HloReadError(f"Computation {name!r} calls itself.")


# Operations.


def uncounted_operations(op: Instruction, why: str) -> HloReadError:
    """Returns the error of a product whose size is not known."""
    return HloReadError(
        f"The operations of {op.opcode} {op.name!r} cannot be counted: {why}. {_NEW_VERSION}"
    )


# Meshes, groups and collectives.


def uneven_slices(devices: int, mesh: str, slices: int) -> HloReadError:
    """Returns the error of a mesh that slices do not divide."""
    return HloReadError(
        f"A mesh of {devices} devices ({mesh}) cannot be of {slices} slices of as many "
        "devices each."
    )


def other_mesh(program_devices: int, mesh: str, mesh_devices: int) -> HloReadError:
    """Returns the error of a mesh of another size than the program."""
    return HloReadError(
        f"The program runs on {program_devices} devices, and the mesh ({mesh}) "
        f"has {mesh_devices}. {_OTHER_MESH}"
    )


def device_beyond_mesh(op: Instruction, device: int, devices: int) -> HloReadError:
    """Returns the error of a collective of devices that the program has not."""
    return HloReadError(
        f"{op.opcode} {op.name!r} connects device {device}, but the program runs on {devices} "
        f"devices (numbers 0 to {devices - 1}). {_OTHER_MESH}"
    )


def unread_groups(op: Instruction, text: str) -> HloReadError:
    """Returns the error of groups of a collective in an unknown form."""
    return HloReadError(
        f"The groups of {op.opcode} {op.name!r} cannot be read: {_excerpt(text, 100)!r}. The "
        "forms known are {{0,1},{2,3}}, [4,2]<=[2,4]T(1,0) and mesh['a'=2,'b'=4] {'a'}; a newer "
        "XLA may print another."
    )


def unread_slices(op: Instruction, text: str, slices: int, devices_each: int) -> HloReadError:
    """Returns the error of a send between slices with a target in an unknown form."""
    return HloReadError(
        f"The target of {op.opcode} {op.name!r}, which exchanges data between slices, "
        f"cannot be read: {text!r}. The mesh has {slices} slices of {devices_each} devices."
    )


def unknown_slice_kind(op: Instruction, kind: str, known: Iterable[str]) -> HloReadError:
    """Returns the error of a send between slices of an unknown type."""
    return HloReadError(
        f"{op.opcode} {op.name!r} exchanges data between slices as {kind!r}; known "
        f"are {', '.join(known)}."
    )


def unknown_collective(op: Instruction, why: str) -> HloReadError:
    """Returns the error of what looks like a collective and is none that is known."""
    return HloReadError(
        f"{op.opcode} {op.name!r} looks like a collective that is not known: {why}. Its bytes "
        f"would be counted as none, so the program is not read. {_REPORT}"
    )


def unreached_collective(op: Instruction, computation: str) -> HloReadError:
    """Returns the error of a collective in a computation that nothing runs."""
    return HloReadError(
        f"{op.opcode} {op.name!r} is in computation {computation!r}, which nothing known "
        f"runs, so it would not be counted. {_REPORT}"
    )


def collective_without_start(op: Instruction, start: str) -> HloReadError:
    """Returns the error of a collective that goes on and never began."""
    return HloReadError(
        f"{op.opcode} {op.name!r} goes on with a collective of a fusion of which the start, a "
        f"call of {start}, is not in the program; it would not be counted."
    )


# Compilers.


def compiler_ended(compiler: str, lines: Sequence[str]) -> CompilerFailedError:
    """Returns the error of a compiler that ended with a message of so many lines."""
    more = f"\n  (and {len(lines) - 20} lines more)" if len(lines) > 20 else ""
    return CompilerFailedError(f"{compiler} ended with: " + "\n".join(lines[:20]) + more)


def description_refused(target: str, error: Exception) -> CompilerFailedError:
    """Returns the error of a GPU's description that its compiler does not take."""
    return CompilerFailedError(
        f"The CUDA plugin does not take the description of {target!r}: {error}"
    )


def partitioner_failed(error: Exception) -> CompilerFailedError:
    """Returns the error of a compiler that ended with an error."""
    return CompilerFailedError(f"XLA's CPU compiler ended with: {error}")


def partitioned_program_missing(files: Iterable[str]) -> CompilerFailedError:
    """Returns the error of a compiler that wrote no partitioned program."""
    return CompilerFailedError(
        "XLA compiled the program but did not write it after partitioning; the folder "
        f"holds {sorted(files)[:5]}. A persistent compilation cache can be why: "
        'jax.config.update("jax_enable_compilation_cache", False).'
    )


def _excerpt(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
