# SPDX-License-Identifier: Apache-2.0
"""Values for the paths of a model, however they are given.

They are given as a State, a mapping by path (nested, or flat with whole paths as keys), containers
arranged like the model, or frozen values, which go to the paths that are their labels.
``merged_values`` joins several of these and refuses what does not belong to the model, all in one
error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from shardax._core import errors
from shardax._core.graph.handlers import PLAIN, handler_of
from shardax._core.graph.paths import Leaf, Path, PyTree
from shardax._core.object import Object
from shardax._core.state.frozen import FrozenVariable
from shardax._core.state.state import State
from shardax._core.variable import Variable


def _any_value_fits(path: Path, value: PyTree) -> tuple[PyTree, str | None]:
    return value, None


def merged_values(
    states: Sequence[object],
    known: Sequence[Path],
    complete: bool = False,
    fit: Callable[[Path, Any], tuple[PyTree, str | None]] = _any_value_fits,
) -> dict[Path, PyTree]:
    """Returns values by paths of a model, joined from several States, mappings and frozen values.

    Args:
        states: What was given; later mappings win.
        known: The paths of the model.
        complete: Whether there must be a value for each of them.
        fit: Called with each path and what was given for it. Returns the value to take, and in
            words what is wrong with it, or None.

    Raises:
        StateMismatchError: If paths are unknown or missing, or values do not fit; all are listed.
        ModuleError: If two frozen values have one label.
    """
    # Formats that only have string keys turn 0 into "0"; such a step is understood where the model
    # has no other reading.
    known_paths = set(known)
    path_by_text = {tuple(map(str, path)): path for path in known}

    values: dict[Path, PyTree] = {}
    unexpected: list[Path] = []
    for entries in states:
        for given_path, value in _by_path(entries, known_paths).items():
            path = given_path
            if path not in known_paths:
                path = path_by_text.get(tuple(map(str, given_path)))
            if path is None:
                unexpected.append(given_path)
            else:
                _check_one_frozen_value(values.get(path), value, path)
                values[path] = value

    missing = [path for path in known if path not in values] if complete else []

    misfits: list[tuple[Path, str]] = []
    for path, value in values.items():
        values[path], problem = fit(path, value)
        if problem is not None:
            misfits.append((path, problem))

    if unexpected or missing or misfits:
        raise errors.state_mismatch(unexpected, missing, misfits, len(values), known)
    return {path: v.value if isinstance(v, Variable) else v for path, v in values.items()}


def _by_path(entries: object, known: Collection[Path]) -> dict[Path, PyTree]:
    """Returns what was given, by path or label; Variables as they are."""
    if isinstance(entries, State):
        return entries.flat()

    if isinstance(entries, Mapping):
        first_steps = {path[:1] for path in known}
        has_whole_paths = all(
            isinstance(key, tuple) and (key,) not in first_steps for key in entries
        )
        return dict(entries) if has_whole_paths else arranged_by_path(entries, known)

    leaves = jax.tree.leaves(entries, is_leaf=lambda leaf: isinstance(leaf, Object))
    are_frozen = all(isinstance(leaf, FrozenVariable) for leaf in leaves)
    if are_frozen and isinstance(entries, (FrozenVariable, tuple, list)):
        by_label: dict[Path, PyTree] = {}
        for leaf in leaves:
            _check_one_frozen_value(by_label.setdefault(leaf.label, leaf), leaf, leaf.label)
        return by_label
    raise errors.no_values_by_path(entries)


def _check_one_frozen_value(first: object, second: object, label: Path) -> None:
    """Raises if two frozen values are given for one label."""
    both_frozen = isinstance(first, FrozenVariable) and isinstance(second, FrozenVariable)
    if both_frozen and first is not second:
        raise errors.two_frozen_values(label)


# --- containers arranged like a model -------------------------------------------------------------


def by_paths_of(entries: PyTree, known: Collection[Path]) -> dict[Path, PyTree]:
    """Returns values arranged like a model by its paths, without Nones."""
    if not isinstance(entries, State) and (() in known or not _holds_entries(entries)):
        return {(): entries}

    by_path = arranged_by_path(entries, known)
    return {
        path: value.value if isinstance(value, Variable) else value
        for path, value in by_path.items()
        if value is not None
    }


def arranged_by_path(
    entries: PyTree, known: Collection[Path], path: Path = ()
) -> dict[Path, PyTree]:
    """Returns what is in mappings and containers by path; Variables as they are.

    Args:
        entries: A mapping, list, tuple, dataclass or pytree node.
        known: Paths at which a container is a value of its own.
        path: Where ``entries`` stands.
    """
    if isinstance(entries, State):
        return {(*path, *below): value for below, value in entries.flat().items()}

    is_mapping = isinstance(entries, Mapping)
    pairs = entries.items() if is_mapping else handler_of(entries).children(entries)
    by_path: dict[Path, Leaf] = {}
    for step, value in pairs:
        here = (*path, step)
        if here not in known and _holds_entries(value):
            by_path.update(arranged_by_path(value, known, here))
        else:
            by_path[here] = value
    return by_path


def _holds_entries(value: object) -> bool:
    """Whether a value holds others, as containers and mappings do."""
    if isinstance(value, Mapping):
        return True
    handler = handler_of(value)
    return handler in PLAIN or (handler.stores_items and not handler.whole)
