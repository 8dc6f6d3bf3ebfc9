# SPDX-License-Identifier: Apache-2.0
"""Placement of batches and of values in host memory, and prefetching.

While a step runs, one thread reads the next host batch and starts its transfer, so the devices do
not wait for the disk. The source therefore stands ahead of what the loop has taken;
``Prefetch.state()`` is the position of what was taken, which is the one that belongs in a
checkpoint.

A source may fill one buffer anew for each batch. So batches are copied on the host before they are
transferred: devices read NumPy arrays later than ``device_put`` returns, and CPUs compute in them.

The thread is a daemon, because a source may wait for ever, and neither a request to stop nor the
end of the interpreter is to wait with it. The thread also rewinds the source, as its last act: so
does one that was left waiting, should its wait end. Until then nobody else may read the source.

``shard(..., memory_kind={sx.OptState: "pinned_host"})`` keeps an optimizer's state out of the
devices' own memory. JAX computes with values of one memory only, so a program brings such values to
the device first (``in_device_memory``) and returns them afterwards; the compiler sees when each is
needed.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax import iter_variables
from shardax.extend import Options, PyTree, ResolvedRules, RulesLike, mesh_axes_of
from shardax.train.data.batches import Rows, Rowwise
from shardax.train.data.sources import (
    Positioned,
    copied,
    go_back,
    innermost,
    position_of,
    require_batch,
    require_narrow,
    with_position,
    without_tensors,
)
from shardax.train.errors import DataError, TrainError

BATCH_AXES = ("batch", "seq")

_END = object()
_INTERRUPTED = object()
_EXIT_SECONDS = 10.0  # in which fetches have to end when the interpreter does


def put_batch(batch: PyTree, sharding: Any) -> PyTree:
    """Makes device arrays of a batch.

    Args:
        batch: A pytree of host arrays, the global batch: over several processes the same in each,
            of which every process places what its devices hold. NumPy arrays are copied, and may
            be written into afterwards.
        sharding: A ``jax.sharding.Sharding`` for all arrays, or a tree prefix of them; None puts
            the arrays whole on the default device.

    Returns:
        The same tree of ``jax.Array``.

    Raises:
        DataError: Integers of 64 bits do not fit the 32 bits that JAX makes of them.

    Example:
        >>> import numpy as np
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> put_batch({"inputs": np.zeros((4, 8), np.int32)}, rows)["inputs"].shape
        (4, 8)
    """
    batch = copied(batch)
    if sharding is None:
        return jax.device_put(batch)
    return _put_rows(batch, sharding, None, 0)


def _put_host(source, sharding, batch):
    require_batch(batch, source)
    return put_batch(without_tensors(batch), sharding)


def _put_rows(batch, sharding, rows: Rows | None, batch_size: int):
    """Places a copied batch with only some of its rows."""

    def put(sharding, leaf):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        ids = rows if array.ndim else None
        if ids is not None and len(array) != ids.size:
            raise DataError(
                f"by_rows was asked for {ids.size} rows, but gave an array of shape {array.shape}."
            )

        def read(index) -> Any:
            if ids is None:
                return array[index]
            start, stop, _ = index[0].indices(batch_size)
            first = int(np.searchsorted(ids, start))
            return array[first : first + stop - start, *index[1:]]

        shape = array.shape if ids is None else (batch_size, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, read, dtype=jax.typeof(array).dtype)

    return jax.tree.map(put, jax.tree.broadcast(sharding, batch), batch)


def _rows_held(sharding, batch_size: int) -> Rows:
    """Returns the rows of a batch held by this process's devices."""
    is_held = np.zeros(batch_size, bool)
    for leaf_sharding in jax.tree.leaves(sharding):
        if isinstance(leaf_sharding, NamedSharding):
            first = NamedSharding(leaf_sharding.mesh, PartitionSpec(*leaf_sharding.spec[:1]))
            for index in first.addressable_devices_indices_map((batch_size,)).values():
                is_held[index] = True
        else:
            is_held[:] = True
    is_held[0] |= not is_held.any()  # a process without a device of the mesh
    return np.flatnonzero(is_held)


