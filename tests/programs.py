# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start share the compiled programs of the tests."""

from __future__ import annotations

import os

import jax


def environment(**more: str) -> dict[str, str]:
    """Variables for a program that a test starts, with the tests' cache of compiled programs.

    Only for programs that end by themselves: one that is killed could leave half an entry.
    """
    return {
        **os.environ,  # the flags of conftest.py are among them
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **more,
    }
