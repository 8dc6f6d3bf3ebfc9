# SPDX-License-Identifier: Apache-2.0
"""``shardax migrate``: what it prints, writes and refuses."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardax.cli import main

BEFORE = "from flax import nnx\n\nlayer = nnx.Conv(3, 8, (3, 3), feature_group_count=1)\n"
AFTER = "import shardax as sx\n\nlayer = sx.nn.Conv(3, 8, (3, 3), groups=1)\n"
LEFT = "from flax import nnx\n\ncell = nnx.GRUCell(3, 4)\nlayer = nnx.Embed(5, 2)\n"
LEFT_REASON = (
    "that of Flax has no bias on the recurrent product, which would be trained here. Write "
    "sx.nn.GRUCell(in_features, features, rngs=rngs), and accept the bias."
)
CHECK_REASON = "a negative index gives NaN, and so does one out of range of a table of one row."
TODO = "1 of 1 files would change, 0 places left"
NOTHING = "0 of 1 files would change, 0 places left"
DIFF = """\
--- a/{0}
+++ b/{0}
@@ -1,3 +1,3 @@
-from flax import nnx
+import shardax as sx
{1}
-layer = nnx.Conv(3, 8, (3, 3), feature_group_count=1)
+layer = sx.nn.Conv(3, 8, (3, 3), groups=1)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(BEFORE)
    return path


def run(capsys: Any, *words: str | Path) -> tuple[int, str, list[str]]:
    """Exit status, what is printed, and the lines on standard error."""
    status = main(["migrate", *map(str, words)])
    printed, errors = capsys.readouterr()
    return status, printed, errors.splitlines()


def test_default_prints_a_diff_and_changes_nothing(capsys: Any, program: Path) -> None:
    assert run(capsys, program) == (0, DIFF.format(program, " "), [TODO])
    assert program.read_text() == BEFORE


def test_write_changes_the_file_and_keeps_its_mode(capsys: Any, program: Path) -> None:
    program.chmod(0o755)
    assert run(capsys, program, "--write") == (0, "", ["1 of 1 files changed, 0 places left"])
    assert program.read_text() == AFTER
    assert program.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in program.parent.iterdir()] == ["model.py"]
    again = run(capsys, program, "--write", "--diff")
    assert again == (0, "", ["0 of 1 files changed, 0 places left"])


def test_write_follows_a_link(capsys: Any, program: Path) -> None:
    link = program.with_name("link.py")
    link.symlink_to(program)
    assert run(capsys, link, "--write")[0] == 0
    assert link.is_symlink() and program.read_text() == AFTER


def test_line_ends_of_windows_are_kept(capsys: Any, program: Path) -> None:
    program.write_bytes(BEFORE.replace("\n", "\r\n").encode())
    assert run(capsys, program, "--write")[0] == 0
    assert program.read_bytes() == AFTER.replace("\n", "\r\n").encode()


def test_check_tells_by_its_status(capsys: Any, program: Path) -> None:
    assert run(capsys, program, "--check") == (1, "", [TODO])
    program.write_text(AFTER)
    assert run(capsys, program, "--check") == (0, "", [NOTHING])


def test_report_names_place_reason_and_remedy(capsys: Any, program: Path) -> None:
    program.write_text(LEFT)
    status, printed, lines = run(capsys, program, "--write")
    assert (status, printed) == (0, "")
    assert lines == [
        f"{program}:3: left: nnx.GRUCell: {LEFT_REASON}",
        f"{program}:4: check: nnx.Embed: {CHECK_REASON}",
        "1 of 1 files changed, 1 places left",
    ]
    assert program.read_text() == (
        "import shardax as sx\n"
        'raise ImportError("shardax migrate left 1 place to write by hand (before, line 3): write '
        'them, then remove this line.")\n'
        "\n"
        "cell = nnx.GRUCell(3, 4)\n"
        "layer = sx.nn.Embed(5, 2)\n"
    )


@pytest.mark.parametrize(
    ("words", "printed"), [((), DIFF.format("<stdin>", " ")), (("--write",), AFTER)]
)
def test_standard_input_is_translated(
    capsys: Any, monkeypatch: Any, words: tuple[str, ...], printed: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BEFORE.encode())))
    status, text, _ = run(capsys, "-", *words)
    assert (status, text) == (0, printed)


def test_folders_are_searched_for_programs(capsys: Any, program: Path) -> None:
    folder = program.parent / "inner"
    folder.mkdir()
    (folder / "other.py").write_text(BEFORE)
    (folder / "notes.txt").write_text(BEFORE)
    _, _, lines = run(capsys, program.parent, program, "--check")
    assert lines == ["2 of 2 files would change, 0 places left"]


BAD = [
    (b"def f(:\n", "{0}:1: this is no Python: "),
    (b"\xff\xfe\n", "{0} is not UTF-8, as Python files are."),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_file_is_refused_before_any_is_written(
    capsys: Any, program: Path, content: bytes, said: str
) -> None:
    bad = program.with_name("bad.py")
    bad.write_bytes(content)
    status, printed, lines = run(capsys, program, bad, "--write")
    assert (status, printed, len(lines)) == (2, "", 1)
    assert lines[0].startswith(f"shardax: {said.format(bad)}")
    assert program.read_text() == BEFORE


REFUSED = [
    ((), "Name the files to translate: shardax migrate FILE..."),
    (("missing.py",), "There is no file 'missing.py' to translate."),
    (("model.py", "--check", "--write"), "--check changes nothing: give it without --write."),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_bad_command_line_is_told_in_one_line(
    capsys: Any, monkeypatch: Any, program: Path, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(program.parent)
    assert run(capsys, *words) == (2, "", [f"shardax: {said}"])


def test_missing_package_is_told_with_its_extra(program: Path) -> None:
    code = (
        "import sys; sys.modules['libcst'] = None\n"
        "from shardax.cli import main\n"
        f"sys.exit(main(['migrate', {str(program)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        (
            "shardax: libcst is missing. The command line needs extra packages: "
            "pip install 'shardax[migrate]'\n"
        ),
    )
