# SPDX-License-Identifier: Apache-2.0
"""Narrowing a selection: methods that return a selection of other places of the same tree.

A selection never changes. It holds its tree and its places, each once, by ``Place.key``. No
selected place lies within another: a search does not go on below what it has found, and what users
name themselves is checked.
"""

from __future__ import annotations

import difflib
import operator
import re
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Self

from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._core.object import Shown
from shardax._core.stored import ARRAY_HOLDERS, class_of
from shardax._select import errors, predicates
from shardax._select.accessors import Accessor, accessed
from shardax._select.edit import Journal
from shardax._select.holders import split_places
from shardax._select.places import ABSENT, Place, children, is_leaf, locate, read, rest_of, search

# A dict key that a path shows as an attribute: ``['name']`` for ``.name``.
_QUOTED_NAME = re.compile(r"""\[(['"])([^\W\d]\w*)\1\]""")

_MOST_LISTED = 12  # how many places an error lists


class Narrowing(Shown):
    """A tree and some of its places; base of ``Selection`` with the methods that narrow it.

    Args:
        tree: The whole tree.
        places: The selected places.
        every_path: Whether what is reached by several paths is a place at each of them.
        journal: Takes notes for undoing, if all edits are in place (``Selection.edit``).
    """

    __slots__ = ("_every_path", "_journal", "_places", "_tree")

    def __init__(
        self,
        tree: PyTree,
        places: Iterable[Place],
        every_path: bool,
        journal: Journal | None = None,
    ) -> None:
        by_key: dict[Hashable, Place] = {}
        for place in places:
            by_key.setdefault(place.key(every_path), place)
        self._tree = tree
        self._places = tuple(by_key.values())
        self._every_path = every_path
        self._journal = journal

    def _narrowed(self, places: Iterable[Place]) -> Self:
        """Returns a selection of other places of the tree."""
        return type(self)(self._tree, places, self._every_path, self._journal)

    def _search(self, test: predicates.Test, innermost: bool, into_values: bool = True) -> Self:
        """Returns a selection of the outermost, or innermost, places with a true test."""
        return self._narrowed(
            search(
                self._places,
                test,
                every_path=self._every_path,
                innermost=innermost,
                into_values=into_values,
            )
        )

    def at(self, accessor: Accessor) -> Self:
        """Selects the parts returned by an accessor.

        Args:
            accessor: Given what is selected, each in turn, returns a part of it, or several as a
                list or tuple: ``lambda block: (block.attn, block.mlp)``. What it is given only
                stands for the real thing, so pointing at a value does not materialise it.

        Raises:
            SelectionError: If it returns something that is not a part of what it was given, or
                parts that lie within each other.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at(lambda m: (m.up.kernel.value, m.down)).keypaths()
            (('up', 'kernel', 'value'), ('down',))
        """
        if not callable(accessor):
            raise errors.not_an_accessor(accessor)

        places: list[Place] = []
        for place in self._places:
            places.extend(accessed(place, accessor))
        _check_disjoint(places)
        return self._narrowed(places)

    def at_instances_of(
        self, cls: type | types.UnionType | tuple[type, ...], *, innermost: bool = False
    ) -> Self:
        """Selects the outermost instances of a class.

        Args:
            cls: A class, a union ``A | B``, or a tuple of classes. Arrays in Variables are found
                too: a value that is still lazy counts as a ``jax.Array``, and is not materialised.
            innermost: Select, of instances within one another, the inner ones.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at_instances_of(sx.nn.Linear).keypaths()
            (('gate',), ('up',), ('down',))
        """
        classes = predicates.classes_in(cls)
        if classes is None:
            raise errors.not_a_class(cls)
        return self._search(
            lambda place: predicates.is_instance(place, classes),
            innermost,
            into_values=predicates.may_be_values(classes),
        )

    def at_subtrees_where(self, fn: predicates.Condition, *, innermost: bool = False) -> Self:
        """Selects the outermost parts with a true test.

        Args:
            fn: A function of the value, or of path and value; or a filter, as ``sx.state`` takes.
                It is asked about configuration and about arrays, too.
            innermost: Select, of parts within one another, the inner ones.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at_subtrees_where(lambda x: getattr(x, "shape", 0) == (2, 4)).count()
            2
            >>> sx.select(mlp).at_subtrees_where(sx.PathContains("up")).keypaths()
            (('up',),)
        """
        return self._search(predicates.to_test(fn), innermost)

    def at_equal_to(self, value: PyTree) -> Self:
        """Selects parts equal to a value, in type too.

        So ``1``, ``True`` and ``1.0`` are three values.

        Args:
            value: Configuration; an array, compared with its dtype and shape; or an object, which
                equals only itself.

        Example:
            >>> import shardax as sx
            >>> sx.select({"a": 1, "b": True, "c": (1.0, 1)}).at_equal_to(1).keypaths()
            (('a',), ('c', 1))
        """
        return self._search(predicates.equals(value), innermost=False)

    def at_keypaths(self, *paths: Path | str) -> Self:
        """Selects the parts at some paths, in their order.

        Args:
            *paths: From the root of the tree; as tuples, or as text: ``".layers[0].kernel"``.

        Raises:
            SelectionError: If there is no such place at or below what is selected, or if one lies
                within another.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at_keypaths(".up.kernel", ("down", "kernel")).count()
            2
        """
        places = [self._at_path(path) for path in paths]
        _check_disjoint(places)
        return self._narrowed(places)

    def at_children(self) -> Self:
        """Selects the direct parts of the selection: attributes, items, entries.

        Example:
            >>> import jax, shardax as sx
            >>> model = sx.nn.Sequential(sx.nn.RMSNorm(2), jax.nn.relu)
            >>> sx.select(model).at(lambda m: m.layers).at_children().keypaths()
            (('layers', 0), ('layers', 1))
        """
        places: list[Place] = []
        for place in self._places:
            places.extend(child for child in children(place) if child.named)
        return self._narrowed(places)

    def at_pytree_leaves(self) -> Self:
        """Selects the leaves of the selection, as ``jax.tree.leaves`` finds them.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select({"mlp": mlp, "rate": 0.1}).at_pytree_leaves().count()
            4
        """
        return self._search(is_leaf, innermost=False)

    def at_childless(self) -> Self:
        """Selects all without parts: leaves, configuration, empty containers.

        Example:
            >>> import shardax as sx
            >>> sx.select({"a": 1, "b": [(), "relu"]}).at_childless().get_all()
            (1, (), 'relu')
        """
        return self._search(lambda place: not children(place), innermost=False)

    def where(self, fn: predicates.Condition) -> Self:
        """Keeps the parts with a true test.

        Args:
            fn: A function of the value, or of path and value; or a filter.

        Example:
            >>> import shardax as sx
            >>> params = sx.select(sx.nn.MLP(2, 4, rngs=sx.Rngs(0))).at_instances_of(sx.Param)
            >>> params.where(sx.PathContains("up")).keypaths()
            (('up', 'kernel'),)
            >>> params.where(lambda param: param.shape[0] == 4).keypaths()
            (('down', 'kernel'),)
        """
        test = predicates.to_test(fn)
        return self._narrowed(place for place in self._places if test(place))

    def pick_nth(self, n: int) -> Self:
        """Keeps one place.

        Args:
            n: Which, from 0; negative from the end.

        Raises:
            SelectionError: If there are not so many.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at_instances_of(sx.nn.Linear).pick_nth(-1).keypaths()
            (('down',),)
        """
        count = len(self._places)
        if not -count <= operator.index(n) < count:
            raise errors.no_nth_place(n, self._description())
        return self._narrowed([self._places[n]])

    def refine(self, fn: Callable[[PyTree], Narrowing]) -> Self:
        """Selects, in each selected part, by a function of that part.

        Args:
            fn: Given what is selected, each in turn, returns a selection of it.

        Raises:
            SelectionError: If it returns anything else.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.Sequential(*(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)) for _ in range(2)))
            >>> mlps = sx.select(model).at_instances_of(sx.nn.MLP)
            >>> mlps.refine(lambda mlp: sx.select(mlp).at_instances_of(sx.nn.Linear).pick_nth(-1))
            Selection of 2 places in a Sequential:
            ...
        """
        places: list[Place] = []
        for place in self._places:
            value = self._read(place)
            inner = fn(value)
            if not isinstance(inner, Narrowing):
                raise errors.not_a_selection_of_the_part(value, place.path, inner)
            if inner._tree is not value:
                other = "a selection of something else"
                raise errors.not_a_selection_of_the_part(value, place.path, other)
            places.extend(_within(place, below, value) for below in inner._places)
        return self._narrowed(places)

    def invert(self) -> Self:
        """Selects the largest parts without anything selected.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> rest = sx.select(mlp).at_instances_of(sx.nn.Linear).invert()
            >>> rest.keypaths()
            (('activation',),)
        """
        _, remaining = split_places(self._tree, self._places, self._every_path)
        return self._narrowed(remaining)

    # --- places and values ------------------------------------------------------------------------

    def _at_path(self, path: Path | str) -> Place:
        """Returns the place at a path, at or below the selection."""
        target = _for_lookup(path)
        starts = [(place, rest_of(target, place.path)) for place in self._places]

        # First what is selected itself: what a method wraps has the path of the method.
        for place, remaining in starts:
            if remaining is not None and not remaining:
                return place
        for place, remaining in starts:
            match = None if remaining is None else locate(place, remaining)
            if match is not None:
                return match

        text = target if isinstance(target, str) else format_path(target)
        raise errors.no_place(text, self._most_like(text), self._description())

    def _most_like(self, text: str) -> str | None:
        """Returns the path of the place whose path is most like a text, if one is like it."""
        names: list[str] = []

        def note_children(place: Place) -> bool:
            names.extend(format_path(child.path) for child in children(place))
            return False

        search(self._places, note_children, every_path=self._every_path)
        matches = difflib.get_close_matches(text, names, n=1)
        return matches[0] if matches else None

    def _read(self, place: Place) -> PyTree:
        """Returns the value at a place, materialized."""
        value = read(place)
        if value is ABSENT:
            raise errors.place_is_gone(place.path)
        return value

    def _description(self) -> str:
        """Returns what is selected, for errors."""
        kind = type(self._tree).__name__
        count = len(self._places)
        if count == 0:
            return f"selection of nothing in a {kind}. Narrow it by other means."

        lines = [f"selection of {errors.count_of('place', count)} in a {kind}:"]
        for place in self._places[:_MOST_LISTED]:
            lines.append(f"  {format_path(place.path)}: {class_of(place.content).__name__}")
        if count > _MOST_LISTED:
            lines.append(f"  ... and {count - _MOST_LISTED} more")
        return "\n".join(lines)


