# SPDX-License-Identifier: Apache-2.0
"""Places of a tree: finding, reading, splitting and printing.

A *tree* is a Module, a Variable, or any pytree with or without these. A *place* is somewhere in it:
an attribute, an item, a dict entry, or part of a Variable's value, such as ``.layers[0].w.value``.
What has identity (an object, a plain list or dict) is one place, by however many paths it is
reached. It is a *holder*; every other place is known by the nearest holder above it and the *local*
path from there. So a selection made before values were written is still right afterwards. The place
of an array attribute holds the array; the hidden Variable around it is only its holder. Looking for
places reads no lazy value.

A *holder graph* has a node for every holder, with the nodes directly above and below it, so that
sharing and cycles are edges like any others. A node *leads* to a selected place if one is between
it and the next holders, or a node below leads to one. What leads somewhere is copied by an edit;
what does not is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardax._core.errors import ShardaxError
from shardax._core.graph.handlers import Pairs, handler_of, has_parts, map_children
from shardax._core.graph.paths import Leaf, Path, format_path, line_of
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object
from shardax._core.stored import ARRAY_HOLDERS, ARRAY_TYPES, ChangeableNode, from_stored, title_of
from shardax._core.variable import Variable


class SelectionError(ShardaxError, ValueError, IndexError):
    """A selection, or an edit of one, without what it asks for."""


ABSENT: Any = object()  # what ``descend`` finds where there is nothing


class Place(NamedTuple):
    """Somewhere in a tree."""

    path: Path
    stored: object  # what the holder stores here
    holder: object  # the nearest value with identity, here or above
    local: Path  # from the holder; empty for the holder itself
    inside: bool = False  # in a Variable's value, where lists and dicts have no identity
    # How many wrappers have the same path and holder: what a bound method or a partial wraps has no
    # step of its own.
    wrapped: int = 0
    above: tuple[int, ...] = ()  # id of every holder above

    @property
    def is_holder(self) -> bool:
        """Whether this is a value with identity, or the root."""
        return not self.local and not self.wrapped

    @property
    def named(self) -> bool:
        """Whether the path leads just here, for selecting."""
        return not self.wrapped

    @property
    def content(self) -> Leaf:
        """The content, not materialised: the array of an array attribute."""
        return content_of(self.stored) if isinstance(self.stored, ARRAY_HOLDERS) else self.stored

    def key(self, every_path: bool) -> Hashable:
        """The key of a place, equal for equal places."""
        # The root is a place of its own, apart from attributes that lead back to it.
        identity = (id(self.holder), self.local, self.wrapped, not self.path)
        return (self.path, *identity) if every_path else identity


def root_place(tree: object) -> Place:
    """Returns the place of the whole tree."""
    return Place((), tree, tree, ())


def content_of(variable: Variable) -> Any:
    """Returns a Variable's value here, without materialising it."""
    value = variable._here()._value
    return variable.value if isinstance(value, np.ndarray) else value


def children(place: Place, into_values: bool = True) -> list[Place]:
    """Returns the places directly below one."""
    stored = place.stored
    if isinstance(stored, Variable) and not into_values:
        return []
    inside = place.inside or isinstance(stored, Variable)
    above = (*place.above, id(place.holder)) if place.is_holder else place.above
    places: list[Place] = []
    for key, child in parts(place.content):
        if not into_values and isinstance(child, ARRAY_HOLDERS):
            continue
        steps = () if key is None else (key,)
        path = (*place.path, *steps)
        if not inside and handler_of(child).has_identity:
            places.append(Place(path, child, child, (), False, 0, above))
        else:
            local = (*place.local, *steps)
            wrapped = 0 if steps else place.wrapped + 1
            places.append(Place(path, child, place.holder, local, inside, wrapped, above))
    return places


def is_leaf(place: Place) -> bool:
    """Whether a place is a leaf to JAX."""
    content = place.content
    if isinstance(content, ARRAY_TYPES):
        return True
    in_module = isinstance(place.holder, Object) and not isinstance(place.holder, Variable)
    if in_module or content is None or isinstance(content, Object):  # configuration, or no leaf
        return False
    return jax.tree_util.all_leaves((content,))


def parts(value: Any) -> Pairs:
    """Returns the (key, stored value) pairs of a value."""
    if isinstance(value, Variable):
        return [("value", content_of(value))]
    return handler_of(value).children(value)


def shown(value: Any) -> Any:
    """Returns a stored value in the user's form, nothing materialised."""
    if isinstance(value, ARRAY_HOLDERS):
        return content_of(value)
    if handler_of(value).stores_items and has_parts(value):
        tree = map_children(shown, value)
        return tree.read() if isinstance(tree, ChangeableNode) else tree
    return value


def read(place: Place) -> Leaf:
    """Returns the value at a place, or ``ABSENT``."""
    if isinstance(place.holder, Variable):
        is_hidden = isinstance(place.holder, ARRAY_HOLDERS)
        if is_hidden or place.local:
            _ = place.holder.value  # what is lazy becomes real
        if is_hidden:
            return descend(place.holder.value, place.local)
    return from_stored(descend(place.holder, place.local))


