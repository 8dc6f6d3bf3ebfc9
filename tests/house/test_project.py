# SPDX-License-Identifier: Apache-2.0
"""The files around the library: packages have a face, CI can start, the version is one."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import entry_points, version

from tests.house.sources import PACKAGE, ROOT


def test_every_folder_of_the_package_has_a_face() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_ci_can_be_started() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_installed_version_is_that_of_the_project() -> None:
    """Otherwise the environment is stale: the stamps in ``.venv`` did not follow pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version("shardax") == project["version"]


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="shardax")
    assert command.value == "shardax.cli:main"
