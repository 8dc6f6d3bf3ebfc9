# SPDX-License-Identifier: Apache-2.0
"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardax._files import write_whole


@pytest.mark.parametrize(
    ("content", "written"), [("é\r\nb\n", "é\r\nb\n".encode()), (b"\x00\xff", b"\x00\xff")]
)
def test_write_replaces_existing_file_exactly(
    tmp_path: Path, content: str | bytes, written: bytes
) -> None:
    (tmp_path / "file").write_text("longer than what comes after it")
    assert write_whole(str(tmp_path / "file"), content) == tmp_path / "file"
    assert (tmp_path / "file").read_bytes() == written
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failed_write_leaves_file_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "half of a pair: \ud800")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "file", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "before"