def placed_batches(source: Any, sharding: Any) -> Iterator[PyTree]:
    """Iterates over device batches; each process builds its own rows only."""
    if jax.process_count() == 1:
        # Not a generator, which would stay at its end when the source is sent back.
        return map(functools.partial(_put_host, source, sharding), source)
    require_rows(source)
    if sharding is None:
        _require_own_rows(source, None)
        batches = source.by_rows(np.arange(source.batch_size))
        return (put_batch(require_batch(batch, source), None) for batch in batches)

    _require_own_rows(source, sharding)
    rows, size = _rows_held(sharding, source.batch_size), source.batch_size
    batches = (require_batch(batch, source) for batch in source.by_rows(rows))
    return (_put_rows(copied(batch), sharding, rows, size) for batch in batches)


def _rows_of_processes(sharding: object, batch_size: int) -> dict[int, set[int]]:
    """Returns the rows of a batch by process, in each the same."""
    owned: dict[int, set[int]] = {}
    if isinstance(sharding, NamedSharding):
        first = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        for device, index in first.devices_indices_map((batch_size,)).items():
            rows = range(*index[0].indices(batch_size))
            owned.setdefault(device.process_index, set()).update(rows)
    return owned


def _require_own_rows(source, sharding) -> None:
    """Raises DataError unless local batches fit the sharding."""
    count = getattr(source, "local_rows", None)
    if count is None:
        return

    for leaf_sharding in jax.tree.leaves(sharding) or [None]:
        owned = _rows_of_processes(leaf_sharding, source.batch_size)
        if len(owned) != jax.process_count() or sum(map(len, owned.values())) != source.batch_size:
            counts = [len(rows) for _, rows in sorted(owned.items())]
            raise DataError(
                f"LocalBatches need a batch of which each process holds {count} rows of its own, "
                f"but of the {source.batch_size} rows the processes hold {counts or 'all'} by "
                f"{leaf_sharding}. Split the batch over the processes (a mesh whose 'data' axis "
                "spans them), or give every process all rows: train.WholeBatches(batches, "
                "batch_size=...)."
            )

        if any(len(rows) != count for rows in owned.values()):
            counts = [len(rows) for _, rows in sorted(owned.items())]
            raise DataError(
                f"LocalBatches give {count} rows of each process, but the processes hold {counts} "
                f"by {leaf_sharding}. Use a mesh with as many devices of each along the batch."
            )


def require_rows(source: object) -> None:
    """Raises DataError unless the source can build some rows only."""
    if not isinstance(source, Rowwise):
        raise DataError(
            f"There are {jax.process_count()} processes, and it is not known which rows of a "
            f"global batch a {type(source).__name__} gives. If every process gets all of them, use "
            "train.WholeBatches(batches, batch_size=...); if each gets rows of its own, "
            "train.LocalBatches(batches, batch_size=...); if rows can be read by their numbers, "
            "train.RowBatches(read, batch_size=...)."
        )


def first_batch(source: Any) -> PyTree:
    """Returns shapes and dtypes of the next global batch, or None at the end."""
    rows = None
    if hasattr(source, "local_rows"):  # of as many rows as there are: the processes compare them
        batch = next(iter(source.batches), _END)
    elif isinstance(source, Rowwise):
        batch, rows = next(iter(source.by_rows(np.arange(1))), _END), source.batch_size
    else:
        batch = next(iter(source), _END)

    if batch is _END:
        return None
    batch = without_tensors(require_batch(batch, source))
    require_narrow(batch)

    def struct(leaf: object):
        aval = jax.typeof(leaf)
        shape = aval.shape
        if shape and hasattr(source, "local_rows"):
            shape = (shape[0] * jax.process_count(), *shape[1:])
        elif shape and rows is not None:
            shape = (rows, *shape[1:])
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    return jax.tree.map(struct, batch)


