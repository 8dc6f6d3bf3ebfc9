# SPDX-License-Identifier: Apache-2.0
"""The text by which a lowered program is known: what it does, and the lines that it comes from.

Lines belong to it, because the report of a program names them. But a location in the text is a
stack of calls, and the outer ones of it are those of the planner and of whoever called it, who may
be anywhere the next time. They are left out here, from the innermost call of the planner on.
"""

from __future__ import annotations

import re
from pathlib import Path

_PLANNER = str(Path(__file__).parent)
_DEFINED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_REFERRED = re.compile(r"#loc\d*\b")
_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":\d')
_NAMED = re.compile(r'^("(?:[^"\\]|\\.)*")\((#loc\d*)\)$')
_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")


def program_text(text: str, planner: str = _PLANNER) -> str:
    """Returns a program's text with the same locations wherever the planner is called from.

    Args:
        text: The program in StableHLO, with locations.
        planner: The folder of the planner's files.

    Example:
        >>> print(program_text('''%0 = add loc(#loc4)
        ... #loc1 = loc("step.py":3:4 to :9)
        ... #loc2 = loc("/plan/lower.py":7:0 to :5)
        ... #loc3 = loc(callsite(#loc1 at #loc2))
        ... #loc4 = loc("jit(f)/add"(#loc3))''', "/plan"))
        %0 = add loc(#0)
        #0 = "jit(f)/add"("step.py":3:4 to :9)
    """
    lines = text.splitlines()
    found = [(line, _DEFINED.match(line)) for line in lines]
    locations = _Locations({m[1]: m[2] for _, m in found if m}, planner)
    numbers: dict[str, int] = {}

    def renumbered(match: re.Match[str]) -> str:
        return f"#{numbers.setdefault(locations.of(match[0]) or 'planner', len(numbers))}"

    body = [_REFERRED.sub(renumbered, line) for line, defined in found if not defined]
    return "\n".join([*body, *(f"#{number} = {where}" for where, number in numbers.items())])


class _Locations:
    """Locations by their names in a text, with the planner's calls and those outside left out."""

    def __init__(self, defined: dict[str, str], planner: str) -> None:
        self._defined = defined
        self._planner = planner
        self._known: dict[str, str | None] = {}

    def of(self, name: str) -> str | None:
        """What a location is, or None if it is one of the planner."""
        if name not in self._known:
            self._known[name] = self._resolved(self._defined.get(name, name))
        return self._known[name]

    def _resolved(self, text: str) -> str | None:
        if match := _FILE.match(text):
            return None if match[1].startswith(self._planner) else text
        if match := _CALL.match(text):
            inner, outer = self.of(match[1]), self.of(match[2])
            return inner if inner is None or outer is None else f"{inner} at {outer}"
        if match := _NAMED.match(text):
            where = self.of(match[2])
            if where is None and _FILE.match(self._defined.get(match[2], "")):
                return None  # a call, by the name of its function
            return f"{match[1]}({where or ''})"
        return _REFERRED.sub(lambda match: self.of(match[0]) or "", text)
