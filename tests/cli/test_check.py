# SPDX-License-Identifier: Apache-2.0
"""``shardax check``: findings on the screen, and an exit status that a script can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from shardax.cli import main
from shardax.cli.inputs import PRESETS
from shardax.cli.runs import RunSettings, write_settings


def said(capsys: Any, *words: str) -> tuple[int, list[str]]:
    """Exit status, and the lines printed; nothing is said to standard error."""
    status = main(["check", *words])
    printed, errors = capsys.readouterr()
    assert errors == ""
    return status, printed.splitlines()


def refused(capsys: Any, *words: str) -> str:
    """What a command that must fail with status 2 says; it prints nothing else."""
    assert main(["check", *words]) == 2
    printed, text = capsys.readouterr()
    assert printed == ""
    assert text.startswith("shardax: ") and text.count("Traceback") == 0
    return text.removeprefix("shardax: ")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run as it is before its first step."""
    preset = PRESETS["tiny"]
    settings = RunSettings(
        preset.model, None, 8, 16, 4, 1e-2, 0, "data=2,model=4", 8, preset.eval_batches, 2
    )
    write_settings(tmp_path / "run", settings)
    return tmp_path / "run"


def test_valid_layout_has_notes_only_and_status_0(capsys: Any) -> None:
    status, lines = said(capsys, "tiny", "--mesh", "data=2,model=4")
    assert status == 0
    assert lines[-1] == "tiny over data=2, model=4: 0 errors, 0 warnings, 3 notes"
    assert [line.split()[0] for line in lines[:-1]] == ["note"] * 3
    quiet = said(capsys, "tiny", "--mesh", "data=2,model=4", "--quiet")
    assert quiet == (0, lines[-1:])


def test_errors_are_grouped_and_give_status_1(capsys: Any) -> None:
    status, lines = said(capsys, "tiny", "--mesh", "model=3", "--quiet")
    assert status == 1
    assert lines[0].startswith(
        "error    dimension 0 ('vocab') has size 256, which is not divisible"
    )
    assert lines[1] == (
        "         at .model.embed.embedding, .optimizer.opt_state[0].mu.embed.embedding, "
        ".optimizer.opt_state[0].nu.embed.embedding"
    )
    [heads] = [i for i, line in enumerate(lines) if "('heads')" in line and "dimension 1" in line]
    assert lines[heads + 1] == (
        "         at .model.layers[0].attn.q.kernel, .model.layers[1].attn.q.kernel, "
        ".optimizer.opt_state[0].mu.layers[0].attn.q.kernel, "
        ".optimizer.opt_state[0].mu.layers[1].attn.q.kernel and 2 more"
    )
    assert lines[-1] == "tiny over model=3, data=1: 45 errors, 0 warnings, 3 notes"


def test_mesh_larger_than_the_machine_is_checked(capsys: Any) -> None:
    status, lines = said(capsys, "small", "--mesh", "data=512,model=4", "--quiet")
    assert jax.device_count() < 2048
    assert (status, lines[-1]) == (0, "small over data=512, model=4: 0 errors, 0 warnings, 3 notes")


def test_warnings_give_status_1_only_with_strict(capsys: Any) -> None:
    words = ["small", "--mesh", "data=8", "--quiet"]
    status, lines = said(capsys, *words)
    assert (status, lines[0].split()[0]) == (0, "warning")
    assert "held whole by each of 8 devices" in lines[0]
    assert said(capsys, *words, "--strict") == (1, lines)
    assert said(capsys, *words, "--strict", "--large", "100")[0] == 0


def test_zero_layout_is_checked(capsys: Any) -> None:
    assert said(capsys, "tiny", "--mesh", "data=2,model=4", "--zero", "--quiet")[0] == 0
    status, lines = said(capsys, "tiny", "--mesh", "data=3,model=4", "--zero", "--quiet")
    assert status == 1
    assert all(".optimizer" in line and ".model" not in line for line in lines[1:-1:2])


def test_run_is_checked_over_own_or_given_mesh(capsys: Any, run_folder: Path) -> None:
    status, lines = said(capsys, str(run_folder), "--quiet")
    assert (status, lines[-1]) == (
        0,
        f"{run_folder} over data=2, model=4: 0 errors, 0 warnings, 3 notes",
    )
    assert said(capsys, str(run_folder), "--mesh", "model=8", "--quiet")[0] == 1
    assert [file.name for file in run_folder.iterdir()] == ["run.json"]


