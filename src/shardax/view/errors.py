# SPDX-License-Identifier: Apache-2.0
"""The error of views."""

from __future__ import annotations

from shardax.errors import ShardaxError


class ViewError(ShardaxError, ValueError):
    """An array without a sharding, or a call without operations to count."""
