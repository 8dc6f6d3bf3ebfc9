# SPDX-License-Identifier: Apache-2.0
"""What the files of one project tell of each other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

import libcst as cst

from shardax._migrate.program import SourceProgram, UnreadableError, library_of, parse
from shardax._migrate.rules import NNX


class Project:
    """The files of a project that can be read.

    Attributes:
        programs: The files by label.
        exports: By module, the names of Flax that other files can import from it.
        taken: Names that some file takes from others, also as attributes of whatever object.
    """

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        self.programs: dict[str, SourceProgram] = {}
        self.exports: dict[str, set[str]] = {}
        self.taken: set[str] = set()
        for label, text in files:
            try:
                self.programs[label] = parse(text)
            except (UnreadableError, RecursionError):  # the translation tells
                continue

        for program in self.programs.values():
            names = {name for _, _, name in program.imports() if not library_of(name)}
            self.taken |= {name.rpartition(".")[2] for name in names}
            self.taken |= {attribute.attr.value for attribute in program.all(cst.Attribute)}
            self.taken |= {"*"} if program.stars() else set()
        # A file may give on what another one gives.
        for _ in self.programs:
            for label, program in self.programs.items():
                path = PurePath(label)
                module = path.parent.name if path.stem == "__init__" else path.stem
                given = {
                    bound
                    for _, bound, name in program.imports()
                    if library_of(name) == NNX or self.gives(name)
                }
                self.exports.setdefault(module, set()).update(given)

    @property
    def uses_nnx(self) -> bool:
        """Whether any file imports Flax NNX."""
        imports = [name for program in self.programs.values() for _, _, name in program.imports()]
        return any(library_of(name) == NNX for name in imports)

    def is_set_by_others(self, names: set[str], attribute: str, program: SourceProgram) -> bool:
        """Whether another file sets an attribute, and some file takes one of some classes."""
        others = [other for other in self.programs.values() if other is not program]
        is_set = any(attribute in other.stores or "" in other.stores for other in others)
        return is_set and not self.taken.isdisjoint({*names, "*"})

    def gives(self, name: str) -> bool:
        """Whether a full name is one of Flax that a file of the project offers."""
        module, _, last = name.rpartition(".")
        return last in self.exports.get(module.rpartition(".")[2], ())
