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

from shardax._core.errors import ShardaxError, first_of


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Options:
    """Checks of the options of one function, class or package."""

    error: type[ShardaxError]
    owner: str = ""  # named in texts where options of several meet, as "TrainerSettings"

    def check(self, name: str, value: object, fits: bool, expected: str, remedy: str = "") -> None:
        """Refuses the value of an option that does not fit."""
        if not fits:
            subject = f"{name}={value!r}"
            if self.owner:
                subject = f"{self.owner} has {subject}, but it"
            raise self.error(f"{subject} must be {expected}.{remedy and f' {remedy}'}")

    def integers(
        self,
        least: int = 1,
        most: int | None = None,
        *,
        optional: bool = False,
        remedy: str = "",
        **options: Any,
    ) -> None:
        """Refuses options, by name, that are no integers in a range."""
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        expected = f"an integer {span}{', or None' if optional else ''}"
        for name, value in options.items():
            fits = is_integer(value) and least <= value and (most is None or value <= most)
            self.check(name, value, fits or (optional and value is None), expected, remedy)

    def choice(self, name: str, value: object, choices: Collection[Any], remedy: str = "") -> None:
        """Refuses what is none of some choices."""
        *first, last = map(repr, choices)
        expected = f"{', '.join(first)} or {last}" if first else last
        self.check(name, value, _is_among(value, choices), expected, remedy)

    def instance(self, name: str, value: object, kinds: Any, expected: str) -> None:
        """Refuses a value of other classes; the text has its type, not the value."""
        if not isinstance(value, kinds):
            needs = f"{self.owner or 'it'} needs"
            raise self.error(f"{name} is a {type(value).__name__}, but {needs} {expected}.")


def _is_among(value: object, choices: Iterable[Any]) -> bool:
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
    """Raises an error with the first problems between two texts, if there are problems."""
    if problems:
        raise error(f"{head}{first_of(problems, separator, most)}{tail}")
