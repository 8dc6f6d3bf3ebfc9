# SPDX-License-Identifier: Apache-2.0
"""The files around the library: packages have a face, CI can start, the version is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import entry_points, version
from pathlib import Path
from xml.etree import ElementTree

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


def test_ci_runs_every_part_and_reports_failure() -> None:
    """What failed stands in the summary; any command can be a part."""
    for parts, status in ((["false", "true"], 1), (["true"], 0)):
        run = [ROOT / ".ci" / "run", *parts]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        summary = done.stdout.partition("=== CI ===\n")[2]
        ends = re.findall(r"^(\w+): (passed|FAILED) after", summary, re.MULTILINE)
        assert ends == [(each, "passed" if each == "true" else "FAILED") for each in parts]
        assert done.returncode == status


def fake(path: Path, version: str, answer: str = "") -> Path:
    """A program in place of a Python; it answers with its version, whatever it is asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer or f'echo {version}'}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("there", "words", "used"),
    [
        ("", [], ".venv"),
        ("", ["PYTHON=./new"], ".venv"),
        ("3.11", [], ".venv"),
        ("3.11", ["PYTHON=./old"], ".venv"),
        ("3.11", ["PYTHON=./new"], ".venv-3.13"),
        ("3.11", ["PYTHON=./new", "VENV=mine"], "mine"),
        ("3.11", ["PYTHON=./none"], "'./none' does not run. Name another one"),
    ],
)
def test_make_uses_environment_of_named_python(
    tmp_path: Path, there: str, words: list[str], used: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    fake(tmp_path / "old", "3.11")
    fake(tmp_path / "new", "3.13")
    if there:
        fake(tmp_path / ".venv" / "bin" / "python", there)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "MAKEFLAGS")}
    done = subprocess.run(
        ["make", "-n", "test", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if used.startswith("'"):
        assert done.returncode != 0 and used in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert f"\n{used}/bin/python -m pytest" in done.stdout
    said = ".venv has Python 3.11; Python 3.13 gets .venv-3.13" in done.stdout
    assert said == (used == ".venv-3.13")


PIP = r"""
import pathlib, sys
if sys.argv[1] == "config":
    print(":env:.index-url='https://mirror'\nglobal.find-links='/a /b'")
    print("global.index-url='https://file'\nglobal.constraint='/c.txt'\nglobal.timeout='9'")
else:
    pathlib.Path("pip.txt").write_text(" ".join(sys.argv[1:]))
"""
UV = """
import json, os, pathlib, sys
if __name__ == "__main__":
    uv = {name: text for name, text in os.environ.items() if name.startswith("UV_")}
    pathlib.Path("uv.txt").write_text(json.dumps([sys.argv[1:], uv]))
    sys.exit(int(os.environ["STATUS"]))
"""


@pytest.mark.parametrize("status", [0, 1])
def test_packages_come_by_uv_else_by_pip(tmp_path: Path, status: int) -> None:
    """By uv with pip's settings, of which variables count more than files."""
    (tmp_path / "pip.py").write_text(PIP, encoding="utf-8")
    (tmp_path / "uv.py").write_text(UV, encoding="utf-8")
    subprocess.run(
        [sys.executable, ROOT / ".ci" / "install.py", "--no-deps", "one"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "STATUS": str(status)},
        check=True,
    )
    words, settings = json.loads((tmp_path / "uv.txt").read_text(encoding="utf-8"))
    assert words == ["pip", "install", "-q", "--python", sys.executable, "--no-deps", "one"]
    assert settings == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://mirror",
        "UV_FIND_LINKS": "/a,/b",
        "UV_CONSTRAINT": "/c.txt",
    }
    by_pip = (tmp_path / "pip.txt").is_file()
    assert by_pip == bool(status)
    if by_pip:
        assert (tmp_path / "pip.txt").read_text(encoding="utf-8") == "install -qq --no-deps one"


def test_ci_finds_newest_python_of_path_and_pyenv(tmp_path: Path) -> None:
    def found(above: str, *folders: Path) -> str:
        path = os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])
        done = subprocess.run(
            [ROOT / ".ci" / "newest_python", above],
            env={"PATH": path, "PYENV_ROOT": str(tmp_path / "pyenv")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert found("3.97") == ""
    real = tmp_path / "real" / "python3.99"
    real.parent.mkdir()
    real.symlink_to(sys.executable)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "python3.99" not in found(own, real.parent)  # by its version, and not by its name
    shim = tmp_path / "shims" / "python3.99"
    fake(shim, "", answer="echo not selected >&2; exit 127")
    fake(tmp_path / "path" / "python3.97", "3.97.0 /path/python3.97")
    folders = (shim.parent, tmp_path / "path")
    assert found("3.11", *folders) == "/path/python3.97"
    fake(tmp_path / "pyenv" / "versions" / "3.9.1" / "bin" / "python", "3.9.1 /3.9.1")
    fake(tmp_path / "pyenv" / "versions" / "3.98.10" / "bin" / "python", "3.98.10 /of pyenv")
    fake(tmp_path / "pyenv" / "versions" / "3.98.9" / "bin" / "python", "3.98.9 /3.98.9")
    assert found("3.11", *folders) == "/of pyenv"


def test_the_installed_version_is_that_of_the_project() -> None:
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


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="shardax")
    assert command.value == "shardax.cli:main"


def test_model_is_trained_without_extra_packages() -> None:
    """The packages of the extras are refused here; `.ci/wheel` runs this without them."""
    program = ROOT / "tests" / "house" / "without_extras.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"loss .* on jax {version('jax')}\n", done.stdout), done.stderr


ERROR = {"error": 1}
SKIPPING = """
import pytest

{whole}

@pytest.mark.skipif(True, reason="pip install nothing")
def test_marked():
    pass

def test_called():
    pytest.skip("needs nothing: install shardax[nothing]")

def test_import():
    pytest.importorskip("no_such_package")

def test_hardware():
    pytest.skip("the devices have one memory only")
"""


# By folder: EVERY_PACKAGE, a line of the module, and how many tests end in which way.
SKIPS: dict[str, tuple[str, str, dict[str, int]]] = {
    "every": ("1", "", {"failure": 2, "skipped": 1, "error": 1}),
    "module": ("1", "pytest.importorskip('no_such_package', reason='pip install nothing')", ERROR),
    "bare": ("1", "pytest.importorskip('no_such_package')", ERROR),
    "but_one": ("but nothing other", "", {"failure": 1, "skipped": 3}),
    "but_part": ("but noth", "", {"failure": 2, "skipped": 1, "error": 1}),
    "unset": ("", "", {"skipped": 4}),
}
# One process for all, as it imports JAX: the variable changes from folder to folder.
CHOOSING = f"""
import os

VALUES = { {name: value for name, (value, *_) in SKIPS.items()} }

def choose(path):
    os.environ.pop("EVERY_PACKAGE", None)
    if VALUES.get(path.parent.name):
        os.environ["EVERY_PACKAGE"] = VALUES[path.parent.name]

def pytest_collectstart(collector):
    choose(collector.path)

def pytest_runtest_protocol(item):
    choose(item.path)
"""


def test_skip_for_missing_package_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "choosing.py").write_text(CHOOSING, encoding="utf-8")
    for name, (_, whole, _) in SKIPS.items():
        (tmp_path / name).mkdir()
        program = tmp_path / name / f"test_{name}.py"
        program.write_text(SKIPPING.format(whole=whole), encoding="utf-8")
    environment = {
        k: v for k, v in os.environ.items() if k != "EVERY_PACKAGE" and "PYTEST" not in k
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-c", os.devnull]
    done = subprocess.run(
        [
            *command,
            "-p",
            "conftest",
            "-p",
            "choosing",
            "--junitxml",
            tmp_path / "report.xml",
            tmp_path,
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Counter[str]] = {name: Counter() for name in SKIPS}
    for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase"):
        module = re.search(r"test_(\w+)", f"{case.get('classname')} {case.get('name')}")
        assert module is not None
        found[module[1]].update(outcome.tag for outcome in case)
    assert found == {name: counts for name, (_, _, counts) in SKIPS.items()}, done.stdout
