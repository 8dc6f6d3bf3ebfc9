# SPDX-License-Identifier: Apache-2.0
"""``shardax plan``, ``plan explain`` and ``plan diff``: what is printed, written and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardax as sx
from shardax.cli import main
from shardax.cli.plan import as_planned, own_step, preset_step
from shardax.errors import CommandError, PlanInterrupted
from shardax.plan import Plan
from shardax.plan.inputs import Inputs
from shardax.plan.rules_file import read_rules
from tests.planner.plan.samples import sample_reports

SOURCE = """
import jax
import shardax as sx
from shardax import plan

def step(up, down, x):
    hidden = jax.nn.relu(x @ up.value)
    return (hidden @ down.value).sum()

def make(batch=32):
    up = sx.Param(sx.Init(jax.nn.initializers.ones, (16, 64)), axes=("embed", "mlp"))
    down = sx.Param(sx.Init(jax.nn.initializers.ones, (64, 16)), axes=("mlp", "embed"))
    return step, (up, down, plan.NamedShape((batch, 16), "float32", ("batch", "embed")))

def plain():
    return 3

def unnamed():
    return step, (sx.Param(sx.Init(jax.nn.initializers.ones, (16, 64))),) * 2 + (3.0,)

NOTHING = 3
"""
RULES = """
[layouts.dp]
mesh = { data = 4, model = 1 }
rules = [["batch", "data"]]

