# SPDX-License-Identifier: Apache-2.0
"""The source line that an instruction comes from.

A program lists at its top the *frames* of Python's stack in which its operations were traced; an
instruction names its innermost. The *source* of an instruction is the innermost line of model code:
code of users, and of ``shardax.models``, which is read and changed like a user's. Code of JAX, of
the layers and of optimizers is *library* code, and is the source of nothing unless the stack holds
nothing else.
"""

from __future__ import annotations

import re

_ROW = re.compile(r"^(\d+) (.*)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|src|git)/"
    r"(?P<path>(?:jax|jaxlib|shardax|optax|flax|chex)/.*\.py)$"
)
_MODELS = re.compile(r"shardax/models/")

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Frames:
    """Frames of a program's stacks.

    Args:
        tables: Lines of the tables at the top of a program, by the name of the table.
    """

    def __init__(self, tables: dict[str, list[str]]) -> None:
        """See the class."""
        rows = {name: dict(_rows(tables.get(name, []))) for name in TABLES}
        files = {number: text.strip('"') for number, text in rows["FileNames"].items()}
        places = {number: _fields(text) for number, text in rows["FileLocations"].items()}
        frames = {number: _fields(text) for number, text in rows["StackFrames"].items()}
        parents = {number: frame.get("parent_frame_id", 0) for number, frame in frames.items()}
        # Compilers of 2025 and 2026 print the parent's number plus one, so that the first frame,
        # which has none, seems to be its own parent.
        offset = 1 if any(number == parent for number, parent in parents.items()) else 0
        self._parents = {number: parent - offset for number, parent in parents.items()}
        self._places = {}
        for number, frame in frames.items():
            place = places.get(frame.get("file_location_id", 0), {})
            self._places[number] = (files.get(place.get("file_name_id", 0), ""), place.get("line"))
        self._sources: dict[int, str] = {}

    def source(self, frame: int) -> str:
        """Returns the source of an instruction, such as ``"model.py:12"``.

        Args:
            frame: Number of its innermost frame.

        Returns:
            The source; "" if the program does not hold the frame.
        """
        if frame not in self._sources:
            self._sources[frame] = _source(self._stack(frame))
        return self._sources[frame]

    def _stack(self, frame: int) -> list[tuple[str, int]]:
        """Files and lines from a frame outwards."""
        stack, seen = [], set()
        while frame in self._places and frame not in seen:
            seen.add(frame)
            file, line = self._places[frame]
            if file and line is not None:
                stack.append((file, line))
            frame = self._parents[frame]
        return stack


def line_name(file: str, line: int) -> str:
    """Returns how a line is called: after its file's name, or its path in a library."""
    found = _LIBRARY.search(file)
    return f"{found['path'] if found else file.rpartition('/')[2]}:{line}"


def _source(stack: list[tuple[str, int]]) -> str:
    own = [(file, line) for file, line in stack if not _is_library(file)]
    of_shardax = [(file, line) for file, line in stack if "/shardax/" in file]
    for file, line in (own or of_shardax or stack)[:1]:
        return line_name(file, line)
    return ""


def _is_library(file: str) -> bool:
    found = _LIBRARY.search(file)
    return found is not None and not _MODELS.match(found["path"])


def _rows(lines: list[str]) -> list[tuple[int, str]]:
    found = [_ROW.match(line) for line in lines]
    return [(int(each[1]), each[2]) for each in found if each]


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}
