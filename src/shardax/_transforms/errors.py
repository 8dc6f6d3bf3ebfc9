# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class TransformError(ShardaxError, ValueError, TypeError):
    """Arguments, options or results do not fit their transform."""


class PrefixError(ShardaxError, ValueError):
    """A prefix does not fit the argument that it describes."""


class StaticArgumentError(ShardaxError, TypeError):
    """A static argument is a Module or not hashable."""


class ClosureError(ShardaxError, RuntimeError):
    """A captured Variable is used where its value cannot be known."""


class NoMeshError(ShardaxError, ValueError):
    """A mesh is needed, none was given, and none is in scope."""
