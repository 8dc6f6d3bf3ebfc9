# SPDX-License-Identifier: Apache-2.0
"""Boxes with axis names: ``Partitioned`` names mesh axes, ``LogicallyPartitioned`` logical ones.

Both have one name per dimension of their value. The names of a ``Partitioned`` are axes of a mesh
and say at once where its value goes. Those of a ``LogicallyPartitioned`` say what a dimension is,
and rules map them to mesh axes: rules *baked* into the box, or else the current ones.

A *baked* mesh or rules belong to the box and take precedence over what is in scope. When a box is
unboxed where a mesh is known, its value is laid out as its names say.

Names where a functional program makes and uses arrays: boxed initializers and constraints.

An *initializer* is a function that returns an array, or a pytree of them; wrapped here, it returns
them in a box. ``with_logical_constraint`` and ``logical_axis_rules`` are ``shardax.constrain`` and
``shardax.axis_rules`` under the names and in the order of arguments of Flax: one engine serves
both, and it serves pytrees here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Self, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.graph.static import PARTITION_NAME, check_axes
from shardax._transforms.errors import BoxError, PartitioningUnspecifiedError
from shardax._transforms.lift.engine import wraps
from shardax.partition.boxes.boxes import (
    AxisMetadata,
    identity_rules,
    inserted,
    without,
)
from shardax.partition.checker import raise_on_errors, spec_for
from shardax.partition.constrain import constrain
from shardax.partition.context import AxisRulesScope, OnNoMesh, axis_rules, current_rules
from shardax.partition.errors import ConstraintError, NoRulesError
from shardax.partition.mesh import AnyMesh, resolve_mesh
from shardax.partition.rules import UNCONSTRAINED, Names, Rules, RulesLike, check_names, strings

# --- Partitioned ---

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Partitioned(AxisMetadata[T]):
    """A box whose names are axes of a mesh.

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
        """Returns the value, laid out as the names say if a mesh is known.

        A mesh is known if the box has one or one is in scope, by ``jax.set_mesh``,
        ``jax.sharding.use_abstract_mesh`` or ``with mesh:``. Over Explicit axes the value is
        resharded, over Manual ones left as it is; an abstract value gets the sharding.

        Args:
            apply_constraint: False to return the value as it is, whatever is known.

        Raises:
            NoRulesError: If names are logical, a mesh is known, and there are no rules.
            ConstraintError: If the value cannot be laid out so.
            AxisNamesError: If the names are malformed.
        """
        mesh = resolve_mesh(self.mesh) if apply_constraint and self.names is not None else None
        if mesh is None:
            return self.value
        names, rules = self._named_by("unbox", ", or call unbox(apply_constraint=False)")
        return jax.tree.map(lambda leaf: _laid_out(leaf, names, self.mesh, mesh, rules), self.value)

    def layout(self) -> tuple[Any, Rules | None]:
        """See the base: the names stand for themselves."""
        return self.names, identity_rules(self.names or ())

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns the box with the name of a new dimension inserted.

        Args:
            index: Where the new dimension is; negative counts from the end of the new dimensions.
            params: ``{PARTITION_NAME: name}``; the name may be None.

        Raises:
            PartitioningUnspecifiedError: If ``params`` has no name.
            BoxError: If there is no such place.
        """
        name = self._name_of_axis("add", index, params)
        return self if self.names is None else self._named(inserted(self, self.names, index, name))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns the box with the name of a dimension removed: the inverse of ``add_axis``.

        Args:
            index: Which dimension goes; negative counts from the end.
            params: ``{PARTITION_NAME: name}``, with the name that stands there.

        Raises:
            PartitioningUnspecifiedError: If ``params`` has no name.
            BoxError: If there is no such dimension, or it has another name.
        """
        name = self._name_of_axis("remove", index, params)
        return self if self.names is None else self._named(without(self, self.names, index, name))

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the names as a ``PartitionSpec``; for a ``LogicallyPartitioned``, a logical one.

        Raises:
            AxisNamesError: If the names are malformed, or one occurs twice.
        """
        return PartitionSpec(*check_names(self.names or ()))

    def get_sharding(self, mesh: AnyMesh | None = None) -> NamedSharding:
        """Returns the ``NamedSharding`` of the value.

        Args:
            mesh: The mesh, also an ``AbstractMesh``; None for the box's own.

        Raises:
            PartitionCheckError: If the value cannot be laid out so.
            NoRulesError: If the names are logical and there are no rules.
            BoxError: If there is no mesh.
        """
        where = resolve_mesh(mesh if mesh is not None else self.mesh)
        if where is None:
            raise BoxError(f"{self!r}: there is no mesh. Write box.get_sharding(mesh).")
        if self.names is None:
            return NamedSharding(where, PartitionSpec())
        names, rules = self._named_by("make a sharding of", "")
        shape = getattr(self.value, "shape", (0,) * len(names))
        spec, findings = spec_for(names, shape, where, rules)
        raise_on_errors(findings)
        return NamedSharding(where, spec)

    def _named_by(self, what: str, way_out: str) -> tuple[Names, Rules]:
        """Returns names that there are, and rules for them."""
        names, own = self.layout()
        rules = current_rules() if own is None else own
        if rules or next(iter(strings(check_names(names))), None) is None:
            return names, rules
        raise NoRulesError(
            f"Cannot {what} {self!r} over a mesh: its names are logical, it has no rules of its "
            "own, and none are in scope. Put them in scope, with sx.axis_rules(rules): ..., or "
            f"give the box rules=rules{way_out}."
        )

    def _named(self, names: tuple[Any, ...]) -> Self:
        return dataclasses.replace(self, names=names)

    def _name_of_axis(self, verb: str, index: int, params: Mapping[Any, Any]) -> Any:
        if PARTITION_NAME in params:
            return params[PARTITION_NAME]
        raise PartitioningUnspecifiedError(
            f"{self!r}: cannot {verb} an axis at {index} without a name for it; {dict(params)} "
            f"does not give one. Write {verb}_axis(tree, {index}, {{PARTITION_NAME: 'layers'}}), "
            "or None for a dimension without a name."
        )


@dataclasses.dataclass(frozen=True)
class LogicallyPartitioned(Partitioned[T]):
    """A box whose names are logical: rules map them to mesh axes.

    Attributes:
        value: An array, or a pytree of arrays, to each of which the names apply.
        names: One per dimension: a name, None (not split), ``PartitionSpec.UNCONSTRAINED``, or a
            tuple of names for a merged dimension. None in place of all names: nothing is known.
        mesh: The mesh to lay the value out over; None for the one in scope.
        rules: Rules, pairs or a mapping; None for the current rules.

    Raises:
        MetadataError: If ``names`` is one string or holds something unhashable.
        RulesError: If ``rules`` are malformed.

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
        self,
        value: T,
        names: Any,
        mesh: AnyMesh | None = None,
        rules: RulesLike | None = None,
    ) -> None:
        baked = rules if rules is None or isinstance(rules, Rules) else Rules(rules)
        for name, item in (("value", value), ("names", names), ("mesh", mesh), ("rules", baked)):
            object.__setattr__(self, name, item)
        self.__post_init__()

    def layout(self) -> tuple[Any, Rules | None]:
        """See the base: the rules are those baked in."""
        return self.names, self.rules


