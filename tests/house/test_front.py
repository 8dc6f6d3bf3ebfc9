# SPDX-License-Identifier: Apache-2.0
"""What a visitor reads first: links that lead somewhere, claims that are shown, a citation."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.house.sources import ROOT

LINK = re.compile(r"\]\(([^)]+)\)")
FRONT = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/comparison.md", "docs/index.md"]


LIBRARIES = "shardax Flax-NNX Equinox Penzai MaxText Levanter SpectraX AutoParallel".split()
PATH = re.compile(r"`((?:tests|benchmarks)/[^`]+)`")


def table_of_comparison() -> tuple[list[str], list[list[str]], dict[str, str]]:
    """Header, rows and the links by name."""
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return header, rows, dict(re.findall(r"^\[([^\]]+)\]: (https://\S+)$", text, re.M))


@pytest.mark.parametrize("page", FRONT)
def test_local_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    targets = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if not (folder / target).exists()] == []


def test_comparison_has_a_column_for_each_library() -> None:
    header, rows, _ = table_of_comparison()
    assert header == ["", *(name.replace("-", " ") for name in LIBRARIES)]
    assert {len(row) for row in rows} == {len(header)} and len(rows) >= 10
    assert all(row[0] and row[1] for row in rows)  # shardax has a word on every feature


def test_each_comparison_claim_is_tested_or_cited() -> None:
    _, rows, links = table_of_comparison()
    claims = [cell for row in rows for cell in row[1:] if cell]
    assert [claim for claim in claims if not (PATH.search(claim) or "][" in claim)] == []
    paths = [path for claim in claims for path in PATH.findall(claim)]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    cited = [name for claim in claims for name in re.findall(r"\]\[([^\]]+)\]", claim)]
    assert sorted(set(cited) - set(links)) == []


def test_what_is_said_of_shardax_is_tested() -> None:
    assert [row[1] for row in table_of_comparison()[1] if not PATH.search(row[1])] == []


def test_index_lists_each_page_once_in_four_parts() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Learn", "Guides", "Planner", "Internals"]
    listed = [target for target in LINK.findall(text) if target != "benchmarks.md"]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert sorted(listed) == sorted((pages | notebooks) - {"index.md", "benchmarks.md"})


def test_files_to_read_first_exist() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    first = text.partition("## Six files to read first")[2].partition("## ")[0]
    files = re.findall(r"^\d\. `([^`]+)`", first, re.M)
    assert len(files) == 6 and all((ROOT / file).is_file() for file in files)


def test_figures_of_the_readme_stand_among_the_measurements() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for figure in ("0.97", "10.23", "2.38", "10.66", "0.88", "63.01", "2.99", "54.88", "1.47"):
        assert f" {figure} |" in readme
        assert figure in measured


def test_the_citation_has_the_version_of_the_package() -> None:
    lines = Path(ROOT, "CITATION.cff").read_text(encoding="utf-8").splitlines()
    fields = dict(
        line.split(": ", 1) for line in lines if not line.startswith(" ") and ": " in line
    )
    assert fields["cff-version"] == "1.2.0" and fields["version"] == metadata.version("shardax")
    assert fields["license"] == "Apache-2.0" and fields["type"] == "software"
