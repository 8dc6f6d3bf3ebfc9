# SPDX-License-Identifier: Apache-2.0
"""The form in which models store values.

What a user assigns to an attribute, or puts into a list or dict of a model, is *stored* in another
form (``to_stored``), and the user reads it back (``from_stored``):

- A plain array is held in a hidden Variable (``ArrayAttribute``), so that it is lifted, written and
  saved like any other data. The user reads the array.
- A list or dict is a tracked copy (``_core.containers``), which notices changes. The one that was
  assigned is not tracked.
- A tuple, or a node of a pytree class, is one of the same class with stored children. A node that
  can be changed in place, such as a dataclass that is not frozen, is stored as ``ChangeableNode``
  if there are arrays among its children.
- A Variable, Module, wrapper or method is stored as it is. Those of Flax NNX are refused: nothing
  here would see their arrays.
- Everything else is configuration. It must be hashable and hold no objects, which is checked here,
  where the mistake is made, and not at the first compiled call.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import jax
import numpy as np

from shardax._core.errors import StaticAttributeError, VariableValueError
from shardax._core.explain import attribute_errors as errors
from shardax._core.frames import local, resolve
from shardax._core.graph import handlers
from shardax._core.graph.held import ObjectSearch
from shardax._core.graph.paths import PyTree
from shardax._core.graph.settings import (
    IncomparableError,
    SettingsKey,
    incomparable_attribute,
    settings_key,
)
from shardax._core.graph.static import function_identities
from shardax._core.init.lazy import LazyValue
from shardax._core.object import Object, Wrapper
from shardax._core.state.frozen import FrozenArray, FrozenVariable, Slot
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute

# What a user calls an array.
ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, LazyValue)
# Objects in whose place the user sees an array.
ARRAY_HOLDERS = (ArrayAttribute, FrozenArray)

_SIMPLE_TYPES = frozenset({bool, int, float, str, type(None)})

# What makes the stored form of an instance of a class, and of where it stands. Lists and dicts are
# stored in classes that stand above, so ``_core.containers`` puts their rows here.
tracked_forms: dict[type, Callable[[Any, str], Object]] = {}


def to_stored(value: Any, where: str) -> Any:
    """Returns the form in which a model stores a value.

    Args:
        value: What a user puts into a model.
        where: The place, for messages: ``"attribute 'kernel' of Linear"``.

    Raises:
        StaticAttributeError: If it is neither data nor configuration, or an object of Flax NNX.
    """
    if type(value) in _SIMPLE_TYPES or isinstance(value, (Object, ChangeableNode)):
        return value
    if isinstance(value, ARRAY_TYPES):
        return _array_attribute(value, where)
    for plain_type, tracked_form in tracked_forms.items():
        if isinstance(value, plain_type):
            return tracked_form(value, where)
    if _is_of_flax(value):
        raise errors.of_flax(value, where)

    handler = handlers.handler_of(value)
    has_parts = handlers.has_parts(value)
    if handler.stores_items and (has_parts or isinstance(value, tuple)):
        return _stored_node(handler, value, where)

    # Other values with objects in them, such as a method of a Module.
    if has_parts:
        hidden = ObjectSearch().hidden_in(value)
        if hidden is not None:
            raise hidden.error(value, where)
        return value

    if not jax.tree_util.all_leaves((value,)) and _is_array_tree(value):
        return _array_attribute(value, where)
    check_static(value, where)
    return value


def _is_of_flax(value: object) -> bool:
    """Whether a value is a Module, Variable or other object of Flax NNX, which is not imported."""
    nnx = sys.modules.get("flax.nnx")
    kinds = (getattr(nnx, "Pytree", None), getattr(nnx, "Variable", None))
    return nnx is not None and isinstance(value, tuple(filter(None, kinds)))


def _stored_node(handler: handlers.Handler, value: Any, where: str) -> Any:
    """Returns a tuple or pytree node with stored children."""
    _check_hashable(value, where, handler.config)
    hidden = ObjectSearch().beside_children(value, handler.config(value))
    if hidden is not None:
        raise hidden.error(value, where)

    stored = handlers.map_children(lambda child: to_stored(child, where), value)
    has_arrays = any(holds_arrays(child) for _, child in handler.children(stored))
    return ChangeableNode.of(value, where) if handler.volatile and has_arrays else stored


def _array_attribute(value: object, where: str) -> ArrayAttribute:
    try:
        return ArrayAttribute(value)
    except VariableValueError as error:
        raise errors.no_array_dtype(value, where) from error


def _is_array_tree(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda item: isinstance(item, Object))
    return bool(leaves) and all(isinstance(leaf, ARRAY_TYPES) for leaf in leaves)


# --- configuration --------------------------------------------------------------------------------


def check_static(value: object, where: str) -> None:
    """Raises if a value is no configuration: hashable, without arrays or objects inside."""
    reason = _untracked_data(value)
    if reason is not None:
        raise errors.untracked_data(value, where, reason)
    hidden = ObjectSearch().held_by(value)
    if hidden is not None:
        raise hidden.error(value, where)
    _check_hashable(value, where, settings_key)


def _check_hashable(value: object, where: str, key: Callable[[Any], object]) -> None:
    try:
        key(value)
    except IncomparableError as error:
        text = incomparable_attribute(type(value), f"given as {where}", error)
        raise StaticAttributeError(text) from error
    except TypeError as error:
        raise errors.not_hashable(value, where, error) from error


def _untracked_data(value: object) -> str | None:
    """Returns why arrays in a value of Python's own cannot be tracked, or None."""
    if isinstance(value, (set, frozenset, collections.deque)):
        array = next((item for item in value if isinstance(item, jax.Array)), None)
        return None if array is None else f"the {type(array).__name__} in it cannot be tracked"

    is_pythons = type(value).__module__ in ("builtins", "itertools")
    is_iterated = isinstance(value, (Iterator, KeysView, ValuesView, ItemsView))
    return "what passes through it cannot be tracked" if is_pythons and is_iterated else None


