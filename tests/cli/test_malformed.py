# SPDX-License-Identifier: Apache-2.0
"""Whatever is malformed on a command line or in a run's settings is one line and status 2."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import shardax as sx
from shardax.cli import main
from shardax.cli.runs import write_settings
from tests.cli.test_runs import SETTINGS

LINES = " ".join(["the quick brown fox"] * 500)
NUMBERS = ("", "x", "1e3", "0x10", "2^9", "-1", "nan", "9" * 5000, str(2**70), str(10**10))
FLOATS = ("", "x", "-1", "nan", "inf", "-inf", "1e999")
MESHES = (
    "data",
    "data=",
    "=2",
    "data=0",
    "data=-1",
    "data=2.5",
    "data=²",
    "data=٣",
    "data=2,data=2",
    "data=2;model=2",
    "data=" + "9" * 5000,
    "data=999999999,model=999999999",
    "data=2147483648",
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "train --seed": NUMBERS,
    "train --steps": ("0", *NUMBERS),
    "train --batch-size": ("0", "999999999", *NUMBERS),
    "train --seq-len": ("0", "999999999", *NUMBERS),
    "train --checkpoint-every": NUMBERS,
    "train --devices": ("0", "5000", *NUMBERS),
    "train --learning-rate": ("0", *FLOATS),
    "train --mesh": MESHES,
    "train --preset": ("", "huge", "tiny,demo"),
    "train --text": ("", "none", "empty", "loop", "a\0b", "\udcff", "n" * 5000),
    "train --out": ("", "file", "a\0b", "\udcff", "n" * 5000),
    "train --rules": ("", "none", "loop", "deep.json", "deep.toml", "nine.json", ".", "os:sep"),
    "sample run --length": ("99999999999", *NUMBERS),
    "sample run --seed": NUMBERS,
    "sample run --temperature": FLOATS,
    "sample run --prompt": ("", "\udcff", "a\udc80"),
    "check tiny --mesh data=2 --large": FLOATS,
    "check tiny --mesh": MESHES,
    "check tiny --mesh data=2 --rules": ("deep.json", "deep.toml", "nine.json", "loop", "os:sep"),
    "check": ("", "none", "loop", "a\0b", "os:getcwd", "math:sqrt", "nothing.at:all", "n" * 5000),
    "show": ("", "none", "loop", "file", "run/none", "run/checkpoints/x", "a\0b", "n" * 5000),
    "show run --mesh": MESHES,
    "show run --html": ("", ".", "none/page.html", "a\0b"),
    "verify": ("", "none", "loop", "file", "a\0b"),
    "plan --batch": NUMBERS,
    "plan --seq-len": NUMBERS,
    "plan --top": ("0", *NUMBERS),
    "plan --processes": ("0", *NUMBERS),
    "plan --mesh": MESHES,
    "plan --effort": ("", "none"),
    "plan explain": ("none.json", "deep.json", "nine.json", "loop", ".", "a\0b"),
    "plan diff file": ("none.json", "deep.json", "loop"),
    "plan --target": ("", "x", "cpu:0", "cpu:-1", "cpu:99999999", "tpu:v5e:0x0", "none.toml"),
    "plan --json": ("", ".", "none/plan.json"),
    "plan": ("none", "os:sep", "math:sqrt", "nothing.at:all"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    path = tmp_path_factory.mktemp("folder")
    write_settings(path / "run", SETTINGS)
    (path / "loop").symlink_to(path / "loop")
    (path / "file").write_text(LINES)
    (path / "empty").write_text("")
    (path / "deep.json").write_text("[" * 100_000)
    (path / "deep.toml").write_text("a = " + "[" * 100_000)
    (path / "nine.json").write_text("9" * 5000)
    return path


@pytest.mark.parametrize("words", OPTIONS)
def test_malformed_value_gives_one_line_and_status_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str
) -> None:
    monkeypatch.chdir(folder)
    for owner, name in ((sx.train.Trainer, "run"), (sx.plan, "search"), (sx.models, "generate")):
        monkeypatch.setattr(owner, name, None)  # nothing gets that far
    before = sorted(folder.rglob("*"))
    is_option = words.split()[-1].startswith("--")
    for place, value in enumerate(OPTIONS[words]):
        forms = [[*words.split(), value]]
        if is_option:
            forms.append([*words.split()[:-1], f"{words.split()[-1]}={value}"])
            if value and value[0] not in "-=":
                # The parser tells the forms apart by these alone: other values have one in turn.
                forms = [forms[place % 2]]
        for given in forms:
            status = main(given)
            printed, said = capsys.readouterr()
            assert (status, printed) == (2, ""), (given, said)
            assert said.startswith("shardax: ") and said.count("\n") == 1, (given, said)
            assert len(said) < 1200, given
    assert sorted(folder.rglob("*")) == before


HUGE = 10**30
SPOILT: list[tuple[str, Any]] = [
    *(("steps", value) for value in ("10", 1.5, True, None, [], {}, -1, 0, HUGE)),
    *(("batch_size", value) for value in ("8", 8.0, False, 0, -8, 2**29, HUGE)),
    *(("learning_rate", value) for value in ("x", None, -1, 0, float("nan"), float("inf"), True)),
    *(("seed", value) for value in ("1", 2**70, -1, 1.0, None)),
    *(("mesh", value) for value in (None, 3, "data", "data=0", "data=99999999999", [])),
    *(("devices", value) for value in ("8", 0, -1, HUGE, 1.5)),
    *(("zero", value) for value in (1, "yes", None)),
    *(("text", value) for value in (3, "", [], True)),
    *(("rules", value) for value in ([], "x", {"rules": 3}, {"a": 1})),
    *(("model", value) for value in (None, [], "tiny", 3, {})),
    *(("seq_len", value) for value in ("16", 2**28 + 1)),
    *(("format", value) for value in (2, "1", None, [])),
]
MODEL: list[tuple[str, Any]] = [
    *(("embed_dim", value) for value in ("64", 64.0, -64, HUGE, None)),
    *(("num_layers", value) for value in (0, "2", HUGE, 10**9, True)),
    *(("rope_base", value) for value in ("x", -1, None)),
    *(("dtype", value) for value in ("none", 3, "int32")),
    *(("tied_head", value) for value in (1, "yes", None)),
    *(("dropout", value) for value in ("0", 2, float("nan"))),
]


@pytest.mark.parametrize("command", ["show", "sample", "verify", "train --resume --out"])
def test_invalid_run_settings_are_refused_by_name(
    tmp_path: Path, capsys: Any, command: str
) -> None:
    file = tmp_path / "run.json"
    record = {"format": 1, **asdict(SETTINGS)}
    records = [(name, {**record, name: value}) for name, value in SPOILT]
    records += [(n, {**record, "model": {**record["model"], n: value}}) for n, value in MODEL]
    texts = [(name, json.dumps(spoilt)) for name, spoilt in records]
    texts += [("", "[" * 100_000), ("", "null"), ("", '"x"'), ("", "9" * 5000), ("", "")]
    for name, text in texts:
        if name == "model" and '"model": {}' in text:
            continue  # the default sizes
        file.write_text(text)
        status = main([*command.split(), str(tmp_path)])
        printed, said = capsys.readouterr()
        assert (status, printed) == (2, ""), (text[:200], said)
        assert said.count("\n") == 1 and ("run.json" in said or "--mesh" in said), (text, said)
        assert name in said or name in ("format", "rules", "model"), (text, said)
    file.write_bytes(b'{"format": "\xff"}')
    assert main([*command.split(), str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--large", "1"], "Missing from shardax check: MODEL"),
        (["check", "tiny", "--none"], "Unrecognized options: --none"),
        ([], "Missing subcommand"),
    ],
)
def test_missing_or_unknown_argument_gives_one_line(
    words: list[str], said: str, capsys: Any
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardax: ") and said in line and line.endswith(". See shardax --help.")