def descend(value: object, path: Path | str) -> Any:
    """Returns the value below another at a path, or ``ABSENT``."""
    if not path:
        return value
    for key, child in parts(value):
        remaining = rest_of(path, () if key is None else (key,))
        if remaining is not None:
            value_below = descend(child, remaining)
            if value_below is not ABSENT:
                return value_below
    return ABSENT


def locate(place: Place, path: Path | str) -> Place | None:
    """Returns the place at a path below another, or None."""
    if not path and place.named:
        return place
    for child in children(place):
        remaining = rest_of(path, child.path[len(place.path) :])
        if remaining is not None:
            place_below = locate(child, remaining)
            if place_below is not None:
                return place_below
    return None


def rest_of(path: Path | str, steps: Path) -> Path | str | None:
    """Returns the rest of a path after some steps, or None."""
    # Of a text the rest of the text. Steps keep 1 and True apart.
    if isinstance(path, str):
        text = format_path(steps) if steps else ""
        return path[len(text) :] if path.startswith(text) else None
    first = path[: len(steps)]
    same = first == steps and all(type(a) is type(b) for a, b in zip(first, steps, strict=True))
    return path[len(steps) :] if same else None


def search(
    starts: Iterable[Place],
    test: Callable[[Place], bool],
    *,
    every_path: bool,
    innermost: bool = False,
    into_values: bool = True,
    barred: Collection[Hashable] = (),
) -> list[Place]:
    """Returns the outermost (or innermost) places with a true test."""
    places: list[Place] = []
    is_inside: dict[Hashable, bool] = {}

    def visit(place: Place) -> bool:
        """Returns whether something wanted is here or below."""
        key = place.key(every_path)
        if key in is_inside:
            return is_inside[key]
        if key in barred or (place.is_holder and id(place.holder) in place.above):
            return False
        is_inside[key] = False  # until it is known better: what leads back here is no second place
        is_chosen = not innermost and place.named and test(place)
        if not is_chosen:
            below = [visit(child) for child in children(place, into_values)]
            is_inside[key] = any(below)
            is_chosen = innermost and not is_inside[key] and place.named and test(place)
        if is_chosen:
            is_inside[key] = True
            places.append(place)
        return is_inside[key]

    for start in starts:
        visit(start)
    return places


# --- holder graphs --------------------------------------------------------------------------------


class Holder:
    """A holder as a graph met it."""

    __slots__ = ("above", "below", "chosen", "leads", "place")

    def __init__(self, place: Place) -> None:
        self.place = place  # where it was met first
        self.below: dict[Path, Holder] = {}
        self.above: list[Holder] = []  # one for every way down to here
        self.chosen = False  # whether a chosen place is between here and the next holders
        self.leads = False  # whether one is anywhere below


class HolderGraph:
    """A walk over a tree to chosen places."""

    def __init__(
        self,
        root: object,
        chosen: Collection[Place],
        every_path: bool,
        keys_kept: Collection[Hashable] = (),
    ) -> None:
        self.every_path = every_path
        self.chosen = {place.key(every_path) for place in chosen}
        self.met: set[Hashable] = set()  # keys of the chosen places that were found
        self.nodes: list[Holder] = []
        self._kept = keys_kept  # keys of chosen places below which to go on
        self._holders = {id(place.holder) for place in chosen if place.local}
        start = root_place(root)
        if self._is_chosen(start) and start.key(every_path) not in keys_kept:
            self.root = Holder(start)
        else:
            self.root = self._visit(start, {})
        self.spread([node for node in self.nodes if node.chosen])

    def _is_chosen(self, place: Place) -> bool:
        key = place.key(self.every_path)
        if key in self.chosen:
            self.met.add(key)
            return True
        return False

    def _visit(self, place: Place, nodes: dict[int, Holder]) -> Holder:
        node = nodes.get(id(place.holder))
        if node is None:
            node = Holder(place)
            self.nodes.append(node)
            if self.every_path:  # only what is above is known: anything else is another place
                nodes = {**nodes, id(place.holder): node}
            else:
                nodes[id(place.holder)] = node
            self._scan(node, place, nodes)
        return node

    def _scan(self, node: Holder, place: Place, nodes: dict[int, Holder]) -> None:
        for child in children(place, self.looks_into(node)):
            if self._is_chosen(child):
                node.chosen = True
                if child.key(self.every_path) not in self._kept:
                    continue
            if child.is_holder:
                below = self._visit(child, nodes)
                node.below[child.path] = below
                below.above.append(node)
            else:
                self._scan(node, child, nodes)

    def looks_into(self, node: Holder) -> bool:
        """Whether chosen places can be below a holder."""
        return not isinstance(node.place.stored, Variable) or id(node.place.holder) in self._holders

    def spread(self, nodes: Iterable[Holder]) -> None:
        """Marks holders and all above them as leading to chosen places."""
        waiting = list(nodes)
        for node in waiting:
            node.leads = True
        while waiting:
            for above in waiting.pop().above:
                if not above.leads:
                    above.leads = True
                    waiting.append(above)


