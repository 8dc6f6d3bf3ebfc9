# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._core``."""

from __future__ import annotations

import pickle

_FACE = "shardax.errors"


class ShardaxError(Exception):
    """Base of all errors raised on purpose by shardax.

    Example:
        >>> import shardax as sx
        >>> issubclass(sx.errors.StaticAttributeError, sx.errors.ShardaxError)
        True
    """

    __module__ = _FACE

    def __init_subclass__(cls) -> None:
        """Lets errors be known by the face that lists them, in tracebacks and pickles."""
        super().__init_subclass__()
        if cls.__module__.startswith("shardax."):
            cls.__module__ = _FACE


class StaticAttributeError(ShardaxError, TypeError):
    """An attribute is neither data (arrays, Variables, Modules) nor hashable configuration."""


class ReadOnlyCopyError(ShardaxError, RuntimeError):
    """A copy rebuilt inside a plain JAX transform was written; the write would be lost."""


class TraceLeakError(ShardaxError, RuntimeError):
    """A traced value would have escaped into a Variable that outlives the trace."""


class ForeignMutationError(ShardaxError, RuntimeError):
    """A Module from outside a transform was structurally changed inside it."""


class AbstractValueError(ShardaxError, TypeError):
    """A Variable that holds only a shape and dtype was used where an array is needed."""


class MissingRngsError(ShardaxError, ValueError):
    """A lazy value needs a random key and was made without a key stream."""


class LayerViewError(ShardaxError, ValueError):
    """A view of one layer of a stack was used where it cannot stand for its part of the stack."""


class StackError(ShardaxError, ValueError):
    """Layers that were to be stacked are not alike."""


class UnknownStreamError(ShardaxError, AttributeError):
    """A random stream was asked for that ``Rngs`` does not hold and that has no default."""


class VariableValueError(ShardaxError, TypeError):
    """A Variable was given a value that is not an array or a pytree of arrays."""


class FrozenVariableError(ShardaxError, AttributeError):
    """A frozen value was written; it cannot change."""


class UnboundVariableError(ShardaxError, AttributeError):
    """A slot was used as if it had a value; the Variable that belongs there was taken out."""


class LabelConflictError(ShardaxError, ValueError):
    """Two different Variables, slots or frozen values have one label; names both paths."""


class BindError(ShardaxError, ValueError):
    """Variables do not fit the slots of a tree: without a label, a slot, or of another type."""


class StatelessCallError(ShardaxError, RuntimeError):
    """A functional call changed more than values, and what it changed would be lost."""


class ReservedNameError(ShardaxError, AttributeError):
    """An attribute name is reserved by shardax."""


class MissingAttributeError(ShardaxError, AttributeError):
    """No chosen Module has an attribute that was to be set."""


class SeedError(ShardaxError, TypeError):
    """A random stream was given something that is neither an integer seed nor a random key."""


class RepeatedKeyError(ShardaxError, RuntimeError):
    """A key was drawn a second time from a stream that was copied, or made of an equal seed."""


class DtypeError(ShardaxError, TypeError):
    """A dtype is none, is of the wrong kind, or has 64 bits while JAX uses 32."""


class DeviceError(ShardaxError, ValueError):
    """There is no device of a name."""


class FilterError(ShardaxError, ValueError):
    """Filters do not cover a Variable, or are out of order, or are not filters."""


class StateMismatchError(ShardaxError, ValueError):
    """A State does not fit a structure: missing, unexpected, or wrong entries."""


class MetadataError(ShardaxError, ValueError):
    """Metadata of a Variable is invalid (unhashable, or axes that do not fit the shape)."""


class PickleWriteError(ShardaxError, pickle.PicklingError):
    """Something cannot be pickled; names its path where that is known."""


class PickleReadError(ShardaxError, pickle.UnpicklingError):
    """A pickle is damaged, was not made by ``sx.host.dumps``, or needs what is not here."""


class LayoutLostWarning(UserWarning):
    """What was pickled was laid out over a mesh that this machine does not have."""

    __module__ = "shardax.errors"


class PrecisionLostWarning(UserWarning):
    """What was pickled has 64-bit numbers, and the process that reads it has none."""

    __module__ = "shardax.errors"
