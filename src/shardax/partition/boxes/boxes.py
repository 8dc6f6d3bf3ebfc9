# SPDX-License-Identifier: Apache-2.0
"""Boxes: pytree nodes of a value and the names of its dimensions.

A *box* holds a *value* (an array or any pytree of arrays), its only child, and *static* attributes,
such as axis names. Trees of boxed parameters go through ``jax.jit``, ``jax.vmap``, ``jax.grad`` and
the states of optax like any other, and the names stay with their arrays. Transforms that stack or
slice (``sx.vmap``, ``sx.scan``) call ``add_axis`` and ``remove_axis`` with *parameters*, for
instance ``{PARTITION_NAME: "layers"}``, in which every kind of box finds what it needs.

The names of a ``Partitioned`` are axes of a mesh; those of a ``LogicallyPartitioned`` are logical,
and rules map them to mesh axes. A mesh or rules *baked* into the box take precedence over those in
scope. A box that is unboxed where a mesh is known lays its value out by its names.

Boxes of other libraries, such as Flax, count as well: they are known by their methods (``is_box``),
and read as the ``Partitioned`` or ``LogicallyPartitioned`` of the same names (``standard_box``).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import Tracer, is_prng_key
from shardax._core.cross_process import packed
from shardax._core.graph import handlers
from shardax._core.graph.handlers import is_box as is_box
from shardax._core.graph.paths import PyTree
from shardax._core.graph.static import BOX_ENTRY, PARTITION_NAME, Metadata, Static, check_axes
from shardax._core.init.lazy import announce
from shardax._transforms.lift.engine import wraps
from shardax.partition.constraints import constrain
from shardax.partition.context import OnNoMesh, axis_rules
from shardax.partition.errors import PartitionError, raise_on_errors
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import Names, Rules, RulesLike, check_names, identity_rules, strings

T = TypeVar("T")
P = ParamSpec("P")
B = TypeVar("B", bound="Partitioned[Any]")


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
        return _rebuilt(type(self), _attributes_of(self), value)

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

    def get_sharding(self, mesh: AnyMesh) -> NamedSharding:
        """Returns the ``NamedSharding`` of the value over a mesh.

        Args:
            mesh: The mesh, also an ``AbstractMesh``.
        """
        return NamedSharding(mesh, self.get_partition_spec())

    def __copy__(self) -> Self:
        return self.replace_boxed(self.value)

    def __getstate__(self) -> Any:
        return {**self.__dict__, _value_field(self): packed(self.value)}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, AxisMetadata) or type(self) is not type(other):
            return NotImplemented
        try:
            if _attributes_of(self) != _attributes_of(other):
                return False
            leaves, treedef = jax.tree.flatten(self.value)
            other_leaves, other_treedef = jax.tree.flatten(other.value)
            return treedef == other_treedef and all(map(_same_leaf, leaves, other_leaves))
        except (TypeError, ValueError):  # what cannot be compared is not known to be equal
            return False

    def __hash__(self) -> int:
        try:
            leaves, treedef = jax.tree.flatten(self.value)
            types = tuple((getattr(x, "shape", None), str(getattr(x, "dtype", ""))) for x in leaves)
            return hash((type(self), _attributes_of(self), treedef, types))
        except (TypeError, ValueError):
            return hash(type(self))

    def __repr__(self) -> str:
        value = "None" if self.value is None else repr(jax.tree.map(_ArrayText, self.value))
        items = _attribute_items(self)
        parts = [value, *(f"{name}={item!r}" for name, item in items if item != None)]  # noqa: E711
        return f"{type(self).__name__}({', '.join(parts)})"


class BoxAttributes(Static):
    """Static attributes of a box, compared by type and value."""

    __slots__ = ("field",)
    field: str  # the attribute that is the value

    def __repr__(self) -> str:
        return ", ".join(f"{name}={item!r}" for name, item in self.value)


def _attribute_names(box: object) -> list[str]:
    fields = dataclasses.fields(box) if dataclasses.is_dataclass(box) else ()
    return [field.name for field in fields] or list(vars(box))


def _value_field(box: object) -> str:
    names = _attribute_names(box)
    return "value" if "value" in names else names[0]


def _attribute_items(box: object) -> tuple[tuple[str, Any], ...]:
    value = _value_field(box)
    return tuple((name, getattr(box, name)) for name in _attribute_names(box) if name != value)


def _attributes_of(box: AxisMetadata[Any]) -> BoxAttributes:
    items = _attribute_items(box)
    try:
        attributes = BoxAttributes(items)
    except TypeError as error:
        raise PartitionError(
            f"{type(box).__name__}: a static attribute is not hashable ({error}): {dict(items)!r}. "
            "Compiled programs are found by them. Use tuples instead of lists, frozen dataclasses "
            "instead of dicts, and keep arrays in the box's value."
        ) from error
    attributes.field = _value_field(box)
    return attributes


def _rebuilt(cls: type[Any], attributes: BoxAttributes, value: object):
    """A box made without its constructor, around any object."""
    box = object.__new__(cls)
    object.__setattr__(box, attributes.field, value)
    for name, item in attributes.value:
        object.__setattr__(box, name, item)
    return box


_registered: weakref.WeakSet[type] = weakref.WeakSet()  # with JAX, in whatever way


def _register(cls: type[Any]) -> None:
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


def standard_box(box: Any, value: object) -> AxisMetadata[Any]:
    """The box itself, or the standard one of a foreign box's names around a value."""
    if isinstance(box, AxisMetadata):
        return box
    names = getattr(box, "names", None)
    if callable(getattr(box, "get_partition_spec", None)) and not (
        names is None and hasattr(box, "names")
    ):
        names = tuple(box.get_partition_spec())
    mesh = getattr(box, "mesh", None)
    if hasattr(box, "rules"):
        return LogicallyPartitioned(value, names, mesh, box.rules)
    return Partitioned(value, names, mesh)


