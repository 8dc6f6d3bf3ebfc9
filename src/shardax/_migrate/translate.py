# SPDX-License-Identifier: Apache-2.0
"""Translation of a program, with a report.

Only what is certain is translated. All else is left as it is, and the program then ends at its
first line. So no program runs that computes something else unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from shardax._migrate.plan import MigrationPlan, Notice
from shardax._migrate.program import (
    GUARD,
    SourceProgram,
    UnreadableError,
    dotted,
    library_of,
    parse,
)
from shardax._migrate.project import Project
from shardax._migrate.rewrite import Imports, Rewriter, with_guard


@dataclass(frozen=True)
class Translation:
    """A translated program."""

    text: str
    notes: tuple[Notice, ...]
    # What was done, by the first line.
    done: tuple[Notice, ...] = field(default=(), compare=False)

    @property
    def left(self) -> int:
        """Number of untranslated places."""
        return sum(note.kind == "left" for note in self.notes)


def translate(text: str, project: Project | None = None, label: str = "FILE") -> Translation:
    """Translates a program of a project.

    Args:
        text: The program.
        project: What its other files tell.
        label: The file, as ``survey`` took it, for the line that ends a program of which something
            is left.

    Returns:
        A Translation.

    Raises:
        UnreadableError: If it is no Python, or nested more deeply than LibCST can read.
    """
    try:
        program = parse(text)
        project = Project() if project is None else project
        module, notices, done = _translated(program, project, label)
    except RecursionError:
        raise UnreadableError(1, "it nests too deeply to be read") from None

    left = sum(notice.kind == "left" for notice in notices)
    places = "1 place" if left == 1 else f"{left} places"
    guard = f"{GUARD}{places} to write by hand; to list them: shardax migrate {label}"
    new = with_guard(module, guard if left else "").code
    return Translation(new, tuple(sorted(set(notices))), tuple(sorted(done)))


def _translated(
    program: SourceProgram, project: Project, label: str
) -> tuple[cst.Module, list[Notice], list[Notice]]:
    """Returns the translated module, the notices, and what was done."""
    plan = MigrationPlan(program, project, label)
    stars = [
        notice for node in program.imports() for notice in _stars(program, project, plan, node)
    ]
    if stars:
        return program.module, stars, []

    imports = Imports(plan)
    unused = [_unused(program, project, line, name) for line, name in imports.unused()]
    done = [
        Notice(lines[0], "done", what, f"{len(lines)} times" if len(lines) > 1 else "")
        for what, lines in plan.done.items()
    ]
    if not plan.libraries:
        return program.module, [*plan.notices, *unused], []
    return program.module.visit(Rewriter(plan, imports)), [*plan.notices, *unused], done


def _unused(program: SourceProgram, project: Project, line: int, name: str) -> Notice:
    """Returns the notice of an import that the file does not use, and another one may."""
    texts = {text.evaluated_value for text in program.all(cst.SimpleString)}  # of __all__
    is_alone = not program.references and not project.is_whole
    kind = "left" if is_alone or name in texts | project.taken else "check"
    reason = "it is imported and not used here: another file may take it, which stays Flax's"
    return Notice(line, kind, name, reason)


def _stars(
    program: SourceProgram, project: Project, plan: MigrationPlan, node: cst.Import | cst.ImportFrom
) -> Iterator[Notice]:
    """Yields the notice of an ``import *``, which can bind every name of the file."""
    if not isinstance(node.names, cst.ImportStar) or not isinstance(node, cst.ImportFrom):
        return
    module = dotted(node.module) if node.module is not None else ""
    is_of_flax = library_of(module) is not None or bool(project.exports.get(module.split(".")[-1]))
    if plan.libraries or is_of_flax:
        reason = "any name of the file may come from it"
        yield Notice(program.line(node), "left", f"from {module} import *", reason, "the names")
