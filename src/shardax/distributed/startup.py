# SPDX-License-Identifier: Apache-2.0
"""Starting the processes of a program together, and ending one of them.

``initialize`` is ``jax.distributed.initialize`` with a deadline and errors that say what is wrong:
a port that is in use, a process 0 that does not listen, others that do not come. Waiting for JAX
happens in a thread of its own, for connecting cannot be given up, but waiting for it can.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import jax

from shardax._core.checks import Options
from shardax.distributed import errors

# A process that has not been heard of for so long is dead, and all others end.
HEARTBEAT_SECONDS = 15
# In which all processes of a job come together.
START_SECONDS = 60


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: float = START_SECONDS,
) -> None:
    """Starts this process as one of several, before any JAX computation.

    Without arguments it finds out from SLURM, Open MPI, Kubernetes or a TPU pod what
    ``jax.distributed`` can find out; elsewhere the program is one process. An exception that ends
    one process ends it at once, so that no other waits for it.

    Args:
        coordinator: ``host:port`` of process 0, where it listens.
        processes: How many there are.
        process: Which of them this one is, from 0.
        timeout: Seconds until all have to be there. A process that gives up once it has reached
            the coordinator can only end.

    Raises:
        DistributedError: If the arguments do not fit, JAX has already been used, the port is in
            use, or the others do not come in time.

    Example:
        >>> initialize("localhost:9000", processes=2, process=2)
        Traceback (most recent call last):
        shardax.errors.DistributedError: process=2 of processes=2: give one from 0 to 1.
    """
    _check_arguments(coordinator, processes, process, timeout)
    if jax.distributed.is_initialized():
        index, count = jax.process_index(), jax.process_count()
        if process not in (None, index) or processes not in (None, count):
            raise errors.is_another_process(index, count, process, processes)
        return

    # JAX would wait for minutes where nothing listens, and abort the process then.
    deadline = time.monotonic() + timeout
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and process == 0:
        _check_port_is_free(_port_of(address))
    elif address is not None and process is not None:
        while not _is_listening(address, deadline):
            if time.monotonic() >= deadline:
                raise errors.nothing_listens(process, timeout, address)
            time.sleep(0.1)

    error = _join(coordinator, processes, process, deadline)
    if isinstance(error, _DeadlineExceeded):
        raise errors.others_did_not_come(process, processes, timeout, address)
    if isinstance(error, ValueError):
        if coordinator is None and processes is None and process is None:
            return  # no cluster was detected
        raise errors.incomplete_arguments(error) from error
    if isinstance(error, RuntimeError):
        raise errors.cannot_start(error) from error
    if error is not None:
        raise error


def _check_arguments(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float
) -> None:
    options = Options(errors.DistributedError)
    if processes is not None:
        options.integers(processes=processes)
    if process is not None:
        options.integers(0, process=process)
    if processes is not None and process is not None and process >= processes:
        raise errors.no_such_process(process, processes)

    is_address = coordinator is None or (
        re.fullmatch(r".+:\d{1,5}", coordinator) is not None and _port_of(coordinator) < 2**16
    )
    options.check("coordinator", coordinator, is_address, "host:port, of a port below 65536")

    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    is_time = is_number and 0 < timeout < 10**6
    options.check("timeout", timeout, is_time, "a number of seconds, such as timeout=60")


class _DeadlineExceeded(TimeoutError):
    """The processes did not meet in time."""


def _join(
    coordinator: str | None, processes: int | None, process: int | None, deadline: float
) -> BaseException | None:
    """Starts ``jax.distributed``; returns what it raised, or ``_DeadlineExceeded``."""
    outcomes: list[BaseException | None] = []
    remaining = max(deadline - time.monotonic(), 0.1)

    def connect() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                # When JAX's own time is over it aborts the process.
                initialization_timeout=int(remaining) + 600,
            )
            outcomes.append(None)
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            outcomes.append(error)

    thread = threading.Thread(target=connect, name="shardax-initialize", daemon=True)
    thread.start()
    try:
        thread.join(remaining)
    finally:  # also if it is interrupted: then it could not end otherwise
        if jax.distributed.is_initialized():
            sys.excepthook = functools.partial(_end_on_error, sys.excepthook)
    return outcomes[0] if outcomes else _DeadlineExceeded()


# --- the address of process 0 ---------------------------------------------------------------------


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _check_port_is_free(port: int) -> None:
    """Raises if process 0 cannot listen at a port."""
    with _open_socket() as listener:
        try:
            if os.name == "posix":  # a port whose last job has ended is free
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
        except OSError as error:
            raise errors.port_in_use(port, error) from error


def _open_socket() -> socket.socket:
    """Returns a socket, for IPv6 if the machine has it."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a machine without IPv6
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _is_listening(address: str, deadline: float) -> bool:
    """Whether a connection to an address is accepted."""
    host, _, port = address.rpartition(":")

    # Not all that is left: a packet that is lost would take the whole time.
    seconds = min(max(deadline - time.monotonic(), 0.1), 5)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError:
        return False
    return True


# --- the end --------------------------------------------------------------------------------------


def _end_on_error(
    old_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Prints an exception that nobody caught, and ends this process of several."""
    old_hook(kind, error, trace)
    if jax.distributed.is_initialized():
        was_interrupted = issubclass(kind, KeyboardInterrupt)
        end_now(130 if was_interrupted else 1)  # as a shell says of a program that was interrupted


def end_now(status: int) -> None:
    """Ends this process of several without waiting for the others."""
    # Otherwise it would meet them when the interpreter ends, where they never come: they wait for
    # its part of a step. Its closed connections end them.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def process_index() -> int:
    """Returns the number of this process, from 0.

    Returns:
        ``jax.process_index()``.

    Example:
        >>> process_index()
        0
    """
    return jax.process_index()


def is_main() -> bool:
    """Whether this process logs, prints and writes reports.

    Returns:
        Whether it is process 0.

    Example:
        >>> if is_main():
        ...     print("once")
        once
    """
    return jax.process_index() == 0
