# SPDX-License-Identifier: Apache-2.0
"""``Worker``: a process that keeps compiled functions and values on devices, as an executor.

Calls run one after the other, in the process's main thread, whoever sends them. What a function is
given and returns is copied; what is *kept* stays there, and a ``Remote`` stands for it.
"""

from __future__ import annotations

import concurrent.futures
import ipaddress
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardax.host.errors import WorkerConfigError, WorkerCrashedError
from shardax.host.workers.encoding import decode, encode_arguments
from shardax.host.workers.functions import describe
from shardax.host.workers.futures import PendingCall, WorkerFuture
from shardax.host.workers.kept import Remote, identity
from shardax.host.workers.link import Link
from shardax.host.workers.messages import Message
from shardax.host.workers.origins import (
    Address,
    GivenAddress,
    NamedProcess,
    Origin,
    OwnProcess,
    ProcessOptions,
)
from shardax.host.workers.server import LEAST_KEY_BYTES

RETRIES = 2  # how often a call marked idempotent is run again
INFO_SECONDS = 10.0


class Worker(concurrent.futures.Executor):
    """A process that stays, and runs calls for any number of clients.

    It takes over the settings of this process (platform, virtual devices, 64 bits, the compilation
    cache, ...) as ``configure`` shows them, and its ``sys.path``. Whoever has the key can run any
    code in it. If it crashes it is started anew, without its values and functions.

    Args:
        name: With a name the worker lives on when the program ends, until nobody has been connected
            for ``idle_timeout`` seconds, and every program of this user that asks for the name gets
            it.
        host: None listens at a Unix socket that only this user can open; ``"127.0.0.1"`` at TCP.
        port: Of TCP; 0 takes a free one.
        beyond_loopback: Allows other hosts than the loopback, where all that is sent, though not
            the key, can be read by the network.
        authkey: The key, 16 bytes or more; random by default.
        configure: Arguments of ``shardax.configure`` for the process, over the settings of this
            one.
        env: Environment variables to set in it.
        functions: How many functions it keeps; the least recently used one goes, and what was
            compiled for it.
        max_message: The most bytes of a call's arguments, and of its result.
        timeout: Seconds that a call may run, unless it says otherwise; None for ever.
        kill_after: Seconds after which a call that was interrupted, and goes on, takes the process
            down; None never.
        heartbeat: Seconds between pings. A process that answers none of four is killed.
        restarts: How many crashes in a row it is started again after.
        idle_timeout: Seconds without clients and calls after which it ends; an hour with a name.
        start_timeout: Seconds that it may take to start.
        log: File to which all that it prints is added, and what libraries write on the way; None:
            where this process prints. One with a name has a log beside its key.

    Attributes:
        address: Where it listens: the path of a socket, or host and port.
        authkey: Its key.

    Raises:
        WorkerConfigError: If options do not fit.
        WorkerStartError: If the process does not start.

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

    address: Address
    authkey: bytes

    def __init__(
        self,
        *,
        name: str | None = None,
        host: str | None = None,
        port: int = 0,
        beyond_loopback: bool = False,
        authkey: bytes | None = None,
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
        _check_positive(
            functions=functions, max_message=max_message, timeout=timeout, heartbeat=heartbeat,
            kill_after=kill_after, idle_timeout=idle_timeout, start_timeout=start_timeout,
        )  # fmt: skip
        if host is not None:
            _check_host(host, beyond_loopback)
        if name is not None and idle_timeout is None:
            idle_timeout = 3600.0
        how = ProcessOptions(
            {
                "family": "AF_UNIX" if host is None else "AF_INET",
                "host": host,
                "port": port,
                "functions": functions,
                "max_message": max_message,
                "kill_after": kill_after,
                "idle_timeout": idle_timeout,
            },
            dict(configure or {}),
            dict(env or {}),
            start_timeout,
            None if log is None else os.fspath(log),
        )
        if name is None:
            key = secrets.token_bytes(32) if authkey is None else _checked_key(authkey)
            origin: Origin = OwnProcess(how, key)
        elif authkey is None and log is None:
            origin = NamedProcess(name, how)
        else:
            raise WorkerConfigError(
                "A worker with a name has a key and a log of its own: omit authkey= and log=."
            )
        self._open(origin, max_message, heartbeat, restarts, timeout)

    @classmethod
    def connect(
        cls,
        address: Address,
        authkey: bytes,
        *,
        max_message: int = 4 << 30,
        timeout: float | None = None,
        heartbeat: float = 5.0,
    ) -> Worker:
        """Connects to a worker that another process started.

        Args:
            address: Its ``address``.
            authkey: Its ``authkey``.
            max_message: As for ``Worker``.
            timeout: As for ``Worker``.
            heartbeat: As for ``Worker``.

        Returns:
            A client of it; ``shutdown`` ends the connection only.

        Raises:
            WorkerAuthenticationError: If it has another key.
            WorkerCrashedError: If nothing listens there.
        """
        _check_positive(max_message=max_message, timeout=timeout, heartbeat=heartbeat)
        worker = cls.__new__(cls)
        origin = GivenAddress(address, _checked_key(authkey))
        worker._open(origin, max_message, heartbeat, 0, timeout)
        return worker

    def _open(
        self,
        origin: Origin,
        max_message: int,
        heartbeat: float,
        restarts: int,
        timeout: float | None,
    ) -> None:
        self._origin = origin
        self._max_message = max_message
        self._heartbeat = heartbeat
        self._restarts = self._restarts_left = restarts
        self._timeout = timeout
        self._changed = threading.Condition()
        self._closing = False
        self._broken: Exception | None = None
        self._expected = False  # whether the loss of the connection was asked for
        self._finalizer = weakref.finalize(self, origin.close)
        with self._changed:
            try:
                self._link = self._connect()
            except BaseException:
                self._closing = True  # a connection that was refused is not opened again
                self._finalizer()
                raise

    def _connect(self) -> Link:
        lost = weakref.WeakMethod(self._lost)

        def on_lost(link: Link, calls: list[PendingCall], why: str) -> None:
            method = lost()
            if method is not None:
                method(link, calls, why)

        def connect(address: Address, key: bytes) -> Link:
            self.address, self.authkey = address, key
            return Link(address, key, self._max_message, self._heartbeat, on_lost)

        return self._origin.open(connect)

    # --- calls -----------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Has a function called in the worker, as executors do.

        Args:
            fn: The function: one that can be imported, a ``jit`` of it, or, with cloudpickle
                installed, any other.
            *args: Its arguments. A ``Remote`` becomes the value it stands for.
            **kwargs: Likewise.

        Returns:
            The future of its result.

        Raises:
            WorkerPickleError: If something cannot be sent.
            WorkerCrashedError: If the worker has crashed too often.
        """
        return self.request(fn, args, kwargs)

    def request(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        idempotent: bool = False,
        keep: bool | str = False,
    ) -> WorkerFuture:
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
            WorkerPickleError: If something cannot be sent.
            WorkerMessageError: If it is too large.
            WorkerCrashedError: If the worker has crashed too often.
        """
        _check_positive(timeout=timeout)
        timeout = self._timeout if timeout is None else timeout
        form = describe(function)
        parts = [*form.parts, *encode_arguments(args, kwargs or {}, self._refer)]
        about = {
            "name": form.name,
            "key": form.key,
            "modules": form.modules,
            "function_parts": len(form.parts),
            "timeout": timeout,
            "idempotent": idempotent,
            "keep": keep is not False,
            "as": keep if isinstance(keep, str) else None,
        }
        call = PendingCall(
            name=form.name,
            message=Message("call", about=about, parts=parts),
            future=WorkerFuture(),
            timeout=timeout,
            retries=RETRIES if idempotent else 0,
            receive=self._receive if keep is False else self._receive_kept,
            keeper=self,
        )
        self._send(call)
        return call.future

    def _send(self, call: PendingCall) -> None:
        while True:
            with self._changed:
                if self._closing:
                    raise RuntimeError("This worker was shut down: cannot schedule new futures.")
                if self._broken is not None:
                    raise WorkerCrashedError(f"{self._broken}") from self._broken
                if self._link.submit(call):
                    return
                self._changed.wait()  # until the worker runs again

    def _receive(self, message: Message) -> Any:
        self._restarts_left = self._restarts
        return decode(message.parts)

    def _receive_kept(self, message: Message) -> Remote:
        self._restarts_left = self._restarts
        return Remote(self, message.about["value"], message.about["text"])

    def _refer(self, obj: Any) -> Any:
        if type(obj) is not Remote:
            return None
        if obj.worker is not self:
            raise WorkerConfigError(
                f"{obj} is kept in another worker than the one that is called. Fetch it, "
                f"value.get(), or call its own worker, value.worker."
            )
        return obj.key

    # --- values ----------------------------------------------------------------------------------

    def put(self, value: Any, name: str | None = None) -> Remote:
        """Copies a value into the worker, arrays onto its devices, and keeps it there.

        Args:
            value: Anything that can be sent: arrays, Modules, trees of them.
            name: Keeps it under that name, for other clients too, until it is deleted.

        Returns:
            What stands for it in calls.
        """
        return self.request(identity, (value,), keep=True if name is None else name).result()

    def value(self, name: str) -> Remote:
        """Returns what stands for a value that was kept under a name."""
        return Remote(self, name, "kept by name")

    def info(self) -> dict[str, Any]:
        """Returns what the worker says of itself: functions, names of values, clients, its pid.

        Raises:
            WorkerCrashedError: If it does not answer.
        """
        return self._link.ask(INFO_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether calls can be made: it is neither shut down nor beyond starting again."""
        return not self._closing and self._broken is None

    def tell(self, message: Message) -> None:
        """Sends a message that nothing waits for."""
        self._link.tell(message)

    # --- life ------------------------------------------------------------------------------------

    def _lost(self, link: Link, calls: list[PendingCall], why: str) -> None:
        """Fails or repeats the calls of a connection that has ended, and opens another one."""
        with self._changed:
            closing = self._closing or not self._finalizer.alive  # or the program ends
            expected = self._expected
        ending = "it was shut down" if closing else self._origin.ending()
        again = [call for call in calls if call.retries and not (closing or expected)]
        for call in calls:
            if call not in again:
                call.future.end(error=_crashed(call, f"{why}; {ending}"))
        with self._changed:
            self._expected = False
            if not closing:
                self._reopen(f"{why}; {ending}", expected)
            broken = self._broken or self._closing
        for call in again:
            call.retries -= 1
            try:
                if broken:
                    raise _crashed(call, f"{why}; {ending}")
                self._send(call)
            except Exception as error:  # noqa: BLE001 (it is the call's)
                call.future.end(error=error)

    def _reopen(self, why: str, expected: bool) -> None:
        try:
            if not (expected or self._restarts_left):
                raise WorkerCrashedError(
                    f"The worker is lost ({why}) and was not started again: it crashed "
                    f"{self._restarts + 1} times in a row. Make a new one."
                )
            self._restarts_left -= 0 if expected else 1
            self._link = self._connect()
        except Exception as error:  # noqa: BLE001 (raised by every later call)
            self._broken = error
        self._changed.notify_all()

    def restart(self) -> None:
        """Ends the process and starts it anew, without its functions and values.

        Calls without a result fail.

        Raises:
            WorkerCrashedError: If it does not start again.
        """
        with self._changed:
            link, self._expected = self._link, True
        self._end_process(link)
        with self._changed:
            while self._link is link and self._broken is None:
                self._changed.wait()
            if self._broken is not None:
                raise WorkerCrashedError(f"{self._broken}") from self._broken

    def _end_process(self, link: Link) -> None:
        link.tell(Message("exit"))
        self._origin.close()
        link.wait_for_end()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends this client, and the process if this client started it and it has no name.

        Args:
            wait: Whether to return only when all calls have a result and the process has ended.
            cancel_futures: Whether to cancel the calls that have not begun.
        """
        with self._changed:
            self._closing = True
            calls = self._link.pending()
        if cancel_futures:
            for call in calls:
                call.future.cancel()
        if wait:
            self._finish(calls)
        else:
            threading.Thread(target=self._finish, args=[calls], daemon=True).start()

    def _finish(self, calls: Sequence[PendingCall]) -> None:
        concurrent.futures.wait([call.future for call in calls])
        self._link.hang_up("it was shut down")
        self._finalizer()

    def stop(self) -> None:
        """Ends the process at once, also one with a name or that another process started."""
        with self._changed:
            self._closing = True
        self._end_process(self._link)
        self._finalizer()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "shut down" if self._closing else "lost"
        return f"Worker({self.address!r}, {state})"


def _crashed(call: PendingCall, why: str) -> WorkerCrashedError:
    when = "while it ran" if call.started else "before it was known to have begun"
    again = (
        "It has been run again as often as it may."
        if call.message.about.get("idempotent")
        else "It was not run again, since it is not marked idempotent. A function that may be run "
        "again from its beginning is marked so: worker.request(f, args, idempotent=True)."
    )
    return WorkerCrashedError(f"The worker of {call.name} was lost {when}: {why}. {again}")


def _checked_key(key: Any) -> bytes:
    if not isinstance(key, bytes) or len(key) < LEAST_KEY_BYTES:
        raise WorkerConfigError(
            f"The key of a worker is at least {LEAST_KEY_BYTES} bytes, and there is "
            f"{'one of ' + str(len(key)) if isinstance(key, bytes) else type(key).__name__}. "
            f"Omit authkey= for a random one, and pass on worker.authkey."
        )
    return key


def _check_host(host: str, beyond_loopback: bool) -> None:
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback or beyond_loopback):
        raise WorkerConfigError(
            f"A worker at {host!r} can be reached from other machines. Its key keeps others from "
            f"running code, but what is sent is not encrypted. Listen at 127.0.0.1 and forward the "
            f"port through ssh, or say that the network is trusted: beyond_loopback=True."
        )


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise WorkerConfigError(f"{name}={value!r} is not a positive number.")
