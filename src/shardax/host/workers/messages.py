# SPDX-License-Identifier: Apache-2.0
"""Messages between a worker and its clients.

A *message* is a header and *parts*. The header is JSON: the version of the protocol, a kind, the
number of a call, some facts, and the sizes of the parts. Parts are bytes that only the call itself
looks into. So whoever reads a header runs nobody's code, and knows how much is to come before any
memory is taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardax.host.errors import WorkerMessageError, WorkerProtocolError

VERSION = 1
MOST_HEADER_BYTES = 1 << 20

FROM_CLIENT = frozenset({"hello", "call", "cancel", "drop", "info", "ping", "exit"})
FROM_WORKER = frozenset({"hello", "refused", "started", "result", "error", "info", "pong"})
KINDS = FROM_CLIENT | FROM_WORKER


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: What it is, one of ``KINDS``.
        id: The number of the call that it is about; 0 if of none.
        about: Facts, of JSON values.
        parts: Buffers of bytes.
    """

    kind: str
    id: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Any] = ()

    def header(self) -> bytes:
        """Returns the header."""
        sizes = [memoryview(part).nbytes for part in self.parts]
        fields = {"v": VERSION, "kind": self.kind, "id": self.id, "about": self.about}
        return json.dumps({**fields, "sizes": sizes}).encode()


def check_size(header: bytes, parts: Sequence[Any], limit: int) -> None:
    """Checks that a message may be sent.

    Args:
        header: Its header.
        parts: Its parts.
        limit: The most bytes that all parts together may have.

    Raises:
        WorkerMessageError: If it is too large.
    """
    total = sum(memoryview(part).nbytes for part in parts)
    if total > limit:
        raise WorkerMessageError(
            f"What a call takes to a worker, or brings back, is {total} bytes, and the limit is "
            f"{limit}. Start the worker with a higher one, sx.host.Worker(max_message={total}), or "
            f"keep large values in it: worker.put(value), worker.request(f, keep=True)."
        )
    if len(header) > MOST_HEADER_BYTES:
        raise WorkerMessageError(
            f"What a call takes to a worker, or brings back, has {len(parts)} arrays, more than "
            f"one message can list. Keep it in the worker: worker.request(f, keep=True)."
        )


def read_header(data: bytes, limit: int) -> tuple[Message, list[int]]:
    """Reads a header that came from outside.

    Args:
        data: Its bytes, any bytes at all.
        limit: The most bytes that the parts may have.

    Returns:
        The message without its parts, and their sizes.

    Raises:
        WorkerProtocolError: If it is not a header of this version, or announces too much.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise WorkerProtocolError(f"not a message: {bytes(data[:40])!r}") from None
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        found = fields.get("v") if isinstance(fields, dict) else None
        raise WorkerProtocolError(
            f"a message of version {found!r}; this is version {VERSION}. Start the worker and its "
            f"client with the same shardax."
        )
    kind, number, about = fields.get("kind"), fields.get("id"), fields.get("about")
    sizes = fields.get("sizes")
    if not (isinstance(kind, str) and kind in KINDS and type(number) is int and number >= 0):
        raise WorkerProtocolError(f"a message of unknown kind {kind!r}, number {number!r}")
    if not (isinstance(about, dict) and isinstance(sizes, list) and all(map(_is_count, sizes))):
        raise WorkerProtocolError(f"a {kind} without facts or sizes")
    if sum(sizes) > limit:
        raise WorkerProtocolError(f"a {kind} of {sum(sizes)} bytes; the limit is {limit}")
    return Message(kind, number, about), sizes


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
