# SPDX-License-Identifier: Apache-2.0
"""Edits of trees, functional or in place, and combining partitions.

An *edit* gives, for each selected place (``_select.places``), the *items* that take the place of
what is there: ``[new]`` replaces it, ``[]`` removes it, ``[OLD, new]`` inserts after it.

A functional edit copies the holders that lead to an edited place, each once, and no others. So what
was shared is shared in the new tree, cycles stay cycles, and every object that leads to no edit is
the same object in both trees. An array attribute belongs to its Module, so a copy gets a hidden
Variable of its own. An edit in place changes the holders of edited places only. Either way
everything is computed, and refused, before anything changes.

How many items may replace one is up to the container's handler: a *sequence* (list, tuple) takes
any number; what is *keyed* (attributes, dict entries) can lose an item; everything else
(NamedTuple, partial, other pytree nodes) has a fixed number of parts.

A *hole* stands in one part of a partitioned tree for what is in another part. It is a pytree
without leaves, and configuration inside a Module, so a part goes through JAX's functions like any
tree: only its own data is there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import jax

from shardax._core.frames import check_structural_write, local, owner_here, resolve
from shardax._core.frozen import Slot
from shardax._core.graph.handlers import Pairs, handler_of
from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.graph.static import EMPTY, exact_key
from shardax._core.object import Object, epoch
from shardax._core.stored import ARRAY_HOLDERS, ARRAY_TYPES, class_of, holds_arrays, to_stored
from shardax._core.values import as_value
from shardax._core.variable import ArrayAttribute, Variable
from shardax._select import places


def arranged(place: places.Place, new: Sequence[tuple[places.Place, Sequence[object]]]) -> Pairs:
    """Returns the parts of a container after an edit."""
    content = place.content
    size = handler_of(content).size
    pairs: list[tuple[Any, Any]] = []
    for child, items in new:
        steps = child.path[len(place.path) :]
        if size != "any":
            check_count(child, items, content, removable=size == "shrinks")
        pairs.extend((steps[0] if steps else None, item) for item in items)
    return pairs


# What to write instead, by whether the part is called.
_IN_PLACE_OF_BOTH = {
    True: "Let one thing do both: .apply(lambda old: sx.nn.Sequential(old, new))",
    False: "Set one value in place of both: .set(value)",
}
_IN_PLACE = {
    True: "Set something that does nothing: .set(sx.nn.Sequential())",
    False: "Set another value: .set(value)",
}


def check_count(
    child: places.Place, items: Sequence[object], content: object, removable: bool
) -> None:
    """Raises if a place cannot hold so many items."""
    if len(items) == 1 or (not items and removable):
        return
    where, kind = format_path(child.path), class_of(content).__name__
    is_called = callable(child.content)
    if items:
        raise places.SelectionError(
            f"Nothing can be inserted beside {where}: it is part of a {kind}, not an item of a "
            f"list or tuple. Nothing was changed. {_IN_PLACE_OF_BOTH[is_called]}."
        )
    raise places.SelectionError(
        f"{where} cannot be removed: it is part of a {kind}, which has a fixed number of parts. "
        f"Nothing was changed. {_IN_PLACE[is_called]}."
    )


def is_mutable(value: object) -> bool:
    """Whether a holder's children can be changed."""
    return handler_of(value).mutable


# --- holes and combining --------------------------------------------------------------------------


class Hole:
    """Placeholder for something in another part of a tree.

    Example:
        >>> import shardax as sx
        >>> first, rest = sx.select({"a": 1, "b": 2}).at_keypaths("['a']").partition()
        >>> first, sx.combine(first, rest)
        ({'a': 1, 'b': Hole()}, {'a': 1, 'b': 2})
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hole)

    def __hash__(self) -> int:
        return hash(Hole)

    def __repr__(self) -> str:
        return "Hole()"


jax.tree_util.register_pytree_node(Hole, lambda hole: ((), None), lambda _, children: HOLE)
HOLE: Final = Hole()


def is_hole(stored: object) -> bool:
    """Whether a stored value is a hole or an array attribute's."""
    if isinstance(stored, ArrayAttribute):
        stored = stored._here()._value
    return isinstance(stored, Hole)


def hole_for(stored: object) -> Any:
    """Returns the hole for a stored value."""
    return ArrayAttribute._make(HOLE, EMPTY, owner_here()) if holds_arrays(stored) else HOLE


