# SPDX-License-Identifier: Apache-2.0
"""Token files are windows as texts are, read where they are needed, and refused if damaged."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardax.errors import DataError, PathNotFoundError
from shardax.train import ByteText, EvalBatches, TokenFile, TrainBatches
from tests.training.train.small_runs import Quiet, make_trainer, state_of

IDS = np.random.default_rng(0).integers(0, 256, 4000)


def content(batches: Any, count: int) -> str:
    """The numbers of some batches."""
    taken = [batch for _, batch in zip(range(count), batches, strict=False)]
    return str([{name: array.tolist() for name, array in batch.items()} for batch in taken])


@pytest.mark.parametrize("name", ["ids.bin", "ids.npy"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_has_the_windows_of_text(name: str, dtype: str, tmp_path: Path):
    tokens = TokenFile.write(tmp_path / name, IDS, dtype=dtype)
    assert tokens.data.dtype == dtype
    assert (tokens.data == IDS).all()
    assert not tokens.data.flags.writeable
    text = ByteText.from_bytes(IDS.astype(np.uint8))
    for ours, theirs in zip(
        tokens.split(0.1, block=100), text.split(0.1, block_bytes=100), strict=True
    ):
        sizes: dict[str, Any] = {"batch_size": 3, "seq_len": 16}
        assert content(TrainBatches(ours, **sizes), 4) == content(TrainBatches(theirs, **sizes), 4)
        assert content(EvalBatches(ours, **sizes), 99) == content(EvalBatches(theirs, **sizes), 99)


def test_raw_token_files_are_opened_with_given_dtype(tmp_path: Path):
    path = tmp_path / "train.bin"
    (IDS + 60_000 - 255).astype("<u2").tofile(path)
    with pytest.raises(DataError, match=r"does not say of which dtype.*dtype='uint16'"):
        TokenFile(path)
    tokens = TokenFile(path, dtype=np.uint16, vocab_size=60_001)
    assert int(tokens.data.max()) == 60_000
    assert "TokenFile(" in repr(tokens)
    assert "4,000 tokens of uint16" in repr(tokens)
    next(TrainBatches(tokens.whole, batch_size=4, seq_len=8))


def test_token_file_write_ends_each_document_with_its_end_token(tmp_path: Path):
    documents = ([i, i + 1] for i in (3, 5))
    tokens = TokenFile.write(tmp_path / "a.bin", documents, end=9, vocab_size=10)
    assert tokens.data.tolist() == [3, 4, 9, 5, 6, 9]
    assert TokenFile.write(tmp_path / "a.bin", [7, 8]).data.tolist() == [7, 8]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]


def damaged(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Opens a file that was written, then changed."""

    def attempt(folder: Path) -> None:
        path = folder / "t.bin"
        TokenFile.write(path, IDS)
        change(path)
        TokenFile(path)

    return attempt


