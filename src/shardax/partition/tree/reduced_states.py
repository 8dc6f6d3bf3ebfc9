# SPDX-License-Identifier: Apache-2.0
"""Reduced states: boxes of an optimizer's state that do not fit the names in them.

A *reduced state* comes about as an optimizer maps over boxed parameters: each array of its state is
in a box with the parameter's names, which some do not fit: row and column statistics (Adafactor)
lack a dimension, a history has one more, and where there is nothing to keep stands one number. Such
a box is laid out by the dimensions of its *owner* that its sizes tell apart, or else replicated,
with the diagnostic ``reduced-state``. The owner is another box of the tree that is alike in
everything but the value, with a shorter path that ends in the same steps (``params.layers.up`` and
``opt[0].v_row.layers.up``; for a parameter at the top, all sizes must be among its own). Without an
owner the names are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from shardax._core.graph.paths import Path
from shardax.partition import findings
from shardax.partition.errors import Diagnostic
from shardax.partition.tree.inventory import LeafInfo

T = TypeVar("T")


class PathEnds(Generic[T]):
    """An index of items by the ends of their paths."""

    def __init__(self, items: Iterable[tuple[Iterable[Path], T]]) -> None:
        self._items_by_end: dict[Path, list[T]] = {}
        for paths, item in items:
            for end in _ends_of(paths):
                self._items_by_end.setdefault(end, []).append(item)

    def of_longest_end(self, paths: Iterable[Path], fits: Callable[[T, Path], bool]) -> list[T]:
        """Returns the fitting items of the longest common path end."""
        for end in sorted(_ends_of(paths), key=len, reverse=True):
            matches = [item for item in self._items_by_end.get(end, ()) if fits(item, end)]
            if matches:
                return matches
        return []


def _ends_of(paths: Iterable[Path]) -> set[Path]:
    """Returns all ends of some paths, the paths themselves and the empty one included."""
    return {path[start:] for path in paths for start in range(len(path) + 1)}


def dimensions_of_state(
    shape: tuple[int, ...], parameter: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Returns the parameter's dimension of each dimension of an optimizer's state.

    None stands for a new dimension, and None in place of all if that is unclear. Three forms occur:
    the parameter's shape, leading dimensions before it (a history), and one dimension less (row and
    column statistics), where the missing one must be clear from the sizes.

    Args:
        shape: The shape of an array of the state.
        parameter: The shape of the parameter.

    Example:
        >>> from shardax import extend
        >>> extend.dimensions_of_state((8, 4), (8, 4)), extend.dimensions_of_state((4,), (8, 4))
        ((0, 1), (1,))
        >>> extend.dimensions_of_state((10, 8, 4), (8, 4)), extend.dimensions_of_state((3,), (8, 4))
        ((None, 0, 1), None)
    """
    extra = len(shape) - len(parameter)
    if extra >= 0 and shape[extra:] == parameter:
        return (*((None,) * extra), *range(len(parameter)))
    if extra != -1:
        return None

    missing = [
        index
        for index in range(len(parameter))
        if (*parameter[:index], *parameter[index + 1 :]) == shape
    ]
    if len(missing) != 1:
        return None
    return tuple(index for index in range(len(parameter)) if index != missing[0])


def reduced_states(
    leaves: Sequence[LeafInfo], diagnostics: Sequence[Diagnostic]
) -> dict[int, tuple[LeafInfo, Diagnostic]]:
    """Returns the reduced states, with the names that fit, by their index among the leaves.

    Args:
        leaves: All leaves of a tree.
        diagnostics: Those of their layout by the names in their boxes.
    """
    # Names do not fit an array of another rank, nor one whose sizes cannot be divided.
    unfit_paths = {each.path for each in diagnostics if each.code == "indivisible"}
    for leaf in leaves:
        if leaf.box is not None and leaf.axes is not None:
            rank = len(leaf.axes)
            unfit_paths.update(info.path for info in leaf.arrays if len(info.shape) != rank)
    if not unfit_paths:
        return {}

    wrong_paths = {each.path for each in diagnostics if each.severity == "error"} | unfit_paths
    owners = PathEnds(
        ((leaf.path,), leaf)
        for leaf in leaves
        if leaf.box is not None and len(leaf.arrays) == 1 and leaf.arrays[0].path not in wrong_paths
    )

    reduced: dict[int, tuple[LeafInfo, Diagnostic]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.box is None:
            continue
        owner = _owner_of(leaf, owners, unfit_paths)
        if owner is not None:
            reduced[index] = _reduced_state(leaf, owner)
    return reduced


def _owner_of(
    leaf: LeafInfo, owners: PathEnds[LeafInfo], unfit_paths: Collection[Path]
) -> LeafInfo | None:
    """Returns the parameter's leaf of a state that does not fit its names, or None."""
    unfit = [info for info in leaf.arrays if info.path in unfit_paths]
    if not unfit:
        return None

    candidates = owners.of_longest_end([leaf.path], lambda owner, end: _may_own(owner, leaf, end))
    if len({owner.arrays[0].shape for owner in candidates}) != 1:
        return None

    # An array of the parameter's rank that does not fit has a wrong size, unless it is one number.
    rank = len(candidates[0].arrays[0].shape)
    if all(len(info.shape) != rank or math.prod(info.shape) == 1 for info in unfit):
        return candidates[0]
    return None


def _may_own(owner: LeafInfo, leaf: LeafInfo, common_end: Path) -> bool:
    """Whether a box may be the parameter of a state, by paths and sizes."""
    if len(owner.path) >= len(leaf.path) or owner.box != leaf.box:
        return False
    if common_end:
        return True

    # Where no step of the paths is common, all sizes must be sizes of the owner.
    if len(owner.path) > 1:
        return False
    sizes = set(owner.arrays[0].shape)
    return all(sizes.issuperset(info.shape) or math.prod(info.shape) == 1 for info in leaf.arrays)


def _reduced_state(leaf: LeafInfo, owner: LeafInfo) -> tuple[LeafInfo, Diagnostic]:
    """Returns the leaf with the names that fit, or without names, and its diagnostic."""
    owner_shape = owner.arrays[0].shape
    shapes = {info.shape for info in leaf.arrays}
    shape = next(iter(shapes))

    dimensions = dimensions_of_state(shape, owner_shape) if len(shapes) == 1 else None
    names = None
    if dimensions is not None:
        owner_names = owner.names_of(owner.arrays[0])
        assert owner_names is not None  # names that the state does not fit
        names = tuple(None if index is None else owner_names[index] for index in dimensions)

    is_clear = names is not None or math.prod(shape) == 1
    severity = "info" if is_clear else "warning"
    diagnostic = findings.reduced_state(
        leaf.path, leaf.axes or (), shape, names, owner.path, owner_shape, severity
    )
    return leaf._replace(axes=names), diagnostic
