# SPDX-License-Identifier: Apache-2.0
"""``AxisMetadata``: the base of boxes, pytree nodes of a value and static attributes.

A *box* holds a *value* (an array or any pytree of arrays), its only child, and *static* attributes,
such as the names of the value's dimensions. Trees of boxed parameters go through ``jax.jit``,
``jax.vmap``, ``jax.grad`` and the states of optax like any other, and the names stay with their
arrays. Transforms that stack or slice (``sx.vmap``, ``sx.scan``) call ``add_axis`` and
``remove_axis`` with *parameters*, for instance ``{PARTITION_NAME: "layers"}``, in which every kind
of box finds what it needs.

A subclass is the user's own kind of box. This file has what it inherits, then what takes its
attributes apart and registers it with JAX, and last the functions that change names for a dimension
that was added or removed.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.cross_process import PickledArray
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import Static
from shardax._core.values import describe, same_value
from shardax.partition.assignment import DimensionName, Names
from shardax.partition.boxes import errors
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Rules, identity_rules

T = TypeVar("T")
B = TypeVar("B", bound="AxisMetadata[Any]")


class AxisMetadata(abc.ABC, Generic[T]):
    """Base of boxes: a value, and the names of its dimensions.

    A subclass has an attribute ``value``, or else its first annotated one is the value; its other
    attributes are static and must be hashable. A frozen dataclass is the usual form. Its ``unbox``
    may leave out ``apply_constraint``. A subclass becomes a pytree node with its first instance,
    unless it is one by then, by ``jax.tree_util.register_dataclass``, ``flax.struct.PyTreeNode`` or
    the like; ``class Box(AxisMetadata, register=False)`` is never made one.
    Boxes of one class are equal when their static attributes are, and their values bit for bit;
    comparing and hashing never fails.

    Example:
        >>> import dataclasses, jax
        >>> @dataclasses.dataclass(frozen=True)
        ... class Described(AxisMetadata):
        ...     value: object
        ...     units: tuple
        ...     def add_axis(self, index, params):
        ...         return dataclasses.replace(self, units=inserted(self, self.units, index, None))
        ...     def remove_axis(self, index, params):
        ...         return dataclasses.replace(self, units=without(self, self.units, index, None))
        >>> jax.tree.map(lambda x: x + 1, Described(1.0, ("m", "s")))
        Described(2.0, units=('m', 's'))
        >>> Described(1.0, ("m", "s")).add_axis(-1, {}).units
        ('m', 's', None)
    """

    # ``value`` has no annotation here: one that can be written would forbid frozen dataclasses.
    def __getattr__(self, name: str) -> Any:
        if name == "value" and _attribute_names(self):
            return getattr(self, _value_field(self))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __init_subclass__(cls, *, register: bool = True, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass writes its own unless the class has them, and its own compare arrays by `==`.
        for name in ("__eq__", "__hash__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        if not register:
            _registered.add(cls)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Decorators and base classes that register a class run after __init_subclass__, and JAX
        # takes one registration; so it is done here, where all of them had their turn.
        if cls not in _registered:
            _register(cls)
        if cls.__init__ is object.__init__:
            return super().__new__(cls, *args, **kwargs)  # refuses arguments
        return super().__new__(cls)

    def unbox(self, apply_constraint: bool = True) -> T:
        """Returns the value; a subclass may lay it out first.

        Args:
            apply_constraint: Whether a value that the box knows how to lay out is laid out.
        """
        return self.value

    def replace_boxed(self, value: object) -> Self:
        """Returns a box like this one around another value.

        Args:
            value: An array or any pytree.
        """
        return with_value(self, value)

    @abc.abstractmethod
    def add_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box of values stacked along a new dimension.

        Args:
            index: Where the new dimension is; negative counts from the end of the new dimensions.
            params: Its properties, for instance ``{PARTITION_NAME: "layers"}``.
        """

    @abc.abstractmethod
    def remove_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box of one slice of the value: the inverse.

        Args:
            index: Which dimension goes; negative counts from the end.
            params: Its properties.
        """

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the ``PartitionSpec`` of the value; by default replicated."""
        return PartitionSpec()

    def layout(self) -> tuple[Any, Rules | None]:
        """Returns the names of the value and the rules for them.

        Every function that lays out trees calls this. By default the names are the axes of a mesh
        that ``get_partition_spec`` returns; a subclass with names of its own kind returns these.

        Returns:
            One name per dimension, or a ``PartitionSpec``, which may be shorter, or None for a
            value that is not split; and the rules, None for those of the call.
        """
        spec = self.get_partition_spec()
        return spec, self._rules_of(tuple(spec))

    def _rules_of(self, names: Names | None) -> Rules | None:
        """Rules for names of this box where no class of the user's says other ones."""
        return identity_rules(names or ())

    def _kept_with_axis(self, index: int, params: Mapping[str, object]) -> Self:
        """Returns what a Variable made of this box keeps of it, for values that were stacked."""
        return self.add_axis(index, params)

    def _kept_without_axis(self, index: int, params: Mapping[str, object]) -> Self:
        """Returns what a Variable made of this box keeps of it, for a slice of its values."""
        return self.remove_axis(index, params)

    def _filtered_as(self) -> tuple[type, Mapping[str, PyTree]]:
        """Returns the type, and the metadata besides axes, by which filters know the box."""
        return type(self), {}

    def get_sharding(self, mesh: AnyMesh) -> NamedSharding:
        """Returns the ``NamedSharding`` of the value over a mesh.

        Args:
            mesh: The mesh, also an ``AbstractMesh``.
        """
        return NamedSharding(mesh, self.get_partition_spec())

    def __copy__(self) -> Self:
        return self.replace_boxed(self.value)

    def __getstate__(self) -> Any:
        return {**self.__dict__, _value_field(self): PickledArray.in_tree(self.value)}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AxisMetadata) or type(self) is not type(other):
            return NotImplemented
        try:
            has_same_attributes = _attributes_of(self) == _attributes_of(other)
            return has_same_attributes and same_value(self.value, other.value)
        except (TypeError, ValueError):
            return False  # what cannot be compared is not known to be equal

    def __hash__(self) -> int:
        try:
            leaves, treedef = jax.tree.flatten(self.value)
            types = tuple(
                (getattr(leaf, "shape", None), str(getattr(leaf, "dtype", ""))) for leaf in leaves
            )
            return hash((type(self), _attributes_of(self), treedef, types))
        except (TypeError, ValueError):
            return hash(type(self))

    def __repr__(self) -> str:
        texts = [describe(self.value)]
        for name, item in _attribute_items(self):
            if item != None:  # noqa: E711 - an item may say itself what it equals
                texts.append(f"{name}={item!r}")
        return f"{type(self).__name__}({', '.join(texts)})"


