# SPDX-License-Identifier: Apache-2.0
"""Files of token ids, memory-mapped.

Batches are read from the file itself, not from the map: who cuts the file gets an error, and
not SIGBUS.

A ``.bin`` file has the ids and nothing else, as uint16 or uint32 in little-endian order, so it does
not say of which dtype it is. ``TokenFile.write`` puts a description beside it, ``NAME.bin.json``:
dtype, number of tokens, and fingerprint. A ``.npy`` file says the first two itself. No file is read
whole: the fingerprint is of the dtype, the length, and 64 evenly spaced blocks of 64 KiB.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardax._files import require_file
from shardax.extend import Options
from shardax.train.data.text import MappedFile, TextPart, TokenData
from shardax.train.errors import DataError

_DTYPES = ("uint8", "uint16", "uint32", "int32")
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_WRITTEN = 1 << 20  # tokens that are converted at a time


@dataclass(frozen=True, eq=False, repr=False)
class TokenFile(TokenData):
    """A memory-mapped file of token ids.

    Its parts are given to ``TrainBatches`` and ``EvalBatches``, as those of a ``ByteText``; windows
    go over the ends of documents.

    A model needs a vocabulary with all ids of the file. With ``vocab_size`` an id that is
    not below it is refused when a batch reads it; without one nothing is checked, and a loss over
    ids beyond the model's vocabulary is NaN.

    Args:
        path: A ``.npy`` file of one dimension, or a file of ids alone, such as ``train.bin`` of
            nanoGPT.
        dtype: Of a file of ids alone, ``"uint16"`` or ``"uint32"``; None where ``write`` left a
            description, or for ``.npy``.
        vocab_size: How many entries the vocabulary has; None: not known.

    Attributes:
        data: Array (length,), read-only; pages are read from disk when touched. Batches are read
            without it, so that they notice when the file was cut.
        name: The path.
        vocab_size: As given.

    Raises:
        PathNotFoundError: There is no such file.
        DataError: The file is empty, was cut or changed, or has another dtype.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "train.bin"
        >>> tokens = TokenFile.write(path, [[1, 2, 3], [4, 5]], dtype="uint16", end=0)
        >>> len(tokens), tokens.data.tolist()
        (7, [1, 2, 3, 0, 4, 5, 0])
        >>> train, held_out = TokenFile(path).split(0.5, block=2)
        >>> len(train), len(held_out)
        (4, 3)
    """

    data: npt.NDArray[Any]
    name: str
    vocab_size: int | None

    unit = "tokens"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: npt.DTypeLike | None = None,
        vocab_size: int | None = None,
    ) -> None:
        path = Path(path)
        require_file(path, "tokens", ", or write one: TokenFile.write(path, tokens)")
        expected = None if dtype is None else _dtype(dtype, path)
        if path.suffix == ".npy":
            file, header = _open_npy(path), None
        else:
            header = _description(path)
            file = _open_raw(path, header, expected)

        data = file.data
        if expected is not None and data.dtype != expected:
            raise DataError(
                f"The file {str(path)!r} has tokens of {data.dtype}, but dtype={expected.name!r} "
                "was asked for. Leave dtype out."
            )
        if vocab_size is not None:
            Options(DataError).integers(vocab_size=vocab_size)

        fields = {"data": data, "name": str(path), "vocab_size": vocab_size, "_file": file}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

        if header is not None and self.fingerprint != header["fingerprint"]:
            raise DataError(
                f"The token file {str(path)!r} was changed after it was written: its fingerprint "
                f"is {self.fingerprint}, but {_beside(path).name} has {header['fingerprint']}. "
                "Write it again, or delete the description and give dtype=."
            )

    @staticmethod
    def write(
        path: str | os.PathLike[str],
        tokens: object,
        *,
        dtype: npt.DTypeLike = "uint16",
        end: int | None = None,
        vocab_size: int | None = None,
    ) -> TokenFile:
        """Writes tokens to a file, and opens it.

        Args:
            path: Where to; ``.npy`` makes a file of NumPy, every other name one of ids alone with a
                description beside it. A file that is there is replaced once all is written.
            tokens: Ids, as an array of one dimension; or an iterable of documents, each such an
                array or list, which are written one after the other and never all in memory.
            dtype: ``"uint16"``, for up to 65,536 ids, or ``"uint32"``.
            end: A token to write after each document; None: none.
            vocab_size: As for ``TokenFile``; ids that are not below it are refused.

        Returns:
            The open file.

        Raises:
            DataError: There are no tokens, or ids do not fit the dtype or the vocabulary.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "tokens.npy"
            >>> TokenFile.write(path, np.arange(10)).data.dtype
            dtype('uint16')
        """
        path, kind = Path(path), _dtype(dtype, Path(path))
        limit = np.iinfo(kind).max + 1
        limit = limit if vocab_size is None else min(limit, vocab_size)

        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        description = _beside(unfinished)

        count = 0
        try:
            with open(unfinished, "wb") as file:
                for part in _parts(tokens, end):
                    if part.size and not 0 <= int(part.min()) <= int(part.max()) < limit:
                        raise DataError(
                            f"Tokens for {str(path)!r} have ids from {part.min()} to {part.max()}, "
                            f"but dtype={kind.name!r}"
                            + ("" if vocab_size is None else f" with vocab_size={vocab_size}")
                            + f" has those from 0 to {limit - 1}."
                        )
                    file.write(part.astype(kind).tobytes())
                    count += part.size

            if not count:
                raise DataError(f"There are no tokens to write to {str(path)!r}.")

            if path.suffix == ".npy":
                _as_npy(unfinished, kind, count)
                os.replace(unfinished, path)
            else:
                fingerprint = _fingerprint(MappedFile(unfinished, kind))
                described = {"dtype": kind.name, "tokens": count, "fingerprint": fingerprint}
                description.write_text(json.dumps(described))  # all is written, then all is moved
                _beside(path).unlink(missing_ok=True)
                os.replace(unfinished, path)
                os.replace(description, _beside(path))
        finally:
            unfinished.unlink(missing_ok=True)
            description.unlink(missing_ok=True)

        return TokenFile(path, vocab_size=vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of dtype, length and samples, as 32 hex digits."""
        return _fingerprint(self)

    def split(
        self, held_out: float = 0.05, *, block: int | None = None
    ) -> tuple[TextPart, TextPart]:
        """Cuts the tokens into a training and a held-out part.

        They have no token in common. Which blocks are held out depends on the number of tokens and
        the arguments only.

        Args:
            held_out: Share to hold out, above 0 and at most 0.5.
            block: Length of a block in tokens; None takes 65,536, less for short files.

        Returns:
            (training part, held-out part).

        Raises:
            DataError: An argument is out of range, or the file is too short to cut.

        Example:
            >>> import tempfile
            >>> tokens = TokenFile.write(tempfile.mkdtemp() + "/a.bin", np.arange(1000))
            >>> train, held_out = tokens.split(0.1, block=10)
            >>> len(train), len(held_out)
            (900, 100)
        """
        return self.split_blocks(held_out, block, "block")

    def __repr__(self) -> str:
        return f"TokenFile({self.name!r}, {len(self):,} tokens of {self.data.dtype})"