def damaged_npy(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The same of a file of NumPy."""

    def attempt(folder: Path) -> None:
        path = folder / "t.npy"
        TokenFile.write(path, IDS)
        change(path)
        TokenFile(path)

    return attempt


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (damaged(cut), r"t\.bin' has 7997 bytes, but t\.bin\.json tells of 4000 tokens of uint16"),
        (damaged(overwrite), r"t\.bin' was changed after it was written: its fingerprint"),
        (
            damaged(lambda path: path.with_name("t.bin.json").write_text("{")),
            r"t\.bin\.json' of a token file cannot be read",
        ),
        (
            damaged(lambda path: path.with_name("t.bin.json").write_text("[" * 10**5)),
            r"t\.bin\.json' of a token file cannot be read",
        ),
        (
            damaged(lambda path: path.with_name("t.bin.json").write_text("{}")),
            r"t\.bin\.json' is no description",
        ),
        (damaged_npy(cut), r"t\.npy' is no whole \.npy file"),
        (damaged_npy(lambda path: path.write_bytes(b"x")), r"t\.npy' is no whole \.npy file"),
        (
            damaged_npy(lambda path: np.save(path, IDS.reshape(2, -1))),
            r"t\.npy' has an array of int64 and shape \(2, 2000\)",
        ),
        (damaged_npy(lambda path: np.save(path, IDS / 2)), "array of float64"),
        (lambda folder: TokenFile.write(folder / "a.bin", [70_000]), "from 0 to 65535"),
        (lambda folder: TokenFile.write(folder / "a.bin", [-1]), "ids from -1 to -1"),
        (lambda folder: TokenFile.write(folder / "a.bin", [5], vocab_size=5), "from 0 to 4"),
        (lambda folder: TokenFile.write(folder / "a.bin", []), "no tokens to write"),
        (lambda folder: TokenFile.write(folder / "a.bin", [[0.5]]), "dtype float64"),
        (lambda folder: TokenFile.write(folder / "a.bin", [1], dtype="int64"), "'int64' is none"),
        (
            lambda folder: TokenFile(
                TokenFile.write(folder / "a.bin", [1, 2]).name, dtype="uint32"
            ),
            "tokens of uint16, but dtype='uint32'",
        ),
    ],
)
def test_malformed_token_files_are_refused_by_name(
    attempt: Callable[[Path], Any], message: str, tmp_path: Path
):
    with pytest.raises(DataError, match=message):
        attempt(tmp_path)
    assert not list(tmp_path.glob("*.unfinished*"))


def test_token_file_refuses_other_files_by_name(tmp_path: Path):
    with pytest.raises(PathNotFoundError, match=r"no file .*none\.bin"):
        TokenFile(tmp_path / "none.bin", dtype="uint16")
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        TokenFile(tmp_path / "empty.bin", dtype="uint16")
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"odd\.bin' has 5 bytes, no multiple of the 4"):
        TokenFile(tmp_path / "odd.bin", dtype="uint32")
    short = TokenFile.write(tmp_path / "short.bin", [1, 2, 3])
    with pytest.raises(DataError, match=r"= 9 tokens fits: the longest segment .* has 3"):
        TrainBatches(short.whole, batch_size=1, seq_len=8)


@pytest.mark.parametrize(("vocab_size", "limit"), [(250, 249), (None, 2**31 - 1)])
def test_batch_with_ids_beyond_the_vocabulary_is_refused(
    vocab_size: int | None, limit: int, tmp_path: Path
):
    ids = IDS % 250
    ids[7] = 250 if vocab_size else 2**31
    path = TokenFile.write(tmp_path / "ids.bin", ids, dtype="uint32").name
    batches = EvalBatches(TokenFile(path, vocab_size=vocab_size).whole, batch_size=2, seq_len=8)
    with pytest.raises(DataError, match=rf"Token 7 of .*ids\.bin has .* from 0 to {limit}\."):
        next(iter(batches))


@pytest.mark.parametrize("name", ["ids.bin", "ids.npy", "ids.txt"])
def test_file_that_is_cut_while_it_is_read_is_an_error(name: str, tmp_path: Path):
    path = tmp_path / name
    if name == "ids.txt":
        path.write_bytes(IDS.astype(np.uint8).tobytes())
        text: Any = ByteText.from_file(path)
    else:
        text = TokenFile.write(path, IDS)
    batches = TrainBatches(text.whole, batch_size=64, seq_len=16)
    held_out = EvalBatches(text.whole, batch_size=4, seq_len=16)
    next(batches)
    with path.open("ab") as file:
        file.write(b"more")  # which changes nothing
    expected = content(held_out, 99)
    whole, size = path.read_bytes(), text.data.nbytes

    os.truncate(path, len(whole) - size // 2)
    message = rf"{name}' was cut while it is read: it has [\d,]+ bytes, of [\d,]+ when"
    for read in (
        lambda: next(batches),
        lambda: list(held_out),
        lambda: list(text.whole.segments()),
    ):
        with pytest.raises(DataError, match=message):
            read()
    assert batches.step == 1
    path.write_bytes(whole)
    assert content(held_out, 99) == expected


def test_opened_tokens_travel_without_their_file(tmp_path: Path):
    tokens = TokenFile.write(tmp_path / "ids.bin", IDS)
    sizes: dict[str, Any] = {"batch_size": 3, "seq_len": 16}
    expected = content(EvalBatches(tokens.whole, **sizes), 99)
    sent = pickle.dumps(tokens)
    (tmp_path / "ids.bin").unlink()
    assert content(EvalBatches(pickle.loads(sent).whole, **sizes), 99) == expected
    assert content(EvalBatches(tokens.whole, **sizes), 99) == expected, "it is still open here"


def test_position_belongs_to_the_tokens(tmp_path: Path):
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 8}
    batches = TrainBatches(TokenFile.write(tmp_path / "a.bin", IDS).whole, **sizes)
    state = json.loads(json.dumps(batches.state()))
    other = TokenFile.write(tmp_path / "b.bin", IDS[::-1])
    with pytest.raises(DataError, match="fingerprint: saved"):
        TrainBatches(other.whole, **sizes).restore(state)
    same = TokenFile.write(tmp_path / "c.npy", IDS)
    TrainBatches(same.whole, **sizes).restore(state)


def test_token_file_run_resumes_bit_for_bit(tmp_path: Path):
    TokenFile.write(tmp_path / "ids.bin", IDS)

    def run(folder: str, steps: int, resume: bool = False) -> Any:
        train, held_out = TokenFile(tmp_path / "ids.bin").split(0.1)
        batches = TrainBatches(train, batch_size=4, seq_len=8)
        judged = EvalBatches(held_out, batch_size=4, seq_len=8, max_batches=1)
        trainer = make_trainer(tmp_path / folder, steps, batches=batches, held_out=judged)
        trainer.run(resume=resume, display=Quiet())
        return state_of(trainer)

    whole = run("whole", 5)
    run("halves", 2)
    assert run("halves", 5, resume=True) == whole


@pytest.mark.parametrize(("count", "size"), [(4000, 100), (10, 40)], ids=["ids", "description"])
def test_full_disk_leaves_the_tokens_there(count: int, size: int, tmp_path: Path):
    path = tmp_path / "ids.bin"
    TokenFile.write(path, np.arange(8))
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # no file grows beyond it
    try:
        with pytest.raises(OSError, match="File too large"):
            TokenFile.write(path, IDS[:count])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files
    assert (TokenFile(path).data == np.arange(8)).all()
