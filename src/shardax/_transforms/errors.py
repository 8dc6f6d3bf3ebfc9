# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class PrefixError(ShardaxError, ValueError):
    """A prefix (sharding, axis, filter mapping) does not fit the argument it describes."""


class InconsistentAliasingError(ShardaxError, ValueError):
    """A Variable reached by two paths was given two different prefixes."""


class AxisSizeError(ShardaxError, ValueError):
    """An axis to map over is missing, cannot be divided, or its sizes differ between arguments."""


class AmbiguousBatchError(ShardaxError, ValueError):
    """The batch of a problem cannot be found by sizes alone; names the arrays in doubt."""


class MappedShardingError(ShardaxError, ValueError):
    """Arrays that are mapped together are split over the Explicit axes of a mesh in two ways."""


class SharedWriteError(ShardaxError, ValueError):
    """A Variable that all lanes or shards share was given a value that differs between them."""


class CarryError(ShardaxError, TypeError):
    """What goes from one iteration of a loop to the next changes its type, or is given wrongly."""


class DecisionError(ShardaxError, TypeError):
    """What decides (predicate, index, condition) is not one number, or does more than decide."""


class BoundedLoopError(ShardaxError, ValueError):
    """A bounded loop cannot be made: its limit, mode, history or padding is not valid."""


class BranchError(ShardaxError, TypeError):
    """The branches of a choice differ in what they return, write or change."""


class ArgumentError(ShardaxError, TypeError):
    """An argument is neither arrays nor objects, or not such as the function takes."""


class StaticArgumentError(ShardaxError, TypeError):
    """A static argument is not hashable, or a Module was passed as a static argument."""


class DonationError(ShardaxError, ValueError):
    """A donated buffer cannot be donated (used twice, or already deleted)."""


class OutputError(ShardaxError, TypeError):
    """A transformed function returned something that cannot leave the transform."""


class DifferentiationError(ShardaxError, TypeError):
    """The differentiated argument or the output has no gradient."""


class TangentError(ShardaxError, ValueError):
    """A tangent, gradient or cotangent does not fit what it belongs to."""


class ClosureError(ShardaxError, RuntimeError):
    """A function uses a Variable that it was not given, where its value cannot be known."""


class StructureMismatchError(ShardaxError, ValueError):
    """A compiled function was called with arguments of another structure."""


class MeshError(ShardaxError, TypeError):
    """Something that is not a mesh was given where a mesh belongs, or a mesh of another kind."""


class NoMeshError(ShardaxError, ValueError):
    """A mesh is needed, none was given, and none is in scope."""


class BoxError(ShardaxError, ValueError):
    """A box of axis metadata cannot do what it is asked for: names, positions, or static data."""


class PartitioningUnspecifiedError(ShardaxError, ValueError):
    """A dimension is added to or removed from a box, and nothing says what it is called."""


class LayerConfigError(ShardaxError, ValueError):
    """A layer or model cannot be built: sizes, names or options that do not fit."""
