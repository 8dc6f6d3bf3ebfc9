# SPDX-License-Identifier: Apache-2.0
"""Batches of windows for training and evaluation of language models.

A window is ``seq_len + 1`` consecutive bytes of one segment: the first ``seq_len`` are the inputs,
the last ``seq_len`` the targets. Neighbouring windows share one byte, so no byte is a target twice.

In training an epoch is one pass over all windows in shuffled order, in which every segment's
windows start at another random offset. Batches run on from one epoch into the next. The position is
the number of batches taken; with the seed it decides the next batch, so a resumed run continues
exactly. In evaluation each byte that has a predecessor counts exactly once.

A batch is what all processes take together in one step. ``by_rows`` builds some of its rows only:
over several processes the trainer asks for those that the process's devices hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from shardax.extend import Options, PyTree, raise_if_any
from shardax.train.data.order import hash64, shuffled
from shardax.train.data.sources import Held
from shardax.train.data.text import TextPart
from shardax.train.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.int64]
OPTIONS = Options(DataError)


@dataclass(frozen=True)
class DataPosition:
    """Position in training data, with the identity of the data.

    Attributes:
        step: Batches taken so far.
        seed: Seed of the order of windows.
        batch_size: Windows per global batch.
        seq_len: Predicted bytes per window.
        fingerprint: Of the part of the text that windows are drawn from.

    Example:
        >>> DataPosition(step=3, seed=0, batch_size=8, seq_len=16, fingerprint="ab").step
        3
    """

    step: int
    seed: int
    batch_size: int
    seq_len: int
    fingerprint: str


@runtime_checkable
class Rowwise(Protocol):
    """Source of batches able to build only some rows."""

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        ...

    def by_rows(self, rows: Rows) -> Iterator[PyTree]:
        """Iterates over these rows, in ascending order, of each batch."""
        ...


class TrainBatches:
    """Endless iterator of shuffled training batches, to be saved and restored.

    Iterating gives ``{"inputs": int32 (batch_size, seq_len), "targets": int32 (batch_size,
    seq_len)}``.

    Args:
        part: The text to draw from.
        batch_size: Windows per batch, over all processes together.
        seq_len: Predicted bytes per window.
        seed: Seed of the order, in ``[0, 2**64)``.

    Raises:
        DataError: No segment is long enough for a window, or the sizes are out of range.

    Example:
        >>> from shardax.train.data.text import ByteText
        >>> train, held_out = ByteText.from_bytes(b"the quick brown fox " * 500).split(0.1)
        >>> batches = TrainBatches(train, batch_size=4, seq_len=16)
        >>> {name: (array.shape, str(array.dtype)) for name, array in next(batches).items()}
        {'inputs': ((4, 16), 'int32'), 'targets': ((4, 16), 'int32')}
        >>> saved = batches.state()
        >>> expected = next(batches)
        >>> batches.restore(saved)
        >>> bool((next(batches)["inputs"] == expected["inputs"]).all())
        True
    """

    def __init__(self, part: TextPart, *, batch_size: int, seq_len: int, seed: int = 0) -> None:
        _check_sizes(part, batch_size, seq_len)
        check_seed(seed)
        self.part = part
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.step = 0

        # One window less than fits leaves room for the offset; where just one fits it is kept.
        predicted = part.ends - part.starts - 1
        windows = np.maximum(predicted // seq_len - 1, (predicted >= seq_len).astype(np.int64))
        self._first_window = np.concatenate([[0], np.cumsum(windows)])
        self._room = predicted - windows * seq_len

        if self.windows_per_epoch == 0:
            raise DataError(
                f"No window of seq_len + 1 = {seq_len + 1} {part.text.unit} fits: the longest "
                f"segment of {part!r} has {int(predicted.max()) + 1}. Use a smaller seq_len, a "
                "longer text, or larger blocks in text.split()."
            )

    @property
    def windows_per_epoch(self) -> int:
        """Number of windows in one epoch."""
        return int(self._first_window[-1])

    @property
    def epoch(self) -> float:
        """Passes over the windows so far, with fractions."""
        return self.step * self.batch_size / self.windows_per_epoch

    @property
    def position(self) -> DataPosition:
        """The position; the next batch follows from it."""
        return DataPosition(
            self.step, self.seed, self.batch_size, self.seq_len, self.part.fingerprint
        )

    def state(self) -> dict[str, int | str]:
        """Returns the position as plain ints and strings, for a checkpoint.

        Returns:
            The fields of ``DataPosition``; it holds for any number of processes.
        """
        return dataclasses.asdict(self.position)

    def restore(self, state: Mapping[str, Any] | DataPosition) -> None:
        """Goes to a saved position; the batches from there followed it.

        Args:
            state: What ``state()`` or ``position`` gave.

        Raises:
            DataError: It is no position, or was saved over other data, seed or sizes; all
                differences are listed. The iterator stays where it is.
        """
        position = self.state()
        saved = dataclasses.asdict(state) if isinstance(state, DataPosition) else state

        step = saved.get("step") if isinstance(saved, Mapping) else None
        if not isinstance(saved, Mapping) or set(saved) != set(position) or not is_count(step):
            raise DataError(
                f"Not a data position: {state!r}. A position has the entries {sorted(position)}, "
                "with a step of 0 or more; pass what batches.state() returned."
            )

        differing = [name for name in position if name != "step" and saved[name] != position[name]]
        arguments = ", ".join(f"{name}=<saved>" for name in differing)
        remedy = (
            "The text is not the one that was trained on (or is split otherwise): open the same "
            "text and split it with the same arguments, or start the data anew by not restoring "
            "its position."
            if "fingerprint" in differing
            else f"Make the batches with the saved values, TrainBatches(part, ..., {arguments}), "
            "and restore again."
        )
        require_same_data(differing, saved, position, remedy)
        self.step = int(saved["step"])

    def batch_at(self, step: int, rows: Rows | None = None) -> Arrays:
        """Returns the batch of a step without moving the iterator.

        Args:
            step: Counted from 0.
            rows: Numbers of the rows to build; None: all.

        Returns:
            ``{"inputs", "targets"}``, int32 (rows, seq_len).

        Raises:
            DataError: ``step`` is negative, or a row is not one of the batch.
        """
        OPTIONS.check("step", step, step >= 0, "0 or more")
        rows = row_numbers(rows, self.batch_size)
        positions = step * self.batch_size + rows
        windows = shuffled(positions, self.windows_per_epoch, self.seed)

        # In each epoch every segment's windows begin at another offset.
        segments = np.searchsorted(self._first_window, windows, side="right") - 1
        epochs = hash64(self.seed, positions // self.windows_per_epoch)
        offsets = hash64(epochs, segments) % (self._room[segments] + 1).astype(np.uint64)
        within = (windows - self._first_window[segments]) * self.seq_len
        starts = self.part.starts[segments] + offsets.astype(np.int64) + within
        return _batch(self.part, starts, self.seq_len)

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Arrays:
        batch = self.batch_at(self.step)
        self.step += 1
        return batch

    def by_rows(self, rows: Rows) -> Iterator[Arrays]:
        """Iterates over some rows of each batch, and moves this iterator on.

        Args:
            rows: Numbers of the rows in the batch.

        Returns:
            An iterator of batches that hold these rows only.

        Raises:
            DataError: A row is not one of the batch.
        """
        while True:
            batch = self.batch_at(self.step, rows)
            self.step += 1
            yield batch

    def __repr__(self) -> str:
        return (
            f"TrainBatches(batch_size={self.batch_size}, seq_len={self.seq_len}, seed={self.seed}, "
            f"step={self.step}, {self.part!r})"
        )


class EvalBatches:
    """Masked batches over a part of a text, in order.

    They are the same on every pass.

    Iterating starts a new pass and gives ``{"inputs": int32 (batch_size, seq_len), "targets": int32
    (batch_size, seq_len), "mask": bool (batch_size, seq_len)}``. Every batch has the same shape;
    where the mask is False inputs and targets are 0 and must not count.

    Args:
        part: The text to judge on.
        batch_size: Windows per batch, over all processes together.
        seq_len: Predicted bytes per window.
        max_batches: At most this many batches, of windows spread evenly over the part; None takes
            all windows.

    Raises:
        DataError: The part has no two consecutive bytes, or the sizes are out of range.

    Example:
        >>> from shardax.train.data.text import ByteText
        >>> batches = EvalBatches(ByteText.from_bytes(b"abcdef").whole, batch_size=2, seq_len=3)
        >>> [batch["mask"].tolist() for batch in batches]
        [[[True, True, True], [True, True, False]]]
        >>> batches.targets
        5
    """

    def __init__(
        self, part: TextPart, *, batch_size: int, seq_len: int, max_batches: int | None = None
    ) -> None:
        _check_sizes(part, batch_size, seq_len)
        fits = max_batches is None or max_batches >= 1
        OPTIONS.check("max_batches", max_batches, fits, "1 or more, or None for all")
        self.batch_size = batch_size
        self.seq_len = seq_len

        # The windows of each segment, of which the last may be shorter.
        predicted = part.ends - part.starts - 1
        counts = -(-predicted // seq_len)
        segments = np.repeat(np.arange(counts.size), counts)
        within = np.arange(segments.size) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = part.starts[segments] + within * seq_len
        lengths = np.minimum(seq_len, predicted[segments] - within * seq_len)

        if starts.size == 0:
            raise DataError(
                f"There is nothing to predict: {part!r} has no two consecutive {part.text.unit}. "
                "Hold out more text, or use larger blocks in text.split()."
            )
        if max_batches is not None and starts.size > max_batches * batch_size:
            max_windows = max_batches * batch_size
            picked = np.arange(max_windows) * starts.size // max_windows
            starts, lengths = starts[picked], lengths[picked]
        self._starts, self._lengths = starts, lengths

        # The exact text of these windows, so that baselines can be taken over the same text.
        ends = starts + lengths + 1
        begins_run = np.concatenate([[True], starts[1:] >= ends[:-1]])
        ends_run = np.concatenate([begins_run[1:], [True]])
        self.part = TextPart(part.text, starts[begins_run], ends[ends_run])

    @property
    def targets(self) -> int:
        """Number of predicted bytes in one pass."""
        return int(self._lengths.sum())

    def __len__(self) -> int:
        return math.ceil(self._starts.size / self.batch_size)

    def __iter__(self) -> Iterator[Arrays]:
        return self.by_rows(np.arange(self.batch_size))

    def by_rows(self, rows: Rows) -> Iterator[Arrays]:
        """Iterates over some rows of each batch, in a new pass.

        Args:
            rows: Numbers of the rows in the batch.

        Returns:
            An iterator of batches that hold these rows only.

        Raises:
            DataError: A row is not one of the batch.
        """
        rows = row_numbers(rows, self.batch_size)
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            windows = first + rows
            exists = windows < self._starts.size
            windows = np.where(exists, windows, 0)
            lengths = np.where(exists, self._lengths[windows], 0)
            mask = np.arange(self.seq_len) < lengths[:, None]
            batch = _batch(self.part, self._starts[windows], self.seq_len)
            yield {**{name: array * mask for name, array in batch.items()}, "mask": mask}

    def __repr__(self) -> str:
        return (
            f"EvalBatches({len(self)} batches of {self.batch_size} x {self.seq_len}, "
            f"{self.targets:,} targets, {self.part!r})"
        )


class RowBatches:
    """Batches of rows read by their numbers.

    Such as a file of tokens. Rows are counted on without end: batch ``k`` has the rows from
    ``k * batch_size`` to ``(k + 1) * batch_size``. Over several processes each reads the rows of
    its own devices only.

    Args:
        read: ``read(start, stop)`` returns the rows ``start`` to ``stop - 1``: a tree of arrays
            with ``stop - start`` rows each. What it returns may depend on these numbers only.
        batch_size: Rows per batch, over all processes together.
        name: Identity of the data; a position saved under another name is refused.

    Raises:
        DataError: ``batch_size`` is not an integer of 1 or more.

    Example:
        >>> tokens = np.arange(1000, dtype=np.int32).reshape(100, 10)
        >>> def read(start, stop):
        ...     rows = tokens[np.arange(start, stop) % len(tokens)]
        ...     return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
        >>> batches = RowBatches(read, batch_size=4)
        >>> _ = next(batches)
        >>> next(batches)["inputs"][:, 0].tolist()
        [40, 50, 60, 70]
    """

    def __init__(self, read: Callable[[int, int], Any], *, batch_size: int, name: str = "") -> None:
        OPTIONS.integers(batch_size=batch_size)
        self.read = read
        self.batch_size = batch_size
        self.name = name
        self.step = 0

    def state(self) -> dict[str, int | str]:
        """Returns the position, for a checkpoint.

        Returns:
            Batches taken, rows per batch, and the name.
        """
        return {"step": self.step, "batch_size": self.batch_size, "name": self.name}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position.

        Args:
            state: What ``state()`` gave.

        Raises:
            DataError: It is no position, or of another name or batch size.
        """
        step = state.get("step") if isinstance(state, Mapping) else None
        if not is_count(step) or {**self.state(), "step": step} != {**state}:
            raise DataError(
                f"The saved data position {state!r} cannot be continued with {self!r}. Make it "
                "with the batch_size and the name that were saved."
            )
        self.step = int(step)

    def by_rows(self, rows: Rows) -> Iterator[PyTree]:
        """Iterates over some rows of each batch, and moves this iterator on.

        Args:
            rows: Numbers of the rows in the batch.

        Returns:
            An iterator of batches that hold these rows only.

        Raises:
            DataError: A row is not one of the batch, or ``read`` returned another number of rows.
        """
        rows = row_numbers(rows, self.batch_size)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        while True:
            first = self.step * self.batch_size
            bounds = [(first + int(run[0]), first + int(run[-1]) + 1) for run in runs]
            batch = self._read(*bounds[0]) if len(runs) == 1 else self._read_runs(bounds)
            self.step += 1
            yield batch

    def _read_runs(self, bounds: Iterable[tuple[int, int]]) -> Any:
        """Reads several runs of rows as one."""
        # Each is copied before the next is read: ``read`` may fill the same arrays again.
        parts = [jax.tree.map(np.array, self._read(start, stop)) for start, stop in bounds]
        return jax.tree.map(_joined, *parts)

    def _read(self, start: int, stop: int) -> Any:
        rows = self.read(start, stop)
        for path, leaf in jax.tree_util.tree_flatten_with_path(rows)[0]:
            if np.shape(leaf)[:1] != (stop - start,):
                raise DataError(
                    f"read({start}, {stop}) must return {stop - start} rows, but "
                    f"{jax.tree_util.keystr(path) or 'it'} has the shape {np.shape(leaf)}."
                )
        return rows

    def __iter__(self) -> RowBatches:
        return self

    def __next__(self) -> Any:
        return next(self.by_rows(np.arange(self.batch_size)))

    def __repr__(self) -> str:
        return f"RowBatches(batch_size={self.batch_size}, step={self.step}, name={self.name!r})"