# --- reading and writing what is stored -----------------------------------------------------------


def from_stored(stored: Any) -> PyTree:
    """Returns a stored value as the user sees it."""
    if isinstance(stored, ARRAY_HOLDERS):
        return stored.value
    if isinstance(stored, ChangeableNode):
        return stored.read()
    if handlers.handler_of(stored).stores_items and handlers.has_parts(stored):
        return handlers.map_children(from_stored, stored)
    return stored


def holds_arrays(stored: object) -> bool:
    """Whether the user sees an array in the place of a stored value, or of a part of it."""
    if isinstance(stored, (*ARRAY_HOLDERS, ChangeableNode)):
        return True
    if isinstance(stored, Slot):
        return stored.variable_type is ArrayAttribute
    handler = handlers.handler_of(stored)
    return handler.stores_items and any(
        holds_arrays(child) for _, child in handler.children(stored)
    )


def array_of_attribute(value: object) -> Any:
    """Returns the array of an array attribute that left its model; another value as it is."""
    # A frozen array is what the user made it there, so it stays.
    return value.value if isinstance(value, ArrayAttribute) else value


def copy_array_attributes(stored: object, where: str) -> Any:
    """Returns a stored value with array attributes of its own; everything else is shared."""
    if isinstance(stored, ArrayAttribute):
        return to_stored(stored.value, where)
    if handlers.handler_of(stored).stores_items and holds_arrays(stored):
        return handlers.map_children(lambda child: copy_array_attributes(child, where), stored)
    return stored


def same_structure(old: object, new: object) -> bool:
    """Whether replacing a stored value by another leaves the model's structure as it was."""
    if old is new:
        return True
    for stored in (old, new):
        if isinstance(stored, Object) or handlers.has_parts(stored):
            return False

    # The walk that is remembered looks at the settings objects that it met, and at no others. A
    # function that was made anew, from the same code, may read other settings.
    new_key = settings_key(new)
    return (
        type(new_key) is not SettingsKey
        and settings_key(old) == new_key
        and function_identities([old]) == function_identities([new])
    )


def write_through(old: object, new: object, where: str) -> bool:
    """Writes an array over a stored array; returns whether it did.

    Raises:
        StaticAttributeError: If ``new`` is an array and ``old`` a Variable, its slot or its frozen
            value, whose type and metadata would be lost.
    """
    if not isinstance(old, (Variable, Slot)) or isinstance(new, Object):
        return False
    is_array = isinstance(new, ARRAY_TYPES)

    if isinstance(old, ArrayAttribute):
        if is_array or _is_node_of_arrays(new):
            old.value = new
            return True
        return False

    if not is_array:
        return False
    if not isinstance(old, (FrozenVariable, Slot)):
        raise errors.array_over_variable(type(old), where)
    if isinstance(old, FrozenArray) or old.variable_type is ArrayAttribute:
        return False  # an array takes the place of an array
    form = "slot" if isinstance(old, Slot) else "frozen value"
    raise errors.array_over_frozen(form, old.variable_type, where)


def _is_node_of_arrays(value: object) -> bool:
    """Whether a value is one pytree node of arrays, which is stored as one array is."""
    if isinstance(value, (tuple, list, dict)) or jax.tree_util.all_leaves((value,)):
        return False
    return _is_array_tree(value)


# --- pytree nodes that can be changed in place ----------------------------------------------------


