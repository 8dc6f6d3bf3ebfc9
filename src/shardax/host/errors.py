# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.host``."""

from __future__ import annotations

import concurrent.futures

from shardax._core.errors import ShardaxError


class HostSpecError(ShardaxError, ValueError):
    """What a host function promises is not valid: its results, ``vmap``, or a derivative."""


class HostResultError(ShardaxError, ValueError):
    """A host function returned something else than it promises; names the leaf."""


class HostFunctionError(ShardaxError, RuntimeError):
    """A host function raised inside a program; carries the text of its exception."""


class ExportError(ShardaxError, ValueError):
    """A function cannot be exported: it needs this process, or has no form outside of Python."""


class ArtifactExistsError(ShardaxError, FileExistsError):
    """An artifact would overwrite something."""


class ArtifactNotFoundError(ShardaxError, FileNotFoundError):
    """There is no artifact at a path."""


class ArtifactDamagedError(ShardaxError, ValueError):
    """A file of an artifact is missing, is not what was written, or cannot be read."""


class ArtifactVersionError(ShardaxError, ValueError):
    """An artifact was written in a format, or by a JAX, that this one does not read."""


class ArtifactEnvironmentError(ShardaxError, RuntimeError):
    """This process cannot run an artifact: its devices, its platform, or 64 bits."""


class ArtifactCallError(ShardaxError, TypeError):
    """The arguments of a loaded function are not those that it was exported for."""


class WorkerConfigError(ShardaxError, ValueError):
    """A worker, or a call to one, was asked for with options that do not fit."""


class WorkerStartError(ShardaxError, RuntimeError):
    """The process of a worker did not start."""


class WorkerAuthenticationError(ShardaxError, PermissionError):
    """A worker and its client do not have the same key."""


class WorkerProtocolError(ShardaxError, ConnectionError):
    """What came over a connection is not a message of this version."""


class WorkerMessageError(ShardaxError, ValueError):
    """A call or its result is larger than what a worker takes."""


class WorkerPickleError(ShardaxError, TypeError):
    """A function, argument or result cannot be sent to another process, or not read there."""


class StaleModuleError(ShardaxError, ImportError):
    """A worker has imported a module whose source is not that of the call."""


class WorkerCallError(ShardaxError, RuntimeError):
    """A call raised in a worker what cannot be sent as an object; carries the text."""


class WorkerTimeoutError(ShardaxError, TimeoutError):
    """A call ran in a worker for longer than it may."""


class CallCancelledError(ShardaxError, concurrent.futures.CancelledError):
    """A call that ran in a worker was interrupted."""


class WorkerCrashedError(ShardaxError, concurrent.futures.BrokenExecutor):
    """A worker ended, or stopped answering, before a call to it was done."""


class RemoteValueError(ShardaxError, LookupError):
    """A value that is said to be kept in a worker is not there."""
