# SPDX-License-Identifier: Apache-2.0
"""Errors of ``shardax.plan``."""

from __future__ import annotations

from shardax._core.errors import ShardaxError


class PlanError(ShardaxError, ValueError):
    """What the planner was asked for cannot be done. The base of those below that say why."""


class PlanInputError(PlanError):
    """A step, its arguments, rules or meshes cannot be planned: unnamed, concrete, or not fitting.

    A step that needs concrete values is one, an argument without names is another; the text names
    the path or the line.
    """


class TargetError(PlanError):
    """There is no such target, or a mesh does not multiply to its devices; lists what there is."""


class HardwareError(PlanError):
    """A description of hardware is wrong: a key that is missing, unknown, or no sensible figure."""


class PlanFileError(PlanError):
    """A file of rules, hardware or reports cannot be read; names the file and the key."""


class CompilerMissingError(ShardaxError, ImportError):
    """The target's own compiler is not installed; names the extra that brings it."""


class LayoutAssertionError(ShardaxError, AssertionError):
    """A layout is not what ``plan.assert_layout`` says that it is; lists every difference."""


class PlanInterrupted(KeyboardInterrupt, ShardaxError):
    """A search was interrupted (Ctrl-C); if it keeps programs, the same call goes on from there.

    Attributes:
        plan: The plan of what was done.
    """

    plan: object = None
