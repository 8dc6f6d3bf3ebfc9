# SPDX-License-Identifier: Apache-2.0
"""What a compiled function remembers: plans, at the cost of a trace, and calls, of a flattening.

Both are bounded. A plan that is needed for one thing more takes the place of the one that was used
least recently, and what that compiled is let go. Calls are forgotten all together, since each is
found anew without tracing.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from shardax.transforms.entry import CallEntry
from shardax.transforms.lift import Graph
from shardax.transforms.plan import Plan

MAX_PLANS = 512
"""How many plans one compiled function remembers."""
_MAX_CALLS = 4096
_MAX_CALLS_WITH_SOURCES = 64
"""How many calls; fewer where objects from closures, which may be many, are part of the key."""


class Memory:
    """The plans and calls of one compiled function.

    Attributes:
        plans: Plans by what they are found by.
        calls: Call entries by what a call is told by.
        ticks: Counts calls; ``Plan.used`` is the count at a plan's last call.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, Plan] = {}
        self.calls: dict[Any, CallEntry] = {}
        self.ticks = itertools.count(1)

    def add(self, plan: Plan) -> None:
        """Remembers a plan; if there are many, forgets the one that was used least recently."""
        while len(self.plans) >= MAX_PLANS:
            oldest = min([*self.plans.values()], key=operator.attrgetter("used"))
            self.plans.pop(oldest.key, None)
            for key, entry in [*self.calls.items()]:
                if entry.plan is oldest:
                    self.calls.pop(key, None)
        self.plans[plan.key] = plan

    def remember(self, key: Any, entry: CallEntry, graph: Graph, few: bool) -> None:
        """Remembers a call until one of its objects is gone.

        Args:
            key: What it is told by.
            entry: What it needs.
            graph: Its roots.
            few: Whether to remember few calls.
        """
        if len(self.calls) >= (_MAX_CALLS_WITH_SOURCES if few else _MAX_CALLS):
            self.calls.clear()

        calls = self.calls  # not self: the callback must keep no plan alive

        def forget(_: Any) -> None:
            calls.pop(key, None)

        entry.keep_weakly(graph, forget)
        self.calls[key] = entry

    def clear(self) -> None:
        """Forgets everything."""
        for plan in self.plans.values():
            plan.clear_cache()
        self.plans.clear()
        self.calls.clear()