# --- splitting ------------------------------------------------------------------------------------


def split_places(
    tree: object, places: Sequence[Place], every_path: bool
) -> tuple[list[Place], list[Place]]:
    """Returns the outermost places of a selection, and of the rest."""
    # Not ``group_by_filter`` and ``assemble``: they sort and put together the Variables of a
    # definition, each once. Here configuration, a leaf of any pytree or a whole Module may be on
    # one side, one object may be on both (``every_path``), and what stays must stay the same
    # object, all of which a definition does not tell.
    root = (root_place(tree),)
    keys = _held(places, HolderGraph(tree, places, every_path))
    chosen = search(root, lambda place: place.key(every_path) in keys, every_path=every_path)
    graph = HolderGraph(tree, chosen, every_path)
    leading = _leading(graph)

    def leads(place: Place) -> bool:
        """Whether something held is at or below a place."""
        if place.key(every_path) in graph.chosen:
            return True
        if place.is_holder:
            return _holder_key(place, every_path) in leading
        return any(map(leads, children(place)))

    remaining = search(
        root, lambda place: not leads(place), every_path=every_path, barred=graph.chosen
    )
    return chosen, remaining


def _held(places: Sequence[Place], graph: HolderGraph) -> set[Hashable]:
    """Returns the keys of selected places and of the objects they hold."""
    leading_keys = set(graph.chosen)
    if graph.every_path:  # by path, nothing is reached from elsewhere
        return leading_keys
    leading = _leading(graph)
    waiting = list(places)
    for place in waiting:
        for child in children(place, into_values=False):
            if child.is_holder:
                key = child.key(graph.every_path)
                if key in leading_keys or _holder_key(child, graph.every_path) in leading:
                    continue
                leading_keys.add(key)
            waiting.append(child)
    return leading_keys


def _leading(graph: HolderGraph) -> set[Hashable]:
    return {_holder_key(n.place, graph.every_path) for n in graph.nodes if n.leads}


def _holder_key(place: Place, every_path: bool) -> Hashable:
    return place.path if every_path else id(place.holder)


# --- printing -------------------------------------------------------------------------------------

_MAX_LINES = 100
_MAX_WIDTH = 80
_MARK, _NO_MARK, _INDENT = "> ", "  ", "  "


def selection_text(tree: object, places: Collection[Place], every_path: bool) -> str:
    """Returns the text of ``repr(selection)``."""
    count = f"{len(places)} place{'' if len(places) == 1 else 's'}"
    lines = list(_Text(places, every_path).lines(root_place(tree), "", 0))
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"{_NO_MARK}... {len(lines) - _MAX_LINES} more lines"]
    return "\n".join((f"Selection of {count} in a {type(tree).__name__}:", *lines))


class _Text:
    """Printer of a tree with marked places."""

    def __init__(self, places: Collection[Place], every_path: bool) -> None:
        anywhere = [] if every_path else places
        self._objects = {id(place.holder) for place in anywhere if place.is_holder}
        self._paths = {place.path for place in places}
        self._leading = {path[:end] for path in self._paths for end in range(len(path))}
        self._shown: dict[int, Path] = {}

    def lines(self, place: Place, label: str, depth: int) -> Iterator[str]:
        """Yields the lines for one place and its parts."""
        marked = place.path in self._paths or (
            place.path != () and place.is_holder and id(place.holder) in self._objects
        )
        margin = (_MARK if marked else _NO_MARK) + _INDENT * depth + label
        content = place.content
        name = title_of(content)
        if place.is_holder and isinstance(content, Object):
            first = self._shown.setdefault(id(content), place.path)
            if first != place.path:
                yield f"{margin}<same {name} as {format_path(first)}>"
                return
        if marked or place.path not in self._leading:
            yield f"{margin}{_folded(place)}"
            return
        is_variable = isinstance(content, Variable)
        yield margin + (repr(content) if is_variable else f"{name}(")
        for child in children(place):
            yield from self.lines(child, _label(content, place, child), depth + 1)
        if not is_variable:
            yield f"{_NO_MARK}{_INDENT * depth})"


def _folded(place: Place) -> str:
    """Returns one line for a place and all below it."""
    content = place.content
    if isinstance(content, ARRAY_TYPES):
        lazy = ", lazy" if isinstance(content, LazyValue) else ""
        return f"{content.dtype}{list(content.shape)}{lazy}"
    if not isinstance(content, Variable):
        below = children(place)
        if below or isinstance(content, Object):
            return f"{title_of(content)}({'...' if below else ''})"
    text = line_of(content)
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."


def _label(content: object, place: Place, child: Place) -> str:
    """Returns the label before a part of a container."""
    steps = child.path[len(place.path) :]
    return handler_of(content).text(content, steps[0])[0] if steps else ""
