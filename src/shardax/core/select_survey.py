# SPDX-License-Identifier: Apache-2.0
"""Surveys: which holders of a tree lead to some chosen places.

A *survey* walks a whole tree once and keeps a *node* for every holder (``core.select_places``) with
the nodes directly above and below it, so that sharing and cycles are edges like any others. A node
*leads* to a chosen place if it has one between itself and the next holders, or a node below leads
to one. What leads somewhere must be copied by an edit; what does not can be shared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from shardax.core.paths import Path
from shardax.core.select_places import Place, children, root_place
from shardax.core.variables import Variable


class Node:
    """A holder as a survey met it.

    Attributes:
        place: Where it was met first.
        below: The holders directly below, by path.
        above: The holders directly above, one for every way down to here.
        chosen: Whether a chosen place lies between here and the next holders.
        leads: Whether one lies anywhere below.
    """

    __slots__ = ("above", "below", "chosen", "leads", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.below: dict[Path, Node] = {}
        self.above: list[Node] = []
        self.chosen = False
        self.leads = False


class Survey:
    """A walk over a tree that looks for chosen places.

    Args:
        root: The tree.
        chosen: The places, which do not lie within each other.
        kept: Keys of chosen places below which to go on looking.
        every_path: Whether what is reached by two paths is two places.

    Attributes:
        root: The node of the tree itself, which counts as a holder.
        nodes: All nodes, in order.
        met: Keys of the chosen places that were found.
    """

    def __init__(
        self,
        root: object,
        chosen: Collection[Place],
        every_path: bool,
        kept: Collection[Hashable] = (),
    ) -> None:
        self.every_path = every_path
        self.chosen = {place.key(every_path) for place in chosen}
        self.met: set[Hashable] = set()
        self.nodes: list[Node] = []
        self._kept = kept
        self._holders = {id(place.holder) for place in chosen if place.local}
        start = root_place(root)
        if self._is_chosen(start) and start.key(every_path) not in kept:
            self.root = Node(start)
        else:
            self.root = self._visit(start, {})
        self.spread([node for node in self.nodes if node.chosen])

    def _is_chosen(self, place: Place) -> bool:
        key = place.key(self.every_path)
        if key in self.chosen:
            self.met.add(key)
            return True
        return False

    def _visit(self, place: Place, known: dict[int, Node]) -> Node:
        node = known.get(id(place.holder))
        if node is None:
            node = Node(place)
            self.nodes.append(node)
            if self.every_path:  # only what is above is known: anything else is another place
                known = {**known, id(place.holder): node}
            else:
                known[id(place.holder)] = node
            self._scan(node, place, known)
        return node

    def _scan(self, node: Node, place: Place, known: dict[int, Node]) -> None:
        for child in children(place, self.looks_into(node)):
            if self._is_chosen(child):
                node.chosen = True
                if child.key(self.every_path) not in self._kept:
                    continue
            if child.is_holder:
                below = self._visit(child, known)
                node.below[child.path] = below
                below.above.append(node)
            else:
                self._scan(node, child, known)

    def looks_into(self, node: Node) -> bool:
        """Whether what is below a node matters: not for a Variable without a chosen place in it."""
        return not isinstance(node.place.stored, Variable) or id(node.place.holder) in self._holders

    def spread(self, nodes: Iterable[Node]) -> None:
        """Notes that some nodes, and so all above them, lead to where one wants to go."""
        waiting = list(nodes)
        for node in waiting:
            node.leads = True
        while waiting:
            for above in waiting.pop().above:
                if not above.leads:
                    above.leads = True
                    waiting.append(above)
