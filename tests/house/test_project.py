# SPDX-License-Identifier: Apache-2.0
"""The files around the library: packages have a face, CI can start, the version is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from shardax._core import _jax
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


def test_the_page_on_installing_says_what_the_project_says() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = (".".join(map(str, each)) for each in (_jax.OLDEST, _jax.NEWEST))
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == set(project["optional-dependencies"])
    assert f"jax>={oldest}" in project["dependencies"] and f"JAX older than {oldest}" in page
    assert f"JAX {oldest} to {newest}" in page and f"JAX newer than {newest}" in page
    assert project["requires-python"] == ">=3.11" and "Python older than 3.11" in page


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="shardax")
    assert command.value == "shardax.cli:main"


def test_a_model_is_trained_without_any_package_of_an_extra() -> None:
    """The packages of the extras are refused here; `.ci/wheel` runs this without them."""
    program = ROOT / "tests" / "house" / "without_extras.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"loss .* on jax {version('jax')}\n", done.stdout), done.stderr


SKIPPING = """
import pytest

{whole}

@pytest.mark.skipif(True, reason="pip install nothing")
def test_marked():
    pass

def test_called():
    pytest.skip("needs nothing: install shardax[nothing]")

def test_import():
    pytest.importorskip("no_such_package", reason="pip install nothing")

def test_hardware():
    pytest.skip("the devices have one memory only")
"""


@pytest.mark.parametrize(
    ("ci", "whole", "counts"),
    [
        (True, "", "2 failed, 1 skipped, 1 error"),
        (True, "pytest.importorskip('no_such_package', reason='pip install nothing')", "1 error"),
        (False, "", "4 skipped"),
    ],
)
def test_in_ci_a_test_that_skips_for_a_missing_package_fails(
    tmp_path: Path, ci: bool, whole: str, counts: str
) -> None:
    program = tmp_path / "test_skipping.py"
    program.write_text(SKIPPING.format(whole=whole), encoding="utf-8")
    environment = {
        k: v for k, v in os.environ.items() if k != "EVERY_PACKAGE" and "PYTEST" not in k
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", os.devnull, program],
        cwd=tmp_path,
        env=environment | ({"EVERY_PACKAGE": "1"} if ci else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1].startswith(counts), done.stdout
