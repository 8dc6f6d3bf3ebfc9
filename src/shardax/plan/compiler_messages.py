# SPDX-License-Identifier: Apache-2.0
"""What a compiler says while it works, where that can be read.

XLA's partitioner writes to the error stream when it finds no exchange from one sharding to another,
and makes the array *whole* on every device to cut it anew. That is no error, so no figure but the
bytes shows it. Processes of the planner write into a file that they can read again; where the error
stream is a terminal, the message stays there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping

from shardax.hlo.text import op_name

_STDERR = 2
_WHOLE = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to "
    r"(\{.*?\}) efficiently for HLO operation %?\S+ = (\S+?)(?:\{[\d,]*\})? (.*?)\. As the last "
    r"resort"
)


def listen() -> Callable[[], str]:
    """Returns a function that returns what was written to the error stream since; "" if unknown.

    Example:
        >>> heard = listen()
        >>> isinstance(heard(), str)
        True
    """
    start = _end()

    def heard() -> str:
        end = _end()
        if start is None or end is None:
            return ""
        try:
            return os.pread(_STDERR, end - start, start).decode(errors="replace")
        except OSError:  # it is open for writing only
            return ""

    return heard


def _end() -> int | None:
    """How long the error stream is, if it is a file."""
    try:
        found = os.fstat(_STDERR)
    except OSError:  # it is closed
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def made_whole(text: str) -> tuple[tuple[str, str], ...]:
    """Returns which arrays the partitioner made whole, by what it wrote.

    Args:
        text: What a compiler wrote.

    Returns:
        For each, once: the traced operation or argument that it is the result of, or ""; and its
        type with both shardings, as XLA writes them.

    Example:
        >>> made_whole(
        ...     "W0 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
        ...     "compiler cannot go from sharding {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]} "
        ...     "efficiently for HLO operation %a = f32[8,16]{1,0} add(%b, %c), "
        ...     'metadata={op_name="jit(f)/add"}. As the last resort, SPMD will replicate ...'
        ... )
        (('jit(f)/add', 'f32[8,16] from {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]}'),)
    """
    found: dict[tuple[str, str], None] = {}
    for each in _WHOLE.finditer(text):
        found[op_name(each[4]), f"{each[3]} from {each[1]} to {each[2]}"] = None
    return tuple(found)


def whole_warnings(
    found: tuple[tuple[str, str], ...], paths: Mapping[str, str], sources: Mapping[str, str]
) -> list[str]:
    """Returns the warnings for arrays that were made whole.

    Args:
        found: As ``made_whole`` returns them.
        paths: Of arguments, by JAX's name of them.
        sources: Lines of model code, by traced operation.

    Example:
        >>> found = (("jit(f)/add", "f32[8] from {..} to {..}"),)
        >>> whole_warnings(found, {}, {"jit(f)/add": "m.py:3"})[0][:60]
        'The result of jit(f)/add at m.py:3 is made whole on every de'
    """
    said: list[str] = []
    for name, change in found:
        is_argument = name and "/" not in name  # operations have that of what they are in
        result = f"The result of {name or 'an operation'}"
        what = paths.get(name, name) if is_argument else result
        where = f" at {sources[name]}" if sources.get(name) else ""
        said.append(
            f"{what}{where} is made whole on every device to be split in another way: XLA knows no "
            "exchange for it. Rules that split the same dimensions before and after, or a "
            f"constraint half-way, avoid that ({change})."
        )
    return list(dict.fromkeys(said))