def stored_in(box: Any) -> Any:
    """What a box holds, of which its ``unbox`` may compute another value."""
    if isinstance(box, AxisMetadata):
        return box.value
    if not handlers.is_node(box):
        return unboxed(box, False)
    children, _ = _children_of(box)
    position = _value_position(box, children)
    return children if position is None else children[position]


def with_stored(box: Any, stored: Any) -> Any:
    """The box around something else in place of ``stored_in``, with the same attributes."""
    # Not by ``replace_boxed``, which is about what ``unbox`` returns, and may convert it.
    if isinstance(box, AxisMetadata):
        return _rebuilt(type(box), _attributes_of(box), stored)
    if not handlers.is_node(box):
        return box.replace_boxed(stored)
    children, treedef = _children_of(box)
    position = _value_position(box, children)
    if position is None:
        return treedef.unflatten(stored)
    return treedef.unflatten([*children[:position], stored, *children[position + 1 :]])


def _children_of(box: object) -> tuple[list[Any], Any]:
    return jax.tree.flatten(box, is_leaf=lambda item: item is not box)


def _value_position(box: object, children: Sequence[object]) -> int | None:
    """Which child of a foreign box its names are about; None for all of several."""
    if len(children) == 1:
        return 0
    try:
        value = unboxed(box, False)
    except Exception:  # noqa: BLE001 - a value that is computed, here of what has no numbers
        return None
    return next((i for i, child in enumerate(children) if child is value), None)


def contents(box: object) -> tuple[Any, Metadata]:
    """The value of a box, and a Variable's metadata from it."""
    value = unboxed(box, False)
    if any(map(is_box, jax.tree.leaves(value, is_leaf=is_box))):
        raise PartitionError(
            f"{box!r}: holds another box, so it is no Variable. Make one of its value: "
            "sx.Param(sx.unbox(box), axes=...)."
        )
    standard = standard_box(box, value)
    names, _ = standard.layout()
    names = None if names is None else tuple(names)
    if names is not None and hasattr(value, "ndim"):
        names = fitted(names, value.ndim)
    return value, Metadata(names, {BOX_ENTRY: with_stored(standard, None)})


# Children and structure are JAX's: a class may be registered with it in a way of its own.
_BOX = dataclasses.replace(handlers.NODE, name="box", whole=True, contents=contents)
handlers.register(
    object,
    dataclasses.replace(handlers.LEAF, name="unregistered box", whole=True, contents=contents),
    where=handlers.has_box_methods,
)
handlers.register(
    object,
    dataclasses.replace(_BOX, name="box of another library"),
    where=handlers.is_node_with_box_methods,
)
handlers.register(AxisMetadata, _BOX)


