# SPDX-License-Identifier: Apache-2.0
"""Values in a ``config.json``: types, names of activations, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardax.errors import ShardaxError


class PretrainedError(ShardaxError, ValueError):
    """A published model cannot be read, or a model be written.

    The type of the model or a field of its config is unknown or unsupported, or tensors are
    missing, left over or of another shape.
    """


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < 2**62


def is_too_large(value: object) -> bool:
    """Whether a value is an integer beyond all sizes and counts."""
    return type(value) is int and not _is_integer(value)


def _is_number(value: object) -> bool:
    return _is_integer(value) or (type(value) is float and math.isfinite(value))


@dataclass(frozen=True)
class Kind:
    """The type of a field of ``config.json``."""

    text: str
    fits: Callable[[Any], bool]
    is_positive: bool = False
    allows_null: bool = False

    @property
    def or_null(self) -> Kind:
        """The same type, or null."""
        return replace(self, allows_null=True)

    @property
    def positive(self) -> Kind:
        """The same type, above 0."""
        return replace(self, is_positive=True)

    def problem(self, name: str, value: Any) -> str | None:
        """Describes a value of another type or size, or returns None."""
        if value is None:
            return None if self.allows_null else f"{name}=None is not {self.text}"
        if not self.fits(value):
            return f"{name}={brief(value)} is not {self.text}"
        if self.is_positive and value <= 0:
            return f"{name}={value!r} is not positive"
        return None


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


ANYTHING = Kind("anything", lambda _: True, allows_null=True)
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
INTEGER = Kind("an integer", _is_integer)
INTEGERS = Kind("a list of integers", _list_of(_is_integer))
NUMBER = Kind("a number", _is_number)
SIZE = INTEGER.positive
TABLE = Kind("a table of fields", lambda value: isinstance(value, dict))
TEXT = Kind("a text", _is_text)
TEXTS = Kind("a list of texts", _list_of(_is_text))


def whole(name: str, number: float) -> int:
    """Returns the integer part of a size that follows from fields, or refuses it."""
    if not math.isfinite(number) or not _is_integer(int(number)):
        raise PretrainedError(f"{name} makes a size of {number:g}, which is too large")
    return int(number)


UNNOTICED = ", as transformers takes no notice of it"


def check_supported(name: str, value: object, fits: bool, limits: str = "") -> None:
    """Refuses an unsupported value of a field."""
    if not fits:
        raise PretrainedError(f"{name}={brief(value)} is not supported{limits}")


def brief(value: object) -> str:
    """Returns the ``repr`` of a value, cut if long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an integer of many digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 120 else text[:120] + "..."


# --- activations ---

ACTIVATION_NAMES = {
    "gelu": "exact_gelu",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}


# Fields of configs with the name of an activation.
ACTIVATION_FIELDS = ("activation", "output.activation")


def known_activation(field: str, name: str) -> str:
    """Returns the activation in ``TransformerConfig`` of a published name."""
    if name not in ACTIVATION_NAMES:
        raise PretrainedError(f"{field}={brief(name)} is none of {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def published_activation(name: str) -> str:
    """Returns the name in ``config.json`` of an activation."""
    published = {"exact_gelu": "gelu", "gelu": "gelu_pytorch_tanh", "squared_relu": "relu2"}
    return published.get(name, name)
