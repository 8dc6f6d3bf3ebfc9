# SPDX-License-Identifier: Apache-2.0
"""Selections: parts of a tree to read and edit.

A *selection* is a tree together with some of its places (``_select.places``). It starts as the
whole tree, ``sx.select(model)``. *Narrowing* methods return a selection of other places at or below
the present ones (``_select.narrowing``); *reading* methods return what is there; *editing* methods
return a new tree (``_select.edit``). Selections never change. The places are remembered, not what
is there: a value that was written since is read as it is now, and a place that was removed since is
an error.

What is reached by several paths is one place, and an edit replaces it wherever it stands, so ties
stay ties; ``select(tree, every_path=True)`` takes every path for itself, and an edit then unties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Self

from shardax._core.graph.paths import Path, PyTree
from shardax._select import errors
from shardax._select.combine import HOLE
from shardax._select.edit import OLD, Items, Journal, edit_tree, undo
from shardax._select.holders import split_places
from shardax._select.narrowing import Narrowing
from shardax._select.places import Place, root_place
from shardax._select.predicates import with_path
from shardax._select.printing import selection_text

_UNSET: Any = object()


def select(tree: PyTree, *, every_path: bool = False) -> Selection:
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


class Selection(Narrowing):
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

    __slots__ = ()

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

    def get_all(self) -> tuple[PyTree, ...]:
        """Returns all selected values, in order."""
        return tuple(map(self._read, self._places))

    def get_by_path(self) -> dict[Path, PyTree]:
        """Returns all selected values, by path."""
        return {place.path: self._read(place) for place in self._places}

    def keypaths(self) -> tuple[Path, ...]:
        """Returns the path of every selected place; of several paths the first."""
        return tuple(place.path for place in self._places)

    def count(self) -> int:
        """Returns the number of selected places."""
        return len(self._places)

    def assert_count(self, n: int) -> Self:
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
            raise errors.wrong_count(n, self._description())
        return self

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[PyTree]:
        return map(self._read, self._places)

    def __repr__(self) -> str:
        return selection_text(self._tree, self._places, self._every_path)

    # --- replacing --------------------------------------------------------------------------------

    def set(self, value: PyTree, *, inplace: bool = False, allow_empty: bool = False) -> PyTree:
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
        fn: Callable[..., PyTree],
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
        if with_index:
            pairs = enumerate(self._places)
            values = iter([fn(index, self._read(place)) for index, place in pairs])
        else:
            function = with_path(fn)
            values = iter([function(place.path, self._read(place)) for place in self._places])

        tree = self._edit(lambda place: [next(values)], inplace, allow_empty)
        if not keep_selected:
            return tree
        everything = Selection(tree, (root_place(tree),), self._every_path, self._journal)
        return everything.at_keypaths(*self.keypaths())

    def set_all(
        self, values: Iterable[PyTree], *, inplace: bool = False, allow_empty: bool = False
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
            count = len(new_values)
            raise errors.wrong_count_of_values(count, len(self), self._description())
        remaining = iter(new_values)
        return self._edit(lambda place: [next(remaining)], inplace, allow_empty)

    def set_by_path(
        self,
        values: Mapping[Path | str, PyTree] | Callable[[Path], PyTree],
        *,
        inplace: bool = False,
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
        value: PyTree = _UNSET,
        *,
        make: Callable[..., PyTree] | None = None,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> PyTree:
        """Inserts before each selected item, as ``insert_after`` does."""
        return self._insert(value, make, lambda new: [new, OLD], inplace, allow_empty)

    def insert_after(
        self,
        value: PyTree = _UNSET,
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

    def _without(self, places: Iterable[Place]) -> PyTree:
        """Returns the tree with holes at some places."""
        edits = [(place, [HOLE]) for place in places]
        if not edits:
            return self._tree
        return edit_tree(self._tree, edits, self._every_path)

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

    # --- editing ----------------------------------------------------------------------------------

    def _insert(
        self,
        value: PyTree,
        make: Callable[..., PyTree] | None,
        arrange: Callable[[PyTree], Items],
        inplace: bool,
        allow_empty: bool,
    ) -> PyTree:
        """Inserts a value, or what a function makes for each place, beside what is there."""
        if (value is _UNSET) == (make is None):
            raise errors.value_or_make()
        if make is None:
            return self._edit(lambda place: arrange(value), inplace, allow_empty)

        make_one = with_path(make)

        def items(place: Place) -> Items:
            return arrange(make_one(place.path, self._read(place)))

        return self._edit(items, inplace, allow_empty)

    def _edit(self, items: Callable[[Place], Items], inplace: bool, allow_empty: bool) -> PyTree:
        """Puts the items of each place there; returns the new tree, or the tree."""
        if not self._places:
            if allow_empty:
                return self._tree
            raise errors.nothing_selected(self._tree)

        journal = self._journal
        if inplace and journal is None:
            journal = []
        edits = [(place, items(place)) for place in self._places]
        return edit_tree(self._tree, edits, self._every_path, journal)
