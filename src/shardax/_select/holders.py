# SPDX-License-Identifier: Apache-2.0
"""Holder graphs: which holders of a tree lead to chosen places, and what the rest of the tree is.

A *holder graph* has a node for every holder, with the nodes directly above and below it, so that
sharing and cycles are edges like any others. A node *leads* to a chosen place if one is between it
and the next holders, or a node below leads to one. What leads somewhere is copied by an edit; what
does not is shared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from shardax._core.graph.paths import Path, PyTree
from shardax._core.variable import Variable
from shardax._select.places import Place, children, root_place, search


class Holder:
    """A node of a holder graph."""

    __slots__ = ("above", "below", "chosen", "leads", "place")

    def __init__(self, place: Place) -> None:
        self.place = place  # where it was met first
        self.below: dict[Path, Holder] = {}
        self.above: list[Holder] = []  # one for every way down to here
        self.chosen = False  # whether a chosen place is between here and the next holders
        self.leads = False  # whether one is anywhere below


class HolderGraph:
    """The holders of a tree down to chosen places.

    Args:
        root: The tree.
        chosen: The chosen places; what is below them is not looked into.
        every_path: Whether what is reached by several paths is a node for each of them.
        looked_into: Keys of chosen places below which to go on.
    """

    def __init__(
        self,
        root: PyTree,
        chosen: Collection[Place],
        every_path: bool,
        looked_into: Collection[Hashable] = (),
    ) -> None:
        self.every_path = every_path
        self.chosen = {place.key(every_path) for place in chosen}
        self.met: set[Hashable] = set()  # keys of the chosen places that were found
        self.nodes: list[Holder] = []
        self._looked_into = looked_into
        self._holders_of_chosen = {id(place.holder) for place in chosen if place.local}

        start = root_place(root)
        if self._is_chosen(start) and start.key(every_path) not in looked_into:
            self.root = Holder(start)
        else:
            self.root = self._visit(start, {})
        self.spread([node for node in self.nodes if node.chosen])

    def _is_chosen(self, place: Place) -> bool:
        key = place.key(self.every_path)
        if key not in self.chosen:
            return False
        self.met.add(key)
        return True

    def _visit(self, place: Place, nodes: dict[int, Holder]) -> Holder:
        """Returns the node of a holder; ``nodes`` are those by ``id`` that are the same place."""
        node = nodes.get(id(place.holder))
        if node is not None:
            return node

        node = Holder(place)
        self.nodes.append(node)
        if self.every_path:  # only what is above is the same place
            nodes = {**nodes, id(place.holder): node}
        else:
            nodes[id(place.holder)] = node
        self._connect(node, place, nodes)
        return node

    def _connect(self, node: Holder, place: Place, nodes: dict[int, Holder]) -> None:
        """Connects a node with the holders at and below a place that it holds."""
        for child in children(place, self._looks_into_values(node)):
            if self._is_chosen(child):
                node.chosen = True
                if child.key(self.every_path) not in self._looked_into:
                    continue

            if child.is_holder:
                below = self._visit(child, nodes)
                node.below[child.path] = below
                below.above.append(node)
            else:
                self._connect(node, child, nodes)

    def _looks_into_values(self, node: Holder) -> bool:
        """Whether a chosen place can be below a holder, if that is a Variable."""
        if not isinstance(node.place.stored, Variable):
            return True
        return id(node.place.holder) in self._holders_of_chosen

    def spread(self, nodes: Iterable[Holder]) -> None:
        """Marks nodes and all above them as leading to chosen places."""
        waiting = list(nodes)
        for node in waiting:
            node.leads = True
        while waiting:
            for above in waiting.pop().above:
                if not above.leads:
                    above.leads = True
                    waiting.append(above)

    def leading(self) -> set[Hashable]:
        """Returns the holder keys of the nodes that lead to chosen places."""
        return {_holder_key(node.place, self.every_path) for node in self.nodes if node.leads}


def _holder_key(place: Place, every_path: bool) -> Hashable:
    return place.path if every_path else id(place.holder)


# --- splitting ------------------------------------------------------------------------------------


def split_places(
    tree: PyTree, places: Sequence[Place], every_path: bool
) -> tuple[list[Place], list[Place]]:
    """Returns the outermost places of a selection, and of the rest."""
    # Not ``group_by_filter`` and ``assemble``: they sort and put together the Variables of a
    # definition, each once. Here configuration, a leaf of any pytree or a whole Module may be on
    # one side, one object may be on both (``every_path``), and what stays must stay the same
    # object, all of which a definition does not tell.
    root = (root_place(tree),)
    keys = _keys_within(places, HolderGraph(tree, places, every_path))
    chosen = search(root, lambda place: place.key(every_path) in keys, every_path=every_path)

    graph = HolderGraph(tree, chosen, every_path)
    leading = graph.leading()

    def holds_chosen(place: Place) -> bool:
        """Whether a chosen place is at or below a place."""
        if place.key(every_path) in graph.chosen:
            return True
        if place.is_holder:
            return _holder_key(place, every_path) in leading
        return any(map(holds_chosen, children(place)))

    remaining = search(
        root, lambda place: not holds_chosen(place), every_path=every_path, barred=graph.chosen
    )
    return chosen, remaining


def _keys_within(places: Sequence[Place], graph: HolderGraph) -> set[Hashable]:
    """Returns the keys of selected places, and of the holders in them that lead to no other."""
    keys = set(graph.chosen)
    if graph.every_path:  # by path, nothing is reached from elsewhere
        return keys

    leading = graph.leading()
    waiting = list(places)
    for place in waiting:  # which grows
        for child in children(place, into_values=False):
            if child.is_holder:
                key = child.key(graph.every_path)
                if key in keys or _holder_key(child, graph.every_path) in leading:
                    continue
                keys.add(key)
            waiting.append(child)
    return keys
