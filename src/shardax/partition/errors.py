# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of layouts, and the errors of ``shardax.partition``.

A *diagnostic* is one thing worth knowing about a layout: an ``"error"`` (the layout is impossible),
a ``"warning"`` (possible, but hardly as meant) or ``"info"``. Its ``code`` names the kind:

* ``axis-names``: error; names malformed, or a name twice in one array.
* ``rank-mismatch``: error; not one name per dimension.
* ``unknown-mesh-axis``: error; the mesh has no such axis.
* ``indivisible``: error; a dimension cannot be cut into equal parts.
* ``mesh-axis-conflict``: two dimensions of one array want one mesh axis. Of rules: error under
  ``on_conflict="error"``, else warning if a name goes without, info if a later rule serves it.
* ``unmapped-name``: no rule mentions a name. Error under ``on_unmapped="error"``; else a warning,
  and only for a name that looks like one that has a rule.
* ``axis-type-order``: warning; a dimension is split over an Auto mesh axis before an Explicit one.
* ``unconstrained``: ``UNCONSTRAINED`` where an array is placed.
* ``unused-rule``: info; no array chose a rule. Warning if its name looks misspelt.
* ``large-replicated``: warning; every device holds a large array whole.
* ``shadowed-rule``: warning; an earlier rule for the same name leaves a rule nothing to do.
* ``unused-mesh-axis``: info; no rule names a mesh axis.

``shardax.partition.tree_check`` lists those of whole trees.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardax._core.errors import ShardaxError
from shardax._core.graph.paths import Path

Severity = Literal["error", "warning", "info"]

NEAR = 0.85  # difflib ratio: "embd" is near "embed" (0.89), "kv_heads" is not near "heads" (0.77)


@dataclass(frozen=True)
class Diagnostic:
    """One thing worth knowing about a layout; ``str()`` gives the message.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        path: Path of the array; ``()`` for a diagnostic of the rules as a whole.
        code: Kind of diagnostic, such as ``"indivisible"``.
        message: What is wrong, where, why it matters and what to do.

    Example:
        >>> print(Diagnostic("error", ("up", "kernel"), "indivisible", ".up.kernel: size 30 ..."))
        .up.kernel: size 30 ...
    """

    severity: Severity
    path: Path
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence with the most similar of the known names, or nothing."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The likely spelling of a misspelt name, or None."""
    near = difflib.get_close_matches(name, names, 1, NEAR)
    # In a short name one exchange of letters is a large part of it: "mpl" for "mlp".
    exchanged = [item for item in names if item != name and sorted(item) == sorted(name)]
    return next(iter((*near, *exchanged)), None)


class PartitionError(ShardaxError, ValueError, RuntimeError):
    """Rules, axis names, overrides or a constraint that cannot be followed."""


class PartitionCheckError(PartitionError):
    """A layout is impossible; lists every offending array.

    Attributes:
        findings: The diagnostics of severity ``"error"``, each with its path.
    """

    def __init__(self, findings: Iterable[Diagnostic]) -> None:
        self.findings: tuple[Diagnostic, ...] = tuple(findings)
        super().__init__(self.findings)

    def __str__(self) -> str:
        count = len(self.findings)
        problems = f"{count} problem{'' if count == 1 else 's'}"
        lines = "".join(f"\n  {finding}" for finding in self.findings)
        return f"The layout has {problems}; nothing was moved.{lines}"


def raise_on_errors(diagnostics: Iterable[Diagnostic]) -> None:
    """Raises one PartitionCheckError with all diagnostics of severity ``"error"``, if any."""
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    if errors:
        raise PartitionCheckError(errors)