def _check_disjoint(places: Iterable[Place]) -> None:
    """Raises if one of some places lies within another."""
    paths = {place.path for place in places}
    for path in paths:
        for end in range(len(path)):
            if path[:end] in paths:
                raise errors.within_another(path[:end], path)


def _for_lookup(path: Path | str) -> Path | str:
    """Returns a path in the form of lookups: a tuple, or its text as ``format_path`` writes it."""
    if not isinstance(path, str):
        return tuple(path)
    if path == format_path(()):
        return ()
    path = _QUOTED_NAME.sub(r".\2", path)
    return path if path.startswith((".", "[")) else f".{path}"


def _within(place: Place, below: Place, value: PyTree) -> Place:
    """Returns a place of a selected part as one of the whole tree.

    Args:
        place: The place of the part.
        below: A place of the part, whose path begins there.
        value: The part.
    """
    path = (*place.path, *below.path)
    above = (*place.above, id(place.holder), *below.above)

    # What has no identity of its own in the whole tree is known by the holder of the part.
    in_value = place.inside or isinstance(place.stored, ARRAY_HOLDERS)
    if in_value or (below.holder is value and not place.is_holder):
        local = (*place.local, *below.path)
        return below._replace(path=path, holder=place.holder, local=local, inside=in_value)
    return below._replace(path=path, above=above)
