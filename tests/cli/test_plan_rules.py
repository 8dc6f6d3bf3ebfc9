# SPDX-License-Identifier: Apache-2.0
"""Rules of one's own in a TOML file: checked, trained with, kept by the run, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardax as sx
from shardax.cli import main
from shardax.cli.inputs import load_rules
from shardax.cli.runs import read_settings
from shardax.errors import CommandError

pytestmark = pytest.mark.usefixtures("one_layer")

FSDP = """
[layouts."fsdp 8x1"]
mesh = { data = 8, model = 1 }
rules = [["batch", "data"], ["embed", "data"], ["vocab", []], ["mlp", "model"]]
"""
TENSOR = """
[layouts.tensor]
mesh = { data = 2, model = 4 }
rules = [["batch", "data"], ["vocab", "model"], ["mlp", "model"], ["heads", "model"]]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "best.toml"
    path.write_text(FSDP)
    return path


def refused(capsys: Any, *words: str) -> str:
    """What a command that must fail says; it prints nothing else."""
    assert main(words) in (1, 2)
    printed, text = capsys.readouterr()
    assert printed == ""
    assert text.startswith("shardax: ") and text.count("\n") == 1
    return text.removeprefix("shardax: ")


def test_training_uses_the_rules_of_the_file(
    file: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Recorded(sx.train.Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

        def check(self, **options: Any) -> None:
            super().check(**options)
            if len(made) > 1:
                raise CommandError("as far as a resumed run needs to go here")

    monkeypatch.setattr(sx.train, "Trainer", Recorded)
    monkeypatch.setattr(sx.models, "generate", lambda *_, **__: [np.zeros(4, int)])
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 200)
    out = str(tmp_path / "run")
    words = ["train", "--preset", "tiny", "--steps", "2", "--batch-size", "8", "--seq-len", "16"]
    words += ["--devices", "8", "--text", str(tmp_path / "text.txt"), "--out", out]
    assert main([*words, "--rules", str(file)]) == 0

    [trainer] = made
    specs = {path: v.value.sharding.spec for path, v in sx.iter_variables(trainer.model)}
    assert specs["embed", "embedding"] == PartitionSpec(None, "data")
    assert specs["layers", 0, "mlp", "gate", "kernel"] == PartitionSpec("data", "model")
    moments = jax.tree.leaves(sx.state(trainer.optimizer, sx.OptState).to_pure_dict())
    assert {x.sharding.spec for x in moments if x.ndim > 1} >= {PartitionSpec("data", "model")}

    settings = read_settings(tmp_path / "run")
    expected = sx.Rules([("batch", "data"), ("embed", "data"), ("vocab", None), ("mlp", "model")])
    assert (settings.layout_rules, settings.mesh) == (expected, "data=8,model=1")
    file.unlink()  # the run has the rules by itself
    assert main([*words, "--resume"]) == 2
    assert (made[1].rules, dict(made[1].mesh.shape)) == (expected, {"data": 8, "model": 1})
    capsys.readouterr()
    assert main(["show", out]) == 0
    [embedding] = [line for line in capsys.readouterr().out.splitlines() if "embedding" in line]
    assert embedding.split()[-4:] == ["data", "16,384", "8.0", "KiB"]
    assert main(["check", out, "--quiet"]) == 0
    assert "over data=8, model=1: 0 errors" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["rules"] = {"rules": 3}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert "run.json: rules.rules: Rules are made of pairs" in refused(capsys, "show", out)


def test_check_uses_mesh_of_file_or_option(file: Path, capsys: Any) -> None:
    assert main(["check", "tiny", "--rules", str(file), "--quiet"]) == 0
    assert "tiny over data=8, model=1: 0 errors" in capsys.readouterr().out
    words = ["check", "tiny", "--rules", str(file), "--mesh", "data=3,model=1", "--quiet"]
    assert main(words) == 1
    assert "over data=3, model=1" in capsys.readouterr().out


def test_load_rules_picks_one_of_several_layouts_by_name(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(FSDP + TENSOR)
    two = str(tmp_path / "two.toml")
    assert load_rules(f"{two}:tensor").mesh == (("data", 2), ("model", 4))
    assert load_rules(f"{two}:fsdp 8x1").rules.spec(("embed", "mlp")) == PartitionSpec(
        "data", "model"
    )
    with pytest.raises(CommandError, match=r"holds 2 layouts: 'fsdp 8x1', 'tensor'\. Name one"):
        load_rules(two)
    with pytest.raises(CommandError, match=r"no layout 'tensro', but .* Did you mean 'tensor'"):
        load_rules(f"{two}:tensro")


def test_unusable_rules_give_one_line(file: Path, tmp_path: Path, capsys: Any) -> None:
    out = ["--out", str(tmp_path / "run")]
    missing = refused(capsys, "train", "--rules", str(tmp_path / "none.toml"), *out)
    assert "none.toml: there is no such file" in missing
    file.write_text('rules = [["batch", "data"]]')
    assert "names no mesh" in refused(capsys, "train", "--rules", str(file), *out)
    file.write_text('rules = [["batch", 3]]')
    wrong = refused(capsys, "check", "tiny", "--rules", str(file), "--mesh", "data=2")
    assert wrong.startswith(f"--rules {file}: rules: Rule 0 for 'batch' has the target 3")
    assert not (tmp_path / "run").exists()
