# SPDX-License-Identifier: Apache-2.0
"""``shardax train --precision``: products in fp8, by parts of paths, saved and resumed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.cli import main
from tests.cli.test_resume import raw_arrays

pytestmark = pytest.mark.usefixtures("one_layer")

OPTIONS = ["--preset", "tiny", "--steps", "4", "--batch-size", "8", "--seq-len", "16"]
OPTIONS += ["--checkpoint-every", "2", "--devices", "8", "--mesh", "data=2,model=2"]
OPTIONS += ["--precision", "attn=none,layers=fp8-delayed"]


def losses_of(out: Path) -> list[tuple[int, float]]:
    records = sx.train.read_jsonl(out / "log.jsonl")
    return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]


def test_run_with_delayed_scales_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, whole, resumed = (tmp_path / name for name in ("text.txt", "whole", "resumed"))
    text.write_text(" ".join(random.Random(0).choices(["the", "lazy", "dog"], k=9000)))
    assert main(["train", *OPTIONS, "--text", str(text), "--out", str(whole)]) == 0
    shutil.copytree(whole, resumed)
    sx.train.Checkpoints(resumed / "checkpoints").rewind(2)
    # Its sample is that of the whole run, of the same parameters.
    monkeypatch.setattr(sx.models, "generate", lambda *_, **__: [np.zeros(4, int)])
    assert main(["train", "--resume", "--out", str(resumed)]) == 0

    settings = json.loads((whole / "run.json").read_text())
    assert settings["precision"] == "attn=none,layers=fp8-delayed"
    expected = raw_arrays(whole, 4)
    histories = {p: np.frombuffer(data, "f4") for p, data in expected.items() if ".precision." in p}
    assert len(histories) == 2 * 3  # of three products of a layer, input and kernel
    # Of four steps, and of those alone: evaluation records nothing.
    assert {np.count_nonzero(history) for history in histories.values()} == {4}
    assert raw_arrays(resumed, 4) == expected
    assert losses_of(resumed) == losses_of(whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "fp4"], "'layers=fp4' is no part of a path with one of fp8"),
        (["--precision", "towers=fp8"], "decides about no kernel"),
        (["--precision", "fp8", "--lora", "2", "--from", "."], "layers that --lora replaces"),
    ],
)
def test_train_refuses_other_precisions(
    tmp_path: Path, capsys: Any, words: list[str], message: str
) -> None:
    assert main(["train", "--preset", "tiny", *words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
