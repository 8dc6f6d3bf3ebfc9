# SPDX-License-Identifier: Apache-2.0
"""Errors of the forms of parallelism."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class PipelineError(ShardaxError, ValueError):
    """A pipeline's schedule, stages or batch do not fit together."""


class DataParallelError(ShardaxError, ValueError):
    """Gradients cannot be computed by data-parallel devices."""
