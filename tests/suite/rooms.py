# SPDX-License-Identifier: Apache-2.0
"""The rooms of the library: which packages they have, and where the tests of each are.

``make test-room ROOM=core`` runs what this prints for a room::

    python -m tests.suite.rooms core

What a room is for, and how many CPU-seconds its tests may take, says its page in ``docs/rooms``.
"""

from __future__ import annotations

import sys

import yaml

from tests.house.sources import PACKAGE, ROOT

# By room: its packages and modules, each with the folder or file of its tests.
ROOMS = {
    "core": {
        "_core": "tests/core/objects",
        "_select": "tests/core/selection",
        "_transforms": "tests/core/transforms",
        "partition": "tests/core/partition",
        "random": "tests/core/random",
        "config": "tests/core/config",
        "extend": "tests/core/test_extend.py",
        "numpy": "tests/core/test_numpy.py",
        "errors.py": "tests/house",
        "__init__.py": "tests/house",
    },
    "layers": {
        "nn": "tests/layers/nn",
        "named": "tests/layers/named",
        "_parallel": "tests/layers/nn",
    },
    "models": {"models": "tests/models"},
    "planner": {"plan": "tests/planner/plan", "hlo": "tests/planner/hlo"},
    "training": {"train": "tests/training/train", "distributed": "tests/training/distributed"},
    "interop": {"bridge": "tests/interop/bridge", "_migrate": "tests/interop/migrate"},
    "tools": {
        "host": "tests/tools/host",
        "surgery": "tests/tools/surgery",
        "view": "tests/tools/view",
        "_files.py": "tests/tools/host",
        "_module_scopes.py": "tests/tools/view",
        "_tables.py": "tests/tools/test_tables.py",
        "_terminal.py": "tests/tools/test_terminal.py",
    },
    "cli": {"cli": "tests/cli", "__main__.py": "tests/cli"},
}


def tests_of(room: str) -> list[str]:
    """Returns the folder of a room's tests and its packages, whose docstrings have examples."""
    packages = [PACKAGE / package for package in ROOMS[room]]
    sources = [path.relative_to(ROOT).as_posix() for path in packages]
    return [f"tests/{room}", *sources]


def room_of(nodeid: str) -> str:
    """Returns the room that a test belongs to, or ``house`` or ``programs``."""
    top, *folders = nodeid.partition("::")[0].split("/")
    if top == "tests":
        is_room = folders[0] in ROOMS or folders[0] == "programs"
        return folders[0] if is_room else "house"
    if top != "src":
        return "programs"
    return next(room for room, packages in ROOMS.items() if folders[1] in packages)


def budget_of(room: str) -> int | None:
    """Returns the CPU-seconds that the tests of a room may take, from the head of its page."""
    page = ROOT / "docs" / "rooms" / f"{room}.md"
    if not page.exists():
        return None
    head = page.read_text(encoding="utf-8").split("---\n")[1]
    return yaml.safe_load(head)["myst"]["substitutions"]["cpu_seconds"]


def main(rooms: list[str]) -> None:
    """Prints the tests of rooms, as arguments for pytest."""
    unknown = [room for room in rooms if room not in ROOMS]
    if unknown or not rooms:
        raise SystemExit(f"make test-room ROOM=...: the rooms are {', '.join(ROOMS)}")
    print(*(path for room in rooms for path in tests_of(room)))


if __name__ == "__main__":
    main(sys.argv[1:])
