# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.plan``."""

from __future__ import annotations

from shardax.errors import ShardaxError


class PlanError(ShardaxError, ValueError):
    """Base of the planner's errors."""


class PlanInputError(PlanError):
    """A step, its arguments, rules or meshes cannot be planned.

    A step that needs concrete values is one case, an argument without names is another; the text
    names the path or the line.
    """


class RowError(PlanInputError):
    """A row of a measured step has a name or a word that is not known.

    The text lists those that are.
    """


class TargetError(PlanError):
    """A target is unknown, or a mesh does not have its devices."""


class HardwareError(PlanError):
    """A description of hardware has a wrong or missing key."""


class PlanFileError(PlanError):
    """A file of rules, hardware or reports cannot be read."""


class CompilerMissingError(ShardaxError, ImportError):
    """The target's own compiler is not installed."""


class LayoutAssertionError(ShardaxError, AssertionError):
    """A layout differs from an assertion of ``plan.assert_layout``."""


class PlanInterrupted(KeyboardInterrupt, ShardaxError):
    """A search was interrupted (Ctrl-C).

    If it keeps programs, the same call goes on from there.

    Attributes:
        plan: The plan of what was done.
    """

    plan: object = None
