# SPDX-License-Identifier: Apache-2.0
"""``shardax migrate``: translation of Flax NNX programs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from shardax._migrate.program import UnreadableError
from shardax._migrate.project import Project
from shardax._migrate.translate import Translation, translate
from shardax._migrate.translator import Notice
from shardax.cli import program_files
from shardax.cli.inputs import CommandError
from shardax.cli.program_files import STDIN, ProgramFile


@dataclass(frozen=True)
class Migrate:
    """Translate Flax NNX programs."""

    details: ClassVar[str] = (
        "Prints what would change, and changes nothing unless --write is given. A report on "
        "standard error tells, in the order of each file, what was done; check (translated, but "
        "look); left (not translated: the file then ends at its first line, until that is "
        "written); kept (stays Flax); unread (no Python, or nested too deeply).\n\n"
        "Of folders, hidden ones, virtual environments, caches and outputs of builds are left "
        "alone. A file that git does not have as it is gets a copy beside it, FILE.orig.\n\n"
        "The exit status is 0, or 1 if a file could not be read; with --check 1 also if a file "
        "would change or something is left."
    )

    # Files, folders of *.py files, or - for standard input.
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    # Change the files. Of standard input, print the translated text.
    write: bool = False
    # Print what changes also with --write.
    diff: bool = False
    # Print no differences, and say by the exit status whether there is something to do.
    check: bool = False

    def run(self) -> int:
        """Runs the command; returns the exit status."""
        if not self.files:
            raise CommandError("Name the files to translate: shardax migrate FILE...")
        if self.check and self.write:
            raise CommandError("--check changes nothing: give it without --write.")

        # All are read and translated before one is written.
        labels = list(program_files.find(self.files))
        files = [file for label in labels if (file := _read(label)) is not None]
        project = Project((_shown(file.label), file.text) for file in files)
        results = [(file, result) for file in files if (result := _translated(file, project))]
        for file, result in results:
            self._finish(file, result)

        changed = sum(file.text != result.text for file, result in results)
        left = sum(result.left for _, result in results)
        unread = len(labels) - len(results)
        word = "changed" if self.write else "would change"
        summary = f"{changed} of {len(labels)} files {word}, {left} places left"
        print(summary + (f", {unread} unread" if unread else ""), file=sys.stderr)
        return 1 if unread or (self.check and (changed or left)) else 0

    def _finish(self, file: ProgramFile, result: Translation) -> None:
        """Reports on one file, and prints or writes what changes."""
        for notice in sorted([*result.done, *result.notes], key=lambda notice: notice.line):
            print(_line(file.label, notice), file=sys.stderr)
        if self.diff or not (self.write or self.check):
            sys.stdout.writelines(_differences(file.label, file.text, result.text))
        if self.write and file.label == STDIN:
            sys.stdout.write(result.text)
        elif self.write and file.text != result.text:
            file.write(result.text)


def _read(label: str) -> ProgramFile | None:
    """Returns a file, or None after the line that says why it could not be read."""
    try:
        return program_files.read(label)
    except UnicodeDecodeError as error:
        _tell_unread(label, 1, f"this is no Python: it is not in the encoding {error.encoding}")
    except SyntaxError as error:
        _tell_unread(label, 1, f"this is no Python: {error.msg}")
    except OSError as error:
        _tell_unread(label, 1, error.strerror or str(error))
    return None


def _translated(file: ProgramFile, project: Project) -> Translation | None:
    """Returns the translation of a file, or None after the line that says why there is none."""
    try:
        return translate(file.text, project, _shown(file.label))
    except UnreadableError as error:
        _tell_unread(file.label, error.line, str(error))
        return None


def _tell_unread(label: str, line: int, reason: str) -> None:
    print(f"{_shown(label)}:{line}: unread: {reason}.", file=sys.stderr)


def _shown(label: str) -> str:
    return "<stdin>" if label == STDIN else label


def _line(label: str, notice: Notice) -> str:
    reason = f": {notice.reason}" if notice.reason else ""
    write = f" Write {notice.write}." if notice.write else ""
    return f"{_shown(label)}:{notice.line}: {notice.kind}: {notice.what}{reason}.{write}"


def _differences(label: str, old: str, new: str) -> Iterator[str]:
    lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for line in difflib.unified_diff(*lines, f"a/{_shown(label)}", f"b/{_shown(label)}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
