# SPDX-License-Identifier: Apache-2.0
"""Byte-level text: what a language model trains on when its vocabulary is the 256 bytes.

A *text* (``ByteText``) is a read-only array of bytes, memory-mapped where it comes from disk. Its
*fingerprint* is a hash of the bytes alone, so the same text has the same fingerprint on every
machine. A *part* (``TextPart``) is the text restricted to some *segments*, runs of consecutive
bytes; nothing that reads a part ever crosses the gap between two segments.

The *held-out split* cuts a text in a training and a held-out part. The text is cut into blocks, and
of every N consecutive blocks one, chosen by a hash of the group's number, is held out. Why not
simply the last N-th: a folder in path order, or a book, has different things at its end, so the
loss there would measure the difference between beginning and end. Blocks spread evenly over the
text make both parts samples of the same distribution. No held-out byte is ever part of a training
window.

Random order without memory: a permutation computed one entry at a time.

A *keyed permutation* of ``range(size)`` answers "which item stands at place i?" without ever
listing the items, so an epoch over billions of windows costs no memory and any place can be looked
up directly; resuming in the middle of an epoch is arithmetic, not replay. It is a balanced Feistel
network over the next power of four, with *cycle walking* (places that land outside the range are
sent round again) to cut it down to ``size``.

All arithmetic is on unsigned 64-bit integers written out here, so the order depends neither on the
machine nor on the version of NumPy (whose ``Generator`` streams may change between releases).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardax.train.corpus import gather, list_folder, list_standard_library
from shardax.train.errors import TextNotFoundError, TextSourceError, WindowError

# --- Shuffle ---

UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 6
_U64 = np.uint64
_LOW_64 = (1 << 64) - 1


def mix64(words: npt.ArrayLike) -> UInt64Array:
    """Scramble 64-bit words: a bijection in which every output bit depends on every input bit.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).

    Args:
        words: Integers in ``[0, 2**64)``, any shape.

    Returns:
        uint64 array of the same shape (at least one-dimensional).

    Example:
        >>> [hex(word) for word in mix64([0, 1]).tolist()]
        ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    x = np.atleast_1d(np.asarray(words, dtype=_U64))
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def hash64(*words: npt.ArrayLike) -> UInt64Array:
    """Hash a sequence of 64-bit words to one, elementwise over arrays that broadcast together.

    Args:
        *words: Integers in ``[0, 2**64)``; the order matters.

    Returns:
        uint64 array of the broadcast shape (at least one-dimensional).

    Example:
        >>> bool(hash64(1, 2)[0] == hash64(2, 1)[0])
        False
    """
    digest = np.zeros(1, dtype=_U64)
    for word in words:
        digest = mix64(digest ^ np.asarray(word, dtype=_U64))
    return digest


