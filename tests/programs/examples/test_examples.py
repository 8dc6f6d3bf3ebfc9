# SPDX-License-Identifier: Apache-2.0
"""Programs of ``examples/``: they run, stay short, and return figures."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.child_processes import environment
from tests.needs import PACKAGES, needs

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
# Programs with a test file of their own are run there.
OTHERS = [p for p in PROGRAMS if not Path(__file__).with_name(f"test_{p.stem}.py").exists()]


def marked(program: Path) -> Any:
    """A program as a parameter, marked by the packages that it imports and needs."""
    tree = ast.parse(program.read_text(encoding="utf-8"))
    names = {
        *(a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names),
        *(n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module),
    }
    packages = {name.partition(".")[0] for name in names} & PACKAGES.keys()
    return pytest.param(program, marks=[needs(name) for name in sorted(packages)])


def check_functional_train_step(figures: Any) -> None:
    assert figures["last"] < 0.2 * figures["first"]
    assert figures["difference"] < 1e-3


def check_lora(figures: Any) -> None:
    assert figures["after"] < 0.1 * figures["before"]
    assert figures["difference"] < 1e-3
    assert figures["adapters"] < 5_000


def check_ensemble(figures: Any) -> None:
    assert len(set(figures["losses"])) == 5
    assert max(figures["losses"]) < 0.1
    assert figures["difference"] < 1e-3
    assert figures["far"] > 5 * figures["near"]


def check_planned_layout(figures: Any) -> None:
    assert figures["layout"] == "mlp=data+model (4x2)"
    assert figures["planned"] == figures["held"]
    assert figures["losses"][-1] < figures["losses"][0]


def check_sentence_search(figures: Any) -> None:
    assert figures == {
        "Where can I send a parcel?": "The post office opens at nine.",
        "a small cat": "A kitten sleeps on the sofa.",
        "astronomy": "The telescope found a planet around a distant star.",
    }


CHECKS = {
    "ensemble": check_ensemble,
    "functional_train_step": check_functional_train_step,
    "lora": check_lora,
    "planned_layout": check_planned_layout,
    "sentence_search": check_sentence_search,
}


# In this process, which has imported JAX and has 8 devices; another one runs a program below.
@pytest.mark.parametrize("program", list(map(marked, OTHERS)), ids=lambda program: program.stem)
def test_program_runs_and_returns_its_figures(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with jax.numpy_rank_promotion("allow"):  # as a user has it
        figures = runpy.run_path(str(program))["main"]([])
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 40, "few, meaningful lines"
    assert figures, "main() returns its figures"
    CHECKS.get(program.stem, bool)(figures)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_program_is_short_and_documents_its_command(program: Path) -> None:
    lines = program.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    tree = ast.parse("\n".join(lines))
    assert f"python examples/{program.name}" in (ast.get_docstring(tree) or "")
    (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    assert ast.unparse(main.args) == "argv: list[str] | None=None"
    assert isinstance(tree.body[-1], ast.If)
    assert ast.unparse(tree.body[-1].test) == "__name__ == '__main__'"
    assert ast.unparse(tree.body[-1].body[-1]) == "main()"


def test_example_programs_are_all_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in PROGRAMS if f"`{p.name}`" not in text] == []


def test_program_runs_as_file_with_other_settings(tmp_path: Path) -> None:
    """As a user does, from another folder, with one device."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "ensemble.py", "--members", "2", "--steps", "60"],
        env=environment(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", PYTHONPATH=str(ROOT / "src")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("2 members at once:")
