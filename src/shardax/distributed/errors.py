# SPDX-License-Identifier: Apache-2.0
"""The error of programs of several processes, and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardax._core.errors import ShardaxError


class DistributedError(ShardaxError, RuntimeError, ValueError):
    """Processes cannot start together, do not answer, or differ."""


# --- start ----------------------------------------------------------------------------------------


def no_such_process(process: int, processes: int) -> DistributedError:
    """Returns the error of a number of a process that the program does not have."""
    return DistributedError(
        f"process={process} of processes={processes}: give one from 0 to {processes - 1}."
    )


def is_another_process(
    index: int, count: int, process: int | None, processes: int | None
) -> DistributedError:
    """Returns the error of a second start with other numbers."""
    return DistributedError(
        f"This already is process {index} of {count}; it cannot be process {process} of "
        f"{processes}. Call initialize once."
    )


def port_in_use(port: int, error: OSError) -> DistributedError:
    """Returns the error of a port at which process 0 cannot listen."""
    return DistributedError(
        f"Process 0 cannot listen at port {port}: {error.strerror}. Another program, or a job that "
        "has not ended, has it; give all processes another port."
    )


def nothing_listens(process: int, timeout: float, address: str) -> DistributedError:
    """Returns the error of an address where process 0 did not come in time."""
    return DistributedError(
        f"Process {process} waited {timeout:g} s for process 0, but nothing listens at {address}. "
        f"Start process 0 there, or give all processes its address."
    )


def others_did_not_come(
    process: int | None, processes: int | None, timeout: float, address: str | None
) -> DistributedError:
    """Returns the error of processes that did not all meet in time."""
    label = "This process" if process is None else f"Process {process}"
    count = "all processes" if processes is None else f"all {processes} processes"
    place = "" if address is None else f" at {address}"
    return DistributedError(
        f"{label} waited {timeout:g} s for {count} to meet{place}. One was not started, or what "
        f"listens there is not process 0 of this job. Give more time if they come later: "
        f"timeout={10 * timeout:g}, --start-timeout {10 * timeout:g} on the command line."
    )


def incomplete_arguments(error: ValueError) -> DistributedError:
    """Returns the error of arguments that JAX could not complete by what it knows."""
    return DistributedError(
        f"Not all of coordinator, processes and process are known here: {error} Give all three."
    )


def cannot_start(error: RuntimeError) -> DistributedError:
    """Returns the error of a start that JAX refused."""
    return DistributedError(f"The processes cannot be started together: {str(error).strip()}")


# --- agreement ------------------------------------------------------------------------------------


def at_different_places(places: str) -> DistributedError:
    """Returns the error of processes at different agreements or barriers."""
    return DistributedError(
        f"The processes are at different places of the program: {places}. All must call the same "
        "agreements and barriers in the same order."
    )


def different_device_counts(counts: Mapping[int, int]) -> DistributedError:
    """Returns the error of processes with different numbers of devices."""
    text = ", ".join(f"process {index}: {counts[index]}" for index in sorted(counts))
    return DistributedError(f"The processes have different numbers of devices: {text}.")


def no_answer(name: str, seconds: float) -> DistributedError:
    """Returns the error of an exchange to which another process did not come."""
    return DistributedError(
        f"At {name!r} another process has not answered for {seconds} s. It may be dead, or may "
        "have taken another way through the program."
    )


def exchange_failed(name: str, error: Exception) -> DistributedError:
    """Returns the error of an exchange that failed, such as where another process ended."""
    return DistributedError(
        f"At {name!r} the exchange with the other processes failed: {first_line(error)}. If one of "
        "them has ended, its own error says why."
    )


def note_on_other_processes(process: int) -> str:
    """Returns the note on an error of JAX in a program of several processes."""
    return (
        f"This was process {process} of several. If another one ended in the middle of a step, it "
        "shows here as a failed collective or a closed connection, and that one's own error says "
        "why. Start all processes again; with resume=True a run goes on from its last checkpoint."
    )


def first_line(error: Exception) -> str:
    """Returns the first line of an error of JAX, shortened."""
    return str(error).partition("\n")[0][:300]


_SHOWN = 120  # characters of a text
_SHOWN_BEFORE = 40  # of them, those before long texts differ


def by_process(texts: Sequence[str]) -> str:
    """Returns each text once, with the processes that have it."""
    processes: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        processes.setdefault(text, []).append(index)

    # Long texts are shown from shortly before they differ.
    start = 0
    if max(map(len, processes)) > _SHOWN:
        start = max(0, _common_length(list(processes)) - _SHOWN_BEFORE)

    described: list[str] = []
    for text, indices in processes.items():
        before = "..." if start else ""
        after = "..." if len(text) > start + _SHOWN else ""
        noun = "processes" if len(indices) > 1 else "process"
        shown = f"{before}{text[start : start + _SHOWN]}{after}"
        described.append(f"{shown} in {noun} {', '.join(map(str, indices))}")
    return "; ".join(described)


def _common_length(texts: Sequence[str]) -> int:
    """Returns how many characters all texts begin with."""
    for position, letters in enumerate(zip(*texts, strict=False)):
        if len(set(letters)) > 1:
            return position
    return min(map(len, texts))
