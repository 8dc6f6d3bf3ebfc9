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


# By table: columns that fit a screen.
LIBRARIES = [["Flax NNX", "Equinox", "Penzai"], ["MaxText", "Levanter", "SpectraX", "AutoParallel"]]


def tables_of_comparison() -> list[list[list[str]]]:
    """The tables of the page: of the libraries, and of what shows the claims about shardax."""
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    tables = [part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", text, re.M)]
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table] for table in tables
    ]


@pytest.mark.parametrize("page", FRONT)
def test_local_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    targets = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if not (folder / target).exists()] == []


def test_comparison_has_a_column_for_each_library() -> None:
    *tables, _ = tables_of_comparison()
    assert [header for header, *_ in tables] == [["", "shardax", *names] for names in LIBRARIES]
    assert all(len(row) == len(table[0]) for table in tables for row in table)
    (_, _, *one), (_, _, *other) = tables
    assert [row[:2] for row in one] == [row[:2] for row in other] and len(one) >= 10


def test_comparison_claims_are_tested_or_cited() -> None:
    *tables, (_, _, *evidence) = tables_of_comparison()
    rows = [row for _, _, *below in tables for row in below]
    assert [feature for feature, _ in evidence] * len(tables) == [row[0] for row in rows]
    paths = [re.findall(r"`((?:tests|benchmarks)/[^`]+\.py)`", files) for _, files in evidence]
    assert all(paths) and all(row[1] for row in rows)
    assert [path for files in paths for path in files if not (ROOT / path).is_file()] == []
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    sources = set(re.findall(r"^\[([^\]]+)\]: (?:https://|benchmarks\.md#)\S+$", text, re.M))
    claims = [claim for row in rows for claim in row[2:] if claim]
    cited = [re.fullmatch(r"\[[^\]]+\]\[([^\]]+)\]", claim) for claim in claims]
    assert [claim for claim, link in zip(claims, cited, strict=True) if link is None] == []
    assert {link[1] for link in cited if link} <= sources


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
    for figure in ("0.97", "10.23", "2.38", "10.66", "0.90", "73.35", "3.14", "62.92", "1.47"):
        assert f" {figure} |" in readme
        assert figure in measured


def test_citation_has_the_version_of_the_package() -> None:
    lines = Path(ROOT, "CITATION.cff").read_text(encoding="utf-8").splitlines()
    fields = dict(
        line.split(": ", 1) for line in lines if not line.startswith(" ") and ": " in line
    )
    assert fields["cff-version"] == "1.2.0" and fields["version"] == metadata.version("shardax")
    assert fields["license"] == "Apache-2.0" and fields["type"] == "software"
