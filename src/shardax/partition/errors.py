# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.partition``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardax._core.errors import ShardaxError


class RulesError(ShardaxError, ValueError):
    """Rules are malformed: not pairs, not a target, or not a policy."""


class AxisNamesError(ShardaxError, ValueError):
    """The logical names of one array are malformed, or one name occurs twice."""


class AxisConflictError(ShardaxError, ValueError):
    """Two names of one array want one mesh axis, and the rules say that this is an error."""


class UnmappedAxisError(ShardaxError, ValueError):
    """No rule mentions a logical name, and the rules say that this is an error."""


class NoRulesError(ShardaxError, ValueError):
    """Rules are needed, none were given, and none are in scope."""


class ConstraintError(ShardaxError, ValueError):
    """An array inside a program cannot be constrained as asked."""


class PartitionCheckError(ShardaxError, ValueError):
    """A tree cannot be laid out by these rules over this mesh; lists every offending array.

    Attributes:
        findings: The findings of severity ``"error"``, each with its path.
    """

    def __init__(self, findings: Iterable[Any]) -> None:
        self.findings: tuple[Any, ...] = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        problems = f"{count} problem{'' if count == 1 else 's'}"
        lines = "".join(f"\n  {finding}" for finding in self.findings)
        return f"The layout has {problems}; nothing was moved.{lines}"


class OverrideError(ShardaxError, ValueError):
    """What was said about places apart from the rules is malformed: an override, a memory kind."""


class PlacementError(ShardaxError, RuntimeError):
    """A device refused an array while a model was being placed; every array is still valid."""
