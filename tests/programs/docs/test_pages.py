# SPDX-License-Identifier: Apache-2.0
"""The pages build without a warning, and hold no Python that nobody runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.house.sources import ROOT
from tests.native_logs import without_native_logs

# Run by pytest, see the root conftest.py.
EXECUTED = {"python"}
# Not Python: what a terminal shows, data, and directives of Sphinx that hold no code.
NOT_CODE = {"console", "text", "toml", "json", "{toctree}", "{eval-rst}", "{math}"}

FENCE = re.compile(r"^[ >]*(?:```|~~~|:::)+[ ]*(\S*)", flags=re.MULTILINE)


def pages() -> list[Path]:
    inner = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    return [ROOT / "README.md", *sorted(inner)]


def other_markdown() -> list[Path]:
    return [*(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def kinds_of_fences(text: str) -> list[str]:
    """The language of each fenced block; fences come in pairs, the second one bare."""
    return FENCE.findall(text)[::2]


def test_pages_hold_only_code_that_is_run() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert set(kinds_of_fences(text)) <= EXECUTED | NOT_CODE, page
        skipped = re.findall(r"skip: *(?:next|start|end)|doctest: *\+SKIP|code-block::", text)
        assert skipped == [], page


def test_markdown_that_is_not_run_holds_no_python() -> None:
    for page in other_markdown():
        assert set(kinds_of_fences(page.read_text(encoding="utf-8"))) <= NOT_CODE, page


def test_language_of_each_fence_is_seen() -> None:
    text = "```python\n1\n```\n\n> ```\n> x\n> ```\n\n:::{toctree}\n:::\n"
    assert kinds_of_fences(text) == ["python", "", "{toctree}"]


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    build = [
        sys.executable,
        # What a build makes lives until its end: collecting garbage takes a tenth of its time.
        *("-c", "import gc, runpy; gc.disable(); runpy.run_module('sphinx', run_name='__main__')"),
        "-q",
        "--no-color",
        "-W",
        "--keep-going",
        *("-b", "dummy"),
        *("-D", "smartquotes=0"),  # which only change how a page looks
    ]
    done = subprocess.run(
        [*build, "-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert without_native_logs(done.stderr) == ""
    assert done.returncode == 0
    # References are looked up all the same; writing hundreds of pages would take twice as long.
    assert (tmp_path / "doctrees" / "generated" / "shardax.nn.Linear.doctree").is_file()