class ChangeableNode:
    """A pytree node that users change in place, as models store it.

    The user has the node itself. So every walk over the model stores what was put into the node
    since the last one, and every reading puts into the node what was written elsewhere, such as by
    a compiled step.
    """

    __slots__ = ("_node_type", "_stored_children", "_user_children", "_user_node", "_where")

    def __init__(
        self, node_type: handlers.NodeType, stored_children: handlers.Pairs, where: str
    ) -> None:
        self._node_type = node_type
        self._stored_children = stored_children
        self._where = where
        self._user_node: Any = None  # what the user has, from the first reading on
        self._user_children: list[Any] = []  # the children of that at the last look

    @classmethod
    def of(cls, node: object, where: str) -> ChangeableNode:
        """Returns a user's node as a model stores it."""
        changeable = cls(handlers.NODE.config(node), [], where)
        changeable._store_changes_of(node)

        # The user's own node is kept if its children read back as they are.
        read_back = [from_stored(child) for _, child in changeable._stored_children]
        if _all_identical(changeable._user_children, read_back):
            changeable._user_node = node
        return changeable

    def children(self) -> handlers.Pairs:
        """Returns keys and stored children."""
        if self._user_node is not None:
            self._store_changes_of(self._user_node)
        return self._stored_children

    @property
    def stored_children(self) -> handlers.Pairs:
        """Keys and stored children of the last look."""
        return self._stored_children

    def config(self) -> handlers.NodeType:
        """Returns type and static part."""
        self.children()
        return self._node_type

    def read(self) -> Any:
        """Returns the node that the user sees, with the present values."""
        frame = local.frame
        if frame is None or not self._has_stand_ins():
            return self._read_here()

        # Inside of a transform that has copies of its arrays the user sees another node.
        pair = frame.nodes.get(id(self))
        if pair is None:
            copy = ChangeableNode(self._node_type, self.children(), self._where)
            pair = frame.nodes[id(self)] = (self, copy)
        return pair[1]._read_here()

    def _has_stand_ins(self) -> bool:
        """Whether other Variables stand for array attributes of the node in this frame."""
        attributes = _array_attributes_in(self)
        return any(resolve(attribute, local.frame) is not attribute for attribute in attributes)

    def _read_here(self) -> Any:
        values = [from_stored(child) for _, child in self.children()]
        if self._user_node is not None and _all_identical(values, self._user_children):
            return self._user_node

        node = self._node_type.value.unflatten(values)
        if self._user_node is not None:
            node = _set_fields(self._user_node, node)

        # A class may make its children anew at every look. These cannot be told from writes, so
        # such a node is not kept.
        self._user_children = _children_of_node(node)
        if _all_identical(self._user_children, _children_of_node(node)):
            self._user_node = node
        return node

    def _store_changes_of(self, node: object) -> None:
        """Stores what was put into the user's node since the last look."""
        pairs = handlers.NODE.children(node)
        node_type = handlers.NODE.config(node)
        is_alike = node_type == self._node_type and len(pairs) == len(self._user_children)

        stored_children = []
        for position, (key, child) in enumerate(pairs):
            old = self._stored_children[position][1] if is_alike else None
            if is_alike and child is self._user_children[position]:
                stored_children.append((key, old))
                continue
            where = f"{key!r} of {self._where}"
            try:
                new = old if write_through(old, child, where) else to_stored(child, where)
            except StaticAttributeError:
                if self._user_children:  # the user's assignment is undone
                    _set_fields(node, self._node_type.value.unflatten(self._user_children))
                raise
            stored_children.append((key, new))

        self._node_type = node_type
        self._stored_children = stored_children
        self._user_children = [child for _, child in pairs]

    def __reduce__(self) -> Any:
        return ChangeableNode, (self.config(), self._stored_children, self._where)


def _all_identical(first: list[Any], second: list[Any]) -> bool:
    return all(one is other for one, other in zip(first, second, strict=True))


def _children_of_node(node: object) -> list[Any]:
    return [child for _, child in handlers.NODE.children(node)]


def _array_attributes_in(stored: object) -> Iterator[ArrayAttribute]:
    """Yields the array attributes in the immutable parts of a stored value."""
    if isinstance(stored, ArrayAttribute):
        yield stored
        return
    handler = handlers.handler_of(stored)
    if not handler.stores_items:
        return
    if isinstance(stored, ChangeableNode):
        children = stored.stored_children
    else:
        children = handler.children(stored)
    for _, child in children:
        yield from _array_attributes_in(child)


def _set_fields(node: object, fresh: object) -> object:
    """Gives a node the fields of a fresh one; returns the fresh one if it has no fields."""
    slots = {name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())}
    fields = {name: getattr(fresh, name) for name in slots if hasattr(fresh, name)}
    fields |= getattr(fresh, "__dict__", {})
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node if fields else fresh


handlers.register(
    ChangeableNode,
    dataclasses.replace(
        handlers.NODE,
        name="changeable pytree node of a model",
        children=ChangeableNode.children,
        config=ChangeableNode.config,
        rebuild=lambda node_type, pairs: ChangeableNode(node_type, list(pairs), "a pytree node"),
        volatile=True,
    ),
)


def class_of(stored: object) -> type:
    """Returns the class of a stored value as the user sees it."""
    if isinstance(stored, ChangeableNode):
        return stored.config().value.node_data()[0]
    return type(stored)


def title_of(stored: object) -> str:
    """Returns what drawings call a stored value: its class, or what a wrapper does."""
    return stored._title if isinstance(stored, Wrapper) else class_of(stored).__name__
