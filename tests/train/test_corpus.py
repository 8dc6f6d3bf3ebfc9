# SPDX-License-Identifier: Apache-2.0
"""Folders become one file: in a fixed order, once, whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardax.train import corpus
from shardax.train.corpus import (
    SEPARATOR,
    ListedFile,
    default_cache_dir,
    gather,
    list_folder,
    list_standard_library,
)
from shardax.train.errors import TextNotFoundError, TextSourceError


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


def test_listing_is_recursive_in_byte_order_without_hidden_and_empty_files(folder: Path):
    paths = [file.path for file in list_folder(folder)]
    assert paths == ["B.txt", "a.txt", "a/code.py", "a/z.txt", "b.txt"]


def test_listing_keeps_the_given_suffixes_and_skips_folders_by_name(folder: Path):
    assert [file.path for file in list_folder(folder, (".py", "b.txt"))] == ["a/code.py", "b.txt"]
    assert [file.path for file in list_folder(folder, (".txt",), skip_folders={"a"})] == [
        "B.txt",
        "a.txt",
        "b.txt",
    ]


def test_no_matching_file_names_the_folder_and_the_endings_there(folder: Path):
    with pytest.raises(TextSourceError) as caught:
        list_folder(folder, (".md", ".rst"))
    assert str(folder) in str(caught.value)
    assert "ending in .md or .rst" in str(caught.value)
    assert "the endings there are: .py, .txt" in str(caught.value)


def test_a_missing_folder_is_also_a_file_not_found_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        list_folder(tmp_path / "nowhere")
    assert isinstance(caught.value, TextNotFoundError)


def test_gathering_joins_the_files_with_a_separator_after_each(folder: Path, tmp_path: Path):
    joined = gather(folder, list_folder(folder), tmp_path / "cache")
    expected = [b"upper", b"alpha", b"print()", b"zeta", b"beta"]
    assert joined.read_bytes() == b"".join(content + SEPARATOR for content in expected)
    assert list(joined.parent.iterdir()) == [joined]


def test_gathering_again_reuses_the_file_and_a_change_makes_another(folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    first = gather(folder, list_folder(folder), cache)
    written = first.stat().st_mtime_ns
    assert gather(folder, list_folder(folder), cache) == first
    assert first.stat().st_mtime_ns == written
    (folder / "b.txt").write_text("gamma")
    second = gather(folder, list_folder(folder), cache)
    assert second != first
    assert second.read_bytes().endswith(b"gamma" + SEPARATOR)


def test_a_same_sized_edit_with_a_new_time_makes_another_file(folder: Path, tmp_path: Path):
    first = gather(folder, list_folder(folder), tmp_path / "cache")
    (folder / "b.txt").write_text("BETA")
    os.utime(folder / "b.txt", ns=(1, 1))
    second = gather(folder, list_folder(folder), tmp_path / "cache")
    assert second.read_bytes() == first.read_bytes().replace(b"beta", b"BETA")


def test_a_file_that_changed_since_listing_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path
):
    files = list_folder(folder)
    (folder / "a.txt").write_text("alphabet")
    with pytest.raises(TextSourceError, match="5 bytes when listed, 8 when read") as caught:
        gather(folder, files, tmp_path / "cache")
    assert str(folder / "a.txt") in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_vanished_since_listing_is_named(folder: Path, tmp_path: Path):
    with pytest.raises(TextSourceError, match=r"gone\.txt"):
        gather(folder, [ListedFile("gone.txt", 1, 0)], tmp_path / "cache")


def test_a_cache_file_of_the_wrong_length_is_gathered_anew(folder: Path, tmp_path: Path):
    joined = gather(folder, list_folder(folder), tmp_path / "cache")
    content = joined.read_bytes()
    joined.write_bytes(content[:-1])
    assert gather(folder, list_folder(folder), tmp_path / "cache").read_bytes() == content


def test_a_cache_folder_that_cannot_be_made_says_what_to_pass(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TextSourceError, match=r"Pass cache_dir=\.\.\."):
        gather(folder, list_folder(folder), tmp_path / "file" / "cache")


def test_a_gathering_that_is_killed_leaves_no_file_under_the_final_name(
    folder: Path, tmp_path: Path
):
    cache = tmp_path / "cache"
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from shardax.train import corpus\n"
        "corpus.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "root = Path(sys.argv[1])\n"
        "corpus.gather(root, corpus.list_folder(root), Path(sys.argv[2]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, folder, cache], env=_environment())
    assert killed.returncode == -9
    (draft,) = cache.iterdir()
    assert draft.name.startswith(".draft-")
    os.utime(draft, (0, 0))
    joined = gather(folder, list_folder(folder), cache)
    assert list(cache.iterdir()) == [joined], "the old draft is swept away"


def test_the_default_cache_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/shardax/text")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/shardax/text"


def test_the_standard_library_is_listed_without_packages_tests_and_build_files():
    root, files = list_standard_library()
    paths = [file.path for file in files]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(paths)
    assert all(path.endswith(".py") and (root / path).is_file() for path in paths)
    folders = {part for path in paths for part in path.split("/")[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not [path for path in paths if path.startswith(("_sysconfigdata", "config-"))]
    assert paths == sorted(paths)


def _environment() -> dict[str, str]:
    source = str(Path(corpus.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
