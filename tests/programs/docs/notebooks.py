# SPDX-License-Identifier: Apache-2.0
"""Executes the notebooks of ``docs/notebooks``: ``make notebooks`` stores what they print.

    python -m tests.programs.docs.notebooks [--out FOLDER] [NAME ...]

Each runs in a kernel of its own, in an empty folder. What would differ from run to run is left out
or gets a fixed name: times of execution, identifiers of drawings, the version of Python.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from tests.house.sources import ROOT

FOLDER = ROOT / "docs" / "notebooks"
SECONDS_OF_A_CELL = 1800  # on a busy machine
# As of the tests: programs are compiled quickly, and are the same ones.
FLAGS = ["--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
DRAWING = re.compile(r"treescope_out_[0-9a-f]{32}")


def names() -> list[str]:
    return [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]


def environment(folder: str) -> dict[str, str]:
    """Settings of the kernel, the same on every machine; nothing of the user's own is read."""
    fixed = {"COLUMNS": "100", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(FLAGS)}
    jupyter = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    owned = (*jupyter, "IPYTHONDIR", "SHARDAX_CACHE_DIR")
    return fixed | {name: f"{folder}/{name.lower()}" for name in owned}


def executed(path: Path, variables: Mapping[str, str] | None = None) -> Any:
    """The notebook with the outputs of a fresh run, whose kernel gets further ``variables``."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with (
        tempfile.TemporaryDirectory() as settings,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {**(variables or {}), **environment(settings)}),
    ):
        NotebookClient(
            notebook,
            timeout=SECONDS_OF_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        ).execute()
    # Of the metadata only what a front end needs to start the kernel.
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel})
    drawings: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return drawings.setdefault(found[0], f"treescope_out_{len(drawings)}")

    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = DRAWING.sub(numbered, output.data["text/html"])
    return notebook


def main(argv: list[str] | None = None) -> None:
    """Executes notebooks and writes them, in place or elsewhere."""
    parser = argparse.ArgumentParser(description="Execute the notebooks and store their outputs.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument("names", nargs="*", help="which ones; all by default")
    given = parser.parse_args(argv)
    import nbformat

    for name in given.names or names():
        nbformat.write(executed(FOLDER / f"{name}.ipynb"), given.out / f"{name}.ipynb")


if __name__ == "__main__":
    main()
