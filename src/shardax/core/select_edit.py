# SPDX-License-Identifier: Apache-2.0
"""Edits of a tree: a new tree that shares what was not edited, or the same tree changed in place.

An *edit* says, for each chosen place (``core.select_survey``), which *items* take the place of what
stands there: ``[new]`` replaces it, ``[]`` removes it, ``[OLD, new]`` puts something after it.

The functional edit copies the holders that lead to an edited place, each once, and no others. So
what was shared is shared in the new tree, cycles stay cycles, and every object that leads to no
edit is the same object in both trees. An array attribute belongs to its Module, so a copy gets a
hidden Variable of its own. The edit in place changes the holders of edited places only. Either way
everything is computed, and refused, before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardax.core import epoch
from shardax.core.arraylike import as_value
from shardax.core.containers import _ARRAYS, _HIDDEN, box, is_boxed
from shardax.core.errors import SelectionError, StaleSelectionError
from shardax.core.frames import check_structural_write, local, owner_here, resolve
from shardax.core.node import Object
from shardax.core.paths import Path, format_path
from shardax.core.select_assemble import (
    Pairs,
    arranged,
    assembled,
    check_count,
    empty_like,
    fill,
    is_mutable,
    stored_in,
)
from shardax.core.select_combine import HOLE, hole_for
from shardax.core.select_places import Place, children, locate, root_place
from shardax.core.select_survey import Node, Survey
from shardax.core.slots import Slot
from shardax.core.variables import ArrayAttribute, Variable

OLD: Any = object()
"""Among the items of an edit: what stands there now."""

Items = Sequence[Any]
Journal = list[Callable[[], None]]
"""How to undo what was done, in the order in which it was done."""


def edit_tree(
    tree: Any,
    edits: Sequence[tuple[Place, Items]],
    every_path: bool,
    journal: Journal | None = None,
) -> Any:
    """Edits a tree.

    Args:
        tree: The tree.
        edits: (place, items) pairs, at least one, for places that do not lie within each other.
        every_path: Whether what is reached by two paths is two places.
        journal: Given, the tree is changed in place, and how to undo it is appended here.

    Returns:
        The new tree, or in place the same.

    Raises:
        SelectionError: If an item cannot stand where it is to stand.
        StaleSelectionError: If a place is gone.
    """
    for place, items in edits:
        if place.is_holder and not place.path:
            check_count(place, items, tree, removable=False)
            if journal is not None:
                raise _fixed_root(tree)
            return items[0]
    if journal is None:
        return _Copying(tree, edits, every_path).run()
    return _Changing(tree, edits, every_path).run(journal)


class _Edit:
    """One edit of one tree: what both ways have in common."""

    def __init__(self, tree: Any, edits: Sequence[tuple[Place, Items]], every_path: bool) -> None:
        self.tree = tree
        self.every_path = every_path
        self.items: Mapping[Hashable, Items] = {p.key(every_path): items for p, items in edits}
        kept = {key for key, items in self.items.items() if any(item is OLD for item in items)}
        self.survey = Survey(tree, [place for place, _ in edits], every_path, kept)
        for place, _ in edits:
            if place.key(every_path) not in self.survey.met:
                raise _unmet(tree, place, every_path)

    def result(self, node: Node) -> Any:
        """Returns what stands for a holder after the edit."""
        raise NotImplementedError

    def content(self, node: Node, place: Place) -> Any:
        """Returns what stands at an immutable place, with its parts edited."""
        new = self.parts(node, place)
        if all(len(items) == 1 and items[0] is child.stored for child, items in new):
            return place.content
        return assembled(place.content, arranged(place, new))

    def contents(self, node: Node) -> Pairs:
        """Returns what a mutable holder stores after the edit."""
        new = self.parts(node, node.place)
        if isinstance(node.place.stored, Object):
            new = [(child, [_stored(child, item) for item in items]) for child, items in new]
        return arranged(node.place, new)

    def value(self, node: Node) -> Any:
        """Returns the value of a Variable after the edit."""
        if isinstance(node.place.stored, _HIDDEN):
            return self.content(node, node.place)
        ((_, value),) = arranged(node.place, self.parts(node, node.place))
        return value

    def parts(self, node: Node, place: Place) -> list[tuple[Place, list[Any]]]:
        """Returns, for everything directly below a place, the items that stand there afterwards."""
        return [(child, self.after(node, child)) for child in children(place)]

    def after(self, node: Node, child: Place) -> list[Any]:
        """Returns the items that stand at a place afterwards."""
        items = self.items.get(child.key(self.every_path), (OLD,))
        if isinstance(node.place.stored, Object):
            for item in items:
                _check_no_loss(child, item)
        return [self._item(node, child, item) for item in items]

    def _item(self, node: Node, child: Place, item: Any) -> Any:
        if item is OLD:
            return self._old(node, child)
        return hole_for(child.stored) if item is HOLE else item

    def _old(self, node: Node, child: Place) -> Any:
        return self.result(node.below[child.path]) if child.is_holder else self.content(node, child)


def _unmet(tree: Any, place: Place, every_path: bool) -> SelectionError:
    """Returns the error for a selected place that is not in the tree, or within another one."""
    where = format_path(place.path)
    found = locate(root_place(tree), place.path)
    if found is not None and found.key(every_path) == place.key(every_path):
        return SelectionError(
            f"What is at {where} lies within something else that is selected, so an edit could "
            f"not change both. Nothing was changed. Edit them one after the other."
        )
    return StaleSelectionError(
        f"The tree has no place {where} any more: it was changed after it was selected. Nothing "
        f"was changed. Select again."
    )


def _check_no_loss(child: Place, item: Any) -> None:
    """Raises if an array is to stand for a Variable of a model, whose type would be lost."""
    stored = child.stored
    if isinstance(item, _ARRAYS) and isinstance(stored, (Variable, Slot)) and not is_boxed(stored):
        kind = getattr(stored, "variable_type", type(stored)).__name__
        form = f"slot of a {kind}" if isinstance(stored, Slot) else kind
        ways = (
            "Put Variables in first, sx.bind(model, variables)"
            if isinstance(stored, Slot)
            else f"Select the value of the {kind}, .at(lambda v: v.value); or give one like it, "
            f".apply(lambda v: v.replace(array))"
        )
        raise SelectionError(
            f"An array cannot take the place of the {form} at {format_path(child.path)}: its type "
            f"and metadata would be lost. Nothing was changed. {ways}; or give a new one, "
            f"sx.{kind}(array)."
        )


def _stored(child: Place, item: Any) -> Any:
    """Returns an item as the model stores it."""
    if item is child.stored or item is HOLE or isinstance(item, Object):
        return item
    return box(item, f"what stands at {format_path(child.path)}")


def _like(variable: Variable[Any], value: Any) -> Variable[Any]:
    """Returns a Variable of the same type and metadata with another value."""
    if isinstance(variable, ArrayAttribute):
        return variable._make(as_value(value, "array"), variable._metadata, owner_here())
    return variable.replace(value)


class _Copying(_Edit):
    """An edit that makes a new tree."""

    def run(self) -> Any:
        """Returns the new tree."""
        leading = [n for n in self.survey.nodes if n.leads and is_mutable(n.place.stored)]
        self._made = {id(node): empty_like(node.place.stored) for node in leading}
        for node in leading:
            fill(self._made[id(node)], self.contents(node))
        root = self.survey.root
        if isinstance(self.tree, (Object, list, dict)):
            return self.result(root)
        return self.content(root, root.place)

    def result(self, node: Node) -> Any:
        """Returns the copy of a holder, or the holder itself where it can be shared."""
        made = self._made.get(id(node))
        if made is None:
            made = self._made[id(node)] = self._variable(node)
        return made

    def _variable(self, node: Node) -> Any:
        stored = node.place.stored
        if isinstance(stored, Variable) and node.leads:
            return _like(stored, self.value(node))
        if isinstance(stored, ArrayAttribute):  # asked for by a copy of what holds it
            return _like(stored, resolve(stored, local.frame)._value)
        return stored


class _Changing(_Edit):
    """An edit that changes the tree in place."""

    def run(self, journal: Journal) -> Any:
        """Changes the tree and returns it; what undoes it is appended to the journal."""
        self._check_single()
        self._writes: list[tuple[Variable[Any], Any]] = []
        changes: list[tuple[Place, Pairs]] = []
        for node in self.survey.nodes:
            stored = node.place.stored
            if not node.chosen:
                continue
            if isinstance(stored, Variable):
                self._writes.append((stored, _like(stored, self.value(node))._value))
            elif is_mutable(stored):
                changes.append((node.place, self.contents(node)))
            else:
                raise _fixed_root(self.tree)
        changes = [(place, pairs) for place, pairs in changes if _differ(place.stored, pairs)]
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

    def result(self, node: Node) -> Any:
        """Returns the holder, which stays."""
        return node.place.stored

    def after(self, node: Node, child: Place) -> list[Any]:
        """Returns the items that stand at a place afterwards."""
        items = super().after(node, child)
        attribute = child.stored
        is_write = len(items) == 1 and isinstance(items[0], _ARRAYS)
        if is_write and isinstance(attribute, ArrayAttribute):  # as assigning over an array does
            self._writes.append((attribute, as_value(items[0], "array")))
            return [attribute]
        return items

    def _check_single(self) -> None:
        """Raises if one holder would have to be changed at one of its paths only."""
        paths: dict[int, list[Path]] = {}
        for node in self.survey.nodes:
            paths.setdefault(id(node.place.holder), []).append(node.place.path)
        for node in self.survey.nodes:
            first, *others = paths[id(node.place.holder)]
            if node.chosen and others:
                raise SelectionError(
                    f"What is to be edited stands in one object that is reached by both "
                    f"{format_path(first)} and {format_path(others[0])}, so it cannot be changed "
                    f"in place at one of the two. Leave inplace out: in the new tree they are two."
                )


def _fixed_root(tree: Any) -> SelectionError:
    return SelectionError(
        f"What is to be edited is the tree itself, or a part of it that is in no Module, list or "
        f"dict: a {type(tree).__name__} cannot be changed in place. Leave inplace out, and use "
        f"the tree that is returned."
    )


def _differ(holder: Any, pairs: Pairs) -> bool:
    old = stored_in(holder)
    return len(old) != len(pairs) or any(
        key != new_key or item is not new_item
        for (key, item), (new_key, new_item) in zip(old, pairs, strict=True)
    )


def _write(variable: Variable[Any], value: Any, done: Journal) -> None:
    old = variable._here()._value
    variable._write(value)
    done.append(lambda: variable._write(old))


def _refill(holder: Any, pairs: Pairs, done: Journal) -> None:
    old = stored_in(holder)

    def put(pairs: Pairs) -> None:
        fill(holder, pairs)
        if isinstance(holder, Object) and holder._marked:
            epoch.advance()

    put(pairs)
    done.append(lambda: put(old))


def undo(journal: Journal) -> None:
    """Undoes what a journal tells of."""
    for back in reversed(journal):
        back()
    journal.clear()
