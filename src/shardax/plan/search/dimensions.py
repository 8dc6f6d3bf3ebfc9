# SPDX-License-Identifier: Apache-2.0
"""The names of the dimensions of every matrix product of a step, found without compiling.

A step is traced once, on shapes, and the names of its arguments and constraints are followed
through the program (see ``shardax.plan.search.dimension_walk``). What comes out is the *dimension
model*: the products with their operations and the names of their dimensions. It tells at once what
a compile would tell in seconds: how much of the work a layout leaves undivided.

The *role* of a product's dimension is ``"batch"`` (of both operands and of the result), ``"sum"``
(of both operands, summed over), ``"left"`` or ``"right"`` (of one operand and of the result).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardax._core.object import Object
from shardax._transforms.jit.abstract_eval import make_jaxpr
from shardax._transforms.jit.jit import Jit
from shardax.partition.context import mark_names, marking_names
from shardax.partition.inventory import (
    LeafInfo,
    TreeInventory,
)
from shardax.partition.rules import (
    Names,
    Rules,
    RulesLike,
    check_names,
    mesh_axes_of,
    strings,
)
from shardax.plan.compile.lowering import needs_no_values
from shardax.plan.inputs import Inputs
from shardax.plan.search.dimension_walk import RawProduct, Value, Walk


@dataclass(frozen=True)
class ProductDimension:
    """A dimension of a matrix product.

    Attributes:
        size: Its size.
        names: Names of its class and of what it is a part or the whole of; none if it has no name.
        role: ``"batch"``, ``"sum"``, ``"left"`` or ``"right"``.
    """

    size: int
    names: frozenset[str]
    role: str


@dataclass(frozen=True)
class Product:
    """All matrix products of a program whose dimensions have the same names, sizes and roles.

    Attributes:
        flops: Operations of all runs, on all devices together: two for a product and a sum.
        runs: How often they run.
        dims: Their dimensions; those of size 1 are left out.
        computed: Whether neither operand is an argument of the step.
    """

    flops: float
    runs: int
    dims: tuple[ProductDimension, ...]
    computed: bool


@dataclass(frozen=True)
class Dimensions:
    """The dimension model of a step.

    Attributes:
        products: Its matrix products, those with most operations first.
        constraints: Shape and names of each array that a constraint lays out.
        arguments: Shape and names of each argument that has names.
        looped: Names of dimensions that a loop takes one element at a time.
        together: Pairs of names that are one dimension, or one the whole and the other a part.
        notes: What could not be told.
        dtype: Of the operands of most of the products' operations.
    """

    products: tuple[Product, ...]
    constraints: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
    arguments: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
    looped: frozenset[str]
    together: frozenset[frozenset[str]]
    notes: tuple[str, ...]
    dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        """Operations of all matrix products, on all devices together."""
        return sum(product.flops for product in self.products)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those of constraints first."""
        arrays = (*self.constraints, *self.arguments)
        return tuple(dict.fromkeys(name for _, names in arrays for name in strings(names)))

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Returns the sizes that dimensions of a name have, each once, smallest first."""
        arrays = (*self.constraints, *self.arguments)
        pairs = (pair for shape, names in arrays for pair in zip(shape, names, strict=True))
        return tuple(sorted({size for size, entry in pairs if name in strings((entry,))}))

    def replicated_compute(self, rules: RulesLike, mesh_sizes: Mapping[str, int]) -> float:
        """Returns how often devices do each operation at the least; 1 is without replication.

        A product can be split by every mesh axis that a name of one of its dimensions has by the
        rules. A dimension without a name counts as split by whatever is left, as far as its size
        goes; so what is returned is a lower bound, and may be below the truth.

        Args:
            rules: Rules; those of one name count together.
            mesh_sizes: Sizes of mesh axes.

        Example:
            >>> import jax, jax.numpy as jnp, shardax as sx
            >>> from shardax.plan.inputs import Inputs, NamedShape
            >>> x = NamedShape((64, 8), "float32", ("batch", "embed"))
            >>> w = sx.Param(sx.Init(jax.nn.initializers.ones, (8, 32)), axes=("embed", "mlp"))
            >>> model = trace_dimensions(Inputs(lambda x, w: x @ w.value, (x, w)))
            >>> model.replicated_compute({"batch": "data"}, {"data": 4, "model": 2})
            2.0
            >>> model.replicated_compute({"batch": "data", "mlp": "model"}, {"data": 4, "model": 2})
            1.0
        """
        devices = math.prod(mesh_sizes.values())
        axes: dict[str, set[str]] = {}
        for name, target in Rules(rules):
            axes.setdefault(name, set()).update(mesh_axes_of(target))
        total = 0.0
        for product in self.products:
            total += product.flops * devices / _ways(product, axes, mesh_sizes, devices)
        return total / self.flops if self.products else 1.0


def _ways(
    product: Product, axes: Mapping[str, set[str]], sizes: Mapping[str, int], devices: int
) -> int:
    """In how many parts a product can be cut at the most."""
    used = {axis for dim in product.dims for name in dim.names for axis in axes.get(name, ())}
    ways = math.prod(sizes.get(axis, 1) for axis in used)
    unnamed = math.prod(dim.size for dim in product.dims if not dim.names)
    return min(devices, ways * unnamed)


def trace_dimensions(inputs: Inputs, mesh_axes: Iterable[str] = ("data", "model")) -> Dimensions:
    """Traces a step on shapes and follows the names of dimensions through it.

    Args:
        inputs: The step and its arguments.
        mesh_axes: Names of mesh axes, for code in the step that asks for them; all of size 1.

    Returns:
        The dimension model.

    Raises:
        PlanInputError: If the step needs values; names the line.
    """
    walk = Walk()
    names = tuple(mesh_axes)
    mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    rules = Rules(dict.fromkeys(("batch", *inputs.logical_names)))
    with marking_names(rules), jax.sharding.use_abstract_mesh(mesh), needs_no_values():
        traced = make_jaxpr(_marked(inputs), static_argnums=_static(inputs))(*inputs.shapes())
    jaxpr = traced.jaxpr
    given = [Value(walk.classes.new(var.aval.shape), True) for var in jaxpr.invars]
    walk.program(jaxpr, given, [True] * len(jaxpr.outvars), 1)
    reached = walk.classes.resolve()
    arguments = tuple(dict.fromkeys(_named_arguments(inputs)))
    known = {(shape, names) for shape, names in arguments}
    return Dimensions(
        products=_summed(walk, reached),
        constraints=tuple(pair for pair in walk.constraints if pair not in known),
        arguments=arguments,
        looped=walk.classes.looped_names(),
        together=_together(reached),
        notes=tuple(walk.notes),
        dtype=_main_dtype(walk.products),
    )


def _main_dtype(products: Iterable[RawProduct]) -> str:
    """The dtype in which most operations are done."""
    totals: Counter[str] = Counter()
    for product in products:
        totals[product.dtype] += int(product.flops * product.runs)
    return max(totals, key=lambda name: totals[name], default="bfloat16")


def _named_arguments(inputs: Inputs) -> Iterable[tuple[tuple[int, ...], tuple[Any, ...]]]:
    for leaf, named in _names_of_leaves(inputs):
        for info, names in zip(leaf.arrays, named, strict=True):
            if names is not None:
                yield tuple(info.shape), names


def _names_of_leaves(inputs: Inputs) -> list[tuple[LeafInfo, list[Names | None]]]:
    """The logical names of each array of each leaf of the arguments, in the order of leaves."""
    found: list[tuple[LeafInfo, list[Names | None]]] = []
    for leaf in TreeInventory(inputs.tree).leaves:
        logical = not isinstance(leaf.axes, PartitionSpec)  # else the names are those of mesh axes
        names = [leaf.names_of(info) if logical else None for info in leaf.arrays]
        found.append((leaf, [None if each is None else check_names(each) for each in names]))
    return found


def _together(reached: Mapping[int, frozenset[str]]) -> frozenset[frozenset[str]]:
    return frozenset(
        frozenset((one, other))
        for names in reached.values()
        for one in names
        for other in names
        if one < other
    )


def _summed(walk: Walk, reached: Mapping[int, frozenset[str]]) -> tuple[Product, ...]:
    """Adds up the products whose dimensions are the same."""
    totals: dict[tuple[tuple[ProductDimension, ...], bool], list[RawProduct]] = {}
    for product in walk.products:
        dims = tuple(
            ProductDimension(
                walk.classes.size(d), reached.get(walk.classes.find(d), frozenset()), role
            )
            for role, d in product.dims
            if walk.classes.size(d) != 1
        )
        totals.setdefault((dims, product.computed), []).append(product)
    found = [
        Product(
            sum(each.flops * each.runs for each in group),
            sum(each.runs for each in group),
            dims,
            computed,
        )
        for (dims, computed), group in totals.items()
    ]
    return tuple(sorted(found, key=lambda product: -product.flops))


# --- the step, with its arguments marked ----------------------------------------------------------


def _static(inputs: Inputs) -> tuple[int, ...]:
    """Positions of arguments in which there is no array."""
    values = enumerate(inputs.tree.values())
    return tuple(position for position, value in values if not TreeInventory(value).leaves)


def _marked(inputs: Inputs) -> Callable[..., Any]:
    """The step, with the names of its arguments left in the program where it begins."""
    step = inputs.step.__wrapped__ if isinstance(inputs.step, Jit) else inputs.step
    named = [names for _, names in _names_of_leaves(inputs)]

    def run(*args: Any) -> Any:
        inventory = TreeInventory(dict(zip(inputs.names, args, strict=True)))
        values: list[Any] = []
        for leaf, names in zip(inventory.leaves, named, strict=True):
            arrays = zip(leaf.arrays_in(leaf.value), names, strict=True)
            made = leaf.with_arrays(leaf.value, [_mark(array, each) for array, each in arrays])
            if leaf.variable is not None and any(each is not None for each in names):
                leaf.variable.value = made
            values.append(made)
        tree = inventory.unflatten(
            lambda part: part.value if isinstance(part.value, Object) else part.filled(values)
        )
        marked = zip(inputs.names, args, strict=True)
        return step(*(arg if tree[name] is None else tree[name] for name, arg in marked))

    return run


def _mark(array: Any, names: Names | None) -> Any:
    return array if names is None else mark_names(array, names)
