# SPDX-License-Identifier: Apache-2.0
"""Agreement of processes: exchange and comparison of facts.

Processes compare texts. Two collectives over all devices carry them: the first a digest and a
length, so that what is equal costs 40 bytes; the second, only if these differ, the texts, padded to
one length. Then each process knows what each has, and all raise the same error. (JAX's coordinator
has a store of keys and values, but no public name for it; see ``docs/design.md``.)

Each function here is called by every process, in the same order. Waiting for a collective happens
in a thread of its own: a collective cannot be given up, but waiting for it can.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import TypeVar

import jax
import numpy as np

from shardax._core._jax import is_prng_key
from shardax._core.checks import raise_if_any
from shardax._core.graph.paths import Leaf, PyTree, format_path, plain_path
from shardax._core.object import Object
from shardax._core.state.split_merge import iter_variables
from shardax._core.variable import Variable
from shardax.distributed import errors

# Others may compile, read data or checksums meanwhile.
ANSWER_SECONDS = 600
MOST_SHOWN = 12  # differences in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

T = TypeVar("T")


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
        compare(dict(_facts_of(value, name)), name)
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


# --- facts ----------------------------------------------------------------------------------------


def compare(facts: Mapping[str, str], at: str) -> None:
    """Raises DistributedError in every process if facts differ, by name.

    Args:
        facts: A text for each name.
        at: Which place of the program this is.
    """
    message = json.dumps([at, dict(facts)], sort_keys=True)
    messages = [json.loads(text) for text in exchange(message, at)]

    places = [place for place, _ in messages]
    if len(set(places)) > 1:
        raise errors.at_different_places(errors.by_process(places))

    all_facts: list[dict[str, str]] = [facts for _, facts in messages]
    differences: list[str] = []
    for name in sorted(set().union(*all_facts)):
        texts = [facts.get(name, "nothing") for facts in all_facts]
        if len({facts.get(name) for facts in all_facts}) > 1:
            differences.append(f"  {name}: {errors.by_process(texts)}")
    raise_if_any(
        errors.DistributedError,
        differences,
        f"The {len(all_facts)} processes differ in\n",
        "\nStart all of them with the same program, arguments, files and packages.",
        separator="\n",
        most=MOST_SHOWN,
    )


def compare_arguments(arguments: Mapping[str, PyTree], at: str) -> None:
    """Raises DistributedError if NumPy arrays or numbers differ beside arrays over processes."""
    if jax.process_count() == 1:
        return

    facts: dict[str, str] = {}
    spans_processes = False
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        dict(arguments), is_leaf=lambda leaf: isinstance(leaf, Object)
    )
    for path, leaf in leaves:
        if isinstance(leaf, Object):
            values = [variable._here()._value for _, variable in iter_variables(leaf)]
            spans_processes |= any(map(_spans_processes, jax.tree.leaves(values)))
        elif isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            name = format_path(plain_path(path)).removeprefix(".")
            facts[name] = array_text(np.asarray(leaf))
        else:
            spans_processes |= _spans_processes(leaf)

    # A program of one process alone is no other's matter.
    if spans_processes:
        compare(facts, at)


def _spans_processes(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _facts_of(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yields names and texts of the parts of a value."""
    if isinstance(value, Variable):
        value = value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

    if isinstance(value, Mapping):
        for key in value:
            yield from _facts_of(value[key], f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _facts_of(item, f"{name}[{index}]")
    elif isinstance(value, (jax.Array, np.ndarray)):
        yield name, array_text(value)
    else:
        yield name, _ADDRESS.sub("", repr(value))


def array_text(array: jax.Array | np.ndarray) -> str:
    """Returns dtype, shape and digest of a local array."""
    return f"{array.dtype}{list(array.shape)} {digest_of(array).hex()}"


def digest_of(array: jax.Array | np.ndarray) -> bytes:
    """Returns 8 bytes that tell the numbers of a local array."""
    if is_prng_key(array):
        array = jax.random.key_data(array)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(content.data, digest_size=8).digest()


# --- exchange -------------------------------------------------------------------------------------


def from_main(value: T, name: str) -> T:
    """Returns the JSON value of the main process in every process."""
    if jax.process_count() == 1:
        return value
    return json.loads(exchange(json.dumps(value), name)[0])


def exchange(text: str, name: str) -> list[str]:
    """Returns the texts of all processes."""
    content = text.encode()
    head = hashlib.sha256(content).digest() + len(content).to_bytes(8, "big")
    heads = [row.tobytes() for row in rows_of_all(head, name)]
    if len(set(heads)) == 1:
        return [text] * len(heads)

    sizes = [int.from_bytes(row[-8:], "big") for row in heads]
    padded_size = 1 << (max(sizes) - 1).bit_length()  # few programs for many lengths
    rows = rows_of_all(content.ljust(padded_size, b"\0"), name)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def rows_of_all(content: bytes, name: str) -> np.ndarray:
    """Returns an array with the bytes of every process, as many of each; raises in time."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise errors.different_device_counts(counts)

    rows: list[np.ndarray] = []
    failures: list[Exception] = []

    def gather_rows() -> None:
        from jax.experimental import multihost_utils

        try:
            rows.append(multihost_utils.process_allgather(np.frombuffer(content, np.uint8)))
        except Exception as error:  # noqa: BLE001 (raised below, in the thread that waits)
            failures.append(error)

    thread = threading.Thread(target=gather_rows, name="shardax-exchange", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if failures:
        raise errors.exchange_failed(name, failures[0]) from failures[0]
    if not rows:
        raise errors.no_answer(name, ANSWER_SECONDS)
    return rows[0]


@contextlib.contextmanager
def noting_other_processes() -> Generator[None]:
    """Adds to errors of JAX at run time what another process may have to do with them."""
    # JAX has one class for all of them, whether another process ended in the middle of a collective
    # or a device is full. Only their English tells, so nothing is decided by it.
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1:
            error.add_note(errors.note_on_other_processes(jax.process_index()))
        raise
