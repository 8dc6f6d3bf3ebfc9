# SPDX-License-Identifier: Apache-2.0
"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the first line outside of the package."""
    # Python shows a text once for each line: inside of the package all users would share one.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
