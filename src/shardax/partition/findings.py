# SPDX-License-Identifier: Apache-2.0
"""Findings: what there is to say about a layout.

A *finding* is one thing worth knowing about a layout: an ``"error"`` (the layout cannot be), a
``"warning"`` (it can, but hardly as meant) or ``"info"``. Its ``code`` names the kind:

* ``axis-names``: error; names malformed, or a name twice in one array.
* ``rank-mismatch``: error; not one name per dimension.
* ``unknown-mesh-axis``: error; a rule names a mesh axis that the mesh does not have.
* ``indivisible``: error; a dimension cannot be cut into equal parts.
* ``mesh-axis-conflict``: a rule came too late for a mesh axis. Error under ``on_conflict="error"``;
  else warning if its name ends without a rule, info if a later rule served it.
* ``unmapped-name``: no rule mentions a name. Error under ``on_unmapped="error"``; else a warning,
  and only for a name that looks like one that has a rule.
* ``axis-type-order``: warning; a dimension is split over an Auto mesh axis and after it over an
  Explicit one.
* ``unconstrained``: warning; ``UNCONSTRAINED`` where an array is placed.
* ``unused-rule``: info; a rule was chosen for no array. Warning if its name looks misspelt.
* ``large-replicated``: warning; a large array is held whole by every device.
* ``shadowed-rule``: warning; an earlier rule for the same name leaves a rule nothing to do.
* ``unused-mesh-axis``: info; no rule names a mesh axis.

Those about one array are made in ``shardax.partition.checker``, those about rules by themselves in
``shardax.partition.rules``, and those that need many arrays in ``shardax.partition.checker``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardax._core.graph.paths import Path
from shardax.partition.mesh import mesh_text

Severity = Literal["error", "warning", "info"]

NEAR = 0.85  # difflib ratio: "embd" is near "embed" (0.89), "kv_heads" is not near "heads" (0.77)


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about a layout; ``str()`` gives the message.

    Attributes:
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        path: Where the array is; ``()`` for a finding about the rules as a whole.
        code: The kind of finding (see the module docstring).
        message: What was found, where, why it matters and what to do.

    Example:
        >>> finding = Finding("error", ("up", "kernel"), "indivisible", ".up.kernel: size 30 ...")
        >>> print(finding)
        .up.kernel: size 30 ...
    """

    severity: Severity
    path: Path
    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats mesh axes with their sizes, as ``(data=2, model=4)``."""
    return f"({mesh_text(sizes)})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the most similar of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