def combine(*parts: object) -> PyTree:
    """Puts the parts of a partitioned tree together.

    What stands in one part only is taken as it is, so the objects are those of the parts. Holders
    that stand in several parts, such as the Modules around what was selected, are made anew.

    Args:
        *parts: Trees of the same form; what is a hole in one must stand in another.

    Returns:
        The tree.

    Raises:
        SelectionError: If something is missing from all parts, or two parts differ in what both
            have.

    Example:
        >>> import shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> kernels, rest = sx.select(model).at_instances_of(sx.Param).partition()
        >>> sx.combine(kernels, rest).up.kernel is model.up.kernel
        True
    """
    if not parts:
        raise places.SelectionError(
            "combine() was given nothing: pass all parts, combine(selected, rest)."
        )
    merge = _Merge(parts)
    whole = merge.merged(parts, ())
    missing = merge.missing
    if missing:
        listed = ", ".join(map(format_path, missing[:5]))
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise places.SelectionError(
            f"No part has anything at {listed}{more}: every part has a hole there. Pass all parts "
            f"that partition returned."
        )
    return whole


class _Merge:
    """Merges the parts of a tree."""

    # Holders that stand at one place in several parts are a *group*: they become one new holder. A
    # holder that is in one part only, but leads to a group (through a cycle) or to a hole, is
    # copied too; every other one stays.

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.missing: list[Path] = []  # where all parts have a hole
        self._groups: dict[int, tuple[Any, ...]] = {}
        self._made: dict[int, Any] = {}
        self._leading: set[int] = set()
        self._group(parts, ())
        for part in parts:
            holes = places.search(
                (places.root_place(part),), lambda place: is_hole(place.stored), every_path=False
            )
            graph = places.HolderGraph(part, holes, every_path=False)
            graph.spread([n for n in graph.nodes if id(n.place.holder) in self._groups])
            self._leading |= {id(node.place.holder) for node in graph.nodes if node.leads}

    def _group(self, values: tuple[object, ...], path: Path) -> None:
        """Finds the groups at and below a place."""
        present = _distinct(values)
        first = present[0]
        if len(present) < 2 or id(first) in self._groups:
            return
        if any(type(value) is not type(first) for value in present):
            raise _conflict(path, present)
        if isinstance(first, Variable) or is_mutable(first):
            self._groups.update((id(value), present) for value in present)
        for key, below in _aligned(present, path):
            self._group(below, _step(path, key))

    def merged(self, values: tuple[object, ...], path: Path):
        """Returns the merged value of a place."""
        present = _distinct(values)
        if len(present) == 1:
            present = self._groups.get(id(present[0]), present)
        first = present[0]
        if is_hole(first):
            self.missing.append(path)
        is_holder = isinstance(first, Variable) or is_mutable(first)
        if len(present) == 1 and is_holder and id(first) not in self._leading:
            return first
        if not is_holder:
            return self._immutable(present, path)
        merged_value = self._made.get(id(first))
        if merged_value is not None:
            return merged_value
        if isinstance(first, Variable):
            ((_, value),) = self._below(present, path)
            merged_value = first._make(
                as_value(value, "array"), first._here()._metadata, owner_here()
            )
            self._made.update((id(v), merged_value) for v in present)
            return merged_value
        handler = handler_of(first)
        merged_value = handler.empty(first)
        self._made.update((id(v), merged_value) for v in present)
        handler.fill(merged_value, self._below(present, path))
        return merged_value

    def _immutable(self, present: tuple[object, ...], path: Path):
        old = _aligned(present, path)
        pairs = [(key, self.merged(below, _step(path, key))) for key, below in old]
        same = all(new is below[0] for (_, new), (_, below) in zip(pairs, old, strict=True))
        if not pairs or (same and len(present) == 1):
            return present[0]
        return handler_of(present[0]).remake(present[0], pairs)

    def _below(self, present: tuple[object, ...], path: Path) -> Pairs:
        return [
            (key, self.merged(below, _step(path, key))) for key, below in _aligned(present, path)
        ]


def _distinct(values: tuple[object, ...]) -> tuple[Any, ...]:
    """Returns the distinct values except holes, else one hole."""
    present = {id(value): value for value in values if not is_hole(value)}
    return tuple(present.values()) or values[:1]