def _same_leaf(first, second) -> bool:
    if first is second:
        return True
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in (first, second)):
        return type(first) is type(second) and bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    for array in (first, second):
        if isinstance(array, Tracer):
            return False
        if isinstance(array, jax.Array) and (array.is_deleted() or not array.is_fully_addressable):
            return False
    return _bits(first) == _bits(second)


def _bits(array) -> bytes:
    if is_prng_key(array):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


class _ArrayText:
    """An array in the text of a box."""

    def __init__(self, leaf) -> None:
        self.leaf = leaf

    def __repr__(self) -> str:
        if hasattr(self.leaf, "shape") and hasattr(self.leaf, "dtype"):
            return f"{self.leaf.dtype}[{', '.join(map(str, self.leaf.shape))}]"
        return repr(self.leaf)


def unboxed(box: Any, apply_constraint: bool) -> Any:
    """The value of a box; ``unbox`` may take no argument."""
    return box.unbox(apply_constraint) if _takes_one(type(box).unbox) else box.unbox()


@functools.lru_cache(maxsize=256)
def _takes_one(method: Callable[..., PyTree]) -> bool:
    try:
        inspect.signature(method).bind(None, True)
    except TypeError:
        return False
    return True


def fitted(names: Names, rank: int) -> Names:
    """Names with one entry per dimension, by None at the end."""
    while len(names) > rank and names[-1] is None:
        names = names[:-1]
    return (*names, *(None,) * (rank - len(names)))


def inserted(box: object, names: tuple[object, ...], index: int, name: object) -> tuple[Any, ...]:
    """The names with one inserted; negative positions count from the new end.

    A place after the last name is reached by None for the dimensions before it.
    """
    names = (*names, *(None,) * (index - len(names)))
    rank = len(names) + 1
    if index < -rank:
        raise PartitionError(
            f"{box!r}: cannot add an axis {name!r} at {index} to the names {names}: give a place "
            f"from {-rank} on. A box has one name per dimension, None for one without."
        )
    place = index % rank
    return (*names[:place], name, *names[place:])


def without(box: Any, names: tuple[object, ...], index: int, name: object) -> tuple[Any, ...]:
    """The names with one removed: the inverse of ``inserted``."""
    if len(names) <= index < getattr(box.value, "ndim", 0):  # the last dimensions have no names
        names = fitted(names, index + 1)
    rank = len(names)
    if not -rank <= index < rank:
        raise PartitionError(
            f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: there are "
            f"{rank}."
        )
    place = index % rank
    if names[place] != name:
        hint = f" The name {name!r} stands at {names.index(name)}." if name in names else ""
        raise PartitionError(
            f"{box!r}: cannot remove an axis {name!r} at {index} from the names {names}: "
            f"{names[place]!r} stands there.{hint} remove_axis undoes add_axis, so it takes the "
            "same index and name."
        )
    return (*names[:place], *names[place + 1 :])


