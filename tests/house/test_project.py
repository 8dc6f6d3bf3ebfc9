# SPDX-License-Identifier: Apache-2.0
"""The files around the library: packages have a face, CI can start, the version is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version

from shardax._core import _jax
from tests.house.sources import PACKAGE, ROOT


def test_folders_of_the_package_have_a_face() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_ci_can_be_started() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_installed_version_is_that_of_the_project() -> None:
    """Otherwise the environment is stale: the stamps in ``.venv`` did not follow pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version("shardax") == project["version"]


def test_install_page_matches_the_project_metadata() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = (".".join(map(str, each)) for each in (_jax.OLDEST, _jax.NEWEST))
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == set(project["optional-dependencies"])
    assert f"jax>={oldest}" in project["dependencies"] and f"JAX older than {oldest}" in page
    assert f"JAX {oldest} to {newest}" in page and f"JAX newer than {newest}" in page
    assert project["requires-python"] == ">=3.11" and "Python older than 3.11" in page


def test_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="shardax")
    assert command.value == "shardax.cli:main"


def test_model_is_trained_without_extra_packages() -> None:
    """The packages of the extras are refused here; `.ci/wheel` runs this without them."""
    program = ROOT / "tests" / "house" / "without_extras.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"loss .* on jax {version('jax')}\n", done.stdout), done.stderr