def test_invalid_model_or_mesh_gives_one_line(capsys: Any, tmp_path: Path) -> None:
    assert "--mesh data=2,model=4" in refused(capsys, "tiny")
    unknown = refused(capsys, "tinny", "--mesh", "data=2")
    assert "no preset (there are tiny, demo, small)" in unknown
    assert "Did you mean 'tiny'?" in unknown
    assert "is no run" in refused(capsys, str(tmp_path), "--mesh", "data=2")
    assert "'modle'" in refused(capsys, "tiny", "--mesh", "modle=2")
    assert "not name=size" in refused(capsys, "tiny", "--mesh", "data=two")


# --- models and rules of one's own ----------------------------------------------------------------

SOURCE = """
import shardax as sx

RULES = {"mlp": "model", "embed": None}
NOTHING = 3

def make(width=32):
    return sx.nn.MLP(16, width, rngs=sx.Rngs(0))

def narrow():
    return make(30)

def plain_arrays():
    return {"w": sx.Param(sx.nn.MLP(16, 4, rngs=sx.Rngs(0)).up.kernel.value)}

MODEL = make()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def rules_file(folder: Path, text: str) -> str:
    (folder / "rules.json").write_text(text)
    return str(folder / "rules.json")


MESH = ["--mesh", "data=2,model=4"]


@pytest.mark.parametrize("what", ["make", "MODEL", "plain_arrays"])
def test_custom_model_is_checked_by_custom_rules(
    capsys: Any, mine: str, tmp_path: Path, what: str
) -> None:
    file = rules_file(tmp_path, '[["mlp", "model"], ["embed", null], ["batch", "data"]]')
    status, lines = said(capsys, f"{mine}:{what}", "--rules", file, *MESH, "--quiet")
    assert status == 0
    [last] = lines
    assert last.startswith(f"{mine}:{what} over data=2, model=4: 0 errors, 0 warnings, ")


def test_errors_name_paths_of_model_and_optimizer(capsys: Any, mine: str) -> None:
    status, lines = said(capsys, f"{mine}:narrow", "--rules", f"{mine}:RULES", *MESH, "--quiet")
    assert status == 1
    assert "('mlp') has size 30, which is not divisible by 4" in lines[0]
    assert ".model.gate.kernel, .model.up.kernel, .optimizer.opt_state[0].mu" in lines[1]
    assert lines[-1].endswith("9 errors, 0 warnings, 1 note")


def test_rules_themselves_are_checked(capsys: Any, mine: str, tmp_path: Path) -> None:
    file = rules_file(tmp_path, '[["mlp", "modle"], ["embed", null], ["embed", "data"]]')
    status, lines = said(capsys, f"{mine}:make", "--rules", file, *MESH)
    assert status == 1
    text = "\n".join(lines)
    assert "mesh axis 'modle'" in text and "Did you mean 'model'?" in text
    assert "warning  The rule ('embed', 'data') is never used" in text
    assert "note     No rule names the mesh axis 'model' of size 4" in text
    preset = said(capsys, "tiny", "--rules", file, *MESH, "--quiet")
    assert preset[0] == 1


def test_invalid_custom_model_or_rules_gives_one_line(
    capsys: Any, mine: str, tmp_path: Path
) -> None:
    make, rules = f"{mine}:make", ["--rules", f"{mine}:RULES"]
    assert "--rules FILE.json" in refused(capsys, make, *MESH)
    assert "--mesh data=2,model=4" in refused(capsys, make, *rules)
    assert "Did you mean 'make'?" in refused(capsys, f"{mine}:mak", *rules, *MESH)
    assert "no module 'nowhere'" in refused(capsys, "nowhere:make", *rules, *MESH)
    assert "no module 'shardax.nowhere'" in refused(capsys, "shardax.nowhere:m", *rules, *MESH)
    assert "there is no array" in refused(capsys, f"{mine}:NOTHING", *rules, *MESH)
    assert "no such file" in refused(capsys, make, "--rules", "none.json", *MESH)
    for text, problem in [
        ("[", "line 1 column"),
        ("3", "Rules are made of pairs or a mapping"),
        ('[["mlp", 3]]', "Rule 0 for 'mlp'"),
        ('{"mlp": ["model", "model"]}', "holds a mesh axis twice"),
    ]:
        file = rules_file(tmp_path, text)
        found = refused(capsys, make, "--rules", file, *MESH)
        assert found.startswith(f"--rules {file}: ") and problem in found


def test_import_error_of_custom_module_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name = f"broken_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [f"{name}:make", "--rules", "shardax.models:DECODER_RULES", *MESH]
    assert main(["check", *words]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"shardax: '{name}:make' raised ModuleNotFoundError; this traceback is")
    assert text.endswith("No module named 'no_such_module_anywhere'\n")
