# SPDX-License-Identifier: Apache-2.0
"""Targets that are not here, as parameters of tests; each needs the compiler for it."""

from __future__ import annotations

import pytest

from tests.needs import needs_compiler

TPU = pytest.param("tpu:v5e:2x4", marks=needs_compiler("tpu"))
GPU = pytest.param("gpu:h100:1x8", marks=needs_compiler("gpu"))
