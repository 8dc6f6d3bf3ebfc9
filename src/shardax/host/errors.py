# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.host``."""

from __future__ import annotations

import concurrent.futures

from shardax._core.errors import ShardaxError


class HostSpecError(ShardaxError, ValueError):
    """Invalid options of a host function: ``out``, ``vmap`` or a derivative."""


class HostResultError(ShardaxError, ValueError):
    """A host function returned something else than it promises; names the leaf."""


class HostFunctionError(ShardaxError, RuntimeError):
    """A host function raised inside a program."""


class ExportError(ShardaxError, ValueError):
    """A function cannot be exported, because it needs this process."""


class ArtifactExistsError(ShardaxError, FileExistsError):
    """An artifact would overwrite something."""


class ArtifactNotFoundError(ShardaxError, FileNotFoundError):
    """There is no artifact at a path."""


class ArtifactDamagedError(ShardaxError, ValueError):
    """A file of an artifact is missing or damaged."""


class ArtifactVersionError(ShardaxError, ValueError):
    """An artifact of an unsupported format or JAX."""


class ArtifactEnvironmentError(ShardaxError, RuntimeError):
    """An artifact needs other devices, another platform, or 64 bits."""


class ArtifactCallError(ShardaxError, TypeError):
    """Arguments do not fit the signature of a loaded function."""


class WorkerConfigError(ShardaxError, ValueError):
    """Invalid options of a worker or of a call to one."""


class WorkerStartError(ShardaxError, RuntimeError):
    """The process of a worker did not start."""


class WorkerAuthenticationError(ShardaxError, PermissionError):
    """A worker and its client do not have the same key."""


class WorkerMessageError(ShardaxError, ValueError):
    """A call or its result is too large for a worker."""


class WorkerPickleError(ShardaxError, TypeError):
    """A function, argument or result cannot be sent to another process."""


class StaleModuleError(ShardaxError, ImportError):
    """A worker has imported another version of a module."""


class WorkerCallError(ShardaxError, RuntimeError):
    """An exception of a call in a worker cannot be sent."""


class WorkerTimeoutError(ShardaxError, TimeoutError):
    """A call ran in a worker for longer than it may."""


class CallCancelledError(ShardaxError, concurrent.futures.CancelledError):
    """A running call of a worker was interrupted."""


class WorkerCrashedError(ShardaxError, concurrent.futures.BrokenExecutor):
    """A worker ended, or stopped answering, before a call was done."""


class RemoteValueError(ShardaxError, LookupError):
    """A worker does not keep a value."""