@dataclasses.dataclass(frozen=True)
class Partitioned(AxisMetadata[T]):
    """A box of axis names of a mesh.

    Attributes:
        value: An array, or a pytree of arrays, to each of which the names apply.
        names: One per dimension: a mesh axis, a tuple of them, None (not split), or
            ``PartitionSpec.UNCONSTRAINED``. None in place of all names: nothing is known.
        mesh: The mesh to lay the value out over; None for the one in scope.

    Raises:
        MetadataError: If ``names`` is one string or holds something unhashable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> kernel = Partitioned(jnp.ones((4, 8)), (None, "model"))
        >>> kernel
        Partitioned(float32[4, 8], names=(None, 'model'))
        >>> kernel.get_partition_spec(), jax.tree.map(jnp.shape, kernel).value
        (P(None, 'model'), (4, 8))
        >>> kernel.add_axis(0, {PARTITION_NAME: "layers"}).names
        ('layers', None, 'model')
    """

    value: T
    names: Names | None
    mesh: AnyMesh | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", check_axes(self.names))
        resolve_mesh(self.mesh)

    def unbox(self, apply_constraint: bool = True) -> T:
        """Returns the value, laid out if a mesh is known.

        A mesh is known if the box has one or one is in scope, by ``jax.set_mesh``,
        ``jax.sharding.use_abstract_mesh`` or ``with mesh:``. Over Explicit axes the value is
        resharded, over Manual ones left as it is; an abstract value gets the sharding.

        Args:
            apply_constraint: False to return the value as it is, whatever is known.

        Raises:
            PartitionError: If names are logical, a mesh is known, and there are no rules, or if the
                value cannot be laid out so, or if the names are malformed.
        """
        mesh = resolve_mesh(self.mesh) if apply_constraint else None
        if mesh is None:
            return self.value
        names, rules = self._names_and_rules(
            mesh, "unbox", ", or call unbox(apply_constraint=False)"
        )
        if names is None:
            return self.value

        def laid_out(leaf):
            if not hasattr(leaf, "shape"):
                return leaf
            fitted_names = fitted(names, len(leaf.shape))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf.update(sharding=_sharding(fitted_names, leaf.shape, mesh, rules))
            return constrain(leaf, fitted_names, self.mesh, rules)

        return jax.tree.map(laid_out, self.value)

    def layout(self) -> tuple[Any, Rules | None]:
        """Returns the names, with rules from each mesh axis to itself.

        Those of a subclass with a ``get_partition_spec`` of its own are what that returns.
        """
        if _is_inherited(self, "get_partition_spec"):
            names = self.names
        else:
            names = tuple(self.get_partition_spec())
        return names, self._rules_of(names)

    def _kept_with_axis(self, index: int, params: Mapping[str, object]) -> Self:
        # The axes of the Variable have the new name. The names of the box stay as they were given,
        # which tells the names that were added since.
        if _is_inherited(self, "add_axis"):
            return self
        return _with_names(self.add_axis(index, params), self.names)

    def _kept_without_axis(self, index: int, params: Mapping[str, object]) -> Self:
        if _is_inherited(self, "remove_axis"):
            return self
        return _with_names(self.remove_axis(index, params), self.names)

    def add_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box with the name of a new dimension inserted.

        Args:
            index: Where the new dimension is; negative counts from the end of the new dimensions.
            params: ``{PARTITION_NAME: name}``; the name may be None.

        Raises:
            PartitionError: If ``params`` has no name; if there is no such place.
        """
        name = self._name_of_axis("add", index, params)
        return (
            self
            if self.names is None
            else self.replace(names=inserted(self, self.names, index, name))
        )

    def remove_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box with the name of a dimension removed.

        Args:
            index: Which dimension goes; negative counts from the end.
            params: ``{PARTITION_NAME: name}``, with the name that stands there.

        Raises:
            PartitionError: If ``params`` has no name; if there is no such dimension, or it has
                another name.
        """
        name = self._name_of_axis("remove", index, params)
        return (
            self
            if self.names is None
            else self.replace(names=without(self, self.names, index, name))
        )

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the names as a ``PartitionSpec``, a logical one for logical names.

        Raises:
            PartitionError: If the names are malformed, or one occurs twice.
        """
        return PartitionSpec(*check_names(self.names or ()))

    def get_sharding(self, mesh: AnyMesh | None = None) -> NamedSharding:
        """Returns the ``NamedSharding`` of the value.

        Args:
            mesh: The mesh, also an ``AbstractMesh``; None for the box's own.

        Raises:
            PartitionCheckError: If the value cannot be laid out so.
            PartitionError: If the names are logical and there are no rules; if there is no mesh.
        """
        where = resolve_mesh(mesh if mesh is not None else self.mesh)
        if where is None:
            raise PartitionError(f"{self!r}: there is no mesh. Write box.get_sharding(mesh).")
        names, rules = self._names_and_rules(where, "make a sharding of", "")
        if names is None:
            return NamedSharding(where, PartitionSpec())
        shape = getattr(self.value, "shape", (0,) * len(names))
        spec = _sharding(fitted(names, len(shape)), shape, where, rules).spec
        return NamedSharding(where, PartitionSpec(*spec[: len(names)]))

    def replace(self, **changes: object) -> Self:
        """Returns a box like this one with some attributes changed.

        Args:
            **changes: Attributes, such as ``names=``.

        Example:
            >>> import jax.numpy as jnp
            >>> Partitioned(1.0, ()).replace(value=jnp.ones(2), names=("data",))
            Partitioned(float32[2], names=('data',))
        """
        return dataclasses.replace(self, **changes)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the metadata of a Variable of Flax NNX.

        Returns:
            ``value``, ``out_sharding`` (the names) and ``mesh``; of a ``LogicallyPartitioned``
            also ``sharding_rules``.

        Example:
            >>> Partitioned(None, ("data", None)).to_nnx_metadata()
            {'value': None, 'mesh': None, 'out_sharding': ('data', None)}
        """
        return {"value": self.value, "mesh": self.mesh, "out_sharding": self.names}

    @classmethod
    def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Returns the box for the metadata of a Variable of Flax NNX.

        Args:
            metadata: As ``to_nnx_metadata`` returns it. The names may also stand under
                ``sharding_names`` or ``sharding``; other entries are left out.

        Example:
            >>> Partitioned.from_nnx_metadata({"value": 1, "out_sharding": (), "tag": "slow"})
            Partitioned(1, names=())
        """
        options = ("out_sharding", "sharding_names", "sharding")
        names = next((metadata[option] for option in options if option in metadata), None)
        layout_options = {"mesh": metadata.get("mesh"), "rules": metadata.get("sharding_rules")}
        fields = [field.name for field in dataclasses.fields(cls)]
        more = {name: item for name, item in layout_options.items() if name in fields}
        return cls(cast("Any", metadata.get("value")), names, **more)

    def _names_and_rules(
        self, mesh: AnyMesh, action: str, way_out: str
    ) -> tuple[Names | None, Rules]:
        """Returns the names and the rules for them over a mesh."""
        names, own_rules = self.layout()
        scope_rules = ResolvedRules(mesh)
        rules = scope_rules.rules if own_rules is None else own_rules
        if names is None or own_rules or not scope_rules.names_without_rules(names):
            return names, rules
        raise PartitionError(
            f"Cannot {action} {self!r} over a mesh: its names are logical, and it has no rules, "
            "nor are any in scope. Put them in scope, with sx.axis_rules(rules): ..., or give the "
            f"box rules=rules{way_out}."
        )

    def _name_of_axis(self, verb: str, index: int, params: Mapping[Any, object]):
        if PARTITION_NAME in params:
            return params[PARTITION_NAME]
        raise PartitionError(
            f"{self!r}: cannot {verb} an axis at {index} without a name for it; {dict(params)} "
            f"does not give one. Write {verb}_axis(tree, {index}, {{PARTITION_NAME: 'layers'}}), "
            "or None for a dimension without a name."
        )


@dataclasses.dataclass(frozen=True)
class LogicallyPartitioned(Partitioned[T]):
    """A box of logical names, for rules to map to mesh axes.

    Attributes:
        value: An array, or a pytree of arrays, to each of which the names apply.
        names: One per dimension: a name, None (not split), ``PartitionSpec.UNCONSTRAINED``, or a
            tuple of names for a merged dimension. None in place of all names: nothing is known.
        mesh: The mesh to lay the value out over; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Raises:
        MetadataError: If ``names`` is one string or holds something unhashable.
        PartitionError: If ``rules`` are malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> kernel = LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "mlp"))
        >>> kernel.get_partition_spec()
        P('embed', 'mlp')
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> baked = LogicallyPartitioned(kernel.value, kernel.names, mesh, {"mlp": "model"})
        >>> baked.unbox().sharding.spec
        P(None, 'model')
    """

    rules: Rules | None = None

    def __init__(
        self, value: T, names: Any, mesh: AnyMesh | None = None, rules: RulesLike | None = None
    ) -> None:
        baked = rules if rules is None or isinstance(rules, Rules) else Rules(rules)
        for name, item in (("value", value), ("names", names), ("mesh", mesh), ("rules", baked)):
            object.__setattr__(self, name, item)
        self.__post_init__()

    def layout(self) -> tuple[Any, Rules | None]:
        """Returns the names, as a ``Partitioned`` does, and the baked rules."""
        return super().layout()

    def _rules_of(self, names: Names | None) -> Rules | None:
        return self.rules

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the metadata of a Flax NNX Variable, with rules."""
        rules = None if self.rules is None else self.rules.pairs
        return {**super().to_nnx_metadata(), "sharding_rules": rules}