class WholeBatches(Held):
    """Batches of a source of whole global batches.

    It must give the same in every process. Each builds all rows and places those that its devices
    hold.

    Args:
        batches: An iterable of trees of arrays with ``batch_size`` rows. Its position
            is used if it has one: ``state()`` and ``restore()``, or as grain, ``datasets`` and
            torchdata name them.
        batch_size: Rows per batch, over all processes together.

    Raises:
        DataError: ``batch_size`` is not an integer of 1 or more.

    Example:
        >>> batches = WholeBatches([{"x": np.arange(4)}], batch_size=4)
        >>> [batch["x"].tolist() for batch in batches.by_rows(np.array([1, 2]))]
        [[1, 2]]
    """

    def __init__(self, batches: Iterable[PyTree], *, batch_size: int) -> None:
        OPTIONS.integers(batch_size=batch_size)
        self.hold(batches)
        self.batch_size = batch_size

    def by_rows(self, rows: Rows) -> Iterator[PyTree]:
        """Iterates over some rows of each batch.

        Args:
            rows: Numbers of the rows in the batch.

        Returns:
            An iterator of batches that hold these rows only.

        Raises:
            DataError: A row is not one of the batch, or a batch has another number of rows.
        """
        rows = row_numbers(rows, self.batch_size)
        return (jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch) for batch in self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            _check_rows(
                batch, self.batch_size, "Give all rows of the global batch in every process."
            )
            yield batch

    def __repr__(self) -> str:
        return f"WholeBatches({type(self.batches).__name__}, batch_size={self.batch_size})"


