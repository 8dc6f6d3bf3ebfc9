# SPDX-License-Identifier: Apache-2.0
"""Boxes: pytree nodes that carry a value together with what its dimensions are called.

A *box* holds a *value* (an array or any pytree of arrays), which is its only child, and *static*
attributes beside it, such as axis names. So a tree of boxed parameters goes through ``jax.jit``,
``jax.vmap``, ``jax.grad`` and the states of optax like any other tree, and the names stay with the
arrays they belong to. Boxes are for programs in the functional style; owners of Modules have
Variables, which know their axes themselves.

``AxisMetadata`` is what all boxes are made of. To *unbox* is to take the value out. A transform
that stacks or slices arrays changes how many dimensions they have, and a box learns of it by being
told: ``add_axis`` and ``remove_axis`` return a box with other names around the same value, and each
undoes the other. (``sx.vmap`` and ``sx.scan`` tell boxes themselves.) The *parameters* of such a
change are a dictionary, for instance ``{PARTITION_NAME: "layers"}``, in which every kind of box
finds what it needs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Self, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.cross_process import packed
from shardax._core.graph.static import exact_key
from shardax._transforms.errors import BoxError
from shardax.partition.mesh import AnyMesh
from shardax.partition.rules import Names, Rules, mesh_axes_of

T = TypeVar("T")


class AxisMetadata(abc.ABC, Generic[T]):
    """Base of boxes: a value, and what is known of its dimensions.

    A subclass has an attribute ``value``; its other attributes are static and must be hashable. A
    frozen dataclass is the usual form. Subclasses become pytree nodes as they are defined; write
    ``class Box(AxisMetadata, register=False)`` for one that is registered with JAX in another way.
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

    value: T

    def __init_subclass__(cls, *, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass writes its own unless the class has them, and its own compare arrays by `==`.
        for name in ("__eq__", "__hash__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        if register:
            _register(cls)

    def unbox(self, apply_constraint: bool = True) -> T:
        """Returns the value; a subclass may lay it out first.

        Args:
            apply_constraint: Whether a value that the box knows how to lay out is laid out.
        """
        return self.value

    def replace_boxed(self, value: Any) -> Self:
        """Returns a box like this one around another value.

        Args:
            value: An array or any pytree.
        """
        return _rebuilt(type(self), _static_of(self), value)

    @abc.abstractmethod
    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns the box of values that were put together along a new dimension.

        Args:
            index: Where the new dimension is; negative counts from the end of the new dimensions.
            params: What is known of it, for instance ``{PARTITION_NAME: "layers"}``.
        """

    @abc.abstractmethod
    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns the box of one slice of the value along a dimension: the inverse.

        Args:
            index: Which dimension goes; negative counts from the end.
            params: What is known of it.
        """

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the ``PartitionSpec`` of the value; by default replicated."""
        return PartitionSpec()

    def layout(self) -> tuple[Any, Rules | None]:
        """Returns what the layout of the value goes by: names, and the rules that map them.

        Every function that lays out trees asks this. By default the names are what
        ``get_partition_spec`` returns, axes of a mesh; a subclass with names of its own kind
        returns these here.

        Returns:
            One name per dimension, or a ``PartitionSpec``, which may be shorter, or None for a
            value that is not split; and the rules, None for those of the call.
        """
        spec = self.get_partition_spec()
        return spec, identity_rules(tuple(spec))

    def get_sharding(self, mesh: AnyMesh) -> NamedSharding:
        """Returns the ``NamedSharding`` of the value over a mesh.

        Args:
            mesh: The mesh, also an ``AbstractMesh``.
        """
        return NamedSharding(mesh, self.get_partition_spec())

    def __copy__(self) -> Self:
        return self.replace_boxed(self.value)

    def __getstate__(self) -> Any:
        return {**self.__dict__, "value": packed(self.value)}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AxisMetadata) or type(self) is not type(other):
            return NotImplemented
        return _same(self, other)

    def __hash__(self) -> int:
        return hash((type(self), *_hashed(self)))

    def __repr__(self) -> str:
        static = _static_items(self)
        shown = [_shown(self.value), *(f"{name}={item!r}" for name, item in static if item != None)]  # noqa: E711
        return f"{type(self).__name__}({', '.join(shown)})"


BOX_ENTRY = "box"
"""Metadata entry of a Variable that was made of a box: the box, empty."""


def layout_of_variable(
    axes: tuple[Any, ...] | None, entries: Mapping[str, Any]
) -> tuple[AnyMesh | None, Rules | None]:
    """Returns the mesh and the rules that a Variable has of its own: those of its box.

    Args:
        axes: The Variable's axes, which may have changed since.
        entries: Its other metadata.

    Returns:
        None for each that it does not have, as a Variable that was made of no box.
    """
    box: Any = entries.get(BOX_ENTRY)
    if axes is None or not isinstance(box, AxisMetadata) or not hasattr(box, "names"):
        return None, None
    box = dataclasses.replace(cast("Any", box), names=axes)
    return box.mesh, box.layout()[1]


@functools.lru_cache(maxsize=1024)
def identity_rules(names: Names) -> Rules:
    """Returns the rules by which names of mesh axes stand for themselves."""
    axes = (axis for name in names for axis in mesh_axes_of(name))
    return Rules([(axis, axis) for axis in axes if isinstance(axis, str)])


# --- positions of dimensions ----------------------------------------------------------------------


def inserted(box: Any, names: tuple[Any, ...], index: int, name: Any) -> tuple[Any, ...]:
    """Returns the names of a box with one more at a position.

    Args:
        box: The box, for the message.
        names: One per dimension.
        index: Where; negative counts from the end of the new names.
        name: The new one.

    Raises:
        BoxError: If there is no such position.

    Example:
        >>> inserted(None, ("embed", "mlp"), -1, "layers")
        ('embed', 'mlp', 'layers')
    """
    rank = len(names) + 1
    if not -rank <= index < rank:
        raise BoxError(
            f"{box!r}: cannot add an axis {name!r} at {index} to the names {names}. Places for "
            f"another dimension go from {-rank} to {rank - 1}; negative ones count from the end of "
            "the new names. A box has one name per dimension, None for one without."
        )
    place = index % rank
    return (*names[:place], name, *names[place:])


def without(box: Any, names: tuple[Any, ...], index: int, name: Any) -> tuple[Any, ...]:
    """Returns the names of a box without the one at a position: the inverse of ``inserted``.

    Args:
        box: The box, for the message.
        names: One per dimension.
        index: Which; negative counts from the end.
        name: What the name must be.

    Raises:
        BoxError: If there is no such position, or another name stands there.

    Example:
        >>> without(None, ("embed", "layers", "mlp"), -2, "layers")
        ('embed', 'mlp')
    """
    rank = len(names)
    if not -rank <= index < rank:
        raise BoxError(
            f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: there are "
            f"{rank}."
        )
    place = index % rank
    if names[place] != name:
        hint = f" The name {name!r} stands at {names.index(name)}." if name in names else ""
        raise BoxError(
            f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: "
            f"{names[place]!r} stands there.{hint} remove_axis undoes add_axis, so it takes the "
            "same index and name."
        )
    return (*names[:place], *names[place + 1 :])


# --- boxes as pytree nodes ------------------------------------------------------------------------


class Static:
    """The static attributes of one box: hashable, and equal only for equal types at every depth."""

    __slots__ = ("_hash", "_key", "items")

    def __init__(self, owner: type, items: tuple[tuple[str, Any], ...]) -> None:
        self.items = items
        try:
            self._key = tuple((name, exact_key(item)) for name, item in items)
            self._hash = hash(self._key)
        except TypeError as error:
            raise BoxError(
                f"{owner.__name__}: a static attribute is not hashable ({error}): "
                f"{dict(items)!r}. Compiled programs are found by the static attributes of boxes. "
                "Use tuples instead of lists, frozen dataclasses instead of dicts, and keep arrays "
                "in the box's value."
            ) from error

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Static) and self._key == other._key)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={item!r}" for name, item in self.items)


def _static_items(box: Any) -> tuple[tuple[str, Any], ...]:
    if dataclasses.is_dataclass(box):
        names: Iterable[str] = (field.name for field in dataclasses.fields(box))
    else:
        names = vars(box)
    return tuple((name, getattr(box, name)) for name in names if name != "value")


def _static_of(box: AxisMetadata[Any]) -> Static:
    return Static(type(box), _static_items(box))


def _rebuilt(cls: type[Any], static: Static, value: Any) -> Any:
    """Makes a box without its constructor: what JAX rebuilds may hold anything as a value."""
    box = object.__new__(cls)
    object.__setattr__(box, "value", value)
    for name, item in static.items:
        object.__setattr__(box, name, item)
    return box


def _register(cls: type[Any]) -> None:
    key = jax.tree_util.GetAttrKey("value")
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda box: (((key, box.value),), _static_of(box)),
        lambda static, children: _rebuilt(cls, static, *children),
        lambda box: ((box.value,), _static_of(box)),
    )


# --- comparing ------------------------------------------------------------------------------------


def _same(first: AxisMetadata[Any], second: AxisMetadata[Any]) -> bool:
    try:
        if _static_of(first) != _static_of(second):
            return False
        leaves, treedef = jax.tree.flatten(first.value)
        others, other_treedef = jax.tree.flatten(second.value)
        return treedef == other_treedef and all(map(_same_leaf, leaves, others))
    except (TypeError, ValueError):  # what cannot be compared is not known to be equal
        return False


def _same_leaf(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in (first, second)):
        return type(first) is type(second) and bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not (_is_readable(first) and _is_readable(second)):
        return False
    return _bits(first) == _bits(second)


def _is_readable(array: Any) -> bool:
    if isinstance(array, Tracer):
        return False
    return isinstance(array, np.ndarray) or (not array.is_deleted() and array.is_fully_addressable)


def _bits(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _hashed(box: AxisMetadata[Any]) -> tuple[Any, ...]:
    try:
        leaves, treedef = jax.tree.flatten(box.value)
        shapes = tuple((getattr(x, "shape", None), str(getattr(x, "dtype", None))) for x in leaves)
        content = (_static_of(box), treedef, shapes)
        hash(content)
    except (TypeError, ValueError):
        return ()
    return content


def _shown(value: Any) -> str:
    return repr(jax.tree.map(_ShownArray, value)) if value is not None else "None"


class _ShownArray:
    """Stands for an array in the text of a box."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def __repr__(self) -> str:
        if hasattr(self.leaf, "shape") and hasattr(self.leaf, "dtype"):
            return f"{self.leaf.dtype}[{', '.join(map(str, self.leaf.shape))}]"
        return repr(self.leaf)
