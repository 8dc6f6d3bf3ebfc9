# SPDX-License-Identifier: Apache-2.0
"""Folders become one text: all their files in a fixed order, or an error that says which."""

import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest

from shardax.errors import DataError, PathNotFoundError
from shardax.train import ByteText


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for path, content in {
        "b.txt": "beta",
        "a/z.txt": "zeta",
        "a/code.py": "print()",
        "a.txt": "alpha",
        "B.txt": "upper",
        "empty.txt": "",
        ".hidden/secret.txt": "no",
        ".hidden.txt": "no",
        "__pycache__/x.txt": "no",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def files_of(text: ByteText) -> list[bytes]:
    """The contents of the joined files; each ends in a NUL byte."""
    *contents, end = bytes(text.data).split(b"\0")
    assert end == b""
    return contents


def test_visible_files_are_joined_in_byte_order(folder: Path):
    text = ByteText.from_folder(folder)
    assert files_of(text) == [b"upper", b"alpha", b"print()", b"zeta", b"beta"]
    assert text.name == str(folder)


def test_from_folder_keeps_only_the_given_endings(folder: Path):
    text = ByteText.from_folder(folder, suffixes=(".py", "b.txt"))
    assert files_of(text) == [b"print()", b"beta"]


def test_from_folder_follows_only_links_to_files(folder: Path, tmp_path: Path):
    (tmp_path / "linked.txt").write_text("linked")
    (folder / "c.txt").symlink_to(tmp_path / "linked.txt")
    (folder / "again").symlink_to(folder / "a", target_is_directory=True)
    contents = files_of(ByteText.from_folder(folder, suffixes=(".txt",)))
    assert contents == [b"upper", b"alpha", b"zeta", b"beta", b"linked"]


def test_fingerprint_depends_on_content_not_location(folder: Path, tmp_path: Path):
    first = ByteText.from_folder(folder).fingerprint
    folder.rename(tmp_path / "moved")
    assert ByteText.from_folder(tmp_path / "moved").fingerprint == first
    (tmp_path / "moved" / "b.txt").write_text("BETA")
    assert ByteText.from_folder(tmp_path / "moved").fingerprint != first


def test_missing_suffix_error_names_the_suffixes_present(folder: Path):
    with pytest.raises(DataError) as caught:
        ByteText.from_folder(folder, suffixes=(".md", ".rst"))
    assert str(folder) in str(caught.value)
    assert "ending in .md or .rst" in str(caught.value)
    assert "the endings there are: .py, .txt" in str(caught.value)


def test_folder_without_files_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="the folder is empty"):
        ByteText.from_folder(tmp_path)


def test_missing_folder_raises_file_not_found(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        ByteText.from_folder(tmp_path / "nowhere")
    assert isinstance(caught.value, PathNotFoundError)


def test_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.name == "z.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    with pytest.raises(DataError, match=r"z\.txt.*Permission denied"):
        ByteText.from_folder(folder)


def test_joined_folder_is_memory_mapped_and_outlives_files(folder: Path):
    text = ByteText.from_folder(folder, suffixes=("a.txt",))
    assert isinstance(text.data.base, np.ndarray) and isinstance(text.data.base.base, np.memmap)
    for path in folder.glob("**/*.txt"):
        path.unlink()
    assert files_of(text) == [b"alpha"]
    with pytest.raises(ValueError, match="read-only"):
        text.data[0] = 1


def test_full_disk_error_names_the_temporary_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match=r"Cannot join .*missing.*TMPDIR"):
        ByteText.from_folder(folder)


def test_standard_library_text_excludes_packages_and_tests():
    root = Path(sysconfig.get_path("stdlib"))
    contents = set(files_of(ByteText.standard_library()))
    for path in ("os.py", "json/decoder.py", "asyncio/events.py"):
        assert (root / path).read_bytes() in contents
    for left_out in root.glob("_sysconfigdata*.py"):
        assert left_out.read_bytes() not in contents
    for left_out in (root / "test").glob("test_a*.py"):
        assert left_out.read_bytes() not in contents
