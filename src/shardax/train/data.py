# SPDX-License-Identifier: Apache-2.0
"""Batches of windows for training and evaluation of language models.

A window is ``seq_len + 1`` consecutive bytes of one segment: the first ``seq_len`` are the inputs,
the last ``seq_len`` the targets. Neighbouring windows share one byte, so no byte is a target twice.

In training an epoch is one pass over all windows in shuffled order, in which every segment's
windows start at another random offset. Batches run on from one epoch into the next. The position is
the number of batches taken; with the seed it decides the next batch, so a resumed run continues
exactly. In evaluation each byte that has a predecessor counts exactly once.

A global batch is what all processes take together in one step; each process builds its own rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardax.train.errors import DataPositionError, WindowError
from shardax.train.text import TextPart, hash64, permute

Arrays = dict[str, npt.NDArray[Any]]
_Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataPosition:
    """Position in training data, with the identity of that data.

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


class TrainBatches:
    """Endless iterator of shuffled training batches, to be saved and restored.

    Iterating gives ``{"inputs": int32 (rows, seq_len), "targets": int32 (rows, seq_len)}``, where
    ``rows`` is ``batch_size`` divided by the number of processes.

    Args:
        part: The text to draw from.
        batch_size: Windows per global batch.
        seq_len: Predicted bytes per window.
        seed: Seed of the order, in ``[0, 2**64)``.
        process_index: Which rows of the global batch to build: the ``process_index``-th of equal
            slices.
        process_count: How many slices there are.

    Raises:
        WindowError: No segment is long enough for a window, or the sizes are out of range or do not
            divide.

    Example:
        >>> from shardax.train.text import ByteText
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

    def __init__(
        self,
        part: TextPart,
        *,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        self._rows = _local_rows(part, batch_size, seq_len, process_index, process_count)
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 64:
            raise WindowError(f"The seed must be in [0, 2**64), got {seed!r}.")
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
            raise WindowError(
                f"No window of seq_len + 1 = {seq_len + 1} bytes fits: the longest segment of "
                f"{part!r} has {int(predicted.max()) + 1}. Use a smaller seq_len, a longer text, "
                "or a larger block_bytes in text.split()."
            )

    @property
    def windows_per_epoch(self) -> int:
        """How many windows make one epoch."""
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
            The fields of ``DataPosition``; it holds for the whole job, whatever the number of
            processes.
        """
        return dataclasses.asdict(self.position)

    def restore(self, state: Mapping[str, Any] | DataPosition) -> None:
        """Goes to a saved position; the batches from there followed it.

        Args:
            state: What ``state()`` or ``position`` gave.

        Raises:
            DataPositionError: It is no position, or was saved over other data, seed or sizes; all
                differences are listed. The iterator stays where it is.
        """
        own = self.state()
        found = dataclasses.asdict(state) if isinstance(state, DataPosition) else state
        step = found.get("step") if isinstance(found, Mapping) else None
        is_count = isinstance(step, int | np.integer) and not isinstance(step, bool) and step >= 0
        if not isinstance(found, Mapping) or set(found) != set(own) or not is_count:
            raise DataPositionError(
                f"Not a data position: {state!r}. A position has the entries {sorted(own)}, with a "
                "step of 0 or more; pass what batches.state() returned."
            )
        differing = [name for name in own if name != "step" and found[name] != own[name]]
        if differing:
            advice = (
                "The text is not the one that was trained on (or is split otherwise): open the "
                "same text and split it with the same arguments, or start the data anew by not "
                "restoring its position."
            )
            if "fingerprint" not in differing:
                arguments = ", ".join(f"{name}=<saved>" for name in differing)
                advice = (
                    "Make the batches with the saved values, TrainBatches(part, ..., "
                    f"{arguments}), and restore again."
                )
            lines = [f"  {name}: saved {found[name]!r}, here {own[name]!r}" for name in differing]
            raise DataPositionError(
                "The saved data position cannot be continued with these batches, because they "
                "would not be the ones that followed:\n" + "\n".join([*lines, advice])
            )
        self.step = int(found["step"])

    def batch_at(self, step: int) -> Arrays:
        """Returns the batch of a step without moving the iterator.

        Args:
            step: Counted from 0.

        Returns:
            ``{"inputs", "targets"}``, int32 (rows, seq_len).

        Raises:
            WindowError: ``step`` is negative.
        """
        if step < 0:
            raise WindowError(f"A step is 0 or more, got {step}.")
        rows = np.arange(self._rows.start, self._rows.stop, dtype=np.int64)
        epochs, places = np.divmod(step * self.batch_size + rows, self.windows_per_epoch)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._window_starts(int(epoch), places[here])
        return _batch(self.part.text.data[starts[:, None] + np.arange(self.seq_len + 1)])

    def _window_starts(self, epoch: int, places: _Int64Array) -> _Int64Array:
        order_key = int(hash64(self.seed, epoch)[0])
        windows = permute(places, self.windows_per_epoch, order_key)
        segments = np.searchsorted(self._first_window, windows, side="right") - 1
        choices = (self._room[segments] + 1).astype(np.uint64)
        offsets = (hash64(order_key, segments) % choices).astype(np.int64)
        within = (windows - self._first_window[segments]) * self.seq_len
        return self.part.starts[segments] + offsets + within

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> Arrays:
        batch = self.batch_at(self.step)
        self.step += 1
        return batch

    def __repr__(self) -> str:
        return (
            f"TrainBatches(batch_size={self.batch_size}, seq_len={self.seq_len}, seed={self.seed}, "
            f"step={self.step}, {self.part!r})"
        )


