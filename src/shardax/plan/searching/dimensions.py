# SPDX-License-Identifier: Apache-2.0
"""The dimension model of a step: matrix products with named dimensions.

A step is traced once, on shapes, and the names of its arguments and constraints are followed
through the jaxpr. The model tells at once what a compile would tell in seconds: how much of the
work a layout leaves undivided.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardax._core.object import Object
from shardax._transforms.jit.abstract_eval import make_jaxpr
from shardax._transforms.jit.jit import Jit
from shardax.partition.context import mark_names, marking_names
from shardax.partition.inventory import LeafInfo, TreeInventory
from shardax.partition.rules import Names, Rules, RulesLike, check_names, mesh_axes_of, strings
from shardax.plan.errors import PlanInputError
from shardax.plan.inputs import Inputs
from shardax.plan.searching.dimension_walk import JaxprWalk, RawProduct, TracedArray

NamedArrayShape = tuple[tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class ProductDimension:
    """A dimension of a matrix product."""

    size: int
    names: frozenset[str]  # of its class and of what it is a part or the whole of
    # "batch" (of both operands and the result), "sum" (of both operands), "left" or "right" (of
    # one operand and the result).
    role: str


@dataclass(frozen=True)
class Product:
    """All matrix products whose dimensions have the same names, sizes and roles."""

    flops: float  # of all runs on all devices: two for a product and a sum
    runs: int
    dims: tuple[ProductDimension, ...]  # without those of size 1
    computed: bool  # whether neither operand is an argument of the step


@dataclass(frozen=True)
class DimensionModel:
    """The dimension model of a step."""

    products: tuple[Product, ...]  # those with most operations first
    constraints: tuple[NamedArrayShape, ...]
    arguments: tuple[NamedArrayShape, ...]  # those that have names
    looped: frozenset[str]  # names of dimensions that a loop takes one element at a time
    # Pairs of names that are one dimension, or one the whole and the other a part.
    together: frozenset[frozenset[str]]
    notes: tuple[str, ...]  # what could not be told
    dtype: str = "bfloat16"  # of most operations

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
        """Returns the sizes of dimensions with a name, in ascending order."""
        arrays = (*self.constraints, *self.arguments)
        pairs = (pair for shape, names in arrays for pair in zip(shape, names, strict=True))
        return tuple(sorted({size for size, entry in pairs if name in strings((entry,))}))

    def replicated_compute(self, rules: RulesLike, mesh_sizes: Mapping[str, int]) -> float:
        """Returns a lower bound of how often devices repeat each operation."""
        # A product can be split by every mesh axis that a name of one of its dimensions has by the
        # rules. A dimension without a name counts as split by whatever is left, as far as its size
        # goes; so this is a lower bound.
        devices = math.prod(mesh_sizes.values())
        axes: dict[str, set[str]] = {}
        for name, target in Rules(rules):
            axes.setdefault(name, set()).update(mesh_axes_of(target))
        total = 0.0
        for product in self.products:
            used = {a for dim in product.dims for name in dim.names for a in axes.get(name, ())}
            ways = math.prod(mesh_sizes.get(axis, 1) for axis in used)
            ways *= math.prod(dim.size for dim in product.dims if not dim.names)
            total += product.flops * devices / min(devices, ways)
        return total / self.flops if self.products else 1.0


def trace_dimensions(
    inputs: Inputs, mesh_axes: Iterable[str] = ("data", "model")
) -> DimensionModel:
    """Traces a step on shapes, with mesh axes of size 1."""
    axes = tuple(mesh_axes)
    mesh = AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
    rules = Rules(dict.fromkeys(("batch", *inputs.logical_names)))
    values = enumerate(inputs.tree.values())
    static = tuple(position for position, value in values if not TreeInventory(value).leaves)
    with marking_names(rules), jax.sharding.use_abstract_mesh(mesh), needs_no_values():
        traced = make_jaxpr(_marked(inputs), static_argnums=static)(*inputs.shapes())
    jaxpr = traced.jaxpr
    walk = JaxprWalk()
    given = [TracedArray(walk.classes.new(var.aval.shape), True) for var in jaxpr.invars]
    walk.program(jaxpr, given, [True] * len(jaxpr.outvars), 1)
    reached = walk.classes.resolve()
    arguments: dict[NamedArrayShape, None] = {}
    for leaf, named in _names_of_leaves(inputs):
        for info, names in zip(leaf.arrays, named, strict=True):
            if names is not None:
                arguments[tuple(info.shape), names] = None
    flops_by_dtype: Counter[str] = Counter()
    for product in walk.products:
        flops_by_dtype[product.dtype] += int(product.flops * product.runs)
    together = [itertools.combinations(sorted(names), 2) for names in reached.values()]
    return DimensionModel(
        products=_merged_products(walk, reached),
        constraints=tuple(pair for pair in walk.constraints if pair not in arguments),
        arguments=tuple(arguments),
        looped=walk.classes.looped_names(),
        together=frozenset(frozenset(pair) for pairs in together for pair in pairs),
        notes=tuple(walk.notes),
        dtype=max(flops_by_dtype, key=lambda name: flops_by_dtype[name], default="bfloat16"),
    )


def _merged_products(walk: JaxprWalk, reached: Mapping[int, frozenset[str]]) -> tuple[Product, ...]:
    """Merges the products whose dimensions are the same."""
    sizes, classes = walk.classes.size, walk.classes
    groups: dict[tuple[tuple[ProductDimension, ...], bool], list[RawProduct]] = {}
    for product in walk.products:
        dims = tuple(
            ProductDimension(sizes(d), reached.get(classes.find(d), frozenset()), role)
            for role, d in product.dims
            if sizes(d) != 1
        )
        groups.setdefault((dims, product.computed), []).append(product)
    found: list[Product] = []
    for (dims, computed), group in groups.items():
        flops = sum(each.flops * each.runs for each in group)
        found.append(Product(flops, sum(each.runs for each in group), dims, computed))
    return tuple(sorted(found, key=lambda product: -product.flops))


def _names_of_leaves(inputs: Inputs) -> list[tuple[LeafInfo, list[Names | None]]]:
    """The logical names of the arrays of each leaf."""
    found: list[tuple[LeafInfo, list[Names | None]]] = []
    for leaf in TreeInventory(inputs.tree).leaves:
        logical = not isinstance(leaf.axes, PartitionSpec)  # else the names are those of mesh axes
        names = [leaf.names_of(info) if logical else None for info in leaf.arrays]
        found.append((leaf, [None if each is None else check_names(each) for each in names]))
    return found


@contextlib.contextmanager
def needs_no_values() -> Iterator[None]:
    """Turns JAX's concretization errors into one that names the line."""
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        line, here = "", error.__traceback__
        while here is not None:  # the innermost line that is neither JAX's nor shardax's
            name = here.tb_frame.f_globals.get("__name__", "")
            if name.partition(".")[0] not in ("jax", "shardax", "contextlib"):
                line = f" at {here.tb_frame.f_code.co_filename}:{here.tb_lineno}"
            here = here.tb_next
        raise PlanInputError(
            f"The step needs concrete values{line}, but is planned from shapes alone. Compute with "
            "jax.numpy and sx.cond or sx.while_loop there, or make the value static. JAX says: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _marked(inputs: Inputs) -> Callable[..., Any]:
    """The step, with the names of its arguments marked in the program."""
    step = inputs.step.__wrapped__ if isinstance(inputs.step, Jit) else inputs.step
    named = [names for _, names in _names_of_leaves(inputs)]

    def run(*args: Any) -> Any:
        inventory = TreeInventory(dict(zip(inputs.names, args, strict=True)))
        values: list[Any] = []
        for leaf, names in zip(inventory.leaves, named, strict=True):
            arrays = zip(leaf.arrays_in(leaf.value), names, strict=True)
            marks = [array if each is None else mark_names(array, each) for array, each in arrays]
            made = leaf.with_arrays(leaf.value, marks)
            if leaf.variable is not None and any(each is not None for each in names):
                leaf.variable.value = made
            values.append(made)
        tree = inventory.unflatten(
            lambda part: part.value if isinstance(part.value, Object) else part.filled(values)
        )
        marked = zip(inputs.names, args, strict=True)
        return step(*(arg if tree[name] is None else tree[name] for name, arg in marked))

    return run