def _sharding(names: Names, shape: tuple[int, ...], mesh: AnyMesh, rules: Rules) -> NamedSharding:
    spec, diagnostics = ResolvedRules(mesh, rules).spec(names, shape)
    raise_on_errors(diagnostics)
    return NamedSharding(mesh, spec)


def _with_names(box: B, names: Names | None) -> B:
    """A box with other names, made without its constructor, which may take others."""
    changed = with_stored(box, box.value)
    object.__setattr__(changed, "names", names)
    return changed


def _is_inherited(box: Partitioned[Any], name: str) -> bool:
    """Whether a method of a box is the one of ``Partitioned``."""
    return getattr(type(box), name) is getattr(Partitioned, name)


class VariableLayout(NamedTuple):
    """How a Variable made of a box is laid out, besides its axes."""

    box: AxisMetadata[Any] | None  # the box, empty, if the Variable has its names
    mesh: AnyMesh | None
    rules: Rules | None
    added_names: frozenset[str]  # names of the Variable that its box does not have


def layout_of_variable(
    axes: tuple[object, ...] | None, entries: Mapping[str, object], value: object
) -> VariableLayout | None:
    """Mesh, rules and added names of a Variable made of a box; None of others."""
    box = entries.get(BOX_ENTRY)
    if axes is None or not isinstance(box, AxisMetadata):
        return None
    names, rules = with_stored(box, value).layout()
    own_names = tuple(names or ())

    # The axes may have been set since, to others of the mesh. Rules of a class of the user's are
    # for what it says itself.
    if type(box).layout in (AxisMetadata.layout, Partitioned.layout, LogicallyPartitioned.layout):
        rules = box._rules_of(axes)
    added: set[str] = set()
    if len(axes) > len(own_names) or not isinstance(box, Partitioned):
        added = set(strings(axes)).difference(strings(own_names))
    kept = box if fitted(own_names, len(axes)) == axes else None
    return VariableLayout(kept, getattr(box, "mesh", None), rules, frozenset(added))


