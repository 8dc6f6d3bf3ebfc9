# SPDX-License-Identifier: Apache-2.0
"""Executors in a process with compiled functions and values on devices."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import importlib.util
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardax.extend import Options, PyTree
from shardax.host import connections, errors
from shardax.host.calls import check_size, decode, name_of, pack, run_packed

RETRIES = 2  # how often a call marked idempotent is run again
INFO_SECONDS = 10.0


def _identity(value: object):
    return value


_OPTIONS = Options(errors.WorkerError)


class Worker(concurrent.futures.Executor):
    """A lasting process for calls of any number of clients.

    It takes over the settings of this process (platform, virtual devices, 64 bits, the compilation
    cache, ...) as ``configure`` shows them, and its ``sys.path``. It listens at a port of the
    loopback, by TLS in which both sides have to show the same credentials; whoever has those can
    run any code in it. If it crashes it is started anew, without its values and functions.

    Needs the packages of ``pip install 'shardax[worker]'``.

    Args:
        name: With a name the worker outlives the program, until nobody has been connected for
            ``idle_timeout`` seconds, and every program of this user that asks for the name gets
            it.
        configure: Arguments of ``shardax.configure`` for the process, over the settings of this
            one.
        env: Environment variables to set in it.
        functions: How many functions it keeps; the least recently used one goes, and what was
            compiled for it.
        max_message: The most bytes of a call's arguments, and of its result.
        timeout: Seconds that a call may run, unless it says otherwise; None for no limit.
        kill_after: Seconds after which a call that was interrupted, and goes on, takes the process
            down; None never.
        heartbeat: Seconds between pings. A process that answers none for four times as long is
            killed.
        restarts: How many crashes in a row it is started again after.
        idle_timeout: Seconds without clients and calls after which it ends; an hour with a name.
        start_timeout: Seconds that it may take to start.
        log: File to which all that it prints is added, and what libraries write on the way; None:
            where this process prints. One with a name has a log beside its credentials.

    Attributes:
        address: Where it listens, ``"tls://127.0.0.1:<port>"``.
        authkey: Its credentials, a certificate and a private key in PEM.

    Raises:
        WorkerError: If options do not fit, or if the process does not start, or a package is not
            installed.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> def norm(x):
        ...     return jnp.sqrt((x * x).sum())
        >>> with sx.host.Worker() as worker:
        ...     print(worker.submit(sx.jit(norm), jnp.array([3.0, 4.0])).result())
        ...     print(list(worker.map(abs, [-1, 2])))
        5.0
        [1, 2]
    """

    address: str
    authkey: bytes

    def __init__(
        self,
        *,
        name: str | None = None,
        configure: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        functions: int = 128,
        max_message: int = 4 << 30,
        timeout: float | None = None,
        kill_after: float | None = 30.0,
        heartbeat: float = 5.0,
        restarts: int = 3,
        idle_timeout: float | None = None,
        start_timeout: float = 120.0,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        _OPTIONS.positive(
            functions=functions, max_message=max_message, timeout=timeout, heartbeat=heartbeat,
            kill_after=kill_after, idle_timeout=idle_timeout, start_timeout=start_timeout,
        )  # fmt: skip

        if name is not None and idle_timeout is None:
            idle_timeout = 3600.0
        options = {
            "functions": functions, "max_message": max_message, "kill_after": kill_after,
            "idle_timeout": idle_timeout, "configure": copy.deepcopy(dict(configure or {})),
            "env": dict(env or {}), "start_timeout": start_timeout,
            "log": None if log is None else os.fspath(log),
        }  # fmt: skip

        if name is None:
            origin = connections.OwnProcess(options)
        elif log is None:
            origin = connections.NamedProcess(name, options)
        else:
            raise errors.WorkerError("A worker with a name has a log of its own: omit log=.")
        self._open(origin, heartbeat, restarts, timeout)

    @classmethod
    def connect(
        cls, address: str, authkey: bytes, *, timeout: float | None = None, heartbeat: float = 5.0
    ) -> Worker:
        """Connects to a worker started by another process of this machine.

        Args:
            address: Its ``address``.
            authkey: Its ``authkey``.
            timeout: As for ``Worker``.
            heartbeat: As for ``Worker``.

        Returns:
            A client of it; ``shutdown`` ends the connection only.

        Raises:
            WorkerAuthenticationError: If it has other credentials.
            WorkerCrashedError: If nothing listens there.
        """
        _OPTIONS.positive(timeout=timeout, heartbeat=heartbeat)
        _OPTIONS.instance("authkey", authkey, bytes, "bytes, such as worker.authkey")
        worker = cls.__new__(cls)
        worker._open(connections.GivenAddress(address, authkey), heartbeat, 0, timeout)
        return worker

    def _open(
        self,
        origin: connections.GivenAddress,
        heartbeat: float,
        restarts: int,
        timeout: float | None,
    ) -> None:
        packages = ("distributed", "cryptography")
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            raise errors.WorkerError(
                f"A worker needs {' and '.join(missing)}: pip install 'shardax[worker]'."
            )

        self._origin = origin
        self._process_id = os.getpid()
        self._heartbeat = heartbeat
        self._restarts = self._restarts_left = restarts
        self._timeout = timeout

        self._changed = threading.Condition()
        self._closing = False
        self._broken: Exception | None = None
        self._expected: connections.Connection | None = None  # whose loss was asked for

        self._finalizer = weakref.finalize(self, _close, origin, self._process_id)
        with self._changed:
            try:
                self._connection = self._connect()
            except BaseException:
                self._closing = True  # a connection that was refused is not opened again
                self._finalizer()
                raise

    def _connect(self) -> connections.Connection:
        lost = weakref.WeakMethod(self._lost)

        def connect(address: str, credentials: bytes) -> connections.Connection:
            self.address, self.authkey = address, credentials
            return connections.Connection(address, credentials, self._heartbeat, lost)

        return self._origin.open(connect)

    # --- calls ---

    def submit(
        self, fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
    ) -> connections.WorkerFuture:
        """Has a function called in the worker, as executors do.

        Args:
            fn: The function: one that can be imported, a ``jit`` of it, or, with cloudpickle
                installed, any other.
            *args: Its arguments. A ``Remote`` becomes the value it stands for.
            **kwargs: Likewise.

        Returns:
            The future of its result.

        Raises:
            WorkerError: If something cannot be sent.
            WorkerCrashedError: If the worker has crashed too often.
        """
        return self.request(fn, args, kwargs)

    def request(
        self,
        function: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
        idempotent: bool = False,
        keep: bool | str = False,
    ) -> connections.WorkerFuture:
        """Has a function called in the worker, with options.

        Args:
            function: As for ``submit``.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            timeout: Seconds that it may run, not counting those in the queue.
            idempotent: Whether it may be run again, from its beginning, if the worker crashes.
            keep: Whether the result stays in the worker: the future's result is then a ``Remote``.
                A text keeps it under that name, for other clients too, until it is deleted.

        Returns:
            The future of its result.

        Raises:
            WorkerError: If something cannot be sent, or if it is too large.
            WorkerCrashedError: If the worker has crashed too often.
        """
        from distributed.protocol.serialize import to_serialize

        errors.require_process(self._process_id)
        _OPTIONS.positive(timeout=timeout)

        head, parts = pack(function, args, kwargs or {}, self._refer)
        check_size(parts, self._connection.max_message)

        def receive(reply: dict[str, Any]):
            self._restarts_left = self._restarts
            if keep is False:
                return decode(reply["parts"])
            return Remote(self, reply["kept"], reply["text"])

        request = {
            "name": name_of(function),
            "head": head,
            "parts": to_serialize(parts),
            "timeout": self._timeout if timeout is None else timeout,
            "keep": keep,
        }

        # `receive` refers to this worker, which so stays until there is a result.
        call = connections.WorkerFuture(request, receive, RETRIES if idempotent else 0)
        self._send(call)
        return call

    def _send(self, call: connections.WorkerFuture) -> None:
        while True:
            with self._changed:
                self._check_is_running()
                if self._connection.submit(call):
                    return
                self._changed.wait()  # until the worker runs again

    def _refer(self, obj: object):
        if type(obj) is not Remote:
            return None
        if obj.worker is not self:
            raise errors.WorkerError(
                f"{obj} is kept in another worker than the one that is called. Fetch it, "
                f"value.get(), or call its own worker, value.worker."
            )
        return obj.key

    # --- values ---

    def put(self, value: object, name: str | None = None) -> Remote:
        """Copies a value into the worker, arrays onto its devices.

        Args:
            value: Anything that can be sent: arrays, Modules, trees of them.
            name: Keeps it under that name, for other clients too, until it is deleted.

        Returns:
            What stands for it in calls.
        """
        return self.request(_identity, (value,), keep=True if name is None else name).result()

    def value(self, name: str) -> Remote:
        """Returns a reference to a value kept under a name."""
        return Remote(self, name, "kept by name")

    def info(self) -> dict[str, Any]:
        """Returns the worker's pid, clients, running call, functions and named values.

        Raises:
            WorkerCrashedError: If it does not answer.
        """
        errors.require_process(self._process_id)
        info = self._connection.ask("info", INFO_SECONDS)
        return {**info, "functions": list(info["functions"]), "values": list(info["values"])}

    @property
    def is_running(self) -> bool:
        """Whether calls can be made."""
        is_own = os.getpid() == self._process_id
        return is_own and not self._closing and self._broken is None

    # --- life cycle ---

    def _lost(
        self, connection: connections.Connection, calls: list[connections.WorkerFuture], reason: str
    ) -> None:
        """Fail or repeat the calls of a lost connection, and reconnect."""
        with self._changed:
            closing = self._closing or not self._finalizer.alive  # or the program ends
            expected = connection is self._expected
        reason = f"{reason}; {'it was shut down' if closing else self._origin.ending()}"

        retried = [call for call in calls if call.retries_left and not (closing or expected)]
        for call in calls:
            if call not in retried:
                call.lose(reason)

        with self._changed:
            if not (closing or self._closing):  # or it was shut down meanwhile
                self._reopen(reason, expected)
            self._changed.notify_all()
            broken = self._broken or self._closing

        for call in retried:
            call.retries_left -= 1
            try:
                if broken:
                    call.lose(reason)
                else:
                    self._send(call)
            except Exception as error:  # noqa: BLE001 (it is the call's)
                call.fail(error)

    def _reopen(self, why: str, expected: bool) -> None:
        try:
            if not (expected or self._restarts_left):
                raise errors.WorkerCrashedError(
                    f"The worker is lost ({why}) and was not started again: it crashed "
                    f"{self._restarts + 1} times in a row. Make a new one."
                )
            self._restarts_left -= 0 if expected else 1
            self._connection = self._connect()
        except Exception as error:  # noqa: BLE001 (raised by every later call)
            self._broken = error

    def restart(self) -> None:
        """Ends the process and starts it anew, without its functions and values.

        Calls without a result fail.

        Raises:
            WorkerCrashedError: If it does not start again.
            RuntimeError: If it was shut down.
        """
        errors.require_process(self._process_id)
        with self._changed:
            self._check_is_running()
            connection = self._expected = self._connection

        self._end_process(connection)
        with self._changed:
            while self._connection is connection and self.is_running:
                self._changed.wait()
            self._check_is_running()

    def _check_is_running(self) -> None:
        if self._closing:
            raise RuntimeError("This worker was shut down. Make a new one: sx.host.Worker().")
        if self._broken is not None:
            raise errors.WorkerCrashedError(f"{self._broken}") from self._broken

    def _end_process(self, connection: connections.Connection) -> None:
        with contextlib.suppress(errors.WorkerCrashedError):
            connection.ask("stop_process", INFO_SECONDS)
        with self._changed:
            if self._connection is connection:  # else it crashed, and the next process stays
                self._origin.close()
        connection.wait_for_end()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends this client, and its process if unnamed.

        Args:
            wait: Whether to return only when all calls have a result and the process has ended.
            cancel_futures: Whether to cancel the calls that have not begun.
        """
        if os.getpid() != self._process_id:
            return  # such as where a fork leaves the ``with`` block of its parent

        with self._changed:
            self._closing = True
            calls = self._connection.pending()

        if cancel_futures:
            for call in calls:
                call.cancel()

        if wait:
            self._finish(calls)
        else:
            threading.Thread(target=self._finish, args=[calls], daemon=True).start()

    def _finish(self, calls: Sequence[connections.WorkerFuture]) -> None:
        concurrent.futures.wait(calls)
        self._connection.close()
        self._finalizer()

    def stop(self) -> None:
        """Ends the process at once, also one with a name."""
        errors.require_process(self._process_id)
        with self._changed:
            self._closing = True
        self._end_process(self._connection)
        self._finalizer()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "shut down" if self._closing else "lost"
        if os.getpid() != self._process_id:
            state = f"of process {self._process_id}"
        return f"Worker({self.address!r}, {state})"