class EvalBatches:
    """Masked batches over a part of a text, in order.

    They are the same on every pass.

    Iterating starts a new pass and gives ``{"inputs": int32 (rows, seq_len), "targets": int32
    (rows, seq_len), "mask": bool (rows, seq_len)}``. Every batch has the same shape; where the mask
    is False inputs and targets are 0 and must not count.

    Args:
        part: The text to judge on.
        batch_size: Windows per global batch.
        seq_len: Predicted bytes per window.
        max_batches: At most this many batches, of windows spread evenly over the part; None takes
            all windows.
        process_index: Which rows of the global batch to build: the ``process_index``-th of equal
            slices.
        process_count: How many slices there are.

    Raises:
        WindowError: The part has no two consecutive bytes, or the sizes are out of range or do not
            divide.

    Example:
        >>> from shardax.train.text import ByteText
        >>> batches = EvalBatches(ByteText.from_bytes(b"abcdef").whole, batch_size=2, seq_len=3)
        >>> [batch["mask"].tolist() for batch in batches]
        [[[True, True, True], [True, True, False]]]
        >>> batches.targets
        5
    """

    def __init__(
        self,
        part: TextPart,
        *,
        batch_size: int,
        seq_len: int,
        max_batches: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        self._rows = _local_rows(part, batch_size, seq_len, process_index, process_count)
        if max_batches is not None and max_batches < 1:
            raise WindowError(f"max_batches must be 1 or more, or None for all, got {max_batches}.")
        self.batch_size = batch_size
        self.seq_len = seq_len
        predicted = part.ends - part.starts - 1
        counts = -(-predicted // seq_len)
        segments = np.repeat(np.arange(counts.size), counts)
        within = np.arange(segments.size) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = part.starts[segments] + within * seq_len
        lengths = np.minimum(seq_len, predicted[segments] - within * seq_len)
        if starts.size == 0:
            raise WindowError(
                f"There is nothing to predict: {part!r} has no two consecutive bytes. Hold out "
                "more text, or use a larger block_bytes in text.split()."
            )
        if max_batches is not None and starts.size > max_batches * batch_size:
            wanted = max_batches * batch_size
            picked = np.arange(wanted) * starts.size // wanted
            starts, lengths = starts[picked], lengths[picked]
        self._starts, self._lengths = starts, lengths
        # What exactly these windows read, so that baselines can be taken over the same text.
        ends = starts + lengths + 1
        begins_run = np.concatenate([[True], starts[1:] >= ends[:-1]])
        ends_run = np.concatenate([begins_run[1:], [True]])
        self.part = TextPart(part.text, starts[begins_run], ends[ends_run])

    @property
    def targets(self) -> int:
        """Number of predicted bytes in one pass over the global batches."""
        return int(self._lengths.sum())

    def __len__(self) -> int:
        return math.ceil(self._starts.size / self.batch_size)

    def __iter__(self) -> Iterator[Arrays]:
        data = self.part.text.data
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            windows = np.arange(first + self._rows.start, first + self._rows.stop)
            exists = windows < self._starts.size
            windows = np.where(exists, windows, 0)
            lengths = np.where(exists, self._lengths[windows], 0)
            mask = np.arange(self.seq_len) < lengths[:, None]
            places = self._starts[windows][:, None] + np.arange(self.seq_len + 1)
            batch = _batch(data[np.minimum(places, data.size - 1)])
            yield {**{name: array * mask for name, array in batch.items()}, "mask": mask}

    def __repr__(self) -> str:
        return (
            f"EvalBatches({len(self)} batches of {self.batch_size} x {self.seq_len}, "
            f"{self.targets:,} targets, {self.part!r})"
        )


def _local_rows(
    part: Any, batch_size: int, seq_len: int, process_index: int, process_count: int
) -> range:
    if not isinstance(part, TextPart):
        raise WindowError(
            f"part is a {type(part).__name__}, but windows are of a TextPart: text.whole, or one "
            "of training, held_out = text.split(0.1)."
        )
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise WindowError(f"{name} must be an integer of 1 or more, got {name}={size!r}.")
    if not 0 <= process_index < process_count:
        raise WindowError(
            f"process_index must be in [0, process_count), got process_index={process_index} and "
            f"process_count={process_count}. Use jax.process_index() and jax.process_count()."
        )
    if batch_size % process_count:
        raise WindowError(
            f"The global batch_size={batch_size} cannot be shared out evenly to {process_count} "
            f"processes. Use batch_size={-(-batch_size // process_count) * process_count}."
        )
    rows = batch_size // process_count
    return range(process_index * rows, (process_index + 1) * rows)


def _batch(windows: npt.NDArray[np.uint8]) -> Arrays:
    tokens = windows.astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