def box_around(box: object, names: Names | None, value: object) -> AxisMetadata[Any] | None:
    """The box of a Variable again, or None where it would say other names or another value.

    Args:
        box: What the Variable keeps of its box.
        names: The axes of the Variable.
        value: Its value.
    """
    if not isinstance(box, AxisMetadata):
        return None
    made = box
    if isinstance(box, Partitioned):
        own_names, _ = with_stored(box, value).layout()
        is_same = names is not None and names == fitted(tuple(own_names or ()), len(names))
        made = box if is_same else _with_names(box, names)
    if not _gives_back(made, value):
        return None
    made = made.replace_boxed(value)
    own_names, _ = made.layout()
    if names is None or own_names is None:
        return made if names is own_names else None
    return made if names == fitted(tuple(own_names), len(names)) else None


def _gives_back(box: AxisMetadata[Any], value: object) -> bool:
    """Whether a box unboxes what was put into it, and nothing computed of that."""
    kind = type(box)
    if (
        kind.unbox in (AxisMetadata.unbox, Partitioned.unbox)
        and kind.replace_boxed is AxisMetadata.replace_boxed
    ):
        return True

    answers: list[bool] = []

    def compare(put: object) -> None:
        taken = unboxed(box.replace_boxed(put), False)
        leaves, treedef = jax.tree.flatten(put)
        taken_leaves, taken_treedef = jax.tree.flatten(taken)
        is_same = treedef == taken_treedef and all(map(operator.is_, leaves, taken_leaves))
        answers.append(is_same)

    # Without numbers, so that nothing is computed and lazy values stay lazy.
    try:
        jax.eval_shape(compare, jax.tree.map(_struct, value))
    except Exception:  # noqa: BLE001 - a method of the user's that does more than to hold a value
        return False
    return answers == [True]


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def sharding_of_own(box: AxisMetadata[Any], mesh: AnyMesh) -> NamedSharding | None:
    """What a class with a ``get_sharding`` of its own makes; None of other classes.

    Args:
        box: A box around arrays, real or abstract.
        mesh: The mesh.
    """
    if type(box).get_sharding in (AxisMetadata.get_sharding, Partitioned.get_sharding):
        return None
    return box.get_sharding(mesh)


def with_partitioning(
    init_fn: Callable[P, PyTree], names: Any, mesh: AnyMesh | None = None
) -> Callable[P, Partitioned[Any]]:
    """Makes an initializer return its value in a ``Partitioned`` box.

    Args:
        init_fn: A function that returns an array or a pytree; its arguments stay as they are.
        names: One per dimension: a mesh axis, a tuple of them, or None (not split).
        mesh: The mesh to lay the value out over; None for the one in scope.

    Returns:
        The function that returns the box.

    Raises:
        MetadataError: If ``names`` is one string.
        TransformError: If ``mesh`` is no mesh.

    Example:
        >>> import jax
        >>> init = with_partitioning(jax.nn.initializers.lecun_normal(), (None, "model"))
        >>> init(jax.random.key(0), (4, 8), dtype="bfloat16")
        Partitioned(bfloat16[4, 8], names=(None, 'model'))
    """
    return _boxed(init_fn, Partitioned(None, names, mesh))


