# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.host``."""

from __future__ import annotations

import concurrent.futures

from shardax._core.errors import ShardaxError


class HostFunctionError(ShardaxError, RuntimeError, ValueError):
    """Wrong options or results of a host function, or its exception."""


class ExportError(ShardaxError, ValueError, TypeError, RuntimeError):
    """A failed export of a function, or a failed load or call."""


class WorkerError(ShardaxError, ValueError, TypeError, RuntimeError, LookupError):
    """Wrong options of a worker or call, or values unfit for sending."""


class WorkerAuthenticationError(ShardaxError, PermissionError):
    """A worker and its client do not have the same key."""


class WorkerTimeoutError(ShardaxError, TimeoutError):
    """A call ran in a worker for longer than it may."""


class CallCancelledError(ShardaxError, concurrent.futures.CancelledError):
    """A running call of a worker was interrupted."""


class WorkerCrashedError(ShardaxError, concurrent.futures.BrokenExecutor):
    """A worker ended, or stopped answering, before a call was done."""
