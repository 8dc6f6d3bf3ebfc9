# SPDX-License-Identifier: Apache-2.0
"""Rows packed of several documents.

A document of ``n`` tokens has ``n - 1`` targets and takes as many places of a row. One that does
not fit into a row is cut into pieces of ``seq_len`` targets, of which each begins with the last
target of the one before, so that no target is lost. A piece goes into the first row of the batch
that has room; the first piece that fits no row begins the next batch. What is packed follows from
the documents and their order alone, so a position is that of the document that is next, and how
much of it is used.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt

from shardax.train.data.batches import (
    OPTIONS,
    Arrays,
    Rows,
    check_seed,
    is_count,
    require_same_data,
    row_numbers,
)
from shardax.train.data.order import shuffled
from shardax.train.data.sources import (
    Positioned,
    go_back,
    go_on_without_end,
    host_batch,
    position_of,
    with_position,
)
from shardax.train.data.tokens import token_ids
from shardax.train.errors import DataError

_Tokens = npt.NDArray[np.int64]
_END = object()
_SAMPLES = 64  # documents that the fingerprint of a sequence reads


class PackedBatches:
    """Iterator of batches with rows packed of documents.

    Iterating gives ``inputs``, ``targets``, ``segment_ids`` and ``positions``, int32 (batch_size,
    seq_len), and ``mask``, bool: in a row the first document has the segment id 1, the next 2, and
    padding 0; positions count from 0 in each. No target is a token of another document, and every
    token but the first of each document is a target once. ``models.next_token_loss`` gives segment
    ids and positions to the model.

    Documents of more than ``seq_len + 1`` tokens are cut; those of less than 2 are left out.

    Over several processes each packs all rows, of the same documents. With documents of its own in
    each process: ``LocalBatches(PackedBatches(...), batch_size=...)``.

    Args:
        documents: A sequence of one-dimensional arrays of token ids, or an iterable of such with a
            position, as for a ``Trainer``. The iterable is read in its own order, in passes if it
            ends and can be read anew.
        batch_size: Rows per batch, over all processes together.
        seq_len: Places of a row.
        seed: Of the order of a sequence, another one in each pass; None keeps its order.
        passes: After how many passes over a sequence to end; None: never. The last batch then has
            padding. ``list(PackedBatches(..., passes=1))`` is held-out data for a ``Trainer``.
        key: Name of the tokens where documents are mappings, such as ``"input_ids"``.

    Raises:
        DataError: No document has two tokens, or an argument is out of range.

    Example:
        >>> documents = [np.array([1, 2, 3]), np.array([4, 5, 6, 7])]
        >>> batch = next(PackedBatches(documents, batch_size=1, seq_len=6, passes=1))
        >>> {name: array.tolist()[0] for name, array in batch.items() if name != "mask"}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'inputs': [1, 2, 4, 5, 6, 0], 'targets': [2, 3, 5, 6, 7, 0],
         'segment_ids': [1, 1, 2, 2, 2, 0], 'positions': [0, 1, 0, 1, 2, 0]}
    """

    def __init__(
        self,
        documents: Sequence[Any] | Iterable[Any],
        *,
        batch_size: int,
        seq_len: int,
        seed: int | None = None,
        passes: int | None = None,
        key: str | None = None,
    ) -> None:
        OPTIONS.integers(batch_size=batch_size, seq_len=seq_len)
        if passes is not None:
            OPTIONS.integers(passes=passes)
        if seed is not None:
            check_seed(seed)
        self.documents = documents
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.key = key
        self.step = 0
        self._next: _Tokens | None = None  # the document that is read, and not used up
        self._used = 0  # places of it that are

        self._identity: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
        if _is_sequence(documents):
            self._order: Any = _Order(cast("Sequence[Any]", documents), seed, passes)
            self._identity |= {"seed": seed, "documents": self._order.fingerprint(self._tokens)}
        elif seed is not None or passes is not None:
            raise DataError(
                "seed and passes are of a sequence of documents, but these are read in the order "
                f"of their {type(documents).__name__}. Shuffle and repeat them there."
            )
        else:
            self._order = with_position(documents)
            if not isinstance(self._order, Positioned):
                raise DataError(
                    f"The documents ({type(documents).__name__}) are no sequence, and have no "
                    "position to resume at. Give a list of arrays, or what has state() and "
                    "restore(), such as an iterator of grain or an IterableDataset of datasets."
                )
            go_on_without_end(self._order)
        self._before = self._position()  # of the document that is next

    def _position(self):
        return position_of(cast(Positioned, self._order))

    def state(self) -> dict[str, Any]:
        """Returns the position, for a checkpoint.

        Returns:
            Batches taken, the position of the next document, and how much of it is used.
        """
        documents_at = copy.deepcopy(self._before)
        position = {"step": self.step, "used": self._used, "documents_at": documents_at}
        return {**position, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position.

        Args:
            state: What ``state()`` gave.

        Raises:
            DataError: It is no position, or of other documents, seed or sizes.
        """
        position = self.state()
        if not isinstance(state, Mapping) or set(state) != set(position):
            raise DataError(
                f"Not a position of packed batches: {state!r}. Pass what batches.state() returned."
            )
        differing = [name for name in self._identity if state[name] != self._identity[name]]
        remedy = "Pack the same documents with the saved arguments."
        require_same_data(differing, state, position, remedy)
        go_back(self._order, state["documents_at"])
        self._before, self._next = copy.deepcopy(state["documents_at"]), None
        self.step, self._used = int(state["step"]), int(state["used"])

    def _piece(self) -> _Tokens | None:
        """Returns the next piece without taking it; None at the end."""
        while self._next is None or self._used >= self._next.size - 1:
            if self._next is not None:
                self._next, self._used = None, 0
                self._before = self._position()
            document = next(self._order, _END)
            if document is _END:
                return None
            self._next = self._tokens(document)
        return self._next[self._used : self._used + self.seq_len + 1]

    def _tokens(self, document) -> _Tokens:
        if self.key is not None:
            document = document[self.key]
        elif isinstance(document, Mapping):
            raise DataError(
                f"A document is a mapping with {', '.join(map(repr, document))}. Say which of "
                'these are the tokens, such as PackedBatches(..., key="input_ids").'
            )
        tokens = token_ids(host_batch(document))
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 31:
            raise DataError(
                f"Token ids are from 0 to 2**31 - 1, but a document has ids from {tokens.min()} to "
                f"{tokens.max()}."
            )
        return tokens.astype(np.int64)

    def __iter__(self) -> PackedBatches:
        return self

    def __next__(self) -> Arrays:
        shape = (self.batch_size, self.seq_len)
        names = ("inputs", "targets", "segment_ids", "positions")
        batch: Arrays = {name: np.zeros(shape, np.int32) for name in names}
        filled, segments = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)

        # A piece goes into the first row with room; what finds none begins the next batch.
        while (piece := self._piece()) is not None:
            size = piece.size - 1
            fitting = np.flatnonzero(filled + size <= self.seq_len)
            if not fitting.size:
                break

            row = int(fitting[0])
            places = slice(int(filled[row]), int(filled[row]) + size)
            segments[row] += 1
            for name, values in (
                ("inputs", piece[:-1]),
                ("targets", piece[1:]),
                ("segment_ids", segments[row]),
                ("positions", np.arange(size)),
            ):
                batch[name][row, places] = values
            filled[row] += size
            self._used += size

        if not filled.any():
            raise StopIteration
        self.step += 1
        batch["mask"] = batch["segment_ids"] != 0
        return batch

    def by_rows(self, rows: Rows) -> Iterator[Arrays]:
        """Iterates over some rows of each batch, and moves this iterator on.

        Args:
            rows: Numbers of the rows in the batch.

        Returns:
            An iterator of batches that hold these rows only; all are packed.

        Raises:
            DataError: A row is not one of the batch.
        """
        rows = row_numbers(rows, self.batch_size)
        return (jax.tree.map(lambda array: array[rows], batch) for batch in self)

    def __repr__(self) -> str:
        return (
            f"PackedBatches({type(self.documents).__name__}, batch_size={self.batch_size}, "
            f"seq_len={self.seq_len}, step={self.step})"
        )


