# SPDX-License-Identifier: Apache-2.0
"""Starting processes together, and exchange of facts between them.

Processes compare texts. Two collectives over all devices carry them: the first a digest and a
length, so that what is equal costs 40 bytes; the second, only if these differ, the texts, padded to
one length. Then each process knows what each has, and all raise the same error. (JAX's
coordinator has a store of keys and values, but no public name for it; see ``docs/design.md``.)
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from shardax._core._jax import is_prng_key
from shardax._core.checks import Options, raise_if_any
from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import format_path, plain_path
from shardax._core.object import Object
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable import Variable

# A process that has not been heard of for so long is dead, and all others end.
HEARTBEAT_SECONDS = 15
# In which all processes of a job come together.
START_SECONDS = 60
# Others may compile, read data or checksums meanwhile.
ANSWER_SECONDS = 600
_SHOWN = 12  # differences in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

T = TypeVar("T")


class DistributedError(ShardaxError, RuntimeError, ValueError):
    """Processes cannot start together, do not answer, or differ."""


# --- start and end --------------------------------------------------------------------------------


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
    options = Options(DistributedError)
    if processes is not None:
        options.integers(processes=processes)
    if process is not None:
        options.integers(0, process=process)
    if processes is not None and process is not None and process >= processes:
        raise DistributedError(
            f"process={process} of processes={processes}: give one from 0 to {processes - 1}."
        )
    is_address = coordinator is None or (
        bool(re.fullmatch(r".+:\d{1,5}", coordinator)) and _port(coordinator) < 2**16
    )
    options.check("coordinator", coordinator, is_address, "host:port, of a port below 65536")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    is_time = is_number and 0 < timeout < 10**6
    options.check("timeout", timeout, is_time, "a number of seconds, such as timeout=60")
    if jax.distributed.is_initialized():
        running = jax.process_count(), jax.process_index()
        if any(a not in (None, b) for a, b in zip((processes, process), running, strict=True)):
            raise DistributedError(
                f"This already is process {running[1]} of {running[0]}; it cannot be process "
                f"{process} of {processes}. Call initialize once."
            )
        return
    deadline = time.monotonic() + timeout
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None and process == 0:
        _check_port_is_free(_port(address))
    elif address is not None and process is not None:
        while not _is_listening(address, deadline):
            if time.monotonic() >= deadline:
                raise DistributedError(
                    f"Process {process} waited {timeout:g} s for process 0, but nothing listens at "
                    f"{address}. Start process 0 there, or give all processes its address."
                )
            time.sleep(0.1)
    error = _join(coordinator, processes, process, deadline)
    if error is _LATE:
        label = "This process" if process is None else f"Process {process}"
        count = "all processes" if processes is None else f"all {processes} processes"
        place = "" if address is None else f" at {address}"
        raise DistributedError(
            f"{label} waited {timeout:g} s for {count} to meet{place}. One was not started, or "
            f"what listens there is not process 0 of this job. Give more time if they come later: "
            f"timeout={10 * timeout:g}, --start-timeout {10 * timeout:g} on the command line."
        )
    if isinstance(error, ValueError):
        if coordinator is None and processes is None and process is None:
            return  # no cluster was detected
        raise DistributedError(
            f"Not all of coordinator, processes and process are known here: {error} Give all three."
        ) from error
    if isinstance(error, RuntimeError):
        raise DistributedError(
            f"The processes cannot be started together: {str(error).strip()}"
        ) from error
    if error is not None:
        raise error


_LATE = TimeoutError()


def _join(
    coordinator: str | None, processes: int | None, process: int | None, deadline: float
) -> BaseException | None:
    """Starts ``jax.distributed``; returns its exception, ``_LATE`` past the deadline."""
    ended: list[BaseException | None] = []
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
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            ended.append(error)

    # In a thread of its own: connecting cannot be given up, but waiting for it can.
    thread = threading.Thread(target=connect, name="shardax-initialize", daemon=True)
    thread.start()
    try:
        thread.join(remaining)
    finally:  # also if it is interrupted: then it could not end otherwise
        if jax.distributed.is_initialized():
            sys.excepthook = functools.partial(_end_on_error, sys.excepthook)
    return ended[0] if ended else _LATE


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _socket() -> socket.socket:
    """Returns a socket, for IPv6 if the machine has it."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a machine without IPv6
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _check_port_is_free(port: int) -> None:
    """Raises if process 0 cannot listen at a port."""
    with _socket() as listener:
        try:
            if os.name == "posix":  # a port whose last job has ended is free
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
        except OSError as error:
            raise DistributedError(
                f"Process 0 cannot listen at port {port}: {error.strerror}. Another program, or a "
                "job that has not ended, has it; give all processes another port."
            ) from error


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


