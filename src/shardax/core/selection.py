# SPDX-License-Identifier: Apache-2.0
"""Selections: which parts of a model are meant, to read them, replace them, or put more beside.

A *selection* is a tree together with some of its places (``core.select_places``). It starts as the
whole tree, ``sx.select(model)``. *Narrowing* methods return a selection of other places at or below
the present ones; *reading* methods return what stands there; *editing* methods return a new tree
(``core.select_edit``). Selections never change.

What is reached by several paths is one place, and an edit replaces it wherever it stands, so ties
stay ties; ``select(tree, every_path=True)`` takes every path for itself, and an edit then unties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardax.core.errors import EmptySelectionError, SelectionCountError, SelectionError
from shardax.core.select_combine import HOLE
from shardax.core.select_edit import OLD, Items, Journal, edit_tree, undo
from shardax.core.select_places import Place, root_place
from shardax.core.select_predicates import with_path
from shardax.core.select_split import split_places
from shardax.core.selected import Selected

_UNSET: Any = object()


def select(tree: Any, *, every_path: bool = False) -> Selection:
    """Starts a selection: of the whole tree, to be narrowed.

    Args:
        tree: A Module, a Variable, or any pytree with or without these.
        every_path: Whether an object that is reached by several paths is selected at each of them
            by itself. An edit then changes it at the selected paths only, which unties it.

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


class Selection(Selected):
    """Some places of a tree, which it reads and edits; made by ``select`` and narrowed from there.

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

    # --- replacing -------------------------------------------------------------------------------

    def set(self, value: Any, *, inplace: bool = False, allow_empty: bool = False) -> Any:
        """Puts a value at every selected place; an object is then one object in all of them.

        Args:
            value: Anything that could be assigned there.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            EmptySelectionError: If nothing is selected.
            SelectionError: If the value cannot stand there, such as an array for a Variable.

        Example:
            >>> import shardax as sx
            >>> model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
            >>> sx.select(model).at(lambda m: m.activation).set("gelu").activation
            'gelu'
        """
        return self._edit(lambda place: [value], inplace, allow_empty)

    def apply(
        self, fn: Callable[..., Any], *, inplace: bool = False, allow_empty: bool = False
    ) -> Any:
        """Replaces what is selected by what a function makes of it, called once for each place.

        Args:
            fn: A function of the value, or of path and value.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Example:
            >>> import shardax as sx
            >>> config = {"rate": 0.1, "layers": [0.2, "relu"]}
            >>> sx.select(config).at_instances_of(float).apply(lambda rate: rate / 2)
            {'rate': 0.05, 'layers': [0.1, 'relu']}
        """
        made = with_path(fn)
        return self._edit(lambda p: [made(p.path, self._read(p))], inplace, allow_empty)

    def set_all(
        self, values: Iterable[Any], *, inplace: bool = False, allow_empty: bool = False
    ) -> Any:
        """Puts one value at each selected place, in the order of ``get_all``.

        Args:
            values: As many as places are selected.
            inplace: Whether to change the tree itself.
            allow_empty: Whether the selection may be empty.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionCountError: If there are more values or fewer than places.

        Example:
            >>> import shardax as sx
            >>> sx.select((1, "a", 2)).at_instances_of(int).set_all([3, 4])
            (3, 'a', 4)
        """
        given = list(values)
        if len(given) != len(self):
            raise SelectionCountError(
                f"set_all was given {len(given)} value{'' if len(given) == 1 else 's'} for "
                f"{len(self)} place{'' if len(self) == 1 else 's'}; nothing was changed. This is a "
                f"{self._found()}"
            )
        remaining = iter(given)
        return self._edit(lambda place: [next(remaining)], inplace, allow_empty)

    def set_by_path(self, values: Mapping[Any, Any], *, inplace: bool = False) -> Any:
        """Puts values at paths at or below what is selected.

        Args:
            values: Path, from the root of the tree and as for ``at_keypaths``, to value.
            inplace: Whether to change the tree itself.

        Returns:
            The new tree; in place, the tree.

        Raises:
            SelectionPathError: If there is no such place.

        Example:
            >>> import shardax as sx
            >>> sx.select({"a": 1, "b": [2, 3]}).set_by_path({"['b'][0]": 5})
            {'a': 1, 'b': [5, 3]}
        """
        return self.at_keypaths(*values).set_all(values.values(), inplace=inplace)

    # --- putting beside, removing ----------------------------------------------------------------

    def insert_before(
        self,
        value: Any = _UNSET,
        *,
        make: Callable[..., Any] | None = None,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> Any:
        """Puts something before each selected item of a list or tuple, as ``insert_after`` does."""
        return self._insert(value, make, lambda new: [new, OLD], inplace, allow_empty)

    def insert_after(
        self,
        value: Any = _UNSET,
        *,
        make: Callable[..., Any] | None = None,
        inplace: bool = False,
        allow_empty: bool = False,
    ) -> Any:
        """Puts something after each selected item of a list or tuple, such as a layer in a row.

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

    def remove(self, *, inplace: bool = False, allow_empty: bool = False) -> Any:
        """Removes what is selected: items of lists and tuples, dict entries, attributes.

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

    # --- taking apart ----------------------------------------------------------------------------

    def partition(self) -> tuple[Any, Any]:
        """Splits the tree in two: what is selected, and the rest, each with holes for the other.

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
        held, rest = split_places(self._tree, self._places, self._every_path)
        return self._without(rest), self._without(held)

    def _without(self, places: Iterable[Place]) -> Any:
        """Returns the tree with holes at some places."""
        edits = [(place, [HOLE]) for place in places]
        return edit_tree(self._tree, edits, self._every_path) if edits else self._tree

    # --- in place --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def edit(self) -> Iterator[Selection]:
        """Gives a selection whose edits change the tree in place; all are undone by an exception.

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

    # ---------------------------------------------------------------------------------------------

    def _insert(
        self,
        value: Any,
        make: Callable[..., Any] | None,
        arrange: Callable[[Any], Items],
        inplace: bool,
        allow_empty: bool,
    ) -> Any:
        if (value is _UNSET) == (make is None):
            raise SelectionError(
                "Say what to insert either as a value, which is then the same object everywhere: "
                "insert_after(layer); or by a function that makes one for each place: "
                "insert_after(make=lambda old: Layer())."
            )
        if make is None:
            return self._edit(lambda place: arrange(value), inplace, allow_empty)
        made = with_path(make)
        return self._edit(
            lambda place: arrange(made(place.path, self._read(place))), inplace, allow_empty
        )

    def _edit(self, items: Callable[[Place], Items], inplace: bool, allow_empty: bool) -> Any:
        if not self._places:
            if allow_empty:
                return self._tree
            raise EmptySelectionError(
                f"Nothing is selected in this {type(self._tree).__name__}, so the edit would do "
                f"nothing. Print the selection to see the tree; or, if that can be, pass "
                f"allow_empty=True."
            )
        journal = [] if inplace and self._journal is None else self._journal
        edits = [(place, items(place)) for place in self._places]
        return edit_tree(self._tree, edits, self._every_path, journal)
