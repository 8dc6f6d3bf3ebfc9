# SPDX-License-Identifier: Apache-2.0
"""Compiles the cases with every compiler that is installed, and keeps the programs as golden files.

Run as ``python -m tests.planner.hlo.make_golden [CASE ...]`` where ``shardax[plan-tpu]`` or
``shardax[plan-gpu]`` are installed. A golden file is the text of a program, without what nothing
reads, under ``golden/<compiler>/<hardware>/<case>.hlo.gz``.
"""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

from tests.planner.hlo.compilers import COMPILERS, InstalledCompiler

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[3]
_UNREAD = re.compile(
    r'"(?:flag_configs|scoped_memory_configs|used_scoped_memory_configs|window_config|'
    r'collective_algorithm_config|retry_config|barrier_config|aliasing_operands)":'
)
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def slim(text: str) -> str:
    """Leaves out parts of ``backend_config`` that nothing counts, and where the repository is."""
    pieces, place = [], 0
    while found := _UNREAD.search(text, place):
        pieces.append(text[place : found.start()])
        depth = 0
        for token in _BRACKET.finditer(text, found.end()):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if depth == 0:
                place = token.end()
                break
        place += text.startswith(",", place)
    return "".join([*pieces, text[place:]]).replace(str(ROOT), "/repository")


def main(names: list[str]) -> None:
    """Makes the golden files of some cases, or of all."""
    for hardware, compiler in COMPILERS.items():
        for name in compiler.cases:
            if compiler.installed and name in (names or compiler.cases):
                write(hardware, compiler, name)


def write(hardware: str, compiler: InstalledCompiler, name: str) -> None:
    """Makes one golden file."""
    file = GOLDEN / compiler.version / hardware / f"{name}.hlo.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    data = gzip.compress(slim(compiler.text(name)).encode(), 9, mtime=0)
    file.write_bytes(data)
    print(f"{file.relative_to(GOLDEN)}: {len(data)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
