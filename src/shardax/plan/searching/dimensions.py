# SPDX-License-Identifier: Apache-2.0
"""The dimension model of a step: matrix products with named dimensions.

A step is traced once, on shapes, and the names of its arguments and constraints are followed
through the jaxpr (``walk.py``). The model tells at once what a compile would tell in seconds: how
much of the work a layout leaves undivided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax import Jit, Rules, make_jaxpr
from shardax.extend import (
    AxisNameMarks,
    Object,
    PyTree,
    RulesLike,
    ScopeSettings,
    TreeInventory,
    axis_names_in,
    mesh_axes_of,
)
from shardax.plan.inputs import Inputs, auto_mesh, needs_no_values, unbound
from shardax.plan.searching.walk import JaxprWalk, NamedArrayShape, RawProduct


@dataclass(frozen=True)
class ProductDimension:
    """A dimension of a matrix product."""

    size: int
    names: frozenset[str]  # of its class and of what it is a part or the whole of
    # "batch" (of both operands and the result), "sum" (of both operands), "left" or "right" (of
    # one operand and the result). Of a ragged product the rows that belong to groups are "rows" (of
    # the left operand and the result) or "terms" (of both operands), the groups "group" (of the
    # right operand) or "sums" (of the result).
    role: str


@dataclass(frozen=True)
class Product:
    """All matrix products with dimensions of equal names, sizes and roles."""

    dims: tuple[ProductDimension, ...]  # without those of size 1
    computed: bool  # whether neither operand is an argument of the step
    loops: frozenset[str]  # names of the dimensions that loops around it run over
    in_blocks: bool  # whether loops around it run over dimensions without names only
    copies: int  # of a ragged product: rows of a token
    flops: float = 0.0  # of all runs on all devices: two for a product and a sum
    runs: int = 0
    # Of all runs, how often the operands have other values (0 of arguments that an earlier product
    # of a loop's body has), and the result is not only added up.
    changes: tuple[int, ...] = (0, 0, 0)
    exchanged: tuple[int, ...] = (0, 0)  # how often rows of an operand are sent to their groups


@dataclass(frozen=True)
class DimensionModel:
    """The dimension model of a step."""

    products: tuple[Product, ...]  # those with most operations first
    constraints: tuple[NamedArrayShape, ...]
    arguments: tuple[NamedArrayShape, ...]  # those that have names
    looped: frozenset[str]  # names of dimensions that a loop takes one element at a time
    notes: tuple[str, ...]  # what could not be told
    dtype: str  # of most operations

    @property
    def flops(self) -> float:
        """Operations of all matrix products, on all devices together."""
        return sum(product.flops for product in self.products)

    def masked_flops(self, *, recomputed: bool = True) -> float:
        """Returns the operations added where all groups meet all rows."""
        ragged = {"rows": 0.0, "terms": 0.0}  # by what each product has of the two
        for product in self.products:
            sizes = {dim.role: dim.size for dim in product.dims}
            groups = max(sizes.get("group", 1), sizes.get("sums", 1))
            ragged["terms" if "terms" in sizes else "rows"] += product.flops * (groups - 1)

        # Each product has two derivatives, of which one sums over terms, and is not computed twice.
        if ragged["terms"] and not recomputed:
            return 3 * ragged["terms"]
        return sum(ragged.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those of constraints first."""
        arrays = (*self.constraints, *self.arguments)
        return tuple(dict.fromkeys(name for _, names in arrays for name in axis_names_in(names)))

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of dimensions with a name, in ascending order."""
        arrays = (*self.constraints, *self.arguments)
        pairs = (pair for shape, names in arrays for pair in zip(shape, names, strict=True))
        return tuple(sorted({size for size, entry in pairs if name in axis_names_in((entry,))}))

    def replicated_compute(self, rules: RulesLike, mesh_sizes: Mapping[str, int]) -> float:
        """Returns a lower bound of the copies of each operation."""
        devices = math.prod(mesh_sizes.values())
        axes: dict[str, set[str]] = {}
        for name, target in Rules(rules):
            axes.setdefault(name, set()).update(mesh_axes_of(target))

        # A product can be split by every mesh axis that a name of one of its dimensions has by the
        # rules. A dimension without a name counts as split by whatever is left, as far as its size
        # goes; so this is a lower bound.
        total = 0.0
        for product in self.products:
            names = [*product.loops, *(name for dim in product.dims for name in dim.names)]
            used = {axis for name in names for axis in axes.get(name, ())}
            ways = math.prod(mesh_sizes.get(axis, 1) for axis in used)
            ways *= math.prod(dim.size for dim in product.dims if not dim.names)
            total += product.flops * devices / min(devices, ways)
        return total / self.flops if self.flops else 1.0


def trace_dimensions(
    inputs: Inputs, mesh_axes: Iterable[str] = ("data", "model")
) -> DimensionModel:
    """Returns the dimension model of a step, traced on shapes with mesh axes of size 1."""
    mesh = auto_mesh(dict.fromkeys(mesh_axes, 1))
    rules = Rules(dict.fromkeys(("batch", *inputs.logical_names)))
    values = enumerate(inputs.tree.values())
    static = tuple(index for index, value in values if not TreeInventory(value).leaves)
    marking = ScopeSettings.scope(rules=rules, marking=True, reference=True)
    with marking, jax.sharding.use_abstract_mesh(mesh), needs_no_values():
        traced = make_jaxpr(_marked(inputs), static_argnums=static)(*inputs.shapes())

    jaxpr = traced.jaxpr
    walk = JaxprWalk()
    step_inputs = [walk.new_array(var, is_argument=True) for var in jaxpr.invars]
    walk.program(jaxpr, step_inputs, [True] * len(jaxpr.outvars))
    names_by_class = walk.classes.resolve()

    arguments: dict[NamedArrayShape, None] = {}
    for leaf in inputs.inventory.leaves:
        for info, names in zip(leaf.arrays, _logical_names(leaf), strict=True):
            if names is not None:
                arguments[tuple(info.shape), names] = None

    flops_by_dtype: Counter[str] = Counter()
    for product in walk.products:
        flops_by_dtype[product.dtype] += int(product.flops * product.runs)
    return DimensionModel(
        products=_merged_products(walk, names_by_class),
        constraints=tuple(pair for pair in walk.constraints if pair not in arguments),
        arguments=tuple(arguments),
        looped=walk.classes.looped_names(),
        notes=tuple(walk.notes),
        dtype=max(flops_by_dtype, key=lambda name: flops_by_dtype[name], default="bfloat16"),
    )


def _merged_products(
    walk: JaxprWalk, names_by_class: Mapping[int, frozenset[str]]
) -> tuple[Product, ...]:
    """Returns products of named dimensions, those with equal dimensions as one."""
    classes = walk.classes
    groups: dict[Product, list[RawProduct]] = {}
    for product in walk.products:
        dims = tuple(
            ProductDimension(
                classes.size(dim), names_by_class.get(classes.find(dim), frozenset()), role
            )
            for role, dim in product.dims
            if classes.size(dim) != 1
        )
        loops = frozenset(name for loop in product.loops for name in classes.own_names(loop))
        in_blocks = bool(product.loops) and not loops
        merged = Product(dims, product.computed, loops, in_blocks, product.copies)
        groups.setdefault(merged, []).append(product)

    products = [
        dataclasses.replace(
            merged,
            flops=sum(product.flops * product.runs for product in group),
            runs=sum(product.runs for product in group),
            changes=_sums(product.changes for product in group),
            exchanged=_sums(product.exchanged for product in group),
        )
        for merged, group in groups.items()
    ]
    return tuple(sorted(products, key=lambda product: -product.flops))


def _sums(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Returns the sum of each column."""
    return tuple(map(sum, zip(*rows, strict=True)))