def _close(origin: connections.GivenAddress, process_id: int) -> None:
    """Ends the process of a worker, but not from a fork of its owner."""
    if os.getpid() == process_id:
        origin.close()


class Remote:
    """A reference to a value kept in a worker.

    ``put`` and calls with ``keep`` return it. In arguments of calls to that worker it becomes the
    value itself, not a copy: a function that writes a Module writes the one that is kept. Without a
    name the value is dropped with the last ``Remote`` of it, and with the connection.

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

    def get(self) -> PyTree:
        """Returns a copy of the value.

        Raises:
            WorkerError: If it is not kept any more.
        """
        return self.worker.submit(_identity, self).result()

    def delete(self) -> None:
        """Frees the value in the worker."""
        errors.require_process(self.worker._process_id)
        self.worker._connection.drop(self.key)

    def __del__(self) -> None:
        is_unnamed = isinstance(getattr(self, "key", None), int)
        if is_unnamed and os.getpid() == self.worker._process_id:
            self.delete()

    def __reduce__(self) -> Any:
        raise errors.WorkerError(
            f"{self!r} cannot be pickled or copied: it stands for a value in a worker. "
            f"Send the value, remote.get(), or keep it under a name, worker.put(value, name='...'),"
            f" and connect to the worker there: worker.value('...')."
        )

    def __repr__(self) -> str:
        return f"Remote({self.key!r}: {self._text})"


# --- functions that run elsewhere ---

_lock = threading.Lock()
_default: list[Worker] = []


def _forget_default() -> None:
    """Lets a fork start a worker of its own."""
    global _lock
    _lock = threading.Lock()  # which another thread may have held
    _default.clear()


os.register_at_fork(after_in_child=_forget_default)


def default_worker() -> Worker:
    """Worker of functions without an executor, started when first needed."""
    with _lock:
        if not _default or not _default[0].is_running:
            _default[:] = [Worker()]
        return _default[0]


class RemoteFunction:
    """A function with its calls run elsewhere; made by ``remote``.

    Attributes:
        function: The function itself. ``__wrapped__`` is only shown.
        executor: What runs it; None is a worker of this process's own, started when first needed.

    Example:
        >>> import shardax as sx
        >>> total = sx.host.remote(sum)  # total([1, 2]) is 3; the first call starts the worker
        >>> print(total)
        RemoteFunction(sum, a worker of this process)
    """

    # Apart from what is only shown, which ``functools.wraps`` may overwrite.
    __slots__ = ("__dict__", "__weakref__", "_options", "executor", "function")

    def __init__(
        self, function: Callable[..., PyTree], executor: Any, options: Mapping[str, Any]
    ) -> None:
        self.function = self.__wrapped__ = function
        self.executor = executor
        self._options = options  # of `Worker.request`

    def __call__(self, /, *args: object, **kwargs: object) -> PyTree:
        """Calls the function there, and waits for its result."""
        return self.submit(*args, **kwargs).result()

    def submit(self, /, *args: PyTree, **kwargs: PyTree) -> concurrent.futures.Future[Any]:
        """Has the function called there.

        Args:
            *args: Its arguments.
            **kwargs: Its arguments.

        Returns:
            The future of its result.

        Raises:
            WorkerError: If something cannot be sent.
        """
        executor = default_worker() if self.executor is None else self.executor
        if isinstance(executor, Worker):
            return executor.request(self.function, args, kwargs, **self._options)
        head, parts = pack(self.function, args, kwargs)
        return _unpacked(executor.submit(run_packed, head, *map(bytes, parts)))

    def __repr__(self) -> str:
        executor = "a worker of this process" if self.executor is None else repr(self.executor)
        return f"RemoteFunction({name_of(self.function)}, {executor})"


def remote(
    f: Callable[..., object] | None = None,
    /,
    *,
    executor: object = None,
    timeout: float | None = None,
    idempotent: bool = False,
    keep: bool | str = False,
) -> Any:
    """Makes a function run in a worker or another executor.

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
        WorkerError: If an option is for workers only, and the executor is not one.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> with sx.host.Worker() as worker:
        ...     @sx.host.remote(executor=worker, timeout=60.0)
        ...     @sx.jit
        ...     def double(x):
        ...         return x * 2
        ...     print(double(jnp.arange(3)), double.submit(jnp.arange(2)).result())
        [0 2 4] [0 2]
    """
    options = {"timeout": timeout, "idempotent": idempotent, "keep": keep}
    if f is None:
        return functools.partial(remote, executor=executor, **options)

    worker_options = [name for name, value in options.items() if value not in (None, False)]
    if not (executor is None or isinstance(executor, Worker)):
        if worker_options:
            raise errors.WorkerError(
                f"{', '.join(worker_options)} of the remote {name_of(f)} is for sx.host.Worker "
                f"only, and the executor is a {type(executor).__name__}. Give that its own option, "
                f"such as client.get_executor(retries=2) of dask.distributed."
            )
        is_executor = callable(getattr(executor, "submit", None))
        expected = "an executor, with submit(f, *args)"
        remedy = "Pass sx.host.Worker(), or with dask.distributed client.get_executor()."
        _OPTIONS.check("executor", executor, is_executor, expected, remedy)

    return RemoteFunction(f, executor, options)


def _unpacked(packed: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
    """A future of the result itself; cancelling it cancels the other."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if done.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(decode(done.result()))
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            future.set_exception(error)

    def cancel(unpacked: concurrent.futures.Future[Any]) -> None:
        if unpacked.cancelled():
            packed.cancel()

    future.add_done_callback(cancel)
    packed.add_done_callback(settle)
    return future
