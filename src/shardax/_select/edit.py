# SPDX-License-Identifier: Apache-2.0
"""Edits of trees, into a new tree or in place.

An *edit* gives, for each selected place (``_select.places``), the *items* that take the place of
what is there: ``[new]`` replaces it, ``[]`` removes it, ``[OLD, new]`` inserts after it.

An edit into a new tree (``_Copying``) copies the holders that lead to an edited place, each once,
and no others. So what was shared is shared in the new tree, cycles stay cycles, and every object
that leads to no edit is the same object in both trees. An array attribute belongs to its Module, so
a copy gets a hidden Variable of its own. An edit in place (``_Changing``) changes the holders of
edited places only. Either way everything is computed, and refused, before anything changes.

How many items may replace one is up to the container's handler: a *sequence* (list, tuple) takes
any number; what is *keyed* (attributes, dict entries) can lose an item; everything else
(NamedTuple, partial, other pytree nodes) has a fixed number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardax._core.frames import check_structural_write
from shardax._core.graph.handlers import Pairs, handler_of
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Object
from shardax._core.state.frozen import Slot
from shardax._core.stored import ARRAY_HOLDERS, ARRAY_TYPES, class_of, holds_arrays, to_stored
from shardax._core.values import as_value
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute
from shardax._select import errors
from shardax._select.combine import HOLE, hole_for
from shardax._select.holders import Holder, HolderGraph
from shardax._select.places import Place, children, locate, parts, root_place
from shardax._select.variables import like, note_structural_change, stored_value, write

OLD: Any = object()  # among the items of an edit: what stands there now
Items = Sequence[PyTree]
# A place and the items that take the place of what is there.
Edit = tuple[Place, Items]
Journal = list[Callable[[], PyTree]]  # how to undo what was done, in the order of doing


def edit_tree(
    tree: PyTree, edits: Sequence[Edit], every_path: bool, journal: Journal | None = None
) -> PyTree:
    """Returns an edited tree.

    Args:
        tree: The tree.
        edits: What to put where.
        every_path: Whether what is reached by several paths is a place at each of them.
        journal: Takes notes for undoing, of an edit in place; None for an edit into a new tree.
    """
    for place, items in edits:
        if place.is_holder and not place.path:
            _check_count(place, items, tree, can_shrink=False)
            if journal is not None:
                raise errors.root_in_place(tree)
            return items[0]

    if journal is None:
        return _Copying(tree, edits, every_path).run()
    return _Changing(tree, edits, every_path).run(journal)


def undo(journal: Journal) -> None:
    """Undoes the changes in a journal."""
    for undo_change in reversed(journal):
        undo_change()
    journal.clear()


# --- what stands where afterwards -----------------------------------------------------------------


class _TreeEdit:
    """The edits of one tree, and what stands where after them; base of both ways."""

    def __init__(self, tree: PyTree, edits: Sequence[Edit], every_path: bool) -> None:
        self.tree = tree
        self.every_path = every_path
        self.items: Mapping[Hashable, Items] = {
            place.key(every_path): items for place, items in edits
        }

        # Where the old value stays, edits may also be below it.
        with_old = {key for key, items in self.items.items() if _keeps_old(items)}
        places = [place for place, _ in edits]
        self.graph = HolderGraph(tree, places, every_path, with_old)
        for place in places:
            if place.key(every_path) not in self.graph.met:
                raise _unreachable(tree, place, every_path)

    def result(self, node: Holder) -> PyTree:
        """Returns the holder after the edit."""
        raise NotImplementedError

    def value_after(self, node: Holder) -> PyTree:
        """Returns the value of a Variable after the edit."""
        if isinstance(node.place.stored, ARRAY_HOLDERS):
            return self.content_after(node, node.place)
        ((_, value),) = _arranged(node.place, self.items_by_child(node, node.place))
        return value

    def contents_after(self, node: Holder) -> Pairs:
        """Returns the contents of a mutable holder after the edit, as it stores them."""
        new = self.items_by_child(node, node.place)
        if isinstance(node.place.stored, Object):
            new = [(child, _as_stored(child, items)) for child, items in new]
        return _arranged(node.place, new)

    def content_after(self, node: Holder, place: Place) -> Leaf:
        """Returns the content of an immutable place, with its parts edited."""
        new = self.items_by_child(node, place)
        if all(len(items) == 1 and items[0] is child.stored for child, items in new):
            return place.content
        return handler_of(place.content).remake(place.content, _arranged(place, new))

    def items_by_child(self, node: Holder, place: Place) -> list[tuple[Place, list[PyTree]]]:
        """Returns every place directly below one, with the items there after the edit."""
        return [(child, self.items_after(node, child)) for child in children(place)]

    def items_after(self, node: Holder, child: Place) -> list[PyTree]:
        """Returns the items at a place below a holder after the edit."""
        items = self.items.get(child.key(self.every_path), (OLD,))
        if isinstance(node.place.stored, Object):
            for item in items:
                _check_keeps_variable(child, item)

        new: list[PyTree] = []
        for item in items:
            if item is OLD:
                new.append(self._old(node, child))
            elif item is HOLE:
                new.append(hole_for(child.stored))
            else:
                new.append(item)
        return new

    def _old(self, node: Holder, child: Place) -> PyTree:
        """Returns what stands at a place, with the edits below it."""
        if child.is_holder:
            return self.result(node.below[child.path])
        return self.content_after(node, child)


def _arranged(place: Place, new: Sequence[tuple[Place, Sequence[PyTree]]]) -> Pairs:
    """Returns the parts of a container after an edit; raises if it cannot hold so many."""
    content = place.content
    size = handler_of(content).size
    pairs: list[tuple[Hashable, PyTree]] = []
    for child, items in new:
        if size != "any":
            _check_count(child, items, content, can_shrink=size == "shrinks")
        steps = place.steps_to(child)
        key = steps[0] if steps else None
        pairs.extend((key, item) for item in items)
    return pairs


def _check_count(place: Place, items: Items, container: PyTree, can_shrink: bool) -> None:
    """Raises if a place that holds one item would hold none or several."""
    if len(items) == 1 or (not items and can_shrink):
        return
    kind, is_called = class_of(container).__name__, callable(place.content)
    if items:
        raise errors.cannot_insert(place.path, kind, is_called)
    raise errors.cannot_remove(place.path, kind, is_called)


def _check_keeps_variable(place: Place, item: PyTree) -> None:
    """Raises if an array is to replace a Variable, whose type and metadata would be lost."""
    stored = place.stored
    if not isinstance(item, ARRAY_TYPES) or holds_arrays(stored):
        return
    if isinstance(stored, Slot):
        raise errors.array_in_place_of_slot(place.path, stored.variable_type.__name__)
    if isinstance(stored, Variable):
        kind = getattr(stored, "variable_type", type(stored)).__name__
        raise errors.array_in_place_of_variable(place.path, kind)


def _keeps_old(items: Items) -> bool:
    """Whether what stands at a place now stays there."""
    return any(item is OLD for item in items)


def _as_stored(place: Place, items: Items) -> list[PyTree]:
    """Returns the items of a place as a Module stores them."""
    stored: list[PyTree] = []
    for item in items:
        is_stored = item is place.stored or item is HOLE or isinstance(item, Object)
        if not is_stored:
            item = to_stored(item, f"what stands at {format_path(place.path)}")
        stored.append(item)
    return stored


def _unreachable(tree: PyTree, place: Place, every_path: bool) -> errors.SelectionError:
    """Returns the error of a place that the walk to edited places did not meet."""
    current = locate(root_place(tree), place.path)
    if current is not None and current.key(every_path) == place.key(every_path):
        return errors.edited_within_another(place.path)
    return errors.edited_place_is_gone(place.path)


# --- into a new tree ------------------------------------------------------------------------------


class _Copying(_TreeEdit):
    """Edits into a new tree."""

    def __init__(self, tree: PyTree, edits: Sequence[Edit], every_path: bool) -> None:
        super().__init__(tree, edits, every_path)
        self._made: dict[int, PyTree] = {}  # the copy of each holder, by ``id`` of its node
        self._only_checks = False

    def run(self) -> PyTree:
        """Returns the new tree."""
        self._check()

        # All copies are known, empty, before one is filled: they may lead to each other.
        leading = [
            node for node in self.graph.nodes if node.leads and _is_mutable(node.place.stored)
        ]
        for node in leading:
            stored = node.place.stored
            self._made[id(node)] = handler_of(stored).empty(stored)
        for node in leading:
            handler_of(node.place.stored).fill(self._made[id(node)], self.contents_after(node))

        root = self.graph.root
        if isinstance(self.tree, (Object, list, dict)):
            return self.result(root)
        return self.content_after(root, root.place)

    def _check(self) -> None:
        """Raises the first error of the edit, by computing everything but for copies."""
        self._only_checks = True
        for node in self.graph.nodes:
            stored = node.place.stored
            if node.chosen and isinstance(stored, Variable):
                like(stored, self.value_after(node))
            elif node.chosen and _is_mutable(stored):
                self.contents_after(node)
        self._only_checks = False

    def result(self, node: Holder) -> PyTree:
        """Returns a holder's copy, or the holder itself."""
        if self._only_checks:
            return node.place.stored
        if id(node) not in self._made:
            self._made[id(node)] = self._copied(node)
        return self._made[id(node)]

    def _copied(self, node: Holder) -> PyTree:
        """Returns a Variable's copy; anything else, which leads nowhere, itself."""
        stored = node.place.stored
        if isinstance(stored, Variable) and node.leads:
            return like(stored, self.value_after(node))
        if isinstance(stored, ArrayAttribute):  # asked for by a copy of what holds it
            return like(stored, stored_value(stored))
        return stored