def _dtype(dtype: npt.DTypeLike, path: Path) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.name not in _DTYPES:
        raise DataError(
            f"dtype={kind.name!r} is none of a token file ({str(path)!r}). Use 'uint16', or "
            "'uint32' for a vocabulary of more than 65,536 entries."
        )
    return kind.newbyteorder("<")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _description(path: Path) -> dict[str, Any] | None:
    """Returns the description left beside a file by ``write``, if any."""
    try:
        header = json.loads(_beside(path).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"The description {str(_beside(path))!r} of a token file cannot be read: {error}. "
            "Delete it, and give dtype=."
        ) from error
    if not isinstance(header, dict) or not {"dtype", "tokens", "fingerprint"} <= set(header):
        raise DataError(
            f"{str(_beside(path))!r} is no description of a token file. Delete it, and give dtype=."
        )
    return header


def _open_raw(path: Path, header, expected) -> MappedFile:
    size = path.stat().st_size
    if header is None and expected is None:
        raise DataError(
            f"The file {str(path)!r} has token ids alone and does not say of which dtype. Give it: "
            "TokenFile(path, dtype='uint16'), as nanoGPT writes them, or 'uint32'."
        )

    kind = expected if header is None else _dtype(header["dtype"], path)
    if header is not None and size != header["tokens"] * kind.itemsize:
        raise DataError(
            f"The token file {str(path)!r} has {size} bytes, but {_beside(path).name} tells of "
            f"{header['tokens']} tokens of {kind.name}, {header['tokens'] * kind.itemsize} "
            "bytes: it was cut, or replaced. Write it again."
        )

    if size % kind.itemsize:
        raise DataError(
            f"The file {str(path)!r} has {size} bytes, no multiple of the {kind.itemsize} of "
            f"{kind.name}: it was cut, or has another dtype."
        )

    if not size:
        raise _empty(path)

    return MappedFile(path, kind)


