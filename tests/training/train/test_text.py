# SPDX-License-Identifier: Apache-2.0
"""Texts, their fingerprints, and the held-out split."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.errors import DataError, PathNotFoundError
from shardax.train import ByteText, TextPart, open_text


@given(
    length=st.integers(2, 5000),
    held_out=st.floats(0.01, 0.5),
    block_bytes=st.none() | st.integers(1, 100),
)
def test_split_covers_every_byte_exactly_once(
    length: int, held_out: float, block_bytes: int | None
):
    text = ByteText.from_bytes(np.zeros(length, np.uint8))
    group_size = round(1 / held_out)
    if length // (block_bytes or 1) < group_size:
        return
    covered = np.zeros(length, int)
    train, judged = text.split(held_out, block_bytes=block_bytes)
    for part in (train, judged):
        for start, end in zip(part.starts, part.ends, strict=True):
            covered[start:end] += 1
    assert (covered == 1).all()
    assert len(train) + len(judged) == length


def test_split_holds_out_one_block_of_every_group():
    text = ByteText.from_bytes(np.zeros(1000, np.uint8))
    _, judged = text.split(0.1, block_bytes=10)
    held_out_bytes = np.concatenate(
        [np.arange(start, end) for start, end in zip(judged.starts, judged.ends, strict=True)]
    )
    assert np.bincount(held_out_bytes // 100).tolist() == [10] * 10
    # Not always the same place in its group, or periodic text would be split systematically.
    assert len(set((held_out_bytes % 100 // 10).tolist())) > 3


def test_split_is_deterministic_in_64_kib_blocks():
    text = ByteText.from_bytes(np.zeros(10 << 20, np.uint8))
    first, second = text.split(0.05), text.split(0.05)
    for one, other in zip(first, second, strict=True):
        assert one.starts.tolist() == other.starts.tolist()
        assert one.ends.tolist() == other.ends.tolist()
    assert (first[1].starts % (1 << 16) == 0).all()
    assert len(first[1]) == 8 * (1 << 16), "one block of each of the 8 groups of 20"


def test_split_parts_are_samples_of_the_same_distribution():
    # A text that drifts from its beginning to its end; a split at the end would differ by 0.5.
    rng = np.random.default_rng(0)
    drifting = (rng.random(1 << 20) < np.linspace(0, 1, 1 << 20)).astype(np.uint8)
    train, judged = ByteText.from_bytes(drifting).split(0.05)
    means = [np.concatenate(list(part.segments())).mean() for part in (train, judged)]
    assert abs(means[0] - means[1]) < 0.05


@pytest.mark.parametrize("held_out", [0.0, -0.1, 0.51, 1.0, float("nan")])
def test_split_refuses_a_share_out_of_range(held_out: float):
    with pytest.raises(DataError, match=r"above 0 and at most 0\.5"):
        ByteText.from_bytes(b"text" * 100).split(held_out)


@pytest.mark.parametrize("block_bytes", [0, -1, 12])
def test_split_refuses_too_few_blocks(block_bytes: int):
    with pytest.raises(DataError, match="block_bytes from 1 to 10"):
        ByteText.from_bytes(bytes(100)).split(0.1, block_bytes=block_bytes)


def test_fingerprint_depends_on_the_bytes_alone(tmp_path: Path):
    (tmp_path / "one").write_bytes(b"same bytes")
    (tmp_path / "two").write_bytes(b"same bytes")
    (tmp_path / "three").write_bytes(b"Same bytes")
    one, two, three = (ByteText.from_file(tmp_path / name) for name in ("one", "two", "three"))
    assert one.fingerprint == two.fingerprint == ByteText.from_bytes(b"same bytes").fingerprint
    assert one.fingerprint != three.fingerprint


@pytest.mark.parametrize("place", [0, 12345, -1])
def test_fingerprint_sees_a_single_changed_byte(place: int):
    data = np.zeros(50_000, np.uint8)
    changed = data.copy()
    changed[place] = 1
    assert ByteText.from_bytes(data).fingerprint != ByteText.from_bytes(changed).fingerprint


@pytest.mark.parametrize("place", [0, -1])
def test_fingerprint_of_a_large_text_samples_its_ends(place: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardax.train.data.text._FULLY_HASHED", 1 << 16)
    data = np.zeros(1 << 18, np.uint8)
    changed = data.copy()
    changed[place] = 1
    assert ByteText.from_bytes(data).fingerprint != ByteText.from_bytes(changed).fingerprint
    assert ByteText.from_bytes(data).fingerprint != ByteText.from_bytes(data[1:]).fingerprint


def test_fingerprint_of_a_part_depends_on_its_segments():
    text = ByteText.from_bytes(bytes(1000))
    prints = [part.fingerprint for held_out in (0.1, 0.2) for part in text.split(held_out)]
    assert len(set(prints)) == 4
    assert text.split(0.1)[0].fingerprint == prints[0]


def test_open_text_takes_files_folders_or_standard_library(tmp_path: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes(b"abc")
    (tmp_path / "texts/b.py").write_bytes(b"def")
    assert bytes(open_text(tmp_path / "texts/a.txt").data) == b"abc"
    assert bytes(open_text(tmp_path / "texts").data) == b"abc\0def\0"
    only_python = open_text(tmp_path / "texts", suffixes=(".py",))
    assert bytes(only_python.data) == b"def\0"
    library = open_text()
    assert len(library) > 5_000_000
    assert b"class JSONDecoder" in bytes(library.data)


def test_file_is_memory_mapped_and_read_only(tmp_path: Path):
    (tmp_path / "text").write_bytes(b"abc")
    text = ByteText.from_file(tmp_path / "text")
    assert isinstance(text.data.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        text.data[0] = 1


def test_bytes_are_read_only_without_changing_the_array():
    mine = np.zeros(3, np.uint8)
    text = ByteText.from_bytes(mine)
    with pytest.raises(ValueError, match="read-only"):
        text.data[0] = 1
    mine[0] = 1
    assert text.data.tolist() == [1, 0, 0]


def test_missing_empty_and_mistyped_texts_are_refused(tmp_path: Path):
    (tmp_path / "empty").touch()
    with pytest.raises(PathNotFoundError, match="nowhere"):
        open_text(tmp_path / "nowhere")
    with pytest.raises(DataError, match="empty"):
        open_text(tmp_path / "empty")
    with pytest.raises(DataError, match="must not be empty"):
        ByteText.from_bytes(b"")
    with pytest.raises(DataError, match=r"dtype int64 and shape \(3,\)"):
        ByteText.from_bytes(np.zeros(3, np.int64))  # pyright: ignore[reportArgumentType]  (the point)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [([], []), ([0], [0]), ([0, 2], [3, 4]), ([5, 0], [6, 1]), ([-1], [1]), ([0], [11])],
)
def test_empty_overlapping_or_outside_segments_are_refused(starts: list[int], ends: list[int]):
    with pytest.raises(DataError, match="non-empty, ascending, disjoint"):
        TextPart(ByteText.from_bytes(bytes(10)), np.array(starts, int), np.array(ends, int))


def test_representations_say_what_and_how_much():
    text = ByteText.from_bytes(bytes(1000), name="a poem")
    assert repr(text) == "ByteText('a poem', 1,000 bytes)"
    assert repr(text.whole) == f"TextPart(1,000 bytes in 1 segments of {text!r})"