class LocalBatches(Held):
    """Batches of a source with rows of its own in each process.

    Such as a dataset that is sharded by process. The rows of all processes together are the global
    batch, which must be split over the processes. A checkpoint has the position of each process; a
    run is resumed with as many.

    Args:
        batches: An iterable of trees of arrays with ``local_rows`` rows. Its position is used if it
            has one, as for ``WholeBatches``.
        batch_size: Rows per batch, over all processes together.

    Attributes:
        local_rows: Rows per batch of one process.

    Raises:
        DataError: ``batch_size`` is not an integer of 1 or more, or not a multiple of the number of
            processes.

    Example:
        >>> batches = LocalBatches([{"x": np.arange(4)}], batch_size=4)
        >>> batches.local_rows, [batch["x"].tolist() for batch in batches]
        (4, [[0, 1, 2, 3]])
    """

    def __init__(self, batches: Iterable[PyTree], *, batch_size: int) -> None:
        OPTIONS.integers(batch_size=batch_size)
        count = jax.process_count()
        if batch_size % count:
            raise DataError(
                f"batch_size={batch_size} is the global batch, of which each of {count} processes "
                f"gives as many rows: use a multiple of {count}."
            )
        self.hold(batches)
        self.batch_size = batch_size
        self.local_rows = batch_size // count

    def by_rows(self, rows: Rows) -> Iterator[PyTree]:
        """Iterates over this process's rows of each batch.

        Args:
            rows: Numbers of the rows in the global batch that this process holds; as many as it
                gives.

        Returns:
            An iterator of batches that hold these rows.

        Raises:
            DataError: There are more or fewer rows.
        """
        if np.size(rows) != self.local_rows:
            raise DataError(
                f"Each process of LocalBatches(batch_size={self.batch_size}) gives "
                f"{self.local_rows} rows, but {np.size(rows)} were asked for."
            )
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            _check_rows(
                batch,
                self.local_rows,
                f"Every process gives {self.local_rows} of the {self.batch_size} rows.",
            )
            yield batch

    def __repr__(self) -> str:
        return f"LocalBatches({type(self.batches).__name__}, batch_size={self.batch_size})"