def _empty(path: Path) -> DataError:
    return DataError(f"The token file {str(path)!r} is empty.")


def _open_npy(path: Path) -> MappedFile:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"The file {str(path)!r} is no whole .npy file of numbers: {error}"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.name not in _DTYPES:
        raise DataError(
            f"The file {str(path)!r} has an array of {tokens.dtype} and shape {tokens.shape}, but "
            f"tokens are of one dimension, and of {', '.join(_DTYPES)}."
        )
    if not tokens.size:
        raise _empty(path)
    return MappedFile(path, tokens.dtype, tokens.offset)


def token_ids(document: object) -> npt.NDArray[Any]:
    """Returns a document as an array of token ids, or raises."""
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(
            "A document is a one-dimensional array of integers, its token ids, but one has dtype "
            f"{tokens.dtype} and shape {tokens.shape}."
        )
    return tokens


def _parts(tokens, end: int | None) -> Iterator[npt.NDArray[Any]]:
    """Yields arrays of ids, in order."""
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1:
        documents: Iterable[Any] = [tokens]
    elif isinstance(tokens, list) and tokens and isinstance(tokens[0], int):
        documents = [np.asarray(tokens)]
    else:
        documents = tokens
    for document in documents:
        array = token_ids(document)
        for start in range(0, array.size, _WRITTEN):
            yield array[start : start + _WRITTEN]
        if end is not None:
            yield np.array([end])


def _as_npy(path: Path, kind: np.dtype[Any], count: int) -> None:
    """Puts the header of NumPy before the ids of a file."""
    copy = path.with_name(f"{path.name}.npy")
    try:
        target = np.lib.format.open_memmap(copy, "w+", kind, (count,))
        source = np.memmap(path, kind, "r")
        for start in range(0, count, _WRITTEN):
            target[start : start + _WRITTEN] = source[start : start + _WRITTEN]
        target.flush()
        os.replace(copy, path)
    finally:
        copy.unlink(missing_ok=True)


def _fingerprint(tokens: MappedFile | TokenFile) -> str:
    data = tokens.data
    digest = hashlib.sha256(f"{data.dtype.name} {data.size}".encode())
    per = min(_SAMPLE_BYTES // data.dtype.itemsize, data.size)
    last_start = data.size - per
    starts = sorted({sample * last_start // (_SAMPLES - 1) for sample in range(_SAMPLES)})
    digest.update(tokens.windows(np.array(starts), per).tobytes())
    return digest.hexdigest()[:32]