def batch_shardings(
    batch: object, mesh: Mesh | None, rules: RulesLike | None, *, parts: int, of: str
) -> PyTree:
    """Returns the shardings of a batch, or raises TrainError."""
    # The arrays have the axes BATCH_AXES, as many as they have dimensions. Gradient accumulation
    # cuts the batch into parts, each divided over the mesh by itself. Without a mesh: None.

    def spec_of(shape: tuple[int, ...]):
        assert mesh is not None
        names = BATCH_AXES[: len(shape)]
        # Dimensions left to the compiler are not split: these arrays come from the host.
        return ResolvedRules(mesh, rules).spec(names, shape[: len(names)])[0]

    problems: list[str] = []
    shardings = []
    rows: tuple[int, ...] = ()

    entries, treedef = jax.tree_util.tree_flatten_with_path(batch)
    for key_path, array in entries:
        shape: tuple[int, ...] = np.shape(array)
        rows = rows or shape[:1]
        leaf_text = f"{jax.tree_util.keystr(key_path)} of shape {shape}"

        if parts > 1 and (not shape or shape[0] % parts):
            problems.append(f"{leaf_text} cannot be cut into grad_accumulation={parts} parts")
            continue

        if mesh is None:
            continue

        spec = spec_of(shape)
        shardings.append(NamedSharding(mesh, spec))
        for position, entry in enumerate(spec):
            axes = mesh_axes_of(entry)
            size = shape[position] // parts if position == 0 else shape[position]
            if size % math.prod(mesh.shape[axis] for axis in axes):
                axes_text = " x ".join(f"{axis!r} of size {mesh.shape[axis]}" for axis in axes)
                problems.append(
                    f"{leaf_text}{f', in {parts} parts' if parts > 1 else ''}: {size} along "
                    f"{BATCH_AXES[position]!r} cannot be divided over the mesh axis {axes_text}"
                )

    if problems:
        step = parts
        if mesh is not None:
            step *= math.prod(mesh.shape[axis] for axis in mesh_axes_of(spec_of((0,))[0]))
        raise TrainError(
            f"The {of} cannot be laid out:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"Use a batch size that is a multiple of {step}, such as "
            + str(-(-(rows[0] if rows else 0) // step) * step)
            + (", another mesh, or other rules." if mesh is not None else ".")
        )
    return None if mesh is None else treedef.unflatten(shardings)


class Interrupted(Exception):
    """The wait for a batch was ended by ``Prefetch.interrupt``."""


class _Fetched(NamedTuple):
    """What came of reading a batch."""

    batch: PyTree  # on the devices, or ``_END``
    state: PyTree = None  # position of the source after it
    error: BaseException | None = None


class _FetchThread:
    """A daemon thread that reads a source, as it is told."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Without a reference to this object: who drops it ends the thread.
        self.thread = threading.Thread(
            target=_obey, args=[self._orders], name="shardax-prefetch", daemon=True
        )
        self.thread.start()
        _fetch_threads.add(self)

    def order(self, action: Callable[[], None]) -> None:
        """Has the thread do something."""
        self._orders.put(action)

    def cancel(self) -> int:
        """Takes back the orders that have not begun; returns how many."""
        count = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()
                count += 1
        return count

    def end(self) -> None:
        """Has the thread end after what it is at."""
        self._orders.put(None)

    def abandon(self) -> None:
        """Leaves the thread at what it is at, also at the end of the interpreter."""
        _fetch_threads.discard(self)
        _left_waiting[id(self._source)] = self

    def join(self) -> None:
        """Waits until the thread has ended."""
        self.thread.join()
        _left_waiting.pop(id(self._source), None)


_fetch_threads: weakref.WeakSet[_FetchThread] = weakref.WeakSet()
_left_waiting: dict[int, _FetchThread] = {}  # by the identity of their sources, which they hold


def require_unread(source: object) -> None:
    """Raises DataError if a thread that was left waiting still reads a source."""
    source = innermost(source)
    left = _left_waiting.get(id(source))
    if left is None:
        return
    if left.thread.is_alive():
        raise DataError(
            f"The batches ({type(source).__name__}) are still being read: they wait for data since "
            "a run or a Prefetch was asked to stop. Make them anew; a checkpoint has the position."
        )
    left.join()


def _obey(orders: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (action := orders.get()) is not None:
        action()
        del action  # it refers to its Prefetch, which may be dropped while this thread waits


@atexit.register
def _end_fetch_threads() -> None:
    """Lets fetches end before the interpreter does."""
    # Python stops daemon threads wherever they are. Within JAX that would abort the process.
    limit = time.monotonic() + _EXIT_SECONDS
    threads = list(_fetch_threads)
    for fetch_thread in threads:
        fetch_thread.cancel()
        fetch_thread.end()
    for fetch_thread in threads:
        fetch_thread.thread.join(max(0.0, limit - time.monotonic()))


class Prefetch:
    """Iterator over device batches, prefetched in one thread.

    An exception in the source is raised where its batch would have been taken, and ends the
    iteration. Close it when done, or use it in a ``with`` statement; after closing it gives no more
    batches. Nothing else may take from the source meanwhile.

    Batch and position are copied before the next batch is asked for: the source may fill the same
    arrays again, and its ``state()`` may return what it goes on changing.

    Args:
        batches: Host batches (pytrees of arrays). If it has ``state()`` and ``restore()``, as
            ``TrainBatches`` has, or a position of grain, ``datasets`` or torchdata, so has the
            result. Over several processes it builds the rows that
            each holds: ``TrainBatches``, ``RowBatches``, ``WholeBatches`` or ``LocalBatches``.
        sharding: As for ``put_batch``.
        depth: How many batches to keep ready, 1 or more.
        limit: How many batches to give; no more are read. None: all.

    Raises:
        DataError: ``depth`` is less than 1, ``limit`` is negative, the position cannot be copied,
            or over several processes it is not known which rows ``batches`` gives.

    Example:
        >>> import numpy as np
        >>> with Prefetch([np.arange(2), np.arange(3)]) as batches:
        ...     [batch.tolist() for batch in batches]
        [[0, 1], [0, 1, 2]]
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        sharding: Any = None,
        *,
        depth: int = 1,
        limit: int | None = None,
    ) -> None:
        options = Options(DataError)
        options.integers(depth=depth)
        if limit is not None:
            options.integers(0, limit=limit)

        self._source = with_position(batches)
        require_unread(self._source)
        self._is_positioned = isinstance(self._source, Positioned)

        self._sharding = sharding
        self._iterator = placed_batches(self._source, sharding)
        self._depth = depth
        self._left = math.inf if limit is None else limit  # batches still to give
        self._state = self._source_state()

        self._closed = self._interrupted = False
        # A signal handler may put into a queue of this kind: see ``interrupt``.
        self._fetched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked = 0  # fetches, and the rewinding, that were ordered and not taken

        self._thread = _FetchThread(innermost(self._source))
        ending = weakref.finalize(self, self._thread.end)
        ending.atexit = False  # ``_end_fetch_threads`` sees to that
        self._work_ahead()

    def state(self) -> PyTree:
        """Returns the position after the last batch taken, for a checkpoint.

        Returns:
            A copy of what the source's ``state()`` gave at that point.

        Raises:
            DataError: The source has no ``state()``.
        """
        if not self._is_positioned:
            raise _no_position("state", self._source)
        return copy.deepcopy(self._state)

    def restore(self, state: object) -> None:
        """Sends the source to a saved position and works ahead from there.

        Args:
            state: What ``state()`` gave.

        Raises:
            DataError: The source has no ``restore()``, or the prefetch is closed, or the position
                does not fit the source, which then goes on from where it was.
        """
        if not self._is_positioned:
            raise _no_position("restore", self._source)
        if self._closed:
            raise DataError("This Prefetch is closed. Make a new one: Prefetch(batches, ...).")

        self._asked -= self._thread.cancel()
        if self._drop_ahead(None) is None:
            raise Interrupted

        source: Positioned = self._source
        try:
            go_back(source, state)
            if isinstance(self._source, Rowwise):  # what has ended goes on from there
                self._iterator = placed_batches(self._source, self._sharding)
        except BaseException:
            go_back(source, self._state)
            raise
        finally:
            self._state = self._source_state()
            self._work_ahead()

    def close(self, timeout: float | None = None) -> bool:
        """Stops prefetching and rewinds the source to after the last batch taken.

        May be called again.

        Args:
            timeout: Seconds to wait for a batch that is being read; None: as long as it takes.

        Returns:
            False if the source still reads. It is rewound when it has done so, and not to be used
            before.
        """
        if not self._closed:
            self._closed = True
            self._asked += 1 - self._thread.cancel()
            self._thread.order(self._rewind)
            self._thread.end()
        if timeout is None and self._interrupted:
            timeout = 0.0

        dropped: list[_Fetched] | None = None  # nor after an exception, such as KeyboardInterrupt
        try:
            dropped = self._drop_ahead(timeout)
        finally:
            if dropped is None:
                self._thread.abandon()
        if dropped is None:
            return False
        self._thread.join()
        if dropped and dropped[-1].error is not None:  # of the rewinding
            raise dropped[-1].error
        return True

    def interrupt(self) -> None:
        """Ends a wait of ``next`` or ``close``; a signal handler may call it.

        After that of ``next``, ``close`` without a timeout does not wait again.
        """
        self._fetched.put(_INTERRUPTED)

    def _work_ahead(self) -> None:
        while not self._closed and self._asked < min(self._depth, self._left):
            self._asked += 1
            self._thread.order(self._fetch)

    def _fetch(self) -> None:
        """Reads a batch, in the thread."""
        try:
            fetched = _Fetched(next(self._iterator, _END), self._source_state())
        except BaseException as error:  # noqa: BLE001 (raised where the batch is taken)
            fetched = _Fetched(_END, error=error)
        self._fetched.put(fetched)

    def _rewind(self) -> None:
        """Puts the source back to after the last batch taken, in the thread."""
        error: BaseException | None = None
        try:
            if self._is_positioned:
                go_back(self._source, self._state)
        except BaseException as raised:  # noqa: BLE001 (raised by ``close``)
            error = raised
        self._fetched.put(_Fetched(_END, error=error))

    def _drop_ahead(self, timeout: float | None) -> list[_Fetched] | None:
        """Takes all that was ordered; returns None if that could not be waited for."""
        dropped: list[_Fetched] = []
        limit = None if timeout is None else time.monotonic() + timeout
        while self._asked:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            try:
                fetched = self._fetched.get(timeout=left)
            except queue.Empty:
                return None
            if fetched is _INTERRUPTED:
                return None
            self._asked -= 1
            dropped.append(fetched)
        return dropped

    def _source_state(self):
        return position_of(self._source) if self._is_positioned else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._closed and self._left == 0:
            self.close()
        if self._closed:
            raise StopIteration
        fetched = self._fetched.get()
        if fetched is _INTERRUPTED:
            self._interrupted = True
            raise Interrupted
        self._asked -= 1
        if fetched.batch is _END:
            self.close()
            raise StopIteration if fetched.error is None else fetched.error

        self._state = fetched.state
        self._left -= 1
        self._work_ahead()
        return fetched.batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _no_position(method: str, source: object) -> DataError:
    return DataError(
        f"Prefetch.{method}() needs a source with state() and restore(), but "
        f"{type(source).__name__} has none. Use TrainBatches, or give your iterator these two "
        "methods."
    )


@contextlib.contextmanager
def in_device_memory(tree: object) -> Generator[None]:
    """Moves values from host to device memory for a block.

    It works inside a compiled function.

    Args:
        tree: A Module, a Variable, or a pytree of such; their layout over the mesh stays.

    Returns:
        A context manager.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jax.device_put(jnp.zeros(2), jax.memory.Space.Host))
        >>> @sx.jit
        ... def add(total, x):
        ...     with in_device_memory(total):
        ...         total.value += x
        >>> add(total, jnp.ones(2))
        >>> total.value.tolist(), total.value.sharding.memory_kind
        ([1.0, 1.0], 'pinned_host')
    """
    hosted = [
        variable
        for _, variable in iter_variables(tree)
        if any(
            jax.typeof(leaf).memory_space == jax.memory.Space.Host
            for leaf in jax.tree.leaves(variable.value)
        )
    ]

    for variable in hosted:
        variable.value = jax.device_put(variable.value, jax.memory.Space.Device)

    try:
        yield
    finally:
        for variable in hosted:
            variable.value = jax.device_put(variable.value, jax.memory.Space.Host)
