# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file under a temporary name, then rename it."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(target)
    except OSError as error:
        if error.errno is not None:  # else its text would be gone
            error.filename = str(target)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return target
