# SPDX-License-Identifier: Apache-2.0
"""Handlers: one table for walking and rebuilding trees.

A *handler* says, for a type of value, what its children are and under which keys, how to make
another value from other children, and whether it has identity. One table maps types to handlers;
every walk over models and mixed trees looks up ``handler_of(value)`` there and adds nothing but
what it does with the children. Packages above the core add rows for their own types (``register``).
Values that are told apart by a test of their type are one row too: ``register(object, handler,
where=test)``. What is registered with JAX as a pytree node is such a row, the one of least rank.

These distinctions carry the differences between walks:

- *Objects* (Modules, Variables, tracked containers) have identity everywhere; they may be shared
  and lead to cycles. So may plain lists and dicts in a tree of the user's, not inside a value.
- Containers with ``in_models`` are looked into wherever they stand. A pytree node is a container
  where it has parts (``has_parts``); without, it is one static value, or one array attribute.
- What is ``mutable`` is made empty and filled afterwards; the rest is rebuilt from its children.
- What is ``volatile`` can be changed behind a model's back, so no walk that met it is remembered.
- Everything without a handler is a ``LEAF``.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.tree_util import DictKey

from shardax._core import errors
from shardax._core.graph.paths import KeyEntry, KeyPath, PyTree, item_key, plain_path, with_key
from shardax._core.graph.settings import settings_static
from shardax._core.graph.static import Metadata, Static
from shardax._core.object import Object, Placeholder, Wrapper

# (key, child) for every child, in order. A key is a step of a path; None adds none.
Pairs = Sequence[tuple[Any, Any]]


def _attribute_text(value: object, key: Hashable) -> tuple[str, str]:
    return f"{key}=", f".{key}"


def _item_text(value: object, key: Hashable) -> tuple[str, str]:
    return "", f"[{key}]"


def _entry_text(value: object, key: Hashable) -> tuple[str, str]:
    return f"{key!r}: ", f"[{key!r}]"


def _node_text(value: object, key: Hashable) -> tuple[str, str]:
    return _item_text(value, key) if isinstance(key, int) else _attribute_text(value, key)


def _item_keys(config: object, steps: Sequence[Any]) -> Sequence[KeyEntry | None]:
    return [item_key(step) for step in steps]


def _entry_keys(config: object, steps: Sequence[Any]) -> Sequence[KeyEntry | None]:
    return [DictKey(step) for step in steps]


def _no_keys(config: object, steps: Sequence[Any]) -> Sequence[KeyEntry | None]:
    return [None] * len(steps)


def _refuse(*args: object):
    raise TypeError("This kind of value cannot be made from children.")


@dataclass(frozen=True, eq=False, slots=True)
class Handler:
    """How to walk, rebuild, edit and print one kind of value."""

    name: str  # unique; pickles of definitions refer to handlers by it
    children: Callable[[Any], Pairs] = lambda value: ()
    config: Callable[[Any], Any] = type  # all that a value is besides its children
    rebuild: Callable[[Any, Iterable[tuple[Any, Any]]], Any] = _refuse  # of config and children
    empty: Callable[[Any], Any] = _refuse  # a new value like a mutable one, to be filled
    fill: Callable[[Any, Pairs], None] = _refuse  # gives a mutable value other children
    mutable: bool = False  # filled after it is made, so that cycles can lead through it
    is_object: bool = False
    in_models: bool = False
    stores_items: bool = False  # children are stored as attributes are: arrays of a model boxed
    volatile: bool = False  # can be changed in place, by code that knows nothing of models
    whole: bool = False  # one entry of an inventory, as objects are, whatever its children
    axes: Callable[[Any], Any] = lambda value: None  # the names an array has of its dimensions
    contents: Callable[[Any], tuple[Any, Metadata]] | None = None  # of a box, for a Variable
    size: Literal["fixed", "shrinks", "any"] = "fixed"  # how many children an edit may leave
    text: Callable[[Any, Any], tuple[str, str]] = _node_text  # a child's label, the code to it
    # JAX's keys of the children, of config and the keys here.
    key_entries: Callable[[Any, Sequence[Any]], Sequence[KeyEntry | None]] = _entry_keys

    @property
    def has_identity(self) -> bool:
        """Whether a value is one thing at several paths of a tree."""
        return self.is_object or self.mutable

    def remake(self, value: object, pairs: Pairs) -> Any:
        """Returns a value like the given one with other children."""
        if not self.mutable:
            return self.rebuild(self.config(value), pairs)
        made = self.empty(value)
        self.fill(made, pairs)
        return made

    def __reduce__(self) -> Any:
        return handler_named, (self.name,)


# --- built-in rows --------------------------------------------------------------------------------


def _fill_list(holder: list[object], pairs: Pairs) -> None:
    holder[:] = [item for _, item in pairs]


def _fill_dict(holder: dict[Any, object], pairs: Pairs) -> None:
    holder.clear()
    holder.update(pairs)


def _partial_children(value) -> Pairs:
    return [(None, value.func), *enumerate(value.args), *value.keywords.items()]


def _rebuild_partial(config, pairs: Iterable[tuple[Any, Any]]):
    (_, function), *others = pairs
    args = [item for key, item in others if isinstance(key, int)]
    keywords = {key: item for key, item in others if isinstance(key, str)}
    return functools.partial(function, *args, **keywords)


def _partial_text(value: object, key: Hashable) -> tuple[str, str]:
    if key is None:
        return "", ".func"
    if isinstance(key, int):
        return "", f".args[{key}]"
    return f"{key}=", f".keywords[{key!r}]"


def _partial_keys(config: object, steps: Sequence[Any]) -> Sequence[KeyEntry | None]:
    # By position or name, among what the function has by attribute.
    return [None if step is None else DictKey(step) for step in steps]


def _field_text(value, key) -> tuple[str, str]:
    return _attribute_text(value, value._fields[key])


class WrapperType:
    """All that a wrapper is besides its function, compared by what it adds."""

    __slots__ = ("key", "make")

    def __init__(self, wrapper: Wrapper) -> None:
        self.make = wrapper._maker()
        self.key = (type(wrapper), wrapper._wrapping())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WrapperType) and self.key == other.key


def _one_level(value: object) -> tuple[list[tuple[KeyPath, Any]], jax.tree_util.PyTreeDef]:
    """Returns (key path, child) of each child of a pytree node, and the treedef of one level."""
    below, treedef = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda item: item is not value
    )
    return [(keys, child) for keys, child in below if keys], treedef


def _node_children(value: object) -> Pairs:
    below, _ = _one_level(value)
    pairs = [(plain_path(keys)[0], child) for keys, child in below]
    if type(value) not in _stable and any(isinstance(child, Object) for _, child in pairs):
        _check_stable(value, pairs)
    return pairs


# Types of nodes whose flattening gives the objects that the node holds, and no copies.
_stable: weakref.WeakSet[type] = weakref.WeakSet()


def _check_stable(value: object, pairs: Pairs) -> None:
    """Raises if a node makes objects anew each time it is flattened."""
    below, _ = _one_level(value)
    for (name, child), (_, second) in zip(pairs, below, strict=True):
        if isinstance(child, Object) and child is not second:
            raise errors.node_of_new_objects(type(value), type(child), (name,))
    _stable.add(type(value))


class NodeType(Static):
    """Type and static part of a pytree node, and JAX's keys of its children."""

    __slots__ = ("key_entries", "static")

    def __init__(self, treedef: Any, key_entries: tuple[KeyEntry, ...]) -> None:
        _, static = treedef.node_data()
        self.static = settings_static(static)
        self.key_entries = key_entries
        super().__init__(treedef, (treedef, self.static))

    def __reduce__(self) -> Any:
        return NodeType, (self.value, self.key_entries)