def _end_on_error(
    old_hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    old_hook(kind, error, trace)
    if jax.distributed.is_initialized():
        end_now(130 if issubclass(kind, KeyboardInterrupt) else 1)


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


# --- agreement ------------------------------------------------------------------------------------


def agree(name: str, value: T) -> T:
    """Compares a value over all processes; every process must call it.

    Args:
        name: What it is, for the message.
        value: Numbers, strings, arrays, and dataclasses, lists and dicts of these; of anything else
            the ``repr`` counts.

    Returns:
        The value.

    Raises:
        DistributedError: In every process, if the values differ: which process has what, or if
            another process does not answer.

    Example:
        >>> agree("learning rate", 0.1)
        0.1
    """
    if jax.process_count() > 1:
        compare(dict(_texts(value, name)), name)
    return value


def barrier(name: str) -> None:
    """Waits until every process has come to the barrier of this name.

    Args:
        name: Which barrier it is.

    Raises:
        DistributedError: If another process is at another barrier or agreement, or if another
            process does not answer.

    Example:
        >>> barrier("data is copied")
    """
    if jax.process_count() > 1:
        compare({}, name)


def compare(facts: Mapping[str, str], at: str) -> None:
    """Raises DistributedError in every process if facts differ, by name."""
    message = json.dumps([at, dict(facts)], sort_keys=True)
    messages = [json.loads(text) for text in exchange(message, at)]
    places = [place for place, _ in messages]
    if len(set(places)) > 1:
        raise DistributedError(
            f"The processes are at different places of the program: {_by_process(places)}. All "
            "must call the same agreements and barriers in the same order."
        )
    all_facts = [facts for _, facts in messages]
    names = sorted({name for facts in all_facts for name in facts})
    differing = [name for name in names if len({facts.get(name) for facts in all_facts}) > 1]
    raise_if_any(
        DistributedError,
        [
            f"  {name}: {_by_process([facts.get(name, 'nothing') for facts in all_facts])}"
            for name in differing
        ],
        f"The {len(all_facts)} processes differ in\n",
        "\nStart all of them with the same program, arguments, files and packages.",
        separator="\n",
        most=_SHOWN,
    )


def compare_arguments(arguments: Mapping[str, object], at: str) -> None:
    """Raises DistributedError if NumPy arrays or numbers differ beside arrays over processes."""
    if jax.process_count() == 1:
        return
    facts: dict[str, str] = {}
    spans = False
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        dict(arguments), is_leaf=lambda leaf: isinstance(leaf, Object)
    )
    for path, leaf in leaves:
        if isinstance(leaf, Object):
            values = [variable._here()._value for _, variable in iter_variables(leaf)]
            spans = spans or any(map(_spans_processes, jax.tree.leaves(values)))
        elif isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            facts[format_path(plain_path(path)).removeprefix(".")] = array_text(np.asarray(leaf))
        else:
            spans = spans or _spans_processes(leaf)
    # A program of one process alone is no other's matter.
    if spans:
        compare(facts, at)


