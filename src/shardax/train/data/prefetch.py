# SPDX-License-Identifier: Apache-2.0
"""Placement of batches and of values in host memory, and prefetching.

While a step runs, one worker thread reads the next host batch and starts its transfer, so the
devices do not wait for the disk. The source therefore stands ahead of what the loop has taken;
``Prefetch.state()`` is the position of what was taken, which is the one that belongs in a
checkpoint.

``shard(..., memory_kind={sx.OptState: "pinned_host"})`` keeps an optimizer's state out of the
devices' own memory. JAX computes with values of one memory only, so a program brings such values to
the device first (``in_device_memory``) and returns them afterwards; the compiler sees when each is
needed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardax._core.checks import Options
from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.state.split_merge import iter_variables
from shardax.partition.checker import spec_for
from shardax.partition.context import rules_over
from shardax.partition.rules import RulesLike, mesh_axes_of
from shardax.train.data.batches import Rows, Rowwise
from shardax.train.data.sources import Positioned, with_position, without_tensors
from shardax.train.errors import DataError, TrainError

BATCH_AXES = ("batch", "seq")

_END = object()


def put_batch(batch: PyTree, sharding: Any) -> PyTree:
    """Makes device arrays of a batch.

    Args:
        batch: A pytree of host arrays, the global batch: over several processes the same in each,
            of which every process places what its devices hold.
        sharding: A ``jax.sharding.Sharding`` for all arrays, or a tree prefix of them; None puts
            the arrays whole on the default device.

    Returns:
        The same tree of ``jax.Array``.

    Example:
        >>> import numpy as np
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        >>> put_batch({"inputs": np.zeros((4, 8), np.int32)}, rows)["inputs"].shape
        (4, 8)
    """
    if sharding is None:
        return jax.device_put(batch)
    return _put_rows(batch, sharding, None, 0)


def _put_host(sharding, batch):
    return put_batch(without_tensors(batch), sharding)


def _put_rows(batch, sharding, rows: Rows | None, batch_size: int):
    """Places a batch with only some of its rows."""

    def put(sharding, leaf):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        ids = rows if array.ndim else None
        if ids is not None and len(array) != ids.size:
            raise DataError(
                f"by_rows was asked for {ids.size} rows, but gave an array of shape {array.shape}."
            )

        def read(index) -> Leaf:
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
        return map(functools.partial(_put_host, sharding), source)
    require_rows(source)
    if sharding is None:
        _require_own_rows(source, None)
        return (put_batch(batch, None) for batch in source.by_rows(np.arange(source.batch_size)))
    _require_own_rows(source, sharding)
    rows = _rows_held(sharding, source.batch_size)
    return (_put_rows(batch, sharding, rows, source.batch_size) for batch in source.by_rows(rows))


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
    """Returns shapes and dtypes of the next global batch, or None."""
    rows = None
    if hasattr(source, "local_rows"):  # of as many rows as there are: the processes compare them
        batch = next(iter(source.batches), None)
    elif isinstance(source, Rowwise):
        batch, rows = next(iter(source.by_rows(np.arange(1))), None), source.batch_size
    else:
        batch = next(iter(source), None)

    def struct(leaf: object):
        aval = jax.typeof(leaf)
        shape = aval.shape
        if shape and hasattr(source, "local_rows"):
            shape = (shape[0] * jax.process_count(), *shape[1:])
        elif shape and rows is not None:
            shape = (rows, *shape[1:])
        return jax.ShapeDtypeStruct(shape, aval.dtype)

    return None if batch is None else jax.tree.map(struct, without_tensors(batch))


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
        return spec_for(names, shape[: len(names)], mesh, rules_over(mesh, rules))[0]

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


class Prefetch:
    """Iterator over device batches, prefetched in one thread.

    An exception in the source is raised where its batch would have been taken, and ends the
    iteration. Close it when done, or use it in a ``with`` statement; after closing it gives no more
    batches. Nothing else may take from the source meanwhile.

    Args:
        batches: Host batches (pytrees of arrays). If it has ``state()`` and ``restore()``, as
            ``TrainBatches`` has, or a position of grain, ``datasets`` or torchdata, so has the
            result. Over several processes it builds the rows that
            each holds: ``TrainBatches``, ``RowBatches``, ``WholeBatches`` or ``LocalBatches``.
        sharding: As for ``put_batch``.
        depth: How many batches to keep ready, 1 or more.

    Raises:
        DataError: ``depth`` is less than 1, or over several processes it is not known which rows
            ``batches`` gives.

    Example:
        >>> import numpy as np
        >>> with Prefetch([np.arange(2), np.arange(3)]) as batches:
        ...     [batch.tolist() for batch in batches]
        [[0, 1], [0, 1, 2]]
    """

    def __init__(self, batches: Iterable[PyTree], sharding: Any = None, *, depth: int = 1) -> None:
        Options(DataError).integers(depth=depth)
        self._source = with_position(batches)
        self._sharding = sharding
        self._iterator = placed_batches(self._source, sharding)
        self._depth = depth
        self._state = self._source_state()
        # Dropped, or at interpreter exit, the executor ends its thread after the current fetch.
        self._worker: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "shardax-prefetch")
        self._ready: deque[Future[tuple[Any, Any]]] = deque()
        self._work_ahead()

    def state(self) -> PyTree:
        """Returns the position after the last batch taken, for a checkpoint.

        Returns:
            What the source's ``state()`` gave at that point.

        Raises:
            DataError: The source has no ``state()``.
        """
        if not isinstance(self._source, Positioned):
            raise _no_position("state", self._source)
        return self._state

    def restore(self, state: object) -> None:
        """Sends the source to a saved position and works ahead from there.

        Args:
            state: What ``state()`` gave.

        Raises:
            DataError: The source has no ``restore()``, or the prefetch is closed, or the position
                does not fit the source, which then goes on from where it was.
        """
        if not isinstance(self._source, Positioned):
            raise _no_position("restore", self._source)
        if self._worker is None:
            raise DataError("This Prefetch is closed. Make a new one: Prefetch(batches, ...).")
        self._drop_ready()
        try:
            self._source.restore(state)
            if isinstance(self._source, Rowwise):  # what has ended goes on from there
                self._iterator = placed_batches(self._source, self._sharding)
        except BaseException:
            self._source.restore(self._state)
            raise
        finally:
            self._state = self._source_state()
            self._work_ahead()

    def close(self) -> None:
        """Stops prefetching and rewinds the source to after the last batch taken.

        May be called again.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._drop_ready()
        worker.shutdown(wait=True)
        if isinstance(self._source, Positioned):
            self._source.restore(self._state)

    def _work_ahead(self) -> None:
        while self._worker is not None and len(self._ready) < self._depth:
            self._ready.append(self._worker.submit(self._fetch))

    def _fetch(self) -> tuple[Any, Any]:
        return next(self._iterator, _END), self._source_state()

    def _drop_ready(self) -> None:
        while self._ready:
            future = self._ready.pop()
            if not future.cancel():
                future.exception()

    def _source_state(self):
        return self._source.state() if isinstance(self._source, Positioned) else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._worker is None:
            raise StopIteration
        try:
            batch, state = self._ready.popleft().result()
        except BaseException:
            self.close()
            raise
        if batch is _END:
            self.close()
            raise StopIteration
        self._state = state
        self._work_ahead()
        return batch

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
