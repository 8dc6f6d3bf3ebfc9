# SPDX-License-Identifier: Apache-2.0
"""``shardax migrate``: what it prints, writes and refuses."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardax.cli import main, program_files

BEFORE = "from flax import nnx\n\nlayer = nnx.Conv(3, 8, (3, 3), feature_group_count=1)\n"
AFTER = "import shardax as sx\n\nlayer = sx.nn.Conv(3, 8, (3, 3), groups=1)\n"
LEFT = "from flax import nnx\n\ncell = nnx.GRUCell(3, 4)\nlayer = nnx.Embed(5, 2)\n"
LEFT_REASON = (
    "that of Flax has no bias on the recurrent product, which would be trained here. Write "
    "sx.nn.GRUCell(in_features, features, rngs=rngs), and accept the bias."
)
CHECK_REASON = "a negative index gives NaN, and so does one out of range of a table of one row."
DONE = "{}:3: done: nnx.Conv is sx.nn.Conv, feature_group_count= is groups=."
TODO = "1 of 1 files would change, 0 places left"
NOTHING = "0 of 1 files would change, 0 places left"
WRITTEN = "1 of 1 files changed, 0 places left"
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
    report = [DONE.format(program), TODO]
    assert run(capsys, program) == (0, DIFF.format(program, " "), report)
    assert program.read_text() == BEFORE
    assert [path.name for path in program.parent.iterdir()] == ["model.py"]


def test_write_keeps_a_copy_and_all_that_the_file_is(capsys: Any, program: Path) -> None:
    program.chmod(0o755)
    other_name, link = program.with_name("other.txt"), program.with_name("link.py")
    other_name.hardlink_to(program)
    link.symlink_to(program)
    # By several names it is one file.
    assert run(capsys, program, link, "--write") == (0, "", [DONE.format(program), WRITTEN])
    assert program.read_text() == other_name.read_text() == AFTER
    assert link.is_symlink() and program.samefile(other_name)
    assert program.stat().st_mode & 0o777 == 0o755
    copy = program.with_name("model.py.orig")
    assert copy.read_text() == BEFORE

    program.write_text(BEFORE + "\n")
    assert run(capsys, program, "--write", "--diff")[0] == 0
    assert copy.read_text() == BEFORE  # that of the first run


def test_write_keeps_no_copy_of_what_git_has(capsys: Any, program: Path) -> None:
    folder = program.parent
    other = folder / "changed.py"
    other.write_text("")
    for words in (["init"], ["add", "."], [*IDENTITY, "commit", "-m", "all"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    other.write_text(BEFORE)
    assert run(capsys, program, other, "--write")[0] == 0
    assert sorted(path.name for path in folder.glob("*.orig")) == ["changed.py.orig"]


IDENTITY = ["-c", "user.name=n", "-c", "user.email=e"]
ENCODED = {
    "line ends of Windows": (BEFORE.replace("\n", "\r\n"), "utf-8"),
    "byte order mark": (BEFORE, "utf-8-sig"),
    "encoding of its own": (f"# coding: latin-1\n{BEFORE}# h\xe9\n", "latin-1"),
}


@pytest.mark.parametrize(("text", "encoding"), ENCODED.values(), ids=ENCODED)
def test_encoding_and_line_ends_are_kept(
    capsys: Any, program: Path, text: str, encoding: str
) -> None:
    program.write_bytes(text.encode(encoding))
    assert run(capsys, program, "--write")[0] == 0
    layer = "nnx.Conv(3, 8, (3, 3), feature_group_count=1)"
    expected = text.replace("from flax import nnx", "import shardax as sx")
    expected = expected.replace(layer, "sx.nn.Conv(3, 8, (3, 3), groups=1)")
    assert program.read_bytes() == expected.encode(encoding)


def test_interrupted_write_puts_the_old_text_back(program: Path, monkeypatch: Any) -> None:
    fill, calls = program_files._fill, []

    def interrupted(file: Any, data: bytes) -> None:
        calls.append(data)
        fill(file, data[:9] if len(calls) == 1 else data)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(program_files, "_fill", interrupted)
    assert main(["migrate", str(program), "--write"]) != 0
    assert program.read_text() == BEFORE


def test_check_tells_by_its_status(capsys: Any, program: Path) -> None:
    assert run(capsys, program, "--check") == (1, "", [DONE.format(program), TODO])
    program.write_text(AFTER)
    assert run(capsys, program, "--check") == (0, "", [NOTHING])


def test_report_names_place_reason_and_remedy_in_order(capsys: Any, program: Path) -> None:
    program.write_text(LEFT)
    status, printed, lines = run(capsys, program, "--write")
    assert (status, printed) == (0, "")
    assert lines == [
        f"{program}:3: left: nnx.GRUCell: {LEFT_REASON}",
        f"{program}:4: done: nnx.Embed is sx.nn.Embed.",
        f"{program}:4: check: nnx.Embed: {CHECK_REASON}",
        "1 of 1 files changed, 1 places left",
    ]
    guard = (
        f"shardax migrate left 1 place to write by hand; to list them: shardax migrate {program}"
    )
    assert program.read_text() == (
        f'raise SystemExit("{guard}")\n'
        "import shardax as sx\n"
        "from flax import nnx\n"
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


SKIPPED = (".hidden", "env", "__pycache__", "build", "dist", "a.egg-info", "node_modules")


def test_folders_are_searched_for_programs(capsys: Any, program: Path) -> None:
    for name in ("inner", *SKIPPED):
        folder = program.parent / name / "deeper"
        folder.mkdir(parents=True)
        (folder / "other.py").write_text(BEFORE)
    (program.parent / "env" / "pyvenv.cfg").write_text("")
    (program.parent / ".hidden.py").write_text(BEFORE)
    (program.parent / "notes.txt").write_text(BEFORE)
    _, _, lines = run(capsys, program.parent, program, "--check")
    assert lines[-1] == "2 of 2 files would change, 0 places left"
    assert run(capsys, program.parent / "env", "--check")[2] == [NOTHING.replace("1", "0")]


BAD = [
    (b"def f(:\n", "{0}:1: unread: this is no Python: invalid syntax."),
    (b"\xff\xfe\n", "{0}:1: unread: this is no Python: invalid or missing encoding declaration."),
    (b"# coding: odd\n", "{0}:1: unread: this is no Python: unknown encoding: odd."),
    (b"x = 1\n# \xe9\n" * 3, "{0}:1: unread: this is no Python: "),
    (b"\0", "{0}:1: unread: this is no Python: "),
    (b"x = " + b"(" * 150 + b"f" + b"()" * 150 + b")" * 150, "{0}:1: unread: it nests "),
]


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_file_is_one_line_and_stops_nothing(
    capsys: Any, program: Path, content: bytes, said: str
) -> None:
    bad = program.with_name("bad.py")
    bad.write_bytes(content)
    status, printed, lines = run(capsys, program, bad, "--write")
    assert (status, printed, len(lines)) == (1, "", 3)
    assert lines[0].startswith(said.format(bad))
    assert lines[1:] == [DONE.format(program), "1 of 2 files changed, 0 places left, 1 unread"]
    assert program.read_text() == AFTER
    assert bad.read_bytes() == content


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
