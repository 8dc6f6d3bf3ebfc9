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

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardax._transforms.jit.abstract_eval import make_jaxpr
from shardax._transforms.jit.jit import Jit
from shardax.partition.context import mark_names, marking_names
from shardax.partition.inventory import (
    Slot,
    Survey,
    arrays_in,
    with_arrays,
)
from shardax.partition.rules import (
    Names,
    Rules,
    RulesLike,
    check_names,
    mesh_axes_of,
    strings,
)
from shardax.plan.errors import PlanInputError
from shardax.plan.inputs import Inputs
from shardax.plan.search.dimension_walk import JaxprWalk, RawProduct, TracedArray


@dataclass(frozen=True)
class ProductDimension:
    """A dimension of a matrix product."""

    size: int  # its size
    # names of its class and of what it is a part or the whole of; none if it has no name
    names: frozenset[str]
    role: str  # ``"batch"``, ``"sum"``, ``"left"`` or ``"right"``


@dataclass(frozen=True)
class Product:
    """All matrix products of a program whose dimensions have the same names, sizes and roles."""

    flops: float  # operations of all runs, on all devices together: two for a product and a sum
    runs: int  # how often they run
    dims: tuple[ProductDimension, ...]  # their dimensions; those of size 1 are left out
    computed: bool  # whether neither operand is an argument of the step


@dataclass(frozen=True)
class Dimensions:
    """The dimension model of a step."""

    products: tuple[Product, ...]  # its matrix products, those with most operations first
    # shape and names of each array that a constraint lays out
    constraints: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
    # shape and names of each argument that has names
    arguments: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
    looped: frozenset[str]  # names of dimensions that a loop takes one element at a time
    # pairs of names that are one dimension, or one the whole and the other a part
    together: frozenset[frozenset[str]]
    notes: tuple[str, ...]  # what could not be told
    dtype: str = "bfloat16"  # of the operands of most of the products' operations

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
        """Returns how often devices do each operation at the least; 1 is without replication."""
        # A product can be split by every mesh axis that a name of one of its dimensions has by the
        # rules. A dimension without a name counts as split by whatever is left, as far as its size
        # goes; so what is returned is a lower bound, and may be below the truth.
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
    """Traces a step on shapes and follows the names of dimensions through it."""
    walk = JaxprWalk()
    names = tuple(mesh_axes)
    mesh = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    rules = Rules(dict.fromkeys(("batch", *inputs.logical_names)))
    with marking_names(rules), jax.sharding.use_abstract_mesh(mesh), needs_no_values():
        traced = make_jaxpr(_marked(inputs), static_argnums=_static(inputs))(*inputs.shapes())
    jaxpr = traced.jaxpr
    given = [TracedArray(walk.classes.new(var.aval.shape), True) for var in jaxpr.invars]
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
    for slot, named in _names_of_slots(inputs):
        for info, names in zip(slot.arrays, named, strict=True):
            if names is not None:
                yield tuple(info.shape), names


def _names_of_slots(inputs: Inputs) -> list[tuple[Slot, list[Names | None]]]:
    """The logical names of each array of each slot of the arguments, in the order of slots."""
    found: list[tuple[Slot, list[Names | None]]] = []
    for slot in Survey(inputs.tree).slots:
        logical = not isinstance(slot.axes, PartitionSpec)  # else the names are those of mesh axes
        names = [slot.names_of(info) if logical else None for info in slot.arrays]
        found.append((slot, [None if each is None else check_names(each) for each in names]))
    return found


def _together(reached: Mapping[int, frozenset[str]]) -> frozenset[frozenset[str]]:
    return frozenset(
        frozenset((one, other))
        for names in reached.values()
        for one in names
        for other in names
        if one < other
    )


def _summed(walk: JaxprWalk, reached: Mapping[int, frozenset[str]]) -> tuple[Product, ...]:
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


@contextlib.contextmanager
def needs_no_values() -> Iterator[None]:
    """Turns JAX's errors about values that a step needs into one that names the line."""
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


def _static(inputs: Inputs) -> tuple[int, ...]:
    """Positions of arguments in which there is no array."""
    values = enumerate(inputs.tree.values())
    return tuple(position for position, value in values if not Survey(value).slots)


def _marked(inputs: Inputs) -> Callable[..., Any]:
    """The step, with the names of its arguments left in the program where it begins."""
    step = inputs.step.__wrapped__ if isinstance(inputs.step, Jit) else inputs.step
    named = [names for _, names in _names_of_slots(inputs)]

    def run(*args: Any) -> Any:
        survey = Survey(dict(zip(inputs.names, args, strict=True)))
        names_by_slot = dict(zip(map(id, survey.slots), named, strict=True))
        values: dict[int, Any] = {}
        for slot, value in survey.values():
            names = names_by_slot[id(slot)]
            arrays = zip(arrays_in(slot, value), names, strict=True)
            made = with_arrays(slot, value, [_mark(array, each) for array, each in arrays])
            if slot.variable is not None and any(each is not None for each in names):
                slot.variable.value = made
            values[id(slot)] = made
        tree = survey.arrange([values[id(s)] for s in survey.slots], lambda part: part.value)
        marked = zip(inputs.names, args, strict=True)
        return step(*(arg if tree[name] is None else tree[name] for name, arg in marked))

    return run


def _mark(array: Any, names: Names | None) -> Any:
    return array if names is None else mark_names(array, names)
