# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.distributed``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class DistributedError(ShardaxError, RuntimeError):
    """Processes cannot be started together, or one does not answer."""


class DisagreementError(ShardaxError, ValueError):
    """Processes of one program differ; the message names the differences."""