def _node_type(value: object) -> NodeType:
    below, treedef = _one_level(value)
    return NodeType(treedef, tuple(with_key(keys[0]) for keys, _ in below))


def is_node(value: object) -> bool:
    """Whether JAX knows a value as a pytree node."""
    return value is not None and not jax.tree_util.all_leaves((value,))


_BOX_METHODS = ("unbox", "replace_boxed")
_BOX_NAMES = ("get_partition_spec", "names", "add_axis")


def has_box_methods(value: object) -> bool:
    """Whether a value is a box by its methods."""
    # Here and not above: it is asked about every type, also where there are no boxes.
    kind = type(value)
    return (
        not isinstance(value, (Object, type))
        and all(callable(getattr(kind, name, None)) for name in _BOX_METHODS)
        and any(hasattr(value, name) for name in _BOX_NAMES)
    )


def is_node_with_box_methods(value: object) -> bool:
    """Whether a box by its methods is a pytree node."""
    return has_box_methods(value) and is_node(value)


def _is_changeable_node(value: object) -> bool:
    if not is_node(value):
        return False
    if isinstance(value, Mapping):
        return isinstance(value, MutableMapping)
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is None or not parameters.frozen


LEAF = Handler("leaf")
OBJECT = Handler("object", is_object=True, in_models=True)
PLACEHOLDER = Handler("placeholder", in_models=True)
LIST = Handler(
    "list",
    children=lambda value: list(enumerate(value)),
    rebuild=lambda kind, pairs: kind([item for _, item in pairs]),
    empty=copy.copy,
    fill=_fill_list,
    mutable=True,
    in_models=True,
    size="any",
    text=_item_text,
    key_entries=_item_keys,
)
TUPLE = Handler(
    "tuple",
    children=lambda value: list(enumerate(value)),
    rebuild=lambda kind, pairs: kind([item for _, item in pairs]),
    in_models=True,
    stores_items=True,
    size="any",
    text=_item_text,
    key_entries=_item_keys,
)
NAMED_TUPLE = Handler(
    "named tuple",
    children=lambda value: list(enumerate(value)),
    rebuild=lambda kind, pairs: kind(*(item for _, item in pairs)),
    in_models=True,
    stores_items=True,
    text=_field_text,
    key_entries=_item_keys,  # and no fields: as in paths, and in a State
)
DICT = Handler(
    "dict",
    children=lambda value: list(value.items()),
    config=lambda value: (type(value), Static(tuple(value))),
    rebuild=lambda config, pairs: dict(pairs),
    empty=copy.copy,
    fill=_fill_dict,
    mutable=True,
    in_models=True,
    size="shrinks",
    text=_entry_text,
    key_entries=_entry_keys,
)
PARTIAL = Handler(
    "partial",
    children=_partial_children,
    config=lambda value: functools.partial,
    rebuild=_rebuild_partial,
    in_models=True,
    text=_partial_text,
    key_entries=_partial_keys,
)
METHOD = Handler(
    "method",
    children=lambda value: [(None, value.__self__)],
    config=lambda value: Static(value.__func__),
    rebuild=lambda function, pairs: types.MethodType(function.value, *(item for _, item in pairs)),
    in_models=True,
    text=lambda value, key: ("", ".__self__"),
    key_entries=_no_keys,
)
WRAPPER = Handler(
    "wrapper",
    children=lambda value: [(None, value.function)],
    config=WrapperType,
    rebuild=lambda kind, pairs: kind.make(*(item for _, item in pairs)),
    in_models=True,
    text=lambda value, key: ("", ".__wrapped__"),
    key_entries=_no_keys,
)
PLAIN = (LIST, TUPLE, NAMED_TUPLE, DICT)  # containers of Python's own
NODE = Handler(
    "pytree node",
    children=_node_children,
    config=_node_type,
    rebuild=lambda kind, pairs: kind.value.unflatten(item for _, item in pairs),
    in_models=True,
    stores_items=True,
    key_entries=lambda kind, steps: kind.key_entries,
)