def _aligned(present: tuple[object, ...], path: Path) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the children of like containers, by key."""
    contents = [dict(places.parts(value)) for value in present]
    first, *more_contents = contents
    if any(more.keys() != first.keys() for more in more_contents):
        raise _conflict(path, present)
    if more_contents and not first and not all(_same(value, present[0]) for value in present):
        raise _conflict(path, present)
    return [(key, tuple(content[key] for content in contents)) for key in first]


def _step(path: Path, key: object) -> Path:
    return path if key is None else (*path, key)


def _same(first: object, second: object) -> bool:
    try:
        return exact_key(first) == exact_key(second)
    except TypeError:
        return False


def _conflict(path: Path, present: tuple[object, ...]) -> places.SelectionError:
    listed = " and ".join(f"{value!r}"[:80] for value in present)
    return places.SelectionError(
        f"The parts differ at {format_path(path)}: {listed}. Where one part has something, all "
        f"others must have a hole; combine what partition returned, with values changed at most."
    )


# --- edits ----------------------------------------------------------------------------------------

OLD: Any = object()  # among the items of an edit: what stands there now
Items = Sequence[Any]
Journal = list[Callable[[], None]]  # how to undo what was done, in the order of doing


def edit_tree(
    tree: object,
    edits: Sequence[tuple[places.Place, Items]],
    every_path: bool,
    journal: Journal | None = None,
) -> PyTree:
    """Edits a tree."""
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
    """One edit of one tree, base of both ways."""

    def __init__(self, tree, edits: Sequence[tuple[places.Place, Items]], every_path: bool) -> None:
        self.tree = tree
        self.every_path = every_path
        self.items: Mapping[Hashable, Items] = {p.key(every_path): items for p, items in edits}
        parents = {key for key, items in self.items.items() if any(item is OLD for item in items)}
        self.graph = places.HolderGraph(tree, [place for place, _ in edits], every_path, parents)
        for place, _ in edits:
            if place.key(every_path) not in self.graph.met:
                raise _unmet(tree, place, every_path)

    def result(self, node: places.Holder) -> PyTree:
        """Returns the holder after the edit."""
        raise NotImplementedError

    def content(self, node: places.Holder, place: places.Place) -> Leaf:
        """Returns the content of an immutable place, with its parts edited."""
        new = self.parts(node, place)
        if all(len(items) == 1 and items[0] is child.stored for child, items in new):
            return place.content
        return handler_of(place.content).remake(place.content, arranged(place, new))

    def contents(self, node: places.Holder) -> Pairs:
        """Returns the contents of a mutable holder after the edit."""
        new = self.parts(node, node.place)
        if isinstance(node.place.stored, Object):
            new = [(child, [_stored(child, item) for item in items]) for child, items in new]
        return arranged(node.place, new)

    def value(self, node: places.Holder) -> Leaf:
        """Returns the value of a Variable after the edit."""
        if isinstance(node.place.stored, ARRAY_HOLDERS):
            return self.content(node, node.place)
        ((_, value),) = arranged(node.place, self.parts(node, node.place))
        return value

    def parts(
        self, node: places.Holder, place: places.Place
    ) -> list[tuple[places.Place, list[Any]]]:
        """Returns every child of a place with its items after the edit."""
        return [(child, self.after(node, child)) for child in places.children(place)]

    def after(self, node: places.Holder, child: places.Place) -> list[Any]:
        """Returns the items at a place afterwards."""
        items = self.items.get(child.key(self.every_path), (OLD,))
        if isinstance(node.place.stored, Object):
            for item in items:
                _check_no_loss(child, item)
        return [self._item(node, child, item) for item in items]

    def _item(self, node: places.Holder, child: places.Place, item: object):
        if item is OLD:
            return self._old(node, child)
        return hole_for(child.stored) if item is HOLE else item

    def _old(self, node: places.Holder, child: places.Place):
        return self.result(node.below[child.path]) if child.is_holder else self.content(node, child)


def _unmet(tree: object, place: places.Place, every_path: bool) -> places.SelectionError:
    """Returns the error for a place not met by the walk."""
    where = format_path(place.path)
    current = places.locate(places.root_place(tree), place.path)
    if current is not None and current.key(every_path) == place.key(every_path):
        return places.SelectionError(
            f"What is at {where} lies within something else that is selected, so an edit could "
            f"not change both. Nothing was changed. Edit them one after the other."
        )
    return places.SelectionError(
        f"The tree has no place {where} any more: it was changed after it was selected. Nothing "
        f"was changed. Select again."
    )


def _check_no_loss(child: places.Place, item: object) -> None:
    """Raises if an array is to replace a Variable."""
    stored = child.stored
    if (
        isinstance(item, ARRAY_TYPES)
        and isinstance(stored, (Variable, Slot))
        and not holds_arrays(stored)
    ):
        kind = getattr(stored, "variable_type", type(stored)).__name__
        form = f"slot of a {kind}" if isinstance(stored, Slot) else kind
        ways = (
            "Put Variables in first, sx.bind(model, variables)"
            if isinstance(stored, Slot)
            else f"Select the value of the {kind}, .at(lambda v: v.value); or give one like it, "
            f".apply(lambda v: v.replace(array))"
        )
        raise places.SelectionError(
            f"An array cannot take the place of the {form} at {format_path(child.path)}: its type "
            f"and metadata would be lost. Nothing was changed. {ways}; or give a new one, "
            f"sx.{kind}(array)."
        )


def _stored(child: places.Place, item: object):
    """Returns an item as the model stores it."""
    if item is child.stored or item is HOLE or isinstance(item, Object):
        return item
    return to_stored(item, f"what stands at {format_path(child.path)}")


def _like(variable: Variable, value: object) -> Variable:
    """Returns a Variable of the same type and metadata with another value."""
    if isinstance(variable, ArrayAttribute):
        return variable._make(as_value(value, "array"), variable._metadata, owner_here())
    return variable.replace(value)


class _Copying(_Edit):
    """An edit into a new tree."""

    def run(self) -> PyTree:
        """Returns the new tree."""
        self._check()
        leading = [n for n in self.graph.nodes if n.leads and is_mutable(n.place.stored)]
        handlers = [handler_of(node.place.stored) for node in leading]
        self._made = {
            id(node): handler.empty(node.place.stored)
            for node, handler in zip(leading, handlers, strict=True)
        }
        for node, handler in zip(leading, handlers, strict=True):
            handler.fill(self._made[id(node)], self.contents(node))
        root = self.graph.root
        if isinstance(self.tree, (Object, list, dict)):
            return self.result(root)
        return self.content(root, root.place)

    def _check(self) -> None:
        """Raises the first error of the edit in place."""
        self._checking = True
        for node in self.graph.nodes:
            stored = node.place.stored
            if node.chosen and isinstance(stored, Variable):
                _like(stored, self.value(node))
            elif node.chosen and is_mutable(stored):
                self.contents(node)
        self._checking = False

    def result(self, node: places.Holder) -> PyTree:
        """Returns a holder's copy, or the holder itself."""
        if self._checking:
            return node.place.stored
        new_variable = self._made.get(id(node))
        if new_variable is None:
            new_variable = self._made[id(node)] = self._variable(node)
        return new_variable

    def _variable(self, node: places.Holder):
        stored = node.place.stored
        if isinstance(stored, Variable) and node.leads:
            return _like(stored, self.value(node))
        if isinstance(stored, ArrayAttribute):  # asked for by a copy of what holds it
            return _like(stored, resolve(stored, local.frame)._value)
        return stored


