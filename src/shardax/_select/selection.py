# SPDX-License-Identifier: Apache-2.0
"""Selections: parts of a tree to read and edit.

A *selection* is a tree together with some of its places (``_select.places``). It starts as the
whole tree, ``sx.select(model)``. *Narrowing* methods return a selection of other places at or below
the present ones; *reading* methods return what is there; *editing* methods return a new tree
(``_select.edit``). Selections never change. No selected place lies within another. The places are
remembered, not what is there: a value that was written since is read as it is now, and a place that
was removed since is an error.

What is reached by several paths is one place, and an edit replaces it wherever it stands, so ties
stay ties; ``select(tree, every_path=True)`` takes every path for itself, and an edit then unties.
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import re
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from typing import Any

from shardax._core.graph.paths import Leaf, Path, PyTree, format_path
from shardax._core.object import Shown
from shardax._core.stored import ARRAY_HOLDERS, class_of
from shardax._select import predicates
from shardax._select.edit import HOLE, OLD, Items, Journal, edit_tree, undo
from shardax._select.places import (
    ABSENT,
    Place,
    SelectionError,
    children,
    is_leaf,
    locate,
    read,
    rest_of,
    root_place,
    search,
    selection_text,
    split_places,
)

# A dict key that a path shows as an attribute: ``['name']`` for ``.name``.
_QUOTED_NAME = re.compile(r"""\[(['"])([^\W\d]\w*)\1\]""")

_MOST = 12  # how many places an error lists


_UNSET: Any = object()


def select(tree: object, *, every_path: bool = False) -> Selection:
    """Starts a selection: of the whole tree, to be narrowed.

    Args:
        tree: A Module, a Variable, or any pytree with or without these.
        every_path: Whether an object that is reached by several paths is selected at each of them
            by itself. An edit then changes it at the selected paths only, which unties it.

    Returns:
        The selection of the whole tree.

    Example:
        >>> import jax, shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> linears = sx.select(model).at_instances_of(sx.nn.Linear)
        >>> linears
        Selection of 3 places in a MLP:
            MLP(
        >     gate=Linear(...)
        >     up=Linear(...)
        >     down=Linear(...)
              activation='silu'
            )
        >>> wrapped = linears.apply(lambda linear: sx.nn.Sequential(linear, jax.nn.relu))
        >>> wrapped.up.layers[0] is model.up
        True
    """
    return Selection(tree, (root_place(tree),), every_path)


class Selection(Shown):
    """Some places of a tree, to be read and edited.

    An edit returns a new tree in which only the Modules on the way to an edited place are new:
    every other Variable and Module is the same object in both. With ``inplace=True`` the tree
    itself is changed and returned. An edit of an empty selection is an error unless
    ``allow_empty=True``; then the tree is returned as it is. Whatever an edit refuses, it refuses
    before anything has changed.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
        >>> kernels = sx.select(model).at_instances_of(sx.Param).where(sx.PathContains("up"))
        >>> doubled = kernels.apply(lambda kernel: kernel.replace(2 * kernel))
        >>> bool((doubled.up.kernel == 2 * model.up.kernel).all()), doubled.gate is model.gate
        (True, True)
    """

    __slots__ = ("_every_path", "_journal", "_places", "_tree")

    def __init__(
        self,
        tree: PyTree,
        places: Iterable[Place],
        every_path: bool,
        journal: Journal | None = None,
    ) -> None:
        self._tree = tree
        self._every_path = every_path
        self._journal = journal
        self._places: tuple[Place, ...] = self._once(places)

    def _once(self, places: Iterable[Place]) -> tuple[Place, ...]:
        """Returns the places, each once."""
        first: dict[Hashable, Place] = {}
        for place in places:
            first.setdefault(place.key(self._every_path), place)
        return tuple(first.values())

    def _narrowed(self, places: Iterable[Place]) -> Selection:
        return Selection(self._tree, places, self._every_path, self._journal)

    def _search(
        self, test: predicates.Test, innermost: bool, into_values: bool = True
    ) -> Selection:
        return self._narrowed(
            search(
                self._places,
                test,
                every_path=self._every_path,
                innermost=innermost,
                into_values=into_values,
            )
        )

    # --- narrowing --------------------------------------------------------------------------------

    def at(self, accessor: Callable[[Any], object]) -> Selection:
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
            raise SelectionError(
                f"at() takes a function that points at parts, at(lambda m: m.layers[0]), but was "
                f"given {accessor!r}. For paths there is at_keypaths('.layers[0]')."
            )
        selection = self._narrowed(
            p for place in self._places for p in predicates.accessed(place, accessor)
        )
        selection._check_disjoint()
        return selection

    def at_instances_of(self, cls: object, *, innermost: bool = False) -> Selection:
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
            raise SelectionError(
                f"{cls!r} is not a class, a union or a tuple of classes. For a filter or a "
                f"function use at_subtrees_where."
            )
        return self._search(
            lambda place: predicates.is_instance(place, classes),
            innermost,
            predicates.may_be_values(classes),
        )

    def at_subtrees_where(self, fn: object, *, innermost: bool = False) -> Selection:
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

    def at_equal_to(self, value: object) -> Selection:
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

    def at_keypaths(self, *paths: Path | str) -> Selection:
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
        selection = self._narrowed([self._at_path(path) for path in paths])
        selection._check_disjoint()
        return selection

    def at_children(self) -> Selection:
        """Selects the direct parts of the selection: attributes, items, entries.

        Example:
            >>> import jax, shardax as sx
            >>> model = sx.nn.Sequential(sx.nn.RMSNorm(2), jax.nn.relu)
            >>> sx.select(model).at(lambda m: m.layers).at_children().keypaths()
            (('layers', 0), ('layers', 1))
        """
        return self._narrowed(
            child for place in self._places for child in children(place) if child.named
        )

    def at_pytree_leaves(self) -> Selection:
        """Selects the leaves of the selection, as ``jax.tree.leaves`` finds them.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select({"mlp": mlp, "rate": 0.1}).at_pytree_leaves().count()
            4
        """
        return self._search(is_leaf, innermost=False)

    def at_childless(self) -> Selection:
        """Selects all without parts: leaves, configuration, empty containers.

        Example:
            >>> import shardax as sx
            >>> sx.select({"a": 1, "b": [(), "relu"]}).at_childless().get_all()
            (1, (), 'relu')
        """
        return self._search(lambda place: not children(place), innermost=False)

    def where(self, fn: object) -> Selection:
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

    def pick_nth(self, n: int) -> Selection:
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
        if not -len(self._places) <= operator.index(n) < len(self._places):
            raise SelectionError(f"There is no place {n} in this: {self._found()}")
        return self._narrowed([self._places[n]])

    def refine(self, fn: Callable[[PyTree], Selection]) -> Selection:
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
            if not isinstance(inner, Selection) or inner._tree is not value:
                returned = (
                    "a selection of something else" if isinstance(inner, Selection) else inner
                )
                raise SelectionError(
                    f"refine needs a selection of the {type(value).__name__} at "
                    f"{format_path(place.path)}, but the function returned {returned!r}. Write "
                    f"refine(lambda part: sx.select(part).at...)."
                )
            places.extend(_within(place, below, value) for below in inner._places)
        return self._narrowed(places)

    def invert(self) -> Selection:
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

    # --- reading ----------------------------------------------------------------------------------

    @property
    def tree(self) -> PyTree:
        """The whole tree, as it was given."""
        return self._tree

    def get(self) -> PyTree:
        """Returns the one selected value.

        Raises:
            SelectionError: If nothing is selected, or more than one place.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(mlp).at(lambda m: m.up).get() is mlp.up
            True
        """
        self.assert_count(1)
        return self._read(self._places[0])

    def get_all(self) -> tuple[Any, ...]:
        """Returns all selected values, in order."""
        return tuple(map(self._read, self._places))

    def get_by_path(self) -> dict[Path, Leaf]:
        """Returns all selected values, by path."""
        return {place.path: self._read(place) for place in self._places}

    def keypaths(self) -> tuple[Path, ...]:
        """Returns the path of every selected place; of several paths the first."""
        return tuple(place.path for place in self._places)

    def count(self) -> int:
        """Returns the number of selected places."""
        return len(self._places)

    def assert_count(self, n: int) -> Selection:
        """Checks the number of selected places, and returns the selection.

        Args:
            n: How many there should be.

        Raises:
            SelectionError: If there are not; shows which were found.

        Example:
            >>> import shardax as sx
            >>> mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> _ = sx.select(mlp).at_instances_of(sx.nn.Linear).assert_count(3)
        """
        if len(self._places) != n:
            raise SelectionError(
                f"There should be {n} place{'' if n == 1 else 's'}, but this is a {self._found()}"
            )
        return self

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, self._places)

    def __repr__(self) -> str:
        return selection_text(self._tree, self._places, self._every_path)

    def _found(self) -> str:
        """Describes the selection, for errors."""
        places = self._places
        kind = type(self._tree).__name__
        if not places:
            return f"selection of nothing in a {kind}. Narrow it by other means."
        lines = [
            f"\n  {format_path(p.path)}: {class_of(p.content).__name__}" for p in places[:_MOST]
        ]
        more = f"\n  ... and {len(places) - _MOST} more" if len(places) > _MOST else ""
        count = f"{len(places)} place{'' if len(places) == 1 else 's'}"
        return f"selection of {count} in a {kind}:{''.join(lines)}{more}"

    def _read(self, place: Place) -> Any:
        value = read(place)
        if value is ABSENT:
            raise SelectionError(
                f"The tree has no place {format_path(place.path)} any more: it was changed after "
                f"it was selected. Select again."
            )
        return value

    # --- replacing --------------------------------------------------------------------------------

    def set(self, value: object, *, inplace: bool = False, allow_empty: bool = False) -> PyTree:
        """Puts a value at every selected place.

        An object is then one object in all of them.

        Args:
            value: Anything that could be assigned there.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionError: If nothing is selected, or if the value cannot stand there, such as an
                array for a Variable.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(model).at(lambda m: m.activation).set("gelu").activation
            'gelu'
        """
        return self._edit(lambda place: [value], inplace, allow_empty)

    def apply(
        self,
        fn: Callable[..., object],
        *,
        with_index: bool = False,
        keep_selected: bool = False,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> PyTree:
        """Replaces each selected value by a function of it.

        The function is called once for each place.

        Args:
            fn: A function of the value, or of path and value.
            with_index: Whether it is a function of index and value instead, where the index
                counts the selected places from 0.
            keep_selected: Whether to return a selection of the same places in the new tree.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree; or a selection in it.

        Example:
            >>> import shardax as sx
            >>> config = {"rate": 0.1, "layers": [0.2, "relu"]}
            >>> rates = sx.select(config).at_instances_of(float)
            >>> rates.apply(lambda rate: rate / 2)
            {'rate': 0.05, 'layers': [0.1, 'relu']}
            >>> rates.apply(lambda i, rate: i, with_index=True, keep_selected=True).get_all()
            (0, 1)
        """
        function: Callable[..., PyTree] = fn if with_index else predicates.with_path(fn)
        counted = iter(range(len(self)))

        def items(place: Place) -> Items:
            return [function(next(counted) if with_index else place.path, self._read(place))]

        tree = self._edit(items, inplace, allow_empty)
        if not keep_selected:
            return tree
        whole = Selection(tree, (root_place(tree),), self._every_path, self._journal)
        return whole.at_keypaths(*self.keypaths())

    def set_all(
        self, values: Iterable[object], *, inplace: bool = False, allow_empty: bool = False
    ) -> PyTree:
        """Puts one value at each selected place, in the order of ``get_all``.

        Args:
            values: As many as places are selected.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionError: If there are more values or fewer than places.

        Example:
            >>> import shardax as sx
            >>> sx.select((1, "a", 2)).at_instances_of(int).set_all([3, 4])
            (3, 'a', 4)
        """
        new_values = list(values)
        if len(new_values) != len(self):
            raise SelectionError(
                f"set_all was given {len(new_values)} value{'' if len(new_values) == 1 else 's'} "
                f"for {len(self)} place{'' if len(self) == 1 else 's'}; nothing was changed. "
                f"This is a {self._found()}"
            )
        remaining = iter(new_values)
        return self._edit(lambda place: [next(remaining)], inplace, allow_empty)

    def set_by_path(
        self, values: Mapping[Any, Any] | Callable[[Path], Any], *, inplace: bool = False
    ) -> PyTree:
        """Puts values at paths at or below the selection.

        Args:
            values: Path, from the root of the tree and as for ``at_keypaths``, to value; or a
                function that returns the value for the path of each selected place.
            inplace: Whether to change the tree itself.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionError: If there is no such place.

        Example:
            >>> import shardax as sx
            >>> sx.select({"a": 1, "b": [2, 3]}).set_by_path({"['b'][0]": 5})
            {'a': 1, 'b': [5, 3]}
            >>> sx.select({"a": 1, "b": 2}).at_children().set_by_path(lambda path: path[0])
            {'a': 'a', 'b': 'b'}
        """
        if callable(values):
            return self.set_all(map(values, self.keypaths()), inplace=inplace)
        return self.at_keypaths(*values).set_all(values.values(), inplace=inplace)

    # --- putting beside, removing -----------------------------------------------------------------

    def insert_before(
        self,
        value: object = _UNSET,
        *,
        make: Callable[..., PyTree] | None = None,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> PyTree:
        """Inserts before each selected item, as ``insert_after`` does."""
        return self._insert(value, make, lambda new: [new, OLD], inplace, allow_empty)

    def insert_after(
        self,
        value: object = _UNSET,
        *,
        make: Callable[..., PyTree] | None = None,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> PyTree:
        """Inserts after each selected item of a list or tuple.

        Args:
            value: What to insert; an object is then one object in all places.
            make: Instead of ``value``: returns what to insert at one place, given what is selected
                there, or the path and that.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionError: If a selected place is not an item of a list or tuple.

        Example:
            >>> import jax, shardax as sx
            >>> model = sx.nn.Sequential(*(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)) for _ in range(2)))
            >>> model = sx.select(model).at_instances_of(sx.nn.Linear).insert_after(jax.nn.relu)
            >>> [layer is jax.nn.relu for layer in model.layers]
            [False, True, False, True]
        """
        return self._insert(value, make, lambda new: [OLD, new], inplace, allow_empty)

    def remove(self, *, inplace: bool = False, allow_empty: bool = False) -> PyTree:
        """Removes the selection: items of lists and tuples, dict entries, attributes.

        Args:
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionError: If it is part of something with a fixed number of parts.

        Example:
            >>> import shardax as sx
            >>> sx.select([1, 2.0, {"a": 3.0}]).at_instances_of(float).remove()
            [1, {}]
        """
        return self._edit(lambda place: [], inplace, allow_empty)

    # --- taking apart -----------------------------------------------------------------------------

    def partition(self) -> tuple[PyTree, PyTree]:
        """Splits the tree into the selection and the rest.

        The objects in both are those of the tree; only the Modules around what is selected are
        copied, once for each part. An object within something selected is in its part, wherever
        else it stands. ``sx.combine`` puts the parts together again.

        Returns:
            (selected, rest). A hole is a pytree without leaves, so ``jax.tree.map`` and transforms
            see in each part just its own.

        Example:
            >>> import jax, shardax as sx
            >>> tree = {"steps": 3, "w": 1.0}
            >>> floats, rest = sx.select(tree).at_instances_of(float).partition()
            >>> sx.combine(jax.tree.map(lambda x: 2 * x, floats), rest)
            {'steps': 3, 'w': 2.0}
        """
        selected, remaining = split_places(self._tree, self._places, self._every_path)
        return self._without(remaining), self._without(selected)

    def _without(self, places: Iterable[Place]):
        """Returns the tree with holes at some places."""
        edits = [(place, [HOLE]) for place in places]
        return edit_tree(self._tree, edits, self._every_path) if edits else self._tree

    # --- in place ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def edit(self) -> Generator[Selection]:
        """Edits the tree in place; an exception undoes all edits.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> with sx.select(model).edit() as editing:
            ...     _ = editing.at(lambda m: m.activation).set("gelu")
            ...     _ = editing.at(lambda m: m.gate).remove()
            >>> model.activation, hasattr(model, "gate")
            ('gelu', False)
        """
        journal: Journal = []
        try:
            yield Selection(self._tree, self._places, self._every_path, journal)
        except BaseException:
            undo(journal)
            raise

    # --- finding places ---------------------------------------------------------------------------

    def _at_path(self, path: Path | str) -> Place:
        """Returns the place at a path, at or below the selection."""
        target = _as_given(path)
        starts = [(place, rest_of(target, place.path)) for place in self._places]
        for place, remaining in starts:  # first what is selected: what a method wraps has its path
            if remaining is not None and not remaining:
                return place
        for place, remaining in starts:
            match = None if remaining is None else locate(place, remaining)
            if match is not None:
                return match
        raise self._no_place(target if isinstance(target, str) else format_path(target))

    def _no_place(self, text: str) -> SelectionError:
        names: list[str] = []

        def note(place: Place) -> bool:
            names.extend(format_path(child.path) for child in children(place))
            return False

        search(self._places, note, every_path=self._every_path)
        near = difflib.get_close_matches(text, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return SelectionError(
            f"There is no place {text} at or below what is selected.{hint} Nothing was changed. "
            f"This is a {self._found()}"
        )

    def _check_disjoint(self) -> None:
        """Raises if a selected place lies within another."""
        paths = {place.path for place in self._places}
        for path in paths:
            for end in range(len(path)):
                if path[:end] in paths:
                    raise SelectionError(
                        f"Both {format_path(path[:end])} and {format_path(path)} would be "
                        f"selected, but one lies within the other, so an edit could not change "
                        f"both. Select them one after the other."
                    )

    # --- editing ----------------------------------------------------------------------------------

    def _insert(
        self,
        value: object,
        make: Callable[..., object] | None,
        arrange: Callable[[Any], Items],
        inplace: bool,
        allow_empty: bool,
    ):
        if (value is _UNSET) == (make is None):
            raise SelectionError(
                "Say what to insert either as a value, which is then the same object everywhere: "
                "insert_after(layer); or by a function that makes one for each place: "
                "insert_after(make=lambda old: Layer())."
            )
        if make is None:
            return self._edit(lambda place: arrange(value), inplace, allow_empty)
        make_one = predicates.with_path(make)
        return self._edit(
            lambda place: arrange(make_one(place.path, self._read(place))), inplace, allow_empty
        )

    def _edit(self, items: Callable[[Place], Items], inplace: bool, allow_empty: bool):
        if not self._places:
            if allow_empty:
                return self._tree
            raise SelectionError(
                f"Nothing is selected in this {type(self._tree).__name__}, so the edit would do "
                f"nothing. Print the selection to see the tree; or, if that can be, pass "
                f"allow_empty=True."
            )
        journal = [] if inplace and self._journal is None else self._journal
        edits = [(place, items(place)) for place in self._places]
        return edit_tree(self._tree, edits, self._every_path, journal)


def _as_given(path: Path | str) -> Path | str:
    """Returns a path in the form of lookups."""
    if not isinstance(path, str):
        return tuple(path)
    if path == format_path(()):
        return ()
    path = _QUOTED_NAME.sub(r".\2", path)
    return path if path.startswith((".", "[")) else f".{path}"


def _within(place: Place, below: Place, value: object) -> Place:
    """Returns a selected part's place as one of the whole tree."""
    path, above = (*place.path, *below.path), (*place.above, id(place.holder), *below.above)
    in_value = place.inside or isinstance(place.stored, ARRAY_HOLDERS)
    if in_value or (below.holder is value and not place.is_holder):
        local = (*place.local, *below.path)
        return below._replace(path=path, holder=place.holder, local=local, inside=in_value)
    return below._replace(path=path, above=above)