def _is_mutable(holder: PyTree) -> bool:
    return handler_of(holder).mutable


# --- in place -------------------------------------------------------------------------------------


class _Changing(_TreeEdit):
    """Edits of the tree in place."""

    def __init__(self, tree: PyTree, edits: Sequence[Edit], every_path: bool) -> None:
        super().__init__(tree, edits, every_path)
        self._writes: list[tuple[Variable, PyTree]] = []

    def run(self, journal: Journal) -> PyTree:
        """Changes the tree, with notes in the journal for undoing; returns it."""
        self._check_reached_once()
        changes = [
            (place, pairs) for place, pairs in self._changes() if _is_change(place.stored, pairs)
        ]
        for place, _ in changes:
            if isinstance(place.stored, Object):
                what = f"{format_path(place.path)}, a {type(place.stored).__name__},"
                check_structural_write(place.stored, what)

        done: Journal = []
        try:
            for variable, value in self._writes:
                _write(variable, value, done)
            for place, pairs in changes:
                _refill(place.stored, pairs, done)
        except BaseException:
            undo(done)
            raise
        journal.extend(done)
        return self.tree

    def _changes(self) -> list[tuple[Place, Pairs]]:
        """Returns the new contents of mutable holders; those of Variables go to ``_writes``."""
        changes: list[tuple[Place, Pairs]] = []
        for node in self.graph.nodes:
            if not node.chosen:
                continue
            stored = node.place.stored
            if isinstance(stored, Variable):
                accepted = like(stored, self.value_after(node))
                self._writes.append((stored, stored_value(accepted)))
            elif _is_mutable(stored):
                changes.append((node.place, self.contents_after(node)))
            else:
                raise errors.root_in_place(self.tree)
        return changes

    def result(self, node: Holder) -> PyTree:
        """Returns the holder itself."""
        return node.place.stored

    def items_after(self, node: Holder, child: Place) -> list[PyTree]:
        """See ``_TreeEdit.items_after``; an array over an array attribute is written into it."""
        items = super().items_after(node, child)
        if len(items) != 1 or not isinstance(child.stored, ArrayAttribute):
            return items
        (item,) = items
        if not isinstance(item, ARRAY_TYPES):
            return items
        self._writes.append((child.stored, as_value(item, "array")))
        return [child.stored]

    def _check_reached_once(self) -> None:
        """Raises if an edit at one path of an object would show at another."""
        paths: dict[int, list[Path]] = {}
        for node in self.graph.nodes:
            paths.setdefault(id(node.place.holder), []).append(node.place.path)

        for node in self.graph.nodes:
            first, *others = paths[id(node.place.holder)]
            if node.chosen and others:
                raise errors.would_untie_in_place(first, others[0])


def _is_change(holder: PyTree, pairs: Pairs) -> bool:
    """Whether a holder has other contents than these."""
    old = parts(holder)
    if len(old) != len(pairs):
        return True
    return any(
        key != new_key or item is not new_item
        for (key, item), (new_key, new_item) in zip(old, pairs, strict=True)
    )


def _write(variable: Variable, value: PyTree, done: Journal) -> None:
    old = write(variable, value)
    done.append(lambda: write(variable, old))


def _refill(holder: PyTree, pairs: Pairs, done: Journal) -> None:
    """Gives a mutable holder other contents."""
    old = parts(holder)

    def fill(pairs: Pairs) -> None:
        handler_of(holder).fill(holder, pairs)
        note_structural_change(holder)

    fill(pairs)
    done.append(lambda: fill(old))
