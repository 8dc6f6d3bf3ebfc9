# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._core``, warnings, and lists of names in texts."""

from __future__ import annotations

import pickle
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

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
        """Names errors by ``shardax.errors`` in tracebacks and pickles."""
        super().__init_subclass__()
        if cls.__module__.startswith("shardax."):
            cls.__module__ = _FACE


class StaticAttributeError(ShardaxError, TypeError):
    """An attribute is neither data (arrays, Variables, Modules) nor hashable configuration."""


class ReadOnlyCopyError(ShardaxError, RuntimeError):
    """A read-only copy inside a plain JAX transform was written."""


class TraceLeakError(ShardaxError, RuntimeError):
    """A traced value would escape into a Variable that outlives the trace."""


class ConcurrentWriteError(ShardaxError, RuntimeError):
    """A write would lose what another thread wrote in the meantime."""


class ForeignMutationError(ShardaxError, RuntimeError):
    """A Module from outside a transform was structurally changed inside it."""


class AbstractValueError(ShardaxError, TypeError):
    """An abstract Variable was used where an array is needed."""


class MissingRngsError(ShardaxError, ValueError):
    """A lazy value needs a random key but was made without one."""


class LayerViewError(ShardaxError, ValueError):
    """A view of one layer of a stack was misused."""


class StackError(ShardaxError, ValueError):
    """Layers that were to be stacked are not alike."""


class UnknownStreamError(ShardaxError, AttributeError):
    """``Rngs`` has neither the random stream nor a default."""


class VariableValueError(ShardaxError, TypeError):
    """A Variable was given something other than arrays."""


class FrozenVariableError(ShardaxError, AttributeError):
    """A frozen value was written; it cannot change."""


class UnboundVariableError(ShardaxError, AttributeError):
    """An empty slot was used as if it had a value."""


class LabelConflictError(ShardaxError, ValueError):
    """Two different Variables, slots or frozen values have one label."""


class BindError(ShardaxError, ValueError):
    """Variables do not fit the slots of a tree."""


class StatelessCallError(ShardaxError, RuntimeError):
    """A functional call changed more than values."""


class ReservedNameError(ShardaxError, AttributeError):
    """An attribute name is reserved by shardax."""


class MissingAttributeError(ShardaxError, AttributeError):
    """No chosen Module has an attribute that was to be set."""


class SeedError(ShardaxError, TypeError):
    """A random stream was given neither a seed nor a key."""


class RepeatedKeyError(ShardaxError, RuntimeError):
    """A random key was drawn a second time."""


class ArrayExpectedError(ShardaxError, ValueError):
    """A function of JAX takes arrays only, and was given a Variable."""


class NotAddressableError(ShardaxError, RuntimeError):
    """Numbers of an array are needed, of which other processes hold parts."""


class DtypeError(ShardaxError, TypeError):
    """A dtype is invalid, or has 64 bits while JAX uses 32."""


class DeviceError(ShardaxError, ValueError):
    """There is no device of a name."""


class FilterError(ShardaxError, ValueError):
    """Filters are invalid, out of order, or miss a Variable."""


class TreeError(ShardaxError, TypeError):
    """What was given is neither a model nor a structure of one."""


class StateMismatchError(ShardaxError, ValueError):
    """A State does not fit a structure: missing, unexpected, or wrong entries."""


class MetadataError(ShardaxError, ValueError):
    """Metadata is unhashable, or axes do not fit the shape."""


class PickleWriteError(ShardaxError, pickle.PicklingError):
    """Something cannot be pickled; names its path where that is known."""


class PickleReadError(ShardaxError, pickle.UnpicklingError):
    """A pickle is damaged, foreign, or needs what is not here."""


class LayoutLostWarning(UserWarning):
    """A pickled layout needs a mesh that this machine does not have."""

    __module__ = "shardax.errors"


class PrecisionLostWarning(UserWarning):
    """Pickled 64-bit numbers were read by a 32-bit process."""

    __module__ = "shardax.errors"


class DonationError(ShardaxError, ValueError):
    """A donated buffer cannot be donated (used twice, or already deleted)."""


_PACKAGE = str(Path(__file__).parents[1])


def user_frame() -> types.FrameType:
    """Returns the innermost frame of Python outside of the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the first line outside of the package."""
    # Python shows a text once for each line: inside of the package all users would share one.
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<unknown>")
    at = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *at, module=module, registry=registry)


def first_of(names: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Joins the first names, and says how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
