# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes a file beside its place and moves it there, over one that was there before.

    Args:
        path: The file.
        content: Its bytes, or text in UTF-8 with line ends as they are.

    Returns:
        The path.

    Raises:
        OSError: If it cannot be written; then nothing has changed.

    Example:
        >>> import tempfile
        >>> file = write_whole(Path(tempfile.mkdtemp()) / "notes.txt", "one line")
        >>> file.read_text(), len(list(file.parent.iterdir()))
        ('one line', 1)
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target