def with_logical_partitioning(
    init_fn: Callable[P, object],
    names: object,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
) -> Callable[P, LogicallyPartitioned[Any]]:
    """Makes an initializer return its value in a ``LogicallyPartitioned`` box.

    Args:
        init_fn: A function that returns an array or a pytree; its arguments stay as they are.
        names: One per dimension: a logical name, None (not split), or a tuple of names for a
            merged dimension.
        mesh: The mesh to lay the value out over; None for the one in scope.
        rules: Rules, pairs or a mapping, baked into the box; None for the current rules.

    Returns:
        The function that returns the box.

    Raises:
        MetadataError: If ``names`` is one string.
        TransformError: If ``mesh`` is no mesh.
        PartitionError: If ``rules`` are malformed.

    Example:
        >>> import jax
        >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
        >>> init(jax.random.key(0), (4, 8))
        LogicallyPartitioned(float32[4, 8], names=('embed', 'mlp'))
    """
    return _boxed(init_fn, LogicallyPartitioned(None, names, mesh, rules))


def _boxed(init_fn: Callable[P, object], empty: B) -> Callable[P, B]:
    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> B:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    if empty.names is not None:
        announce(boxed, init_fn, Metadata(empty.names, {BOX_ENTRY: empty}))
    return boxed


def with_logical_constraint(
    x: object,
    names: object,
    rules: RulesLike | None = None,
    mesh: AnyMesh | None = None,
    *,
    on_no_mesh: OnNoMesh | None = None,
) -> Any:
    """Lays out a pytree of arrays by logical names.

    Args:
        x: An array, or a pytree of arrays.
        names: The names of an array, one per dimension; for a pytree, names for each array in a
            pytree that is a prefix of ``x``. None says nothing and leaves the array as it is.
        rules: Rules, pairs or a mapping; None for the current rules.
        mesh: The mesh; None for the one in scope, else the one that ``x`` is laid out over.
        on_no_mesh: What to do without a mesh, or without rules: ``"error"``, or ``"ignore"`` to
            return ``x`` as it is. None: as for the rules in scope, else ``"error"``.

    Returns:
        ``x`` with the same values, laid out.

    Raises:
        NoMeshError: If there is no mesh, under ``on_no_mesh="error"``.
        PartitionError: If there are no rules, under ``on_no_mesh="error"``, or if an array cannot
            be laid out so, or ``names`` do not fit the pytree, or if names are malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> x = {"tokens": jnp.ones((2, 3)), "mask": jnp.ones(2)}
        >>> names = {"tokens": ("batch", None), "mask": ("batch",)}
        >>> y = with_logical_constraint(x, names, {"batch": "data"}, mesh)
        >>> y["tokens"].sharding.spec, y["mask"].sharding.spec
        (P('data', None), P('data',))
    """

    def laid_out(its_names, part):
        if its_names is None:
            return part
        return jax.tree.map(
            lambda leaf: constrain(leaf, its_names, mesh, rules, on_no_mesh=on_no_mesh), part
        )

    if hasattr(x, "shape"):  # an array's names may hold tuples, for merged dimensions
        return laid_out(names, x)
    try:
        per_array = jax.tree.structure(names, is_leaf=_is_names).flatten_up_to(x)
    except (TypeError, ValueError) as error:
        raise PartitionError(
            f"The names {names!r} do not fit the pytree {jax.tree.structure(x)}: {error}. Give "
            "names for each array in a pytree of the same form, or once for all below a place."
        ) from error
    leaves, treedef = jax.tree.flatten(names, is_leaf=_is_names)
    return treedef.unflatten(map(laid_out, leaves, per_array))


def _is_names(value: object) -> bool:
    if value is None or isinstance(value, PartitionSpec):
        return True
    return isinstance(value, tuple) and all(
        isinstance(x, str) or x is None or x is PartitionSpec.UNCONSTRAINED for x in value
    )


logical_axis_rules = axis_rules
"""``axis_rules`` under Flax's name."""
