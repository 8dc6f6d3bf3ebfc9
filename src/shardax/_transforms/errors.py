# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._transforms``."""

from __future__ import annotations

from collections.abc import Sequence

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


class UncertainCaptureWarning(UserWarning):
    """A compiled function is traced at every call, for what it reaches without being given it."""


def uncertain_capture(compiled: object, met: Sequence[str]) -> UncertainCaptureWarning:
    """Returns the warning of a function that reaches Variables in no certain way."""
    listed = ", ".join(dict.fromkeys(met[:4])) + (", ..." if len(met) > 4 else "")
    return UncertainCaptureWarning(
        f"{compiled!r} uses {listed}, which it was not given and found in no way that surely leads "
        f"to the same object at the next call, so it is traced again at every call. Pass it as an "
        f"argument: step(model, ...). Certain are a name that the function closes over, a global "
        f"that its own code names, a default value, and an attribute of the object that a method "
        f"is bound to; not an item of a list or dict, a helper function, or a class."
    )


def unusable_captures(compiled: object, objects: Sequence[object]) -> TransformError:
    """Returns the error of objects that a trace used and that could not become its inputs."""
    kinds = ", ".join(sorted({type(item).__name__ for item in objects}))
    return TransformError(
        f"{compiled!r} used {len(objects)} objects that were not passed in, and could not make "
        f"them inputs ({kinds}). Pass them as arguments."
    )
