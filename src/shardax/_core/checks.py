# SPDX-License-Identifier: Apache-2.0
"""Checks of options at the public door, and errors that list problems.

An option is checked once, where a user gives it; what is called further in trusts its caller. The
texts have one form: the option and its value, what it must be, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from shardax._core.errors import first_of


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Options:
    """Checks of the options of one function, class or package.

    Each method returns nothing, or raises ``error``, whose text has the option, its value, and what
    it must be.

    Args:
        error: The error that a wrong option raises.
        owner: Whose options these are, named in texts where options of several meet.

    Example:
        >>> from shardax import extend
        >>> options = extend.Options(ValueError)
        >>> options.integers(heads=4)
        >>> options.choice("mode", "fast", ("exact", "approximate"))
        Traceback (most recent call last):
        ValueError: mode='fast' must be 'exact' or 'approximate'.
        >>> extend.Options.is_integer(3), extend.Options.is_integer(True)
        (True, False)
    """

    error: type[Exception]
    owner: str = ""  # named in texts where options of several meet, as "TrainerSettings"

    @staticmethod
    def is_integer(value: object) -> TypeGuard[int]:
        """Returns whether a value is an integer of Python or NumPy, and no boolean."""
        return is_integer(value)

    def check(self, name: str, value: object, fits: bool, expected: str, remedy: str = "") -> None:
        """Refuses the value of an option that does not fit."""
        if not fits:
            text = f"{name}={value!r} must be {expected}."
            if self.owner:
                text = f"{self.owner} needs {name} to be {expected}, but {name}={value!r}."
            raise self.error(f"{text} {remedy}".rstrip())

    def integers(self, least: int = 1, /, **options: Any) -> None:
        """Refuses options, by name, below a least integer or of another type."""
        for name, value in options.items():
            fits = is_integer(value) and least <= value
            self.check(name, value, fits, f"an integer of at least {least}")

    def positive(self, **options: Any) -> None:
        """Refuses options, by name, other than positive numbers and None."""
        for name, value in options.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = value is None or (is_number and value > 0)
            self.check(name, value, fits, "a positive number")

    def choice(self, name: str, value: object, choices: Collection[Any], remedy: str = "") -> None:
        """Refuses what is none of some choices."""
        *first, last = map(repr, choices)
        expected = f"{', '.join(first)} or {last}" if first else last
        self.check(name, value, _is_among(value, choices), expected, remedy)

    def instance(self, name: str, value: object, kinds: Any, expected: str) -> None:
        """Refuses a value of other classes, by the name of its type."""
        if not isinstance(value, kinds):
            needs = f"but {self.owner} needs" if self.owner else "not"
            raise self.error(f"{name} is a {type(value).__name__}, {needs} {expected}.")


def _is_among(value: object, choices: Iterable[object]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def raise_if_any(
    error: type[Exception] | Callable[[str], Exception],
    problems: Sequence[str],
    head: str,
    tail: str = "",
    *,
    separator: str = ", ",
    most: int = 8,
) -> None:
    """Raises an error that lists problems, if there are any."""
    if problems:
        raise error(f"{head}{first_of(problems, separator, most)}{tail}")