def _spans_processes(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def from_main(value: object, name: str) -> Any:
    """Returns the main process's JSON value in every process."""
    if jax.process_count() == 1:
        return value
    return json.loads(exchange(json.dumps(value), name)[0])


def exchange(text: str, name: str) -> list[str]:
    """Returns the texts of all processes."""
    content = text.encode()
    head = hashlib.sha256(content).digest() + len(content).to_bytes(8, "big")
    heads = [row.tobytes() for row in _rows_of_all(head, name)]
    if len(set(heads)) == 1:
        return [text] * len(heads)
    sizes = [int.from_bytes(row[-8:], "big") for row in heads]
    room = 1 << (max(sizes) - 1).bit_length()  # few programs for many lengths
    rows = _rows_of_all(content.ljust(room, b"\0"), name)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


# In errors of JAX's collectives over processes, whose types are those of any error at run time.
_OF_COLLECTIVES = ("Gloo", "NCCL", "Coordination", "coordination service", "Connection closed")


@contextlib.contextmanager
def explain_ended_process() -> Generator[None]:
    """Explains errors of collectives after the end of another process."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not any(word in str(error) for word in _OF_COLLECTIVES):
            raise
        raise DistributedError(
            f"In a step another process ended: {_first_line(error)}. Start all processes again; "
            f"with resume=True a run goes on from its last checkpoint."
        ) from error


def _rows_of_all(content: bytes, name: str) -> np.ndarray:
    """Returns as many bytes of every process, or raises in time."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"process {index}: {counts[index]}" for index in sorted(counts))
        raise DistributedError(f"The processes have different numbers of devices: {counts_text}.")
    result: list[Any] = []

    def gather_rows() -> None:
        from jax.experimental import multihost_utils

        try:
            result.append(multihost_utils.process_allgather(np.frombuffer(content, np.uint8)))
        except Exception as error:  # noqa: BLE001 (raised below, in the thread that waits)
            result.append(error)

    # In a thread of its own: a collective cannot be given up, but waiting for it can.
    thread = threading.Thread(target=gather_rows, name="shardax-exchange", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not result:
        raise DistributedError(
            f"At {name!r} another process has not answered for {ANSWER_SECONDS} s. It may be dead, "
            "or may have taken another way through the program."
        )
    if isinstance(result[0], Exception):
        text = f"At {name!r} another process ended: {_first_line(result[0])}"
        raise DistributedError(text) from result[0]
    return result[0]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _by_process(texts: Sequence[str]) -> str:
    """Tells the processes of each text."""
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text, []).append(index)
    start = list(itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*groups)))  # noqa: B905
    # Long texts begin shortly before they differ.
    skipped = max(0, len(start) - 40) if max(map(len, groups)) > 120 else 0
    return "; ".join(
        f"{'...' if skipped else ''}{text[skipped : skipped + 120]}"
        f"{'...' if len(text) > skipped + 120 else ''} in process"
        f"{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
        for text, indices in groups.items()
    )


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the parts of a value."""
    if isinstance(value, Variable):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            yield from _texts(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _texts(item, f"{name}[{index}]")
    elif isinstance(value, (jax.Array, np.ndarray)):
        yield name, array_text(value)
    else:
        yield name, _ADDRESS.sub("", repr(value))


# --- arrays ---------------------------------------------------------------------------------------


def gather(x: object) -> Any:
    """Returns whole values in every process; every process must call it.

    Args:
        x: A tree of arrays, Variables and Modules, whose parts may be on devices of other
            processes.

    Returns:
        The same tree of NumPy arrays (random keys stay JAX arrays), the same in each process. A
        Module gives a dict of its Variables by path.

    Example:
        >>> import jax.numpy as jnp
        >>> gather({"weights": jnp.arange(3)})
        {'weights': array([0, 1, 2], dtype=int32)}
    """
    return jax.tree.map(_gathered, x, is_leaf=lambda leaf: isinstance(leaf, Object))


def _gathered(leaf: object):
    if isinstance(leaf, Variable):
        return gather(leaf.value)
    if isinstance(leaf, Object):
        return {format_path(path): gather(variable) for path, variable in iter_variables(leaf)}
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    if is_prng_key(leaf):
        words = _gathered(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


def array_text(array: Any) -> str:
    """Returns dtype, shape and digest of a local array."""
    return f"{array.dtype}{list(array.shape)} {_digest(array).hex()}"


def _digest(array) -> bytes:
    if is_prng_key(array):
        array = jax.random.key_data(array)
    content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(content, digest_size=8).digest()


def compare_replicas(tree: object, at: str) -> None:
    """Raises DistributedError if copies of one shard differ."""
    # Each process knows which shards any other has copies of, so all send tables of one form: a
    # digest of each such shard, of zeros where a process has none.
    tables: list[bytes] = []
    names: list[str] = []
    for path, variable in iter_variables(tree):
        for leaf in jax.tree.leaves(variable.value):
            if not isinstance(leaf, jax.Array):
                continue
            local_digests = {_key(shard.index): [] for shard in leaf.addressable_shards}
            holders: dict[Any, set[int]] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                holders.setdefault(_key(index), set()).add(device.process_index)
            shared = sorted(key for key, processes in holders.items() if len(processes) > 1)
            if not shared:
                continue
            for shard in leaf.addressable_shards:
                if (key := _key(shard.index)) in shared:
                    local_digests[key].append(_digest(shard.data))
            for key in shared:
                digests = local_digests.get(key, [])
                # Copies of one process that differ give what no other process can have.
                same = len(set(digests)) <= 1
                tables.append((digests[0] if digests else bytes(8)) if same else os.urandom(8))
                names.append(f"{format_path(path)}{list(key) if len(holders) > 1 else ''}")
    compare({"copies of shards": str(len(tables))}, at)
    if not tables:
        return
    rows = _rows_of_all(b"".join(tables), at).reshape(jax.process_count(), -1, 8)
    facts = []
    for column, name in enumerate(names):
        column_digests = [rows[index, column].tobytes() for index in range(len(rows))]
        if len({digest for digest in column_digests if any(digest)}) > 1:
            facts.append(f"  {name}: {_by_process([digest.hex() for digest in column_digests])}")
    raise_if_any(
        DistributedError,
        facts,
        "Copies of one array differ between processes, by checksum:\n",
        f"\nThis was found {at}. The values given to each process, or what it read, differ.",
        separator="\n",
        most=_SHOWN,
    )


def _key(index) -> tuple[Any, ...]:
    return tuple((part.start or 0, part.stop if part.stop is not None else -1) for part in index)
