# SPDX-License-Identifier: Apache-2.0
"""``shardax train`` with kernels by name: their scope, ``run.json``, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardax as sx
from shardax.cli import main
from tests.needs import needs_no

pytestmark = pytest.mark.usefixtures("one_layer")

SMALL = ["--preset", "tiny", "--steps", "2", "--batch-size", "8", "--seq-len", "16"]
CHOSEN = {"attention": "auto", "loss": "auto", "gated": "auto", "norms": "auto"}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the lazy dog and the quick fox " * 400)
    return ["train", *SMALL, "--checkpoint-every", "1", "--text", str(text), "--out"]


def test_kernels_are_those_of_run_json(
    tmp_path: Path, options: list[str], caplog: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, chosen = tmp_path / "plain", tmp_path / "chosen"
    with monkeypatch.context() as patch:  # without its sample, which other tests read
        patch.setattr(sx.models, "generate", lambda *_, **__: [np.zeros(4, int)])
        assert main([*options, str(plain)]) == 0
    words = [word for kind, name in CHOSEN.items() for word in (f"--{kind}", name)]
    with caplog.at_level(logging.INFO, "shardax.kernels"):
        assert main([*options, str(chosen), *words]) == 0
    assert all(f", {kind}: xla" in caplog.text for kind in ("norms", "gated", "loss"))
    settings = json.loads((chosen / "run.json").read_text())
    assert {kind: settings[kind] for kind in CHOSEN} == CHOSEN
    assert settings["experts"] is None
    losses = [sx.train.read_jsonl(out / "log.jsonl")[-1]["eval_loss"] for out in (plain, chosen)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    capsys.readouterr()
    assert main(["train", "--resume", "--out", str(chosen), "--norms", "xla"]) == 2
    assert "was started with other settings than --norms xla" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention", "splash"], "--attention splash: MultiHeadAttention.* runs on TPUs"),
        *(
            pytest.param([kind, "tokamax"], f"{kind} tokamax: {layer}", marks=needs_no("tokamax"))
            for kind, layer in [
                ("--norms", "RMSNorm"),
                ("--loss", "blockwise_cross_entropy"),
                ("--gated", "MLP"),
            ]
        ),
        (["--experts", "auto"], "--experts auto: the model has no experts"),
        (["--gated", "cudnn"], "gated='cudnn' must be None, 'auto', 'xla' or 'tokamax'"),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    tmp_path: Path, options: list[str], capsys: Any, words: list[str], message: str
) -> None:
    assert main([*options, str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()
