# SPDX-License-Identifier: Apache-2.0
"""Paths print as the code that a user would type after the model."""

from __future__ import annotations

from typing import Any

import pytest

from shardax._core.graph.paths import format_path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "(root)"),
        (("kernel",), ".kernel"),
        (("layers", 0, "attn", "q", "kernel"), ".layers[0].attn.q.kernel"),
        (("heads", "en-us"), ".heads['en-us']"),
        (("table", (1, 2), -1), ".table[(1, 2)][-1]"),
        (("flags", True, None), ".flags[True][None]"),
    ],
)
def test_path_prints_as_code(path: tuple[Any, ...], text: str) -> None:
    assert format_path(path) == text
