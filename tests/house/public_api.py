# SPDX-License-Identifier: Apache-2.0
"""The public names: what each face lists, and the file that remembers it.

A *face* is the ``__init__.py`` of a package. It makes a name public by ``from .x import X as X``,
or by defining it. After changing public names on purpose, ``make api`` (which runs this file with
``python -m tests.house.public_api``) writes ``public_api.txt`` anew; it belongs in the same commit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house import sources
from tests.house.sources import Source

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def faces() -> list[Source]:
    """The faces that list public names; ``shardax.cli`` offers its command line instead."""
    return [face for face in sources.faces() if face.module != "shardax.cli"]


def names_on(face: Source) -> Iterator[str]:
    """The names that one face makes public, without the package's own."""
    yield from _names_in(face.tree.body)


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            # Names that the face imports on first use, declared for type checkers.
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                yield from _names_in(statement.body)
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases if alias.asname == alias.name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name[0] != "_":
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name[0] != "_":
                    yield name


def public_names() -> list[str]:
    """Every public name with its face, as ``shardax.core.State``, sorted."""
    return sorted(f"{face.module}.{name}" for face in faces() for name in names_on(face))


def remembered_names() -> list[str]:
    """The names in ``public_api.txt``."""
    return SNAPSHOT.read_text(encoding="utf-8").split()


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{name}\n" for name in public_names()), encoding="utf-8")
