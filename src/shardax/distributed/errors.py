# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.distributed``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class DistributedError(ShardaxError, RuntimeError, ValueError):
    """Processes cannot start together, do not answer, or differ."""
