# SPDX-License-Identifier: Apache-2.0
"""Each notebook runs, and shows what is stored in it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.child_processes import environment
from tests.house.sources import ROOT
from tests.programs.docs.notebooks import FOLDER, executed, names

# Figures of compiled programs differ by version of JAX, and so do its reprs.
STORED_WITH = "0.10."
LEARN = {"first-model", "sharding", "surgery", "planning", "many-processes", "from-flax"}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def shown(notebook: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What each cell shows, as (kind, text)."""
    cells = []
    for cell in notebook["cells"]:
        outputs = []
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                outputs.append((output["name"], "".join(output["text"])))
            else:
                outputs += [(kind, "".join(text)) for kind, text in output["data"].items()]
        cells.append(("".join(cell["source"]), outputs))
    return cells


def comparable(kind: str, text: str) -> tuple[str, list[float]]:
    """A text without its decimals, and these; drawings hold values of arrays, which may differ."""
    if "treescope" in text:
        return kind, []
    text = re.sub(r"(\.py):\d+", r"\1", text)  # lines of the library's own files
    decimals = re.compile(r"\d+\.\d+")
    return decimals.sub("1.0", text), list(map(float, decimals.findall(text)))


@pytest.mark.parametrize("name", names())
def test_notebook_reproduces_its_stored_outputs(name: str, tmp_path: Path) -> None:
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's packages
        fresh_run = executed(FOLDER / f"{name}.ipynb", environment())
    nbformat.write(fresh_run, tmp_path / f"{name}.ipynb")
    found, stored = (shown(read(folder / f"{name}.ipynb")) for folder in (tmp_path, FOLDER))
    for (source, fresh), (_, old) in zip(found, stored, strict=True):
        assert [kind for kind, _ in fresh] == [kind for kind, _ in old], source
        if not jax.__version__.startswith(STORED_WITH):
            continue
        for one, other in zip(fresh, old, strict=True):
            (text, decimals), (expected, figures) = comparable(*one), comparable(*other)
            assert text == expected, f"{source}\nmake notebooks stores the outputs anew"
            assert decimals == pytest.approx(figures, rel=0.05, abs=0.02), source


@pytest.mark.parametrize("name", names())
def test_stored_notebook_is_complete_and_machine_independent(name: str) -> None:
    notebook = read(FOLDER / f"{name}.ipynb")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert 10 <= len(notebook["cells"]) <= 30
    outputs = [output for _, each in shown(notebook) for output in each]
    assert {kind for kind, _ in outputs} <= {"stdout", "text/plain", "text/html"}
    for _, text in outputs:
        assert not re.search(r"0x[0-9a-f]{6}|/tmp/|/home/|site-packages|\x1b\[", text), text


def test_docs_index_lists_every_notebook() -> None:
    assert set(names()) == LEARN
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^notebooks/([\w-]+)$", index, re.MULTILINE)) == LEARN
