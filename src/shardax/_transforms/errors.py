# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class PrefixError(ShardaxError, ValueError):
    """A prefix does not fit the argument that it describes."""


class InconsistentAliasingError(ShardaxError, ValueError):
    """A Variable reached by two paths was given two different prefixes."""


class AxisSizeError(ShardaxError, ValueError):
    """A mapped axis is missing, cannot be divided, or sizes differ."""


class AmbiguousBatchError(ShardaxError, ValueError):
    """Sizes alone do not say which axes are the batch."""


class MappedShardingError(ShardaxError, ValueError):
    """Mapped arrays are split differently over Explicit mesh axes."""


class SharedWriteError(ShardaxError, ValueError):
    """A shared Variable was given a value that is not shared."""


class CarryError(ShardaxError, TypeError):
    """A loop's carry changes its type, or is given wrongly."""


class DecisionError(ShardaxError, TypeError):
    """A predicate, index or condition is not one number, or writes."""


class BoundedLoopError(ShardaxError, ValueError):
    """Limit, mode, history or padding of a bounded loop is not valid."""


class BranchError(ShardaxError, TypeError):
    """Branches differ in what they return, write or change."""


class ArgumentError(ShardaxError, TypeError):
    """An argument is neither arrays nor objects, or of the wrong kind."""


class StaticArgumentError(ShardaxError, TypeError):
    """A static argument is a Module or not hashable."""


class OutputError(ShardaxError, TypeError):
    """A transformed function returned something that cannot leave the transform."""


class DifferentiationError(ShardaxError, TypeError):
    """The differentiated argument or the output has no gradient."""


class TangentError(ShardaxError, ValueError):
    """A tangent, gradient or cotangent does not fit what it belongs to."""


class ClosureError(ShardaxError, RuntimeError):
    """A captured Variable is used where its value cannot be known."""


class StructureMismatchError(ShardaxError, ValueError):
    """A compiled function was called with arguments of another structure."""


class MeshError(ShardaxError, TypeError):
    """Something is no mesh, or not the mesh in scope."""


class NoMeshError(ShardaxError, ValueError):
    """A mesh is needed, none was given, and none is in scope."""