class BoxAttributes(Static):
    """Static attributes of a box, compared by type and value."""

    __slots__ = ("field",)
    field: str  # the attribute that is the value

    def __repr__(self) -> str:
        return ", ".join(f"{name}={item!r}" for name, item in self.value)


def _attribute_names(box: object) -> list[str]:
    """Returns the names of all attributes of a box, that of the value included."""
    fields = dataclasses.fields(box) if dataclasses.is_dataclass(box) else ()
    return [field.name for field in fields] or list(vars(box))


def _value_field(box: object) -> str:
    """Returns the name of the attribute that is the value."""
    names = _attribute_names(box)
    return "value" if "value" in names else names[0]


def _attribute_items(box: object) -> tuple[tuple[str, Any], ...]:
    """Returns the static attributes, in order."""
    value_field = _value_field(box)
    names = [name for name in _attribute_names(box) if name != value_field]
    return tuple((name, getattr(box, name)) for name in names)


def _attributes_of(box: AxisMetadata[Any]) -> BoxAttributes:
    """Returns the static attributes, by which boxes and compiled programs are compared."""
    items = _attribute_items(box)
    try:
        attributes = BoxAttributes(items)
    except TypeError as error:
        raise errors.unhashable_attribute(type(box).__name__, dict(items), error) from error
    attributes.field = _value_field(box)
    return attributes


def with_value(box: B, value: object) -> B:
    """Returns a box of the same attributes around any object, made without its constructor."""
    return _rebuilt(type(box), _attributes_of(box), value)


def _rebuilt(cls: type[B], attributes: BoxAttributes, value: object) -> B:
    """Returns a box of a class, made without its constructor."""
    box = object.__new__(cls)
    object.__setattr__(box, attributes.field, value)
    for name, item in attributes.value:
        object.__setattr__(box, name, item)
    return box


_registered: weakref.WeakSet[type] = weakref.WeakSet()  # with JAX, in whatever way


def _register(cls: type[Any]) -> None:
    """Registers a class of boxes as a pytree node with JAX."""
    key = jax.tree_util.GetAttrKey
    # JAX refuses a class that it knows, and has no other way to ask whether it does.
    with contextlib.suppress(ValueError):
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda box: (((key(_value_field(box)), box.value),), _attributes_of(box)),
            lambda attributes, children: _rebuilt(cls, attributes, *children),
            lambda box: ((box.value,), _attributes_of(box)),
        )
    _registered.add(cls)


def fitted(names: Names, rank: int) -> Names:
    """Returns the names with one entry per dimension, by None at the end."""
    while len(names) > rank and names[-1] is None:
        names = names[:-1]
    return (*names, *(None,) * (rank - len(names)))


def inserted(box: AxisMetadata[Any], names: Names, index: int, name: DimensionName) -> Names:
    """Returns the names with one inserted; negative positions count from the new end.

    A place after the last name is reached by None for the dimensions before it.
    """
    names = (*names, *(None,) * (index - len(names)))
    rank = len(names) + 1
    if index < -rank:
        raise errors.no_place_for_axis(box, names, index, name)
    position = index % rank
    return (*names[:position], name, *names[position:])


def without(box: AxisMetadata[Any], names: Names, index: int, name: DimensionName) -> Names:
    """Returns the names with one removed: the inverse of ``inserted``."""
    if len(names) <= index < getattr(box.value, "ndim", 0):  # the last dimensions have no names
        names = fitted(names, index + 1)
    rank = len(names)
    if not -rank <= index < rank:
        raise errors.no_axis_to_remove(box, names, index, name)
    position = index % rank
    if names[position] != name:
        raise errors.other_axis_to_remove(box, names, index, name, names[position])
    return (*names[:position], *names[position + 1 :])