[layouts."tp 1x4"]
mesh = { data = 1, model = 4 }
rules = [["batch", "data"], ["mlp", "model"]]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a module that makes steps."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "planned_here.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "planned_here"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    return tmp_path / "rules.toml"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in a file."""
    file = tmp_path_factory.mktemp("kept") / "plan.json"
    Plan("tpu:v5e:4x4", sample_reports()).to_json(file)
    return file


def said(capsys: Any, *words: str, status: int = 0) -> str:
    """What a command prints that ends with a status."""
    assert main(["plan", *words]) == status
    return capsys.readouterr().out


def refused(capsys: Any, *words: str) -> str:
    """What a command that must fail says; it prints nothing else."""
    assert main(["plan", *words]) in (1, 2)
    printed, text = capsys.readouterr()
    assert printed == ""
    assert text.startswith("shardax: ") and text.count("Traceback") == 0
    return text.removeprefix("shardax: ").strip()


# --- a search and a comparison --------------------------------------------------------------------


def test_search_prints_best_and_writes_files(mine: str, tmp_path: Path, capsys: Any) -> None:
    files = {name: tmp_path / name for name in ("out.json", "out.html", "best.toml")}
    options = ["--json", "out.json", "--html", "out.html", "--write-rules", "best.toml"]
    options = [str(files.get(word, word)) for word in options]
    words = [f"{mine}:make", "--target", "cpu:4", "--top", "2", "--effort", "screen", "--no-cache"]
    printed = said(capsys, *words, *options)
    plan = Plan.from_json(files["out.json"])
    assert len(plan) == 2
    assert printed.startswith(f"{plan}\n")
    assert printed.endswith(
        f"plan: {files['out.json']}\npage: {files['out.html']}\nrules: {files['best.toml']}\n"
    )
    assert "<!doctype html>" in files["out.html"].read_text()
    best = plan.best().layout
    [entry] = read_rules(files["best.toml"])
    assert (entry.name, entry.rules.pairs, entry.mesh) == (best.name, best.rules, best.mesh)
    comments = [line for line in files["best.toml"].read_text().splitlines() if line[:1] == "#"]
    assert comments[0] == "# Found by shardax plan for cpu:4."
    assert comments[1].startswith(f"# {best.name} over ") and "peak" in comments[1]


def test_layouts_of_file_use_their_own_meshes(
    mine: str, rules: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "plan.json"
    words = [f"{mine}:make", "--target", "cpu:4", "--rules", str(rules), "--no-cache"]
    assert "cpu:4: 2 of 2 layouts fit" in said(capsys, *words, "--json", str(file))
    plan = Plan.from_json(file)
    assert {each.layout.name: each.layout.sizes for each in plan} == {
        "dp": {"data": 4, "model": 1},
        "tp 1x4": {"data": 1, "model": 4},
    }
    assert plan["dp"].argument_bytes["batch"] * 4 == plan["tp 1x4"].argument_bytes["batch"]
    assert (
        plan["dp"].argument_bytes["parameters"] == 4 * plan["tp 1x4"].argument_bytes["parameters"]
    )


def test_mesh_options_replace_meshes_of_the_file(
    mine: str, rules: Path, tmp_path: Path, capsys: Any
) -> None:
    small = tmp_path / "small.toml"
    small.write_text('like = "cpu"\nname = "small"\nmemory_bytes = 4096\nusable_bytes = 4096\n')
    words = [f"{mine}:make", "--target", f"{small}:4", "--rules", f"{rules}:tp 1x4"]
    meshes = ["--mesh", "data=2,model=2", "--mesh", "data=4,model=1", "--no-cache"]
    assert main(["plan", *words, *meshes, "--batch", "64"]) == 1
    printed, errors = capsys.readouterr()
    assert "0 of 2 layouts fit; 2 too large\n" in printed
    assert "tp 1x4 data=2,model=2" in printed and "tp 1x4 data=4,model=1" in printed
    assert errors.splitlines()[-1].startswith("shardax: None of 2 layouts fits into")


def test_preset_is_planned_as_it_is_trained() -> None:
    planned = preset_step("tiny", batch=8, seq_len=16)
    batch = planned.args[2]
    assert {name: (each.shape, each.axes) for name, each in batch.items()} == dict.fromkeys(
        ("inputs", "targets"), ((8, 16), ("batch", "seq"))
    )
    places = sx.plan.Layout("dp", (("batch", "data"),), (("data", 8),))
    report = Inputs(planned.step, planned.args).place(places)
    assert report.argument_bytes["optimizer"] >= 2 * report.argument_bytes["parameters"]


# --- what a function of one's own returns ---------------------------------------------------------


@dataclass
class Made:
    step: Any
    args: Any
    tie: Any = None
    fix: Any = None


def test_step_is_a_pair_mapping_or_dataclass(mine: str) -> None:
    pair = as_planned((abs, [1]), "m:f")
    assert (pair.step, pair.args, pair.options) == (abs, (1,), {})
    mapping = {"step": abs, "args": (1,), "meshes": [{"data": 2}], "tie": None}
    assert as_planned(mapping, "m:f").options == {"meshes": [{"data": 2}]}
    assert as_planned(Made(abs, (1,), fix={"seq": None}), "m:f").options == {"fix": {"seq": None}}
    assert own_step(f"{mine}:make", batch=8).args[2].shape == (8, 16)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (3, "returned int. It should return (step, args)"),
        ({"step": abs}, "returned dict. It should return (step, args)"),
        ({"step": abs, "args": (), "ties": []}, "with 'ties'; there are step, args, tie"),
        ({"step": abs, "args": (), "ties": []}, "Did you mean 'tie'?"),
        ((3, ()), "returned step=3 and args of type tuple"),
        ((abs, 3), "args of type int"),
    ],
)
def test_invalid_step_is_refused_with_reason(made: Any, problem: str) -> None:
    with pytest.raises(CommandError) as caught:
        as_planned(made, "my:make")
    assert str(caught.value).startswith("'my:make' returned ") and problem in str(caught.value)


def test_invalid_plan_is_refused_before_compiling(
    mine: str, rules: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "bare.toml").write_text('rules = [["batch", "data"]]')
    for words, problem in {
        ("tinny",): "'tinny' is not MODULE:NAME",
        (f"{mine}:mak",): "Did you mean 'make'?",
        (f"{mine}:NOTHING",): "cannot be called",
        (f"{mine}:plain",): "returned int. It should return (step, args)",
        (f"{mine}:plain", "--batch", "8"): "is called as plain(batch=8): got an unexpected",
        (f"{mine}:unnamed",): "no axis names",
        (f"{mine}:make", "--seq-len", "8"): "--seq-len is of the presets",
        ("--preset", "tinny"): "--preset 'tinny' is unknown",
        ("--batch", "0"): "--batch 0: give a number from 1 to 268,435,456",
        ("--target", "tpv:v5e:4x4"): "There is no target 'tpv:v5e:4x4'",
        ("--mesh", "data=two"): "not name=size",
        (f"{mine}:make", "--mesh", "data=3"): "3",
        ("--top", "0"): "at least 1",
        ("--json", str(tmp_path / "no" / "out.json")): "there is no folder",
        ("--html", str(tmp_path)): "is a folder",
        ("--rules", str(tmp_path / "bare.toml")): "names no mesh; name it",
        ("--rules", f"{rules}:dpp"): "no layout 'dpp'",
        ("--rules", str(rules), "--batch", "8", "16"): "with --rules give one batch size",
        (f"{mine}:make", "--rules", f"{rules}:dp", "--mesh", "data=4"): "cpu:8",
    }.items():
        assert problem in refused(capsys, *words), words


def test_interrupted_search_prints_and_writes_partial_plan(
    mine: str, kept: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Plan:
        error = PlanInterrupted("The search was interrupted after 3 of 8 layouts.")
        error.plan = Plan.from_json(kept)
        raise error

    monkeypatch.setattr(sx.plan, "search", interrupted)
    file = tmp_path / "so-far.json"
    assert main(["plan", f"{mine}:make", "--json", str(file)]) == 130
    printed, errors = capsys.readouterr()
    assert printed.startswith("tpu:v5e:4x4: 2 of 8 layouts fit")
    assert errors == "shardax: The search was interrupted after 3 of 8 layouts.\n"
    assert len(Plan.from_json(file)) == 8


# --- more about a plan in a file ------------------------------------------------------------------


def test_layout_of_a_file_is_explained(kept: Path, capsys: Any) -> None:
    plan = Plan.from_json(kept)
    assert said(capsys, "explain", str(kept)) == sx.plan.explain(plan.best()) + "\n"
    words = ["explain", str(kept), "fsdp+tp 4x4", "--axis", "model", "--by", "kind"]
    assert said(capsys, *words) == sx.plan.explain(plan["fsdp+tp 4x4"], "model", "kind") + "\n"


def test_diff_compares_layouts_of_one_or_two_files(kept: Path, capsys: Any) -> None:
    plan = Plan.from_json(kept)
    expected = sx.plan.diff(plan["fsdp 16x1"], plan["fsdp+tp 4x4"]) + "\n"
    assert said(capsys, "diff", f"{kept}:fsdp 16x1", "fsdp+tp 4x4") == expected
    assert said(capsys, "diff", f"{kept}:fsdp 16x1", f"{kept}:fsdp+tp 4x4") == expected
    assert said(capsys, "diff", str(kept), f"{kept}:fsdp+tp 4x4") == expected


def test_missing_layout_axis_or_file_is_named(kept: Path, tmp_path: Path, capsys: Any) -> None:
    assert "no layout 'fsdp 16x2'" in refused(capsys, "explain", str(kept), "fsdp 16x2")
    assert "no axis 'seq'" in refused(capsys, "explain", str(kept), "--axis", "seq")
    missing = str(tmp_path / "none.json")
    assert f"{missing}: there is no such file" in refused(capsys, "explain", missing)
    assert "there is no such file" in refused(capsys, "diff", f"{missing}:a", f"{kept}:b")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    assert "no plan of shardax" in refused(capsys, "explain", str(tmp_path / "other.json"))


def test_help_lists_plan_commands(capsys: Any) -> None:
    for words, expected in {
        ("plan", "--help"): "shardax plan explain PLAN.json LAYOUT",
        ("plan", "explain", "--help"): "usage: shardax plan explain",
        ("plan", "diff", "--help"): "A.json:LAYOUT",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert expected in " ".join(capsys.readouterr().out.split())


def test_command_gets_virtual_devices_of_cpu_target(mine: str, rules: Path, tmp_path: Path) -> None:
    (tmp_path / "planned_here.py").write_text(SOURCE)
    words = ["plan", "planned_here:make", "--target", "cpu:4", "--rules", f"{rules}:dp"]
    done = subprocess.run(
        [sys.executable, "-m", "shardax", *words, "--no-cache"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu:4: 1 of 1 layouts fits\n")


# --- errors of a user's own code ------------------------------------------------------------------

BROKEN = """
def make():
    return {}["missing"]

def step(x):
    raise RuntimeError("of the step")

def make_step():
    from shardax import plan
    return step, (plan.NamedShape((8, 4), "float32", ("batch", "embed")),)
"""
SAID_OF_OWN = """{name!r} raised {kind}; this traceback is of its own code:
Traceback (most recent call last):
  File "{file}", line {line}, in {function}
"""


def test_errors_of_own_code_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = f"broken_{tmp_path.name}"
    file = tmp_path / f"{module}.py"
    file.write_text(BROKEN)
    (tmp_path / f"importing_{module}.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for function, kind, line, frame in [
        ("make", "KeyError", 3, "make"),
        ("make_step", "RuntimeError", 6, "step"),
    ]:
        name = f"{module}:{function}"
        start = SAID_OF_OWN.format(name=name, kind=kind, file=file, line=line, function=frame)
        assert main(["plan", name, "--target", "cpu:2", "--processes", "1"]) == 1
        assert capsys.readouterr().err.startswith(f"shardax: {start}")
    assert main(["plan", f"importing_{module}:make", "--target", "cpu:2"]) == 1
    text = capsys.readouterr().err
    assert text.endswith("\nModuleNotFoundError: No module named 'no_such_module_anywhere'\n")
    assert text.count("File") == 1
