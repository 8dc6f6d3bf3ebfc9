# SPDX-License-Identifier: Apache-2.0
"""``remote``: a function that runs elsewhere, on whatever executor there is."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

from shardax.host.errors import WorkerConfigError
from shardax.host.workers.functions import name_of
from shardax.host.workers.packed import pack, run_packed, unpack
from shardax.host.workers.worker import Worker

_lock = threading.Lock()
_default: list[Worker] = []


def default_worker() -> Worker:
    """Returns the worker of functions that name no executor, started when first asked for."""
    with _lock:
        if not _default or not _default[0].is_running:
            _default[:] = [Worker()]
        return _default[0]


class RemoteFunction:
    """A function whose calls run elsewhere; made by ``remote``.

    Attributes:
        __wrapped__: The function itself.
        executor: What runs it; None is a worker of this process's own, started when first needed.

    Example:
        >>> import shardax as sx
        >>> with sx.host.Worker() as worker:
        ...     total = sx.host.remote(sum, executor=worker)
        ...     print(type(total).__name__, total([1, 2]), total.submit([3, 4]).result())
        RemoteFunction 3 7
    """

    def __init__(
        self,
        function: Callable[..., Any],
        executor: Any,
        timeout: float | None,
        idempotent: bool,
        keep: bool | str,
    ) -> None:
        self.__wrapped__ = function
        self.executor = executor
        self._options: dict[str, Any] = {
            "timeout": timeout,
            "idempotent": idempotent,
            "keep": keep,
        }

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function there, and waits for its result."""
        return self.submit(*args, **kwargs).result()

    def submit(self, /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Has the function called there.

        Args:
            *args: Its arguments.
            **kwargs: Its arguments.

        Returns:
            The future of its result.

        Raises:
            WorkerPickleError: If something cannot be sent.
        """
        executor = default_worker() if self.executor is None else self.executor
        if isinstance(executor, Worker):
            return executor.request(self.__wrapped__, args, kwargs, **self._options)
        return _unpacked(executor.submit(run_packed, *pack(self.__wrapped__, args, kwargs)))

    def __repr__(self) -> str:
        where = "a worker of this process" if self.executor is None else repr(self.executor)
        return f"RemoteFunction({name_of(self.__wrapped__)}, {where})"


def remote(
    f: Callable[..., Any] | None = None,
    /,
    *,
    executor: Any = None,
    timeout: float | None = None,
    idempotent: bool = False,
    keep: bool | str = False,
) -> Any:
    """Makes a function run elsewhere: in a worker, or wherever another executor runs it.

    An executor is anything whose ``submit(f, *args)`` returns a ``concurrent.futures`` future:
    ``shardax.host.Worker``, ``client.get_executor()`` of ``dask.distributed``,
    ``concurrent.futures.ProcessPoolExecutor``. Every process that calls run in keeps the functions,
    and with them what JAX compiled. Those need shardax installed, of the same version.

    Args:
        f: The function; without it, a decorator is returned.
        executor: What runs it; None is a worker of this process's own.
        timeout: Seconds that a call may run. For workers only, as the options below.
        idempotent: Whether a call may be run again if the worker crashes.
        keep: Whether results stay in the worker, as ``Worker.request`` says.

    Returns:
        A function of the same arguments; its ``submit`` returns futures.

    Raises:
        WorkerConfigError: If an option is for workers only, and the executor is not one.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> with sx.host.Worker() as worker:
        ...     @sx.host.remote(executor=worker, timeout=60.0)
        ...     @sx.jit
        ...     def double(x):
        ...         return x * 2
        ...     print(double(jnp.arange(3)))
        [0 2 4]
    """
    if f is None:
        return functools.partial(
            remote, executor=executor, timeout=timeout, idempotent=idempotent, keep=keep
        )
    options = {"timeout": timeout, "idempotent": idempotent, "keep": keep}
    given = [name for name, value in options.items() if value not in (None, False)]
    if not (executor is None or isinstance(executor, Worker)):
        if given:
            raise WorkerConfigError(
                f"{', '.join(given)} of sx.host.remote({name_of(f)}) is for sx.host.Worker only, "
                f"and the executor is a {type(executor).__name__}. Give that its own option, such "
                f"as client.get_executor(retries=2) of dask.distributed, or wait for the future "
                f"with result(timeout)."
            )
        if not callable(getattr(executor, "submit", None)):
            raise WorkerConfigError(
                f"{executor!r} is no executor: it has no submit(f, *args). Pass sx.host.Worker(), "
                f"or with dask.distributed client.get_executor()."
            )
    return RemoteFunction(f, executor, timeout, idempotent, keep)


def _unpacked(packed: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
    """A future of the result itself; cancelling it cancels the other."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if done.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(unpack(done.result()))
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            future.set_exception(error)

    def cancel(ours: concurrent.futures.Future[Any]) -> None:
        if ours.cancelled():
            packed.cancel()

    future.add_done_callback(cancel)
    packed.add_done_callback(settle)
    return future
