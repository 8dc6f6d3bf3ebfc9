# SPDX-License-Identifier: Apache-2.0
"""``shardax migrate``: translation of Flax NNX programs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import libcst as cst
import tyro

from shardax._files import write_whole
from shardax._migrate.project import Project, survey
from shardax._migrate.translate import Notice, Translation, translate
from shardax.cli.inputs import CommandError

_STDIN = "-"


@dataclass(frozen=True)
class Migrate:
    """Translate Flax NNX programs."""

    details: ClassVar[str] = (
        "Prints what would change, and changes nothing unless --write is given. What a person must "
        "look at is told on standard error: left (not translated; the file then fails when it is "
        "imported, until that is written), check (translated, but look), kept (stays Flax).\n\n"
        "The exit status is 0; with --check 1 if a file would change or something is left."
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
        inputs = list(_inputs(self.files))
        project = survey(text for _, text in inputs)
        results = [(label, text, _translated(label, text, project)) for label, text in inputs]
        for label, text, result in results:
            self._finish(label, text, result)
        changed = sum(text != result.text for _, text, result in results)
        left = sum(result.left for _, _, result in results)
        word = "changed" if self.write else "would change"
        print(f"{changed} of {len(results)} files {word}, {left} places left", file=sys.stderr)
        return 1 if self.check and (changed or left) else 0

    def _finish(self, label: str, text: str, result: Translation) -> None:
        for note in result.notes:
            print(_line(label, note), file=sys.stderr)
        if self.diff or not (self.write or self.check):
            sys.stdout.writelines(_differences(label, text, result.text))
        if self.write and label == _STDIN:
            sys.stdout.write(result.text)
        elif self.write and text != result.text:
            path = Path(label).resolve()  # of a link, the file itself
            mode = path.stat().st_mode
            write_whole(path, result.text)
            path.chmod(mode)


def _inputs(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields labels and texts, each once."""
    paths: dict[str, None] = {}
    for name in names:
        path = Path(name)
        if name == _STDIN:
            paths[name] = None
        elif path.is_dir():
            paths.update(dict.fromkeys(map(str, sorted(path.rglob("*.py")))))
        elif path.is_file():
            paths[str(path)] = None
        else:
            raise CommandError(f"There is no file {name!r} to translate.")
    for label in paths:
        data = sys.stdin.buffer.read() if label == _STDIN else Path(label).read_bytes()
        try:
            yield label, data.decode()
        except UnicodeDecodeError:
            raise CommandError(f"{_shown(label)} is not UTF-8, as Python files are.") from None


def _translated(label: str, text: str, project: Project) -> Translation:
    try:
        return translate(text, project)
    except cst.ParserSyntaxError as error:
        place = f"{_shown(label)}:{error.raw_line}"
        raise CommandError(f"{place}: this is no Python: {error.message.splitlines()[0]}") from None


def _shown(label: str) -> str:
    return "<stdin>" if label == _STDIN else label


def _line(label: str, note: Notice) -> str:
    write = f" Write {note.write}." if note.write else ""
    return f"{_shown(label)}:{note.line}: {note.kind}: {note.what}: {note.reason}.{write}"


def _differences(label: str, old: str, new: str) -> Iterator[str]:
    lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for line in difflib.unified_diff(*lines, f"a/{_shown(label)}", f"b/{_shown(label)}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
