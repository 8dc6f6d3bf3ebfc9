# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax._core``, warnings, and lists of names in texts."""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

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


class ModuleError(ShardaxError, ValueError, TypeError, RuntimeError):
    """A Module, a Variable or random keys cannot be used so."""


class ModuleAttributeError(ShardaxError, AttributeError):
    """An attribute is missing, reserved, frozen or not bound."""


class StaticAttributeError(ShardaxError, TypeError):
    """An attribute is neither data (arrays, Variables, Modules) nor hashable configuration."""


def hidden_object(value: Any, where: str, item: object, way: str) -> StaticAttributeError:
    """Returns the error of a value that holds an object which cannot be tracked there.

    Args:
        value: What is, or would be, part of a model.
        where: Its place.
        item: The object inside.
        way: How that is reached from the value, in words.
    """
    kind, found = type(value).__name__, type(item).__name__
    subject = f"the {kind} {value.__qualname__}" if isinstance(value, _WITH_NAMES) else f"a {kind}"
    ways = (
        f"make a function a method, and a class of your own a sx.Module, with the {found} as an "
        f"attribute; or write `functools.partial(function, layer)`, whose arguments are tracked. "
        f"Of transforms take those of shardax: `sx.jit(layer)`, `sx.vmap(layer)`, "
        f"`sx.remat(layer)`"
        if callable(value)
        else "use a list, dict or tuple, such as list(value); make a class of your own a "
        "sx.Module, or register it with JAX (jax.tree_util.register_dataclass)"
    )
    return StaticAttributeError(
        f"Cannot use {subject} as {where}: the {found} that it reaches by {way} cannot be tracked "
        f"there. It would be part of no state, gradient, optimizer or checkpoint, and a copy of "
        f"the model would go on using this very {found}. Ways out: {ways}."
    )


_WITH_NAMES = (types.FunctionType, type)


class TraceLeakError(ShardaxError, RuntimeError):
    """A traced value would escape into a Variable that outlives the trace."""


def used_after_trace(kind: str, transform: str) -> TraceLeakError:
    """Returns the error of a Variable that was made in a run that is over.

    Args:
        kind: What it is, with its article.
        transform: The name of the transform.
    """
    return TraceLeakError(
        f"A{kind[1:]} made inside sx.{transform} was used after that call ended. Its value exists "
        f"only during the trace. Return it from the function (or assign it to an attribute of a "
        f"Module that is an argument); then the caller gets it with a real array."
    )


def write_from_plain_transform(what: str) -> TraceLeakError:
    """Returns the error of a write inside of a plain JAX transform."""
    return TraceLeakError(
        f"Cannot write {what} from inside a plain JAX transform that did not receive it: the write "
        f"would happen once, while tracing, and a traced value would outlive its trace. Use the "
        f"shardax transform of the same name (sx.jit, sx.grad, ...) and pass the Module as an "
        f"argument; or return the new value and write it outside."
    )


def write_to_rebuilt_copy(what: str, kind: str) -> ModuleError:
    """Returns the error of a write to an object that JAX rebuilt inside of a plain transform."""
    return ModuleError(
        f"Cannot write {what}: this {kind} is a copy that JAX rebuilt inside "
        f"a plain transform (jax.jit, jax.grad, jax.vmap, ...), so the write would be lost "
        f"when the function returns. Use the shardax transform of the same name (sx.jit, "
        f"sx.grad, ...), which carries writes back; or, if you return the copy, make it "
        f"writable first:\n\n    model = sx.mutable(model)\n    ...\n    return model"
    )


class ConcurrentWriteError(ShardaxError, RuntimeError):
    """A write would lose what another thread wrote in the meantime."""


def written_since_read(kind: str) -> ConcurrentWriteError:
    """Returns the error of a write that would replace what another thread wrote."""
    return ConcurrentWriteError(
        f"This {kind} was written by another thread after this one read it, "
        f"and that would be lost; nothing was written. Hold one lock around reading and "
        f"writing, with lock: v[...] = v + 1; or update it in one step, v += 1."
    )


def held_by_other_thread(doing: str, where: str, consequence: str) -> ConcurrentWriteError:
    """Returns the error of an object that one thread at a time may use."""
    return ConcurrentWriteError(
        f"Another thread {doing} at {where} now, {consequence}. Let threads take turns by a lock, "
        f"or give each a model of its own, `sx.clone(model)`."
    )


class ForeignMutationError(ShardaxError, RuntimeError):
    """A Module from outside a transform was structurally changed inside it."""


def change_of_captured(
    what: str, transform: str, kind: str, carries_values: bool
) -> ForeignMutationError:
    """Returns the error of a structural change of an object that a function was not given.

    Args:
        what: What was to be changed.
        transform: The name of the transform.
        kind: What messages call the object.
        carries_values: Whether the transform hands back values of captured Variables.
    """
    hint = " (Writing values of its Variables works either way.)" if carries_values else ""
    return ForeignMutationError(
        f"Cannot change the structure of {what} inside sx.{transform}: the {kind} was reached "
        f"through a closure or global, so the change would happen once, while tracing, and not "
        f"when the compiled function runs. Pass the Module as an argument of the function; then "
        f"its structural changes are carried back.{hint}"
    )


class VariableValueError(ShardaxError, TypeError):
    """A Variable was given something other than arrays."""


class RepeatedKeyError(ShardaxError, RuntimeError):
    """A random key was drawn a second time."""


class FilterError(ShardaxError, ValueError):
    """Filters are invalid, out of order, or miss a Variable."""


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


def replaced_branch(where: str, kind: str) -> ModuleError:
    """Returns the error about a model rebuilt without the Variables below a place."""
    return ModuleError(
        f"JAX was to rebuild a model with an object of type {kind} in the place of all Variables "
        f"below {where}. A function of JAX with is_leaf= stopped above them, and what it returned "
        f"is no model. The State of a model may hold anything there: "
        f"jax.tree.map(function, sx.state(model), is_leaf=is_leaf)."
    )


_PACKAGE = str(Path(__file__).parents[1])


def user_frame() -> types.FrameType:
    """Returns the innermost frame of Python outside of the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
    return frame


def _is_inside(frame: types.FrameType) -> bool:
    # dataclasses.replace and copy.replace make a config of the package in the user's place, and
    # functools.cached_property computes an attribute that the user reads.
    is_own = frame.f_code.co_filename.startswith(_PACKAGE)
    return is_own or frame.f_globals.get("__name__") in ("copy", "dataclasses", "functools")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the first line outside of the package."""
    # Python shows a text once for each line: inside of the package all users would share one.
    frame = user_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<unknown>")
    at = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *at, module=module, registry=registry)


@contextlib.contextmanager
def naming_package(subject: str, package: str) -> Generator[None]:
    """Names a package to install in an ImportError of a block."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or package).partition(".")[0]
        raise ImportError(f"{subject} needs {missing}: pip install '{package}'.") from error


def first_of(names: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Joins the first names, and says how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