def _laid_out(leaf: Any, names: Names, baked: AnyMesh | None, mesh: AnyMesh, rules: Rules) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        spec, findings = spec_for(names, leaf.shape, mesh, rules)
        raise_on_errors(findings)
        return leaf.update(sharding=NamedSharding(mesh, spec))
    return constrain(leaf, names, baked, rules)


# --- Boxing ---

P = ParamSpec("P")


def with_partitioning(
    init_fn: Callable[P, Any], names: Any, mesh: AnyMesh | None = None
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
        MeshError: If ``mesh`` is no mesh.

    Example:
        >>> import jax
        >>> init = with_partitioning(jax.nn.initializers.lecun_normal(), (None, "model"))
        >>> init(jax.random.key(0), (4, 8), dtype="bfloat16")
        Partitioned(bfloat16[4, 8], names=(None, 'model'))
    """
    empty = Partitioned(None, names, mesh)

    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> Partitioned[Any]:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    return boxed


def with_logical_partitioning(
    init_fn: Callable[P, Any],
    names: Any,
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
        MeshError: If ``mesh`` is no mesh.
        RulesError: If ``rules`` are malformed.

    Example:
        >>> import jax
        >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
        >>> init(jax.random.key(0), (4, 8))
        LogicallyPartitioned(float32[4, 8], names=('embed', 'mlp'))
    """
    empty = LogicallyPartitioned(None, names, mesh, rules)

    @wraps(init_fn)
    def boxed(*args: P.args, **kwargs: P.kwargs) -> LogicallyPartitioned[Any]:
        return empty.replace_boxed(init_fn(*args, **kwargs))

    return boxed


def with_logical_constraint(
    x: Any,
    names: Any,
    rules: RulesLike | None = None,
    mesh: AnyMesh | None = None,
    *,
    on_no_mesh: OnNoMesh | None = None,
) -> Any:
    """Lays out arrays by the logical names of their dimensions: ``constrain`` for pytrees.

    Args:
        x: An array, or a pytree of arrays.
        names: The names of an array, one per dimension; for a pytree, names for each array in a
            pytree that is a prefix of ``x``. None says nothing and leaves the array as it is.
        rules: Rules, pairs or a mapping; None for the current rules.
        mesh: The mesh; None for the one in scope, else the one that ``x`` is laid out over.
        on_no_mesh: What to do without a mesh, or without rules: ``"error"``, or ``"ignore"`` to
            return ``x`` as it is. None: as the rules in scope say, else ``"error"``.

    Returns:
        ``x`` with the same values, laid out.

    Raises:
        NoMeshError: If there is no mesh, under ``on_no_mesh="error"``.
        NoRulesError: If there are no rules, under ``on_no_mesh="error"``.
        ConstraintError: If an array cannot be laid out so, or ``names`` do not fit the pytree.
        AxisNamesError: If names are malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> x = {"tokens": jnp.ones((2, 3)), "mask": jnp.ones(2)}
        >>> names = {"tokens": ("batch", None), "mask": ("batch",)}
        >>> y = with_logical_constraint(x, names, {"batch": "data"}, mesh)
        >>> y["tokens"].sharding.spec, y["mask"].sharding.spec
        (P('data', None), P('data',))
    """

    def laid_out(its_names: Any, part: Any) -> Any:
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
        raise ConstraintError(
            f"The names {names!r} do not fit the pytree {jax.tree.structure(x)}: {error}. Give "
            "names for each array in a pytree of the same form, or once for all below a place."
        ) from error
    leaves, treedef = jax.tree.flatten(names, is_leaf=_is_names)
    return treedef.unflatten(map(laid_out, leaves, per_array))


def logical_axis_rules(rules: RulesLike, *, on_no_mesh: OnNoMesh | None = None) -> AxisRulesScope:
    """Makes ``rules`` the current rules in a ``with`` block or a decorated function.

    The name that Flax has for ``axis_rules``; the scope is the same.

    Args:
        rules: Rules, pairs or a mapping.
        on_no_mesh: As for ``axis_rules``.

    Returns:
        The context manager, which is also a decorator.

    Raises:
        RulesError: If the rules are malformed.
        ConstraintError: If ``on_no_mesh`` is no policy.

    Example:
        >>> import shardax as sx
        >>> with logical_axis_rules([("mlp", "model")]):
        ...     sx.partition.logical_to_mesh_axes(("embed", "mlp"))
        P(None, 'model')
    """
    return axis_rules(rules, on_no_mesh=on_no_mesh)


def _is_names(value: Any) -> bool:
    if value is None or isinstance(value, PartitionSpec):
        return True
    return isinstance(value, tuple) and all(
        entry is None or entry is UNCONSTRAINED or isinstance(entry, str) for entry in value
    )
