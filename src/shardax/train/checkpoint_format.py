# SPDX-License-Identifier: Apache-2.0
"""Checkpoint contents, and their description in JSON.

A tree is taken apart into arrays, named by the text of their paths, and positions. A Variable
reached twice is one array, so tied weights are stored once. A position is a part of the tree that
is not made of arrays: a plain dict of JSON values, or an object with ``state()`` and
``restore(state)``, such as an iterator over data. The description says path, shape and dtype of
every stored array; comparing it with a tree, before any array is read, finds all that does not fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardax import (
    FrozenVariable,
    Intermediate,
    List,
    Not,
    State,
    Variable,
    iter_modules,
    iter_variables,
    select,
)
from shardax.extend import (
    Object,
    Path,
    PyTree,
    format_path,
    has_objects,
    is_prng_key,
    path_of_keys,
    stored_value,
)
from shardax.train import errors
from shardax.train.data.sources import cut_integers

FORMAT_VERSION = 2  # of the description


class ModelArray(NamedTuple):
    """One array of a tree, as a checkpoint names it."""

    path: str
    variable: Variable
    value: Any  # a stand-in while the Variable is lazy or abstract

    @property
    def dtype(self) -> str:
        """Name of the dtype; for random keys such as ``key<fry>``."""
        return str(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape; of random keys, without the integers inside."""
        return tuple(self.value.shape)

    @property
    def is_key(self) -> bool:
        """Whether it holds random keys, stored as their integers."""
        return is_prng_key(self.value)

    @property
    def is_deleted(self) -> bool:
        """Whether the array was donated or deleted."""
        is_array = isinstance(self.value, jax.Array) and not isinstance(self.value, Tracer)
        return is_array and self.value.is_deleted()


