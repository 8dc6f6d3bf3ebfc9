# SPDX-License-Identifier: Apache-2.0
"""Which compilers tests can ask; those of TPUs and GPUs are extras."""

from __future__ import annotations

from typing import Any

import pytest

from shardax import plan

INSTALLED = {each.kind: each for each in plan.known_compilers()}


def needs(kind: str) -> Any:
    """Skips a test where a compiler is not installed, and says how to install it."""
    info = INSTALLED[kind]
    return pytest.mark.skipif(not info.installed, reason=f"needs {info.install}")


TPU = pytest.param("tpu:v5e:2x4", marks=needs("tpu"))
GPU = pytest.param("gpu:h100:1x8", marks=needs("gpu"))
