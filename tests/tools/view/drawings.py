# SPDX-License-Identifier: Apache-2.0
"""Drawings of shardings for tests."""

from __future__ import annotations

import shardax as sx


def text_of(value: object) -> str:
    """The drawing of an array or a Variable, which stands below its caption."""
    return str(sx.view.sharding(value)).partition("\n")[2]
