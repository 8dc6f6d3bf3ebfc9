# SPDX-License-Identifier: Apache-2.0
"""Many files as one: gather text files into a single cache file that can be memory-mapped.

A *corpus* is a list of files in a fixed order (by relative path, compared byte by byte, so it does
not depend on the file system or the locale). Its *listing* is what the file system says of them
without reading: path, size, time of change. The *cache file* holds the bytes of all of them, each
followed by one ``SEPARATOR``, and is named by a hash of the listing, so a changed folder gets a new
cache file and an unchanged one is gathered only once.

A cache file appears under its name only when complete (written beside it, flushed to disk, then
renamed), so a process killed on the way leaves no half corpus behind, and two processes gathering
at once do no harm.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardax.train.errors import TextNotFoundError, TextSourceError

SEPARATOR = b"\x00"
"""One NUL byte after each file: it does not occur in text, so a model can learn where files end."""

_STALE_SECONDS = 24 * 60 * 60
# Installed packages, test suites, and what differs between builds of one Python version.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_BUILD_SPECIFIC = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class ListedFile:
    """One file of a corpus: its path below the root, and its size (bytes) and time of change (ns).

    Example:
        >>> ListedFile("a.txt", size=3, changed_ns=0).path
        'a.txt'
    """

    path: str
    size: int
    changed_ns: int


def list_folder(
    root: Path, suffixes: Sequence[str] | None = None, skip_folders: Collection[str] = ()
) -> list[ListedFile]:
    """List the non-empty files below a folder in a deterministic order.

    Hidden files and folders (names starting with a dot) and ``__pycache__`` are left out. Links to
    files are followed, links to folders are not.

    Args:
        root: The folder.
        suffixes: Endings to keep, such as ``(".py", ".md")``; None keeps every file.
        skip_folders: Names of folders to leave out wherever they occur, unread.

    Returns:
        Files sorted by the bytes of their relative path, ``/`` between parts.

    Raises:
        TextNotFoundError: There is no such folder.
        TextSourceError: The folder holds no matching file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "b.txt").write_text("beta")
        ...     _ = Path(folder, "a.py").write_text("alpha")
        ...     [file.path for file in list_folder(Path(folder))]
        ['a.py', 'b.txt']
    """
    if not root.is_dir():
        raise TextNotFoundError(
            f"There is no folder {str(root)!r} to read text from. Check the path, or leave it out "
            "to train on the source text of Python's standard library."
        )
    found = _walk(root, skip_folders)
    paths = [path for path in found if suffixes is None or path.endswith(tuple(suffixes))]
    files = [file for path in paths if (file := _stat(root, path)).size > 0]
    if not files:
        wanted = "any name" if suffixes is None else f"a name ending in {' or '.join(suffixes)}"
        seen = sorted({Path(path).suffix or "(none)" for path in found})
        raise TextSourceError(
            f"No non-empty file with {wanted} below {str(root)!r}; the endings there are: "
            f"{', '.join(seen) or 'none, the folder is empty'}. Pass suffixes=(...) with endings "
            "that occur."
        )
    return files


def list_standard_library() -> tuple[Path, list[ListedFile]]:
    """List the source files of the running Python's standard library.

    Left out, so that two machines with the same Python version see the same text: installed
    packages, test suites, and files written by the build (``_sysconfigdata*``, ``config-*``,
    ``sitecustomize``).

    Returns:
        The library's folder, and its ``.py`` files in order.

    Example:
        >>> _, files = list_standard_library()
        >>> "json/decoder.py" in {file.path for file in files}
        True
    """
    root = Path(sysconfig.get_path("stdlib"))

    files = list_folder(root, (".py",), skip_folders=_NOT_LIBRARY)
    return root, [file for file in files if not file.path.startswith(_BUILD_SPECIFIC)]


def default_cache_dir() -> Path:
    """Where cache files go unless the caller says otherwise: ``$XDG_CACHE_HOME/shardax/text``.

    Returns:
        The folder (``~/.cache/shardax/text`` where the variable is unset); it need not exist.

    Example:
        >>> default_cache_dir().parts[-2:]
        ('shardax', 'text')
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardax" / "text"


def gather(root: Path, files: Sequence[ListedFile], cache_dir: Path | None = None) -> Path:
    r"""Write the files' bytes into one cache file, unless it is there already.

    Args:
        root: The folder that the files' paths are relative to.
        files: What to gather, in order, as listed by ``list_folder``.
        cache_dir: Where cache files live; None means ``default_cache_dir()``.

    Returns:
        The cache file: each file's bytes followed by ``SEPARATOR``.

    Raises:
        TextSourceError: A file changed since it was listed, or the cache folder cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("alpha")
        ...     _ = Path(folder, "b.txt").write_text("beta")
        ...     gather(Path(folder), list_folder(Path(folder)), Path(folder, "cache")).read_bytes()
        b'alpha\x00beta\x00'
    """
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    target = cache_dir / f"{_listing_digest(root, files)}.bytes"
    expected = sum(file.size + len(SEPARATOR) for file in files)
    if target.is_file() and target.stat().st_size == expected:
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale_drafts(cache_dir)
        handle, draft = tempfile.mkstemp(dir=cache_dir, prefix=".draft-", suffix=".bytes")
    except OSError as error:
        raise TextSourceError(
            f"Cannot write the text cache in {str(cache_dir)!r}: {error}. Pass cache_dir=... with "
            "a folder that can be written, or set XDG_CACHE_HOME."
        ) from error
    try:
        with os.fdopen(handle, "wb") as output:
            for file in files:
                output.write(_read_unchanged(root, file))
                output.write(SEPARATOR)
            output.flush()
            os.fsync(output.fileno())
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return target


def _walk(root: Path, skip_folders: Collection[str]) -> list[str]:
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not _is_hidden(name) and name not in skip_folders
        ]
        for name in names:
            path = Path(folder, name)
            if not _is_hidden(name) and path.is_file():
                found.append(path.relative_to(root).as_posix())
    return sorted(found, key=os.fsencode)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _stat(root: Path, path: str) -> ListedFile:
    stat = (root / path).stat()
    return ListedFile(path, stat.st_size, stat.st_mtime_ns)


def _listing_digest(root: Path, files: Iterable[ListedFile]) -> str:
    digest = hashlib.sha256(os.fsencode(root.resolve()) + b"\x00")
    for file in files:
        digest.update(os.fsencode(file.path) + b"\x00%d\x00%d\x00" % (file.size, file.changed_ns))
    return digest.hexdigest()[:32]


def _read_unchanged(root: Path, file: ListedFile) -> bytes:
    try:
        content = (root / file.path).read_bytes()
    except OSError as error:
        raise TextSourceError(
            f"Cannot read {str(root / file.path)!r}, which was listed as text: {error}. Make it "
            "readable, or leave it out with suffixes=(...)."
        ) from error
    if len(content) != file.size:
        raise TextSourceError(
            f"{str(root / file.path)!r} changed while text was gathered: {file.size} bytes when "
            f"listed, {len(content)} when read. Wait until nothing writes to the folder, then open "
            "it again."
        )
    return content


def _remove_stale_drafts(cache_dir: Path) -> None:
    # A draft this old belongs to a process that was killed, not to one still writing.
    for draft in cache_dir.glob(".draft-*.bytes"):
        try:
            if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
                draft.unlink()
        except FileNotFoundError:
            continue