# --- the table ------------------------------------------------------------------------------------

_rows: list[tuple[type, Callable[[Any], bool] | None, Handler]] = []
_by_name: dict[str, Handler] = {LEAF.name: LEAF}
_known: dict[type, Handler] = {}  # what was looked up, so that a walk costs one lookup per value
_MOST_KNOWN = 4096  # bounded, because it keeps types alive


def register(cls: type, handler: Handler, where: Callable[[Any], bool] | None = None) -> None:
    """Adds a row for a class and its subclasses."""
    # Of several rows for a class the last one registered decides. A test asks about the type alone.
    _rows.append((cls, where, handler))
    _by_name[handler.name] = handler
    _known.clear()


def handler_named(name: str) -> Handler:
    """Returns the handler of a name, for pickles."""
    return _by_name[name]


def handler_of(value: object) -> Handler:
    """Returns the handler of a value, ``LEAF`` by default."""
    return _known.get(type(value)) or _look_up(value)


def _look_up(value: object) -> Handler:
    """Returns the handler of a value by the rows, and remembers it for its type."""
    kind = type(value)
    matching = (
        handler
        for cls, where, handler in reversed(_rows)
        if issubclass(kind, cls) and (where is None or where(value))
    )
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    _known[kind] = handler = next(matching, LEAF)
    return handler


register(object, NODE, where=is_node)
register(
    object, replace(NODE, name="changeable pytree node", volatile=True), where=_is_changeable_node
)
register(functools.partial, PARTIAL)
register(Wrapper, WRAPPER)
register(types.MethodType, METHOD)
register(dict, DICT)
register(list, LIST)
register(tuple, TUPLE)
register(tuple, NAMED_TUPLE, where=lambda value: hasattr(value, "_fields"))
register(Placeholder, PLACEHOLDER)
register(Object, OBJECT)


def has_parts(value: Any) -> bool:
    """Whether a value is or contains an object or placeholder."""
    handler = handler_of(value)
    if handler is LEAF or not handler.in_models:
        return False
    if handler.is_object or handler is PLACEHOLDER:
        return True
    if handler is METHOD:  # of anything else than an object it is configuration
        return isinstance(value.__self__, Object)
    return any(has_parts(child) for _, child in handler.children(value))


def knows_names(value: object) -> bool:
    """Whether a value holds arrays that know the names of their dimensions."""
    leaves = jax.tree.leaves(value, is_leaf=lambda item: axes_of(item) is not None)
    return any(axes_of(leaf) is not None for leaf in leaves)


def axes_of(value: object) -> tuple[Any, ...] | None:
    """Returns the dimension names that an array itself knows, or None."""
    return handler_of(value).axes(value)


def is_whole(value: object) -> bool:
    """Whether an inventory has a value as one entry; for ``is_leaf=``."""
    handler = handler_of(value)
    return handler.is_object or handler.whole or handler.axes(value) is not None


def is_box(value: object) -> bool:
    """Whether a value is a box, of this library or another."""
    return handler_of(value).contents is not None


def children_in_model(value: object) -> Pairs:
    """Returns the children of a value as part of a model."""
    handler = handler_of(value)
    return handler.children(value) if handler.in_models else ()


def map_children(function: Callable[[PyTree], object], value: object) -> Any:
    """Applies a function to the children of a container."""
    handler = handler_of(value)
    pairs = [(key, child, function(child)) for key, child in handler.children(value)]
    if all(new is old for _, old, new in pairs):  # then it is shared
        return value
    return handler.remake(value, [(key, new) for key, _, new in pairs])
