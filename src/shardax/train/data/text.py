# SPDX-License-Identifier: Apache-2.0
"""Byte-level text and its split into a training and a held-out part.

A ``ByteText`` is a read-only array of bytes. Its fingerprint is a hash of the bytes alone, so the
same text has the same fingerprint on every machine. A ``TextPart`` is the text restricted to
segments, runs of consecutive bytes; no window of a part crosses the gap between two segments.

The split cuts a text into blocks and holds out one of every N consecutive ones, chosen by a hash of
the group's number: the end of a folder or a book differs from its beginning, but blocks spread
evenly over the text are samples of the same distribution.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardax._files import PathNotFoundError, require_file
from shardax.extend import Options
from shardax.train.data.order import hash64
from shardax.train.errors import DataError

ByteArray = npt.NDArray[np.uint8]
_OPTIONS = Options(DataError)

_LARGEST_BLOCK = 1 << 16
_FULLY_HASHED = 1 << 28
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 1 << 10
_READ_BYTES = 1 << 22
# Left out of the standard library: installed packages, test suites, files of one build.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_BUILD_SPECIFIC = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class MappedFile:
    """A file of numbers: mapped as one array, and read in windows.

    Whoever touches a map beyond the end of its file is ended by SIGBUS, as where the file was cut
    since. So windows are read from the file itself, which costs as much, and says what is missing.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, offset: int = 0) -> None:
        self.path = path
        self.offset = offset  # bytes before the numbers
        with open(path, "rb") as file:
            mapped = np.memmap(file, dtype, "r", offset)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        # A plain array over the map: slices of np.memmap carry a slow subclass along.
        self.data: npt.NDArray[Any] = np.asarray(mapped)

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Returns the numbers from some places on, with zeros past the end."""
        windows = np.zeros((starts.size, length), self.data.dtype)
        for window, start in zip(windows, starts.tolist(), strict=True):
            self._fill(window[: self.data.size - start], start)
        return windows

    def blocks(self, length: int) -> Iterator[npt.NDArray[Any]]:
        """Yields all numbers, some at a time."""
        for start in range(0, self.data.size, length):
            block = np.empty(min(length, self.data.size - start), self.data.dtype)
            self._fill(block, start)
            yield block

    def require_whole(self) -> None:
        """Raises DataError if the file is shorter than its map."""
        size = os.fstat(self._descriptor).st_size
        if size < self.offset + self.data.nbytes:
            raise self._cut(size)

    def _fill(self, numbers: npt.NDArray[Any], start: int) -> None:
        """Reads the numbers from a place on."""
        missing = numbers.view(np.uint8).data
        position = self.offset + start * numbers.itemsize
        try:
            while missing:
                count = os.preadv(self._descriptor, [missing], position)
                if not count:
                    raise self._cut(os.fstat(self._descriptor).st_size)
                missing, position = missing[count:], position + count
        except OSError as error:  # such as a file system that is gone
            raise DataError(f"Cannot read {str(self.path)!r}: {error}.") from error

    def _cut(self, size: int) -> DataError:
        return DataError(
            f"The file {str(self.path)!r} was cut while it is read: it has {size:,} bytes, of "
            f"{self.offset + self.data.nbytes:,} when it was opened. Put the whole file back, and "
            "go on from the last checkpoint. Who writes a file anew that is read should write "
            "another one and rename it, as TokenFile.write does."
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # the numbers travel without their file


@dataclass(frozen=True, eq=False, repr=False)
class TokenData:
    """Base of sequences of tokens, the source of windows."""

    data: npt.NDArray[Any]
    name: str
    # From which the data is, if it is from one.
    _file: MappedFile | None = field(default=None, kw_only=True)
    unit: ClassVar[str]  # what a token is called, for people

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the tokens."""
        raise NotImplementedError

    @property
    def whole(self) -> TextPart:
        """All of it, as one segment."""
        return TextPart(self, np.array([0]), np.array([len(self)]))

    def split_blocks(
        self, held_out: float, block: int | None, argument: str
    ) -> tuple[TextPart, TextPart]:
        """Cuts into blocks, and holds some of them out."""
        expected = "a share above 0 and at most 0.5"
        remedy = "For example text.split(held_out=0.05); text.whole is the text without a split."
        _OPTIONS.check("held_out", held_out, 0 < held_out <= 0.5, expected, remedy)
        group_size = round(1 / held_out)

        if block is None:
            block = max(1, min(_LARGEST_BLOCK, len(self) // (4 * group_size)))
        blocks = -(-len(self) // block) if block >= 1 else 0
        if blocks < group_size:
            raise DataError(
                f"Cannot hold out one block in {group_size}: {self.name} has {len(self)} "
                f"{self.unit}, which is {blocks} blocks of {argument}={block}. Use a longer text, "
                f"or a {argument} from 1 to {max(1, len(self) // group_size)}."
            )

        groups = np.arange(-(-blocks // group_size))
        chosen = groups * group_size + (hash64(groups) % np.uint64(group_size)).astype(np.int64)
        is_held_out = np.zeros(blocks, dtype=np.bool_)
        is_held_out[chosen[chosen < blocks]] = True
        return self._part_of_blocks(~is_held_out, block), self._part_of_blocks(is_held_out, block)

    def _part_of_blocks(self, chosen: npt.NDArray[np.bool_], block: int) -> TextPart:
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        starts, ends = edges[0::2] * block, edges[1::2] * block
        return TextPart(self, starts, np.minimum(ends, len(self)))

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Returns the tokens from some places on, with anything past the end."""
        if self._file is not None:
            return self._file.windows(starts, length)
        places = starts[:, None] + np.arange(length)
        return self.data[np.minimum(places, self.data.size - 1)]

    def require_whole(self) -> None:
        """Raises DataError if the file of the tokens was cut."""
        if self._file is not None:
            self._file.require_whole()

    def __len__(self) -> int:
        return self.data.size


@dataclass(frozen=True, eq=False, repr=False)
class ByteText(TokenData):
    """A text as bytes.

    Make one with ``from_bytes``, ``from_file``, ``from_folder``, ``standard_library`` or
    ``open_text``.

    Attributes:
        data: uint8 array (length,), read-only.
        name: Where the text comes from, for people.

    Example:
        >>> text = ByteText.from_bytes(b"to be or not to be")
        >>> len(text), text.vocab_size
        (18, 256)
    """

    vocab_size: ClassVar[int] = 256
    unit: ClassVar[str] = "bytes"

    data: ByteArray
    name: str

    @classmethod
    def from_bytes(cls, data: bytes | ByteArray, name: str = "bytes in memory") -> ByteText:
        """Takes text in memory.

        Args:
            data: The bytes, or a uint8 array (length,), which is not copied.
            name: Where the text comes from, for people.

        Returns:
            The text.

        Raises:
            DataError: There are no bytes, or the array is not one-dimensional uint8.

        Example:
            >>> len(ByteText.from_bytes(b"abc"))
            3
        """
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
        if array.dtype != np.uint8 or array.ndim != 1:
            raise DataError(
                f"Text is a uint8 array of one dimension, but {name} has dtype {array.dtype} and "
                f"shape {array.shape}. Of a string: ByteText.from_bytes(string.encode())."
            )
        if array.size == 0:
            raise DataError(f"Text must not be empty, but {name} has no bytes.")
        view = array.view()
        view.flags.writeable = False
        return cls(view, name)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ByteText:
        """Memory-maps one file.

        Args:
            path: The file.

        Returns:
            The text; pages are read from disk when touched.

        Raises:
            PathNotFoundError: There is no such file.
            DataError: The file is empty.

        Example:
            >>> text = ByteText.from_file(os.__file__)
            >>> bytes(text.data[:3])
            b'r""'
        """
        path = Path(path)
        require_file(path, "text")
        if path.stat().st_size == 0:
            raise DataError(f"The text file {str(path)!r} is empty. Pass a file that holds text.")
        file = MappedFile(path, np.uint8)
        text = cls(file.data, str(path))
        object.__setattr__(text, "_file", file)
        return text

    @classmethod
    def from_folder(
        cls, path: str | os.PathLike[str], *, suffixes: Sequence[str] | None = None
    ) -> ByteText:
        """Joins the files below a folder, each followed by NUL.

        The joined text is memory-mapped, in a temporary file without a name.

        Args:
            path: The folder, read recursively, in order of the bytes of the relative paths. Hidden
                files and folders, ``__pycache__`` and empty files are left out; links to files are
                followed, links to folders are not.
            suffixes: Endings to keep, such as ``(".txt",)``; None keeps every file.

        Returns:
            The text; pages are read from disk when touched. The folder for temporary files
            (``TMPDIR``) must have room for a copy of the files.

        Raises:
            PathNotFoundError: There is no such folder.
            DataError: No file matches, one cannot be read, or there is no room for the copy.

        Example:
            >>> import json
            >>> text = ByteText.from_folder(Path(json.__file__).parent, suffixes=(".py",))
            >>> int((text.data == 0).sum())  # five modules
            5
        """
        return cls.from_bytes(_joined_files(Path(path), suffixes), str(Path(path)))

    @classmethod
    def standard_library(cls) -> ByteText:
        """Source text of the running Python's standard library.

        Returns:
            About 10 MB of Python source, the same for the same Python version on every machine:
            without tests, installed packages and files that the build writes.

        Example:
            >>> len(ByteText.standard_library()) > 1_000_000
            True
        """
        root = Path(sysconfig.get_path("stdlib"))
        joined = _joined_files(root, (".py",), _NOT_LIBRARY, _BUILD_SPECIFIC)
        return cls.from_bytes(joined, "the Python standard library")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the length and the bytes, as 32 hex digits.

        Above 256 MiB, of the length and 1024 evenly spaced blocks of 64 KiB (first and last
        included), so that opening a large text stays fast.
        """
        digest = hashlib.sha256(b"%d\x00" % len(self))
        if len(self) > _FULLY_HASHED:
            last_start = len(self) - _SAMPLE_BYTES
            for sample in range(_SAMPLES):
                start = np.array([sample * last_start // (_SAMPLES - 1)])
                digest.update(self.windows(start, _SAMPLE_BYTES).data)
        elif self._file is None:
            digest.update(self.data.data)
        else:
            for block in self._file.blocks(_READ_BYTES):
                digest.update(block.data)
        return digest.hexdigest()[:32]

    def split(
        self, held_out: float = 0.05, *, block_bytes: int | None = None
    ) -> tuple[TextPart, TextPart]:
        """Cuts the text into a training and a held-out part.

        They have no byte in common.

        Deterministic: depends on the length of the text and the arguments only.

        Args:
            held_out: Share of the text to hold out, above 0 and at most 0.5; one block in ``round(1
                / held_out)``.
            block_bytes: Length of a block in bytes; None takes 64 KiB, less for texts under 4
                groups of that.

        Returns:
            (training part, held-out part).

        Raises:
            DataError: ``held_out`` or ``block_bytes`` is out of range, or the text is too short to
                cut.

        Example:
            >>> train, held_out = ByteText.from_bytes(bytes(1000)).split(0.1, block_bytes=10)
            >>> len(train), len(held_out)
            (900, 100)
        """
        return self.split_blocks(held_out, block_bytes, "block_bytes")

    def __repr__(self) -> str:
        return f"ByteText({self.name!r}, {len(self):,} bytes)"


@dataclass(frozen=True, eq=False, repr=False)
class TextPart:
    """Segments of a text, to train on or to hold out.

    Attributes:
        text: The text.
        starts: int64 array (segments,), first byte of each segment; ascending.
        ends: int64 array (segments,), one past the last byte of each; no segment is empty and none
            overlap.

    Example:
        >>> text = ByteText.from_bytes(b"one two three")
        >>> part = TextPart(text, np.array([0, 8]), np.array([3, 13]))
        >>> [bytes(segment) for segment in part.segments()], len(part)
        ([b'one', b'three'], 8)
    """

    text: TokenData
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        starts, ends = self.starts, self.ends
        edges = np.column_stack([starts, ends]).ravel()
        in_order = bool((starts < ends).all() and (np.diff(edges) >= 0).all())
        if not edges.size or not in_order or edges[0] < 0 or edges[-1] > len(self.text):
            raise DataError(
                "Segments must be non-empty, ascending, disjoint and inside the text (0 to "
                f"{len(self.text)}), got starts={starts.tolist()} and ends={ends.tolist()}."
            )

    def segments(self) -> Iterator[npt.NDArray[Any]]:
        """Yields the segments in order.

        Yields:
            Array (length,) per segment, uint8 of bytes: a view, nothing is copied.

        Raises:
            DataError: The file of the text was cut since it was opened.
        """
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            self.text.require_whole()
            yield self.text.data[start:end]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the text's fingerprint and the segments' bounds."""
        bounds = np.column_stack([self.starts, self.ends]).astype("<i8").tobytes()
        return hashlib.sha256(self.text.fingerprint.encode() + bounds).hexdigest()[:32]

    def __len__(self) -> int:
        return int((self.ends - self.starts).sum())

    def __repr__(self) -> str:
        size = f"{len(self):,} {self.text.unit}"
        return f"TextPart({size} in {self.starts.size} segments of {self.text!r})"


def open_text(
    path: str | os.PathLike[str] | None = None, *, suffixes: Sequence[str] | None = None
) -> ByteText:
    """Opens a file, a folder, or the default text.

    Args:
        path: A file or a folder; None is the source text of the running Python's standard library.
        suffixes: For a folder, the endings to keep; None keeps every file.

    Returns:
        The text, memory-mapped; the files of a folder are joined in a temporary file.

    Raises:
        PathNotFoundError: There is nothing at ``path``.
        DataError: What is there holds no text.

    Example:
        >>> open_text(os.__file__).name == os.__file__
        True
    """
    if path is None:
        return ByteText.standard_library()
    if Path(path).is_dir():
        return ByteText.from_folder(path, suffixes=suffixes)
    return ByteText.from_file(path)


def _joined_files(
    root: Path,
    suffixes: Sequence[str] | None,
    skipped_folders: Collection[str] = (),
    skipped_prefixes: tuple[str, ...] = (),
) -> ByteArray:
    """Joins files by path, each followed by NUL, in a memory-mapped file."""
    if not root.is_dir():
        raise PathNotFoundError(
            f"There is no folder {str(root)!r} to read text from. Check the path, or leave it out "
            "to train on the source text of Python's standard library."
        )

    paths: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name != "__pycache__" and name not in skipped_folders
        ]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        paths += [file.relative_to(root).as_posix() for file in files if file.is_file()]
    # By bytes, so that the order depends neither on the file system nor on the locale.
    paths = sorted(
        (path for path in paths if not path.startswith(skipped_prefixes)), key=os.fsencode
    )

    chosen_paths = [path for path in paths if suffixes is None or path.endswith(tuple(suffixes))]
    try:
        # A nameless file, which is gone with its map: a corpus may be larger than memory.
        with tempfile.TemporaryFile() as joined:
            for path in chosen_paths:
                content = _read(root / path)
                # NUL does not occur in text, so a model can learn where files end.
                joined.write(content + b"\x00" if content else b"")
            joined.flush()
            if joined.tell():
                return np.asarray(np.memmap(joined, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise DataError(
            f"Cannot join the files below {str(root)!r} in a temporary file: {error}. Make room "
            "for a copy of them, set TMPDIR to a folder that has it, or pass one file."
        ) from error

    name_rule = "any name" if suffixes is None else f"a name ending in {' or '.join(suffixes)}"
    seen = sorted({Path(path).suffix or "(none)" for path in paths})
    raise DataError(
        f"No non-empty file with {name_rule} below {str(root)!r}; the endings there are: "
        f"{', '.join(seen) or 'none, the folder is empty'}. Pass some of them as suffixes=(...)."
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"Cannot read {str(path)!r}: {error}. Make it readable, or leave it out with "
            "suffixes=(...)."
        ) from error