def _logical_names(leaf) -> list[tuple[Any, ...] | None]:
    """Returns the logical names of each array of a leaf of the arguments."""
    if leaf.has_names_of_mesh_axes:
        return [None] * len(leaf.arrays)
    return [leaf.names_of(info) for info in leaf.arrays]


def _marked(inputs: Inputs) -> Callable[..., PyTree]:
    """Returns the step, with the names of its arguments marked in the program."""
    step, bound, keywords = unbound(inputs.step)
    step = functools.partial(step.function if isinstance(step, Jit) else step, *bound, **keywords)
    names_by_path = {leaf.path: _logical_names(leaf) for leaf in inputs.inventory.leaves}

    def run(*args: PyTree) -> PyTree:
        inventory = TreeInventory(dict(zip(inputs.names, args, strict=True)))
        values: list[PyTree] = []
        for leaf in inventory.leaves:
            unnamed = [None] * len(leaf.arrays)  # of numbers, which are traced too
            names_of_arrays = names_by_path.get(leaf.path) or unnamed
            arrays = zip(leaf.arrays_in(leaf.value), names_of_arrays, strict=True)
            marks = [
                array if names is None else AxisNameMarks.put(array, names)
                for array, names in arrays
            ]
            value = leaf.with_arrays(leaf.value, marks)
            if leaf.variable is not None and any(names is not None for names in names_of_arrays):
                leaf.variable.value = value
            values.append(value)

        # Objects are themselves, with other values in them.
        tree = inventory.unflatten(
            lambda part: part.value if isinstance(part.value, Object) else part.filled(values)
        )
        marked_args = [
            arg if tree[name] is None else tree[name]
            for name, arg in zip(inputs.names, args, strict=True)
        ]
        return step(*marked_args)

    return run
