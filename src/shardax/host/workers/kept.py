# SPDX-License-Identifier: Apache-2.0
"""Values that stay in a worker, from the side of its clients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shardax._core.errors import ShardaxError
from shardax.host.errors import RemoteValueError
from shardax.host.workers.messages import Message

if TYPE_CHECKING:
    from shardax.host.workers.worker import Worker


def identity(value: Any) -> Any:
    """Returns its argument: the call that puts and gets values."""
    return value


class Remote:
    """Stands for a value that is kept in a worker; made by ``put`` and by calls with ``keep``.

    In arguments of calls to that worker it becomes the value itself, not a copy: a function that
    writes a Module writes the one that is kept. Without a name the value goes with the last
    ``Remote`` of it, and with the connection.

    Attributes:
        worker: Where the value is.
        key: What it is known by there.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> def add(count, step):
        ...     count[...] += step
        >>> with sx.host.Worker() as worker:
        ...     count = worker.put(sx.Variable(jnp.float32(1)))
        ...     worker.submit(add, count, 2).result()
        ...     print(count.get().value)
        3.0
    """

    def __init__(self, worker: Worker, key: int | str, text: str) -> None:
        self.worker = worker
        self.key = key
        self._text = text

    def get(self) -> Any:
        """Returns a copy of the value.

        Raises:
            RemoteValueError: If it is not kept any more.
        """
        return self.worker.submit(identity, self).result()

    def delete(self) -> None:
        """Frees the value in the worker."""
        self.worker.tell(Message("drop", about={"value": self.key}))

    def __del__(self) -> None:
        if isinstance(getattr(self, "key", None), int):
            with contextlib.suppress(ShardaxError):
                self.delete()

    def __reduce__(self) -> Any:
        raise RemoteValueError(
            f"{self!r} cannot be pickled or copied: it stands for a value in a worker. "
            f"Send the value, remote.get(), or keep it under a name, worker.put(value, name='...'),"
            f" and connect to the worker there: worker.value('...')."
        )

    def __repr__(self) -> str:
        return f"Remote({self.key!r}: {self._text})"