class _Changing(_Edit):
    """An edit of the tree in place."""

    def run(self, journal: Journal) -> PyTree:
        """Changes the tree, with notes in the journal for undoing."""
        self._check_single()
        self._writes: list[tuple[Variable, Any]] = []
        changes: list[tuple[places.Place, Pairs]] = []
        for node in self.graph.nodes:
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
                description = f"{format_path(place.path)}, a {type(place.stored).__name__},"
                check_structural_write(place.stored, description)
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

    def result(self, node: places.Holder) -> PyTree:
        """Returns the holder itself."""
        return node.place.stored

    def after(self, node: places.Holder, child: places.Place) -> list[Any]:
        """Returns the items at a place afterwards."""
        items = super().after(node, child)
        attribute = child.stored
        is_write = len(items) == 1 and isinstance(items[0], ARRAY_TYPES)
        if is_write and isinstance(attribute, ArrayAttribute):  # as assigning over an array does
            self._writes.append((attribute, as_value(items[0], "array")))
            return [attribute]
        return items

    def _check_single(self) -> None:
        """Raises if an edit in place would untie paths."""
        paths: dict[int, list[Path]] = {}
        for node in self.graph.nodes:
            paths.setdefault(id(node.place.holder), []).append(node.place.path)
        for node in self.graph.nodes:
            first, *more_paths = paths[id(node.place.holder)]
            if node.chosen and more_paths:
                raise places.SelectionError(
                    f"What is to be edited stands in one object that is reached by both "
                    f"{format_path(first)} and {format_path(more_paths[0])}, so it cannot be "
                    "changed in place at one of the two. Leave inplace out: in the new tree they "
                    "are two."
                )


def _fixed_root(tree: object) -> places.SelectionError:
    return places.SelectionError(
        f"What is to be edited is the tree itself, or a part of it that is in no Module, list or "
        f"dict: a {type(tree).__name__} cannot be changed in place. Leave inplace out, and use "
        f"the tree that is returned."
    )


def _differ(holder: object, pairs: Pairs) -> bool:
    old = places.parts(holder)
    return len(old) != len(pairs) or any(
        key != new_key or item is not new_item
        for (key, item), (new_key, new_item) in zip(old, pairs, strict=True)
    )


def _write(variable: Variable, value: object, done: Journal) -> None:
    old = variable._here()._value
    variable._write(value)
    done.append(lambda: variable._write(old))


def _refill(holder: object, pairs: Pairs, done: Journal) -> None:
    handler, old = handler_of(holder), places.parts(holder)

    def put(pairs: Pairs) -> None:
        handler.fill(holder, pairs)
        if isinstance(holder, Object) and holder._marked:
            epoch.advance(holder)

    put(pairs)
    done.append(lambda: put(old))


def undo(journal: Journal) -> None:
    """Undoes the changes in a journal."""
    for back in reversed(journal):
        back()
    journal.clear()