class StoredArray(NamedTuple):
    """Description of one stored array."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None  # implementation of the random keys that it holds


class ArraySlot(NamedTuple):
    """Entry of a dict or list, with plain arrays in it."""

    container: Any
    key: Any
    variables: list[Variable]  # stand for its arrays, in their order

    def write(self) -> None:
        """Replaces the entry by one with the values of the Variables."""
        variables = iter(self.variables)

        def replaced(leaf):
            if not _is_array(leaf):
                return leaf
            value = next(variables).value
            return np.array(value) if isinstance(leaf, np.ndarray) else value

        self.container[self.key] = jax.tree.map(
            replaced, self.container[self.key], is_leaf=_is_taken_apart
        )


class Contents(NamedTuple):
    """A tree taken apart."""

    objects: object  # the tree with None in place of positions, Variables in place of arrays
    arrays: list[ModelArray]
    positions: dict[str, Any]  # by the text of their paths
    slots: list[ArraySlot]


def contents_of(tree: PyTree, *, restoring: bool = False) -> Contents:
    """Takes a tree apart, or raises CheckpointError."""
    walk = _Walk(restoring)
    objects = walk.without_positions(tree, (), None)
    return Contents(objects, arrays_of(objects), walk.positions, walk.slots)


def arrays_of(objects: object) -> list[ModelArray]:
    """Returns the arrays of a tree without positions, in order."""
    arrays = []
    for path, variable in iter_variables(objects, Not(Intermediate)):  # those are of one call
        value = stored_value(variable)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            text = format_path(path) + jax.tree_util.keystr(keys)
            arrays.append(ModelArray(text, variable, leaf))
    return arrays


class _Walk:
    """Takes a tree apart into objects, positions and plain arrays."""

    def __init__(self, restoring: bool) -> None:
        self.restoring = restoring
        self.positions: dict[str, Any] = {}
        self.slots: list[ArraySlot] = []

    def without_positions(self, tree: object, path: Path, slot: ArraySlot | None):
        """Returns the tree with None for positions and Variables for arrays."""
        if tree is None or isinstance(tree, Object):
            return tree
        if _is_array(tree):
            return self._variable_of(tree, path, slot)
        if _is_stateful(tree) or (isinstance(tree, dict) and next(_parts(tree), None) is None):
            self.positions[format_path(path)] = tree
            return None
        if isinstance(tree, State):  # entries that belong together may stand apart
            items = tree.flat().items()
            entries = {p: self.without_positions(v, (*path, *p), slot) for p, v in items}
            return State.from_flat(entries).to_pure_dict()

        children = _children(tree)
        if children is not None:
            # The elements of a tuple at the root can be restored into a list.
            has_slots = isinstance(tree, (list, dict)) or not (path or self.restoring)
            pairs = []
            for key, child in children:
                child_slot = ArraySlot(tree, key, []) if has_slots else slot
                pairs.append((key, self.without_positions(child, (*path, key), child_slot)))
                if has_slots and child_slot is not None and child_slot.variables:
                    self.slots.append(child_slot)
            is_sequence = isinstance(tree, (list, tuple))
            return tuple(child for _, child in pairs) if is_sequence else dict(pairs)

        if next(_parts(tree), None) is not None:  # a node of JAX
            items = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
            return {
                jax.tree_util.keystr(keys, simple=True, separator="."): self.without_positions(
                    child, (*path, jax.tree_util.keystr(keys, simple=True, separator=".")), slot
                )
                for keys, child in items
            }
        raise errors.CheckpointError(
            f"Cannot save or restore {tree!r} at {format_path(path)}, of type "
            f"{type(tree).__name__}. A tree is made of Modules, Variables, arrays, dicts of JSON "
            "values, objects with state() and restore(), and pytrees of these. Put numbers and "
            "texts into extra=."
        )

    def _variable_of(self, array: object, path: Path, slot: ArraySlot | None) -> Variable:
        if slot is None:
            place = f"The array at {format_path(path)}" if path else "The tree"
            remedy = (
                "a list has the paths of a tuple: `holder = list(tree)`, then restore into holder"
                if self.restoring and path
                else 'save and restore a dict: `holder = {"tree": tree}`'
            )
            raise errors.CheckpointError(
                f"{place} cannot be written into: restore replaces arrays in dicts and lists, and "
                "the values of Variables. Of the arrays of other trees made of Modules, Variables "
                f"or arrays, {remedy}."
            )

        problem = "" if self.restoring else cut_integers(array)
        if problem:
            raise errors.CheckpointError(
                f"{format_path(path)} holds {problem} Save them as a list, which is kept as it is: "
                'put `{"ids": ids.tolist()}` into the tree, or into extra=.'
            )

        variable: Variable = Variable(array)
        slot.variables.append(variable)
        return variable


def _is_array(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_taken_apart(value: object) -> bool:
    """Whether a value is taken apart by itself."""
    return isinstance(value, (Object, list, dict)) or _is_stateful(value)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None))


def _children(tree: object) -> list[tuple[Any, Any]] | None:
    """Returns (step of a path, child) of a container, or None for what is taken apart otherwise."""
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    if callable(tree):
        return None
    if jax.tree_util.all_leaves([tree]):
        # A container that JAX does not know (``extend.register_container``), or a leaf.
        below = select(tree).at_children().get_by_path()
        return [(path[0], child) for path, child in below.items()] or None
    if not has_objects(tree):
        return None
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda value: value is not tree)
    return [(path_of_keys(keys)[0], child) for keys, child in pairs]


def _parts(value) -> Iterator[Any]:
    """Yields the objects, arrays and stateful things in a pytree."""
    if isinstance(value, Object) or _is_array(value) or _is_stateful(value):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _parts(child)
    elif not jax.tree_util.all_leaves([value]):
        leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Object))
        yield from (leaf for leaf in leaves if isinstance(leaf, Object) or _is_array(leaf))


def describe(
    arrays: Sequence[ModelArray], positions: Mapping[str, Any], extra: Any, step: int | None
) -> dict[str, Any]:
    """Makes the description of arrays with values, of JSON values only."""
    # Of copies, as it is written later, while positions and extra change.
    saved = {}
    for path, position in positions.items():
        state = position.state() if _is_stateful(position) else position
        saved[path] = _json_copy(state, f"The position at {path}")

    entries = []
    for array in arrays:
        entry = {"path": array.path, "shape": list(array.shape), "dtype": array.dtype}
        if (axes := array.variable.axes) is not None:
            texts = (name if name is None or isinstance(name, str) else repr(name) for name in axes)
            entry["axes"] = list(texts)
        if array.is_key:
            entry["key"] = str(jax.random.key_impl(array.value))
        entries.append(entry)
    return {
        "format": "shardax",
        "version": FORMAT_VERSION,
        "step": step,
        "arrays": entries,
        "positions": saved,
        "extra": _json_copy(extra, "extra"),
    }


def _json_copy(value: object, name: str) -> Any:
    """Returns a copy of a JSON value, or raises CheckpointError."""
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) is list:
        return [_json_copy(child, f"{name}[{index}]") for index, child in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _json_copy(child, f"{name}[{key!r}]") for key, child in value.items()}
    raise errors.CheckpointError(
        f"{name} is {value!r} of type {type(value).__name__}, not a value of JSON: None, bool, "
        "int, float, str, lists, dicts with str keys. Use int(x), list(x) or the like."
    )


def stored_arrays(description: Mapping[str, Any]) -> dict[str, StoredArray]:
    """Reads the stored arrays of a description, by path."""
    return {
        entry["path"]: StoredArray(
            entry["path"], tuple(entry["shape"]), entry["dtype"], entry.get("key")
        )
        for entry in description["arrays"]
    }


def check_fit(
    stored: Mapping[str, StoredArray],
    contents: Contents,
    positions: Mapping[str, Any],
    where: str,
    *,
    partial: bool,  # the checkpoint may hold more than the tree
    cast: bool,  # floating dtypes may differ
) -> None:
    """Raises CheckpointError, with all differences."""
    sections = _differences(stored, contents, positions, partial, cast)
    if not any(sections.values()):
        return
    message = (
        f"The checkpoint {where} ({len(stored)} arrays) does not fit what it is to be restored "
        f"into ({len(contents.arrays)} arrays); nothing was changed."
    )
    for title, entries in sections.items():
        if entries:
            message += "\n  ".join((f"\n{len(entries)} {title}:", *entries))
    raise errors.CheckpointError(
        f"{message}\nRestore into a model of the same configuration. To leave out what only the "
        "checkpoint has: partial=True. To convert floating dtypes: cast=True."
    )


def _differences(
    stored: Mapping[str, StoredArray],
    contents: Contents,
    positions: Mapping[str, Any],
    partial: bool,
    cast: bool,
) -> dict[str, Sequence[str]]:
    """Returns the differences of a checkpoint and a tree, by kind."""
    targets = {array.path: array for array in contents.arrays}
    missing = [path for path in targets if path not in stored]
    unexpected = [] if partial else [path for path in stored if path not in targets]
    shapes, dtypes = [], []

    for path in targets.keys() & stored.keys():
        array, saved = targets[path], stored[path]
        if array.shape != saved.shape:
            shapes.append(f"{path}: {array.shape}, stored {saved.shape}")
        if array.dtype != saved.dtype and not (cast and _both_floating(array, saved)):
            dtypes.append(f"{path}: {array.dtype}, stored {saved.dtype}")

    unread = [] if partial else [path for path in positions if path not in contents.positions]
    return {
        "not in the checkpoint": [path + _near(path, unexpected or stored) for path in missing],
        "in the checkpoint only": [path + _near(path, missing) for path in unexpected],
        "of another shape": sorted(shapes),
        "of another dtype": sorted(dtypes),
        "frozen, so nothing can be read into it (restore into sx.thaw(tree))": [
            array.path for array in contents.arrays if isinstance(array.variable, FrozenVariable)
        ],
        "positions not in the checkpoint": [p for p in contents.positions if p not in positions],
        "positions in the checkpoint only": unread,
    }


def _near(path: str, candidates) -> str:
    matches = difflib.get_close_matches(path, list(candidates), n=1, cutoff=0.8)
    return f" (near: {matches[0]})" if matches else ""


def _both_floating(array: ModelArray, stored: StoredArray) -> bool:
    if array.is_key or stored.key is not None:
        return False
    return all(jnp.issubdtype(jnp.dtype(x), jnp.floating) for x in (array.dtype, stored.dtype))


def positions_in_modules(objects: object) -> list[str]:
    """Returns the paths of positions in Modules, not saved in checkpoints."""
    return [
        format_path((*path, *place))
        for path, module in iter_modules(objects)
        for place in _positions_held(vars(module), ())
    ]


def _positions_held(value: object, place: Path) -> Iterator[Path]:
    """Yields the places of positions in an attribute and its containers."""
    if isinstance(value, (Mapping, list, tuple, List)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in items:
            yield from _positions_held(child, (*place, key))
    elif not isinstance(value, Object) and _is_stateful(value):
        yield place