def _check_rows(batch: object, rows: int, advice: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if np.shape(leaf)[:1] != (rows,):
            raise DataError(
                f"{jax.tree_util.keystr(path) or 'The batch'} has the shape {np.shape(leaf)}, but "
                f"batch_size={rows} rows were announced. {advice}"
            )


def _joined(*parts) -> PyTree:
    return np.concatenate(parts)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of 0 or more."""
    return Options.is_integer(value) and value >= 0


def require_same_data(
    differing: Iterable[str],
    saved: Mapping[str, object],
    position: Mapping[str, object],
    remedy: str,
) -> None:
    """Refuses a saved position of other data; lists all differences."""
    raise_if_any(
        DataError,
        [f"  {name}: saved {saved[name]!r}, here {position[name]!r}" for name in differing],
        "The saved data position cannot be continued with these batches, because they would not "
        "be the ones that followed:\n",
        f"\n{remedy}",
        separator="\n",
    )


def check_seed(seed: object) -> None:
    """Refuses what is no seed of an order."""
    OPTIONS.check("seed", seed, is_count(seed) and seed < 1 << 64, "an integer in [0, 2**64)")


def _check_sizes(part: object, batch_size: int, seq_len: int) -> None:
    expected = "a TextPart: text.whole, or one of training, held_out = text.split(0.1)"
    OPTIONS.instance("part", part, TextPart, expected)
    OPTIONS.integers(batch_size=batch_size, seq_len=seq_len)


def row_numbers(rows: object, batch_size: int) -> Rows:
    """Returns row numbers as an array, or raises DataError."""
    numbers: Any = np.arange(batch_size) if rows is None else np.asarray(rows)
    wrong = numbers.ndim != 1 or numbers.dtype.kind not in "iu" or numbers.size == 0
    if wrong or numbers.min() < 0 or numbers.max() >= batch_size:
        raise DataError(
            f"rows must be numbers from 0 to {batch_size - 1}, at least one, got {rows!r}."
        )
    return numbers.astype(np.int64)


def _batch(part: TextPart, starts: Rows, seq_len: int) -> Arrays:
    """Returns the windows at some places as inputs and targets."""
    text = part.text
    windows = text.windows(starts, seq_len + 1)
    limit = min(getattr(text, "vocab_size", None) or 1 << 31, 1 << 31)
    if limit <= np.iinfo(windows.dtype).max and windows.size and int(windows.max()) >= limit:
        row, column = np.unravel_index(windows.argmax(), windows.shape)
        raise DataError(
            f"Token {starts[row] + column} of {text.name} has the id {int(windows.max())}, but ids "
            f"are from 0 to {limit - 1}. The file is of another vocabulary or dtype, or is damaged."
        )
    tokens = windows.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
