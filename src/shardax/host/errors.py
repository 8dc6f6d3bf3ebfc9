# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.host``."""

from __future__ import annotations

import concurrent.futures
import os

from shardax.errors import ShardaxError


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


def require_process(process_id: int) -> None:
    """Raises WorkerError in the fork of a process, where its connections have no threads."""
    if os.getpid() != process_id:
        raise WorkerError(
            f"This worker belongs to process {process_id}, of which this one, {os.getpid()}, is a "
            "fork: the threads of its connection did not come along, so no answer would arrive. "
            "Connect from here: `other = sx.host.Worker.connect(worker.address, worker.authkey)`, "
            'or start processes by multiprocessing.get_context("spawn").'
        )
