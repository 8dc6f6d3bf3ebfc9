# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.nn``."""

from __future__ import annotations

from shardax.errors import ShardaxError


class LayerConfigError(ShardaxError, ValueError):
    """Sizes, names or options of a layer do not fit."""


class LayerInputError(ShardaxError, ValueError):
    """An input of a layer has a wrong shape, rank or dtype."""
