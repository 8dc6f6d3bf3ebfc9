# SPDX-License-Identifier: Apache-2.0
"""Translation of a program, with a report.

Only what is certain is translated. All else is left as it is, and the program then ends at its
first line. So no program runs that computes something else unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from shardax._migrate.imports import GUARD, ImportRewriter, is_guard, with_guard
from shardax._migrate.program import (
    SourceProgram,
    UnreadableError,
    dotted,
    library_of,
    module_of,
    parse,
    text_of,
)
from shardax._migrate.project import Project
from shardax._migrate.rules import LIBRARIES, NNX
from shardax._migrate.translator import Notice, Translator

_OTHER_FILE = "it is of Flax, by way of another file"


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
        label: The file, as the project has it, for the line that ends a program of which something
            is left.

    Returns:
        A Translation.

    Raises:
        UnreadableError: If it is no Python, or nested more deeply than LibCST can read.
    """
    project = Project() if project is None else project
    try:
        program = project.programs.get(label) or parse(text)
        module, notices, done = _translated(program, project)
    except RecursionError:
        raise UnreadableError(1, "it nests too deeply to be read") from None

    left = sum(notice.kind == "left" for notice in notices)
    places = "1 place" if left == 1 else f"{left} places"
    guard = f"{GUARD}{places} to write by hand; to list them: shardax migrate {label}"
    new = with_guard(module, guard if left else "").code
    return Translation(new, tuple(sorted(notices)), tuple(sorted(done)))


def _translated(
    program: SourceProgram, project: Project
) -> tuple[cst.Module, set[Notice], set[Notice]]:
    """Returns the translated module, the notices, and what was done."""
    # A file of which something was left is one of Flax still.
    of_nnx = any(library_of(name) == NNX for _, _, name in program.imports())
    is_left = any(map(is_guard, program.module.body))
    translator = Translator(program, project, of_nnx or is_left)
    libraries = translator.libraries
    if stars := set(_of_stars(program, project, bool(libraries) or of_nnx)):
        return program.module, stars, set()

    module = program.module
    if libraries or translator.is_of_flax or project.uses_nnx:
        module = module.visit(translator)
    notices = {*translator.notices, *_of_imports(program, project, libraries)}
    done = {
        Notice(lines[0], "done", what, f"{len(lines)} times" if len(lines) > 1 else "")
        for what, lines in translator.done.items()
    }
    return module.visit(ImportRewriter(translator.names)), notices, done


def _of_imports(program: SourceProgram, project: Project, libraries: set[str]) -> Iterator[Notice]:
    """Yields the notices of libraries that stay, of unused imports, and of other files' names."""
    for library in LIBRARIES.keys() - libraries:
        references = [each for each in program.references.values() if each.library == library]
        if references:
            line = min(program.line(each.node) for each in references)
            reason = "its Modules are not translated, so all of it stays as it is"
            yield Notice(line, "kept", library, reason)

    texts = {*map(text_of, program.all(cst.SimpleString))}  # of __all__
    for node, name, whole in program.imports():
        line = program.line(node)
        if project.gives(whole):
            yield Notice(line, "left", name, _OTHER_FILE, "its own import")
        elif library_of(whole) and (node, name) not in program.uses:
            is_alone = not program.references and len(project.programs) < 2
            kind = "left" if is_alone or name in texts | project.taken else "check"
            reason = (
                "it is imported and not used here: another file may take it, which stays Flax's"
            )
            yield Notice(line, kind, name, reason)
    for attribute in program.all(cst.Attribute):
        origin = program.origin(attribute)
        if origin is not None and project.gives(origin.name):
            line = program.line(attribute)
            yield Notice(line, "left", dotted(attribute), _OTHER_FILE, "its own import")


def _of_stars(program: SourceProgram, project: Project, is_of_flax: bool) -> Iterator[Notice]:
    """Yields the notices of ``import *``, which can bind every name of the file."""
    for node in program.stars():
        module, line = module_of(node), program.line(node)
        gives = library_of(module) or project.exports.get(module.rpartition(".")[2])
        if is_of_flax or gives:
            reason = "any name of the file may come from it"
            yield Notice(line, "left", f"from {module} import *", reason, "the names")
