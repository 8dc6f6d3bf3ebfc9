# SPDX-License-Identifier: Apache-2.0
"""Programs of tests: their environment, where they are processes, and running them here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def compiled_in(folder: Path | str) -> dict[str, str]:
    """Variables by which a program keeps all that it compiles in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def environment(**more: str) -> dict[str, str]:
    """Variables for a program that a test starts, with the tests' cache of compiled programs.

    Only for programs that end by themselves: one that is killed could leave half an entry.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    return os.environ | compiled_in(folder) | more  # the flags of conftest.py are in os.environ


def run_here(program: str) -> dict[str, Any]:
    """Runs a program in this process as ``python -c`` does; returns its names."""
    names: dict[str, Any] = {"__name__": "__main__", "__package__": None}
    exec(compile(program, "<string>", "exec", dont_inherit=True), names)
    return names
