# SPDX-License-Identifier: Apache-2.0
"""What rich draws on terminals: progress bars."""

from __future__ import annotations

import importlib.util
import os
from typing import Self, TextIO


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def is_live(file: TextIO) -> bool:
    """Whether rich can redraw lines of a file's terminal."""
    is_plain = not file.isatty() or os.environ.get("TERM") in ("dumb", "unknown")
    return not is_plain and has_rich()


class ProgressBar:
    """A live bar with title, count, status and time left."""

    # `transient` removes it at the end. On a narrow terminal the bar gives way, the texts do not.
    def __init__(
        self,
        file: TextIO,
        title: str,
        total: int,
        done: int = 0,
        status: str = "",
        *,
        transient: bool = False,
        elapsed: bool = False,
    ) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self._bar = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
            progress.MofNCompleteColumn(),
            *([progress.TimeElapsedColumn()] if elapsed else []),
            progress.TextColumn("{task.fields[status]}", markup=False),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
            console=Console(file=file),
            expand=True,
            transient=transient,
        )
        self._task = self._bar.add_task(title, total=total, completed=done, status=status)

    def update(
        self, *, done: int, status: str, title: str | None = None, total: int | None = None
    ) -> None:
        """Redraws the bar; None leaves the title or the total."""
        self._bar.update(self._task, completed=done, status=status, description=title, total=total)

    def note(self, message: str) -> None:
        """Prints a line above the bar, as it is."""
        self._bar.console.print(message, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