def _is_sequence(documents: object) -> bool:
    """Whether documents are read by number, in any order."""
    if type(documents).__module__.partition(".")[0] == "grain":
        return False  # which has an order of its own
    return hasattr(documents, "__getitem__") and hasattr(documents, "__len__")


class _Order:
    """Passes over a sequence of documents."""

    def __init__(self, documents: Sequence[Any], seed: int | None, passes: int | None) -> None:
        if not len(documents):
            raise DataError("There are no documents to pack; give at least one.")
        self.documents, self.seed, self.passes = documents, seed, passes
        self.taken = 0

    def state(self) -> int:
        return self.taken

    def restore(self, state) -> None:
        if not is_count(state):
            raise DataError(f"Not a number of documents: {state!r}.")
        self.taken = int(state)

    def __iter__(self) -> _Order:
        return self

    def __next__(self) -> Any:
        count = len(self.documents)
        if self.passes is not None and self.taken >= self.passes * count:
            raise StopIteration

        index = self.taken % count
        if self.seed is not None:
            (index,) = shuffled(np.array([self.taken]), count, self.seed).tolist()
        self.taken += 1
        return self.documents[index]

    def fingerprint(self, tokens_of) -> str:
        """Returns a hash of their number and some, or raises."""
        count = len(self.documents)
        picked = sorted({index * (count - 1) // (_SAMPLES - 1) for index in range(_SAMPLES)})
        sampled = [tokens_of(self.documents[index]) for index in picked]
        digest = hashlib.sha256(json.dumps([count, [tokens.size for tokens in sampled]]).encode())
        for tokens in sampled:
            digest.update(tokens.tobytes())
        if max(tokens.size for tokens in sampled) < 2 and not any(
            tokens_of(document).size > 1 for document in self.documents
        ):
            raise DataError(
                f"None of the {count} documents has two tokens, so there is nothing to predict."
            )
        return digest.hexdigest()[:32]
