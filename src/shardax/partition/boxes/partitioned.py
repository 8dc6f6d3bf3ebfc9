# SPDX-License-Identifier: Apache-2.0
"""``Partitioned`` and ``LogicallyPartitioned``: boxes of one name per dimension.

The names of a ``Partitioned`` are axes of a mesh; those of a ``LogicallyPartitioned`` are logical,
and rules map them to mesh axes. A mesh or rules *baked* into the box take precedence over those in
scope. A box that is unboxed where a mesh is known lays its value out by its names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeVar, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.paths import Leaf, PyTree
from shardax._core.graph.static import PARTITION_NAME, check_axes
from shardax.partition.assignment import Names
from shardax.partition.boxes import errors
from shardax.partition.boxes.axis_metadata import (
    AxisMetadata,
    fitted,
    inserted,
    with_value,
    without,
)
from shardax.partition.constraints import constrain
from shardax.partition.errors import raise_on_errors
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.resolved import ResolvedRules
from shardax.partition.rules import Rules, RulesLike, check_names

T = TypeVar("T")
B = TypeVar("B", bound="Partitioned[Any]")


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

        def lay_out(leaf: Leaf) -> Leaf:
            if not hasattr(leaf, "shape"):
                return leaf
            names_of_leaf = fitted(names, len(leaf.shape))
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf.update(sharding=_sharding_of(names_of_leaf, leaf.shape, mesh, rules))
            return constrain(leaf, names_of_leaf, self.mesh, rules)

        return jax.tree.map(lay_out, self.value)

    def layout(self) -> tuple[Any, Rules | None]:
        """Returns the names, with rules from each mesh axis to itself, or the baked rules.

        The names of a subclass with a ``get_partition_spec`` of its own are what that returns.
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
        return with_names(self.add_axis(index, params), self.names)

    def _kept_without_axis(self, index: int, params: Mapping[str, object]) -> Self:
        if _is_inherited(self, "remove_axis"):
            return self
        return with_names(self.remove_axis(index, params), self.names)

    def add_axis(self, index: int, params: Mapping[Any, PyTree]) -> Self:
        """Returns the box with the name of a new dimension inserted.

        Args:
            index: Where the new dimension is; negative counts from the end of the new dimensions.
            params: ``{PARTITION_NAME: name}``; the name may be None.

        Raises:
            PartitionError: If ``params`` has no name; if there is no such place.
        """
        name = self._name_of_axis("add", index, params)
        if self.names is None:
            return self
        return self.replace(names=inserted(self, self.names, index, name))

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
        if self.names is None:
            return self
        return self.replace(names=without(self, self.names, index, name))

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
        if mesh is None:
            mesh = self.mesh
        mesh = resolve_mesh(mesh)
        if mesh is None:
            raise errors.no_mesh(self)

        names, rules = self._names_and_rules(mesh, "make a sharding of", "")
        if names is None:
            return NamedSharding(mesh, PartitionSpec())

        # Of a value that is no array, the names alone are checked: 0 is divisible by everything.
        shape = getattr(self.value, "shape", (0,) * len(names))
        spec = _sharding_of(fitted(names, len(shape)), shape, mesh, rules).spec
        return NamedSharding(mesh, PartitionSpec(*spec[: len(names)]))

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
        names = None
        for entry in ("out_sharding", "sharding_names", "sharding"):
            if entry in metadata:
                names = metadata[entry]
                break

        # A subclass may have no rules, as this class, or no mesh.
        fields = {field.name for field in dataclasses.fields(cls)}
        layout = {"mesh": metadata.get("mesh"), "rules": metadata.get("sharding_rules")}
        options = {name: item for name, item in layout.items() if name in fields}
        return cls(cast("Any", metadata.get("value")), names, **options)

    def _names_and_rules(
        self, mesh: AnyMesh, action: str, way_out: str
    ) -> tuple[Names | None, Rules]:
        """Returns the names and the rules for them over a mesh."""
        names, own_rules = self.layout()
        scope_rules = ResolvedRules(mesh)
        rules = scope_rules.rules if own_rules is None else own_rules
        if names is None or own_rules or not scope_rules.names_without_rules(names):
            return names, rules
        raise errors.logical_names_without_rules(self, action, way_out)

    def _name_of_axis(self, verb: str, index: int, params: Mapping[Any, object]) -> Any:
        """Returns the name of a new or removed dimension, which may be None."""
        if PARTITION_NAME in params:
            return params[PARTITION_NAME]
        raise errors.axis_without_name(self, verb, index, params)


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
        if rules is not None and not isinstance(rules, Rules):
            rules = Rules(rules)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "rules", rules)
        self.__post_init__()

    def _rules_of(self, names: Names | None) -> Rules | None:
        return self.rules

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the metadata of a Flax NNX Variable, with rules."""
        rules = None if self.rules is None else self.rules.pairs
        return {**super().to_nnx_metadata(), "sharding_rules": rules}


def _sharding_of(
    names: Names, shape: tuple[int, ...], mesh: AnyMesh, rules: Rules
) -> NamedSharding:
    """Returns the sharding of an array, or raises if it cannot be laid out so."""
    spec, diagnostics = ResolvedRules(mesh, rules).spec(names, shape)
    raise_on_errors(diagnostics)
    return NamedSharding(mesh, spec)


def with_names(box: B, names: Names | None) -> B:
    """Returns a box with other names, made without its constructor, which may take others."""
    changed = with_value(box, box.value)
    object.__setattr__(changed, "names", names)
    return changed


def _is_inherited(box: Partitioned[Any], name: str) -> bool:
    """Whether a method of a box is the one of ``Partitioned``."""
    return getattr(type(box), name) is getattr(Partitioned, name)
