# SPDX-License-Identifier: Apache-2.0
"""Call entries: what a compiled function remembers about a call, to repeat it at no cost.

An entry belongs to particular objects, and is valid while the structure epoch stays
(``core.epoch``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from shardax.core.node import Object
from shardax.core.variables import Variable
from shardax.transforms.lift import Graph
from shardax.transforms.plan import Plan


class CallEntry:
    """What a steady call needs, for particular objects.

    Attributes:
        epoch: Structure epoch at which this was made.
        kept: Variables whose values are passed.
        donated: Variables whose values are passed and donated.
        leaves: All of them, in graph order.
        roots: Called, each returns a root; held weakly, so that remembering a call keeps no model
            alive.
        plan: The plan.
        last: The record of the last call and the Variables it wrote.
        spans: Where the dynamic leaves of each argument stand, in quick calls
            (``transforms.automatic``).
    """

    __slots__ = (
        "donated",
        "epoch",
        "kept",
        "last",
        "leaves",
        "plan",
        "roots",
        "spans",
    )

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.epoch = graph.flat.epoch
        self.leaves: list[Any] = graph.leaves
        self.kept, self.donated = plan.partition(graph.leaves)
        self.roots = [_weak(root) for root in graph.roots]
        self.last: tuple[Any, list[Any]] = (None, [])
        self.spans: Any = None

    def graph(self) -> Graph:
        """Flattens the roots anew; for calls that trace or change structure."""
        return Graph([root() for root in self.roots], self.plan.names)

    def keep_weakly(self, graph: Graph, forget: Callable[[Any], None]) -> None:
        """Prepares for being remembered: lets go of everything that the caller may drop.

        Args:
            graph: The roots of the call.
            forget: Called when one of them is gone.
        """
        self.roots = [
            weakref.ref(root, forget) if isinstance(root, Object) else _weak(root)
            for root in graph.roots
        ]
        bare = {id(root) for root in graph.roots if isinstance(root, Variable)}
        if bare:  # these have no Module that keeps them alive, and whose end would be noticed
            self.leaves = [weakref.proxy(v) if id(v) in bare else v for v in graph.leaves]
            self.kept, self.donated = self.plan.partition(self.leaves)


def _weak(root: Any) -> Callable[[], Any]:
    return weakref.ref(root) if isinstance(root, Object) else lambda: root