def permute(places: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Which items stand at the given places of a shuffled ``range(size)``.

    Args:
        places: Integers in ``[0, size)``, any shape.
        size: How many items there are, at least 1 and at most ``2**62``.
        key: Selects the permutation; taken modulo ``2**64``.

    Returns:
        int64 array of the shape of ``places`` (at least one-dimensional), in ``[0, size)``; a
        bijection.

    Raises:
        WindowError: ``size`` is out of range or a place is outside ``[0, size)``.

    Example:
        >>> permute(range(8), size=8, key=1).tolist() == permute(range(8), size=8, key=2).tolist()
        False
        >>> sorted(permute(range(8), size=8, key=1).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if not 1 <= size <= 1 << 62:
        raise WindowError(f"permute() needs 1 <= size <= 2**62, got size={size}.")
    start = np.atleast_1d(np.asarray(places, dtype=np.int64))
    if start.size and (start.min() < 0 or start.max() >= size):
        raise WindowError(f"permute() got a place outside [0, {size}).")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash64(key & _LOW_64, np.arange(_ROUNDS))
    x = _feistel(start.astype(_U64), half_bits, round_keys)
    # The domain is at most four times the range, so few entries walk and none walks long.
    while (outside := x >= _U64(size)).any():
        x[outside] = _feistel(x[outside], half_bits, round_keys)
    return x.astype(np.int64)


def _feistel(x: UInt64Array, half_bits: int, round_keys: UInt64Array) -> UInt64Array:
    shift, mask = _U64(half_bits), _U64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right


# --- Text ---

ByteArray = npt.NDArray[np.uint8]

_LARGEST_BLOCK = 1 << 16
_FULLY_HASHED = 1 << 28
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 1 << 10


@dataclass(frozen=True, eq=False, repr=False)
class ByteText:
    """A text as bytes, usually memory-mapped.

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

    data: ByteArray
    name: str

    @classmethod
    def from_bytes(cls, data: bytes | ByteArray, name: str = "bytes in memory") -> ByteText:
        """Take text that is in memory.

        Args:
            data: The bytes, or a uint8 array (length,), which is not copied.
            name: Where the text comes from, for people.

        Returns:
            The text.

        Raises:
            TextSourceError: There are no bytes, or the array is not one-dimensional uint8.

        Example:
            >>> len(ByteText.from_bytes(b"abc"))
            3
        """
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
        if array.dtype != np.uint8 or array.ndim != 1:
            raise TextSourceError(
                f"Text must be a one-dimensional uint8 array, but {name} has dtype {array.dtype} "
                f"and shape {array.shape}. Encode strings first: "
                "ByteText.from_bytes(string.encode())."
            )
        if array.size == 0:
            raise TextSourceError(f"Text must not be empty, but {name} has no bytes.")
        view = array.view()
        view.flags.writeable = False
        return cls(view, name)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ByteText:
        """Memory-map one file.

        Args:
            path: The file.

        Returns:
            The text; pages are read from disk when touched.

        Raises:
            TextNotFoundError: There is no such file.
            TextSourceError: The file is empty.

        Example:
            >>> text = ByteText.from_file(os.__file__)
            >>> bytes(text.data[:3])
            b'r""'
        """
        path = Path(path)
        if not path.is_file():
            raise TextNotFoundError(
                f"There is no file {str(path)!r} to read text from. Check the path."
            )
        if path.stat().st_size == 0:
            raise TextSourceError(
                f"The text file {str(path)!r} is empty. Pass a file that holds text."
            )
        return cls(_map_bytes(path), str(path))

    @classmethod
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        suffixes: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> ByteText:
        """Join the files below a folder, in order of path, each followed by one NUL byte.

        Args:
            path: The folder, read recursively; hidden files and folders are left out.
            suffixes: Endings to keep, such as ``(".txt",)``; None keeps every file.
            cache_dir: Where the joined file is kept; None means ``$XDG_CACHE_HOME/shardax/text``.

        Returns:
            The text, memory-mapped from the joined file.

        Raises:
            TextNotFoundError: There is no such folder.
            TextSourceError: No file matches, a file changes while it is read, or the cache cannot
                be written.

        Example:
            >>> import json, tempfile
            >>> package = Path(json.__file__).parent
            >>> with tempfile.TemporaryDirectory() as cache:
            ...     text = ByteText.from_folder(package, suffixes=(".py",), cache_dir=cache)
            >>> int((text.data == 0).sum())  # five modules
            5
        """
        root = Path(path)
        joined = gather(
            root, list_folder(root, suffixes), None if cache_dir is None else Path(cache_dir)
        )
        return cls(_map_bytes(joined), str(root))

    @classmethod
    def standard_library(cls, *, cache_dir: str | os.PathLike[str] | None = None) -> ByteText:
        """The source text of the running Python's standard library: real input on any machine.

        Args:
            cache_dir: Where the joined file is kept; None means ``$XDG_CACHE_HOME/shardax/text``.

        Returns:
            About 10 MB of Python source, the same for the same Python version; without tests and
            installed packages.

        Raises:
            TextSourceError: The cache cannot be written.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as cache:
            ...     len(ByteText.standard_library(cache_dir=cache)) > 1_000_000
            True
        """
        root, files = list_standard_library()
        joined = gather(root, files, None if cache_dir is None else Path(cache_dir))
        return cls(_map_bytes(joined), "the Python standard library")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the length and the bytes, as 32 hex digits.

        Above 256 MiB, of the length and 1024 evenly spaced blocks of 64 KiB (first and last
        included), so that opening a large text stays fast.
        """
        digest = hashlib.sha256(b"%d\x00" % len(self))
        if len(self) <= _FULLY_HASHED:
            digest.update(self.data.data)
        else:
            last = len(self) - _SAMPLE_BYTES
            for sample in range(_SAMPLES):
                start = sample * last // (_SAMPLES - 1)
                digest.update(self.data[start : start + _SAMPLE_BYTES].data)
        return digest.hexdigest()[:32]

    @property
    def whole(self) -> TextPart:
        """All of the text, as one segment."""
        return TextPart(self, np.array([0]), np.array([len(self)]))

    def split(
        self, held_out: float = 0.05, *, block_bytes: int | None = None
    ) -> tuple[TextPart, TextPart]:
        """Cut into a training and a held-out part that share no byte.

        Deterministic: depends on the length of the text and the arguments only. See the module's
        docstring for the why of the blocks.

        Args:
            held_out: Share of the text to hold out, above 0 and at most 0.5; one block in ``round(1
                / held_out)``.
            block_bytes: Length of a block in bytes; None takes 64 KiB, less for texts under 4
                groups of that.

        Returns:
            (training part, held-out part).

        Raises:
            TextSourceError: ``held_out`` or ``block_bytes`` is out of range, or the text is too
                short to cut.

        Example:
            >>> train, held_out = ByteText.from_bytes(bytes(1000)).split(0.1, block_bytes=10)
            >>> len(train), len(held_out)
            (900, 100)
        """
        if not 0 < held_out <= 0.5:
            raise TextSourceError(
                f"held_out must be a share above 0 and at most 0.5, got {held_out}. For example "
                "text.split(held_out=0.05); text.whole is the text without a split."
            )
        group_size = round(1 / held_out)
        if block_bytes is None:
            block_bytes = max(1, min(_LARGEST_BLOCK, len(self) // (4 * group_size)))
        blocks = -(-len(self) // block_bytes) if block_bytes >= 1 else 0
        if blocks < group_size:
            raise TextSourceError(
                f"Cannot hold out one block in {group_size}: {self.name} has {len(self)} bytes, "
                f"which is {blocks} blocks of block_bytes={block_bytes}. Use a longer text, or a "
                f"block_bytes from 1 to {max(1, len(self) // group_size)}."
            )
        is_held_out = _held_out_blocks(blocks, group_size)
        return (
            self._part_of_blocks(~is_held_out, block_bytes),
            self._part_of_blocks(is_held_out, block_bytes),
        )

    def _part_of_blocks(self, chosen: npt.NDArray[np.bool_], block_bytes: int) -> TextPart:
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        starts, ends = edges[0::2] * block_bytes, edges[1::2] * block_bytes
        return TextPart(self, starts, np.minimum(ends, len(self)))

    def __len__(self) -> int:
        return self.data.size

    def __repr__(self) -> str:
        return f"ByteText({self.name!r}, {len(self):,} bytes)"


@dataclass(frozen=True, eq=False, repr=False)
class TextPart:
    """Some segments of a text: what a training run may read, or what is held out from it.

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

    text: ByteText
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        starts, ends = self.starts, self.ends
        edges = np.column_stack([starts, ends]).ravel()
        in_order = bool((starts < ends).all() and (np.diff(edges) >= 0).all())
        if not edges.size or not in_order or edges[0] < 0 or edges[-1] > len(self.text):
            raise TextSourceError(
                "The segments of a TextPart must be non-empty, ascending, disjoint and inside the "
                f"text (0 to {len(self.text)}), got starts={starts.tolist()} and "
                f"ends={ends.tolist()}."
            )

    def segments(self) -> Iterator[ByteArray]:
        """The segments' bytes in order.

        Yields:
            uint8 array (bytes,) per segment: a view, nothing is copied.
        """
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield self.text.data[start:end]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the text's fingerprint and the segments' bounds, as 32 hex digits."""
        bounds = np.column_stack([self.starts, self.ends]).astype("<i8").tobytes()
        return hashlib.sha256(self.text.fingerprint.encode() + bounds).hexdigest()[:32]

    def __len__(self) -> int:
        return int((self.ends - self.starts).sum())

    def __repr__(self) -> str:
        return f"TextPart({len(self):,} bytes in {self.starts.size} segments of {self.text!r})"


def open_text(
    path: str | os.PathLike[str] | None = None,
    *,
    suffixes: Sequence[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ByteText:
    """Open a file, a folder, or the default text.

    Args:
        path: A file or a folder; None is the source text of the running Python's standard library.
        suffixes: For a folder, the endings to keep; None keeps every file.
        cache_dir: Where joined files are kept; None means ``$XDG_CACHE_HOME/shardax/text``.

    Returns:
        The text, memory-mapped.

    Raises:
        TextNotFoundError: There is nothing at ``path``.
        TextSourceError: What is there holds no text.

    Example:
        >>> open_text(os.__file__).name == os.__file__
        True
    """
    if path is None:
        return ByteText.standard_library(cache_dir=cache_dir)
    if Path(path).is_dir():
        return ByteText.from_folder(path, suffixes=suffixes, cache_dir=cache_dir)
    return ByteText.from_file(path)


def _map_bytes(path: Path) -> ByteArray:
    # A plain array over the map: slices of np.memmap carry a slow subclass along.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _held_out_blocks(blocks: int, group_size: int) -> npt.NDArray[np.bool_]:
    groups = np.arange(-(-blocks // group_size))
    chosen = groups * group_size + (hash64(groups) % np.uint64(group_size)).astype(np.int64)
    is_held_out = np.zeros(blocks, dtype=np.bool_)
    is_held_out[chosen[chosen < blocks]] = True
    return is_held_out
